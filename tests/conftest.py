"""Settings of all tests: a quiet TensorFlow on one thread, reproducible examples."""

import collections
import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import tensorflow as tf  # noqa: E402

from tf_adaptive_dp._keras.generation import GENERATION  # noqa: E402

tf.get_logger().setLevel("ERROR")
# The suite runs one process a core.
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
# Two devices, so that strategies with several replicas can be tested.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)

# The same examples in every run; the first one pays for TensorFlow's warm-up.
hypothesis.settings.register_profile("tests", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("tests")


def pytest_addoption(parser):
    """`--one-case` makes a run short; the other cases may still fail."""
    parser.addoption("--one-case", action="store_true", help="run the first case of each test only")


@pytest.hookimpl(tryfirst=True)  # before pytest's own hook selects by mark
def pytest_collection_modifyitems(config, items):
    """`slow_after(n)`: of a test with many cases, those after the first n are slow.

    `slow_on(2)`: the test is slow with this version of Keras; the quick tests of the other run it.

    `in_turns`: of the quick cases, the first, third, fifth, … are slow with Keras 2 and the others
    with Keras 3, so that each of them is quick with one of the two.
    """
    quick_cases = collections.Counter()
    for item in items:
        if any(GENERATION in mark.args for mark in item.iter_markers("slow_on")):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow"):
            continue
        test = item.nodeid.partition("[")[0]
        quick_cases[test] += 1
        last = item.get_closest_marker("slow_after")
        turn = 3 if quick_cases[test] % 2 else 2
        if (last is not None and quick_cases[test] > last.args[0]) or (
            item.get_closest_marker("in_turns") and turn != GENERATION
        ):
            item.add_marker(pytest.mark.slow)
    if config.getoption("--one-case"):
        first = {}
        for item in items:
            is_slow = item.get_closest_marker("slow") is not None
            first.setdefault((is_slow, item.nodeid.partition("[")[0]), item)
        kept = set(first.values())
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


@pytest.fixture(scope="session")
def context():
    """One TFF worker for each process of the tests of `federated`, which ends with it."""
    from federated.runtime import contexts  # TFF takes seconds to import

    with contexts.local_context() as made:
        yield made


@pytest.fixture(autouse=True)
def little_garbage():
    """What a test leaves is looked at once: each `fit` leaks its graph into TensorFlow.

    Otherwise Python's collector goes through all of it again and again: a fifth of the time.
    """
    yield
    gc.collect()
    gc.freeze()
