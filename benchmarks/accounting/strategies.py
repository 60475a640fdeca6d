"""Strategies of correlated noise and what they cost, beside those of JAX-Privacy.

No privacy claim: nothing is trained. Both sides compute the same figures from `cases`, JAX-Privacy
in an environment of its own and without a network: coefficients of the strategies and of their
noise, the noise in sums of steps, sensitivities for single and multiple participation with a
minimum separation, trees where the library's bound is exact, and ε by PLD accounting.

    make benchmarks/peers/jax_privacy/.venv/ready
    python -m benchmarks.accounting.strategies
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from typing import Any

import numpy as np
import pandas as pd

from benchmarks import core
from benchmarks.accounting import cases
from benchmarks.steps.catalogue import FAMILIES, ROOT
from tf_adaptive_dp.accounting import BandedNoise, Releases, ToeplitzNoise, TreeNoise
from tf_adaptive_dp.accounting.noise_strategies import prefix_error, sensitivity
from tf_adaptive_dp.sampling import CyclicPoissonSampling, FixedOrder

Figures = dict[str, dict[str, Any]]

TOLERANCE = 1e-6
TITLES = {
    "c": "coefficients of the strategies",
    "d": "coefficients of the noise",
    "error": "noise in sums of steps",
    "sensitivity": "sensitivities of banded strategies",
    "tree": "sensitivities of trees",
    "amplified": "ε with cyclic Poisson sampling",
    "not amplified": "ε without sampling",
}


def own_figures() -> Figures:
    """The figures of this library."""
    found: Figures = {name: {} for name in TITLES}
    strategies = {f"bands={b}": BandedNoise(b) for b in cases.BANDS}
    strategies |= {f"own={i}": ToeplitzNoise(c) for i, c in enumerate(cases.OWN)}
    for name, strategy in strategies.items():
        found["c"][name] = list(strategy.coefficients)
        for steps in cases.STEPS:
            key = f"{name} T={steps}"
            found["d"][key] = strategy.noise_coefficients(steps).tolist()
            found["error"][key] = prefix_error(strategy, steps)
            for apart, most in cases.PARTICIPATIONS:
                moved = sensitivity(strategy, steps, apart, most)
                found["sensitivity"][f"{key} s={apart} k={most}"] = moved
    for per_tree, steps, apart in cases.TREES:
        moved = sensitivity(TreeNoise(per_tree), steps, apart)
        found["tree"][f"{per_tree} T={steps} s={apart}"] = moved
    for per_tree, steps in cases.TREES_ONCE:
        moved = sensitivity(TreeNoise(per_tree), steps, 1, max_participations=1)
        found["tree"][f"{per_tree} T={steps}"] = moved
    found["amplified"] = {str(case): _amplified(*case) for case in cases.AMPLIFIED}
    found["not amplified"] = {str(case): _not_amplified(*case) for case in cases.NOT_AMPLIFIED}
    return found


def _amplified(noise_multiplier: float, steps: int, bands: int, probability: float) -> float:
    num_examples = 1_000 * bands
    sampling = CyclicPoissonSampling(probability, bands, num_examples + 1, steps)
    size = sampling.expected_batch_size(num_examples)
    ledger = Releases([(noise_multiplier, size, steps)], noise=BandedNoise(bands))
    return sampling.epsilon_spent(ledger, num_examples, cases.DELTA, accountant="pld")


def _not_amplified(noise_multiplier: float, bands: int, steps: int, apart: int) -> float:
    ledger = Releases([(noise_multiplier, 1.0, steps)], noise=BandedNoise(bands))
    return FixedOrder(1, steps).epsilon_spent(ledger, apart, cases.DELTA, accountant="pld")


def peer_figures(python: os.PathLike) -> Figures:
    """The figures of JAX-Privacy.

    Args:
      python: that of its environment.

    Raises:
      FileNotFoundError: if there is no such environment.
      subprocess.CalledProcessError: if it fails.
    """
    done = subprocess.run(
        [str(python), "-m", "benchmarks.accounting.jax_privacy_side"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


def difference(own: Any, other: Any) -> float:
    """By how much figures differ, relative to the largest of the other's; infinite if not alike."""
    own, other = np.atleast_1d(own), np.atleast_1d(other)
    if own.shape != other.shape or not np.isfinite(own).all():
        return math.inf
    return float(np.abs(own - other).max() / np.abs(other).max())


def compare(own: Figures, other: Figures) -> dict[str, float]:
    """The largest difference of each kind of figures.

    Raises:
      ValueError: if the sides computed different cases.
    """
    found = {}
    for name, figures in own.items():
        if not figures or figures.keys() != other.get(name, {}).keys():
            raise ValueError(f"The sides must compute the same cases of {name!r}.")
        found[name] = max(difference(figures[key], other[name][key]) for key in figures)
    return found


def main() -> None:
    """Prints a table; exits with 1 if the sides differ by more than the tolerance."""
    arguments = core.parser(__doc__)
    arguments.parse_args()
    peer = FAMILIES["jax"].python()
    if not peer.exists():
        raise SystemExit("JAX-Privacy has no environment yet: `make bench-peers` makes it.")
    own = own_figures()
    found = compare(own, peer_figures(peer))
    table = pd.DataFrame(
        [[TITLES[n], str(len(own[n])), f"{found[n]:.0e}"] for n in found],
        columns=["figures", "cases", "largest relative difference"],
    )
    print(core.markdown(table))
    if max(found.values()) > TOLERANCE:
        raise SystemExit(f"They differ by more than {TOLERANCE:g}.")


if __name__ == "__main__":
    main()
