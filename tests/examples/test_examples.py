"""The examples run as a user would run them, with small settings."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(example, *arguments):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_quickstart_reports_accuracy_epsilon_and_sampling(tmp_path):
    out = run("quickstart.py", "--epochs", 2, "--out_dir", tmp_path)
    last = [line for line in out.splitlines() if line.startswith("Test accuracy")][0]
    assert "ε = " in last and "δ = 1/1437" in last and "Poisson sampling" in last
    assert "tensorboard --logdir" in out
    assert (tmp_path / "training.png").stat().st_size > 10_000
    assert list((tmp_path / "logs").iterdir())


@pytest.mark.slow
def test_quickstart_reaches_what_the_readme_says(tmp_path):
    out = run("quickstart.py", "--out_dir", tmp_path)
    last = [line for line in out.splitlines() if line.startswith("Test accuracy")][0]
    accuracy, epsilon = float(last.split()[2][:-1]), float(last.split("ε = ")[1].split(",")[0])
    assert accuracy >= 91 and epsilon <= 4  # one run varies by about 1.5 percentage points


def test_quickstart_draws_poisson_batches():
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "examples/quickstart.py")
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    import numpy as np

    x = np.arange(1437, dtype=np.float32)[:, None] + 1
    counts, sizes = np.zeros(1437), []
    for batch_x, batch_y, weight in quickstart.poisson_batches(x, np.arange(1437)).take(600):
        real = weight.numpy() > 0
        np.testing.assert_array_equal(batch_x.numpy()[real, 0], batch_y.numpy()[real] + 1)
        counts[batch_y.numpy()[real]] += 1
        sizes.append(real.sum())
    q = quickstart.BATCH_SIZE / 1437
    # Means and spreads of 600 independent draws, within five standard errors.
    assert abs(np.mean(sizes) - 1437 * q) < 5 * np.sqrt(1437 * q * (1 - q) / 600)
    assert abs(np.var(sizes) / (1437 * q * (1 - q)) - 1) < 5 * np.sqrt(2 / 600)
    assert abs(np.var(counts) / (600 * q * (1 - q)) - 1) < 5 * np.sqrt(2 / 1437)
    assert counts.max() <= 600 and counts.min() > 0


@pytest.mark.parametrize("optimizer", ["adadp", "dp_adam", "dp_adam_wosm", "dp_sgd", "adadps"])
def test_mnist_trains_with_each_optimizer(optimizer):
    data_dir = os.environ.get("TFDS_DATA_DIR")
    if not data_dir or not (pathlib.Path(data_dir) / "mnist").is_dir():
        pytest.skip("needs MNIST: set TFDS_DATA_DIR to a tensorflow-datasets folder that has it")
    out = run(
        *("mnist.py", "--optimizer", optimizer, "--epochs", 1, "--batch_size", 50),
        *("--max_examples", 1000, "--hidden_units", 16, "--data_dir", data_dir),
    )
    result = json.loads(out.splitlines()[-1])
    assert result["optimizer"] == optimizer and result["epsilon"] > 0
    assert "shuffl" in out
