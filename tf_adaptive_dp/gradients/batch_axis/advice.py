"""The one thing to do about an operation that mixes the examples of a batch."""

from __future__ import annotations

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import ancestors, layer_path
from tf_adaptive_dp.gradients.batch_axis.operation_types import VARIABLE_READS

NORMALIZE = (
    "Replace the batch normalization by `tf.keras.layers.GroupNormalization` or "
    "`LayerNormalization` (`tf_adaptive_dp.validate(model, batch, fix=True)` replaces each "
    "`BatchNormalization` in a copy), or freeze it, as in a pretrained network "
    "(`layer.trainable = False`; on Keras 3, calling the network with `training=False` is not "
    "enough)."
)
_REDUCE = "Leave the batch axis out of the reduction, as with `axis=-1`."
_REDUCE_NOTHING = (
    "Return one loss per example: what is reduced here has one entry for each of them, and no "
    "other axis."
)
_OTHER_AXIS = "Have it work along another axis, such as `axis=-1`."
_MULTIPLY = (
    'Multiply within each example, as `tf.einsum("bi,bi->b", x, y)` does. A loss that compares the '
    "examples of a batch with each other has no gradient per example."
)
_ALIGN = (
    "Give both tensors the same axes: with [B, 1], such as the outputs of `Dense(1)`, [B] is "
    "broadcast to [B, B]. Drop the last axis (`outputs[:, 0]`) or add one (`labels[:, None]`). A "
    "loss that compares the examples of a batch with each other has no gradient per example."
)
_KEEP_ROWS = (
    "Keep all examples, in their order: reorder or split the data set instead (`dataset.shuffle`, "
    "`dataset.filter`), and give examples that must not count a `sample_weight` of 0."
)
_JOIN = (
    "Concatenate along another axis, such as `axis=-1`, so that row i stays example i. To train on "
    "other examples beside those of the batch, such as generated ones, call the model on each of "
    "the two batches and add the losses."
)
_DECIDE = "Decide for each example on its own, with `tf.where`."
_STATIC = (
    "Write axes and shapes as Python numbers, or give the tensor its shape with `tf.ensure_shape`."
)
_RESHAPE = (
    "Keep the batch as axis 0, as `tf.reshape(x, [tf.shape(x)[0], ...])` with fixed sizes after it "
    "does."
)
_OWN = (
    "Compute entry i from example i alone, with the batch as an axis of its own; or, if it depends "
    "on the data only, before training, in `dataset.map`."
)
_PREPROCESS = (
    "The layer prepares inputs and looks at several examples for that, as RandAugment, MixUp and "
    "CutMix do, or the library cannot tell that it does not. Leave it out of the model. If it also "
    "makes sense for one example, apply it to each on its own in the data set: `dataset.map` "
    "before `batch`, or `tf.map_fn` in batches, as those of `plan.batches` (a plan reads each "
    "example once)."
)
_DENSE = (
    "Give each input the batch as axis 0 and a static shape (`tf.ensure_shape`). Before `fit`, or "
    "in `dataset.map`, pad a ragged input by `to_tensor(shape=[None, length])`, and make a sparse "
    "one dense by `tf.sparse.to_dense`."
)
_ONE_LENGTH = "With a ragged tensor of your own, call `to_tensor(shape=[None, length])`."
_HINGE = (
    "Keras's hinge losses look at all labels of a batch. With labels of -1 and 1, use "
    "`lambda y, z: tf.reduce_mean(tf.maximum(1.0 - y * z, 0.0), axis=-1)`, squared or not."
)
_CTC = (
    "This CTC loss is not supported, since TensorFlow computes its gradient for the whole batch at "
    "once. docs/troubleshooting.md has one that works, for sequences of one length."
)

# They take no axis; `tf.tensordot(x, y, 2)` is one of them.
_PRODUCTS = {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"}
# By words of what an operation does, the first that fit.
_BY_WORDS = (
    (("is BatchNormalization",), NORMALIZE),
    (("is sparse or ragged",), _DENSE),
    (("unknown",), _STATIC),
    (("reduces over", "sums over"), _REDUCE),
    (("by broadcasting",), _ALIGN),
    (("with every other one",), _MULTIPLY),
    (("takes some examples", "picks ", "takes the batch apart"), _KEEP_ROWS),
    (("beside other ones", "puts other rows", "adds rows"), _JOIN),
    (("decision", "lets one example decide", "loop whose length", "decides by"), _DECIDE),
    (("reshapes", "removes the batch axis"), _RESHAPE),
    (("works across",), _OTHER_AXIS),
)


def advice(op: tf.Operation, why: str) -> str:
    """What to change about an operation that mixes examples.

    Args:
      op: the operation.
      why: what it does, as a `CrossExample` says.

    Returns:
      One or two sentences.
    """
    if "moments" in op.name.split("/"):  # of `tf.nn.moments`, as in BatchNormalization
        return NORMALIZE
    if {"hinge", "squared_hinge"}.intersection(op.name.split("/")):
        return _HINGE
    if "ctc_loss_dense" in op.name.split("/"):  # of `tf.nn.ctc_loss`, as in `keras.losses.CTC`
        return _CTC
    if "to the longest" in why:
        return _ONE_LENGTH
    if layer_path(op.name) is not None and not _reads_weights(op):
        return _PREPROCESS
    fix = next((fix for words, fix in _BY_WORDS if any(w in why for w in words)), _OWN)
    if fix == _REDUCE and op.type in _PRODUCTS:
        return _MULTIPLY
    if fix == _REDUCE and op.inputs[0].shape.rank == 1:
        return _REDUCE_NOTHING
    return fix


def _reads_weights(op: tf.Operation) -> bool:
    """Whether what an operation does depends on weights; the state of random numbers is integer."""
    reads = [o for o in ancestors(op.outputs) if o.type in VARIABLE_READS]
    return any(t.dtype.is_floating for o in reads for t in o.outputs)
