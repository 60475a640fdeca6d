"""Default candidates for tuning, and a starting point for the learning rate."""

from __future__ import annotations

import itertools
import math

from tf_adaptive_dp import checks

# The authors' released configuration: 4 clip norms and 10 learning rates.
CLIP_NORMS = (0.1, 0.2, 0.5, 1.0)
LEARNING_RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
# Their number, seven, follows from the ε of table 1; the values are our choice.
MOMENTA = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

_TUNED = {
    "DPSGD": ("learning_rate", "l2_norm_clip"),
    "DPMomentum": ("momentum", "learning_rate", "l2_norm_clip"),
    "DPAdam": ("l2_norm_clip",),
    "DPAdamWOSM": ("l2_norm_clip",),
    "ADADP": ("l2_norm_clip",),
}
_VALUES = {"learning_rate": LEARNING_RATES, "l2_norm_clip": CLIP_NORMS, "momentum": MOMENTA}


def default_grid(optimizer: type | str) -> list[dict[str, float]]:
    """The candidates of the honest-selection paper for an optimizer.

    Every candidate costs privacy. For an optimizer that adapts its learning rate, only the clip
    norm remains to be tuned.

    | optimizer | candidates | tuned |
    | --- | --- | --- |
    | DPSGD | 40 | learning rate and clip norm |
    | DPMomentum | 280 | momentum, learning rate and clip norm |
    | DPAdam, DPAdamWOSM, ADADP | 4 | clip norm |

    The paper states that DPSGD has 40 candidates and DPAdam 4. The values for DPSGD are those of
    the authors' released configuration
    (github.com/mshubhankar/The-Role-of-Adaptive-Optimizers-for-Honest-Private-Hyperparameter-Selection,
    CONFIG.py): 0.1, 0.2, 0.5, 1 for C and 0.001, 0.002, 0.005, … 0.5, 1 for α. That DPMomentum has
    seven momenta follows from the ε in table 1 (3.14 on MNIST and 5.23 on Adult, which is what 280
    candidates cost, not 240 or 320); the values are our choice.

    Learning rates are for gradients averaged over the batch, as in all our optimizers.

    Args:
      optimizer: a class, such as `tf_adaptive_dp.DPAdam`, or its name. `"DPMomentum"` is `DPSGD`
        with a `momentum`.

    Returns:
      A list of arguments for the optimizer. All others keep their defaults.

    Raises:
      ValueError: if there is no grid for the optimizer.

    References:
      - Mohapatra et al., "The Role of Adaptive Optimizers for Honest Private Hyperparameter
        Selection" (2021), arXiv:2111.04906, section 5.

    >>> default_grid("ADADP")
    [{'l2_norm_clip': 0.1}, {'l2_norm_clip': 0.2}, {'l2_norm_clip': 0.5}, {'l2_norm_clip': 1.0}]
    >>> len(default_grid("DPSGD")), default_grid("DPSGD")[0]
    (40, {'learning_rate': 0.001, 'l2_norm_clip': 0.1})
    """
    name = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", None)
    if name not in _TUNED:
        raise ValueError(
            f"`optimizer` must be one of {sorted(_TUNED)}, as a class or a name. Received: "
            f"optimizer={optimizer!r}. For any other, write the list of arguments yourself."
        )
    tuned = _TUNED[name]
    values = itertools.product(*(_VALUES[argument] for argument in tuned))
    return [dict(zip(tuned, chosen)) for chosen in values]


def optimal_learning_rate(
    l2_norm_clip: float,
    steps: int,
    noise_multiplier: float,
    radius: float,
    *,
    num_parameters: int = 1,
    expected_batch_size: float = 1,
) -> float:
    """The optimal learning rate of DP-SGD on a convex problem, for its clip norm and noise.

        α = R / (C·√(T·(1 + d·σ²/L²)))

    for T steps from a point at distance R from the optimum, d parameters and batches of L. At this
    rate the mean iterate is, in expectation, at most C·R·√((1 + d·σ²/L²) / T) above the optimum.

    Derivation (the honest-selection paper, theorem 2): a step moves along g + z with ‖g‖ ≤ C and,
    for the mean over a batch, z ~ N(0, (σC/L)²) in each of d coordinates, so
    E‖g + z‖² ≤ C²(1 + d·σ²/L²). For projected subgradient steps this gives

        E[f(mean of x_t)] − f(x*) ≤ R²/(2αT) + α·C²(1 + d·σ²/L²)/2,

    which is smallest at the α above. The paper prints α = R/(C·T·√(1 + σ²)), with T outside the
    root, next to the bound R·C·√(1 + σ²)/√T. The two contradict each other: with the printed α the
    first term is R·C·√(1 + σ²)/2 for a run of any length. The printed bound requires T under the
    root, as computed here. The paper also has d = 1 and L = 1, the defaults.

    The result holds if the clipped gradients are those of a convex function. R is not known in
    advance, so use the result as a starting point, and search for the product α·C instead of two
    separate numbers.

    Args:
      l2_norm_clip: C.
      steps: T.
      noise_multiplier: σ.
      radius: R, the distance from the first weights to the best ones.
      num_parameters: d.
      expected_batch_size: L, by which our optimizers divide the noisy sum; 1 for a sum.

    Raises:
      ValueError: if an argument is not positive (σ may be 0).

    >>> optimal_learning_rate(1.0, 100, 4.0, 31.6, num_parameters=10, expected_batch_size=250)
    3.15...
    >>> optimal_learning_rate(0.1, 100, 4.0, 31.6, num_parameters=10, expected_batch_size=250)
    31.5...
    """
    clip = checks.number("l2_norm_clip", l2_norm_clip, 0, strict=True)
    noise = checks.number("noise_multiplier", noise_multiplier, 0)
    radius = checks.number("radius", radius, 0, strict=True)
    batch = checks.number("expected_batch_size", expected_batch_size, 0, strict=True)
    steps = checks.integer("steps", steps, 1)
    dimension = checks.integer("num_parameters", num_parameters, 1)
    return radius / (clip * math.sqrt(steps * (1 + dimension * (noise / batch) ** 2)))
