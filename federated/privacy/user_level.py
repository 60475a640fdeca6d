"""User-level privacy: the public parameters of the mechanism, and its aggregator."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
import tensorflow_privacy as tfp

from federated.privacy import dp_queries
from tf_adaptive_dp import checks
from tf_adaptive_dp.accounting import noise_strategies
from tf_adaptive_dp.accounting.noise_strategies import BandedNoise
from tf_adaptive_dp.mechanism.clipping import LARGEST, SMALLEST

MECHANISMS = ("gaussian", "tree", "banded")
# They belong to banded noise. A run's journal has them only where they are set, so that runs that
# were begun before they existed resume.
BANDED_ARGUMENTS = ("bands", "min_separation", "max_participations")

# As in Andrew et al. (2021) and in TFF: the clip follows the median, by a factor of at most
# exp(±0.1) per round, and the standard deviation of the noisy count is 5% of the cohort.
_QUANTILE = 0.5
_LEARNING_RATE = 0.2
_COUNT_STDDEV = 0.05


@dataclasses.dataclass(frozen=True)
class UserLevelPrivacy:
    """Noisy averages of clipped client updates, with the user as the unit of privacy.

    Each round releases (Σ clip(Δᵢ) + noise) / `clients_per_round`, where clip(Δ) = Δ·min(1, C/‖Δ‖)
    over all tensors of an update together. All clients have the same weight, because a weight by
    number of examples would be private. The divisor is a public constant, never the size of the
    cohort.

    Guarantee: adding or removing one client in a round changes the sum by at most C, whatever the
    client holds or sends (an update that is not finite counts as zeros). Noise of standard
    deviation C · `noise_multiplier` is added once to the sum, also in a round without clients. So:
    - "gaussian": each round is the Gaussian mechanism with `noise_multiplier`, with fresh noise
      whenever a round is run. Amplification depends on the sampling of cohorts; see
      `federated.epsilon_spent`. With `clip="adaptive"` the count that moves the clip is part of the
      budget: z⁻² = z_sum⁻² + z_count⁻², so sum and count together cost `noise_multiplier`.
    - "tree": DP-FTRL, see `federated.privacy.dp_queries.TreeSum`. `noise_multiplier` applies to
      each node of a tree over the `rounds_per_pass` rounds of a pass. The sampling need not be
      secret, but each client may take part in at most one round per pass: use `ShuffledEpochs`.
      The state holds the noise, so keep it and its checkpoints as secret as the data.
    - "banded": each round cancels part of the noise of the last `bands` - 1 rounds, see
      `federated.privacy.dp_queries.BandedSum`. `noise_multiplier` is that of one participation, and
      k participations of a user cost √k times as much. The sampling need not be secret, but a
      client may take part at most once in any `min_separation` consecutive rounds, and in at most
      `max_participations` rounds: use `tf_adaptive_dp.sampling.FixedOrder`, which
      `ClientSampler.fixed_order` makes. The state holds the noise of the last `bands` - 1 rounds,
      each as large as the model: keep it and its checkpoints as secret as the data.
    No seed of TensorFlow or Keras makes noise repeat.

    Attributes:
      noise_multiplier: z, at least 0; with 0 nothing is protected and ε is infinite.
      clients_per_round: the expected number of clients in a cohort, a public constant; an integer
        for "tree" and "banded".
      total_clients: the number of clients, a public constant.
      clip: C in L2 norm, or `"adaptive"`: C follows the median of the updates' norms, by a factor
        of at most exp(±0.1) per round.
      mechanism: `"gaussian"`, `"tree"` or `"banded"`.
      initial_clip: C of the first round if the clip is adaptive.
      bands: b, from 2 to `min_separation`; only for "banded", which needs it.
      min_separation: the smallest distance between two rounds of a client, which may take part in
        rounds t and t + `min_separation`, but in none between them. Only for "banded"; `None`
        becomes `rounds_per_pass`, the largest distance for which there are enough clients.
      max_participations: the largest number of rounds of a run that a client takes part in; only
        for "banded". `None` means as many as the separation allows.

    Raises:
      TypeError, ValueError: if an argument is invalid, or incompatible with another one.

    References:
      McMahan et al. (2018), "Learning Differentially Private Recurrent Language Models",
      arXiv:1710.06963.
      Andrew et al. (2021), "Differentially Private Learning with Adaptive Clipping",
      arXiv:1905.03871.
      Kairouz et al. (2021), "Practical and Private (Deep) Learning without Sampling or Shuffling",
      arXiv:2103.00039.
      Kalinin and Lampert (2024), "Banded Square Root Matrix Factorization for Differentially
      Private Model Training", arXiv:2405.13763.

    >>> privacy = UserLevelPrivacy(noise_multiplier=1.0, clients_per_round=100, total_clients=3400)
    >>> round(privacy.value_noise_multiplier, 4)
    1.005
    >>> UserLevelPrivacy(1.0, 100, 3400, clip=0.5, mechanism="tree").rounds_per_pass
    34
    >>> UserLevelPrivacy(1.0, 100, 3400, clip=0.5, mechanism="banded", bands=8).min_separation
    34
    """

    noise_multiplier: float
    clients_per_round: float
    total_clients: int
    clip: float | str = "adaptive"
    mechanism: str = "gaussian"
    initial_clip: float = 0.1
    bands: int | None = None
    min_separation: int | None = None
    max_participations: int | None = None

    def __post_init__(self) -> None:
        self._keep(checks.number, "noise_multiplier", 0)
        self._keep(checks.number, "clients_per_round", 0, strict=True)
        self._keep(checks.integer, "total_clients", 1)
        checks.choice("mechanism", self.mechanism, MECHANISMS)
        self._keep(checks.number, "initial_clip", 0, strict=True)
        if self.clients_per_round > self.total_clients:
            raise ValueError(
                "`clients_per_round` must be at most `total_clients`. Received: "
                f"clients_per_round={self.clients_per_round!r}, "
                f"total_clients={self.total_clients!r}"
            )
        if isinstance(self.clip, str):
            checks.choice("clip", self.clip, ("adaptive",))
        else:
            self._keep(checks.number, "clip", 0, strict=True)
        self._check_range()
        if self.mechanism == "banded":
            self._check_banded()
        else:
            self._check_not_banded()
        if self.mechanism == "tree":
            self._check_tree()
        elif self.is_adaptive:
            self._check_adaptive()

    def _check_range(self) -> None:
        """Clips and noise must not be lost where updates have 32 bits."""
        for name, least in (
            ("noise_multiplier", 0.0),
            ("initial_clip", SMALLEST),
            ("clip", SMALLEST),
        ):
            value = getattr(self, name)
            if not isinstance(value, str) and not least <= value <= LARGEST:
                raise ValueError(
                    f"`{name}` must be from {least:g} to {LARGEST:g}, since updates are numbers of "
                    f"32 bits. Rescale the updates. Received: {name}={value!r}"
                )

    def _check_tree(self) -> None:
        if self.is_adaptive:
            raise ValueError(
                "The tree mechanism needs one clip for all rounds of a tree: an adaptive clip has "
                "no proven accounting here. Pass a number as `clip`, or use mechanism='gaussian'. "
                f"Received: clip={self.clip!r}, mechanism='tree'"
            )
        checks.integer("clients_per_round", self.clients_per_round, 1)

    def _check_banded(self) -> None:
        if self.is_adaptive:
            raise ValueError(
                "Banded noise needs one clip for all rounds: what a round cancels was scaled with "
                "the clip of earlier rounds, so with an adaptive clip there is no proven "
                "accounting here. Pass a number as `clip`, or use mechanism='gaussian'. Received: "
                f"clip={self.clip!r}, mechanism='banded'"
            )
        checks.integer("clients_per_round", self.clients_per_round, 1)
        if self.bands is None:
            raise ValueError(
                "`bands` must be given for banded noise: the number of rounds that share noise, "
                f"from 2 to {self.rounds_per_pass}, the rounds of a pass over the clients. "
                "Received: bands=None, mechanism='banded'"
            )
        if self.min_separation is None:
            object.__setattr__(self, "min_separation", self.rounds_per_pass)
        self._keep(checks.integer, "bands", 2)
        self._keep(checks.integer, "min_separation", 1)
        bands, separation = int(self.bands), int(self.min_separation or 0)
        if self.max_participations is not None:
            self._keep(checks.integer, "max_participations", 1)
        if separation > self.rounds_per_pass:
            raise ValueError(
                "`min_separation` must be at most total_clients / clients_per_round, since the "
                "cohorts of that many rounds in a row have no client in common. Lower it, or "
                "`clients_per_round`. Received: "
                f"min_separation={self.min_separation!r}, total_clients={self.total_clients!r}, "
                f"clients_per_round={self.clients_per_round!r}"
            )
        if bands > separation:
            raise ValueError(
                "`bands` must be at most `min_separation`: otherwise one row of the noise would "
                "hide several updates of a client. Use fewer bands, or a larger separation, which "
                f"requires a smaller `clients_per_round`. Received: bands={self.bands!r}, "
                f"min_separation={self.min_separation!r}"
            )
        BandedNoise(bands)  # it knows the largest number of bands

    def _check_not_banded(self) -> None:
        for name in BANDED_ARGUMENTS:
            if getattr(self, name) is not None:
                raise ValueError(
                    f"`{name}` must be None unless the noise is banded. Pass mechanism='banded', "
                    f"or leave it out. Received: {name}={getattr(self, name)!r}, "
                    f"mechanism={self.mechanism!r}"
                )

    def _keep(self, check: Callable[..., Any], name: str, minimum: int, **kwargs: bool) -> None:
        """Checks a number, and stores it as a Python number, since JSON cannot hold NumPy's."""
        if isinstance(getattr(self, name), np.generic):
            object.__setattr__(self, name, getattr(self, name).item())
        check(name, getattr(self, name), minimum, **kwargs)

    def _check_adaptive(self) -> None:
        if self.noise_multiplier >= 2 * _COUNT_STDDEV * self.clients_per_round:
            raise ValueError(
                "With an adaptive clip `noise_multiplier` must be below clients_per_round / "
                f"{1 / (2 * _COUNT_STDDEV):g}: otherwise the count of norms alone would use up its "
                "privacy. Lower it, or pass a number as `clip`. Received: "
                f"noise_multiplier={self.noise_multiplier!r}, "
                f"clients_per_round={self.clients_per_round!r}"
            )

    @property
    def is_adaptive(self) -> bool:
        """Whether the clip follows the updates."""
        return self.clip == "adaptive"

    @property
    def strategy(self) -> BandedNoise | None:
        """How the noises of rounds depend on each other; `None` unless they are banded."""
        return None if self.bands is None else BandedNoise(self.bands)

    def sensitivity(self, rounds: int) -> float:
        """By how much one client moves consecutive rounds with banded noise, at a clip of 1.

        It is `noise_strategies.sensitivity` for the separation and the participations that are
        stated; the noise multiplier divided by it is that of one Gaussian mechanism.

        Args:
          rounds: the number of rounds, at least 1.

        Raises:
          ValueError: if the noise is not banded.
        """
        if self.bands is None or self.min_separation is None:
            raise ValueError(f"`mechanism` must be 'banded'. Received: {self!r}")
        return noise_strategies.sensitivity(
            BandedNoise(self.bands), rounds, self.min_separation, self.max_participations
        )

    @property
    def rounds_per_pass(self) -> int:
        """The number of whole cohorts in a pass over the clients, at least 1."""
        return math.floor(self.total_clients / self.clients_per_round)

    @property
    def value_noise_multiplier(self) -> float:
        """The noise of the sum alone, divided by C: above `noise_multiplier` if the clip adapts."""
        if not self.is_adaptive or not self.noise_multiplier:
            return float(self.noise_multiplier)
        count = 2 * _COUNT_STDDEV * self.clients_per_round
        return (self.noise_multiplier**-2 - count**-2) ** -0.5

    def aggregator(self) -> tff.aggregators.UnweightedAggregationFactory:
        """An aggregation factory based on `tff.aggregators.DifferentiallyPrivateFactory`.

        Guarantee: that of the class, for each process that the factory creates.
        """
        return _NoisyMeanFactory(self)

    def query_for(self, value_type: Any) -> tfp.SumAggregationDPQuery:
        """The TF Privacy query for updates of a TFF type.

        Raises:
          TypeError: if updates are not float32, or their shapes are unknown.
          ValueError: if the model has no trainable weights.
        """
        specs = tf.nest.flatten(tff.types.type_to_tf_tensor_specs(value_type))
        if not specs:
            raise ValueError("The model must have trainable weights. Received: none")
        for spec in specs:
            if spec.dtype != tf.float32 or not spec.shape.is_fully_defined():
                raise TypeError(
                    "Client updates must be float32 tensors of known shapes. Build the model with "
                    f"float32 weights. Received: {spec!r}"
                )
        return self.query(sum(spec.shape.num_elements() for spec in specs))

    def query(self, size: int) -> tfp.SumAggregationDPQuery:
        """The TF Privacy query for updates of `size` values."""
        if self.mechanism == "tree":
            numerator = dp_queries.TreeSum(
                float(self.clip), float(self.noise_multiplier), self.rounds_per_pass, size
            )
        elif self.bands is not None:
            numerator = dp_queries.BandedSum(
                float(self.clip), float(self.noise_multiplier), self.bands, size
            )
        elif self.is_adaptive:
            # The count is exact only if nothing has noise.
            stddev = _COUNT_STDDEV * self.clients_per_round if self.noise_multiplier else 0.0
            numerator = dp_queries.AdaptiveClipSum(
                initial_l2_norm_clip=float(self.initial_clip),
                noise_multiplier=self.value_noise_multiplier,
                target_unclipped_quantile=_QUANTILE,
                learning_rate=_LEARNING_RATE,
                clipped_count_stddev=stddev,
                expected_num_records=float(self.clients_per_round),
            )
        else:
            numerator = dp_queries.GaussianSum(
                float(self.clip), float(self.clip) * float(self.noise_multiplier)
            )
        return tfp.NormalizedQuery(numerator, float(self.clients_per_round))


class _NoisyMeanFactory(tff.aggregators.UnweightedAggregationFactory):
    """Makes the query once the type of the updates is known."""

    def __init__(self, privacy: UserLevelPrivacy):
        self._privacy = privacy

    def create(self, value_type: Any) -> tff.templates.AggregationProcess:
        """See the base class, and `UserLevelPrivacy.query_for` for its errors."""
        query = self._privacy.query_for(value_type)
        return tff.aggregators.DifferentiallyPrivateFactory(query).create(value_type)
