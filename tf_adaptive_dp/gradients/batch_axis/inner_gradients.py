"""What gradient operations do to the batch axis, for losses that contain a gradient.

An example is a penalty on the gradient of the model's output with respect to its inputs.
"""

from __future__ import annotations

from tf_adaptive_dp.gradients.batch_axis.operations import (
    axis_0,
    register_layout,
    unless_cross_example,
)
from tf_adaptive_dp.gradients.batch_axis.values import CrossExample

register_layout(
    "AvgPoolGrad",
    "AvgPool3DGrad",
    "DepthwiseConv2dNativeBackpropInput",
    "LRNGrad",
    "MaxPoolGrad",
    "MaxPoolGradV2",
    "MaxPool3DGrad",
    "ResizeBicubicGrad",
    "ResizeBilinearGrad",
    "ResizeNearestNeighborGrad",
)(axis_0)


@register_layout("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")
@unless_cross_example
def fused_batch_norm_grad(op, batch_axes):
    """The gradient of a frozen normalization, or of one with the examples as channels."""
    rank = op.inputs[1].shape.rank
    entries = {batch_axes[t] for t in op.inputs[:2] if batch_axes.depends(t)}
    scales = {batch_axes[t] for t in op.inputs[2:] if batch_axes.depends(t)}
    channels = 1 if op.get_attr("data_format") in (b"NCHW", b"NCDHW") else rank - 1
    of_scales = CrossExample(op, "sums over the batch axis")
    if len(entries) == 1:
        layout = entries.pop()
        if layout.axis == channels and scales <= {layout.at(0)}:
            return [layout] + [layout.at(0)] * (len(op.outputs) - 1)
        if not scales and not op.get_attr("is_training"):
            return [layout] + [of_scales] * (len(op.outputs) - 1)
    return CrossExample(op, "is BatchNormalization in training mode")
