"""The optimizers in Keras 3's train step: exact, counted, saved, and never with raw gradients."""

import copy
import functools
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import ROOT, catalogue
from tests.helpers.catalogue import by_rank, mirrored
from tests.helpers.gaussianity import assert_gaussian
from tf_adaptive_dp._keras.generation import GENERATION, keras
from tf_adaptive_dp._keras.mixed_precision import may_vanish
from tf_adaptive_dp._keras.optimizers import SelfScalingOptimizer

if GENERATION != 3:
    pytest.skip("Keras 2 trains through another shell", allow_module_level=True)

CLIP = 0.05
X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int64")


def adadps(**kwargs):
    fixed = dp.side_information.FixedPreconditioner(by_rank, provenance="public")
    return dp.AdaDPS(fixed, learning_rate=0.5, **kwargs)


OPTIMIZERS = {
    "DPSGD": functools.partial(dp.DPSGD, learning_rate=0.5, momentum=0.9),
    "DPAdam": functools.partial(dp.DPAdam, learning_rate=0.05),
    "ADADP": functools.partial(dp.ADADP, learning_rate=0.5, weight_decay=0.01),
    # It needs noise, here too little to see.
    "DPAdamWOSM": lambda noise_multiplier, **k: dp.DPAdamWOSM(
        noise_multiplier=max(noise_multiplier, 1e-9), learning_rate=0.5, epsilon=1.0, **k
    ),
    "AdaDPS": adadps,
}


def make(name="DPSGD", **kwargs):
    return OPTIMIZERS[name](**{"l2_norm_clip": CLIP, "noise_multiplier": 0.0, **kwargs})


def mean_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(optimizer, loss=None, **kwargs):
    keras.utils.set_random_seed(0)
    layers = [keras.Input([4]), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.compile(optimizer, loss or mean_loss(), **kwargs)
    return model


def fit(model, epochs=1, batch_size=8, **kwargs):
    data = {"x": X, "y": Y, "shuffle": False, "verbose": 0, **kwargs}
    return model.fit(batch_size=batch_size, epochs=epochs, **data)


def trained(optimizer, epochs=1, fit_with=(), **kwargs):
    model = compiled(optimizer, **kwargs)
    fit(model, epochs, **dict(fit_with))
    return model


def clipped_mean(model, x, y, scale=by_rank):
    """By batches of one, under eager execution, of the ordinary loss."""
    variables, total = model.trainable_variables, 0
    for i in range(len(x)):
        with tf.GradientTape() as tape:
            loss = mean_loss()(y[i : i + 1], model(x[i : i + 1]))
        gradients = [
            g.numpy() / scale(v)
            for g, v in zip(tape.gradient(loss, [v.value for v in variables]), variables)
        ]
        norm = np.sqrt(sum((g**2).sum() for g in gradients))
        assert norm > CLIP  # so all of them are clipped
        total = total + np.concatenate([np.ravel(g) * CLIP / norm for g in gradients])
    flat = np.split(total / len(x), np.cumsum([np.prod(v.shape) for v in variables])[:-1])
    return [g.reshape(v.shape) for g, v in zip(flat, variables)]


def assert_same_weights(actual, expected, rtol=1e-5, atol=1e-6):
    catalogue.assert_same_weights(actual, expected, rtol, atol)


# ----- exact


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fit_with_an_ordinary_loss_is_exact_against_batches_of_one(name):
    model, by_hand = (compiled(make(name, expected_batch_size=8)) for _ in range(2))
    scale = by_rank if name == "AdaDPS" else np.ones_like
    fit(model, steps_per_epoch=3)
    for i in range(0, 24, 8):
        gradients = clipped_mean(by_hand, X[i : i + 8], Y[i : i + 8], scale)
        pairs = [(tf.constant(g), v) for g, v in zip(gradients, by_hand.trainable_variables)]
        by_hand.optimizer.apply_gradients(pairs, non_private_gradients=True)
    assert_same_weights(model, by_hand)
    assert model.optimizer.ledger.num_releases == 3
    assert int(model.optimizer.iterations) == int(by_hand.optimizer.iterations) == 3
    assert model.optimizer.variables[0] is model.optimizer.iterations


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("ours, of_keras", [("DPSGD", "SGD"), ("DPAdam", "Adam")])
def test_the_update_is_that_of_keras(ours, of_keras):
    rule = {"SGD": {"learning_rate": 0.5, "momentum": 0.9}, "Adam": {"learning_rate": 0.05}}
    model = trained(make(ours))
    by_keras = compiled(getattr(keras.optimizers, of_keras)(**rule[of_keras]))
    for i in range(0, 32, 8):
        gradients = clipped_mean(by_keras, X[i : i + 8], Y[i : i + 8], np.ones_like)
        by_keras.optimizer.apply([tf.constant(g) for g in gradients], by_keras.trainable_variables)
    assert_same_weights(model, by_keras)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    "compile_with",
    [
        {"jit_compile": True},
        {"steps_per_execution": 2},
        {"loss": keras.losses.SparseCategoricalCrossentropy(True, reduction="none")},
        {"loss": keras.losses.SparseCategoricalCrossentropy(True, reduction="sum")},
        {"jit_compile": True, "steps_per_execution": 2},
    ],
    ids=["jit", "two steps", "losses", "sum of losses", "two steps with jit"],
)
def test_the_way_of_training_does_not_change_the_step(compile_with):
    expected = trained(make("DPAdam", noise_multiplier=0.5, seed=1))
    model = trained(make("DPAdam", noise_multiplier=0.5, seed=1), **compile_with)
    assert_same_weights(model, expected)
    assert model.optimizer.ledger.segments == expected.optimizer.ledger.segments == [(0.5, 8.0, 4)]


def test_a_step_is_traced_once(monkeypatch):
    traces = []
    compute = dp.DPSGD.compute_gradients
    monkeypatch.setattr(
        dp.DPSGD, "compute_gradients", lambda *a: traces.append(None) or compute(*a)
    )
    trained(make("DPSGD"), epochs=2)
    assert len(traces) == 1


def test_a_batch_that_arrives_in_parts_is_one_release():
    whole = trained(make("ADADP"), epochs=2)
    parts = trained(
        make("ADADP", gradient_accumulation_steps=2, expected_batch_size=8),
        epochs=2,
        fit_with={"batch_size": 4},
    )
    assert_same_weights(parts, whole)
    optimizer = parts.optimizer
    assert optimizer.parts_per_batch == 2 and optimizer.unfinished_parts == 0
    assert optimizer.ledger.num_releases == int(optimizer.iterations) == 8
    assert type(optimizer).from_config(optimizer.get_config()).parts_per_batch == 2


# ----- raw gradients never exist


def vector(model, x, y):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    return loss(y, model(x, training=True))


def test_the_gradients_that_keras_sees_are_none(monkeypatch):
    seen, own = [], dp.DPSGD.apply_gradients

    def spy(self, pairs):
        pairs = list(pairs)
        seen.extend(g for g, _ in pairs)
        return own(self, pairs)

    monkeypatch.setattr(dp.DPSGD, "apply_gradients", spy)
    trained(make())
    assert seen == [None] * 4


@pytest.mark.parametrize("apply", ["apply", "apply_gradients"])
def test_raw_gradients_are_refused(apply):
    model = compiled(make())
    variables, optimizer = model.trainable_variables, model.optimizer

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(vector(model, x, y))
        gradients = tape.gradient(loss, variables)
        if apply == "apply":
            optimizer.apply(gradients, variables)
        else:
            optimizer.apply_gradients(zip(gradients, variables))

    before = model.get_weights()
    for way in (step, tf.function(step)):
        with pytest.raises(dp.NotPrivateError, match="scale_loss"):
            way(X[:8], Y[:8])
    optimizer.build(variables)
    with pytest.raises(dp.NotPrivateError, match="other gradients"):
        optimizer.apply([tf.ones_like(v.value) for v in variables])
    for a, b in zip(before, model.get_weights()):
        np.testing.assert_array_equal(a, b)
    assert optimizer.ledger.num_releases == 0


def test_gradients_beside_the_kept_loss_are_refused():
    model = compiled(make())

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = vector(model, x, y)
            model.optimizer.scale_loss(loss)
        model.optimizer.apply(
            tape.gradient(loss, model.trainable_variables), model.trainable_variables
        )

    with pytest.raises(dp.NotPrivateError, match="what `scale_loss` returned"):
        step(X[:8], Y[:8])


def custom_step(model, losses=1):
    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            for _ in range(losses):
                loss = model.optimizer.scale_loss(tf.reduce_mean(vector(model, x, y)))
        model.optimizer.apply(
            tape.gradient(loss, model.trainable_variables), model.trainable_variables
        )

    return step


def test_a_custom_loop_makes_the_steps_of_fit():
    model, expected = compiled(make("ADADP")), trained(make("ADADP"))
    step = custom_step(model)
    for i in range(0, 32, 8):
        step(X[i : i + 8], Y[i : i + 8])
    assert_same_weights(model, expected)
    assert model.optimizer.ledger.segments == expected.optimizer.ledger.segments


def test_a_second_loss_of_a_step_is_refused():
    with pytest.raises(dp.NotPrivateError, match="a second loss"):
        custom_step(compiled(make()), losses=2)(X[:8], Y[:8])


def test_a_failed_trace_leaves_no_loss_behind():
    model = compiled(make())

    @tf.function
    def fails(x, y):
        model.optimizer.scale_loss(vector(model, x, y))
        raise RuntimeError("in the middle of a step")

    with pytest.raises(RuntimeError, match="in the middle"):
        fails(X[:8], Y[:8])
    custom_step(model)(X[:8], Y[:8])
    assert model.optimizer.ledger.num_releases == 1


def test_a_loss_of_another_function_is_refused():
    model = compiled(make())

    @tf.function
    def forward(x, y):
        return model.optimizer.scale_loss(vector(model, x, y))

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = forward(x, y)
        model.optimizer.apply(
            tape.gradient(loss, model.trainable_variables), model.trainable_variables
        )

    with pytest.raises(dp.NotPrivateError, match="in the same function"):
        step(X[:8], Y[:8])


def test_minimize_works_eagerly_and_in_a_function():
    expected = trained(make("DPAdam"), fit_with={"steps_per_epoch": 2})
    model = compiled(make("DPAdam"))

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = vector(model, x, y)
        model.optimizer.minimize(loss, model.trainable_variables, tape)

    with pytest.warns(UserWarning, match="eager"):
        step(X[:8], Y[:8])
    tf.function(step)(X[8:16], Y[8:16])
    assert_same_weights(model, expected)
    assert model.optimizer.ledger.num_releases == 2


def test_an_eager_fit_is_refused():
    with pytest.raises(dp.NotPrivateError, match="run_eagerly"):
        trained(make(), run_eagerly=True)


def test_a_loss_scale_optimizer_around_is_refused():
    optimizer = make()
    with pytest.raises(ValueError, match="clipped and noised by this library"):
        trained(keras.optimizers.LossScaleOptimizer(optimizer))
    assert optimizer.ledger.num_releases == 0


def test_other_ways_to_apply_are_refused():
    with pytest.raises(dp.NotPrivateError, match="stateless_apply"):
        make().stateless_apply([], [], [])
    with pytest.raises(ValueError, match="`loss_scale_factor` must be None.*`loss_scale`"):
        make(loss_scale_factor=2.0)
    weight, optimizer = keras.Variable([0.0]), make()
    with pytest.raises(dp.NotPrivateError, match="^`apply` and `apply_gradients` take only") as e:
        optimizer.apply([tf.ones([1])], [weight])
    assert str(e.value).endswith("and differentiate what it returns.")  # not with what is unsafe


def test_variables_that_keras_sets_to_their_gradient_are_refused():
    variable = keras.Variable([0.0])
    variable.overwrite_with_gradient = True
    with pytest.raises(dp.NotPrivateError, match="float8"):
        make().build([variable])


def test_nothing_of_the_loss_scale_optimizer_is_left():
    wrapper = vars(keras.optimizers.LossScaleOptimizer)
    inherited = {n for n in wrapper if hasattr(keras.optimizers.Optimizer, n)}
    public = {n for n in wrapper if not n.startswith("_")}
    of_python = {"__doc__", "__module__", "__static_attributes__", "__firstlineno__"}
    # `check_finite` is new there, and `apply` alone calls it.
    needed = (inherited | public) - of_python - {"check_finite"}
    assert {"apply", "scale_loss", "build", "learning_rate", "from_config", "__init__"} <= needed
    exported = {n for n in needed if n.startswith("_api_export")}
    assert needed - exported <= set(vars(SelfScalingOptimizer))


# ----- saving


def finish(model):
    fit(model)
    return model.optimizer


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_saved_model_continues_as_if_it_had_not_stopped(tmp_path, name):
    uninterrupted = trained(make(name, noise_multiplier=0.5, seed=2), epochs=2)
    model = trained(make(name, noise_multiplier=0.5, seed=2))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.ledger.segments == model.optimizer.ledger.segments == [(0.5, 8.0, 4)]
    finish(loaded)
    assert_same_weights(loaded, uninterrupted)
    assert loaded.optimizer.ledger.segments == [(0.5, 8.0, 8)]
    assert int(loaded.optimizer.iterations) == 8


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("way", ["weights", "checkpoint", "deferred"])
@pytest.mark.parametrize("name", ["ADADP", "DPAdam", "AdaDPS"])
def test_weights_and_checkpoints_keep_the_ledger(tmp_path, name, way):
    arguments = {"noise_multiplier": 0.5, "seed": 2}
    model, other = trained(make(name, **arguments)), compiled(make(name, **arguments))
    if way != "deferred":
        other.optimizer.build(other.trainable_variables)
    if way == "weights":
        model.save_weights(tmp_path / "model.weights.h5")
        other.load_weights(tmp_path / "model.weights.h5")
    else:
        path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "c")
        status = tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
        if way == "checkpoint":
            status.assert_consumed()
    for of_model in (finish(model), finish(other)):
        assert of_model.ledger.segments == [(0.5, 8.0, 8)]
        assert int(of_model.iterations) == 8
    assert_same_weights(other, model)


def test_the_variables_of_the_model_are_not_among_those_of_the_optimizer():
    model = trained(make("ADADP"))
    own = {id(v) for v in model.optimizer.variables}
    assert len(own) == len(model.optimizer.variables)
    assert not own & {id(v) for v in model.variables}


def test_configurations_and_copies():
    optimizer = trained(make("ADADP", noise_multiplier=0.5)).optimizer
    described = keras.saving.serialize_keras_object(optimizer)
    assert described["registered_name"] == "tf_adaptive_dp>ADADP"
    assert described["config"].pop("fewest_units") == len(X)  # what `fit` had
    for other in (keras.optimizers.get(described), pickle.loads(pickle.dumps(make("ADADP")))):
        assert type(other) is dp.ADADP and other.get_config().keys() == described["config"].keys()
    assert keras.optimizers.get(described).ledger.segments == [(0.5, 8.0, 4)]
    assert copy.deepcopy(make("DPAdam")).l2_norm_clip == CLIP


# ----- replicas


def on(strategy, optimizer, **kwargs):
    with strategy.scope():
        return compiled(optimizer(), **kwargs)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "name, arguments",
    [
        ("DPSGD", {"clipnorm": 1e-3, "weight_decay": 0.01, "use_ema": True}),
        ("ADADP", {}),
        ("DPSGD", {"global_clipnorm": 1e-3}),
        ("DPSGD", {"clipvalue": 1e-4}),
        ("DPAdam", {}),
        ("DPAdamWOSM", {}),
        ("AdaDPS", {}),
    ],
)
def test_two_replicas_make_the_step_of_one_device(name, arguments):
    models = []
    for strategy in (mirrored(), tf.distribute.get_strategy()):
        model = on(strategy, functools.partial(make, name, **arguments))
        fit(model, steps_per_epoch=3)
        models.append(model)
    assert_same_weights(*models, rtol=1e-4, atol=1e-6)
    assert models[0].optimizer.ledger.segments == models[1].optimizer.ledger.segments
    assert models[0].optimizer.ledger.num_releases == 3


SIZE = 20_000


def noise_of_a_step(**kwargs):
    """What one step on two replicas moves weights by that have no gradient."""
    with mirrored().scope():
        model = keras.Sequential(
            [keras.Input([SIZE]), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
        )
        arguments = {"l2_norm_clip": 2.0, "noise_multiplier": 1.5, "expected_batch_size": 8}
        model.compile(dp.DPSGD(learning_rate=1.0, **arguments, **kwargs), "mse")
    zeros = np.zeros([8, SIZE], "float32")
    model.fit(zeros, zeros[:, :1], batch_size=8, verbose=0)
    copies = [np.ravel(v.numpy()) for v in model.layers[0].kernel.value.values]
    np.testing.assert_array_equal(*copies)
    assert model.optimizer.ledger.segments == [(1.5, 8.0, 1)]
    return copies[0]


def test_the_noise_of_two_replicas_has_the_scale_that_was_asked_for():
    assert_gaussian(noise_of_a_step(), 1.5 * 2.0 / 8)


def test_keras_clips_the_sum_over_replicas():
    # Of two replicas' noise, clipped one by one, the sum would have √2 times this norm.
    assert np.linalg.norm(noise_of_a_step(clipnorm=0.25)) == pytest.approx(0.25, rel=1e-4)


# ----- side information


PUBLIC_RULES = {
    "AdaDPS": ("adam", dp.AdaDPS),
    "ADADP": ("rmsprop", lambda p, **k: dp.ADADP(side_information=p, **k)),
    "DPAdamPub": ("rmsprop", dp.optimizers.baselines.DPAdamPub),
    "PDADPMD": ("gradient", functools.partial(dp.optimizers.baselines.PDADPMD, mixing=0.5)),
}


def with_public(name):
    rule, optimizer = PUBLIC_RULES[name]
    data = tf.data.Dataset.from_tensor_slices((X[::-1], Y[::-1])).batch(8)
    public = dp.side_information.PublicGradients(data, rule=rule, epsilon=1e-2, provenance="public")
    return optimizer(public, l2_norm_clip=CLIP, noise_multiplier=0.0, learning_rate=0.1)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", PUBLIC_RULES)
def test_public_gradients_are_refreshed_in_fit(name):
    models = []
    for strategy in (mirrored(), tf.distribute.get_strategy()):
        # Keras divides means by the number of replicas, also that of the public batch.
        loss = keras.losses.SparseCategoricalCrossentropy(True, reduction="none")
        model = on(strategy, functools.partial(with_public, name), loss=loss)
        fit(model, steps_per_epoch=3, callbacks=[model.optimizer.side_information])
        models.append(model)
        (refreshes,), moments, *_ = model.optimizer.side_information_state
        assert refreshes.numpy() == (2 if name == "ADADP" else 3)
        assert all(np.any(m.numpy()) for m in moments)
        assert model.optimizer.ledger.num_releases == 3
    assert_same_weights(*models, rtol=1e-4, atol=1e-5)


def test_adas_takes_the_mean_of_every_loss():
    models = []
    for reduction in ("sum_over_batch_size", "none"):
        fixed = dp.side_information.FixedPreconditioner(by_rank, provenance="public")
        optimizer = dp.optimizers.baselines.AdaS(fixed, learning_rate=0.5)
        loss = keras.losses.SparseCategoricalCrossentropy(True, reduction=reduction)
        models.append(trained(optimizer, loss=loss))
    assert_same_weights(*models)


# ----- mixed precision


@pytest.fixture(params=["mixed_float16", "mixed_bfloat16"])
def policy(request):
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy("float32")


def test_mixed_precision_needs_no_wrapper(policy):
    optimizer, scales = make(), []
    original = optimizer._loss_scaling.scale_for
    optimizer._loss_scaling.scale_for = lambda *a: scales.append(original(*a)) or scales[-1]
    model = trained(optimizer)
    assert model.optimizer is optimizer and optimizer.ledger.num_releases == 4
    assert scales == [1024.0 if policy == "mixed_float16" else 1.0]
    keras.config.set_dtype_policy("float32")
    assert_same_weights(model, trained(make()), rtol=0.03, atol=2e-3)


def test_half_precision_is_found_inside_of_loops():
    variable = keras.Variable([1.0])

    @tf.function
    def loss(dtype):
        def body(i, total):
            inner = tf.cast(total, dtype) * tf.cast(variable.value, dtype)
            return i + 1, tf.cast(inner, tf.float32)

        _, total = tf.while_loop(lambda i, _: i < 3, body, [0, tf.ones([1])])
        found.append(may_vanish(total, [variable]))
        return total

    found = []
    for dtype in (tf.float16, tf.bfloat16, tf.float32):
        loss(dtype)
    assert found == [True, False, False]


# ----- another backend


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "program",
    [
        "import keras; keras.backend.backend = lambda: 'jax'; import tf_adaptive_dp",
        # If JAX is not installed, not even Keras can be imported.
        "import os; os.environ['KERAS_BACKEND'] = 'jax'; import tf_adaptive_dp",
    ],
)
def test_another_backend_is_refused_with_what_to_set(program):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KERAS_BACKEND": "tensorflow"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1
    assert "needs the TensorFlow backend of Keras 3. Received: 'jax'" in done.stderr
    assert "KERAS_BACKEND=tensorflow" in done.stderr
