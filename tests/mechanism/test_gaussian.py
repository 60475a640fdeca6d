"""The mechanism bounds the influence of an example, divides by a public number and counts."""

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

import tf_adaptive_dp as dp
from tests.helpers import zoo
from tf_adaptive_dp.gradients.api import per_example_gradients

pytestmark = pytest.mark.filterwarnings("ignore:Under eager execution")
both_modes = pytest.mark.parametrize("mode", ["eager", "graph"])
every_clipping = pytest.mark.parametrize("clipping", ["flat", "automatic"])
SHAPES = [(3, 2), (4,)]
DIVISOR = 16.0
# What float32 may add to a norm.
ROUNDING = 1 + 1e-5


def random_rows(seed, batch_size=6):
    """Gradients of two variables whose norms differ by many orders of magnitude, some zero."""
    generator = np.random.default_rng(seed)
    sizes = 10 ** generator.uniform(-4, 6, batch_size) * (generator.random(batch_size) > 0.2)
    return [
        generator.normal(size=[batch_size, *s]) * sizes.reshape([-1, *[1] * len(s)]) for s in SHAPES
    ]


def random_precondition(seed):
    generator = np.random.default_rng(seed)
    scale = [10 ** generator.uniform(-2, 2, s).astype("float32") for s in SHAPES]
    shift = [generator.normal(size=s).astype("float32") for s in SHAPES]
    return scale, shift


def norm(gradients):
    return np.sqrt(sum((g.astype("float64") ** 2).sum() for g in gradients))


def noiseless_sum(rows, clip=1.0, clipping="flat", **kwargs):
    """Σ of the clipped rows, from the mean that a mechanism without noise releases."""
    mechanism = zoo.make_mechanism(
        l2_norm_clip=clip, expected_batch_size=DIVISOR, clipping=clipping
    )
    return [DIVISOR * g for g in zoo.release(mechanism, *rows, **kwargs)]


def difference(a, b):
    return norm([x - y for x, y in zip(a, b)])


def without(rows, i):
    return [np.delete(r, i, axis=0) for r in rows]


def padded(rows, i):
    """The rows with example i replaced by padding, whose gradient is zero."""
    rows = [r.copy() for r in rows]
    for r in rows:
        r[i] = 0.0
    return rows


@pytest.mark.slow_after(1)
@every_clipping
@pytest.mark.parametrize("precondition", ["none", "scale", "scale and shift"])
@hypothesis.settings(max_examples=15)
@hypothesis.given(seed=st.integers(0, 2**32), clip=st.sampled_from([0.01, 1.0, 50.0]))
def test_an_example_changes_the_sum_by_the_clip_at_most(precondition, clipping, seed, clip):
    rows = random_rows(seed)
    scale, shift = random_precondition(seed)
    kwargs = {"scale": scale if "scale" in precondition else None}
    kwargs["shift"] = shift if "shift" in precondition else None
    kwargs.update(clip=clip, clipping=clipping)
    whole = noiseless_sum(rows, **kwargs)
    removed = noiseless_sum(without(rows, 0), **kwargs)
    assert difference(whole, removed) <= clip * ROUNDING
    # Padding is absence.
    np.testing.assert_allclose(
        difference(noiseless_sum(padded(rows, 0), **kwargs), removed), 0, atol=1e-5 * clip
    )
    replaced = noiseless_sum([np.concatenate([-3 * r[:1], r[1:]]) for r in rows], **kwargs)
    assert difference(whole, replaced) <= 2 * clip * ROUNDING


class Scales(tf.keras.layers.Layer):
    """Multiplies vectors and sequences by the same weights, as a LayerNormalization of Keras 3."""

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=[shape[-1]], initializer="ones")

    def call(self, x):
        return x * tf.reshape(self.scale, [1] * (x.shape.rank - 1) + [-1])

    def compute_output_shape(self, shape):
        return shape


@pytest.mark.slow_on(2)
def test_an_example_that_cancels_between_two_uses_of_a_layer_takes_nothing_from_the_others():
    """A layer for vectors and for sequences reads its weights in two shapes, so in two sums."""
    vectors, sequences = tf.keras.Input([6]), tf.keras.Input([1, 6])
    shared = Scales()
    pair = [shared(vectors), tf.keras.layers.Flatten()(shared(sequences))]
    outputs = tf.keras.layers.Dense(1, trainable=False)(tf.keras.layers.Subtract()(pair))
    model = tf.keras.Model([vectors, sequences], outputs)
    a, b, y = zoo.floats(64, 6), zoo.floats(64, 1, 6, seed=1), zoo.floats(64, 1, seed=2)
    b[3, 0], y[3] = a[3], 1e14  # the same input twice, and a huge error

    def moved(model, weights):
        optimizer = dp.DPSGD(1.0, 0.0, expected_batch_size=1)

        def step(a, b, y, weights):
            with tf.GradientTape() as tape:
                errors = tf.reduce_mean((model([a, b], training=True) - y) ** 2, axis=1)
                loss = errors * weights
            found = optimizer.compute_gradients(loss, model.trainable_variables, tape)
            return [tf.convert_to_tensor(g) for g, _ in found]

        return [g.numpy() for g in zoo.in_mode("graph", step, (a, b, y, weights))(a, b, y, weights)]

    without = np.ones(64, "float32")
    without[3] = 0.0
    assert difference(moved(model, np.ones(64, "float32")), moved(model, without)) <= ROUNDING


@every_clipping
@pytest.mark.parametrize("clip", [0.01, 1.0, 50.0])
def test_the_bounds_are_reached(clip, clipping):
    # Otherwise the noise would be larger than it needs to be.
    rows = [np.full([2, *s], 1e4) * [[[1]], [[-1]]] for s in SHAPES[:1]]
    kwargs = {"clip": clip, "clipping": clipping}
    one = noiseless_sum([rows[0][:1]], **kwargs)
    other = noiseless_sum([rows[0][1:]], **kwargs)
    assert norm(one) == pytest.approx(clip, rel=1e-5)
    assert difference(one, other) == pytest.approx(2 * clip, rel=1e-5)


@pytest.mark.in_turns
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_the_release_is_the_mean_of_clipped_preconditioned_gradients(mode):
    rows = random_rows(5)
    scale, shift = random_precondition(6)
    mechanism = zoo.make_mechanism(l2_norm_clip=0.7)
    released = zoo.release(mechanism, *rows, mode=mode, scale=scale, shift=shift)
    present = norm_of_rows(rows) > 0
    assert 0 < present.sum() < 6
    moved = [(r + b) * a for r, a, b in zip(rows, scale, shift)]
    weights = present * np.minimum(1, 0.7 / norm_of_rows(moved))
    for actual, m in zip(released, moved):
        np.testing.assert_allclose(actual, np.tensordot(weights, m, 1) / 6, rtol=1e-4, atol=1e-6)


def norm_of_rows(rows):
    return np.sqrt(sum((r.reshape(len(r), -1) ** 2).sum(axis=1) for r in rows))


@pytest.mark.in_turns
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e25])
def test_a_gradient_that_is_not_finite_contributes_exactly_zero(bad):
    scale, shift = random_precondition(0)
    rows = random_rows(1)
    spoilt = [r.copy() for r in rows]
    spoilt[1][2, 0] = bad
    for kwargs in ({}, {"scale": scale}, {"scale": scale, "shift": shift}):
        actual, absent = noiseless_sum(spoilt, **kwargs), noiseless_sum(padded(rows, 2), **kwargs)
        for a, b in zip(actual, absent):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("num_bad", "counted"), [(1, 1.0), (2, 0.0)])
def test_two_that_are_not_finite_void_epsilon_where_one_may_spoil_the_other(num_bad, counted):
    rows = random_rows(1)
    for r in rows:
        r[:num_bad] = np.nan
    source = zoo.Rows(*rows)
    source.spoils_others = True  # as that of Jacobians under XLA
    mechanism = zoo.make_mechanism(noise_multiplier=1.0, expected_batch_size=DIVISOR)
    mechanism.release(source, tf.shape(rows[0])[0])
    assert mechanism.ledger.segments == [(counted, DIVISOR, 1)]


@pytest.mark.in_turns
@both_modes
def test_sample_weight_zero_contributes_exactly_zero_despite_a_shift(mode):
    problem = zoo.problem("sample weights")  # examples 1 and 4 have weight zero
    shift = [tf.ones(v.shape) for v in problem.variables]
    mechanism = zoo.make_mechanism(expected_batch_size=DIVISOR)

    def step(*batch):
        source = zoo.source(problem, *batch)
        return mechanism.release(source, tf.shape(batch[0])[0], None, shift)

    run = zoo.in_mode(mode, step, problem.batch)
    whole = run(*problem.batch)
    x, y, weights = problem.batch
    assert mechanism.statistics.summary().num_examples == np.count_nonzero(weights) < len(x)
    other = run(np.where(weights[:, None] == 0, 1e3, x).astype("float32"), y, weights)
    absent = run(*(a[weights > 0] for a in problem.batch))
    for a, b, c in zip(whole, other, absent):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-7)
    assert norm([g.numpy() for g in whole]) > 0


def test_a_batch_of_padding_alone_still_gets_noise_and_a_ledger_entry():
    mechanism = zoo.make_mechanism(noise_multiplier=1.0, expected_batch_size=4)
    released = zoo.release(mechanism, np.zeros([4, 50]), shift=[tf.ones([50])])
    assert 0.1 < released[0].std() < 0.5
    assert mechanism.ledger.segments == [(1.0, 4.0, 1)]


@pytest.mark.in_turns
@both_modes
def test_a_batch_without_examples_still_gets_noise_and_a_ledger_entry(mode):
    problem = zoo.problem("MLP")
    mechanism = zoo.make_mechanism(noise_multiplier=1.0, expected_batch_size=4)

    def step(*batch):
        return mechanism.release(zoo.source(problem, *batch), tf.shape(batch[0])[0])

    released = zoo.in_mode(mode, step, problem.batch)(*(a[:0] for a in problem.batch))
    assert 0.1 < np.std(released[0]) < 0.5
    assert mechanism.ledger.segments == [(1.0, 4.0, 1)]


@both_modes
def test_the_divisor_is_the_expected_batch_size_whatever_the_batch(mode):
    mechanism = zoo.make_mechanism(expected_batch_size=8.0)
    rows = np.ones([6, 1], "float32")

    def step(rows):
        return mechanism.release(zoo.Rows(rows), tf.shape(rows)[0])[0]

    run = zoo.in_mode(mode, step, [rows])
    for batch_size in (6, 2, 1, 4):
        np.testing.assert_allclose(run(rows[:batch_size]), [batch_size / 8])
    with_padding = np.concatenate([rows, np.zeros([10, 1], "float32")])
    np.testing.assert_allclose(run(with_padding), [6 / 8])
    assert mechanism.ledger.segments == [(0.0, 8.0, 5)]


@pytest.mark.in_turns
@both_modes
def test_without_expected_batch_size_the_size_that_batches_share_divides(mode):
    mechanism = zoo.make_mechanism()
    assert mechanism.batch_size() is None
    rows = np.ones([4, 1], "float32")
    for present in (4, 1):
        released = zoo.release(mechanism, rows * (np.arange(4) < present)[:, None], mode=mode)
        np.testing.assert_allclose(released[0], [present / 4])
    assert mechanism.batch_size() == 4.0
    assert mechanism.sizes.expected is None
    assert mechanism.ledger.segments == [(0.0, 4.0, 2)]


@pytest.mark.in_turns
@pytest.mark.parametrize("second", [3, 5])
@both_modes
def test_batches_that_vary_without_expected_batch_size_are_an_error(mode, second):
    mechanism = zoo.make_mechanism(noise_multiplier=1.0)
    rows = np.ones([5, 2], "float32")

    def step(rows):
        return mechanism.release(zoo.Rows(rows), tf.shape(rows)[0])[0]

    run = zoo.in_mode(mode, step, [rows])
    run(rows[:4])
    with pytest.raises(tf.errors.InvalidArgumentError, match="Pass `expected_batch_size`"):
        run(rows[:second])
    assert mechanism.ledger.segments == [(1.0, 4.0, 1)]
    run(rows[:4])
    assert mechanism.ledger.segments == [(1.0, 4.0, 2)]
    mechanism.sizes.expected = 4
    run(rows[:second])
    assert mechanism.ledger.segments == [(1.0, 4.0, 3)]


@pytest.mark.in_turns
@pytest.mark.parametrize("compiled", [False, True])
def test_batches_that_vary_leave_the_weights_of_an_optimizer_alone(compiled):
    w = tf.Variable([1.0])
    optimizer = dp.DPSGD(1.0, 1.0, learning_rate=1.0)

    def step(x):
        with tf.GradientTape() as tape:
            loss = x * w
        optimizer.minimize(loss, [w], tape)

    if compiled:
        step = tf.function(step, input_signature=[tf.TensorSpec([None])])
    step(tf.ones([4]))
    before = w.numpy()
    with pytest.raises(tf.errors.InvalidArgumentError, match="Batches vary in size"):
        step(tf.ones([3]))
    np.testing.assert_array_equal(w, before)
    assert optimizer.ledger.segments == [(1.0, 4.0, 1)]


@pytest.mark.slow_on(3)
def test_under_xla_the_size_of_the_first_batch_stays_the_divisor():
    mechanism = zoo.make_mechanism()
    step = tf.function(
        lambda rows: mechanism.release(zoo.Rows(rows), tf.shape(rows)[0])[0], jit_compile=True
    )
    np.testing.assert_allclose(step(tf.ones([4, 1])), [1.0])
    np.testing.assert_allclose(step(tf.ones([2, 1])), [0.5])
    assert mechanism.ledger.segments == [(0.0, 4.0, 2)]


def linear_step(mechanism):
    """A release of the gradients of lossᵢ = ⟨xᵢ, w⟩, which are the rows of x."""
    w = tf.Variable(tf.zeros([3]))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(x, w)
        source = per_example_gradients(loss, [w], tape, num_microbatches=mechanism.num_microbatches)
        return mechanism.release(source, tf.shape(x)[0])[0]

    return step


@both_modes
def test_microbatches_are_clipped_as_means_and_the_release_is_the_mean_of_them(mode):
    x = np.random.default_rng(0).normal(size=[8, 3]).astype("float32")
    mechanism = zoo.make_mechanism(l2_norm_clip=0.5, num_microbatches=4)
    released = zoo.in_mode(mode, linear_step(mechanism), [x])(x)
    means = x.reshape(4, 2, 3).mean(axis=1)
    clipped = means * np.minimum(1, 0.5 / np.linalg.norm(means, axis=1))[:, None]
    np.testing.assert_allclose(released, clipped.mean(axis=0), rtol=1e-5)


@pytest.mark.parametrize("clip", [0.1, 1.0])
def test_an_example_of_a_microbatch_changes_the_sum_by_twice_the_clip_at_most(clip):
    mechanism = zoo.make_mechanism(l2_norm_clip=clip, num_microbatches=4)
    changes = []
    x = zoo.floats(8, 3)
    step = zoo.in_mode("graph", linear_step(mechanism), [x])
    for seed in range(30):
        x = 10.0 * zoo.floats(8, 3, seed=seed)
        if seed == 0:
            x[1] = -3.0 * x[0]  # turns the mean of its group round
        absent = np.where(np.arange(8)[:, None] == 1, np.float32(0), x)
        changes.append(4 * np.linalg.norm(step(x) - step(absent)))
    assert max(changes) <= 2 * clip * ROUNDING
    assert changes[0] == pytest.approx(2 * clip, rel=1e-5)


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("num_microbatches, sigma", [(None, 1.2), (8, 1.2), (4, 0.6), (1, 0.6)])
@both_modes
def test_microbatches_of_several_examples_halve_the_noise_multiplier_of_the_ledger(
    mode, num_microbatches, sigma
):
    optimizer = dp.DPSGD(1.0, 1.2, num_microbatches)
    w = tf.Variable(tf.zeros([3]))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(x, w)
        return optimizer.compute_gradients(loss, [w], tape)[0][0]

    x = zoo.floats(8, 3)
    zoo.in_mode(mode, step, [x])(x)
    assert optimizer.ledger.segments == [(sigma, 8.0, 1)]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("expected_batch_size", [None, 8])
@both_modes
def test_microbatches_need_batches_of_one_size(mode, expected_batch_size):
    # Otherwise the size of a batch would decide how many examples share a clipped mean.
    mechanism = zoo.make_mechanism(num_microbatches=2, expected_batch_size=expected_batch_size)
    x = zoo.floats(8, 3)
    step = zoo.in_mode(mode, linear_step(mechanism), [x])
    step(x)
    with pytest.raises(tf.errors.InvalidArgumentError, match="without `num_microbatches`"):
        step(x[:4])
    assert mechanism.ledger.segments == [(0.0, 8.0, 1)]


@pytest.mark.parametrize("arguments", [{}, {"num_microbatches": 1, "expected_batch_size": 8}])
@both_modes
def test_a_first_batch_without_examples_is_an_error_where_its_size_is_needed(mode, arguments):
    mechanism = zoo.make_mechanism(noise_multiplier=1.0, **arguments)
    rows = np.zeros([mechanism.num_microbatches or 0, 3], "float32")
    step = zoo.in_mode(mode, lambda r: mechanism.release(zoo.Rows(r), 0)[0], [rows])
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(rows)


@both_modes
def test_values_that_are_set_between_steps_take_effect_in_a_traced_step(mode):
    mechanism = zoo.make_mechanism(expected_batch_size=4.0)
    rows = 10 * np.ones([4, 1000], "float32")

    def step(rows):
        return mechanism.release(zoo.Rows(rows), tf.shape(rows)[0])[0]

    run = zoo.in_mode(mode, step, [rows])
    assert norm([run(rows).numpy()]) == pytest.approx(1.0)
    mechanism.clip_norm.value = 3.0
    assert norm([run(rows).numpy()]) == pytest.approx(3.0)
    # The bound is no parameter of the guarantee: noise goes along with it.
    assert mechanism.ledger.segments == [(0.0, 4.0, 2)]
    mechanism.sizes.expected = 12
    assert norm([run(rows).numpy()]) == pytest.approx(1.0)
    mechanism.noise_multiplier = 2.0
    assert np.std(run(rows)) == pytest.approx(2.0 * 3.0 / 12, rel=0.15)
    mechanism.noise_multiplier = 0.7
    assert np.std(run(rows)) == pytest.approx(0.7 * 3.0 / 12, rel=0.15)
    mechanism.sizes.expected = None  # back to the size of the batches
    assert np.std(run(rows)) == pytest.approx(0.7 * 3.0 / 4, rel=0.15)
    assert mechanism.ledger.segments == [
        (0.0, 4.0, 2),
        (0.0, 12.0, 1),
        (2.0, 12.0, 1),
        (0.7, 12.0, 1),
        (0.7, 4.0, 1),
    ]
    assert (mechanism.clip_norm.value, mechanism.noise_multiplier) == (3.0, 0.7)


def test_an_optimizer_passes_its_settings_on():
    optimizer = dp.DPSGD(0.5, 1.1, expected_batch_size=32)
    optimizer.l2_norm_clip, optimizer.noise_multiplier = 2.0, 3.0
    assert (optimizer._mechanism.clip_norm.value, optimizer._mechanism.noise_multiplier) == (
        2.0,
        3.0,
    )
    optimizer.expected_batch_size = 64
    assert optimizer._mechanism.batch_size() == optimizer.expected_batch_size == 64.0


@pytest.mark.parametrize("num_microbatches, per_group", [(None, 1), (8, 1), (2, 4)])
@pytest.mark.parametrize("expected", [None, 8.0, 20.0])
def test_noise_stddev_is_that_of_the_noise_in_a_release(expected, num_microbatches, per_group):
    mechanism = zoo.make_mechanism(
        noise_multiplier=2.0,
        l2_norm_clip=0.5,
        expected_batch_size=expected,
        num_microbatches=num_microbatches,
    )
    (released,) = mechanism.release(zoo.Rows(np.zeros([8 // per_group, 20_000])), 8)
    assert float(mechanism.noise_stddev()) == pytest.approx(per_group / (expected or 8.0))
    assert np.std(released) == pytest.approx(float(mechanism.noise_stddev()), rel=0.03)


def test_variables_without_gradient_get_none_and_no_noise():
    w, unused = tf.Variable([2.0]), tf.Variable([1.0])
    with tf.GradientTape() as tape:
        loss = tf.constant([1.0, 2.0]) * w
    mechanism = zoo.make_mechanism(noise_multiplier=1.0)
    source = per_example_gradients(loss, [unused, w], tape)
    none, released = mechanism.release(source, 2, *[[tf.ones([1])] * 2] * 2)
    assert none is None and released.shape == [1]


BAD_NUMBERS = {
    "negative": (-1.0, ValueError, "must be finite and .* Received: {name}=-1.0"),
    "NaN": (np.nan, ValueError, "must be finite and .* Received: {name}=nan"),
    "infinite": (np.inf, ValueError, "must be finite and .* Received: {name}=inf"),
    "bool": (True, TypeError, "must be a number. Received: {name}=True"),
    "string": ("1", TypeError, "must be a number. Received: {name}='1'"),
    "array": (np.ones(2), TypeError, "must be a number. Received: {name}=array"),
    "complex": (1j, TypeError, "must be a number. Received: {name}=1j"),
}


@pytest.mark.parametrize("name", ["l2_norm_clip", "noise_multiplier", "expected_batch_size"])
@pytest.mark.parametrize("value, error, message", BAD_NUMBERS.values(), ids=BAD_NUMBERS)
def test_numbers_out_of_range_are_refused_when_passed_and_when_set(name, value, error, message):
    message = f"`{name}` {message.format(name=name)}"
    with pytest.raises(error, match=message):
        zoo.make_mechanism(**{name: value})
    with pytest.raises(error, match=message):
        dp.DPSGD(**{"l2_norm_clip": 1.0, "noise_multiplier": 1.0, name: value})
    optimizer = dp.DPSGD(l2_norm_clip=7.0, noise_multiplier=7.0, expected_batch_size=7.0)
    with pytest.raises(error, match=message):
        setattr(optimizer, name, value)
    assert getattr(optimizer, name) == 7.0


@pytest.mark.parametrize(
    "name, bound",
    [("l2_norm_clip", "at least 1e-12"), ("expected_batch_size", "greater than 0")],
)
def test_zero_is_refused_where_it_makes_no_sense(name, bound):
    message = f"`{name}` must be finite and {bound}. Received: {name}=0"
    with pytest.raises(ValueError, match=message):
        zoo.make_mechanism(**{name: 0})


BAD_ARGUMENTS = {
    "no microbatches": ({"num_microbatches": 0}, ValueError, "must be at least 1. Received: .*=0"),
    "half a microbatch": ({"num_microbatches": 0.5}, TypeError, "whole number. Received: .*=0.5"),
    "microbatches as float": ({"num_microbatches": 2.0}, TypeError, "whole number. .*=2.0"),
    "microbatches as bool": ({"num_microbatches": True}, TypeError, "whole number. .*=True"),
    "negative seed": ({"seed": -1}, ValueError, "`seed` must be at least 0. Received: seed=-1"),
    "seed as string": ({"seed": "1"}, TypeError, "`seed` must be a whole number"),
    "seed as bool": ({"seed": False}, TypeError, "`seed` must be a whole number"),
    "clipping": (
        {"clipping": "ghost"},
        ValueError,
        "`clipping` must be one of 'flat', 'automatic', .*. Received: clipping='ghost'",
    ),
    "no clip": ({"l2_norm_clip": None}, TypeError, "must be a number. Received: l2_norm_clip=None"),
}


@pytest.mark.parametrize("arguments, error, message", BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_other_arguments_out_of_range_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        zoo.make_mechanism(**arguments)


@pytest.mark.parametrize("cast", [int, float, np.float32, np.int64], ids=lambda c: c.__name__)
def test_any_kind_of_number_is_taken(cast):
    mechanism = zoo.make_mechanism(
        l2_norm_clip=cast(2), noise_multiplier=cast(3), expected_batch_size=cast(4)
    )
    settings = (
        mechanism.clip_norm.value,
        mechanism.noise_multiplier,
        mechanism.sizes.expected,
    )
    assert settings == (2.0, 3.0, 4.0)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("parts", [1, 2])
def test_under_xla_a_batch_with_larger_microbatches_halves_the_noise_multiplier(parts):
    mechanism = zoo.make_mechanism(
        noise_multiplier=1.0, num_microbatches=4, gradient_accumulation_steps=parts
    )
    step = tf.function(linear_step(mechanism), jit_compile=True)
    for size in [4] * parts + [8] + [4] * (2 * parts - 1):
        step(tf.ones([size, 3]))
    first, *others = mechanism.ledger.segments
    assert first == (1.0, 4.0 * parts, 1)
    assert others == [(0.5, 8.0 * parts, 2)]


def test_the_next_release_is_that_of_the_microbatches_and_not_of_the_divisor():
    optimizer = dp.DPSGD(1.0, 1.0, num_microbatches=4, expected_batch_size=4)
    w = tf.Variable(tf.zeros([3]))
    assert optimizer.next_release() == (0.5, 4.0)  # until a batch has shown its size
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(tf.ones([8, 3]), w)
        optimizer.minimize(loss, [w], tape)
        assert optimizer.next_release() == (0.5, 4.0) == optimizer.ledger.segments[-1][:2]
