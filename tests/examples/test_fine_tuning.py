"""The example of fine-tuning learns both tasks, and trains nothing but what it says."""

import json

import pytest

from tests.helpers.programs import run_example
from tf_adaptive_dp._keras.generation import GENERATION

if GENERATION != 3:
    pytest.skip("KerasHub needs Keras 3", allow_module_level=True)
pytest.importorskip("keras_hub")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("task", ["classifier", "language_model"])
def test_fine_tuning_learns(task):
    out = run_example("fine_tuning.py", "--task", task)
    result = json.loads(out.splitlines()[-1])
    assert result["accuracy"] > result["accuracy before"] + 0.1
    assert result["trained weights"] < 0.1 * result["all weights"]
    assert 2.9 < result["epsilon"] <= 3
    assert "Unit: one example" in out


def test_fine_tuning_in_mixed_precision_with_another_optimizer():
    out = run_example(
        *("fine_tuning.py", "--bfloat16", "--optimizer", "dp_adam"),
        *("--epochs", 2, "--num_texts", 500, "--batch_size", 100),
    )
    assert 2.9 < json.loads(out.splitlines()[-1])["epsilon"] <= 3
