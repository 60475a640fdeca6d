"""Private optimizers for Keras, and in `baselines` those that the papers compare them with."""

from tf_adaptive_dp.optimizers import baselines
from tf_adaptive_dp.optimizers.adadp import ADADP
from tf_adaptive_dp.optimizers.adadps import AdaDPS
from tf_adaptive_dp.optimizers.adam_wosm import DPAdamWOSM
from tf_adaptive_dp.optimizers.keras_optimizers import (
    DPSGD,
    DPAdagrad,
    DPAdam,
    DPAdamW,
    DPRMSprop,
    make_dp_optimizer_class,
)
from tf_adaptive_dp.optimizers.untuned_sgd import UntunedSGD

__all__ = [
    "ADADP",
    "AdaDPS",
    "DPAdagrad",
    "DPAdam",
    "DPAdamW",
    "DPAdamWOSM",
    "DPRMSprop",
    "DPSGD",
    "UntunedSGD",
    "baselines",
    "make_dp_optimizer_class",
]
