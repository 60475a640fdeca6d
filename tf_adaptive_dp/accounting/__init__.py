"""From a ledger of releases to epsilon, and from epsilon to noise."""

from tf_adaptive_dp.accounting.calibration import noise_multiplier_for
from tf_adaptive_dp.accounting.composition import (
    dp_event,
    epsilon,
    epsilon_spent,
    epsilon_without_amplification,
    releases_left,
)
from tf_adaptive_dp.accounting.ledger import Ledger
from tf_adaptive_dp.accounting.noise_strategies import (
    BandedNoise,
    IndependentNoise,
    NoiseStrategy,
    ToeplitzNoise,
    TreeNoise,
)
from tf_adaptive_dp.accounting.releases import Releases, Segment

__all__ = [
    "BandedNoise",
    "IndependentNoise",
    "Ledger",
    "NoiseStrategy",
    "Releases",
    "Segment",
    "ToeplitzNoise",
    "TreeNoise",
    "dp_event",
    "epsilon",
    "epsilon_spent",
    "epsilon_without_amplification",
    "noise_multiplier_for",
    "releases_left",
]
