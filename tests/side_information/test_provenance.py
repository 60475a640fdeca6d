"""What is said of side information: in the statement, the logs, the warnings."""

import glob
import math
import warnings

import dp_accounting
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tf_adaptive_dp.accounting.accountants import is_unprotected

N, DELTA = 1_000, 1e-4
IDEAL = dp_accounting.NonPrivateDpEvent()
RELEASED = dp_accounting.GaussianDpEvent(4.0)


def words(text):
    return " ".join(text.split())


def tokens(provenance):
    return dp.side_information.token_frequencies([5, 1, 0, 2, 9, 3], provenance=provenance)


def trained(provenance, *callbacks):
    model = catalogue.mlp()
    optimizer = dp.AdaDPS(tokens(provenance), 1.0, 2.0)
    model.compile(optimizer, loss=catalogue.loss())
    history = catalogue.fit(model, 2, callbacks).history
    return optimizer, history


@pytest.mark.parametrize(
    "make, description",
    [
        (
            lambda: dp.side_information.FixedPreconditioner({}, provenance="public"),
            "fixed preconditioner",
        ),
        (lambda: tokens("public"), "token frequencies"),
        (lambda: dp.side_information.tf_idf([1.0], provenance="public"), "TF-IDF scores"),
        (
            lambda: dp.side_information.PublicGradients(catalogue.PUBLIC, provenance="public"),
            "PublicGradients",
        ),
    ],
)
def test_the_statement_names_the_side_information(make, description):
    optimizer = dp.AdaDPS(make(), 1.0, 2.0)
    assert optimizer.side_information.description == description
    optimizer.ledger.restore([(2.0, 8.0, 4)])
    text = words(dp.privacy_statement(optimizer, N, DELTA))
    assert f"Side information: {description}, public. The data it was computed from are" in text
    assert "Side information" not in dp.privacy_statement(optimizer.ledger, N, DELTA)


@pytest.mark.slow_on(2)
def test_the_statement_names_the_release_of_side_information():
    monitor = dp.PrivacyMonitor(N, DELTA, full_passes=False)
    optimizer, _ = trained(RELEASED, monitor)
    text = words(monitor.statement())
    said = "Side information: token frequencies, released by GaussianDpEvent(noise_multiplier=4.0);"
    assert f"{said} included in epsilon." in text
    optimizer.ledger.other_events = ()
    without = dp.epsilon_spent(optimizer, N, DELTA)
    text = words(dp.privacy_statement(optimizer, N, DELTA))
    assert "(noise_multiplier=4.0), which epsilon does NOT include." in text
    optimizer.ledger.other_events = (RELEASED,)
    assert dp.epsilon_spent(optimizer, N, DELTA) > without + 0.5


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("event", [RELEASED, IDEAL])
def test_a_ledger_that_lost_the_release_of_side_information_is_refused(event):
    model = catalogue.mlp()
    optimizer = dp.AdaDPS(tokens(event), 1.0, 2.0)
    model.compile(optimizer, loss=catalogue.loss())
    optimizer.ledger.other_events = (dp_accounting.GaussianDpEvent(9.0),)  # where `+=` was meant
    for callbacks in ([], [dp.PrivacyMonitor(N, DELTA, full_passes=False)]):
        with pytest.raises(
            dp.NotPrivateError, match="lacks the release of the .* side information"
        ):
            catalogue.fit(model, 2, callbacks)
    assert not optimizer.ledger.num_releases
    optimizer.ledger.other_events += (event,)
    catalogue.fit(model, 2)


def test_an_optimizer_can_be_validated_whose_side_information_was_released():
    model = catalogue.mlp()
    model.compile(dp.AdaDPS(tokens(RELEASED), 1.0, 2.0), loss=catalogue.loss())
    assert dp.validation.validate(model, catalogue.data()).ok


def test_public_and_released_side_information_raise_no_alarm():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens("public")
        tokens(RELEASED)


@pytest.mark.parametrize(
    "event, expected",
    [
        (IDEAL, True),
        (dp_accounting.ComposedDpEvent([RELEASED, IDEAL]), True),
        (dp_accounting.SelfComposedDpEvent(IDEAL, 2), True),
        (dp_accounting.GaussianDpEvent(0.0), True),
        (RELEASED, False),
        (dp_accounting.LaplaceDpEvent(0.01), False),
        (dp_accounting.NoOpDpEvent(), False),
        (dp_accounting.UnsupportedDpEvent(), False),
    ],
)
def test_a_release_without_privacy_is_known(event, expected):
    assert is_unprotected(event) is expected
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        tokens(event)
    assert ["NOT PRIVATE" in str(w.message) for w in found] == [True] * expected


@pytest.mark.filterwarnings("ignore:NOT PRIVATE")
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize(
    "sampling", ["shuffled", "poisson", dp.PoissonSampling(8 / N, max_batch_size=32, steps=8)]
)
def test_epsilon_of_the_ideal_bound_is_infinite_for_every_accountant(sampling, accountant):
    optimizer = dp.AdaDPS(tokens(IDEAL), 1.0, 2.0, expected_batch_size=8)
    for segments in ([], [(2.0, 8.0, 4)]):
        optimizer.ledger.restore(segments)
        assert dp.epsilon_spent(optimizer, N, DELTA, accountant=accountant) == math.inf
        arguments = {"sampling": sampling, "accountant": accountant}
        text = words(dp.privacy_statement(optimizer, N, DELTA, **arguments))
        assert text.startswith("NOT PRIVATE: epsilon is infinite because the release NonPrivate")
        assert "Side information: token frequencies, NOT PRIVATE" in text
        assert "Differential privacy" not in text and "Protected" not in text


@pytest.mark.filterwarnings("ignore:NOT PRIVATE")
def test_epsilon_of_the_ideal_bound_is_infinite_for_batches_of_fixed_size():
    optimizer = dp.AdaDPS(tokens(IDEAL), 1.0, 2.0, expected_batch_size=8)
    optimizer.ledger.restore([(2.0, 8.0, 4)])
    text = dp.privacy_statement(optimizer, N, DELTA, sampling="fixed")
    assert text.startswith("NOT PRIVATE")
    released = dp.AdaDPS(tokens(RELEASED), 1.0, 2.0, expected_batch_size=8)
    released.ledger.restore([(2.0, 8.0, 4)])
    with pytest.raises(ValueError, match="cannot be composed with batches of fixed size"):
        dp.privacy_statement(released, N, DELTA, sampling="fixed")


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.filterwarnings("ignore:NOT PRIVATE")
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_the_monitor_says_not_private_wherever_it_reports(accountant, tmp_path, capsys):
    monitor = dp.PrivacyMonitor(
        N, DELTA, tmp_path / "logs", accountant=accountant, full_passes=False
    )
    csv = tf.keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    model = catalogue.mlp()
    model.compile(dp.AdaDPS(tokens(IDEAL), 1.0, 2.0), loss=catalogue.loss())
    history = catalogue.fit(model, 2, [monitor, csv], verbose=2).history
    assert history["epsilon"] == [math.inf] * 2 and history["NOT_PRIVATE"] == [1.0] * 2
    printed = capsys.readouterr().out
    assert printed.count("epsilon: inf") == printed.count("NOT_PRIVATE: 1") == 2
    header, *rows = (tmp_path / "log.csv").read_text().splitlines()
    assert "NOT_PRIVATE" in header.split(",") and all("inf" in row for row in rows)
    (path,) = glob.glob(str(tmp_path / "logs" / "*"))
    tags = {
        value.tag
        for record in tf.data.TFRecordDataset(path)
        for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value
    }
    assert "privacy/NOT_PRIVATE" in tags
    assert monitor.statement().startswith("NOT PRIVATE")


@pytest.mark.slow_on(2)
def test_a_private_run_has_no_such_entry(tmp_path):
    _, history = trained(
        "public", dp.PrivacyMonitor(N, DELTA, tmp_path / "logs", full_passes=False)
    )
    assert "NOT_PRIVATE" not in history and math.isfinite(history["epsilon"][-1])
    (path,) = glob.glob(str(tmp_path / "logs" / "*"))
    assert b"privacy/NOT_PRIVATE" not in open(path, "rb").read()


@pytest.mark.filterwarnings("ignore:NOT PRIVATE")
@pytest.mark.parametrize("sampling", ["shuffled", "fixed"])
def test_no_budget_has_room_for_the_ideal_bound(sampling):
    budget = dp.PrivacyBudget(1e6, DELTA, N, batch_size=8, sampling=sampling, full_passes=False)
    with pytest.raises(dp.BudgetExceededError, match="NOT PRIVATE: NonPrivateDpEvent.*infinite"):
        trained(IDEAL, budget)
