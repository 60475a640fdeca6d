"""Inputs in units of their own size: a layer whose means and deviations are released privately."""

from tf_adaptive_dp.normalization.layer import PrivateNormalization
from tf_adaptive_dp.normalization.payment import OF_OTHER_UNIT as OF_OTHER_UNIT
from tf_adaptive_dp.normalization.payment import first_unpaid as first_unpaid
from tf_adaptive_dp.normalization.payment import normalizations_in as normalizations_in
from tf_adaptive_dp.normalization.payment import of_other_unit as of_other_unit
from tf_adaptive_dp.normalization.payment import refuse_unpaid_behind as refuse_unpaid_behind
from tf_adaptive_dp.normalization.payment import refuse_unpaid_in as refuse_unpaid_in
from tf_adaptive_dp.normalization.payment import unpaid_in as unpaid_in
from tf_adaptive_dp.normalization.planned import PlannedNormalization as PlannedNormalization
from tf_adaptive_dp.normalization.planned import some_of as some_of
from tf_adaptive_dp.normalization.planned import words_of as words_of

# The other names are for optimizers, plans, callbacks and validation.
__all__ = ["PrivateNormalization"]
