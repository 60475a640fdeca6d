"""Lower bounds on epsilon from real runs, and attacks."""

from tf_adaptive_dp.auditing.bounds import (
    ManyRunReport,
    OneRunReport,
    many_run_epsilon,
    one_run_epsilon,
)
from tf_adaptive_dp.auditing.canaries import Canaries, PrivacyAudit
from tf_adaptive_dp.auditing.membership import membership_inference

__all__ = [
    "Canaries",
    "ManyRunReport",
    "OneRunReport",
    "PrivacyAudit",
    "many_run_epsilon",
    "membership_inference",
    "one_run_epsilon",
]
