"""Whose record each example is: the records of users, and how batches take some of each user's."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from tf_adaptive_dp import checks
from tf_adaptive_dp.sampling import draws

_HOW = (
    "Pass one id per example, in the order of the examples: an array of whole numbers or of "
    "strings. Ids only need to tell users apart."
)


class UserRecords:
    """The records of each user, from the ids of the users that examples belong to.

    Args:
      user_ids: [n], whole numbers or strings, one for each example.

    Attributes:
      num_users: the number of different ids.
      num_records: n.

    Raises:
      TypeError: if the ids are not whole numbers or strings.
      ValueError: if there are none, if an id is missing or masked, if examples have several ids, or
        if NumPy would take different ids for one.

    >>> records = UserRecords(["ann", "bob", "ann"])
    >>> records.num_users, records.num_records
    (2, 3)
    """

    def __init__(self, user_ids: Any):
        _, users = np.unique(checked_ids(user_ids), return_inverse=True)
        users = np.reshape(users, -1)
        self._users = users
        self._in_order = np.argsort(users, kind="stable")
        self._counts = np.bincount(users)
        self._first = np.cumsum(self._counts) - self._counts
        self.num_users, self.num_records = len(self._counts), len(users)

    def take(self, users: np.ndarray, most: int, random: np.random.Generator) -> np.ndarray:
        """Takes at most some records of each of several users.

        Guarantee: of a user with more records than `most`, each subset of that size is equally
        likely, whatever is taken of the others. The method is Floyd's, for all users at once.

        Args:
          users: [u], numbers of users.
          most: k.
          random: the generator.

        Returns:
          [u, k], indices of examples; -1 where a user has fewer.

        References:
          - Bentley and Floyd, "Programming Pearls: A Sample of Brilliance" (1987),
            Communications of the ACM 30(9).
        """
        counts = self._counts[users]
        taken = np.tile(np.arange(most), (len(users), 1))
        taken[taken >= counts[:, np.newaxis]] = -1
        large = np.flatnonzero(counts > most)
        for place in range(most):
            last = counts[large] - most + place
            one = random.integers(0, last + 1)
            is_taken = np.any(taken[large, :place] == one[:, np.newaxis], axis=1)
            taken[large, place] = np.where(is_taken, last, one)
        absent = taken < 0
        found = self._in_order[np.where(absent, 0, self._first[users][:, np.newaxis] + taken)]
        found[absent] = -1
        return found

    def place(
        self,
        sampling: draws.Sampling,
        step: int,
        key: bytes,
        gradient_accumulation_steps: int = 1,
        equal_rows: bool = True,
    ) -> np.ndarray:
        """The rows of the batch of a step: [parts, rows per part], with indices of examples.

        Each user of the draw has k neighboring rows. The user's records take the first of these.
        Padding is n or n + 1, chosen by a random bit, as for `Sampling.place`.

        Guarantee: that of `Sampling.place` for users. The records of a user depend on that user
        alone, and on random numbers of this step.

        Args:
          sampling: with `examples_per_user` k.
          step: the number of the step.
          key: 32 secret bytes.
          gradient_accumulation_steps: the number of parts; a user is in one of them.
          equal_rows: see `Sampling.place`.
        """
        k = sampling.examples_per_user or 1
        users = sampling.place(self.num_users, step, key, gradient_accumulation_steps, equal_rows)
        parts, places = users.shape
        users = users.reshape(-1)
        random = draws.generator(key, b"records", step)
        words = random.bit_generator.random_raw(-(-len(users) * k // 64))
        marks = np.unpackbits(words.view(np.uint8))[: len(users) * k]
        rows = self.num_records + marks.astype(np.int64).reshape(-1, k)
        drawn = np.flatnonzero(users < self.num_users)
        taken = self.take(users[drawn], k, random)
        rows[drawn] = np.where(taken < 0, rows[drawn], taken)
        return rows.reshape(parts, places * k)

    def shares(self) -> np.ndarray:
        """The share that each example has of its user, [n]: one over the user's number of examples.

        >>> UserRecords(["ann", "bob", "ann"]).shares().tolist()
        [0.5, 1.0, 0.5]
        """
        return 1 / self._counts[self._users]

    def fingerprint(self, salt: bytes) -> str:
        """A digest of who owns which example, to notice that it changed. It is NOT private.

        Guarantee: none. Anyone who has the digest and its salt can test a guess of the whole
        assignment. If BLAKE2b is secure, two assignments have the same digest if and only if they
        group the same examples under ids in the same order.

        Args:
          salt: 16 random bytes.
        """
        users = self._users.astype("<i8").tobytes()
        return hashlib.blake2b(users, digest_size=16, salt=salt).hexdigest()


def checked_ids(user_ids: Any) -> np.ndarray:
    """The ids of users as an array [n] of whole numbers or strings.

    Args:
      user_ids: see `UserRecords`.

    Raises:
      TypeError, ValueError: see `UserRecords`.
    """
    several = (
        "Each example must belong to one user. Received: {what}. If a record is about several "
        "people, as a message is, clipping the gradient of one of them protects none: removing "
        "another of them would change that gradient too. Drop such records: whether a record has "
        "several ids depends on the record alone, so dropping costs no privacy."
    )
    checks.not_masked("user_ids", user_ids)
    # NumPy would make strings of the numbers, and of the missing values, in a list of strings.
    ids = np.asarray(user_ids, None if hasattr(user_ids, "dtype") else object)
    if ids.ndim > 1:
        raise ValueError(several.format(what=f"`user_ids` of shape {ids.shape}"))
    if ids.ndim != 1 or not ids.size:
        raise ValueError(
            f"`user_ids` must have one entry for each example. {_HOW} Received: shape {ids.shape}"
        )
    if ids.dtype.kind == "O":
        for one in ids.flat:
            if isinstance(one, (list, tuple, set, frozenset, np.ndarray)):
                raise ValueError(several.format(what=f"the ids {one!r} of one example"))
        types = sorted({type(one).__name__ for one in ids.flat})
        if len(types) > 1:
            raise TypeError(
                f"`user_ids` must have one type. {_HOW} Records whose user is unknown cannot be "
                f"protected: drop them. Received: ids of types {', '.join(types)}"
            )
        _refuse_what_numpy_changes(ids)
        ids = np.array(ids.tolist())
    if ids.dtype.kind not in "iuSU":
        raise TypeError(
            f"`user_ids` must be whole numbers or strings. {_HOW} Records whose user is unknown "
            f"(NaN) cannot be protected: drop them. Received: ids of type {ids.dtype}"
        )
    if ids.dtype.kind in "SU" and np.any(ids == ids.dtype.type()):
        raise ValueError(
            "`user_ids` must name a user for each example. Records whose user is unknown cannot be "
            "protected: drop them. Received: an empty id"
        )
    return ids


def _refuse_what_numpy_changes(ids: np.ndarray) -> None:
    """Raises for Python's numbers and strings that an array of NumPy cannot hold as they are."""
    for one in ids.flat:
        if isinstance(one, int) and not -(2**63) <= one < 2**63:
            raise ValueError(
                "`user_ids` must be whole numbers of 64 bits with a sign, or strings: pass all ids "
                f"as strings if some are larger. Received: an id of {one.bit_length()} bits"
            )
        if isinstance(one, (str, bytes)) and one[-1:] in ("\0", b"\0"):
            raise ValueError(
                "`user_ids` must not end with a character of code 0, which NumPy cuts off: two "
                "users could become one. Received: such an id"
            )
