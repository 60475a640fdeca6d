"""The wheel: what it holds, what it asks for, and that it trains where nothing else is."""

import email
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.helpers import ROOT

PACKAGES = ("tf_adaptive_dp", "federated")
PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13")

TRAINS = """
import keras
import numpy as np
import tensorflow as tf
import tf_adaptive_dp

x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = (x[:, 0] > 0).astype("int64")
model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf_adaptive_dp.ADADP(l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=16)
monitor = tf_adaptive_dp.PrivacyMonitor(num_examples=64, delta=1e-2, log_dir="logs")
model.compile(optimizer, loss)
model.fit(x, y, batch_size=16, epochs=1, verbose=0, callbacks=[monitor])
assert "epsilon = " in monitor.statement()
print(tf_adaptive_dp.__file__, tf.__version__, optimizer.ledger.num_releases)
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


@pytest.fixture(scope="module")
def metadata(wheel) -> email.message.Message:
    with zipfile.ZipFile(wheel) as held:
        (name,) = [n for n in held.namelist() if n.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(held.read(name))


def needs(metadata, python, extra="") -> "dict[str, SpecifierSet]":
    """What a Python asks for, by name; bounds of one package are joined, as pip does."""
    found: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, metadata.get_all("Requires-Dist")):
        of_extra = f"extra == '{extra}'" in str(requirement.marker).replace('"', "'")
        if "extra" in str(requirement.marker) and not of_extra:
            continue
        environment = {"python_version": python, "extra": extra}
        if requirement.marker is None or requirement.marker.evaluate(environment):
            found[requirement.name] = found.get(requirement.name, SpecifierSet()) & (
                requirement.specifier
            )
    return found


def accepted(specifiers, versions):
    return [version for version in versions if version in specifiers]


def test_each_python_gets_a_tensorflow_that_is_tested(metadata):
    assert all(f"{python}.1" in SpecifierSet(metadata["Requires-Python"]) for python in PYTHONS)
    assert "3.14.0" not in SpecifierSet(metadata["Requires-Python"])
    for python in PYTHONS:
        assert f"Programming Language :: Python :: {python}" in metadata.get_all("Classifier")
    releases = ["2.13.1", "2.14.1", "2.15.1", *(f"2.{minor}.0" for minor in range(16, 23))]
    assert accepted(needs(metadata, "3.11")["tensorflow"], releases) == ["2.14.1", "2.21.0"]
    assert accepted(needs(metadata, "3.12")["tensorflow"], releases) == ["2.21.0"]
    assert accepted(needs(metadata, "3.13")["tensorflow"], releases) == ["2.21.0"]


@pytest.mark.parametrize("extra", ["federated", "tf-privacy"])
def test_extras_of_the_older_stack_bring_its_tensorflow(metadata, extra):
    package = {"federated": "tensorflow-federated", "tf-privacy": "tensorflow-privacy"}[extra]
    for python in ("3.9", "3.10", "3.11"):
        wanted = needs(metadata, python, extra)
        assert package in wanted
        assert accepted(wanted["tensorflow"], ["2.14.1", "2.21.0"]) == ["2.14.1"]
    for python in ("3.12", "3.13"):
        assert needs(metadata, python, extra) == needs(metadata, python)


@pytest.mark.parametrize(
    ("lock", "pythons"), [("today", PYTHONS[1:]), ("tff", PYTHONS[:3])], ids=["today", "tff"]
)
def test_locks_fit_the_bounds_of_the_wheel(metadata, lock, pythons):
    lines = (ROOT / "requirements" / f"{lock}.txt").read_text().splitlines()
    pins = [Requirement(line.rstrip("\\ ")) for line in lines if "==" in line and line[0].isalpha()]
    for python in pythons:
        environment = {"python_version": python, "python_full_version": f"{python}.1"}
        locked = {
            pin.name: next(iter(pin.specifier)).version
            for pin in pins
            if pin.marker is None or pin.marker.evaluate(environment)
        }
        for name, bounds in needs(metadata, python).items():
            assert locked[name] in bounds, f"{name} {locked[name]} on Python {python}"


def python_of_version(folder, minor) -> Path:
    """A Python that says it is 3.`minor`."""
    path = folder / f"python3.{minor}"
    pretend = f"import sys; sys.version_info = (3, {minor}, 0, 'final', 0); exec(sys.argv[1])"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{pretend}" "$2"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("minors", "stacks", "left_out"),
    [
        ([13, 11], "today tff", ""),
        ([11], "today tff", ""),
        ([13], "today", "federated/ and Keras 2 with TF Privacy, which needs Python 3.9 to 3.11"),
        ([9], "tff", "Keras 3, which needs Python 3.10 to 3.13"),
        ([14], None, "which needs"),
    ],
    ids=["3.13 and 3.11", "3.11 alone", "3.13 alone", "3.9 alone", "3.14 alone"],
)
def test_make_knows_the_stacks_that_it_can_set_up(minors, stacks, left_out, tmp_path):
    def run(command):
        pythons = [str(python_of_version(tmp_path, minor)) for minor in minors]
        script = str(ROOT / "requirements" / "environment.sh")
        return subprocess.run(
            ["sh", script, command, str(tmp_path / "python3.8"), *pythons],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    found = run("stacks")
    assert found.stdout.strip() == (stacks or "")
    assert (found.returncode == 0) == (stacks is not None)
    assert stacks or "Needed: 3.9 to 3.13" in found.stderr
    said = run("left-out").stdout
    assert left_out in said
    if stacks:
        assert said.count("\n") == (0 if not left_out else 1)  # one sentence
        assert not said or "pyenv install 3.1" in said


@pytest.mark.slow  # downloads TensorFlow: minutes and gigabytes
@pytest.mark.parametrize("extra", ["", "tf-privacy"])
def test_wheel_trains_in_a_fresh_environment(wheel, extra, tmp_path):
    if extra and sys.version_info >= (3, 12):
        pytest.skip("TF Privacy needs Python 3.9 to 3.11")
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    wanted = f"{wheel}[{extra}]" if extra else str(wheel)
    subprocess.run([python, "-m", "pip", "install", "-qq", wanted], check=True)
    found = subprocess.run(
        [python, "-c", TRAINS], cwd=tmp_path, check=True, capture_output=True, text=True, env={}
    ).stdout.split()
    older = extra or sys.version_info < (3, 10)
    installed = next((tmp_path / "env").rglob("tf_adaptive_dp/__init__.py"))
    assert found[0] == str(installed) and found[2] == "4"
    assert found[1].startswith("2.14." if older else "2.21.")
    assert list((tmp_path / "logs").rglob("events*"))
