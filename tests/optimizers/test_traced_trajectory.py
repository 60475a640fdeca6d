"""Training with traced gradients is training with materialized ones, for every optimizer."""

import numpy as np
import pytest

from tests.helpers import catalogue


def trained(name, gradients, **kwargs):
    model = catalogue.mlp()
    optimizer = catalogue.make(name, gradients=gradients, **kwargs)
    model.compile(optimizer, catalogue.loss())
    catalogue.fit(model, epochs=5)  # 20 steps
    return model.get_weights(), optimizer.ledger.segments


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "name",
    [
        n if n in catalogue.KINDS else pytest.param(n, marks=pytest.mark.slow)
        for n in catalogue.OPTIMIZERS
    ],
)
def test_the_same_trajectory(name):
    weights, ledger = trained(name, "traced")
    expected, expected_ledger = trained(name, "materialized")
    assert ledger == expected_ledger
    for a, b in zip(weights, expected):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_same_trajectory_in_microbatches():
    weights, ledger = trained("DPAdam", "traced", num_microbatches=4)
    expected, expected_ledger = trained("DPAdam", "materialized", num_microbatches=4)
    assert ledger == expected_ledger
    for a, b in zip(weights, expected):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
