"""Candidates to choose from, and where to look for a learning rate."""

from __future__ import annotations

import itertools
import math

from tf_adaptive_dp import checks

# The authors' released configuration: 4 clip norms and 10 learning rates.
CLIP_NORMS = (0.1, 0.2, 0.5, 1.0)
LEARNING_RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
# How many: seven, from the ε of table 1. Which: our choice.
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

    What each candidate costs is what counts: an optimizer that adapts its learning rate leaves the
    clip norm alone to choose ("The Role of Adaptive Optimizers for Honest Private Hyperparameter
    Selection", section 5).

    | optimizer | candidates | chosen |
    | --- | --- | --- |
    | DPSGD | 40 | learning rate and clip norm |
    | DPMomentum | 280 | momentum, learning rate and clip norm |
    | DPAdam, DPAdamWOSM, ADADP | 4 | clip norm |

    Sources: the paper prints that DPSGD has 40 candidates and DPAdam 4, and leaves the rest to a
    table of its appendix. The values for DPSGD, 0.1, 0.2, 0.5, 1 for C and
    0.001, 0.002, 0.005, … 0.5, 1 for α, are those of its authors' released configuration
    (github.com/mshubhankar/The-Role-of-Adaptive-Optimizers-for-Honest-Private-Hyperparameter-Selection,
    CONFIG.py), 4 × 10. DPMomentum's seven momenta are our choice; that they are seven follows from
    the ε that table 1 prints for it (3.14 on MNIST and 5.23 on Adult, which 280 candidates cost and
    neither 240 nor 320 do).

    Learning rates belong to gradients averaged over the batch, as all our optimizers have them.

    Args:
      optimizer: a class, `tf_adaptive_dp.DPAdam` for example, or its name. `"DPMomentum"` is
        `DPSGD` with a `momentum`.

    Returns:
      A list of arguments for the optimizer; what is not among them keeps its default.

    Raises:
      ValueError: if there is no grid for it.

    >>> default_grid("ADADP")
    [{'l2_norm_clip': 0.1}, {'l2_norm_clip': 0.2}, {'l2_norm_clip': 0.5}, {'l2_norm_clip': 1.0}]
    >>> len(default_grid("DPSGD")), default_grid("DPSGD")[0]
    (40, {'learning_rate': 0.001, 'l2_norm_clip': 0.1})
    """
    name = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", None)
    if name not in _TUNED:
        raise ValueError(
            f"`optimizer` must be one of {sorted(_TUNED)}, as a class or a name. Received: "
            f"optimizer={optimizer!r}. For another one, write the list of its arguments yourself."
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
    """The learning rate that a convex problem wants from DP-SGD: inverse in the clip norm.

        α = R / (C·√(T·(1 + d·σ²/L²)))

    for T steps from a point at distance R of the optimum, d parameters and batches of L. At this
    rate the mean iterate is, in expectation, at most C·R·√((1 + d·σ²/L²) / T) above the optimum.

    Derivation (the honest-selection paper, theorem 2): a step moves along g + z with ‖g‖ ≤ C and,
    for the mean over a batch, z ~ N(0, (σC/L)²) in each of d coordinates, so
    E‖g + z‖² ≤ C²(1 + d·σ²/L²). For projected subgradient steps this gives

        E[f(mean of x_t)] − f(x*) ≤ R²/(2αT) + α·C²(1 + d·σ²/L²)/2,

    which is smallest at the α above. The paper prints α = R/(C·T·√(1 + σ²)), with T outside of the
    root, beside the bound R·C·√(1 + σ²)/√T. The two contradict each other: with the printed α the
    first term is R·C·√(1 + σ²)/2 however long the run. The printed bound belongs to T under the
    root, which is what is computed here. It also has d = 1 and L = 1, the defaults.

    It holds where the clipped gradients are those of a convex function. R is not known beforehand:
    take it as the place to begin a search, and that α·C is one number to look for, not two.

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
