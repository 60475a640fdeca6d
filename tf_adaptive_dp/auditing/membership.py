"""Membership inference on a trained model with the attacks of TF Privacy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from tf_adaptive_dp import checks

ATTACKS = ("threshold", "lr", "mlp", "rf", "knn")


def membership_inference(
    model: tf.keras.Model,
    loss: Callable[..., tf.Tensor],
    train_data: tuple,
    test_data: tuple,
    *,
    attacks: Sequence[str] = ("threshold",),
    batch_size: int = 512,
) -> Any:
    """Measures how well an attacker distinguishes the training data from similar other data.

    Requires `tensorflow-empirical-privacy`, the package that now holds TF Privacy's attacks.

    Guarantee: none. A successful attack shows a leak. A failed one proves nothing, since these
    attacks see only outputs and know little. The package's "epsilon lower bound" is not a bound on
    the ε of training either: the threshold is chosen on the data it is tested on, and no coins
    decided which examples were trained on. `PrivacyAudit` gives a real bound. The result was
    computed from the private data without noise: do not publish it.

    Args:
      model: a trained model.
      loss: `loss(y_true, y_pred)` → [B], for example a Keras loss with `reduction="none"`.
      train_data: `(x, y)`, the data that the model was trained on.
      test_data: `(x, y)` from the same distribution that the model was not trained on.
      attacks: a list of `"threshold"` (on the loss alone) and of classifiers trained on the model's
        outputs and losses: `"lr"`, `"mlp"`, `"rf"`, `"knn"`.
      batch_size: number of examples per call of the model.

    Returns:
      The package's `AttackResults`: `summary()` describes them, `single_attack_results` has
      `get_auc()` and `get_attacker_advantage()`.

    Raises:
      ImportError: if the package cannot be imported; the message says how to install it.
      TypeError: if `attacks` is a text or empty.
      ValueError: if an attack is unknown, or the loss is not one number per example.
    """
    if isinstance(attacks, str) or not attacks:
        raise TypeError(f"`attacks` must be a list of names. Received: attacks={attacks!r}")
    attacks = [checks.choice("attacks", attack, ATTACKS) for attack in attacks]
    try:
        from tensorflow_privacy.privacy.privacy_tests.membership_inference_attack import (
            data_structures,
            membership_inference_attack,
        )
    except ImportError as error:
        raise ImportError(
            "Membership inference needs the attacks of TF Privacy, which are a separate package "
            f"and require scikit-learn before 1.7. Received: {error}. Install them with `pip "
            "install 'scikit-learn<1.7' 'pandas<2' immutabledict statsmodels==0.14.0` and `pip "
            "install --no-deps tensorflow-empirical-privacy==0.1.0` (the attacks import none of "
            "its other dependencies)."
        ) from error
    inputs = data_structures.AttackInputData()
    for name, (x, y) in (("train", train_data), ("test", test_data)):
        outputs = model.predict(x, batch_size=batch_size, verbose=0)
        losses = np.asarray(loss(y, outputs))
        if losses.shape != (len(outputs),):
            raise ValueError(
                "`loss` must return one number for each example (`reduction='none'`). Received: "
                f"shape {losses.shape} for {len(outputs)} examples"
            )
        setattr(inputs, f"loss_{name}", losses)
        setattr(inputs, f"logits_{name}", outputs.reshape(len(outputs), -1))
    kinds = [data_structures.AttackType(attack) for attack in attacks]
    return membership_inference_attack.run_attacks(inputs, attack_types=kinds)
