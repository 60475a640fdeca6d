"""Trains one model with many candidates: compiles once and resets the model for each candidate.

Compiling takes as long as a thousand steps of a small model. Learning rate, clip norm and noise
multiplier are variables of the compiled step, so they can be set between runs. Everything else that
a run changes is reset to the state of a fresh model. The reset does not affect the noise generator,
so noise is never repeated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf

import tf_adaptive_dp
from examples.experiments.lib import dense
from examples.experiments.lib.datasets import adult, images, text

SETTABLE = ("learning_rate", "l2_norm_clip", "noise_multiplier")
# Arguments of `dense.make_model`. Counts of words are bytes, which the scaling turns into floats.
MODELS = {
    "adult": {"classes": 2},
    "imdb": {"classes": 2, "input_scale": 1.0},
    "mnist": {"classes": 10},
}
# The paper's names of its models: logistic regression, and one hidden layer.
HIDDEN_UNITS = {"LR": [], "TLNN": [100]}
# Data sets and models of the paper's scale.
PAPER = [(data, model) for data in MODELS for model in HIDDEN_UNITS]
WORDS = 2000
# The papers' name for DP-SGD with a momentum.
CLASSES = {"DPMomentum": "DPSGD"}
DEFAULT_RATES = {"ADADP": 0.1, "DPAdam": 0.001, "DPAdamWOSM": 0.001}
ALL_STEPS = 10**7  # more than any process runs with one model


def trial_event(
    num_examples: int, batch_size: int, noise_multiplier: float, steps: int
) -> dp_accounting.DpEvent:
    """The DP event of one run."""
    sampled = dp_accounting.PoissonSampledDpEvent(
        batch_size / num_examples, dp_accounting.GaussianDpEvent(noise_multiplier)
    )
    return dp_accounting.SelfComposedDpEvent(sampled, steps)


class CompiledOnce:
    """A compiled model that is reused for many runs.

    Args:
      make_model: Returns a built model; called again for the initial weights of each seed.
      optimizer: A private optimizer.
      loss: A vector loss.
      data: Private inputs and labels.
      sampling: The sampling of batches, with at least as many steps as all runs together.
      steps_per_execution: See Keras; the granularity of `train`.
    """

    def __init__(
        self,
        make_model: Callable[[], tf.keras.Model],
        optimizer: tf.keras.optimizers.Optimizer,
        loss: tf.keras.losses.Loss,
        data: tuple[np.ndarray, np.ndarray],
        sampling: tf_adaptive_dp.PoissonSampling,
        steps_per_execution: int = 1,
    ):
        self._make_model = make_model
        self._execution = steps_per_execution
        self.model = make_model()
        self.model.compile(optimizer, loss, steps_per_execution=steps_per_execution)
        optimizer.build(self.model.trainable_variables)
        self._fresh = [v.numpy() for v in optimizer.variables]
        self._first_weights: dict[int, list[np.ndarray]] = {}
        self.model.make_train_function()  # which returns nothing in Keras 3
        self._train_function = self.model.train_function
        self._batches = iter(tf_adaptive_dp.poisson_batches(data, sampling))

    def begin(self, seed: int, arguments: Mapping[str, float]) -> None:
        """Resets the model for a new run.

        Args:
          seed: The seed of the initial weights.
          arguments: New values for some of `SETTABLE`; the others keep theirs.
        """
        if seed not in self._first_weights:
            tf.keras.utils.set_random_seed(seed)
            self._first_weights[seed] = self._make_model().get_weights()
        self.model.set_weights(self._first_weights[seed])
        optimizer = self.model.optimizer
        for variable, value in zip(optimizer.variables, self._fresh):
            variable.assign(value)
        for name, value in arguments.items():
            setattr(optimizer, name, value)

    def train(self, steps: int) -> None:
        """Continues the run, on batches that no run has seen.

        Args:
          steps: The number of steps, a multiple of `steps_per_execution`.
        """
        if steps % self._execution:
            raise ValueError(
                f"`steps` must be a multiple of {self._execution}. Received: steps={steps!r}"
            )
        for _ in range(steps // self._execution):
            self._train_function(self._batches)


@functools.lru_cache(maxsize=2)
def load(name: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Loads the arrays of a data set, whose place the environment gives.

    Args:
      name: `"adult"`; `"mnist"`; or `"imdb"`, the counts of the 2,000 words that are most frequent
        in the (public) texts of the test part.
      split: `"train"` or `"test"`.
    """
    if name == "adult":
        return adult.adult(None, split)
    if name == "mnist":
        return images.mnist(None, split)
    rows, labels = text.imdb(None, split)
    first = text.UNKNOWN + 2  # before it are padding and the like
    rows = np.where(rows < first + WORDS, rows, text.UNKNOWN)
    return np.ascontiguousarray(text.bag_of_words(rows, first + WORDS)[:, first:]), labels


def _dense(data: str, hidden_units: tuple[int, ...], features: int) -> tf.keras.Model:
    model = dense.make_model(hidden_units, **MODELS[data])
    model.build([None, features])
    return model


@functools.lru_cache(maxsize=1)
def _compiled(
    data: str,
    num_train: int | None,
    hidden_units: tuple[int, ...],
    optimizer: str,
    fixed: tuple[tuple[str, float], ...],
    batch_size: int,
    execution: int,
) -> CompiledOnce:
    x, y = (array[:num_train] for array in load(data, "train"))
    made = getattr(tf_adaptive_dp, CLASSES.get(optimizer, optimizer))(
        l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=batch_size, **dict(fixed)
    )
    return CompiledOnce(
        functools.partial(_dense, data, hidden_units, x.shape[1]),
        made,
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none"),
        (x, y),
        tf_adaptive_dp.PoissonSampling.for_batch_size(batch_size, len(y), ALL_STEPS),
        execution,
    )


def accuracy(model: tf.keras.Model, test: tuple[np.ndarray, np.ndarray], rows: int = 2500) -> float:
    """The accuracy to five digits."""
    right = 0
    for k in range(0, len(test[1]), rows):
        logits = model(tf.convert_to_tensor(test[0][k : k + rows]), training=False)
        right += np.count_nonzero(np.argmax(logits, -1) == test[1][k : k + rows])
    return round(right / len(test[1]), 5)


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """Trains one candidate privately on a data set whose place the environment gives.

    Args:
      settings: "data", "hidden_units", "num_train" (`None`: all), "batch_size", "steps" and
        "judge_every"; "optimizer", a name, and "arguments" for it; "noise_multiplier"; "seed", of
        the first weights. Noise and batches are never the same twice.
      data_dir: Unused; it would be the folder of one data set, and there are several.

    Returns:
      "steps" and "accuracy" on the test data, lists; at the end: "halves", the accuracy on the
      first and on the second half of the test data, and "learning_rate"; "num_examples".
    """
    del data_dir
    given = {"noise_multiplier": settings["noise_multiplier"], **settings["arguments"]}
    if settings["optimizer"] in DEFAULT_RATES:  # the run before may have changed it
        given.setdefault("learning_rate", DEFAULT_RATES[settings["optimizer"]])
    every = settings["judge_every"]
    compiled = _compiled(
        settings["data"],
        settings["num_train"],
        tuple(settings["hidden_units"]),
        settings["optimizer"],
        tuple(sorted((k, v) for k, v in given.items() if k not in SETTABLE)),
        settings["batch_size"],
        math.gcd(every, 50),
    )
    compiled.begin(settings["seed"], {k: v for k, v in given.items() if k in SETTABLE})
    curve = []
    for _ in range(settings["steps"] // every):
        compiled.train(every)
        curve.append(accuracy(compiled.model, load(settings["data"], "test")))
    x, y = load(settings["data"], "test")
    middle = len(y) // 2
    return {
        "steps": [every * (k + 1) for k in range(len(curve))],
        "accuracy": curve,
        "halves": [
            accuracy(compiled.model, (x[:middle], y[:middle])),
            accuracy(compiled.model, (x[middle:], y[middle:])),
        ],
        "num_examples": len(load(settings["data"], "train")[1][: settings["num_train"]]),
        "learning_rate": float(f"{float(compiled.model.optimizer.learning_rate):.4g}"),
    }
