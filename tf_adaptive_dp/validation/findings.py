"""The findings of a validation, and how they print."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, NamedTuple

import tensorflow as tf

from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.wording import counted


class Finding(NamedTuple):
    """One problem.

    Attributes:
      kind: the kind of problem, a short phrase: "batch statistics", "mixing", "loss", …
      where: the path of a layer, or "model", "loss", "optimizer" or "batch".
      what: what is wrong.
      fix: how to fix it; empty if `what` says it.
      severity: `"error"` if it voids the guarantee or stops training, `"warning"` if you should
        know about it.
    """

    kind: str
    where: str
    what: str
    fix: str
    severity: str = "error"

    def __str__(self) -> str:
        fix = f" Fix: {self.fix}" if self.fix else ""
        return f"[{self.severity}, {self.kind}] {self.where}: {self.what}{fix}"


@dataclasses.dataclass(frozen=True)
class ValidationReport:
    """What `validate` found in a model, a loss, an optimizer and a batch.

    Attributes:
      findings: all problems of this `model` and `loss`; errors come first.
      repaired: the problems that the repair fixed, each with what it did as its `fix`; empty
        without `fix=True`.
      probed: a sentence on what the numeric probe ran, and in which mode.
      model: the model; with `fix=True` the repaired copy.
      loss: the loss; with `fix=True` the repaired one.
    """

    findings: tuple[Finding, ...]
    repaired: tuple[Finding, ...]
    probed: str
    model: tf.keras.Model
    loss: str | Callable[..., Any]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that prevent private training."""
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def ok(self) -> bool:
        """Whether there are no errors; there may be warnings."""
        return not self.errors

    def raise_errors(self) -> None:
        """Raises an error if there are errors among the findings.

        Raises:
          NotPrivateError: with all findings in the message.
        """
        if not self.ok:
            raise NotPrivateError(str(self))

    def _verdict(self) -> str:
        which = "The repaired copy, `report.model`," if self.repaired else "This model"
        if not self.ok:
            return f"{which} cannot be trained privately yet."
        if not self.repaired:
            return f"{which} is ready for private training."
        return (
            f"{which} is ready for private training; the model that you passed is not. Compile the "
            "copy before you train it: `report.model.compile(...)`."
        )

    def __str__(self) -> str:
        num_errors, num_warnings = len(self.errors), len(self.findings) - len(self.errors)
        lines = [
            self._verdict(),
            f"{counted(num_errors, 'error')}, {counted(num_warnings, 'warning')}. {self.probed}",
        ]
        lines += [f"  {finding}" for finding in self.findings]
        if self.repaired:
            lines += ["Repaired:", *(f"  {f.where}: {f.fix}" for f in self.repaired)]
        return "\n".join(lines)

    __repr__ = __str__
