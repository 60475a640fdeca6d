"""Batches that are drawn as the accountant believes, and epsilon for them."""

from tf_adaptive_dp.sampling.cyclic import CyclicPoissonSampling
from tf_adaptive_dp.sampling.datasets import (
    fixed_size_batches,
    poisson_batches,
    shuffled_batches,
)
from tf_adaptive_dp.sampling.draws import Sampling
from tf_adaptive_dp.sampling.fixed_order import FixedOrder
from tf_adaptive_dp.sampling.fixed_size import FixedSizeSampling
from tf_adaptive_dp.sampling.poisson import PoissonSampling
from tf_adaptive_dp.sampling.shuffled import ShuffledEpochs

__all__ = [
    "CyclicPoissonSampling",
    "FixedOrder",
    "FixedSizeSampling",
    "PoissonSampling",
    "Sampling",
    "ShuffledEpochs",
    "fixed_size_batches",
    "poisson_batches",
    "shuffled_batches",
]
