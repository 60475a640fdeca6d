"""State that is loaded as a whole or not at all, so that no release is forgotten."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_adaptive_dp.accounting.ledger import Ledger, Segment


class CheckedState:
    """Mixin of an optimizer whose state is not to be loaded in parts.

    Keras assigns variable after variable until one does not fit, takes a list that is too short,
    and skips a saved state of another length with a warning.

    Guarantee: a state that does not fit changes nothing; if it holds releases that the ledger lacks
    it is an error, since ε of the weights that belong to it would be too small.
    """

    ledger: Ledger

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets all variables of the optimizer, its ledger included.

        Args:
          weights: arrays or variables, as `variables` has them.

        Raises:
          ValueError: if they are not those of an optimizer like this one, or it is not built.
        """
        weights = list(weights)
        if getattr(self, "_built", False):
            self._refuse_other_shapes([tuple(np.shape(w)) for w in weights])
        super().set_weights(weights)

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Sets all variables from a saved model or saved weights; called by Keras.

        Args:
          store: arrays by their number.

        Raises:
          ValueError: if they do not fit, and hold releases that the ledger lacks.
        """
        saved = [store[str(i)] for i in range(len(store.keys()))]
        shapes, segments = [tuple(a.shape) for a in saved], _segments(saved)
        if segments and segments != self.ledger.segments:
            self._refuse_other_shapes(shapes)
        if shapes == [tuple(v.shape) for v in self.variables]:
            super().load_own_variables(store)
        elif saved:
            warnings.warn(
                "The saved state of another optimizer, or of one that was not built, is not "
                "loaded. It holds no releases that this ledger lacks.",
                stacklevel=2,
            )

    def _refuse_other_shapes(self, shapes: list[tuple]) -> None:
        own = [tuple(v.shape) for v in self.variables]
        if shapes != own:
            raise ValueError(
                "`weights` must be those of an optimizer of this kind for the same variables: its "
                "ledger would be lost, and ε be too small. Nothing of the optimizer was changed. "
                "Call `optimizer.build(model.trainable_variables)` before loading, or load the "
                f"model's weights before `compile`. Received: shapes {shapes}, instead of {own}"
            )


def _segments(saved: Sequence[Any]) -> list[Segment]:
    """What the ledger of a saved optimizer holds, if it has one."""
    size = Ledger.MAX_SEGMENTS
    for parameters, counts in zip(saved, saved[1:]):
        if parameters.shape == (size, 2) and counts.shape == (size,) and counts.dtype == np.int64:
            pairs = zip(np.asarray(parameters).tolist(), np.asarray(counts).tolist())
            return [Segment(*of, count) for of, count in pairs if count]
    return []
