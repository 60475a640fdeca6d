"""ε for one user of the rounds in a ledger, and the privacy statement to publish."""

from __future__ import annotations

import math

import dp_accounting

from federated.privacy.client_sampling import EveryClient, check_sampling, described
from federated.privacy.user_ledger import UserLedger
from tf_adaptive_dp import checks, statement
from tf_adaptive_dp.accounting.accountants import Counts, composed_epsilon
from tf_adaptive_dp.accounting.composition import epsilon_without_amplification
from tf_adaptive_dp.accounting.noise_strategies import BandedNoise
from tf_adaptive_dp.accounting.releases import Releases
from tf_adaptive_dp.sampling import draws
from tf_adaptive_dp.sampling.shuffled import ShuffledEpochs
from tf_adaptive_dp.statement import Unit
from tf_adaptive_dp.wording import format_delta, format_epsilon, joined, list_item, paragraph

__all__ = ["UserLedger", "epsilon_spent", "privacy_statement"]

USER = Unit(
    one="user",
    a="a user",
    batch="cohort",
    batches="cohorts",
    release="noisy average of client updates",
    releases="noisy averages of client updates",
    others="averages",
    whole="all data of some users",
    largest="max_clients",
)

_PROTECTED = """\
Protected: every noisy average that was released, and therefore the weights of the server's model
after every round, and anything computed from them without further access to the users' data."""
_STATE_PROTECTED = """\
The state of the process is protected as well. The key of the sampler and the clients' statistics,
which a run keeps in its folder `secret`, are not."""
_STATE_NOT_PROTECTED = """\
The state of the process and its checkpoints are NOT protected: they contain the noise of the tree.
Keep them as secret as the data, and publish only the model weights."""
_BANDED_STATE_NOT_PROTECTED = """\
The state of the process and its checkpoints are NOT protected: they contain noise that later rounds
cancel. Keep them as secret as the data, and publish only the model weights."""

_DROPPED = """\
Users who were drawn could drop out of a round. Their number is not stated, since it depends on who
was there. Each counts as a user who sends zeros: the sums were divided by the expected size of the
drawn cohorts, and epsilon is for these."""

_RELEASES_UNKNOWN = """\
Nobody verified that the process kept and released nothing else about the users: its rounds were not
a TensorFlow Federated computation that the library could read. This epsilon holds only if it did
not."""

_NOT_PROTECTED = """\
Not protected: what TFF reports about the clients' training without noise ("client_work": losses,
accuracy, statistics of the client optimizer); the exact size and the members of each cohort;
statistics and vocabularies computed from the users' data beforehand (`adapt`); the choice of
hyperparameters, if they were tuned on the private data; and the number of users, which is treated
as public. The server adds the noise: nothing protects users from the server or from the
workers that train for the clients."""

_WHOLE_USER = (
    """This epsilon covers all data of a user, provided that each user is exactly one client."""
)


ACCOUNTANTS = ("tightest", "rdp", "pld")


def epsilon_spent(
    ledger: UserLedger, delta: float, *, sampling: draws.Sampling, accountant: str = "tightest"
) -> float:
    """Computes the ε of all rounds in a ledger, for one user.

    Guarantee: (ε, δ)-DP for
    - `PoissonSampling`: adding or removing one user; cohorts that are cut use up part of δ;
    - `EveryClient`: adding or removing one user, without amplification;
    - `FixedSizeSampling`: replacing one user by another;
    - `ShuffledEpochs` with mechanism="gaussian": an approximation, see `privacy_statement` for the
      proven bound;
    - `ShuffledEpochs` or `EveryClient` with mechanism="tree": replacing one user by one who sends
      zeros, if each user was in at most one cohort per pass. A tree of `steps` rounds is
      `dp_accounting.SingleEpochTreeAggregationDpEvent`: the Gaussian mechanism with noise
      multiplier z / √⌈log₂(steps + 1)⌉;
    - `FixedOrder` with mechanism="banded": replacing one user by one who sends zeros, if each user
      was in at most one of any `min_separation` cohorts in a row. A sequence of T rounds is one
      Gaussian mechanism with noise multiplier z divided by the sensitivity s of
      `accounting.noise_strategies`, at most √(number of participations). Several sequences (lost
      rounds, rounds that were run again) are one with √(Σ s²).

    Args:
      ledger: the ledger of the run.
      delta: δ, in (0, 1); should be well below 1 / number of users.
      sampling: the sampling of the cohorts, such as `ClientSampler.sampling`.
      accountant: `"rdp"`, `"pld"`, or `"tightest"`, the smaller ε of both. Each is a bound, so the
        smaller one is too. PLD knows all samplings and trees; where it would take minutes, for δ
        below 1e-9, and for side information released by an event that it does not support, the ε of
        RDP is the only one.

    Returns:
      ε ≥ 0; 0.0 before the first round, `math.inf` if something was released without noise.

    Raises:
      TypeError, ValueError: if an argument is invalid, or the sampling contradicts the ledger's
        privacy.
      dp_accounting.UnsupportedEventError: if the accountant does not support the release of the
        side information.

    Example:
      >>> from federated.privacy.client_sampling import PoissonSampling
      >>> from federated.privacy.user_level import UserLevelPrivacy
      >>> ledger = UserLedger(UserLevelPrivacy(1.0, 100, 10_000, clip=1.0))
      >>> ledger.record_lost(1000)
      >>> sampling = PoissonSampling.for_batch_size(100, 10_000, steps=1000)
      >>> round(epsilon_spent(ledger, 1e-5, sampling=sampling), 3)
      1.828
      >>> round(epsilon_spent(ledger, 1e-5, sampling=sampling, accountant="rdp"), 3)
      2.101
    """
    return _spent(ledger, delta, sampling, accountant)[0]


def _spent(
    ledger: UserLedger, delta: float, sampling: draws.Sampling, accountant: str
) -> tuple[float, str]:
    """ε, and the accountant that gave it."""
    _check(ledger, sampling)
    checks.choice("accountant", accountant, ACCOUNTANTS)
    if accountant != "tightest":
        return _by(ledger, delta, sampling, accountant), accountant
    by_rdp = _by(ledger, delta, sampling, "rdp")
    try:
        by_pld = _by(ledger, delta, sampling, "pld")
    except dp_accounting.UnsupportedEventError:
        return by_rdp, "rdp"
    return (by_pld, "pld") if by_pld < by_rdp else (by_rdp, "rdp")


def _by(ledger: UserLedger, delta: float, sampling: draws.Sampling, accountant: str) -> float:
    if ledger.is_tree:
        return _epsilon_of_trees(ledger, delta, accountant)
    if ledger.is_banded:
        return _epsilon_of_sequences(ledger, delta, accountant)
    clients = ledger.privacy.total_clients
    return sampling.epsilon_spent(_releases(ledger), clients, delta, accountant=accountant)


def _releases(ledger: UserLedger) -> Releases:
    """A ledger without its unit, for functions that are told the number of users."""
    return Releases(ledger.segments, ledger.other_events)


def privacy_statement(
    ledger: UserLedger, delta: float, *, sampling: draws.Sampling, accountant: str = "tightest"
) -> str:
    """Describes the user-level privacy of a run in a text to publish with the model.

    Guarantee: the text states the ε of `epsilon_spent`, rounded up. For shuffled cohorts under the
    Gaussian mechanism it also states the bound without amplification by sampling. It names the unit
    (one user with all data), the adjacency, the sampling, what is protected and what is not, and
    the side information with its provenance.

    Args:
      ledger: the ledger of the run.
      delta: δ, in (0, 1).
      sampling: the sampling of the cohorts.
      accountant: see `epsilon_spent`. The text names the one whose ε it states.

    Returns:
      Paragraphs of at most 80 columns.

    Raises:
      TypeError, ValueError, dp_accounting.UnsupportedEventError: as `epsilon_spent`.

    Example:
      >>> from federated.privacy.user_level import UserLevelPrivacy
      >>> ledger = UserLedger(UserLevelPrivacy(4.0, 10, 10, clip=1.0))
      >>> ledger.record_lost(20)
      >>> text = privacy_statement(ledger, 1e-2, sampling=EveryClient())
      >>> print("".join(text.splitlines(keepends=True)[:4]))
      Differential privacy with epsilon = 2.6937 and delta = 0.01 (PLD accounting,
      rounded up). Unit: one user. Adjacency: data sets that differ by adding or
      removing one user. Every user was in the cohort of every round: this epsilon is
      a proven upper bound without amplification by sampling.
      <BLANKLINE>
    """
    spent, accountant = _spent(ledger, delta, sampling, accountant)
    clients, events = ledger.privacy.total_clients, ledger.non_tree_events
    if not ledger.num_releases and not events:
        return paragraph(statement.NOTHING_RELEASED)
    released = statement.list_of_releases(ledger.segments, events, clients, USER)
    released += _list_of_trees(ledger) + _list_of_sequences(ledger)
    dropped = paragraph(_DROPPED) if ledger.clients_may_drop_out else ""
    unknown = paragraph(_RELEASES_UNKNOWN) if ledger.releases_unknown else ""
    information = statement.side_information_paragraph(ledger.side_information, events)
    if math.isinf(spent):
        why = statement.why_not_private(ledger.segments, events, sampling, USER)
        return joined([why, released, information])
    state = {"tree": _STATE_NOT_PROTECTED, "banded": _BANDED_STATE_NOT_PROTECTED}.get(
        ledger.privacy.mechanism, _STATE_PROTECTED
    )
    return joined(
        [
            _claim(ledger, spent, delta, sampling, accountant),
            statement.delta_warning(delta, clients, USER, may_be_secure=False),
            released,
            dropped,
            information,
            unknown,
            paragraph(f"{_PROTECTED} {state}"),
            paragraph(_NOT_PROTECTED),
            paragraph(_WHOLE_USER),
        ]
    )


def _check(ledger: UserLedger, sampling: draws.Sampling) -> None:
    if not isinstance(ledger, UserLedger):
        raise TypeError(
            "`ledger` must be a `UserLedger`, such as `trained.ledger` of what `federated.train` "
            f"returns. Received: ledger of type {type(ledger).__name__}"
        )
    check_sampling(ledger.privacy, sampling)
    check_drawn(ledger, sampling)
    longest = max(ledger.sequences, default=0)
    if longest > sampling.steps:
        raise ValueError(
            f"The ledger holds {longest} rounds in a row, but the sampling draws only "
            f"{sampling.steps} cohorts. Let `steps` be the number of rounds of the whole run. "
            f"Received: sampling={sampling!r}"
        )


def check_drawn(ledger: UserLedger, sampling: draws.Sampling) -> None:
    """Raises ValueError if the ledger records that another sampling drew the cohorts."""
    if ledger.sampling not in (None, described(sampling)):
        raise ValueError(
            "The rounds in `ledger` have cohorts that were drawn in another way: their ε cannot be "
            f"computed for this `sampling`. Received: sampling={sampling!r}, the rounds were drawn "
            f"by {ledger.sampling}"
        )


def _epsilon_of_trees(ledger: UserLedger, delta: float, accountant: str) -> float:
    counts: Counts = {}
    for steps, count in ledger.trees.items():
        # ⌈log₂(steps + 1)⌉ nodes, at most, have one leaf of the tree below them.
        release = (ledger.privacy.noise_multiplier / math.sqrt(steps.bit_length()), 1.0)
        counts[release] = counts.get(release, 0) + count
    return composed_epsilon(counts, ledger.non_tree_events, delta, accountant)


def _epsilon_of_sequences(ledger: UserLedger, delta: float, accountant: str) -> float:
    counts: Counts = {}
    if ledger.sequences:
        counts[ledger.privacy.noise_multiplier / ledger.banded_sensitivity, 1.0] = 1
    return composed_epsilon(counts, ledger.non_tree_events, delta, accountant)


def _claim(
    ledger: UserLedger, spent: float, delta: float, sampling: draws.Sampling, accountant: str
) -> str:
    start = (
        f"Differential privacy with epsilon = {format_epsilon(spent)} and delta = "
        f"{format_delta(delta)} ({accountant.upper()} accounting, rounded up). Unit: one user. "
        "Adjacency: data sets"
    )
    if ledger.is_tree:
        return paragraph(
            f"{start} in which one user's updates are replaced by zeros. The noise was added by "
            "tree aggregation (DP-FTRL). This epsilon is a proven upper bound for any order of the "
            "users if each user was in at most one cohort per pass. It does not rely on secret "
            "sampling."
        )
    if ledger.privacy.strategy is not None:
        return _claim_of_sequences(ledger, start, ledger.privacy.strategy)
    if isinstance(sampling, EveryClient):
        return paragraph(
            f"{start} that differ by adding or removing one user. Every user was in the cohort of "
            "every round: this epsilon is a proven upper bound without amplification by sampling."
        )
    clients = ledger.privacy.total_clients
    unamplified = math.nan
    if isinstance(sampling, ShuffledEpochs):
        unamplified = epsilon_without_amplification(
            _releases(ledger), clients, delta, accountant=accountant
        )
    return statement.claim(
        spent,
        unamplified,
        delta=delta,
        accountant=accountant,
        sampling=sampling,
        num_examples=clients,
        unit=USER,
        num_unchecked=ledger.num_releases - ledger.rounds_drawn,
    )


def _claim_of_sequences(ledger: UserLedger, start: str, strategy: BandedNoise) -> str:
    most = ledger.privacy.max_participations
    often = "" if most is None else f" and in at most {most} of a run's cohorts"
    if sum(ledger.sequences.values()) > 1:  # lost rounds are repeated with the same users
        often += ", apart from repetitions of lost rounds, which this epsilon includes"
    return paragraph(
        f"{start} in which one user's updates are replaced by zeros. The noise of each round "
        f"canceled {strategy.taken_back} (banded matrix factorization). This epsilon is a "
        "proven upper bound for any order of the users if each user was in at most one of any "
        f"{ledger.privacy.min_separation} cohorts in a row{often}. It does not rely on secret "
        "sampling."
    )


def _averages(number: int) -> str:
    return f"{number} noisy {'average' if number == 1 else 'averages'} of client updates"


def _list_of_trees(ledger: UserLedger) -> str:
    privacy = ledger.privacy
    return "".join(
        list_item(
            f"{count} {'tree' if count == 1 else 'trees'} of {_averages(steps)}, with noise "
            f"multiplier {privacy.noise_multiplier:g} at each node and "
            f"{privacy.clients_per_round:g} of {privacy.total_clients} users per cohort"
        )
        for steps, count in ledger.trees.items()
    )


def _list_of_sequences(ledger: UserLedger) -> str:
    privacy = ledger.privacy
    return "".join(
        list_item(
            f"{count} {'sequence' if count == 1 else 'sequences'} of {_averages(rounds)}, with "
            f"noise of {privacy.bands} bands, noise multiplier "
            f"{privacy.noise_multiplier:g} and {privacy.clients_per_round:g} of "
            f"{privacy.total_clients} users per cohort, any two cohorts of a user at least "
            f"{privacy.min_separation} rounds apart: one user moves it by at most "
            f"{privacy.sensitivity(rounds):.4g} times the clip"
        )
        for rounds, count in ledger.sequences.items()
    )
