"""The models of the zoo that say what they compute in a few lines; see `zoo`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, NamedTuple

import numpy as np
import tensorflow as tf

from tests.helpers import zoo_layers as own

layers = tf.keras.layers


class Problem(NamedTuple):
    """A model with a batch.

    Attributes:
      variables: what is trained.
      losses: from the arrays of a batch to the loss vector [B].
      batch: the arrays, axis 0 of each is the batch.
      xla: whether XLA can compile it.
      rules: whether rules cover it, so that no Jacobian is needed.
      free: whether axis 1 is unknown, too, where the batch size is.
      tolerance: relative error that rounding can make.
    """

    variables: list[tf.Variable]
    losses: Callable[..., tf.Tensor]
    batch: tuple[np.ndarray, ...]
    xla: bool = True
    rules: bool = True
    free: bool = False
    tolerance: float = 1e-5


def cross_entropy(labels, logits):
    """One entry an example."""
    return tf.keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


def floats(*shape, seed=0):
    """Normal numbers, the same each time."""
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def labels(batch_size, classes=3):
    """Classes in turn."""
    return np.arange(batch_size) % classes


def shake(variables: Sequence[tf.Variable]) -> None:
    """Away from zero biases and unit scales."""
    generator = np.random.default_rng(1)
    for variable in variables:
        variable.assign_add(tf.cast(0.1 * generator.normal(size=variable.shape), variable.dtype))


def classifier(model, x, xla=True, **kwargs):
    """A problem whose model ends in three logits."""
    model(x[:1])
    shake(model.trainable_variables)

    def losses(x, y):
        return cross_entropy(y, model(x, training=True))

    return Problem(model.trainable_variables, losses, (x, labels(len(x))), xla, **kwargs)


def stack(*parts, of, **kwargs):
    """A maker of a classifier: layers that `parts` make in turn, then a dense one, on `of`."""

    def make():
        hidden = [part() for part in parts]
        return classifier(tf.keras.Sequential([*hidden, layers.Dense(3)]), of, **kwargs)

    return make


def conv(kind, *args, **kwargs):
    """A maker of a layer with a smooth activation."""
    return lambda: getattr(layers, kind)(*args, activation="tanh", **kwargs)


pooled_1d, pooled_2d, pooled_3d = (
    layers.GlobalAveragePooling1D,
    layers.GlobalAveragePooling2D,
    layers.GlobalAveragePooling3D,
)


def dense(units):
    return lambda: layers.Dense(units, activation="tanh")


def _group_normalized_images():
    return [
        lambda: layers.Conv2D(4, 3),
        lambda: layers.GroupNormalization(2),
        lambda: layers.LayerNormalization(axis=[1, 2, 3]),
        layers.Flatten,
    ]


def _frozen_batch_normalization():
    normalization = layers.BatchNormalization(trainable=False)
    problem = stack(lambda: layers.Conv2D(4, 3), lambda: normalization, layers.Flatten, of=IMAGES)()
    for weight, value in zip(normalization.weights, (1.5, 0.2, 0.3, 2.0)):
        weight.assign(tf.fill(weight.shape, value))
    return problem


def _frozen_layers():
    frozen = layers.Dense(5, activation="tanh", trainable=False)
    nested = tf.keras.Sequential([frozen, layers.Dense(4, activation="tanh")])
    return classifier(tf.keras.Sequential([nested, layers.Dense(3)]), floats(5, 4))


def _residual(x, filters):
    hidden = layers.GroupNormalization(2)(layers.Conv2D(filters, 3, padding="same")(x))
    hidden = layers.Conv2D(filters, 3, padding="same")(layers.Activation("relu")(hidden))
    return layers.Activation("relu")(layers.Add()([layers.Conv2D(filters, 1)(x), hidden]))


def _residual_cnn():
    inputs = tf.keras.Input([6, 6, 2])
    hidden = layers.MaxPooling2D()(_residual(layers.ZeroPadding2D(1)(inputs), 4))
    outputs = layers.Dense(3)(layers.Flatten()(_residual(hidden, 4)))
    return classifier(tf.keras.Model(inputs, outputs), floats(4, 6, 6, 2))


def _autoencoder():
    model = tf.keras.Sequential(
        [
            layers.Conv2D(3, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(4, activation="tanh"),
            layers.Dense(12, activation="tanh"),
            layers.Reshape([2, 2, 3]),
            layers.Conv2DTranspose(2, 3, strides=2, padding="same"),
        ]
    )
    x = floats(4, 4, 4, 2)
    model(x)
    shake(model.trainable_variables)

    def losses(x):
        return tf.reduce_mean((model(x, training=True) - x) ** 2, axis=[1, 2, 3])

    return Problem(model.trainable_variables, losses, (x,))


def _attention():
    inputs = tf.keras.Input([4, 3])
    hidden = layers.MultiHeadAttention(2, 3)(inputs, inputs)
    hidden = layers.LayerNormalization()(layers.Add()([inputs, hidden]))
    outputs = layers.Dense(3)(layers.GlobalAveragePooling1D()(hidden))
    return classifier(tf.keras.Model(inputs, outputs), floats(5, 4, 3))


def _tied_weights():
    table = tf.Variable(floats(5, 3), name="table")
    ids = np.array([[1, 1], [0, 3], [4, 1], [2, 2]])

    def losses(ids, y):
        hidden = tf.reduce_mean(tf.nn.embedding_lookup(table, ids), axis=1)
        return cross_entropy(y, tf.matmul(tf.tanh(hidden), table, transpose_b=True))

    return Problem([table], losses, (ids, labels(4, 5)))


def _two_outputs():
    inputs = tf.keras.Input([4])
    hidden = layers.Dense(5, activation="tanh")(inputs)
    model = tf.keras.Model(inputs, [layers.Dense(3)(hidden), layers.Dense(2)(hidden)])

    def losses(x, y, target):
        logits, values = model(x, training=True)
        return cross_entropy(y, logits) + 0.3 * tf.reduce_mean((values - target) ** 2, axis=1)

    batch = (floats(5, 4), labels(5), floats(5, 2, seed=2))
    return Problem(model.trainable_variables, losses, batch)


def _sample_weights():
    problem = MODELS["MLP"]()

    def losses(x, y, weights):
        return problem.losses(x, y) * weights

    weights = np.array([0.5, 0.0, 2.0, 1.0, 0.0], "float32")
    return problem._replace(losses=losses, batch=(*problem.batch, weights))


def _bfloat16():
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        problem = stack(
            conv("Conv2D", 4, 3), layers.LayerNormalization, layers.Flatten, dense(5), of=IMAGES
        )()
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")

    def losses(x, y):
        # A scale far from 1 shows whether δ is kept in a wider type.
        return problem.losses(x, y) * 3.0

    return problem._replace(losses=losses, tolerance=5e-2)


def _shared(*lengths):
    """One layer on sequences of several lengths."""
    shared = layers.Dense(3, activation="tanh")
    inputs = [tf.keras.Input([n, 3]) for n in lengths]
    hidden = [layers.GlobalAveragePooling1D()(shared(shared(i))) for i in inputs]
    model = tf.keras.Model(inputs, layers.Dense(3)(layers.Concatenate()(hidden)))
    shake(model.trainable_variables)
    batch = [floats(4, n, 3, seed=n) for n in lengths]

    def losses(*batch):
        return cross_entropy(batch[-1], model(list(batch[:-1]), training=True))

    return Problem(model.trainable_variables, losses, (*batch, labels(4)))


SEQUENCES, IMAGES = floats(4, 6, 3), floats(5, 5, 5, 2)
IDS = np.array([[1, 1, 1, 2], [0, 3, 0, 3], [4, 1, 1, 4], [2, 2, 2, 2]])
_einsum = layers.EinsumDense

MODELS: dict[str, Callable[[], Problem]] = {
    "MLP": stack(dense(7), of=floats(5, 6)),
    "dense on sequences": stack(dense(4), dense(2), layers.Flatten, of=SEQUENCES),
    "dense on sequences of any length": stack(
        dense(4), dense(4), pooled_1d, of=SEQUENCES, free=True
    ),
    "CNN": stack(
        conv("Conv2D", 4, 3, strides=2, padding="same"),
        lambda: layers.MaxPooling2D(2),
        conv("Conv2D", 3, 2, dilation_rate=2),
        layers.Flatten,
        of=floats(5, 12, 12, 2),
    ),
    "convolutions of sequences": stack(
        conv("Conv1D", 4, 3, padding="causal", dilation_rate=2),
        conv("Conv1D", 5, 3, strides=2, padding="same"),
        conv("Conv1D", 4, 2),
        layers.Flatten,
        of=floats(4, 7, 3),
    ),
    "convolutions of sequences of any length": stack(
        conv("Conv1D", 4, 3, padding="causal", dilation_rate=2),
        conv("Conv1D", 5, 3, strides=2, padding="same"),
        pooled_1d,
        of=floats(4, 7, 3),
        free=True,
    ),
    "convolutions of volumes": stack(
        conv("Conv3D", 3, (3, 2, 3), strides=(2, 1, 2), padding="same"),
        conv("Conv3D", 3, 2, dilation_rate=(1, 2, 1)),
        pooled_3d,
        of=floats(3, 4, 5, 4, 2),
    ),
    "depthwise and separable": stack(
        conv("DepthwiseConv2D", 3, depth_multiplier=2),
        conv("DepthwiseConv2D", 2, strides=2, padding="same"),
        conv("SeparableConv2D", 3, 2, depth_multiplier=2),
        pooled_2d,
        of=floats(4, 7, 7, 2),
    ),
    "separable convolutions of sequences": stack(
        conv("SeparableConv1D", 4, 3, dilation_rate=2, padding="same", depth_multiplier=2),
        conv("DepthwiseConv1D", 2, strides=2),
        pooled_1d,
        of=SEQUENCES,
    ),
    "transposed convolutions": stack(
        conv("Conv2DTranspose", 4, 3, strides=2, padding="same"),
        conv("Conv2DTranspose", 3, (2, 3), strides=(1, 2), output_padding=(0, 1)),
        pooled_2d,
        of=floats(4, 3, 3, 2),
    ),
    "transposed convolutions of sequences": stack(
        conv("Conv1DTranspose", 4, 3, strides=2), pooled_1d, of=SEQUENCES
    ),
    "transposed convolutions of volumes": stack(
        conv("Conv3DTranspose", 3, 2, strides=(2, 1, 2), padding="same"),
        pooled_3d,
        of=floats(3, 2, 3, 2, 2),
    ),
    "layers at each time": stack(
        lambda: layers.TimeDistributed(layers.Conv2D(3, 2, activation="tanh")),
        lambda: layers.TimeDistributed(layers.Flatten()),
        lambda: layers.TimeDistributed(layers.Dense(4, activation="tanh")),
        lambda: layers.TimeDistributed(layers.GroupNormalization(2)),
        pooled_1d,
        of=floats(4, 3, 4, 4, 2),
    ),
    "embedding with repeated ids": stack(lambda: layers.Embedding(5, 3), pooled_1d, of=IDS),
    "masked embedding": stack(
        lambda: layers.Embedding(5, 3, mask_zero=True), dense(4), pooled_1d, of=IDS
    ),
    "LayerNormalization": stack(dense(6), layers.LayerNormalization, of=floats(5, 4)),
    "GroupNormalization": stack(dense(6), lambda: layers.GroupNormalization(3), of=floats(5, 4)),
    "UnitNormalization": stack(dense(6), layers.UnitNormalization, of=floats(5, 4)),
    "normalized images": stack(*_group_normalized_images(), of=IMAGES),
    "frozen BatchNormalization": _frozen_batch_normalization,
    "frozen statistics, trained scale": stack(
        conv("Conv2D", 3, 2),
        own.FrozenStatistics,
        layers.Flatten,
        dense(4),
        own.FrozenStatistics,
        of=IMAGES,
    ),
    "EinsumDense": stack(
        lambda: _einsum("abc,cde->abde", [6, 2, 4], bias_axes="de", activation="tanh"),
        lambda: _einsum("abde,bdef->abf", [6, 5], bias_axes="f", activation="tanh"),
        lambda: _einsum("...x,xy->...y", 4, activation="tanh"),
        layers.Flatten,
        of=SEQUENCES,
    ),
    "MultiHeadAttention": _attention,
    "transformer": stack(
        lambda: own.TokenAndPosition(6, 4), lambda: own.TransformerBlock(2, 4), pooled_1d, of=IDS
    ),
    "transformer on text of any length": stack(
        lambda: own.TokenAndPosition(6, 4),
        lambda: own.TransformerBlock(2, 4),
        pooled_1d,
        of=IDS,
        free=True,
    ),
    "class token": stack(
        own.ClassToken, lambda: own.TransformerBlock(2, 3), own.First, of=SEQUENCES
    ),
    "PReLU and learned factors": stack(
        dense(5),
        layers.PReLU,
        lambda: layers.Reshape([1, 5, 1]),
        lambda: layers.PReLU(shared_axes=[1]),
        layers.Flatten,
        own.Factors,
        of=floats(5, 4),
    ),
    "weight normalization": stack(own.WeightNormalized, own.WeightNormalized, of=floats(5, 6)),
    "kernels that are rearranged": stack(own.Rearranged, dense(4), of=floats(5, 6)),
    "products by hand": stack(own.Products, layers.Flatten, of=SEQUENCES),
    "sums by hand": stack(own.Sums, layers.Flatten, of=SEQUENCES),
    "convolutions by hand": stack(own.Convolutions, pooled_2d, of=IMAGES),
    "layer used twice": lambda: _shared(3),
    "layer used six times": lambda: _shared(2, 4, 3),
    "frozen and nested layers": _frozen_layers,
    "siamese network": stack(
        lambda: own.Siamese(conv("Conv2D", 3, 2), layers.Flatten, dense(4)),
        of=floats(4, 2, 3, 3, 2),
    ),
    "gathered by hand": stack(own.Gathers, dense(3), layers.Flatten, of=IDS),
    "tied weights": _tied_weights,
    "two outputs": _two_outputs,
    "sample weights": _sample_weights,
    "autoencoder": _autoencoder,
    "residual CNN": _residual_cnn,
    "mixed_bfloat16": _bfloat16,
    "time-major": stack(own.TimeMajor, of=SEQUENCES),
    "LSTM": stack(lambda: layers.LSTM(3), of=floats(4, 5, 2)),
    "GRU": stack(lambda: layers.Bidirectional(layers.GRU(3)), of=floats(4, 5, 2)),
    "hidden in a function": stack(own.InFunction, of=floats(5, 6)),
    "loop": stack(own.Loop, of=floats(5, 4)),
    "branch": stack(own.Branch, of=floats(5, 4), rules=False, xla=False),
    "recomputed": stack(own.Recomputed, of=floats(5, 4)),
}
