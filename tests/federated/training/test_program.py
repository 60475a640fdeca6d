"""Federated rounds that end at any moment and go on: each is counted, and none is forgotten."""

import asyncio
import contextlib
import csv
import dataclasses
import json
import os
import random
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from federated.clients.client_optimizers import build_adadps
from federated.clients.preconditioner import ClientPreconditioner
from federated.privacy.client_sampling import (
    ClientSampler,
    FixedOrder,
    FixedSizeSampling,
    ShuffledEpochs,
)
from federated.privacy.user_epsilon import UserLedger, privacy_statement
from federated.runtime import contexts, worker
from federated.runtime.connection import WorkerLostError
from federated.training import monitor, program
from federated.training.processes import build_adaptive_fed_avg, build_dp_fed_avg
from tests.helpers import killable_rounds as rounds
from tests.helpers import real_rounds
from tests.helpers.crash_injection import CrashInjector
from tf_adaptive_dp.durable import files
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.statement import LargeDeltaWarning


@pytest.fixture(scope="module")
def injector():
    with CrashInjector("killable_rounds", kill=os.killpg) as injector:
        yield injector


def kill_at_moments(injector, folder, mechanism, moments):
    for moment in moments:
        job = {"what": "train", "rounds": 1000, "mechanism": mechanism, "kill_at": moment}
        code = injector.run({"folder": str(folder), **job})
        assert code == -signal.SIGKILL
        before = rounds.check(folder, mechanism)
    total = 2 + (before.finished if mechanism is None else before.journal.begun)
    trained = rounds.train(folder, total, mechanism)
    after = rounds.check(folder, mechanism)
    assert after.number == after.journal.released == trained.num_begun
    if mechanism is None:
        assert trained.ledger is None and trained.num_finished == total
    else:
        assert trained.ledger.num_releases == trained.num_begun == total
    assert trained.num_finished == int(trained.state["rounds"]) == after.finished
    # None was forgotten: each that is in the model was released.
    _, _, released = rounds.check_record(rounds.record(folder), mechanism)
    assert len(released) == trained.num_finished
    left = [path.suffix for path in (folder / "run/secret/states").iterdir()]
    assert set(left) == {".state", ".array"} and left.count(".array") == 3


LOST = pytest.mark.filterwarnings("ignore:.*were begun whose results")


@pytest.mark.slow
@LOST
@pytest.mark.parametrize(
    "mechanism, moments",
    [
        ("gaussian", range(32)),
        ("tree", range(1, 32, 6)),
        ("banded", range(1, 32, 6)),
        (None, range(1, 32, 6)),
    ],
)
def test_a_run_may_be_killed_at_every_moment(injector, tmp_path, mechanism, moments):
    # One run, ended again and again, each time a moment later: so at the moments of its beginning,
    # of a start, and of one round; and once each of what follows.
    kill_at_moments(injector, tmp_path, mechanism, moments)


@LOST
@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["gaussian", "tree", None])
def test_a_run_may_be_killed_at_every_moment_of_three_rounds(injector, tmp_path, mechanism):
    kill_at_moments(injector, tmp_path, mechanism, range(80))


def test_a_run_goes_on_from_its_last_round(tmp_path):
    first = rounds.train(tmp_path, 3)
    assert first[2:4] == (3, 3) and first.ledger.num_releases == 3
    again = rounds.train(tmp_path, 3)
    tf.nest.map_structure(np.testing.assert_array_equal, again.state, first.state)
    trained = rounds.train(tmp_path, 5)
    assert trained[2:4] == (5, 5)
    record = rounds.record(tmp_path)
    rounds.check_record(record, "gaussian")
    assert [e["number"] for e in record if e["event"] == "released"] == [1, 2, 3, 4, 5]
    assert [e["clients"] for e in record if e["event"] == "began"] == [
        [f"client {index}"] for index in range(5)
    ]


def test_each_step_of_a_round_is_on_the_disk_before_the_next_one(tmp_path, monkeypatch):
    steps = []

    def note(owner, name, describe):
        original = getattr(owner, name)

        def noted(*args, **kwargs):
            result = original(*args, **kwargs)
            steps.append(describe(*args))
            return result

        monkeypatch.setattr(owner, name, noted)

    def path(file):
        return os.readlink(f"/proc/self/fd/{file}").removeprefix(f"{tmp_path}/run/secret/")

    rounds.train(tmp_path, 1)
    note(os, "pwrite", lambda file, line, place: line[:10].decode())
    note(os, "fsync", lambda file: f"sync {path(file)}")
    note(Path, "rename", lambda old, new: f"rename {new.name}")
    monkeypatch.setattr(rounds, "append", lambda folder, **entry: steps.append(entry["event"]))
    rounds.train(tmp_path, 2)

    begun = steps.index('{"begun": ')
    # The process before may have ended between writing its last state and syncing it.
    assert "sync states" in steps[:begun]
    del steps[:begun]  # what is done when the run goes on
    assert steps[:4] == ['{"begun": ', "sync journal", "began", "ended"]
    # First the array that changed, named by a hash, then the state that needs it.
    saved = [
        "sync states/HASH.new",
        "rename HASH.array",
        "sync states",
        "sync states/round_2.new",
        "rename round_2.state",
        "sync states",
    ]
    assert [re.sub("[0-9a-f]{32}", "HASH", step) for step in steps[4:-3]] == saved
    assert steps[-3:] == ["released", '{"released', "sync journal"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("way", ["from_generator", "py_function", "numpy_function in a map"])
def test_data_that_call_python_are_refused_before_the_round_counts(tmp_path, way):
    def dataset(client):
        good = real_rounds.dataset(client)
        if way == "from_generator":
            generate = good.as_numpy_iterator
            return tf.data.Dataset.from_generator(generate, output_signature=good.element_spec)
        call = tf.py_function if way == "py_function" else tf.numpy_function

        def called(x, y):
            (found,) = call(lambda a: [np.asarray(a)], [x], [x.dtype])
            return tf.ensure_shape(found, x.shape), y

        return good.map(called)

    # No round is empty, as one of Poisson sampling may be.
    made, sampler = real_rounds.process("tree"), real_rounds.sampler("tree")
    with pytest.raises(ValueError, match="do not call Python.*Received: a data set with .*PyFunc"):
        program.train(made, dataset, sampler, 2, tmp_path)
    assert '"begun"' not in (tmp_path / "secret/journal").read_text()


def test_batches_that_tff_does_not_send_cost_no_round(context, tmp_path):
    def dataset(client):
        return real_rounds.dataset(client).map(lambda x, y: {"y": y, "x": x})

    def model():
        made = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
        made.compile(loss="mse")
        return made

    privacy, spec = real_rounds.privacy("tree"), dataset("client 0").element_spec
    optimizer = tff.learning.optimizers.build_sgdm(0.1)
    single, grouped = (
        build_dp_fed_avg(model, optimizer, privacy, input_spec=spec, clients_per_group=n)
        for n in (1, "auto")
    )
    sampler = real_rounds.sampler("tree")
    with pytest.raises(TypeError, match=r"sorted, or an `OrderedDict`.*\['y', 'x'\]"):
        program.train(single, dataset, sampler, 1, tmp_path)
    assert '"begun"' not in (tmp_path / "secret/journal").read_text()
    assert program.train(grouped, dataset, sampler, 1, tmp_path / "grouped").num_finished == 1


def test_data_that_clients_share_in_a_file_are_refused_before_the_round_counts(tmp_path):
    def dataset(client):
        return real_rounds.dataset(client).cache(str(tmp_path / "file"))

    made, sampler = real_rounds.process("tree"), real_rounds.sampler("tree")
    with pytest.raises(ValueError, match="keep nothing in files.*CacheDatasetV2"):
        program.train(made, dataset, sampler, 2, tmp_path)
    assert '"begun"' not in (tmp_path / "secret/journal").read_text()


def test_a_failed_round_is_counted_when_the_run_goes_on(tmp_path):
    with pytest.raises(ConnectionError, match="a worker is gone"):
        rounds.train(tmp_path, 5, failing=[False, True])
    with pytest.warns(UserWarning, match="1 round was begun whose result is not.*It is counted"):
        trained = rounds.train(tmp_path, 5)
    assert trained[2:4] == (4, 5)
    assert (trained.ledger.num_releases, trained.ledger.lost) == (5, 1)
    rounds.check_record(rounds.record(tmp_path), "gaussian")


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "mechanism, finished", [("gaussian", 3), ("tree", 3), ("banded", 3), (None, 5)]
)
def test_rounds_may_fail_so_many_times(tmp_path, mechanism, finished):
    # A run without privacy has no budget, so what is lost is made up for.
    with pytest.warns(UserWarning, match="failed: ConnectionError"):
        trained = rounds.train(tmp_path, 5, mechanism, [False, True, True], max_failures=2)
    assert trained.num_finished == int(trained.state["rounds"]) == finished
    assert trained.num_begun == finished + 2
    rounds.check_record(rounds.record(tmp_path), mechanism)


def test_one_failure_too_many_is_raised(tmp_path):
    with pytest.warns(UserWarning), pytest.raises(ConnectionError):
        rounds.train(tmp_path, 5, failing=[True, True, True], max_failures=2)
    with pytest.warns(UserWarning, match="^3 rounds"):
        trained = rounds.train(tmp_path, 5)
    assert (trained.ledger.num_releases, trained.ledger.lost) == (5, 3)


def test_no_round_is_wasted_on_a_worker_that_is_gone(tmp_path, monkeypatch):
    def gone(self, state, datasets):
        raise WorkerLostError("it does not answer", ["ada:8000"])

    with monkeypatch.context() as patch, pytest.raises(WorkerLostError):
        patch.setattr(rounds.Process, "next", gone)
        rounds.train(tmp_path, 5, max_failures=3)
    with pytest.warns(UserWarning, match="^1 round was"):
        trained = rounds.train(tmp_path, 5)
    assert (trained.ledger.num_releases, trained.ledger.lost) == (5, 1)


@pytest.mark.parametrize("mechanism", ["gaussian", "tree"])
def test_rounds_that_the_ledger_holds_are_part_of_the_sampling(tmp_path, mechanism):
    def train(num_rounds, earlier):
        ledger = rounds.ledger(mechanism)
        ledger.record_lost(earlier)
        sampler = rounds.Sampler(["a"], rounds.Sampling(10))
        folder = tmp_path / f"{num_rounds} {earlier}"
        return program.train(
            rounds.Process(tmp_path), str, sampler, num_rounds, folder, ledger=ledger
        )

    assert train(3, 7).num_finished == 3
    if mechanism == "gaussian":
        with pytest.raises(ValueError, match="less the rounds .* num_rounds=4, 7 rounds in the"):
            train(4, 7)
        assert not (tmp_path / "4 7").exists()
    else:  # its ledger is of trees, which need no sampling
        assert train(4, 7).num_finished == 4


@pytest.mark.parametrize("mechanism", ["gaussian", "tree"])
def test_only_rounds_of_the_run_count_as_drawn_by_its_sampler(tmp_path, mechanism):
    ledger = rounds.ledger(mechanism)
    ledger.record_lost(7)  # by hand
    sampling = ShuffledEpochs(8, 20) if mechanism == "tree" else FixedSizeSampling(2, 20)
    process = rounds.Process(tmp_path, [False, True])
    sampler = Unchecked(list("abcdefgh"), sampling)
    with pytest.warns(UserWarning, match="^1 round was"):
        trained = program.train(process, str, sampler, 3, tmp_path, ledger=ledger, max_failures=1)
    assert trained.ledger.num_releases - trained.ledger.rounds_drawn == 7


def with_cohorts(cohort):
    """A sampler of Poisson cohorts, it says, that draws others."""

    class Other(ClientSampler):
        def cohort(self, round_num):
            return cohort(self, round_num)

    made = real_rounds.sampler("gaussian")
    return Other(made.client_ids, made.sampling)


@dataclasses.dataclass(frozen=True)
class FirstOnes(FixedSizeSampling):
    def draw(self, num_examples, step, key):
        return np.arange(self.batch_size)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "sampler",
    [
        with_cohorts(lambda self, number: list(self.client_ids[:3])),
        ClientSampler(real_rounds.CLIENTS, FirstOnes(3, 400)),
    ],
    ids=["sampler", "sampling"],
)
def test_cohorts_of_a_callers_own_code_do_not_count_as_drawn(process, tmp_path, sampler):
    trained = program.train(process, real_rounds.dataset, sampler, 1, tmp_path)
    assert (trained.ledger.num_releases, trained.ledger.rounds_drawn) == (1, 0)
    text = " ".join(privacy_statement(trained.ledger, 1e-3, sampling=sampler.sampling).split())
    assert "are stated to have been drawn" in text and "did not verify" in text
    assert "proven" not in text
    again = program.train(process, real_rounds.dataset, sampler, 1, tmp_path)  # and stay so
    assert again.ledger.rounds_drawn == 0


def test_lost_rounds_whose_cohorts_a_callers_code_drew_never_count_as_drawn(tmp_path, monkeypatch):
    class Other(Unchecked):
        def cohort(self, round_num):
            return list(self.client_ids[:2])

    def train(sampler, num_rounds):
        made = sampler(list("abcdefgh"), FixedSizeSampling(2, 20))
        ledger = rounds.ledger("gaussian")
        process = rounds.Process(tmp_path)
        return program.train(process, str, made, num_rounds, tmp_path, ledger=ledger)

    def failed(*_):
        raise ConnectionError

    train(Unchecked, 1)
    with monkeypatch.context() as patch:
        patch.setattr(rounds.Process, "next", failed)
        with pytest.raises(ConnectionError):
            train(Other, 2)
        with pytest.raises(ConnectionError), pytest.warns(UserWarning, match="^1 round was begun"):
            train(Unchecked, 3)
    with pytest.warns(UserWarning, match="^2 rounds were begun"):
        ledger = train(Unchecked, 4).ledger
    assert (ledger.num_releases, ledger.rounds_drawn) == (4, 3)


def test_a_client_that_comes_twice_in_a_cohort_is_refused(process, tmp_path):
    sampler = with_cohorts(lambda self, number: [*self.client_ids[:2], self.client_ids[0]])
    with pytest.raises(ValueError, match="at most once for a round.*does not count"):
        program.train(process, real_rounds.dataset, sampler, 1, tmp_path)


MIME = tff.learning.algorithms.build_unweighted_mime_lite
FED_AVG = tff.learning.algorithms.build_unweighted_fed_avg


@pytest.mark.parametrize("momentum", [0.9, None], ids=["momentum", "plain"])
def test_a_process_that_releases_exact_sums_is_refused_before_its_first_round(
    context, tmp_path, momentum
):
    """Mime's state has the exact mean gradient of the cohort beside the private aggregator."""
    privacy = real_rounds.privacy("gaussian")
    optimizer = tff.learning.optimizers.build_sgdm(0.1, momentum)
    made = MIME(real_rounds.model_fn, optimizer, model_aggregator=privacy.aggregator())
    arguments = (made, real_rounds.dataset, real_rounds.sampler("gaussian"), 1, tmp_path / "run")
    with pytest.raises(NotPrivateError, match="Mime"):
        program.train(*arguments, ledger=UserLedger(privacy))
    assert not (tmp_path / "run").exists()


def test_an_algorithm_of_tff_with_the_private_aggregator_has_a_ledger(context, tmp_path):
    privacy = real_rounds.privacy("gaussian")
    optimizer = tff.learning.optimizers.build_sgdm(0.1)
    made = FED_AVG(real_rounds.model_fn, optimizer, model_aggregator=privacy.aggregator())
    sampler = real_rounds.sampler("gaussian")

    def train(process, folder):
        arguments = (process, real_rounds.dataset, sampler, 1, tmp_path / folder)
        ledger = program.train(*arguments, ledger=UserLedger(privacy)).ledger
        return " ".join(privacy_statement(ledger, 1e-3, sampling=sampler.sampling).split())

    text = train(made, "read")
    assert "proven upper bound" in text and "Nobody verified" not in text
    hidden = SimpleNamespace(
        initialize=made.initialize,
        next=lambda state, data: made.next(state, data),
        get_model_weights=made.get_model_weights,
    )
    assert "Nobody verified that the process kept and released nothing" in train(hidden, "hidden")


def test_a_run_may_have_more_rounds_than_it_was_begun_with(tmp_path):
    def train(steps):
        sampler = rounds.Sampler(["a"], rounds.Sampling(steps))
        return program.train(
            rounds.Process(tmp_path),
            str,
            sampler,
            steps,
            tmp_path / "run",
            ledger=rounds.ledger("gaussian"),
        )

    assert [train(steps).num_finished for steps in (2, 5)] == [2, 5]
    rounds.check_record(rounds.record(tmp_path), "gaussian")


def test_lost_rounds_at_the_end_are_released_as_counted(tmp_path):
    def released():
        found = [e for e in rounds.record(tmp_path) if e["event"] == "released"]
        return [(e["number"], e["figures"]["privacy/rounds_counted"]) for e in found]

    with pytest.warns(UserWarning, match="failed: ConnectionError"):
        rounds.train(tmp_path, 5, failing=[False, False, True, True, True], max_failures=3)
    assert released() == [(1, 1), (2, 2), (5, 5)]
    with pytest.warns(UserWarning, match="^3 rounds were begun whose results are not"):
        assert rounds.train(tmp_path, 5).ledger.num_releases == 5
    assert released() == [(1, 1), (2, 2), (5, 5)]
    with pytest.warns(UserWarning, match="^3 rounds"):
        rounds.train(tmp_path, 6)
    assert released()[3:] == [(6, 6)]


@LOST
def test_more_rounds_may_be_lost_at_the_end_of_a_resumed_run(tmp_path):
    """The evaluation of the last finished round was released with the first of them."""
    released = []

    class Seen(tff.program.ReleaseManager):
        async def release(self, value, key):
            released.append((key, "test/model" in value))

    def train(number, failing):
        sampler, process = rounds.Sampler(["a"], rounds.Sampling()), rounds.Process(tmp_path)
        process.failing = failing
        return program.train(
            process,
            str,
            sampler,
            number,
            tmp_path / "run",
            ledger=rounds.ledger("gaussian"),
            evaluate=lambda model: {"model": model},
            evaluate_every=5,
            max_failures=1,
            release_managers=[Seen()],
        )

    train(3, [False, False, True])
    assert released == [(1, False), (2, False), (2, True), (3, False)]
    for _ in range(2):
        assert train(4, [True])[2:4] == (2, 4)
        assert released[4:] == [(4, False)]
    assert train(5, []).num_finished == 3 and released[5:] == [(5, True)]


class Unchecked(ClientSampler):
    """Its privacy may be that of `rounds.ledger`, which is no `UserLevelPrivacy`."""

    def checked(self, privacy):
        return self


@pytest.mark.parametrize("sampling", [ShuffledEpochs(2, 40), FixedOrder(2, 40)])
def test_no_run_begins_in_the_middle_of_another_ones_pass(tmp_path, sampling):
    def train(earlier, mechanism="gaussian"):
        ledger = rounds.ledger(mechanism)
        ledger.record_lost(earlier)
        sampler = Unchecked(list("abcdefgh"), sampling)
        folder = tmp_path / f"{earlier} {mechanism}"
        return program.train(rounds.Process(tmp_path), str, sampler, 1, folder, ledger=ledger)

    for whole_passes in (0, 4):
        assert train(whole_passes).num_finished == 1
    for earlier in (3, 5):
        with pytest.raises(ValueError, match=f"{earlier} rounds in the ledger, 4 rounds per pass"):
            train(earlier)
        assert not (tmp_path / f"{earlier} gaussian").exists()
    assert train(3, "tree").num_finished == 1  # each run has trees of its own


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "kind, keyed, lengths",
    [
        (FixedOrder, True, (3, 2, 4, 1)),
        (ShuffledEpochs, False, (4, 8, 3)),
        (FixedOrder, False, (4, 8, 3)),
        (ShuffledEpochs, True, (3, 2, 4, 1)),
    ],
)
def test_runs_of_one_ledger_have_each_client_as_often_as_is_accounted_for(
    tmp_path, kind, keyed, lengths
):
    """Nine clients, so that one is left out of a pass of four rounds, and not always the same."""
    ledger, sampler = rounds.ledger("gaussian"), Unchecked(list("abcdefghi"), kind(2, 40))
    for length in lengths:
        folder, made = tmp_path / str(ledger.num_releases), rounds.Process(tmp_path)
        trained = program.train(made, str, sampler, length, folder, ledger=ledger)
        ledger = trained.ledger
        sampler = trained.sampler if keyed else Unchecked(sampler.client_ids, sampler.sampling)
        clients = [c for e in rounds.record(tmp_path) for c in e.get("clients", ())]
        assert len(clients) == 2 * ledger.num_releases
        assert max(map(clients.count, clients)) <= -(-ledger.num_releases // 4)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", [FixedOrder, ShuffledEpochs])
def test_only_the_order_of_the_ledgers_own_run_goes_on(tmp_path, kind):
    ids = list("abcdefgh")

    def train(folder, num_rounds, sampler, ledger):
        process = rounds.Process(tmp_path)
        return program.train(process, str, sampler, num_rounds, tmp_path / folder, ledger=ledger)

    first = train("1", 3, Unchecked(ids, kind(2, 40)), rounds.ledger("gaussian"))
    others = [
        Unchecked(ids, kind(2, 40), bytes(32)),  # a key was passed, but another one
        Unchecked(list("bcdefghi"), kind(2, 40), first.sampler.key),
    ]
    for other in others:
        with pytest.raises(ValueError, match="or pass its sampler, `Trained.sampler`"):
            train("2", 2, other, first.ledger)
    assert not (tmp_path / "2").exists()
    assert train("2", 2, first.sampler, first.ledger).num_finished == 2
    # It resumes with its own key, whatever the sampler of that call has.
    assert train("2", 4, Unchecked(ids, kind(2, 40)), first.ledger).num_finished == 4


def test_a_round_that_could_not_be_released_is_released_again(tmp_path):
    class Full(tff.program.ReleaseManager):
        async def release(self, value, key):
            raise OSError("disk full")

    process = rounds.Process(tmp_path)
    sampler = rounds.Sampler(["a"], rounds.Sampling())
    ledger = rounds.ledger("gaussian")
    with pytest.raises(OSError, match="disk full"):
        program.train(
            process, str, sampler, 2, tmp_path / "run", ledger=ledger, release_managers=[Full()]
        )
    assert ledger.num_releases == 0  # what is passed is not changed
    trained = rounds.train(tmp_path, 2)
    assert trained[2:4] == (2, 2)
    _, began, released = rounds.check_record(rounds.record(tmp_path), "gaussian")
    assert began == 2 and list(released) == [1, 2]


def test_data_that_cannot_be_made_cost_no_round(tmp_path):
    asked = []

    def datasets(client):
        asked.append(client)
        if len(asked) == 2:
            raise FileNotFoundError(client)
        return client

    def run():
        sampler = rounds.Sampler(["a"], rounds.Sampling())
        return program.train(
            rounds.Process(tmp_path),
            datasets,
            sampler,
            2,
            tmp_path / "run",
            ledger=rounds.ledger("gaussian"),
            max_failures=9,
        )

    with pytest.raises(FileNotFoundError):
        run()
    trained = run()
    assert trained.num_begun == trained.num_finished == trained.ledger.num_releases == 2
    assert asked == ["client 0", "client 1", "client 1"]


def test_client_data_of_tff_is_asked_for_its_datasets(tmp_path):
    data = SimpleNamespace(create_tf_dataset_for_client=lambda client: f"data of {client}")
    sampler = rounds.Sampler(["a"], rounds.Sampling())
    program.train(rounds.Process(tmp_path), data, sampler, 1, tmp_path / "run")
    assert rounds.record(tmp_path)[0]["clients"] == ["data of client 0"]


def test_a_run_may_be_called_where_a_loop_is_running(tmp_path):
    async def notebook():
        return rounds.train(tmp_path, 1)

    assert asyncio.run(notebook()).num_finished == 1


def test_the_model_is_evaluated_after_some_rounds_and_the_last(tmp_path):
    def run(num_rounds):
        rounds.train(tmp_path, num_rounds, None, evaluate_every=2)
        record = rounds.record(tmp_path)
        return [e["number"] for e in record if "test/model" in e.get("figures", ())]

    assert run(5) == [2, 4, 5]
    assert run(7) == [2, 4, 5, 6, 7]


@pytest.mark.parametrize("found", [None, 0.5, {"accuracy": [0.5, 0.6]}])
def test_an_evaluation_without_numbers_costs_one_round_and_is_corrected(tmp_path, found):
    sampler = rounds.Sampler(["a"], rounds.Sampling())
    arguments = (rounds.Process(tmp_path), str, sampler, 2, tmp_path / "run")
    for _ in range(2):
        with pytest.raises(TypeError, match="`evaluate` must return a dict of numbers by name"):
            program.train(*arguments, evaluate=lambda weights: found)
    trained = program.train(*arguments, evaluate=lambda weights: {"accuracy": 0.5})
    assert trained.num_begun == trained.num_finished == 2


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"num_rounds": 0}, "`num_rounds` must be at least 1"),
        ({"num_rounds": 1001}, r"`num_rounds` must be at most the `steps`.*steps=1000"),
        ({"evaluate_every": 0}, "`evaluate_every` must be at least 1"),
        ({"max_failures": -1}, "`max_failures` must be at least 0"),
        ({"delta": 1e-5}, r"`delta` needs a `ledger`, such as `federated.UserLedger\(privacy\)`"),
        ({"client_data": {"a": 1}}, "`client_data` must be a.*such as `datasets.__getitem__`"),
        ({"client_data": [1]}, "not a list: `sampler` says .* type list$"),
        ({"process": print}, "`process` must be a .*LearningProcess.*without `initialize`"),
        ({"release_managers": [print]}, "`release_managers` must be a list of.*among them"),
        ({"release_managers": print}, "`release_managers` must be a list of.*function print>$"),
        ({"sampler": "every"}, "must be a `ClientSampler`.*uniform_sampling_fn.*FixedSizeSampling"),
        ({"ledger": 7}, "`ledger` must be a `UserLedger`"),
    ],
)
def test_bad_arguments_are_refused_before_anything_happens(tmp_path, kwargs, message):
    sampler = rounds.Sampler(["a"], rounds.Sampling())
    good = {"client_data": str, "sampler": sampler, "num_rounds": 1, "directory": tmp_path / "run"}
    good["process"] = rounds.Process(tmp_path)
    with pytest.raises((TypeError, ValueError), match=message):
        program.train(**good | kwargs)
    assert not (tmp_path / "run").exists()


def check_real_record(folder, mechanism):
    """What real rounds did, against what was found, counted and released; see `real_rounds`."""
    finished, order, began, released, cohorts = {}, [], 0, {}, []
    exact, shown = [], []  # ε, whose figures cover some rounds more than were counted
    for entry in rounds.record(folder):
        event, model = entry["event"], tuple(entry.get("model", {}).values())
        if event == "found":
            finished.setdefault(model, 0)
            order = order or [model]
            assert began <= entry["begun"] == entry["counted"]
            assert max(released, default=0) <= entry["number"]
            assert model == released.get(entry["number"], (model,))[0]
            assert entry["finished"] == finished[model]
            exact.append(entry["epsilon"])
        elif event == "began":
            began += 1
            newest = list(released.values())[-1][0] if released else order[0]
            assert order.index(model) >= order.index(newest)
            cohorts.append((finished[model], entry["clients"]))
        elif event == "ended":
            order.append(model)
            finished[model] = cohorts[-1][0] + 1
        else:
            figures = entry["figures"]
            weights = tuple(figures[name] for name in figures if name.startswith("test/"))
            result = weights, figures["privacy/epsilon"]
            assert released.setdefault(entry["number"], result) == result
            assert weights in order
            assert figures["privacy/rounds_counted"] == entry["number"] >= began
            shown.append(result[1])
            assert shown[-1] >= exact[-1]
    assert exact == sorted(exact) and shown == sorted(shown) and shown[-1] == exact[-1]
    assert len(released) == entry["finished"]
    kept = real_rounds.sampler(mechanism, (folder / "run/secret/sampler_key").read_bytes())
    if mechanism != "gaussian":
        assert all(clients == kept.cohort(index) for index, clients in cohorts)
    else:
        # In the order of the sampling, each of its cohorts once at most.
        drawn = iter([kept.cohort(index) for index in range(entry["begun"])])
        assert all(clients in drawn for _, clients in cohorts)
    return entry


def wait_for_rounds(folder, number, seconds):
    """Waits until so many more rounds of a run in a folder began, and then so many seconds."""

    def num_begun():
        return [entry["event"] for entry in rounds.record(folder)].count("began")

    def wait():
        before, deadline = num_begun(), time.monotonic() + 120
        while num_begun() < before + number and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(seconds)

    return wait


@pytest.mark.slow
@pytest.mark.parametrize("mechanism, kills", [("gaussian", 12), ("tree", 6), ("banded", 4)])
def test_real_rounds_may_be_killed_at_any_moment(injector, tmp_path, mechanism, kills):
    moments = random.Random(len(mechanism))
    began = 4 if mechanism == "banded" else 1  # some rounds to take noise back from
    job = {"what": "train_really", "folder": str(tmp_path), "mechanism": mechanism}
    for _ in range(kills):
        wait = wait_for_rounds(tmp_path, began, moments.uniform(0.0, 3.0))
        assert injector.run({**job, "rounds": 300}, wait) == -signal.SIGKILL
    # From the journal, since the record does not say how far the run came after its last start: on
    # a machine without other work that is more than nine rounds.
    total = (tmp_path / "run/secret/journal").read_text().count('"begun"') + 9
    injector.run({**job, "rounds": total})
    last = check_real_record(tmp_path, mechanism)
    assert last["event"] == "found" and last["begun"] == last["counted"] == total
    assert last["finished"] < last["begun"]
    if mechanism == "banded":
        check_past_noise(rounds.record(tmp_path))


def check_past_noise(record):
    """A resumed run has the noise that its own last rounds released, and no other."""
    before, current, seen, checked = {}, None, [], 0
    for entry in record:
        model = tuple(entry.get("model", {}).values())
        if entry["event"] == "began":
            current = model
        elif entry["event"] == "ended":
            before[model] = current
            noise = 3 * (np.array(current) - np.array(model))  # three clients a round, SGD
            # The noise of a lost round is not that of the round that was run in its place.
            assert all(np.abs(noise - other).max() > 1e-4 for other in seen)
            seen.append(noise)
        elif entry["event"] == "found":
            for past in map(np.array, entry["past"]):
                if model not in before:
                    assert not past.any()  # before the first round
                    continue
                released = 3 * (np.array(before[model]) - np.array(model))
                np.testing.assert_allclose(past, released, atol=1e-5)
                model, checked = before[model], checked + 1
    assert checked > 9


@pytest.mark.slow
def test_rounds_of_banded_noise_that_fail_after_their_release_are_counted(context, tmp_path):
    made, outputs = real_rounds.process("banded"), []

    class Failing:
        initialize = staticmethod(made.initialize)
        get_model_weights = staticmethod(made.get_model_weights)
        new_ledger = staticmethod(made.new_ledger)

        @staticmethod
        def next(state, datasets):
            outputs.append(made.next(state, datasets))
            if len(outputs) == 4:
                raise ConnectionError("the answer is lost")
            return outputs[-1]

    def train(sampler, rounds, process=Failing):
        arguments = (process, real_rounds.dataset, sampler, rounds, tmp_path / "run")
        return program.train(*arguments, delta=real_rounds.DELTA)

    for sampling in (ShuffledEpochs(3, 400), FixedSizeSampling(3, 400)):
        with pytest.raises(ValueError, match="at most once in any 4 rounds in a row"):
            train(ClientSampler(real_rounds.CLIENTS, sampling), 5)
    assert not (tmp_path / "run").exists()
    sampler = real_rounds.sampler("banded")
    with pytest.raises(ConnectionError):
        train(sampler, 5)
    with pytest.warns(UserWarning, match="^1 round was begun"):
        trained = train(sampler, 6)
    assert (trained.num_finished, trained.num_begun) == (5, 6)
    assert trained.ledger.sequences == {1: 1, 5: 1}
    # The lost round and the one in its place take back the same noises and add others.
    lost, again = (np.asarray(pasts(output.state)) for output in outputs[3:5])
    np.testing.assert_array_equal(lost[1:], again[1:])
    assert np.abs(lost[0] - again[0]).max() > 1e-3
    journal = (tmp_path / "run/secret/journal").read_text()
    for said in ('"bands": 4', '"min_separation": 4', '"mechanism": "banded"', "FixedOrder("):
        assert said in journal
    described = json.loads(files.checked(journal.splitlines(keepends=True)[0].encode()))["run"]
    assert "max_participations" not in described["privacy"]  # nor in journals from before it was
    # With noise of other settings ε would be another one, so it does not go on.
    before = rounds.contents(tmp_path)
    for change in (
        {"noise_multiplier": 1.5},
        {"bands": 3},
        {"bands": 3, "min_separation": 3},
        {"max_participations": 100},
    ):
        privacy = dataclasses.replace(real_rounds.privacy("banded"), **change)

        class Other(Failing):
            new_ledger = staticmethod(lambda privacy=privacy: UserLedger(privacy))

        if "max_participations" in change:  # which the state does not show
            found = "other arguments.*privacy: was .*max_participations.: 100"
        else:
            found = "The aggregator did not release what `privacy` says.*noise of 4 bands"
        with pytest.raises(ValueError, match=found):
            train(sampler, 7, Other)
    assert rounds.contents(tmp_path) == before


def pasts(state):
    return state.aggregator.query_state.numerator_state.past


@pytest.fixture(scope="module")
def process(context):
    return real_rounds.process("gaussian")


@pytest.mark.slow
def test_real_rounds_go_on(process, tmp_path):
    def train(num_rounds):
        real_rounds.report(tmp_path, "gaussian", process)
        managers = monitor.monitors(tmp_path)
        trained = real_rounds.train(tmp_path, num_rounds, "gaussian", process, managers)
        real_rounds.report(tmp_path, "gaussian", process)
        return trained

    assert train(2).num_finished == 2
    trained = train(4)
    assert trained.num_finished == trained.ledger.num_releases == 4
    last = check_real_record(tmp_path, "gaussian")
    assert (last["finished"], last["counted"]) == (4, 4)
    with open(tmp_path / "figures.csv") as file:
        table = list(csv.DictReader(file))
    assert [row["round"] for row in table] == ["1", "2", "3", "4"]
    names = {name for row in table for name, value in row.items() if value}
    assert {"privacy/epsilon", "privacy/clip_norm", "not_private/train/loss"} < names
    assert {"not_private/optimizer/learning_rate", "not_private/optimizer/discarded_share"} < names
    assert not [name for name in names if "num_" in name or "clients" in name]


@pytest.mark.slow_after(1)
def test_a_private_process_is_never_run_without_its_ledger(process, tmp_path):
    sampler = real_rounds.sampler("gaussian")
    trained = program.train(process, real_rounds.dataset, sampler, 1, tmp_path)
    assert trained.ledger.num_releases == 1
    assert trained.ledger.privacy == process.privacy
    other = UserLedger(dataclasses.replace(process.privacy, noise_multiplier=0.25))
    with pytest.raises(ValueError, match="`ledger` must have the `privacy` of the process"):
        program.train(process, real_rounds.dataset, sampler, 2, tmp_path, ledger=other)
    event = dp_accounting.GaussianDpEvent(1.0)
    known = UserLedger(process.privacy, SimpleNamespace(description="A", provenance=event))
    with pytest.raises(ValueError, match="must have the `side_information` of the process"):
        program.train(process, real_rounds.dataset, sampler, 2, tmp_path, ledger=known)


def with_other_noise(process, noise_multiplier):
    """A process that says it has the privacy of another one."""
    privacy = dataclasses.replace(process.privacy, noise_multiplier=noise_multiplier)
    made = build_dp_fed_avg(real_rounds.model_fn, tff.learning.optimizers.build_sgdm(0.1), privacy)
    return SimpleNamespace(
        initialize=made.initialize,
        next=made.next,
        get_model_weights=made.get_model_weights,
        new_ledger=process.new_ledger,
    )


def test_other_noise_than_stated_costs_no_round(process, tmp_path):
    def train(process, folder, num_rounds=1):
        arguments = (process, real_rounds.dataset, real_rounds.sampler("gaussian"), num_rounds)
        return program.train(*arguments, tmp_path / folder)

    less, begun = with_other_noise(process, 0.1), []
    for other in (less, with_other_noise(process, 0.25)):
        with pytest.raises(ValueError, match="did not release what `privacy` says.*multiplier"):
            train(other, "new")
    assert not (tmp_path / "new").exists()
    # One that shows it after its first round only, and a run of which earlier versions saved that.
    changing = SimpleNamespace(**vars(less) | {"initialize": process.initialize})

    def next_with_less(state, datasets):
        begun.append(state)
        return less.next(less.initialize(), datasets)

    changing.next = next_with_less
    with pytest.raises(ValueError, match="did not release what `privacy` says.*multiplier 0.1"):
        train(changing, "run")
    before = rounds.contents(tmp_path)
    for again in (changing, process):
        for num_rounds in (1, 2):
            with pytest.raises(ValueError, match="Round 1 of the run in this directory did not"):
                train(again, "run", num_rounds)
    assert len(begun) == 1 and rounds.contents(tmp_path) == before


def test_a_round_whose_state_does_not_show_its_release_never_counts_as_stated(process, tmp_path):
    def next_without_aggregator(state, datasets):
        output = process.next(state, datasets)
        state = SimpleNamespace(global_model_weights=output.state.global_model_weights)
        return SimpleNamespace(state=state, metrics=output.metrics)

    def train(by):
        sampler = real_rounds.sampler("gaussian")
        return program.train(by, real_rounds.dataset, sampler, 2, tmp_path)

    parts = {n: getattr(process, n) for n in ("initialize", "get_model_weights", "new_ledger")}
    with pytest.raises(TypeError, match="no other aggregator around it"):
        train(SimpleNamespace(next=next_without_aggregator, **parts))
    with pytest.raises(ValueError, match="Round 1 of the run in this directory did not"):
        train(process)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "change, found",
    [
        (lambda d: d.map(lambda x, y: (tf.cast(x, tf.float64), y)), "float64"),
        (lambda d: d.unbatch(), "TensorSpec"),
        (lambda d: d.map(lambda x, y: {"x": x, "y": y}), "'x'"),
        (lambda d: next(iter(d)), "tuple"),
        (lambda d: next(iter(d))[0].numpy(), "ndarray"),
    ],
    ids=["another dtype", "examples", "another structure", "one batch", "an array"],
)
def test_data_of_the_wrong_type_cost_no_round(process, tmp_path, change, found):
    sampler = real_rounds.sampler("gaussian", bytes(range(32)))
    before = next(k for k in range(1, 20) if sampler.cohort(k))
    program.train(process, real_rounds.dataset, sampler, before, tmp_path)
    wrong = sampler.cohort(before)[-1]

    def train():
        def datasets(client):
            dataset = real_rounds.dataset(client)
            return change(dataset) if client == wrong else dataset

        return program.train(process, datasets, sampler, before + 1, tmp_path, max_failures=9)

    with pytest.raises(TypeError, match=f"(?s)`client_data` must give.*{found}.*does not count"):
        train()
    wrong = None
    trained = train()
    assert trained.num_begun == trained.num_finished == trained.ledger.num_releases == before + 1


def test_a_ledger_is_for_one_way_to_draw_cohorts(process, tmp_path):
    """ε of all rounds would else be computed as if all were drawn like the last ones."""
    first = real_rounds.sampler("gaussian")
    earlier = program.train(process, real_rounds.dataset, first, 1, tmp_path / "1").ledger
    cut = dataclasses.replace(first.sampling, max_batch_size=3)
    for other in (cut, FixedSizeSampling(3, 400), ShuffledEpochs(3, 400)):
        sampler = ClientSampler(real_rounds.CLIENTS, other)
        arguments = (process, real_rounds.dataset, sampler, 1, tmp_path / "2")
        with pytest.raises(ValueError, match="drawn in another way"):
            program.train(*arguments, ledger=earlier)
    assert not (tmp_path / "2").exists()


@pytest.mark.slow
def test_another_side_information_is_another_release(tmp_path):
    event = dp_accounting.GaussianDpEvent(1.0)

    def train(number, folder, ledger=None):
        one = ClientPreconditioner.from_arrays([[[number], [1.0]], None], provenance=event)
        process = build_dp_fed_avg(
            real_rounds.model_fn, build_adadps(one), real_rounds.privacy("gaussian")
        )
        sampler = real_rounds.sampler("gaussian", rounds.KEY)
        arguments = (process, real_rounds.dataset, sampler, 1, tmp_path / folder)
        return program.train(*arguments, ledger=ledger).ledger

    earlier = train(2.0, "first")
    assert train(2.0, "second", earlier).other_events == (event,)
    with pytest.raises(ValueError, match="must have the `side_information` of the process"):
        train(3.0, "third", earlier)
    with pytest.raises(ValueError, match="Changed: ledger at the beginning"):
        train(3.0, "first")


@pytest.mark.slow
def test_what_has_no_epsilon_is_refused_before_anything_happens(process, tmp_path):
    released = ClientPreconditioner.from_arrays(
        [[[2.0], [1.0]], None], provenance=dp_accounting.GaussianDpEvent(1.0)
    )
    privacy = real_rounds.privacy("gaussian")
    private = build_dp_fed_avg(real_rounds.model_fn, build_adadps(released), privacy)
    subsets = ClientSampler(real_rounds.CLIENTS, FixedSizeSampling(3, 400))
    with pytest.raises(ValueError, match="cannot be composed with batches of fixed size"):
        program.train(private, real_rounds.dataset, subsets, 1, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    wrapped = build_adaptive_fed_avg(
        real_rounds.model_fn,
        model_aggregator=tff.aggregators.as_weighted_aggregator(
            tff.aggregators.zeroing_factory(1e6, privacy.aggregator())
        ),
    )
    arguments = (wrapped, real_rounds.dataset, real_rounds.sampler("gaussian"), 1, tmp_path / "run")
    with pytest.raises(TypeError, match="with no other aggregator around it"):
        program.train(*arguments, ledger=UserLedger(privacy))
    assert not (tmp_path / "run").exists()
    with pytest.warns(UserWarning, match="there is no `ledger`: its rounds are not counted"):
        program.train(*arguments)


@pytest.mark.slow
def test_rounds_of_ones_own_go_on_with_the_sampler_of_the_run(process, tmp_path):
    sampler = real_rounds.sampler("gaussian")
    asked = []

    def data(client):
        asked.append(client)
        return real_rounds.dataset(client)

    two = program.train(process, data, sampler, 2, tmp_path)
    assert asked == two.sampler.cohort(0) + two.sampler.cohort(1)
    assert two.sampler.key != sampler.key
    asked.clear()
    program.train(process, data, sampler, 3, tmp_path)
    assert asked == two.sampler.cohort(two.ledger.num_releases)


def test_a_process_with_noise_and_without_ledger_is_warned_of(process, tmp_path):
    public = SimpleNamespace(
        initialize=process.initialize, get_model_weights=process.get_model_weights
    )
    public.next = lambda state, datasets: SimpleNamespace(state=state, metrics={})
    sampler = real_rounds.sampler("gaussian")
    with pytest.warns(UserWarning, match="there is no `ledger`: its rounds are not counted"):
        assert program.train(public, real_rounds.dataset, sampler, 1, tmp_path).ledger is None


def test_a_wrong_delta_is_refused_before_anything_happens(process, tmp_path):
    sampler = real_rounds.sampler("gaussian", rounds.KEY)  # whose first cohort has somebody
    with pytest.raises(ValueError, match="`delta` must"):
        program.train(process, real_rounds.dataset, sampler, 1, tmp_path / "run", delta=1.0)
    assert not (tmp_path / "run").exists()
    with pytest.warns(LargeDeltaWarning, match="well below 1 / num_users.*delta=0.5"):
        with pytest.raises(ZeroDivisionError):  # where the first data set is made
            program.train(process, lambda client: 1 / 0, sampler, 1, tmp_path / "run", delta=0.5)


@pytest.mark.slow
def test_no_cohort_is_drawn_for_two_rounds_of_one_ledger_or_of_two_runs(process, tmp_path):
    asked = []

    def data(client):
        asked.append(client)
        return real_rounds.dataset(client)

    def cohorts(name, sampler, rounds, ledger=None):
        asked.clear()
        folder = tmp_path / name
        made = program.train(process, data, sampler, rounds, folder, ledger=ledger)
        return list(asked), made.ledger

    key = bytes(range(32))
    kept = real_rounds.sampler("gaussian", key)
    expected = [[c for r in rs for c in kept.cohort(r)] for rs in (range(3), range(3, 6))]
    first, earlier = cohorts("first", kept, 3)
    second, both = cohorts("second", kept, 3, earlier)
    assert [first, second] == expected and first != second
    assert both.num_releases == 6
    assert cohorts("second", kept, 4, earlier)[0] == kept.cohort(6)
    # Without a key that somebody chose, runs have nothing to do with each other.
    fresh = real_rounds.sampler("gaussian")
    assert cohorts("third", fresh, 6)[0] != cohorts("fourth", fresh, 6)[0]


@pytest.mark.slow
def test_a_run_that_loses_one_worker_goes_on_and_both_cost_a_round(process, tmp_path):
    def train(data, num_rounds):
        sampler = real_rounds.sampler("gaussian", rounds.KEY)
        return program.train(process, data, sampler, num_rounds, tmp_path, max_failures=3)

    with contextlib.ExitStack() as opened:
        workers = [worker.WorkerProcess() for _ in range(2)]
        for started in workers:
            opened.callback(started.close)
        asked = []

        def killing(client):
            asked.append(client)
            if len(asked) in (5, 11):
                workers[len(asked) == 11].close()
            return real_rounds.dataset(client)

        with contexts.remote_context([w.address for w in workers], timeout=5):
            with pytest.warns(UserWarning, match="Lost the worker .* Its clients run again"):
                trained = train(killing, 2)
            # Its clients ran again in the same round, which was counted once.
            assert trained.num_finished == trained.num_begun == trained.ledger.num_releases == 2
            asked.extend([""] * (10 - len(asked)))
            with pytest.raises(contexts.WorkerLostError) as lost:
                train(killing, 4)
        assert set(lost.value.addresses) == {w.address for w in workers}
        again = worker.WorkerProcess(workers[1].port)
        opened.callback(again.close)
        with contexts.remote_context([again.address]):
            with pytest.warns(UserWarning, match="1 round was begun whose result is not"):
                trained = train(real_rounds.dataset, 4)
    assert (trained.num_finished, trained.num_begun, trained.ledger.num_releases) == (3, 4, 4)


def test_a_sampler_of_other_cohorts_is_refused(process, tmp_path):
    sampler = ClientSampler(real_rounds.CLIENTS[:-1], real_rounds.sampler("gaussian").sampling)
    with pytest.raises(ValueError, match="`total_clients` must be the number of clients"):
        program.train(process, real_rounds.dataset, sampler, 1, tmp_path / "run")
    assert not (tmp_path / "run").exists()
