"""ADADP's learning rate: it compares one step of size η with two of size η/2.

These are pure functions of tensors.

References:
  - Koskela and Honkela, "Learning Rate Adaptation for Federated and Differentially Private
    Learning" (2018), arXiv:1809.03832, Algorithms 1 and 2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from tf_adaptive_dp import checks

# The smallest and largest normal float32. No learning rate leaves this range.
_SMALLEST, _LARGEST = 1.2e-38, 3.4e38
# TensorFlow rounds the reciprocals of the largest float32 to 0, and an error would vanish.
_LARGEST_SIZE = 2.0**120
# Weights of a variable for which looking whether any exceeds 1 costs less than dividing by them.
_WORTH_A_LOOK = 2**14
# The networks of the paper's figures 4 and 5 for MNIST, for which it prints a tolerance of 1.
_PARAMETERS_OF_PAPER = 270_000
# From which number of parameters on a tolerance of 1 does better on normalized inputs, too.
_PARAMETERS_FOR_1 = 40_000
# The minibatches of runs for which such models do best with 1; see `default_tolerance`.
_STEPS_FOR_1 = 4_800


@dataclasses.dataclass(frozen=True)
class StepDoublingSettings:
    """The arguments that ADADP has in both its shells, for Keras and for clients, checked.

    Args:
      tolerance: tol at the start; `None` if it depends on the model, see `default_tolerance`.
      tolerance_decay: how fast tol falls, see `decayed_tolerance`; 0 keeps it constant.
      alpha_min: the smallest factor of one adaptation, above 0 and at most 1.
      alpha_max: the largest factor of one adaptation, at least 1.
      keep: which point to keep after two minibatches: `"half_steps"`, θ̃, or `"euler"`, θ̂.
      discard: whether to return to the point before both minibatches if err > tol.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range.

    >>> StepDoublingSettings(1, 0, 0.9, 1.1, "euler", False).tolerance
    1.0
    """

    tolerance: float | None
    tolerance_decay: float
    alpha_min: float
    alpha_max: float
    keep: str
    discard: bool

    def __post_init__(self) -> None:
        checked = {
            "tolerance_decay": checks.number("tolerance_decay", self.tolerance_decay, 0),
            "alpha_min": checks.number("alpha_min", self.alpha_min, 0, strict=True),
            "alpha_max": checks.number("alpha_max", self.alpha_max, 1),
            "keep": checks.choice("keep", self.keep, ("half_steps", "euler")),
            "discard": checks.boolean("discard", self.discard),
        }
        if self.tolerance is not None:
            checked["tolerance"] = checks.number("tolerance", self.tolerance, 0, strict=True)
        if self.alpha_min > 1:
            raise ValueError(
                f"`alpha_min` must be at most 1. Received: alpha_min={self.alpha_min!r}"
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def error_estimate(
    half_step_points: Sequence[tf.Tensor], euler_points: Sequence[tf.Tensor]
) -> tf.Tensor:
    """The local error of one step, equation 6: ‖(θ̃ − θ̂) / max(1, |θ̃|)‖₂ over all variables.

    Args:
      half_step_points: θ̃, after two half steps, one tensor per variable.
      euler_points: θ̂, after one whole step, one tensor per variable.

    Returns:
      Scalar, float32.

    >>> float(error_estimate([tf.constant([3.0, 0.5])], [tf.constant([0.0, 0.5])]))
    1.0
    """
    points = [tf.cast(tilde, tf.float32) for tilde in half_step_points]
    return relative_norm(
        [tilde - tf.cast(hat, tf.float32) for tilde, hat in zip(points, euler_points)], points
    )


def relative_norm(differences: Sequence[tf.Tensor], points: Sequence[tf.Tensor]) -> tf.Tensor:
    """‖d / max(1, |θ̃|)‖₂ over all variables: equation 6 for a given difference.

    An |θ̃| above 2¹²⁰ counts as 2¹²⁰, so the error of such a point is larger.

    Args:
      differences: d, one float32 tensor per variable.
      points: θ̃, one float32 tensor per variable.

    Returns:
      Scalar, float32.

    >>> float(relative_norm([tf.constant([4.0, 3.0])], [tf.constant([-1.0, 1.0])]))
    5.0
    """
    scaled = [_relative(d, point) for d, point in zip(differences, points)]
    # l2_loss is half the sum of squares, computed without an intermediate tensor.
    return tf.sqrt(2.0 * tf.add_n([tf.nn.l2_loss(s) for s in scaled]))


def error_of_sums(
    error: tf.Tensor, independent: tf.Tensor, in_difference: float, in_sums: float
) -> tf.Tensor:
    """err as it would be if its noise were independent, with as little of it in sums of steps.

    Correlated noise takes part of itself back in the next steps. So two gradients in a row differ
    by more noise than there is in either, while the weights, sums of gradients, keep less. The
    noise in err is known: κe, where e is what independent noise of the same σ would add. Here ρe
    takes its place, by which the noise of sums grows in each step:

        err ← √(max(err² − κ²e², 0) + ρ²e²)

    So η is as large as the noise that remains allows, and differences that noise does not explain
    still lower it. This correction is our addition.

    Args:
      error: err, scalar.
      independent: e, scalar: η/√2 · σC/L · ‖1 / max(1, |θ̃|)‖₂ over all weights.
      in_difference: κ, see `ToeplitzStrategy.difference_deviation`.
      in_sums: ρ, see `ToeplitzStrategy.drift_deviation`.

    Returns:
      Scalar, float32; infinite or NaN if err is.

    >>> [round(float(error_of_sums(e, 1.0, 1.9, 0.2)), 2) for e in (1.9, 3.0)]
    [0.2, 2.33]
    """
    beyond_noise = tf.maximum(tf.square(error) - tf.square(in_difference * independent), 0.0)
    return tf.sqrt(beyond_noise + tf.square(in_sums * independent))


def _relative(difference: tf.Tensor, point: tf.Tensor) -> tf.Tensor:
    """d / max(1, |θ̃|)."""

    def divided() -> tf.Tensor:
        # One pass over |θ̃|, and a reciprocal: TensorFlow divides several times more slowly.
        size = tf.raw_ops.ClipByValue(
            t=tf.abs(point), clip_value_min=1.0, clip_value_max=_LARGEST_SIZE
        )
        return difference * tf.math.reciprocal(size)

    if (point.shape.num_elements() or 0) < _WORTH_A_LOOK:
        return divided()
    none_exceeds_1 = (tf.reduce_max(point) <= 1.0) & (tf.reduce_min(point) >= -1.0)
    return tf.cond(none_exceeds_1, lambda: difference, divided)


def adapted_learning_rate(
    learning_rate: tf.Tensor,
    error: tf.Tensor,
    tolerance: float,
    alpha_min: float | tf.Tensor = 0.9,
    alpha_max: float | tf.Tensor = 1.1,
) -> tf.Tensor:
    """The next learning rate, Algorithm 1: η · min(max(tol / err, α_min), α_max).

    An error of zero gives α_max, and an infinite error or NaN gives α_min. For a finite η the
    result is a normal float32, whatever the error.

    Args:
      learning_rate: η, scalar.
      error: err, scalar.
      tolerance: tol, in the units of the parameters.
      alpha_min: the smallest factor.
      alpha_max: the largest factor.

    Returns:
      Scalar, float32.

    >>> print(f"{adapted_learning_rate(0.1, 2.0, 1.9).numpy():.4f}")
    0.0950
    """
    factor = tf.clip_by_value(_tolerance_by_error(error, tolerance), alpha_min, alpha_max)
    return tf.clip_by_value(tf.cast(learning_rate, tf.float32) * factor, _SMALLEST, _LARGEST)


def factor_bounds(
    judged: tf.Tensor,
    accepted: tf.Tensor,
    alpha_min: float,
    alpha_max: float,
    initial_factor: float,
) -> tuple[tf.Tensor, tf.Tensor]:
    """α_min and α_max of the next adaptation; wider until errors were on both sides of tol.

    A first η that is 100 times too small takes 49 steps to grow by tenths, which is a large part of
    a run with large batches, and 7 to double. Once errors have been above the tolerance and below
    it, the bounds are those of the paper. The search is our addition.

    Args:
      judged: how many errors were compared with the tolerance.
      accepted: how many of them were not above it.
      alpha_min: the smallest factor after the search.
      alpha_max: the largest factor after the search.
      initial_factor: by how much the search may change η in one step, up or down; 1 leaves it out.

    Returns:
      Two scalars, float32.

    >>> for accepted in (0, 2, 3):
    ...     print([round(float(a), 2) for a in factor_bounds(3, accepted, 0.9, 1.1, 2.0)])
    [0.5, 2.0]
    [0.9, 1.1]
    [0.5, 2.0]
    """
    searches = tf.equal(accepted, 0) | tf.equal(accepted, judged)
    smallest = tf.where(searches, min(alpha_min, 1 / initial_factor), alpha_min)
    return smallest, tf.where(searches, max(alpha_max, initial_factor), alpha_max)


def share_of_step(error: tf.Tensor, tolerance: float) -> tf.Tensor:
    """The share of a step that is taken, min(1, tol / err), so that its error stays within tol.

    The clients of federated averaging shorten steps in this way by default; it is our addition.
    Where the paper discards a step with err > tol, this keeps its direction, as clipping does with
    a gradient.

    Args:
      error: err, scalar.
      tolerance: tol, in the units of the parameters.

    Returns:
      Scalar, float32, from 0 to 1: 1 if err ≤ tol, and 0 if err is infinite or NaN.

    >>> [float(share_of_step(error, 0.5)) for error in (0.0, 0.5, 2.0, float("nan"))]
    [1.0, 1.0, 0.25, 0.0]
    """
    return tf.minimum(1.0, _tolerance_by_error(error, tolerance))


def _tolerance_by_error(error: tf.Tensor, tolerance: float) -> tf.Tensor:
    """tol / err, and 0 if err is infinite or NaN."""
    error = tf.cast(error, tf.float32)
    return tf.where(tf.math.is_nan(error), 0.0, tf.cast(tolerance, tf.float32) / error)


def decayed_learning_rate(
    learning_rate: tf.Tensor, elapsed: tf.Tensor, next_elapsed: tf.Tensor, decay: float
) -> tf.Tensor:
    """Moves η_k = η_frozen / (1 + decay·(k − frozen)) from one k to a later one.

    This is the paper's schedule for the SGD that follows ADADP (section "Comparison of ADADP
    against DP-Adam").

    Args:
      learning_rate: η_k.
      elapsed: k − frozen.
      next_elapsed: the same for the next step.
      decay: 0.1 in the paper.

    Returns:
      Scalar, float32.
    """
    ratio = (1.0 + decay * tf.cast(elapsed, tf.float32)) / (
        1.0 + decay * tf.cast(next_elapsed, tf.float32)
    )
    return tf.cast(learning_rate, tf.float32) * ratio


def default_tolerance(
    num_parameters: int,
    normalized_inputs: bool = False,
    noise_multiplier: float | tf.Tensor = 0.0,
    num_steps: int | None = None,
) -> tf.Tensor:
    """min(√d / 50, max(least, √(d / 270,000)))·f: the first tolerance if nothing else is known.

    The paper prints 1, for a network of 270,000 parameters. Where noise dominates, a step moves
    each parameter by about tol/√d. With few parameters a tolerance of 1 would mean large steps, and
    the paper expects a smaller one there (section "Choice of parameter tol"). The bound of 1/50 per
    parameter is our choice. With more than 270,000 parameters, a tolerance of 1 would slow training
    down, the more so the larger the network is; so we let each parameter move as far as in the
    paper's network. Smaller networks get at least 1, as the paper prints.

    If the inputs are normalized, small networks get at least √(σ / 8), or 1 if that is less. The
    noise of a step moves the model by about tol, and the gradients move it in proportion to η, so
    to tol / σ. With more noise, tol has to be larger, or the gradients would not move the model far
    enough. They also get at least (d / 40,000)², which reaches 1 at 40,000 parameters. Both laws
    were chosen on held-out training data (docs/results.md, `adadp_tolerance`), where inputs that
    were not normalized did worse with less than 1.

    At the same ε, a run of fewer steps takes larger batches, whose gradients have less noise. So it
    may take larger steps, and has to, as it takes fewer of them. From 40,000 parameters on, with
    normalized inputs, a run of T minibatches gets f = max(1, (4,800 / T)^¼) times as much, which
    was chosen on held-out data too. The law for small networks has this factor already: at the same
    ε, σ is in proportion to T^-½, and the root of σ to T^-¼.

    Args:
      num_parameters: d.
      normalized_inputs: whether the inputs have mean 0 and variance 1, or nearly so: `least` is
        then min(max(√(σ / 8), (d / 40,000)²), 1), and otherwise 1.
      noise_multiplier: σ; with correlated noise ρσ, see `error_of_sums`.
      num_steps: T, the minibatches of the whole run; `None` if that is unknown: f is 1 then.

    Returns:
      tol, in the units of the parameters: scalar, float32.

    Raises:
      ValueError: if `num_parameters` or `num_steps` is below 1.

    >>> [round(float(default_tolerance(d)), 2) for d in (100, 10_000, 270_000, 1_080_000)]
    [0.2, 1.0, 1.0, 2.0]
    >>> [round(float(default_tolerance(10_000, True, sigma)), 2) for sigma in (0.5, 2, 9)]
    [0.25, 0.5, 1.0]
    >>> [round(float(default_tolerance(d, True, 0.5)), 2) for d in (20_000, 30_000, 40_000)]
    [0.27, 0.56, 1.0]
    >>> [round(float(default_tolerance(270_000, True, 1, T)), 2) for T in (300, 700, 4_800)]
    [2.0, 1.62, 1.0]
    """
    root = math.sqrt(checks.integer("num_parameters", num_parameters, 1))
    least, for_few_steps = tf.constant(1.0), 1.0
    if num_steps is not None:
        num_steps = checks.integer("num_steps", num_steps, 1)
        if normalized_inputs and num_parameters >= _PARAMETERS_FOR_1:
            for_few_steps = max(1.0, (_STEPS_FOR_1 / num_steps) ** 0.25)
    if normalized_inputs:
        of_noise = tf.sqrt(tf.cast(noise_multiplier, tf.float32) / 8.0)
        least = tf.minimum(tf.maximum(of_noise, (num_parameters / _PARAMETERS_FOR_1) ** 2), 1.0)
    of_network = tf.minimum(root / 50, tf.maximum(least, root / math.sqrt(_PARAMETERS_OF_PAPER)))
    return for_few_steps * of_network


def decayed_tolerance(
    tolerance: float | tf.Tensor, num_steps: tf.Tensor, decay: float
) -> tf.Tensor:
    """tol_t = tol / √(1 + decay·t), the tolerance after t steps of size η.

    Where noise dominates, a step moves the parameters by tol in a random direction. T steps with a
    constant tolerance move them by √T·tol, so the noise of a long run grows without bound. With
    the decay, the square of that distance is tol²·ln(1 + decay·T) / decay, while the sum of the
    learning rates, which follow the tolerance, still diverges. The decay is our addition; the
    paper's tolerance is constant.

    Args:
      tolerance: tol, in the units of the parameters.
      num_steps: t.
      decay: the decay per step; 0 keeps the tolerance constant.

    Returns:
      Scalar, float32.

    >>> print(f"{decayed_tolerance(1.0, 600, 0.005).numpy():.2f}")
    0.50
    """
    return tolerance / tf.sqrt(1.0 + decay * tf.cast(num_steps, tf.float32))


def next_tolerance(tolerance: float | tf.Tensor, first: float, decay: float) -> tf.Tensor:
    """tol_{t+1} of `decayed_tolerance` from tol_t, for states without a counter.

    (tol_0 / tol_t)² = 1 + decay·t is linear in t, so tol_t tells t:
    tol_{t+1} = tol_t / √(1 + decay·(tol_t / tol_0)²). The tolerance may be set at any time, and
    goes on as if it had fallen to that value.

    Args:
      tolerance: tol_t.
      first: tol_0.
      decay: the decay per step; 0 keeps the tolerance constant.

    Returns:
      Scalar, of the type of `tolerance`.

    >>> print(f"{next_tolerance(decayed_tolerance(1.0, 599, 0.005), 1.0, 0.005).numpy():.2f}")
    0.50
    """
    tolerance = tf.convert_to_tensor(tolerance)
    relative = tf.minimum(tolerance / first, 1e18)  # whose square is finite
    return tolerance / tf.sqrt(1.0 + decay * relative**2)


def suggest_tolerance(num_steps: int, num_parameters: int, noise: float = 1.0) -> float:
    """The constant tolerance that leaves a given noise in each parameter after a run.

    After T steps each parameter carries noise of about √(2T)·tol/√d (section "Choice of parameter
    tol"). Setting this to `noise` gives tol = noise·√(d / (2T)). It holds where noise dominates,
    √d ≫ |B|. The paper asks for noise of order 1, which suits parameters of that order; the
    weights of a layer with hundreds of inputs start near 0.05.

    Args:
      num_steps: T, the number of steps of size η. ADADP takes one per two minibatches.
      num_parameters: d.
      noise: the standard deviation of the noise in each parameter, in the parameter's units.

    Returns:
      tol, for `ADADP(tolerance=tol, tolerance_decay=0.0)`.

    Raises:
      ValueError: if `num_steps` or `num_parameters` is below 1, or `noise` is not above 0.

    >>> suggest_tolerance(num_steps=1_000, num_parameters=2_000)
    1.0
    """
    num_steps = checks.integer("num_steps", num_steps, 1)
    num_parameters = checks.integer("num_parameters", num_parameters, 1)
    noise = checks.number("noise", noise, 0, strict=True)
    return noise * math.sqrt(num_parameters / (2 * num_steps))
