"""Batches are drawn as the accountant believes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

import tf_adaptive_dp as dp
from tests.helpers.sampled import KEY
from tf_adaptive_dp.sampling import draws


def included(sampling, n, steps, key=KEY):
    """[steps, n]: which example was in which batch."""
    table = np.zeros((steps, n), bool)
    for step in range(steps):
        table[step, sampling.draw(n, step, key)] = True
    return table


def accepts(statistic, degrees):
    """Two-sided chi-square test, wrong once in a million."""
    return stats.chi2.ppf(5e-7, degrees) < statistic < stats.chi2.ppf(1 - 5e-7, degrees)


def frequencies_fit(table, q):
    """Is each example in Binomial(steps, q) batches, independently of the others?"""
    steps, n = table.shape
    return accepts(((table.sum(0) - steps * q) ** 2).sum() / (steps * q * (1 - q)), n)


def sizes_fit(table, q):
    """Are the sizes of batches Binomial(n, q)? By classes that are equally likely, about."""
    steps, n = table.shape
    edges = np.unique(stats.binom.ppf(np.arange(1, 10) / 10, n, q))
    cdf = np.concatenate([[0], stats.binom.cdf(edges, n, q), [1]])
    observed = np.bincount(np.searchsorted(edges, table.sum(1)), minlength=len(cdf) - 1)
    expected = steps * np.diff(cdf)
    statistic = ((observed - expected) ** 2 / expected).sum()
    return statistic < stats.chi2.ppf(1 - 1e-6, len(observed) - 1)


def largest_covariance(table, q):
    """The z-score of the pair of columns that goes together (or avoids each other) most."""
    centred = (table - q) / math.sqrt(q * (1 - q))
    z = centred.T @ centred / math.sqrt(len(table))
    return np.abs(z[np.triu_indices(len(z), 1)]).max()


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("q", [0.004, 0.1, 0.5, 0.95, 2**-16])
def test_each_example_joins_with_probability_q(q):
    steps = 3_000 if q > 1e-3 else 20_000
    table = included(dp.PoissonSampling(q, 200, steps), 200, steps)
    assert frequencies_fit(table, q)
    if 1e-3 < q < 0.6:
        assert not frequencies_fit(table, 2 / 3 * q)
        assert not frequencies_fit(table, 3 / 2 * q)


def test_a_probability_of_one_takes_all():
    table = included(dp.PoissonSampling(1.0, 13, 5), 13, 5)
    assert table.all()


@pytest.mark.parametrize("q", [2.0**-17, 1.4 * 2.0**-12, 0.75 * 2.0**-8, 1.2 * 2.0**-8])
def test_q_is_met_between_the_steps_of_eight_bits(q):
    # ceil(q·2⁸) / 2⁸ is far more than these: the other numbers have to reject the rest.
    n, steps = 400_000, 300 if q < 1e-4 else 20
    expected, total = steps * n * q, 0
    for step in range(steps):
        total += len(dp.PoissonSampling(q, n, 1).draw(n, step, KEY))
    assert abs(total - expected) < 5 * math.sqrt(expected)
    assert expected / 3 > 10 * math.sqrt(expected)  # so 2/3 and 3/2 of q would be seen


@pytest.mark.parametrize("q", [0.05, 0.5])
def test_sizes_of_batches_are_binomial(q):
    n, steps = 101, 2_000
    assert sizes_fit(included(dp.PoissonSampling(q, n, steps), n, steps), q)
    fixed = included(dp.sampling.FixedSizeSampling(round(n * q), steps), n, steps)
    assert not sizes_fit(fixed, q)
    for wrong in (2 / 3, 3 / 2):
        table = included(dp.PoissonSampling(q * wrong, n, steps), n, steps)
        assert not sizes_fit(table, q)


def test_examples_join_independently_of_each_other():
    n, steps, q = 60, 4_000, 0.2
    bound = stats.norm.isf(1e-6 / n**2)
    assert largest_covariance(included(dp.PoissonSampling(q, n, steps), n, steps), q) < bound
    # The test sees neighbours that join together, and subsets of a fixed size in few examples.
    half = included(dp.PoissonSampling(q, n, steps), n // 2, steps)
    assert largest_covariance(np.repeat(half, 2, axis=1), q) > bound
    few = included(dp.sampling.FixedSizeSampling(1, steps), 5, steps)
    assert largest_covariance(few, q) > bound


def test_steps_keys_and_examples_are_independent():
    n, steps, q = 4_000, 60, 0.2
    bound = stats.norm.isf(1e-6 / steps**2)
    sampling = dp.PoissonSampling(q, n, steps)
    tables = [included(sampling, n, steps, draws.new_key(seed)) for seed in (1, 2)]
    assert largest_covariance(np.concatenate(tables).T, q) < bound
    assert largest_covariance(np.concatenate([tables[0], tables[0]]).T, q) > bound


def test_of_too_many_a_uniformly_random_part_stays():
    n, steps, rows = 40, 8_000, 4
    table = included(dp.PoissonSampling(0.5, rows, steps), n, steps)
    assert (table.sum(1) <= rows).all() and table.sum(1).mean() > rows - 0.01
    counts, expected = table.sum(0), table.sum() / n

    def uniform(counts):  # subsets of nearly fixed size vary less than independent draws
        return accepts(((counts - expected) ** 2).sum() / expected / (1 - rows / n), n - 1)

    assert uniform(counts)
    everyone = included(dp.PoissonSampling(0.5, n, steps), n, steps)
    first = everyone & (np.cumsum(everyone, 1) <= rows)
    assert not uniform(first.sum(0))
    # Pairs, too: each pair is together equally often.
    centred = table - rows / n
    pairs = (centred.T @ centred)[np.triu_indices(n, 1)] / steps
    assert np.abs(pairs - pairs.mean()).max() < 0.01


def test_no_truncation_up_to_the_last_row():
    sampling = dp.PoissonSampling(0.5, 6, 1)
    free = dp.PoissonSampling(0.5, 12, 1)
    sizes = set()
    for step in range(200):
        cut, whole = sampling.draw(12, step, KEY), free.draw(12, step, KEY)
        assert len(cut) == min(6, len(whole)) and set(cut) <= set(whole)
        assert list(cut) == sorted(set(cut))
        sizes.add(len(cut))
    assert max(sizes) == 6 and min(sizes) <= 2


def test_subsets_of_fixed_size_are_all_equally_likely():
    counts = dict.fromkeys(itertools.combinations(range(5), 2), 0)
    for step in range(5_000):
        counts[tuple(dp.sampling.FixedSizeSampling(2, 1).draw(5, step, KEY))] += 1
    assert accepts(((np.array(list(counts.values())) - 500) ** 2 / 500).sum(), 9)


def test_shuffled_passes_have_each_example_once_in_a_new_order():
    sampling = dp.sampling.ShuffledEpochs(3, steps=100)
    drawn = [sampling.draw(10, step, KEY) for step in range(9)]
    passes = [np.concatenate(drawn[i : i + 3]) for i in (0, 3, 6)]
    for one in passes:
        assert len(set(one)) == 9
    assert not np.array_equal(passes[0], passes[1])
    firsts = [sampling.draw(10, 3 * epoch, KEY)[0] for epoch in range(2_000)]
    assert accepts(((np.bincount(firsts, minlength=10) - 200) ** 2 / 200).sum(), 9)
