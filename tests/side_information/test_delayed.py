"""DelayedPreconditioner: computed from released gradients only, at the right times, and kept."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tf_adaptive_dp.side_information import DelayedPreconditioner, delayed
from tf_adaptive_dp.statement import side_information_paragraph

RNG = np.random.default_rng(4)
SIZE = 20
X = (RNG.normal(size=[SIZE, 6]) * 10.0 ** np.arange(-3, 3)).astype("float32")
Y = RNG.integers(2, size=SIZE)


@pytest.fixture(autouse=True)
def short_windows(monkeypatch):
    monkeypatch.setattr(delayed, "_FIRST_WINDOW", 3.0)


def steps(optimizer, num):
    """Makes steps; returns what each released and the A that it used, for the kernel."""
    step, _ = stepper(optimizer)
    made = []
    for _ in range(num):
        used = scale_of(optimizer)
        made.append((step().numpy(), used))
    return made


def stepper(optimizer):
    """A function that makes a step and returns what it released for the kernel; and variables."""
    kernel, bias = tf.Variable(tf.zeros([6, 2])), tf.Variable(tf.zeros([2]))
    optimizer.build([kernel, bias])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            logits = tf.constant(X) @ kernel + bias
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.constant(Y), logits)
        pairs = optimizer.compute_gradients(loss, [kernel, bias], tape)
        optimizer.apply_gradients(pairs)
        return pairs[0][0]

    return step, [kernel, bias]


def scale_of(optimizer):
    return optimizer.side_information_state[3][0].numpy()


def sgd(noise_multiplier=0.3, clip=1.0, **kwargs):
    kwargs = {"learning_rate": 0.1, "seed": 3, **kwargs}
    return dp.DPSGD(clip, noise_multiplier, side_information=DelayedPreconditioner(), **kwargs)


def test_the_scales_follow_the_formulas_after_3_6_12_gradients():
    optimizer = sgd()
    made = steps(optimizer, 13)
    used = [scale for _, scale in made]
    changes = [k for k in range(1, 13) if (used[k] != used[k - 1]).any()]
    assert changes == [3, 6, 12]
    for first, last in ((0, 3), (3, 6), (6, 12)):
        mean = np.mean([g / a for g, a in made[first:last]], axis=0)
        noise = np.mean([(0.3 / SIZE / a) ** 2 for _, a in made[first:last]], axis=0)
        noise = noise / (last - first)
        energy = np.mean(mean**2, axis=1, keepdims=True) - noise
        floor = np.maximum(noise, (0.3 / SIZE) ** 2 / last)  # √(2/outputs) = 1
        energy = np.where(energy > 2 * noise, energy, floor)
        expected = np.sqrt(np.mean(energy) / energy)
        np.testing.assert_allclose(used[last], expected, rtol=1e-3)


def test_gradients_are_scaled_before_they_are_clipped():
    optimizer = sgd(noise_multiplier=0.0, learning_rate=1e-9)
    gradient, scale = steps(optimizer, 4)[-1]
    assert np.ptp(scale) > 1
    residuals = np.full([SIZE, 2], 0.5)
    residuals[np.arange(SIZE), Y] -= 1
    rows = scale * X[:, :, None] * residuals[:, None, :]
    squares = np.sum(rows**2, axis=(1, 2)) + np.sum(residuals**2, axis=1)
    clipped = rows / np.maximum(np.sqrt(squares), 1)[:, None, None]
    np.testing.assert_allclose(gradient, clipped.sum(0) / SIZE, rtol=1e-3, atol=1e-6)


@pytest.mark.slow_on(2)
def test_the_units_of_the_inputs_cancel_once_they_are_known():
    def after(units):
        global X
        kept, X = X, X * units
        try:
            # Nothing is clipped, or the directions would depend on the units until they are known.
            optimizer = sgd(noise_multiplier=0.0, clip=1e9, learning_rate=1e-12)
            gradient, scale = steps(optimizer, 13)[-1]
        finally:
            X = kept
        return gradient / np.linalg.norm(gradient), (scale * units[:, None]).ravel()

    plain = after(np.ones(6, np.float32))
    rescaled = after(np.float32([1, 100, 1, 1, 0.01, 1]))
    np.testing.assert_allclose(rescaled[1] / plain[1], (rescaled[1] / plain[1])[0], rtol=1e-3)
    np.testing.assert_allclose(rescaled[0], plain[0], atol=1e-4)


@pytest.mark.slow_on(2)
def test_of_pure_noise_the_scales_stay_within_a_factor_of_ten():
    kernel = tf.Variable(tf.zeros([500, 10]))
    optimizer = sgd(noise_multiplier=1.0)
    optimizer.build([kernel])
    information, state = optimizer.side_information, optimizer.side_information_state

    @tf.function
    def step(noise):
        own = information.scale_and_shift(state, [0])[0]
        yes = tf.constant(True)
        information.observe(state, [0], [noise], own, tf.constant(0.05), yes, yes)

    for _ in range(3 * 2**9):
        step(tf.constant(0.05 * RNG.normal(size=[500, 10]), tf.float32))
    scale = scale_of(optimizer)
    assert scale.max() < 10 and scale.min() > 0.1 and np.ptp(scale) > 0


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("optimizer_class", [dp.DPSGD, dp.ADADP, dp.DPAdam])
def test_it_releases_nothing(optimizer_class):
    # With so little noise some rows always stand out of it.
    plain = optimizer_class(1.0, 0.01)
    learning = optimizer_class(1.0, 0.01, side_information=DelayedPreconditioner())
    for optimizer in (plain, learning):
        model = catalogue.mlp()
        model.compile(optimizer, loss=catalogue.loss())
        catalogue.fit(model, 2)
    assert learning.ledger.segments == plain.ledger.segments
    assert learning.ledger.other_events == () and learning.ledger.num_releases == 8
    assert (learning.side_information_state[3][0].numpy() != 1).any()


@pytest.mark.slow_on(2)
def test_both_minibatches_of_a_step_of_adadp_share_the_scales():
    optimizer = dp.ADADP(1.0, 0.3, side_information=DelayedPreconditioner())
    used = [scale for _, scale in steps(optimizer, 18)]
    changes = [k for k in range(1, 18) if (used[k] != used[k - 1]).any()]
    assert changes == [4, 8, 16]


@pytest.mark.slow_on(2)
def test_the_parts_of_a_batch_count_once():
    optimizer = sgd(gradient_accumulation_steps=2)
    used = [scale for _, scale in steps(optimizer, 7)]
    assert [k for k in range(1, 7) if (used[k] != used[k - 1]).any()] == [6]
    assert float(optimizer.side_information_state[0][0]) == 3


def test_the_scales_do_not_change_between_the_parts_of_a_batch():
    # After three gradients they are due, but a step of ADADP has two; they must wait for the end of
    # the fourth batch, not for its first part.
    optimizer = dp.ADADP(
        1.0, 0.3, side_information=DelayedPreconditioner(), gradient_accumulation_steps=2
    )
    used = [scale for _, scale in steps(optimizer, 17)]
    changes = [k for k in range(1, 17) if (used[k] != used[k - 1]).any()]
    assert changes == [8, 16]


def test_it_learns_from_gradients_beside_those_of_regularizers():
    optimizer, kernel = sgd(), tf.Variable(tf.ones([6, 1]))

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            squares = (tf.squeeze(x @ kernel, 1) - y) ** 2
            loss = tf.reduce_mean(squares) + 0.1 * tf.reduce_sum(kernel**2)
        optimizer.minimize(loss, [kernel], tape)

    step(X, Y.astype("float32"))
    assert float(optimizer.side_information_state[0][0]) == 1


def test_what_is_no_gradient_changes_nothing():
    """`UntunedSGD` releases histograms, too, after which it passes what the sums are not."""
    optimizer = sgd()
    stepper(optimizer)
    state = optimizer.side_information_state
    before = [v.numpy() for kind in state for v in kind]
    due, ratios = optimizer.side_information.observe(
        *(state, [0, 1], [tf.ones([6, 2]), tf.ones([2])], [tf.ones([6, 1]), 1.0]),
        noise_stddev=tf.constant(1.0),
        counts=tf.constant(False),
        may_change=tf.constant(True),
    )
    assert not due and np.all([r.numpy() == 1 for r in ratios])
    for value, kept in zip((v for kind in state for v in kind), before):
        np.testing.assert_array_equal(value.numpy(), kept)


@pytest.mark.slow_on(2)
def test_untuned_sgd_measures_under_new_scales_and_multiplies_its_steps_by_them():
    optimizer = dp.UntunedSGD(
        noise_multiplier=0.01, side_information=DelayedPreconditioner(), seed=2
    )
    step, (kernel, bias) = stepper(optimizer)
    moved = []
    for k in range(60):
        before, own = kernel.numpy(), scale_of(optimizer)
        gradient = step().numpy()
        moved.append(not np.array_equal(kernel.numpy(), before))
        if moved[-1]:
            scale, bias_scale = map(float, optimizer.scale_of([kernel, bias]))
            expected = before - float(optimizer.learning_rate) * scale * own * gradient
            np.testing.assert_allclose(kernel.numpy(), expected, rtol=1e-3, atol=1e-7)
        if k == 10:
            first_bias_scale = bias_scale
    # W = 5; A may change after 40 steps. The step at which it does moves nothing either.
    assert moved == [False] * 5 + [True] * 40 + [False] * 6 + [True] * 9
    assert optimizer.ledger.num_releases == 60
    assert (scale_of(optimizer) != 1).any() and bias_scale == pytest.approx(first_bias_scale)
    assert float(optimizer.side_information_state[0][0]) == 50


@pytest.mark.slow_on(2)
def test_it_goes_on_from_where_it_was(tmp_path):
    def model_of(optimizer):
        tf.keras.utils.set_random_seed(1)
        model = catalogue.mlp()
        model.compile(optimizer, loss=catalogue.loss())
        return model

    whole = model_of(sgd(noise_multiplier=0.0))
    catalogue.fit(whole, 4)
    half = model_of(sgd(noise_multiplier=0.0))
    catalogue.fit(half, 2)
    half.save(tmp_path / "half.keras")
    resumed = tf.keras.models.load_model(tmp_path / "half.keras")
    catalogue.fit(resumed, 2)
    np.testing.assert_allclose(scale_of(resumed.optimizer), scale_of(whole.optimizer), rtol=1e-3)
    for a, b in zip(resumed.get_weights(), whole.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_replicas_learn_the_same_from_the_sum_of_their_gradients():
    def trained(strategy):
        tf.keras.utils.set_random_seed(1)
        with strategy.scope():
            model = catalogue.mlp()
            model.compile(sgd(noise_multiplier=0.0), loss=catalogue.loss())
        catalogue.fit(model, 2)
        return model

    one, two = trained(tf.distribute.get_strategy()), trained(catalogue.mirrored())
    for a, b in zip(two.get_weights(), one.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_where_it_cannot_work_it_says_so():
    half = tf.Variable(tf.zeros([3, 2], tf.float16))
    with pytest.raises(ValueError, match="must be float32 or float64. Received: .*float16"):
        sgd().build([half])
    with pytest.raises(ValueError, match="must not depend on released gradients"):
        dp.optimizers.baselines.AdaS(DelayedPreconditioner())


def test_the_statement_says_where_it_comes_from():
    text = side_information_paragraph(DelayedPreconditioner(), ())
    assert "computed from the gradients that were released" in " ".join(text.split())
