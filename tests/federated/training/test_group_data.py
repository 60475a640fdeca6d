"""Which data sets the thread that trains may compute itself, and that groups take any."""

import numpy as np
import pytest
import tensorflow as tf

from federated.training.group_data import serialized_client
from federated.training.grouped import GroupedRounds
from federated.training.processes import build_adaptive_fed_avg
from tests.federated.training.test_processes import client_of, functional_model, weights

ROWS = np.random.default_rng(3).normal(size=[23, 2]).astype(np.float32)
EXAMPLES = tf.data.Dataset.from_tensor_slices((ROWS, ROWS[:, :1]))
IN_THREAD = {
    "batches": EXAMPLES.batch(4),
    "of a static size": EXAMPLES.batch(4, drop_remainder=True),
    "passes": EXAMPLES.shuffle(23, seed=1).repeat(2).batch(4),
    "a part": EXAMPLES.batch(4).skip(1).take(3),
    "two data sets": EXAMPLES.batch(4).concatenate(EXAMPLES.take(6).batch(3)),
    "no batch": EXAMPLES.take(0).batch(4),
}
ELSEWHERE = {
    "a function": EXAMPLES.map(lambda x, y: (x, 2 * y)).batch(4),
    "a parallel function": EXAMPLES.batch(4).map(lambda x, y: (x, y), num_parallel_calls=2),
    "a filter": EXAMPLES.filter(lambda x, y: y[0] < 1e3).batch(4),
    "data sets of data sets": EXAMPLES.batch(4).interleave(
        lambda x, y: tf.data.Dataset.from_tensors((x, y)), num_parallel_calls=2
    ),
    "parallel batches": EXAMPLES.batch(4, num_parallel_calls=2),
    "batches in advance": EXAMPLES.batch(4).prefetch(2),
    "a cache": EXAMPLES.batch(4).cache(),
}


@pytest.mark.parametrize(
    "data, in_thread",
    [(d, True) for d in IN_THREAD.values()] + [(d, False) for d in ELSEWHERE.values()],
    ids=[*IN_THREAD, *ELSEWHERE],
)
def test_one_thread_computes_what_calls_no_functions(data, in_thread):
    assert serialized_client(data).in_thread == in_thread
    if in_thread:
        assert data.cardinality() == sum(1 for _ in data)


@pytest.mark.parametrize("way", ["cache", "inner cache", "snapshot"])
def test_data_that_other_clients_would_read_from_a_file_are_refused(tmp_path, way):
    """Of two clients with one file, both train on the data of the first."""
    path = str(tmp_path / "file")
    first, second = (EXAMPLES.skip(k).take(2).cache(path) for k in (0, 9))
    np.testing.assert_array_equal(*(list(d.as_numpy_iterator())[0][0] for d in (first, second)))
    data = {
        "cache": EXAMPLES.batch(4).cache(path),
        "inner cache": EXAMPLES.flat_map(
            lambda x, y: tf.data.Dataset.from_tensors((x, y)).cache(path)
        ),
        "snapshot": EXAMPLES.snapshot(path).batch(4),
    }[way]
    with pytest.raises(ValueError, match="keep nothing in files.*Received: .*Dataset.*/file'"):
        serialized_client(data)


def test_a_generator_computes_in_its_own_thread():
    spec = (tf.TensorSpec([None, 2]), tf.TensorSpec([None, 1]))
    data = tf.data.Dataset.from_generator(lambda: iter(client_of(1)), output_signature=spec)
    assert not serialized_client(data).in_thread


@pytest.mark.usefixtures("context")
def test_a_group_takes_data_sets_of_all_kinds():
    # Several of each in a group, so that they would wait for each other's threads if they could.
    cohort = 4 * [*IN_THREAD.values(), *ELSEWHERE.values()]
    process = build_adaptive_fed_avg(functional_model())
    start = process.initialize()
    expected = process.next.single(start, cohort)
    for clients_per_group in (3, 100):
        rounds = GroupedRounds(process.next.single, process.next.grouped, clients_per_group)
        output = rounds(start, cohort)
        np.testing.assert_allclose(
            weights(process, output.state), weights(process, expected.state), rtol=1e-4
        )
    assert np.abs(weights(process, start) - weights(process, output.state)).max() > 1e-3
