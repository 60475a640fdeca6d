"""The ledger's record of side information: its provenance, not its values."""

from __future__ import annotations

import dataclasses
from typing import Any

import dp_accounting

from federated.privacy import dp_event_json
from tf_adaptive_dp import checks
from tf_adaptive_dp.side_information import provenance as provenances


@dataclasses.dataclass(frozen=True)
class SideInformation:
    """The provenance of a run's side information, without its values.

    Attributes:
      description: what it is, in words.
      provenance: `"public"`, or the `dp_accounting.DpEvent` by which it was released.
      digest: distinguishes it from another release with the same description; empty if unknown.

    Raises:
      NotPrivateError: if `provenance` is missing.
      TypeError: if `description` or `digest` is no text.
    """

    description: str
    provenance: str | dp_accounting.DpEvent
    digest: str = ""

    def __post_init__(self) -> None:
        provenances.stated_provenance(self.provenance)
        checks.instance("description", self.description, str)
        checks.instance("digest", self.digest, str)

    @classmethod
    def of(cls, used: Any) -> SideInformation | None:
        """Records the side information of an optimizer or a process; `None` for `None`.

        Args:
          used: any object with `provenance`, and optionally `description` and `digest`.

        Raises:
          NotPrivateError: if it does not state its provenance.
          ValueError: if dp_accounting does not know the event that released it.
        """
        if used is None:
            return None
        provenance = provenances.check_provenance(getattr(used, "provenance", None))
        description = str(getattr(used, "description", "side information"))
        # Through `to_plain`, so that it equals a record read from a file, where tuples are lists.
        return cls.from_plain(cls(description, provenance, getattr(used, "digest", "")).to_plain())

    def to_plain(self) -> list:
        """The attributes as JSON values."""
        return [self.description, dp_event_json.to_plain(self.provenance), self.digest]

    @classmethod
    def from_plain(cls, plain: list) -> SideInformation:
        """Converts the result of `to_plain` back.

        Raises:
          ValueError: if `plain` does not describe side information.
        """
        description, provenance, digest = plain
        return cls(description, dp_event_json.from_plain(provenance), digest)
