"""How texts for users put numbers, paragraphs and lists."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence


def counted(number: int, one: str, several: str | None = None) -> str:
    """A number with its noun, in the singular or the plural.

    Args:
      number: how many.
      one: the noun in the singular.
      several: its plural, by default with an "s".

    >>> counted(1, "noisy gradient"), counted(2, "noisy gradient")
    ('1 noisy gradient', '2 noisy gradients')
    """
    return f"{number} {one if number == 1 else several or f'{one}s'}"


def format_epsilon(epsilon: float) -> str:
    """ε with four decimals, rounded up.

    >>> format_epsilon(0.53832), format_epsilon(math.inf)
    ('0.5384', 'infinity')
    """
    if math.isinf(epsilon):
        return "infinity"
    return f"{math.ceil(epsilon * 1e4) / 1e4:.4f}"


def format_delta(delta: float) -> str:
    """δ with six digits, rounded up: the pair of ε and δ holds as it is printed.

    >>> format_delta(1e-5), format_delta(1.000004999e-5), format_delta(1 / 60_000)
    ('1e-05', '1.00001e-05', '1.66667e-05')
    """
    printed = f"{delta:g}"
    if float(printed) >= delta:
        return printed
    digits, _, exponent = f"{delta:.5e}".partition("e")
    return f"{float(f'{float(digits) + 1e-5:.5f}e{exponent}'):g}"


def paragraph(text: str) -> str:
    """Wraps a paragraph at 80 columns."""
    return textwrap.fill(" ".join(text.split()), width=80) + "\n"


def list_item(text: str) -> str:
    """Wraps a list item at 80 columns."""
    return textwrap.fill(text, width=80, initial_indent="  - ", subsequent_indent="    ") + "\n"


def joined(paragraphs: Sequence[str]) -> str:
    """Joins paragraphs by blank lines and drops empty ones."""
    return "\n".join(text for text in paragraphs if text)
