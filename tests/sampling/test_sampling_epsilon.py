"""ε is that of the batches that were drawn, truncation included."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from types import SimpleNamespace

import dp_accounting
import numpy as np
import pytest
from scipy import stats

import tf_adaptive_dp as dp
from tests.helpers.sampled import DELTA, N, fake_ledger
from tf_adaptive_dp.accounting import Releases
from tf_adaptive_dp.accounting.composition import epsilon, releases_left
from tf_adaptive_dp.sampling import poisson, sampling_epsilon


@pytest.mark.parametrize("n, q, rows", [(7, 0.3, 4), (20, 0.5, 12), (50, 0.02, 1), (9, 1.0, 9)])
def test_the_failure_probability_is_that_of_counting(n, q, rows):
    exact = Fraction(q)
    tail = sum(math.comb(n, k) * exact**k * (1 - exact) ** (n - k) for k in range(rows, n + 1))
    ours = dp.PoissonSampling(q, rows, 1).failure_probability(n)
    assert ours == pytest.approx(float(exact * tail), rel=1e-9)


def test_far_tails_are_not_rounded_to_zero():
    assert 1e-80 < dp.PoissonSampling(200 / 60_000, 500, 1).failure_probability(60_000) < 1e-70


def hockey_sticks(gradients, x, sigma, q, rows, epsilon):
    """δ(ε) of one step with and without one example, both ways, by summing over all batches."""
    grid = np.linspace(-40, 40, 40_001)

    def density(values):
        total = np.zeros_like(grid)
        for drawn in itertools.product([0, 1], repeat=len(values)):
            chosen = [v for v, d in zip(values, drawn) if d]
            p = q ** len(chosen) * (1 - q) ** (len(values) - len(chosen))
            kept = list(itertools.combinations(chosen, min(rows, len(chosen))))
            for subset in kept:
                total += p / len(kept) * stats.norm.pdf(grid, sum(subset), sigma)
        return total

    without, with_x = density(gradients), density([*gradients, x])
    spacing = grid[1] - grid[0]
    return [
        np.maximum(a - math.exp(epsilon) * b, 0).sum() * spacing
        for a, b in ((with_x, without), (without, with_x))
    ]


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("spent", [0.1, 0.5, 1.0, 2.0])
def test_truncation_costs_at_most_what_is_said(rows, spent):
    # Others of the opposite sign: to drop one of them for x moves the sum by 2.
    others, sigma, q = [-1.0, -1.0, -1.0, -1.0], 0.8, 0.4
    untruncated = max(hockey_sticks([], 1.0, sigma, q, 9, spent))
    truncated = max(hockey_sticks(others, 1.0, sigma, q, rows, spent))
    share = dp.PoissonSampling(q, rows, 1).failure_probability(4) * math.exp(spent)
    assert truncated <= untruncated + share
    if rows == 1 and spent >= 1:
        assert truncated > untruncated + 0.01  # it does cost something


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
def test_epsilon_is_consistent_with_the_delta_that_truncation_leaves(accountant):
    ledger = fake_ledger((1.0, 100.0, 50))
    sampling = dp.PoissonSampling(0.1, 150, 50)
    spent = sampling.epsilon_spent(ledger, N, DELTA, accountant=accountant)
    plain = epsilon(1.0, 0.1, 50, DELTA, accountant)
    left = DELTA - 50 * sampling.failure_probability(N) * math.exp(spent)
    assert 0 < left < DELTA
    needed = epsilon(1.0, 0.1, 50, left, accountant)
    assert needed <= spent <= needed * (1 + 1e-5)
    assert plain < spent
    assert left == pytest.approx(sampling.delta_for_noise(spent, N, DELTA), rel=1e-12)
    half = fake_ledger((1.0, 100.0, 25))
    assert sampling.delta_for_noise(1.0, N, DELTA, releases=25) > sampling.delta_for_noise(
        1.0, N, DELTA
    )
    assert sampling.epsilon_spent(half, N, DELTA, accountant=accountant) < spent


@pytest.mark.parametrize("slope", [0.5, 0.9, 0.999, 1.0, 1.5])
def test_the_search_for_epsilon_ends(slope):
    # ε(δ) = 1 + slope · (1 - δ), δ left = 1 - (ε - 1) / 1000: solved near 1, or never.
    found = poisson._self_consistent(
        lambda delta: 1 + 1e3 * slope * (1 - delta), lambda e: 1 - (e - 0.999) / 1e3, 1.0
    )
    if slope < 1:
        exact = (1 - 0.999 * slope) / (1 - slope)
        assert exact * (1 - 1e-9) <= found <= max(exact * 1.5, exact + 0.01)
    else:
        assert found == math.inf


def test_too_little_room_has_no_epsilon():
    ledger = fake_ledger((1.0, 100.0, 50))
    assert dp.PoissonSampling(0.1, 110, 50).epsilon_spent(ledger, N, DELTA) == math.inf
    assert dp.PoissonSampling(0.1, 150, 50).epsilon_spent(fake_ledger(), N, DELTA) == 0.0
    silent = fake_ledger((0.0, 100.0, 1))
    assert dp.PoissonSampling(0.1, 150, 50).epsilon_spent(silent, N, DELTA) == math.inf


def trained(rows, parts=1, users=None):
    """An optimizer whose first batch had so many rows, as far as ε needs one."""
    ledger = Releases([(1.0, 100.0, 50)], examples_per_user=users)
    return SimpleNamespace(ledger=ledger, rows_per_batch=rows, parts_per_batch=parts)


@pytest.mark.parametrize(
    ("rows", "parts", "users", "room"),
    [
        (0, 1, None, 200),  # nothing was seen
        (200, 1, None, 200),
        (208, 1, None, 200),  # the smaller room costs more
        (150, 1, None, 150),
        (67, 3, None, 200),
        (50, 3, None, 148),  # rounded up from 148 to 150
        (1, 3, None, 1),
        (600, 1, 3, 200),
        (450, 1, 3, 150),
        (201, 3, 3, 200),
        (150, 3, 3, 148),
    ],
)
def test_epsilon_is_that_of_the_room_that_batches_had(rows, parts, users, room):
    """A sampling with more room than the one that drew was believed."""
    own = {"examples_per_user": users}
    claimed, drew = (dp.PoissonSampling(0.1, most, 60, **own) for most in (200, room))
    optimizer = trained(rows, parts, users)
    assert claimed.as_drawn(optimizer) == drew
    spent = claimed.epsilon_spent(optimizer, N, DELTA)
    assert spent == drew.epsilon_spent(optimizer.ledger, N, DELTA)
    assert claimed.as_drawn(optimizer.ledger) is claimed
    if room == 150:
        assert spent > claimed.epsilon_spent(optimizer.ledger, N, DELTA)
        of_budget = 1.0, 100.0, N, spent + 0.01, DELTA
        left = sampling_epsilon.releases_left(claimed, optimizer, *of_budget)
        assert left == sampling_epsilon.releases_left(drew, optimizer.ledger, *of_budget)
        assert left < sampling_epsilon.releases_left(claimed, optimizer.ledger, *of_budget)


def test_the_statement_is_about_the_room_that_batches_had():
    claimed = dp.PoissonSampling(0.1, 200, 60)
    for rows, said in (
        (150, "Draws of more than 150 examples were subsampled uniformly to 150"),
        (110, "truncating batches to 110 examples costs more than delta; draw again with a larger"),
    ):
        text = dp.privacy_statement(trained(rows), N, DELTA, sampling=claimed)
        text = " ".join(text.split())
        assert said in text and f"had room for {rows} examples, not for 200 like those" in text
    assert "room" not in dp.privacy_statement(trained(200), N, DELTA, sampling=claimed)


def test_a_batch_size_finds_room_that_costs_nothing():
    for size, n, steps in [(128, 1437, 440), (200, 60_000, 6_000), (1, 10, 5), (10, 10, 5)]:
        sampling = dp.PoissonSampling.for_batch_size(size, n, steps)
        assert sampling.expected_batch_size(n) == pytest.approx(size, rel=1e-12)
        assert sampling.steps == steps and sampling.seed is None
        rows = sampling.max_batch_size
        assert rows == n + 1 or rows % 8 == 0
        assert steps * sampling.failure_probability(n) <= 1e-12
        if rows <= n:
            less = dp.PoissonSampling(size / n, rows - 8, steps)
            assert steps * less.failure_probability(n) > 1e-12
        ledger = fake_ledger((2.0, float(size), steps))
        plain = epsilon(2.0, size / n, steps, 1e-5)
        assert sampling.epsilon_spent(ledger, n, 1e-5) == pytest.approx(plain, rel=1e-5)


def test_the_noise_for_a_budget_keeps_it():
    sampling = dp.PoissonSampling(0.1, 150, 50)
    left = sampling.delta_for_noise(3.0, N, DELTA)
    noise = dp.noise_multiplier_for(3.0, left, 0.1, 50)
    assert sampling.epsilon_spent(fake_ledger((noise, 100.0, 50)), N, DELTA) <= 3.0


def test_fixed_size_is_accounted_for_replacing_an_example():
    sampling = dp.sampling.FixedSizeSampling(100, 50)
    ours = sampling.epsilon_spent(fake_ledger((2.0, 100.0, 30), (1.5, 100.0, 20)), N, DELTA)
    accountant = dp_accounting.rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    for sigma, count in [(1.0, 30), (0.75, 20)]:  # halved: the sum moves by 2C
        gaussian = dp_accounting.GaussianDpEvent(sigma)
        accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(N, 100, gaussian), count)
    assert ours == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-12)
    whole = dp.sampling.FixedSizeSampling(N, 1).epsilon_spent(
        fake_ledger((2.0, float(N), 1)), N, DELTA
    )
    assert whole == pytest.approx(epsilon(1.0, 1.0, 1, DELTA))
    silent = fake_ledger((1e-9, 100.0, 1))
    assert sampling.epsilon_spent(silent, N, DELTA) == math.inf
    assert sampling.epsilon_spent(fake_ledger(), N, DELTA) == 0.0


def test_labels_account_like_their_samplings():
    ledger = fake_ledger((2.0, 100.0, 50))
    plain = epsilon(2.0, 0.1, 50, DELTA)
    for sampling in ("poisson", "shuffled", dp.sampling.ShuffledEpochs(100, 50)):
        assert sampling_epsilon.epsilon_spent(sampling, ledger, N, DELTA) == pytest.approx(plain)
    fixed = dp.sampling.FixedSizeSampling(100, 50).epsilon_spent(ledger, N, DELTA)
    assert sampling_epsilon.epsilon_spent("fixed", ledger, N, DELTA) == fixed
    assert fixed > 1.5 * plain


@pytest.mark.parametrize(
    "sampling",
    [
        "poisson",
        "fixed",
        dp.PoissonSampling(0.1, 150, 10**9),
        dp.sampling.FixedSizeSampling(100, 10**9),
    ],
)
def test_releases_left_are_the_most_that_fit(sampling):
    ledger = fake_ledger((2.0, 100.0, 5))
    left = sampling_epsilon.releases_left(sampling, ledger, 2.0, 100.0, N, 4.0, DELTA)
    assert left > 5

    def after(n):
        return sampling_epsilon.epsilon_spent(sampling, fake_ledger((2.0, 100.0, 5 + n)), N, DELTA)

    assert after(left) <= 4.0 < after(left + 1)
    if sampling == "poisson":
        assert left == releases_left(ledger, 2.0, 100.0, N, 4.0, DELTA)
