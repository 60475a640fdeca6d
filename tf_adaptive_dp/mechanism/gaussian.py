"""The Gaussian mechanism: it clips, sums, counts the release in the ledger and adds the noise.

The order matters. The ledger records a release before anything that was released can be used, so
a step that fails later is still counted; a step that fails on its data before that is not. So
`release` goes through `clip_and_sum`, where it may fail on the data, `_record` and `_add_noise`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Callable, NamedTuple

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.variables import value_of
from tf_adaptive_dp.accounting.ledger import Ledger
from tf_adaptive_dp.accounting.noise_strategies import NoiseStrategy, get_strategy
from tf_adaptive_dp.accounting.releases import Contents
from tf_adaptive_dp.gradients.released import mark_released
from tf_adaptive_dp.gradients.source import PerExampleGradients
from tf_adaptive_dp.gradients.watch import search_sums_when_complete
from tf_adaptive_dp.mechanism import replicas
from tf_adaptive_dp.mechanism.accumulation import Accumulator
from tf_adaptive_dp.mechanism.batch_sizes import BatchSizes, hyperparameter
from tf_adaptive_dp.mechanism.clipped_sums import ClippedSums, clip_and_sum
from tf_adaptive_dp.mechanism.clipping import (
    AdaptiveClipping,
    ClipNorm,
    Clipping,
    get_clipping,
)
from tf_adaptive_dp.mechanism.correlated_noise import CorrelatedNoise, OrderCheck
from tf_adaptive_dp.mechanism.draw_numbers import Draw, Number, SeenDraws
from tf_adaptive_dp.mechanism.histograms import Histograms
from tf_adaptive_dp.mechanism.noise import GaussianNoise
from tf_adaptive_dp.mechanism.padding import Order
from tf_adaptive_dp.mechanism.secure_noise import SecureNoise
from tf_adaptive_dp.mechanism.statistics import GradientStatistics
from tf_adaptive_dp.mechanism.turns import Turns


class GaussianMechanism:
    """Releases the noisy mean of clipped per-example gradients.

        (Σᵢ clip((gᵢ + shift) ∘ scale, C) + N(0, σ²C²·I)) / L

    with C = `l2_norm_clip`, σ = `noise_multiplier` and L the expected batch size.

    Guarantee: adding or removing one example changes the sum by at most C in L2 norm (2C with
    microbatches of more than one example). Noise of standard deviation σ·C is added to the sum
    exactly once, and the divisor is a public constant. Each release is one entry in the ledger,
    with the noise multiplier that accounts for the sensitivity (σ, or σ/2 with microbatches). A
    row whose gradient is zero or not finite contributes exactly zero, so padding counts as absent.
    - With `examples_per_user` the unit is a user, all of whose rows in a batch are one gradient:
      adding or removing one user, whatever the number of their examples, changes the sum by at most
      C. The ledger records σ, and L and the batch size count users. The caller must ensure that the
      rows of one user are neighbors in one batch, as `sampling.poisson_batches` does.
    - A step in which the padding of our batches has gradients fails before the release. XLA drops
      assertions; there such a release counts with σ/2.
    - A step in which an index outside of its row may have made gradients of others NaN fails before
      the release; under XLA it counts as one without noise. So does a step whose loss has a
      different number of rows than the batch.
    - The ledger also records whether the batch of a release was released before (`draw_numbers`).
    - With `gradient_accumulation_steps` a batch arrives in parts. Their clipped sums are added, and
      the last part causes the one release.
    - On R replicas each one adds noise of standard deviation σ·C/√R to the sum over its examples,
      so the sum over replicas has noise σ·C. L is the size of the global batch, and every replica
      records the one release in its copy of the ledger.
    - Threads that share the mechanism record their releases one at a time, and each draws its own
      noise. C and σ are read once per release, so that clipping and noise agree.
    - `AdaptiveClipping` also releases a noisy count. The noise of the count and that of the
      gradients together amount to σ.
    - With a `noise` strategy, the noise of a release cancels part of earlier noise (see
      `accounting.noise_strategies`). A step whose batch, or part of one, was drawn for another
      step, that trains other variables than the steps before it, or whose ledger does not belong to
      the noise, fails before the release. XLA drops assertions; there such a release counts as one
      without noise.
    - With `histograms` every release has two parts, of which one is zero before the noise: the
      histograms until they are complete, and the gradients from then on.
    - A `"measured"` C is 1 until a histogram of the norms of gradients is complete, and from then
      on a tenth of their upper quartile. It comes from released counts, so it may be published.

    Attributes:
      clipping: the `Clipping`.
      clip_norm: the `ClipNorm`, which holds C.
      num_microbatches: the number of groups whose mean gradients are clipped, or `None`.
      examples_per_user: the number of rows of each user, or `None` if the unit is an example.
      gradient_accumulation_steps: the number of parts in which each batch arrives.
      accumulator: the `Accumulator` of these parts; `None` if there is one part.
      ledger: the `Ledger` of all releases.
      statistics: `GradientStatistics`, not private.
      generator: draws the noise: a `GaussianNoise`, a `SecureNoise` with `secure_noise=True`, or
        the `CorrelatedNoise` of a strategy.
      sizes: the `BatchSizes`, with the public divisor.
      histograms: the `Histograms` of the first batches, those of a measured C or what an optimizer
        set before its first step; or `None`.
    """

    def __init__(
        self,
        *,
        l2_norm_clip: float | str,
        noise_multiplier: float,
        num_microbatches: int | None,
        expected_batch_size: float | None,
        clipping: str | Clipping,
        gradient_accumulation_steps: int,
        secure_noise: bool,
        seed: int | None,
        add_variable: Callable[..., tf.Variable],
        noise: NoiseStrategy | dict | None = None,
        examples_per_user: int | None = None,
    ):
        """Creates the mechanism.

        The arguments are those of `tf_adaptive_dp.DPSGD`, except for `add_variable`, which makes a
        variable that is saved with the optimizer.

        Raises:
          TypeError, ValueError: if an argument has the wrong type or is out of its range.
        """
        self.clipping = get_clipping(clipping)
        self.clip_norm = ClipNorm(l2_norm_clip, self.clipping, add_variable)
        self.histograms = Histograms(None, add_variable) if self.clip_norm.is_measured else None
        self._noise_multiplier = hyperparameter(0.0)
        self.noise_multiplier = noise_multiplier
        self.num_microbatches, self.examples_per_user = _checked_groups(
            num_microbatches, examples_per_user
        )
        steps = checks.integer("gradient_accumulation_steps", gradient_accumulation_steps, 1)
        self.gradient_accumulation_steps = steps
        self.accumulator = Accumulator(steps) if steps > 1 else None
        strategy = get_strategy(noise)
        self.ledger = Ledger(add_variable, strategy, self.examples_per_user)
        self._taken_over: weakref.WeakSet[Ledger] = weakref.WeakSet()
        self.generator = _generator(
            checks.boolean("secure_noise", secure_noise), seed, add_variable, strategy, steps > 1
        )
        if not strategy.is_independent:
            self._refuse_beside_correlated_noise(strategy)
        self.statistics = GradientStatistics()
        self._turns = Turns()
        self._complete: dict[int, tf.Tensor] = {}  # by thread, as each traces a graph of its own
        self.sizes = BatchSizes(
            expected_batch_size,
            self.num_microbatches,
            self.examples_per_user,
            steps,
            add_variable,
        )
        self.seen = SeenDraws(self.ledger)

    def _refuse_beside_correlated_noise(self, strategy: NoiseStrategy) -> None:
        """Raises ValueError for settings whose releases have parts without correlated noise."""
        given = {
            "l2_norm_clip": self.clip_norm.is_measured,
            "num_microbatches": self.num_microbatches is not None,
            "clipping": isinstance(self.clipping, AdaptiveClipping),
            "examples_per_user": self.examples_per_user is not None,
        }
        for name, wrong in given.items():
            if wrong:
                raise ValueError(
                    "No epsilon is proven for correlated noise with microbatches, adaptive or "
                    f"measured clip norms, or users. Leave `{name}` out, or the noise independent. "
                    f"Received: {name}, noise={strategy!r}"
                )

    @tf.autograph.experimental.do_not_convert
    def release(
        self,
        source: PerExampleGradients,
        batch_size: tf.Tensor,
        scale: list[tf.Tensor] | None = None,
        shift: list[tf.Tensor] | None = None,
        layers: Sequence[str] = (),
        places: Sequence[int] = (),
        number: Number | None = None,
        padding: tf.Tensor | None = None,
        order: Order | None = None,
        public_size: bool | tf.Tensor = True,
    ) -> list[tf.Tensor | None]:
        """Releases one noisy mean gradient and records it in the ledger.

        Args:
          source: gradients of the examples, microbatches or users.
          batch_size: scalar, the number of rows of this replica in this part of the batch,
            padding included.
          scale: one tensor per variable, which multiplies gradients before clipping.
          shift: one tensor per variable, which is added to each gradient before that.
          layers: the layer that each variable belongs to, for per-layer clipping.
          places: the number of each variable among those of the optimizer.
          number: the number of the batch, see `draw_numbers.number_of`; `None` if it has none.
          padding: [B], bool, the rows that are padding; `None` if that is unknown.
          order: which step the batch was drawn for; `None` if that is unknown. Only correlated
            noise needs it.
          public_size: whether `batch_size` is public even if the expected size is given, as that
            of padded batches is; a bool or a bool scalar.

        Returns:
          One float32 tensor per variable, or `None` if the loss does not depend on the variable.
          On several replicas the caller must sum them. As long as the batch is incomplete (see
          `complete`), they are zero and nothing is released. They are zero, too, if the batch was
          released as histograms.

        Raises:
          tf.errors.InvalidArgumentError: when the step runs, if batches vary in size and there is
            no `expected_batch_size`, if padding has gradients, or if a batch comes at a step that
            it was not drawn for. Nothing is released then. XLA does not raise such errors; there
            the size of the first batch stays the divisor.
        """
        size = self.sizes.units(replicas.total(tf.cast(batch_size, tf.int64)))
        check = self.sizes.check(size)
        clip = self.clip_norm.read()
        with tf.control_dependencies([check] if check is not None else []):
            of_variables, batch = clip_and_sum(
                source,
                clip,
                self.clipping,
                scale=scale,
                shift=shift,
                layers=layers,
                places=places,
                padding=padding,
                absent=self._units_of_padding(padding),
                histograms=self.histograms,
                statistics=self.statistics,
            )
        search_sums_when_complete([*batch.sums, *batch.within])
        arrived = _Arrived(size, public_size, number, order)
        # After the sums, so that a step that fails on its data releases and changes nothing.
        with tf.control_dependencies([*batch.flat(), *batch.rejects()]):
            if self.accumulator is None:
                complete = tf.constant(True)
                noisy = self._release_at_once(batch, clip, arrived)
            else:
                complete, noisy = self._accumulate(self.accumulator, batch, clip, arrived, places)
        self._complete[threading.get_ident()] = complete
        released = iter(noisy)
        return [None if s is None else next(released) for s in of_variables]

    def _units_of_padding(self, padding: tf.Tensor | None) -> tf.Tensor | None:
        """Which examples, or users, are padding.

        Args:
          padding: [B], bool, the rows that are padding; `None` if that is unknown.

        Returns:
          `None` if it is unknown, or with microbatches, which halve σ anyway.
        """
        if padding is None or self.num_microbatches is not None:
            return None
        if self.examples_per_user is not None:
            # Padding among a user's records is that user's own; empty places count.
            return tf.reduce_all(tf.reshape(padding, [-1, self.examples_per_user]), axis=1)
        return padding

    def _release_at_once(
        self, batch: ClippedSums, clip: tf.Tensor, arrived: _Arrived
    ) -> list[tf.Tensor]:
        """Releases a batch that did not arrive in parts."""

        def record() -> list[tf.Tensor]:
            checked = self._check_order(arrived.order, batch)
            with tf.control_dependencies(self._remember(arrived, checked)):
                draw = self.seen.add(arrived.number, tf.constant(True))
                return self._record(batch, arrived.size, draw, checked).flat()

        return self._add_noise(batch, clip, _Recorded.of(self._turns.take(record)))

    def _accumulate(
        self,
        accumulator: Accumulator,
        part: ClippedSums,
        clip: tf.Tensor,
        arrived: _Arrived,
        places: Sequence[int],
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Adds one part of a batch, and releases the batch after its last part.

        Returns:
          Whether this was the last part; and the noisy means, or zeros if parts are missing.
        """
        # In units of C, since C may be set anew before the batch is complete.
        unit = tf.cast(clip, tf.float32)
        in_units = part._replace(sums=[s / unit for s in part.sums])
        draw, complete, totals = self._add_part(accumulator, in_units, arrived, places)

        def release() -> list[tf.Tensor]:
            whole = totals._replace(sums=[s * unit for s in totals.sums])
            return self._release_parts(whole, draw, clip, arrived)

        def wait() -> list[tf.Tensor]:
            of_gradients = part.sums if self.histograms is None else part.sums[:-1]
            return [tf.zeros_like(s) for s in of_gradients]

        return complete, tf.cond(complete, release, wait)

    def _add_part(
        self, accumulator: Accumulator, part: ClippedSums, arrived: _Arrived, places: Sequence[int]
    ) -> tuple[Draw, tf.Tensor, ClippedSums]:
        """Adds a part to those of its batch that arrived before.

        Returns:
          What the parts so far show of the batch, whether they are all of it, and their sums.
        """

        def add() -> list[tf.Tensor]:
            checked = self._check_order(arrived.order, part)
            # A part that was drawn for another step fails here; under XLA it marks its batch.
            marked = part._replace(
                out_of_order=tf.cast(~checked.in_order, tf.float32),
                order_unknown=tf.cast(~checked.shown, tf.float32),
            )
            with tf.control_dependencies(self._remember(arrived, checked)):
                totals, complete = accumulator.add(marked.flat(), places)
                return [*self.seen.add(arrived.number, complete), complete, *totals]

        made = self._turns.take(add)
        num = len(Draw._fields)
        return Draw(*made[:num]), made[num], part.like(made[num + 1 :])

    def _release_parts(
        self, batch: ClippedSums, draw: Draw, clip: tf.Tensor, arrived: _Arrived
    ) -> list[tf.Tensor]:
        """Releases a batch whose last part has arrived.

        Args:
          batch: the sums over all parts.
          draw: what the parts show of the batch.
          clip: C.
          arrived: the last part.
        """

        def record() -> list[tf.Tensor]:
            # That of the noise; each part was checked as it arrived.
            order = self._check_order(None, batch)
            order = order.with_parts(batch.out_of_order, batch.order_unknown)
            with tf.control_dependencies(self._remember(arrived, order)):
                return self._record(batch, arrived.size, draw, order).flat()

        return self._add_noise(batch, clip, _Recorded.of(self._turns.take(record)))

    def _record(
        self, batch: ClippedSums, size: tf.Tensor, draw: Draw, order: OrderCheck
    ) -> _Recorded:
        """Records a release in the ledger. Call it when its turn comes, after all checks.

        Args:
          batch: the sums over the whole batch.
          size: the rows of the batch, or of its last part.
          draw: whether the batch was released before.
          order: whether the batch and the noise were drawn for this release.
        """
        per_group, expected = self.sizes.per_group(), self.sizes.divisor()
        sigma = self.sigma()
        # An example may take the place of another one, or of padding that contributes.
        twice = (per_group > 1) | (batch.padding > 0)
        # An example in 1 + c parts of a batch moves the sum by up to (1 + c)·C.
        counted = tf.where(twice, sigma / 2, sigma) / (1 + draw.copies)
        private = order.in_order & batch.are_bounded()
        recorded = self.ledger.record(
            tf.where(private, counted, tf.zeros_like(counted)),
            expected,
            checked=draw.checked & order.shown,
            distance=draw.distance,
            # Padding that contributes halves σ already.
            size_seen=self.sizes.too_large(
                expected, per_group, size, batch.present - batch.padding
            ),
        )
        # Which noise is drawn depends on the number of the release, so it is drawn in this turn.
        correlated: list[tf.Tensor] = []
        if isinstance(self.generator, CorrelatedNoise):
            with tf.control_dependencies([recorded]):
                correlated = self.generator.draw(batch.sums)
        return _Recorded(recorded, per_group, expected, sigma, correlated)

    def _add_noise(self, batch: ClippedSums, clip: tf.Tensor, record: _Recorded) -> list[tf.Tensor]:
        """The noisy means of a batch, given what `_record` returned for its release."""
        stddev = replicas.share(self._gradient_noise(record.sigma, record.expected)) * clip
        divisor = tf.cast(record.groups, tf.float32)
        # Recorded first, since weights may move before another operation of the step fails.
        with tf.control_dependencies([record.ledger]):
            if isinstance(self.generator, CorrelatedNoise):
                scale = tf.cast(stddev, tf.float32)
                noisy = [s + scale * w for s, w in zip(batch.sums, record.correlated)]
            else:
                noisy = self.generator.add_to(batch.sums, stddev, clip)
                if isinstance(self.clipping, AdaptiveClipping):
                    self._adapt(self.clipping, self.generator, batch.within, clip, record)
            if self.histograms is None:
                return [s / divisor for s in noisy]
            # The noise of gradients that were left out would only move weights.
            *noisy, counts = noisy
            factor = tf.where(self.histograms.are_open(), 0.0, 1 / divisor)
            self._add_to(self.histograms, counts, clip, record)
        return [s * factor for s in noisy]

    def _check_order(self, order: Order | None, batch: ClippedSums) -> OrderCheck:
        """Whether the next release is the one that a batch, or a part of one, was drawn for."""
        if isinstance(self.generator, CorrelatedNoise):
            return self.generator.check_order(order, self.ledger.count(), batch.sums)
        return OrderCheck.any_order()

    def _remember(self, arrived: _Arrived, order: OrderCheck) -> list[tf.Operation | tf.Tensor]:
        """What later batches are compared with; call it when the batch's turn comes.

        Args:
          arrived: the batch, or a part.
          order: of this batch, or part. If it fails, nothing is written.
        """
        with tf.control_dependencies(order.rejects):
            written = [*order.rejects, self.sizes.remember(arrived.size, arrived.has_public_size)]
            if isinstance(self.generator, CorrelatedNoise):
                written += self.generator.keep_groups(order)
        return written

    def _adapt(
        self,
        clipping: AdaptiveClipping,
        generator: GaussianNoise | SecureNoise,
        count: list[tf.Tensor],
        clip: tf.Tensor,
        record: _Recorded,
    ) -> None:
        """Moves C, given how many examples lie within the C that they were clipped to."""
        _, count_noise = clipping.split_noise(record.sigma, record.expected)
        stddev = replicas.share(count_noise)
        (noisy,) = generator.add_to(count, stddev, tf.constant(0.5, tf.float64))
        mark_released(noisy)
        total = replicas.total(noisy)
        with tf.control_dependencies([total]):
            self._turns.take(lambda: self.clip_norm.adapt(clipping, clip, total, record.groups))

    def _add_to(
        self, histograms: Histograms, released: tf.Tensor, clip: tf.Tensor, record: _Recorded
    ) -> None:
        """Keeps what was released for the histograms, and sets a measured C with the last of it."""
        mark_released(released)
        total = replicas.total(released)
        sigma = self._gradient_noise(record.sigma, record.expected)

        def add() -> list[tf.Tensor]:
            written = histograms.add(total, clip, sigma, record.groups)
            if not self.clip_norm.is_measured:
                return written
            with tf.control_dependencies(written):
                return [*written, self.clip_norm.measure(histograms)]

        with tf.control_dependencies([total]):
            self._turns.take(add)

    def _gradient_noise(self, sigma: tf.Tensor, expected: tf.Tensor) -> tf.Tensor:
        """The noise of the gradients in units of C: σ, or σ_Δ with `AdaptiveClipping`; float64."""
        if isinstance(self.clipping, AdaptiveClipping):
            return self.clipping.split_noise(sigma, expected)[0]
        return sigma

    @property
    def seen(self) -> SeenDraws:
        """The numbers of released batches, with which batches are compared."""
        return self._seen

    @seen.setter
    def seen(self, seen: SeenDraws) -> None:
        self._seen = seen
        self.ledger.batches = seen, self.sizes

    def continue_after(self, ledgers: Iterable[Ledger]) -> None:
        """Takes over what this process knows about releases that the ledger took over.

        Otherwise a copy of an optimizer would not know how the batches before it were drawn, nor
        behind which statistics it trained.

        Args:
          ledgers: those whose releases this ledger holds.
        """
        for ledger in ledgers:
            if ledger.batches is not None and ledger not in self._taken_over:
                self._taken_over.add(ledger)
                self.ledger.statistics.update(ledger.statistics)
                seen, sizes = ledger.batches
                if seen is not self._seen:
                    self._seen.add_counts(seen.counts())
                self.sizes.continue_after(sizes)

    @property
    def noise_multiplier(self) -> float:
        """σ, the noise in units of C. Setting it between steps opens a new ledger segment."""
        return float(value_of(self._noise_multiplier))

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        value = checks.number("noise_multiplier", value, 0)
        if isinstance(self.clipping, AdaptiveClipping):
            self.clipping.check_noise(value)
        self._noise_multiplier.assign(value)

    def sigma(self) -> tf.Tensor:
        """σ as a scalar tensor, for steps that compute with it."""
        return self._noise_multiplier.read_value()

    def batch_size(self, recorded: Contents | None = None) -> float | None:
        """The batch size that the next release will be recorded with.

        Args:
          recorded: what the ledger holds now, if it was read already.

        Returns:
          L, as given or taken from the first batch; more, if batches turned out to be larger; or
          `None` if L is not given and no batch has been seen.
        """
        size = self.sizes.expected or self.sizes.first
        recorded = self.ledger.read() if recorded is None else recorded
        return recorded.size_that_counts(size) if size else None

    def drop_parts(self) -> None:
        """Forgets the parts of an incomplete batch."""
        if self.accumulator is not None:
            self.accumulator.drop()
        if isinstance(self.generator, CorrelatedNoise):
            self.generator.forget_parts()
        self.seen.drop_parts()

    @property
    def complete(self) -> tf.Tensor | None:
        """Whether this thread's last `release` completed a batch: a bool tensor in its graph."""
        return self._complete.get(threading.get_ident())

    def released_gradients(self) -> tf.Tensor:
        """Whether this thread's last `release` released gradients; a bool scalar.

        It did not if the batch is incomplete, or if the release belonged to the histograms.

        Raises:
          RuntimeError: before the first `release` of this thread.
        """
        complete = self.complete
        if complete is None:
            raise RuntimeError("Nothing was released in this graph.")
        if self.histograms is None:
            return complete
        return complete & ~self.histograms.released()

    def is_measuring(self) -> tf.Tensor:
        """Whether this step's batch measures, and so must change no weights; a bool scalar."""
        if self.histograms is None:
            return tf.constant(False)
        return self.histograms.released() | self.histograms.are_open()

    def relative_noise(self) -> tf.Tensor:
        """The noise in a released mean in units of C, σ/L; float64."""
        sigma, expected = self.sigma(), self.sizes.divisor()
        return self._gradient_noise(sigma, expected) / (expected / self.sizes.per_group())

    def has_only_measured(self) -> bool:
        """Whether no gradients were released so far, but histograms; or nothing at all."""
        if self.histograms is None:
            return False
        return bool(self.is_measuring() & self.histograms.are_the_first())

    def batches_to_measure(self) -> tf.Tensor:
        """W, the number of batches that `histograms` take; float64.

        Raises:
          RuntimeError: without histograms.
        """
        if self.histograms is None:
            raise RuntimeError("This mechanism has no histograms.")
        sigma, expected = self.sigma(), self.sizes.divisor()
        return self.histograms.batches_needed(sigma, expected / self.sizes.per_group())

    def noise_stddev(self) -> tf.Tensor:
        """The standard deviation of the noise in the last released mean, σC/L; float32."""
        return tf.cast(self.relative_noise() * self.clip_norm.of_last_release(), tf.float32)


class _Arrived(NamedTuple):
    """What a batch, or a part of one, shows of itself; see `GaussianMechanism.release`.

    Attributes:
      size: how many examples or users it has, padding included, on all replicas; int64 scalar.
      has_public_size: whether that is public even if the expected size is given.
      number: of the batch, or `None`.
      order: which step it was drawn for, or `None`.
    """

    size: tf.Tensor
    has_public_size: bool | tf.Tensor
    number: Number | None
    order: Order | None


class _Recorded(NamedTuple):
    """What the noise of a release needs to know, as it was when the ledger recorded it.

    Attributes:
      ledger: available when the ledger is written.
      per_group: how many examples are clipped together.
      expected: L, in examples or users.
      sigma: σ.
      correlated: the noise of a strategy, for each sum; or nothing.
    """

    ledger: tf.Tensor
    per_group: tf.Tensor
    expected: tf.Tensor
    sigma: tf.Tensor
    correlated: list[tf.Tensor]

    @property
    def groups(self) -> tf.Tensor:
        """How many clipped gradients L amounts to."""
        return self.expected / self.per_group

    def flat(self) -> list[tf.Tensor]:
        return [*self[:4], *self.correlated]

    @classmethod
    def of(cls, flat: Sequence[tf.Tensor]) -> _Recorded:
        """Undoes `flat`."""
        ledger, per_group, expected, sigma, *correlated = flat
        return cls(ledger, per_group, expected, sigma, correlated)


def _checked_groups(
    num_microbatches: int | None, examples_per_user: int | None
) -> tuple[int | None, int | None]:
    """The two arguments by which rows form groups, of which at most one may be given."""
    if num_microbatches is not None:
        num_microbatches = checks.integer("num_microbatches", num_microbatches, 1)
    if examples_per_user is not None:
        examples_per_user = checks.integer("examples_per_user", examples_per_user, 1)
        if num_microbatches is not None:
            raise ValueError(
                "`num_microbatches` cannot be combined with `examples_per_user`: a user's rows "
                f"already form one group. Received: num_microbatches={num_microbatches!r}, "
                f"examples_per_user={examples_per_user!r}"
            )
    return num_microbatches, examples_per_user


def _generator(
    secure: bool, seed: int | None, add_variable: Callable, strategy: NoiseStrategy, in_parts: bool
) -> GaussianNoise | SecureNoise | CorrelatedNoise:
    if seed is not None:
        seed = checks.integer("seed", seed, 0)
        if secure:
            raise ValueError(
                "Secure noise cannot be repeated, so it takes no `seed`. Received: "
                f"secure_noise=True, seed={seed!r}"
            )
        if seed >= 2**63:
            raise ValueError(f"`seed` must be below 2**63. Received: seed={seed!r}")
    if strategy.is_independent:
        return SecureNoise(add_variable) if secure else GaussianNoise(add_variable, seed)
    if secure:
        raise ValueError(
            "Secure noise must be independent: otherwise the noise of earlier steps would have to "
            f"be kept on its grid. Received: secure_noise=True, noise={strategy!r}"
        )
    return CorrelatedNoise(add_variable, strategy, seed, in_parts=in_parts)
