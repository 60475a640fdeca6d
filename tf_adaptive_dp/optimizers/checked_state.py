"""Checks that saved state fits an optimizer, so that loading it never loses releases.

Keras assigns variable after variable until one does not fit, accepts a list that is too short, and
skips a saved state of another length with a warning.

Guarantee: state that does not fit changes nothing. If it holds releases that the ledger lacks,
loading it is an error, since the ε of the weights that belong to it would be understated.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_adaptive_dp.accounting.ledger import Ledger, Segment


def require_same_shapes(variables: Sequence[tf.Variable], weights: Sequence[Any]) -> None:
    """Raises unless weights fit all variables of an optimizer.

    Args:
      variables: the optimizer's.
      weights: arrays or variables, meant for them in this order.

    Raises:
      ValueError: if their number or their shapes differ.
    """
    received, own = _shapes(weights), _shapes(variables)
    if received != own:
        raise ValueError(
            "`weights` must be those of an optimizer of this kind for the same variables. Loading "
            "others would discard the ledger and understate epsilon. Nothing of the optimizer was "
            "changed. Call `optimizer.build(model.trainable_variables)` before loading, or load "
            f"the model's weights before `compile`. Received: shapes {received}, instead of {own}"
        )


def can_load(variables: Sequence[tf.Variable], ledger: Ledger, store: Mapping[str, Any]) -> bool:
    """Whether a saved state fits an optimizer; warns if it does not but may be skipped.

    Args:
      variables: the optimizer's.
      ledger: the optimizer's.
      store: saved arrays, by their number.

    Raises:
      ValueError: if the state does not fit and holds releases that the ledger lacks.
    """
    saved = [store[str(i)] for i in range(len(store.keys()))]
    segments = _saved_segments(saved)
    if segments and segments != ledger.segments:
        require_same_shapes(variables, saved)
    if _shapes(saved) == _shapes(variables):
        return True
    if saved:
        warnings.warn(
            "The saved state belongs to another optimizer, or to one that was not built, and is "
            "not loaded. It holds no releases that this ledger lacks.",
            stacklevel=3,
        )
    return False


def _shapes(arrays: Sequence[Any]) -> list[tuple]:
    return [tuple(np.shape(array)) for array in arrays]


def _saved_segments(saved: Sequence[Any]) -> list[Segment]:
    """The ledger of a saved optimizer; empty if it has none."""
    size = Ledger.MAX_SEGMENTS
    for parameters, counts in zip(saved, saved[1:]):
        if parameters.shape == (size, 2) and counts.shape == (size,) and counts.dtype == np.int64:
            pairs = zip(np.asarray(parameters).tolist(), np.asarray(counts).tolist())
            return [Segment(noise, batch, count) for (noise, batch), count in pairs if count]
    return []
