"""Runs federated rounds that resume after any interruption; each is counted before it is run."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from federated.privacy import user_epsilon
from federated.training import monitor
from federated.training.dropout import Dropout, check_dropping
from federated.training.evaluation import Best, BestState, Evaluation, warn_of_choice
from federated.training.run import Run, rounds_before
from tf_adaptive_dp import checks, statement


class Trained(NamedTuple):
    """The result of `train`.

    Attributes:
      state: the state of the process after the last finished round.
      ledger: the ledger with all rounds that were begun; `None` in a run without privacy.
      num_finished: the number of rounds that the state results from.
      num_begun: the number of rounds that were begun. The difference was lost.
      sampler: the sampler with the key of this run. To continue with your own rounds, take its
        cohorts, starting with number `ledger.num_releases` under the Gaussian mechanism and
        `num_finished` under the tree mechanism and with banded noise.
      best: the best state by `evaluation`, of those that were evaluated; the last one always is.
        `None` without an evaluation that chooses, without a finished round, and (with a warning) if
        its figure was always NaN.
    """

    state: Any
    ledger: user_epsilon.UserLedger | None
    num_finished: int
    num_begun: int
    sampler: Any
    best: Best | None = None


def _ledger_of(
    process: Any, ledger: user_epsilon.UserLedger | None
) -> user_epsilon.UserLedger | None:
    """The ledger that a run of the process begins with; `None` without privacy."""
    if ledger is not None and not hasattr(ledger, "record_lost"):
        raise TypeError(
            "`ledger` must be a `UserLedger`, such as `process.new_ledger()`. "
            f"Received: ledger={ledger!r}"
        )
    if not hasattr(process, "new_ledger"):
        return ledger
    new = process.new_ledger()
    if ledger is None:
        return new
    for name in ("privacy", "side_information"):
        said, is_so = getattr(ledger, name), getattr(new, name)
        if said != is_so:
            raise ValueError(
                f"`ledger` must have the `{name}` of the process: begin with "
                f"`process.new_ledger()`. Received: {said!r}, the process has {is_so!r}"
            )
    return ledger


def _check_clients(
    ledger: user_epsilon.UserLedger | None, dropout: Dropout, on_client_error: str, min_clients: int
) -> None:
    """Checks what a round does without clients that were drawn."""
    checks.integer("min_clients", min_clients, 0)
    if min_clients and ledger is not None:
        raise ValueError(
            "`min_clients` must be 0 in a private run: skipping a round because few clients are "
            "left would reveal something about who is there, which ε does not cover. A private "
            "round is released with all of its noise, however few clients are left. Received: "
            f"min_clients={min_clients!r}"
        )
    check_dropping(dropout, on_client_error)


def _check(
    sampler: Any,
    num_rounds: int,
    ledger: user_epsilon.UserLedger | None,
    release_managers: Sequence,
) -> None:
    if not hasattr(sampler, "cohort"):
        raise TypeError(
            "`sampler` must be a `ClientSampler`, since ε depends on how it draws: "
            "`ClientSampler.poisson(client_data.client_ids, privacy, num_rounds)`; or, in place of "
            "`tff.simulation.build_uniform_sampling_fn`, `ClientSampler(client_data.client_ids, "
            "FixedSizeSampling(clients_per_round, steps=num_rounds))` with the sampling of "
            f"`tf_adaptive_dp.sampling`. Received: sampler={sampler!r}"
        )
    sampling = sampler.sampling
    before = rounds_before(ledger)
    if num_rounds + before > sampling.steps:
        raise ValueError(
            "`num_rounds` must be at most the `steps` of the sampling, less the rounds that "
            f"`ledger` holds. Received: num_rounds={num_rounds}, {before} rounds in the ledger, "
            f"sampling={sampling!r}"
        )
    if ledger is not None:
        user_epsilon.check_drawn(ledger, sampling)
    is_list = isinstance(release_managers, Sequence)
    for manager in release_managers if is_list else [release_managers]:
        if not is_list or not isinstance(manager, tff.program.ReleaseManager):
            raise TypeError(
                "`release_managers` must be a list of `tff.program.ReleaseManager`s. Received: "
                f"{manager!r}{' among them' if is_list else ''}"
            )


def _check_epsilon(
    ledger: user_epsilon.UserLedger | None, delta: float | None, sampling: Any, stacklevel: int
) -> None:
    """Raises if a run's ε is unknown, as with some side information; warns of a large δ."""
    if isinstance(ledger, user_epsilon.UserLedger):
        user_epsilon.epsilon_spent(ledger, 0.5, sampling=sampling)
        if delta is not None:
            users = ledger.privacy.total_clients
            statement.warn_of_large_delta(delta, users, user_epsilon.USER, stacklevel)


def _check_process(process: Any) -> None:
    for name in ("initialize", "next", "get_model_weights"):
        if not hasattr(process, name):
            raise TypeError(
                "`process` must be a `tff.learning.templates.LearningProcess`, such as that of "
                f"`federated.build_dp_fed_avg`. Received: process without `{name}`, of type "
                f"{type(process).__name__}"
            )


def _datasets_of(client_data: Any) -> Callable[[str], tf.data.Dataset]:
    datasets = getattr(client_data, "create_tf_dataset_for_client", client_data)
    if not callable(datasets):
        raise TypeError(
            "`client_data` must be a `tff.simulation.datasets.ClientData` or a function from a "
            "client id to a `tf.data.Dataset`, such as `datasets.__getitem__` of a dict, not a "
            "list: `sampler` says whose data a round takes. Received: client_data of type "
            f"{type(client_data).__name__}"
        )
    return datasets


def rounds_covered(counted: int, planned: int) -> int:
    """The number of rounds whose ε is shown after `counted` rounds.

    It is the next multiple of four, or of the largest power of two that is at most an eighth of
    `counted` if that is more, and at most `planned`. It never decreases, and a run of N rounds has
    about 8 log₂(N) - 32 of these numbers.

    Args:
      counted: the rounds counted so far.
      planned: those at the end of the run.

    >>> [rounds_covered(n, 1000) for n in (0, 1, 5, 32, 65, 500, 999)], rounds_covered(1001, 1000)
    ([0, 4, 8, 32, 72, 512, 1000], 1001)
    """
    step = 1 << max(2, (counted - 1).bit_length() - 4)
    return max(counted, min(-(-counted // step) * step, planned))


class _PrivacyFigures:
    """The figures of the rounds counted so far.

    Composing the privacy losses of a run takes longer than all else that `train` does in a round,
    and longer the more rounds there are. So ε is computed for more rounds than were counted, and
    stays the same until that many were counted (see `rounds_covered`): more releases never have a
    smaller ε.

    Guarantee: the ε shown is at least that of `epsilon_spent` for the same ledger, and equal to it
    after the last planned round.

    Args:
      ledger: the ledger as it is before the run; `None` without privacy.
      delta: see `train`.
      sampling: that of the sampler.
      num_rounds: the rounds of the run.
    """

    def __init__(
        self,
        ledger: user_epsilon.UserLedger | None,
        delta: float | None,
        sampling: Any,
        num_rounds: int,
    ):
        self._delta, self._sampling = delta, sampling
        self._planned = num_rounds + (0 if ledger is None else ledger.num_releases)
        self._known: tuple[dict, float] | None = None

    def __call__(self, ledger: user_epsilon.UserLedger | None) -> dict[str, float]:
        """The figures of a ledger.

        Args:
          ledger: that of the run; `None` without privacy.
        """
        if ledger is None:
            if self._delta is not None:
                raise ValueError(
                    "`delta` needs a `ledger`, such as `federated.UserLedger(privacy)` for a "
                    "process whose aggregator is `privacy.aggregator()`, or a process that has "
                    f"one, as `federated.build_dp_fed_avg` makes. Received: delta={self._delta}"
                )
            return {}
        counted = {"privacy/rounds_counted": float(ledger.num_releases)}
        if self._delta is None:
            return counted
        covered = ledger
        more = rounds_covered(ledger.num_releases, self._planned) - ledger.num_releases
        # Trees and banded noise cost little, and further rounds of these are no lost ones.
        if more and ledger.privacy.mechanism == "gaussian":
            covered = type(ledger).from_dict(ledger.to_dict(), ledger.privacy)
            covered.record_lost(more)
        # Compared with all that ε depends on: rounds may be lost, or released with other noise.
        content = covered.to_dict()
        if self._known is None or self._known[0] != content:
            epsilon = user_epsilon.epsilon_spent(covered, self._delta, sampling=self._sampling)
            self._known = content, epsilon
        epsilon = self._known[1]
        infinite = {"privacy/NOT_PRIVATE": 1.0} if math.isinf(epsilon) else {}
        return {
            **counted,
            "privacy/epsilon": epsilon,
            "privacy/epsilon_covers_rounds": float(covered.num_releases),
            "privacy/delta": self._delta,
            **infinite,
        }


class _Figures:
    """Makes the figures of each round, and remembers what share of ADADP's steps was discarded.

    Args:
      of_privacy: makes the figures of a ledger.
    """

    def __init__(self, of_privacy: _PrivacyFigures):
        self.of_privacy = of_privacy
        self._discarded: list[float] = []  # of each round where it is known

    def __call__(
        self,
        output: Any,
        ledger: user_epsilon.UserLedger | None,
        num_drawn: int,
        num_clients: int,
    ) -> dict[str, Any]:
        """The figures of a round; for the arguments see `Run.next`."""
        values = monitor.scalars(output.metrics, None if ledger is None else ledger.privacy)
        self._discarded.extend(
            share
            for name, share in values.items()
            if name.endswith("optimizer/discarded_share")
            and isinstance(share, float)
            and not math.isnan(share)
        )
        if ledger is None:
            values["train/clients"] = float(num_clients)
            if num_clients < num_drawn:
                values["train/dropped_clients"] = float(num_drawn - num_clients)
        return values | self.of_privacy(ledger)

    def warn_if_no_step_was_accepted(self, stacklevel: int) -> None:
        """Warns if no client of any round took a step."""
        if self._discarded and min(self._discarded) == 1.0:
            warnings.warn(
                f"ADADP accepted no step in {len(self._discarded)} rounds, so the clients have "
                "hardly moved the model. With `discard=True`, give `build_adadp` a larger "
                "`tolerance` or a smaller `learning_rate`, or leave it out. Without it, only steps "
                "whose error is infinite or NaN are discarded: check the clients' data and loss.",
                stacklevel=stacklevel,
            )


class _Evaluator(NamedTuple):
    """Evaluates the model after some of the rounds.

    Attributes:
      every: the number of finished rounds between evaluations.
      figures: maps the model weights to figures.
      prefix: what the names of these figures begin with where they are released.
    """

    every: int
    figures: Callable[[Any], Mapping[str, float]]
    prefix: str

    def is_due(self, finished: int) -> bool:
        """Whether to evaluate the model after this many finished rounds."""
        return finished % self.every == 0


def _held_out(evaluation: Evaluation, kept: BestState, run: Run) -> _Evaluator:
    """Evaluates a run on held-out clients, and keeps its best state."""

    def figures(weights: Any) -> Mapping[str, float]:
        found = kept.figures(run.number, weights)
        kept.consider(run.number, run.state, found)
        return found

    prefix = "held_out/" if run.ledger is None else "not_private/held_out/"
    return _Evaluator(evaluation.every, figures, prefix)


def _best(evaluation: Evaluation, kept: BestState, run: Run, stacklevel: int) -> Best | None:
    """The best state; the last one, if none was evaluated in earlier calls."""
    best = kept.best()
    if best is not None or evaluation.best is None or not run.finished:
        return best
    found = kept.figures(run.number, run.process.get_model_weights(run.state))
    kept.consider(run.number, run.state, found)
    best = kept.best()
    if best is None:
        warnings.warn(
            f"There is no best state: {evaluation.best!r} was NaN whenever the model was "
            "evaluated. If the model's weights are finite, check the held-out clients' data.",
            stacklevel=stacklevel + 1,
        )
    return best


def _named_numbers(prefix: str, found: Any) -> dict[str, float]:
    """What an evaluation found, with a prefix for the names.

    Raises:
      TypeError: if it is no mapping from names to numbers. The round is saved, and released when
        the run resumes.
    """
    try:
        return {f"{prefix}{name}": float(x) for name, x in found.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(
            "`evaluate` must return a dict of numbers by name, such as {'accuracy': 0.9}. The "
            f"round is saved: correct `evaluate` and call `train` again. Received: {found!r}"
        ) from error


class _Releases:
    """What a run releases after a round, and after its last one.

    Args:
      run: the run.
      num_rounds: see `train`.
      evaluators: those of the model, in the order of their figures.
      managers: the release managers.
    """

    def __init__(
        self,
        run: Run,
        num_rounds: int,
        evaluators: Sequence[_Evaluator],
        managers: Sequence[tff.program.ReleaseManager],
    ):
        self._run, self._num_rounds = run, num_rounds
        self._evaluators, self._managers = evaluators, managers

    def is_last(self) -> bool:
        """Whether no round is left. In a private run those that were lost are used up, too."""
        used = self._run.finished if self._run.ledger is None else self._run.journal.begun
        return used >= self._num_rounds

    def release(self) -> None:
        """Releases the figures of the last finished round, and those of its model."""
        # TFF would take a list apart.
        released = OrderedDict(
            (name, np.array(value) if isinstance(value, list) else value)
            for name, value in self._run.figures.items()
        )
        for evaluator in self._evaluators:
            if evaluator.is_due(self._run.finished) or self.is_last():
                found = evaluator.figures(self._run.process.get_model_weights(self._run.state))
                released.update(_named_numbers(evaluator.prefix, found))
        self._publish(released, self._run.number)

    def release_what_was_saved(self) -> None:
        """Releases a round that an earlier call saved, but perhaps did not release."""
        if self._run.journal.released < self._run.number:
            self.release()

    def release_what_was_lost(self, of_privacy: _PrivacyFigures) -> None:
        """Releases counts and ε if the last rounds were lost: the last ε would be too small."""
        run = self._run
        if run.journal.released < run.journal.begun and run.ledger is not None:
            all_were_due = all(evaluator.is_due(run.finished) for evaluator in self._evaluators)
            # If lost rounds were released after it in an earlier call, so was its evaluation.
            is_newest = run.journal.released <= run.number
            if run.finished and is_newest and not all_were_due:
                self.release()  # with the evaluation that no later round has had
            self._publish(OrderedDict(of_privacy(run.ledger)), run.journal.begun)

    def _publish(self, released: Mapping, number: int) -> None:
        for manager in self._managers:
            _wait(manager.release(released, number))
        self._run.journal.note("released", number)


def _wait(coroutine: Coroutine) -> Any:
    """Runs a coroutine in a separate thread, so that it works inside a notebook too."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def train(
    process: tff.learning.templates.LearningProcess,
    client_data: tff.simulation.datasets.ClientData | Callable[[str], tf.data.Dataset],
    sampler: Any,
    num_rounds: int,
    directory: str | os.PathLike,
    *,
    ledger: user_epsilon.UserLedger | None = None,
    delta: float | None = None,
    evaluate: Callable[[Any], Mapping[str, float]] | None = None,
    evaluate_every: int = 1,
    evaluation: Evaluation | None = None,
    release_managers: Sequence[tff.program.ReleaseManager] = (),
    max_failures: int = 0,
    dropout: Dropout = None,
    on_client_error: str = "raise",
    min_clients: int = 0,
) -> Trained:
    """Trains for a number of rounds, or resumes an earlier call with the same arguments.

    Each round takes these steps, and each step is on the disk before the next one begins: the
    journal records that the round begins; the round is run; the state, the ledger and the figures
    are saved together; the model is evaluated and the figures are released. The program may
    therefore be killed at any moment and started again. A round that began but is not in the saved
    state is lost: the ledger counts it (`record_lost`), with a warning. A round that was saved but
    perhaps not released is released again, with the same figures and the same number. If the last
    rounds are lost, the updated counts and ε are released.

    `num_rounds` limits the *counted* rounds: in a private run, lost rounds use up the budget like
    any others. Without a ledger, lost rounds are repeated until the state results from `num_rounds`
    rounds.

    Guarantee: with a ledger, every round is counted on the disk before its clients are asked, so ε
    is never too small and never decreases, whatever happens to the round. Under the Gaussian
    mechanism the round after a lost one draws a new cohort. Under the tree mechanism it has the
    same cohort as the lost one, since clients must come in the order of the tree's leaves, and the
    lost round counts as a separate tree. With banded noise it also has that cohort, and the lost
    round counts as one more row of the noise. This assumes that `directory/secret` stays unchanged
    on a local disk and that nobody else reads it (it holds the sampler's key, exact training
    figures and, with the tree mechanism or banded noise, noise); that the ledger describes the
    process; and that no client's data make its training raise an error, such as a label out of
    range: that ends the round, which anybody can see. Figures named `not_private/…` are exact
    averages over clients and outside the guarantee. So is everything that `evaluate` computes from
    data of the clients.

    Args:
      process: a process of `federated.training.processes`, or any other whose `next` takes a state
        and a list of datasets. TFF's context must be synchronous, as the default one is; a
        notebook's running event loop does no harm.
      client_data: the datasets by client id.
      sampler: a `federated.ClientSampler`. Each run creates its own key unless one was passed to
        the sampler; `directory` keeps it, so that the run can resume.
      num_rounds: the total number of rounds, earlier calls included.
      directory: the directory of this run alone; created if missing. Its folder `secret` holds
        everything that must stay secret.
      ledger: the ledger as it was when the run began, with the privacy of the process; it is not
        modified. The sampling continues after the ledger's rounds, which must have been drawn by
        the same sampling. Under the Gaussian mechanism with `ShuffledEpochs` or `FixedOrder` they
        must be whole passes, unless the sampler has the key of the run that they belong to, as
        `Trained.sampler` has. If the sampler was given a key, never start two runs from one ledger:
        both would draw the same cohorts. `None` takes `process.new_ledger()`, or no ledger in a run
        without privacy.
      delta: if given, the figures include ε at this δ, and `privacy/NOT_PRIVATE` if ε is infinite;
        needs a ledger. It should be well below 1 / number of clients; a warning says if it is not.
        Under the Gaussian mechanism `privacy/epsilon` is that of `privacy/epsilon_covers_rounds`
        rounds, up to three or an eighth more than were counted. So it is too large in the first
        rounds, a little too large later on, and exact after the last one. `epsilon_spent` and
        `privacy_statement` are exact at any time.
      evaluate: maps the model weights to figures, released as `test/…`; called again for a round
        that is released again.
      evaluate_every: the number of finished rounds between evaluations. The last round is always
        evaluated. If the last rounds are lost, the round before them is released again for that
        purpose.
      evaluation: evaluates the model on held-out clients, and keeps the best state (see
        `federated.Evaluation`, which says what ε does not cover). A round's figures are on the disk
        before they are released or compared, so they are the same whenever it is released again.
        One batch is evaluated before the first round, which shows most mistakes.
      release_managers: receive the figures of each round, see `federated.scalars`, under the number
        of the round, which counts lost rounds.
      max_failures: the number of rounds of this call that may end with an exception; they are lost.
        One more exception is raised, and counted when the run resumes. `WorkerLostError` is always
        raised.
      dropout: for simulations: which clients that were drawn do not take part. A probability in
        [0, 1), or a function from a client's id and the number of the round to whether it drops
        out, which must not look at other clients. The round continues without them, and its sum is
        divided by `clients_per_round` as always: a client that dropped out is like one that sends
        zeros. So ε is that of the cohorts that were drawn, of `clients_per_round` expected clients,
        and dropping out neither raises nor lowers it. The ledger records that clients could drop
        out. To compensate, choose a larger `clients_per_round` and set the server's learning rate
        to 1 / (1 - `dropout`). There is no way to select the first clients that answer: who is
        among them depends on other clients, and no ε here would hold for that.
      on_client_error: `"raise"`, or `"drop"`: a client whose data set raises while it is made or
        read drops out too, with a warning. For this, each data set is read once before the round.
      min_clients: the smallest number of clients to run a round with; a smaller one is a failure
        (see `max_failures`), after which another cohort is drawn under Poisson and fixed-size
        sampling. In passes, and if all clients take part, the same clients are asked again.
        Only without privacy: whether a round is run must not depend on who is there, so a private
        round is released, with all of its noise, even if nobody is left.

    Returns:
      The last state, the ledger with all rounds, and the numbers of rounds.

    Raises:
      TypeError, ValueError: if an argument is invalid, or if the directory is damaged or holds a
        run with other arguments.
      RuntimeError: if the run is in progress elsewhere.
    """
    checks.integer("num_rounds", num_rounds, 1)
    checks.path("directory", directory)
    checks.integer("evaluate_every", evaluate_every, 1)
    checks.integer("max_failures", max_failures, 0)
    if evaluation is not None and not isinstance(evaluation, Evaluation):
        raise TypeError(
            f"`evaluation` must be a `federated.Evaluation`. Received: evaluation={evaluation!r}"
        )
    _check_process(process)
    datasets = _datasets_of(client_data)
    ledger = _ledger_of(process, ledger)
    _check_clients(ledger, dropout, on_client_error, min_clients)
    _check(sampler, num_rounds, ledger, release_managers)
    of_privacy = _PrivacyFigures(ledger, delta, sampler.sampling, num_rounds)
    of_privacy(ledger)  # fails now rather than after a round
    _check_epsilon(ledger, delta, sampler.sampling, stacklevel=3)
    figures = _Figures(of_privacy)
    run = Run(
        process,
        sampler,
        directory,
        ledger,
        max_failures,
        dropout=dropout,
        on_client_error=on_client_error,
        min_clients=min_clients,
    )
    with contextlib.closing(run.journal):
        evaluators = [] if evaluate is None else [_Evaluator(evaluate_every, evaluate, "test/")]
        kept = None
        if evaluation is not None:
            evaluation.check(process.get_model_weights(run.state))
            kept = BestState(run.folder, evaluation, run.state)  # refuses another evaluation
            if ledger is not None:
                warn_of_choice(evaluation, sampler.client_ids, stacklevel=2)
            evaluators.append(_held_out(evaluation, kept, run))
        releases = _Releases(run, num_rounds, evaluators, release_managers)
        releases.release_what_was_saved()
        while not releases.is_last():
            if run.next(datasets, figures):
                releases.release()
        releases.release_what_was_lost(of_privacy)
        figures.warn_if_no_step_was_accepted(stacklevel=3)
        best = None
        if evaluation is not None and kept is not None:
            best = _best(evaluation, kept, run, stacklevel=2)
        return Trained(run.state, run.ledger, run.finished, run.journal.begun, run.sampler, best)
