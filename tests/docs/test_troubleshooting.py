"""Each message that docs/troubleshooting.md explains is one of the library's."""

import ast
import re

import pytest

from tests.helpers import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTES = re.findall(r"^> (.+)$", PAGE, re.M)


def text(node):
    """A message in the sources, with … for what is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text(node.left) + text(node.right)
    return "…"


def messages():
    for path in (ROOT / "tf_adaptive_dp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)):
                found = text(node)
                if len(found) > 20:
                    yield re.sub(r"\{[^{}]*\}", "…", found)


MESSAGES = set(messages())


@pytest.mark.parametrize("quote", QUOTES, ids=[q[:50].strip() for q in QUOTES])
def test_each_quoted_message_is_in_the_sources(quote):
    parts = [re.escape(part.strip()) for part in quote.split("…") if part.strip()]
    pattern = re.compile(r"\s*…\s*".join(parts))
    assert any(pattern.search(message) for message in MESSAGES), quote


def test_the_page_explains_the_messages_that_users_meet():
    assert len(QUOTES) > 30
