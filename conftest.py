"""What cannot be imported on the stack at hand is left out; the head of the report names it."""

import importlib.util
import os
import signal
import zlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import tensorflow as tf  # noqa: E402

from tf_adaptive_dp._keras.generation import GENERATION  # noqa: E402

# A shell that starts the tests in the background has them ignore this signal, and whatever they
# start. TFF ends its own worker with it when Python ends, and waits for that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore_glob = []
if GENERATION == 2:
    collect_ignore_glob.append("tf_adaptive_dp/_keras/optimizers_keras3.py")
if importlib.util.find_spec("tensorflow_federated") is None:
    collect_ignore_glob += [
        "federated/*",
        "tests/federated/*",
        "tests/benchmarks/test_federated.py",
        "tests/helpers/killable_rounds.py",
        "tests/helpers/real_rounds.py",
    ]


def pytest_addoption(parser):
    """`--part 3/12` runs the tests of some files, so that all parts together run each test once."""
    parser.addoption("--part", metavar="K/N", help="run the tests of part K of N (from 1 on)")


def pytest_ignore_collect(collection_path, config):
    """A file belongs to the part that its path says, whichever other files there are."""
    if config.getoption("--part") is None or not collection_path.is_file():
        return None
    number, parts = map(int, config.getoption("--part").split("/"))
    path = collection_path.relative_to(config.rootpath).as_posix()
    return None if zlib.crc32(path.encode()) % parts == number - 1 else True


def pytest_report_header():
    """Which Keras is tested, and what is not."""
    left_out = ", ".join(collect_ignore_glob)
    return f"TensorFlow {tf.__version__}, Keras {GENERATION}; cannot be imported: {left_out}"
