"""Settings of all tests: a quiet TensorFlow on one thread, helpers that tests can import."""

import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# pytest's importmode=importlib leaves this folder out, with zoo.py and the like in it.
sys.path.insert(0, str(Path(__file__).parent))

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import tensorflow as tf  # noqa: E402

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


@pytest.fixture(scope="session")
def context():
    """One TFF worker for each process of the tests of `federated`, which ends with it."""
    from federated import runtime  # TFF takes seconds to import

    with runtime.local_context() as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def little_garbage(request):
    """KerasTuner collects garbage before each model: seconds, with what earlier tests have left."""
    if not request.path.name.startswith("test_tuner"):
        yield
        return
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
