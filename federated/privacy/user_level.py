"""What is promised to each user: the public values of the mechanism, and its aggregator."""

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

MECHANISMS = ("gaussian", "tree")

# Andrew et al. 2021: the clip follows the median, by a factor of exp(±0.1) in a round, and the
# count of norms below it has noise of 5% of the cohort. TFF has the same values.
_QUANTILE = 0.5
_LEARNING_RATE = 0.2
_COUNT_STDDEV = 0.05


@dataclasses.dataclass(frozen=True)
class UserLevelPrivacy:
    """Noisy averages of clipped client updates, with the user as the unit of privacy.

    Each round releases (Σ clip(Δᵢ) + noise) / `clients_per_round`, where clip(Δ) = Δ·min(1, C/‖Δ‖)
    over all tensors of an update together. Clients count alike: a weight by number of examples
    would be private. The divisor is a public constant, never the size of the cohort.

    Guarantee: adding or removing one client in a round changes the sum by at most C, whatever it
    holds or sends (not-a-number counts as zeros), and the noise of standard deviation
    C · `noise_multiplier` is added once to the sum, also of a round without clients. So
    - "gaussian": each round is the Gaussian mechanism with `noise_multiplier`, whose noise is fresh
      whenever a round is run. What cohorts make of it is up to the sampling; see
      `federated.epsilon_spent`. With `clip="adaptive"` the noise is shared with the
      count that moves the clip: z⁻² = z_sum⁻² + z_count⁻², so both together cost
      `noise_multiplier`.
    - "tree": DP-FTRL (Kairouz et al. 2021), see `federated.privacy.dp_queries.TreeSum`:
      `noise_multiplier` is that of each node of a tree over the `rounds_per_pass` rounds of a pass.
      It needs no secret sampling, but each client may take part in one round of a pass at most: use
      `ShuffledEpochs`.
      The state holds noise, so it and its checkpoints must be kept as secret as the data.
    No seed of TensorFlow or Keras makes noise repeat.

    Attributes:
      noise_multiplier: z, at least 0; 0 protects nothing and makes ε infinite.
      clients_per_round: the expected number of clients in a cohort, a public constant; whole for
        "tree".
      total_clients: how many clients there are, a public constant.
      clip: C in L2 norm, or `"adaptive"`: C follows the median of the updates' norms (Andrew et
        al. 2021), by a factor of at most exp(±0.1) a round.
      mechanism: `"gaussian"` or `"tree"`.
      initial_clip: C of the first round if the clip is adaptive.

    Raises:
      TypeError, ValueError: for an argument of the wrong type, out of its range, or that does not
        go with another one.

    >>> privacy = UserLevelPrivacy(noise_multiplier=1.0, clients_per_round=100, total_clients=3400)
    >>> round(privacy.value_noise_multiplier, 4)
    1.005
    >>> UserLevelPrivacy(1.0, 100, 3400, clip=0.5, mechanism="tree").rounds_per_pass
    34
    """

    noise_multiplier: float
    clients_per_round: float
    total_clients: int
    clip: float | str = "adaptive"
    mechanism: str = "gaussian"
    initial_clip: float = 0.1

    def __post_init__(self):
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
        if self.mechanism == "tree":
            self._check_tree()
        elif self.is_adaptive:
            self._check_adaptive()

    def _check_tree(self) -> None:
        if self.is_adaptive:
            raise ValueError(
                "The tree mechanism needs one clip for all rounds of a tree: with an adaptive one "
                "its noise has no accounting that is proven here. Pass a number as `clip`, or use "
                f"mechanism='gaussian'. Received: clip={self.clip!r}, mechanism='tree'"
            )
        checks.integer("clients_per_round", self.clients_per_round, 1)

    def _keep(self, check: Callable[..., Any], name: str, minimum: int, **kwargs: bool) -> None:
        """Checks a number, and keeps it as Python's own: NumPy's cannot be written as JSON."""
        if isinstance(getattr(self, name), np.generic):
            object.__setattr__(self, name, getattr(self, name).item())
        check(name, getattr(self, name), minimum, **kwargs)

    def _check_adaptive(self) -> None:
        if self.noise_multiplier >= 2 * _COUNT_STDDEV * self.clients_per_round:
            raise ValueError(
                "The noise of the count that an adaptive clip needs would alone use up the "
                "privacy that `noise_multiplier` stands for: let it be below clients_per_round / "
                f"{1 / (2 * _COUNT_STDDEV):g}, or pass a number as `clip`. Received: "
                f"noise_multiplier={self.noise_multiplier!r}, "
                f"clients_per_round={self.clients_per_round!r}"
            )

    @property
    def is_adaptive(self) -> bool:
        """Whether the clip follows the updates."""
        return self.clip == "adaptive"

    @property
    def rounds_per_pass(self) -> int:
        """How many cohorts a pass over the clients gives, at least 1; the rest is left out."""
        return math.floor(self.total_clients / self.clients_per_round)

    @property
    def value_noise_multiplier(self) -> float:
        """The noise of the sum alone / C: more than `noise_multiplier` if the clip is adaptive."""
        if not self.is_adaptive or not self.noise_multiplier:
            return float(self.noise_multiplier)
        count = 2 * _COUNT_STDDEV * self.clients_per_round
        return (self.noise_multiplier**-2 - count**-2) ** -0.5

    def aggregator(self) -> tff.aggregators.UnweightedAggregationFactory:
        """An aggregation factory on `tff.aggregators.DifferentiallyPrivateFactory`.

        Guarantee: that of the class, for each process that the factory creates.
        """
        return _NoisyMeanFactory(self)

    def query(self, size: int) -> tfp.SumAggregationDPQuery:
        """The query of TF Privacy's kind for updates of `size` numbers."""
        if self.mechanism == "tree":
            numerator = dp_queries.TreeSum(
                float(self.clip), float(self.noise_multiplier), self.rounds_per_pass, size
            )
        elif self.is_adaptive:
            # A count without noise only where nothing has noise.
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
    """Makes the query when the type of the updates is known."""

    def __init__(self, privacy: UserLevelPrivacy):
        self._privacy = privacy

    def create(self, value_type: Any) -> tff.templates.AggregationProcess:
        """See the base class.

        Raises:
          TypeError: for updates that are not float32, or whose shapes are not known.
          ValueError: if nothing is trained.
        """
        specs = tf.nest.flatten(tff.types.type_to_tf_tensor_specs(value_type))
        if not specs:
            raise ValueError("The model must have something to train. Received: no such weights")
        for spec in specs:
            if spec.dtype != tf.float32 or not spec.shape.is_fully_defined():
                raise TypeError(
                    "Client updates must be float32 tensors of known shapes. Build the model with "
                    f"float32 weights. Received: {spec!r}"
                )
        query = self._privacy.query(sum(spec.shape.num_elements() for spec in specs))
        factory = tff.aggregators.DifferentiallyPrivateFactory(query)
        return factory.create(value_type)
