"""What a ledger keeps of side information: where it came from, not what it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import dp_accounting

from federated.privacy import dp_event_json
from tf_adaptive_dp.side_information import provenance as provenances


@dataclasses.dataclass(frozen=True)
class SideInformation:
    """Where the side information of a run came from, without the side information.

    Attributes:
      description: what it is.
      provenance: `"public"`, or the `dp_accounting.DpEvent` by which it was released.
      digest: tells it from another one with the same words, which was another release; empty if
        that is not known.
    """

    description: str
    provenance: str | dp_accounting.DpEvent
    digest: str = ""

    @classmethod
    def of(cls, used: Any) -> SideInformation | None:
        """That of an optimizer or a process; `None` of `None`.

        Args:
          used: anything with `provenance`, perhaps with `description` and `digest`.

        Raises:
          NotPrivateError: if it does not say where it comes from.
          ValueError: if it was released by an event that dp_accounting does not know.
        """
        if used is None:
            return None
        provenance = provenances.check_provenance(getattr(used, "provenance", None))
        description = str(getattr(used, "description", "side information"))
        # By way of `plain`, so that it equals what is read from a file: there tuples are lists.
        return cls.from_plain(cls(description, provenance, getattr(used, "digest", "")).to_plain())

    def to_plain(self) -> list:
        """Its attributes, for JSON."""
        return [self.description, dp_event_json.to_plain(self.provenance), self.digest]

    @classmethod
    def from_plain(cls, plain: list) -> SideInformation:
        """What `to_plain` described.

        Raises:
          ValueError: for a description of something else.
        """
        description, provenance, digest = plain
        return cls(description, dp_event_json.from_plain(provenance), digest)
