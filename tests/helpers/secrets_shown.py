"""Searches what a run leaves behind for the secrets that it took from the operating system."""

from __future__ import annotations

import base64
import os
import pathlib
import sys
import zipfile
from collections.abc import Iterator
from typing import Any


def forms(secret: bytes) -> dict[str, bytes]:
    """How the bytes of a secret may be written down.

    Args:
      secret: as the operating system gave them; 8 of them are also taken for a number.
    """
    number = int.from_bytes(secret[:8], "little")
    signed = int.from_bytes(secret[:8], "little", signed=True)
    varint, rest = bytearray(), number
    while rest > 127:
        varint.append(rest % 128 + 128)
        rest //= 128
    varint.append(rest)
    first = secret[:16]
    return {
        "bytes": first,
        "bytes, reversed": secret[:8][::-1],
        "protobuf number": bytes(varint),
        "decimal": str(abs(signed)).encode(),
        "unsigned decimal": str(number).encode(),
        "hexadecimal": first.hex().encode(),
        "hexadecimal number": f"{number:x}".encode(),
        "base64": base64.b64encode(first)[: len(first) * 8 // 6],
        "Python": repr(first)[2:-1].encode(),
        "octal": "".join(f"\\{byte:03o}" for byte in first).encode(),
    }


def recorded(monkeypatch: Any) -> list[bytes]:
    """A list that grows by whatever our packages take from the operating system from now on."""
    taken, urandom = [], os.urandom

    def record(size: int) -> bytes:
        value = urandom(size)
        while size >= 8 and 0 in (value[0], value[7]):  # or a number of fewer digits might be met
            value = urandom(size)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.split(".")[0] in ("tf_adaptive_dp", "federated"):
            taken.append(value)
        return value

    monkeypatch.setattr(os, "urandom", record)
    return taken


def found(artefact: bytes, secrets: list[bytes]) -> set[str]:
    """The forms in which a secret stands in an artefact."""
    return {
        name
        for secret in secrets
        for name, form in forms(secret).items()
        if len(form) >= 8 and form in artefact
    }


def contents(path: pathlib.Path) -> Iterator[bytes]:
    """What the files in a folder hold, and those in archives among them."""
    for file in sorted(p for p in [path, *path.rglob("*")] if p.is_file()):
        yield file.read_bytes()
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                yield from map(archive.read, archive.namelist())


def shown(value: Any, depth: int = 6) -> Iterator[str]:
    """`repr` of an object and of all that `vars` finds in ours."""
    yield repr(value)
    yield str(value)
    if type(value).__module__.split(".")[0] in ("tf_adaptive_dp", "federated") and depth:
        for name, part in getattr(value, "__dict__", {}).items():
            yield name
            yield from shown(part, depth - 1)
