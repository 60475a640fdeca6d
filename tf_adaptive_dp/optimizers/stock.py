"""Private versions of Keras's own optimizers."""

from __future__ import annotations

import tensorflow as tf

from tf_adaptive_dp.optimizers.factory import make_dp_optimizer_class

# With `momentum` this is the DPMomentum of the papers.
DPSGD = make_dp_optimizer_class(tf.keras.optimizers.SGD)
DPAdam = make_dp_optimizer_class(tf.keras.optimizers.Adam)
DPAdamW = make_dp_optimizer_class(tf.keras.optimizers.AdamW)
DPRMSprop = make_dp_optimizer_class(tf.keras.optimizers.RMSprop)
DPAdagrad = make_dp_optimizer_class(tf.keras.optimizers.Adagrad)
