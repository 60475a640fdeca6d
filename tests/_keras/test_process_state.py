"""What is drawn within shows neither in the seed of the process nor in what is drawn later."""

import pytest
import tensorflow as tf

from tf_adaptive_dp._keras.process_state import global_seed_kept


def drawn(seed, of_operation, num_within):
    """Numbers that are drawn before and after others, which are drawn with the same seeds."""
    tf.random.set_seed(seed)
    numbers = [float(tf.random.uniform([], seed=of_operation))]
    with global_seed_kept():
        tf.random.set_seed(seed)
        for _ in range(num_within):
            tf.random.uniform([], seed=of_operation)
    return numbers + [float(tf.random.uniform([], seed=of_operation)) for _ in range(2)]


@pytest.mark.parametrize("seed, of_operation", [(0, None), (0, 7), (None, 7)])
def test_numbers_drawn_later_do_not_depend_on_how_many_were_drawn_within(seed, of_operation):
    later = [drawn(seed, of_operation, num_within) for num_within in (0, 2, 5)]
    assert later[0] == later[1] == later[2]


def test_operations_without_a_seed_go_on_as_if_nothing_had_been_drawn_within():
    tf.random.set_seed(0)
    undisturbed = [float(tf.random.uniform([])) for _ in range(3)]
    assert drawn(0, None, 3) == undisturbed
