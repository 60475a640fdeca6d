"""The comparison of noise strategies with JAX-Privacy notices what differs."""

import math

import pytest

from benchmarks.accounting import cases, strategies
from benchmarks.steps.catalogue import FAMILIES


def test_differences_are_relative_to_the_largest_figure():
    assert strategies.difference(2.0, 2.0) == 0
    assert strategies.difference(2.0 + 4e-6, 2.0) == pytest.approx(2e-6)
    assert strategies.difference([1.0, 1e-6], [1.0, 0.0]) == pytest.approx(1e-6)
    for other in ([1.0], [1.0, math.nan], [[1.0, 2.0]]):
        assert math.isinf(strategies.difference(other, [1.0, 2.0]))


def test_the_largest_difference_of_each_kind_counts():
    own = {"c": {"a": [1.0, 0.5], "b": [1.0]}, "d": {"a": 2.0}}
    same = {"c": {"b": [1.0], "a": [1.0, 0.5]}, "d": {"a": 2.0}, "more": {}}
    assert strategies.compare(own, same) == {"c": 0, "d": 0}
    other = {**same, "c": {"a": [1.0, 0.4], "b": [1.0]}}
    assert strategies.compare(own, other) == {"c": pytest.approx(0.1), "d": 0}
    for wrong in ({"c": same["c"]}, {**same, "d": {"b": 2.0}}, {**same, "d": {}}):
        with pytest.raises(ValueError, match="same cases of 'd'"):
            strategies.compare(own, wrong)
    with pytest.raises(ValueError, match="same cases of 'c'"):
        strategies.compare({"c": {}}, {"c": {}})


@pytest.mark.slow
def test_the_figures_are_those_of_jax_privacy_where_it_is_installed():
    python = FAMILIES["jax"].python()
    if not python.exists():
        pytest.skip("the environment of JAX-Privacy is made by `make bench-peers`")
    own = strategies.own_figures()
    assert len(own["sensitivity"]) == 10 * len(cases.STEPS) * len(cases.PARTICIPATIONS)
    found = strategies.compare(own, strategies.peer_figures(python))
    assert found.keys() == strategies.TITLES.keys()
    assert max(found.values()) <= strategies.TOLERANCE
