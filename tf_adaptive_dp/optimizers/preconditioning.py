"""The part of an optimizer that holds side information and applies it to gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_adaptive_dp._keras.optimizers import add_slot, is_built, slot_index
from tf_adaptive_dp._keras.variables import native
from tf_adaptive_dp.mechanism import replicas
from tf_adaptive_dp.side_information.provenance import (
    SideInformation,
    deserialize,
    serialize,
    stated_provenance,
)


def check_side_information(value: Any, *, rule: str | None = None) -> SideInformation:
    """Returns side information that an optimizer can use, or raises.

    Args:
      value: what the caller passed, or the description in a saved configuration.
      rule: the rule that `PublicGradients` must have. `None` accepts every rule that gives a
        preconditioner.

    Raises:
      TypeError: if it is not side information.
      NotPrivateError: if it does not state its provenance.
      ValueError: if this optimizer cannot use its rule.
    """
    if isinstance(value, dict) and "config" in value:
        value = deserialize(value)
    if not isinstance(value, SideInformation):
        raise TypeError(
            "`side_information` must be a `FixedPreconditioner` (`token_frequencies`, `tf_idf`), "
            "`PublicGradients` or a `DelayedPreconditioner`, which state its provenance. "
            f"Received: side_information={value!r}"
        )
    if not (value.learns and getattr(value, "provenance", None) == "released"):
        stated_provenance(getattr(value, "provenance", None))
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
    """Side information, its state, and when and how it changes gradients.

    Attributes:
      side_information: the `SideInformation`, or `None`, which leaves gradients unchanged.
      state: lists of the variables that `side_information` keeps in the optimizer, once built.
      before_clipping: whether gradients are preconditioned before they are clipped. Otherwise the
        update rule calls `apply`.
    """

    def __init__(
        self,
        side_information: SideInformation | None,
        *,
        before_clipping: bool = True,
        minibatches_per_step: int = 1,
    ):
        """Creates the part without state.

        Args:
          side_information: what `check_side_information` returned, or `None`.
          before_clipping: see the class.
          minibatches_per_step: how many minibatches make one step and so share A.
        """
        self.side_information = side_information
        self.before_clipping = before_clipping
        self.state: list[list[tf.Variable]] = []
        self._minibatches_per_step = minibatches_per_step

    def build_in(self, optimizer: Any, variables: Sequence[tf.Variable]) -> None:
        """Creates the state in an optimizer that is not built; see `SideInformation.build`.

        Args:
          optimizer: the one that holds this part. Call it before its own slots are created.
          variables: those that it will train.
        """
        if self.side_information is None or is_built(optimizer):
            return
        own = [native(v) for v in variables]
        self.state = self.side_information.build(own, functools.partial(add_slot, optimizer))
        # Checkpoints know the state by this name.
        optimizer.side_information_state = self.state

    def is_between_steps(self, iterations: tf.Variable) -> bool:
        """Whether the state may change now: not between the minibatches of one step."""
        return int(iterations.numpy()) % self._minibatches_per_step == 0

    def scale_and_shift(
        self, optimizer: tf.keras.optimizers.Optimizer, variables: Sequence[tf.Variable]
    ) -> tuple[list[tf.Tensor] | None, list[tf.Tensor] | None]:
        """The preconditioner of some variables: (gradient + shift) ∘ scale.

        Args:
          optimizer: the built optimizer that holds this part.
          variables: variables that it was built for.

        Returns:
          One tensor per variable each, or `None` for what does not apply.
        """
        if self.side_information is None:
            return None, None
        indices = [slot_index(optimizer, variable) for variable in variables]
        return self.side_information.scale_and_shift(self.state, indices)

    def observe(
        self,
        optimizer: tf.keras.optimizers.Optimizer,
        variables: Sequence[tf.Variable],
        released: Sequence[tf.Tensor | None],
        scales: Sequence[tf.Tensor] | None,
        noise_stddev: tf.Tensor,
        counts: tf.Tensor,
    ) -> None:
        """Shows side information that `learns` what was released; see `SideInformation.observe`.

        Args:
          optimizer: the built optimizer that holds this part.
          variables: variables that it was built for.
          released: their noisy mean gradients, on several replicas the part of this one.
          scales: what these were multiplied by; `None` if by nothing.
          noise_stddev: scalar, the standard deviation of the noise in their sum over replicas.
          counts: bool scalar, whether these are gradients.
        """
        if self.side_information is None or not self.side_information.learns:
            return
        totals = [None if g is None else replicas.total(g) for g in released]
        indices = [slot_index(optimizer, variable) for variable in variables]
        each = [1.0] * len(totals) if scales is None else scales
        may_change = self.may_change(optimizer)
        changed, ratios = self.side_information.observe(
            self.state, indices, totals, each, noise_stddev, counts, may_change
        )
        self.after_change(optimizer, changed, indices, ratios)

    def may_change(self, optimizer: tf.keras.optimizers.Optimizer) -> tf.Tensor:
        """Whether A may change after this minibatch, which ends a step; a bool scalar."""
        steps = tf.convert_to_tensor(optimizer.iterations) + 1
        return tf.equal(steps % self._minibatches_per_step, 0)

    def after_change(
        self,
        optimizer: tf.keras.optimizers.Optimizer,
        changed: tf.Tensor,
        indices: Sequence[int],
        ratios: Sequence[tf.Tensor],
    ) -> None:
        """Does what a change of A asks of the optimizer: here, nothing.

        Args:
          optimizer: the built optimizer that holds this part.
          changed: bool scalar, whether A has changed.
          indices: the places of the variables of this step.
          ratios: for each of them [2], see `SideInformation.observe`.
        """

    def apply(
        self,
        optimizer: tf.keras.optimizers.Optimizer,
        gradient: tf.Tensor | tf.IndexedSlices,
        variable: tf.Variable,
    ) -> tf.Tensor:
        """(gradient + shift) ∘ scale of one variable, for gradients that are not clipped later.

        Args:
          optimizer: the built optimizer that holds this part, with side information.
          gradient: the gradient for the variable.
          variable: a variable that it was built for.
        """
        scale, shift = self.scale_and_shift(optimizer, [variable])
        gradient = tf.convert_to_tensor(gradient)  # slices of an embedding table
        if shift is not None:
            gradient += tf.cast(shift[0], gradient.dtype)
        return gradient if scale is None else gradient * tf.cast(scale[0], gradient.dtype)

    def get_config(self) -> dict:
        """The argument that makes the same side information."""
        information = self.side_information
        return {"side_information": None if information is None else serialize(information)}
