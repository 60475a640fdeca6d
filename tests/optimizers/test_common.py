"""What holds for every optimizer: each mode of Keras, each way of saving, each shape of model."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tests.helpers.catalogue import KINDS, OPTIMIZERS, WITHOUT_TAPE
from tests.helpers.gaussianity import assert_gaussian, assert_independent
from tf_adaptive_dp._keras.generation import GENERATION

every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
# What takes long is in the quick suite for one of each kind.
each_kind = pytest.mark.parametrize(
    "name",
    [
        n if n in (*KINDS, "DPAdamWOSM") else pytest.param(n, marks=pytest.mark.slow)
        for n in OPTIMIZERS
    ],
)


def trained(name, epochs=1, noise_multiplier=0.5, compile_with=(), **kwargs):
    model = catalogue.mlp()
    optimizer = catalogue.make(name, noise_multiplier=noise_multiplier)
    model.compile(optimizer, loss=catalogue.loss(), **dict(compile_with))
    catalogue.fit(model, epochs, **kwargs)
    return model


def assert_same_state(actual, expected, rtol=1e-4, atol=1e-5):
    for a, b in zip(actual.get_weights(), expected.get_weights()):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
    assert actual.optimizer.ledger.segments == expected.optimizer.ledger.segments
    assert int(actual.optimizer.iterations) == int(expected.optimizer.iterations)
    np.testing.assert_allclose(
        float(actual.optimizer.learning_rate), float(expected.optimizer.learning_rate), rtol=1e-4
    )


@pytest.mark.slow_after(1)
@every_optimizer
def test_training_moves_the_weights_and_counts_each_minibatch(name):
    model = trained(name)
    start = catalogue.mlp().get_weights()
    assert all(np.abs(a - b).max() > 0 for a, b in zip(model.get_weights(), start))
    assert model.optimizer.ledger.segments == [(0.5, 8.0, 4)]
    assert int(model.optimizer.iterations) == 4


@pytest.mark.slow
@each_kind
@pytest.mark.parametrize(
    "mode", [pytest.param({"run_eagerly": True}, marks=WITHOUT_TAPE), {"steps_per_execution": 2}]
)
def test_modes_of_keras_train_alike(name, mode):
    if "steps_per_execution" in mode and catalogue.callbacks_of(catalogue.make(name)):
        pytest.skip("public statistics are refreshed once an execution, so these differ")
    assert_same_state(trained(name, compile_with=mode), trained(name))


@pytest.mark.slow_on(3)
@pytest.mark.slow_after(1)
@each_kind
def test_jit_compile_trains_alike(name):
    # XLA's generator gives other numbers for the same seed, so this compares without noise.
    noise_multiplier = 0.5 if "WOSM" in name else 0.0
    model = trained(name, noise_multiplier=noise_multiplier, compile_with={"jit_compile": True})
    plain = trained(name, noise_multiplier=noise_multiplier)
    assert model.optimizer.ledger.segments == [(noise_multiplier, 8.0, 4)]
    if noise_multiplier == 0:
        assert_same_state(model, plain)


def saved_and_loaded(model, path):
    model.save(path)
    if GENERATION == 2 or path.suffix != ".h5":
        return tf.keras.models.load_model(path)
    with pytest.warns(UserWarning, match="keeps its ledger.*Save models as `.keras`"):
        return tf.keras.models.load_model(path)


@pytest.mark.skipif(GENERATION == 2, reason="Keras 2 restores all of the state, see below")
@pytest.mark.slow_after(1)
@each_kind
def test_an_h5_file_of_keras_3_keeps_the_ledger(name, tmp_path):
    # Keras 3 builds an optimizer that it loads from this format before it knows the variables.
    # With its own optimizers such a model cannot be trained.
    model = trained(name, steps_per_epoch=3)
    loaded = saved_and_loaded(model, tmp_path / "model.h5")
    for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert type(loaded.optimizer) is type(model.optimizer)
    assert loaded.optimizer.ledger.segments == model.optimizer.ledger.segments
    assert int(loaded.optimizer.iterations) == 0
    for information in catalogue.callbacks_of(loaded.optimizer):
        information.dataset = catalogue.PUBLIC
    catalogue.fit(loaded, steps_per_epoch=3)
    assert loaded.optimizer.ledger.num_releases == 6
    assert int(loaded.optimizer.iterations) == 3


@pytest.mark.slow_after(1)
@each_kind
@pytest.mark.parametrize("suffix", [".keras", ".h5"] if GENERATION == 2 else [".keras"])
def test_a_saved_model_goes_on_where_it_stopped(name, suffix, tmp_path):
    # Three of four steps: ADADP is in the middle of a pair.
    model = trained(name, steps_per_epoch=3)
    loaded = saved_and_loaded(model, tmp_path / f"model{suffix}")
    assert_same_state(loaded, model)
    for information in catalogue.callbacks_of(loaded.optimizer):
        information.dataset = catalogue.PUBLIC
    for copy in (model, loaded):
        catalogue.fit(copy, steps_per_epoch=3)
        assert copy.optimizer.ledger.num_releases == 6
    if not catalogue.callbacks_of(model.optimizer):  # whose public batches begin anew
        assert_same_state(loaded, model)


@pytest.mark.skipif(GENERATION == 3, reason="Keras 3 does not write the SavedModel format")
@pytest.mark.slow_after(1)
@each_kind
def test_a_saved_model_directory_keeps_the_ledger(name, tmp_path):
    # Keras restores no other state of an optimizer from this format.
    model = trained(name)
    model.save(tmp_path / "model", save_format="tf")
    loaded = tf.keras.models.load_model(tmp_path / "model")
    assert loaded.optimizer.ledger.segments == model.optimizer.ledger.segments
    assert type(loaded.optimizer) is type(model.optimizer)


@pytest.mark.slow_after(1)
@each_kind
def test_a_checkpoint_restores_all_of_the_state(name, tmp_path):
    model = trained(name, steps_per_epoch=3)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "c")
    other = catalogue.mlp()
    other.compile(catalogue.make(name), loss=catalogue.loss())
    restored = tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    other.optimizer.build(other.trainable_variables)
    restored.assert_existing_objects_matched()
    assert_same_state(other, model)
    for a, b in zip(other.optimizer.variables, model.optimizer.variables):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.slow_after(1)
@each_kind
def test_backup_and_restore_in_the_middle_of_a_pair_changes_nothing(name, tmp_path):
    class Interrupted(Exception):
        pass

    class Interrupt(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 7:
                raise Interrupted

    def backup():
        return tf.keras.callbacks.BackupAndRestore(tmp_path, save_freq=1)

    # Keras starts the data anew when it resumes, so all batches are the same. Keras 3 also starts
    # the epoch anew, of which three steps had been made.
    steps = 11 if GENERATION == 3 else 8
    whole = trained(name, epochs=steps, steps_per_epoch=1, same_batches=True)
    model = catalogue.mlp()
    model.compile(catalogue.make(name), loss=catalogue.loss())
    with pytest.raises(Interrupted):
        catalogue.fit(model, 2, callbacks=[backup(), Interrupt()], same_batches=True)
    model = catalogue.mlp()
    model.compile(catalogue.make(name), loss=catalogue.loss())
    catalogue.fit(model, 2, callbacks=[backup()], same_batches=True)
    assert model.optimizer.ledger.segments == whole.optimizer.ledger.segments
    if not catalogue.callbacks_of(model.optimizer):
        assert_same_state(model, whole)


@every_optimizer
def test_config_makes_the_same_optimizer(name):
    # UntunedSGD has neither a clip norm nor another clipping.
    clipping = {} if name == "UntunedSGD" else {"l2_norm_clip": 1.0, "clipping": "automatic"}
    optimizer = catalogue.make(name, expected_batch_size=8.0, **clipping)
    config = optimizer.get_config()
    assert type(optimizer).from_config(config).get_config() == config
    assert {"noise_multiplier": 0.5, **clipping}.items() <= config.items()


@pytest.mark.slow_on(3)
@pytest.mark.slow_after(1)
@each_kind
def test_a_custom_loop_trains_as_fit_does(name):
    model = catalogue.mlp()
    optimizer = catalogue.make(name)
    model.compile(optimizer, loss=catalogue.loss())
    x, y = catalogue.data()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = catalogue.loss()(y, model(x, training=True))
        optimizer.minimize(loss, model.trainable_variables, tape)

    for k in range(4):
        for information in catalogue.callbacks_of(optimizer):
            information.update(model)
        step(x[8 * k : 8 * k + 8], y[8 * k : 8 * k + 8])
    assert_same_state(model, trained(name))


@pytest.mark.slow_after(1)
@each_kind
def test_frozen_variables_stay(name):
    model = catalogue.mlp()
    model.get_layer("hidden").trainable = False
    start = model.get_weights()
    model.compile(catalogue.make(name), loss=catalogue.loss())
    catalogue.fit(model)
    moved = [np.abs(a - b).max() > 0 for a, b in zip(model.get_weights(), start)]
    assert moved == [False, False, True, True]


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@each_kind
def test_subclassed_models_with_several_outputs_train(name):
    class TwoOutputs(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.logits = tf.keras.layers.Dense(3)
            self.value = tf.keras.layers.Dense(1)

        def call(self, x):
            return self.logits(x), self.value(x)

    tf.keras.utils.set_random_seed(5)
    x, y = catalogue.data()
    model = TwoOutputs()
    model(x)
    optimizer = catalogue.make(name)
    squared = tf.keras.losses.MeanSquaredError(reduction="none")
    model.compile(optimizer, loss=[catalogue.loss(), squared])
    start = model.get_weights()
    information = catalogue.callbacks_of(optimizer)
    if information:
        value = tf.data.Dataset.from_tensor_slices((x, (y, x[:, :1]))).batch(8)
        information[0].dataset = value
    model.fit(x, (y, x[:, :1]), batch_size=8, verbose=0, callbacks=information)
    assert all(np.abs(a - b).max() > 0 for a, b in zip(model.get_weights(), start))
    assert optimizer.ledger.num_releases == 4


@pytest.mark.slow_on(3)
@pytest.mark.slow_after(1)
@each_kind
def test_sample_weight_zero_means_absent(name):
    x, y = catalogue.data(16)
    weights = np.array([1.0] * 5 + [0.0] * 3 + [1.0] * 8)

    def weights_after(x):
        model = catalogue.mlp()
        optimizer = catalogue.make(name, expected_batch_size=8)
        model.compile(optimizer, loss=catalogue.loss())
        information = catalogue.callbacks_of(optimizer)
        model.fit(x, y, 8, 1, 0, information, shuffle=False, sample_weight=weights)
        return model.get_weights()

    changed = x.copy()
    changed[5:8] = 100.0
    for a, b in zip(weights_after(x), weights_after(changed)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.in_turns
@pytest.mark.slow_after(2)
@every_optimizer
def test_each_release_has_noise_of_its_own_of_the_size_asked_for(name):
    """Whatever scales gradients before they are clipped must not scale the noise."""
    optimizer = catalogue.make(
        name, l2_norm_clip=0.5, noise_multiplier=1.3, expected_batch_size=8, seed=None
    )
    variables = [tf.Variable(tf.zeros(shape)) for shape in ([60, 50], [3000])]
    optimizer.build(variables)
    for of_side_information in getattr(optimizer, "side_information_state", []):
        for variable in of_side_information:
            variable.assign(tf.fill(variable.shape, tf.cast(4, variable.dtype)))

    @tf.function(autograph=False)
    def step(batch):
        with tf.GradientTape() as tape:
            loss = batch * tf.add_n([tf.reduce_sum(v) for v in variables])
        found = optimizer.compute_gradients(loss, variables, tape)
        optimizer.apply_gradients(found)
        return [tf.convert_to_tensor(g) for g, _ in found]

    clip = 1.0 if name == "UntunedSGD" else 0.5
    releases = [[8 * g.numpy() for g in step(tf.zeros([8]))] for _ in range(3)]
    for release in releases:
        for noise in release:
            assert_gaussian(noise, 1.3 * clip)
        assert_independent(release[0], release[1])
    assert_independent(
        np.concatenate([r.ravel() for r in releases[0]]),
        np.concatenate([r.ravel() for r in releases[1]]),
    )
    assert optimizer.ledger.segments == [(1.3, 8.0, 3)]


@pytest.mark.slow
@each_kind
def test_averaged_weights_are_kept_by_keras(name):
    model = catalogue.mlp()
    arguments = {"use_ema": True, "ema_momentum": 0.5}
    optimizer = catalogue.make(name, **arguments)
    model.compile(optimizer, loss=catalogue.loss())
    catalogue.fit(model)
    plain = trained(name)
    # fit() ends on the average of the points, not on the last one.
    assert np.abs(model.get_weights()[0] - plain.get_weights()[0]).max() > 0
    assert model.optimizer.get_config()["use_ema"] is True


def every_public_optimizer():
    return {
        getattr(package, name)
        for package in (dp.optimizers, dp.optimizers.baselines)
        for name in package.__all__
        if isinstance(getattr(package, name), type)
        and issubclass(getattr(package, name), tf.keras.optimizers.Optimizer)
    }


def test_the_list_holds_every_private_optimizer():
    # Some are in it as subclasses of their own.
    listed = {base for name in OPTIMIZERS for base in type(catalogue.make(name)).__mro__}
    missing = every_public_optimizer() - listed
    assert missing == {dp.optimizers.baselines.AdaS}


def test_each_docstring_is_complete():
    nadam = dp.make_dp_optimizer_class(tf.keras.optimizers.Nadam)
    for optimizer_class in [*every_public_optimizer(), nadam]:
        text = optimizer_class.__doc__
        assert "{{" not in text, optimizer_class
        sections = ["Guarantee: ", "Args:\n", "Raises:\n"]
        if optimizer_class is not nadam:
            sections += ["References:\n", ">>> "]
        if optimizer_class not in (dp.optimizers.baselines.AdaS, dp.UntunedSGD):
            sections += ["\n  l2_norm_clip: C", "\n  seed: "]
        assert not [s for s in sections if s not in text], optimizer_class
        assert max(map(len, text.splitlines())) <= 100, optimizer_class
