"""The programs in README and in pages that build on a model of the reader's run as printed.

tests/docs/test_programs.py runs those of the other pages.
"""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT

# In place of what Keras downloads, and fewer steps than a model needs.
MNIST = """
import keras
import numpy as np
import tf_adaptive_dp.plan
tf_adaptive_dp.plan._ENOUGH_STEPS = 50
numbers = np.random.default_rng(0)
images, labels = numbers.integers(0, 256, [1_000, 28, 28]), numbers.integers(0, 10, 1_000)
keras.datasets.mnist.load_data = lambda: ((images, labels), (images, labels))
"""
without_tf_keras = pytest.mark.skipif(
    importlib.util.find_spec("tf_keras") is None, reason="TensorFlow 2.14 has its own Keras 2"
)


def program(document, containing):
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / document).read_text(), re.M | re.S)
    (found,) = [block for block in blocks if containing in block]
    return found


def output_of(code, folder, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("document", "containing", "before", "says"),
    [
        ("README.md", "plan.fit(", MNIST, r"epsilon = (2\.9\d*|3\.0000) and delta = 1e-06"),
        (
            "docs/how-to/tune-honestly.md",
            "HonestTuner(",
            "",
            r"epsilon = (2\.9\d*|3\.0000) and delta = 1e-05",
        ),
        ("docs/how-to/tune-honestly.md", "recommend(", "", r"2\.86"),
        ("docs/stacks.md", "model.save(", "", r"epsilon: [\d.]+"),
    ],
    ids=["plan", "HonestTuner", "recommend", "stacks"],
)
def test_the_program_runs(document, containing, before, says, tmp_path):
    code = program(document, containing)
    out = output_of(before + code, tmp_path)
    assert says is None or re.search(says, out), out


def test_the_first_page_of_the_site_begins_as_readme_does():
    first = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert program("README.md", "plan.fit(") in first


@pytest.mark.slow
@without_tf_keras
def test_the_program_runs_on_tf_keras_too(tmp_path):
    code = program("docs/stacks.md", "model.save(").replace("import keras\n", "")
    imports = program("docs/stacks.md", "import tf_keras as keras")
    out = output_of(imports + code, tmp_path, TF_USE_LEGACY_KERAS="1")
    assert re.search(r"epsilon: [\d.]+", out), out
