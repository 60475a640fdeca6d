"""Under mixed precision what is right has no findings, and what is wrong is still found."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers.zoo import floats
from tf_adaptive_dp.gradients.batch_axis import operations
from tf_adaptive_dp.gradients.rules import RULES
from tf_adaptive_dp.validation.layer_findings import named_layers

# What is compared in other types hardly depends on the version of Keras.
pytestmark = pytest.mark.slow_on(2)

layers = tf.keras.layers
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
Y = np.arange(6) % 3
SHAPES = {"dense": (784,), "long": (1500, 3)}


@pytest.fixture(params=["mixed_float16", "mixed_bfloat16"])
def policy(request):
    tf.keras.mixed_precision.set_global_policy(request.param)
    yield request.param
    tf.keras.mixed_precision.set_global_policy("float32")


def model(name="dense", *more):
    tf.keras.utils.set_random_seed(2)
    hidden = {
        # Units near zero that are on in one rounding and off in another.
        "dense": lambda: [layers.Dense(64, "relu"), layers.Dense(64, "relu")],
        # The gradient of a bias that is a sum over many places.
        "long": lambda: [layers.Conv1D(8, 3), layers.GlobalAveragePooling1D()],
    }[name]()
    return tf.keras.Sequential([tf.keras.Input(SHAPES[name]), *hidden, *more, layers.Dense(3)])


def report(of, name="dense"):
    batch = (floats(6, *SHAPES[name]), Y)
    return dp.validate(of, batch, loss=LOSS, optimizer=dp.DPSGD(1.0, 1.0))


def policies(of):
    return [layer.dtype_policy for layer in [of, *(layer for _, layer in named_layers(of))]]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", SHAPES)
def test_a_clean_model_has_no_findings(name, policy):
    looked_at = model(name)
    before = policies(looked_at)
    seen = report(looked_at, name)
    assert seen.ok and not seen.findings, seen
    assert "gradients of 4 examples match" in seen.probed
    after = policies(looked_at)
    assert all(a is b for a, b in zip(after, before)) and after[0].name == policy
    assert looked_at(floats(2, *SHAPES[name])).dtype == policy.removeprefix("mixed_")


@pytest.mark.slow_after(1)
def test_a_rule_that_is_slightly_wrong_is_found(policy, monkeypatch):
    right = RULES["BiasAdd"]

    def too_much(context):
        part = right(context)
        part.tensors[0] *= 1.01
        return part

    looked_at = model()
    before = policies(looked_at)
    monkeypatch.setitem(RULES, "BiasAdd", too_much)
    seen = report(looked_at)
    assert [f.kind for f in seen.errors] == ["gradients"], seen
    assert "not those of single examples" in seen.errors[0].what
    assert all(a is b for a, b in zip(policies(looked_at), before))


def test_mixing_that_was_vouched_for_is_found(policy, monkeypatch):
    monkeypatch.setitem(
        operations._RULES, "ReverseV2", lambda op, batch_axes: batch_axes[op.inputs[0]]
    )
    reversing = model("dense", layers.Lambda(lambda x: x + 0.05 * tf.reverse(x, [0])))
    with pytest.raises(dp.NotPrivateError, match="not those of single examples"):
        dp.validation.check_per_example(reversing, (floats(6, 784), Y), loss=LOSS)


def test_mixing_is_refused(policy):
    assert {"batch statistics"} <= {
        f.kind for f in report(model("dense", layers.BatchNormalization())).errors
    }


class Casts(layers.Layer):
    """Computes in bfloat16 whatever its policy; `add` sees the result."""

    def __init__(self, in_branch, add):
        super().__init__()
        self.in_branch, self.add = in_branch, add

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=(shape[-1], 64))
        self.bias = self.add_weight(name="bias", shape=(64,))

    def call(self, x):
        def short():
            product = tf.cast(x, tf.bfloat16) @ tf.cast(self.kernel, tf.bfloat16)
            return tf.cast(tf.tanh(product + tf.cast(self.bias, tf.bfloat16)), tf.float32)

        if self.in_branch:
            hidden = tf.cond(self.kernel[0, 0] < 9, short, lambda: x @ self.kernel)
        else:
            hidden = short()
        return hidden + self.add(hidden)


def compared(in_branch, add=lambda hidden: 0.0):
    casting = tf.keras.Sequential([tf.keras.Input([5]), Casts(in_branch, add), layers.Dense(3)])
    casting.compile(dp.DPSGD(1.0, 1.0), LOSS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # variables that are read in a branch have no rule
        return dp.validation.check_per_example(casting, (floats(6, 5), Y))


@pytest.mark.slow
@pytest.mark.parametrize("in_branch", [False, True])
def test_rounding_of_a_model_that_casts_passes_and_mixing_in_it_does_not(in_branch, monkeypatch):
    tf.keras.utils.set_random_seed(2)
    seen = compared(in_branch)
    assert 1e-4 < max(seen.norm_error, seen.sum_error) < 0.05
    monkeypatch.setitem(
        operations._RULES, "ReverseV2", lambda op, batch_axes: batch_axes[op.inputs[0]]
    )
    with pytest.raises(dp.NotPrivateError, match="not those of single examples"):
        compared(in_branch, lambda hidden: 0.2 * tf.reverse(hidden, [0]))


@pytest.mark.slow_after(1)
def test_a_model_of_fixed_types_is_not_compared_and_that_is_said(policy):
    short = policy.removeprefix("mixed_")
    fixed = model("dense", layers.Lambda(lambda x: x + tf.ones([64], short)))
    before = policies(fixed)
    with pytest.raises(ValueError, match="this one does not run in float32"):
        dp.validation.check_per_example(fixed, (floats(6, 784), Y), loss=LOSS)
    seen = report(fixed)
    assert seen.ok and "gradients not compared (ValueError: " in seen.probed, seen
    assert all(a is b for a, b in zip(policies(fixed), before))
