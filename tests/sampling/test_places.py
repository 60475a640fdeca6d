"""Where an example is put in a batch says nothing about the others, and moves none of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

import tf_adaptive_dp as dp
from tests.helpers import zoo
from tests.helpers.sampled import KEY, numbered, records, to_pair
from tf_adaptive_dp.sampling import draws, sources

LEVEL = 1e-6  # of all tests below: wrong once in a million


def at_the_front(sampling, n, step, key, k=1):
    """As examples were put before: ascending, with the padding at the end of each part."""
    rows = sampling.rows_per_batch(k)
    drawn, parts = sampling.draw(n, step, key), np.full((k, rows), n)
    for i, part in enumerate(parts):
        own = drawn[i * len(drawn) // k : (i + 1) * len(drawn) // k]
        part[: len(own)] = own
    return parts


def counted(sampling, n, k, steps, place=None):
    """How often each arrangement of the rows came, by what was drawn."""
    found: dict[tuple, dict[tuple, int]] = {}
    for step in range(steps):
        placed = (place or type(sampling).place)(sampling, n, step, KEY, k).ravel()
        placed = np.minimum(placed, n)  # padding has random bits besides
        of_draw = found.setdefault(tuple(sampling.draw(n, step, KEY)), {})
        of_draw[tuple(placed)] = of_draw.get(tuple(placed), 0) + 1
    return found


def all_equally_likely(found, rows, n):
    """Chi-square test over all injections of each set of examples into the rows."""
    statistic = degrees = 0
    for drawn, counts in found.items():
        arrangements = set(itertools.permutations([*drawn, *[n] * (rows - len(drawn))]))
        assert set(counts) <= arrangements
        expected = sum(counts.values()) / len(arrangements)
        if expected < 5 or len(arrangements) == 1:
            continue
        statistic += sum((counts.get(a, 0) - expected) ** 2 / expected for a in arrangements)
        degrees += len(arrangements) - 1
    assert degrees
    return stats.chi2.ppf(LEVEL / 2, degrees) < statistic < stats.chi2.isf(LEVEL / 2, degrees)


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("sampling", "n", "k"),
    [
        (dp.PoissonSampling(0.5, 4, 1), 3, 1),
        (dp.PoissonSampling(0.6, 2, 1), 4, 1),  # truncated
        (dp.PoissonSampling(0.5, 3, 1), 3, 2),  # four rows in two parts
        (dp.sampling.FixedSizeSampling(3, 1), 4, 1),
        (dp.sampling.FixedSizeSampling(4, 1), 5, 2),
    ],
)
def test_all_ways_to_fill_the_rows_are_equally_likely(sampling, n, k):
    rows = k * sampling.rows_per_batch(k)
    assert all_equally_likely(counted(sampling, n, k, 4_000), rows, n)
    assert not all_equally_likely(counted(sampling, n, k, 4_000, at_the_front), rows, n)


def test_rows_of_shuffled_batches_are_random_within_a_pass_that_is_fixed(monkeypatch):
    # The same pass again and again: its order is not what makes the rows random.
    fixed = dp.sampling.ShuffledEpochs(3, 10_000)
    monkeypatch.setattr(dp.sampling.ShuffledEpochs, "draw", lambda *args: np.array([0, 1, 2]))
    assert all_equally_likely(counted(fixed, 3, 1, 1_000), 3, 3)
    assert not all_equally_likely(counted(fixed, 3, 1, 1_000, at_the_front), 3, 3)


def other_rows(sampling, n, others, steps, place, key):
    """The law of the rows of `others` in the steps that drew just these of the first three."""
    law = {}
    for step in range(steps):
        placed = place(sampling, n, step, key).ravel()
        if set(placed) & {0, 1, 2} == set(others):
            rows = tuple(int(np.flatnonzero(placed == i)[0]) for i in others)
            law[rows] = law.get(rows, 0) + 1
    return law


def same_law(a, b):
    """Two-sample chi-square test."""
    table = np.array([[law.get(key, 0) for law in (a, b)] for key in a.keys() | b.keys()])
    statistic, _, degrees, _ = stats.chi2_contingency(table)
    return statistic < stats.chi2.isf(LEVEL, degrees)


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("others", [(0,), (1, 2), (0, 2)])
def test_one_example_more_leaves_the_law_of_the_other_rows(others):
    # In its arrays the new example stands before the others, as it may: 3 is moved to the front.
    def first(sampling, n, step, key):
        order = np.array([3, 0, 1, 2, n])
        placed = np.minimum(dp.PoissonSampling.place(sampling, n, step, key), n)
        return order[placed] if n == 4 else placed

    def first_at_the_front(sampling, n, step, key):
        placed = at_the_front(sampling, n, step, key)
        return np.array([3, 0, 1, 2, n])[placed] if n == 4 else placed

    sampling = dp.PoissonSampling(0.5, 5, 1)
    keys = draws.new_key(1), draws.new_key(2)
    laws = [other_rows(sampling, n, others, 4_000, first, key) for n, key in zip((3, 4), keys)]
    assert same_law(*laws)
    laws = [
        other_rows(sampling, n, others, 4_000, first_at_the_front, key)
        for n, key in zip((3, 4), keys)
    ]
    assert not same_law(*laws)


def clipped_sum(placed, gradients, ties):
    """The noise-free sum where row r turns the gradient of its example by `ties[r]`."""
    rows = ties[:, None] * np.vstack([gradients, np.zeros_like(gradients[:1])])[placed]
    mechanism = zoo.make_mechanism(l2_norm_clip=1.0, expected_batch_size=1.0)
    return zoo.release(mechanism, rows.astype(np.float32))[0]


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("k", [1, 3])
def test_neighbours_move_a_sum_that_is_tied_to_the_rows_by_one_at_most(k):
    n, random = 40, np.random.default_rng(0)
    sampling = dp.PoissonSampling(0.5, 60, 1)
    gradients = 5 * random.normal(size=[n, 3])
    ties = random.choice([-1.0, 1.0], size=60)  # the rows' own, known to everyone
    moved, moved_before = [], []
    for step in range(30):
        placed = np.minimum(sampling.place(n, step, KEY, k).ravel(), n)
        drawn = sampling.draw(n, step, KEY)
        x = drawn[0]  # all that come later would move up
        # The coupling of the proof: without x its row has padding, and all others stay.
        without = np.where(placed == x, n, placed)
        sums = [clipped_sum(rows, gradients, ties) for rows in (placed, without)]
        moved.append(np.linalg.norm(sums[0] - sums[1]))
        fronts = [np.pad(d, (0, 60 - len(d)), constant_values=n) for d in (drawn, drawn[1:])]
        sums = [clipped_sum(rows, gradients, ties) for rows in fronts]
        moved_before.append(np.linalg.norm(sums[0] - sums[1]))
    assert 0.999 < max(moved) <= 1 + 1e-5
    assert max(moved_before) > 3


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("make", "sampling"),
    [
        (dp.poisson_batches, dp.PoissonSampling(0.4, 18, 20)),
        (dp.sampling.fixed_size_batches, dp.sampling.FixedSizeSampling(18, 20)),
        (dp.sampling.shuffled_batches, dp.sampling.ShuffledEpochs(6, 20)),
    ],
)
@pytest.mark.parametrize("k", [1, 3])
def test_datasets_have_the_rows_of_the_key_from_every_source(make, sampling, k, monkeypatch):
    key = draws.new_key()
    x, y = numbered()
    placed = np.concatenate([sampling.place(30, step, key, k) for step in range(20)])
    options = {"key": key, "gradient_accumulation_steps": k}
    made = [lambda: make((x, y, y + 0.5), sampling, **options)]
    made.append(lambda: make(list(zip(x, y, y + 0.5)), sampling, **options))
    for number, source in enumerate([*made, made[0]]):
        if number == 2:
            monkeypatch.setattr(sources, "MAX_COPIED_BYTES", 0)
        for rows, (bx, by, bw) in zip(placed, source().as_numpy_iterator(), strict=True):
            there = rows < 30
            np.testing.assert_array_equal(by, np.where(there, rows, 0))
            padding = 1 if make is dp.poisson_batches else 0
            np.testing.assert_array_equal(bx[:, 0], np.where(there, rows + 1, padding))
            np.testing.assert_array_equal(bw, np.where(there, rows + 0.5, 0))
    resumed = make((x, y), sampling, start_step=7, **options).as_numpy_iterator()
    for rows, batch in zip(placed[7 * k :], resumed, strict=True):
        np.testing.assert_array_equal(batch[1], np.where(rows < 30, rows, 0))


def test_files_are_read_in_ascending_order():
    asked = []

    class Files(list):
        def __getitems__(self, indices):
            asked.append(indices)
            return [self[i] for i in indices]

    sampling = dp.PoissonSampling(0.5, 30, 5, seed=1)
    made = dp.poisson_batches(Files(records()), sampling, preprocess=to_pair)
    list(made)
    _, *by_step = asked
    assert by_step == [sampling.draw(30, t, draws.new_key(1)).tolist() for t in range(5)]
