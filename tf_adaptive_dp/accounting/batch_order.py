"""Batches that show which step they were drawn for, and from which groups of examples.

With correlated noise, ε depends on the order of the releases: a batch that comes at a step other
than the one it was drawn for may bring an example back too soon, and so may a batch from other
groups than those of the steps before. So the batches of `CyclicPoissonSampling` show both in the
signs of the zeros that mark their padding. The mechanism compares the step with the number of the
release, and the groups with those of the first batch.

Every row has a fixed pattern of `BITS` bits. The exclusive or of the patterns of all marked rows is
the code of the step. A zero in the row of an example, such as a sample weight of 0, carries no mark
and does not disturb it.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np

# Steps with the same code are multiples of 2²⁰ steps apart.
BITS = 20
# The upper ones also show the groups; no two of all numbers of groups are equal in the others.
_BITS_OF_GROUPS = 8
BITS_OF_PERIOD = BITS - _BITS_OF_GROUPS


def code_of_period(period: int) -> int:
    """The number that is combined with that of a step by exclusive or, so that periods differ.

    Args:
      period: b, the number of groups of the sampling.
    """
    return period * 2531 % 2**BITS_OF_PERIOD  # an odd factor: no two are equal


def code_of_groups(key: bytes) -> int:
    """The number that is combined with that of a step, so that groups differ but for one in 256.

    Args:
      key: that of the groups, 32 bytes.
    """
    digest = hashlib.blake2b(key=key, digest_size=_BITS_OF_GROUPS // 8, person=b"shown").digest()
    return int.from_bytes(digest, "little") << BITS_OF_PERIOD


@functools.lru_cache(maxsize=16)
def patterns(rows: int) -> np.ndarray:
    """[rows, BITS], zeros and ones: the pattern of each row, the same in every process."""
    words = np.random.SFC64(20).random_raw(rows)
    return (words[:, np.newaxis] >> np.arange(BITS, dtype=np.uint64) & np.uint64(1)).astype(int)


@functools.lru_cache(maxsize=16)
def _numbers(rows: int) -> list[int]:
    return (patterns(rows) @ (1 << np.arange(BITS))).tolist()


def marked(
    padding: np.ndarray, random: np.ndarray, step: int, period: int, groups: int = 0
) -> np.ndarray:
    """Changes random marks so that they show a step.

    Args:
      padding: [rows], bool, which rows are padding.
      random: [rows], bool, random marks.
      step: the number of the step.
      period: the number of groups of the sampling.
      groups: their code, see `code_of_groups`.

    Returns:
      [rows], bool: marks of padding rows only. None at all if there is too little padding to show
      the step.

    >>> marks = marked(np.ones(64, bool), np.zeros(64, bool), step=5, period=8)
    >>> shown(marks) == 5 ^ code_of_period(8)
    True
    """
    numbers, places = _numbers(len(padding)), np.flatnonzero(padding).tolist()
    now = random & padding
    missing = shown(now) ^ step % 2**BITS ^ code_of_period(period) ^ groups
    # Gaussian elimination over the field of two elements. A set of rows is a number, too.
    basis: list[tuple[int, int]] = [(0, 0)] * (BITS + 1)
    left = BITS
    for place in places:
        number, rows = _reduced(numbers[place], 1 << place, basis)
        if number:
            basis[number.bit_length()] = number, rows
            left -= 1
        if not left:
            break
    missing, rows = _reduced(missing, 0, basis)
    if missing:
        return np.zeros_like(now)
    now[[place for place in places if rows >> place & 1]] ^= True
    return now


def _reduced(number: int, rows: int, basis: list[tuple[int, int]]) -> tuple[int, int]:
    """What is left of a number, and the rows whose patterns amount to the difference."""
    for length in range(number.bit_length(), 0, -1):
        if number.bit_length() == length:
            number, rows = number ^ basis[length][0], rows ^ basis[length][1]
    return number, rows


def shown(marks: np.ndarray) -> int:
    """The exclusive or of the patterns of the rows with marks."""
    parity = marks.astype(int) @ patterns(len(marks)) % 2
    return int(parity @ (1 << np.arange(BITS)))
