"""Strategies of correlated noise, against dense matrices and all ways to participate."""

import itertools
import math

import numpy as np
import pytest

from tests.helpers.strategies import noise_matrix, strategy_matrix, sum_decoder
from tf_adaptive_dp.accounting import batch_order, noise_strategies
from tf_adaptive_dp.accounting.noise_strategies import (
    BandedNoise,
    IndependentNoise,
    ToeplitzNoise,
    TreeNoise,
    prefix_error,
    sensitivity,
)

TOEPLITZ = {
    "independent": IndependentNoise(),
    "2 bands": BandedNoise(2),
    "5 bands": BandedNoise(5),
    "of one's own": ToeplitzNoise((3.0, 2.0, 2.0, 0.5)),
    "all alike": ToeplitzNoise((1, 1, 1)),
}
TREES = {f"trees of {steps}": TreeNoise(steps) for steps in (1, 4, 5, 100)}
STRATEGIES = {**TOEPLITZ, **TREES}
each = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
each_toeplitz = pytest.mark.parametrize("strategy", TOEPLITZ.values(), ids=TOEPLITZ)
each_tree = pytest.mark.parametrize("strategy", TREES.values(), ids=TREES)


def test_a_strategy_without_its_cost_cannot_be_created():
    class Free(noise_strategies.ToeplitzStrategy):
        coefficients, bands = (1.0,), 1
        sensitivity = noise_strategies.NoiseStrategy.sensitivity

    with pytest.raises(TypeError, match="abstract.*sensitivity"):
        Free()
    with pytest.raises(TypeError, match="abstract"):
        noise_strategies.NoiseStrategy()


def test_the_bands_are_those_of_the_square_root_of_the_matrix_of_sums():
    steps = 40
    root = strategy_matrix(BandedNoise(steps), steps)
    root /= root[0, 0]
    np.testing.assert_allclose(root @ root, np.tri(steps), atol=1e-12)
    some = np.array(BandedNoise(7).coefficients)
    np.testing.assert_allclose(some / some[0], root[:7, 0])


@each_toeplitz
def test_a_column_has_norm_one_and_noise_is_that_of_the_inverse(strategy):
    assert math.isclose(np.linalg.norm(strategy.coefficients), 1)
    inverse = np.linalg.inv(strategy_matrix(strategy, 30))
    np.testing.assert_allclose(strategy.noise_coefficients(30), inverse[:, 0], atol=1e-9)


@each
@pytest.mark.parametrize("steps", [1, 2, 30])
def test_the_error_of_sums_is_that_of_dense_matrices(strategy, steps):
    sums = np.linalg.norm(sum_decoder(strategy, steps), axis=1)
    np.testing.assert_allclose(strategy.sum_deviations(steps), sums, rtol=1e-9)
    expected = math.sqrt((sums**2).sum() / steps)
    assert prefix_error(strategy, steps) == pytest.approx(expected, rel=1e-9)
    single = np.linalg.norm(noise_matrix(strategy, steps), axis=1)
    np.testing.assert_allclose(strategy.deviations(steps), single, rtol=1e-9)


@pytest.mark.parametrize("name", ["independent", "2 bands", "5 bands", "of one's own"])
def test_the_noise_of_late_steps_is_that_of_dense_matrices(name):
    strategy, steps = TOEPLITZ[name], 600
    noise = noise_matrix(strategy, steps)
    difference = np.linalg.norm(noise[-1] - noise[-2]) / np.sqrt(2)
    assert strategy.difference_deviation() == pytest.approx(difference, rel=1e-6)
    of_sum = np.linalg.norm(noise.sum(axis=0)) / np.sqrt(steps)
    assert strategy.drift_deviation() == pytest.approx(of_sum, rel=0.02)


@pytest.mark.parametrize("bands", range(2, 7))
def test_the_noise_of_a_step_is_bounded_unless_coefficients_are_equal_in_blocks(bands):
    grows = set()
    for falls in itertools.product([False, True], repeat=bands - 1):
        coefficients = 1 / (1.0 + np.cumsum([0, *falls]))
        strategy = ToeplitzNoise(tuple(coefficients))
        short, long = strategy.deviations(4000)[[1999, 3999]]
        # c_b = 0 is a fall, too.
        common = math.gcd(bands, *(k for k, fall in enumerate(falls, 1) if fall))
        assert long / short == pytest.approx(math.sqrt(2) if common > 1 else 1, rel=1e-2)
        assert strategy.is_bounded == (common == 1)
        grows.add(common > 1)
    assert grows == {False, True}


def test_more_bands_give_smaller_sums_at_the_same_noise_multiplier():
    errors = [prefix_error(IndependentNoise(), 4_000)]
    errors += [prefix_error(BandedNoise(bands), 4_000) for bands in (2, 4, 8, 16, 32)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.3 * errors[0]


@each
@pytest.mark.parametrize("separation", [1, 2, 3, 5])
@pytest.mark.parametrize("most", [1, 2, 3, None])
def test_sensitivity_is_the_largest_over_all_ways_to_participate(strategy, separation, most):
    largest, steps = largest_over_all_ways(strategy, 9, separation, most), 9
    found = sensitivity(strategy, steps, separation, most)
    if isinstance(strategy, TreeNoise):  # a bound
        assert largest * (1 - 1e-12) <= found <= 1.3 * largest
    else:
        assert found == pytest.approx(largest, rel=1e-12)


def largest_over_all_ways(strategy, steps, separation, most=None):
    matrix, largest = strategy_matrix(strategy, steps).astype(float), 0.0
    for chosen in itertools.product([False, True], repeat=steps):
        when = np.flatnonzero(chosen)
        if len(when) and np.diff(when).min(initial=separation) >= separation:
            if most is None or len(when) <= most:
                largest = max(largest, np.linalg.norm(matrix[:, when].sum(axis=1)))
    return largest


@pytest.mark.parametrize(
    "steps_per_tree, steps, separation, most",
    [(7, 12, 1, 1), (12, 12, 3, 1), (3, 12, 4, None), (4, 12, 4, 2), (4, 8, 4, None)]
    + [(8, 8, 2, None), (8, 8, 1, None), (4, 8, 2, None), (16, 16, 4, None), (16, 16, 8, None)],
)
def test_the_bound_for_trees_is_reached_where_it_says_so(steps_per_tree, steps, separation, most):
    noise = TreeNoise(steps_per_tree)
    largest = largest_over_all_ways(noise, steps, separation, most)
    assert sensitivity(noise, steps, separation, most) == pytest.approx(largest, rel=1e-12)


@pytest.mark.parametrize("steps", [5, 16, 21, 64, 90])
@pytest.mark.parametrize("separation", [3, 8, 20])
@pytest.mark.parametrize("most", [1, 3, 30])
def test_one_tree_costs_at_least_what_tf_privacy_says(steps, separation, most):
    accountant = pytest.importorskip(
        "tensorflow_privacy.privacy.analysis.tree_aggregation_accountant"
    )
    # It counts the steps between two participations.
    rdp = accountant.compute_rdp_single_tree(1.0, steps, most, separation - 1, 2.0)
    found = sensitivity(TreeNoise(steps), steps, separation, most)
    assert math.sqrt(rdp) * (1 - 1e-12) <= found <= 1.2 * math.sqrt(rdp)


@each_tree
def test_the_sums_of_trees_are_unbiased(strategy):
    decoder, matrix = sum_decoder(strategy, 21), strategy_matrix(strategy, 21).astype(float)
    np.testing.assert_allclose(decoder @ matrix, np.tri(21), atol=1e-9)


@each
def test_gradients_in_other_directions_change_no_more(strategy):
    # The gradients of an example need not point the same way.
    random, steps = np.random.default_rng(0), 12
    bound = sensitivity(strategy, steps, 2)
    for _ in range(200):
        gradients = random.normal(size=[steps, 3])
        gradients /= np.linalg.norm(gradients, axis=1, keepdims=True)
        gradients[1 - random.integers(2) :: 2] = 0
        assert np.linalg.norm(strategy_matrix(strategy, steps) @ gradients) <= bound + 1e-9


@each_toeplitz
def test_participations_beyond_the_bands_are_orthogonal(strategy):
    most = sensitivity(strategy, 100 * strategy.bands, strategy.bands)
    assert most == pytest.approx(10.0, rel=1e-12)


def test_what_is_forgotten_does_not_show_in_float32():
    steps = 3_000
    for bands in (2, 4, 8, 16, 32):
        strategy = BandedNoise(bands)
        beyond = strategy.noise_coefficients(steps)[strategy.memory(steps) :]
        assert np.abs(beyond).sum() < 1e-9
        assert strategy.memory(steps) < 40 * bands
    assert ToeplitzNoise((1, 1)).memory(50) == 50  # never forgets


def test_strategies_are_told_apart_and_can_be_saved():
    strategies = [*STRATEGIES.values(), BandedNoise(3), ToeplitzNoise((3.0, 2.0, 2.0, 0.4))]
    assert len({strategy.digest() for strategy in strategies}) == len(strategies)
    for strategy in strategies:
        again = noise_strategies.get_strategy(noise_strategies.serialize(strategy))
        assert again == strategy and again.digest() == strategy.digest()
    assert noise_strategies.get_strategy(None) == IndependentNoise()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: BandedNoise(1), "`bands` must be at least 2"),
        (lambda: BandedNoise(2_000), "`bands` must be at most 1024"),
        (lambda: BandedNoise(2.5), "`bands` must be"),
        (lambda: ToeplitzNoise((1.0,)), "2 to 1024 positive numbers"),
        (lambda: ToeplitzNoise((1.0, 2.0)), "non-increasing order"),
        (lambda: ToeplitzNoise((1.0, 0.0)), "`coefficients` must be"),
        (lambda: ToeplitzNoise((1.0, -0.5)), "`coefficients` must be"),
        (lambda: ToeplitzNoise("ab"), "a sequence of numbers"),
        (lambda: TreeNoise(0), "`steps_per_tree` must be at least 1"),
        (lambda: TreeNoise(2**30), r"`steps_per_tree` must be below 2\*\*30"),
        (lambda: TreeNoise(2.5), "`steps_per_tree` must be"),
        (lambda: noise_strategies.get_strategy("banded"), "`noise` must be"),
        (lambda: sensitivity(BandedNoise(2), 5, 0), "`min_separation` must be"),
    ],
)
def test_what_is_no_strategy_is_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize("padding", [24, 30, 60, 128])
def test_marks_show_the_step(padding):
    random, told = np.random.default_rng(padding), 0
    for step in random.integers(2**22, size=100).tolist():
        rows = np.zeros(128, bool)
        rows[random.choice(128, padding, replace=False)] = True
        marks = batch_order.marked(rows, random.random(128) < 0.5, step, period=8)
        assert not (marks & ~rows).any()
        if marks.any():
            told += 1
            assert batch_order.shown(marks) == step % 2**20 ^ batch_order.code_of_period(8)
    assert told > (90 if padding == 24 else 98)


def test_too_little_padding_shows_nothing():
    rows = np.zeros(128, bool)
    rows[:5] = True
    assert not batch_order.marked(rows, rows, 3, period=8).any()


def test_other_periods_have_other_codes():
    codes = {batch_order.code_of_period(period) for period in range(2, 1025)}
    assert len(codes) == 1023 and max(codes) < 2**batch_order.BITS_OF_PERIOD


def test_other_groups_have_other_codes():
    codes = {batch_order.code_of_groups(bytes([k] * 32)) for k in range(256)}
    assert len(codes) > 140 and not any(c % 2**batch_order.BITS_OF_PERIOD for c in codes)
    assert max(codes) < 2**batch_order.BITS


# Of JAX-Privacy 2.0.0, `matrix_factorization.toeplitz` in float64 for 1,000 steps: c_0 and c_1, d_k
# for k = 0, 1, 7, 40, the root mean square error of sums, and the sensitivity for (s, k).
JAX_PRIVACY = {
    2: (
        [0.894427191, 0.447213595],
        [1.118033989, -0.559016994, -0.008734641, 0.0],
        16.69164979,
        [42.41462012, 14.14213562, 4.47213595, 5.0],
    ),
    8: (
        [0.762852351, 0.381426175],
        [1.310869658, -0.655434829, -0.021122411, -0.000121073],
        9.42622877,
        [75.66155113, 17.35587562, 5.44733554, 5.0],
    ),
    32: (
        [0.679317827, 0.339658913],
        [1.472065005, -0.736032503, -0.023719797, -0.003314117],
        5.48049117,
        [135.51533153, 28.12735409, 8.50158874, 5.0],
    ),
}


@pytest.mark.parametrize("bands", JAX_PRIVACY)
def test_the_figures_are_those_of_jax_privacy(bands):
    strategy, steps = BandedNoise(bands), 1_000
    column, noise, error, sensitivities = JAX_PRIVACY[bands]
    np.testing.assert_allclose(strategy.coefficients[:2], column, atol=1e-9)
    of_noise = strategy.noise_coefficients(steps)[[0, 1, 7, 40]]
    np.testing.assert_allclose(of_noise, noise, atol=1e-9)
    assert prefix_error(strategy, steps) == pytest.approx(error, rel=1e-8)
    cases = [(1, None), (5, None), (5, 20), (40, None)]
    found = [sensitivity(strategy, steps, *case) for case in cases]
    np.testing.assert_allclose(found, sensitivities, rtol=1e-8)


@pytest.mark.parametrize(
    "passes, expected", [(1, (0.40, 0.40, 0.34, 0.24)), (10, (0.32, 0.26, 0.31, 0.12))]
)
def test_the_table_of_the_documentation_is_right(passes, expected):
    def noise_in_sums(strategy):
        return sensitivity(strategy, 234 * passes, 234) * prefix_error(strategy, 234 * passes)

    strategies = (TreeNoise(234), TreeNoise(234 * passes), BandedNoise(16), BandedNoise(234))
    found = [noise_in_sums(s) / noise_in_sums(IndependentNoise()) for s in strategies]
    np.testing.assert_allclose(found, expected, atol=0.005)


def test_coefficients_that_were_divided_by_their_norm_stay_what_they_are():
    generator = np.random.default_rng(0)
    for bands in [2, 3, 7, 100, 1024] * 20:
        given = np.sort(generator.uniform(0.01, 1.0, bands))[::-1]
        once = ToeplitzNoise(tuple(given.tolist()))
        assert np.linalg.norm(once.coefficients) == pytest.approx(1, abs=1e-14)
        assert ToeplitzNoise(once.coefficients) == once
        assert noise_strategies.get_strategy(noise_strategies.serialize(once)) == once
