"""What several tests of the normalization need."""

import numpy as np
import pytest
import tensorflow as tf

from tf_adaptive_dp.normalization import estimator


@pytest.fixture
def usual_noise(monkeypatch):
    """The same noise every time, for what holds for nearly all noise."""
    random = np.random.default_rng(11)
    monkeypatch.setattr(
        estimator, "fresh_normal_numbers", lambda size: tf.constant(random.normal(size=size))
    )
