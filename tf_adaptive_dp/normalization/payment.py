"""Which releases of normalizations a budget or a ledger counts, and which it does not."""

from __future__ import annotations

from collections.abc import Sequence

import dp_accounting
import tensorflow as tf

from tf_adaptive_dp._keras.layers import layers_within
from tf_adaptive_dp.accounting.ledger import missing_events
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.normalization.layer import PrivateNormalization
from tf_adaptive_dp.side_information import provenance

OF_OTHER_UNIT = (
    "The statistics of a `PrivateNormalization` were released for examples, but the optimizer "
    "protects users: those of a user with many examples would not be covered by epsilon."
)


def normalizations_in(model: tf.keras.Model) -> list[PrivateNormalization]:
    """The `PrivateNormalization` layers in a model, those inside of other layers too."""
    return [layer for layer in layers_within(model) if isinstance(layer, PrivateNormalization)]


def of_other_unit(
    layers: Sequence[PrivateNormalization], optimizer: tf.keras.optimizers.Optimizer
) -> PrivateNormalization | None:
    """The first layer whose release protects examples where the optimizer protects users.

    A user with many examples moves its sums by far more than its event says.
    """
    if optimizer.examples_per_user is None:
        return None
    return next((x for x in layers if x.release_id and not x.protects_users), None)


def first_unpaid(
    layers: Sequence[PrivateNormalization],
    optimizer: tf.keras.optimizers.Optimizer,
    events: Sequence[dp_accounting.DpEvent],
    known: dict[int, dp_accounting.DpEvent] | None = None,
) -> PrivateNormalization | None:
    """The first layer whose release no event is left to pay for; `None` if all are paid for.

    Each event pays for one release: of side information, or of the statistics of one layer and its
    copies.

    Args:
      layers: what the optimizer trains behind; layers without statistics will need an event, too.
      optimizer: the one whose side information is paid for first.
      events: what is paid for.
      known: releases that are paid for already, by their numbers.

    Raises:
      NotPrivateError: if a release protects examples and the optimizer users.
    """
    other = of_other_unit(layers, optimizer)
    if other is not None:
        raise NotPrivateError(
            f"{OF_OTHER_UNIT} Adapt a new layer with `layer.adapt(x, user_ids)`, or let the plan "
            f"do it: `plan.normalization(x)`. Received: {other.name!r}, "
            f"examples_per_user={optimizer.examples_per_user!r}"
        )
    information = optimizer.side_information
    of_information = () if information is None else provenance.events(information.provenance)
    known = dict(known or {})
    left = missing_events(events, among=[*of_information, *known.values()])
    for layer in layers:
        for number, event in layer.releases.items() or [(0, layer.dp_event)]:
            if number in known:
                continue  # it has been paid for, or is a copy of one that has
            if missing_events([event], among=left):
                return layer
            left = missing_events(left, among=[event])
            if number:
                known[number] = event
    return None


def unpaid_in(
    model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer
) -> PrivateNormalization | None:
    """A layer in a model whose statistics the optimizer's ledger does not count; see above."""
    adapted = [layer for layer in normalizations_in(model) if layer.release_id]
    return first_unpaid(adapted, optimizer, optimizer.ledger.other_events)
