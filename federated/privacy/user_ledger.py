"""Counts the released rounds of a run."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from typing import Any

import dp_accounting
import numpy as np
import tensorflow_federated as tff
import tree

from federated.privacy.side_information import SideInformation
from federated.privacy.user_level import BANDED_ARGUMENTS, UserLevelPrivacy
from tf_adaptive_dp import checks
from tf_adaptive_dp.accounting.ledger import Ledger
from tf_adaptive_dp.accounting.releases import Segment
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.side_information import provenance as provenances

# A quotient of float32 numbers deviates from the requested noise multiplier by at most this much.
# A larger deviation means that something else was released. Our own queries are never below it.
_ROUNDING = 1e-6
_MOST_ABOVE = 1e-4


class UserLedger:
    """Counts the rounds of a run, for the ε of one user.

    Guarantee: every recorded round, finished or lost, is counted with a noise multiplier of at most
    the one used, so the ε computed from the ledger is not too small. A round that is run again
    counts again. Under the tree mechanism, a sequence of rounds that was abandoned for an earlier
    state counts as separate trees from the beginning of the pass, and each lost round counts as one
    more tree, since running it again draws new noise for its nodes. With banded noise such a
    sequence counts as further consecutive rows of noise (`sequences`), and a lost round as one row.

    Args:
      privacy: the privacy that the aggregator was made from.
      side_information: that of the client optimizer or of the process, if any
        (`optimizer.side_information`): any object with `provenance`, see `SideInformation.of`. If
        it was released from private data, that event is part of ε.

    Attributes:
      counts_rounds: true; `tf_adaptive_dp.accounting` refuses such a ledger, whose unit is not one
        example.
      privacy: the privacy.
      side_information: the record of the side information, or `None`.
      sampling: how the cohorts were drawn, as `federated.train` records it
        (`federated.privacy.client_sampling.described`). No ε is computed for another sampling.
        `None` if it is unknown; then the ledger trusts the caller.
      rounds_drawn: how many of the rounds have cohorts that `federated.train` drew by `sampling`.
        Statements say of the others that nobody verified how they were drawn.
      order: the order of the clients in the last run, as `federated.train` records it
        (`ClientSampler.order`), if its cohorts were drawn in passes. Only a run with this order may
        begin in the middle of a pass.
      clients_may_drop_out: whether drawn clients could drop out of rounds, as `federated.train`
        records it. Each counts as one that sends zeros, so ε is that of the drawn cohorts.
      releases_unknown: whether rounds were run by a process of which `federated.train` could not
        read what else it releases, since its `next` is no computation of TFF. Statements say so.

    Raises:
      TypeError, NotPrivateError: if an argument is invalid.

    >>> ledger = UserLedger(UserLevelPrivacy(1.0, 100, 3400))
    >>> ledger.record_lost(2)
    >>> ledger.segments
    [Segment(noise_multiplier=1.0, batch_size=100.0, num_releases=2)]
    """

    counts_rounds = True

    def __init__(self, privacy: UserLevelPrivacy, side_information: Any = None):
        self.privacy = checks.instance("privacy", privacy, UserLevelPrivacy)
        self.side_information = SideInformation.of(side_information)
        self.sampling: str | None = None
        self.rounds_drawn = 0
        self.order: str | None = None
        self.clients_may_drop_out = False
        self.releases_unknown = False
        self._segments: list[Segment] = []
        self._trees: collections.Counter[int] = collections.Counter()
        self._tree_rounds = 0
        self._unknown = 0  # rounds with an unknown release
        # Banded noise: lost rounds, and consecutive rounds that an earlier state replaced.
        self._sequences: collections.Counter[int] = collections.Counter()
        # What the next round may continue: how many rounds the last recorded state results from,
        # and how many of them are in its last tree.
        self._behind = 0
        self._in_tree = 0

    @property
    def is_tree(self) -> bool:
        """Whether this is the tree mechanism."""
        return self.privacy.mechanism == "tree"

    @property
    def is_banded(self) -> bool:
        """Whether the noise is banded."""
        return self.privacy.mechanism == "banded"

    @property
    def segments(self) -> list[Segment]:
        """Consecutive releases of the Gaussian mechanism with equal parameters."""
        return list(self._segments)

    @property
    def trees(self) -> dict[int, int]:
        """The number of trees by their number of rounds; none under the Gaussian mechanism."""
        trees = self._trees + collections.Counter({self._in_tree: 1} if self._in_tree else {})
        return dict(sorted(trees.items()))

    @property
    def sequences(self) -> dict[int, int]:
        """The number of sequences of rounds with banded noise by their length; else none."""
        current = {self._behind: 1} if self.is_banded and self._behind else {}
        return dict(sorted((self._sequences + collections.Counter(current)).items()))

    @property
    def banded_sensitivity(self) -> float:
        """By how much one user moves all `sequences` together, at a clip of 1; 0 without any.

        Each sequence has fresh noise in each of its rows, so the squares of their sensitivities
        add up. The sensitivity of m consecutive rows from the middle of a run is at most that of
        its first m rows: the squares of a client's coefficients fall from one participation to the
        next.
        """
        squares = (count * self.privacy.sensitivity(m) ** 2 for m, count in self.sequences.items())
        return math.sqrt(sum(squares))

    @property
    def other_events(self) -> tuple[dp_accounting.DpEvent, ...]:
        """All other spending: the release of side information, trees, and banded noise."""
        return self.non_tree_events + self.tree_events + self.banded_events

    @property
    def non_tree_events(self) -> tuple[dp_accounting.DpEvent, ...]:
        """The release of side information unless it is public, and unknown rounds."""
        unknown = (dp_accounting.NonPrivateDpEvent(),) if self._unknown else ()
        information = self.side_information
        if information is None:
            return unknown
        return provenances.events(information.provenance) + unknown

    @property
    def banded_events(self) -> tuple[dp_accounting.DpEvent, ...]:
        """All rounds with banded noise, as one Gaussian mechanism."""
        if not self.sequences:
            return ()
        z = float(self.privacy.noise_multiplier) / self.banded_sensitivity
        return (dp_accounting.GaussianDpEvent(z),)

    @property
    def tree_events(self) -> tuple[dp_accounting.DpEvent, ...]:
        """The trees, for accountants of `NeighboringRelation.REPLACE_SPECIAL`."""
        z = float(self.privacy.noise_multiplier)
        return tuple(
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.SingleEpochTreeAggregationDpEvent(z, steps), count
            )
            for steps, count in self.trees.items()
        )

    @property
    def num_releases(self) -> int:
        """The number of counted rounds, lost ones included."""
        gaussian = sum(segment.num_releases for segment in self._segments)
        banded = sum(rounds * count for rounds, count in self.sequences.items())
        return gaussian + self._tree_rounds + banded + self._unknown

    def record(self, state: Any) -> None:
        """Counts the round that a state results from.

        A state shows what its aggregator released, but hardly what else the process took from its
        clients. `federated.privacy.process_releases.check_releases(process)` reads that from the
        process, as `federated.train` does before the first round.

        Args:
          state: the state that a round of a process of `federated.training.processes`, or of its
            aggregator, returned.

        Raises:
          TypeError: if the state has no differentially private aggregator.
          ValueError: if it is an initial state, or if the release contradicts `privacy`. The round
            is then counted as what it was; if that is unknown, ε becomes infinite.
          NotPrivateError: if the state holds gradients of clients, as that of Mime does; then ε
            becomes infinite.
        """
        exact = _exact_gradients(state)
        if exact is not None:
            self._unknown += 1
            raise exact
        state = self.aggregator_of(state)
        event = tff.aggregators.differential_privacy.extract_dp_event_from_state(state)
        if self.is_tree:
            self._record_tree(event, _numerator(state))
        elif self.is_banded:
            self._record_banded(event, _numerator(state))
        else:
            self._record_gaussian(event)
        found = self._other_divisor(state.query_state)
        if found is not None:
            raise self._contradiction(found)

    def check_noise(self, state: Any) -> None:
        """Checks that the next round of a state has the noise that `privacy` says.

        `record` checks what a round released, but only after it was run.

        Args:
          state: a state of the process, or of its aggregator, such as the initial one.

        Raises:
          TypeError: if the state has no differentially private aggregator.
          ValueError: if it contradicts `privacy`.
          NotPrivateError: if the process keeps gradients of clients, as Mime does.
        """
        exact = _exact_gradients(state)
        if exact is not None:
            raise exact
        query_state = getattr(self.aggregator_of(state), "query_state", None)
        numerator = getattr(query_state, "numerator_state", None)
        found = None
        if self.is_tree:
            found = self._other_tree(numerator)
        elif self.is_banded:
            found = self._other_banded(numerator)
        elif hasattr(numerator, "period") or hasattr(numerator, "coefficients"):
            found = "noise that is correlated over rounds"
        else:
            noise_multiplier = _next_noise_multiplier(numerator)
            # That of a query which is not known here shows in its first round.
            if noise_multiplier is not None and not self._is_said(noise_multiplier):
                found = f"noise multiplier {noise_multiplier:.7g}"
        found = found or self._other_divisor(query_state)
        if found is not None:
            raise self._contradiction(found)

    def aggregator_of(self, state: Any) -> Any:
        """The part of a process's state that describes the release.

        Raises:
          TypeError: if the state has no differentially private aggregator, or one that is wrapped
            in another aggregator.
        """
        state = getattr(state, "aggregator", state)
        if not hasattr(state, "dp_event"):
            raise TypeError(
                "`state` must be that of a learning process whose aggregator is made by "
                "`UserLevelPrivacy`, with no other aggregator around it. "
                f"Received: state of type {type(state).__name__}"
            )
        return state

    def record_lost(self, rounds: int, state: Any = None) -> None:
        """Counts rounds that began but whose result is unknown, as if it had been released.

        Under the Gaussian mechanism the run must continue with the next cohort: a cohort that is
        used twice is not drawn independently, and ε would not hold. Under the tree mechanism and
        with banded noise the run continues from the remaining state, with the cohort of that
        state's next round.

        Args:
          rounds: the number of lost rounds, at least 0.
          state: the state that they began with, of the process or of its aggregator. Under the tree
            mechanism a lost round costs the nodes above one leaf of a tree. That is the tree of the
            rounds up to this state and the lost ones, or of a whole pass if `state` is left out.

        Raises:
          TypeError: if the state has no differentially private aggregator.
          ValueError: if it contradicts `privacy`. Nothing is counted then.
        """
        rounds = checks.integer("rounds", rounds, 0)
        if not rounds:
            return
        if self.is_banded:
            # Whether they were successive or the same one: each is one row.
            self._sequences[1] += rounds
            return
        if not self.is_tree:
            self._add(self.privacy.noise_multiplier, rounds)
            return
        # They may have been successive rounds, or repetitions of one round. Each finishes at most
        # all nodes above one leaf, of a tree of this many rounds:
        most = period = self.privacy.rounds_per_pass
        if state is not None:
            self.check_noise(state)
            most = int(_numerator(self.aggregator_of(state)).rounds) % period + rounds
        self._trees[min(most, period)] += rounds
        self._tree_rounds += rounds

    # What a state says if it contradicts `privacy`; `None` if it does not.

    def _other_divisor(self, query_state: Any) -> str | None:
        divisor = float(getattr(query_state, "denominator", math.nan))
        same = math.isclose(divisor, self.privacy.clients_per_round, rel_tol=_ROUNDING)
        return None if same else f"sums divided by {divisor:g}"

    def _other_tree(self, tree: Any) -> str | None:
        if not hasattr(tree, "period"):
            return "no tree"
        period, found = int(tree.period), float(tree.stddev) / float(tree.clip)
        if self._is_said(found) and period == self.privacy.rounds_per_pass:
            return None
        return f"trees of {period} rounds with noise multiplier {found:.7g} at each node"

    def _other_banded(self, banded: Any) -> str | None:
        if not hasattr(banded, "coefficients"):
            return "no banded noise"
        found, strategy = float(banded.stddev) / float(banded.clip), self.privacy.strategy
        stated = np.array(strategy.coefficients if strategy else ())
        used = np.asarray(banded.coefficients, np.float64)
        same = used.shape == stated.shape and np.allclose(used, stated, rtol=_ROUNDING, atol=0)
        if same and self._is_said(found):
            return None
        return (
            f"noise of {len(used)} bands with noise multiplier {found:.7g} and coefficients from "
            f"{used[0]:.7g}"
        )

    def _is_said(self, noise_multiplier: float) -> bool:
        said = float(self.privacy.noise_multiplier)
        return said * (1 - _ROUNDING) <= noise_multiplier <= said * (1 + _MOST_ABOVE)

    def _add(self, noise_multiplier: float, rounds: int) -> None:
        clients = float(self.privacy.clients_per_round)
        more = Segment(float(noise_multiplier), clients, rounds)
        self._segments = Ledger.extended(self._segments, more)

    def _record_gaussian(self, event: dp_accounting.DpEvent) -> None:
        said, found = float(self.privacy.noise_multiplier), effective_noise_multiplier(event)
        least = said * (1 - _ROUNDING)
        if found >= said:
            self._add(said, 1)
        elif found >= least:  # rounding differs from round to round: no segment for each
            self._add(least, 1)
        elif found >= 0:
            self._add(found, 1)
        else:
            self._unknown += 1
        if not self._is_said(found):
            raise self._contradiction(f"noise multiplier {found:.7g}, of the event {event}")

    def _record_tree(self, event: dp_accounting.DpEvent, tree: Any) -> None:
        if not (isinstance(event, dp_accounting.UnsupportedDpEvent) and hasattr(tree, "rounds")):
            self._unknown += 1
            raise self._contradiction(f"no tree, but the event {event}")
        other = self._other_tree(tree)
        if other is not None:
            self._unknown += 1
            raise self._contradiction(other)
        rounds, period = int(tree.rounds), self.privacy.rounds_per_pass
        if rounds > self._behind + 1:
            self._unknown += 1
            raise self._unrecorded(rounds)
        place = (rounds - 1) % period + 1
        if self._in_tree and (place == 1 or rounds <= self._behind):
            self._trees[self._in_tree] += 1
        self._behind, self._in_tree = rounds, place
        self._tree_rounds += 1

    def _record_banded(self, event: dp_accounting.DpEvent, banded: Any) -> None:
        known = isinstance(event, dp_accounting.UnsupportedDpEvent)
        if not (known and hasattr(banded, "coefficients")):
            self._unknown += 1
            raise self._contradiction(f"no banded noise, but the event {event}")
        other = self._other_banded(banded)
        if other is not None:
            self._unknown += 1
            raise self._contradiction(other)
        rounds = int(banded.rounds)
        if rounds > self._behind + 1:
            self._unknown += 1
            raise self._unrecorded(rounds)
        if rounds <= self._behind:  # those from this one on were given up
            self._sequences[self._behind - rounds + 1] += 1
        self._behind = rounds

    def _unrecorded(self, rounds: int) -> ValueError:
        return ValueError(
            "Rounds were released that this ledger does not know of: record each round's state. "
            f"Received: the state after {rounds} rounds, {self._behind} recorded"
        )

    def _contradiction(self, found: str) -> ValueError:
        return ValueError(
            "The aggregator did not release what `privacy` says. Build process and ledger from the "
            f"same `UserLevelPrivacy`. Received: {found}; privacy={self.privacy!r}"
        )

    def to_dict(self) -> dict:
        """The counts as JSON values."""
        information = self.side_information
        # Only where it is so: runs that were begun before ledgers had these must resume.
        flags = ("clients_may_drop_out", "releases_unknown")
        flagged = {name: True for name in flags if getattr(self, name)}
        order = {} if self.order is None else {"order": self.order}
        as_usual = self.rounds_drawn == self._drawn_by_default()
        drawn = {} if as_usual else {"drawn": self.rounds_drawn}
        banded = {"sequences": [list(item) for item in sorted(self._sequences.items())]}
        # Trees and sequences say nothing of their noise, so ε needs that of the run.
        noise = {} if self.privacy.mechanism == "gaussian" else {"noise": _noise(self.privacy)}
        return (
            flagged
            | order
            | drawn
            | noise
            | (banded if self.is_banded else {})
            | {
                "segments": [list(segment) for segment in self._segments],
                "trees": [list(item) for item in sorted(self._trees.items())],
                "tree_rounds": self._tree_rounds,
                "behind": self._behind,
                "in_tree": self._in_tree,
                "unknown": self._unknown,
                "side_information": information and information.to_plain(),
                "sampling": self.sampling,
                **self._population(),
            }
        )

    def _population(self) -> dict[str, Any]:
        """The population of the cohorts, and their size where segments do not have it."""
        sizes = () if self.privacy.mechanism == "gaussian" else ("clients_per_round",)
        return {name: getattr(self.privacy, name) for name in ("total_clients", *sizes)}

    def _require_same_population(self, plain: Mapping[str, Any]) -> None:
        """Raises ValueError if the restored rounds drew from another number of clients.

        Ledgers of earlier versions do not say how many there were. Of these, only cohorts that are
        larger than the number of clients are refused.
        """
        mine = self._population()
        were = {name: plain.get(name, value) for name, value in mine.items()}
        largest = max((clients for _, clients, _ in plain["segments"]), default=0.0)
        if largest > self.privacy.total_clients:
            were["clients_per_round"] = largest
        if were != mine:
            raise ValueError(
                "`privacy` must have the number of clients of the ledger's rounds, since their ε "
                "depends on the share of the clients that each cohort drew. After clients joined "
                "or left, begin a new ledger; a client of both is protected by the sum of both ε "
                f"and both δ. Received: {mine}, the rounds had {were}"
            )

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], privacy: UserLevelPrivacy) -> UserLedger:
        """Restores a ledger.

        Args:
          plain: the result of `to_dict`.
          privacy: the privacy of that run. Rounds under the Gaussian mechanism keep their own noise
            multipliers.

        Raises:
          TypeError, ValueError, KeyError: if `plain` is not the result of `to_dict`, or belongs to
            another mechanism, to another number of clients, or to trees or banded noise of other
            settings.
        """
        information = checks.instance("plain", plain, Mapping)["side_information"]
        ledger = cls(privacy, information and SideInformation.from_plain(information))
        ledger.sampling = plain["sampling"]
        ledger.order = plain.get("order")
        ledger.clients_may_drop_out = bool(plain.get("clients_may_drop_out"))
        ledger.releases_unknown = bool(plain.get("releases_unknown"))
        holds = {
            "gaussian": plain["segments"],
            "tree": plain["trees"] or plain["in_tree"],
            "banded": "sequences" in plain,
        }
        holds_its_own = holds.pop(privacy.mechanism)
        if any(holds.values()) or (privacy.mechanism == "banded" and not holds_its_own):
            raise ValueError(
                "The ledger belongs to another mechanism. Received: "
                f"mechanism={privacy.mechanism!r}, {dict(plain)}"
            )
        if privacy.mechanism != "gaussian" and plain["noise"] != _noise(privacy):
            raise ValueError(
                "`privacy` must be that of the ledger's rounds: otherwise their ε would be wrong. "
                f"Received: {privacy!r}, the rounds had {plain['noise']}"
            )
        ledger._require_same_population(plain)
        for noise_multiplier, clients, rounds in plain["segments"]:
            segment = Segment(
                checks.number("noise_multiplier", noise_multiplier, 0),
                checks.number("clients_per_round", clients, 0, strict=True),
                checks.integer("rounds", rounds, 1),
            )
            ledger._segments.append(segment)
        for steps, count in plain["trees"]:
            ledger._trees[checks.integer("steps", steps, 1)] = checks.integer("count", count, 1)
        for rounds, count in plain.get("sequences", ()):
            length = checks.integer("rounds", rounds, 1)
            ledger._sequences[length] = checks.integer("count", count, 1)
        ledger._tree_rounds = checks.integer("tree_rounds", plain["tree_rounds"], 0)
        ledger._behind = checks.integer("behind", plain["behind"], 0)
        ledger._in_tree = checks.integer("in_tree", plain["in_tree"], 0)
        ledger._unknown = checks.integer("unknown", plain["unknown"], 0)
        drawn = plain.get("drawn", ledger._drawn_by_default())
        ledger.rounds_drawn = checks.integer("drawn", drawn, 0)
        return ledger

    def _drawn_by_default(self) -> int:
        """The `rounds_drawn` of ledgers that do not say: those of a run, or those kept by hand."""
        return 0 if self.sampling is None else self.num_releases


def _noise(privacy: UserLevelPrivacy) -> dict[str, Any]:
    """What the ε of rounds with trees or banded noise depends on, as JSON values."""
    names = ("noise_multiplier", *(BANDED_ARGUMENTS if privacy.mechanism == "banded" else ()))
    return {name: getattr(privacy, name) for name in names}


def _exact_gradients(state: Any) -> NotPrivateError | None:
    """The error for a state in which the clients' work keeps arrays like those of the model.

    Mime keeps momentum of the clients' exact mean gradients there; other algorithms have only
    numbers there, such as learning rates.
    """
    kept, weights = (getattr(state, n, None) for n in ("client_work", "global_model_weights"))
    shapes = {np.shape(w) for w in getattr(weights, "trainable", ())} - {()}
    found = [s for s in map(np.shape, tree.flatten(kept)) if s in shapes]
    if not found:
        return None
    return NotPrivateError(
        "`state` must be that of a process whose clients send nothing but what the private "
        "aggregator takes. This one keeps gradients of the clients without clipping or noise in "
        "`client_work`, as Mime does, so no ε holds. Use `federated.build_dp_fed_avg`, or an "
        "algorithm of TFF such as `build_unweighted_fed_avg`. Received: arrays of the shapes "
        f"{found} in `client_work`"
    )


def effective_noise_multiplier(event: dp_accounting.DpEvent) -> float:
    """The noise multiplier z of several Gaussian mechanisms on the same cohort, taken as one.

    z = (Σ zᵢ⁻²)^(-1/2): stacked, with each noise scaled to 1, they are one Gaussian mechanism of
    sensitivity (Σ zᵢ⁻²)^(1/2). NaN if an event has any other part.

    >>> two = [dp_accounting.GaussianDpEvent(3.0), dp_accounting.GaussianDpEvent(4.0)]
    >>> round(effective_noise_multiplier(dp_accounting.ComposedDpEvent(two)), 10)
    2.4
    """
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return float(event.noise_multiplier)
    if isinstance(event, dp_accounting.ComposedDpEvent) and event.events:
        parts = [effective_noise_multiplier(part) for part in event.events]
        if 0.0 in parts and not any(map(math.isnan, parts)):
            return 0.0
        return sum(z**-2 for z in parts) ** -0.5
    return math.nan


def _numerator(state: Any) -> Any:
    return getattr(state.query_state, "numerator_state", None)


def _next_noise_multiplier(numerator: Any) -> float | None:
    """The z of a query for independent noise, by its state; `None` if it is another query."""
    parts = [numerator]
    if hasattr(numerator, "quantile_estimator_state"):  # an adaptive clip
        counted = getattr(numerator.quantile_estimator_state, "below_estimate_state", None)
        parts = [getattr(numerator, "sum_state", None), getattr(counted, "numerator_state", None)]
    if not all(hasattr(part, "stddev") and hasattr(part, "l2_norm_clip") for part in parts):
        return None
    events = [dp_accounting.GaussianDpEvent(float(p.stddev) / float(p.l2_norm_clip)) for p in parts]
    return effective_noise_multiplier(dp_accounting.ComposedDpEvent(events))
