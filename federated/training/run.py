"""One run on disk: its state, its ledger, and how both are restored."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
import tree

from federated.privacy import user_epsilon
from federated.privacy.client_sampling import FixedSizeSampling, PoissonSampling, described
from federated.privacy.process_releases import check_releases
from federated.privacy.user_level import BANDED_ARGUMENTS
from federated.runtime.connection import WorkerLostError
from federated.training.dropout import Dropout, Dropping
from federated.training.group_data import (
    nodes_of,
    require_no_shared_files,
    serialized_dataset,
)
from federated.training.run_journal import RunJournal
from federated.training.saved_states import SavedStates, newest
from tf_adaptive_dp.durable import files, journal

_KEY = "sampler_key"  # the name of its file


def _description(state: Any, sampler: Any, ledger: user_epsilon.UserLedger | None) -> dict:
    """What must not change when a run resumes."""
    leaves = []
    for path, leaf in tree.flatten_with_path(state):
        array = np.asarray(leaf)
        leaves.append(f"{'/'.join(map(str, path))}: {array.dtype}{list(array.shape)}")
    privacy = spent = None
    if ledger is not None:
        arguments = dataclasses.asdict(ledger.privacy)
        # Runs that were begun before these existed must resume.
        unset = [name for name in BANDED_ARGUMENTS if arguments.get(name) is None]
        privacy = {name: value for name, value in arguments.items() if name not in unset}
        # What `privacy` has is compared there, and earlier versions wrote it nowhere else.
        spent = {name: v for name, v in ledger.to_dict().items() if name not in privacy}
    return {
        "privacy": privacy,
        "ledger at the beginning": spent,
        "sampling": described(sampler.sampling),
        "clients": len(sampler.client_ids),
        "client ids": hashlib.blake2b("\0".join(sampler.client_ids).encode()).hexdigest(),
        "state": leaves,
    }


def _require_journal(folder: Path) -> None:
    """Raises if a run had a journal, which is written before everything else.

    A key that is left would draw the cohorts of that run once more, and its best state would be
    compared with those of the new run.

    Args:
      folder: the run's folder `secret`.
    """
    path, saved = folder / "journal", newest(folder / "states")
    others = [name for name in (_KEY, "held_out", "best") if (folder / name).exists()]
    if (saved is not None or others) and not journal.has_begun(path):
        left = f"the last saved state is of round {saved}"
        if saved is None:
            left = f"there is {', '.join(others)}"
        raise ValueError(
            "The journal of the run in this directory is gone, so nobody knows how many rounds "
            "were begun. Restore it, or begin a new run in another directory; what this one "
            "released stays spent. Nothing was changed. Received: no entries in "
            f"{str(path)!r}, {left}"
        )


def rounds_before(ledger: user_epsilon.UserLedger | None) -> int:
    """The number of cohorts of the sampling in a ledger.

    Correlated noise starts afresh with each run, and its rounds are not counted here.
    """
    return 0 if ledger is None else sum(s.num_releases for s in ledger.segments)


def check_pass(sampler: Any, ledger: user_epsilon.UserLedger) -> None:
    """Raises ValueError if a new run would abandon the pass that a ledger ends in.

    Guarantee: no client takes part in more than ⌈T / s⌉ of T rounds that all have Gaussian noise,
    with s rounds per pass. Either earlier runs end with whole passes, in each of which a client is
    in one round at most, or the order continues as if all were one run. ε of the tree mechanism and
    of banded noise needs none of this: `UserLedger` counts trees and rows of each run separately.

    Args:
      sampler: the sampler of the new run, with its key.
      ledger: that of the earlier runs.
    """
    before, per_pass = rounds_before(ledger), getattr(sampler, "rounds_per_pass", 1)
    if before % per_pass and (ledger.order is None or ledger.order != sampler.order):
        raise ValueError(
            "`ledger` must end with a whole pass over the clients. A new run begins a new order, "
            "so clients of the unfinished pass would take part again without being counted. "
            "Continue the earlier run in its directory to the end of a pass, or pass its sampler, "
            "`Trained.sampler`, whose key keeps the order. "
            f"Received: {before} rounds in the ledger, {per_pass} rounds per pass"
        )


class Run:
    """A run of `federated.train`; it implements that function's guarantee.

    Attributes:
      process: the learning process.
      sampler: draws the cohorts, with the key of the run.
      privacy: what the users are promised; `None` without a ledger.
      failures_left: how many more rounds may fail.
      folder: the folder of what must stay secret.
      journal: the rounds that were begun and released.
      states: the saved states.
      number: the round that `state` was saved with; 0 for the initial state.
      state: the state of the process.
      finished: the number of rounds that the state results from.
      figures: the figures of the last of these.
      ledger: all rounds that were begun, or `None`.
    """

    def __init__(
        self,
        process: Any,
        sampler: Any,
        directory: str | os.PathLike,
        ledger: user_epsilon.UserLedger | None,
        max_failures: int,
        dropout: Dropout = None,
        on_client_error: str = "raise",
        min_clients: int = 0,
    ):
        self.process, self.failures_left = process, max_failures
        self._min_clients = min_clients
        self._checked_first_graph = False
        self.privacy = None if ledger is None else ledger.privacy
        self._rounds_before = rounds_before(ledger)
        if ledger is not None:
            sampler.checked(ledger.privacy)
        state = process.initialize()
        self._releases_unknown = False
        if ledger is not None:
            ledger.check_noise(state)  # fails now rather than after a round of unknown cost
            self._releases_unknown = not check_releases(process)
        elif any("dp_event" in map(str, path) for path, _ in tree.flatten_with_path(state)):
            warnings.warn(
                "The process adds noise for privacy, but there is no `ledger`: its rounds are not "
                "counted, and figures are shown as if nothing were private.",
                stacklevel=3,
            )
        self.folder = folder = Path(directory) / "secret"
        if ledger is not None and not (folder / _KEY).exists():
            check_pass(sampler.for_new_run(), ledger)  # before anything is written
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        _require_journal(folder)
        self.journal = RunJournal(folder / "journal", _description(state, sampler, ledger))
        try:
            self._require_no_contradiction()
            self.sampler = self._with_kept_key(sampler, folder / _KEY)
            if ledger is not None:  # its cohorts are those of the kept key
                self.sampler.checked(ledger.privacy)
                check_pass(self.sampler, ledger)
            self.states = SavedStates(folder / "states")
            self._restore(state, ledger)
            if self.ledger is not None and self._releases_unknown:
                self.ledger.releases_unknown = True
            self._dropping = Dropping(dropout, on_client_error, self.sampler.key)
            if self.ledger is not None and self._dropping.happens:
                self.ledger.clients_may_drop_out = True
        except BaseException:
            self.journal.close()
            raise

    @property
    def rounds_can_be_repeated(self) -> bool:
        """Whether a lost round is run again with the same clients.

        With the tree mechanism clients must come in the order of the leaves in the state, so the
        same leaf has to be filled again. Its noise is fresh (see
        `federated.privacy.dp_queries.TreeSum`) and the lost round counts as a separate tree, so
        this is sound even if its result was seen. The same holds for banded noise, where clients
        must come in the order of the rounds behind the state. Under the Gaussian mechanism each
        round counts as one more cohort of the sampling, so the next round draws a new one.
        """
        return self.privacy is None or self.privacy.mechanism != "gaussian"

    def _require_no_contradiction(self) -> None:
        """Raises if a round did not release what `privacy` states, which its count assumes."""
        if self.journal.contradicted:
            raise ValueError(
                f"Round {self.journal.contradicted} of the run in this directory did not release "
                "what `privacy` says, so what it cost is unknown, and no ε of this run is. Nothing "
                "was changed. Build a process whose noise is that of its `UserLevelPrivacy`, and "
                "begin a new run in another directory. Its ε will not include what this one "
                f"released. Received: {str(self.folder)!r}"
            )

    def _with_kept_key(self, sampler: Any, path: Path) -> Any:
        """The sampler with the key of the run, which is stored in a file of its owner.

        With another key, a client could take part twice in a pass of the tree mechanism, or too
        soon for banded noise, and what the statement calls proven would be wrong. So the journal
        has the key's hash. A run that was begun before journals had it gets it now.
        """
        if not path.exists():
            if self.journal.begun or self.journal.sampler_key is not None:
                raise ValueError(
                    "The key of the run's sampler is missing, so its cohorts are unknown. Restore "
                    f"it or start a new run. Nothing was changed. Received: {str(path)!r}"
                )
            files.write(path, sampler.for_new_run().key)
        key = path.read_bytes()
        found = hashlib.blake2b(key, digest_size=16, person=b"sampler_key").hexdigest()
        if self.journal.sampler_key is None:
            self.journal.note_sampler_key(found)
        elif self.journal.sampler_key != found:
            raise ValueError(
                "The key of the run's sampler is damaged or belongs to another run, so its cohorts "
                "are unknown. Restore it or start a new run. Nothing was changed. Received: "
                f"{str(path)!r}"
            )
        return type(sampler)(sampler.client_ids, sampler.sampling, key)

    def _restore(self, state: Any, ledger: user_epsilon.UserLedger | None) -> None:
        number, journal = self.states.latest(), self.journal
        self.ledger: user_epsilon.UserLedger | None = None
        if number is None and not journal.begun:
            self.number, self.state, self.finished, self.figures = 0, state, 0, {}
            if ledger is not None:
                self.ledger = _copied(ledger.to_dict(), ledger)
                self.ledger.sampling = described(self.sampler.sampling)
                self.ledger.order = getattr(self.sampler, "order", None)
            self._save()
            return
        if number is None or number > journal.begun:
            raise ValueError(
                "The journal and the saved states are not of the same run, or one of them is "
                "incomplete, so the number of releases is unknown. Nothing was changed. Received: "
                f"{journal.begun} rounds in the journal, the last saved state is "
                f"{'missing' if number is None else f'of round {number}'}"
            )
        self.state, record = self.states.load(number, state)
        self.number = number
        self.finished, self.figures = record["finished"], record["figures"]
        if record["ledger"] is not None:
            self.ledger = _copied(record["ledger"], ledger)
            self.ledger.check_noise(self.state)  # a run of earlier versions may have other noise
        # The process may have ended when the state was complete but not yet on the disk.
        self.states.sync(number)
        self._lose(journal.begun - number)

    def _save(self) -> None:
        record = {
            "finished": self.finished,
            "figures": self.figures,
            "ledger": None if self.ledger is None else self.ledger.to_dict(),
        }
        self.states.save(self.number, self.state, record)

    def _lose(self, rounds: int) -> None:
        """Counts rounds that were begun but whose result is gone."""
        if rounds and self.ledger is not None:
            self.ledger.record_lost(rounds, self.state)
            self._count_drawn(range(self.journal.begun - rounds + 1, self.journal.begun + 1))
            lost = (
                "1 round was begun whose result is not in the saved state. It is counted: ε "
                "includes it."
                if rounds == 1
                else f"{rounds} rounds were begun whose results are not in the saved state. They "
                "are counted: ε includes them."
            )
            warnings.warn(lost, stacklevel=3)

    @property
    def _draws_as_described(self) -> bool:
        return getattr(self.sampler, "draws_as_described", False)

    def _count_drawn(self, numbers: Iterable[int]) -> None:
        """Counts rounds as drawn, but not those whose cohorts a sampler of the caller's drew."""
        if self.ledger is not None and self._draws_as_described:
            by_caller = self.journal.drawn_by_caller
            self.ledger.rounds_drawn += sum(number not in by_caller for number in numbers)

    def _cohort(self) -> list[str]:
        """The clients of the next round: distinct ones, since each is clipped where it appears."""
        cohort = self.sampler.cohort(self._index())
        if len(set(cohort)) < len(cohort):
            raise ValueError(
                "`sampler` must draw each client at most once for a round: one that comes twice "
                "would change the sum by twice the clip. The round was not begun and does not "
                f"count. Received: {cohort!r} from {self.sampler!r}"
            )
        return cohort

    def _index(self) -> int:
        """The number of the next cohort; no round used it before, those of the ledger included."""
        if not self.rounds_can_be_repeated:
            return self._rounds_before + self.journal.begun
        if not self.journal.redrawn:
            return self.finished
        # Once all are used, the first ones are used again: without privacy that does no harm.
        return (self.finished + len(self.journal.redrawn)) % self.sampler.sampling.steps

    def _require_clients(self, found: int, drawn: int) -> None:
        """Raises RuntimeError if a round has too few clients; the next one has others if it can.

        The cohort of a later round is as good if each is drawn independently. In passes it is not:
        the clients of this one would be left out of the pass.
        """
        if found >= self._min_clients:
            return
        then = "The next round has the same cohort, since these are drawn in passes"
        if isinstance(self.sampler.sampling, (PoissonSampling, FixedSizeSampling)):
            self.journal.note("redrawn", self.journal.begun)
            then = "Another cohort is drawn for the next round"
        raise RuntimeError(
            f"{found} of {drawn} clients are left, and `min_clients` is {self._min_clients}. "
            f"{then}: allow some `max_failures`, or lower `min_clients`."
        )

    def _data_of(
        self, number: int, cohort: list[str], datasets: Callable[[str], tf.data.Dataset]
    ) -> list:
        """The data sets of those who take part in a round, of the type that the process expects."""
        clients, data = self._dropping.left(cohort, number, datasets)
        signature = getattr(self.process.next, "type_signature", None)
        if signature is None:
            return data
        expected = signature.parameter[1].member.element
        for client, found in zip(clients, data):
            if isinstance(found, list):  # of batches, which TFF checks one by one
                continue
            if not isinstance(found, tf.data.Dataset):
                received = f"{type(found).__name__} for client {client!r}"
            elif not expected.is_assignable_from(tff.types.tensorflow_to_type(found.element_spec)):
                received = f"elements of {found.element_spec!r} for client {client!r}"
            elif not self._can_be_sent(found.element_spec):
                raise TypeError(
                    "`client_data` must give batches whose names are sorted, or an `OrderedDict`, "
                    "if clients are computed one by one: TFF sends no others. Map them to "
                    "`collections.OrderedDict(x=..., y=...)`. Received: a dict with the keys "
                    f"{list(found.element_spec)} for client {client!r}. The round was not begun "
                    "and does not count."
                )
            else:
                continue
            raise TypeError(
                "`client_data` must give a `tf.data.Dataset` of each client, such as "
                "`tf.data.Dataset.from_tensor_slices((x, y)).batch(16)`, of the type that the "
                f"process was built for. Received: {received}, expected elements of {expected}. "
                "The round was not begun and does not count."
            )
        return data

    def _can_be_sent(self, spec: Any) -> bool:
        """Whether a data set of these elements can be; groups are sent in a form of their own."""
        is_unsorted = type(spec) is dict and list(spec) != sorted(spec)
        return hasattr(self.process.next, "grouped") or not is_unsorted

    def _check_first_graph(self, data: list) -> None:
        """Raises if the first data set of the run calls Python, or keeps batches in a file.

        No worker can call Python. Groups look at the files of all data sets.
        """
        found = next((d for d in data if isinstance(d, tf.data.Dataset)), None)
        if self._checked_first_graph or found is None:
            return
        graph = tf.compat.v1.GraphDef.FromString(serialized_dataset(found))
        require_no_shared_files(graph)
        calls = {n.op for n in nodes_of(graph)} & {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
        if calls:
            raise ValueError(
                "`client_data` must give data sets that do not call Python, since they are sent to "
                "TFF's worker: use `tf.data.Dataset.from_tensor_slices` or a loader of "
                "`federated.datasets` in place of `from_generator` or `py_function`. Received: a "
                f"data set with {', '.join(sorted(calls))}. The round was not begun and does not "
                "count."
            )
        self._checked_first_graph = True

    def next(self, datasets: Callable[[str], tf.data.Dataset], figures: Callable) -> bool:
        """Runs one round; returns true once its result is on the disk, false if it was lost."""
        number = self.journal.begun + 1
        cohort = self._cohort()
        # Before the round counts: nothing was released yet if this fails.
        data = self._data_of(number, cohort, datasets)
        self._check_first_graph(data)
        if self.ledger is not None and not self._draws_as_described:
            self.journal.note("drawn_by_caller", number)  # another sampler may resume this run
        self.journal.note("begun", number)
        try:
            self._require_clients(len(data), len(cohort))
            output = self.process.next(self.state, data)
        except Exception as error:
            # A worker that is gone stays gone: every further round would be counted and fail.
            if not self.failures_left or isinstance(error, WorkerLostError):
                raise
            self.failures_left -= 1
            warnings.warn(f"Round {number} failed: {error!r}", stacklevel=3)
            self._lose(1)
            return False
        if self.ledger is not None:
            try:
                self.ledger.record(output.state)
                self._count_drawn([number])
            except Exception:  # TypeError, say, if the state has no private aggregator any more
                self.journal.note("contradicted", number)  # so that it never counts as stated
                raise
        self.figures = figures(output, self.ledger, len(cohort), len(data))
        self.number, self.state, self.finished = number, output.state, self.finished + 1
        self._save()
        return True


def _copied(record: dict, ledger: user_epsilon.UserLedger | None) -> user_epsilon.UserLedger:
    """A ledger of the kind and the privacy of `ledger`, with what `to_dict` returned."""
    if ledger is None:
        raise ValueError("`ledger` must be that of the run. Received: ledger=None")
    return type(ledger).from_dict(record, ledger.privacy)
