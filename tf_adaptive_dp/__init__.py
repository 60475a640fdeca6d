"""Private training for Keras: change the optimizer, keep the rest.

`model.compile(tf_adaptive_dp.ADADP(l2_norm_clip=1.0, noise_multiplier=1.1), loss=...)` with a loss
that has `reduction="none"`.
"""

from tf_adaptive_dp import gradients, selection
from tf_adaptive_dp.callbacks import PrivacyBudget, PrivacyMonitor
from tf_adaptive_dp.errors import BudgetExceededError, NotPrivateError
from tf_adaptive_dp.gradients.per_example import per_example_gradients
from tf_adaptive_dp.mechanism.adaptive_clipping import AdaptiveClipping
from tf_adaptive_dp.mechanism.clipping import PerLayerClipping
from tf_adaptive_dp.optimizers.adadp import ADADP
from tf_adaptive_dp.optimizers.adadps import AdaDPS
from tf_adaptive_dp.optimizers.adam_wosm import DPAdamWOSM
from tf_adaptive_dp.optimizers.adas import AdaS
from tf_adaptive_dp.optimizers.factory import make_dp_optimizer_class
from tf_adaptive_dp.optimizers.noise_first import DPAdamPub, DPRPub
from tf_adaptive_dp.optimizers.pda_dpmd import PDADPMD, CosineMixing
from tf_adaptive_dp.optimizers.stock import DPSGD, DPAdagrad, DPAdam, DPAdamW, DPRMSprop
from tf_adaptive_dp.privacy.accounting import epsilon, epsilon_spent
from tf_adaptive_dp.privacy.audit_training import Canaries, PrivacyAudit
from tf_adaptive_dp.privacy.auditing import (
    ManyRunReport,
    OneRunReport,
    many_run_epsilon,
    one_run_epsilon,
)
from tf_adaptive_dp.privacy.calibration import noise_multiplier_for
from tf_adaptive_dp.privacy.membership import membership_inference
from tf_adaptive_dp.privacy.sampling import (
    FixedSizeSampling,
    PoissonSampling,
    ShuffledEpochs,
    fixed_size_batches,
    poisson_batches,
    shuffled_batches,
)
from tf_adaptive_dp.privacy.statement import privacy_statement
from tf_adaptive_dp.release_log import ReleaseLog
from tf_adaptive_dp.side_information.disjoint import check_disjoint, split_public
from tf_adaptive_dp.side_information.fixed import FixedPreconditioner
from tf_adaptive_dp.side_information.public_gradients import PublicGradients
from tf_adaptive_dp.side_information.token_counts import TokenCounts, token_counts
from tf_adaptive_dp.side_information.tokens import tf_idf, token_frequencies
from tf_adaptive_dp.update_rules.step_doubling import suggest_tolerance
from tf_adaptive_dp.validation import (
    Finding,
    PerExampleReport,
    ValidationReport,
    check_per_example,
    validate,
)
from tf_adaptive_dp.version import __version__

__all__ = [
    "ADADP",
    "AdaDPS",
    "AdaS",
    "AdaptiveClipping",
    "BudgetExceededError",
    "Canaries",
    "CosineMixing",
    "DPAdagrad",
    "DPAdam",
    "DPAdamPub",
    "DPAdamW",
    "DPAdamWOSM",
    "DPRMSprop",
    "DPRPub",
    "DPSGD",
    "Finding",
    "FixedPreconditioner",
    "FixedSizeSampling",
    "ManyRunReport",
    "NotPrivateError",
    "OneRunReport",
    "PDADPMD",
    "PerExampleReport",
    "PerLayerClipping",
    "PoissonSampling",
    "PrivacyAudit",
    "PrivacyBudget",
    "PrivacyMonitor",
    "PublicGradients",
    "ReleaseLog",
    "ShuffledEpochs",
    "TokenCounts",
    "ValidationReport",
    "__version__",
    "check_disjoint",
    "check_per_example",
    "epsilon",
    "epsilon_spent",
    "fixed_size_batches",
    "gradients",
    "make_dp_optimizer_class",
    "many_run_epsilon",
    "membership_inference",
    "noise_multiplier_for",
    "one_run_epsilon",
    "per_example_gradients",
    "poisson_batches",
    "privacy_statement",
    "selection",
    "shuffled_batches",
    "split_public",
    "suggest_tolerance",
    "tf_idf",
    "token_counts",
    "token_frequencies",
    "validate",
]
