"""Side information: what preconditions gradients, and where it comes from."""

from tf_adaptive_dp.side_information.delayed import DelayedPreconditioner
from tf_adaptive_dp.side_information.disjoint import check_disjoint, split_public
from tf_adaptive_dp.side_information.fixed import FixedPreconditioner
from tf_adaptive_dp.side_information.public_gradients import PublicGradients
from tf_adaptive_dp.side_information.tokens import (
    TokenCounts,
    tf_idf,
    token_counts,
    token_frequencies,
)

__all__ = [
    "DelayedPreconditioner",
    "FixedPreconditioner",
    "PublicGradients",
    "TokenCounts",
    "check_disjoint",
    "split_public",
    "tf_idf",
    "token_counts",
    "token_frequencies",
]
