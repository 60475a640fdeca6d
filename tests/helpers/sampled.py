"""Small data and ledgers for the tests of samplings."""

from __future__ import annotations

import numpy as np

from tf_adaptive_dp.accounting.releases import Releases, Segment
from tf_adaptive_dp.sampling import draws

KEY = draws.new_key(seed=7)
N, DELTA = 1_000, 1e-3


def fake_ledger(*segments, other_events=(), checks=()):
    return Releases([Segment(*s) for s in segments], other_events, checks)


def drawn_ids(dataset):
    """Of data made by `numbered`: the ids in each batch, ascending."""
    return [
        sorted(int(i) for i, w in zip(y, weight) if w)
        for _, y, weight in dataset.as_numpy_iterator()
    ]


def numbered(n=30):
    return np.arange(1, n + 1, dtype=np.float32)[:, None], np.arange(n)


def records(n=30):
    return [{"image": np.full([2, 2], i + 1, np.uint8), "label": np.int64(i)} for i in range(n)]


def to_pair(record):
    return record["image"] / np.float32(255), record["label"]
