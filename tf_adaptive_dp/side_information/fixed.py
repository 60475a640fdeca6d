"""Preconditioners that are known before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable

import dp_accounting
import numpy as np
import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp._keras.variables import path_of
from tf_adaptive_dp.side_information.provenance import (
    SideInformation,
    check_provenance,
    deserialize,
    serialize,
)


@keras.saving.register_keras_serializable("tf_adaptive_dp")
class FixedPreconditioner(SideInformation):
    """A fixed preconditioner A for each variable: the divisor of its gradients.

    Guarantee: accounting includes `provenance`. That A really comes from there is the caller's
    responsibility.

    Args:
      preconditioners: positive arrays by variable name, or a function that returns one for a
        variable. A name is `variable.path` in Keras 3 and `variable.name` in Keras 2, with or
        without ":0"; the last parts of it are enough if no other name ends with them. An array
        broadcasts to the variable's shape. Shape [V, 1], one number per row of a kernel, costs far
        less than [V, K]. Other variables have A = 1.
      provenance: `"public"`, or the `dp_accounting.DpEvent` of the release of A.

    Raises:
      NotPrivateError: if `provenance` is missing.
      TypeError, ValueError: if arrays are not numbers; when the optimizer is built, if they do
        not fit or are not positive and finite.

    References:
      - Li et al., "Private Adaptive Optimization with Side Information" (2022), arXiv:2202.05963,
        section 4, option 2.

    >>> fixed = FixedPreconditioner({"dense/kernel": [[0.5], [2.0]]}, provenance="public")
    >>> fixed.provenance
    'public'
    """

    def __init__(
        self,
        preconditioners: Mapping[str, Any] | Callable[[tf.Variable], Any],
        *,
        provenance: str | dp_accounting.DpEvent | None = None,
    ):
        self.provenance = check_provenance(provenance)
        if isinstance(preconditioners, Mapping):
            preconditioners = {
                str(name).split(":")[0]: _floats(name, array)
                for name, array in preconditioners.items()
            }
        elif not callable(preconditioners):
            raise TypeError(
                "`preconditioners` must be a dict of arrays by variable name, or a function of the "
                f"variable. Received: preconditioners={preconditioners!r}"
            )
        self.preconditioners = preconditioners

    @property
    def description(self) -> str:
        """See `SideInformation`."""
        return "fixed preconditioner"

    def _array(self, variable: tf.Variable, by_path: Mapping[str, Any]) -> np.ndarray:
        name = path_of(variable)
        if callable(self.preconditioners):
            array = self.preconditioners(variable)
        else:
            array = by_path.get(name, 1.0)
        array = _floats(name, array)
        with np.errstate(divide="ignore", over="ignore"):
            usable = (array > 0) & np.isfinite(array) & np.isfinite(np.float32(1) / array)
        if not usable.all():
            raise ValueError(
                f"The preconditioner of {name!r} must be positive and finite, and its inverse too. "
                f"Received: {float(array[~usable].flat[0])!r}"
            )
        try:
            np.broadcast_to(array, variable.shape)
        except ValueError as error:
            raise ValueError(
                f"The preconditioner of {name!r} must broadcast to {variable.shape}. Received: "
                f"shape {array.shape}"
            ) from error
        return array

    def _arrays(self, variables: Sequence[tf.Variable]) -> list[np.ndarray]:
        """A for each variable, in a shape that broadcasts to the variable's."""
        paths = [path_of(v) for v in variables]
        by_path = {}
        if not callable(self.preconditioners):
            by_path = checks.by_path("preconditioners", "variable", self.preconditioners, paths)
        return [self._array(v, by_path) for v in variables]

    def build(
        self, variables: Sequence[tf.Variable], add_slot: Callable[..., tf.Variable]
    ) -> list[list[tf.Variable]]:
        """Checks the arrays and stores 1/A in a slot per variable; see `SideInformation`.

        A slot has the shape of the array, which can be smaller than the variable.
        """
        scales = [
            add_slot(v, "scale", initial_value=tf.constant(1.0 / array, v.dtype))
            for v, array in zip(variables, self._arrays(variables))
        ]
        return [scales]

    def scale_and_shift(
        self, state: list[list[tf.Variable]], indices: Sequence[int]
    ) -> tuple[list[tf.Tensor], None]:
        """1/A and no shift; see `SideInformation`."""
        return [tf.cast(state[0][i], tf.float32) for i in indices], None

    def get_config(self) -> dict:
        """The arguments. A function must be registered with Keras to be loaded again."""
        if callable(self.preconditioners):
            described = {"function": serialize(self.preconditioners)}
        else:
            described = {"arrays": {k: a.tolist() for k, a in self.preconditioners.items()}}
        return {**described, "provenance": self.serialized_provenance()}

    @classmethod
    def from_config(cls, config: dict) -> FixedPreconditioner:
        """Makes the object that `get_config` described."""
        preconditioners = config.get("arrays")
        if preconditioners is None:
            preconditioners = deserialize(config["function"])
        return cls(preconditioners, provenance=config["provenance"])


def _floats(name: str, array: Any) -> np.ndarray:
    try:
        return np.asarray(array, np.float32)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"The preconditioner of {name!r} must be an array of numbers. Received: {array!r}"
        ) from error
