"""The base of all side information, which states its provenance."""

from __future__ import annotations

import abc
import inspect
import warnings
from collections.abc import Sequence
from typing import Any, Callable

import dp_accounting
import tensorflow as tf

from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp.accounting.accountants import is_unprotected
from tf_adaptive_dp.accounting.terms import missing_events
from tf_adaptive_dp.errors import NotPrivateError


def check_provenance(provenance: Any) -> str | dp_accounting.DpEvent:
    """Returns `provenance` as `stated_provenance` does, with a warning if there is no privacy.

    `dp_accounting.NonPrivateDpEvent()` stands for unprotected statistics of the private data, which
    show what better side information could achieve. Epsilon is infinite then, and a warning says
    so.

    Args:
      provenance: `"public"`, or the `dp_accounting.DpEvent` of its release.

    Raises:
      NotPrivateError: if it is anything else.
    """
    stated_provenance(provenance)
    if isinstance(provenance, dp_accounting.DpEvent) and is_unprotected(provenance):
        warnings.warn(
            "NOT PRIVATE: the provenance of this side information is a release without any "
            "privacy, so epsilon is infinite for everything trained with it. Use it only to "
            f"compare methods. Received: provenance={provenance!r}",
            stacklevel=3,
        )
    return provenance


def stated_provenance(provenance: Any) -> str | dp_accounting.DpEvent:
    """Returns `provenance`, or raises if it does not say where side information comes from.

    Args:
      provenance: `"public"`, or the `dp_accounting.DpEvent` of its release.

    Raises:
      NotPrivateError: if it is anything else.
    """
    is_public = isinstance(provenance, str) and provenance == "public"
    if is_public or isinstance(provenance, dp_accounting.DpEvent):
        return provenance
    raise NotPrivateError(
        "`provenance` must say where side information comes from: 'public', or the "
        "`dp_accounting.DpEvent` of its private release. Statistics of the private data without "
        f"privacy would void the guarantee. Received: provenance={provenance!r}"
    )


def events(provenance: str | dp_accounting.DpEvent) -> tuple[dp_accounting.DpEvent, ...]:
    """The releases that produced the side information, besides those of the optimizer itself.

    There are none if it is public, or if all of them are in the optimizer's own ledger.
    """
    return (provenance,) if isinstance(provenance, dp_accounting.DpEvent) else ()


def uncounted_events(
    information: Any, counted: Sequence[dp_accounting.DpEvent]
) -> tuple[dp_accounting.DpEvent, ...]:
    """The releases of side information that a ledger does not count.

    Args:
      information: a `SideInformation`, or `None` if there is none.
      counted: the `other_events` of the ledger.
    """
    return () if information is None else missing_events(events(information.provenance), counted)


def serialize(registered: Any) -> dict:
    """Describes an object or a function that is registered with Keras.

    The description suits all of Keras's formats, which disagree on how to describe objects nested
    in the configuration of an optimizer.

    Raises:
      ValueError: if it is not registered.
    """
    target = registered if inspect.isfunction(registered) else type(registered)
    name = keras.saving.get_registered_name(target)
    if keras.saving.get_registered_object(name) is not target:
        raise ValueError(
            "To be saved with an optimizer, a function or class must be decorated with "
            f"`tf.keras.saving.register_keras_serializable()`. Received: {registered!r}"
        )
    config = None if target is registered else registered.get_config()
    return {"registered_name": name, "config": config}


def deserialize(description: dict) -> Any:
    """Returns the object or function that `serialize` described.

    Raises:
      ValueError: if its name is not registered in this program.
    """
    target = keras.saving.get_registered_object(description["registered_name"])
    if target is None:
        raise ValueError(
            "An object of the saved optimizer is not registered with Keras in this program. "
            f"Received: {description['registered_name']!r}"
        )
    config = description["config"]
    return target if config is None else target.from_config(config)


class SideInformation(abc.ABC):
    """What optimizers require of side information.

    Attributes:
      provenance: `"public"`, or the `dp_accounting.DpEvent` of its release; or `"released"`, if all
        of it comes from what the optimizer that holds it has released and entered in its ledger.
      learns: whether it takes in what the optimizer releases, with `observe`.
    """

    provenance: str | dp_accounting.DpEvent
    learns: bool = False

    @property
    def description(self) -> str:
        """A name of a few words, for the privacy statement."""
        return type(self).__name__

    @abc.abstractmethod
    def build(
        self, variables: Sequence[tf.Variable], add_slot: Callable[..., tf.Variable]
    ) -> list[list[tf.Variable]]:
        """Creates the state that an optimizer keeps for it.

        Args:
          variables: the variables that are trained.
          add_slot: creates a variable that is saved with the optimizer, from a model variable, a
            name and an `initial_value` or a `shape`.

        Returns:
          Lists of variables, for `scale_and_shift`.
        """

    @abc.abstractmethod
    def scale_and_shift(
        self, state: list[list[tf.Variable]], indices: Sequence[int]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor] | None]:
        """The preconditioner, which maps gradients to (gᵢ + shift) ∘ scale.

        Args:
          state: what `build` returned.
          indices: the places of the variables among those passed to `build`.

        Returns:
          Scales and shifts, one tensor per variable each, in shapes that broadcast to the
          variable's. The shift may be `None`.
        """

    def observe(
        self,
        state: list[list[tf.Variable]],
        indices: Sequence[int],
        released: Sequence[tf.Tensor | None],
        scales: Sequence[tf.Tensor | float],
        noise_stddev: tf.Tensor,
        counts: tf.Tensor,
        may_change: tf.Tensor,
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Takes in what was released; only called if it `learns`.

        Args:
          state: what `build` returned, which may change.
          indices: the places of the variables among those passed to `build`.
          released: noisy mean gradients, or `None` where the loss does not depend on the variable.
          scales: what they were multiplied by before they were clipped.
          noise_stddev: scalar, the standard deviation of their noise.
          counts: bool scalar, whether these are gradients; otherwise nothing may change.
          may_change: bool scalar, whether the next minibatch may have another preconditioner.

        Returns:
          A bool scalar, whether it has; and for each variable [2], float64, the smallest and the
          largest factor by which its scale changes.
        """
        raise NotImplementedError(f"{type(self).__name__} does not learn.")

    @abc.abstractmethod
    def get_config(self) -> dict:
        """The arguments that make the same object."""

    @classmethod
    def from_config(cls, config: dict) -> SideInformation:
        """Makes the object that `get_config` described."""
        return cls(**config)

    def serialized_provenance(self) -> str:
        """The provenance for a saved configuration.

        Raises:
          ValueError: if it is a `DpEvent`, which Keras cannot save.
        """
        if isinstance(self.provenance, dp_accounting.DpEvent):
            raise ValueError(
                "An optimizer whose side information is not public cannot be saved with its "
                f"configuration. Received: provenance={self.provenance!r}. Save the weights "
                "(`tf.train.Checkpoint`) and create the optimizer anew."
            )
        return self.provenance
