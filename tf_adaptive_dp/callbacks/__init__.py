"""Callbacks for `Model.fit`: they report epsilon, enforce a budget and survive crashes."""

from tf_adaptive_dp.callbacks.backups import epoch_backup
from tf_adaptive_dp.callbacks.privacy_budget import PrivacyBudget
from tf_adaptive_dp.callbacks.privacy_monitor import PrivacyMonitor
from tf_adaptive_dp.callbacks.release_log import ReleaseLog

__all__ = ["PrivacyBudget", "PrivacyMonitor", "ReleaseLog", "epoch_backup"]
