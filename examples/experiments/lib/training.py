"""One training run, evaluated on the test set after each epoch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tf_adaptive_dp


class Judge(tf.keras.callbacks.Callback):
    """Evaluates on the test set after epochs, also with averaged weights if there are any.

    Args:
      test: inputs and labels.
      every: the number of epochs between evaluations.
      last: the number of last epochs that are always evaluated.

    Attributes:
      epochs: those that were evaluated.
      scores: loss and metrics after each of them. If the optimizer averages weights (`use_ema`),
        they are those of the averages, and "accuracy_unaveraged" has that of the others.
    """

    def __init__(self, test: Any, every: int = 1, last: int = 1):
        super().__init__()
        # Keras never frees what it makes of arrays, so each evaluation would leave a copy of them.
        self.test = tf.data.Dataset.from_tensor_slices(test).batch(1000)
        self.every, self.last = every, last
        self.epochs, self.scores = [], []

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if (epoch + 1) % self.every and epoch + 1 <= self.params["epochs"] - self.last:
            return
        self.epochs.append(epoch + 1)
        scores = self._evaluate()
        if getattr(self.model.optimizer, "use_ema", False):
            scores = {
                **self._evaluate_averaged(),
                **{f"{name}_unaveraged": score for name, score in scores.items()},
            }
        self.scores.append(scores)

    def _evaluate(self) -> dict[str, float]:
        return self.model.evaluate(self.test, verbose=0, return_dict=True)

    def _evaluate_averaged(self) -> dict[str, float]:
        trained = self.model.trainable_variables
        kept = [v.numpy() for v in trained]
        for variable, average in zip(trained, self.model.optimizer._model_variables_moving_average):
            variable.assign(average)
        scores = self._evaluate()
        for variable, value in zip(trained, kept):
            variable.assign(value)
        return scores


def fit(
    model: tf.keras.Model,
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    *,
    epochs: int,
    batch_size: int,
    delta: float,
    sampling: str = "poisson",
    callbacks: Sequence[tf.keras.callbacks.Callback] = (),
    judge_every: int = 1,
    judge_last: int = 1,
) -> dict[str, Any]:
    """Trains a compiled model on private data.

    Args:
      model: A model compiled with a private optimizer, a vector loss, and metrics.
      train: Private inputs and labels.
      test: Held-out inputs and labels, used for the figures alone.
      epochs: The number of epochs, each of `len(x) // batch_size` releases.
      batch_size: The expected batch size.
      delta: δ.
      sampling: `"poisson"`, or `"shuffled"` as in the papers. The ε of shuffled batches is an
        approximation; fixed groups of examples (`num_microbatches`) need them.
      callbacks: Side information that is refreshed during training.
      judge_every: The number of epochs between evaluations.
      judge_last: The number of last epochs that are always evaluated.

    Returns:
      Lists by evaluated epoch: "epochs", "epsilon", "learning_rate", and each metric. If the
      optimizer averages weights (`use_ema`), the metrics are those of the averaged weights, and
      further lists such as "accuracy_unaveraged" have those of the others.
    """
    num_examples = len(train[1])
    steps = num_examples // batch_size
    if sampling == "poisson":
        sampler = tf_adaptive_dp.PoissonSampling.for_batch_size(
            batch_size, num_examples, steps=steps * epochs
        )
        batches = tf_adaptive_dp.poisson_batches(train, sampler)
    else:
        sampler = tf_adaptive_dp.sampling.ShuffledEpochs(batch_size, steps=steps * epochs)
        batches = tf_adaptive_dp.sampling.shuffled_batches(train, sampler)
    judge = Judge(test, judge_every, judge_last)
    monitor = tf_adaptive_dp.PrivacyMonitor(num_examples, delta, sampling=sampler)
    start = time.perf_counter()
    history = model.fit(
        batches,
        epochs=epochs,
        steps_per_epoch=steps,
        callbacks=[*callbacks, monitor, judge],
        verbose=0,
    ).history
    epsilons = [round(history["epsilon"][epoch - 1], 4) for epoch in judge.epochs]
    return _result(judge, epsilons, history["learning_rate"], start)


def fit_without_privacy(
    model: tf.keras.Model,
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    *,
    epochs: int,
    batch_size: int,
    callbacks: Sequence[tf.keras.callbacks.Callback] = (),
    judge_every: int = 1,
    judge_last: int = 1,
) -> dict[str, Any]:
    """Trains a compiled model without privacy, for comparison.

    Args:
      model: A model compiled with an ordinary optimizer, and metrics.
      train: Inputs and labels.
      test: Held-out inputs and labels.
      epochs: The number of epochs.
      batch_size: The number of examples in a batch.
      callbacks: See `fit`.
      judge_every: See `fit`.
      judge_last: See `fit`.

    Returns:
      See `fit`; all values of "epsilon" are `None`.
    """
    judge = Judge(test, judge_every, judge_last)
    start = time.perf_counter()
    model.fit(
        *train,
        epochs=epochs,
        batch_size=batch_size,
        callbacks=[*callbacks, judge],
        verbose=0,
    )
    rate = float(model.optimizer.learning_rate)
    return _result(judge, [None] * len(judge.epochs), [rate] * epochs, start)


def _result(judge: Judge, epsilons: list, rates: Sequence[float], start: float) -> dict[str, Any]:
    return {
        "epochs": judge.epochs,
        "epsilon": epsilons,
        "learning_rate": [float(f"{rates[epoch - 1]:.4g}") for epoch in judge.epochs],
        **{k: [round(s[k], 5) for s in judge.scores] for k in judge.scores[0]},
        "seconds": round(time.perf_counter() - start, 1),
    }
