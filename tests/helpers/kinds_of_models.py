"""Models of the kinds that Keras's own examples show, with arguments of `compile` and a batch."""

import numpy as np
import tensorflow as tf

layers = tf.keras.layers
B, WORDS, LENGTH, CLASSES = 4, 11, 6, 3
RANDOM = np.random.default_rng(0)
LABELS = np.array([0, 2, 1, 2])
IMAGES = RANDOM.normal(size=[B, 8, 8, 3]).astype("float32")
TEXTS = RANDOM.integers(1, WORDS, [B, LENGTH])
SERIES = RANDOM.normal(size=[B, 10, 2]).astype("float32")
CLASSIFIED = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}


def classified(inputs, x):
    return tf.keras.Model(inputs, layers.Dense(CLASSES, "softmax")(x))


class Positions(layers.Layer):
    """Adds a learned vector to each position."""

    def build(self, shape):
        self.table = self.add_weight(name="table", shape=shape[1:], initializer="uniform")

    def call(self, x):
        return x + self.table


class Fourier(layers.Layer):
    def call(self, x):
        return tf.math.real(tf.signal.fft2d(tf.cast(x, tf.complex64)))


def encoder(x, causal=False):
    attended = layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=causal)
    x = layers.LayerNormalization()(x + attended)
    hidden = layers.Dense(x.shape[-1])(layers.Dense(8, "gelu")(x))
    return layers.LayerNormalization()(x + hidden)


def patches():
    inputs = tf.keras.Input([8, 8, 3])
    return inputs, layers.Reshape([4, 8])(layers.Conv2D(8, 4, strides=4)(inputs))


def vision_transformer():
    inputs, x = patches()
    x = layers.Flatten()(encoder(Positions()(x)))
    return classified(inputs, x), CLASSIFIED, IMAGES, LABELS


def mlp_mixer():
    inputs, x = patches()
    tokens = layers.Permute([2, 1])(layers.LayerNormalization()(x))
    tokens = layers.Dense(4)(layers.Dense(8, "gelu")(tokens))
    x = layers.Add()([x, layers.Permute([2, 1])(tokens)])
    channels = layers.Dense(8)(layers.Dense(8, "gelu")(layers.LayerNormalization()(x)))
    x = layers.GlobalAveragePooling1D()(layers.Add()([x, channels]))
    return classified(inputs, x), CLASSIFIED, IMAGES, LABELS


def fnet():
    inputs = tf.keras.Input([LENGTH], dtype="int32")
    x = Positions()(layers.Embedding(WORDS, 8)(inputs))
    x = layers.LayerNormalization()(layers.Add()([x, Fourier()(x)]))
    x = layers.LayerNormalization()(layers.Add()([x, layers.Dense(8, "relu")(x)]))
    return classified(inputs, layers.GlobalAveragePooling1D()(x)), CLASSIFIED, TEXTS, LABELS


def mini_gpt():
    inputs = tf.keras.Input([LENGTH], dtype="int32")
    x = encoder(Positions()(layers.Embedding(WORDS, 8)(inputs)), causal=True)
    model = tf.keras.Model(inputs, layers.Dense(WORDS)(x))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, {"loss": loss}, TEXTS, np.roll(TEXTS, -1, axis=1)


class VariationalAutoencoder(tf.keras.Model):
    """Its reparametrized draws are random, unless `spread` is 0."""

    spread = 0.0

    def __init__(self):
        super().__init__()
        self.encoder = layers.Dense(4)
        self.decoder = layers.Dense(SERIES.shape[-1] * SERIES.shape[1])

    def call(self, x):
        mean, log_variance = tf.split(self.encoder(tf.reshape(x, [-1, 20])), 2, axis=1)
        kl = -0.5 * tf.reduce_sum(1 + log_variance - mean**2 - tf.exp(log_variance), axis=1)
        self.add_loss(tf.reduce_mean(kl))
        noise = self.spread * tf.random.normal(tf.shape(mean))
        return tf.reshape(self.decoder(mean + tf.exp(0.5 * log_variance) * noise), [-1, 10, 2])


def variational_autoencoder():
    model = VariationalAutoencoder()
    model(SERIES)
    return model, {"loss": "mse"}, SERIES, SERIES


def autoencoder():
    inputs = tf.keras.Input([8, 8, 3])
    x = layers.MaxPooling2D(2)(layers.Conv2D(4, 3, padding="same", activation="relu")(inputs))
    x = layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="relu")(x)
    outputs = layers.Conv2D(3, 3, padding="same", activation="sigmoid")(x)
    targets = 1 / (1 + np.exp(-IMAGES))
    return tf.keras.Model(inputs, outputs), {"loss": "binary_crossentropy"}, IMAGES, targets


class Distiller(tf.keras.Model):
    """A student that learns from labels and from a teacher that does not train."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = layers.Dense(CLASSES), layers.Dense(CLASSES)
        self.teacher.trainable = False

    def call(self, x):
        return self.student(tf.reshape(x, [-1, 20]))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        soft = tf.nn.softmax(self.teacher(tf.reshape(x, [-1, 20])) / 2.0)
        distance = tf.keras.losses.KLDivergence()(soft, tf.nn.softmax(y_pred / 2.0))
        own = super().compute_loss(x, y, y_pred, sample_weight, **kwargs)
        return 0.3 * own + 0.7 * distance


def distillation():
    model = Distiller()
    model(SERIES)
    model.teacher(tf.reshape(SERIES, [-1, 20]))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, {"loss": loss}, SERIES, LABELS


def structured_data():
    inputs = {
        "age": tf.keras.Input([1], name="age"),
        "job": tf.keras.Input([1], dtype="int64", name="job"),
    }
    age = layers.Normalization(mean=40.0, variance=100.0)(inputs["age"])
    job = layers.IntegerLookup(vocabulary=[3, 5, 8], output_mode="one_hot")(inputs["job"])
    x = layers.Dense(4, "relu")(layers.Concatenate()([age, job]))
    x = tf.keras.Model(inputs, layers.Dense(1, "sigmoid")(x))
    data = {"age": np.array([[20.0], [31.0], [55.0], [47.0]], "float32")}
    data["job"] = np.array([[3], [8], [5], [9]])
    return x, {"loss": "binary_crossentropy"}, data, np.array([[0.0], [1.0], [1.0], [0.0]])


class Recommender(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.users, self.films = layers.Embedding(5, 4), layers.Embedding(7, 4)
        self.biases = layers.Embedding(7, 1)

    def call(self, pairs):
        user, film = self.users(pairs[:, 0]), self.films(pairs[:, 1])
        score = tf.reduce_sum(user * film, axis=1, keepdims=True) + self.biases(pairs[:, 1])
        return tf.sigmoid(score)


def collaborative_filtering():
    model, pairs = Recommender(), np.array([[0, 1], [4, 6], [2, 1], [2, 3]])
    model(pairs)
    return model, {"loss": "mse"}, pairs, np.array([[1.0], [0.2], [0.5], [0.9]])


def timeseries_transformer():
    inputs = tf.keras.Input([10, 2])
    x = layers.LayerNormalization(epsilon=1e-6)(inputs)
    x = layers.Add()([layers.MultiHeadAttention(2, 4)(x, x), inputs])
    hidden = layers.Conv1D(4, 1, activation="relu")(layers.LayerNormalization(epsilon=1e-6)(x))
    x = layers.Add()([layers.Conv1D(2, 1)(hidden), x])
    x = layers.GlobalAveragePooling1D(data_format="channels_first")(x)
    return classified(inputs, layers.Dense(8, "relu")(x)), CLASSIFIED, SERIES, LABELS


def bidirectional_lstm():
    inputs = tf.keras.Input([LENGTH], dtype="int32")
    x = layers.Embedding(WORDS, 4)(inputs)
    x = layers.Bidirectional(layers.LSTM(3, return_sequences=True))(x)
    return (
        *(classified(inputs, layers.Bidirectional(layers.LSTM(3))(x)), CLASSIFIED),
        *(TEXTS, LABELS),
    )


def conv_lstm():
    inputs = tf.keras.Input([3, 6, 6, 1])
    x = layers.ConvLSTM2D(2, 3, padding="same", return_sequences=True)(inputs)
    outputs = layers.Conv3D(1, 3, padding="same", activation="sigmoid")(x)
    videos = RANDOM.random([B, 3, 6, 6, 1], dtype="float32")
    return tf.keras.Model(inputs, outputs), {"loss": "binary_crossentropy"}, videos, videos


def convolutions_over_time():
    inputs = x = tf.keras.Input([10, 2])
    for _ in range(2):
        x = layers.Conv1D(4, 3, padding="same")(x)
        x = layers.ReLU()(layers.GroupNormalization(2)(x))
    return classified(inputs, layers.GlobalAveragePooling1D()(x)), CLASSIFIED, SERIES, LABELS


def text_cnn():
    inputs = tf.keras.Input([LENGTH], dtype="int32")
    x = layers.Embedding(WORDS, 4)(inputs)
    x = layers.Conv1D(5, 3, padding="valid", activation="relu")(x)
    return classified(inputs, layers.GlobalMaxPooling1D()(x)), CLASSIFIED, TEXTS, LABELS


KINDS = [
    vision_transformer,
    text_cnn,
    mlp_mixer,
    fnet,
    mini_gpt,
    variational_autoencoder,
    autoencoder,
    distillation,
    structured_data,
    collaborative_filtering,
    timeseries_transformer,
    bidirectional_lstm,
    conv_lstm,
    convolutions_over_time,
]
