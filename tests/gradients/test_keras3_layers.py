"""Keras 3's own layers: their gradients are exact and traced, or they are refused."""

import numpy as np
import pytest

import tf_adaptive_dp as dp
from tests.helpers import zoo
from tests.helpers.gradients_asked import squared_norms
from tf_adaptive_dp._keras.generation import GENERATION, keras

pytestmark = [
    pytest.mark.skipif(GENERATION != 3, reason="layers that only Keras 3 has, or has anew"),
    pytest.mark.filterwarnings("ignore:No rule covers"),
]
layers = keras.layers
IDS = np.array([[1, 1, 1, 2], [0, 3, 0, 3], [4, 1, 1, 4], [2, 2, 2, 2]])


def of(kind, *args, **kwargs):
    """A maker of a layer."""
    return lambda: getattr(layers, kind)(*args, **kwargs)


def dense(units=4):
    return of("Dense", units, activation="tanh")


class Wrapper(layers.Layer):
    """Calls a layer that takes several inputs, or a function of layers."""

    def __init__(self, inner, **kwargs):
        super().__init__()
        self.inner, self.kwargs = inner, kwargs


class SelfAttention(Wrapper):
    """Attention of a sequence to itself."""

    def build(self, shape):
        self.inner.build(shape, shape)

    def call(self, x):
        return self.inner(x, x, **self.kwargs)


class PairAttention(Wrapper):
    """Attention with learned queries."""

    def build(self, shape):
        self.query = layers.Dense(4)
        self.query.build(shape)
        self.inner.build([shape, shape])

    def call(self, x):
        return self.inner([self.query(x), x], **self.kwargs)


class Tied(Wrapper):
    """Embeds tokens, and scores all tokens by the same table."""

    def build(self, shape):
        self.inner.build(shape)

    def call(self, ids):
        return self.inner(keras.ops.tanh(self.inner(ids)), reverse=True)


class InTraining(Wrapper):
    """Calls a layer that a functional model would leave out, as Keras does with Equalization."""

    def call(self, x):
        return self.inner(x, training=True)


class Recomputed(Wrapper):
    """A layer whose activations are computed again for the gradient."""

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return keras.remat(self.inner.call)(x)


class RecomputedTwice(Recomputed):
    """A layer that is recomputed within what is recomputed, and used before and after that."""

    def call(self, x):
        within = keras.remat(self.inner.call)
        outside = keras.remat(lambda x: within(x) + self.inner(x))
        return self.inner(outside(self.inner(x)))


class Leaking(Recomputed):
    """Uses a tensor of a function that is recomputed outside of it, too; Keras ignores that."""

    def call(self, x):
        kept = []

        def function(x):
            kept.append(self.inner(x))
            return keras.ops.tanh(kept[-1])

        return keras.remat(function)(x) + kept[0]


class Capturing(Recomputed):
    """Uses a tensor in a function that is recomputed without passing it; Keras ignores that."""

    def call(self, x):
        captured = self.inner(x)
        return keras.remat(lambda x: x * captured)(x) + captured


class ReadingLate(Recomputed):
    """Uses a variable only when it is recomputed; the first run reads it and ignores it."""

    def call(self, x):
        runs = []

        def function(x):
            runs.append(self.inner(x))
            return runs[-1] if len(runs) > 1 else x

        return keras.remat(function)(x)


class MixingAgain(layers.Layer):
    """Looks at the other examples only when it is recomputed."""

    def call(self, x):
        runs = []

        def function(x):
            runs.append(x)
            return x - keras.ops.mean(x, axis=0) if len(runs) > 1 else x

        return keras.remat(function)(x)


class Function(layers.Layer):
    """A function of `keras.ops` that keeps the shape."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)

    def compute_output_shape(self, shape):
        return shape


def function(name):
    """A maker of a layer with one of the functions below."""
    return lambda: Function(FUNCTIONS[name])


FUNCTIONS = {
    "map": lambda x: keras.ops.map(keras.ops.tanh, x),
    "vectorized_map": lambda x: keras.ops.vectorized_map(keras.ops.tanh, x),
    "while_loop": lambda x: keras.ops.while_loop(
        lambda i, x: i < 3, lambda i, x: (i + 1, keras.ops.tanh(x)), (0, x)
    )[1],
    "fori_loop": lambda x: keras.ops.fori_loop(0, 3, lambda i, x: keras.ops.tanh(x), x),
    "scan over time": lambda x: keras.ops.moveaxis(
        keras.ops.scan(
            lambda state, row: (keras.ops.tanh(state + row), state),
            keras.ops.zeros_like(x[:, 0]),
            keras.ops.moveaxis(x, 1, 0),
        )[1],
        0,
        1,
    ),
    "cond": lambda x: keras.ops.cond(keras.ops.shape(x)[1] > 2, lambda: x, lambda: -x),
    "one_hot of argmax": lambda x: x + keras.ops.one_hot(keras.ops.argmax(x, -1), 4),
    "take_along_axis": lambda x: keras.ops.take_along_axis(x, keras.ops.argsort(x, axis=1), axis=1),
    "dot_product_attention": lambda x: keras.ops.squeeze(
        keras.ops.dot_product_attention(*[keras.ops.expand_dims(x, 2)] * 3), 2
    ),
    "qr": lambda x: keras.ops.qr(x)[0],
}


def with_lora(kind, shape, *args, quantized=None, **kwargs):
    """A maker of a layer of which only adapters, and what cannot be adapted, are trained."""

    def make():
        layer = getattr(layers, kind)(*args, **kwargs)
        layer.build((None, *shape))
        if quantized:
            layer.quantize(quantized)
        layer.enable_lora(2)
        return layer

    return make


def quantized(mode):
    """A maker of a frozen dense layer of small numbers."""

    def make():
        layer = layers.Dense(4)
        layer.build((None, 4))
        layer.quantize(mode)
        return layer

    return make


def recomputed(kind, *args, **kwargs):
    """A maker of a layer that is computed again for the gradient."""
    return lambda: Recomputed(of(kind, *args, **kwargs)())


def with_recomputed_activations():
    with keras.RematScope(mode="activations"):
        return layers.Dense(4, activation="tanh")


EQUATION = ("abc,cd->abd",)
TIME, IMAGES = (5, 3), (4, 4, 3)
# name: (shape of an example or the batch itself, makers of layers)
TRACED = {
    "MultiHeadAttention": (
        (4, 3),
        [dense(), lambda: SelfAttention(layers.MultiHeadAttention(2, 3))],
    ),
    "LSTM": (TIME, [of("LSTM", 3)]),
    "LoRA on Dense": ((5,), [with_lora("Dense", (5,), 4)]),
    "RMSNormalization": ((4, 5), [dense(6), of("RMSNormalization")]),
    "ReversibleEmbedding": (IDS, [lambda: Tied(layers.ReversibleEmbedding(5, 3))]),
    "Conv2D, grouped": ((6, 6, 4), [of("Conv2D", 4, 3, groups=2, activation="tanh")]),
    "GroupQueryAttention": (
        (4, 3),
        [dense(), lambda: SelfAttention(layers.GroupQueryAttention(3, 4, 2))],
    ),
    "RematScope of activations": ((5,), [with_recomputed_activations]),
    "keras.remat": ((5,), [dense(), recomputed("Dense", 4, "tanh"), recomputed("Dense", 3)]),
    "keras.remat of LSTM": (TIME, [dense(), recomputed("LSTM", 3)]),
    "keras.remat of GRU": (TIME, [recomputed("GRU", 3, reset_after=False)]),
    "keras.remat of Bidirectional": (
        TIME,
        [dense(), lambda: Recomputed(layers.Bidirectional(layers.LSTM(2)))],
    ),
    "keras.remat of MultiHeadAttention": (
        (4, 3),
        [lambda: Recomputed(SelfAttention(layers.MultiHeadAttention(2, 3)))],
    ),
    "keras.remat of Conv2D": (IMAGES, [dense(3), recomputed("Conv2D", 2, 3)]),
    "keras.remat of Embedding": (IDS, [recomputed("Embedding", 5, 3)]),
    "keras.remat of what captures": ((5,), [lambda: Capturing(layers.Dense(5))]),
    "keras.remat of what leaks": ((5,), [lambda: Leaking(layers.Dense(4))]),
    "keras.remat within keras.remat": ((5,), [dense(), lambda: RecomputedTwice(layers.Dense(4))]),
    "CategoryEncoding, multi-hot": (IDS, [of("CategoryEncoding", 5, output_mode="multi_hot")]),
    "Conv1D": ((6, 3), [of("Conv1D", 4, 3, padding="causal", dilation_rate=2)]),
    "Conv1D, grouped": ((6, 4), [of("Conv1D", 4, 3, groups=2)]),
    "Conv2D": ((6, 6, 2), [of("Conv2D", 4, 3, strides=2, padding="same")]),
    "Conv3D": ((4, 4, 4, 2), [of("Conv3D", 3, 2)]),
    "Conv3D, grouped": ((4, 4, 4, 4), [of("Conv3D", 4, 2, groups=2)]),
    "Conv1DTranspose": ((6, 3), [of("Conv1DTranspose", 4, 3, strides=2)]),
    "Conv2DTranspose": ((3, 3, 2), [of("Conv2DTranspose", 4, 3, strides=2, padding="same")]),
    "Conv2DTranspose, output padded": (
        (3, 3, 2),
        [of("Conv2DTranspose", 4, 3, strides=2, output_padding=1)],
    ),
    "Conv3DTranspose": ((2, 3, 2, 2), [of("Conv3DTranspose", 3, 2, strides=(2, 1, 2))]),
    "SeparableConv1D": ((6, 3), [of("SeparableConv1D", 4, 3, depth_multiplier=2)]),
    "SeparableConv2D": ((6, 6, 3), [of("SeparableConv2D", 4, 3, depth_multiplier=2)]),
    "DepthwiseConv1D": ((6, 3), [of("DepthwiseConv1D", 3, strides=2)]),
    "DepthwiseConv2D": ((6, 6, 3), [of("DepthwiseConv2D", 3, strides=2, depth_multiplier=2)]),
    "LayerNormalization": ((4, 5), [dense(6), of("LayerNormalization")]),
    "LayerNormalization of all": ((4, 5), [dense(6), of("LayerNormalization", axis=[1, 2])]),
    "GroupNormalization": ((6, 6, 4), [dense(6), of("GroupNormalization", 3)]),
    "UnitNormalization": ((5,), [dense(6), of("UnitNormalization")]),
    "BatchNormalization, frozen": ((5,), [dense(6), of("BatchNormalization", trainable=False)]),
    "SpectralNormalization": (
        (5,),
        [lambda: layers.SpectralNormalization(layers.Dense(4), power_iterations=60)],
    ),
    "SimpleRNN": (TIME, [of("SimpleRNN", 3)]),
    "LSTM of sequences": (TIME, [of("LSTM", 3, return_sequences=True)]),
    "LSTM, unrolled": (TIME, [of("LSTM", 3, unroll=True)]),
    "LSTM, masked": (IDS, [of("Embedding", 5, 3, mask_zero=True), of("LSTM", 3)]),
    "GRU": (TIME, [of("GRU", 3)]),
    "GRU, reset before": (TIME, [of("GRU", 3, reset_after=False)]),
    "GRU, unrolled": (TIME, [of("GRU", 3, unroll=True)]),
    "Bidirectional": (TIME, [lambda: layers.Bidirectional(layers.LSTM(3))]),
    "stacked cells": (
        TIME,
        [lambda: layers.RNN([layers.LSTMCell(3), layers.GRUCell(2)])],
    ),
    "ConvLSTM1D": ((3, 4, 2), [of("ConvLSTM1D", 2, 2)]),
    "ConvLSTM2D": ((3, 4, 4, 2), [of("ConvLSTM2D", 2, 2)]),
    "ConvLSTM3D": ((3, 3, 3, 3, 2), [of("ConvLSTM3D", 2, 2)]),
    "TimeDistributed": (TIME, [lambda: layers.TimeDistributed(layers.Dense(3))]),
    "MultiHeadAttention, causal": (
        (4, 3),
        [dense(), lambda: SelfAttention(layers.MultiHeadAttention(2, 3), use_causal_mask=True)],
    ),
    "GroupQueryAttention, causal": (
        (4, 3),
        [dense(), lambda: SelfAttention(layers.GroupQueryAttention(3, 4, 2), use_causal_mask=True)],
    ),
    "Attention": ((4, 3), [dense(), lambda: PairAttention(layers.Attention(use_scale=True))]),
    "Attention by sums": (
        (4, 3),
        [dense(), lambda: PairAttention(layers.Attention(score_mode="concat", use_scale=True))],
    ),
    "AdditiveAttention": (
        (4, 3),
        [dense(), lambda: PairAttention(layers.AdditiveAttention())],
    ),
    "EinsumDense": ((4, 3), [of("EinsumDense", *EQUATION, (4, 5), bias_axes="d")]),
    "EinsumDense by position": (
        (4, 3),
        [of("EinsumDense", "abc,bcd->abd", (4, 5), bias_axes="bd")],
    ),
    "Embedding": (IDS, [of("Embedding", 5, 3)]),
    "Embedding, masked": (
        IDS,
        [of("Embedding", 5, 3, mask_zero=True), dense(), of("GlobalAveragePooling1D")],
    ),
    "ReversibleEmbedding, untied": (
        IDS,
        [lambda: Tied(layers.ReversibleEmbedding(5, 3, tie_weights=False))],
    ),
    "PReLU": ((4, 5), [dense(6), of("PReLU")]),
    "PReLU, shared": ((4, 5, 3), [dense(6), of("PReLU", shared_axes=[1, 2])]),
    "Normalization": ((5,), [of("Normalization", mean=0.3, variance=2.0), dense()]),
    "Rescaling": ((5,), [of("Rescaling", 0.5), dense()]),
    "Discretization": (
        (4,),
        [of("Discretization", bin_boundaries=[0.0, 1.0]), of("Embedding", 3, 3)],
    ),
    "CategoryEncoding, one-hot": (IDS, [of("CategoryEncoding", 5, output_mode="one_hot")]),
    "CategoryEncoding of counts": (IDS, [of("CategoryEncoding", 5, output_mode="count")]),
    "Hashing": (IDS, [of("Hashing", 4), of("Embedding", 4, 3)]),
    "IntegerLookup": (IDS, [of("IntegerLookup", vocabulary=[2, 0, 1]), of("Embedding", 5, 3)]),
    "IntegerLookup, multi-hot": (
        IDS,
        [of("IntegerLookup", vocabulary=[2, 0, 1], output_mode="multi_hot")],
    ),
    "Solarization": (IMAGES, [dense(3), of("Solarization")]),
    "Resizing": (IMAGES, [of("Resizing", 6, 6)]),
    "CenterCrop": (IMAGES, [of("CenterCrop", 2, 2)]),
    "STFTSpectrogram": (
        (32, 1),
        [of("STFTSpectrogram", frame_length=8, frame_step=4, fft_length=8)],
    ),
    "AdaptiveAveragePooling2D": (IMAGES, [dense(), of("AdaptiveAveragePooling2D", 2)]),
    "AdaptiveMaxPooling2D": (IMAGES, [dense(), of("AdaptiveMaxPooling2D", 2)]),
    "LoRA on EinsumDense": (
        (4, 5),
        [with_lora("EinsumDense", (4, 5), *EQUATION, (4, 4), bias_axes="d")],
    ),
    "LoRA on Embedding": (IDS, [with_lora("Embedding", (4,), 5, 3)]),
    "LoRA on Conv1D": ((6, 3), [with_lora("Conv1D", (6, 3), 4, 3)]),
    "LoRA on Conv2D": ((6, 6, 3), [with_lora("Conv2D", (6, 6, 3), 4, 3)]),
    "LoRA on Conv3D": ((4, 4, 4, 3), [with_lora("Conv3D", (4, 4, 4, 3), 4, 2)]),
    "Dense of int8": ((5,), [dense(), quantized("int8")]),
    "Dense of int4": ((5,), [dense(), quantized("int4")]),
    "LoRA on Dense of int8": ((5,), [dense(), with_lora("Dense", (4,), 4, quantized="int8")]),
    "LoRA on EinsumDense of int8": (
        (4, 5),
        [with_lora("EinsumDense", (4, 5), *EQUATION, (4, 4), bias_axes="d", quantized="int8")],
    ),
    "LoRA on Embedding of int8": (IDS, [with_lora("Embedding", (4,), 5, 3, quantized="int8")]),
    **{f"ops: {name}": ((4, 4), [dense(), function(name)]) for name in FUNCTIONS},
}
# The Jacobian is taken for some variables, which is exact but slow.
WITH_JACOBIAN = {
    "keras.remat that reads late": ((5,), [lambda: ReadingLate(layers.Dense(5))]),
}

# Random, so that there is nothing to compare with; examples must stay apart all the same.
RANDOM = {
    "Dropout": ((5,), [dense(), of("Dropout", 0.5)]),
    "LSTM with dropout": (TIME, [of("LSTM", 3, dropout=0.5, recurrent_dropout=0.5)]),
    "RandomErasing": (IMAGES, [dense(3), of("RandomErasing")]),
    "RandomPerspective": (IMAGES, [of("RandomPerspective")]),
    "SpatialDropout1D": ((4, 5), [dense(), of("SpatialDropout1D", 0.5)]),
    "GaussianNoise": ((5,), [dense(), of("GaussianNoise", 0.5)]),
    "GaussianDropout": ((5,), [dense(), of("GaussianDropout", 0.5)]),
    "AlphaDropout": ((5,), [dense(), of("AlphaDropout", 0.5)]),
    "RandomFlip": (IMAGES, [of("RandomFlip")]),
    "RandomCrop": (IMAGES, [of("RandomCrop", 3, 3)]),
    "RandomPosterization": (IMAGES, [of("RandomPosterization", 4)]),
    "RandomColorJitter": (IMAGES, [of("RandomColorJitter", brightness_factor=0.1)]),
    "RandomGaussianBlur": (IMAGES, [of("RandomGaussianBlur")]),
    "RandomTranslation": (IMAGES, [of("RandomTranslation", 0.1, 0.1)]),
    **{
        f"Random{name}": (IMAGES, [of(f"Random{name}", 0.1)])
        for name in "Brightness Contrast Grayscale Hue Invert Rotation Saturation Sharpness Shear "
        "ColorDegeneration Zoom".split()
    },
}

MIX = "[Ee]xamples in a batch affect each other"
REFUSED = {
    "BatchNormalization": ((5,), [dense(), of("BatchNormalization")], MIX),
    "keras.remat of BatchNormalization": (
        (5,),
        [dense(), lambda: Recomputed(InTraining(layers.BatchNormalization()))],
        MIX,
    ),
    "keras.remat that mixes": (
        (5,),
        [dense(), MixingAgain],
        "custom gradient mixes.*whose gradient reduces over the batch axis",
    ),
    "MixUp": (IMAGES, [of("MixUp")], f"{MIX}.*picks examples by index"),
    "CutMix": (IMAGES, [of("CutMix")], f"{MIX}.*picks examples by index"),
    "Dense of float8": (
        (5,),
        [dense(), quantized("float8")],
        "custom gradient mixes.*with respect to a variable",
    ),
    # Augment images in the `tf.data` pipeline instead.
    "RandomElasticTransform": (IMAGES, [of("RandomElasticTransform")], MIX),
    "RandAugment": (IMAGES, [of("RandAugment")], MIX),
    "AugMix": (IMAGES, [of("AugMix")], MIX),
    # It counts the pixels of the whole batch.
    "Equalization": (IMAGES, [lambda: InTraining(layers.Equalization(value_range=(-3, 3)))], MIX),
    "MelSpectrogram": (
        (64,),
        [
            of("MelSpectrogram", fft_length=16, sequence_stride=8, num_mel_bins=4),
        ],
        MIX,
    ),
}


def problem(case):
    """Layers and three logits, on a batch of 4."""
    shape, makers = case[:2]
    keras.utils.set_random_seed(3)
    model = keras.Sequential([*(make() for make in makers), layers.Flatten(), layers.Dense(3)])
    return zoo.classifier(model, zoo.floats(4, *shape) if isinstance(shape, tuple) else shape)


def answers(found, method):
    """Squared norms [4] and the sum of gradients, in a step for batches of any size."""

    def step(*batch):
        source = zoo.source(found, *batch, method=method)
        return source.squared_norms(), source.weighted_sum(np.ones(4, "float32"))

    return zoo.in_mode("graph", step, found.batch)(*found.batch)


def check(found, method):
    norms, sums = answers(found, method)
    rows = zoo.batch_of_one_gradients(found)
    np.testing.assert_allclose(norms, squared_norms(rows), rtol=1e-5)
    size = max(np.abs(r).max() for r in rows)
    for actual, expected in zip(sums, rows):
        np.testing.assert_allclose(actual, expected.sum(axis=0), atol=1e-5 * size)


@pytest.mark.slow_after(9)
@pytest.mark.parametrize("name", TRACED)
def test_gradients_are_exact_and_traced(name):
    check(problem(TRACED[name]), "traced")


@pytest.mark.parametrize("name", WITH_JACOBIAN)
def test_gradients_are_exact_with_a_jacobian(name):
    found = problem(WITH_JACOBIAN[name])
    with pytest.warns(UserWarning, match="No rule covers"):
        check(found, "auto")


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", RANDOM)
def test_random_layers_are_accepted(name):
    norms, _ = answers(problem(RANDOM[name]), "traced")
    # What is drawn may erase an image, whose gradient then is 0.
    assert np.all(np.isfinite(norms)) and np.any(norms > 0)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_examples_is_refused(name):
    found = problem(REFUSED[name])
    with pytest.raises(dp.NotPrivateError, match=REFUSED[name][2]):
        answers(found, "auto")


FITTED = [
    "LoRA on Dense of int8",
    "MultiHeadAttention",
    "LSTM",
    "RematScope of activations",
    "GroupQueryAttention, causal",
    "ReversibleEmbedding",
    "CategoryEncoding, multi-hot",
    "Conv2D, grouped",
    "Bidirectional",
    "ConvLSTM2D",
]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", FITTED)
def test_a_compiled_model_takes_the_mean_of_clipped_gradients(name):
    shape, makers = TRACED[name]
    keras.utils.set_random_seed(3)
    model = keras.Sequential([*(make() for make in makers), layers.Flatten(), layers.Dense(3)])
    found = zoo.classifier(model, zoo.floats(4, *shape) if isinstance(shape, tuple) else shape)
    rows = zoo.batch_of_one_gradients(found)
    norms = np.sqrt(squared_norms(rows))
    clip = float(np.median(norms))
    before = [v.numpy() for v in found.variables]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(dp.DPSGD(clip, 0.0, learning_rate=1.0), loss)
    model.train_on_batch(*found.batch)
    share = np.minimum(1.0, clip / norms)
    for old, new, row in zip(before, found.variables, rows):
        expected = np.tensordot(share, row, axes=1) / 4
        np.testing.assert_allclose(old - new.numpy(), expected, rtol=1e-4, atol=1e-5)
