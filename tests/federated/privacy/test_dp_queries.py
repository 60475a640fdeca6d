"""Clip, noise and their fresh draws, of the queries alone."""

import math

import numpy as np
import pytest
import tensorflow as tf

from federated.privacy import dp_queries
from federated.privacy.dp_queries import MARGIN, AdaptiveClipSum, BandedSum, GaussianSum, TreeSum
from tests.helpers.gaussianity import assert_gaussian, assert_independent
from tf_adaptive_dp.mechanism.noise import fresh_normal_numbers

SIZE = 20_000


def noisy_sum(query, records, state, like=None):
    """One round of a query: the result, the next state and the event."""
    params = query.derive_sample_params(state)
    like = records[0] if like is None else like
    total = query.initial_sample_state(tf.nest.map_structure(tf.zeros_like, like))
    for record in records:
        record = tf.nest.map_structure(tf.constant, record)
        total = tf.nest.map_structure(tf.add, total, query.preprocess_record(params, record))
    return query.get_noised_result(total, state)


def released(query, rounds, like, state=None):
    """[rounds, d], the results of empty rounds, and the last state."""
    state = query.initial_global_state() if state is None else state
    results = []
    for _ in range(rounds):
        result, state, _ = noisy_sum(query, [], state, like)
        results.append(np.concatenate([np.ravel(t) for t in tf.nest.flatten(result)]))
    return np.stack(results), state


def adaptive(clip=2.0, noise_multiplier=0.0, count_stddev=0.0):
    return AdaptiveClipSum(clip, noise_multiplier, 0.5, 0.2, count_stddev, 4.0)


def queries(noise_multiplier, clip=2.0, size=4):
    count_stddev = 1.0 if noise_multiplier else 0.0
    return {
        "gaussian": GaussianSum(clip, clip * noise_multiplier),
        "adaptive": adaptive(clip, noise_multiplier, count_stddev),
        "tree": TreeSum(clip, noise_multiplier, period=4, size=size),
        "banded": BandedSum(clip, noise_multiplier, bands=3, size=size),
    }


@pytest.mark.slow_after(9)
@pytest.mark.parametrize("name", queries(0.0))
@pytest.mark.parametrize("norm", [0.5, 2.0, 3.0, 1e6])
def test_one_client_changes_the_sum_by_its_clipped_norm_at_most(name, norm):
    rng = np.random.default_rng(0)
    others = [[rng.normal(size=3).astype(np.float32), np.float32(rng.normal())] for _ in range(3)]
    direction = rng.normal(size=4).astype(np.float32)
    direction *= norm / np.linalg.norm(direction)
    query = queries(0.0)[name]
    state = query.initial_global_state()
    without, *_ = noisy_sum(query, others, state)
    with_it, *_ = noisy_sum(query, [*others, [direction[:3], direction[3]]], state)
    change = [np.ravel(a - b) for a, b in zip(with_it, without)]
    np.testing.assert_allclose(np.linalg.norm(np.concatenate(change)), min(norm, 2.0), rtol=1e-5)
    # The clip scales, and does not turn.
    assert np.dot(np.concatenate(change), direction) > 0.9999 * min(norm, 2.0) * norm


def test_the_clip_bounds_large_updates_to_less_than_the_margin():
    update = np.random.default_rng(1).normal(size=3_000_000).astype(np.float32)
    cut, norm = dp_queries.clipped([update[:1000], update[1000:]], tf.constant(0.3))
    exact = np.linalg.norm(np.concatenate(cut).astype(np.float64))
    assert abs(exact / 0.3 - 1) < (MARGIN - 1) / 4
    np.testing.assert_allclose(norm, np.linalg.norm(update.astype(np.float64)), rtol=1e-5)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", queries(0.0))
def test_how_sums_are_rounded_depends_on_no_client(name):
    # In float32 a client who lifts the sum over 2**13 has the small updates after it vanish.
    query = queries(0.0, clip=1.0, size=1)[name]
    state = query.initial_global_state()
    params = query.derive_sample_params(state)

    @tf.function
    def summed(updates):
        total = query.initial_sample_state([tf.zeros([1])])
        for k in tf.range(tf.size(updates)):
            total = query.accumulate_record(params, total, [tf.reshape(updates[k], [1])])
        return query.get_noised_result(total, state)[0][0][0]

    others = np.concatenate([np.full(8191, 1.0), np.full(11_000, -0.0004)])
    with_it, without = (
        summed(tf.constant([0.5, *one, *others], tf.float32)) for one in ([1.0], [])
    )
    assert abs(float(with_it - without)) <= 1 + 1e-3


@pytest.mark.parametrize("tiny", [1e-18, 1.1e-19, 1e-20, 1e-24, 1e-38])
def test_the_clip_holds_for_numbers_whose_squares_are_no_float32(tiny):
    cut, _ = dp_queries.clipped(
        # So many that the sum of their squares runs on threads that flush tiny numbers to zero.
        [tf.fill([1_000_000], tiny), tf.constant([0.0, -tiny])],
        tf.constant(tiny),
    )
    exact = np.linalg.norm(np.concatenate(cut).astype(np.float64))
    assert exact <= tiny * MARGIN
    assert (exact > 0) == (tiny > 2e-19)


@pytest.mark.parametrize("name", queries(0.0))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_an_update_that_is_not_finite_counts_as_zeros(name, bad):
    query = queries(0.0)[name]
    state = query.initial_global_state()
    good = np.array([1.0, 0.5, 0.0, 0.0], np.float32)
    broken = np.array([0.1, bad, 0.2, bad], np.float32)
    result, state, _ = noisy_sum(query, [good, broken], state)
    np.testing.assert_array_equal(result, good)
    assert all(np.isfinite(leaf).all() for leaf in tf.nest.flatten(state))


def test_the_adaptive_clip_holds_at_its_current_value_and_follows_the_share_below_it():
    query = adaptive(clip=2.0)
    state = query.initial_global_state()
    clip = 2.0
    for below in (3, 1, 0):
        norms = [clip / 2] * below + [50.0] * (4 - below)
        updates = [np.array([norm, 0.0], np.float32) for norm in norms]
        result, state, _ = noisy_sum(query, updates, state)
        np.testing.assert_allclose(result[0], below * clip / 2 + (4 - below) * clip, rtol=1e-6)
        clip *= math.exp(-0.2 * (below / 4 - 0.5))
        np.testing.assert_allclose(query.derive_metrics(state)["clip"], clip, rtol=1e-6)


def test_gaussian_noise_has_the_stated_size_also_for_nobody():
    like = [np.zeros(SIZE, np.float32), np.zeros([3, 2], np.float32)]
    ((sum_,), _) = released(GaussianSum(2.0, 3.0), 1, like)
    assert sum_.shape == (SIZE + 6,)
    assert_gaussian(sum_, 3.0)
    one = [np.full(SIZE, 1e-3, np.float32), np.zeros([3, 2], np.float32)]
    query = GaussianSum(2.0, 3.0)
    result, _, event = noisy_sum(query, [one], query.initial_global_state())
    assert_gaussian(result[0] - one[0], 3.0)
    assert float(event.noise_multiplier) == pytest.approx(1.5 * MARGIN, rel=1e-6)
    assert event.noise_multiplier > 1.5


@pytest.mark.parametrize(("norm", "bound"), [(0.0, 1e-12), (1e30, 1e12)])
def test_the_adaptive_clip_stays_where_float32_has_both_clip_and_noise(norm, bound):
    query = adaptive(2 * bound if norm == 0 else bound / 2, 1.5, count_stddev=0.4)
    state = query.initial_global_state()
    for _ in range(10):
        _, state, event = noisy_sum(query, [np.float32([norm])] * 8, state)
    assert float(state.sum_state.l2_norm_clip) == np.float32(bound)
    assert float(state.sum_state.stddev) == pytest.approx(1.5 * bound, rel=1e-6)
    assert float(state.quantile_estimator_state.current_estimate) == np.float32(bound)
    of_both = [float(e.noise_multiplier) for e in event.events]
    assert of_both == pytest.approx([1.5 * MARGIN, 0.8 * MARGIN], rel=1e-6)


@pytest.mark.slow
def test_adaptive_noise_of_sum_and_count_have_the_stated_sizes():
    query = adaptive(clip=2.0, noise_multiplier=1.5, count_stddev=0.4)
    state = query.initial_global_state()
    result, _, event = noisy_sum(query, [np.zeros(SIZE, np.float32)], state)
    assert_gaussian(result, 3.0)
    assert [float(e.noise_multiplier) for e in event.events] == pytest.approx([1.5, 0.8], rel=1e-4)
    assert all(e.noise_multiplier > z for e, z in zip(event.events, (1.5, 0.8)))
    below, above = np.zeros(1, np.float32), np.full(1, 9.0, np.float32)

    @tf.function
    def next_clips():
        def next_clip(_):
            return noisy_sum(query, [below, above], state)[1].sum_state.l2_norm_clip

        return tf.map_fn(next_clip, tf.range(2000.0))

    # One is below and one above, so the share is at its aim of one half, but for the noise.
    clips = next_clips()
    assert_gaussian(np.log(np.array(clips) / 2.0) / -0.2, 0.4 / 4)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", queries(1.0))
def test_no_seed_and_no_saved_state_makes_noise_repeat(name):
    like = np.zeros(SIZE, np.float32)

    def graph():
        tf.keras.utils.set_random_seed(1)
        query = queries(1.0, size=SIZE)[name]
        state = query.initial_global_state()
        run = tf.function(lambda: query.get_noised_result(query_sum(query, like), state)[0])
        return [run().numpy(), run().numpy()]

    tf.keras.utils.set_random_seed(1)
    draws = [*graph(), *graph()]
    for i, draw in enumerate(draws):
        for other in draws[:i]:
            assert_independent(draw, other)


def query_sum(query, like):
    return query.initial_sample_state(tf.zeros_like(like))


@pytest.mark.slow
def test_fresh_numbers_are_gaussian_whatever_their_number():
    few = tf.function(lambda: tf.map_fn(lambda _: fresh_normal_numbers(7), tf.range(2000.0)))
    assert_gaussian(few(), 1.0)
    sample = fresh_normal_numbers(100_001).numpy()
    assert sample.shape == (100_001,)
    assert_gaussian(sample, 1.0)
    assert_independent(sample[:50_000], sample[50_000:100_000])


def prefix_variance(rounds):
    """In units of a node's: a node of level k is known to 1 / (2 - 2⁻ᵏ)."""
    return sum(1 / (2 - 0.5**k) for k in range(rounds.bit_length()) if rounds >> k & 1)


def test_tree_noise_of_prefix_sums_is_that_of_their_nodes():
    sums, _ = released(TreeSum(2.0, 1.5, period=5, size=SIZE), 10, np.zeros(SIZE, np.float32))
    first, second = np.cumsum(sums[:5], axis=0), np.cumsum(sums[5:], axis=0)
    for rounds in range(1, 6):
        for prefix in (first, second):
            assert_gaussian(prefix[rounds - 1], 3.0 * math.sqrt(prefix_variance(rounds)))
        assert_independent(first[rounds - 1], second[rounds - 1])  # another tree
    # The sum of four is a node of its own; that of five has one leaf more, and the same node.
    assert_gaussian(first[4] - first[3], 3.0)


def test_a_tree_round_that_is_run_again_has_fresh_noise_in_all_nodes_it_finishes():
    query, like = TreeSum(1.0, 1.0, period=4, size=SIZE), np.zeros(SIZE, np.float32)
    state = query.initial_global_state()
    for rounds in range(1, 5):
        (first,), new_state = released(query, 1, like, state)
        (again,), _ = released(query, 1, like, state)
        finished = (rounds & -rounds).bit_length() - 1  # level of the largest node
        weight = 1 / (2 - 0.5**finished)
        own = 1.0
        for _ in range(finished):
            own = 1 + own / 4  # the right child is new as well, the left one is not
        assert_gaussian(first - again, weight * math.sqrt(2 * own))
        state = new_state


def noise_matrix(monkeypatch, rounds, period):
    """[rounds, nodes], in prefix sums, of the numbers drawn; the margin is left out."""
    size = 2 * rounds
    drawn = iter(np.eye(size, dtype=np.float32))
    monkeypatch.setattr(dp_queries, "fresh_normal_numbers", lambda _: tf.constant(next(drawn)))
    query = TreeSum(1.0, 1.0 / MARGIN, period, size)
    sums, _ = released(query, rounds, np.zeros(size, np.float32))
    return np.cumsum(sums.astype(np.float64), axis=0)


@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 5, 7, 8, 13, 16])
def test_what_a_tree_tells_of_one_client_is_at_most_what_is_accounted(monkeypatch, rounds):
    """All prefix sums s + B·z together are one Gaussian mechanism of covariance B·Bᵀ.

    A client in round j changes them by a_j, 0 before j and 1 from there on: sensitivity
    √(a_jᵀ (B·Bᵀ)⁻¹ a_j) in units of the noise, whose square the accountant takes for the depth.
    """
    matrix = noise_matrix(monkeypatch, rounds, period=16)
    inverse = np.linalg.inv(matrix @ matrix.T)
    changes = np.tril(np.ones([rounds, rounds]))  # column j: a client in round j
    told = max(np.diag(changes.T @ inverse @ changes))
    depth = math.ceil(math.log2(rounds + 1))
    assert told <= depth * (1 + 1e-5)
    # Less noise, or one node less in the account, would not be covered.
    assert told * (3 / 2) ** 2 > depth
    assert told > depth - 1 or rounds > 8


def test_a_client_that_comes_twice_in_a_tree_is_not_covered(monkeypatch):
    """So the order of the clients matters: the test above has the power to find it."""
    matrix = noise_matrix(monkeypatch, 4, period=4)
    inverse = np.linalg.inv(matrix @ matrix.T)
    twice = np.tril(np.ones([4, 4])) @ np.array([0.0, 0.0, 1.0, 1.0])
    assert twice @ inverse @ twice > math.ceil(math.log2(5))


@pytest.mark.parametrize("period", [1, 2, 3, 6])
def test_trees_of_any_period_begin_anew(monkeypatch, period):
    matrix = noise_matrix(monkeypatch, 3 * period, period)
    residuals = np.diff(matrix, axis=0, prepend=np.zeros([1, matrix.shape[1]]))
    within = [np.cumsum(residuals[k * period : (k + 1) * period], axis=0) for k in range(3)]
    for k, prefix in enumerate(within):
        variances = [prefix_variance(r) for r in range(1, period + 1)]
        np.testing.assert_allclose(np.sum(prefix**2, axis=1), variances, rtol=1e-4)
        for other in within[:k]:
            np.testing.assert_allclose(prefix @ other.T, 0.0, atol=1e-6)


def honaker_matrix(rounds, period):
    """[rounds, nodes], from the definition: every node has a number of its own."""
    rows, columns = [], {}

    def unscaled(tree, level, place):
        """The estimate of a node from its own number and those of all nodes below it."""
        own = {columns.setdefault((tree, level, place), len(columns)): 1.0}
        if level:
            for child in (2 * place, 2 * place + 1):
                for column, weight in unscaled(tree, level - 1, child).items():
                    own[column] = own.get(column, 0.0) + weight / 2
        return own

    before = {}
    for number in range(rounds):
        tree, leaf = divmod(number, period)
        row = dict(before)  # earlier trees stay in the prefix sums
        end = 0
        for level in reversed(range(period.bit_length())):
            if (leaf + 1) >> level & 1:
                for column, weight in unscaled(tree, level, end >> level).items():
                    row[column] = row.get(column, 0.0) + weight / (2 - 0.5**level)
                end += 1 << level
        if leaf + 1 == period:
            before = row
        rows.append(row)
    matrix = np.zeros([rounds, len(columns)])
    for row, weights in zip(matrix, rows):
        for column, weight in weights.items():
            row[column] = weight
    return matrix


@pytest.mark.parametrize("rounds, period", [(16, 16), (13, 13), (11, 4), (12, 5)])
def test_the_covariance_of_all_prefix_sums_is_that_of_honakers_estimates(
    monkeypatch, rounds, period
):
    """The draw of a round stands for several nodes; nothing that is released tells it from them."""
    matrix, defined = noise_matrix(monkeypatch, rounds, period), honaker_matrix(rounds, period)
    found, expected = matrix @ matrix.T, defined @ defined.T
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for wrong in (2 / 3, 3 / 2):
        assert np.abs(found - wrong**2 * expected).max() > 0.3
    # Were a node's right child left out of its estimate, this would find it.
    assert period < 2 or np.abs(found - np.diag(np.diag(expected))).max() > 0.3


@pytest.mark.parametrize("period", [1, 5, 8])
def test_a_round_needs_no_idle_node_and_keeps_them_as_they_were(monkeypatch, period):
    size = 4
    query, like = TreeSum(1.0, 1.0, period, size), np.zeros(size, np.float32)
    state = query.initial_global_state()
    for number in range(2 * period + 1):
        numbers = np.random.default_rng(number).standard_normal(size, np.float32)
        monkeypatch.setattr(dp_queries, "fresh_normal_numbers", lambda _, z=numbers: tf.constant(z))
        state = tf.nest.map_structure(np.asarray, state)
        lean = dp_queries.without_idle_nodes(state)
        (expected,), after = released(query, 1, like, state)
        (found,), lean_after = released(query, 1, like, lean)
        np.testing.assert_array_equal(found, expected)
        whole = dp_queries.with_idle_nodes(state, lean_after)
        tf.nest.map_structure(np.testing.assert_array_equal, whole, after)
        kept = [len(node) for node in after.nodes]
        leaves = (number + 1) % period
        assert kept == [size * (leaves >> k & 1) for k in range(len(kept))]
        read = [k for k, node in enumerate(lean.nodes) if len(node)]
        assert read == list(range(len(read)))
        state = after


def test_a_tree_round_without_a_node_that_it_takes_back_fails():
    query = TreeSum(1.0, 1.0, period=4, size=1)  # one number would fit by broadcasting
    _, state = released(query, 1, np.zeros(1, np.float32))
    without = state._replace(nodes=tuple(tf.zeros([0]) for _ in state.nodes))
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="[sS]hape"):
        released(query, 1, np.zeros(1, np.float32), without)


def test_a_tree_of_an_earlier_version_is_refused():
    """It had all levels in one array, and the noise of the last sum; here as many leaves as now."""
    state = TreeSum(1.0, 1.0, period=3, size=4).initial_global_state()
    state = tf.nest.map_structure(np.asarray, state)
    assert dp_queries.without_idle_nodes(state).rounds == 0
    old = state._replace(nodes=(np.zeros([2, 4], np.float32), np.zeros([4], np.float32)))
    for rounds in range(4):
        with pytest.raises(ValueError, match="must hold one vector.*resume them with the version"):
            dp_queries.without_idle_nodes(old._replace(rounds=np.int64(rounds)))
