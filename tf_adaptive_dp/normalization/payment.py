"""Which releases of normalizations a budget or a ledger counts, and which it does not."""

from __future__ import annotations

from collections.abc import Sequence

import dp_accounting
import tensorflow as tf

from tf_adaptive_dp._keras.callers import running_models
from tf_adaptive_dp._keras.graphs import is_symbolic
from tf_adaptive_dp._keras.layers import layers_within
from tf_adaptive_dp._keras.variables import local_copies, native
from tf_adaptive_dp.accounting.terms import missing_events
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.frames import handles_read
from tf_adaptive_dp.normalization.layer import PrivateNormalization, applied_normalizations
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
    """A layer in a model that the optimizer's ledger does not pay for; see `first_unpaid`."""
    return _unpaid_among(normalizations_in(model), optimizer)


def _unpaid_among(
    layers: Sequence[PrivateNormalization], optimizer: tf.keras.optimizers.Optimizer
) -> PrivateNormalization | None:
    adapted = [layer for layer in layers if layer.release_id]
    ledger = optimizer.ledger
    return first_unpaid(adapted, optimizer, ledger.other_events, ledger.statistics)


def refuse_unpaid_in(model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer) -> None:
    """Raises if a model holds statistics that the optimizer's ledger does not count.

    Raises:
      NotPrivateError: if ε would leave their release out.
    """
    _refuse_unpaid(normalizations_in(model), optimizer)


def refuse_unpaid_behind(
    loss: tf.Tensor,
    optimizer: tf.keras.optimizers.Optimizer,
    apart_from: Sequence[PrivateNormalization] = (),
) -> None:
    """Raises if a loss depends on statistics that the optimizer's ledger does not count.

    They are found wherever the layer is, by the variables that the loss is computed from.
    For an eager loss, only the layers of the models that are being trained are known. The ledger
    notes them, so that no event pays for statistics that take their place.

    Args:
      loss: what the optimizer was given.
      optimizer: the optimizer.
      apart_from: layers that were looked at before.

    Raises:
      NotPrivateError: if ε would leave their release out.
    """
    if not applied_normalizations():
        return
    if is_symbolic(loss):
        layers = _read_by(loss)
    else:
        trained = [m for m in running_models() if getattr(m, "optimizer", None) is optimizer]
        layers = [layer for model in trained for layer in normalizations_in(model)]
    layers = [x for x in layers if all(x is not y for y in apart_from)]
    _refuse_unpaid(layers, optimizer)
    for layer in layers:
        optimizer.ledger.statistics.update(layer.releases)


def _read_by(loss: tf.Tensor) -> list[PrivateNormalization]:
    """The layers whose means a symbolic loss is computed from."""
    read = handles_read(loss)

    def is_read(layer: PrivateNormalization) -> bool:
        return any(id(copy.handle) in read for copy in local_copies(native(layer.mean)))

    return [layer for layer in applied_normalizations() if is_read(layer)]


def _refuse_unpaid(
    layers: Sequence[PrivateNormalization], optimizer: tf.keras.optimizers.Optimizer
) -> None:
    layer = _unpaid_among(layers, optimizer)
    if layer is not None:
        raise NotPrivateError(
            "The model has a `PrivateNormalization` whose release is not in the optimizer's "
            "ledger, so epsilon would be too small. Before training, add it once for each "
            "layer that was adapted: `optimizer.ledger.other_events += (layer.dp_event,)`; or "
            "train with a `PrivacyPlan` that has `normalize_inputs=True` or "
            f"`normalize_targets=True`. Received: {layer.name!r} with "
            f"{layer.dp_event!r}, other_events={optimizer.ledger.other_events!r}"
        )
