"""Poisson sampling, and the cost of limiting the size of a batch."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, Callable, ClassVar, TypeVar

import dp_accounting
import numpy as np
from scipy import stats

from tf_adaptive_dp import checks
from tf_adaptive_dp.accounting import composition
from tf_adaptive_dp.accounting.noise_strategies import NoiseStrategy
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.sampling import draws
from tf_adaptive_dp.wording import counted

REDUCTIONS = ("mean", "sum")
# Where batches differ in their number of rows, they have at least this many places, and this many
# empty ones if B permits: enough random bits that the optimizer can tell draws apart. The number of
# places is a multiple of 8, which suits vector instructions.
_LEAST_PLACES, _LEAST_EMPTY, _STEP_OF_PLACES = 40, 12, 8
# Upper bound on the probability that a run is refused because padding had no marks by chance.
_FALSE_ALARM = 1e-12
_Kind = TypeVar("_Kind", bound="RandomSizes")


class RandomSizes(draws.Sampling):
    """A sampling whose batches vary in size, up to B = `max_batch_size`, and are padded.

    A larger draw is subsampled uniformly to B; see `PoissonSampling` for what that costs.

    Attributes:
      max_batch_size: B, at least 1.
      share: the probability that an example joins a given batch, before anything was drawn.
    """

    max_batch_size: int
    # How many of the random signs in the padding of a batch are chosen to show its step.
    _bits_of_step: ClassVar[int] = 0

    @property
    @abc.abstractmethod
    def share(self) -> float:
        """The probability that an example joins a given batch, before anything was drawn."""

    @abc.abstractmethod
    def _epsilon(self, ledger: Any, num_examples: int, delta: float, accountant: str) -> float:
        """ε of a ledger, without the cost of truncation."""

    @property
    def rows(self) -> int:
        """Number of rows of an undivided batch, padding included."""
        return self.rows_per_batch()

    def rows_per_batch(self, gradient_accumulation_steps: int = 1) -> int:
        """The number of rows of each part of a batch, padding included."""
        gradient_accumulation_steps = checks.integer(
            "gradient_accumulation_steps", gradient_accumulation_steps, 1
        )
        places = -(-self.max_batch_size // gradient_accumulation_steps)
        return places * (self.examples_per_user or 1)

    def expected_batch_size(self, num_examples: int) -> float:
        """`share` · num_examples, which the optimizer's `expected_batch_size` must equal."""
        return self.share * checks.integer("num_examples", num_examples, 1)

    def equivalent_sensitivity(self, noise: NoiseStrategy, num_examples: int) -> float:
        """About the sensitivity of one Gaussian mechanism that spends as much as all steps."""
        del noise, num_examples
        return self.share * math.sqrt(self.steps)

    def describe(self, num_examples: int, epochs: int) -> list[str]:
        """See `Sampling.describe`."""
        size = self.expected_batch_size(num_examples)
        room = counted(self.max_batch_size, self.unit)
        if self.examples_per_user is not None:
            each = counted(self.examples_per_user, "row")
            room += f" with {each} each ({counted(self.rows, 'row')})"
        rows = f"Batches average {size:g} {self.unit}{'s' * (size != 1)}, with room for {room}"
        rows += ", since their sizes are random"
        batches = counted(self.steps // epochs, "Poisson batch", "Poisson batches")
        steps = f"{counted(self.steps, 'step')}: {counted(epochs, 'epoch')} of {batches}"
        return [steps, rows]

    def failure_probability(self, num_examples: int) -> float:
        """η / T: the probability that one example is drawn together with at least B others."""
        num_examples = checks.integer("num_examples", num_examples, 1)
        tail = stats.binom.sf(self.max_batch_size - 1, num_examples, self.share)
        return float(self.share * tail)

    def delta_for_noise(
        self, epsilon: float, num_examples: int, delta: float, releases: int | None = None
    ) -> float:
        """δ₀ = δ - e^ε·η, the part of δ that truncation leaves, e.g. for `noise_multiplier_for`.

        Args:
          epsilon: the ε of the final guarantee.
          num_examples: number of examples in the training set, a public constant.
          delta: the δ of the final guarantee.
          releases: T; by default `steps`.

        Returns:
          δ₀; zero or less if truncation alone uses up δ.
        """
        releases = self.steps if releases is None else checks.integer("releases", releases, 0)
        delta = checks.probability("delta", delta)
        return self._delta_left(checks.number("epsilon", epsilon, 0), num_examples, delta, releases)

    def _delta_left(self, epsilon: float, num_examples: int, delta: float, releases: int) -> float:
        """`delta_for_noise`, also of an infinite ε."""
        failure = releases * self.failure_probability(num_examples)
        return delta - failure * math.exp(min(epsilon, 700.0)) if failure else delta

    def check_delta(self, num_examples: int, delta: float) -> None:
        """Raises ValueError if overflow alone uses up δ before the last step."""
        if self.delta_for_noise(0.0, num_examples, delta) <= 0:
            raise ValueError(
                "Batches overflow so often that ε is infinite at this `delta`. Make "
                f"`max_batch_size` larger; `{type(self).__name__}.for_batch_size` finds one. "
                "Received: "
                f"delta={delta!r}, sampling={self!r}"
            )

    def as_drawn(self: _Kind, ledger: Any) -> _Kind:
        """See `Sampling.as_drawn`.

        The later batches of a run that is made longer may have more room than its first ones. Less
        room means more truncation, and ε counts as if all batches had the smaller room.
        """
        rows = getattr(ledger, "rows_per_batch", 0)  # 0 before the first batch
        if not rows:
            return self
        parts = ledger.parts_per_batch
        if rows >= self.rows_per_batch(parts):
            return self
        # Each part has room for ceil(B / parts), so B was at least this.
        room = (rows // (self.examples_per_user or 1) - 1) * parts + 1
        own: Any = self
        drew: _Kind = dataclasses.replace(own, max_batch_size=max(room, 1))
        return drew

    def check_ledger(self, ledger: Any, num_examples: int) -> None:
        """Raises ValueError if a ledger or an optimizer contradicts the sampling."""
        refuse_microbatches(ledger)
        # Padding that counts as examples makes batches look too large as well.
        self._refuse_lost_marks(ledger, num_examples)
        self._refuse_large_batches(ledger, num_examples)
        super().check_ledger(ledger, num_examples)

    def _refuse_lost_marks(self, ledger: Any, num_examples: int) -> None:
        """Raises if an optimizer was given these batches without their sample weights.

        Their padding counts as examples then, and an example that joins a batch replaces padding,
        which moves the sum by up to 2C.
        """
        seen = getattr(ledger, "batches_seen", None)
        if seen is None or seen.marked == seen.numbered:
            return
        parts, missing = ledger.parts_per_batch, seen.numbered - seen.marked
        # Where there is less room, more batches have no padding that could be marked.
        by_chance = self.as_drawn(ledger)._probability_of_no_marks(num_examples, parts)
        batches = [-(-count // parts) for count in (missing, seen.numbered)]
        if stats.binom.sf(batches[0] - 1, batches[1], by_chance) < _FALSE_ALARM:
            raise NotPrivateError(
                f"{missing} of {seen.numbered} batches reached the optimizer without the sample "
                "weights that `poisson_batches` gives them, so their padding would count as "
                "examples, and epsilon does not hold. Pass the weights on unchanged: a `map` must "
                "return them, and a step of your own must multiply the losses by them. If the "
                "batches were drawn in another way, say so with a label: `sampling='shuffled'` for "
                "those of `model.fit(x, y)`. A model that is trained by a plan needs `plan.fit`, "
                f"from new weights. Received: sampling={self!r}"
            )

    def _refuse_large_batches(self, ledger: Any, num_examples: int) -> None:
        """Raises if a ledger saw more examples than these batches hold, although L is right."""
        expected = self.expected_batch_size(num_examples)
        for segment, known in composition.checks_of(ledger, num_examples, correlated=True):
            if math.isclose(known.declared, expected):
                raise NotPrivateError(
                    f"The batches held more examples than the {expected:g} that the sampling draws "
                    "on average. Rows of padding have gradients, so epsilon does not hold: pass "
                    "the sample weights of `poisson_batches` on unchanged, and multiply all terms "
                    f"of the loss by them. Received: batches of {segment.batch_size:g} rows, "
                    f"sampling={self!r}"
                )

    def _probability_of_no_marks(self, num_examples: int, parts: int) -> float:
        """Upper bound on the probability that some part of a batch has no mark."""
        users = self.examples_per_user or 1
        places = self.rows_per_batch(parts) // users
        empty, drawn = np.arange(places + 1), stats.binom(num_examples, self.share / parts)
        random_bits = np.maximum(empty * users - self._bits_of_step, 0)
        of_part = drawn.pmf(places - empty) @ 0.5**random_bits + drawn.sf(places)
        return min(1.0, parts * float(of_part))

    def account(self, ledger: Any, num_examples: int, delta: float, accountant: str) -> float:
        """ε of a ledger; see the class."""
        ledger = composition.in_units(ledger)
        segments, _ = composition.read_ledger(ledger, num_examples, correlated=True)
        releases = sum(segment.num_releases for segment in segments)

        def epsilon_at(delta: float) -> float:
            return self._epsilon(ledger, num_examples, delta, accountant)

        def delta_left(epsilon: float) -> float:
            return self._delta_left(epsilon, num_examples, delta, releases)

        return _self_consistent(epsilon_at, delta_left, delta)


@dataclasses.dataclass(frozen=True)
class PoissonSampling(RandomSizes):
    """Every example joins each batch independently with the same probability.

    A batch has room for B = `max_batch_size` examples. A larger draw is subsampled uniformly to B.

    Guarantee: (ε, δ)-DP for adding or removing one example, with the ε of `epsilon_spent`, if the
    choice of q, B, `steps` and the optimizer's parameters did not depend on the presence of any
    single example. (`num_examples` counts as public and only bounds the overflow.)

    Truncation costs e^ε·η of δ, where η = T·q·P[Binomial(n, q) ≥ B] for T releases. Proof: let D'
    be D with one additional example x, and let M be the training. Let H be M on D' with an extra
    seat for x: the draw of the others is cut to B as if x did not exist; then x joins with
    probability q.
    1. H against M(D): the batch of the others has the same distribution. Given this batch, a
       release is N(μ, σ²C²) against the mixture (1 - q)·N(μ, σ²C²) + q·N(μ + g, σ²C²) with
       ‖g‖ ≤ C. This is the pair that the accountant composes: H and M(D) are (ε, δ₀)-close in both
       directions.
    2. H against M(D'): run with the same random numbers, they differ only if in some step x and at
       least B others are drawn. This has probability at most η, whatever was released before.
    So P[M(D') ∈ S] ≤ P[H ∈ S] + η ≤ e^ε·P[M(D) ∈ S] + δ₀ + η, and P[M(D) ∈ S] ≤ e^ε·P[H ∈ S] + δ₀
    ≤ e^ε·P[M(D') ∈ S] + δ₀ + e^ε·η. Hence δ = δ₀ + e^ε·η, and `epsilon_spent` solves it for ε.

    Rows: `place` puts the examples of a draw into uniformly random rows of the batch, or of all its
    k parts together. So a loss may depend on the row, for example through position numbers, row
    weights or noise from a known seed. Couple the batches of D and D' as follows. Draw the others
    and put them into rows by one random injection, the same for both. If x joins the batch of D',
    put it into one of the remaining rows, each equally likely. In both batches all examples are
    then in uniformly random rows, as `place` puts them. The others are in the same rows, so their
    gradients are the same; x takes a row of padding, which contributed zero. So the sums differ by
    the clipped gradient of x, and ‖g‖ ≤ C as step 1 requires. (g depends on the row of x, which
    gives another mixture of such pairs. If the others fill all rows, x stays out of H.) This
    assumes that a row's gradient depends only on its example and its place, which the optimizer
    checks. The number of examples in a part is random; no clipping, division or adaptation is done
    per part.

    Fewer rows: `PrivacyPlan.fit` pads a batch to `places_for` places only, so x may add rows. The
    others are then in uniformly random rows of a larger batch, and the coupling needs more: that a
    row's gradient depends on its example alone, apart from random numbers that are independent and
    alike in all rows, which can be coupled by example. Only steps that are compiled for an unknown
    number of rows get such batches. They are searched for values tied to rows and for the number of
    rows, and refused if the gradient depends on them.

    Users: with `examples_per_user` k the unit is a user, the person behind an id. Read "user" for
    "example" in all of the above, and `num_examples` as the number of users: users join by
    themselves, and B is a number of users. At most k examples of each user who joins are in the
    batch, all of them in the user's own k rows; if the user has more, a uniformly random k. The
    optimizer clips the gradient of these rows together to C, so ‖g‖ ≤ C holds for what a whole user
    adds, however many examples the user has. (g depends on the examples taken too, which gives
    another mixture of such pairs. Which examples of a user are taken depends on no other user.)

    Attributes:
      sampling_probability: q, in (0, 1].
      max_batch_size: B, at least 1; `for_batch_size` chooses one with negligible cost.
      steps: number of batches in the whole run, at least 1.
      seed: `None` for the operating system's entropy. A number makes the draws predictable, so
        sampling does not amplify privacy: for tests only.
      examples_per_user: k, the largest number of examples of one user in a batch; `None` to draw
        examples.
      user_reduction: whether a user's gradient is the `"mean"` or the `"sum"` of the gradients of
        the user's examples in the batch.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range.

    >>> sampling = PoissonSampling.for_batch_size(128, num_examples=1437, steps=440)
    >>> sampling.max_batch_size
    224
    >>> PoissonSampling(0.5, max_batch_size=4, steps=1).draw(6, step=0, key=draws.new_key(seed=1))
    array([2])
    """

    sampling_probability: float
    max_batch_size: int
    steps: int
    seed: int | None = None
    examples_per_user: int | None = None
    user_reduction: str = "mean"
    label: ClassVar[str] = "poisson"

    def __post_init__(self) -> None:
        checks.keep(self, checks.probability, "sampling_probability", or_one=True)
        checks.keep(self, checks.integer, "max_batch_size", 1)
        if self.examples_per_user is not None:
            checks.keep(self, checks.integer, "examples_per_user", 1)
        checks.choice("user_reduction", self.user_reduction, REDUCTIONS)
        self._check_common()

    @classmethod
    def for_batch_size(
        cls,
        batch_size: float,
        num_examples: int,
        steps: int,
        seed: int | None = None,
        *,
        examples_per_user: int | None = None,
        user_reduction: str = "mean",
    ) -> PoissonSampling:
        """Makes a sampling with enough room that truncation does not show in ε.

        Args:
          batch_size: the expected batch size, as for the optimizer.
          num_examples: number of examples (or users) in the training set, a public constant.
          steps: number of batches in the whole run.
          seed: see the class.
          examples_per_user: see the class.
          user_reduction: see the class.

        Returns:
          A sampling whose `max_batch_size` is the smallest multiple of 8 with η ≤ 1e-12, or
          `num_examples` + 1 if that is smaller. Then nothing overflows, even with one additional
          example.
        """
        return with_room(
            lambda q, rows: cls(q, rows, steps, seed, examples_per_user, user_reduction),
            batch_size,
            num_examples,
            steps,
            unit="example" if examples_per_user is None else "user",
        )

    def draw(self, num_examples: int, step: int, key: bytes) -> np.ndarray:
        """Indices of the examples (or users) in the batch of a step, ascending.

        Guarantee: a pure function of its arguments. The draws of different steps and of different
        keys are independent, as far as BLAKE2b and SFC64 are random. An example joins if its
        uniform numbers allow it: an 8-bit number with probability c/2⁸, the smallest multiple of
        2⁻⁸ that is at least q, and a further one with probability q·2⁸/c. So q is exact up to a
        relative error of 2⁻⁵², no binomial size is approximated, and most examples use one byte.
        The subset kept from a draw that is too large is uniformly random, so no example is favored.
        """
        generator = draws.generator(key, b"poisson", step)
        chosen = bernoulli(generator, num_examples, self.sampling_probability)
        return at_most(generator, chosen, self.max_batch_size)

    def places_for(self, num_drawn: int) -> int:
        """Somewhat more places than were drawn, at most B.

        Args:
          num_drawn: how many examples, or users, the batch has.

        >>> sampling = PoissonSampling(0.05, max_batch_size=128, steps=1)
        >>> [sampling.places_for(n) for n in (0, 64, 70, 120)]
        [40, 80, 88, 128]
        """
        wanted = max(num_drawn + _LEAST_EMPTY, _LEAST_PLACES)
        return min(-(-wanted // _STEP_OF_PLACES) * _STEP_OF_PLACES, self.max_batch_size)

    @property
    def share(self) -> float:
        """q."""
        return self.sampling_probability

    def dp_event(self, ledger: Any, num_examples: int) -> dp_accounting.DpEvent:
        """Converts a ledger to a `DpEvent`, also one of users.

        Guarantee: that of the class, without the cost of truncation.

        Args:
          ledger: a ledger, or an optimizer with the attribute `ledger`.
          num_examples: number of examples (or users) in the training set, a public constant.

        Raises:
          TypeError, ValueError: as for `epsilon_spent`.
        """
        self.check_ledger(ledger, num_examples)
        return composition.dp_event(composition.in_units(ledger), num_examples, in_epochs=False)

    def _epsilon(self, ledger: Any, num_examples: int, delta: float, accountant: str) -> float:
        return composition.epsilon_spent(
            ledger, num_examples, delta, accountant=accountant, in_epochs=False
        )


def with_room(
    make: Callable[[float, int], _Kind],
    batch_size: float,
    num_examples: int,
    steps: int,
    unit: str = "example",
) -> _Kind:
    """Makes the sampling with the least room for which η ≤ 1e-12; see `PoissonSampling`.

    Args:
      make: makes a sampling, given the share of all examples in a batch and its rows.
      batch_size: the expected batch size.
      num_examples: number of examples (or users) in the training set.
      steps: number of batches in the whole run.
      unit: `"example"` or `"user"`.
    """
    batch_size = checks.number("batch_size", batch_size, 0, strict=True)
    num_examples = checks.integer("num_examples", num_examples, 1)
    steps = checks.integer("steps", steps, 1)
    if batch_size > num_examples:
        most = "`num_examples`" if unit == "example" else "the number of users"
        raise ValueError(
            f"`batch_size` must be at most {most}. Received: "
            f"batch_size={batch_size!r}, {most.strip('`')}={num_examples!r}"
        )
    share = batch_size / num_examples
    for rows in range(8 * math.ceil(batch_size / 8), num_examples + 1, 8):
        sampling = make(share, rows)
        if steps * sampling.failure_probability(num_examples) <= 1e-12:
            return sampling
    return make(share, num_examples + 1)


def bernoulli(generator: np.random.Generator, size: int, probability: float) -> np.ndarray:
    """The successes among independent trials; see `PoissonSampling.draw`.

    Args:
      generator: draws the numbers.
      size: the number of trials.
      probability: that of a success.

    Returns:
      The numbers of the trials, from 0, ascending.
    """
    likely = math.ceil(probability * 2**8)
    words = generator.bit_generator.random_raw(-(-size // 8)).view(np.uint8)
    # `likely` can be 2⁸, which does not fit in 8 bits.
    chosen = np.flatnonzero(words[:size] <= likely - 1)
    rest = probability * 2**8 / likely
    if rest < 0.5:
        # Uniform numbers are multiples of 2⁻⁵³: exact for powers of 2 and between 1/2 and 1.
        rest, exponent = math.frexp(rest)
        chosen = chosen[generator.random(len(chosen)) < 2.0**exponent]
    return chosen[generator.random(len(chosen)) < rest]


def at_most(generator: np.random.Generator, chosen: np.ndarray, size: int) -> np.ndarray:
    """A uniformly random subset of `size`, ascending; all of them if there are no more."""
    if len(chosen) <= size:
        return chosen
    stay = generator.choice(len(chosen), size, replace=False, shuffle=False)
    return chosen[np.sort(stay)]


def refuse_microbatches(ledger: Any) -> None:
    """Raises ValueError for an optimizer with microbatches, which Poisson batches cannot have.

    An additional example moves others into different microbatches, so the sum may change by far
    more than 2C.
    """
    if getattr(ledger, "num_microbatches", None) is not None:
        raise ValueError(
            "Poisson batches cannot be clipped in microbatches. Create the optimizer without "
            f"`num_microbatches`. Received: num_microbatches={ledger.num_microbatches!r}"
        )


def _self_consistent(
    epsilon_at: Callable[[float], float], delta_left: Callable[[float], float], delta: float
) -> float:
    """An ε with epsilon_at(delta_left(ε)) ≤ ε, or infinity.

    It is the smallest one up to rounding, or that for a δ which is smaller by 2e-6 of itself.
    """
    # Mostly truncation takes far less of δ than this, and one evaluation is enough.
    least = delta if delta_left(0.0) == delta else delta * (1 - 2e-6)
    spent = epsilon_at(least)
    if delta_left(spent) >= least:  # ε falls as δ grows
        return spent
    attempt = 0
    while True:
        # The steps grow, since small ones would creep near the largest η that δ permits.
        trial = spent * (1 + 1e-7 * 2**attempt)
        left = delta_left(trial)
        if not left > 0:
            return math.inf
        spent = epsilon_at(left)
        if spent <= trial:  # also a solution: the smaller ε is, the more of δ is left
            return spent
        attempt += 1
