"""One training run, judged on the test set after each epoch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tf_adaptive_dp


class _Judge(tf.keras.callbacks.Callback):
    """Evaluates on the test set after epochs, with averaged weights too if there are any."""

    def __init__(self, test: Any, every: int, last: int):
        super().__init__()
        self.test, self.every, self.last = test, every, last
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
        x, y = self.test
        return self.model.evaluate(x, y, batch_size=1000, verbose=0, return_dict=True)

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
      model: compiled with one of our optimizers, a loss vector, and metrics.
      train: private inputs and labels.
      test: held-out inputs and labels, used for the figures alone.
      epochs: passes; each of `len(x) // batch_size` releases.
      batch_size: the expected batch size.
      delta: δ.
      sampling: `"poisson"`, or `"shuffled"` as the papers do, whose ε is an approximation and
        which fixed groups of examples (`num_microbatches`) need.
      callbacks: side information that is refreshed while training.
      judge_every: epochs between two evaluations.
      judge_last: the last so many epochs are evaluated in any case.

    Returns:
      Lists by evaluated epoch: "epochs", "epsilon", each metric's name; and "learning_rate". If
      the optimizer averages weights (`use_ema`), the metrics are those of the averaged weights, and
      there are more lists for the others, "accuracy_unaveraged" for example.
    """
    num_examples = len(train[1])
    steps = num_examples // batch_size
    if sampling == "poisson":
        law = tf_adaptive_dp.PoissonSampling.for_batch_size(
            batch_size, num_examples, steps=steps * epochs
        )
        batches = tf_adaptive_dp.poisson_batches(train, law)
    else:
        law = tf_adaptive_dp.sampling.ShuffledEpochs(batch_size, steps=steps * epochs)
        batches = tf_adaptive_dp.sampling.shuffled_batches(train, law)
    judge = _Judge(test, judge_every, judge_last)
    monitor = tf_adaptive_dp.PrivacyMonitor(num_examples, delta, sampling=law)
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
    """Trains a compiled model in the ordinary way, to compare with.

    Args:
      model: compiled with an optimizer that gives no privacy, and metrics.
      train: inputs and labels.
      test: held-out inputs and labels.
      epochs: passes.
      batch_size: examples of a batch.
      callbacks: see `fit`.
      judge_every: see `fit`.
      judge_last: see `fit`.

    Returns:
      See `fit`; "epsilon" is `None` throughout.
    """
    judge = _Judge(test, judge_every, judge_last)
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


def _result(judge: _Judge, epsilons: list, rates: Sequence[float], start: float) -> dict[str, Any]:
    return {
        "epochs": judge.epochs,
        "epsilon": epsilons,
        "learning_rate": [float(f"{rates[epoch - 1]:.4g}") for epoch in judge.epochs],
        **{k: [round(s[k], 5) for s in judge.scores] for k in judge.scores[0]},
        "seconds": round(time.perf_counter() - start, 1),
    }
