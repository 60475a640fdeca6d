"""The shell of all optimizers: what it refuses, and that nothing changes when it does."""

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tests.helpers.catalogue import EAGERLY, WITHOUT_TAPE
from tf_adaptive_dp import NotPrivateError
from tf_adaptive_dp._keras.generation import GENERATION
from tf_adaptive_dp._keras.variables import native


def compiled(model=None, loss=None, **kwargs):
    model = model or catalogue.mlp()
    model.compile(catalogue.make("DPSGD"), loss=loss or catalogue.loss(), **kwargs)
    return model


def assert_refused(model, match, error=NotPrivateError, **kwargs):
    start = model.get_weights()
    with pytest.raises(error, match=match):
        catalogue.fit(model, **kwargs)
    for a, b in zip(model.get_weights(), start):
        np.testing.assert_array_equal(a, b)
    assert model.optimizer.ledger.num_releases == 0
    assert int(model.optimizer.iterations.numpy()) == 0


@WITHOUT_TAPE
def test_a_scalar_loss_is_refused_under_eager_execution():
    scalar = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    assert_refused(compiled(loss=scalar, run_eagerly=True), 'reduction="none"')


@pytest.mark.parametrize("run_eagerly", EAGERLY)
def test_a_loss_of_rank_2_is_refused(run_eagerly):
    class Rank2(tf.keras.losses.Loss):
        def call(self, y, prediction):
            return tf.square(prediction)

    model = compiled(loss=Rank2(reduction="none"), run_eagerly=run_eagerly)
    assert_refused(model, r"shape \((8|None), 3\).*Reduce axis 1")


@pytest.mark.parametrize("run_eagerly", EAGERLY)
def test_batch_normalization_that_trains_is_refused(run_eagerly):
    model = tf.keras.Sequential(
        [
            tf.keras.Input([6]),
            tf.keras.layers.Dense(4),
            tf.keras.layers.BatchNormalization(name="the_culprit"),
            tf.keras.layers.Dense(3),
        ]
    )
    model = compiled(model, run_eagerly=run_eagerly)
    match = "GroupNormalization" if run_eagerly else "the_culprit.*GroupNormalization"
    start = [v.numpy() for v in model.trainable_variables]
    with pytest.raises(NotPrivateError, match=match):
        catalogue.fit(model)
    for a, b in zip(model.trainable_variables, start):
        np.testing.assert_array_equal(a, b)
    assert model.optimizer.ledger.num_releases == 0


@pytest.mark.slow
@pytest.mark.parametrize("run_eagerly", EAGERLY)
def test_batches_whose_size_varies_unforeseen_need_an_expected_batch_size(run_eagerly):
    model = compiled(run_eagerly=run_eagerly)
    parts = [np.split(part, [12, 24]) for part in catalogue.data()]
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected_batch_size"):
        model.fit((batch for batch in zip(*parts)), verbose=0)
    assert model.optimizer.ledger.segments == [(0.5, 12.0, 2)]
    assert int(model.optimizer.iterations) == 2
    model.compile(catalogue.make("DPSGD", expected_batch_size=12), loss=catalogue.loss())
    catalogue.fit(model, batch_size=12)
    assert model.optimizer.ledger.segments == [(0.5, 12.0, 3)]


@pytest.mark.slow
def test_another_batch_size_on_purpose_opens_a_segment():
    model = compiled()
    catalogue.fit(model)
    model.optimizer.expected_batch_size = 16
    catalogue.fit(model, batch_size=16)
    model.optimizer.noise_multiplier = 2.0
    catalogue.fit(model, batch_size=16)
    assert model.optimizer.ledger.segments == [(0.5, 8.0, 4), (0.5, 16.0, 2), (2.0, 16.0, 2)]


@pytest.mark.parametrize("run_eagerly", EAGERLY)
def test_microbatches_must_divide_the_batch(run_eagerly):
    model = catalogue.mlp()
    optimizer = catalogue.make("DPSGD", num_microbatches=3)
    model.compile(optimizer, loss=catalogue.loss(), run_eagerly=run_eagerly)
    assert_refused(model, "num_microbatches` must divide the batch", ValueError)


def test_a_smaller_last_batch_that_nobody_foresaw_fails_because_of_the_microbatches():
    model = catalogue.mlp()
    model.compile(catalogue.make("DPSGD", num_microbatches=4), loss=catalogue.loss())
    x, y = catalogue.data()
    single = tf.data.Dataset.from_tensor_slices((x[:10], y[:10]))
    batches = single.filter(lambda *_: True).batch(8)
    # Nothing knows its size beforehand, and no reshaping into groups may fail first.
    with pytest.raises(tf.errors.InvalidArgumentError, match="must divide the batch"):
        model.fit(batches, verbose=0)


@pytest.mark.slow_on(3)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("num_microbatches, sigma", [(4, 0.25), (8, 0.5)])
def test_microbatches_count_with_twice_the_sensitivity(num_microbatches, sigma):
    model = catalogue.mlp()
    optimizer = catalogue.make("DPSGD", num_microbatches=num_microbatches)
    model.compile(optimizer, loss=catalogue.loss())
    catalogue.fit(model)
    assert optimizer.ledger.segments == [(sigma, 8.0, 4)]
    assert optimizer.next_release() == (sigma, 8.0)


def test_gradients_from_elsewhere_are_refused():
    optimizer = catalogue.make("DPSGD")
    w = tf.Variable([1.0, 2.0], name="w")
    with pytest.raises(NotPrivateError, match=r"for w\..*non_private_gradients=True"):
        optimizer.apply_gradients([(tf.ones([2]), w)])
    np.testing.assert_array_equal(w, [1.0, 2.0])
    optimizer.apply_gradients([(tf.ones([2]), w)], non_private_gradients=True)
    np.testing.assert_allclose(w, [0.9, 1.9])


def test_released_gradients_that_were_processed_need_the_explicit_word():
    optimizer = catalogue.make("DPSGD")
    w = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(w * tf.ones([4, 2]), axis=1)
    pairs = optimizer.compute_gradients(loss, [w], tape)
    assert optimizer.ledger.num_releases == 1
    with pytest.raises(NotPrivateError):
        optimizer.apply_gradients([(2 * g, v) for g, v in pairs])
    optimizer.apply_gradients(pairs)


def test_a_plain_custom_loop_is_refused_inside_a_function():
    optimizer = catalogue.make("DPSGD")
    w = tf.Variable([1.0, 2.0])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w)
        optimizer.apply_gradients(zip(tape.gradient(loss, [w]), [w]))

    with pytest.raises(NotPrivateError, match="minimize"):
        step()
    np.testing.assert_array_equal(w, [1.0, 2.0])


def test_a_loss_given_as_a_function_works():
    w = tf.Variable([1.0, 2.0])
    x = tf.constant([[1.0, 0.0], [0.0, 1.0]])
    optimizer = dp.DPSGD(1e6, 0.0, learning_rate=1.0)
    optimizer.minimize(lambda: tf.linalg.matvec(x, w), lambda: [w])
    np.testing.assert_allclose(w, [0.5, 1.5])


def test_a_tensor_loss_needs_its_tape():
    with pytest.raises(ValueError, match="`tape` must be the tape.*tape=None"):
        catalogue.make("DPSGD").minimize(tf.ones([3]), [tf.Variable(1.0)])


@pytest.mark.skipif(GENERATION == 3, reason="_keras/test_optimizers_keras3.py has that of Keras 3")
def test_a_loss_scaling_wrapper_is_refused():
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(catalogue.make("DPSGD"))
    w = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.linalg.matvec(tf.ones([4, 2]), w)
    with pytest.raises(NotPrivateError, match="Pass the optimizer itself"):
        optimizer.minimize(loss, [w], tape)


def test_variables_without_a_gradient_stay_without_noise():
    used, unused = tf.Variable([1.0]), tf.Variable([1.0])
    optimizer = dp.DPSGD(1.0, 1.0, learning_rate=1.0)
    with tf.GradientTape() as tape:
        loss = tf.ones([4]) * used
    optimizer.minimize(loss, [used, unused], tape)
    assert unused.numpy() == [1.0] and used.numpy() != [1.0]


@pytest.mark.parametrize(
    "kwargs, error, match",
    [
        ({"l2_norm_clip": 0.0}, ValueError, "`l2_norm_clip`.*at least 1e-12.*l2_norm_clip=0.0"),
        ({"l2_norm_clip": 1e-20}, ValueError, "`l2_norm_clip`.*at least 1e-12"),
        ({"l2_norm_clip": -1.0}, ValueError, "`l2_norm_clip`.*l2_norm_clip=-1.0"),
        ({"l2_norm_clip": float("nan")}, ValueError, "`l2_norm_clip`.*finite"),
        ({"l2_norm_clip": "1"}, TypeError, "`l2_norm_clip` must be a number"),
        ({"noise_multiplier": -1.0}, ValueError, "`noise_multiplier`.*at least 0"),
        ({"noise_multiplier": float("inf")}, ValueError, "`noise_multiplier`.*finite"),
        ({"noise_multiplier": True}, TypeError, "`noise_multiplier` must be a number"),
        ({"num_microbatches": 0}, ValueError, "`num_microbatches`.*at least 1"),
        ({"num_microbatches": 2.5}, TypeError, "`num_microbatches` must be a whole number"),
        ({"expected_batch_size": 0}, ValueError, "`expected_batch_size`.*greater than 0"),
        ({"clipping": "none"}, ValueError, "`clipping` must be one of 'flat', 'automatic'"),
        ({"gradients": "fast"}, ValueError, "`gradients` must be one of"),
        ({"gradients": "jacobian"}, ValueError, "must be one of 'auto', "),
        ({"seed": 2**63}, ValueError, r"`seed` must be below 2\*\*63"),
        ({"seed": -1}, ValueError, "`seed`.*at least 0"),
        ({"lerning_rate": 0.1}, (TypeError, ValueError), "lerning_rate"),  # raised by Keras
    ],
)
def test_bad_arguments_are_named(kwargs, error, match):
    arguments = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, **kwargs}
    with pytest.raises(error, match=match):
        dp.DPSGD(**arguments)


@pytest.mark.parametrize("name", ["l2_norm_clip", "noise_multiplier", "expected_batch_size"])
def test_setting_a_bad_value_changes_nothing(name):
    optimizer = catalogue.make("DPSGD", expected_batch_size=8.0)
    before = getattr(optimizer, name)
    with pytest.raises(ValueError, match=name):
        setattr(optimizer, name, -1.0)
    assert getattr(optimizer, name) == before


@pytest.mark.parametrize(
    "make, error, match",
    [
        (lambda: dp.ADADP(1.0, 1.0, tolerance=0), ValueError, "`tolerance`"),
        (lambda: dp.ADADP(1.0, 1.0, normalized_inputs=1), TypeError, "`normalized_inputs`.*True"),
        (lambda: dp.ADADP(1.0, 1.0, num_steps=0), ValueError, "`num_steps` must be at least 1"),
        (lambda: dp.ADADP(1.0, 1.0, tolerance_decay=-1), ValueError, "`tolerance_decay`.*-1"),
        (lambda: dp.ADADP(1.0, 1.0, alpha_min=1.2), ValueError, "`alpha_min` must be at most 1"),
        (lambda: dp.ADADP(1.0, 1.0, alpha_max=0.9), ValueError, "`alpha_max`.*at least 1"),
        (lambda: dp.ADADP(1.0, 1.0, initial_factor=0.5), ValueError, "`initial_factor`.*least 1"),
        (lambda: dp.ADADP(1.0, 1.0, keep="both"), ValueError, "`keep` must be one of"),
        (lambda: dp.ADADP(1.0, 1.0, learning_rate=0.0), ValueError, "`learning_rate`"),
        (
            lambda: dp.ADADP(1.0, 1.0, freeze_learning_rate_after=-1),
            ValueError,
            "`freeze_learning_rate_after`",
        ),
        (
            lambda: dp.ADADP(
                1.0,
                1.0,
                learning_rate=tf.keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9),
            ),
            TypeError,
            "ADADP adapts its learning rate, which a schedule would overwrite",
        ),
        (lambda: dp.DPAdamWOSM(1.0, 0.0), ValueError, "`noise_multiplier` must be greater than 0"),
        (lambda: dp.DPAdamWOSM(1.0, 1.0, beta_1=1.0), ValueError, "`beta_1` must be below 1"),
        (lambda: dp.DPAdamWOSM(1.0, 1.0, epsilon=-1), ValueError, "`epsilon`"),
        (lambda: dp.AdaDPS(None, 1.0, 1.0), TypeError, "`side_information`"),
        (
            lambda: dp.make_dp_optimizer_class(tf.keras.optimizers.legacy.SGD),
            TypeError,
            "keras.optimizers.legacy",
        ),
        (lambda: dp.make_dp_optimizer_class(dp.DPSGD), TypeError, "private already"),
    ],
)
def test_bad_arguments_of_single_optimizers_are_named(make, error, match):
    with pytest.raises(error, match=match):
        make()


@pytest.mark.slow
def test_the_same_keras_class_gives_the_same_private_class():
    assert dp.make_dp_optimizer_class(tf.keras.optimizers.SGD) is dp.DPSGD
    nadam = dp.make_dp_optimizer_class(tf.keras.optimizers.Nadam)
    model = catalogue.mlp()
    model.compile(nadam(1.0, 0.5, learning_rate=0.01), loss=catalogue.loss())
    catalogue.fit(model)
    assert model.optimizer.ledger.segments == [(0.5, 8.0, 4)]


@pytest.mark.skipif(GENERATION == 2, reason="Keras 2 has no `MultiOptimizer`")
def test_one_release_serves_several_rules_which_share_no_learning_rate(tmp_path):
    rules = tf.keras.optimizers.OptimizerMap(
        tf.keras.optimizers.SGD(0.1), {"hidden/.*": tf.keras.optimizers.SGD(0.0)}
    )
    several = dp.make_dp_optimizer_class(tf.keras.optimizers.MultiOptimizer)
    inputs = tf.keras.Input([2])
    hidden = tf.keras.layers.Dense(3, name="hidden")(inputs)
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(2, name="last")(hidden))
    model.compile(several(1.0, 0.5, optimizer_map=rules), loss=catalogue.loss())
    assert "num_releases=0" in repr(model.optimizer)
    start = model.get_weights()
    monitor = dp.PrivacyMonitor(num_examples=32, delta=1e-3, log_dir=tmp_path)
    x, y = np.random.default_rng(0).normal(size=(32, 2)), np.arange(32) % 2
    history = model.fit(x, y, batch_size=8, verbose=0, callbacks=[monitor]).history
    moved = [np.abs(a - b).max() > 0 for a, b in zip(model.get_weights(), start)]
    assert moved == [False, False, True, True]
    assert model.optimizer.ledger.segments == [(0.5, 8.0, 4)]
    assert "epsilon" in history and "learning_rate" not in history


@pytest.mark.slow
def test_mixed_bfloat16_trains_with_float32_gradients():
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = catalogue.mlp()
        model.compile(catalogue.make("DPSGD", noise_multiplier=0.0), loss=catalogue.loss())
        catalogue.fit(model)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    plain = compiled()
    plain.optimizer.noise_multiplier = 0.0
    catalogue.fit(plain)
    for a, b in zip(model.get_weights(), plain.get_weights()):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, atol=0.02)


@pytest.mark.slow_on(2)
def test_after_unfreezing_the_same_ledger_goes_on():
    model = catalogue.mlp()
    model.layers[0].trainable = False
    catalogue.fit(compiled(model))
    model.layers[0].trainable = True
    old = model.optimizer
    model.compile(old, loss=catalogue.loss())
    with pytest.raises(ValueError, match=r"compile with `type\(optimizer\)\.from_config"):
        catalogue.fit(model)
    model.compile(type(old).from_config(old.get_config()), loss=catalogue.loss())
    catalogue.fit(model)
    assert model.optimizer.ledger.num_releases == 8


def test_no_configuration_forgets_other_events():
    optimizer = catalogue.make("DPSGD")
    optimizer.get_config()
    gaussian = dp_accounting.GaussianDpEvent(0.5), dp_accounting.GaussianDpEvent(3.0)
    optimizer.ledger.other_events = gaussian
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.ledger.other_events == gaussian
    optimizer.ledger.other_events = (*gaussian, dp_accounting.LaplaceDpEvent(0.5))
    with pytest.raises(ValueError, match="cannot be saved .*LaplaceDpEvent"):
        optimizer.get_config()


class Regularized(tf.keras.Sequential):
    """Keras itself cannot add regularization losses to a loss vector."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return self.loss(y, y_pred, sample_weight) + tf.add_n(self.losses)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("method", ["traced", "materialized"])
def test_regularization_is_added_once_after_clipping(method):
    x, y = catalogue.data()
    tf.keras.utils.set_random_seed(4)
    model = Regularized(
        [
            tf.keras.Input([6]),
            tf.keras.layers.Dense(5, kernel_regularizer=tf.keras.regularizers.L2(0.5)),
            tf.keras.layers.Dense(3, bias_regularizer="l2", bias_initializer="ones"),
        ]
    )
    start = [tf.identity(v) for v in model.trainable_variables]
    with tf.GradientTape() as tape:
        penalty = tf.add_n(model.losses)
    variables = [native(v) for v in model.trainable_variables]
    expected = tape.gradient(penalty, variables, unconnected_gradients="zero")
    # Clipped to nearly nothing, all that is left of the step is the penalty.
    optimizer = dp.DPSGD(1e-9, 0.0, learning_rate=1.0, gradients=method)
    model.compile(optimizer, loss=catalogue.loss())
    model.fit(x, y, batch_size=32, verbose=0)
    for before, after, gradient in zip(start, model.trainable_variables, expected):
        np.testing.assert_allclose(before - after, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["DPAdamW", "ADADP euler", "DPAdamWOSM", "AdaDPS fixed"])
def test_a_step_is_traced_once_although_it_creates_slots(name):
    weights, traces = tf.Variable(tf.ones([6])), []
    optimizer = catalogue.make(name)

    @tf.function
    def step(x):
        traces.append(x)
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(x, weights)
        optimizer.minimize(loss, [weights], tape)

    for batch in (catalogue.data(8)[0], catalogue.data(8)[0]):
        step(tf.constant(batch))
    assert len(traces) == 1
    assert optimizer.ledger.num_releases == 2
    assert int(optimizer.iterations) == 2
    assert all(v.numpy().any() for v in optimizer.variables if v.shape == [6])


@pytest.fixture
def tensor_float_32():
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(True)
    yield tf.config.experimental.tensor_float_32_execution_enabled
    tf.config.experimental.enable_tensor_float_32_execution(before)


def one_step():
    w = tf.Variable([1.0])
    optimizer = dp.DPSGD(1.0, 1.0)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = x * w
        optimizer.minimize(loss, [w], tape)

    step(tf.constant([1.0, 2.0]))
    return optimizer


@pytest.mark.in_turns
@pytest.mark.parametrize(
    "details, stays",
    [({"compute_capability": (8, 0)}, False), ({}, False), ({"compute_capability": (7, 5)}, True)],
)
def test_tensor_float_32_is_turned_off_where_a_gpu_has_it(
    tensor_float_32, monkeypatch, recwarn, details, stays
):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["a GPU"])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda device: details)
    one_step()
    warned = ["TensorFloat-32 is off now" in str(w.message) for w in recwarn]
    assert tensor_float_32() is stays is not any(warned)


def test_without_a_gpu_tensor_float_32_is_left_alone(tensor_float_32):
    one_step()
    assert tensor_float_32()


def test_rewriting_float32_in_16_bits_is_refused(monkeypatch):
    options = {"auto_mixed_precision": True, "constant_folding": True}
    monkeypatch.setattr(tf.config.optimizer, "get_experimental_options", lambda: options)
    with pytest.raises(NotPrivateError, match="optimizer options auto_mixed_precision. Turn"):
        one_step()
    monkeypatch.setitem(options, "auto_mixed_precision", False)
    assert one_step().ledger.num_releases == 1


@pytest.mark.slow_on(3)
def test_traces_for_batches_of_several_sizes_are_refused():
    # In each the size is a constant, so a loss that depends on it cannot be told from others.
    def step_of(optimizer, w, **kwargs):
        @tf.function(**kwargs)
        def step(x):
            with tf.GradientTape() as tape:
                losses = tf.reduce_sum(x * w, axis=1)
            optimizer.minimize(losses, [w], tape)

        return step

    batches = [np.ones([n, 2], np.float32) for n in (8, 9)]
    optimizer, w = dp.DPSGD(1.0, 0.0, expected_batch_size=8), tf.Variable([1.0, 1.0])
    step = step_of(optimizer, w)
    step(batches[0])
    step(batches[0])
    with pytest.raises(dp.NotPrivateError, match="Received: batches of 8 and of 9 rows"):
        step(batches[1])
    assert optimizer.ledger.num_releases == 2
    optimizer.expected_batch_size = 9  # a public number, as is the size of batches of one size
    step_of(optimizer, w)(batches[1])
    signature = [tf.TensorSpec([None, 2])]
    for kwargs in ({"input_signature": signature}, {"reduce_retracing": True}):
        other = dp.DPSGD(1.0, 0.0, expected_batch_size=8)
        step = step_of(other, tf.Variable([1.0, 1.0]), **kwargs)
        for batch in batches:
            step(batch)
        assert other.ledger.num_releases == 2
