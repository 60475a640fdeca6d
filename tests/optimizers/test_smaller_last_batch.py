"""Arrays whose last batch is smaller are refused before the first step, and nothing else is."""

import numpy as np
import pytest

import tf_adaptive_dp as dp
from tests.helpers import catalogue


def model(**kwargs):
    made = catalogue.mlp()
    made.compile(dp.DPSGD(1.0, 1.0, **kwargs), loss=catalogue.loss())
    return made


def fit(made, num_examples, **kwargs):
    x, y = catalogue.data(num_examples)
    made.fit(x, y, **{"batch_size": 8, "verbose": 0, **kwargs})
    return made.optimizer.ledger.num_releases


@pytest.mark.parametrize("kwargs", [{}, {"num_microbatches": 2, "expected_batch_size": 8}])
def test_it_is_refused_before_anything_is_released(kwargs):
    made = model(**kwargs)
    before = made.get_weights()
    with pytest.raises(ValueError, match="batches of 8 examples, and a last one of 4"):
        fit(made, 20)
    assert made.optimizer.ledger.num_releases == 0
    for old, new in zip(before, made.get_weights()):
        np.testing.assert_array_equal(old, new)


def test_batches_of_one_size_and_batches_that_may_vary_train():
    made = model()
    assert fit(made, 16) == 2
    assert fit(made, 16, steps_per_epoch=1) == 3
    assert fit(model(), 5) == 1  # one batch, smaller than asked for
    assert fit(model(expected_batch_size=8), 20) == 3


def test_a_later_fit_is_refused_as_well():
    made = model()
    assert fit(made, 16) == 2
    with pytest.raises(ValueError, match="a last one of 4"):
        fit(made, 20)
    assert made.optimizer.ledger.num_releases == 2
