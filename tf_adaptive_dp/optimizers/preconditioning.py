"""What optimizers with side information share: its state, and A at each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_adaptive_dp.side_information.provenance import SideInformation, deserialize, serialize


def check_side_information(value: Any, *, rule: str | None = None) -> SideInformation:
    """Returns side information, or raises if it is none or of the wrong kind.

    Args:
      value: what the caller passed, or the description of a saved configuration.
      rule: the rule that `PublicGradients` must have; `None`: any that gives a preconditioner.

    Raises:
      TypeError: if it is no side information.
      ValueError: if its rule is not for this optimizer.
    """
    if isinstance(value, dict) and "config" in value:
        value = deserialize(value)
    if not isinstance(value, SideInformation):
        raise TypeError(
            "`side_information` must be a `FixedPreconditioner` (`token_frequencies`, `tf_idf`) or "
            "`PublicGradients`, which say where it comes from. Received: side_information="
            f"{value!r}"
        )
    received = getattr(value, "rule", None)
    if rule is not None and received != rule:
        raise ValueError(
            f"`side_information` must be `PublicGradients(..., rule={rule!r})`. Received: "
            f"{type(value).__name__} with rule={received!r}"
        )
    if rule is None and received == "gradient":
        raise ValueError(
            "`side_information` must give a preconditioner; the rule 'gradient' gives the public "
            "gradient itself, for `PDADPMD`. Received: rule='gradient'. Choose 'rmsprop', "
            "'adam' or 'adagrad'."
        )
    return value


class Preconditioning:
    """Mixin of an optimizer that may hold side information, beside its own slots.

    Attributes:
      side_information: the `SideInformation`, or `None`.
      side_information_state: what it keeps in the optimizer; saved with the rest.
    """

    side_information: SideInformation | None = None
    # So many minibatches make one step and share A.
    _minibatches_per_step = 1

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Creates all slots, those of the side information first.

        Args:
          var_list: the variables to train.
        """
        if self.side_information is not None and not getattr(self, "_built", False):
            self.side_information_state = self.side_information.build(
                var_list, self.add_variable_from_reference
            )
        super().build(var_list)

    def is_between_steps(self) -> bool:
        """Whether side information may change now: not between the minibatches of one step."""
        return int(self.iterations.numpy()) % self._minibatches_per_step == 0

    def _precondition(self, variables: Sequence[tf.Variable]) -> tuple[list | None, list | None]:
        """What gradients are multiplied by, and what is added before that."""
        if self.side_information is None:
            return None, None
        indices = [self._index_dict[self._var_key(v)] for v in variables]
        return self.side_information.scale_and_shift(self.side_information_state, indices)

    def _preconditioned(self, gradient: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
        """(gradient + shift) ∘ scale of one variable, for what is not clipped afterwards."""
        (scale,), shift = self._precondition([variable])
        gradient = tf.convert_to_tensor(gradient)  # slices of an embedding table
        if shift is not None:
            gradient += tf.cast(shift[0], gradient.dtype)
        return gradient * tf.cast(scale, gradient.dtype)

    def get_config(self) -> dict:
        """The arguments that make the same optimizer."""
        information = self.side_information
        described = None if information is None else serialize(information)
        return {**super().get_config(), "side_information": described}
