"""Checks whether a model, its loss, optimizer and data are fit for private training."""

from tf_adaptive_dp.validation.findings import Finding, ValidationReport
from tf_adaptive_dp.validation.per_example import PerExampleReport, check_per_example
from tf_adaptive_dp.validation.validate import validate

__all__ = ["Finding", "PerExampleReport", "ValidationReport", "check_per_example", "validate"]
