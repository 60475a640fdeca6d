"""Correlated noise has the covariance of its strategy, and goes on only where it is known.

Tests of a distribution accept the wanted scale and reject 2/3 and 3/2 of it. They fail by chance
once in a million.
"""

import copy
import math
import pickle
import threading

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import zoo
from tests.helpers.gaussianity import assert_gaussian, assert_independent, assert_uncorrelated, fits
from tests.helpers.strategies import noise_matrix, strategy_matrix, tree_nodes, whitened
from tf_adaptive_dp.accounting import batch_order
from tf_adaptive_dp.accounting.noise_strategies import (
    BandedNoise,
    IndependentNoise,
    ToeplitzNoise,
    TreeNoise,
    sensitivity,
)
from tf_adaptive_dp.mechanism.correlated_noise import CorrelatedNoise, NoiseKey, new_noise_key
from tf_adaptive_dp.mechanism.noise import GaussianNoise, normal_numbers

pytestmark = [
    pytest.mark.filterwarnings("ignore:Under eager execution"),
    pytest.mark.slow_on(2),  # what noise is drawn does not depend on the version of Keras
]
SIZE = 5_000
STRATEGIES = {
    "banded": BandedNoise(4),
    "own": ToeplitzNoise((3.0, 2.0, 2.0)),
    "trees": TreeNoise(8),
}
FOUR_BANDS = STRATEGIES["banded"]
each = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)


def mechanism_of(strategy, **kwargs):
    return zoo.make_mechanism(noise=strategy, **{"noise_multiplier": 1.0, **kwargs})


def released_by(mechanism, steps, mode="eager", size=SIZE):
    """[steps, size]: what is released for gradients of zero, in batches of one row."""
    rows = [np.zeros([1, size], "float32")]
    step = zoo.in_mode(mode, lambda r: mechanism.release(zoo.Rows(r), 1)[0], rows)
    return np.stack([step(*rows).numpy() for _ in range(steps)])


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("mode", ["eager", "graph of fixed size", "xla"])
@each
def test_the_noise_times_the_strategy_is_independent_and_gaussian(strategy, mode):
    mechanism = mechanism_of(strategy, noise_multiplier=1.3, l2_norm_clip=0.5)
    z = whitened(strategy, released_by(mechanism, 7, mode))
    assert_gaussian(z, 1.3 * 0.5)
    for lag in range(1, 6):
        assert_uncorrelated(z[lag:].ravel(), z[:-lag].ravel())
    assert mechanism.ledger.segments == [(1.3, 1.0, 7)]
    assert mechanism.ledger.noise == strategy


@each
def test_the_noise_of_each_step_has_the_variance_and_correlations_of_the_inverse(strategy):
    steps = 9
    w = released_by(mechanism_of(strategy), steps, "graph of fixed size", 20_000)
    rows = noise_matrix(strategy, steps)
    for t in range(steps):
        assert_gaussian(w[t], np.linalg.norm(rows[t]))
    bound = 6 / math.sqrt(20_000)
    for s in range(steps):
        for t in range(s + 1, steps):
            wanted = rows[s] @ rows[t] / (np.linalg.norm(rows[s]) * np.linalg.norm(rows[t]))
            found = np.corrcoef(w[s], w[t])[0, 1]
            assert abs(found - wanted) < bound
            # In a tree, only the steps that finish more than a leaf take something back.
            depends = not isinstance(strategy, TreeNoise) or t % 2
            if t == s + 1 and depends:
                # So independent noise, and 2/3 and 3/2 of the correlation, would fail.
                assert abs(wanted) / 3 > 2 * bound


@pytest.mark.slow_after(1)
@each
def test_sums_have_less_noise_than_those_of_independent_noise(strategy):
    steps = 40
    w = released_by(mechanism_of(strategy), steps, "graph of fixed size")
    expected = strategy.sum_deviations(steps)[-1]
    assert_gaussian(w.sum(axis=0), expected)
    assert expected < 0.75 * math.sqrt(steps)
    independent = released_by(zoo.make_mechanism(noise_multiplier=1.0), steps, "graph")
    assert fits(independent.sum(axis=0), math.sqrt(steps))
    assert not fits(independent.sum(axis=0), expected)


def test_the_tests_reject_independent_noise():
    w = released_by(zoo.make_mechanism(noise_multiplier=1.0), 9, "graph", 20_000)
    d = BandedNoise(4).noise_coefficients(2)
    wanted = d[1] / np.linalg.norm(d)
    assert abs(np.corrcoef(w[0], w[1])[0, 1] - wanted) > 6 / math.sqrt(20_000)
    z = whitened(BandedNoise(4), w)
    with pytest.raises(AssertionError):
        assert_uncorrelated(z[1:].ravel(), z[:-1].ravel())


def test_variables_share_no_noise_and_padding_of_the_vector_is_left_out():
    mechanism = mechanism_of(BandedNoise(3), seed=1)
    shapes = [(1_003,), (7, 11), (), (1_001,)]
    steps = [
        [
            r.numpy()
            for r in mechanism.release(zoo.Rows(*map(np.zeros, [(1, *s) for s in shapes])), 1)
        ]
        for _ in range(3)
    ]
    assert [r.shape for r in steps[0]] == shapes
    for first, *_, last in steps:
        assert_independent(first[:1_000], last[:1_000])


def test_the_noise_is_added_to_the_clipped_sum():
    mechanism = mechanism_of(BandedNoise(3), seed=2, l2_norm_clip=2.0)
    quiet = mechanism_of(BandedNoise(3), seed=2, l2_norm_clip=2.0)
    rows = np.full([3, 4], 100.0, "float32")
    for _ in range(4):
        (with_rows,) = zoo.release(mechanism, rows)
        (without,) = zoo.release(quiet, np.zeros([3, 4]))
        np.testing.assert_allclose(with_rows - without, np.ones(4), atol=1e-5)


def test_neighbours_differ_by_at_most_the_clipped_gradient_of_one_step_and_its_bands():
    # y = C g + z of neighbours, given the same noise: one example moves it by at most C.
    strategy, clip = BandedNoise(4), 0.7
    runs = []
    for scale in (0.0, 50.0):
        mechanism = mechanism_of(strategy, seed=3, l2_norm_clip=clip, expected_batch_size=1.0)
        others = np.random.default_rng(0).normal(size=[8, 5, 6]).astype("float32")
        released = []
        for t in range(8):
            rows = np.concatenate([others[t], scale * (t == 2) * np.ones([1, 6], "float32")])
            released.append(zoo.release(mechanism, rows)[0])
        runs.append(whitened(strategy, np.stack(released)))
    moved = np.linalg.norm(runs[1] - runs[0])
    assert moved == pytest.approx(clip, rel=1e-4)
    assert np.abs(runs[1] - runs[0])[[0, 1, 6, 7]].max() < 1e-5


def resumed(strategy, keys, num_releases, size=SIZE, **kwargs):
    mechanism = mechanism_of(strategy, **kwargs)
    mechanism.ledger.restore([(1.0, 1.0, num_releases)])
    mechanism.generator.resume(keys, num_releases)
    return mechanism


@pytest.mark.slow_after(1)
@each
@pytest.mark.parametrize("traced_before", [False, True])
def test_another_process_goes_on_with_the_same_noise(strategy, traced_before):
    first, second, third = new_noise_key(0), new_noise_key(5), new_noise_key(6)
    run = resumed(strategy, [first], 0)
    before = released_by(run, 5, "graph of fixed size")
    run = resumed(strategy, [first, second], 5)
    between = released_by(run, 1)
    run = mechanism_of(strategy)
    if traced_before:
        released_by(run, 2)
    run.ledger.restore([(1.0, 1.0, 6)])
    run.generator.resume([first, second, third], 6)
    after = released_by(run, 6, "graph of fixed size")
    z = whitened(strategy, np.concatenate([before, between, after]))
    assert_gaussian(z, 1.0)
    assert_gaussian(z[5:9], 1.0)
    assert z[6:8].var() < 1.1  # 7 standard deviations from 1
    for lag in range(1, 6):
        assert_uncorrelated(z[lag:].ravel(), z[:-lag].ravel())
    # Without the noise of the past it would not be so; four bands give 1.25, the others more.
    fresh = released_by(mechanism_of(strategy), 6)
    z = whitened(strategy, np.concatenate([before, between, fresh]))
    assert z[6:8].var() > 1.1


def test_noise_after_many_releases_is_that_of_the_whole_run():
    # What is replayed begins where float32 no longer sees what was before.
    strategy, steps = BandedNoise(2), 200
    key = NoiseKey(0, 17)
    run = resumed(strategy, [key], 0, size=40)
    whole = released_by(run, steps + 3, "graph of fixed size", 40)
    later = resumed(strategy, [key], steps)
    np.testing.assert_allclose(released_by(later, 3, size=40), whole[steps:], atol=2e-6)


def test_processes_that_go_on_from_the_same_directory_never_draw_the_same_numbers():
    strategy, first = BandedNoise(3), new_noise_key(0)
    released_by(resumed(strategy, [first], 0), 4)
    one, other = (resumed(strategy, [first, new_noise_key(4)], 4) for _ in range(2))
    # Both take back the same noise; what they draw anew is independent.
    both = np.stack([released_by(run, 3) for run in (one, other)])
    assert_gaussian((both[0] - both[1])[0], math.sqrt(2) / strategy.coefficients[0])


@pytest.mark.parametrize("steps_per_tree", [1, 5, 8, 100])
@pytest.mark.parametrize("mode", ["eager", "graph of fixed size", "xla"])
@pytest.mark.slow_after(6)
def test_the_noise_of_trees_is_that_of_dense_matrices(steps_per_tree, mode):
    strategy, steps, size = TreeNoise(steps_per_tree), 19, 32
    mechanism = mechanism_of(strategy, seed=7)
    w = released_by(mechanism, steps, mode, size)
    drawn = [
        normal_numbers(size, tf.constant(7, tf.int64), tf.constant(32 * t + level + 1, tf.int64))
        for _, t, level in tree_nodes(strategy, steps)
    ]
    np.testing.assert_allclose(w, noise_matrix(strategy, steps) @ np.stack(drawn), atol=1e-5)


def test_no_two_nodes_have_the_same_draw():
    numbers = [32 * t + level + 1 for _, t, level in tree_nodes(TreeNoise(64), 200)]
    assert len(set(numbers)) == len(numbers) and TreeNoise(2**30 - 1).levels < 32


def test_neighbours_of_trees_move_the_nodes_by_at_most_the_sensitivity():
    # C g of neighbours, given the same noise. The example takes part every three steps.
    strategy, clip, steps = TreeNoise(8), 0.7, 12
    runs = []
    for scale in (0.0, 50.0):
        mechanism = mechanism_of(strategy, seed=3, l2_norm_clip=clip, expected_batch_size=1.0)
        others = np.random.default_rng(0).normal(size=[steps, 5, 6]).astype("float32")
        released = []
        for t in range(steps):
            rows = np.concatenate([others[t], scale * (t % 3 == 1) * np.ones([1, 6], "float32")])
            released.append(zoo.release(mechanism, rows)[0])
        runs.append(np.stack(released))
    matrix = strategy_matrix(strategy, steps).astype(float)
    moved = np.linalg.norm(matrix @ (runs[1] - runs[0]))
    exact = clip * np.linalg.norm(matrix[:, 1::3].sum(axis=1))
    assert moved == pytest.approx(exact, rel=1e-4)
    assert 0.85 * clip * sensitivity(strategy, steps, 3) < moved
    assert moved <= clip * sensitivity(strategy, steps, 3) * (1 + 1e-6)


def test_a_tree_that_was_begun_by_another_process_is_finished_with_its_noise():
    # In the middle of a tree, at its end, and in the middle of a later one, with a key for each.
    strategy, size = TreeNoise(8), 40
    keys = [NoiseKey(0, 17), NoiseKey(3, 18), NoiseKey(8, 19), NoiseKey(13, 20)]
    parts = []
    for number, (key, end) in enumerate(zip(keys, (3, 8, 13, 20))):
        run = resumed(strategy, keys[: number + 1], key.first, size)
        parts.append(released_by(run, end - key.first, size=size))
    drawn = []
    for _, t, level in tree_nodes(strategy, 20):
        key = [k.key for k in keys if k.first <= t][-1]
        drawn.append(normal_numbers(size, tf.constant(key, tf.int64), 32 * t + level + 1))
    wanted = noise_matrix(strategy, 20) @ np.stack(drawn)
    np.testing.assert_allclose(np.concatenate(parts), wanted, atol=1e-5)


@pytest.mark.parametrize(
    "keys", [[], [NoiseKey(1, 5)], [NoiseKey(0, 5), NoiseKey(9, 6)], [NoiseKey(0, 1)] * 0]
)
def test_keys_that_do_not_cover_the_run_are_refused(keys):
    with pytest.raises(ValueError, match="must cover all releases"):
        mechanism_of(BandedNoise(2)).generator.resume(keys, 4)


def test_a_ledger_without_the_noise_of_its_releases_stops_the_run():
    run = mechanism_of(BandedNoise(3))
    released_by(run, 3)
    step = zoo.in_mode(
        "graph of fixed size",
        lambda r: run.release(zoo.Rows(r), 1)[0],
        rows := [np.zeros([1, SIZE], "float32")],
    )
    step(*rows)
    for releases in (0, 3, 5):  # as from a checkpoint, or a log
        run.ledger.restore([(1.0, 1.0, releases)])
        with pytest.raises(tf.errors.InvalidArgumentError, match="cancels noise"):
            step(*rows)
        assert run.ledger.num_releases == releases  # nothing was released
        with pytest.raises(dp.NotPrivateError, match="with the noise of 4 known"):
            run.generator.require_fit(releases)
    run.ledger.restore([(1.0, 1.0, 4)])
    step(*rows)
    run.generator.require_fit(5)


def test_a_long_run_with_trees_does_not_come_back_to_its_first_draws():
    # Threefry numbers the draws of a key with 32 bits, and a step of a tree has 32 of them.
    first, many = mechanism_of(TreeNoise(4)), 2**27
    later = mechanism_of(TreeNoise(4))
    first.generator.resume([NoiseKey(0, 17)], 0)
    later.generator.resume([NoiseKey(0, 17)], many)
    later.ledger.restore([(1.0, 1.0, many)])
    assert_independent(released_by(first, 4), released_by(later, 4))


def test_under_xla_such_a_release_counts_as_one_without_noise():
    run = mechanism_of(BandedNoise(3))
    released_by(run, 2, "xla")
    run.ledger.restore([(1.0, 1.0, 1)])
    z = released_by(run, 1, "xla")
    assert run.ledger.segments == [(1.0, 1.0, 1), (0.0, 1.0, 1)]
    assert z.std() > 0.5  # the noise itself never repeats
    sampling = dp.sampling.CyclicPoissonSampling(0.1, 3, 50, 40)
    assert math.isinf(sampling.account(run.ledger, 30, 1e-3, "rdp"))


# A batch that another draw would not equal, but that shows no step.
WITHOUT_PADDING = np.linspace(0.5, 1.0, 64, dtype="float32")


def weights_of(step, period, rows=64, drawn=20, groups=0):
    """The weights of a batch that shows a step and the code of its groups."""
    random = np.random.default_rng([step, drawn])
    padding = np.ones(rows, bool)
    padding[random.choice(rows, drawn, replace=False)] = False
    marks = batch_order.marked(padding, random.random(rows) < 0.5, step, period, groups)
    return np.where(padding, np.where(marks, -0.0, 0.0), 1.0).astype("float32")


def trained(optimizer, jit_compile=False):
    """A step of `optimizer` on batches of given weights."""
    variable = tf.Variable(tf.zeros([8]))

    @tf.function(
        autograph=False,
        jit_compile=jit_compile,
        input_signature=[tf.TensorSpec([64]), tf.TensorSpec([64, 8])],
    )
    def step(weights, x):
        with tf.GradientTape() as tape:
            loss = weights * tf.linalg.matvec(x, variable)
        optimizer.minimize(loss, [variable], tape)
        return tf.convert_to_tensor(variable)

    return lambda weights: step(weights, np.ones([64, 8], "float32"))


def test_a_batch_that_was_drawn_for_another_step_is_refused():
    optimizer = dp.DPSGD(1.0, 1.0, expected_batch_size=20, noise=BandedNoise(4))
    step = trained(optimizer)
    for t in range(3):
        step(weights_of(t, 4))
    for wrong in (weights_of(2, 4), weights_of(4, 4), weights_of(3, 5), weights_of(7, 4)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="drawn for another step"):
            step(wrong)
    assert optimizer.ledger.num_releases == 3
    step(weights_of(3, 4))
    assert [c.checked for c in optimizer.ledger.checks] == [4]


OTHER_GROUPS = batch_order.code_of_groups(bytes(32))


@pytest.mark.parametrize("first", [weights_of(0, 4, groups=OTHER_GROUPS), WITHOUT_PADDING])
def test_a_batch_from_other_groups_is_refused(first):
    """It passed as one for its step, though its examples may have been in the step before."""
    optimizer = dp.DPSGD(1.0, 1.0, expected_batch_size=20, noise=BandedNoise(4))
    step = trained(optimizer)
    step(first)
    step(weights_of(1, 4, groups=OTHER_GROUPS))
    with pytest.raises(tf.errors.InvalidArgumentError, match="from other groups of examples"):
        step(weights_of(2, 4))
    step(weights_of(2, 4, groups=OTHER_GROUPS))
    assert optimizer.ledger.num_releases == 3


def test_the_first_release_and_its_parts_decide_on_the_groups():
    kwargs = {"expected_batch_size": 40, "gradient_accumulation_steps": 2}
    optimizer = dp.DPSGD(1.0, 1.0, noise=BandedNoise(4), **kwargs)
    step = trained(optimizer)
    step(weights_of(0, 4))  # and then a data set that begins again, from other groups
    optimizer.drop_unfinished_parts()
    for t in (0, 1):
        step(weights_of(t, 4, drawn=20, groups=OTHER_GROUPS))
        # Neither may the second part of a batch, even of the first one, come from others.
        with pytest.raises(tf.errors.InvalidArgumentError, match="from other groups of examples"):
            step(weights_of(t, 4, drawn=21))
        step(weights_of(t, 4, drawn=21, groups=OTHER_GROUPS))
    with pytest.raises(tf.errors.InvalidArgumentError, match="from other groups of examples"):
        step(weights_of(2, 4))
    optimizer.drop_unfinished_parts()
    with pytest.raises(tf.errors.InvalidArgumentError, match="from other groups of examples"):
        step(weights_of(2, 4))
    assert optimizer.ledger.segments == [(1.0, 40.0, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [weights_of(5, 4), weights_of(1, 4, groups=OTHER_GROUPS)])
def test_under_xla_such_a_batch_makes_epsilon_infinite(wrong):
    optimizer = dp.DPSGD(1.0, 1.0, expected_batch_size=20, noise=BandedNoise(4))
    step = trained(optimizer, jit_compile=True)
    step(weights_of(0, 4))
    step(wrong)
    assert [s.noise_multiplier for s in optimizer.ledger.segments] == [1.0, 0.0]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("mode", ["graph of fixed size", "eager", "xla"])
@each
def test_a_batch_in_parts_has_the_noise_of_one_release(strategy, mode):
    steps, size = 11, 32
    gradients = np.random.default_rng(0).normal(size=[steps, 6, size]).astype("float32")
    kwargs = {"seed": 5, "noise_multiplier": 0.7, "expected_batch_size": 6.0}
    whole, in_parts = (
        mechanism_of(strategy, gradient_accumulation_steps=k, **kwargs) for k in (1, 3)
    )
    rows = [gradients[0, :2]]
    step = zoo.in_mode(mode, lambda r: in_parts.release(zoo.Rows(r), 2)[0], rows)
    for t, batch in enumerate(gradients):
        parts = [step(batch[i : i + 2]).numpy() for i in (0, 2, 4)]
        assert not parts[0].any() and not parts[1].any()
        np.testing.assert_allclose(parts[2], zoo.release(whole, batch)[0], atol=1e-5)
        assert in_parts.ledger.num_releases == int(in_parts.generator.number()) == t + 1
    assert in_parts.ledger.segments == whole.ledger.segments == [(0.7, 6.0, steps)]


def test_a_part_that_was_drawn_for_another_step_is_refused():
    kwargs = {"expected_batch_size": 40, "gradient_accumulation_steps": 2}
    optimizer = dp.DPSGD(1.0, 1.0, noise=BandedNoise(4), **kwargs)
    step = trained(optimizer)
    for t in (0, 1):
        step(weights_of(t, 4))
        step(weights_of(t, 4, drawn=21))
    assert optimizer.ledger.num_releases == 2
    for _ in range(2):  # as the first part and as the second
        with pytest.raises(tf.errors.InvalidArgumentError, match="drawn for another step"):
            step(weights_of(3, 4))
        step(weights_of(2, 4, drawn=21 + optimizer.unfinished_parts))
    assert optimizer.ledger.segments == [(1.0, 40.0, 3)]
    assert [c.checked for c in optimizer.ledger.checks] == [3]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("wrong", [0, 1])
def test_under_xla_such_a_part_makes_epsilon_infinite(wrong):
    kwargs = {"expected_batch_size": 40, "gradient_accumulation_steps": 2}
    optimizer = dp.DPSGD(1.0, 1.0, noise=BandedNoise(4), **kwargs)
    step = trained(optimizer, jit_compile=True)
    for part in (0, 1):
        step(weights_of(5 if part == wrong else 0, 4, drawn=20 + part))
    assert [s.noise_multiplier for s in optimizer.ledger.segments] == [0.0]
    for part in (0, 1):
        step(weights_of(1, 4, drawn=20 + part))
    assert [s.noise_multiplier for s in optimizer.ledger.segments] == [0.0, 1.0]


def test_a_batch_with_a_part_that_shows_no_step_counts_as_unchecked():
    kwargs = {"expected_batch_size": 40, "gradient_accumulation_steps": 2}
    optimizer = dp.DPSGD(1.0, 1.0, noise=BandedNoise(4), **kwargs)
    step = trained(optimizer)
    for weights in (weights_of(0, 4), WITHOUT_PADDING):
        step(weights)
    for part in (0, 1):
        step(weights_of(1, 4, drawn=20 + part))
    assert [(c.checked, c.repeated) for c in optimizer.ledger.checks] == [(1, 0)]


def test_batches_that_show_no_step_count_as_unchecked():
    optimizer = dp.DPSGD(1.0, 1.0, expected_batch_size=20, noise=BandedNoise(4))
    step = trained(optimizer)
    step(WITHOUT_PADDING)
    step(weights_of(1, 4))
    assert [c.checked for c in optimizer.ledger.checks] == [1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_microbatches": 2}, "`num_microbatches` out"),
        ({"examples_per_user": 2}, "`examples_per_user` out"),
        ({"clipping": "adaptive"}, "`clipping` out"),
        ({"secure_noise": True}, "Secure noise must be independent"),
        ({"noise": "banded"}, "`noise` must be"),
    ],
)
def test_what_is_not_proven_is_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        dp.DPSGD(1.0, 1.0, **{"noise": BandedNoise(2), **arguments})


def without_a_clip(_, noise_multiplier, **kwargs):
    return dp.UntunedSGD(noise_multiplier=noise_multiplier, **kwargs)


@pytest.mark.parametrize("make", [dp.DPAdamWOSM, without_a_clip])
def test_update_rules_for_independent_noise_refuse_other_noise(make):
    instead = "Leave `noise` out.*`PrivacyPlan.*use ADADP.*or DPSGD or DPAdam"
    with pytest.raises(ValueError, match=f"`noise` must be IndependentNoise.*{instead}"):
        make(1.0, 1.0, noise=BandedNoise(2))
    assert make(1.0, 1.0, noise=IndependentNoise()).noise == IndependentNoise()


def test_side_information_that_learns_from_noisy_gradients_refuses_correlated_noise():
    delayed = dp.side_information.DelayedPreconditioner
    for noise in (BandedNoise(2), TreeNoise(8)):
        with pytest.raises(ValueError, match="must be IndependentNoise.*DelayedPreconditioner"):
            dp.DPSGD(1.0, 1.0, noise=noise, side_information=delayed())
    fixed = dp.side_information.FixedPreconditioner({}, provenance="public")
    assert dp.DPSGD(1.0, 1.0, noise=BandedNoise(2), side_information=fixed).noise.bands == 2
    assert dp.DPSGD(1.0, 1.0, side_information=delayed()).noise == IndependentNoise()


def test_independent_noise_is_the_default_and_what_it_was():
    assert isinstance(zoo.make_mechanism().generator, GaussianNoise)
    assert isinstance(zoo.make_mechanism(noise=IndependentNoise()).generator, GaussianNoise)
    assert dp.DPSGD(1.0, 1.0).noise == IndependentNoise()
    assert dp.DPSGD(1.0, 1.0).get_config()["noise"] is None


@pytest.mark.slow_after(1)
@each
def test_a_configuration_keeps_the_strategy_and_the_ledger_but_not_the_key(strategy):
    optimizer = dp.DPAdam(1.0, 1.0, expected_batch_size=20, noise=strategy)
    trained(optimizer)(np.ones(64, "float32"))
    again = dp.DPAdam.from_config(optimizer.get_config())
    assert again.noise == strategy and again.ledger.segments == optimizer.ledger.segments
    with pytest.raises(dp.NotPrivateError, match="with the noise of 0 known"):
        trained(again)(np.ones(64, "float32"))
    optimizer.ledger.restore([])
    with pytest.raises(dp.NotPrivateError, match="0 releases in the ledger"):
        trained(optimizer)(np.ones(64, "float32"))


def test_copies_do_not_go_on_with_the_noise_of_the_original():
    run = mechanism_of(BandedNoise(3))
    released_by(run, 2)
    copied = copy.deepcopy(run)
    with pytest.raises(dp.NotPrivateError):
        copied.generator.require_fit(copied.ledger.num_releases)
    fresh = mechanism_of(BandedNoise(3))
    assert_independent(released_by(copy.deepcopy(fresh), 1), released_by(fresh, 1))


def test_nothing_that_is_saved_or_shown_has_the_key_or_the_noise():
    run = mechanism_of(BandedNoise(3))
    released_by(run, 2, size=64)
    noise = run.generator
    key = int(noise._secret.next.numpy()[0])
    past = next(iter(noise._secret.past.values())).numpy()
    shown = repr(noise) + repr(vars(noise)) + repr(noise._secret)
    assert str(key) not in shown and str(past[0, 0]) not in shown
    secret = pickle.dumps(noise._secret)
    assert key.to_bytes(8, "little", signed=True) not in secret and past[0].tobytes() not in secret
    assert noise.saved.numpy().tolist() == [2, BandedNoise(3).digest()]


def test_variables_that_change_within_a_run_are_refused():
    run = mechanism_of(BandedNoise(3))
    released_by(run, 2, size=64)
    with pytest.raises(ValueError, match="variables that are trained changed"):
        released_by(run, 1, size=80)


def step_of(mechanism, size, mode):
    """A traced step whose gradients are zeros of this size, which returns what it releases."""
    rows = [np.zeros([1, size], "float32")]
    step = zoo.in_mode(mode, lambda r: mechanism.release(zoo.Rows(r), 1)[0], rows)
    step.get_concrete_function()
    return lambda: step(*rows).numpy()


def test_steps_for_other_variables_are_refused_even_if_they_were_traced_before_the_first_one():
    # Each would cancel its own noise only, as if the releases of the other had not come between.
    for first, second in ((64, 160), (160, 64)):
        run = mechanism_of(BandedNoise(3))
        steps = {size: step_of(run, size, "graph of fixed size") for size in (64, 160)}
        steps[first]()
        with pytest.raises(tf.errors.InvalidArgumentError, match="variables that are trained chan"):
            steps[second]()
        steps[first]()
        assert run.ledger.segments == [(1.0, 1.0, 2)]
        run = mechanism_of(BandedNoise(3))
        steps = {size: step_of(run, size, "xla") for size in (64, 160)}
        for size in (first, second, first):
            steps[size]()
        assert run.ledger.segments[0] == (1.0, 1.0, 1)  # by XLA, the others may be without noise
        assert run.ledger.segments[1][0] == 0.0


def test_a_step_that_trains_two_sets_of_variables_in_turn_is_refused():
    optimizer = dp.DPSGD(1.0, 1.0, expected_batch_size=4, noise=FOUR_BANDS, learning_rate=0.1)
    sets = [tf.Variable(tf.zeros([8])), tf.Variable(tf.zeros([24]))]
    optimizer.build(sets)

    @tf.function(autograph=False)
    def step(x):
        for variable in sets:
            with tf.GradientTape() as tape:
                loss = x * tf.reduce_sum(variable)
            optimizer.minimize(loss, [variable], tape)

    with pytest.raises(tf.errors.InvalidArgumentError, match="an optimizer of its own"):
        step(tf.ones([4]))
    assert optimizer.ledger.num_releases == 1


def test_another_process_may_go_on_with_the_noise_of_fewer_variables():
    # What stands at a place cancels the noise that was released there.
    key, new = new_noise_key(0), new_noise_key(2)
    before = released_by(resumed(BandedNoise(3), [key], 0), 2, size=160)
    run = resumed(BandedNoise(3), [key, new], 2)
    steps = {size: step_of(run, size, "graph of fixed size") for size in (160, 64)}
    after = np.stack([steps[64]() for _ in range(2)])
    whole = released_by(resumed(BandedNoise(3), [key, new], 2), 2, size=160)
    np.testing.assert_allclose(after, whole[:, :64], atol=1e-5)
    assert np.abs(before).max() > 0
    with pytest.raises(tf.errors.InvalidArgumentError, match="variables that are trained changed"):
        steps[160]()


def test_a_state_of_another_strategy_is_not_taken_for_one_s_own(tmp_path):
    def checkpoint_of(strategy):
        variables = {}

        def add_variable(shape, dtype=None, name=None):
            variables[name] = zoo.add_variable(shape, dtype, name)
            return variables[name]

        run = mechanism_of(strategy, add_variable=add_variable)
        return run, tf.train.Checkpoint(**variables)

    run, checkpoint = checkpoint_of(BandedNoise(3))
    released_by(run, 2)
    path = checkpoint.save(tmp_path / "state")
    other, checkpoint = checkpoint_of(BandedNoise(4))
    checkpoint.restore(path)
    with pytest.raises(ValueError, match="another `noise`"):
        _ = other.ledger.noise
    with pytest.raises(dp.NotPrivateError):
        other.generator.require_fit(2)
    _, checkpoint = checkpoint_of(None)
    with pytest.raises(ValueError, match="shape"):
        checkpoint.restore(path)


def test_the_noise_of_one_object_is_that_of_its_seed():
    one, other = (CorrelatedNoise(zoo.add_variable, BandedNoise(3), seed=5) for _ in range(2))
    for _ in range(3):
        first, second = (n.draw([tf.zeros([30])])[0] for n in (one, other))
        np.testing.assert_array_equal(first, second)
    plain = GaussianNoise(zoo.add_variable, seed=5).add_to([tf.zeros([30])], 1.0, 1.0)[0]
    (first,) = CorrelatedNoise(zoo.add_variable, BandedNoise(3), seed=5).draw([tf.zeros([30])])
    np.testing.assert_allclose(first * BandedNoise(3).coefficients[0], plain, rtol=1e-5)


def test_the_noise_of_a_step_is_shown_with_its_true_size():
    variable = tf.Variable(tf.zeros([100]))
    one, other = (dp.DPSGD(1.0, 2.0, expected_batch_size=10, noise=n) for n in (None, FOUR_BANDS))
    other.ledger.restore([(2.0, 10.0, 50)])
    expected = 2.0 * np.linalg.norm(FOUR_BANDS.noise_coefficients(51))
    assert one.noise_to_signal([variable]) == 2.0
    assert other.noise_to_signal([variable]) == pytest.approx(expected)


def test_threads_that_share_an_optimizer_share_its_past():
    run = mechanism_of(FOUR_BANDS)
    found = {}

    def train(name):
        rows = [np.zeros([1, SIZE], "float32")]
        step = zoo.in_mode("graph of fixed size", lambda r: run.release(zoo.Rows(r), 1), rows)
        found[name] = [step(*rows)[0].numpy() for _ in range(6)]

    threads = [threading.Thread(target=train, args=[name]) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert run.ledger.num_releases == 18 and len(run.generator._secret.past) == 1
    # In some order they are the noise of one run: the last three are those that are kept.
    (past,) = run.generator._secret.past.values()
    released = np.concatenate(list(found.values()))
    for kept in past.numpy()[:, :SIZE]:
        assert np.isclose(released, kept, atol=1e-5).all(axis=1).sum() == 1
    first = min(range(18), key=lambda i: released[i].std())
    assert_gaussian(released[first], FOUR_BANDS.noise_coefficients(1)[0])
