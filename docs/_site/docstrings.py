"""Makes docstrings of the sources read well on the site; griffe loads this extension."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import textwrap
from typing import Any

import griffe

ROOT = pathlib.Path(__file__).parents[2]
# "Guarantee: ..." and what else opens a paragraph that an auditor should not miss.
GUARANTEE = re.compile(r"^(Guarantee)s?: ?((?:.+\n?)+)", re.M)


@functools.cache
def shared_texts() -> dict[str, str]:
    """What `fill_docstring` puts into the optimizers' docstrings, without importing it."""
    source = (ROOT / "tf_adaptive_dp" / "optimizers" / "docstrings.py").read_text("utf-8")
    (texts,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "SHARED_TEXTS"
    )
    return ast.literal_eval(texts)


def fenced(docstring: str) -> str:
    """The docstring with each doctest in a fence, at the indentation that it has."""
    lines: list[str] = []
    indent = None  # of the doctest that is open
    for line in [*docstring.splitlines(), ""]:
        if indent is not None and not line.strip():
            lines.append(f"{indent}```")
            indent = None
        elif indent is None and line.lstrip().startswith(">>> "):
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f"{indent}```pycon")
        lines.append(line)
    return "\n".join(lines).rstrip()


def readable(docstring: str) -> str:
    """The docstring with its placeholders filled in, guarantees set off and doctests in fences."""
    for name, text in shared_texts().items():
        docstring = docstring.replace("{{" + name + "}}", text)
    docstring = GUARANTEE.sub(
        lambda found: f'!!! guarantee "Guarantee"\n{textwrap.indent(found[2], "    ")}', docstring
    )
    return fenced(docstring)


class Docstrings(griffe.Extension):
    """Rewrites each docstring before griffe parses it."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called once for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = readable(obj.docstring.value)
