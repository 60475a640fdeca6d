"""The only place where privacy noise is drawn."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Callable

import tensorflow as tf

from tf_adaptive_dp._keras.variables import handle_of
from tf_adaptive_dp.mechanism import replicas
from tf_adaptive_dp.mechanism.turns import Turns

# TensorFlow takes a slice without copying it if it begins at a multiple of 64 bytes.
_ALIGNED = 16
# Made anew by the kernel whenever it is read.
_RANDOM_UUID = "/proc/sys/kernel/random/uuid"
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _threefry(key: tf.Tensor, block: tf.Tensor, release: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Two uniform words for each block: Threefry-2x32 of 20 rounds (Salmon et al. 2011).

    For a given key this is a bijection from (block, release), so no pair of words comes twice
    because a counter did.

    Args:
      key: [2], uint32, as are all tensors here.
      block: [n], numbers the pairs of one release.
      release: scalar.

    Returns:
      Two tensors [n].
    """
    left, right = tf.bitwise.left_shift, tf.bitwise.right_shift
    xor, word = tf.bitwise.bitwise_xor, lambda value: tf.constant(value, tf.uint32)
    keys = [key[0], key[1], xor(xor(key[0], key[1]), word(0x1BD11BDA))]
    a, b = block + keys[0], release + keys[1]
    for group in range(5):
        for bits in _ROTATIONS[group % 2]:
            a += b
            b = xor(a, left(b, word(bits)) + right(b, word(32 - bits)))
        a += keys[(group + 1) % 3]
        b += keys[(group + 2) % 3] + word(group + 1)
    return a, b


def _power_series(square: tf.Tensor, first: int) -> tf.Tensor:
    """From x² to cos x (`first` = 0) or sin x / x (`first` = 1), to float32 for |x| ≤ π/4.

    XLA on CPU makes vector instructions of this, but one call a number of its own sine and cosine.
    """
    total = tf.zeros_like(square)
    for n in reversed(range(first, first + 12, 2)):
        total = 1.0 / math.factorial(n) - square * total
    return total


def _box_muller(a: tf.Tensor, b: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Pairs of independent standard normal numbers from pairs of uniform words.

    `a` gives the radius √(-2 log u), with u from 2⁻³³ to 1 - 2⁻²⁴: in float32 a u of 1 would turn
    up, and leave a pair without any noise. `b` gives the angle: two bits choose one of four
    half-axes, the other thirty the angle to it, from -π/4 to π/4.
    """
    u = tf.minimum((tf.cast(a, tf.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    radius = tf.sqrt(-2.0 * tf.math.log(u))
    bits = tf.bitcast(b, tf.int32)
    x = (tf.cast(tf.bitwise.right_shift(bits, 2), tf.float32) + 0.5) * (math.pi / 4 * 2.0**-29)
    along, across = radius * _power_series(x * x, 0), radius * x * _power_series(x * x, 1)
    along = tf.where(tf.bitwise.bitwise_and(bits, 2) > 0, -along, along)
    swap = tf.bitwise.bitwise_and(bits, 1) > 0
    return tf.where(swap, across, along), tf.where(swap, along, across)


# One implementation for eager, graph and XLA. Compiled, it is one loop of vector instructions and
# several times faster than the normal numbers of TensorFlow, NumPy and XLA itself; with Philox for
# the words, XLA 2.14 on CPU needs twice as long. Where functions cannot be compiled (workers of
# TensorFlow Federated, `tf.config.run_functions_eagerly`) its operations run one by one.
@tf.function(
    jit_compile=True,
    autograph=False,
    input_signature=[tf.TensorSpec([], t) for t in (tf.int32, tf.int64, tf.int64)],
)
def _normal_pairs(size: tf.Tensor, key: tf.Tensor, release: tf.Tensor) -> tf.Tensor:
    """At least `size` numbers from N(0, 1), two float32 in each uint64."""
    block = tf.cast(tf.range((size + 1) // 2), tf.uint32)
    words = _threefry(tf.bitcast(key, tf.uint32), block, tf.cast(release, tf.uint32))
    # With two outputs XLA would compute nearly everything twice.
    a, b = (tf.cast(tf.bitcast(z, tf.uint32), tf.uint64) for z in _box_muller(*words))
    return a + tf.bitwise.left_shift(b, tf.constant(32, tf.uint64))


def fresh_normal_numbers(size: int) -> tf.Tensor:
    """Numbers from N(0, 1) that are other ones each time the graph runs; for graphs sent away.

    A graph that is serialized (a computation of TensorFlow Federated) can keep no variable and call
    no Python. So its key is made where it runs: the kernel there gives 64 bits of its cryptographic
    generator, by way of the file `/proc/sys/kernel/random/uuid`, and a block of Threefry mixes them
    with 64 random bits of TensorFlow. The numbers are those of `GaussianNoise`, computed without
    XLA.

    Guarantee: the graph holds nothing secret, and whoever has it lacks the 64 bits of each draw. No
    seed of TensorFlow, Keras, NumPy or Python changes the numbers or repeats them, and nothing that
    is saved with a state does. Two draws share a key by chance only, once in 2⁶⁴, and show it only
    if they fall into the same microsecond of 4,295 seconds.

    Args:
      size: how many numbers, below 2³¹ - 1.

    Returns:
      [size], float32.

    Raises:
      tf.errors.NotFoundError: when it runs on a machine without that file; it needs Linux.
    """
    random = tf.raw_ops.NonDeterministicInts(shape=[2], dtype=tf.uint32)
    words = _threefry(_bits_of_the_kernel(), random[:1], random[1])
    key = tf.bitcast(tf.concat(words, axis=0), tf.int64)
    microseconds = tf.cast(tf.math.floormod(tf.timestamp() * 1e6, 2.0**32), tf.int64)
    pairs = _normal_pairs.python_function(tf.constant(size, tf.int32), key, microseconds)
    return tf.reshape(tf.bitcast(pairs, tf.float32), [-1])[:size]


def _bits_of_the_kernel() -> tf.Tensor:
    """64 random bits that are read from the kernel each time the graph runs, [2], uint32.

    Each line of that file is another random UUID, of which digits 1 to 8 and the last 8 hold no
    version number. Data sets alone read a file whose length the kernel does not tell.
    """
    # The operations of a data set that reads files have state, so no optimizer of graphs runs them
    # beforehand or takes two of them for one.
    uuid = tf.data.TextLineDataset(_RANDOM_UUID).take(1).get_single_element()
    digits = tf.strings.substr(uuid, 0, 8) + tf.strings.substr(uuid, -8, 8)
    codes = tf.cast(tf.io.decode_raw(digits, tf.uint8), tf.int64)
    values = tf.where(codes < ord("a"), codes - ord("0"), codes - ord("a") + 10)
    places = tf.constant([16**place for place in range(8)], tf.int64)
    return tf.cast(tf.reduce_sum(tf.reshape(values, [2, 8]) * places, axis=1), tf.uint32)


class SecretStream:
    """A key, and a number for each draw, in a variable that nothing saves or shows.

    Guarantee: the key is in no graph (which has a handle of the variable), and so in no profile, no
    log of TensorBoard and no SavedModel; nothing tracks the variable, so no checkpoint and no saved
    model has it; `repr`, `vars`, copies and pickles of this object do not show it, and a copy, or
    what was unpickled, has a key of its own. No number is given twice, whatever threads, functions
    and ways of running (eager, compiled or not, XLA) ask for it at the same time.

    Args:
      seed: the key, for tests; `None` for the operating system's entropy.
    """

    __slots__ = ("_seed", "_state")

    def __init__(self, seed: int | None = None):
        self._seed = seed
        with tf.init_scope():
            # As the generators of TensorFlow have it: a counter of two words, and the key.
            self._state = tf.Variable([0, 0, self._new_key()], dtype=tf.int64, trainable=False)

    def _new_key(self) -> int:
        if self._seed is not None:
            return self._seed
        return int.from_bytes(os.urandom(8), "little", signed=True)

    def __reduce__(self) -> tuple:
        """Copies and pickles are made anew; otherwise both would draw the same noise."""
        return SecretStream, (self._seed,)

    def next(self) -> tuple[tf.Tensor, tf.Tensor]:
        """The key, and a number from 1 on that was not given before; int64 scalars."""
        # The one operation of TensorFlow that adds to a variable and says what was there before,
        # in one go; it counts in steps of 256.
        state = tf.raw_ops.RngReadAndSkip(
            resource=handle_of(self._state),
            alg=tf.random.Algorithm.PHILOX.value,
            delta=tf.constant(1, tf.uint64),
        )
        return state[2], state[0] // 256 + 1


class GaussianNoise:
    """Independent Gaussian noise for a list of tensors, one draw a release.

    The numbers come from a counter-based generator, Threefry-2x32, keyed with 64 bits of the
    operating system's entropy, by the method of Box and Muller. That is a good statistical
    generator, not a cryptographic one. They are computed in float32, and lie within 6.76 standard
    deviations (a Gaussian exceeds that once in 7·10¹⁰ numbers); nothing guards against attacks
    that look at the last bits of floating-point noise (Mironov 2012).

    Guarantee: with `seed=None` no two releases share noise, not even of threads that draw at the
    same time. The key is made anew for every object, also for a copy and for a run that was
    restored from a checkpoint, and nothing saves or shows it, see `SecretStream`; within one object
    a counter separates the releases (2³² of them), and no checkpoint sets it back. With a `seed`
    the counter is saved, and the noise can be repeated by anyone who knows the seed, to the
    rounding of float32 in every mode: for tests only.
    Replicas draw with keys of their own, derived from it.
    """

    def __init__(self, add_variable: Callable[..., tf.Variable], seed: int | None = None):
        """Creates the counter.

        Args:
          add_variable: makes a variable that is saved with the optimizer.
          seed: `None` for the operating system's entropy.
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
          stddev: scalar, that of each entry.
          sensitivity: scalar, not needed here; see `SecureNoise`.

        Returns:
          float32 tensors.
        """
        del sensitivity
        if self.seed is None:
            # Beside the forward pass, on a core that is idle, whatever the release has to wait for.
            # A step that fails after that has used a number up, which does not matter.
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
        # One draw for all variables: cheaper, and no two variables can share a stream.
        shapes = [tf.shape(s) for s in sums]
        sizes = [tf.reduce_prod(shape) for shape in shapes]
        ends = tf.cumsum([-(-size // _ALIGNED) * _ALIGNED for size in sizes])
        pairs = _normal_pairs(ends[-1], _own_key(key), release)
        flat = tf.reshape(tf.bitcast(pairs, tf.float32), [-1])
        starts = tf.unstack(tf.concat([[0], ends[:-1]], axis=0))
        parts = [tf.slice(flat, [start], [size]) for start, size in zip(starts, sizes)]
        return [tf.reshape(part, shape) for part, shape in zip(parts, shapes)]


def _own_key(key: tf.Tensor) -> tf.Tensor:
    """The key of this replica, int64: each draws numbers of its own.

    A block of release 0, which is never drawn from, makes 64 new bits for each replica.
    """
    if replicas.num_replicas() == 1:
        return key
    block = replicas.replica_id()[tf.newaxis]
    words = _threefry(tf.bitcast(key, tf.uint32), block, tf.constant(0, tf.uint32))
    return tf.bitcast(tf.concat(words, axis=0), tf.int64)
