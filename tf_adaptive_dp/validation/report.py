"""What a validation found, and how it reads."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, NamedTuple

import tensorflow as tf

from tf_adaptive_dp.errors import NotPrivateError


class Finding(NamedTuple):
    """One thing that is wrong.

    Attributes:
      kind: what sort of thing, one of a few short words: "batch statistics", "mixing", "loss", …
      where: the layer's path in the model, or "model", "loss", "optimizer" or "batch".
      what: what is wrong.
      cure: what to do.
      severity: `"error"` for what voids the guarantee or stops training, `"warning"` for what you
        should know.
    """

    kind: str
    where: str
    what: str
    cure: str
    severity: str = "error"

    def __str__(self) -> str:
        return f"[{self.severity}, {self.kind}] {self.where}: {self.what} Cure: {self.cure}"


@dataclasses.dataclass(frozen=True)
class ValidationReport:
    """What `validate` found in a model, a loss, an optimizer and a batch.

    Attributes:
      findings: all that is wrong with `model` and `loss` as they stand here; errors come first.
      repaired: what was wrong before the repair; empty without `fix=True`.
      probed: what the numeric probe ran, and in which mode.
      model: the model, repaired if that was asked for.
      loss: the loss, likewise.
    """

    findings: tuple[Finding, ...]
    repaired: tuple[Finding, ...]
    probed: str
    model: tf.keras.Model
    loss: str | Callable[..., Any]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that stand in the way of private training."""
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def ok(self) -> bool:
        """Whether nothing stands in the way; there may be warnings."""
        return not self.errors

    def raise_errors(self) -> None:
        """Raises if there are errors.

        Raises:
          NotPrivateError: with all findings.
        """
        if not self.ok:
            raise NotPrivateError(str(self))

    def __str__(self) -> str:
        num_errors, num_warnings = len(self.errors), len(self.findings) - len(self.errors)
        lines = [
            "Fit for private training." if self.ok else "Not fit for private training.",
            f"{num_errors} errors, {num_warnings} warnings. Probed: {self.probed}",
        ]
        lines += [f"  {finding}" for finding in self.findings]
        if self.repaired:
            lines += ["Repaired:", *(f"  {f.where}: {f.what}" for f in self.repaired)]
        return "\n".join(lines)

    __repr__ = __str__
