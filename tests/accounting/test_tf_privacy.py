"""What TF Privacy is told; tests/test_statement.py tests what it says."""

import math

import pytest

from tf_adaptive_dp.accounting import tf_privacy

N = 60_000


def test_tf_privacy_counts_what_the_ledger_counts():
    batches = [(1.0, 7), (3.0, 10), (200.0, N), (63.5, N), (256.0, 50_000), (10.0, 10), (7.0, N)]
    for batch_size, num_examples in batches:
        probability = batch_size / num_examples
        for count in [1, 2, 3, 7, 10, 29, 300, 6_000, 6_001, 99_991, 1_000_000]:
            epochs = tf_privacy._num_epochs(count, batch_size, num_examples)
            assert epochs > 0
            assert math.ceil(epochs / probability) == count, (batch_size, num_examples, count)


@pytest.mark.parametrize(
    ("count", "batch_size", "num_examples", "epochs"),
    [(6_000, 200.0, N, 20.0), (6_150, 200.0, N, 20.5), (300, 200.0, N, 1.0), (7, 3.0, 10, 2.09)],
)
def test_the_number_of_epochs_is_short(count, batch_size, num_examples, epochs):
    assert tf_privacy._num_epochs(count, batch_size, num_examples) == epochs
