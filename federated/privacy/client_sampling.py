"""Draws the cohort of each round: a pure function of a secret key and the round's number."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from federated.privacy.user_level import UserLevelPrivacy
from tf_adaptive_dp import checks
from tf_adaptive_dp.accounting import composition
from tf_adaptive_dp.sampling import draws
from tf_adaptive_dp.sampling.fixed_order import FixedOrder
from tf_adaptive_dp.sampling.fixed_size import FixedSizeSampling
from tf_adaptive_dp.sampling.poisson import PoissonSampling
from tf_adaptive_dp.sampling.shuffled import ShuffledEpochs

__all__ = [
    "ClientSampler",
    "EveryClient",
    "FixedOrder",
    "FixedSizeSampling",
    "PoissonSampling",
    "ShuffledEpochs",
    "check_sampling",
]


@dataclasses.dataclass(frozen=True)
class EveryClient(draws.Sampling):
    """All clients take part in each round.

    Guarantee: (ε, δ)-DP for adding or removing one client, with the ε of `epsilon_spent`. Each
    round is the Gaussian mechanism without amplification.

    >>> EveryClient().draw(3, step=0, key=draws.new_key(seed=1))
    array([0, 1, 2])
    """

    label: ClassVar[str] = "every"
    steps = composition.MAX_RELEASES
    seed = None

    def expected_batch_size(self, num_examples: int) -> float:
        """The number of clients."""
        return float(num_examples)

    def draw(self, num_examples: int, step: int, key: bytes) -> np.ndarray:
        """All indices."""
        del step, key
        return np.arange(num_examples)

    def account(self, ledger: Any, num_examples: int, delta: float, accountant: str) -> float:
        """ε of a ledger, see the class."""
        return composition.epsilon_spent(ledger, num_examples, delta, accountant=accountant)


_SAMPLINGS = (PoissonSampling, FixedSizeSampling, ShuffledEpochs, FixedOrder, EveryClient)
# Fields that samplings did not have when the first runs and ledgers were saved.
_LATER = ("examples_per_user", "user_reduction")


def described(sampling: draws.Sampling) -> str:
    """Describes all parameters of a sampling that ε depends on, so everything but `steps`.

    Runs and ledgers hold this text, so it must not change: see `_LATER`.

    >>> described(FixedSizeSampling(2, steps=10))
    'FixedSizeSampling(batch_size=2, seed=None)'
    """
    if not dataclasses.is_dataclass(sampling):
        return repr(sampling)
    values = [
        f
        for f in dataclasses.fields(sampling)
        if f.name != "steps" and not (f.name in _LATER and getattr(sampling, f.name) == f.default)
    ]
    said = ", ".join(f"{f.name}={getattr(sampling, f.name)!r}" for f in values)
    return f"{type(sampling).__name__}({said})"


def _require_sampling(sampling: Any) -> None:
    """Raises TypeError if it is no sampling."""
    if not isinstance(sampling, draws.Sampling):
        raise TypeError(
            "`sampling` must be a `PoissonSampling`, `FixedSizeSampling`, `ShuffledEpochs`, "
            "`FixedOrder` or `EveryClient`, such as `sampler.sampling` of a `ClientSampler`. "
            f"Received: sampling={sampling!r}"
        )


def check_sampling(privacy: UserLevelPrivacy, sampling: draws.Sampling) -> None:
    """Checks that a sampling draws the cohorts that the privacy is stated for.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if the expected size of a cohort is not `privacy.clients_per_round`, if a client
        could take part twice in a pass of the tree mechanism, or sooner or more often than banded
        noise is stated for.
    """
    checks.instance("privacy", privacy, UserLevelPrivacy)
    _require_sampling(sampling)
    if sampling.examples_per_user is not None:
        raise ValueError(
            "Here the clients are the users, and each takes part as a whole: leave out "
            f"`examples_per_user`. Received: sampling={sampling!r}"
        )
    if privacy.mechanism == "tree" and not isinstance(sampling, (ShuffledEpochs, EveryClient)):
        raise ValueError(
            "With mechanism='tree', each client may take part at most once per pass: use "
            f"`ShuffledEpochs`. Received: sampling={sampling!r}"
        )
    if privacy.mechanism == "banded":
        _check_separation(privacy, sampling)
    expected = sampling.expected_batch_size(privacy.total_clients)
    if not math.isclose(expected, privacy.clients_per_round, rel_tol=1e-9):
        raise ValueError(
            f"The sampling draws {expected!r} of {privacy.total_clients} clients per round, but "
            f"the privacy is stated for clients_per_round={privacy.clients_per_round!r}, which "
            f"divides the noise and determines ε. Received: sampling={sampling!r}"
        )


def _check_separation(privacy: UserLevelPrivacy, sampling: draws.Sampling) -> None:
    """Raises ValueError if a sampling does not separate the rounds of a client as stated."""
    if not isinstance(sampling, FixedOrder):
        why = "it does not keep the rounds of a client apart"
        if isinstance(sampling, ShuffledEpochs):
            why = (
                "it draws a new order for each pass, so a client of the last round of a pass may "
                "come again in the next round"
            )
        raise ValueError(
            "With mechanism='banded', each client may take part at most once in any "
            f"{privacy.min_separation} rounds in a row. Use `ClientSampler.fixed_order`, or "
            f"`FixedOrder`, whose passes all have the same order: of this sampling, {why}. "
            f"Received: sampling={sampling!r}"
        )
    separation = sampling.separation(privacy.total_clients)
    if separation < (privacy.min_separation or 1):
        raise ValueError(
            f"The sampling brings a client back after {separation} rounds, but the privacy is "
            f"stated for min_separation={privacy.min_separation!r}. Let its `batch_size` be "
            f"`clients_per_round`. Received: sampling={sampling!r}"
        )
    times = -(-sampling.steps // separation)
    if privacy.max_participations is not None and times > privacy.max_participations:
        raise ValueError(
            f"In {sampling.steps} rounds a client takes part up to {times} times, but the privacy "
            f"is stated for max_participations={privacy.max_participations!r}. Lower the `steps` "
            f"of the sampling to {separation * privacy.max_participations} at most, or raise "
            f"`max_participations`. Received: sampling={sampling!r}"
        )


def distinct_client_ids(client_ids: Sequence[str]) -> tuple[str, ...]:
    """Client ids, each of which is listed once: one that is listed twice would count twice.

    Raises:
      TypeError, ValueError: if they are not distinct strings, at least one.
    """
    found = checks.strings("client_ids", client_ids)
    if not found or len(set(found)) < len(found):
        raise ValueError(
            "`client_ids` must be at least one, and all different: a client that is listed twice "
            f"would count twice. Received: {len(found)} ids, {len(set(found))} distinct"
        )
    return found


class ClientSampler:
    """Draws the cohort of each round.

    Guarantee: that of the sampling, with clients instead of examples, if the key stays secret. The
    ids are sorted, so their order does not matter: the same ids and key give the same cohorts.
    Cohorts do not depend on data. Under Poisson sampling a cohort may be empty; run that round like
    any other.

    Args:
      client_ids: the ids of all clients.
      sampling: a `PoissonSampling`, `FixedSizeSampling`, `ShuffledEpochs`, `FixedOrder` or
        `EveryClient`.
      key: 32 secret bytes. `None` creates a new key (from the sampling's seed if it has one), and
        `federated.train` creates a new key for each run. To continue with your own rounds, pass the
        same `key` again. With the tree mechanism and with banded noise the guarantee requires it:
        another key could draw a client twice in one pass.

    Attributes:
      client_ids: the sorted ids, a tuple.
      sampling: the sampling.
      key: the key. Anyone who knows it knows which clients took part in which round.

    Raises:
      TypeError, ValueError: if the ids are not distinct strings, or another argument is invalid.

    >>> sampler = ClientSampler(["b", "c", "a"], FixedSizeSampling(2, steps=10, seed=1))
    >>> sampler.cohort(0)
    ['a', 'c']
    """

    def __init__(
        self, client_ids: Sequence[str], sampling: draws.Sampling, key: bytes | None = None
    ):
        if hasattr(client_ids, "client_ids"):
            raise TypeError(
                "`client_ids` must be a list of strings: pass `client_data.client_ids`. Received: "
                f"client_ids of type {type(client_ids).__name__}"
            )
        self.client_ids = tuple(sorted(distinct_client_ids(client_ids)))
        _require_sampling(sampling)
        size = getattr(sampling, "batch_size", 0)
        if size > len(self.client_ids):
            raise ValueError(
                "A cohort cannot be larger than the number of clients. Received: "
                f"sampling={sampling!r} and {len(self.client_ids)} clients"
            )
        if key is not None:
            draws.check_key(key)
        self.sampling = sampling
        self.key = draws.new_key(sampling.seed) if key is None else key
        self._key_was_passed = key is not None

    @classmethod
    def poisson(
        cls,
        client_ids: Sequence[str],
        privacy: UserLevelPrivacy,
        num_rounds: int,
        key: bytes | None = None,
        max_clients: int | None = None,
    ) -> ClientSampler:
        """Makes a sampler of Poisson cohorts with q = clients_per_round / total_clients.

        Args:
          client_ids: see the class.
          privacy: the privacy of the rounds.
          num_rounds: the number of rounds of the whole run, failed rounds included.
          key: see the class.
          max_clients: the largest cohort; larger draws are subsampled uniformly to this size, and δ
            accounts for that (see `PoissonSampling`). If ε is large, hardly any draw may be cut.
            `None` keeps all drawn clients.

        >>> privacy = UserLevelPrivacy(1.0, 2, 4, clip=1.0)
        >>> sampler = ClientSampler.poisson(["a", "b", "c", "d"], privacy, num_rounds=10)
        >>> sampler.sampling.sampling_probability
        0.5
        """
        checks.instance("privacy", privacy, UserLevelPrivacy)
        checks.integer("num_rounds", num_rounds, 1)
        rows = privacy.total_clients + 1
        if max_clients is not None:
            rows = checks.integer("max_clients", max_clients, 1)
        probability = privacy.clients_per_round / privacy.total_clients
        sampling = PoissonSampling(probability, rows, num_rounds)
        return cls(client_ids, sampling, key).checked(privacy)

    @classmethod
    def fixed_order(
        cls,
        client_ids: Sequence[str],
        privacy: UserLevelPrivacy,
        num_rounds: int,
        key: bytes | None = None,
    ) -> ClientSampler:
        """Makes a sampler of passes over the clients, all in the same random order.

        A pass has floor(total_clients / clients_per_round) rounds; the clients that are left over
        never take part. A client takes part in every round of its place in the pass.

        Guarantee: with banded noise, that the cohorts are as far apart as the privacy says (see
        `checked`).

        Args:
          client_ids: see the class.
          privacy: the privacy of the rounds, of whole `clients_per_round`.
          num_rounds: the number of rounds of the whole run.
          key: see the class. ε does not need it to be secret.

        >>> privacy = UserLevelPrivacy(1.0, 2, 4, clip=1.0, mechanism="banded", bands=2)
        >>> sampler = ClientSampler.fixed_order(list("abcd"), privacy, 10, key=bytes(32))
        >>> sampler.cohort(0) == sampler.cohort(2) == sampler.cohort(8)
        True
        """
        checks.instance("privacy", privacy, UserLevelPrivacy)
        checks.integer("num_rounds", num_rounds, 1)
        size = checks.integer("clients_per_round", privacy.clients_per_round, 1)
        return cls(client_ids, FixedOrder(size, num_rounds), key).checked(privacy)

    def for_new_run(self) -> ClientSampler:
        """A sampler for rounds that are not a continuation of earlier ones.

        Returns:
          One with a new key, so that the cohorts of different runs are independent, as they have to
          be where their ε are added. With a key that was passed: itself.
        """
        if self._key_was_passed:
            return self
        return ClientSampler(self.client_ids, self.sampling)

    @property
    def rounds_per_pass(self) -> int:
        """The number of rounds after which a pass ends; 1 for samplings without passes."""
        if isinstance(self.sampling, (ShuffledEpochs, FixedOrder)):
            return len(self.client_ids) // self.sampling.batch_size
        return 1

    @property
    def order(self) -> str | None:
        """A hash of key and clients, which determine the order of all passes; else `None`.

        It says nothing of the order to anyone who does not know the key.
        """
        if not isinstance(self.sampling, (ShuffledEpochs, FixedOrder)):
            return None
        clients = "\0".join(self.client_ids).encode()
        return hashlib.blake2b(clients, key=self.key, digest_size=16, person=b"order").hexdigest()

    def checked(self, privacy: UserLevelPrivacy) -> ClientSampler:
        """Returns this sampler if it draws the cohorts that the privacy is stated for.

        Raises:
          TypeError, ValueError: if it does not (see `check_sampling`), or if the number of clients
            is not `privacy.total_clients`. With banded noise, all cohorts are drawn to see that
            each client comes as seldom as the privacy says. With it and with the tree mechanism,
            only cohorts that this library draws are accepted.
        """
        check_sampling(privacy, self.sampling)
        if len(self.client_ids) != privacy.total_clients:
            raise ValueError(
                "`total_clients` must be the number of clients that cohorts are drawn from. "
                f"Received: total_clients={privacy.total_clients!r}, "
                f"{len(self.client_ids)} client ids"
            )
        if privacy.mechanism == "banded":
            self._check_cohorts(privacy)
        if privacy.mechanism != "gaussian" and not self.draws_as_described:
            raise TypeError(
                f"With mechanism={privacy.mechanism!r}, ε holds only if each client comes as "
                "seldom as the sampling says. Use `ClientSampler` and a sampling of this library "
                "as they are; clients that are not available may drop out of a round. Received: "
                f"{type(self).__name__}(sampling={self.sampling!r})"
            )
        return self

    @property
    def draws_as_described(self) -> bool:
        """Whether this library's own code draws the cohorts, as `sampling` describes them.

        Of cohorts that a subclass draws in another way, statements say that nobody verified them.
        """
        own = type(self).cohort is ClientSampler.cohort and "cohort" not in vars(self)
        return own and type(self.sampling) in _SAMPLINGS

    def _check_cohorts(self, privacy: UserLevelPrivacy) -> None:
        """Draws all cohorts, and raises ValueError if a client comes too soon or too often."""
        nearest, times = self._returns()
        most = privacy.max_participations
        if nearest < (privacy.min_separation or 1) or (most is not None and times > most):
            raise ValueError(
                "The cohorts of the sampler must be as far apart as the privacy says: draw them by "
                f"`FixedOrder` itself. Received: a client comes back after {nearest} rounds, and "
                f"up to {times} times, min_separation={privacy.min_separation!r}, "
                f"max_participations={most!r}, sampling={self.sampling!r}"
            )

    def _returns(self) -> tuple[float, int]:
        """After how many rounds a client comes back, at least, and how often one comes, at most."""
        count = len(self.client_ids)
        index = {client: number for number, client in enumerate(self.client_ids)}
        last, times, nearest = np.full(count, -math.inf), np.zeros(count, int), math.inf
        for step in range(self.sampling.steps):
            # Not `sampling.draw`: a subclass may take other clients.
            drawn = np.array([index[c] for c in self.cohort(step) if c in index], int)
            # A client that is in one cohort twice comes back at once.
            if len(np.unique(drawn)) < len(drawn):
                return 0, int(times.max()) + 2
            nearest = min(nearest, float((step - last[drawn]).min(initial=math.inf)))
            last[drawn] = step
            times[drawn] += 1
        return nearest, int(times.max())

    def cohort(self, round_num: int) -> list[str]:
        """Returns the clients of a round.

        Args:
          round_num: the number of the round, from 0 and below `sampling.steps`. With the Gaussian
            mechanism, never use a number twice: a failed round counts, and the next round takes the
            next number. With the tree mechanism and with banded noise, pass the number of rounds
            that the process's state results from.

        Returns:
          Distinct client ids; the empty list if no client was drawn.

        Raises:
          TypeError, ValueError: if there is no such round.
        """
        if isinstance(round_num, bool) or not isinstance(round_num, (int, np.integer)):
            raise TypeError(
                f"`round_num` must be a whole number. Received: round_num={round_num!r}"
            )
        if not 0 <= round_num < self.sampling.steps:
            raise ValueError(
                f"`round_num` must be at least 0 and below {self.sampling.steps}, the `steps` of "
                f"the sampling. Received: round_num={round_num!r}"
            )
        drawn = self.sampling.draw(len(self.client_ids), int(round_num), self.key)
        return [self.client_ids[index] for index in drawn]
