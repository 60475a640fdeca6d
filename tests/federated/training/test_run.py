"""A run in its directory: who may go on with it, and what is refused and left unchanged."""

import json
import os
import shutil
import warnings

import numpy as np
import pytest
import tensorflow_federated as tff

from federated.privacy.user_ledger import UserLedger
from federated.privacy.user_level import UserLevelPrivacy
from federated.training import program
from federated.training import run as run_module
from federated.training.run import Run, _description, rounds_before
from tests.helpers import killable_rounds as rounds
from tests.helpers import real_rounds
from tests.helpers.crash_injection import CrashInjector
from tf_adaptive_dp.durable import files


@pytest.fixture(scope="module")
def one_round(tmp_path_factory):
    """A folder with a run of one round; copy it."""
    folder = tmp_path_factory.mktemp("one_round")
    rounds.train(folder, 1)
    return folder


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"noise_multiplier": 1.0}, "'noise_multiplier': 2.0.*'noise_multiplier': 1.0"),
        ({"total_clients": 9}, "'total_clients': 8.*'total_clients': 9"),
        ({"mechanism": "tree"}, "'mechanism': 'gaussian'.*'mechanism': 'tree'"),
        ({"ledger": None}, "Changed: ledger at the beginning: .*; privacy: .*, is None"),
        ({"counted": 1}, "was {.*'num_releases': 0.*is {.*'num_releases': 1"),
        ({"shape": 3}, r"another form.*more/0: float64\[2, 3\].*more/0: float64\[2, 2\]"),
        ({"seed": 5}, r"was 'Sampling\(seed=None\)', is 'Sampling\(seed=5\)'"),
        ({"clients": 2}, "clients: was 1, is 2"),
        ({"ids": "b"}, "Changed: client ids"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_other_arguments_are_refused(one_round, tmp_path, monkeypatch, changes, message):
    shutil.copytree(one_round, tmp_path, dirs_exist_ok=True)
    before = rounds.contents(tmp_path)
    process, changes = rounds.Process(tmp_path), dict(changes)
    if changes.pop("shape", None):
        initial = process.initialize() | {"more": (np.zeros([2, 2]),)}
        monkeypatch.setattr(process, "initialize", lambda: initial)
    sampling = rounds.Sampling(1000, changes.pop("seed", None))
    ids = changes.pop("ids", "ab"[: changes.pop("clients", 1)])
    sampler = rounds.Sampler(ids, sampling)
    counted = changes.pop("counted", 0)
    ledger = None
    if "ledger" not in changes:
        ledger = rounds.Ledger(rounds.Privacy(**changes))
        ledger.record_lost(counted)
    with pytest.raises(ValueError, match=message):
        program.train(process, str, sampler, 2, tmp_path / "run", ledger=ledger)
    assert rounds.contents(tmp_path) == before


def test_a_journal_describes_a_ledger_as_earlier_versions_did():
    """Or their runs could not resume. The number of clients is compared with that of `privacy`."""
    ledger = UserLedger(real_rounds.privacy("tree"))
    described = _description({}, real_rounds.sampler("tree"), ledger)
    assert set(described["ledger at the beginning"]) == {
        *("segments", "trees", "tree_rounds", "behind", "in_tree", "unknown"),
        *("noise", "side_information", "sampling"),
    }
    assert described["privacy"]["total_clients"] == 12


def test_rounds_with_another_noise_used_cohorts_too():
    earlier = UserLedger(UserLevelPrivacy(1.0, 12, 60, clip=1.0))
    earlier.record_lost(3)
    ledger = UserLedger.from_dict(earlier.to_dict(), UserLevelPrivacy(2.0, 12, 60, clip=1.0))
    ledger.record_lost(2)
    assert len(ledger.segments) == 2 and rounds_before(ledger) == 5
    assert rounds_before(None) == 0


def test_a_run_that_was_copied_goes_on(one_round, tmp_path):
    shutil.copytree(one_round, tmp_path, dirs_exist_ok=True)
    assert rounds.train(tmp_path, 2).num_begun == 2


def test_a_second_run_in_the_directory_is_refused(tmp_path):
    class Second(tff.program.ReleaseManager):
        async def release(self, value, key):
            with pytest.raises(RuntimeError, match="in progress in another process"):
                rounds.train(tmp_path, 3)
            refused.append(key)

    refused = []
    sampler = rounds.Sampler(["a"], rounds.Sampling())
    program.train(
        rounds.Process(tmp_path),
        str,
        sampler,
        1,
        tmp_path / "run",
        ledger=rounds.ledger("gaussian"),
        release_managers=[Second()],
    )
    assert refused == [1]


def test_a_second_process_in_the_directory_is_refused(tmp_path):
    run = rounds.opened(tmp_path)
    holding = Run(
        run.process, run.sampler, tmp_path / "run", rounds.ledger("gaussian"), max_failures=0
    )
    job = {"what": "train", "folder": str(tmp_path), "rounds": 1}
    with CrashInjector("killable_rounds") as other:
        assert other.run(job) == 1
        assert not rounds.record(tmp_path)
        holding.journal.close()
        assert other.run(job) == 0
    assert len(rounds.record(tmp_path)) == 3


def states(folder):
    return folder / "run/secret/states"


def test_a_damaged_state_is_an_error(tmp_path):
    rounds.train(tmp_path, 2)
    path = states(tmp_path) / "round_2.state"
    content = path.read_bytes()
    for wrong in [content[: len(content) // 2], content[:-1], content + b"0", b""]:
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match="saved state cannot be read.*round_2"):
            rounds.train(tmp_path, 3)
    path.write_bytes(content)
    assert rounds.train(tmp_path, 3)[2:4] == (3, 3)


def test_a_state_that_was_renamed_does_not_lower_the_count(tmp_path):
    rounds.train(tmp_path, 5)
    os.replace(states(tmp_path) / "round_4.state", states(tmp_path) / "round_5.state")
    before = rounds.contents(tmp_path)
    with pytest.raises(ValueError, match="it is the state of round 4"):
        rounds.train(tmp_path, 5)
    assert rounds.contents(tmp_path) == before


@pytest.mark.slow
def test_a_tree_run_of_an_earlier_version_is_refused(context, tmp_path):
    """Its states had all levels in one array, and the noise of the last sum."""
    made = real_rounds.process("tree")

    def train(num_rounds):
        sampler = real_rounds.sampler("tree", rounds.KEY)
        folder = tmp_path / "run"
        return program.train(made, real_rounds.dataset, sampler, num_rounds, folder)

    train(2)
    path = tmp_path / "run/secret/journal"
    first, _, others = path.read_bytes().partition(b"\n")
    description = json.loads(files.checked(first + b"\n"))
    leaves, place = description["run"]["state"], "aggregator/query_state/numerator_state"
    start = leaves.index(f"{place}/nodes/0: float32[0]")
    assert leaves[start + 2] == f"{place}/nodes/2: float32[0]"
    leaves[start : start + 3] = [f"{place}/nodes: float32[3, 6]", f"{place}/previous: float32[6]"]
    path.write_bytes(files.with_checksum(json.dumps(description, sort_keys=True).encode()) + others)
    before = rounds.contents(tmp_path)
    message = "an earlier version of this library began the run.*arguments and the version that"
    with pytest.raises(ValueError, match=message) as error:
        train(3)
    # It names these leaves, and none of the twenty that are the same.
    assert "/previous: float32[6]" in str(error.value) and "finalizer" not in str(error.value)
    assert rounds.contents(tmp_path) == before


@pytest.mark.parametrize("mechanism", ["gaussian", "tree", "banded"])
def test_rounds_whose_state_vanished_stay_counted(tmp_path, mechanism):
    rounds.train(tmp_path, 3, mechanism)
    (states(tmp_path) / "round_3.state").unlink()
    with pytest.warns(UserWarning, match="^1 round was"):
        trained = rounds.train(tmp_path, 4, mechanism)
    assert (trained.ledger.num_releases, trained.num_finished) == (4, 3)
    released = [e["number"] for e in rounds.record(tmp_path) if e["event"] == "released"]
    assert released == [1, 2, 3, 4]


def test_a_process_that_cannot_be_searched_is_told_in_the_ledger(context, tmp_path, monkeypatch):
    """Also where the run began with one that could."""
    made, privacy = real_rounds.process("gaussian"), real_rounds.privacy("gaussian")
    for searched in (True, False):
        monkeypatch.setattr(run_module, "check_releases", lambda process, known=searched: known)
        sampler = real_rounds.sampler("gaussian", rounds.KEY)
        run = Run(made, sampler, tmp_path, UserLedger(privacy), max_failures=0)
        run.journal.close()
        assert run.ledger.releases_unknown is not searched


@pytest.mark.parametrize("mechanism", ["gaussian", None])
def test_a_run_without_any_of_its_states_is_refused(tmp_path, mechanism):
    rounds.train(tmp_path, 3, mechanism)
    shutil.rmtree(states(tmp_path))
    with pytest.raises(ValueError, match="3 rounds in the journal.*state is missing"):
        rounds.train(tmp_path, 4, mechanism)


def test_a_journal_that_lost_its_end_is_refused(tmp_path):
    rounds.train(tmp_path, 3)
    path = tmp_path / "run/secret/journal"
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in (0, 1, len(lines) - 3):
        path.write_bytes(b"".join(lines[:kept]))
        with pytest.raises(ValueError, match="last saved state is of round 3"):
            rounds.train(tmp_path, 4)
    path.write_bytes(b"".join(lines))
    assert rounds.train(tmp_path, 4).num_begun == 4


@pytest.mark.parametrize("content", [None, b"", b'{"run": {'], ids=["gone", "empty", "torn"])
def test_a_run_whose_journal_is_gone_does_not_forget_its_lost_rounds(tmp_path, content):
    with pytest.raises(ConnectionError):
        rounds.train(tmp_path, 3, failing=(True,))
    path = tmp_path / "run/secret/journal"
    journal = path.read_bytes()
    path.unlink() if content is None else path.write_bytes(content)
    before = rounds.contents(tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match="journal.*gone.*saved state is of round 0"):
            rounds.train(tmp_path, 3)
    assert rounds.contents(tmp_path) == before
    path.write_bytes(journal)
    with pytest.warns(UserWarning, match="1 round was begun"):
        assert rounds.train(tmp_path, 3).ledger.num_releases == 3


@pytest.mark.parametrize("kept", ["sampler_key", "best"])
def test_no_run_begins_with_the_key_or_the_best_state_of_another_one(tmp_path, kept):
    rounds.train(tmp_path, 2, evaluated=True)
    secret = tmp_path / "run/secret"
    for path in secret.iterdir():
        if path.name != kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = rounds.contents(tmp_path)
    with pytest.raises(ValueError, match=f"journal.*gone.*another directory.*there is {kept}$"):
        rounds.train(tmp_path, 2, evaluated=True)
    assert rounds.contents(tmp_path) == before


def test_what_has_to_stay_secret_is_for_the_owner_alone(tmp_path):
    rounds.train(tmp_path, 1)
    secret = tmp_path / "run/secret"
    assert secret.stat().st_mode & 0o777 == 0o700
    assert (secret / "sampler_key").stat().st_mode & 0o777 == 0o600
    assert (secret / "journal").stat().st_mode & 0o777 == 0o600


def test_a_run_keeps_the_key_of_its_sampler(tmp_path):
    def key(passed):
        sampler = rounds.Sampler(["a"], rounds.Sampling(), passed)
        run = Run(rounds.Process(tmp_path), sampler, tmp_path, None, 0)
        run.journal.note("begun", run.journal.begun + 1)
        run.journal.close()
        return run.sampler.key

    assert key(rounds.KEY) == key(os.urandom(32)) == rounds.KEY
    (tmp_path / "secret/sampler_key").unlink()
    with pytest.raises(ValueError, match="key of the run's sampler is missing"):
        key(rounds.KEY)


def test_a_new_run_has_the_key_that_its_sampler_makes_for_it(tmp_path):
    """With the key of an earlier run it would draw the cohorts of that run once more."""

    class Sampler(rounds.Sampler):
        def for_new_run(self):
            return type(self)(self.client_ids, self.sampling, bytes(32))

    for _ in range(2):  # and keeps it when it resumes
        sampler = Sampler(["a"], rounds.Sampling(), rounds.KEY)
        run = Run(rounds.Process(tmp_path), sampler, tmp_path, None, 0)
        run.journal.close()
        assert run.sampler.key == (tmp_path / "secret/sampler_key").read_bytes() == bytes(32)


@pytest.mark.parametrize(
    "how, may_drop_out",
    [({}, False), ({"dropout": 0.5}, True), ({"on_client_error": "drop"}, True)],
    ids=str,
)
def test_the_ledger_of_a_run_says_how_its_clients_came(tmp_path, how, may_drop_out):
    sampler, ledger = rounds.Sampler(["a"], rounds.Sampling()), rounds.Ledger(rounds.Privacy())
    run = Run(rounds.Process(tmp_path), sampler, tmp_path, ledger, 0, **how)
    run.journal.close()
    assert getattr(run.ledger, "clients_may_drop_out", False) == may_drop_out
    assert run.ledger.sampling == "Sampling(seed=None)"


@pytest.mark.parametrize("of", ["the sampler", "the noise"])
def test_what_contradicts_the_ledger_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, of
):
    kind, name = {
        "the sampler": (rounds.Sampler, "checked"),
        "the noise": (rounds.Ledger, "check_noise"),
    }[of]

    def refuse(*args):
        raise ValueError(f"{of} is another one")

    monkeypatch.setattr(kind, name, refuse)
    sampler, ledger = rounds.Sampler(["a"], rounds.Sampling()), rounds.Ledger(rounds.Privacy())
    with pytest.raises(ValueError, match=f"{of} is another one"):
        Run(rounds.Process(tmp_path), sampler, tmp_path / "run", ledger, 0)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("bit", [0, 3, 255])
def test_a_key_with_one_flipped_bit_is_refused(tmp_path, bit):
    rounds.train(tmp_path, 2)
    path = tmp_path / "run/secret/sampler_key"
    key = bytearray(path.read_bytes())
    key[bit // 8] ^= 1 << bit % 8
    path.write_bytes(key)
    journal = (tmp_path / "run/secret/journal").read_bytes()
    with pytest.raises(ValueError, match="key of the run's sampler is damaged.*sampler_key"):
        rounds.train(tmp_path, 3)
    assert (tmp_path / "run/secret/journal").read_bytes() == journal
    path.write_bytes(rounds.KEY)
    assert rounds.train(tmp_path, 3).num_begun == 3


def test_a_copied_run_is_told_from_a_moved_one(tmp_path):
    rounds.train(tmp_path, 2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "moved").rename(tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rounds.train(tmp_path, 3)
    (tmp_path / "run").rename(tmp_path / "original")
    (tmp_path / "copy").rename(tmp_path / "run")
    for _ in range(2):  # not only the first time
        with pytest.warns(UserWarning, match="is a copy, or was restored.*ε is too small"):
            rounds.train(tmp_path, 3)
