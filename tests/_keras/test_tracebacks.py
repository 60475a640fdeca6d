"""Errors about a user's model say what is wrong, and nothing around it."""

import pytest
import tensorflow as tf

from tf_adaptive_dp._keras.tracebacks import message_lines


class Fails(tf.keras.layers.Layer):
    def call(self, x):
        raise ValueError("`units` must be positive.\nReceived: 0")


def test_what_keras_adds_behind_a_message_is_left_out():
    with pytest.raises(ValueError, match="[Aa]rguments received by") as error:
        Fails()(tf.zeros([2, 3]))
    assert message_lines(error.value)[-2:] == ["`units` must be positive.", "Received: 0"]
