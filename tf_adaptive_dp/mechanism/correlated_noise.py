"""Gaussian noise that later releases take back in part."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.variables import local_copies, uncounted_variables
from tf_adaptive_dp.accounting.noise_strategies import NoiseStrategy
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.mechanism.noise import aligned, normal_numbers

# Threads that trace steps at the same time have to take back noise from the same variable.
_CREATION = threading.Lock()

NO_KEY = (
    "The noise of this optimizer takes back noise of earlier releases, which only the process that "
    "drew it knows, or the directory of a `PrivacyPlan`. Without it no epsilon is proven for "
    "further releases. Call `plan.fit` with the directory of the run to resume it; or train on "
    "with a new optimizer whose `ledger.other_events` hold `sampling.dp_event(old, num_examples)`, "
    "what this one spent."
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


class _Secret:
    """The key, the number of the next release, and the last noises, which nothing saves or shows.

    The noises w_{t-1}, ..., w_{t-b+1} are as secret as the key: with one of them anybody can take
    the noise out of a released gradient. They are in variables that nothing tracks, so no
    checkpoint and no saved model contains them. Copies and unpickled objects start without them.
    """

    __slots__ = ("_seed", "keys", "next", "past")

    def __init__(self, seed: int | None):
        self._seed = seed
        first = new_noise_key(0) if seed is None else NoiseKey(0, seed)
        self.keys = [first]
        self.past: dict[int, tf.Variable] = {}
        with uncounted_variables():
            # The key in use, and the number of the next release.
            self.next = tf.Variable([first.key, 0], dtype=tf.int64, trainable=False)

    def __reduce__(self) -> tuple:
        return _Secret, (self._seed,)

    def __repr__(self) -> str:
        return "<secret>"


class CorrelatedNoise:
    """Noise w with C w = z for a strategy C, where z is that of `GaussianNoise`.

        w_t = (z_t - Σ_{k=1}^{b-1} c_k w_{t-k}) / c_0

    Guarantee: w_0, w_1, ... of one object are the noise of one run: each is given once, in order,
    and z is new for each release (see `GaussianNoise`), to float32 rounding. Neither the key nor
    the last b - 1 noises are saved or shown, so a run can go on in another process only with the
    keys that `resume` takes. A process draws with a key of its own, so even two processes that go
    on from the same keys (a copied directory) never draw the same z.

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
    ):
        """Creates the counter.

        Args:
          add_variable: makes a variable that is saved with the optimizer.
          strategy: how the noises depend on each other.
          seed: `None` uses the operating system's entropy.
        """
        self.strategy, self.seed = strategy, seed
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
        """Whether the next noise belongs to the next release of a ledger, a bool scalar.

        Args:
          num_releases: how many the ledger holds.
        """
        same = tf.equal(self.saved.read_value()[1], self.strategy.digest())
        return same & tf.equal(self.number(), num_releases)

    def require_fit(self, num_releases: int) -> None:
        """Raises before a step that could not go on with the noise of earlier releases.

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
            f"{NO_KEY} Received: {num_releases} releases in the ledger, with the noise of {drawn} "
            f"known for {self.strategy!r}"
        )

    def resume(self, keys: Sequence[NoiseKey], num_releases: int) -> None:
        """Goes on after the releases of an earlier process.

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
        for past in self._secret.past.values():
            past.assign(self._replayed(past.shape[1]))

    def add_to(
        self, sums: Sequence[tf.Tensor], stddev: tf.Tensor, sensitivity: tf.Tensor
    ) -> list[tf.Tensor]:
        """Adds the noise of the next release; see `draw`.

        Args:
          sums: float32 tensors of known shapes.
          stddev: scalar, the noise multiplier times the clipping bound.
          sensitivity: scalar; not used.
        """
        del sensitivity
        scale = tf.cast(stddev, tf.float32)
        return [s + scale * w for s, w in zip(sums, self.draw(sums))]

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
        first, *others = self.strategy.coefficients
        (own,) = local_copies(self._secret.next)
        key, number = tf.unstack(own.read_value())
        before = past.read_value()
        taken_back = tf.linalg.matvec(before, tf.constant(others, tf.float32), transpose_a=True)
        noise = (normal_numbers(size, key, number + 1) - taken_back) / first
        # In this order: a step that is cut off in between leaves a number that `fits` rejects.
        kept = past.assign(tf.concat([noise[tf.newaxis], before[:-1]], axis=0))
        with tf.control_dependencies([tf.convert_to_tensor(kept)]):
            written = [
                own.assign(tf.stack([key, number + 1])),
                self.saved.assign(tf.stack([number + 1, self.saved.read_value()[1]])),
            ]
        with tf.control_dependencies([tf.convert_to_tensor(variable) for variable in written]):
            parts = tf.split(tf.identity(noise), places)
        return [tf.reshape(p[:n], s.shape) for p, n, s in zip(parts, sizes, sums)]

    def _past(self, size: int) -> tf.Variable:
        """[b - 1, size], the last noises, the latest first."""
        secret = self._secret
        with _CREATION:
            if size in secret.past:
                return secret.past[size]
            with tf.init_scope():
                if secret.past and int(self.number()):
                    raise ValueError(
                        "The variables that are trained changed, so that the noise of earlier "
                        "steps cannot be taken back from them. Train them with a new optimizer. "
                        f"Received: noise for {size} numbers after {list(secret.past)}"
                    )
                start = self._replayed(size)
                with uncounted_variables():
                    made = tf.Variable(start, trainable=False, name="past_noise")
            secret.past = {size: local_copies(made)[0]}
            return secret.past[size]

    def _replayed(self, size: int) -> tf.Tensor:
        """[b - 1, size], the noises before the next release, drawn again with the keys.

        The number at a place does not depend on `size`, so other variables may be trained now:
        whatever stands at that place takes back the noise that was released there.
        """
        kept = self.strategy.bands - 1
        count = int(self.number())
        start = tf.zeros([kept, size])
        if not count:
            return start
        # Noise that is further back is below the rounding of float32.
        begin = max(0, count - kept - self.strategy.memory(count))
        first, *others = self.strategy.coefficients
        firsts = np.array([key.first for key in self._secret.keys])
        used = [self._secret.keys[int((firsts <= t).sum()) - 1].key for t in range(begin, count)]

        @tf.function(autograph=False)
        def replay(keys: tf.Tensor, past: tf.Tensor) -> tf.Tensor:
            def one(t: tf.Tensor, past: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                z = normal_numbers(size, keys[t], begin + tf.cast(t, tf.int64) + 1)
                back = tf.linalg.matvec(past, tf.constant(others, tf.float32), transpose_a=True)
                now = (z - back) / first
                return t + 1, tf.concat([now[tf.newaxis], past[:-1]], axis=0)

            return tf.while_loop(lambda t, _: t < count - begin, one, (0, past))[1]

        return replay(tf.constant(used, tf.int64), start)
