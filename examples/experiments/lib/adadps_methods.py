"""The methods that the AdaDPS paper compares, by the names of its tables.

All methods are built from the same few settings, so an experiment adds its data, model and grids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf

import tf_adaptive_dp
from examples.experiments.lib import training

Arrays = tuple[np.ndarray, np.ndarray]

TITLES = {
    "dp_sgd": "DP-SGD",
    "dp_adam": "DP-Adam",
    "dp_rmsprop": "DP-RMSProp",
    "adadps_rmsprop": "AdaDPS (RMSProp), public data",
    "adadps_adam": "AdaDPS (Adam), public data",
    "adadps_frequency": "AdaDPS, token frequency",
    "dp_r_pub": "DP-R-Pub",
    "dp_adam_pub": "DP-Adam-Pub",
    "pda_dpmd": "PDA-DPMD",
    "warm_start": "DP-SGD, warm start",
    "ideal": "AdaDPS, ideal (not private)",
    "sgd": "SGD (not private)",
    "adam": "Adam (not private)",
    "adas": "AdaS, public data (not private)",
    "adas_frequency": "AdaS, token frequency (not private)",
}
NOT_PRIVATE = ("sgd", "adam", "adas", "adas_frequency")
_RULES = {"adadps_adam": "adam", "pda_dpmd": "gradient"}
_STOCK = {
    "dp_sgd": tf_adaptive_dp.DPSGD,
    "warm_start": tf_adaptive_dp.DPSGD,
    "dp_adam": tf_adaptive_dp.DPAdam,
    "dp_rmsprop": tf_adaptive_dp.DPRMSprop,
}


def side_information(
    settings: dict[str, Any],
    public: Arrays,
    private: Arrays,
    word_counts: np.ndarray | None = None,
) -> Any:
    """Makes the side information of a method, or `None`.

    Args:
      settings: "method", "batch_size"; optionally "epsilon_root", the ε of √(v + ε), "every", the
        number of minibatches between public batches, and "public_batch", their size.
      public: Public examples.
      private: The training data; only "ideal" uses it, with a provenance that says so.
      word_counts: Public counts of words, for token frequencies.
    """
    method = settings["method"]
    if method.endswith("_frequency"):
        return tf_adaptive_dp.side_information.token_frequencies(
            word_counts, divisor=float(np.max(word_counts)), provenance="public"
        )
    if method in _STOCK or method in ("sgd", "adam"):
        return None
    data, provenance = public, "public"
    if method == "ideal":
        data, provenance = private, dp_accounting.NonPrivateDpEvent()
    size = min(settings.get("public_batch", settings["batch_size"]), len(data[1]))
    batches = tf.data.Dataset.from_tensor_slices(data).shuffle(len(data[1])).batch(size, True)
    return tf_adaptive_dp.side_information.PublicGradients(
        batches,
        _RULES.get(method, "rmsprop"),
        epsilon=settings.get("epsilon_root", 1e-8),
        every=settings.get("every", 1),
        provenance=provenance,
    )


def optimizer(settings: dict[str, Any], known: Any, steps: int) -> tf.keras.optimizers.Optimizer:
    """The optimizer of a method.

    Args:
      settings: "method", "rate", "batch_size", and for private methods "clip" and "sigma", and
        "microbatches", and "ema", the momentum of averaged weights, where they are wanted.
      known: of `side_information`.
      steps: The number of steps of the whole run, for the mixing of PDA-DPMD.
    """
    method, rate = settings["method"], settings["rate"]
    if method == "sgd":
        return tf.keras.optimizers.SGD(rate)
    if method == "adam":
        return tf.keras.optimizers.Adam(rate)
    if method.startswith("adas"):
        return tf_adaptive_dp.optimizers.baselines.AdaS(known, rate)
    private = dict(
        l2_norm_clip=settings["clip"],
        noise_multiplier=settings["sigma"],
        learning_rate=rate,
        expected_batch_size=settings["batch_size"],
        num_microbatches=settings.get("microbatches"),
    )
    if "ema" in settings:
        private.update(use_ema=True, ema_momentum=settings["ema"])
    if method in _STOCK:
        # Keras's ε = 1e-7 is as large as noisy gradients with a small C.
        small = {} if _STOCK[method] is tf_adaptive_dp.DPSGD else {"epsilon": 1e-10}
        return _STOCK[method](**private, **small)
    if method == "dp_r_pub":
        return tf_adaptive_dp.optimizers.baselines.DPRPub(known, **private)
    if method == "dp_adam_pub":
        return tf_adaptive_dp.optimizers.baselines.DPAdamPub(known, **private)
    if method == "pda_dpmd":
        return tf_adaptive_dp.optimizers.baselines.PDADPMD(
            known, **private, mixing=tf_adaptive_dp.optimizers.baselines.CosineMixing(max(steps, 1))
        )
    return tf_adaptive_dp.AdaDPS(known, **private)


def run(
    model: tf.keras.Model,
    settings: dict[str, Any],
    public: Arrays,
    private: Arrays,
    test: Arrays,
    *,
    loss: type,
    metrics: Sequence[Any],
    judge_every: int = 1,
    judge_last: int = 1,
    word_counts: np.ndarray | None = None,
    known: Any = None,
    **loss_arguments: Any,
) -> dict[str, Any]:
    """Trains a model with one method, and judges it on the test data.

    Args:
      model: not compiled yet.
      settings: of `side_information` and `optimizer`; "epochs", and for a warm start
        "public_epochs" and "public_rate", of Adam on the public data. With "microbatches" batches
        are shuffled, since groups need a fixed size. "delta", unless it is one over the number of
        private examples; "steps_per_execution" of `compile`.
      public: public inputs and labels.
      private: private inputs and labels.
      test: held-out inputs and labels.
      loss: the class of a Keras loss.
      metrics: of `compile`.
      judge_every: The number of epochs between evaluations.
      judge_last: The number of last epochs that are always evaluated.
      word_counts: See `side_information`.
      known: Side information that replaces that of `side_information`.
      **loss_arguments: of `loss`.

    Returns:
      See `training.fit`; "epsilon" is `None` throughout for what is not private.
    """
    if settings["method"] == "warm_start":
        model.compile(tf.keras.optimizers.Adam(settings["public_rate"]), loss(**loss_arguments))
        size = min(settings["batch_size"], len(public[1]))
        model.fit(*public, batch_size=size, epochs=settings["public_epochs"], verbose=0)
    batch_size, epochs = settings["batch_size"], settings["epochs"]
    known = known or side_information(settings, public, private, word_counts)
    steps = len(private[1]) // batch_size * epochs
    is_private = settings["method"] not in NOT_PRIVATE
    model.compile(
        optimizer(settings, known, steps),
        loss=loss(reduction="none" if is_private else "sum_over_batch_size", **loss_arguments),
        metrics=metrics,
        steps_per_execution=settings.get("steps_per_execution", 1),
    )
    shared = dict(
        epochs=epochs,
        batch_size=batch_size,
        callbacks=[known] if isinstance(known, tf.keras.callbacks.Callback) else [],
        judge_every=judge_every,
        judge_last=judge_last,
    )
    if not is_private:
        return training.fit_without_privacy(model, private, test, **shared)
    result = training.fit(
        model,
        private,
        test,
        delta=settings.get("delta", 1 / len(private[1])),
        sampling="shuffled" if "microbatches" in settings else "poisson",
        **shared,
    )
    if settings["method"] == "ideal":
        result["epsilon"] = [None] * len(result["epochs"])
    return result
