"""The papers' comparisons: optimizers with public data, and AdaS without privacy."""

from tf_adaptive_dp.optimizers.baselines.adas import AdaS
from tf_adaptive_dp.optimizers.baselines.noise_first import DPAdamPub, DPRPub
from tf_adaptive_dp.optimizers.baselines.pda_dpmd import PDADPMD, CosineMixing

__all__ = ["AdaS", "CosineMixing", "DPAdamPub", "DPRPub", "PDADPMD"]
