"""What a plan normalizes: one array of its data, of which it releases the statistics once."""

from __future__ import annotations

import hashlib
import secrets
import warnings
from typing import Any, Callable, NamedTuple

import numpy as np

from tf_adaptive_dp._keras.tracebacks import level_of_caller
from tf_adaptive_dp.normalization.estimator import array_of
from tf_adaptive_dp.normalization.layer import PrivateNormalization
from tf_adaptive_dp.sampling.users import UserRecords

_FEW = 32  # examples that tell their units
_SALT = secrets.token_bytes(16)  # of digests, which must show nothing of the examples


class Words(NamedTuple):
    """How a plan and its errors speak of what is normalized.

    Attributes:
      argument: the plan's argument that pays for it.
      call: the plan's method that makes the layer.
      data: what is normalized.
      name: the argument of `fit` that holds it.
      place: where the layer belongs.
    """

    argument: str
    call: str
    data: str
    name: str
    place: str


_INPUTS = Words("normalize_inputs", "plan.normalization(x)", "inputs", "x", "first")
_TARGETS = Words("normalize_targets", "plan.denormalization(y)", "targets", "y", "last")


def words_of(invert: bool) -> Words:
    """How to speak of inputs, or of targets, for which a layer inverts."""
    return _TARGETS if invert else _INPUTS


class PlannedNormalization:
    """The inputs of a plan, or its targets, and the layer that holds their statistics.

    Guarantee: statistics are released once. Later calls return the same layer, so what the budget
    pays for is all that is spent.

    Args:
      noise_multiplier: that of the release, which the budget pays for.
      users: the records of the users, if users are protected.
      invert: whether it is about targets, into whose units the layer turns outputs.

    Attributes:
      words: how errors speak of it.
      layer: the layer, once something was released for it.
    """

    def __init__(self, noise_multiplier: float, users: UserRecords | None, invert: bool):
        self.words = words_of(invert)
        self.layer: PrivateNormalization | None = None
        self._noise_multiplier, self._users, self._invert = noise_multiplier, users, invert
        self._is_adapted = False
        self._seen: tuple[tuple, bytes] | None = None  # see `_compare`

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what this process knows of the data."""
        return {**vars(self), "_seen": None}

    def layer_for(
        self, values: Any, axis: int | None, check_num_examples: Callable[[int], None]
    ) -> PrivateNormalization:
        """The layer; the first call releases means and deviations.

        Args:
          values: [n, ...], the inputs or targets of all examples.
          axis: see `PrivateNormalization`.
          check_num_examples: raises if n is not the plan's number of examples.

        Raises:
          TypeError, ValueError: if the values are not an array of all examples, or an earlier call
            had another `axis` or values of another shape.
        """
        layer = self.layer
        if layer is not None and self._is_adapted:
            self._compare(values)
        else:
            if layer is None:
                layer = PrivateNormalization(self._noise_multiplier, axis, self._invert)
            array = array_of(self.words.name, values)
            check_num_examples(len(array))
            try:
                layer.adapt(array, self._users)  # which refuses after a call that failed too late
            finally:
                if layer.release_id:
                    self.layer = layer
            self._is_adapted = True
            self._seen = array.shape[1:], _digest_of_some(array)
        if layer.axis != axis:
            raise ValueError(
                "`axis` must be that of the first call: another normalization would be another "
                f"release. Received: axis={axis!r} after axis={layer.axis!r}"
            )
        return layer

    def _compare(self, values: Any) -> None:
        """Raises, or warns, if values are not those whose statistics were released."""
        if self._seen is None:
            return
        shape, digest = self._seen
        array, data = array_of(self.words.name, values), self.words.data
        new = f"For other {data}, make a new plan: it is another release"
        if array.shape[1:] != shape:
            raise ValueError(
                f"The statistics of this plan were released for {data} of another shape. {new}. "
                f"Received: {data} of shape {array.shape[1:]} after {shape}"
            )
        if _digest_of_some(array) != digest:
            warnings.warn(
                f"The layer has the statistics of the first call, whose {data} had other values or "
                f"another order. {new}.",
                stacklevel=level_of_caller(),
            )

    def require_use(self, layers: list[PrivateNormalization], model_name: str) -> None:
        """Raises, or warns, if a model does not use what the budget pays for.

        Args:
          layers: those in the model.
          model_name: its name.

        Raises:
          ValueError: if nothing can have been normalized outside of the model either.
        """
        if any(layer.invert == self._invert for layer in layers):
            return
        words = self.words
        advice = (
            f"The plan reserves budget for normalizing the {words.data}, but the model has no such "
            f"layer. Put `{words.call}` {words.place} in the model, or make the plan without "
            f"`{words.argument}`."
        )
        if self.layer is None:
            raise ValueError(f"{advice} Received: model={model_name!r}")
        warnings.warn(advice, stacklevel=level_of_caller())


def some_of(count: int) -> np.ndarray:
    """Indices of a few of `count` examples, from everywhere among them."""
    return np.linspace(0, count - 1, min(_FEW, count)).astype(int)


def _digest_of_some(array: np.ndarray) -> bytes:
    """A number by which this process recognizes values, whatever their type."""
    rows = np.ascontiguousarray(array[some_of(len(array))], np.float32)
    return hashlib.blake2b(rows.tobytes(), key=_SALT).digest()
