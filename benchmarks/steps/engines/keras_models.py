"""The models and losses in Keras, with TensorFlow or without."""

from __future__ import annotations

from typing import Any

from benchmarks.steps import problems

try:
    from tensorflow import keras
except ImportError:  # a peer that works on JAX
    import keras

layers = keras.layers


class PositionEmbedding(layers.Layer):
    """Adds a learned vector to each position."""

    def build(self, input_shape) -> None:
        self.positions = self.add_weight(name="positions", shape=input_shape[1:])

    def call(self, inputs: Any) -> Any:
        return inputs + self.positions


def _dense(x, problem: problems.Problem, width: int):
    *hidden, last = problem.layer_sizes(width)[1:]
    for size in hidden:
        x = layers.Dense(size, activation=problem.activation)(x)
    return layers.Dense(last, activation=problem.output_activation)(x)


def _convolutions(x):
    for _ in range(2):
        x = layers.Conv2D(problems.FILTERS, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D(2)(x)
    return layers.Flatten()(x)


def _encoder(x):
    x = PositionEmbedding()(layers.Embedding(problems.VOCABULARY, problems.DIM)(x))
    head_dim = problems.DIM // problems.HEADS
    attended = layers.MultiHeadAttention(problems.HEADS, head_dim)(x, x)
    x = layers.LayerNormalization()(x + attended)
    hidden = layers.Dense(problems.FEED_FORWARD, activation="relu")(x)
    x = layers.LayerNormalization()(x + layers.Dense(problems.DIM)(hidden))
    return layers.GlobalAveragePooling1D()(x)


def _embeddings(words: int, length: int, dim: int):
    inputs = keras.Input([length], dtype="int32")
    return inputs, layers.GlobalAveragePooling1D()(layers.Embedding(words, dim)(inputs))


def _adapted_bert():
    import keras_hub  # Keras 3 alone has it

    bert = keras_hub.models.BertBackbone(**problems.BERT, dropout=0.0)
    bert.enable_lora(problems.LORA_RANK)
    inputs = keras.Input([problems.BERT["max_sequence_length"]], dtype="int32")
    ones, zeros = keras.ops.ones_like(inputs), keras.ops.zeros_like(inputs)
    found = bert({"token_ids": inputs, "padding_mask": ones, "segment_ids": zeros})
    return inputs, found["pooled_output"]


def build(problem: problems.Problem, width: int, model_class=keras.Model, **kwargs):
    """The model of a problem.

    Args:
      problem: which.
      width: see `Problem.layer_sizes`.
      model_class: what to make it of.
      **kwargs: further arguments of that class.

    Returns:
      The model, not compiled.
    """
    if problem.name == "cnn":
        inputs = keras.Input(problems.IMAGE)
        x = _convolutions(inputs)
    elif problem.name == "transformer":
        inputs = keras.Input([problems.LENGTH], dtype="int32")
        x = _encoder(inputs)
    elif problem.name == "bow":
        inputs, x = _embeddings(problems.BOW_VOCABULARY, problems.BOW_LENGTH, problems.BOW_DIM)
    elif problem.name == "large_vocabulary":
        inputs, x = _embeddings(
            problems.LARGE_VOCABULARY, problems.LARGE_LENGTH, problems.LARGE_DIM
        )
    elif problem.name == "lora":
        inputs, x = _adapted_bert()
    else:
        inputs = x = keras.Input(problem.sizes[:1])
    return model_class(inputs=inputs, outputs=_dense(x, problem, width), **kwargs)


def loss(problem: problems.Problem, reduction: str) -> keras.losses.Loss:
    """The loss; one number an example where `reduction` is "none"."""
    if problem.loss == "softmax":
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    if problem.loss == "sigmoid":
        return keras.losses.BinaryCrossentropy(from_logits=True, reduction=reduction)
    return keras.losses.MeanSquaredError(reduction=reduction)
