"""Convolutions of one, two and three dimensions: products of patches and output gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import TensorReference
from tf_adaptive_dp._keras.tracing import in_xla
from tf_adaptive_dp.gradients.batch_axis.values import static_or_dynamic_shape
from tf_adaptive_dp.gradients.contributions import (
    DenseGradient,
    OuterGradient,
    VariableContribution,
)
from tf_adaptive_dp.gradients.rules.registry import RuleContext, register_rule

# More slices than this take long to compile.
_MOST_SLICES = 32
# For depthwise convolutions with more outputs per channel, products of matrices are as fast.
_MOST_MULTIPLIED = 3


@register_rule("Conv2D", "Conv3D")
def convolution(context: RuleContext) -> VariableContribution | None:
    """g = Σ_t patch_t δ_tᵀ over the positions t, in groups."""
    if context.index != 1:
        return None
    return _contribution(context, context.op.inputs[0], context.op.outputs[0])


@register_rule("Conv2DBackpropInput", "Conv3DBackpropInputV2")
def transposed_convolution(context: RuleContext) -> VariableContribution | None:
    """A convolution with input and output exchanged."""
    if context.index != 1:
        return None
    return _contribution(context, context.op.outputs[0], context.op.inputs[2])


@register_rule("DepthwiseConv2dNative")
def depthwise_convolution(context: RuleContext) -> VariableContribution | None:
    """Each channel is a group of its own."""
    if context.index != 1:
        return None
    op, (*sizes, channels, multiplier) = context.op, context.op.inputs[1].shape.as_list()
    if multiplier <= _MOST_MULTIPLIED:
        return context.contribute(_by_tap(context, sizes, channels, multiplier))
    patches = _patches(context, op.inputs[0], op.outputs[0], sizes)
    delta = _positions(context, _channels_last(op, context.delta), op.outputs[0])
    form = OuterGradient(tf.transpose(patches, [0, 1, 3, 2]), _split(delta, [channels, multiplier]))
    view = context.view.reshape([math.prod(sizes), channels, multiplier]).transpose([1, 0, 2])
    return context.contribute(form, view)


def _by_tap(
    context: RuleContext, sizes: Sequence[int], channels: int, multiplier: int
) -> DenseGradient:
    """g = Σ_t x_t ∘ δ_t at each tap of a depthwise kernel, for the entries x_t under the tap.

    This needs no patches, which are larger than x by the number of taps.
    """
    op = context.op
    x, windows = _padded(op, op.inputs[0], op.outputs[0], sizes)
    x = _phases(tf.repeat(tf.cast(x, tf.float32), multiplier, axis=3), windows)
    delta = tf.cast(_channels_last(op, context.delta), tf.float32)
    shape = static_or_dynamic_shape(delta)

    def at_tap(start: tf.Tensor) -> tf.Tensor:
        under = tf.reshape(tf.slice(x, start, [1, 1, *shape]), shape)
        rows = context.rows(tf.reduce_sum(under * delta, [1, 2]), like=op.outputs[0])
        return tf.reduce_sum(rows, 1)

    starts = []
    for taps in itertools.product(*map(range, sizes)):
        (a, i), (b, j) = (divmod(k * d, s) for k, (_, s, d, _) in zip(taps, windows))
        starts.append([i, j, 0, a, b, 0])
    signature = tf.TensorSpec([None, channels * multiplier])
    # The graph of a loop is as small for many taps as for few. Two at a time are as fast as all.
    found = tf.map_fn(
        at_tap, tf.constant(starts), fn_output_signature=signature, parallel_iterations=2
    )
    rows = tf.reshape(tf.transpose(found, [1, 0, 2]), [-1, *sizes, channels, multiplier])
    return DenseGradient(rows.shape[1:], rows)


def _contribution(context: RuleContext, image: tf.Tensor, small: tf.Tensor) -> VariableContribution:
    """The kernel slides over `image`; `small` has one entry per position."""
    op, kernel = context.op, context.op.inputs[1].shape.as_list()
    *sizes, channels, outputs = kernel
    groups = _channels_last(op, image).shape[-1] // channels
    entries = {image.ref(): image, small.ref(): small, op.outputs[0].ref(): context.delta}
    patches = _patches(context, image, small, sizes, entries)
    patches = _split(patches, [groups, channels])  # [B, T, taps, G, channels]
    x = tf.transpose(patches, [0, 1, 3, 2, 4])
    x = _merge(x, 3, 5)
    delta = _positions(context, _channels_last(op, entries[small.ref()]), small)
    delta = _split(delta, [groups, outputs // groups])
    taps = math.prod(sizes)
    view = context.view.reshape([taps * channels, groups, outputs // groups]).transpose([1, 0, 2])
    return context.contribute(OuterGradient(x, delta), view)


def _channels_first(op: tf.Operation) -> bool:
    return op.get_attr("data_format") in (b"NCHW", b"NCDHW")


def _channels_last(op: tf.Operation, tensor: tf.Tensor) -> tf.Tensor:
    if not _channels_first(op):
        return tensor
    rank = tensor.shape.rank
    return tf.transpose(tensor, [0, *range(2, rank), 1])


def _spatial(op: tf.Operation, name: str) -> list[int]:
    """The entries of an attribute that belong to spatial axes."""
    values = op.get_attr(name)
    return list(values[2:] if _channels_first(op) else values[1:-1])


def _split(tensor: tf.Tensor, sizes: list[int]) -> tf.Tensor:
    """Splits the last axis into several."""
    shape = static_or_dynamic_shape(tensor)
    return tf.reshape(tensor, [*shape[:-1], *sizes])


def _merge(tensor: tf.Tensor, first: int, last: int) -> tf.Tensor:
    """Merges the axes from `first` up to, but not including, `last`."""
    shape = static_or_dynamic_shape(tensor)
    return tf.reshape(tensor, [*shape[:first], math.prod(shape[first:last]), *shape[last:]])


def _positions(context: RuleContext, tensor: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """[B, T, C] from a tensor with batch axis 0, any positions, and channels last."""
    rows = context.rows(tensor, like=like)
    return _merge(rows, 1, rows.shape.rank - 1)


def _patches(
    context: RuleContext,
    image: tf.Tensor,
    small: tf.Tensor,
    sizes: Sequence[int],
    entries: dict[TensorReference, tf.Tensor] | None = None,
) -> tf.Tensor:
    """[B, T, taps, C]: the part of `image` under the kernel at each position of `small`."""
    x, windows = _padded(context.op, (entries or {}).get(image.ref(), image), small, sizes)
    few = math.prod(sizes) <= _MOST_SLICES
    taken = _sliced(x, windows) if few and in_xla() else _gathered(x, windows)
    channels, front = x.shape[-1], static_or_dynamic_shape(x)[0]
    positions = math.prod(count for *_, count in windows)
    stacked = tf.reshape(taken, [front, positions, math.prod(sizes), channels])
    rows = context.rows(stacked, like=image)
    return _merge(rows, 1, rows.shape.rank - 2)


# A spatial axis: taps, stride, dilation and number of positions.
_Window = tuple[int, int, int, "tf.Tensor | int"]


def _padded(
    op: tf.Operation, image: tf.Tensor, small: tf.Tensor, sizes: Sequence[int]
) -> tuple[tf.Tensor, list[_Window]]:
    """`image` with channels last and its padding, and its windows at the positions of `small`."""
    x = _channels_last(op, image)
    positions = static_or_dynamic_shape(_channels_last(op, small))[1:-1]
    strides = _spatial(op, "strides")
    dilations = _spatial(op, "dilations")
    reach = [(k - 1) * d + 1 for k, d in zip(sizes, dilations)]
    given = static_or_dynamic_shape(x)[1:-1]
    missing = [
        _at_least_0((n - 1) * s + r - g) for n, s, r, g in zip(positions, strides, reach, given)
    ]
    padding = op.get_attr("padding")
    if padding == b"EXPLICIT":
        pairs = op.get_attr("explicit_paddings")
        pairs = pairs[4:] if _channels_first(op) else pairs[2:-2]
        before = pairs[::2]
    else:
        before = [m // 2 if padding == b"SAME" else 0 for m in missing]
    x = tf.pad(x, [[0, 0], *([b, _at_least_0(m - b)] for b, m in zip(before, missing)), [0, 0]])
    return x, list(zip(sizes, strides, dilations, positions))


def _gathered(x: tf.Tensor, windows: Sequence[_Window]) -> tf.Tensor:
    """All entries under the kernel, ordered by position and tap, from x [B, ..., C].

    One gather is much faster than a slice for each tap, except under XLA.
    """
    index: tf.Tensor | int = 0
    rank = len(windows)
    for axis, (taps, stride, dilation, count) in enumerate(windows):
        places = tf.range(count)[:, tf.newaxis] * stride + tf.range(taps) * dilation
        shape = [1] * (2 * rank)
        shape[axis], shape[rank + axis] = count, taps
        index = index * static_or_dynamic_shape(x)[1 + axis] + tf.reshape(places, shape)
    return tf.gather(_merge(x, 1, 1 + rank), tf.reshape(index, [-1]), axis=1)


def _sliced(x: tf.Tensor, windows: Sequence[_Window]) -> tf.Tensor:
    """What `_gathered` returns, with the axes apart, from a slice for each tap."""
    slices = []
    for offsets in itertools.product(*(range(taps) for taps, *_ in windows)):
        places = [
            slice(k * dilation, k * dilation + (count - 1) * stride + 1, stride)
            for k, (_, stride, dilation, count) in zip(offsets, windows)
        ]
        slices.append(x[(slice(None), *places)])
    return tf.stack(slices, axis=1 + len(windows))


def _phases(x: tf.Tensor, windows: Sequence[_Window]) -> tf.Tensor:
    """Moves x[:, a·s + i, b·s' + j], for strides s and s', to [i, j, :, a, b].

    The entries under a tap are then a slice without strides, which is faster.
    """
    front, *lengths, channels = static_or_dynamic_shape(x)
    strides = [stride for _, stride, *_ in windows]
    counts = [-(-n // s) for n, s in zip(lengths, strides)]
    more = [[0, c * s - n] for n, s, c in zip(lengths, strides, counts)]
    x = tf.pad(x, [[0, 0], *more, [0, 0]])
    split = [n for pair in zip(counts, strides) for n in pair]
    return tf.transpose(tf.reshape(x, [front, *split, channels]), [2, 4, 0, 1, 3, 5])


def _at_least_0(n: tf.Tensor | int) -> tf.Tensor | int:
    return max(n, 0) if isinstance(n, int) else tf.maximum(n, 0)
