"""The notebooks run from the first cell to the last, and hold what they printed."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tf_adaptive_dp._keras.generation import GENERATION

FOLDER = ROOT / "docs" / "tutorials"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
WITHOUT_TFF = importlib.util.find_spec("tensorflow_federated") is None


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_the_notebook_runs(notebook):
    if notebook.stem == "federated" and WITHOUT_TFF:
        pytest.skip("TensorFlow Federated is for the older stack")
    if notebook.stem != "federated" and GENERATION == 2:
        pytest.skip("the tutorials are written for Keras 3")
    done = subprocess.run(
        [sys.executable, str(FOLDER / "execute.py"), str(notebook)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_the_notebook_holds_its_outputs(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert any(cell["outputs"] for cell in code)
    assert notebook.stat().st_size < 200_000
