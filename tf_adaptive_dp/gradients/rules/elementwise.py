"""Biases, scales, and whatever else combines a variable with the data entry by entry."""

from __future__ import annotations

import tensorflow as tf

from tf_adaptive_dp.gradients.contributions import Dense
from tf_adaptive_dp.gradients.layout.names import ELEMENTWISE
from tf_adaptive_dp.gradients.rules.registry import Site, register_rule
from tf_adaptive_dp.gradients.totals import Viewed


def summed_rows(site: Site, entries: tf.Tensor) -> Viewed | None:
    """Sums over the axes along which the variable was broadcast, but for the examples.

    Args:
      site: whose output has the shape of `entries`.
      entries: the gradient for the variable at each entry of the output.
    """
    output, shape = site.op.outputs[0], site.op.inputs[site.index].shape
    rank, axis = output.shape.rank, site.layouts[output].axis
    aligned = [1] * (rank - shape.rank) + shape.as_list()
    if aligned[axis] != 1:
        return None  # a row of the variable for each example
    rows = site.rows(entries, like=output)
    others = [a for a in range(rank) if a != axis]
    gone = [1] + [2 + k for k, a in enumerate(others) if aligned[a] == 1]
    return site.viewed(Dense(shape.as_list(), tf.reduce_sum(rows, axis=gone)))


@register_rule("BiasAdd")
def bias_add(site: Site) -> Viewed | None:
    """δ, summed over all positions."""
    rows, axis = site.delta_rows(), site.layouts[site.op.outputs[0]].axis
    rank = site.delta.shape.rank
    channels = 1 if site.op.get_attr("data_format") == b"NCHW" else rank - 1
    if site.index != 1 or axis == channels:
        return None
    place = 2 + channels - (axis < channels)
    gone = [a for a in range(1, rank + 1) if a != place]
    return site.viewed(Dense(site.op.inputs[1].shape, tf.reduce_sum(rows, axis=gone)))


@register_rule(*(ELEMENTWISE - {"AddN", "IdentityN"}))
def elementwise(site: Site) -> Viewed | None:
    """The derivative of the operation at each entry, times δ.

    TensorFlow's own gradient gives it, when the variable is spread to the shape of the output
    first, so that nothing is summed.
    """
    op, output = site.op, site.op.outputs[0]
    if op.type in ("Add", "AddV2"):
        return summed_rows(site, site.delta)
    if op.type == "Sub":
        return summed_rows(site, site.delta if site.index == 0 else -site.delta)
    inputs = list(op.inputs)
    spread = inputs[site.index] = tf.broadcast_to(inputs[site.index], tf.shape(output))
    again = op.graph.create_op(
        op.type, inputs, [t.dtype for t in op.outputs], attrs=dict(op.node_def.attr)
    )
    entries = tf.gradients(again.outputs[0], spread, grad_ys=site.delta)[0]
    return None if entries is None else summed_rows(site, entries)


@register_rule("BroadcastTo", "Tile")
def spread(site: Site) -> Viewed | None:
    """A variable that is repeated for each example, such as a class token."""
    if site.index != 0 or site.op.type == "Tile" and _repeats(site):
        return None
    return summed_rows(site, site.delta)


def _repeats(site: Site) -> bool:
    """Whether entries other than single ones are repeated, so that axes keep their length."""
    output, shape = site.op.outputs[0], site.op.inputs[0].shape
    axis = site.layouts[output].axis
    return any(n != 1 and n != output.shape[a] for a, n in enumerate(shape) if a != axis) or (
        shape[axis] != 1
    )
