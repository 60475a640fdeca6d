"""What tests share: models with known gradients, statistical tests, programs that are killed."""

import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tf_privacy(module: str = "tensorflow_privacy") -> types.ModuleType:
    """A module of TF Privacy; skips the test that asks for it where TF Privacy is missing."""
    return pytest.importorskip(module, reason="TF Privacy does not run on today's TensorFlow")
