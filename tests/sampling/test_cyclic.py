"""Cyclic Poisson sampling draws by its law, and ε is that of its blocks."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting import rdp

import tf_adaptive_dp as dp
from tests.helpers.sampled import KEY, numbered
from tests.sampling.test_law import accepts, frequencies_fit, largest_covariance
from tf_adaptive_dp.accounting import BandedNoise, Releases, ToeplitzNoise, TreeNoise, batch_order
from tf_adaptive_dp.accounting.releases import BatchChecks
from tf_adaptive_dp.sampling import (
    CyclicPoissonSampling,
    FixedOrder,
    draws,
    sampling_epsilon,
)

N, DELTA = 1_000, 1e-3


FOUR_BANDS = BandedNoise(4)
# What the batches of 4 groups that are drawn with `KEY` show besides their step.
CODE = batch_order.code_of_period(4) ^ batch_order.code_of_groups(
    draws.derived_key(KEY, b"groups", 0)
)


def ledger_of(*segments, noise=FOUR_BANDS, **kwargs):
    return Releases(list(segments), noise=noise, **kwargs)


def sampling_of(steps=40, batch_size=50.0, groups=4):
    return CyclicPoissonSampling.for_batch_size(batch_size, N, steps, groups)


def table(sampling, n, steps, key=KEY):
    """[steps, n]: which example was in which batch."""
    drawn = np.zeros((steps, n), bool)
    for step in range(steps):
        drawn[step, sampling.draw(n, step, key)] = True
    return drawn


def test_no_example_is_in_two_of_as_many_batches_as_there_are_groups():
    sampling = CyclicPoissonSampling(0.5, 4, 101, 400)
    drawn = table(sampling, 100, 400)
    assert all(len(set(np.flatnonzero(column) % 4)) == 1 for column in drawn.T)
    assert drawn.sum() > 1_000


@pytest.mark.parametrize("q", [0.1, 0.4])
def test_each_example_joins_the_batches_of_its_group_with_probability_q(q):
    n, rounds = 200, 1_000
    drawn = table(CyclicPoissonSampling(q, 4, n, 4 * rounds), n, 4 * rounds)
    of_group = drawn.reshape(rounds, 4, n).any(axis=1)
    assert frequencies_fit(of_group, q)
    assert not frequencies_fit(of_group, 2 / 3 * q) and not frequencies_fit(of_group, 3 / 2 * q)
    bound = 6 + math.log(n)
    assert largest_covariance(of_group[:, :60], q) < bound


def groups_of(keys, n, groups):
    """[keys, n], the group of each example."""
    sampling = CyclicPoissonSampling(1.0, groups, n, groups)
    found = [[sampling.draw(n, step, key) for step in range(groups)] for key in keys]
    return np.array(
        [[next(g for g in range(groups) if i in f[g]) for i in range(n)] for f in found]
    )


def test_groups_are_uniform_and_independent_for_every_example():
    found = groups_of([draws.new_key(seed) for seed in range(300)], 40, 4)
    counts = np.stack([(found == g).sum(axis=0) for g in range(4)])
    assert accepts(((counts - 75) ** 2 / 75).sum(), 3 * 40)
    sizes = (found == 0).sum(axis=1)  # binomial, not equal: no example moves another one
    assert 0.7 < sizes.var() / (40 * 3 / 16) < 1.4
    same = (found[:, :1] == found[:, 1:]).mean(axis=0)
    assert np.abs(same - 0.25).max() < 5 * math.sqrt(3 / 16 / 300)


def test_all_passes_and_processes_with_one_key_of_the_groups_have_the_same_groups():
    sampling = CyclicPoissonSampling(0.5, 4, 60, 8)
    all_of = CyclicPoissonSampling(1.0, 4, 60, 8)
    groups = draws.derived_key(KEY, b"groups", 0)
    other = draws.new_key(5) + groups
    for step in range(8):
        members = set(all_of.draw(50, step, KEY))
        first = sampling.draw(50, step, KEY)
        again = sampling.draw(50, step, sampling.key_of_pass(KEY, 1))
        third = sampling.draw(50, step, other)
        assert set(first) <= members and set(again) <= members and set(third) <= members
        assert list(first) != list(again) or len(first) < 3
    np.testing.assert_array_equal(
        sampling.draw(50, 2, KEY), sampling.draw(50, 2, sampling.key_of_pass(KEY, 0))
    )


def test_batches_show_their_step():
    sampling = CyclicPoissonSampling(0.4, 4, 64, 12)
    batches = dp.poisson_batches(numbered(100), sampling, key=KEY)
    for step, (_, _, weights) in enumerate(batches.as_numpy_iterator()):
        marks = (weights == 0) & np.signbit(weights)
        assert batch_order.shown(marks) == step ^ CODE
        assert 0 < marks.sum() < (weights == 0).sum()


@pytest.mark.parametrize("of_examples", [-0.0, -1e-40, -1e-300])
def test_weights_of_examples_are_no_marks(of_examples):
    """A single weight of -0.0 made the step of its batch fail, as one drawn for another step."""
    sampling = CyclicPoissonSampling(0.4, 4, 64, 12)
    x, y = numbered(100)
    weights = np.full(100, of_examples, np.float64)
    batches = dp.poisson_batches((x, y, weights), sampling, key=KEY)
    for step, (_, _, weights) in enumerate(batches.as_numpy_iterator()):
        marks = (weights.astype(np.float32) == 0) & np.signbit(weights)
        assert batch_order.shown(marks) == step ^ CODE


def test_to_go_on_needs_the_key_of_the_groups():
    sampling = CyclicPoissonSampling(0.4, 4, 64, 12)
    with pytest.raises(ValueError, match="pass the `key`"):
        dp.poisson_batches(numbered(100), sampling, start_step=3)
    whole = list(dp.poisson_batches(numbered(100), sampling, key=KEY).as_numpy_iterator())
    rest = dp.poisson_batches(numbered(100), sampling, start_step=3, key=KEY)
    for (x, *_), (again, *_) in zip(whole[3:], rest.as_numpy_iterator()):
        np.testing.assert_array_equal(x, again)
    with pytest.raises(ValueError, match="`key` must be 32 bytes.*bytes of length 40"):
        dp.poisson_batches(numbered(100), sampling, key=bytes(40))


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
@pytest.mark.parametrize("steps, blocks", [(40, 10), (37, 10), (1, 1), (4, 1), (5, 2)])
def test_epsilon_is_that_of_one_sampled_gaussian_per_block(steps, blocks, accountant):
    sampling = sampling_of()
    spent = sampling.epsilon_spent(ledger_of((1.5, 50.0, steps)), N, DELTA, accountant=accountant)
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(1.5)), blocks
    )
    kind = rdp.RdpAccountant if accountant == "rdp" else dp_accounting.pld.PLDAccountant
    assert spent == pytest.approx(kind().compose(event).get_epsilon(DELTA), rel=1e-5)
    assert sampling.dp_event(ledger_of((1.5, 50.0, steps)), N) == event if blocks > 1 else True


def test_segments_and_other_events_are_composed():
    other = dp_accounting.GaussianDpEvent(5.0)
    ledger = ledger_of((1.5, 50.0, 9), (2.5, 50.0, 6), other_events=(other,))
    accountant = rdp.RdpAccountant()
    for sigma, blocks in ((1.5, 3), (2.5, 2)):
        sampled = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(sigma))
        accountant.compose(sampled, blocks)
    expected = accountant.compose(other).get_epsilon(DELTA)
    assert sampling_of().epsilon_spent(ledger, N, DELTA) == pytest.approx(expected, rel=1e-6)


def test_epsilon_is_infinite_after_a_release_that_was_out_of_order():
    ledger = ledger_of((1.5, 50.0, 9), (0.0, 50.0, 1))
    assert math.isinf(sampling_of().epsilon_spent(ledger, N, DELTA))
    assert "NOT PRIVATE" in dp.privacy_statement(ledger, N, DELTA, sampling=sampling_of())


def test_what_fits_into_a_budget_fits():
    sampling, ledger = sampling_of(steps=400), ledger_of((1.5, 50.0, 9))
    left = sampling_epsilon.releases_left(sampling, ledger, 1.5, 50.0, N, 5.0, DELTA)
    for n, fits in ((left, True), (left + 1, False)):
        spent = sampling.epsilon_spent(ledger_of((1.5, 50.0, 9 + n)), N, DELTA)
        assert (spent <= 5.0) == fits
    assert (9 + left) % 4 == 0  # a block that was begun is paid for


@pytest.mark.parametrize(
    "sampling",
    [
        "shuffled",
        "poisson",
        "fixed",
        dp.PoissonSampling(0.05, 100, 40),
        dp.sampling.FixedSizeSampling(50, 40),
        dp.sampling.ShuffledEpochs(50, 40),
        CyclicPoissonSampling.for_batch_size(50.0, N, 40, 5),
        CyclicPoissonSampling.for_batch_size(50.0, N, 40, 2),
    ],
    ids=lambda s: s if isinstance(s, str) else f"{s.label} {getattr(s, 'num_groups', '')}",
)
def test_no_other_sampling_has_an_epsilon_for_correlated_noise(sampling):
    ledger = ledger_of((1.5, 50.0, 20))
    asks = (
        lambda: sampling_epsilon.epsilon_spent(sampling, ledger, N, DELTA),
        lambda: sampling_epsilon.releases_left(sampling, ledger, 1.5, 50.0, N, 9.0, DELTA),
        lambda: dp.privacy_statement(ledger, N, DELTA, sampling=sampling),
    )
    for ask in asks:
        with pytest.raises(ValueError, match="correlated|as many bands"):
            ask()


def test_the_accountants_of_independent_noise_refuse_it():
    ledger = ledger_of((1.5, 50.0, 20))
    for ask in (
        lambda: dp.epsilon_spent(ledger, N, DELTA),
        lambda: dp.accounting.dp_event(ledger, N),
        lambda: dp.accounting.epsilon_without_amplification(ledger, N, DELTA),
        lambda: dp.accounting.releases_left(ledger, 1.5, 50.0, N, 9.0, DELTA),
    ):
        with pytest.raises(ValueError, match="noise of these releases is correlated"):
            ask()


@pytest.mark.parametrize(
    "ledger, message",
    [
        (ledger_of((1.5, 50.0, 9), checks=[BatchChecks(9, 2, 5)]), "2 releases on such batches"),
        (ledger_of((1.5, 40.0, 9)), "50.0 examples a batch"),
        (ledger_of((1.5, 50.0, 41)), "draws only 40 batches"),
        (Releases([(1.5, 50.0, 9)]), "as many bands"),
        (ledger_of((1.5, 50.0, 9), noise=ToeplitzNoise((2, 1))), "as many bands"),
    ],
)
def test_a_ledger_that_contradicts_the_sampling_is_refused(ledger, message):
    with pytest.raises(ValueError, match=message):
        sampling_of().epsilon_spent(ledger, N, DELTA)


def test_truncation_costs_what_it_costs_poisson_sampling_of_the_same_share():
    cyclic = CyclicPoissonSampling(0.2, 4, 70, 40)
    plain = dp.PoissonSampling(0.05, 70, 40)
    assert cyclic.failure_probability(N) == plain.failure_probability(N) > 0
    assert cyclic.delta_for_noise(1.0, N, DELTA) == plain.delta_for_noise(1.0, N, DELTA) < DELTA
    roomy = CyclicPoissonSampling(0.2, 4, N + 1, 40)
    ledger = ledger_of((1.5, 50.0, 40))
    assert cyclic.epsilon_spent(ledger, N, 1e-6) > roomy.epsilon_spent(ledger, N, 1e-6)
    # By counting: x joins its group's batch, and so do at least B of the others.
    counted, rounds = 0, 3_000
    small = CyclicPoissonSampling(0.8, 2, 12, 1)
    for seed in range(rounds):
        drawn = CyclicPoissonSampling(0.8, 2, 99, 1).draw(21, 0, draws.new_key(seed))
        counted += 0 in drawn and len(drawn) - 1 >= 12
    expected = rounds * small.failure_probability(20)
    assert expected > 40 and abs(counted - expected) < 5 * math.sqrt(expected)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: CyclicPoissonSampling(0.5, 1, 9, 9), "`num_groups` must be at least 2"),
        (lambda: CyclicPoissonSampling(0.0, 2, 9, 9), "`sampling_probability` must be"),
        (lambda: CyclicPoissonSampling.for_batch_size(300, 1_000, 9, 4), "larger than the data"),
        (lambda: dp.sampling.fixed_size_batches(numbered(), sampling_of()), "must be a FixedSize"),
    ],
)
def test_what_is_no_sampling_is_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_the_statement_says_how_the_batches_were_drawn():
    ledger = ledger_of((1.5, 50.0, 40), checks=[BatchChecks(checked=40)])
    text = " ".join(dp.privacy_statement(ledger, N, DELTA, sampling=sampling_of()).split())
    assert (
        "drawn by cyclic Poisson sampling, for which this epsilon is a proven upper bound" in text
    )
    assert "put into one of 4 groups at random" in text and "BandedNoise(bands=4)" in text
    assert "with probability 0.2" in text
    unchecked = ledger_of((1.5, 50.0, 40), checks=[BatchChecks(checked=38)])
    text = " ".join(dp.privacy_statement(unchecked, N, DELTA, sampling=sampling_of()).split())
    assert "did not verify that the batch was a fresh draw for its step for 2 of the" in text


def fitted(steps_per_epoch=10, epochs=2, **kwargs):
    sampling = sampling_of(steps=20)
    model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(2)])
    optimizer = dp.DPSGD(1.0, 1.5, expected_batch_size=50.0, noise=BandedNoise(4))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    model.compile(optimizer, loss)
    x, y = np.zeros([N, 1], "float32"), np.zeros(N, "int64")
    monitor = dp.PrivacyMonitor(N, DELTA, sampling=sampling)
    batches = dp.poisson_batches((x, y), sampling, **kwargs)
    model.fit(
        batches, steps_per_epoch=steps_per_epoch, epochs=epochs, callbacks=[monitor], verbose=0
    )
    return model, batches, monitor


def test_a_model_that_is_fitted_has_every_batch_checked():
    model, batches, monitor = fitted()
    ledger = model.optimizer.ledger
    assert [c.checked for c in ledger.checks] == [20] == [s.num_releases for s in ledger.segments]
    expected = sampling_of(20).epsilon_spent(ledger_of((1.5, 50.0, 20)), N, DELTA)
    assert monitor.epsilon() == pytest.approx(expected)


def trained(noise, **kwargs):
    """The weights after 24 steps, with known batches and noise."""
    tf.keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=[120, 3]).astype("float32")
    data, settings = (x, (x[:, 0] > 0).astype("int64")), {"key": KEY}
    if noise.bands:
        sampling = CyclicPoissonSampling.for_batch_size(6.0, 120, 24, noise.bands)
        batches = dp.poisson_batches(data, sampling, **settings)
    else:
        batches = dp.sampling.shuffled_batches(data, FixedOrder(6, 24), **settings)
    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(2)])
    optimizer = dp.DPSGD(1.0, 1.0, expected_batch_size=6.0, noise=noise, seed=7, learning_rate=0.1)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **kwargs)
    model.fit(batches, steps_per_epoch=12, epochs=2, shuffle=False, verbose=0)
    assert optimizer.ledger.segments == [(1.0, 6.0, 24)]
    return model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize("noise", [FOUR_BANDS, TreeNoise(7)], ids=repr)
def test_modes_of_keras_have_the_same_noise(noise):
    expected = trained(noise)
    for kwargs in ({"steps_per_execution": 4}, {"jit_compile": True}):
        for actual, wanted in zip(trained(noise, **kwargs), expected):
            np.testing.assert_allclose(actual, wanted, atol=1e-5)


def test_a_dataset_that_begins_again_is_refused():
    model, batches, _ = fitted(steps_per_epoch=5, epochs=1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="drawn for another step"):
        model.fit(batches, steps_per_epoch=5, epochs=1, verbose=0)
    assert model.optimizer.ledger.num_releases == 5


def test_a_dataset_that_goes_on_with_other_groups_is_refused():
    model, *_ = fitted(epochs=1, key=draws.new_key(1))
    data = np.zeros([N, 1], "float32"), np.zeros(N, "int64")
    batches = dp.poisson_batches(data, sampling_of(steps=20), start_step=10, key=KEY)
    with pytest.raises(tf.errors.InvalidArgumentError, match="one `key` for all data sets"):
        model.fit(batches, verbose=0)
    assert model.optimizer.ledger.num_releases == 10


def test_the_noise_of_trees_has_no_epsilon_with_cyclic_batches():
    ledger = Releases([(2.0, 50.0, 40)], noise=TreeNoise(4))
    with pytest.raises(ValueError, match="as many bands as the sampling has groups"):
        CyclicPoissonSampling(0.2, 4, 70, 40).epsilon_spent(ledger, N, DELTA)
    with pytest.raises(ValueError, match="or `FixedOrder` that drew the batches"):
        dp.epsilon_spent(ledger, N, DELTA)
    with pytest.raises(ValueError, match="correlated"):
        dp.PoissonSampling(0.05, 70, 40).epsilon_spent(ledger, N, DELTA)
