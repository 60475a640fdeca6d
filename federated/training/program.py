"""Rounds of federated learning that go on after any interruption, each counted before it is run."""

from __future__ import annotations

import contextlib
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from federated.privacy import user_epsilon
from federated.privacy.client_sampling import ShuffledEpochs
from federated.training import monitor
from federated.training.run import Run, rounds_before
from federated.training.saved_states import wait
from tf_adaptive_dp import checks


class Trained(NamedTuple):
    """What `train` returns.

    Attributes:
      state: of the process, after the last finished round.
      ledger: all rounds that were begun; `None` if the run has none.
      num_finished: how many rounds the state is the result of.
      num_begun: how many rounds were begun; the difference was lost.
      sampler: with the key of this run. Rounds of your own that go on with the state need its
        cohorts: of number `ledger.num_releases` with the Gaussian mechanism, of number
        `num_finished` with the tree.
    """

    state: Any
    ledger: user_epsilon.UserLedger | None
    num_finished: int
    num_begun: int
    sampler: Any


def _ledger_of(
    process: Any, ledger: user_epsilon.UserLedger | None
) -> user_epsilon.UserLedger | None:
    """The ledger that a run of the process begins with, `None` if nothing is private."""
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


def _check(
    sampler: Any,
    num_rounds: int,
    ledger: user_epsilon.UserLedger | None,
    release_managers: Sequence,
) -> None:
    if not hasattr(sampler, "cohort"):
        raise TypeError(f"`sampler` must be a `ClientSampler`. Received: sampler={sampler!r}")
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
    if isinstance(sampling, ShuffledEpochs):
        per_pass = len(sampler.client_ids) // sampling.batch_size
        if before % per_pass:
            raise ValueError(
                "`ledger` ends in the middle of a pass over the clients. A new run begins a new "
                "pass, so clients of the one that was cut short take part again, and ε would not "
                "count that. Let the earlier run go on in its directory to the end of a pass. "
                f"Received: {before} rounds in the ledger, {per_pass} rounds a pass"
            )
    for manager in release_managers:
        if not isinstance(manager, tff.program.ReleaseManager):
            raise TypeError(
                "`release_managers` must be a list of `tff.program.ReleaseManager`s. Received: "
                f"{manager!r} among them"
            )


def _datasets_of(client_data: Any) -> Callable[[str], tf.data.Dataset]:
    datasets = getattr(client_data, "create_tf_dataset_for_client", client_data)
    if not callable(datasets):
        raise TypeError(
            "`client_data` must be a `tff.simulation.datasets.ClientData` or a function from a "
            f"client id to a `tf.data.Dataset`. Received: client_data={client_data!r}"
        )
    return datasets


def _figures_of_privacy(
    ledger: user_epsilon.UserLedger | None, delta: float | None, sampling: Any
) -> dict[str, float]:
    """What was counted so far."""
    if ledger is None:
        if delta is not None:
            raise ValueError(
                f"`delta` needs a `ledger`, or a process that has one. Received: delta={delta}"
            )
        return {}
    counted = {"privacy/rounds_counted": float(ledger.num_releases)}
    if delta is None:
        return counted
    epsilon = user_epsilon.epsilon_spent(ledger, delta, sampling=sampling)
    infinite = {"privacy/NOT_PRIVATE": 1.0} if math.isinf(epsilon) else {}
    return counted | {"privacy/epsilon": epsilon, "privacy/delta": delta} | infinite


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
    release_managers: Sequence[tff.program.ReleaseManager] = (),
    max_failures: int = 0,
) -> Trained:
    """Trains for a number of rounds, or goes on where an earlier call with these arguments ended.

    In each round, in this order and each step on the disk before the next one: the journal says
    that the round is begun; the round is run; the state, the ledger and the figures are saved in
    one version; the model is evaluated and the figures are released. So the program may be ended
    at any moment, by whatever signal, and started again. A round that was begun and is not in the
    saved state is lost: the ledger counts it (`record_lost`), with a warning. A round that was
    saved and perhaps not released is released again, with the same figures and the same number.
    Lost rounds at the end get a release of what was counted, ε above all.

    `num_rounds` limits the rounds that are *counted*: in a private run lost ones use up the budget
    as others do. Where there is no ledger, lost rounds are run again until the state is the result
    of `num_rounds` of them.

    Guarantee: with a ledger, every round is counted on the disk before its clients are asked, so
    that ε never is too small and never falls, whatever became of the round. Under the Gaussian
    mechanism the round after a lost one has a cohort of its own. Under the tree mechanism it has
    the clients of the lost one, since they have to come in the order of the tree's leaves, and the
    lost one counts as a tree of its own. Assumed: `directory/secret` is kept as it is, on a
    local disk, and nobody else reads it; it holds the sampler's key, exact training figures and,
    with the tree mechanism, noise. The process is the one that the ledger describes. Figures named
    `not_private/…` are exact averages over clients: they are outside of the guarantee. So is what
    `evaluate` computes from data of the clients.

    Args:
      process: of `federated.training.processes`, or any other whose `next` takes a state and a
        list of datasets. TFF's context has to be a synchronous one, such as the default; a
        notebook's running loop does no harm.
      client_data: the datasets, by client id.
      sampler: a `federated.ClientSampler`. The run has a key of its own, unless one was
        passed to the sampler; it is kept in `directory`, and used when the run goes on.
      num_rounds: in all, those of earlier calls included.
      directory: of this run alone; made where it is missing. What has to stay secret is in its
        folder `secret`.
      ledger: of the privacy that the process has, as it was when the run began; it is not
        changed, and the sampling goes on after its rounds, which have to be of the same sampling,
        and with `ShuffledEpochs` whole passes. With a key that was passed, no two runs may go on
        from one ledger: they would draw the same cohorts. `None` for a new one,
        `process.new_ledger()`, and for a run without privacy.
      delta: if given, ε at this δ is among the figures, with `privacy/NOT_PRIVATE` where it is
        infinite; needs a ledger.
      evaluate: from the model weights to figures, released as `test/…`; done again for a round that
        is released again.
      evaluate_every: evaluate after every so many finished rounds, and after the last one.
      release_managers: get the figures of each round, see `federated.scalars`, under the
        number of the round, which counts lost rounds.
      max_failures: how many rounds may end with an exception in this call; they are lost. One more
        is raised, and counted when the run goes on; so is `WorkerLostError`, always, since no
        round can succeed before there is a new context.

    Returns:
      The last state, the ledger with all rounds, and how many there were.

    Raises:
      TypeError, ValueError: for an argument of the wrong type or out of its range; if the directory
        holds a run with other arguments, or is damaged.
      RuntimeError: if the run is in progress elsewhere.
    """
    checks.integer("num_rounds", num_rounds, 1)
    checks.integer("evaluate_every", evaluate_every, 1)
    checks.integer("max_failures", max_failures, 0)
    datasets = _datasets_of(client_data)
    ledger = _ledger_of(process, ledger)
    _check(sampler, num_rounds, ledger, release_managers)
    _figures_of_privacy(ledger, delta, sampler.sampling)  # it fails now rather than after a round
    if isinstance(ledger, user_epsilon.UserLedger):  # and so does side information without an ε
        user_epsilon.epsilon_spent(ledger, 0.5, sampling=sampler.sampling)

    def figures(output: Any, ledger: user_epsilon.UserLedger | None, num_clients: int) -> dict:
        values = monitor.scalars(output.metrics, None if ledger is None else ledger.privacy)
        if ledger is None:
            values["train/clients"] = float(num_clients)
        return values | _figures_of_privacy(ledger, delta, sampler.sampling)

    run = Run(process, sampler, directory, ledger, max_failures)
    with contextlib.closing(run.journal) as journal:

        def is_last() -> bool:
            return (run.finished if ledger is None else journal.begun) >= num_rounds

        def release() -> None:
            # TFF would take a list apart.
            released = OrderedDict(
                (name, np.array(value) if isinstance(value, list) else value)
                for name, value in run.figures.items()
            )
            if evaluate is not None and (run.finished % evaluate_every == 0 or is_last()):
                results = evaluate(process.get_model_weights(run.state))
                released.update((f"test/{name}", float(x)) for name, x in results.items())
            publish(released, run.number)

        def publish(released: Mapping, number: int) -> None:
            for manager in release_managers:
                wait(manager.release(released, number))
            journal.note("released", number)

        if journal.released < run.number:
            release()
        while not is_last():
            if run.next(datasets, figures):
                release()
        if journal.released < journal.begun and run.ledger is not None:
            # The last rounds were lost: without this the last ε on show would be too small.
            counted = _figures_of_privacy(run.ledger, delta, sampler.sampling)
            publish(OrderedDict(counted), journal.begun)
        return Trained(run.state, run.ledger, run.finished, journal.begun, run.sampler)
