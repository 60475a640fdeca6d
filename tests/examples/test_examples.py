"""The examples run as a user would run them, with small settings."""

import json
import os
import pathlib

import pytest

from tests.helpers.programs import run_example


@pytest.mark.slow
def test_quickstart_does_what_the_readme_says(tmp_path):
    out = run_example("quickstart.py", "--out_dir", tmp_path)
    last = [line for line in out.splitlines() if line.startswith("Test accuracy")][0]
    assert "δ = 1/1437" in last and "Poisson sampling" in last
    accuracy, epsilon = float(last.split()[2][:-1]), float(last.split("ε = ")[1].split(",")[0])
    assert accuracy >= 91 and epsilon <= 4  # one run varies by about 1.5 percentage points
    claim = "Each example joined each batch independently with probability 0.0890745"
    assert claim in " ".join(out.split())
    assert "tensorboard --logdir" in out
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert list((tmp_path / "logs").iterdir())


@pytest.mark.parametrize("optimizer", ["adadp", "dp_adam", "dp_adam_wosm", "dp_sgd", "adadps"])
def test_mnist_trains_with_each_optimizer(optimizer):
    data_dir = os.environ.get("TFDS_DATA_DIR")
    if not data_dir or not (pathlib.Path(data_dir) / "mnist").is_dir():
        pytest.skip("needs MNIST: set TFDS_DATA_DIR to a tensorflow-datasets folder that has it")
    out = run_example(
        *("mnist.py", "--optimizer", optimizer, "--epochs", 1, "--batch_size", 50),
        *("--max_examples", 1000, "--hidden_units", 16, "--data_dir", data_dir),
    )
    result = json.loads(out.splitlines()[-1])
    assert result["optimizer"] == optimizer and result["epsilon"] > 0
    assert "shuffl" in out
