"""What tests share: models with known gradients, statistical tests, programs that are killed."""

import importlib.util
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HAS_TF_PRIVACY = importlib.util.find_spec("tensorflow_privacy") is not None


def tf_privacy(module: str = "tensorflow_privacy") -> types.ModuleType:
    """A module of TF Privacy; skips the test that asks for it where TF Privacy is missing."""
    return pytest.importorskip(module, reason="TF Privacy does not run on today's TensorFlow")
