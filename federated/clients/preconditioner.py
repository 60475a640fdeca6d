"""Preconditioners for clients: A by the position of a weight, with its provenance."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp.side_information.fixed import FixedPreconditioner
from tf_adaptive_dp.side_information.provenance import check_provenance


# eq=False, since comparing arrays gives no single truth value.
@dataclasses.dataclass(frozen=True, eq=False)
class ClientPreconditioner:
    """1/A for each trainable weight of a model, in order, and the provenance of A.

    TFF's optimizers see weights without names, so `from_side_information` binds side information
    that is keyed by name to positions. `from_arrays` takes the arrays by position.

    Guarantee: every optimizer that uses A exposes its `provenance` as `side_information`. The
    library cannot verify that A really has this provenance; the caller asserts it.

    Attributes:
      scales: 1/A for each trainable weight, in a shape that broadcasts to the weight's; `None` for
        A = 1.
      provenance: `"public"`, or the `dp_accounting.DpEvent` by which A was released.
      description: what A was computed from, for the privacy statement.

    Raises:
      NotPrivateError: if `provenance` is missing.
      TypeError, ValueError: if `scales` are not positive and finite arrays, or `description` is no
        text.
    """

    scales: tuple[np.ndarray | None, ...]
    provenance: str | dp_accounting.DpEvent | None = None
    description: str = "fixed preconditioner"

    def __post_init__(self) -> None:
        check_provenance(self.provenance)
        checks.instance("description", self.description, str)
        if not isinstance(self.scales, (tuple, list)):
            raise TypeError(
                "`scales` must be a tuple with an array or None for each trainable weight; "
                f"`from_arrays` makes it of A. Received: scales={self.scales!r}"
            )
        for k, scale in enumerate(self.scales):
            if scale is None:
                continue
            if not isinstance(scale, (np.ndarray, np.generic)) or scale.dtype.kind not in "iuf":
                raise TypeError(
                    "`scales` must be NumPy arrays of numbers, or None. Received: "
                    f"scales[{k}]={scale!r}"
                )
            if not (np.all(scale > 0) and np.all(np.isfinite(scale))):
                raise ValueError(
                    f"`scales` must be positive and finite. Received: scales[{k}]={scale!r}"
                )

    @classmethod
    def from_arrays(
        cls,
        arrays: Sequence[Any],
        *,
        provenance: str | dp_accounting.DpEvent | None = None,
        description: str = "fixed preconditioner",
    ) -> ClientPreconditioner:
        """Makes a preconditioner from one array per trainable weight, or `None` for A = 1.

        Args:
          arrays: A, positive, in the order of the model's trainable weights. An array of shape
            [V, 1], one number per row of a kernel, is far cheaper than one of shape [V, K].
          provenance: see the class.
          description: see the class.

        Raises:
          NotPrivateError: if `provenance` is missing.
          TypeError, ValueError: if an array is not positive and finite.

        >>> made = ClientPreconditioner.from_arrays([[[0.5], [2.0]], None], provenance="public")
        >>> made.scales[0].tolist(), made.scales[1]
        ([[2.0], [0.5]], None)
        """
        if isinstance(arrays, (str, dict)) or not isinstance(arrays, Sequence):
            raise TypeError(
                "`arrays` must be a sequence with an array or None for each trainable weight. "
                f"Received: arrays={arrays!r}"
            )
        names = [f"trainable weight {k}" for k in range(len(arrays))]
        given = {n: a for n, a in zip(names, arrays) if a is not None}
        fixed = FixedPreconditioner(given, provenance="public")  # only to check the arrays
        specs = [tf.TensorSpec(np.shape(array), name=name) for name, array in given.items()]
        checked = dict(zip(given, _scales(fixed, specs)))
        return cls(tuple(checked.get(name) for name in names), provenance, description)

    @classmethod
    def from_side_information(
        cls, side_information: FixedPreconditioner, variables: Any
    ) -> ClientPreconditioner:
        """Makes a preconditioner from side information for Keras, such as `token_frequencies`.

        Args:
          side_information: a `tf_adaptive_dp.side_information.FixedPreconditioner`.
          variables: a Keras model, its trainable variables, or, for a model without variables, a
            named `tf.TensorSpec` per trainable weight.

        Raises:
          TypeError: for other side information. `PublicGradients` changes from step to step.
          ValueError: if its names or shapes do not fit the variables.

        >>> import tf_adaptive_dp
        >>> tokens = tf_adaptive_dp.side_information.token_frequencies([3, 0], provenance="public")
        >>> specs = [tf.TensorSpec([2, 5], name="kernel"), tf.TensorSpec([5], name="bias")]
        >>> bound = ClientPreconditioner.from_side_information(tokens, specs)
        >>> bound.scales[0].tolist(), bound.description
        ([[0.25], [1.0]], 'token frequencies')
        """
        if not isinstance(side_information, FixedPreconditioner):
            raise TypeError(
                "`side_information` must be a "
                "`tf_adaptive_dp.side_information.FixedPreconditioner` (`token_frequencies`, "
                "`tf_idf`), which is the same at every step. Received: "
                f"side_information={side_information!r}"
            )
        if isinstance(variables, tf.keras.Model):
            variables = variables.trainable_variables
        specs = [
            tf.TensorSpec(v.shape, v.dtype, v.name or f"trainable weight {k}")
            for k, v in enumerate(variables)
        ]
        scales = tuple(_scales(side_information, specs))
        return cls(scales, side_information.provenance, side_information.description)

    @property
    def digest(self) -> str:
        """A one-way hash that identifies A."""
        made = hashlib.blake2b(digest_size=16)
        for scale in self.scales:
            made.update(repr(None if scale is None else (scale.shape, scale.dtype.str)).encode())
            made.update(b"" if scale is None else np.ascontiguousarray(scale).tobytes())
        return made.hexdigest()

    def precondition(self, gradients: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
        """g / A for each of a model's gradients.

        Args:
          gradients: dense gradients in the order of the trainable weights; `None` stays `None`.

        Raises:
          ValueError: if their number or a shape does not fit A.
        """
        if len(gradients) != len(self.scales):
            raise ValueError(
                "`preconditioner` must have an array or None for each trainable weight. Received: "
                f"{len(self.scales)} for {len(gradients)} weights"
            )
        return [_scaled(g, s, k) for k, (g, s) in enumerate(zip(gradients, self.scales))]


def _scales(fixed: FixedPreconditioner, specs: Sequence[tf.TensorSpec]) -> list[np.ndarray]:
    """1/A for variables with these specs, checked by `FixedPreconditioner`."""
    with tf.init_scope():  # so that any graph can use the constants later
        (scales,) = fixed.build(specs, lambda spec, name, initial_value: initial_value.numpy())
    return scales


def _scaled(gradient: tf.Tensor | None, scale: np.ndarray | None, k: int) -> tf.Tensor | None:
    if gradient is None or scale is None:
        return gradient
    try:
        np.broadcast_to(scale, gradient.shape)
    except ValueError as error:
        raise ValueError(
            f"The preconditioner of trainable weight {k} must broadcast to {gradient.shape}. "
            f"Received: shape {scale.shape}"
        ) from error
    return gradient * tf.constant(scale, gradient.dtype)
