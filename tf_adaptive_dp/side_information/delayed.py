"""Preconditioners from what the optimizer released before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable

import tensorflow as tf

from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp._keras.variables import path_of
from tf_adaptive_dp.side_information.provenance import SideInformation
from tf_adaptive_dp.update_rules import row_scales

# The first A, and the second and so on: after 30, 60, 120, ... gradients.
_FIRST_WINDOW = 30.0


@keras.saving.register_keras_serializable("tf_adaptive_dp")
class DelayedPreconditioner(SideInformation):
    """Gives the rows of kernels equal weight, as far as released gradients tell them from noise.

    Inputs of very different sizes have gradients of very different sizes, and the noise hides the
    small ones. This divides the gradient of each input, a row of a kernel of shape [inputs,
    outputs], by its size before the gradients are clipped. The sizes are those of the mean of
    earlier noisy gradients; looking at these costs no privacy. Sizes are measured anew after 30,
    60, 120, ... gradients, each time over all gradients since the time before, so there is neither
    a delay nor a rate to choose. Rows whose gradients do not stand out from the noise, which is
    known, are treated as if they lay just below it. With the mean m of the n gradients of a window,
    without A, the noise b = (σC/(L·A))²/n in it, b₀ = (σC/L)²/t after t gradients in all and
    r = √(2/outputs):

        v = mean over outputs of m² − b,  or r·max(b, b₀) if that is not above 2·r·b
        A = √(mean over rows of v / v),    gᵢ ← A ∘ gᵢ

    It pays off for linear models of inputs with different units or frequencies, such as raw
    measurements. It can cost accuracy where the inputs are alike, and where there are hidden
    layers: `docs/concepts/side-information.md` has figures. Variables with other than two axes keep
    A = 1.

    Guarantee: A is computed from released gradients only, so it is post-processing and adds nothing
    to the ledger. Clipping comes after A, so the sensitivity is C for every A. A is the same for
    all minibatches of a step of the optimizer, including the two of an `ADADP` step.

    Pass the object to the optimizer; there is no callback. It keeps one tensor of the size of each
    kernel, which is saved with the optimizer.

    Raises:
      ValueError: when the optimizer is built, for kernels in float16 or bfloat16.

    References:
      - Li et al., "Differentially Private Adaptive Optimization with Delayed Preconditioners"
        (2023), arXiv:2212.00309. There A is per coordinate and comes with a delay, a floor, two
        learning rates and two clip norms to choose.

    >>> import tf_adaptive_dp
    >>> optimizer = tf_adaptive_dp.ADADP(
    ...     l2_norm_clip=1.0, noise_multiplier=1.1, side_information=DelayedPreconditioner()
    ... )
    >>> optimizer.side_information.provenance
    'released'
    """

    learns = True

    def __init__(self) -> None:
        self.provenance = "released"

    @property
    def description(self) -> str:
        """See `SideInformation`."""
        return "delayed preconditioner"

    def build(
        self, variables: Sequence[tf.Variable], add_slot: Callable[..., tf.Variable]
    ) -> list[list[tf.Variable]]:
        """Creates counters, and for each kernel sums, noise and A; see `SideInformation`.

        The counters are those of gradients, and of gradients when A last changed.
        """
        for variable in variables:
            if len(variable.shape) == 2 and variable.dtype.size < 4:
                raise ValueError(
                    "`DelayedPreconditioner` adds up small numbers, so trained kernels must be "
                    f"float32 or float64. Received: {path_of(variable)} of {variable.dtype.name}. "
                    "Under a mixed-precision policy, variables are float32."
                )
        counters = [add_slot(variables[0], name, shape=[]) for name in ("observed", "changed_at")]
        sums, noise, scales = [], [], []
        for v in variables:
            is_kernel = len(v.shape) == 2
            rows = [v.shape[0], 1] if is_kernel else []
            sums.append(add_slot(v, "released_sum", shape=v.shape if is_kernel else []))
            noise.append(add_slot(v, "released_noise", shape=rows))
            scales.append(add_slot(v, "row_scale", initial_value=tf.ones(rows, v.dtype)))
        return [counters, sums, noise, scales]

    def scale_and_shift(
        self, state: list[list[tf.Variable]], indices: Sequence[int]
    ) -> tuple[list[tf.Tensor], None]:
        """A and no shift; see `SideInformation`."""
        return [tf.cast(state[3][i], tf.float32) for i in indices], None

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
        """Takes in a released gradient, and changes A when a window is complete.

        See `SideInformation`.
        """
        (observed, changed_at), sums, noise, own = state
        seen = observed + tf.cast(counts, observed.dtype)
        since = changed_at.read_value()
        due = counts & may_change & (seen >= tf.maximum(2 * since, _FIRST_WINDOW))
        ratios = []
        for i, gradient, scale in zip(indices, released, scales):
            ratios.append(tf.ones([2], tf.float64))
            if gradient is not None and len(gradient.shape) == 2:
                ratios[-1] = _observe_one(
                    sums[i],
                    noise[i],
                    own[i],
                    gradient=gradient,
                    scale=scale,
                    noise_stddev=noise_stddev,
                    counts=counts,
                    due=due,
                    since=since,
                    seen=seen,
                )
        changed_at.assign(tf.where(due, seen, since))
        observed.assign(seen)
        return due, ratios

    def get_config(self) -> dict:
        """No arguments; what was learned is in the optimizer's variables."""
        return {}


def _observe_one(
    total: tf.Variable,
    noise: tf.Variable,
    own: tf.Variable,
    gradient: tf.Tensor,
    scale: tf.Tensor | float,
    noise_stddev: tf.Tensor,
    counts: tf.Tensor,
    due: tf.Tensor,
    since: tf.Tensor,
    seen: tf.Tensor,
) -> tf.Tensor:
    """Adds a gradient to the sum for one kernel, and changes its A if that is due.

    Args:
      total: the sum so far, [rows, outputs].
      noise: the variance of the noise in each entry of that, [rows, 1].
      own: A, [rows, 1].
      gradient: [rows, outputs].
      scale: what it was multiplied by, in a shape that broadcasts to [rows, 1].
      noise_stddev: that of its entries.
      counts: whether to add it.
      due: whether to change A.
      since: the number of gradients when A last changed.
      seen: the number of gradients up to now.

    Returns:
      [2], float64, the smallest and the largest ratio of the next A to the present one.
    """
    dtype = total.dtype
    scale = tf.cast(scale, dtype)
    counted = tf.where(counts, 1 / scale, tf.zeros_like(scale))
    sums = total + tf.cast(gradient, dtype) * counted
    variance = noise + tf.square(tf.cast(noise_stddev, dtype) * counted)

    present = own.read_value()

    def changed() -> tuple[tf.Tensor, tf.Tensor]:
        n, t = tf.cast(seen - since, dtype), tf.cast(seen, dtype)
        in_mean = variance / tf.square(n)
        without = in_mean * tf.square(present) * n / t
        energy = row_scales.energies(sums / n, in_mean, without)
        return row_scales.row_scales(energy), tf.zeros_like(sums)

    # A branch, which costs nothing in most steps. It assigns nothing, as replicas require.
    following, kept = tf.cond(due, changed, lambda: (present, sums))
    ratio = tf.cast(following / present, tf.float64)
    own.assign(following)
    total.assign(kept)
    noise.assign(tf.where(due, tf.zeros_like(variance), variance))
    return tf.stack([tf.reduce_min(ratio), tf.reduce_max(ratio)])
