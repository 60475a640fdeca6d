"""The text that goes with a model."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
import types

import dp_accounting
import numpy as np
import pytest

import tf_adaptive_dp as dp
from tests.helpers import HAS_TF_PRIVACY, tf_privacy
from tests.helpers.sampled import fake_ledger
from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp.accounting import BandedNoise
from tf_adaptive_dp.accounting.composition import (
    epsilon,
    epsilon_spent,
    epsilon_without_amplification,
)
from tf_adaptive_dp.accounting.releases import BatchChecks, Releases, Segment
from tf_adaptive_dp.sampling import (
    CyclicPoissonSampling,
    FixedOrder,
    FixedSizeSampling,
    fixed_size_batches,
    shuffled_batches,
)
from tf_adaptive_dp.statement import privacy_statement

N, DELTA = 60_000, 1e-5


def gaussians(*releases):
    """RDP's ε of `(noise_multiplier, count)` without sampling."""
    accountant = dp_accounting.rdp.RdpAccountant()
    for noise_multiplier, count in releases:
        accountant.compose(dp_accounting.GaussianDpEvent(noise_multiplier), count)
    return accountant.get_epsilon(DELTA)


def words(*args, **kwargs):
    return " ".join(privacy_statement(*args, **kwargs).split())


ONE = fake_ledger((2.0, 200.0, 6_000))
TWO = fake_ledger((2.0, 200.0, 6_000), (1.5, 100.0, 31))


def test_the_printed_delta_is_not_below_the_one_that_epsilon_is_for():
    text = words(ONE, N, 1.000004999e-5, sampling="poisson")
    assert "delta = 1.00001e-05" in text and "delta = 1e-05" in words(ONE, N, DELTA)


def test_a_delta_that_the_end_of_the_noise_may_exceed_is_pointed_out():
    said = "it ends at 8.24 standard deviations"
    assert said in words(ONE, N, 1e-9, sampling="poisson")
    assert said not in words(ONE, N, 1e-8, sampling="poisson")


# --- noise with a seed ------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["poisson", "shuffled", "fixed"])
@pytest.mark.parametrize("noise", [{}, {"noise": BandedNoise(2)}])
def test_noise_with_a_seed_protects_nobody(sampling, noise):
    if noise:
        if sampling != "poisson":
            pytest.skip("accounted for with samplings of its own only")
        sampling = CyclicPoissonSampling.for_batch_size(200, N, 600, 2)

    def said(**kwargs):
        optimizer = dp.DPSGD(1.0, 2.0, expected_batch_size=200.0, **noise, **kwargs)
        optimizer.ledger.restore([(2.0, 200.0, 600)], [BatchChecks(checked=600)])
        return words(optimizer, N, DELTA, sampling=sampling)

    secret, seeded = said(), said(seed=1234567)
    assert "NOT PRIVATE" not in secret and "seed" not in secret
    assert seeded.startswith("NOT PRIVATE unless the seed of the noise is secret")
    assert "epsilon protects nobody from them" in seeded
    assert "is a proven upper bound" not in seeded and "TF Privacy's statement" not in seeded
    # The statement is published, and the seed of whoever goes on with it must not be.
    assert "1234567" not in seeded
    other = "only against those who know no seed of the run"
    if isinstance(sampling, CyclicPoissonSampling):
        assert "is a proven upper bound" in secret
        assert f"This epsilon is an upper bound {other}." in seeded
    elif sampling != "shuffled":  # a label
        assert "if so, this epsilon is an upper bound. The library verified" in secret
        assert f"if so, this epsilon is an upper bound {other}. The library verified" in seeded


# --- ε without amplification -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "epochs"), [(1, 1), (300, 1), (301, 2), (5_999, 20), (6_000, 20), (6_001, 21)]
)
def test_epochs_are_rounded_up(count, epochs):
    ours = epsilon_without_amplification(fake_ledger((2.0, 200.0, count)), N, DELTA)
    assert ours == pytest.approx(gaussians((2.0, epochs)), rel=1e-12)


def test_a_pass_may_drop_its_last_batch():
    # 10 examples in batches of 4: with the remainder dropped, 4 releases are two passes and not
    # the 1.6 of 4 * 4 / 10 examples; 20 releases are ten passes and not eight.
    ours = epsilon_without_amplification(fake_ledger((2.0, 4.0, 20)), 10, DELTA)
    assert ours == pytest.approx(gaussians((2.0, 10)), rel=1e-12)


def test_a_segment_that_begins_within_a_pass_may_see_an_example_once_more():
    aligned = fake_ledger((2.0, 200.0, 600), (1.5, 200.0, 300))
    ours = epsilon_without_amplification(aligned, N, DELTA)
    assert ours == pytest.approx(gaussians((2.0, 2), (1.5, 1)), rel=1e-12)
    within = fake_ledger((2.0, 200.0, 450), (1.5, 200.0, 300), (2.0, 200.0, 300))
    ours = epsilon_without_amplification(within, N, DELTA)
    assert ours == pytest.approx(gaussians((2.0, 2), (1.5, 2), (2.0, 2)), rel=1e-12)


def test_where_passes_end_is_unknown_if_batches_do_not_divide_the_data():
    # 5 batches of 4 are two passes over 10 examples, or two and a half with remainders dropped.
    ledger = fake_ledger((2.0, 4.0, 5), (1.5, 4.0, 2))
    ours = epsilon_without_amplification(ledger, 10, DELTA)
    assert ours == pytest.approx(gaussians((2.0, 3), (1.5, 2)), rel=1e-12)


def test_without_amplification_counts_other_events_and_missing_noise():
    event = dp_accounting.GaussianDpEvent(4.0)
    ledger = fake_ledger((2.0, 200.0, 6_000), other_events=(event,))
    ours = epsilon_without_amplification(ledger, N, DELTA)
    assert ours == pytest.approx(gaussians((2.0, 20), (4.0, 1)), rel=1e-12)
    assert epsilon_without_amplification(fake_ledger((0.0, 200.0, 1)), N, DELTA) == math.inf
    assert epsilon_without_amplification(fake_ledger(), N, DELTA) == 0.0


def test_without_amplification_by_pld_is_tighter():
    assert epsilon_without_amplification(ONE, N, DELTA, accountant="pld") < (
        epsilon_without_amplification(ONE, N, DELTA)
    )


# --- the claim -------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
@pytest.mark.parametrize("ledger", [ONE, TWO])
def test_names_epsilon_delta_unit_and_adjacency(ledger, sampling):
    text = words(ledger, N, DELTA, sampling=sampling)
    assert "delta = 1e-05 (RDP accounting, rounded up)" in text
    assert "Unit: one example." in text
    assert "Adjacency: data sets that differ by adding or removing one example." in text
    shown = float(re.search(r"epsilon = ([0-9.]+)", text).group(1))
    assert 0 <= shown - epsilon_spent(ledger, N, DELTA) <= 1.001e-4


def test_poisson_sampling_is_a_proof_for_draws_that_were_checked_and_a_label_is_none():
    text = words(ONE, N, DELTA, sampling="poisson")
    assert "are stated to have been drawn by Poisson sampling; if so, this epsilon is an" in text
    assert "did not verify that the batch was a fresh draw for 6000 of the noisy gradients" in text
    assert "proven" not in text
    checked = dataclasses.replace(ONE, checks=[BatchChecks(checked=6_000)])
    text = words(checked, N, DELTA, sampling="poisson")
    assert "are stated to have been drawn by Poisson sampling; if so, this epsilon is an" in text
    assert (
        "The library verified that each batch was a fresh draw, but not how it was drawn." in text
    )
    assert "proven" not in text
    nearly_all = words(Releases([(9.0, 0.9 * N, 2)]), N, DELTA, sampling="poisson")
    assert "did not verify that the batch was a fresh draw for 2 of the noisy" in nearly_all
    drawn = dp.PoissonSampling.for_batch_size(200, N, steps=6_000)
    text = words(checked, N, DELTA, sampling=drawn)
    assert "were drawn by Poisson sampling, for which this epsilon is a proven upper bound" in text
    assert "approximation" not in text
    assert "shuffling the data" not in text


def test_shuffling_is_an_approximation_with_the_unamplified_epsilon_beside_it():
    text = words(ONE, N, DELTA)
    assert text == words(ONE, N, DELTA, sampling="shuffled")
    assert "batches are stated to have come from shuffling the data, not from Poisson" in text
    assert "For shuffled batches it is a customary approximation, not a proven bound" in text
    assert "each epoch ended before the next one began" in text
    assert "The bound does not hold if an epoch was cut short." in text
    shown = float(re.search(r"epsilon = ([0-9.]+) assumes no amplification", text).group(1))
    assert 0 <= shown - gaussians((2.0, 20)) <= 1.001e-4


def test_the_accountant_is_named_and_used():
    text = words(ONE, N, DELTA, sampling="poisson", accountant="pld")
    assert "(PLD accounting, rounded up)" in text
    if HAS_TF_PRIVACY:
        assert "at delta = 1e-05 computed with PLD accounting" in text  # TF Privacy's, too
    shown = float(re.search(r"epsilon = ([0-9.]+)", text).group(1))
    assert 0 <= shown - epsilon(2.0, 200 / N, 6_000, DELTA, "pld") <= 1.001e-4


def test_a_single_release_is_in_the_singular():
    one = words(fake_ledger((2.0, 200.0, 1)), N, DELTA)
    assert "- 1 noisy gradient with noise multiplier 2 and" in one
    assert "- 31 noisy gradients with" in words(TWO, N, DELTA)


def test_every_segment_is_listed():
    text = words(TWO, N, DELTA)
    assert (
        "6000 noisy gradients with noise multiplier 2 and expected batch size 200 of 60000" in text
    )
    assert (
        "31 noisy gradients with noise multiplier 1.5 and expected batch size 100 of 60000" in text
    )


def test_other_events_are_named():
    event = dp_accounting.GaussianDpEvent(4.0)
    text = words(fake_ledger((2.0, 200.0, 1), other_events=(event,)), N, DELTA)
    assert (
        "in addition to the gradients, and included in epsilon: one release of the Gaussian "
        "mechanism with noise multiplier 4 (for example the means and deviations of a "
        "`PrivateNormalization`, or the gradients of an earlier optimizer)"
    ) in text
    other = dp_accounting.LaplaceDpEvent(4.0)
    text = words(fake_ledger((2.0, 200.0, 1), other_events=(other,)), N, DELTA)
    assert "included in epsilon: LaplaceDpEvent(" in text
    assert "in addition to the gradients" in words(fake_ledger(other_events=(event,)), N, DELTA)
    assert "in addition to the gradients" not in words(ONE, N, DELTA)


def test_says_what_is_protected_and_what_is_not():
    text = words(TWO, N, DELTA)
    assert "Protected: every noisy gradient that was released, and therefore the" in text
    assert "all checkpoints" in text
    unprotected = text[text.index("Not protected:") :]
    computed = "computed from the data beforehand without noise, such as by Keras's `adapt`"
    tuned = "hyperparameters, if they were tuned"
    for what in ["losses and metrics", "gradient norms", computed, tuned]:
        assert what in unprotected


def test_an_empty_ledger_claims_nothing():
    text = words(fake_ledger(), N, DELTA)
    assert text.startswith("Nothing was released: the ledger is empty, so epsilon = 0.")
    assert "Protected" not in text
    assert words(fake_ledger((2.0, 200.0, 0)), N, DELTA) == text


@pytest.mark.parametrize(
    "ledger",
    [
        fake_ledger((0.0, 200.0, 1)),
        fake_ledger((2.0, 200.0, 6_000), (0.0, 200.0, 1)),
        fake_ledger((2.0, 200.0, 1), other_events=(dp_accounting.NonPrivateDpEvent(),)),
    ],
)
def test_without_noise_it_says_not_private(ledger):
    text = words(ledger, N, DELTA)
    assert text.startswith("NOT PRIVATE: epsilon is infinite")
    assert "Protected" not in text
    assert "Differential privacy" not in text


def test_a_large_delta_is_warned_of():
    assert "Warning: delta exceeds 1 / (number of examples). A delta" in words(TWO, N, 1.01 / N)
    assert "Warning" not in words(TWO, N, 1 / N)


def test_persons_are_not_examples():
    text = words(TWO, N, DELTA)
    assert "This epsilon is per example. A person who contributed several examples has" in text
    assert "several examples (up to 3) has" in words(TWO, N, DELTA, max_examples_per_user=3)
    assert "also per person" in words(TWO, N, DELTA, max_examples_per_user=1)
    assert "per person" not in text


def test_an_optimizer_stands_for_its_ledger():
    optimizer = types.SimpleNamespace(ledger=TWO)
    assert privacy_statement(optimizer, N, DELTA) == privacy_statement(TWO, N, DELTA)


def test_lines_are_at_most_80_wide():
    for ledger in (ONE, TWO, fake_ledger((0.0, 64.0, 12))):
        text = privacy_statement(ledger, N, DELTA, max_examples_per_user=2)
        assert max(map(len, text.splitlines())) <= 82  # TF Privacy's is indented by two


# --- TF Privacy's statement ------------------------------------------------------------------


def test_a_run_of_one_segment_ends_with_tf_privacys_statement():
    lib = tf_privacy("tensorflow_privacy.privacy.analysis.compute_dp_sgd_privacy_lib")
    theirs = lib.compute_dp_sgd_privacy_statement(
        N, 200, 20.0, 2.0, DELTA, used_microbatching=False, max_examples_per_user=4
    )
    ours = words(ONE, N, DELTA, max_examples_per_user=4)
    assert ours.endswith("the same run: " + " ".join(theirs.split()))
    for epsilon_of_theirs in ("12.302", "0.538"):
        assert epsilon_of_theirs in theirs


def test_any_other_run_does_not():
    tf_privacy()
    assert "TF Privacy" in words(ONE, N, DELTA)
    assert "TF Privacy" not in words(TWO, N, DELTA)
    event = dp_accounting.GaussianDpEvent(4.0)
    with_event = fake_ledger((2.0, 200.0, 6_000), other_events=(event,))
    assert "TF Privacy" not in words(with_event, N, DELTA)


def test_without_tf_privacy_our_statement_stands_alone(monkeypatch):
    alone = words(ONE, N, DELTA).partition("TF Privacy's statement for the same run:")[0]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert words(ONE, N, DELTA) == alone.strip()


def test_tf_privacys_failure_is_told():
    tf_privacy()
    text = words(fake_ledger((1e8, 200.0, 6_000)), N, DELTA)
    assert "TF Privacy cannot produce a statement for this run: " in text


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"delta": 2}, ValueError, r"`delta` must be in \(0, 1\). Received: delta=2"),
        ({"num_examples": 100}, ValueError, "`batch_size` must be at most `num_examples`"),
        ({"num_examples": 0}, ValueError, "`num_examples` must be at least 1"),
        ({"sampling": "sorted"}, ValueError, "`sampling` must be one of 'shuffled', 'poisson'"),
        ({"accountant": "gdp"}, ValueError, "`accountant` must be one of 'rdp', 'pld'"),
        ({"max_examples_per_user": 0}, ValueError, "`max_examples_per_user` must be at least 1"),
        ({"max_examples_per_user": 1.5}, TypeError, "`max_examples_per_user` must be a whole"),
        ({"ledger": None}, TypeError, "`ledger` must be a ledger or an optimizer that has one"),
    ],
)
def test_refuses(change, error, message):
    with pytest.raises(error, match=message):
        privacy_statement(**{**dict(ledger=ONE, num_examples=N, delta=DELTA), **change})
    if not {"sampling", "max_examples_per_user"} & set(change):
        with pytest.raises(error, match=message):
            epsilon_without_amplification(
                **{**dict(ledger=ONE, num_examples=N, delta=DELTA), **change}
            )


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("kind", [FixedSizeSampling, FixedOrder])
def test_a_sampling_that_drew_nothing_proves_nothing(kind):
    """ε was called proven for any batches of the right size, such as those of `fit(x, y)`."""
    sampling = kind(100, 20 if kind is FixedOrder else 21)
    x, y = np.ones([2_000, 2], "float32"), np.ones([2_000, 1], "float32")
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile(dp.DPSGD(1.0, 8.0, expected_batch_size=100, learning_rate=0.1), "mse")
    monitor = dp.PrivacyMonitor(2_000, DELTA, sampling=sampling)
    x += np.random.default_rng(0).normal(size=x.shape).astype("float32")
    model.fit(x, y, batch_size=100, shuffle=False, verbose=0, callbacks=[monitor])
    said = " ".join(monitor.statement().split())
    assert "are stated to have been drawn" in said and "proven" not in said
    make = shuffled_batches if kind is FixedOrder else fixed_size_batches
    make((x, y), sampling)  # whether it is these that are trained on, nobody can tell
    assert "proven upper bound" in " ".join(monitor.statement().split())


# --- a model that a search chose --------------------------------------------------------------


VERIFIED = [BatchChecks(checked=6_000)]


@pytest.mark.parametrize("sampling", ["poisson", "shuffled", "fixed"])
def test_the_ledger_of_a_model_that_a_search_chose_bounds_its_training_alone(sampling):
    chosen = dataclasses.replace(ONE, checks=VERIFIED, chosen_by_search=True)
    text = words(chosen, N, DELTA, sampling=sampling)
    assert text.startswith("NOT THE WHOLE COST: this model was chosen by a search")
    assert "`HonestTuner.privacy_statement()`" in text
    assert "delta = 1e-05 of this training alone (RDP" in text
    assert "upper bound for this training alone" in text
    assert not re.search("upper bound(?! for this training alone)", text)
    assert "TF Privacy" not in text
    plain = words(dataclasses.replace(chosen, chosen_by_search=False), N, DELTA, sampling=sampling)
    assert "search" not in plain and "this training alone" not in plain
    assert set(re.findall(r"epsilon = [\d.]+", text)) <= set(re.findall(r"epsilon = [\d.]+", plain))


def test_an_empty_ledger_of_a_model_that_a_search_chose_is_not_all():
    text = words(Releases(chosen_by_search=True), N, DELTA)
    assert text.startswith("NOT THE WHOLE COST") and "Nothing was released" in text


def test_what_was_drawn_is_no_proof_for_a_model_that_a_search_chose():
    sampling = dp.PoissonSampling.for_batch_size(8, 64, 16)
    data = np.zeros([64, 1], "float32"), np.zeros([64], "int64")
    next(iter(dp.poisson_batches(data, sampling)))
    checks_of = [BatchChecks(checked=16)]
    for chosen in (False, True):
        ledger = Releases([Segment(1.0, 8.0, 16)], checks=checks_of, chosen_by_search=chosen)
        text = words(ledger, 64, 1e-3, sampling=sampling)
        assert ("proven" in text) is not chosen
        assert ("This epsilon is an upper bound for this training alone." in text) is chosen
