"""Clients that drop out cost signal, never privacy: the round goes on as if they had sent zeros."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from federated.privacy.client_sampling import (
    ClientSampler,
    EveryClient,
    FixedSizeSampling,
    PoissonSampling,
    ShuffledEpochs,
)
from federated.privacy.user_epsilon import epsilon_spent, privacy_statement
from federated.privacy.user_ledger import UserLedger
from federated.privacy.user_level import UserLevelPrivacy
from federated.training import program
from federated.training.dropout import Dropping
from federated.training.processes import build_dp_fed_avg
from tests.helpers import killable_rounds as rounds
from tests.helpers import real_rounds

KEY = bytes(range(32))
CLIENTS = [f"client {k}" for k in range(100)]


def left(dropping, cohort=CLIENTS, number=1):
    return dropping.left(cohort, number, lambda client: client)[0]


def test_clients_drop_out_at_the_rate_and_independently():
    dropping = Dropping(0.3, "raise", KEY)
    rounds_of = [set(left(dropping, number=n)) for n in range(100)]
    stays = np.array([[client in there for client in CLIENTS] for there in rounds_of])
    for mean in (stays.mean(), *stays.mean(axis=0).reshape(10, 10).mean(axis=1)):
        assert abs(mean - 0.7) < 0.06
    pairs = np.corrcoef(stays.T.astype(float))
    assert abs(pairs[~np.eye(100, dtype=bool)]).mean() < 0.12  # 0.08 for 100 independent rounds


@pytest.mark.parametrize("dropout", [0.5, lambda client, number: int(client[-1]) < 5])
def test_who_drops_out_does_not_depend_on_who_else_is_drawn(dropout):
    dropping = Dropping(dropout, "raise", KEY)
    together = left(dropping)
    assert 20 < len(together) < 80
    assert together == [c for c in CLIENTS if left(dropping, [c])]
    assert together == left(Dropping(dropout, "raise", KEY))  # when the run resumes, too


def test_rounds_and_runs_differ():
    dropping = Dropping(0.5, "raise", KEY)
    assert left(dropping, number=1) != left(dropping, number=2)
    assert left(dropping) != left(Dropping(0.5, "raise", bytes(32)))
    for nobody in (None, 0.0):
        assert left(Dropping(nobody, "raise", KEY)) == CLIENTS


def failing_to_read(client):
    def check(x):
        with tf.control_dependencies([tf.debugging.Assert(x < 2, ["unreadable"])]):
            return tf.identity(x)

    dataset = tf.data.Dataset.range(3)
    return dataset.map(check) if client == "bad" else dataset


def failing_to_make(client):
    if client == "bad":
        raise FileNotFoundError("no such file")
    return tf.data.Dataset.range(3)


@pytest.mark.parametrize(
    ("datasets", "why"), [(failing_to_read, "unreadable"), (failing_to_make, "no such file")]
)
def test_a_client_whose_data_cannot_be_read_drops_out_if_it_may(datasets, why):
    with pytest.warns(UserWarning, match=f"(?s)Client 'bad' drops out of round 7: .*{why}"):
        clients, data = Dropping(None, "drop", KEY).left(["a", "bad", "b"], 7, datasets)
    assert clients == ["a", "b"] and len(data) == 2
    if datasets is failing_to_make:
        with pytest.raises(FileNotFoundError):
            Dropping(None, "raise", KEY).left(["bad"], 7, datasets)


@pytest.mark.parametrize(
    ("dropout", "on_error", "message"),
    [
        (1.0, "raise", "`dropout` must be below 1"),
        (-0.1, "raise", "`dropout` must be finite and at least 0"),
        (None, "skip", "`on_client_error` must be one of"),
    ],
)
def test_bad_arguments_are_refused(dropout, on_error, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Dropping(dropout, on_error, KEY)
    with pytest.raises(ValueError, match=message):
        rounds.train(tmp_path, 1, None, dropout=dropout, on_client_error=on_error)
    assert not (tmp_path / "run").exists()


# --- rounds


def clients_of(folder):
    return [e["clients"] for e in rounds.record(folder) if e["event"] == "began"]


def train(folder, num_rounds, mechanism="gaussian", **options):
    ledger = rounds.ledger(mechanism)
    sampler = rounds.Sampler(["a"], rounds.Sampling())
    return program.train(
        rounds.Process(folder),
        str,
        sampler,
        num_rounds,
        folder / "run",
        ledger=ledger,
        release_managers=[rounds.witness(folder)],
        **options,
    )


def test_a_round_that_everybody_dropped_out_of_is_released_and_counted(tmp_path):
    trained = train(tmp_path, 4, dropout=lambda client, number: number in (2, 3))
    assert clients_of(tmp_path) == [["client 0"], [], [], ["client 3"]]
    assert trained.num_finished == trained.ledger.num_releases == 4


def test_a_private_round_is_never_held_back_for_want_of_clients(tmp_path):
    with pytest.raises(ValueError, match="`min_clients` must be 0 in a private run"):
        train(tmp_path, 4, min_clients=1)
    assert not (tmp_path / "run").exists()


def test_a_public_round_with_too_few_clients_is_a_failure(tmp_path):
    options = {"dropout": lambda client, number: number == 2, "min_clients": 1}
    with pytest.raises(RuntimeError, match="0 of 1 clients are left, and `min_clients` is 1"):
        train(tmp_path / "strict", 3, None, **options)
    with pytest.warns(UserWarning, match="Round 2 failed: RuntimeError"):
        trained = train(tmp_path, 3, None, max_failures=1, **options)
    assert (trained.num_finished, trained.num_begun) == (3, 4)
    assert clients_of(tmp_path) == [["client 0"], ["client 1"], ["client 2"]]


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("kind", ["poisson", "fixed size", "passes"])
def test_a_cohort_that_is_too_small_is_drawn_anew_where_rounds_are_independent(
    tmp_path, kind, resumed
):
    sampling = {
        "poisson": PoissonSampling(0.5, 9, steps=12),
        "fixed size": FixedSizeSampling(4, steps=12),
        "passes": ShuffledEpochs(4, steps=12),
    }[kind]
    sampler = ClientSampler(CLIENTS[:8], sampling, KEY)
    gone = sampler.cohort(1)[:3]  # for good, so that this cohort never has enough

    def run(**options):
        return program.train(
            *(rounds.Process(tmp_path), str, sampler, 12, tmp_path / "run"),
            dropout=lambda client, number: client in gone,
            min_clients=2,
            **options,
        )

    if kind == "passes":
        with pytest.warns(UserWarning, match="The next round has the same cohort"):
            with pytest.raises(RuntimeError):
                run(max_failures=5)
        assert len(clients_of(tmp_path)) == 1
        return
    with pytest.warns(UserWarning, match="Round .* failed: .*Another cohort is drawn"):
        if not resumed:
            trained = run(max_failures=30)
        for _ in range(30 if resumed else 0):
            try:
                trained = run(max_failures=1)
                break
            except RuntimeError:
                pass
    assert trained.num_finished == 12 < trained.num_begun
    cohorts = [[c for c in sampler.cohort(k) if c not in gone] for k in range(12)]
    usable = [c for c in cohorts if len(c) >= 2]
    # Then the first ones come again.
    assert clients_of(tmp_path) == (usable * 12)[:12]


def test_a_public_run_shows_how_many_dropped_out(tmp_path):
    train(tmp_path, 2, None, dropout=lambda client, number: number == 2)
    released = [e["figures"] for e in rounds.record(tmp_path) if e["event"] == "released"]
    assert [f["train/clients"] for f in released] == [1, 0]
    assert [f.get("train/dropped_clients") for f in released] == [None, 1]


def test_a_private_run_shows_no_number_of_clients(tmp_path):
    train(tmp_path, 2, "gaussian", dropout=lambda client, number: number == 2)
    released = [e["figures"] for e in rounds.record(tmp_path) if e["event"] == "released"]
    assert len(released) == 2
    for figures in released:
        assert not [name for name in figures if "client" in name or "examples" in name]


PRIVACY = UserLevelPrivacy(1.3, 50, 2000, clip=1.0)


def test_the_ledger_and_the_statement_say_that_clients_could_drop_out():
    plain, dropped = UserLedger(PRIVACY), UserLedger(PRIVACY)
    dropped.clients_may_drop_out = True
    for ledger in (plain, dropped):
        ledger.record_lost(20)
    sampling = PoissonSampling.for_batch_size(50, 2000, steps=20)
    assert epsilon_spent(plain, 1e-4, sampling=sampling) == epsilon_spent(
        dropped, 1e-4, sampling=sampling
    )
    restored = UserLedger.from_dict(dropped.to_dict(), PRIVACY)
    assert restored.clients_may_drop_out and "clients_may_drop_out" not in plain.to_dict()
    for ledger, said in ((plain, False), (restored, True)):
        text = " ".join(privacy_statement(ledger, 1e-4, sampling=sampling).split())
        assert ("could drop out of a round" in text) == said
        assert "expected cohort size 50 of 2000 users" in text


@pytest.fixture(scope="module")
def noiseless(context):
    """Sums without noise, so that they can be compared; clipped at less than most updates."""
    return build_dp_fed_avg(
        real_rounds.model_fn,
        tff.learning.optimizers.build_sgdm(1.0),
        UserLevelPrivacy(0.0, 4, 4, clip=0.3),
        tff.learning.optimizers.build_sgdm(1.0),
    )


@pytest.mark.slow
def test_the_rest_is_divided_by_the_size_that_was_expected(noiseless, tmp_path):
    """A round without some clients is the sum of rounds of one client each, of those who stay."""
    ids = real_rounds.CLIENTS[:4]
    start = noiseless.initialize()

    def moved(state):
        before, after = map(noiseless.get_model_weights, (start, state))
        parts = zip(before.trainable, after.trainable)
        return np.concatenate([np.ravel(a - b) for a, b in parts])

    alone = {c: moved(noiseless.next(start, [real_rounds.dataset(c)]).state) for c in ids}
    sampler = ClientSampler(ids, EveryClient())
    for gone in (ids[:1], ids[1:3], ids):
        trained = program.train(
            noiseless,
            real_rounds.dataset,
            sampler,
            1,
            tmp_path / str(len(gone)),
            dropout=lambda client, number, gone=gone: client in gone,
        )
        expected = sum(alone[c] for c in ids if c not in gone) + 0 * alone[ids[0]]
        np.testing.assert_allclose(moved(trained.state), expected, atol=1e-6)
        assert trained.ledger.clients_may_drop_out and trained.ledger.num_releases == 1
    # So one client moves the sum by at most C, whoever else dropped out.
    for one in alone.values():
        assert 0 < np.linalg.norm(one) <= 0.3 / 4 * (1 + 1e-5)
