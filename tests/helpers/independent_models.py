"""Layers and losses that keep the examples of a batch apart, for `gradients/test_accepted`.

Batches have 4 examples, and so many other axes have length 4 that sizes say nothing about axes.
"""

from __future__ import annotations

import inspect

import tensorflow as tf

layers = tf.keras.layers
POOLINGS = "MaxPooling AveragePooling GlobalMaxPooling GlobalAveragePooling".split()


def _of(kind, *args, **kwargs):
    return lambda: getattr(layers, kind)(*args, **kwargs)


def _function(function):
    return lambda: layers.Lambda(function)


def _pooling(kind, dimensions):
    size = () if kind.startswith("Global") else (2,)
    return _of(f"{kind}{dimensions}", *size)


# By the shape of an example that they take.
LAYERS: dict[tuple[int, ...], dict] = {
    (4, 4): {
        "Permute": _of("Permute", (2, 1)),
        "Reshape": _of("Reshape", (8, 2)),
        "Reshape to -1": _of("Reshape", (-1, 2)),
        "UpSampling1D": _of("UpSampling1D", 2),
        "ZeroPadding1D": _of("ZeroPadding1D", 2),
        "Cropping1D": _of("Cropping1D", 1),
        "SpatialDropout1D": _of("SpatialDropout1D", 0.0),
        "Masking": _of("Masking"),
        "Softmax": _of("Softmax", axis=1),
        "ActivityRegularization of nothing": _of("ActivityRegularization"),
        "GroupNormalization": _of("GroupNormalization", 2),
        "GroupNormalization on axis 1": _of("GroupNormalization", 2, axis=1),
        "LayerNormalization of all": _of("LayerNormalization", axis=[1, 2]),
        "LayerNormalization on axis 1": _of("LayerNormalization", axis=1),
        "UnitNormalization": _of("UnitNormalization"),
        "LocallyConnected1D": _of("LocallyConnected1D", 3, 2),
        "LocallyConnected1D by product": _of("LocallyConnected1D", 3, 2, implementation=2),
        "Conv1D": _of("Conv1D", 3, 2, padding="causal", dilation_rate=2),
        "SimpleRNN": _of("SimpleRNN", 3),
        "LSTM sequences": _of("LSTM", 3, return_sequences=True),
        "LSTM unrolled": _of("LSTM", 3, unroll=True),
        "LSTM time-major": lambda: tf.keras.Sequential(
            [
                layers.Lambda(lambda x: tf.transpose(x, [1, 0, 2])),
                layers.LSTM(3, time_major=True, return_sequences=True),
                layers.Lambda(lambda x: tf.transpose(x, [1, 0, 2])),
            ]
        ),
        "GRU backwards": _of("GRU", 3, go_backwards=True),
        "RNN of stacked cells": lambda: layers.RNN([layers.LSTMCell(3), layers.GRUCell(2)]),
        "Bidirectional": lambda: layers.Bidirectional(layers.LSTM(2)),
        "TimeDistributed": lambda: layers.TimeDistributed(layers.Dense(3)),
        "cumsum": _function(lambda x: tf.cumsum(x, axis=1)),
        "cumulative_logsumexp": _function(lambda x: tf.math.cumulative_logsumexp(x, axis=-1)),
        "sort": _function(lambda x: tf.sort(x, axis=-1)),
        "top_k": _function(lambda x: tf.math.top_k(x, 2).values),
        "reverse and roll": _function(lambda x: tf.roll(tf.reverse(x, [1]), 1, 2)),
        "slices": _function(lambda x: x[:, 1:, ::-1] - x[:, :-1] + x[..., -1, tf.newaxis, :]),
        "gather": _function(lambda x: tf.gather(x, [2, 0, 0], axis=1)),
        "unstack and stack": _function(lambda x: tf.stack(tf.unstack(x, axis=1)[::-1], axis=2)),
        "split and concat": _function(lambda x: tf.concat(tf.split(x, 2, -1)[::-1], 1)),
        "pad": _function(lambda x: tf.pad(x, [[0, 0], [1, 2], [0, 1]], mode="REFLECT")),
        "products of an example": _function(lambda x: x @ tf.transpose(x, [0, 2, 1])),
        "einsum of an example": _function(lambda x: tf.einsum("bij,bkj->bik", x, x)),
        "positive definite": _function(
            lambda x: tf.linalg.inv(tf.einsum("bij,bkj->bik", x, x) + 3 * tf.eye(4))
        ),
        "clip_by_norm": _function(lambda x: tf.clip_by_norm(x, 1.0, axes=[1, 2])),
        "FFT": _function(lambda x: tf.abs(tf.signal.rfft(x))),
        "time-major and back": _function(
            lambda x: tf.transpose(tf.nn.softmax(tf.transpose(x, [1, 0, 2]), axis=0), [1, 0, 2])
        ),
        "batch and time merged": _function(
            lambda x: tf.reshape(tf.tanh(tf.reshape(x, [-1, 4])), [-1, 4, 4])
        ),
        "batch and time merged by size": _function(
            lambda x: tf.reshape(tf.reshape(x, [tf.shape(x)[0] * 4, 4]), tf.shape(x))
        ),
        "time and batch merged": _function(
            lambda x: tf.reshape(tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, 4]), [4, -1, 4])[1]
        ),
        "vectorized_map": _function(lambda x: tf.vectorized_map(tf.linalg.trace, x)[:, None]),
        "one_hot": _function(lambda x: x + tf.one_hot(tf.argmax(x, 1), 4)),
        "masked": _function(lambda x: tf.where(tf.reduce_any(x > 1, 2, keepdims=True), x, -x)),
        "tile": _function(lambda x: tf.tile(x, [1, 2, 1])),
        "repeat": _function(lambda x: tf.repeat(x, 2, axis=1)),
        "noise": _function(lambda x: x + 0.0 * tf.random.normal(tf.shape(x))),
        "branch": _function(lambda x: tf.cond(tf.shape(x)[1] > 2, lambda: x, lambda: -x)),
        "loop": _function(
            lambda x: tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, tf.tanh(x)), [0, x])[1]
        ),
        "function": _function(tf.function(lambda x: x - tf.reduce_mean(x, [1, 2], keepdims=True))),
        "recompute_grad": _function(tf.recompute_grad(lambda x: tf.tanh(x) ** 2)),
        "gradient reversal": _function(
            tf.custom_gradient(lambda x: (tf.identity(x), lambda d: -0.3 * d))
        ),
    },
    (4,): {
        "Dropout": _of("Dropout", 0.0),
        "AlphaDropout": _of("AlphaDropout", 0.0),
        "GaussianNoise": _of("GaussianNoise", 0.0),
        "GaussianDropout": _of("GaussianDropout", 0.0),
        "RepeatVector": _of("RepeatVector", 4),
        "Normalization": _of("Normalization", mean=0.3, variance=2.0),
        "Rescaling": _of("Rescaling", 0.5, offset=1.0),
        "ReLU": _of("ReLU", max_value=1.0, negative_slope=0.1, threshold=0.2),
        "ThresholdedReLU": _of("ThresholdedReLU", 0.1),
        "ELU": _of("ELU"),
        "LeakyReLU": _of("LeakyReLU"),
        "PReLU": _of("PReLU"),
        "RandomFourierFeatures": lambda: tf.keras.layers.experimental.RandomFourierFeatures(5),
        "matvec": _function(lambda x: tf.linalg.matvec(tf.ones([3, 4]), x)),
        "kernel of another layer": _function(lambda x: tf.nn.embedding_lookup(tf.eye(4), [1]) * x),
        **{
            f"activation {name}": lambda name=name: layers.Activation(name)
            for name, f in inspect.getmembers(tf.keras.activations, inspect.isfunction)
            if name not in ("get", "serialize", "deserialize", "glu", "threshold")
        },
    },
    (4, 4, 4): {
        "RandomFlip": _of("RandomFlip", seed=1),
        "RandomRotation": _of("RandomRotation", 0.1, seed=1),
        "RandomContrast": _of("RandomContrast", 0.2, seed=1),
        "RandomZoom": _of("RandomZoom", 0.1, seed=1),
        "RandomTranslation": _of("RandomTranslation", 0.1, 0.1, seed=1),
        "RandomBrightness": _of("RandomBrightness", 0.1, seed=1),
        "RandomCrop": _of("RandomCrop", 3, 3, seed=1),
        "CenterCrop": _of("CenterCrop", 2, 2),
        "Resizing": _of("Resizing", 6, 6),
        "UpSampling2D": _of("UpSampling2D", 2, interpolation="bilinear"),
        "ZeroPadding2D": _of("ZeroPadding2D", 1),
        "Cropping2D": _of("Cropping2D", 1),
        "SpatialDropout2D": _of("SpatialDropout2D", 0.0),
        "LocallyConnected2D": _of("LocallyConnected2D", 2, 2),
        "ConvLSTM1D": _of("ConvLSTM1D", 2, 2),
        "GroupNormalization of images": _of("GroupNormalization", 2),
        "InstanceNormalization": _of("GroupNormalization", -1),
        "LayerNormalization of images": _of("LayerNormalization"),
        "per_image_standardization": _function(tf.image.per_image_standardization),
        "depth_to_space": _function(lambda x: tf.nn.depth_to_space(x, 2)),
        "extract_patches": _function(
            lambda x: tf.image.extract_patches(x, [1, 2, 2, 1], [1] * 4, [1] * 4, "VALID")
        ),
        "local response": _function(tf.nn.local_response_normalization),
        **{f"{p}2D": _pooling(p, "2D") for p in POOLINGS},
    },
    (8, 4): {f"{p}1D": _pooling(p, "1D") for p in POOLINGS},
    (4, 4, 4, 4): {
        "UpSampling3D": _of("UpSampling3D", 2),
        "ZeroPadding3D": _of("ZeroPadding3D", 1),
        "Cropping3D": _of("Cropping3D", 1),
        "SpatialDropout3D": _of("SpatialDropout3D", 0.0),
        "ConvLSTM2D": _of("ConvLSTM2D", 2, 2),
        **{f"{p}3D": _pooling(p, "3D") for p in POOLINGS},
    },
}

# Keras 3 has neither these layers nor the argument `time_major`.
OF_KERAS_2 = {
    "LocallyConnected1D",
    "LocallyConnected1D by product",
    "LocallyConnected2D",
    "LSTM time-major",
    "RandomFourierFeatures",
    "ThresholdedReLU",
}
# Their outputs are random, so there is nothing to compare with.
RANDOM = {name for name in LAYERS[4, 4, 4] if name.startswith("Random")}

# Layers before the first one with variables, that take integers or strings.
PREPROCESSING = {
    "Discretization": _of("Discretization", bin_boundaries=[1.0, 2.0]),
    "CategoryEncoding": _of("CategoryEncoding", 4, output_mode="multi_hot"),
    "CategoryEncoding of counts": _of("CategoryEncoding", 4, output_mode="count"),
    "Hashing": _of("Hashing", 4),
    "IntegerLookup": _of("IntegerLookup", vocabulary=[2, 0, 1]),
    "IntegerLookup multi-hot": _of("IntegerLookup", vocabulary=[2, 0], output_mode="multi_hot"),
    "HashedCrossing": lambda: _crossing(),
}


def _crossing():
    of_keras2 = getattr(layers, "experimental", None)
    crossing = (of_keras2.preprocessing if of_keras2 else layers).HashedCrossing(4)
    return layers.Lambda(
        lambda x: crossing((tf.cast(x[:, 0], tf.int64), tf.cast(x[:, 1], tf.int64)))
    )


MERGES = {
    **{k: _of(k) for k in "Add Subtract Multiply Average Maximum Minimum Concatenate".split()},
    "Concatenate on axis 1": _of("Concatenate", axis=1),
    "Dot": _of("Dot", axes=2),
    "Dot, normalized": _of("Dot", axes=(1, 2), normalize=True),
    "Attention": _of("Attention"),
    "Attention, scaled and causal": lambda: (
        lambda pair: layers.Attention(use_scale=True)(pair, use_causal_mask=True)
    ),
    "AdditiveAttention": _of("AdditiveAttention"),
    "MultiHeadAttention": lambda: (lambda attention: lambda pair: attention(*pair))(
        layers.MultiHeadAttention(2, 3)
    ),
}


def focal(y, logits):
    probability = tf.reduce_sum(y * tf.nn.softmax(logits), axis=-1)
    return -((1 - probability) ** 2) * tf.math.log(probability)


def smoothed(y, logits):
    return tf.keras.losses.categorical_crossentropy(y, logits, True, label_smoothing=0.1)


FROM_LOGITS = {
    f"{kind}Crossentropy": getattr(tf.keras.losses, f"{kind}Crossentropy")
    for kind in ("Binary", "BinaryFocal", "Categorical", "CategoricalFocal", "SparseCategorical")
}
# What they do to a label depends on all labels of the batch, or they are no losses of examples, or
# their labels or predictions have other shapes.
_OTHERS = "Hinge SquaredHinge CTC Circle Dice Tversky CategoricalGeneralizedCrossEntropy".split()
LOSSES = {
    "focal": focal,
    "label smoothing": smoothed,
    "huber by hand": lambda y, p: tf.reduce_mean(tf.where(abs(y - p) < 1, (y - p) ** 2, 1.0), 1),
    "margin of the best": lambda y, p: tf.reduce_max(p, 1) - tf.reduce_sum(y * p, 1),
    "softmax by TensorFlow": lambda y, p: tf.nn.softmax_cross_entropy_with_logits(y, p),
    "sigmoid by TensorFlow": lambda y, p: tf.reduce_sum(
        tf.nn.weighted_cross_entropy_with_logits(y, p, 3.0), 1
    ),
    **{
        name: loss(reduction="none")
        for name, loss in inspect.getmembers(tf.keras.losses, inspect.isclass)
        if name not in ("Loss", "Reduction", *_OTHERS, *FROM_LOGITS)
    },
    **{name: FROM_LOGITS[name](from_logits=True, reduction="none") for name in FROM_LOGITS},
    "SparseCategoricalCrossentropy": lambda y, p: tf.keras.losses.SparseCategoricalCrossentropy(
        True, reduction="none"
    )(tf.argmax(y, 1), p),
}
