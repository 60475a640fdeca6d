"""Clients that are drawn for a round and do not take part, in simulations."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Union

import tensorflow as tf

from tf_adaptive_dp import checks

Dropout = Union[float, Callable[[str, int], bool], None]
ON_ERROR = ("raise", "drop")


def check_dropping(dropout: Dropout, on_client_error: str) -> None:
    """Raises TypeError or ValueError if an argument of `Dropping` is invalid."""
    checks.choice("on_client_error", on_client_error, ON_ERROR)
    if dropout is not None and not callable(dropout):
        checks.number("dropout", dropout, 0)
        if dropout >= 1:
            raise ValueError(
                f"`dropout` must be below 1, or nobody is left. Received: dropout={dropout!r}"
            )


class Dropping:
    """Decides which clients of a cohort drop out of a round.

    Guarantee: a client's dropping out depends on the client, its own data, the number of the round
    and a key, and on no other client. So the sum of a round is over the cohort, with zeros for
    those who dropped out: it has one term for each client, of norm at most C, which no other client
    changes. Sensitivity, noise, divisor and the sampling of the cohorts are as without dropping
    out, and so is ε. (Taking the first k clients that answer would be a different matter: who is
    among them depends on how fast the others are, so one client more would change two terms.)

    Args:
      dropout: the probability of dropping out of a round, in [0, 1), independently of everything;
        or a function from a client's id and the number of a round to whether it drops out, which
        must not look at other clients; `None` if no client does.
      on_client_error: `"raise"`, or `"drop"`: a client whose data set raises while it is made or
        read drops out. For this, each data set is read once before the round.
      key: the secret key of the run.

    Raises:
      TypeError, ValueError: if an argument is invalid.

    >>> dropping = Dropping(0.5, "raise", bytes(32))
    >>> dropping.left(["a", "b", "c", "d"], number=1, datasets=str.upper)
    (['a', 'c', 'd'], ['A', 'C', 'D'])
    """

    def __init__(self, dropout: Dropout, on_client_error: str, key: bytes):
        check_dropping(dropout, on_client_error)
        self._dropout = dropout
        self._reads = on_client_error == "drop"
        self._key = key

    @property
    def happens(self) -> bool:
        """Whether any client may drop out."""
        return self._reads or bool(self._dropout)

    def left(
        self, cohort: Sequence[str], number: int, datasets: Callable[[str], tf.data.Dataset]
    ) -> tuple[list[str], list[Any]]:
        """The clients of a cohort that take part, and their data sets.

        Args:
          cohort: the drawn clients.
          number: the number of the round.
          datasets: the data set of a client.
        """
        clients, data = [], []
        for client in cohort:
            if self._drops_out(client, number):
                continue
            try:
                found = datasets(client)
                if self._reads and isinstance(found, tf.data.Dataset):
                    for _ in found:
                        pass
            except Exception as error:
                if not self._reads:
                    raise
                why = f"{type(error).__name__}: {error}"
                warnings.warn(f"Client {client!r} drops out of round {number}: {why}", stacklevel=4)
                continue
            clients.append(client)
            data.append(found)
        return clients, data

    def _drops_out(self, client: str, number: int) -> bool:
        if callable(self._dropout):
            return bool(self._dropout(client, number))
        if not self._dropout:
            return False
        message = number.to_bytes(8, "little") + client.encode()
        digest = hashlib.blake2b(message, key=self._key, digest_size=8, person=b"dropout")
        return int.from_bytes(digest.digest(), "little") < self._dropout * 2.0**64
