"""The ledger: how many noisy gradients were released, and with which parameters.

It keeps a record (`releases`), what its numbers mean (`terms`), and what shows that it was set back
(`watermark`) in variables, which each release changes in the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Callable

import dp_accounting
import numpy as np
import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.variables import local_copies, value_of
from tf_adaptive_dp.accounting.noise_strategies import IndependentNoise, NoiseStrategy
from tf_adaptive_dp.accounting.releases import (
    MAX_SEGMENTS,
    BatchChecks,
    Contents,
    Segment,
    checks_after,
    segment_for,
)
from tf_adaptive_dp.accounting.terms import (
    Terms,
    checked_events,
    digest,
    gaussian_events,
    missing_events,
)
from tf_adaptive_dp.accounting.watermark import AT_THE_START, Watermark, watermark_after

__all__ = ["Ledger", "has_ledger", "is_chosen_by_search", "ledger_of", "wrong_size"]


class Ledger:
    """Counts the releases of an optimizer inside the graph, in variables that are saved.

    A release with other parameters than the previous one opens a new segment.

    Guarantee: every release is counted, with at most the noise multiplier that was used and at
    least the expected batch size that was declared. If that is right, an ε computed from the ledger
    is never too small. If the batches turn out larger beyond doubt, the ledger counts with their
    size from then on (see `GaussianMechanism`). Both numbers are exact for the first
    `MAX_SEGMENTS` segments. Later segments are merged into the last one, which keeps the
    smallest noise multiplier and the largest batch size. `checks` record repeated batches, which ε
    counts without amplification.

    `terms` are saved, too. After loading a state whose releases had another unit or noise strategy,
    or other events that are not known here, `noise`, `examples_per_user` and `other_events` raise
    an error until that is settled. If variables are set back to a state that lacks releases of this
    process, `noise` and `examples_per_user` do. `segments`, `checks` and `num_releases` can always
    be read, since callbacks need them, and so does whoever settles it with `restore`.

    Attributes:
      restorations: how often `restore` replaced the record; not saved.
      batches: what this process knows about the batches of its releases, for a ledger that takes
        these over; the `GaussianMechanism` sets it.
      statistics: the events of released statistics behind its gradients, by their numbers, as far
        as this process knows; see `normalization.payment`.
    """

    MAX_SEGMENTS = MAX_SEGMENTS
    MAX_SAVED_EVENTS = 16

    def __init__(
        self,
        add_variable: Callable[..., tf.Variable],
        noise: NoiseStrategy | None = None,
        examples_per_user: int | None = None,
    ):
        """Creates the ledger's variables.

        Args:
          add_variable: creates a variable that is saved with the optimizer, like
            `tf.keras.optimizers.Optimizer.add_variable`.
          noise: how the noise of a release depends on that of earlier ones; `None` if it does
            not.
          examples_per_user: see the property.
        """
        self._noise = IndependentNoise() if noise is None else noise
        self._examples_per_user = examples_per_user
        self._parameters = add_variable(
            [self.MAX_SEGMENTS, 2], dtype=tf.float64, name="ledger_parameters"
        )
        self._counts = add_variable([self.MAX_SEGMENTS], dtype=tf.int64, name="ledger_counts")
        self._checks = add_variable(
            [self.MAX_SEGMENTS, len(BatchChecks._fields)], dtype=tf.float64, name="ledger_checks"
        )
        self._terms = add_variable([len(Terms._fields)], dtype=tf.int64, name="ledger_terms")
        # The noise multipliers of the `other_events` that are releases of the Gaussian mechanism.
        self._events = add_variable(
            [self.MAX_SAVED_EVENTS], dtype=tf.float64, name="ledger_other_events"
        )
        self._fewest_units = add_variable([], dtype=tf.int64, name="ledger_fewest_units")
        with tf.init_scope():
            # Not saved: see `Watermark`.
            self._watermark = tf.Variable(AT_THE_START, dtype=tf.float64, trainable=False)
        self.restorations = 0
        self.batches: Any = None
        self.statistics: dict[int, dp_accounting.DpEvent] = {}
        self._fewest_noted: int | None = None  # in this process, whatever was loaded since
        self._chosen_by_search = False
        self._other_events: tuple[dp_accounting.DpEvent, ...] = ()
        with tf.init_scope():
            self._terms.assign(self.terms)

    @property
    def noise(self) -> NoiseStrategy:
        """How the noise of a release depends on that of earlier ones: ε depends on it.

        Raises:
          ValueError: see `require_own_terms` and `require_nothing_lost`.
        """
        self.require_own_terms()
        self.require_nothing_lost()
        return self._noise

    @property
    def examples_per_user(self) -> int | None:
        """`None` if the unit of privacy is an example.

        A number means that the unit is a user with at most that many examples in a batch; batch
        sizes then count users.

        Raises:
          ValueError: see `require_own_terms` and `require_nothing_lost`.
        """
        self.require_own_terms()
        self.require_nothing_lost()
        return self._examples_per_user

    @property
    def other_events(self) -> tuple[dp_accounting.DpEvent, ...]:
        """`dp_accounting.DpEvent`s spent besides the gradients, such as for side information.

        Releases of the Gaussian mechanism are saved with the ledger and restored, up to
        `MAX_SAVED_EVENTS` of them. For other events only a digest is saved: set them before you
        load a state that has them.

        Raises:
          ValueError: see `require_own_terms`.
        """
        self.require_own_terms()
        return self._other_events

    @other_events.setter
    def other_events(self, events: Iterable[dp_accounting.DpEvent]) -> None:
        events = self._other_events = checked_events(events)
        saved = [e.noise_multiplier for e in events if type(e) is dp_accounting.GaussianDpEvent]
        saved = saved[: self.MAX_SAVED_EVENTS]
        with tf.init_scope():
            self._events.assign(saved + [0.0] * (self.MAX_SAVED_EVENTS - len(saved)))
            loaded = self._loaded_terms()
            # Whether unit and noise of a state that was loaded fit is another question.
            self._terms.assign(Terms(*loaded[:2], *self._own_terms(loaded)[2:]))

    @property
    def chosen_by_search(self) -> bool:
        """Whether a search of hyperparameters chose the model whose releases are counted.

        The ledger then has the releases of one trial, and of what it was trained further, but not
        those of the other trials. So its ε does not bound what the model has cost, and the privacy
        statement says so. `HonestTuner.load_model` sets this, and so does `fit` in a trial of
        KerasTuner's other tuners. It is saved with the ledger, and a state that was loaded can only
        add it. Set it to `False` if the search was on other data than the training that is counted
        here.
        """
        return bool(self.terms.chosen_by_search)

    @chosen_by_search.setter
    def chosen_by_search(self, chosen: bool) -> None:
        self._chosen_by_search = checks.boolean("chosen_by_search", chosen)
        with tf.init_scope():  # whether the other terms fit is another question
            terms = self._loaded_terms()._replace(chosen_by_search=int(chosen))
            for copy in local_copies(self._terms):  # a replica that traces a step may set it, too
                copy.assign(terms)

    @property
    def fewest_units(self) -> int | None:
        """The smallest number of examples, or users, that the releases were drawn from.

        It is the smallest that a callback was given for them, or that `fit` had, and `None` if
        neither is known. Computing ε for a larger number is an error: it would be too small for
        examples that could be in all releases. Set it if a callback was given a wrong number, or if
        each pass over shuffled data was fed in parts, with a `fit` of one epoch for each; `None`
        trusts whoever asks.
        """
        with tf.init_scope():
            return int(value_of(local_copies(self._fewest_units)[0])) or None

    @fewest_units.setter
    def fewest_units(self, number: int | None) -> None:
        self._fewest_noted = number
        number = 0 if number is None else checks.integer("fewest_units", number, 1)
        with tf.init_scope():
            self._fewest_units.assign(number)

    def note_units(self, number: int) -> None:
        """Records the number of examples, or users, that the next releases are drawn from."""
        known = self.fewest_units if self.num_releases else None
        self.fewest_units = number if known is None else min(number, known)

    def lower_units(self, other: int | None) -> None:
        """Takes over the number of examples, or users, of another record if it is smaller."""
        known = [n for n in (self.fewest_units, other) if n is not None]
        self.fewest_units = min(known, default=None)

    @property
    def terms(self) -> Terms:
        """What the numbers of this ledger mean, whatever was loaded."""
        return self._own_terms(self._loaded_terms())

    def _own_terms(self, loaded: Terms) -> Terms:
        """`terms`; all that a state which was loaded can change in them is to add the mark."""
        self._chosen_by_search |= bool(loaded.chosen_by_search)
        return Terms.of(
            self._examples_per_user, self._noise, self._other_events, self._chosen_by_search
        )

    def _loaded_terms(self) -> Terms:
        with tf.init_scope():
            return Terms(*value_of(self._terms).tolist())

    @property
    def num_lost(self) -> int:
        """How many releases that this process recorded are missing, because it was set back."""
        return self.num_lost_in(self.read())

    def num_lost_in(self, recorded: Contents) -> int:
        """`num_lost` for a caller that has read the ledger already, with `read`."""
        with tf.init_scope():
            return self._read_watermark().num_lost(recorded.num_releases)

    @property
    def num_recorded_here(self) -> int:
        """How many releases this process recorded, whatever was loaded or restored since."""
        with tf.init_scope():
            return int(self._read_watermark().recorded)

    def _read_watermark(self) -> Watermark:
        return Watermark(*value_of(local_copies(self._watermark)[0]).tolist())

    def require_nothing_lost(self, recorded: Contents | None = None) -> None:
        """Raises if the ledger was set back and now lacks releases that this process recorded.

        Args:
          recorded: what the ledger holds now, if it was read already.

        Raises:
          NotPrivateError: until `restore` says what counts.
        """
        with tf.init_scope():
            released = self.num_releases if recorded is None else recorded.num_releases
            self._read_watermark().require_nothing_lost(released)

    def require_own_terms(self) -> None:
        """Takes over the events of a state that was loaded; raises if the state does not fit.

        If one set of events contains the other, the larger one counts from then on. So a new
        optimizer takes over the events that were saved.

        Raises:
          ValueError: if the loaded releases had another unit or noise strategy, or if neither their
            `other_events` nor those of the ledger contain the others. Setting `other_events`
            settles the latter.
        """
        with tf.init_scope():
            loaded = self._loaded_terms()
            own = self._own_terms(loaded)
            if loaded == own:
                return
            self._require_unit_and_noise(loaded)
            if loaded.other_events == own.other_events:
                self._terms.assign(own)  # which has the mark that the state lacks
                return
            of_state = gaussian_events(value_of(self._events).tolist())
        known = digest(of_state) == loaded.other_events
        more = missing_events(of_state, self._other_events)
        if not known or (more and missing_events(self._other_events, of_state)):
            raise ValueError(
                "The loaded state records releases that `ledger.other_events` does not list. Set "
                "`optimizer.ledger.other_events` to everything besides the gradients that was "
                "released about the examples of this training, before the state was saved and "
                "since. "
                f"Received: other_events={self._other_events!r}, and with the state "
                + (f"{of_state!r}" if known else "unknown ones")
            )
        self.other_events = of_state if more else self._other_events

    def _require_unit_and_noise(self, loaded: Terms) -> None:
        if loaded.noise != self.terms.noise:
            raise ValueError(
                "The state that was loaded belongs to an optimizer with another `noise`. "
                f"Create the optimizer as it was then. Received: noise={self._noise!r}"
            )
        if loaded.examples_per_user != self.terms.examples_per_user:
            raise ValueError(
                "The state that was loaded belongs to an optimizer with another unit of privacy: "
                f"examples_per_user={loaded.examples_per_user or None}. Create the optimizer as it "
                f"was then. Received: examples_per_user={self._examples_per_user!r}"
            )

    def __repr__(self) -> str:
        with tf.init_scope():  # while a step is being traced, too
            others = f", other_events={self._other_events!r}" if self._other_events else ""
            return f"<Ledger segments={self.segments}{others}>"

    def record(
        self,
        noise_multiplier: tf.Tensor,
        batch_size: tf.Tensor,
        *,
        checked: tf.Tensor | bool = False,
        distance: tf.Tensor | int = 0,
        size_seen: tf.Tensor | float = 0.0,
    ) -> tf.Tensor:
        """Counts one release, inside a graph or eagerly.

        Threads take turns, see `mechanism.turns`.

        Args:
          noise_multiplier: scalar, see `Segment`.
          batch_size: scalar, see `Segment`.
          checked: whether its batch was identified, as new or as repeated.
          distance: how many releases ago the batch was released before; 0 if it was not.
          size_seen: number of rows of the batch if they exceed what `batch_size` allows, or 0. From
            then on the ledger counts with this size, as long as `batch_size` does not change.

        Returns:
          [MAX_SEGMENTS], the counts, as a dependency for whatever must wait for the count.
        """
        parameters, checks_before = self._parameters.read_value(), self._checks.read_value()
        counts, declared = self._counts.read_value(), tf.cast(batch_size, tf.float64)
        seen = tf.maximum(declared, tf.cast(size_seen, tf.float64))
        noise_multiplier = tf.cast(noise_multiplier, tf.float64)
        index, row, seen = segment_for(
            noise_multiplier, declared, seen, parameters, checks_before, counts
        )
        here = tf.equal(tf.range(self.MAX_SEGMENTS, dtype=tf.int64), index)
        checks_now = checks_after(
            *(tf.gather(checks_before, index), checked, distance),
            tf.where(seen > declared, declared, tf.zeros_like(declared)),
        )
        rows = here[:, tf.newaxis]
        parameters_now = tf.where(rows, row, parameters)
        watermark = watermark_after(self._watermark.read_value(), counts, parameters_now)
        written = [
            self._parameters.assign(parameters_now),
            self._checks.assign(tf.where(rows, checks_now, checks_before)),
            self._watermark.assign(watermark),
        ]
        with tf.control_dependencies([tf.convert_to_tensor(variable) for variable in written]):
            return tf.convert_to_tensor(self._counts.assign_add(tf.cast(here, tf.int64)))

    def count(self) -> tf.Tensor:
        """The number of releases so far, an int64 scalar, in a graph too."""
        return tf.reduce_sum(self._counts.read_value())

    def was_created_in(self, strategy: tf.distribute.Strategy) -> bool:
        """Whether each replica of a strategy has a ledger of its own; they share others.

        Args:
          strategy: that of the step.
        """
        return strategy.extended.variable_created_in_scope(self._counts)

    @property
    def segments(self) -> list[Segment]:
        """The releases so far, oldest first."""
        return _segments(value_of(self._parameters), value_of(self._counts))

    @property
    def checks(self) -> list[BatchChecks]:
        """What is known about the batches of each segment."""
        return _checks(value_of(self._checks), value_of(self._counts))

    def read(self) -> Contents:
        """Reads `segments` and `checks` together, for callbacks that ask in each step."""
        counts = value_of(self._counts)
        parameters, checks_of = value_of(self._parameters), value_of(self._checks)
        return Contents(_segments(parameters, counts), _checks(checks_of, counts))

    def restore(
        self, segments: Sequence[Sequence[float]], checks_of: Sequence[Sequence[Any]] = ()
    ) -> None:
        """Replaces the record.

        Args:
          segments: a value of the property `segments`.
          checks_of: a value of the property `checks`. Nothing is known about segments without an
            entry.

        Raises:
          TypeError, ValueError: if there are too many segments or a value is invalid. Nothing is
            changed then.
        """
        if len(segments) > self.MAX_SEGMENTS:
            raise ValueError(
                f"`segments` must be at most {self.MAX_SEGMENTS}. Received: {len(segments)}"
            )
        parameters = np.zeros(self._parameters.shape)
        counts = np.zeros(self._counts.shape, np.int64)
        for row, (noise_multiplier, batch_size, count) in enumerate(segments):
            parameters[row, 0] = checks.number("noise_multiplier", noise_multiplier, 0)
            parameters[row, 1] = checks.number("batch_size", batch_size, 0, strict=True)
            counts[row] = checks.integer("num_releases", count, 0)
        known = np.zeros(self._checks.shape)
        for row, values in enumerate(checks_of[: len(segments)]):
            known[row] = [checks.number("checks", value, 0) for value in BatchChecks(*values)]
        self._parameters.assign(parameters)
        self._counts.assign(counts)
        self._checks.assign(known)
        if counts.any():  # a state that was loaded may know of fewer releases
            self.lower_units(self._fewest_noted)
        recorded = float(self.num_recorded_here)
        self._watermark.assign(
            AT_THE_START._replace(following=float(counts.sum()), recorded=recorded)
        )
        self.restorations += 1

    @classmethod
    def extended(cls, segments: Sequence[Segment], more: Segment) -> list[Segment]:
        """The segments after `more.num_releases` calls of `record`, as a plain list.

        Guarantee: that of the class.

        Args:
          segments: a value of the property `segments`.
          more: the releases to add.
        """
        *before, last = segments or [more._replace(num_releases=0)]
        if last[:2] != more[:2] and len(segments) < cls.MAX_SEGMENTS:
            return [*segments, more]
        return [*before, last.merged(more)]

    @classmethod
    def extends(cls, segments: Sequence[Segment], earlier: Sequence[Segment]) -> bool:
        """Whether `earlier` followed by further releases can result in `segments`.

        Args:
          segments: a value of the property `segments`.
          earlier: a value at an earlier time.
        """
        if not earlier or len(earlier) > len(segments):
            return not earlier
        *before, last = earlier
        now = segments[len(before)]
        same = last[:2] == now[:2] and last.num_releases <= now.num_releases
        merged = (
            len(earlier) == cls.MAX_SEGMENTS
            and last.noise_multiplier >= now.noise_multiplier
            and last.batch_size <= now.batch_size
            and last.num_releases < now.num_releases
        )
        return before == list(segments[: len(before)]) and (same or merged)

    @property
    def num_releases(self) -> int:
        """The number of noisy gradients released so far."""
        return int(value_of(self._counts).sum())


def _segments(parameters: np.ndarray, counts: np.ndarray) -> list[Segment]:
    return [
        Segment(noise_multiplier, batch_size, count)
        for (noise_multiplier, batch_size), count in zip(parameters.tolist(), counts.tolist())
        if count
    ]


def _checks(values: np.ndarray, counts: np.ndarray) -> list[BatchChecks]:
    return [
        BatchChecks(int(checked), int(repeated), int(nearest), declared)
        for (checked, repeated, nearest, declared), count in zip(values.tolist(), counts.tolist())
        if count
    ]


def has_ledger(optimizer: Any) -> bool:
    """Whether an optimizer, or a class of them, counts what it releases: it is one of ours."""
    return hasattr(optimizer, "ledger")


def ledger_of(ledger: Any) -> Any:
    """The ledger of an optimizer; what has no attribute `ledger` is taken for a ledger itself."""
    return getattr(ledger, "ledger", ledger)


def is_chosen_by_search(ledger: Any) -> bool:
    """Whether a ledger, or that of an optimizer, lacks the search that chose its model.

    Args:
      ledger: a ledger, or whatever stands for one; see `Ledger.chosen_by_search`.
    """
    return getattr(ledger_of(ledger), "chosen_by_search", False)


def wrong_size(declared: float, seen: float) -> str:
    """The warning about batches that are larger than expected."""
    return (
        f"The batches hold more examples than the expected batch size of {declared:g}, so that "
        f"ε would be too small: it is computed for {seen:g} rows. Pass the true "
        "`expected_batch_size` to the optimizer; the noisy sum is divided by it, too. Received: "
        f"an expected batch size of {declared:g}, batches of {seen:g} rows"
    )
