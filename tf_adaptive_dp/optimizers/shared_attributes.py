"""What every private optimizer shows: its settings, its ledger, and what its steps have met.

Nothing is held here. Each value belongs to one of the parts that the optimizer consists of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tf_adaptive_dp._keras.variables import native
from tf_adaptive_dp.accounting.ledger import Ledger
from tf_adaptive_dp.accounting.noise_strategies import NoiseStrategy
from tf_adaptive_dp.accounting.releases import Contents
from tf_adaptive_dp.mechanism.clipping import MEASURED, Clipping
from tf_adaptive_dp.mechanism.correlated_noise import CorrelatedNoise, NoiseKey
from tf_adaptive_dp.mechanism.draw_numbers import Seen, SeenDraws
from tf_adaptive_dp.mechanism.gaussian import GaussianMechanism
from tf_adaptive_dp.mechanism.statistics import GradientStatistics
from tf_adaptive_dp.optimizers.loss_scaling import LossScaling
from tf_adaptive_dp.optimizers.preconditioning import Preconditioning
from tf_adaptive_dp.side_information.provenance import SideInformation


class SharedAttributes:
    """The attributes of `DPOptimizer`, which passes them on to its parts."""

    _mechanism: GaussianMechanism
    _preconditioning: Preconditioning
    _loss_scaling: LossScaling
    _expects_padding: bool

    @property
    def l2_norm_clip(self) -> float:
        """C, the bound on each example's gradient; 1 until a `"measured"` one is known.

        It may be set between steps.
        """
        return self._mechanism.clip_norm.value

    @l2_norm_clip.setter
    def l2_norm_clip(self, value: float) -> None:
        self._mechanism.clip_norm.value = value

    @property
    def measures_clip(self) -> bool:
        """Whether the first batches measure C, as `l2_norm_clip="measured"` asks."""
        return self._mechanism.clip_norm.is_measured

    @property
    def learns_units(self) -> bool:
        """Whether the optimizer learns how large gradients are, from what it releases."""
        return self._mechanism.clip_norm.is_learned

    @property
    def batches_to_measure(self) -> int:
        """W, how many of the first batches find scales and change no weights; 0 if none do.

        It is known once the batch size is.
        """
        mechanism = self._mechanism
        if mechanism.histograms is None or not self.next_release()[1]:
            return 0
        return int(mechanism.batches_to_measure())

    @property
    def has_only_measured(self) -> bool:
        """Whether all of its batches so far found scales, so that it has changed no weights.

        A copy measures anew, whatever its ledger holds of the batches before.
        """
        return self.ledger.num_releases > 0 and self._mechanism.has_only_measured()

    @property
    def noise_multiplier(self) -> float:
        """σ. Setting it between steps opens a new segment of the ledger."""
        return self._mechanism.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self._mechanism.noise_multiplier = value

    @property
    def expected_batch_size(self) -> float | None:
        """L, the public divisor, or `None`. Setting it opens a new segment of the ledger."""
        return self._mechanism.sizes.expected

    @expected_batch_size.setter
    def expected_batch_size(self, value: float | None) -> None:
        self._mechanism.sizes.expected = value

    def take_batch_size(self, size: int) -> None:
        """Sets `expected_batch_size` to that of full batches, of which the last may be smaller."""
        self._mechanism.sizes.expect_at_most(size)

    def expect_rows(self, most: int | None) -> None:
        """Says whether the next batches differ in their number of rows, which is private then.

        Args:
          most: the rows that the largest ones have room for, a public constant; `None` if all have
            as many.
        """
        self._mechanism.sizes.expect_rows(most)

    @property
    def num_microbatches(self) -> int | None:
        """The number of groups whose mean gradients are clipped; `None` clips every example's."""
        return self._mechanism.num_microbatches

    @property
    def examples_per_user(self) -> int | None:
        """The number of rows of each user in a batch; `None` if the unit is an example."""
        return self._mechanism.examples_per_user

    @property
    def clipping(self) -> Clipping:
        """How gradients are clipped."""
        return self._mechanism.clipping

    def compare_draws_with(self, seen: SeenDraws) -> None:
        """Compares batches with those of other optimizers, too; before the first step.

        Args:
          seen: the batches that were released by any of them.
        """
        self._mechanism.seen = seen

    @property
    def expects_padding(self) -> bool:
        """Whether a plan made this optimizer, whose batches are padded with rows of weight 0."""
        return self._expects_padding

    def expect_padding(self) -> None:
        """Makes a step warn if it receives no sample weights, which a plan's batches have."""
        self._expects_padding = True

    @property
    def parts_per_batch(self) -> int:
        """k, the number of parts in which each batch arrives; `gradient_accumulation_steps`.

        Keras 3 has a property of that name, and would accumulate what was released.
        """
        return self._mechanism.gradient_accumulation_steps

    @property
    def unfinished_parts(self) -> int:
        """How many parts of an incomplete batch are held."""
        accumulator = self._mechanism.accumulator
        return 0 if accumulator is None else accumulator.num_parts

    def drop_unfinished_parts(self) -> None:
        """Forgets the parts of an incomplete batch. Nothing of them was released."""
        if self.unfinished_parts:
            self._mechanism.drop_parts()

    @property
    def rows_per_batch(self) -> int:
        """Rows of the first batch, padding included; 0 before it. With microbatches, the most."""
        return self._mechanism.sizes.rows_per_batch

    @property
    def batches_seen(self) -> Seen:
        """How many batches, or parts of batches, this process identified; not saved."""
        return self._mechanism.seen.counts()

    @property
    def seed(self) -> int | None:
        """The seed of the noise; `None` if the noise is secret, as privacy needs it."""
        return self._mechanism.generator.seed

    @property
    def noise(self) -> NoiseStrategy:
        """How the noise of a step depends on that of earlier steps."""
        return self.ledger.noise

    @property
    def side_information(self) -> SideInformation | None:
        """What preconditions gradients, or `None`."""
        return self._preconditioning.side_information

    @property
    def initial_scale(self) -> float:
        """The loss scale; `1.0` if it depends on the variables."""
        return self._loss_scaling.scale or 1.0

    @property
    def ledger(self) -> Ledger:
        """The record of all releases; saved and restored with the optimizer."""
        return self._mechanism.ledger

    @property
    def statistics(self) -> GradientStatistics:
        """Statistics of the raw gradients, for monitoring. NOT private."""
        return self._mechanism.statistics

    @property
    def current_learning_rate(self) -> float | None:
        """The rate of the next step; `None` if variables differ in it, as in `MultiOptimizer`."""
        rate = getattr(self, "learning_rate", None)
        return None if rate is None else float(tf.convert_to_tensor(rate).numpy())

    def __repr__(self) -> str:
        with tf.init_scope():  # while a step is being traced, too
            is_unknown = self.measures_clip and self._mechanism.has_only_measured()
            values = {
                "l2_norm_clip": MEASURED if is_unknown else float(f"{self.l2_norm_clip:.6g}"),
                "noise_multiplier": self.noise_multiplier,
                "expected_batch_size": self.expected_batch_size,
            }
            if self.current_learning_rate is not None:
                values["learning_rate"] = float(f"{self.current_learning_rate:.6g}")
            values["num_releases"] = self.ledger.num_releases
        return f"<{type(self).__name__} {', '.join(f'{k}={v}' for k, v in values.items())}>"

    def resume_noise(self, keys: Sequence[tuple[int, int]]) -> None:
        """Continues the noise of an earlier process; `PrivacyPlan.fit` calls it.

        Args:
          keys: the keys of correlated noise, each with the number of the first release that it is
            for; the last one is new. The ledger must hold all releases of the run.

        Raises:
          TypeError: if the noise is independent, which needs no keys.
          ValueError: if the keys do not cover all releases.
        """
        if not isinstance(self._mechanism.generator, CorrelatedNoise):
            raise TypeError(f"Only correlated noise has keys. Received: noise={self.noise!r}")
        own = [NoiseKey(*key) for key in keys]
        self._mechanism.generator.resume(own, self.ledger.num_releases)

    def next_release(self, recorded: Contents | None = None) -> tuple[float, float | None]:
        """What the ledger will record for one more step.

        Args:
          recorded: what the ledger holds now, if it was read already.

        Returns:
          The noise multiplier, and the batch size or `None` if no batch has been seen yet.
        """
        halved = self._mechanism.sizes.examples_share_groups()
        return self.noise_multiplier / (2 if halved else 1), self._mechanism.batch_size(recorded)

    def noise_to_signal(self, variables: Sequence[tf.Variable]) -> float | None:
        """The norm of a step's noise relative to the largest norm that the mean gradient can have.

        That is σ·√d / L for d trained numbers and a batch of L examples, all of them public; more
        with correlated noise, whose single steps are noisier.

        Args:
          variables: the variables that are trained.

        Returns:
          `None` if no batch has been seen yet and `expected_batch_size` was not set.
        """
        _, size = self.next_release()
        if not size:
            return None
        num_parameters = sum(native(v).shape.num_elements() for v in variables)
        noise = self.noise_multiplier * math.sqrt(num_parameters) / size
        if self.noise.is_independent:
            return noise
        return noise * float(self.noise.deviations(self.ledger.num_releases + 1)[-1])
