"""Gaussian noise that later releases partly cancel."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.variables import local_copies, uncounted_variables
from tf_adaptive_dp.accounting import batch_order
from tf_adaptive_dp.accounting.noise_strategies import NoiseStrategy, ToeplitzStrategy, TreeNoise
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.mechanism.batch_sizes import assert_true
from tf_adaptive_dp.mechanism.noise import aligned, normal_numbers
from tf_adaptive_dp.mechanism.padding import Order

# Threads that trace steps at the same time have to cancel noise from the same variable.
_CREATION = threading.Lock()

# Numbers of draws that each release of `TreeNoise` reserves; it needs one for each level at most.
_DRAWS_PER_RELEASE = 32
# In place of the code of groups, which is not negative.
_NO_GROUPS = -1
# In place of the size of the noise, which is positive.
_NO_SIZE = 0

_NO_KEY = (
    "The noise of this optimizer cancels noise of earlier releases, which is known only to the "
    "process that drew it, or from the directory of a `PrivacyPlan`. Without it, no epsilon is "
    "proven for further releases. Call `plan.fit` with the directory of the run to resume it; or "
    "continue with a new optimizer whose `ledger.other_events` hold `sampling.dp_event(old, "
    "num_examples)`, what this one spent."
)


_OTHER_VARIABLES = (
    "The variables that are trained changed, so the noise of earlier steps cannot be canceled in "
    "them. With correlated noise all steps of an optimizer must train the same variables: "
    "differentiate the sum of the losses once, or give each set of variables an optimizer of its "
    "own."
)

_OUT_OF_ORDER = (
    "The batch was drawn for another step, from other groups of examples than earlier ones, or "
    "with another number of groups than the noise has bands. With correlated noise each batch must "
    "come at its own step, or an example may return too soon. Draw batches with `poisson_batches` "
    "and a CyclicPoissonSampling, with one `key` for all data sets of the run and "
    "`start_step=optimizer.ledger.num_releases`, use each once and in order, and pass "
    "`steps_per_epoch` to `fit`."
)


class OrderCheck(NamedTuple):
    """Whether a release is the one that its batch and its noise were drawn for.

    Attributes:
      rejects: assertions that must run before the release, and fail it if it is another one.
      in_order: bool scalar, whether the release is that one, as far as the batch shows.
      shown: bool scalar, whether the batch showed its step.
      groups: int64 scalar, the groups that it was drawn from, if it was drawn for this step; or
        `None`.
    """

    rejects: list[tf.Operation]
    in_order: tf.Tensor
    shown: tf.Tensor
    groups: tf.Tensor | None

    @classmethod
    def any_order(cls) -> OrderCheck:
        """That of independent noise, for which the order of batches does not matter."""
        return cls([], tf.constant(True), tf.constant(True), None)

    def with_parts(self, out_of_order: tf.Tensor, order_unknown: tf.Tensor) -> OrderCheck:
        """That of a batch, given how many of its parts were out of order or did not show theirs."""
        return self._replace(
            in_order=self.in_order & tf.equal(out_of_order, 0), shown=tf.equal(order_unknown, 0)
        )


class NoiseKey(NamedTuple):
    """The key of the noise from a release on. It is as secret as the data.

    Attributes:
      first: the number of the release, from 0.
      key: 64 bits.
    """

    first: int
    key: int


def new_noise_key(first: int) -> NoiseKey:
    """A key from the operating system's entropy, for the noise from a release on."""
    return NoiseKey(first, int.from_bytes(os.urandom(8), "little", signed=True))


class _Recurrence(Protocol):
    """How the next noise follows from new noise and from a state.

    Attributes:
      rows: of the state, [rows, size]. It is zero before the first release.
    """

    rows: int

    def first_needed(self, count: int) -> int:
        """The release from which a state of zeros leads to the state before release `count`."""

    def step(
        self, size: int, key: tf.Tensor, number: tf.Tensor, state: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The noise of a release, and the state after it.

        Args:
          size: how many numbers.
          key: int64 scalar.
          number: int64 scalar, of the release, from 0.
          state: [rows, size].

        Returns:
          [size] and [rows, size].
        """


def take_back(
    coefficients: Sequence[float] | tf.Tensor, fresh: tf.Tensor, past: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """The next noise of a `ToeplitzStrategy`: w_t = (z_t - Σ_{k=1}^{b-1} c_k w_{t-k}) / c_0.

    Args:
      coefficients: [b], c_0, ..., c_{b-1}.
      fresh: [size], z_t, float32, independent of what was drawn before.
      past: [b - 1, size], w_{t-1}, ..., w_{t-b+1}, and zeros for what is before the first release.

    Returns:
      w_t, [size], and the `past` of the next release.

    >>> noise, past = take_back((0.8, 0.6), tf.constant([1.0]), tf.constant([[0.5]]))
    >>> noise.numpy().round(3), past.numpy().round(3)
    (array([0.875], dtype=float32), array([[0.875]], dtype=float32))
    """
    coefficients = tf.convert_to_tensor(coefficients, tf.float32)
    taken_back = tf.linalg.matvec(past, coefficients[1:], transpose_a=True)
    noise = (fresh - taken_back) / coefficients[0]
    return noise, tf.concat([noise[tf.newaxis], past[:-1]], axis=0)


class _ToeplitzRecurrence:
    """That of `take_back`; the state holds the last noises, latest first.

    z_t is the draw t + 1 of the key.
    """

    def __init__(self, strategy: ToeplitzStrategy):
        self._strategy = strategy
        self.rows = strategy.bands - 1

    def first_needed(self, count: int) -> int:
        """See `_Recurrence`. Noise that is further back is below the rounding of float32."""
        return max(0, count - self.rows - self._strategy.memory(count)) if count else 0

    def step(
        self, size: int, key: tf.Tensor, number: tf.Tensor, state: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `_Recurrence`."""
        fresh = normal_numbers(size, key, number + 1)
        return take_back(self._strategy.coefficients, fresh, state)


class _TreeRecurrence:
    """The noise of `TreeNoise`.

    The state holds u of the last finished left node of each level, and then the noise in the sum of
    all steps of the tree so far. Release t finishes a node of each level up to some j; z of the one
    of level k is the draw 32·t + k + 1 of the key.
    """

    def __init__(self, strategy: TreeNoise):
        self._steps_per_tree = strategy.steps_per_tree
        self._levels = strategy.levels
        self._weights = 1 / strategy.variances
        self.rows = strategy.levels + 1

    def first_needed(self, count: int) -> int:
        """See `_Recurrence`. A tree takes nothing back from the ones before it."""
        return count - count % self._steps_per_tree

    def step(
        self, size: int, key: tf.Tensor, number: tf.Tensor, state: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `_Recurrence`."""
        leaf = tf.math.floormod(number, self._steps_per_tree)
        nodes, before = state[:-1], state[-1]

        def drawn(level: tf.Tensor) -> tf.Tensor:
            return normal_numbers(size, key, _DRAWS_PER_RELEASE * number + level + 1)

        def bit(value: tf.Tensor, level: tf.Tensor) -> tf.Tensor:
            return tf.bitwise.bitwise_and(tf.bitwise.right_shift(value, level), 1)

        def is_right_child(level: tf.Tensor, u: tf.Tensor) -> tf.Tensor:
            del u
            return bit(leaf, level) > 0

        def parent(level: tf.Tensor, u: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return level + 1, 0.5 * (nodes[level] + u) + drawn(level + 1)

        zero = tf.constant(0, tf.int64)
        level, u = tf.while_loop(is_right_child, parent, (zero, drawn(zero)))
        levels = tf.range(self._levels, dtype=tf.int64)
        nodes = tf.where(tf.equal(levels, level)[:, tf.newaxis], u, nodes)
        weights = tf.cast(bit(leaf + 1, levels), tf.float32) * self._weights.astype(np.float32)
        in_sum = tf.linalg.matvec(nodes, weights, transpose_a=True)
        noise = in_sum - tf.where(tf.equal(leaf, 0), 0.0, before)
        return noise, tf.concat([nodes, in_sum[tf.newaxis]], axis=0)


def _recurrence(strategy: NoiseStrategy) -> _Recurrence:
    if isinstance(strategy, TreeNoise):
        return _TreeRecurrence(strategy)
    if isinstance(strategy, ToeplitzStrategy):
        return _ToeplitzRecurrence(strategy)
    raise TypeError(f"No noise is known for this strategy. Received: {strategy!r}")


class _Secret:
    """What is known of the noise and its batches, all of it unsaved.

    These are the key, the number of the next release, the noise that is taken back, of how many
    numbers it is, and the groups of examples that this process's first batch came from.

    The noises w_{t-1}, ..., w_{t-b+1}, or those of the nodes of a tree, are as secret as the key:
    with one of them, anybody can remove the noise from a released gradient. They are in variables
    that nothing tracks, so no checkpoint and no saved model contains them. Copies and unpickled
    objects start without them.
    """

    __slots__ = ("_seed", "groups", "keys", "next", "past", "size")

    def __init__(self, seed: int | None):
        self._seed = seed
        first = new_noise_key(0) if seed is None else NoiseKey(0, seed)
        self.keys = [first]
        self.past: dict[int, tf.Variable] = {}
        with uncounted_variables():
            # The key in use, and the number of the next release.
            self.next = tf.Variable([first.key, 0], dtype=tf.int64, trainable=False)
            self.groups = tf.Variable(_NO_GROUPS, dtype=tf.int64, trainable=False)
            # The `past` that was released with; there may be others, of steps that were traced.
            self.size = tf.Variable(_NO_SIZE, dtype=tf.int64, trainable=False)

    def __reduce__(self) -> tuple:
        return _Secret, (self._seed,)

    def __repr__(self) -> str:
        return "<secret>"


class CorrelatedNoise:
    """The noise w of a strategy, see `accounting.noise_strategies`, with the z of `GaussianNoise`.

    Guarantee: w_0, w_1, ... of one object are the noise of one run: each is given once, in order,
    and z is new for each release (see `GaussianNoise`), to float32 rounding. Neither the key nor
    the noises that later ones cancel are saved or shown, so another process can continue a run only
    with the keys that `resume` takes. Each process draws with a new key, so even two processes that
    continue from the same keys (a copied directory) never draw the same z.

    Attributes:
      strategy: the `NoiseStrategy`.
      seed: see `GaussianNoise`.
      saved: [2], int64, a variable of the optimizer: the number of releases and the strategy.
    """

    def __init__(
        self,
        add_variable: Callable[..., tf.Variable],
        strategy: NoiseStrategy,
        seed: int | None = None,
        *,
        in_parts: bool = False,
    ):
        """Creates the counter.

        Args:
          add_variable: makes a variable that is saved with the optimizer.
          strategy: how the noises depend on each other.
          seed: `None` uses the operating system's entropy.
          in_parts: whether batches arrive in parts.
        """
        self.strategy, self.seed, self._in_parts = strategy, seed, in_parts
        self._recurrence = _recurrence(strategy)
        self._secret = _Secret(seed)
        # The number of releases, and the strategy: that of a saved state may be another one. It has
        # another shape than that of `GaussianNoise`, so neither state is taken for the other.
        self.saved = add_variable([2], dtype=tf.int64, name="noise_counter")
        with tf.init_scope():
            self.saved.assign([0, strategy.digest()])

    def number(self) -> tf.Tensor:
        """How many noises were drawn: the number of the next one, an int64 scalar."""
        return self._secret.next.read_value()[1]

    def fits(self, num_releases: tf.Tensor) -> tf.Tensor:
        """Whether the noise belongs to the next release of a ledger: a bool scalar.

        Args:
          num_releases: how many the ledger holds.
        """
        same = tf.equal(self.saved.read_value()[1], self.strategy.digest())
        return same & tf.equal(self.number(), num_releases)

    def require_fit(self, num_releases: int) -> None:
        """Raises before a step that could not continue the noise of earlier releases.

        Args:
          num_releases: how many the ledger holds.

        Raises:
          NotPrivateError: if the noise of some of them is not known, or that of more is.
        """
        with tf.init_scope():
            if bool(self.fits(tf.constant(num_releases, tf.int64))):
                return
            drawn = int(self.number())
        raise NotPrivateError(
            f"{_NO_KEY} Received: {num_releases} releases in the ledger, with the noise of {drawn} "
            f"known for {self.strategy!r}"
        )

    def resume(self, keys: Sequence[NoiseKey], num_releases: int) -> None:
        """Continues after the releases of an earlier process.

        Args:
          keys: all keys of the run, in order. The last one is for what is released from now on.
          num_releases: how many releases there may have been.

        Raises:
          ValueError: if the keys do not cover all releases, or the last one has been used.
        """
        firsts = [key.first for key in keys]
        if not firsts or firsts[0] != 0 or firsts != sorted(firsts) or firsts[-1] > num_releases:
            raise ValueError(f"The keys must cover all releases. Received: keys from {firsts}")
        self._secret.keys = list(keys)
        self._secret.next.assign([keys[-1].key, num_releases])
        self._secret.groups.assign(_NO_GROUPS)
        self._secret.size.assign(_NO_SIZE)
        for past in self._secret.past.values():
            past.assign(self._replayed(past.shape[1]))

    def check_order(
        self, order: Order | None, num_releases: tf.Tensor, sums: Sequence[tf.Tensor]
    ) -> OrderCheck:
        """Whether the next release is the one that a batch, or a part of one, was drawn for.

        Args:
          order: which step the batch was drawn for; `None` if that is unknown.
          num_releases: how many releases the ledger holds, which is the number of the next one.
          sums: the tensors that are to be released, of known shapes.

        Raises:
          ValueError: if the noise so far is that of other variables.
        """
        size = sum(aligned([s.shape.num_elements() for s in sums]))
        self._require_size(size)
        fits = self.fits(num_releases)
        rejects = [assert_true(fits, [_NO_KEY, "Received: releases in the ledger:", num_releases])]
        # A step that was traced before the first release has not been refused.
        known = self._size()
        same = tf.equal(known, size) | tf.equal(known, _NO_SIZE)
        received = ["Received: noise for", size, "numbers after", known]
        rejects.append(assert_true(same, [_OTHER_VARIABLES, *received]))
        fits &= same
        shown, in_order, groups = tf.constant(False), tf.constant(True), None
        if order is not None and self.strategy.bands is not None:
            shown = order.shown
            groups = order.groups_at(num_releases, self.strategy.bands)
            in_order = ~shown | self._come_from(groups)
            rejects.append(assert_true(in_order, [_OUT_OF_ORDER, "Received: step", num_releases]))
        return OrderCheck([r for r in rejects if r is not None], fits & in_order, shown, groups)

    def keep_groups(self, order: OrderCheck) -> list[tf.Tensor]:
        """Remembers the groups that a batch in order shows; callers take turns.

        Args:
          order: that of the batch, or of a part.

        Returns:
          Tensors that become available when they are written.
        """
        if order.groups is None:
            return []
        (own,) = local_copies(self._secret.groups)
        when = order.in_order & order.shown
        kept = own.assign(tf.where(when, order.groups, self._known_groups()))
        return [tf.convert_to_tensor(kept)]

    def _come_from(self, groups: tf.Tensor) -> tf.Tensor:
        """Whether a batch is from the groups of the releases so far, a bool scalar.

        Args:
          groups: see `Order.groups_at`.
        """
        known = self._known_groups()
        is_code = tf.equal(groups % 2**batch_order.BITS_OF_PERIOD, 0)
        return tf.where(known < 0, is_code, tf.equal(groups, known))

    def forget_parts(self) -> None:
        """Forgets the groups that parts of the first batch have shown; no others."""
        if int(self.number()) == 0:
            self._secret.groups.assign(_NO_GROUPS)

    def _known_groups(self) -> tf.Tensor:
        """Those of the releases so far, and of parts of the first one; negative before them.

        A first batch that did not arrive in parts and was not released does not count.
        """
        (own,) = local_copies(self._secret.groups)
        if self._in_parts:
            return own.read_value()
        none = tf.constant(_NO_GROUPS, tf.int64)
        return tf.where(self.number() > 0, own.read_value(), none)

    def draw(self, sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The noise of the next release; callers take turns.

        Args:
          sums: tensors of known shapes.

        Returns:
          float32 tensors of these shapes, of noise multiplier 1. They become available only when
          every variable has been written.
        """
        sizes = [s.shape.num_elements() for s in sums]
        places = aligned(sizes)
        size = sum(places)
        past = self._past(size)
        (own,) = local_copies(self._secret.next)
        key, number = tf.unstack(own.read_value())
        noise, state = self._recurrence.step(size, key, number, past.read_value())
        # In this order: a step that is cut off in between leaves a number that `fits` rejects.
        kept = past.assign(state)
        with tf.control_dependencies([tf.convert_to_tensor(kept)]):
            written = [
                own.assign(tf.stack([key, number + 1])),
                local_copies(self._secret.size)[0].assign(size),
                self.saved.assign(tf.stack([number + 1, self.saved.read_value()[1]])),
            ]
        with tf.control_dependencies([tf.convert_to_tensor(variable) for variable in written]):
            parts = tf.split(tf.identity(noise), places)
        return [tf.reshape(p[:n], s.shape) for p, n, s in zip(parts, sizes, sums)]

    def _past(self, size: int) -> tf.Variable:
        """[rows, size], the state of the recurrence."""
        secret = self._secret
        with _CREATION:
            if size in secret.past:
                return secret.past[size]
            with tf.init_scope():
                start = self._replayed(size)
                with uncounted_variables():
                    made = tf.Variable(start, trainable=False, name="past_noise")
            secret.past[size] = local_copies(made)[0]
            return secret.past[size]

    def _require_size(self, size: int) -> None:
        """Raises ValueError if this process's releases have noise of another size."""
        with tf.init_scope():
            known = int(self._size())
        if known not in (_NO_SIZE, size):
            raise ValueError(f"{_OTHER_VARIABLES} Received: noise for {size} numbers after {known}")

    def _size(self) -> tf.Tensor:
        """Of how many numbers the noise of this process is, an int64 scalar; 0 if of none yet."""
        (own,) = local_copies(self._secret.size)
        return own.read_value()

    def _replayed(self, size: int) -> tf.Tensor:
        """[rows, size], the state before the next release, drawn again with the keys.

        The number at a place does not depend on `size`, so other variables may be trained now:
        whatever stands at that place cancels the noise that was released there.
        """
        count = int(self.number())
        start = tf.zeros([self._recurrence.rows, size])
        begin = self._recurrence.first_needed(count)
        if begin == count:
            return start
        firsts = np.array([key.first for key in self._secret.keys])
        used = [self._secret.keys[int((firsts <= t).sum()) - 1].key for t in range(begin, count)]

        @tf.function(autograph=False)
        def replay(keys: tf.Tensor, state: tf.Tensor) -> tf.Tensor:
            def one(t: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                number = begin + tf.cast(t, tf.int64)
                return t + 1, self._recurrence.step(size, keys[t], number, state)[1]

            return tf.while_loop(lambda t, _: t < count - begin, one, (0, state))[1]

        return replay(tf.constant(used, tf.int64), start)
