"""Settings that a private step changes before it begins, as users would otherwise have to.

TensorFloat-32 is turned off in the whole process, with a warning, and the batch size of `fit`
becomes the expected one.
"""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from tf_adaptive_dp._keras.callers import running_fit
from tf_adaptive_dp._keras.tracebacks import level_of_caller
from tf_adaptive_dp.mechanism.replicas import num_replicas


def turn_off_tensor_float_32() -> None:
    """Gives products of float32 matrices the precision of float32, in the whole process.

    Norms and clipped sums are such products. TensorFloat-32, TensorFlow's default on newer GPUs,
    keeps 11 of 24 bits of their factors, so that norms whose terms nearly cancel would be far too
    small, and the sum would not be that of the gradients whose norms were taken. So it is turned
    off, with a warning.
    """
    if tf.config.experimental.tensor_float_32_execution_enabled() and _has_tensor_float_32():
        tf.config.experimental.enable_tensor_float_32_execution(False)
        warnings.warn(
            "TensorFloat-32 is off now in this process: it keeps 11 of the 24 bits of float32, and "
            "clipping needs exact norms. `keras.mixed_precision` is fast without it.",
            stacklevel=level_of_caller(),
        )


def _has_tensor_float_32() -> bool:
    """Whether a GPU of this process has it; those of unknown kind count as if they had."""
    for device in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(device)
        if details.get("compute_capability", (8, 0)) >= (8, 0):
            return True
    return False


def settle_batch_size(optimizer: Any) -> None:
    """Takes the expected batch size from the data of `fit` if their last batch may be smaller.

    `batch_size` of `fit`, and that of a `tf.data.Dataset` or a `PyDataset`, are public. Where it
    cannot be the expected size, as with microbatches, such data are rejected before anything is
    released, and so is a `PyDataset` with batches of other sizes that names none: the sizes of its
    batches may be random. Otherwise the step of the last batch would fail, at the end of an epoch.
    """
    with tf.init_scope():
        expected, groups = optimizer.expected_batch_size, optimizer.num_microbatches
        seen = optimizer.rows_per_batch
    may_vary = expected is not None and groups is None
    fit = None if may_vary else running_fit(optimizer, on_replicas=False)
    if fit is None:
        return
    sizes = fit.sizes_of_batches()
    can_take = groups is None and optimizer.examples_per_user is None and num_replicas() == 1
    if can_take and sizes is not None and seen in (0, sizes[0]):
        with tf.init_scope():
            optimizer.take_batch_size(sizes[0])
        return
    is_last_known = sizes is not None and sizes[1] is not None
    first_and_last = sizes if is_last_known else fit.sizes_of_ends()
    if first_and_last is None:
        return  # the last one may be as large as the others
    first, last = first_and_last
    given = "" if groups is None else f", num_microbatches={groups}"
    cures = "" if groups is None else " without `num_microbatches`"
    if can_take and sizes is None:
        cures += ", give the `PyDataset` an attribute `batch_size`"
    raise ValueError(
        f"Batches vary in size: `fit` would get batches of {first} examples, and a last one of "
        f"{last}. Pass `expected_batch_size` to the optimizer{cures}, or make all "
        "batches equal (a `tf.data.Dataset` with `batch(..., drop_remainder=True)`). Received: "
        f"expected_batch_size={expected}{given}"
    )
