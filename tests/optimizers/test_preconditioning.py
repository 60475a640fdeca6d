"""Side information in every optimizer: what is scaled, what is refused, and training without."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tf_adaptive_dp._keras.generation import GENERATION
from tf_adaptive_dp.side_information.provenance import SideInformation


def fixed(values=2.0):
    return dp.side_information.FixedPreconditioner(lambda v: values, provenance="public")


def with_penalty(optimizer):
    """One step of a model whose loss has a term ‖w‖² that no example owns."""
    w = tf.Variable([1.0, 2.0])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(tf.ones([4, 2]), w) + tf.reduce_sum(w**2)
        optimizer.minimize(loss, [w], tape)

    step()
    return w.numpy()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("order", ["precondition_first", "noise_first"])
def test_terms_that_no_example_owns_are_preconditioned_as_gradients_are(order):
    # Else the objective would be another one. Clipped to nearly nothing, only the penalty is left.
    clip = {"l2_norm_clip": 1e-9, "noise_multiplier": 0.0, "learning_rate": 0.1}
    a = np.array([2.0, 4.0])
    adadps = dp.AdaDPS(fixed(a), **clip, order=order)
    np.testing.assert_allclose(with_penalty(adadps), [1 - 0.2 / 2, 2 - 0.4 / 4], rtol=1e-6)
    np.testing.assert_allclose(with_penalty(dp.DPSGD(**clip)), [0.8, 1.6], rtol=1e-6)


@pytest.mark.parametrize("order", ["precondition_first", "noise_first"])
def test_the_order_decides_where_the_noise_is_scaled(order):
    size = 20_000
    w = tf.Variable(tf.zeros([size]))
    optimizer = dp.AdaDPS(fixed(4.0), 1.0, 2.0, learning_rate=1.0, order=order)
    with tf.GradientTape() as tape:
        loss = tf.zeros([8]) * tf.reduce_sum(w)
    optimizer.minimize(loss, [w], tape)
    expected = 2.0 / 8 / (4.0 if order == "noise_first" else 1.0)
    assert np.std(w.numpy()) == pytest.approx(expected, rel=0.05)
    assert optimizer.ledger.segments == [(2.0, 8.0, 1)]


def test_a_schedule_as_mixing_is_saved_with_the_optimizer():
    public = dp.side_information.PublicGradients(None, rule="gradient", provenance="public")
    for mixing in (
        0.5,
        dp.optimizers.baselines.CosineMixing(9),
        tf.keras.optimizers.schedules.CosineDecay(1.0, 9),
    ):
        config = dp.optimizers.baselines.PDADPMD(public, 1.0, 1.0, mixing=mixing).get_config()
        again = dp.optimizers.baselines.PDADPMD.from_config(config)
        assert again.get_config() == config
        assert type(again.mixing) is type(mixing)


def test_a_configuration_from_before_side_information_still_loads():
    config = dp.DPSGD(1.0, 1.0).get_config()
    assert config.pop("side_information") is None
    assert dp.DPSGD.from_config(config).side_information is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DPRPub", "DPAdamPub", "PDADPMD"])
def test_baselines_with_public_data_take_the_step_of_a_single_device(name):
    def weights(strategy):
        with strategy.scope():
            model = catalogue.mlp()
            optimizer = catalogue.make(name, noise_multiplier=0.0)
            model.compile(optimizer, loss=catalogue.loss())
        catalogue.fit(model)
        return model.get_weights()

    for a, b in zip(weights(catalogue.mirrored()), weights(tf.distribute.get_strategy())):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_warm_start_keeps_the_weights_and_counts_the_private_part_only():
    model = catalogue.mlp()
    scalar = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.SGD(0.1), loss=scalar)
    model.fit(catalogue.PUBLIC, epochs=2, verbose=0)
    warm = model.get_weights()
    assert np.abs(warm[0] - catalogue.mlp().get_weights()[0]).max() > 0
    model.compile(dp.DPSGD(1.0, 1.0, learning_rate=0.1, seed=1), loss=catalogue.loss())
    for a, b in zip(model.get_weights(), warm):
        np.testing.assert_array_equal(a, b)
    assert model.optimizer.ledger.num_releases == 0
    catalogue.fit(model)
    assert model.optimizer.ledger.segments == [(1.0, 8.0, 4)]
    assert 0 < np.abs(model.get_weights()[0] - warm[0]).max() < 1


def adas(information=None, **kwargs):
    model = catalogue.mlp()
    model.compile(
        dp.optimizers.baselines.AdaS(information or fixed(), 0.1), loss=catalogue.loss(), **kwargs
    )
    return model


@pytest.mark.parametrize("callback", [dp.PrivacyMonitor(32, 1e-3), dp.PrivacyBudget(1.0, 1e-3, 32)])
def test_adas_says_that_it_is_not_private(callback):
    model = adas()
    assert (
        "NO PRIVACY" in dp.optimizers.baselines.AdaS.__doc__
        and "not_private" in model.optimizer.name
    )
    with pytest.raises(TypeError, match="optimizer of tf_adaptive_dp.*gives no privacy"):
        catalogue.fit(model, callbacks=[callback])


def test_adas_neither_clips_nor_adds_noise():
    # A gradient of any size counts in full, and the same step comes out twice.
    def step(x):
        w, optimizer = tf.Variable([1.0, 2.0]), dp.optimizers.baselines.AdaS(fixed(), 0.1)
        optimizer.minimize(lambda: tf.linalg.matvec(tf.constant(x), w), lambda: [w])
        return w.numpy()

    x = [[1e6, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    np.testing.assert_allclose(step(x), [1 - 0.1 * 1e6 / 4 / 2, 2 - 0.1 / 4 / 2], rtol=1e-6)
    np.testing.assert_array_equal(step(x), step(x))


def with_tape(optimizer, model, x, y):
    with tf.GradientTape() as tape:
        loss = catalogue.loss()(y, model(x))
    optimizer.minimize(loss, model.trainable_variables, tape)


@pytest.mark.parametrize("wrap", [lambda step: step, tf.function], ids=["eager", "function"])
def test_adas_takes_the_same_step_in_a_loop_as_in_fit(wrap):
    x, y = catalogue.data()
    fitted, looped = adas(), adas()
    looped.set_weights(fitted.get_weights())
    fitted.fit(x, y, len(x), 2, 0)
    wrapped = wrap(lambda: with_tape(looped.optimizer, looped, x, y))
    for _ in range(2):
        wrapped()
    assert int(looped.optimizer.iterations) == 2
    for a, b in zip(looped.get_weights(), fitted.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_adas_needs_the_tape_of_a_loss():
    w, optimizer = tf.Variable([1.0, 2.0]), dp.optimizers.baselines.AdaS(fixed(), 0.1)
    with pytest.raises(ValueError, match="`tape` must be the tape that recorded `loss`"):
        optimizer.minimize(tf.reduce_sum(w), [w])


def test_adas_trains_embeddings_and_on_several_replicas():
    def trained(strategy):
        with strategy.scope():
            tf.keras.utils.set_random_seed(2)
            model = tf.keras.Sequential(
                [tf.keras.layers.Embedding(7, 3, input_length=4), tf.keras.layers.Flatten()]
            )
            model.compile(dp.optimizers.baselines.AdaS(fixed(), 0.5), loss=catalogue.loss())
        x = np.arange(32).reshape(8, 4) % 7
        model.fit(x, np.arange(8) % 12, 8, 2, 0)
        return model.get_weights()[0]

    one = trained(tf.distribute.get_strategy())
    np.testing.assert_allclose(trained(catalogue.mirrored()), one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_adas_is_saved_and_loaded(suffix, tmp_path):
    model = adas(dp.side_information.PublicGradients(catalogue.PUBLIC, provenance="public"))
    catalogue.fit(model)
    model.save(tmp_path / f"m{suffix}")
    loaded = tf.keras.models.load_model(tmp_path / f"m{suffix}")
    assert type(loaded.optimizer) is dp.optimizers.baselines.AdaS
    if GENERATION == 2 or suffix == ".keras":
        for a, b in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())
    else:
        assert int(loaded.optimizer.iterations) == 0  # Keras 3 restores no state from this format
    for information in catalogue.callbacks_of(loaded.optimizer):
        information.dataset = catalogue.PUBLIC
    before = loaded.get_weights()
    catalogue.fit(loaded)
    assert all(np.abs(a - b).max() > 0 for a, b in zip(loaded.get_weights(), before))


class Shift(SideInformation):
    """Adds a public constant to each entry of a gradient."""

    provenance = "public"
    description = "a shift"

    def __init__(self, shift):
        self.shift = shift

    def build(self, variables, add_slot):
        return [[]]

    def scale_and_shift(self, state, indices):
        return [tf.ones([]) for _ in indices], [tf.constant(self.shift) for _ in indices]

    def get_config(self):
        return {"shift": self.shift}


@pytest.mark.parametrize("provenance", [None, "private", "released", 1, ["public"]])
def test_side_information_of_ones_own_must_state_its_provenance(provenance):
    """Its epsilon left out what the provenance would have said."""
    information = Shift(1.0)
    information.provenance = provenance
    with pytest.raises(dp.NotPrivateError, match="`provenance` must say where"):
        dp.AdaDPS(information, 1.0, 1.0)


def test_the_provenance_of_what_an_optimizer_released_is_its_ledger():
    information = Shift(1.0)
    information.provenance, information.learns = "released", True
    assert dp.AdaDPS(information, 1.0, 1.0).side_information is information


USES = {
    "sum": lambda x, w: tf.reduce_sum(x * w, [1, 2]),
    "products": lambda x, w: tf.reduce_sum(
        tf.matmul(tf.eye(4, batch_shape=tf.shape(x)[:1]) + 0.0 * x, w) * x, [1, 2]
    ),
}


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(4)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("gradients", ["auto", "materialized"])
@pytest.mark.parametrize("shift, clip", [(1e7, 1.0), (1e8, 1.0), (1e4, 1e-4)])
def test_an_example_that_a_shift_cancels_moves_the_sum_by_no_more_than_the_clip(
    shift, clip, gradients, use
):
    """Its norm was 0, so that it was added as it is: rounding moved the sum by up to 37 C."""

    def sum_of(x):
        w = tf.Variable(tf.zeros([4, 4]))
        optimizer = dp.AdaDPS(
            Shift(-shift), clip, 0.0, expected_batch_size=1, learning_rate=1.0, gradients=gradients
        )

        @tf.function(input_signature=[tf.TensorSpec([None, 4, 4])])
        def step(x):
            with tf.GradientTape() as tape:
                losses = USES[use](x, w)
            optimizer.minimize(losses, [w], tape)

        step(x)
        return -w.numpy().astype("float64")

    others = shift * np.random.default_rng(0).uniform(0.5, 2, [40, 4, 4]).astype("float32")
    cancelled = np.full([1, 4, 4], shift, "float32")
    moved = sum_of(np.concatenate([others, cancelled])) - sum_of(others)
    assert np.linalg.norm(moved) <= 1.001 * clip
