"""The programs in README and docs/federated.md run as they are printed."""

import os
import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT

# What a reader has already: a model with its data, and a model with its clients.
MODEL = """
import tensorflow as tf
model = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(3)])
examples = tf.random.normal([60_000, 4]), tf.zeros([60_000], tf.int32)
train = tf.data.Dataset.from_tensor_slices(examples)
"""
CLIENTS = """
import tensorflow as tf
import tensorflow_federated as tff

def of_client(name):
    return tf.data.Dataset.from_tensors((tf.ones([2, 4]), tf.zeros([2], tf.int32)))

client_data = tff.simulation.datasets.ClientData.from_clients_and_tf_fn(
    [str(k) for k in range(10_000)], of_client
)

def model_fn():
    return tff.learning.models.from_keras_model(
        tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(3)]),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        client_data.element_type_structure,
    )
"""


def program(document, containing):
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / document).read_text(), re.M | re.S)
    (found,) = [block for block in blocks if containing in block]
    return found


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("document", "containing", "before", "says"),
    [
        ("README.md", "model.fit(", MODEL, r"epsilon: [\d.]+"),
        ("README.md", "HonestTuner(", "", r"epsilon = (2\.9\d*|3\.0000) and delta = 1e-05"),
        ("README.md", "recommend(", "", r"2\.86"),
        ("README.md", "build_dp_fed_avg(", CLIENTS, None),
        ("docs/federated.md", "federated.train(", CLIENTS, r"epsilon = [\d.]+ and delta = 1e-05"),
    ],
    ids=["fit", "HonestTuner", "recommend", "federated", "federated.train"],
)
def test_the_program_runs(document, containing, before, says, tmp_path):
    code = program(document, containing).replace("500", "2")  # rounds
    done = subprocess.run(
        [sys.executable, "-c", before + code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert says is None or re.search(says, done.stdout), done.stdout
