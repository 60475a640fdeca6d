"""What the optimizers need of Keras beyond its public API, for the Keras in use.

The rest of the library asks for what it needs by these names, which say nothing about how a version
of Keras provides it.
"""

from typing import TYPE_CHECKING

from tf_adaptive_dp._keras.generation import GENERATION

if TYPE_CHECKING or GENERATION == 2:
    from tf_adaptive_dp._keras.optimizers_keras2 import (
        APPLYING,
        HOW_TO_STEP,
        OwnRuleOptimizer,
        SelfScalingOptimizer,
        add_slot,
        add_state,
        decays,
        has_slots_for,
        is_built,
        is_wrapped_by_loss_scaling,
        slot_index,
    )
else:
    from tf_adaptive_dp._keras.optimizers_keras3 import (
        APPLYING,
        HOW_TO_STEP,
        OwnRuleOptimizer,
        SelfScalingOptimizer,
        add_slot,
        add_state,
        decays,
        has_slots_for,
        is_built,
        is_wrapped_by_loss_scaling,
        slot_index,
    )

__all__ = [
    "APPLYING",
    "HOW_TO_STEP",
    "OwnRuleOptimizer",
    "SelfScalingOptimizer",
    "add_slot",
    "add_state",
    "decays",
    "has_slots_for",
    "is_built",
    "is_wrapped_by_loss_scaling",
    "slot_index",
]
