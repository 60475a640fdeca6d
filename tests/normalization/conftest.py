"""What several tests of the normalization need."""

import numpy as np
import pytest

from tf_adaptive_dp.mechanism import secure_noise


@pytest.fixture
def usual_noise(monkeypatch):
    """The same noise every time, for what holds for nearly all noise."""
    random = np.random.default_rng(11)
    monkeypatch.setattr(secure_noise, "_normal_numbers", lambda size: random.normal(size=size))
