"""The figures of JAX-Privacy, as JSON on stdout; for `strategies`, which runs this as a process.

Sensitivities and coefficients are those of its `matrix_factorization`, ε that of its events and its
PLD accountant. Computed in float64.
"""

from __future__ import annotations

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax_privacy.accounting import accountants
from jax_privacy.experimental import accounting
from jax_privacy.matrix_factorization import sensitivity, toeplitz

from benchmarks.accounting import cases


def columns() -> dict[str, jax.Array]:
    """The first column of the matrix of each strategy, of norm 1."""
    roots = {f"bands={b}": toeplitz.optimal_max_error_strategy_coefs(b) for b in cases.BANDS}
    own = {f"own={i}": jnp.array(c) for i, c in enumerate(cases.OWN)}
    return {name: c / jnp.linalg.norm(c) for name, c in {**roots, **own}.items()}


def tree(steps_per_tree: int, steps: int) -> np.ndarray:
    """A row for each whole node of binary trees, with 1 for the steps below it."""
    step = np.arange(steps)
    rows = []
    for first in range(0, steps, steps_per_tree):
        end, size = min(first + steps_per_tree, steps), 1
        while first + size <= end:
            starts = range(first, end - size + 1, size)
            rows += [(step >= start) & (step < start + size) for start in starts]
            size *= 2
    return np.array(rows, float)


def pld(event: Any) -> float:
    """ε of an event."""
    accountant = accountants.PldAccountantConfig().create_accountant()
    return float(accountant.compose(event).get_epsilon(cases.DELTA))


def amplified(noise_multiplier: float, steps: int, bands: int, probability: float) -> float:
    """ε of banded noise with cyclic Poisson sampling."""
    return pld(
        accounting.amplified_bandmf_event(
            noise_multiplier, steps, num_bands=bands, sampling_prob=probability
        )
    )


def not_amplified(noise_multiplier: float, bands: int, steps: int, apart: int) -> float:
    """ε of banded noise with participations some steps apart, without sampling."""
    column = columns()[f"bands={bands}"]
    moved = math.sqrt(toeplitz.minsep_sensitivity_squared(column, apart, None, steps))
    return pld(accounting.dpsgd_event(noise_multiplier / moved, 1, sampling_prob=1.0))


def main() -> None:
    """Prints the figures."""
    jax.config.update("jax_enable_x64", True)
    found: dict[str, Any] = {name: {} for name in ("c", "d", "error", "sensitivity", "tree")}
    for name, column in columns().items():
        found["c"][name] = column.tolist()
        for steps in cases.STEPS:
            key = f"{name} T={steps}"
            found["d"][key] = toeplitz.inverse_coef(column, steps).tolist()
            errors = toeplitz.per_query_error(strategy_coef=column, n=steps)
            found["error"][key] = math.sqrt(errors.mean())
            for apart, most in cases.PARTICIPATIONS:
                square = toeplitz.minsep_sensitivity_squared(column, apart, most, steps)
                found["sensitivity"][f"{key} s={apart} k={most}"] = math.sqrt(square)
    for per_tree, steps, apart in cases.TREES:
        nodes = jnp.array(tree(per_tree, steps))
        moved = sensitivity.fixed_epoch_sensitivity(nodes, steps // apart)
        found["tree"][f"{per_tree} T={steps} s={apart}"] = moved
    for per_tree, steps in cases.TREES_ONCE:
        nodes = jnp.array(tree(per_tree, steps))
        moved = float(sensitivity.single_participation_sensitivity(nodes))
        found["tree"][f"{per_tree} T={steps}"] = moved
    found["amplified"] = {str(case): amplified(*case) for case in cases.AMPLIFIED}
    found["not amplified"] = {str(case): not_amplified(*case) for case in cases.NOT_AMPLIFIED}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
