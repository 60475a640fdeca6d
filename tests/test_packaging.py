"""The wheel: what it holds, and that it trains where nothing else of the project is."""

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.helpers import ROOT

PACKAGES = ("tf_adaptive_dp", "federated")

TRAINS = """
import numpy as np
import tensorflow as tf
import tf_adaptive_dp

x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = (x[:, 0] > 0).astype("int64")
model = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(2)])
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
optimizer = tf_adaptive_dp.ADADP(l2_norm_clip=1.0, noise_multiplier=1.0)
model.compile(optimizer, loss)
model.fit(x, y, batch_size=16, epochs=1, verbose=0)
print(tf_adaptive_dp.__file__, optimizer.ledger.num_releases)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy so that the build leaves nothing behind in the project."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(source)], check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_every_module_and_says_that_it_is_typed(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(p.relative_to(ROOT)) for name in PACKAGES for p in (ROOT / name).rglob("*.py")}
    assert modules <= held
    assert {f"{name}/py.typed" for name in PACKAGES} <= held
    assert not [name for name in held if name.startswith(("tests", "examples", "benchmarks"))]


@pytest.mark.slow  # downloads TensorFlow: minutes and gigabytes
def test_wheel_trains_in_a_fresh_environment(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-qq", str(wheel)], check=True)
    found = subprocess.run(
        [python, "-c", TRAINS], cwd=tmp_path, check=True, capture_output=True, text=True, env={}
    ).stdout.split()
    assert found == [str(next((tmp_path / "env").rglob("tf_adaptive_dp/__init__.py"))), "4"]
