"""Private versions of Keras's own optimizers."""

from __future__ import annotations

import tensorflow as tf

from tf_adaptive_dp.optimizers.factory import make_dp_optimizer_class

# With `momentum` this is the DPMomentum of the papers.
DPSGD = make_dp_optimizer_class(tf.keras.optimizers.SGD)
DPAdam = make_dp_optimizer_class(tf.keras.optimizers.Adam)
DPAdamW = make_dp_optimizer_class(tf.keras.optimizers.AdamW)
# The papers' DP-RMSProp. Keras has ε inside the root, as AdaDPS's preconditioner.
DPRMSprop = make_dp_optimizer_class(tf.keras.optimizers.RMSprop)
# The papers' DP-AdaGrad is that with `initial_accumulator_value=0.0`; Keras begins at 0.1.
DPAdagrad = make_dp_optimizer_class(tf.keras.optimizers.Adagrad)
