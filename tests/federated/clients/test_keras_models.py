"""Compiled models of Keras train as TFF's own wrapping of the same model does."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tf_adaptive_dp
from federated.clients.keras_models import with_tff_models
from federated.privacy.user_level import UserLevelPrivacy
from federated.training.processes import build_adaptive_fed_avg, build_dp_fed_avg

SPEC = (tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None], tf.int32))
SGD = tff.learning.optimizers.build_sgdm(0.1)


def layers(units=4, **options):
    return tf.keras.Sequential(
        [tf.keras.Input([3]), tf.keras.layers.Dense(units, kernel_initializer="ones", **options)]
    )


def one_output():
    return layers(1)


def functional(units=4):
    x = tf.keras.Input([3])
    hidden = tf.keras.layers.Dense(2, kernel_initializer="ones", kernel_regularizer="l2")(x)
    return tf.keras.Model(x, tf.keras.layers.Dense(units, kernel_initializer="ones")(hidden))


def compiled(make=layers, **options):
    def model_fn():
        model = make()
        model.compile(**options)
        return model

    return model_fn


def converted(model_fn, spec=SPEC):
    return with_tff_models(model_fn, spec)()


@pytest.fixture(scope="module")
def clients():
    rng = np.random.default_rng(0)
    return [
        tf.data.Dataset.from_tensor_slices(
            (rng.normal(size=[n, 3]).astype(np.float32), rng.integers(0, 4, n, np.int32))
        ).batch(2)
        for n in (4, 3)
    ]


def round_of(model_fn, clients, **options):
    process = build_adaptive_fed_avg(model_fn, SGD, **options)
    output = process.next(process.initialize(), clients)
    return process.get_model_weights(output.state), output.metrics["client_work"]["train"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("make", [layers, functional])
def test_rounds_equal_those_of_tffs_wrapping(context, clients, make):
    def wrapped():
        return tff.learning.models.from_keras_model(
            make(),
            tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            SPEC,
            metrics=[tf.keras.metrics.SparseCategoricalAccuracy("accuracy")],
        )

    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    ours = compiled(make, loss=loss, metrics=["accuracy"])
    expected, figures = round_of(wrapped, clients)
    found, same = round_of(ours, clients, input_spec=SPEC)
    for a, b in zip(expected.trainable, found.trainable):
        np.testing.assert_array_equal(a, b)
    assert dict(figures) == dict(same) and "accuracy" in same


@pytest.mark.slow
def test_a_private_process_takes_a_compiled_model(context, clients):
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    process = build_dp_fed_avg(
        compiled(loss=loss), SGD, UserLevelPrivacy(1.0, 2, 4, clip=1.0), input_spec=SPEC
    )
    state = process.next(process.initialize(), clients).state
    assert [w.shape for w in process.get_model_weights(state).trainable] == [(3, 4), (4,)]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("sparse_categorical_crossentropy", tf.keras.losses.SparseCategoricalCrossentropy()),
        ("mse", tf.keras.losses.MeanSquaredError()),
        ("MeanSquaredError", tf.keras.losses.MeanSquaredError()),
        (tf.keras.losses.Huber(2.0), tf.keras.losses.Huber(2.0)),
        (lambda y, p: tf.square(y - p[:, 0]), None),
    ],
    ids=["sparse", "mse", "MeanSquaredError", "object", "function"],
)
def test_losses_by_name_object_or_function(loss, expected):
    spec = (SPEC[0], tf.TensorSpec([None], tf.float32))
    x, y = np.ones([2, 3], np.float32), np.array([0.0, 1.0], np.float32)
    units = 2 if loss == "sparse_categorical_crossentropy" else 1
    model = with_tff_models(compiled(lambda: layers(units), loss=loss), spec)()
    output = model.forward_pass((x, y))
    predictions = output.predictions
    if expected is None:
        wanted = np.mean((y - predictions[:, 0]) ** 2)
    else:
        wanted = expected(y, predictions)
    np.testing.assert_allclose(output.loss, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("units", "labels", "metric", "kind"),
    [
        (4, [None], "accuracy", "SparseCategoricalAccuracy"),
        (4, [None, 1], "acc", "SparseCategoricalAccuracy"),
        (4, [None, 4], "accuracy", "CategoricalAccuracy"),
        (1, [None], "accuracy", "BinaryAccuracy"),
        (1, [None, 1], "crossentropy", "BinaryCrossentropy"),
        (1, [None], "mae", "MeanAbsoluteError"),
        (1, [None], tf.keras.metrics.AUC(num_thresholds=7, name="area"), "AUC"),
    ],
)
def test_metrics_are_those_that_keras_takes(units, labels, metric, kind):
    spec = (SPEC[0], tf.TensorSpec(labels, tf.float32))
    loss = {"SparseCategoricalAccuracy": "sparse_categorical_crossentropy"}.get(kind, "mse")
    make = compiled(lambda: layers(units), loss=loss, metrics=[metric])
    model = with_tff_models(make, spec)()
    by_name = dict(zip(model.metric_finalizers(), model._metrics))
    name = metric if isinstance(metric, str) else "area"
    assert type(by_name[name]).__name__ == kind
    assert getattr(by_name[name], "num_thresholds", 7) == 7
    # Keras itself computes the same from the same predictions.
    keras = make()
    x = np.random.default_rng(0).normal(size=[8, 3]).astype(np.float32)
    y = (x[:, :1] > 0).astype(np.float32)
    if len(labels) == 1:
        y = y[:, 0]
    elif labels[-1] == 4:
        y = np.eye(4, dtype=np.float32)[y[:, 0].astype(int)]
    model.forward_pass((x, y), training=False)
    expected = keras.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)[name]
    np.testing.assert_allclose(by_name[name].result(), expected, rtol=1e-5)


def test_several_outputs_keep_their_losses_and_weights():
    def make():
        x = tf.keras.Input([3])
        parts = [tf.keras.layers.Dense(1, name=n, kernel_initializer="ones")(x) for n in "ab"]
        return tf.keras.Model(x, parts)

    spec = (SPEC[0], [tf.TensorSpec([None, 1])] * 2)
    x, y = np.ones([2, 3], np.float32), [np.zeros([2, 1], np.float32)] * 2
    for options, expected in (
        ({"loss": "mse"}, 9 + 9),
        ({"loss": {"a": "mse", "b": "mae"}, "loss_weights": {"a": 2.0, "b": 0.5}}, 18 + 1.5),
    ):
        model = with_tff_models(compiled(make, **options), spec)()
        np.testing.assert_allclose(model.forward_pass((x, y)).loss, expected)


LABEL_AND_PIXELS = {"label": SPEC[1], "pixels": SPEC[0]}
CLIENT_DATA = tff.simulation.datasets.TestClientData({"a": (np.ones([2, 3]),)})


def mean(labels, predictions):
    return tf.reduce_mean(predictions)


def functional_model():
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return tff.learning.models.functional_model_from_keras(layers(), loss, SPEC)


class Subclass(tf.keras.Model):
    def call(self, x):
        return x


class WithLoss(tf.keras.layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_mean(x))
        return x


def with_a_loss_of_a_batch():
    return tf.keras.Sequential([tf.keras.Input([3]), WithLoss(), tf.keras.layers.Dense(1)])


def with_a_loss_of_its_own():
    model = layers(1)
    model.add_loss(lambda: tf.reduce_sum(model.weights[0]))
    return model


def with_spectral_normalization():
    layer = tf.keras.layers.SpectralNormalization(tf.keras.layers.Dense(2), name="bounded")
    return tf.keras.Sequential([tf.keras.Input([3]), layer])


@tf.keras.saving.register_keras_serializable("test_keras_models")
class Late(tf.keras.metrics.Metric):
    """A metric that creates its variable with the first batch."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        if not self.weights:
            self.add_weight("count", initializer="zeros")
        self.weights[0].assign_add(1.0)

    def result(self):
        return tf.identity(self.weights[0])


@tf.keras.saving.register_keras_serializable("test_keras_models")
class InSession(tf.keras.metrics.MeanAbsoluteError):
    """A metric whose state Keras resets in a session."""

    def reset_state(self):
        for variable in self.variables:
            tf.keras.backend.set_value(variable, 0.0)


@pytest.mark.parametrize(
    ("model_fn", "spec", "error", "message"),
    [
        (
            compiled(with_spectral_normalization, loss="mse"),
            SPEC,
            TypeError,
            "decide nothing by the value.*the layer 'bounded', a `SpectralNormalization`",
        ),
        (
            compiled(one_output, loss="mse", metrics=[Late("late")]),
            SPEC,
            TypeError,
            "first batch.* late$",
        ),
        (
            compiled(one_output, loss="mse", metrics=[InSession("slow")]),
            SPEC,
            TypeError,
            "must reset their state by.*the metric 'slow', a `InSession`",
        ),
        (compiled(loss="mse"), None, TypeError, "Pass `input_spec=client_data.element_type_str"),
        (compiled(loss="mse"), SPEC[:1], ValueError, "`input_spec` must have two parts"),
        (compiled(loss="mse"), (*SPEC, SPEC[1]), ValueError, "no sample weights: make each a part"),
        (compiled(loss="mse"), [*SPEC], TypeError, r"`element_spec` .* a tuple .*Received: .*\["),
        (compiled(loss="mse"), CLIENT_DATA, TypeError, "`client_data.element_type_structure` of a"),
        (compiled(loss="mse"), LABEL_AND_PIXELS, ValueError, "two parts, x and y. .*dataset.map"),
        (compiled(), SPEC, ValueError, "must be compiled with a loss"),
        (compiled(Subclass, loss="mse"), SPEC, TypeError, "does not state its inputs"),
        (compiled(with_a_loss_of_its_own, loss="mse"), SPEC, TypeError, "call `add_loss` in"),
        (
            compiled(lambda: layers(1, activity_regularizer="l1"), loss="mse"),
            SPEC,
            TypeError,
            "leave out `activity_regularizer` .* Received: .*ActivityRegularizer",
        ),
        (compiled(with_a_loss_of_a_batch, loss="mse"), SPEC, TypeError, "in the `call` of a layer"),
        (compiled(loss="mse", weighted_metrics=["mae"]), SPEC, ValueError, "weighted_metrics"),
        (compiled(loss="mse", loss_weights=[2.0]), SPEC, ValueError, "loss_weights"),
        (compiled(loss="mse", metrics=[len]), SPEC, ValueError, "metrics .* must be names"),
        (
            compiled(loss="mse", metrics=[lambda y, p: p]),
            SPEC,
            ValueError,
            "names or objects of .* not compiled. Received: a lambda$",
        ),
        (compiled(loss="mse", metrics=[mean]), SPEC, ValueError, "Received: the function 'mean'$"),
        (functional_model, None, TypeError, "`model_fn` must be the .* itself.*pass what it ret"),
        (compiled(loss="mse", metrics={"dense": "mae"}), SPEC, ValueError, "must be names"),
        (
            compiled(loss="mse"),
            (tf.TensorSpec([None, 5]), SPEC[1]),
            ValueError,
            r"batches of `input_spec`.*expected shape=\(None, 3\), found shape=\(None, 5\)",
        ),
        (
            compiled(loss="mse"),
            (tf.TensorSpec([3]), tf.TensorSpec([], tf.int32)),
            ValueError,
            r"`client_data.preprocess\(lambda dataset: dataset.batch.*found ndim=1",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused_with_a_cure(model_fn, spec, error, message):
    with pytest.raises(error, match=message):
        converted(model_fn, spec)


@pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", "categorical_crossentropy"])
@pytest.mark.parametrize("names", [None, ["x", "y"]])
def test_labels_in_another_form_than_the_loss_takes_are_refused(loss, names):
    numbers, one_hot = SPEC, (SPEC[0], tf.TensorSpec([None, 4], tf.float32))
    fits, other = (numbers, one_hot) if loss.startswith("sparse") else (one_hot, numbers)
    if names:
        fits, other = (dict(zip(names, spec)) for spec in (fits, other))
    assert converted(compiled(loss=loss), fits)
    with pytest.raises(ValueError, match="Labels in one-hot form need a loss that is not sparse"):
        converted(compiled(loss=loss), other)


def test_a_model_may_compute_in_bfloat16():
    dtype = tf.keras.mixed_precision.Policy("mixed_bfloat16")
    model = converted(compiled(lambda: layers(1, dtype=dtype), loss="mse"))
    assert model.forward_pass((np.ones([2, 3], np.float32), np.zeros(2, np.int32))).loss == 9.0


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_private_weights_of_other_types_are_refused_with_a_cure(dtype):
    made = compiled(lambda: layers(dtype=dtype), loss="sparse_categorical_crossentropy")
    privacy = UserLevelPrivacy(1.0, 2, 4, clip=1.0)
    with pytest.raises(TypeError, match=f"Build the model with float32 weights.*{dtype}"):
        build_dp_fed_avg(made, SGD, privacy, input_spec=SPEC)


def test_an_optimizer_of_ours_in_the_model_is_refused():
    def model_fn():
        model = layers(1)
        model.compile(tf_adaptive_dp.ADADP(1.0, 1.0), "mse")
        return model

    with pytest.raises(TypeError, match="clients train with `client_optimizer`"):
        converted(model_fn)


def test_what_is_no_compiled_model_is_left_as_it_is():
    model = layers()
    assert with_tff_models(model, SPEC) is model
    assert with_tff_models(None) is None
    assert with_tff_models(lambda: 7)() == 7
    assert with_tff_models(lambda: model)() is model  # not compiled: `made_model` refuses it
    once = with_tff_models(compiled(one_output, loss="mse"), SPEC)
    assert with_tff_models(once) is once


def test_the_weights_of_the_model_are_those_that_the_server_begins_with(context):
    rng = np.random.default_rng(0)
    loaded = [rng.normal(size=[3, 4]).astype(np.float32), np.ones([4], np.float32)]

    def model_fn():
        model = layers()
        model.set_weights(loaded)
        model.compile(loss="sparse_categorical_crossentropy")
        return model

    process = build_adaptive_fed_avg(model_fn, SGD, input_spec=SPEC)
    for found, expected in zip(process.get_model_weights(process.initialize()).trainable, loaded):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("optimizer", [tf.keras.optimizers.Adam, tf.keras.optimizers.legacy.Adam])
def test_a_model_may_be_compiled_with_an_optimizer_object(optimizer):
    model = converted(compiled(one_output, optimizer=optimizer(1e-3), loss="mse", metrics=["mae"]))
    assert "mae" in model.metric_finalizers()


def normalizing(**options):
    inner = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Normalization(**options)])
    if not options:
        inner.layers[0].adapt(np.random.default_rng(0).normal(1000.0, 50.0, [99, 3]))
    return tf.keras.Sequential([tf.keras.Input([3]), inner, layers(1).layers[0]])


@pytest.mark.parametrize("options", [{}, {"mean": 1000.0, "variance": 2500.0}], ids=["adapted", ""])
def test_clients_normalize_as_the_model_was_adapted(context, options):
    """Also inside of another model. `tff.learning` gives the copy its weights, as here."""
    made = []

    def model_fn():
        made.append(compiled(lambda: normalizing(**options), loss="mse")())
        return made[-1]

    model = with_tff_models(model_fn, SPEC)()
    tff.learning.models.ModelWeights.from_model(made[0]).assign_weights_to(model)
    x = np.random.default_rng(1).normal(1000.0, 50.0, [8, 3]).astype(np.float32)
    expected = made[0].predict(x, verbose=0)
    assert np.abs(expected).max() < 20  # without the adapted mean it is above 1000
    np.testing.assert_allclose(model.predict_on_batch(x, training=False), expected, rtol=1e-5)


class Offset(tf.keras.layers.Layer):
    """Keeps what it learned outside of its weights and its configuration."""

    offset = 0.0

    def call(self, x):
        return x + self.offset


class Noisy(tf.keras.layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


def with_a_layer(layer, **attributes):
    def make():
        made = layer()
        for name, value in attributes.items():
            setattr(made, name, value)
        return tf.keras.Sequential([tf.keras.Input([3]), made, layers(1).layers[0]])

    return compiled(make, loss="mse")


def test_a_layer_that_a_copy_does_not_equal_is_refused():
    with pytest.raises(TypeError, match="Let `get_config.*` of that layer return it"):
        converted(with_a_layer(Offset, offset=3.0))
    converted(with_a_layer(Offset))
    converted(with_a_layer(Noisy))  # two calls of the model itself differ


def words(**options):
    def make():
        x = tf.keras.Input([1], dtype=tf.string)
        lookup = tf.keras.layers.StringLookup(**options)
        if not options:
            lookup.adapt(np.array(["a", "b"]))
        embedded = tf.keras.layers.Embedding(4, 2)(lookup(x))
        return tf.keras.Model(x, tf.keras.layers.Dense(1)(tf.keras.layers.Flatten()(embedded)))

    return compiled(make, loss="mse")


def bins(**options):
    def make():
        layer = tf.keras.layers.Discretization(**options)
        if "num_bins" in options:
            layer.adapt(np.random.default_rng(0).normal(size=[50, 3]))
        x = tf.keras.Input([3])
        return tf.keras.Model(x, tf.keras.layers.CategoryEncoding(5, "multi_hot")(layer(x)))

    return compiled(make, loss="mse")


def test_adapted_layers_whose_settings_say_nothing_of_it_are_refused_with_a_cure():
    spec = (tf.TensorSpec([None, 1], tf.string), tf.TensorSpec([None, 1]))
    with pytest.raises(TypeError, match="`StringLookup` must be made with `vocabulary=`"):
        converted(words(), spec)
    converted(words(vocabulary=["a", "b"]), spec)
    with pytest.raises(TypeError, match="`Discretization` must be made with `bin_boundaries=`"):
        converted(bins(num_bins=4), (SPEC[0], tf.TensorSpec([None, 5])))
    converted(bins(bin_boundaries=[-1.0, 0.0, 1.0]), (SPEC[0], tf.TensorSpec([None, 5])))


def encoded(layer):
    def make():
        x = tf.keras.Input([1], dtype=tf.string)
        return tf.keras.Model(x, tf.keras.layers.Dense(1)(layer(x)))

    return compiled(make, loss="mse")


def test_lookups_that_no_client_can_make_are_refused_with_a_cure():
    spec = (tf.TensorSpec([None, 1], tf.string), tf.TensorSpec([None, 1]))
    text = tf.keras.layers.TextVectorization(vocabulary=["a"], output_mode="multi_hot")
    with pytest.raises(TypeError, match="Split texts .* take a `StringLookup"):
        converted(encoded(text), spec)
    one_hot = {"vocabulary": ["a", "b"], "output_mode": "one_hot"}
    with pytest.raises(TypeError, match="`max_tokens` .* `CategoryEncoding` next.*'one_hot'"):
        converted(encoded(tf.keras.layers.StringLookup(**one_hot)), spec)
    padded = tf.keras.layers.StringLookup(**one_hot, max_tokens=3, pad_to_max_tokens=True)
    converted(encoded(padded), spec)
    made, encoding = tf.keras.layers.StringLookup, tf.keras.layers.CategoryEncoding(3, "one_hot")
    converted(encoded(tf.keras.Sequential([made(vocabulary=["a", "b"]), encoding])), spec)


TWO_LABELS = (SPEC[0], (tf.TensorSpec([None, 2]), tf.TensorSpec([None, 3])))


def two_outputs():
    x = tf.keras.Input([3])
    a = tf.keras.layers.Dense(2, name="a", activation="softmax")(x)
    return tf.keras.Model(x, [a, tf.keras.layers.Dense(3, name="b", activation="softmax")(x)])


def of_two_outputs(metrics):
    """A compiled model, a batch for it, and what Keras computes from both."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=[8, 3]).astype(np.float32)
    y = tuple(np.eye(n, dtype=np.float32)[rng.integers(0, n, 8)] for n in (2, 3))
    model = compiled(two_outputs, loss="categorical_crossentropy", metrics=metrics)()
    model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
    figures = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    return model, (x, y), {k: v for k, v in figures.items() if not k.endswith("_loss")}


@pytest.mark.parametrize(
    "metrics",
    [
        ["accuracy"],
        "mae",
        {"a": "acc", "b": ["mae", tf.keras.metrics.AUC(name="area", num_thresholds=7)]},
        [["mse"], ["accuracy", "mae"]],
        [tf.keras.metrics.CategoricalAccuracy("right")],
        {"b": [tf.keras.metrics.F1Score("macro"), tf.keras.metrics.OneHotMeanIoU(3)]},
        [],
    ],
    ids=["names", "name", "by output", "in lists", "object", "built late", "none"],
)
def test_metrics_of_several_outputs_are_those_of_keras(metrics):
    keras, batch, expected = of_two_outputs(metrics)
    model = with_tff_models(lambda: keras, TWO_LABELS)()
    tff.learning.models.ModelWeights.from_model(keras).assign_weights_to(model)
    model.forward_pass(batch, training=False)
    assert set(model.metric_finalizers()) == {*expected, "num_examples", "num_batches"}
    found = {metric.name: float(metric.result()) for metric in model.get_metrics()}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_clients_report_the_metrics_of_several_outputs(context):
    area = tf.keras.metrics.AUC(name="area", num_thresholds=7)  # which updates by an operation
    keras, batch, expected = of_two_outputs({"a": "accuracy", "b": ["accuracy", "mae", area]})
    data = tf.data.Dataset.from_tensors(batch)
    figures = round_of(lambda: keras, [data, data], input_spec=data.element_spec)[1]
    assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_clients_report_metrics_that_know_their_shapes_from_a_batch(context):
    metrics = [
        tf.keras.metrics.F1Score(),
        tf.keras.metrics.R2Score(name="r2"),
        tf.keras.metrics.OneHotMeanIoU(4, name="overlap"),
    ]
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=[8, 3]), np.eye(4)[rng.integers(0, 4, 8)]
    model_fn = compiled(lambda: layers(activation="sigmoid"), loss="mse", metrics=[*metrics, "mae"])
    model = model_fn()
    model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    batch = tf.cast(x, tf.float32), tf.cast(y, tf.float32)
    data = tf.data.Dataset.from_tensors(batch)
    figures = round_of(lambda: model, [data, data], input_spec=data.element_spec)[1]
    for name in ("f1_score", "r2", "overlap", "mae"):
        np.testing.assert_allclose(figures[name], expected[name], rtol=1e-4)


def by_name():
    x = tf.keras.Input([3])
    return tf.keras.Model(x, {n: tf.keras.layers.Dense(1, name=n)(x) for n in "ab"})


@pytest.mark.parametrize(
    ("make", "labels"),
    [
        (two_outputs, {n: tf.TensorSpec([None, 2]) for n in "ab"}),
        (two_outputs, tf.TensorSpec([None, 2])),
        (by_name, (tf.TensorSpec([None, 1]),) * 2),
    ],
    ids=["labels by name", "one label", "outputs by name"],
)
def test_outputs_that_tff_cannot_pair_with_labels_are_refused(make, labels):
    with pytest.raises(ValueError, match="return them as a list, .* a tuple of labels"):
        converted(compiled(make, loss="mse"), (SPEC[0], labels))


@pytest.mark.parametrize(
    "name", ["kld", "kl_divergence", "KLDivergence", "logcosh", "msle", "mape"]
)
def test_names_of_keras_are_found_whatever_their_case(name):
    """Keras itself finds no metric of the names "kld" and "kl_divergence"."""
    metric = "msle" if name == "msle" else "logcosh"
    make = compiled(lambda: layers(4, activation="softmax"), loss=name, metrics=[metric])
    x, y = np.ones([2, 3], np.float32), np.eye(4, dtype=np.float32)[:2]
    expected = make().evaluate(x, y, verbose=0, return_dict=True)
    model = converted(make, (SPEC[0], tf.TensorSpec([None, 4])))
    model.forward_pass((x, y), training=False)
    by_name = dict(zip(model.metric_finalizers(), model.get_metrics()))
    assert {n: float(by_name[n].result()) for n in expected} == pytest.approx(expected, rel=1e-5)


def test_ragged_batches_are_refused_as_tff_has_none():
    ragged = (tf.RaggedTensorSpec([None, None], tf.int32, 1), SPEC[1])
    with pytest.raises(TypeError):  # if this does not raise, the refusal can go
        tff.types.to_type(ragged)
    with pytest.raises(TypeError, match="dense tensors only.*padded_batch"):
        converted(compiled(loss="mse"), ragged)
