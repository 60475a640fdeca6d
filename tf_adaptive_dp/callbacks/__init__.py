"""Keras callbacks that report what was spent, and stop before too much is."""

from tf_adaptive_dp.callbacks.budget import PrivacyBudget
from tf_adaptive_dp.callbacks.monitor import PrivacyMonitor

__all__ = ["PrivacyBudget", "PrivacyMonitor"]
