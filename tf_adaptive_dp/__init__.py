"""Private training for Keras: change the optimizer, keep the rest.

`model.compile(tf_adaptive_dp.ADADP(l2_norm_clip=1.0, noise_multiplier=1.1), loss=...)` trains
privately. The names that you need first are here; the rest is in the submodules.
"""

from tf_adaptive_dp import (
    accounting,
    auditing,
    gradients,
    optimizers,
    sampling,
    side_information,
    tuning,
    validation,
)
from tf_adaptive_dp.accounting import epsilon_spent, noise_multiplier_for
from tf_adaptive_dp.callbacks import PrivacyBudget, PrivacyMonitor, ReleaseLog
from tf_adaptive_dp.errors import BudgetExceededError, NotPrivateError
from tf_adaptive_dp.mechanism.clipping import AdaptiveClipping, PerLayerClipping
from tf_adaptive_dp.normalization import PrivateNormalization
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
from tf_adaptive_dp.plan import PrivacyPlan
from tf_adaptive_dp.sampling import PoissonSampling, poisson_batches
from tf_adaptive_dp.statement import privacy_statement
from tf_adaptive_dp.validation import validate
from tf_adaptive_dp.version import __version__

__all__ = [
    "ADADP",
    "AdaDPS",
    "AdaptiveClipping",
    "BudgetExceededError",
    "DPAdagrad",
    "DPAdam",
    "DPAdamW",
    "DPAdamWOSM",
    "DPRMSprop",
    "DPSGD",
    "NotPrivateError",
    "PerLayerClipping",
    "PoissonSampling",
    "PrivacyBudget",
    "PrivacyMonitor",
    "PrivacyPlan",
    "PrivateNormalization",
    "ReleaseLog",
    "UntunedSGD",
    "__version__",
    "accounting",
    "auditing",
    "epsilon_spent",
    "gradients",
    "make_dp_optimizer_class",
    "noise_multiplier_for",
    "optimizers",
    "poisson_batches",
    "privacy_statement",
    "sampling",
    "side_information",
    "tuning",
    "validate",
    "validation",
]
