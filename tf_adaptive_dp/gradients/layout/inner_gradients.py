"""What operations of a gradient do to the batch axis, where the loss itself depends on a gradient.

Such as a penalty on the gradient of the model's output for its inputs.
"""

from __future__ import annotations

from tf_adaptive_dp.gradients.layout.batch_axis import Mixed
from tf_adaptive_dp.gradients.layout.operations import axis_0, register_layout, unless_mixed

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
@unless_mixed
def fused_batch_norm_grad(op, layouts):
    """That of a frozen normalization, or of one with the examples as channels."""
    rank = op.inputs[1].shape.rank
    entries = {layouts[t] for t in op.inputs[:2] if layouts.depends(t)}
    scales = {layouts[t] for t in op.inputs[2:] if layouts.depends(t)}
    channels = 1 if op.get_attr("data_format") in (b"NCHW", b"NCDHW") else rank - 1
    of_scales = Mixed(op, "sums over the batch axis")
    if len(entries) == 1:
        layout = entries.pop()
        if layout.axis == channels and scales <= {layout.at(0)}:
            return [layout] + [layout.at(0)] * (len(op.outputs) - 1)
        if not scales and not op.get_attr("is_training"):
            return [layout] + [of_scales] * (len(op.outputs) - 1)
    return Mixed(op, "is BatchNormalization in training mode")
