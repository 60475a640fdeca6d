"""Membership inference on a finished model, by the attacks of TF Privacy."""

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
    """How well an attacker tells the training data from other data of the same kind.

    Needs `tensorflow-empirical-privacy`, the package that TF Privacy's attacks moved to.

    Guarantee: none. An attack that succeeds shows what leaks; one that fails proves nothing, since
    these look at outputs only and know little. Nor is the package's "epsilon lower bound" a bound
    on the ε of training: the threshold is chosen on the data it is tested on, and the training data
    were not drawn by coins. `PrivacyAudit` gives one that is. What the attack returns was computed
    from the private data without noise: do not publish it.

    Args:
      model: a trained model.
      loss: `loss(y_true, y_pred)` → [B], for example a Keras loss with `reduction="none"`.
      train_data: `(x, y)`, what the model was trained on.
      test_data: `(x, y)`, of the same distribution, and not trained on.
      attacks: of `"threshold"` (on the loss alone), and of classifiers that are trained on the
        model's outputs and losses: `"lr"`, `"mlp"`, `"rf"`, `"knn"`.
      batch_size: how many examples the model is called with at a time.

    Returns:
      The package's `AttackResults`: `summary()` puts them in words, `single_attack_results` has
      `get_auc()` and `get_attacker_advantage()`.

    Raises:
      ImportError: if the package cannot be imported; the message says how to install it.
      ValueError: for an unknown attack, or a loss that is not one number for each example.
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
            "Membership inference needs the attacks of TF Privacy, which are a package of their "
            "own and work with scikit-learn before 1.7 only. Received: "
            f"{error}. Install them by `pip install 'scikit-learn<1.7' 'pandas<2' immutabledict "
            "statsmodels==0.14.0` and `pip install --no-deps tensorflow-empirical-privacy==0.1.0` "
            "(of its dependencies the attacks import only these)."
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
