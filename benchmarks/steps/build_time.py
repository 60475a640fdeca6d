"""Seconds to trace a private step and to run it for the first time, next to Keras's SGD.

No privacy claim: the data is random. Each model is built anew for each optimizer, in alternation.
The `train_function` of a compiled model is traced and then called for the first time, when
TensorFlow optimizes the graph. The CPU time of the process is shown beside the elapsed time, since
other processes disturb it less.

    python -m benchmarks.steps.build_time
    python -m benchmarks.steps.build_time --models bidirectional_lstm --batch unknown --rounds 3
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Callable

import numpy as np
import tensorflow as tf

import tf_adaptive_dp as dp
from benchmarks.core import parser

_BATCH, _TIME, _FEATURES, _WORDS = 8, 12, 6, 50


def _on_sequences(*layers: Callable[[], tf.keras.layers.Layer]) -> Callable[[], tf.keras.Model]:
    """A model of sequences of vectors."""
    return lambda: tf.keras.Sequential(
        [tf.keras.Input([_TIME, _FEATURES]), *(make() for make in layers), tf.keras.layers.Dense(4)]
    )


def _transformer() -> tf.keras.Model:
    inputs = x = tf.keras.Input([_TIME, _FEATURES])
    for _ in range(2):
        heads = tf.keras.layers.MultiHeadAttention(2, 4)(x, x)
        x = tf.keras.layers.LayerNormalization()(x + heads)
        hidden = tf.keras.layers.Dense(16, "gelu")(x)
        hidden = tf.keras.layers.Dense(_FEATURES)(tf.keras.layers.Dropout(0.1)(hidden))
        x = tf.keras.layers.LayerNormalization()(x + hidden)
    x = tf.keras.layers.GlobalAveragePooling1D()(x)
    return tf.keras.Model(inputs, tf.keras.layers.Dense(4)(x))


def _text() -> tf.keras.Model:
    layers = tf.keras.layers
    words = tf.keras.Input([_TIME], dtype=tf.int64)
    return tf.keras.Sequential(
        [words, layers.Embedding(_WORDS, 8, mask_zero=True), layers.LSTM(8), layers.Dense(4)]
    )


def _images() -> tf.keras.Model:
    layers = tf.keras.layers
    convolutions = [layers.Conv2D(4, 3, activation="relu") for _ in range(3)]
    end = [layers.Flatten(), layers.Dense(16, "relu"), layers.Dense(4)]
    return tf.keras.Sequential([tf.keras.Input([12, 12, 3]), *convolutions, *end])


def _videos() -> tf.keras.Model:
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input([4, 8, 8, 3]),
            layers.ConvLSTM2D(4, 3),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4),
        ]
    )


def _recurrent() -> dict[str, Callable[[], tf.keras.Model]]:
    layers, models = tf.keras.layers, {}
    for name in ("SimpleRNN", "GRU", "LSTM"):
        layer = getattr(layers, name)
        models[name.lower()] = _on_sequences(lambda layer=layer: layer(8))
    models["lstm_masked"] = _on_sequences(lambda: layers.Masking(), lambda: layers.LSTM(8))
    models["lstm_dropout"] = _on_sequences(
        lambda: layers.LSTM(8, dropout=0.1, recurrent_dropout=0.1)
    )
    models["gru_sequences"] = _on_sequences(
        lambda: layers.GRU(8, return_sequences=True), lambda: layers.GlobalAveragePooling1D()
    )
    models["stacked_grus"] = _on_sequences(
        *[lambda: layers.GRU(8, return_sequences=True)] * 2, lambda: layers.GRU(8)
    )
    models["bidirectional_lstm"] = _on_sequences(lambda: layers.Bidirectional(layers.LSTM(8)))
    return models


MODELS: dict[str, Callable[[], tf.keras.Model]] = {
    "mlp": lambda: tf.keras.Sequential(
        [
            tf.keras.Input([_FEATURES]),
            *[tf.keras.layers.Dense(16, "relu") for _ in range(3)],
            tf.keras.layers.Dense(4),
        ]
    ),
    "cnn": _images,
    "transformer": _transformer,
    **_recurrent(),
    "embedding_lstm": _text,
    "conv_lstm_2d": _videos,
}


def _batches(model: tf.keras.Model, known: bool) -> tf.data.Dataset:
    random, inputs = np.random.default_rng(0), model.inputs[0]
    shape = [n or _TIME for n in inputs.shape[1:]]
    x = random.standard_normal((8 * _BATCH, *shape)).astype(np.float32)
    if inputs.dtype.is_integer:
        x = random.integers(_WORDS, size=x.shape)
    data = tf.data.Dataset.from_tensor_slices((x, random.integers(4, size=len(x))))
    return data.repeat().batch(_BATCH, drop_remainder=known)


def build(make: Callable[[], tf.keras.Model], kind: str, known: bool) -> dict[str, float]:
    """CPU seconds to `trace` one step and to run it `first`, and elapsed seconds for both."""
    tf.keras.backend.clear_session()
    model = make()
    sgd = kind == "keras_sgd"
    optimizer = tf.keras.optimizers.SGD(0.1) if sgd else dp.DPSGD(1.0, 1.0, learning_rate=0.1)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="sum_over_batch_size" if sgd else "none"
    )
    model.compile(optimizer, loss=loss)
    iterator = iter(_batches(model, known))
    step = model.make_train_function()
    cpu, clock = time.process_time(), time.perf_counter()
    step.get_concrete_function(iterator)
    traced = time.process_time() - cpu
    step(iterator)["loss"].numpy()
    both = time.process_time() - cpu
    return {"trace": traced, "first": both - traced, "clock": time.perf_counter() - clock}


def _parse_args() -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments.add_argument(
        "--batch", nargs="+", choices=("known", "unknown"), default=["known", "unknown"]
    )
    arguments.add_argument("--rounds", type=int, default=2, help="turns of each optimizer (2)")
    return arguments.parse_args()


def main() -> None:
    """Measures and prints."""
    args = _parse_args()
    build(MODELS["mlp"], "dpsgd", True)  # pays for late imports
    print("seconds of CPU time to trace and to run first; ratio of dpsgd to keras_sgd")
    print(f"{'model':20} {'batch':8} {'keras_sgd':>13} {'dpsgd':>13} {'clock':>11} trace  both")
    for name in args.models:
        for batch in args.batch:
            found: dict[str, list] = {"keras_sgd": [], "dpsgd": []}
            for _ in range(args.rounds):
                for kind, times in found.items():
                    times.append(build(MODELS[name], kind, batch == "known"))
            sgd, own = (
                {part: statistics.median(t[part] for t in times) for part in times[0]}
                for times in found.values()
            )
            ratio = (own["trace"] + own["first"]) / (sgd["trace"] + sgd["first"])
            print(
                f"{name:20} {batch:8} {sgd['trace']:6.2f} {sgd['first']:6.2f} "
                f"{own['trace']:6.2f} {own['first']:6.2f} {sgd['clock']:5.2f} {own['clock']:5.2f} "
                f"{own['trace'] / sgd['trace']:5.1f} {ratio:5.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
