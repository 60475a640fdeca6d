"""The examples run as a user would run them, with small settings."""

import json
import os
import pathlib

import pytest

from tests.helpers import posts
from tests.helpers.programs import run_example


@pytest.mark.slow
def test_quickstart_does_what_the_readme_says(tmp_path):
    out = run_example("quickstart.py", "--out_dir", tmp_path)
    last = [line for line in out.splitlines() if line.startswith("Test accuracy")][0]
    assert "δ = 1e-05" in last and "Poisson sampling" in last
    accuracy, epsilon = float(last.split()[2][:-1]), float(last.split("ε = ")[1].split(",")[0])
    assert accuracy >= 91 and epsilon <= 4  # one run varies by about 1.5 percentage points
    claim = "Each example joined each batch independently with probability 0.0570633"
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


@pytest.mark.slow
def test_people_states_both_guarantees(tmp_path):
    words = {"brewing": "hot coffee cup", "physics": "qubit spin gate"}
    rows = [
        (split, f"{split} {user}", words[tag], "", tag)
        for split in ("heldout", "train", "test")
        for user in range(40)
        for tag in list(words) * (1 + user % 2)
    ]
    posts.write(tmp_path, rows)
    small = {"num_words": 6, "num_tags": 2, "epochs": 2, "batch_size": 8, "examples_per_user": 2}
    small["posts"] = 2
    flags = [part for name, value in small.items() for part in (f"--{name}", value)]
    out = run_example("people.py", "--data_dir", tmp_path, *flags)
    post, person = (json.loads(line) for line in out.splitlines() if line.startswith("{"))
    assert "120 posts of 40 people, who wrote 2 to 4 each" in out
    assert person["epsilon_per_person"] == person["epsilon_per_unit"] == 8.0
    of_two = post["epsilon_per_person"]["2"]
    assert of_two is None or 10.0 < of_two < 40.0
    assert post["steps"] == 30 and person["steps"] == 10
    assert "Unit: one example." in out and "Unit: one user." in out
