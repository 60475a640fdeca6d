"""Layers that use variables by hand, as users do; for the models of the zoo."""

from __future__ import annotations

import tensorflow as tf

layers = tf.keras.layers


class Own(layers.Layer):
    """A layer whose weights have names and shapes only."""

    def weight(self, *shape, initializer="glorot_normal"):
        return self.add_weight(name=f"w{len(self.weights)}", shape=shape, initializer=initializer)


class FrozenStatistics(layers.Layer):
    """BatchNormalization with given statistics, whose scale and offset are trained."""

    def build(self, shape):
        self.inner = layers.BatchNormalization()
        self.inner.build(shape)
        self.inner.moving_mean.assign(tf.linspace(-0.5, 0.5, shape[-1]))
        self.inner.moving_variance.assign(tf.linspace(0.5, 2.0, shape[-1]))

    def call(self, x):
        return self.inner(x, training=False)


class TokenAndPosition(layers.Layer):
    """Learned embeddings of words and of places."""

    def __init__(self, size, width):
        super().__init__()
        self.words = layers.Embedding(size, width, mask_zero=True)
        self.places = layers.Embedding(9, width)

    def call(self, ids):
        return self.words(ids) + self.places(tf.range(tf.shape(ids)[1]))

    def compute_mask(self, ids, mask=None):
        return self.words.compute_mask(ids)


class TransformerBlock(layers.Layer):
    """Causal self-attention and a dense layer, normalized and residual."""

    def __init__(self, heads, width):
        super().__init__()
        self.supports_masking = True
        self.attention = layers.MultiHeadAttention(heads, width)
        self.dense = layers.Dense(width, activation="gelu")
        self.norms = layers.LayerNormalization(), layers.LayerNormalization()

    def build(self, shape):
        self.out = layers.Dense(shape[-1])

    def call(self, x):
        x = self.norms[0](x + self.attention(x, x, use_causal_mask=True))
        return self.norms[1](x + self.out(self.dense(x)))


class ClassToken(Own):
    """Puts a learned vector before each sequence, and another one behind it."""

    def build(self, shape):
        self.before, self.behind = self.weight(1, 1, shape[-1]), self.weight(1, shape[-1])

    def call(self, x):
        before = tf.tile(self.before, [tf.shape(x)[0], 1, 1])
        behind = tf.broadcast_to(self.behind, [tf.shape(x)[0], 1, x.shape[-1]])
        return tf.concat([before, x, behind], axis=1)


class First(layers.Layer):
    """The first vector of each sequence."""

    def call(self, x):
        return x[:, 0]


class Factors(Own):
    """Multiplies by a vector, divides by a number, and more of the kind."""

    def build(self, shape):
        self.factor, self.power = self.weight(shape[-1], initializer="ones"), self.weight(1)
        self.temperature = self.weight(initializer="ones")

    def call(self, x):
        x = x * self.factor / tf.exp(self.temperature)
        x = tf.where(x > 0.1, x, self.power * x) + tf.maximum(x, self.power)
        return tf.math.squared_difference(self.factor, x) - (self.power - x) ** 2


class WeightNormalized(Own):
    """A dense layer whose kernel has columns of a learned length."""

    def build(self, shape):
        self.kernel, self.length = self.weight(shape[-1], 4), self.weight(4, initializer="ones")

    def call(self, x):
        return tf.tanh(x @ (tf.nn.l2_normalize(self.kernel, axis=0) * self.length))


class Rearranged(Own):
    """Kernels that are transposed, reshaped, cut and negated on their way to the data."""

    def build(self, shape):
        n = shape[-1]
        self.a, self.b, self.c = self.weight(4, n), self.weight(2, 2, 5), self.weight(n, 9)

    def call(self, x):
        y = tf.tanh(x @ tf.transpose(self.a)) @ tf.reshape(self.b, [4, 5]) - x @ self.c[:, 2:7]
        back = tf.transpose(-self.b, [1, 0, 2])[tf.newaxis]
        return tf.tanh(y + x[:, :4] @ tf.reshape(back, [4, 5]))


class Products(Own):
    """Products of [B, T, n] with variables, by all the ways there are."""

    def build(self, shape):
        _, times, n = shape
        self.a, self.b, self.c = self.weight(n, 4), self.weight(5, 4), self.weight(times, 5, 3)
        self.d, self.e, self.f = self.weight(2, 3), self.weight(times, 2), self.weight(2)

    def call(self, x):
        x = tf.tanh(x @ self.a)  # BatchMatMul, broadcast
        x = tf.tanh(tf.matmul(x, self.b, transpose_b=True))
        x = tf.transpose(x, [1, 2, 0])  # [T, 5, B]
        x = tf.tanh(tf.matmul(self.c, x, transpose_a=True))  # [T, 3, B], a kernel for each time
        x = tf.tanh(tf.tensordot(self.d, x, [[1], [1]]))  # [2, T, B]
        x = tf.einsum("ktb,tj->bkj", x, self.e)
        return tf.linalg.matvec(x, self.f) + tf.transpose(
            tf.matmul(self.d[:, :2], x[:, :, 0], transpose_b=True)
        )


class Sums(Own):
    """Adds variables that are broadcast over the batch, over several axes, and over all."""

    def build(self, shape):
        _, times, n = shape
        self.parts = [
            self.weight(*s) for s in [(n,), (times, 1), (1, 1, n), (times, n), (1, 1, 1), ()]
        ]

    def call(self, x):
        a, b, c, d, e, f = self.parts
        x = tf.tanh(tf.nn.bias_add(tf.tanh(x + a) - b, a))
        x = tf.tanh(c - (d + x))
        return tf.tanh(x - e + f)


class Convolutions(Own):
    """Convolutions with paddings and kernels that no layer has."""

    def build(self, shape):
        n = shape[-1]
        self.a, self.b, self.c = self.weight(3, 2, n, 4), self.weight(2, 2, 3, 4), self.weight(4, 6)
        self.d, self.e = self.weight(2, 3, 3), self.weight(2, 2, 4, 6)

    def call(self, x):
        x = tf.nn.conv2d(x, self.a, [2, 1], [[0, 0], [1, 2], [2, 0], [0, 0]])
        shape = tf.shape(x)
        shape = [shape[0], 2 * shape[1], shape[2] + 1, 3]
        y = tf.nn.conv2d_transpose(tf.tanh(x), self.b, shape, [2, 1], "VALID")
        x = tf.nn.depthwise_conv2d(tf.tanh(y), tf.reshape(self.d, [2, 3, 3, 1]), [1] * 4, "SAME")
        kernel = tf.reshape(tf.transpose(self.c), [2, 1, 3, 4])
        x = tf.tanh(tf.nn.conv2d(x, kernel, 1, "VALID"))
        # None is in groups, which TensorFlow differentiates on some processors only.
        return tf.tanh(tf.nn.conv2d(x, self.e, 1, "SAME"))


class Siamese(layers.Layer):
    """Runs two inputs through the same layers, side by side on the batch axis."""

    def __init__(self, *parts):
        super().__init__()
        self.encoder = tf.keras.Sequential([part() for part in parts])

    def call(self, pairs):
        both = self.encoder(tf.concat([pairs[:, 0], pairs[:, 1]], axis=0))
        one, other = tf.split(both, 2)
        return tf.concat([one * other, tf.abs(one - other)], axis=1)


class Gathers(Own):
    """Rows of tables, along several axes and through views."""

    def build(self, shape):
        self.a, self.b, self.c = self.weight(5, 3), self.weight(3, 5), self.weight(10, 2)

    def call(self, ids):
        ids = tf.cast(ids, tf.int32)  # a Sequential model of Keras 3 passes numbers on as floats
        x = tf.gather(self.a, ids) + tf.gather(tf.transpose(self.b), ids)
        return tf.concat([x, tf.gather(tf.reshape(self.c, [5, 4]), ids[:, ::-1])], axis=-1)


class TimeMajor(Own):
    """A dense layer, a bias and a sum over time, with the batch as axis 1."""

    def build(self, shape):
        self.dense, self.bias = layers.Dense(4, activation="tanh"), self.weight(shape[1], 1, 4)

    def call(self, x):
        x = self.dense(tf.transpose(x, [1, 0, 2])) + self.bias
        return tf.reduce_sum(tf.nn.softmax(x, axis=0) * x, axis=0)


class InFunction(layers.Layer):
    """A layer in a `tf.function` of its own, before one that is not."""

    def __init__(self):
        super().__init__()
        self.inside, self.outside = layers.Dense(4, activation="tanh"), layers.Dense(4)
        self.function = tf.function(lambda x: self.inside(x))

    def build(self, shape):
        # Weights that Keras 3 makes while the function is traced are constants in that trace.
        self.inside.build(shape)

    def call(self, x):
        return self.outside(self.function(x))


class Loop(Own):
    """Applies one kernel in a loop."""

    def build(self, shape):
        self.a = self.weight(shape[-1], shape[-1])

    def call(self, x):
        body = lambda i, x: (i + 1, tf.tanh(x @ self.a))  # noqa: E731
        x = tf.while_loop(lambda i, x: i < 3, body, (tf.constant(0), x), maximum_iterations=3)[1]
        return x @ self.a


class Branch(Own):
    """Applies a kernel in a branch that a public number takes."""

    def build(self, shape):
        self.a, self.flag = self.weight(shape[-1], shape[-1]), tf.Variable(1.0, trainable=False)

    def call(self, x):
        return tf.cond(self.flag > 0, lambda: tf.tanh(x @ self.a), lambda: x) @ self.a


class Recomputed(Own):
    """A kernel whose activations are computed again for the gradient, and that is used again."""

    def build(self, shape):
        self.a = self.weight(shape[-1], shape[-1])

    def call(self, x):
        return tf.recompute_grad(lambda x: tf.tanh(x @ self.a))(x) @ self.a
