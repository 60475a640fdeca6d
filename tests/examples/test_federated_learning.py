"""The program that docs/federated.md begins with runs without any data folder."""

import importlib.util
import re

import pytest
import tensorflow as tf

from tests.helpers import ROOT
from tests.helpers.programs import run_example

PROGRAM = (ROOT / "examples" / "federated_learning.py").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "federated.md").read_text(encoding="utf-8")


def test_the_page_begins_with_the_program():
    first = re.search(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    assert first[1] == PROGRAM
    assert PAGE[: first.start()].count("\n") < 20


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_federated") is None,
    reason="TensorFlow Federated is for the older stack",
)
def test_it_trains_states_what_it_spent_and_resumes(tmp_path, monkeypatch):
    monkeypatch.delenv("TFF_CACHE_DIR", raising=False)
    out = run_example("federated_learning.py", "--out_dir", tmp_path)
    accuracy = float(re.search(r"Accuracy on held-out users: ([\d.]+)%", out)[1])
    assert 60 < accuracy < 100
    assert re.search(r"epsilon = \d\.\d+ and delta = 0.0005", out)
    assert "8 noisy averages of client updates" in out
    model = tf.keras.models.load_model(tmp_path / "model.keras")
    assert model.predict(tf.zeros([1, 64]), verbose=0).shape == (1, 10)
    again = run_example("federated_learning.py", "--out_dir", tmp_path)
    assert f"{accuracy}%" in again and "8 noisy averages" in again
