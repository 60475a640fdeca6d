"""`check_per_example` accepts what is right, and finds mixing and wrong rules."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers.zoo import floats
from tf_adaptive_dp.gradients.batch_axis import operations
from tf_adaptive_dp.gradients.rules import RULES

layers = tf.keras.layers
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
BATCH = (floats(6, 5), np.arange(6) % 3)


def model(*hidden):
    tf.keras.utils.set_random_seed(2)
    return tf.keras.Sequential([tf.keras.Input([5]), layers.Dense(4), *hidden, layers.Dense(3)])


def test_a_model_that_rules_cover_passes():
    report = dp.validation.check_per_example(model(layers.LayerNormalization()), BATCH, loss=LOSS)
    assert report.norm_error < 1e-5 and report.sum_error < 1e-5
    assert report.num_examples == 6 and report.training and report.without_rules == ()


class Dilation(layers.Layer):
    """An operation that keeps examples apart and has no rule."""

    def __init__(self, height=3, **kwargs):
        super().__init__(**kwargs)
        self.height = height

    def build(self, shape):
        self.filter = self.add_weight(name="filter", shape=[self.height, 1, 1])

    def call(self, x):
        x = tf.reshape(x, [-1, 4, 1, 1])
        x = tf.nn.dilation2d(x, self.filter, [1, 1, 1, 1], "SAME", "NHWC", [1, 1, 1, 1])
        return tf.reshape(x, [-1, 4])


def test_a_model_that_no_rule_covers_passes_and_says_so():
    report = dp.validation.check_per_example(model(Dilation()), BATCH, loss=LOSS)
    assert report.norm_error < 1e-5
    assert "read by Dilation2D in layer 'sequential" in report.without_rules[0]


def test_random_layers_are_compared_without_their_randomness():
    report = dp.validation.check_per_example(model(layers.Dropout(0.5)), BATCH, loss=LOSS)
    assert not report.training and report.norm_error < 1e-5


def test_layers_that_are_random_in_prediction_too_cannot_be_compared():
    noisy = layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x)))
    with pytest.raises(ValueError, match="draws random numbers with `training=False` too.*of "):
        dp.validation.check_per_example(model(noisy), BATCH, loss=LOSS)


def test_sample_weights_and_several_inputs():
    one, two = tf.keras.Input([5]), tf.keras.Input([2])
    both = tf.keras.Model([one, two], layers.Dense(3)(layers.Concatenate()([one, two])))
    batch = ([BATCH[0], floats(6, 2, seed=1)], BATCH[1], np.array([1, 0, 2, 1, 1, 0.5], "float32"))
    assert dp.validation.check_per_example(both, batch, loss=LOSS).norm_error < 1e-5


@pytest.mark.parametrize("reduce", [tf.identity, tf.reduce_mean], ids=["vector", "mean"])
def test_a_term_that_all_examples_share_is_compared_with_none(reduce):
    regularized = model()
    kernel = regularized.layers[0].weights[0]

    def loss(y, z):
        return reduce(LOSS(y, z) + 3 * tf.reduce_sum(kernel * kernel))

    regularized.compile(dp.DPSGD(1.0, 1.0, expected_batch_size=6.0), loss)
    report = dp.validation.check_per_example(regularized, BATCH)
    assert report.norm_error < 1e-5 and report.sum_error < 1e-5


def test_mixing_is_refused():
    with pytest.raises(dp.NotPrivateError, match="reduces over the batch axis"):
        dp.validation.check_per_example(model(layers.BatchNormalization()), BATCH, loss=LOSS)


def test_an_operation_that_was_vouched_for_wrongly_is_found(monkeypatch):
    monkeypatch.setitem(
        operations._RULES, "ReverseV2", lambda op, batch_axes: batch_axes[op.inputs[0]]
    )
    reversing = layers.Lambda(lambda x: x + tf.reverse(x, [0]))
    with pytest.raises(dp.NotPrivateError, match="not those of single examples.*register_layout"):
        dp.validation.check_per_example(model(reversing), BATCH, loss=LOSS)


def double_gradients(monkeypatch, operation="BiasAdd"):
    """Makes the rule for biases, or for another operation, a wrong one."""
    right = RULES[operation]

    def twice(context):
        part = right(context)
        part.tensors[0] *= 2.0
        return part

    monkeypatch.setitem(RULES, operation, twice)


def test_a_wrong_rule_is_found(monkeypatch):
    double_gradients(monkeypatch)
    with pytest.raises(dp.NotPrivateError, match="not those of single examples"):
        dp.validation.check_per_example(model(), BATCH, loss=LOSS)


@pytest.mark.parametrize("second", [0, 1], ids=["all", "all but one"])
def test_examples_whose_loss_is_almost_zero_are_no_sign_of_a_wrong_rule(second, monkeypatch):
    """With raw inputs, the squares of their gradients underflow: `validate` failed by chance."""
    dense = layers.Dense(3)
    saturated = tf.keras.Sequential([tf.keras.Input([2]), dense])
    dense.kernel.assign([[6e-5, 0, 0], [0, 0.1, 0.2]])  # a logit of 60
    batch = np.array([[1e6, 0.3], [1e6, -1], [1e6, 2]], "float32"), np.array([0, second, 0])
    assert dp.validation.check_per_example(saturated, batch, loss=LOSS).norm_error < 1e-5
    double_gradients(monkeypatch, "MatMul")
    with pytest.raises(dp.NotPrivateError, match="not those of single examples"):
        dp.validation.check_per_example(saturated, batch, loss=LOSS)


@pytest.mark.parametrize("loss", [5, "mse"])
def test_a_loss_that_is_no_function_is_refused(loss):
    with pytest.raises(TypeError, match=f"`loss` must be a function .*Received: loss={loss!r}"):
        dp.validation.check_per_example(model(), BATCH, loss=loss)


def test_a_batch_of_one_proves_nothing():
    with pytest.raises(ValueError, match="two examples or more. Received: 1"):
        dp.validation.check_per_example(model(), (BATCH[0][:1], BATCH[1][:1]), loss=LOSS)


@pytest.mark.parametrize("row", [0, 3])
def test_examples_that_are_not_finite_are_left_out_and_hide_nothing(row, monkeypatch):
    x = BATCH[0].copy()
    x[row, 0] = np.nan
    report = dp.validation.check_per_example(model(), (x, BATCH[1]), loss=LOSS)
    assert report.num_examples == 5 and max(report.norm_error, report.sum_error) < 1e-5
    double_gradients(monkeypatch)
    with pytest.raises(dp.NotPrivateError, match="not those of single examples"):
        dp.validation.check_per_example(model(), (x, BATCH[1]), loss=LOSS)


def test_a_batch_without_finite_gradients_proves_nothing():
    nothing = (np.full_like(BATCH[0], np.nan), BATCH[1])
    with pytest.raises(ValueError, match="an example whose gradient is finite. Received: none"):
        dp.validation.check_per_example(model(), nothing, loss=LOSS)


def test_a_variable_that_the_loss_does_not_reach_has_no_gradient():
    inputs = tf.keras.Input([5])
    outputs = {name: layers.Dense(3, name=name)(inputs) for name in "ab"}
    two = tf.keras.Model(inputs, outputs)
    two.compile("sgd", {"a": tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)})
    report = dp.validation.check_per_example(two, (BATCH[0], {"a": BATCH[1]}))
    assert report.norm_error < 1e-5 and report.num_examples == 6


def test_batches_that_are_not_dense_are_refused():
    dense = tf.constant(BATCH[0])
    for x, how in (
        (tf.RaggedTensor.from_tensor(dense), "to_tensor"),
        (tf.sparse.from_dense(dense), "to_dense"),
    ):
        for batch in ((x, BATCH[1]), x):
            with pytest.raises(TypeError, match=f"`batch` must hold dense .*{how}.* Received: "):
                dp.validation.check_per_example(model(), batch)
