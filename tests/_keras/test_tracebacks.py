"""Errors about a user's model say what is wrong, and nothing around it."""

import traceback
import warnings

import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tf_adaptive_dp._keras import tracebacks
from tf_adaptive_dp._keras.generation import GENERATION
from tf_adaptive_dp._keras.tracebacks import level_of_caller, message_lines, raised


class Fails(tf.keras.layers.Layer):
    def call(self, x):
        raise ValueError("`units` must be positive.\nReceived: 0")


def test_what_keras_adds_behind_a_message_is_left_out():
    with pytest.raises(ValueError, match="[Aa]rguments received by") as error:
        Fails()(tf.zeros([2, 3]))
    assert message_lines(error.value)[-2:] == ["`units` must be positive.", "Received: 0"]


@pytest.mark.skipif(GENERATION == 2, reason="Keras 2 builds models by running them")
def test_what_a_layer_raised_while_its_shape_was_inferred_is_shown():
    model = tf.keras.Sequential([Fails(), tf.keras.layers.Dense(1)])
    with pytest.raises(ValueError) as error:
        model(tf.zeros([2, 3]))
    assert raised(error.value).endswith("Error encountered: `units` must be positive.")
    model.compile(dp.DPSGD(1.0, 1.0), "mse")
    (found,) = dp.validate(model, (tf.zeros([2, 3]), tf.zeros([2, 1]))).errors
    assert found.what.endswith("`units` must be positive.") and "labels" not in found.fix


class HoldsOneThatFails(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = Fails()

    def call(self, x):
        return self.inner(x)


@pytest.mark.parametrize("make", [Fails, HoldsOneThatFails])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_raised_is_said_without_the_layer_and_the_way_to_it(make, compiled):
    call = tf.function(make()) if compiled else make()
    with pytest.raises(ValueError, match="Exception encountered when calling") as error:
        call(tf.zeros([2, 3]))
    assert raised(error.value) == "ValueError: `units` must be positive."


@pytest.mark.parametrize("message", ["", "One.\nTwo."])
def test_what_is_raised_is_said_in_one_line(message):
    assert raised(KeyError()) == "KeyError: "
    assert raised(ValueError(message)) == f"ValueError: {message[:4]}"


class Warns(tf.keras.layers.Layer):
    @tf.autograph.experimental.do_not_convert  # as are all functions of the library that warn
    def call(self, x, training=None):
        warnings.warn("of a layer", stacklevel=level_of_caller())
        return x


@pytest.mark.parametrize("autograph", [False, True])
def test_a_warning_names_the_line_outside_of_keras_and_tensorflow(monkeypatch, autograph):
    # As if the layer were the library's.
    monkeypatch.setitem(globals(), "__name__", "tf_adaptive_dp.layers")
    namespace = {"tf": tf, "layer": Warns(), "__name__": "users"}
    code = "def call(x):\n    return tf.function(layer, autograph=autograph)(x)\n"
    exec(compile(code, "users.py", "exec"), {**namespace, "autograph": autograph}, namespace)
    with pytest.warns(UserWarning, match="of a layer") as found:
        namespace["call"](tf.zeros([2, 3]))
    lines = [(w.filename, w.lineno) for w in found if str(w.message) == "of a layer"]
    assert lines == [("users.py", 2)]


@pytest.mark.skipif(GENERATION == 2, reason="AutoGraph adds its frames in Keras 2")
def test_an_error_of_the_library_has_few_frames_above_it():
    x, y = catalogue.data()
    model = catalogue.mlp()
    model.compile(dp.DPSGD(1.0, 1.0, num_microbatches=4), loss=catalogue.loss())
    with pytest.raises(ValueError, match="Batches vary in size: .*Received: ") as error:
        model.fit(x[:10], y[:10], batch_size=8, verbose=0)
    frames = traceback.extract_tb(error.value.__traceback__)
    assert [f.filename for f in frames if "tf_adaptive_dp/" in f.filename] == [tracebacks.__file__]
