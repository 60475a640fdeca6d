"""Gaussian noise from a counter-based generator; the default noise of the mechanism."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from tf_adaptive_dp._keras.variables import handle_of
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.mechanism import replicas
from tf_adaptive_dp.mechanism.turns import Turns

# TensorFlow splits rows of 64 bytes without copying them.
_ALIGNED = 16
# Keys of further draws come from blocks beyond those of replicas.
_BEYOND_REPLICAS = 2**31
# The kernel writes another one for every read.
_RANDOM_UUID = "/proc/sys/kernel/random/uuid"
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _threefry(key: tf.Tensor, block: tf.Tensor, release: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Two uniform words for each block: Threefry-2x32 with 20 rounds.

    For a given key this is a bijection from (block, release), so distinct counters never give the
    same pair of words.

    Args:
      key: [2], uint32, like all tensors here.
      block: [n], the numbers of the pairs of one release.
      release: scalar.

    Returns:
      Two tensors [n].

    References:
      - Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011), SC '11.
    """
    left, right = tf.bitwise.left_shift, tf.bitwise.right_shift
    xor = tf.bitwise.bitwise_xor
    word = functools.cache(lambda value: tf.constant(value, tf.uint32))  # few operations to trace
    first, second = tf.unstack(key)
    keys = [first, second, xor(xor(first, second), word(0x1BD11BDA))]
    a, b = block + first, release + second
    for group in range(5):
        for bits in _ROTATIONS[group % 2]:
            a += b
            b = xor(a, left(b, word(bits)) + right(b, word(32 - bits)))
        a += keys[(group + 1) % 3]
        b += keys[(group + 2) % 3] + word(group + 1)
    return a, b


def _power_series(square: tf.Tensor, first: int) -> tf.Tensor:
    """From x² to cos x (`first` = 0) or sin x / x (`first` = 1), to float32 for |x| ≤ π/4.

    XLA on CPU compiles this to vector instructions. Its own sine and cosine take one call per
    number.
    """
    total = tf.zeros_like(square)
    for n in reversed(range(first, first + 12, 2)):
        total = 1.0 / math.factorial(n) - square * total
    return total


def _box_muller(a: tf.Tensor, b: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Pairs of independent standard normal numbers from pairs of uniform words.

    `a` gives the radius √(-2 log u) for u up to 1 - 2⁻²⁴. Without that bound, rounding to float32
    would sometimes give u = 1 and a pair without noise. `b` gives the angle: two bits choose one of
    four half-axes, and thirty bits the angle to it, from -π/4 to π/4. If `a` is 0, the last sixteen
    of these, of which a float32 hardly has any, give u below 2⁻³² down to 2⁻⁴⁹: where the noise
    ends, an outcome can show what was added to it, and δ must cover that.
    """
    ordinary = (tf.cast(a, tf.float32) + 0.5) * 2.0**-32
    last = tf.bitwise.bitwise_and(tf.bitwise.right_shift(b, tf.constant(2, tf.uint32)), 0xFFFF)
    beyond = (tf.cast(last, tf.float32) + 0.5) * 2.0**-48
    u = tf.minimum(tf.where(tf.equal(a, 0), beyond, ordinary), 1 - 2.0**-24)
    radius = tf.sqrt(-2.0 * tf.math.log(u))
    bits = tf.bitcast(b, tf.int32)
    x = (tf.cast(tf.bitwise.right_shift(bits, 2), tf.float32) + 0.5) * (math.pi / 4 * 2.0**-29)
    along, across = radius * _power_series(x * x, 0), radius * x * _power_series(x * x, 1)
    along = tf.where(tf.bitwise.bitwise_and(bits, 2) > 0, -along, along)
    swap = tf.bitwise.bitwise_and(bits, 1) > 0
    return tf.where(swap, across, along), tf.where(swap, along, across)


# One implementation serves eager execution, graphs and XLA. Compiled, it is one loop of vector
# instructions, several times faster than the normal numbers of TensorFlow, NumPy and XLA itself;
# with Philox for the words, XLA 2.14 on CPU takes twice as long. Where functions cannot be compiled
# (workers of TensorFlow Federated, `tf.config.run_functions_eagerly`), its operations run one by
# one.
@tf.function(
    jit_compile=True,
    autograph=False,
    input_signature=[tf.TensorSpec([], t) for t in (tf.int32, tf.int64, tf.int64)],
)
def _normal_pairs(size: tf.Tensor, key: tf.Tensor, release: tf.Tensor) -> tf.Tensor:
    """At least `size` numbers from N(0, 1), two float32 in each uint64.

    Threefry numbers releases with 32 bits. Beyond them every 2³² releases have a key of their own.
    """
    low, high = tf.unstack(tf.bitcast(release, tf.uint32))
    words = tf.bitcast(key, tf.uint32)
    further = _block_without_noise(words, high + tf.constant(_BEYOND_REPLICAS, tf.uint32))
    return _pairs(size, tf.where(high > 0, further, words), low)


def _pairs(size: tf.Tensor, key: tf.Tensor, release: tf.Tensor) -> tf.Tensor:
    """As `_normal_pairs`, for a key of two words and a number of one, uint32."""
    block = tf.cast(tf.range((size + 1) // 2), tf.uint32)
    words = _threefry(key, block, release)
    # With two outputs XLA would compute nearly everything twice.
    a, b = (tf.cast(tf.bitcast(z, tf.uint32), tf.uint64) for z in _box_muller(*words))
    return a + tf.bitwise.left_shift(b, tf.constant(32, tf.uint64))


def fresh_normal_numbers(size: int) -> tf.Tensor:
    """Fresh numbers from N(0, 1) each time the graph runs, for graphs that run on other machines.

    A serialized graph (a computation of TensorFlow Federated) can neither keep variables nor call
    Python. So the key is made where the graph runs: the kernel there gives 64 bits of its
    cryptographic generator through the file `/proc/sys/kernel/random/uuid`, and a Threefry block
    mixes them with 64 random bits of TensorFlow. The numbers are those of `GaussianNoise`, computed
    without XLA.

    Guarantee: the graph holds nothing secret, and whoever has it lacks the 64 bits of each draw. No
    seed of TensorFlow, Keras, NumPy or Python changes the numbers or repeats them, and nothing that
    is saved with a state does. Two draws share a key by chance only, once in 2⁶⁴, and show it only
    if they fall into the same microsecond of 4,295 seconds.

    Args:
      size: how many numbers, below 2³¹ - 1.

    Returns:
      [size], float32.

    Raises:
      tf.errors.NotFoundError: when the graph runs on a machine without that file; it needs Linux.
    """
    random = tf.raw_ops.NonDeterministicInts(shape=[2], dtype=tf.uint32)
    key = tf.concat(_threefry(_bits_of_the_kernel(), random[:1], random[1]), axis=0)
    microseconds = tf.cast(tf.math.floormod(tf.timestamp() * 1e6, 2.0**32), tf.int64)
    pairs = _pairs(tf.constant(size, tf.int32), key, tf.cast(microseconds, tf.uint32))
    return tf.reshape(tf.bitcast(pairs, tf.float32), [-1])[:size]


def has_fresh_normal_numbers(serialized: bytes) -> bool:
    """Whether a serialized graph, or what contains graphs, draws `fresh_normal_numbers`.

    Args:
      serialized: its bytes, not compressed.

    >>> graph = tf.function(lambda: fresh_normal_numbers(1)).get_concrete_function().graph
    >>> has_fresh_normal_numbers(graph.as_graph_def().SerializeToString())
    True
    """
    return _RANDOM_UUID.encode() in serialized


def _bits_of_the_kernel() -> tf.Tensor:
    """64 random bits that are read from the kernel each time the graph runs, [2], uint32.

    Each read of the file gives another random UUID. Its first 8 and last 8 digits contain no
    version number. Only datasets can read a file whose length the kernel does not report.
    """
    # Operations of a dataset that reads files are stateful, so graph optimizers neither run them
    # ahead of time nor merge two of them.
    uuid = tf.data.TextLineDataset(_RANDOM_UUID).take(1).get_single_element()
    digits = tf.strings.substr(uuid, 0, 8) + tf.strings.substr(uuid, -8, 8)
    codes = tf.cast(tf.io.decode_raw(digits, tf.uint8), tf.int64)
    values = tf.where(codes < ord("a"), codes - ord("0"), codes - ord("a") + 10)
    places = tf.constant([16**place for place in range(8)], tf.int64)
    return tf.cast(tf.reduce_sum(tf.reshape(values, [2, 8]) * places, axis=1), tf.uint32)


class SecretStream:
    """A key, and a number for each draw, in a variable that nothing saves or shows.

    Guarantee:
    - The key is in no graph, which holds a handle of the variable only, and so in no profile,
      TensorBoard log or SavedModel.
    - Nothing tracks the variable, so no checkpoint and no saved model contains it.
    - `repr`, `vars`, copies and pickles of this object do not show the key. Copies and unpickled
      objects have keys of their own.
    - No number is given twice, whatever threads, functions and execution modes (eager, graph, XLA)
      ask for one at the same time.

    Args:
      seed: the key, for tests. `None` uses the operating system's entropy.
    """

    __slots__ = ("_process", "_seed", "_state")

    def __init__(self, seed: int | None = None):
        self._seed = seed
        self._process = os.getpid()
        with tf.init_scope():
            # The layout of TensorFlow's generators: a counter of two words, then the key.
            self._state = tf.Variable([0, 0, self._new_key()], dtype=tf.int64, trainable=False)

    def _new_key(self) -> int:
        if self._seed is not None:
            return self._seed
        return int.from_bytes(os.urandom(8), "little", signed=True)

    def __reduce__(self) -> tuple:
        """Creates copies and pickles anew; otherwise both would draw the same noise."""
        return SecretStream, (self._seed,)

    def next(self) -> tuple[tf.Tensor, tf.Tensor]:
        """The key, and a positive number that was not given before; int64 scalars.

        Raises:
          NotPrivateError: in a process that was forked from the one that made this stream. Both
            would draw the same noise.
        """
        if os.getpid() != self._process:
            raise NotPrivateError(
                "This process was forked from the one that made the optimizer, and both would draw "
                f"the same noise. Received: process {os.getpid()}, forked from {self._process}. "
                "Create the optimizer in the process that trains, or start processes with "
                "`multiprocessing.get_context('spawn')`."
            )
        # The only operation of TensorFlow that adds to a variable and returns the previous value
        # atomically. It counts in steps of 256.
        state = tf.raw_ops.RngReadAndSkip(
            resource=handle_of(self._state),
            alg=tf.random.Algorithm.PHILOX.value,
            delta=tf.constant(1, tf.uint64),
        )
        count, _, key = tf.unstack(state)
        return key, tf.bitwise.right_shift(count, tf.constant(8, tf.int64)) + 1


class GaussianNoise:
    """Independent Gaussian noise for a list of tensors, one draw per release.

    The numbers come from the counter-based generator Threefry-2x32, keyed with 64 bits of the
    operating system's entropy, and the Box-Muller method. The generator is statistically good but
    not cryptographic. Numbers are computed in float32 and lie within 8.24 standard deviations. For
    d numbers with noise multiplier σ this costs at most 3.3e-15·√d/σ of δ in each step that an
    example takes part in, which ε does not count. Nothing guards against attacks on the last bits
    of floating-point noise (Mironov 2012); see `SecureNoise`.

    Guarantee: with `seed=None` no two releases share noise, even if threads draw at the same time.
    Every object makes its own key, including copies and runs restored from a checkpoint, and
    nothing saves or shows it (see `SecretStream`). Within one object a counter of 55 bits separates
    releases, and no checkpoint resets it. With a `seed` the counter is saved, and anyone who knows
    the seed can repeat the noise, to float32 rounding in every mode: for tests only. Replicas draw
    with keys of their own, derived from the object's; so does every run of 2³² releases.
    """

    def __init__(self, add_variable: Callable[..., tf.Variable], seed: int | None = None):
        """Creates the counter.

        Args:
          add_variable: makes a variable that is saved with the optimizer.
          seed: `None` uses the operating system's entropy.
        """
        self.seed = seed
        self._stream = SecretStream(seed)
        self._turns = Turns()
        self._counter = add_variable([], dtype=tf.int64, name="noise_counter")

    def add_to(
        self, sums: Sequence[tf.Tensor], stddev: tf.Tensor, sensitivity: tf.Tensor
    ) -> list[tf.Tensor]:
        """Adds the noise of one release.

        Args:
          sums: float32 tensors.
          stddev: scalar, the standard deviation of each entry's noise.
          sensitivity: scalar; not used here, see `SecureNoise`.

        Returns:
          float32 tensors.
        """
        del sensitivity
        if self.seed is None:
            # Without control dependencies an idle core can draw during the forward pass. A step
            # that fails later has used up a number, which does not matter.
            with tf.control_dependencies(None):
                numbers = self._numbers(sums, *self._stream.next())
            counted = tf.convert_to_tensor(self._counter.assign_add(1))
        else:
            # A step that fails leaves its number to the next one.
            key, _ = self._stream.next()
            (counted,) = self._turns.take(
                lambda: [tf.convert_to_tensor(self._counter.assign_add(1))]
            )
            numbers = self._numbers(sums, key, counted)
        stddev = tf.cast(stddev, tf.float32)
        with tf.control_dependencies([counted]):
            return [s + stddev * z for s, z in zip(sums, numbers)]

    def _numbers(
        self, sums: Sequence[tf.Tensor], key: tf.Tensor, release: tf.Tensor
    ) -> list[tf.Tensor]:
        """Normal numbers in the shapes of `sums`."""
        # One draw for all variables is cheaper, and no two variables can share a stream.
        known = all(s.shape.is_fully_defined() for s in sums)
        shapes = [s.shape if known else tf.shape(s) for s in sums]
        sizes = [s.num_elements() if known else tf.reduce_prod(s) for s in shapes]
        rows = [-(-size // _ALIGNED) for size in sizes]
        pairs = _normal_pairs(sum(rows) * _ALIGNED, _own_key(key), release)
        numbers = tf.reshape(tf.bitcast(pairs, tf.float32), [-1, _ALIGNED])
        parts = tf.split(numbers, rows if known else tf.stack(rows))
        return [_first(part, size, shape) for part, size, shape in zip(parts, sizes, shapes)]


def aligned(sizes: Sequence[int]) -> list[int]:
    """The sizes of several tensors in one vector of numbers, so that it splits without a copy."""
    return [-(-size // _ALIGNED) * _ALIGNED for size in sizes]


def normal_numbers(size: int, key: tf.Tensor, release: tf.Tensor) -> tf.Tensor:
    """[size] numbers from N(0, 1), float32: those of one release of `GaussianNoise` with that key.

    Args:
      size: how many, a multiple of 2.
      key: int64 scalar.
      release: int64 scalar, at least 1.
    """
    pairs = _normal_pairs(tf.constant(size, tf.int32), key, release)
    return tf.reshape(tf.bitcast(pairs, tf.float32), [size])


def _first(numbers: tf.Tensor, size: tf.Tensor | int, shape: Any) -> tf.Tensor:
    """The first `size` of the numbers, in a shape."""
    if not isinstance(size, int) or size % _ALIGNED:
        numbers = tf.reshape(numbers, [-1])[:size]
    return tf.reshape(numbers, shape)


def _own_key(key: tf.Tensor) -> tf.Tensor:
    """The key of this replica, int64, so that each replica draws numbers of its own."""
    if replicas.num_replicas() == 1:
        return key
    words = _block_without_noise(tf.bitcast(key, tf.uint32), replicas.replica_id())
    return tf.bitcast(words, tf.int64)


def _block_without_noise(key: tf.Tensor, block: tf.Tensor) -> tf.Tensor:
    """[2], uint32: another key, a block of release 0, from which no noise is drawn."""
    words = _threefry(key, block[tf.newaxis], tf.constant(0, tf.uint32))
    return tf.concat(words, axis=0)
