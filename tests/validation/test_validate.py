"""Each defect is found with its place and its fix, all at once; what is clean has none."""

import dataclasses
import re
import warnings

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers.zoo import floats
from tests.validation.test_per_example import Dilation
from tf_adaptive_dp._keras.generation import GENERATION
from tf_adaptive_dp.gradients.jacobian import JacobianWarning
from tf_adaptive_dp.validation import argument_findings

layers = tf.keras.layers
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
BATCH = (floats(6, 5), np.arange(6) % 3)


def optimizer(**kwargs):
    return dp.DPSGD(**{"l2_norm_clip": 1.0, "noise_multiplier": 1.0, **kwargs})


def model(*hidden):
    tf.keras.utils.set_random_seed(2)
    return tf.keras.Sequential([tf.keras.Input([5]), layers.Dense(4), *hidden, layers.Dense(3)])


def report(of=None, loss=LOSS, optimizer=None, batch=BATCH, **kwargs):
    optimizer = globals()["optimizer"]() if optimizer is None else optimizer
    of = model() if of is None else of
    return dp.validate(of, batch, loss=loss, optimizer=optimizer, **kwargs)


def kinds(report):
    return {f.kind for f in report.findings}


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_sum(x**2))
        return x


class AddsVector(layers.Layer):
    """As the KL term of a variational autoencoder."""

    def __init__(self, mixes=False, **kwargs):
        super().__init__(**kwargs)
        self.mixes = mixes

    def call(self, x):
        term = tf.reduce_sum(x**2, axis=1)
        self.add_loss(term * tf.reduce_mean(term) if self.mixes else term)
        return x


class Remembers(layers.Layer):
    """Subtracts a moving average that it updates itself."""

    def build(self, shape):
        self.average = self.add_weight(name="average", shape=shape[-1:], trainable=False)

    def call(self, x):
        self.average.assign(0.9 * self.average + 0.1 * tf.reduce_mean(x, axis=0))
        return x - self.average


class Rotates(layers.Layer):
    """A complex variable that is trained."""

    def build(self, shape):
        self.phase = self.add_weight(
            name="phase", shape=[4], dtype=tf.complex64, initializer="ones"
        )

    def call(self, x):
        return tf.math.real(tf.cast(x, tf.complex64) * self.phase)


def adapted():
    normalization = layers.Normalization(name="it")
    normalization.adapt(floats(6, 4))
    return normalization


def wrapped(layer):
    return [layers.Reshape([2, 2]), layers.TimeDistributed(layer, name="each"), layers.Flatten()]


# Name of the layer: "it", or as said.
OF_LAYERS = {
    "BatchNormalization": (
        lambda: [layers.BatchNormalization(name="it")],
        "it",
        "batch statistics",
        "GroupNormalization",
    ),
    "synchronized BatchNormalization": (
        lambda: [layers.BatchNormalization(synchronized=True, name="it")],
        "it",
        "batch statistics",
        "GroupNormalization",
    ),
    "BatchNormalization without scale": (
        lambda: [layers.BatchNormalization(center=False, scale=False, name="it")],
        "it",
        "batch statistics",
        "GroupNormalization",
    ),
    "BatchNormalization in a submodel": (
        lambda: [tf.keras.Sequential([layers.BatchNormalization(name="it")], name="block")],
        "block/it",
        "batch statistics",
        "GroupNormalization",
    ),
    "BatchNormalization in TimeDistributed": (
        lambda: wrapped(layers.BatchNormalization(name="it")),
        "each/it",
        "batch statistics",
        "GroupNormalization",
    ),
    "SpectralNormalization": (
        lambda: [layers.SpectralNormalization(layers.Dense(4), name="it")],
        "it",
        "state",
        "wrapped layer alone",
    ),
    "adapted Normalization": (lambda: [adapted()], "it", "adapted", "public data, or use `plan.n"),
    "softmax over the batch": (
        lambda: [layers.Softmax(axis=0, name="it")],
        "it",
        "mixing",
        "Keep the batch as an axis",
    ),
    "py_function": (
        lambda: [
            layers.Lambda(
                lambda x: tf.ensure_shape(
                    tf.py_function(lambda x: x - tf.reduce_mean(x, 0), [x], tf.float32), [None, 4]
                ),
                name="it",
            )
        ],
        "it",
        "mixing",
        "Keep the batch as an axis",
    ),
    "moving average": (lambda: [Remembers(name="it")], "it", "state", ""),
    "activity_regularizer": (
        lambda: [layers.Dense(4, activity_regularizer="l2", name="it")],
        "it",
        "added loss",
        "one entry per example",
    ),
    "add_loss": (lambda: [AddsLoss(name="it")], "it", "added loss", "one entry per example"),
    "kernel_regularizer": (
        lambda: [layers.Dense(4, kernel_regularizer="l2", name="it")],
        "it",
        "regularizer",
        "weight_decay",
    ),
    "complex variable": (lambda: [Rotates(name="it")], "it", "variables", "real and imaginary"),
}


@pytest.mark.slow
def test_a_vector_that_a_layer_adds_to_the_loss_is_part_of_it():
    weights = np.array([1, 0, 2, 1, 1, 0], "float32")
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loss = loss if GENERATION == 3 else LOSS  # Keras 3 adds up what layers add
    assert report(model(AddsVector()), loss, batch=(*BATCH, weights)).ok
    seen = report(model(AddsVector(mixes=True, name="it")), loss)
    assert {(f.kind, f.where) for f in seen.findings if f.kind == "mixing"} == {("mixing", "it")}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", OF_LAYERS)
def test_what_is_wrong_with_a_layer_is_found(name):
    hidden, where, kind, fix = OF_LAYERS[name]
    seen = report(model(*hidden()))
    found = [f for f in seen.findings if (f.kind, f.where) == (kind, where)]
    assert len(found) == 1 and fix in found[0].fix, seen
    assert seen.ok == (kind == "adapted"), seen


def test_a_refusal_that_names_its_fix_is_not_followed_by_another():
    rooted = report(loss=lambda y, z: tf.sqrt(tf.reduce_mean(squares(y, z))))
    assert "report the root as a metric" in str(rooted)
    assert "Follow the message" not in str(rooted)
    assert not any(line.rstrip().endswith("Fix:") for line in str(rooted).splitlines())


def test_state_between_batches_is_found():
    inputs = tf.keras.Input(batch_shape=[6, 3, 5])
    recurrent = layers.GRU(4, stateful=True, name="memory")
    seen = report(
        tf.keras.Model(inputs, layers.Dense(3)(recurrent(inputs))),
        batch=(floats(6, 3, 5), BATCH[1]),
    )
    assert "stateful=False" in str([f.fix for f in seen.findings if f.where == "memory"])
    assert not seen.ok


def test_a_model_without_trainable_variables_is_found():
    frozen = model()
    frozen.trainable = False
    assert "nothing to train" in str(report(frozen))


def squares(y, z):
    return tf.reduce_sum((floats_of(y)[:, tf.newaxis] - z) ** 2, axis=1)


def floats_of(y):
    return tf.reshape(tf.cast(y, tf.float32), [-1])  # Keras 2 passes labels [B] as [B, 1]


LOSSES = {
    "over the batch": (
        lambda y, z: squares(y, z) * tf.reduce_mean(squares(y, z)),
        "mixes the examples",
        "error",
    ),
    "not a number": (lambda y, z: squares(y, z) / floats_of(y) * 0.0, "0, 3", "error"),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", LOSSES)
def test_what_is_wrong_with_a_loss_is_found(name):
    loss, what, severity = LOSSES[name]
    seen = report(loss=loss)
    assert what in str([f.what for f in seen.findings if f.severity == severity]), seen
    assert seen.ok == (severity == "warning")


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "loss",
    [
        "sparse_categorical_crossentropy",
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"),
        squares,
        lambda y, z: tf.reduce_mean(squares(y, z)),
        lambda y, z: z**2,
    ],
)
def test_a_loss_may_be_reduced_and_regularized(loss):
    hidden = layers.Dense(4, "relu", activity_regularizer="l2", kernel_regularizer="l2")
    seen = report(model(hidden, layers.Dense(3, "softmax")), loss=loss)
    assert seen.ok and not seen.findings, seen


def test_what_is_missing_is_an_error():
    with pytest.raises(ValueError, match="`model` must be compiled, or `loss` and `optimizer`"):
        dp.validate(model(), BATCH)
    with pytest.raises(TypeError, match="takes 2 positional arguments but 4 were given"):
        dp.validate(model(), LOSS, optimizer(), BATCH)


def test_labels_out_of_range_are_found():
    assert "labels out of range" in str(report(batch=(BATCH[0], BATCH[1] + 1)))


OPTIMIZERS = {
    "Keras's own": (lambda: tf.keras.optimizers.SGD(), "adds no noise", "error"),
    "no noise": (lambda: optimizer(noise_multiplier=0.0), "gives no privacy", "error"),
    "loss scaling": (
        lambda: tf.keras.mixed_precision.LossScaleOptimizer(optimizer()),
        "multiplies the loss before",
        "error",
    ),
    "microbatches of random batches": (
        lambda: optimizer(num_microbatches=2, expected_batch_size=6),
        "together with expected_batch_size=6",
        "warning",
    ),
    "microbatches that do not divide": (
        lambda: optimizer(num_microbatches=4),
        "does not divide the batch of 6",
        "error",
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_wrong_with_an_optimizer_is_found(name):
    make, what, severity = OPTIMIZERS[name]
    found = argument_findings.optimizer_findings(make(), 6)
    assert len(found) == 1 and found[0].where == "optimizer", found
    assert what in found[0].what and found[0].severity == severity


def test_clipping_of_released_gradients_is_nothing_wrong():
    for each in (optimizer(clipnorm=1.0), optimizer(global_clipnorm=1.0), optimizer(clipvalue=1.0)):
        assert not argument_findings.optimizer_findings(each, 6)


def test_a_clip_norm_out_of_proportion_is_found():
    seen = report(optimizer=optimizer(l2_norm_clip=1e6))
    assert seen.ok and "more than 100 times the largest gradient" in str(seen)


def with_nan(x):
    x = x.copy()
    x[[1, 4], 0] = np.nan, np.inf
    return x


BATCHES = {
    "NaN": ((with_nan(BATCH[0]), BATCH[1]), "x of examples 1, 4", True),
    "one example": ((BATCH[0][:1], BATCH[1][:1]), "1 examples", False),
    "of two sizes": ((BATCH[0], BATCH[1][:4]), "differ in the size of axis 0", False),
}


@pytest.mark.in_turns
@pytest.mark.parametrize("name", BATCHES)
def test_what_is_wrong_with_a_batch_is_found(name):
    batch, what, ok = BATCHES[name]
    seen = report(batch=batch)
    assert [f.where for f in seen.findings] == ["batch"] and what in seen.findings[0].what, seen
    assert seen.ok == ok


def test_a_batch_that_is_none_is_an_error():
    with pytest.raises(TypeError, match=r"`next\(iter\(dataset\)\)`"):
        report(batch=tf.data.Dataset.from_tensors(BATCH))
    with pytest.raises(TypeError, match=r"`batch` must be \(x, y\).*Received: batch of type str"):
        report(batch="train")
    with pytest.raises(TypeError, match=r"lists of numbers by `numpy.array`. Received: 1.0 in it"):
        report(batch=([[1.0, 2.0]], [0]))


def test_one_problem_is_in_the_singular():
    seen = report(optimizer=tf.keras.optimizers.SGD())
    assert "\n1 error, 0 warnings. Checked with " in str(seen)


def test_several_defects_are_all_reported():
    bad = model(
        layers.Lambda(lambda x: x - tf.reduce_mean(x, 0), name="mean"),
        layers.BatchNormalization(name="norm"),
        layers.Softmax(axis=0, name="soft"),
        layers.Dense(4, activity_regularizer="l2", name="active"),
        layers.Dense(4, kernel_regularizer="l2", name="regular"),
        layers.Lambda(lambda x: tf.sort(x, axis=0), name="sort"),
    )
    seen = report(bad, loss="sparse_categorical_crossentropy", optimizer=tf.keras.optimizers.SGD())
    places = {"mean", "norm", "soft", "sort", "optimizer"}
    assert {f.where for f in seen.findings} == places
    text = str(seen)
    assert text == repr(seen) and "5 errors, 0 warnings. Not run, because the errors" in text
    assert all(f.what in text and f.fix in text for f in seen.findings)
    with pytest.raises(dp.NotPrivateError, match="This model cannot be trained privately yet"):
        seen.raise_errors()


class Residual(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(5, "relu")
        self.norm = layers.BatchNormalization()
        self.top = layers.Dense(3)

    def call(self, x, training=None):
        return self.top(x + self.norm(self.dense(x), training=False))


def attention():
    x = tf.keras.Input([4, 5])
    h = layers.MultiHeadAttention(2, 3)(x, x)
    h = layers.LayerNormalization()(h + x)
    return tf.keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(h)))


def on_sequences(hidden):
    return lambda: tf.keras.Sequential([tf.keras.Input([4, 5]), *hidden(), layers.Dense(3)])


CLEAN = {
    "dense": (lambda: model(layers.LayerNormalization()), BATCH),
    "dropout": (lambda: model(layers.Dropout(0.5), layers.GaussianNoise(0.3)), BATCH),
    "dropout with a seed": (lambda: model(layers.Dropout(0.5, seed=1)), BATCH),
    "frozen BatchNormalization": (lambda: model(layers.BatchNormalization(trainable=False)), BATCH),
    "BatchNormalization on fixed statistics": (Residual, BATCH),
    "GRU": (on_sequences(lambda: [layers.GRU(4)]), (floats(6, 4, 5), BATCH[1])),
    "attention": (attention, (floats(6, 4, 5), BATCH[1])),
    "embeddings": (
        lambda: tf.keras.Sequential(
            [tf.keras.Input([4]), layers.Embedding(9, 5), layers.LSTM(4), layers.Dense(3)]
        ),
        (np.arange(24).reshape(6, 4) % 9, BATCH[1]),
    ),
    "convolutions": (
        lambda: tf.keras.Sequential(
            [
                tf.keras.Input([6, 6, 2]),
                layers.RandomFlip(),
                layers.Conv2D(8, 3),
                layers.GroupNormalization(4),
                layers.GlobalMaxPooling2D(),
                layers.Dense(3),
            ]
        ),
        (floats(6, 6, 6, 2), BATCH[1]),
    ),
    "sample weights": (model, (*BATCH, np.linspace(0, 1, 6).astype("float32"))),
}


SLOW = {"attention", "embeddings", "convolutions"}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CLEAN]
)
def test_a_clean_model_has_no_findings(name):
    make, batch = CLEAN[name]
    seen = report(make(), batch=batch)
    assert seen.ok and not seen.findings, seen
    assert "gradients of 4 examples match" in seen.probed


def test_nothing_is_changed_by_looking():
    tf.random.set_seed(5)
    expected = tf.random.normal([2]).numpy()
    looked_at = model(layers.BatchNormalization(), layers.Dropout(0.5), Remembers())
    before = [w.copy() for w in looked_at.get_weights()]
    private = optimizer()
    num_variables = len(private.variables)
    tf.random.set_seed(5)
    first = report(looked_at, optimizer=private)
    np.testing.assert_array_equal(expected, tf.random.normal([2]).numpy())
    for old, new in zip(before, looked_at.get_weights()):
        np.testing.assert_array_equal(old, new)
    assert private.ledger.num_releases == 0 and len(private.variables) == num_variables
    assert str(first) == str(report(looked_at, optimizer=private))


class OneNumber(tf.keras.Model):
    """Reduces its loss itself, as Keras's own `compute_loss` does."""

    centered = False

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        y_pred -= tf.reduce_mean(y_pred, 0) if self.centered else 0.0
        return tf.reduce_mean(self.loss(y, y_pred)) + tf.add_n(self.losses)


@pytest.mark.slow
def test_a_models_own_loss_may_be_one_number():
    inputs = tf.keras.Input([5])
    reduced = OneNumber(inputs, layers.Dense(3, kernel_regularizer="l2")(inputs))
    private = optimizer()
    reduced.compile(private, LOSS)
    clean = report(reduced)
    assert clean.ok and not clean.findings and "match those of batches of one" in clean.probed, (
        clean
    )
    reduced.fit(*BATCH, verbose=0)
    assert private.ledger.num_releases == 1
    reduced.centered = True
    assert "mixing" in kinds(report(reduced))


def test_the_states_of_recurrent_layers_are_put_back():
    recurrent = layers.SimpleRNN(3, stateful=True)
    looked_at = tf.keras.Sequential(
        [tf.keras.Input(batch_shape=[6, 2, 5]), recurrent, layers.Dense(3)]
    )
    (state,) = recurrent.states
    state.assign(tf.fill([6, 3], 0.5))
    seen = report(looked_at, batch=(floats(6, 2, 5), BATCH[1]))
    assert "state" in kinds(seen)
    np.testing.assert_array_equal(state.numpy(), np.full([6, 3], 0.5))


@pytest.mark.slow
def test_a_model_with_its_own_loss_is_searched_with_it():
    class Own(tf.keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            return self.loss(y, y_pred, sample_weight) + tf.add_n(self.losses)

    def own(**kwargs):
        inputs = tf.keras.Input([5])
        return Own(inputs, layers.Dense(3, **kwargs)(inputs))

    regularized = own(kernel_regularizer="l2")
    assert "Call `model.compile` before" in str(report(regularized))
    regularized.compile(optimizer(), LOSS)
    assert not report(regularized).findings
    active = own(activity_regularizer="l2")
    active.compile(optimizer(), LOSS)
    assert "mixing" in kinds(report(active))


@pytest.mark.slow
def test_a_loss_that_counts_the_batch_is_wrong_for_random_batches_only():
    def shared(y, z):
        return squares(y, z) / tf.cast(tf.shape(z)[0], tf.float32)

    fixed = report(loss=shared)
    assert "batch size" in kinds(fixed) and fixed.ok
    random = report(loss=shared, optimizer=optimizer(expected_batch_size=6.0))
    assert random.ok and "which is not public here" in str(random)  # in batches of unknown size


def jacobians_announced(of):
    """What `validate` finds on Jacobians, and the warnings of two epochs of `fit` after it."""
    of.compile(optimizer(), LOSS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = dp.validate(of, BATCH)
        assert not [w for w in caught if isinstance(w.message, JacobianWarning)], "announced twice"
        of.fit(*BATCH, batch_size=3, epochs=2, verbose=0)
    assert seen.ok and of.optimizer.ledger.num_releases == 4
    found = [f for f in seen.findings if f.kind == "Jacobian"]
    announced = [w for w in caught if isinstance(w.message, JacobianWarning)]
    assert {w.filename for w in announced} <= {__file__}, "a warning names the line of `fit`"
    return found, [w.message for w in announced]


@pytest.mark.slow_on(2)
def test_a_jacobian_is_announced_once_with_its_price():
    dilated = model(Dilation(500, name="it"), layers.Dense(2))
    (found,), (warned,) = jacobians_announced(dilated)
    assert (found.where, found.severity) == ("it", "warning") and "it/filter" in found.what
    price = "6 backward passes in place of one, and 6 x 500 numbers in memory, 12 kB for a batch of"
    assert price in found.what
    assert float(re.search(r"batch took ([\d.]+) times as long", found.what)[1]) > 0
    assert [v.shape for v in warned.variables] == [[500, 1, 1]]
    assert "it/filter, read by Dilation2D in layer" in str(warned)


@pytest.mark.slow
def test_no_jacobian_is_announced_where_rules_cover_all():
    assert jacobians_announced(model(layers.LayerNormalization())) == ([], [])


def test_the_report_says_what_it_is():
    clean = report()
    assert "This model is ready for private training." in str(clean)
    assert dataclasses.is_dataclass(clean) and clean.repaired == ()
    clean.raise_errors()


def test_of_two_layers_with_like_names_the_one_that_mixes_is_named():
    layers = tf.keras.layers
    hidden = [layers.Softmax(axis=0, name="soft"), layers.Softmax(name="soft_1")]
    model = tf.keras.Sequential([tf.keras.Input([5]), *hidden, layers.Dense(3)])
    model.compile(dp.DPSGD(1.0, 1.0), tf.keras.losses.SparseCategoricalCrossentropy(True))
    report = dp.validate(model, (np.ones([6, 5], "float32"), np.arange(6) % 3))
    assert [f.where for f in report.errors] == ["soft"]
