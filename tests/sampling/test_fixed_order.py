"""Passes in one order: their law, and ε without amplification by sampling."""

from __future__ import annotations

import math
from types import SimpleNamespace

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting import rdp

import tf_adaptive_dp as dp
from tests.helpers.sampled import KEY, numbered
from tests.helpers.strategies import strategy_matrix
from tf_adaptive_dp import report
from tf_adaptive_dp.accounting import BandedNoise, IndependentNoise, Releases, TreeNoise
from tf_adaptive_dp.accounting.releases import BatchChecks
from tf_adaptive_dp.mechanism.draw_numbers import Seen
from tf_adaptive_dp.sampling import (
    FixedOrder,
    draws,
    fixed_order,
    sampling_epsilon,
    shuffled_batches,
)

N, DELTA = 1_000, 1e-3
STRATEGIES = (IndependentNoise(), BandedNoise(4), BandedNoise(30))


@pytest.fixture(autouse=True)
def a_process_without_orders(monkeypatch):
    monkeypatch.setattr(fixed_order, "_orders_of", {})


def test_every_pass_has_the_same_batches_in_the_same_rows():
    sampling = FixedOrder(20, steps=17)
    batches = list(shuffled_batches(numbered(105), sampling, key=KEY).as_numpy_iterator())
    assert len(batches) == 17
    for t in range(5, 17):
        np.testing.assert_array_equal(batches[t][1], batches[t - 5][1])
    first = np.concatenate([y for _, y in batches[:5]])
    assert len(set(first.tolist())) == 100 and list(first) != sorted(first)
    other = shuffled_batches(numbered(105), sampling).as_numpy_iterator()
    assert not np.array_equal(next(other)[1], batches[0][1])
    dataset = shuffled_batches(numbered(105), sampling, key=KEY)
    for _ in range(2):  # another iteration has the same order
        np.testing.assert_array_equal(next(dataset.as_numpy_iterator())[1], batches[0][1])
    with pytest.raises(ValueError, match="pass the `key`"):
        shuffled_batches(numbered(105), sampling, start_step=5)


def test_a_dataset_for_each_pass_keeps_the_order():
    """With orders of their own, an example could be in two neighboring batches of two passes."""

    def first(sampling, num_examples=105):
        return next(shuffled_batches(numbered(num_examples), sampling).as_numpy_iterator())[1]

    one = first(FixedOrder(20, steps=17))
    for same in (FixedOrder(20, steps=17), FixedOrder(20, steps=18)):  # a run may become longer
        np.testing.assert_array_equal(first(same), one)
    assert not np.array_equal(first(FixedOrder(20, 17, 1)), one)
    assert not np.array_equal(first(FixedOrder(19, steps=17)), one[:19])
    assert not np.array_equal(first(FixedOrder(20, steps=17), 106), one)


def dense_sensitivity(noise, steps, separation):
    matrix = strategy_matrix(noise, steps).astype(float)
    firsts = range(separation)
    return max(np.linalg.norm(matrix[:, first::separation].sum(axis=1)) for first in firsts)


@pytest.mark.parametrize("noise", STRATEGIES, ids=repr)
@pytest.mark.parametrize("steps", [7, 20, 65])
def test_epsilon_is_that_of_one_gaussian_mechanism(noise, steps):
    sampling = FixedOrder(50, steps=100)  # a pass is 20 steps
    ledger = Releases([(3.0, 50.0, steps)], noise=noise)
    sigma = 3.0 / dense_sensitivity(noise, steps, 20)
    event = dp_accounting.GaussianDpEvent(sigma)
    expected = rdp.RdpAccountant().compose(event).get_epsilon(DELTA)
    assert sampling.epsilon_spent(ledger, N, DELTA) == pytest.approx(expected, rel=1e-6)
    as_event = rdp.RdpAccountant().compose(sampling.dp_event(ledger, N)).get_epsilon(DELTA)
    assert as_event == pytest.approx(expected, rel=1e-6)
    if noise.bands <= 20 and steps == 20:
        assert sigma == pytest.approx(3.0, rel=0.2)


@pytest.mark.parametrize("passes", [1, 2, 5])
def test_trees_of_one_pass_cost_what_dp_accounting_says(passes):
    steps = 20 * passes
    ledger = Releases([(3.0, 50.0, steps)], noise=TreeNoise(20))
    event = dp_accounting.SingleEpochTreeAggregationDpEvent(3.0, 20)
    expected = rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    ).compose(event, passes)
    sampling = FixedOrder(50, steps=100)
    found = sampling.epsilon_spent(ledger, N, DELTA)
    assert found == pytest.approx(expected.get_epsilon(DELTA), rel=1e-6)


@pytest.mark.parametrize("trees", [1, 7, 16, 20, 40, 100])
@pytest.mark.parametrize("steps", [7, 20, 65, 100])
def test_epsilon_of_trees_is_at_least_that_of_the_passes(trees, steps):
    sampling, ledger = (
        FixedOrder(50, steps=100),
        Releases([(9.0, 50.0, steps)], noise=TreeNoise(trees)),
    )
    found = sampling.epsilon_spent(ledger, N, DELTA)
    spent = []
    for factor in (1.0, 1.25):
        sigma = 9.0 / (factor * dense_sensitivity(TreeNoise(trees), steps, 20))
        event = dp_accounting.GaussianDpEvent(sigma)
        spent.append(rdp.RdpAccountant().compose(event).get_epsilon(DELTA))
    assert spent[0] * (1 - 1e-6) <= found <= spent[1]


def test_of_several_noise_multipliers_the_least_counts_and_other_events_are_added():
    other = dp_accounting.GaussianDpEvent(5.0)
    sampling = FixedOrder(50, steps=100)
    ledger = Releases([(3.0, 50.0, 10), (4.0, 50.0, 15)], (other,), noise=BandedNoise(4))
    sigma = 3.0 / dense_sensitivity(BandedNoise(4), 25, 20)
    event = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(sigma), other])
    expected = rdp.RdpAccountant().compose(event).get_epsilon(DELTA)
    assert sampling.epsilon_spent(ledger, N, DELTA) == pytest.approx(expected, rel=1e-6)
    assert sampling.epsilon_spent(Releases(), N, DELTA) == 0.0
    none = Releases([(0.0, 50.0, 1)], noise=BandedNoise(4))
    assert math.isinf(sampling.epsilon_spent(none, N, DELTA))


def test_what_fits_into_a_budget_fits():
    sampling, ledger = FixedOrder(50, steps=400), Releases([(9.0, 50.0, 3)], noise=BandedNoise(4))
    left = sampling_epsilon.releases_left(sampling, ledger, 9.0, 50.0, N, 1.0, DELTA)
    for n, fits in ((left, True), (left + 1, False)):
        then = Releases([(9.0, 50.0, 3 + n)], noise=BandedNoise(4))
        assert (sampling.epsilon_spent(then, N, DELTA) <= 1.0) == fits


@pytest.mark.parametrize(
    "checks, message",
    [
        ([BatchChecks(30, 10, 20)], None),
        ([BatchChecks(30, 10, 19)], "A batch came back after 19 steps"),
        ([BatchChecks(30, 1, 1)], "A batch came back after 1 steps"),
    ],
)
def test_batches_must_not_come_back_before_the_pass_is_over(checks, message):
    ledger = Releases([(3.0, 50.0, 30)], noise=BandedNoise(4), checks=checks)
    sampling = FixedOrder(50, steps=100)
    if message is None:
        sampling.epsilon_spent(ledger, N, DELTA)
        draws.remember_num_examples(sampling, N)  # as if it had made a data set
        seen = SimpleNamespace(ledger=ledger, batches_seen=Seen(30, 0), parts_per_batch=1)
        text = " ".join(dp.privacy_statement(seen, N, DELTA, sampling=sampling).split())
        assert "one example is blank or not" in text
        assert "drawn in one order that every pass over the data repeats, for which this" in text
        return
    with pytest.raises(ValueError, match=message):
        sampling.epsilon_spent(ledger, N, DELTA)


def fitted(epochs, steps_per_epoch, noise=STRATEGIES[-1]):
    x = np.random.default_rng(0).normal(size=[N, 3]).astype("float32")
    sampling = FixedOrder(50, steps=60)
    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(2)])
    optimizer = dp.DPSGD(1.0, 3.0, expected_batch_size=50.0, noise=noise)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    model.compile(optimizer, loss)
    monitor = dp.PrivacyMonitor(N, DELTA, sampling=sampling)
    batches = shuffled_batches((x, np.zeros(N, "int64")), sampling)
    for _ in range(epochs):
        model.fit(batches, steps_per_epoch=steps_per_epoch, callbacks=[monitor], verbose=0)
    return model.optimizer.ledger


def test_a_model_is_fitted_and_the_ledger_knows_when_batches_came_back():
    ledger = fitted(1, 45)
    # They show no step, so none counts as checked.
    assert [c[:3] for c in ledger.checks] == [(0, 25, 20)]
    text = " ".join(dp.privacy_statement(ledger, N, DELTA, sampling=FixedOrder(50, 60)).split())
    assert "did not verify that the batch came in its order for 45 of the" in text


def test_a_model_is_fitted_with_the_noise_of_trees():
    ledger = fitted(1, 45, TreeNoise(20))
    assert ledger.segments == [(3.0, 50.0, 45)] and ledger.noise == TreeNoise(20)
    text = " ".join(dp.privacy_statement(ledger, N, DELTA, sampling=FixedOrder(50, 60)).split())
    assert "noise multiplier is that of a node of the trees, which have 20 steps each" in text
    event = dp_accounting.GaussianDpEvent(3.0 / math.sqrt(5 + 5 + 3))
    expected = rdp.RdpAccountant().compose(event).get_epsilon(DELTA)
    assert FixedOrder(50, 60).epsilon_spent(ledger, N, DELTA) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow_on(2)
def test_a_dataset_that_begins_again_too_soon_has_no_epsilon():
    with pytest.raises(ValueError, match="A batch came back after 7 steps"):
        fitted(2, 7)


def compiled(batch_size):
    model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
    model.compile(dp.DPSGD(1.0, 4.0, expected_batch_size=batch_size, learning_rate=0.01), "mse")
    return model


def trained(model, sampling, steps, key=None, skipped=0, num_examples=400):
    """Trains for a part of a pass, with a dataset of its own."""
    x, _ = numbered(num_examples)
    batches = shuffled_batches((x, x), sampling, key=key).skip(skipped).take(steps)
    model.fit(batches, shuffle=False, verbose=0)
    return model.optimizer


def said(ledger, sampling):
    return " ".join(dp.privacy_statement(ledger, 400, DELTA, sampling=sampling).split())


@pytest.mark.slow_on(2)
def test_a_longer_run_goes_on_in_its_order_so_that_a_pass_that_begins_again_is_noticed():
    """Each `FixedOrder` had an order of its own: .864 was called proven where 1.88 held."""
    model = compiled(20)
    first = FixedOrder(20, steps=2)
    assert "proven upper bound" in said(trained(model, first, steps=2), first)
    longer = FixedOrder(20, steps=4)
    optimizer = trained(model, longer, steps=2)
    with pytest.raises(ValueError, match="A batch came back after 2 steps"):
        said(optimizer, longer)


@pytest.mark.slow_on(2)
def test_releases_that_this_process_did_not_see_may_have_come_in_another_order():
    sampling = FixedOrder(25, steps=10)
    optimizer = trained(compiled(25), sampling, steps=4)
    assert "proven upper bound" in said(optimizer, sampling)
    # Like a model that another process saved, it has seen none of the batches.
    again = compiled(25)
    again.compile(type(optimizer).from_config(optimizer.get_config()), "mse")
    optimizer = trained(again, sampling, steps=3, skipped=4)
    assert [c.checked for c in optimizer.ledger.checks] == [7] and optimizer.batches_seen == (3, 0)
    # Nobody knows it of a ledger alone.
    for ledger, number in ((optimizer, 4), (optimizer.ledger, 7)):
        text = said(ledger, sampling)
        assert f"did not verify that the batch came in its order for {number} of the" in text
        assert "proven" not in text
    facts = report.facts(optimizer, 400, DELTA, sampling=sampling)
    assert "verified to come in their order | 3 of 7 |" in report.model_card(facts)


@pytest.mark.slow_on(2)
def test_parts_of_batches_that_this_process_saw_do_not_count_as_batches():
    """Two parts of each of its two batches hid that another process had released two more."""
    x, _ = numbered(400)
    sampling = FixedOrder(50, steps=4)

    def resumed(optimizer):
        model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
        done = optimizer.ledger.num_releases
        batches = shuffled_batches((x, x), sampling, gradient_accumulation_steps=2)
        model.fit(batches.skip(2 * done).take(4), shuffle=False, verbose=0)
        return model.optimizer

    kwargs = dict(learning_rate=0.01, expected_batch_size=50, gradient_accumulation_steps=2)
    first = resumed(dp.DPSGD(1.0, 4.0, **kwargs))
    assert sampling.num_in_order(first) == 2 and "proven upper bound" in said(first, sampling)
    second = resumed(type(first).from_config(first.get_config()))
    assert second.ledger.num_releases == 4 and second.batches_seen == (4, 0)
    assert sampling.num_in_order(second) == 2
    assert "came in its order for 2 of the" in said(second, sampling)


@pytest.mark.slow_on(2)
def test_a_process_with_two_keys_made_two_orders():
    model, sampling = compiled(16), FixedOrder(16, steps=10)
    assert "proven upper bound" in said(trained(model, sampling, 4, key=KEY), sampling)
    text = said(trained(model, sampling, 4), sampling)
    assert "came in its order for 8 of the" in text and "proven" not in text


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("seed", [None, 3])
def test_data_that_grew_have_another_order(seed):
    """The statement called an epsilon proven that held for an example in half of these steps."""
    model, sampling = compiled(16), FixedOrder(16, steps=25, seed=seed)
    assert ("proven upper bound" in said(trained(model, sampling, 12), sampling)) == (seed is None)
    optimizer = trained(model, sampling, 12, num_examples=420)
    text = said(optimizer, sampling)
    assert "came in its order for 24 of the" in text and "proven" not in text
