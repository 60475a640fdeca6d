"""The default grids, and Theorem 2's learning rate on a problem where its bound can be seen."""

import math

import numpy as np
import pytest

import tf_adaptive_dp
from tf_adaptive_dp.tuning import grids


def test_grids_have_the_papers_numbers_of_candidates():
    sizes = {name: len(grids.default_grid(name)) for name in grids._TUNED}
    assert sizes == {"DPSGD": 40, "DPMomentum": 280, "DPAdam": 4, "DPAdamWOSM": 4, "ADADP": 4}
    for name in sizes:
        candidates = [tuple(sorted(c.items())) for c in grids.default_grid(name)]
        assert len(set(candidates)) == sizes[name]


@pytest.mark.parametrize("name", ["DPSGD", "DPAdam", "DPAdamWOSM", "ADADP"])
def test_a_class_and_its_name_have_the_same_grid_whose_candidates_make_optimizers(name):
    optimizer = getattr(tf_adaptive_dp, name)
    grid = grids.default_grid(optimizer)
    assert grid == grids.default_grid(name)
    for candidate in (grid[0], grid[-1]):
        made = optimizer(noise_multiplier=4.0, **candidate)
        assert made.l2_norm_clip == pytest.approx(candidate["l2_norm_clip"])
        if "learning_rate" in candidate:
            assert float(made.learning_rate) == pytest.approx(candidate["learning_rate"])


def test_momentum_candidates_make_dpsgd():
    candidate = grids.default_grid("DPMomentum")[-1]
    made = tf_adaptive_dp.DPSGD(noise_multiplier=4.0, **candidate)
    assert made.momentum == candidate["momentum"] == 0.99


@pytest.mark.parametrize("optimizer", ["SGD", tf_adaptive_dp.DPRMSprop, 3])
def test_no_grid_for_other_optimizers(optimizer):
    with pytest.raises(ValueError, match="`optimizer` must be one of .*ADADP.*Received"):
        grids.default_grid(optimizer)


def excess(rate, clip, steps, noise, radius, dimension=1, batch=1.0, runs=400):
    """Mean excess of the mean iterate on f(x) = C‖x‖, whose gradients all have norm C."""
    generator = np.random.default_rng(0)
    x = np.zeros([runs, dimension])
    x[:, 0] = radius
    total = np.zeros_like(x)
    for _ in range(steps):
        total += x
        norms = np.linalg.norm(x, axis=1, keepdims=True)
        gradient = clip * x / np.maximum(norms, 1e-12)
        x = x - rate * (gradient + generator.normal(0, noise * clip / batch, x.shape))
    return clip * np.linalg.norm(total / steps, axis=1).mean()


CASES = [
    {"clip": 1.0, "steps": 1000, "noise": 4.0, "radius": 1.0},
    {"clip": 0.1, "steps": 1000, "noise": 1.0, "radius": 5.0},
    {"clip": 2.0, "steps": 2000, "noise": 4.0, "radius": 3.0, "dimension": 10},
    {"clip": 2.0, "steps": 2000, "noise": 40.0, "radius": 3.0, "dimension": 10, "batch": 25.0},
]


def rate_of(case):
    return grids.optimal_learning_rate(
        *(case[k] for k in ("clip", "steps", "noise", "radius")),
        num_parameters=case.get("dimension", 1),
        expected_batch_size=case.get("batch", 1.0),
    )


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("case", CASES)
def test_the_rate_keeps_theorem_2s_bound_and_the_printed_rate_breaks_it(case):
    dimension, batch = case.get("dimension", 1), case.get("batch", 1.0)
    spread = math.sqrt(1 + dimension * (case["noise"] / batch) ** 2)
    bound = case["radius"] * case["clip"] * spread / math.sqrt(case["steps"])
    assert excess(rate_of(case), **case) <= bound
    printed = case["radius"] / (case["clip"] * case["steps"] * spread)
    assert excess(printed, **case) > 2 * bound


@pytest.mark.slow_after(7)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("wrong", [1 / 40, 40])
def test_rates_far_away_break_the_bound(case, wrong):
    spread = math.sqrt(1 + case.get("dimension", 1) * (case["noise"] / case.get("batch", 1)) ** 2)
    bound = case["radius"] * case["clip"] * spread / math.sqrt(case["steps"])
    assert excess(wrong * rate_of(case), **case) > bound


def test_the_rate_is_inverse_in_the_clip_norm_and_the_root_of_the_steps():
    at = grids.optimal_learning_rate
    assert at(0.1, 100, 4.0, 1.0) == pytest.approx(10 * at(1.0, 100, 4.0, 1.0))
    assert at(1.0, 400, 4.0, 1.0) == pytest.approx(at(1.0, 100, 4.0, 1.0) / 2)
    assert at(1.0, 100, 0.0, 3.0) == pytest.approx(0.3)
    assert at(1.0, 1, 4.0, 1.0) == pytest.approx(1 / math.sqrt(17))


@pytest.mark.parametrize(
    "name, value",
    [
        ("l2_norm_clip", 0),
        ("steps", 0),
        ("noise_multiplier", -1),
        ("radius", 0),
        ("num_parameters", 0),
        ("expected_batch_size", 0),
    ],
)
def test_bad_arguments_are_named(name, value):
    given = {"l2_norm_clip": 1.0, "steps": 10, "noise_multiplier": 1.0, "radius": 1.0, name: value}
    with pytest.raises(ValueError, match=f"`{name}` must be .*Received: {name}={value}"):
        grids.optimal_learning_rate(**given)
