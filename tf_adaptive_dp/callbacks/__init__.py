"""Callbacks for `Model.fit`: epsilon as it grows, a budget, releases that no crash loses."""

from tf_adaptive_dp.callbacks.privacy_budget import PrivacyBudget
from tf_adaptive_dp.callbacks.privacy_monitor import PrivacyMonitor
from tf_adaptive_dp.callbacks.release_log import ReleaseLog

__all__ = ["PrivacyBudget", "PrivacyMonitor", "ReleaseLog"]
