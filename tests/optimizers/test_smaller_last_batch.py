"""Arrays whose last batch is smaller train with the batch size of `fit`, or are refused at once."""

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


def test_the_batch_size_of_fit_becomes_the_expected_one():
    given, found = model(expected_batch_size=8, seed=3), model(seed=3)
    found.set_weights(given.get_weights())
    for made in (given, found):
        assert fit(made, 20, shuffle=False) == 3
        assert made.optimizer.ledger.segments == [(1.0, 8.0, 3)]
    assert found.optimizer.expected_batch_size == 8.0
    for with_size, without in zip(given.get_weights(), found.get_weights(), strict=True):
        np.testing.assert_array_equal(with_size, without)


def test_the_parts_of_a_batch_make_the_expected_size_together():
    made = model(gradient_accumulation_steps=2)
    assert fit(made, 28) == 2  # 8 + 8, 8 + 4
    assert made.optimizer.ledger.segments == [(1.0, 16.0, 2)]


@pytest.mark.parametrize(
    "kwargs, cure",
    [
        ({"num_microbatches": 2, "expected_batch_size": 8}, "without `num_microbatches`"),
        ({"num_microbatches": 2}, "without `num_microbatches`.*expected_batch_size=None"),
        ({"examples_per_user": 2}, "Pass `expected_batch_size` to the optimizer, or"),
    ],
)
def test_it_is_refused_before_anything_is_released(kwargs, cure):
    made = model(**kwargs)
    before = made.get_weights()
    with pytest.raises(ValueError, match=f"batches of 8 examples, and a last one of 4.*{cure}"):
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


def test_a_later_fit_goes_on_with_batches_of_the_same_size_only():
    made = model()
    assert fit(made, 16) == 2
    assert fit(made, 20) == 5
    assert made.optimizer.ledger.segments == [(1.0, 8.0, 5)]
    made = model()
    assert fit(made, 16) == 2
    with pytest.raises(ValueError, match="batches of 6 examples, and a last one of 2"):
        fit(made, 20, batch_size=6)
    assert made.optimizer.ledger.num_releases == 2
