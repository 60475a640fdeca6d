"""Makes a private version of any Keras optimizer."""

from __future__ import annotations

import functools

import tensorflow as tf

from tf_adaptive_dp.optimizers.docstrings import ARGUMENTS, RAISES, SIDE_INFORMATION
from tf_adaptive_dp.optimizers.dp_optimizer import PACKAGE, DPOptimizer


@functools.cache
def make_dp_optimizer_class(keras_optimizer_class: type) -> type:
    """Makes the private version of a Keras optimizer.

    Its arguments are those of TF Privacy (`l2_norm_clip`, `noise_multiplier`,
    `num_microbatches`), `expected_batch_size`, `clipping`, `gradients`, `side_information` and
    `seed` (see `DPSGD`), and those of the Keras optimizer by name. It needs a loss vector:
    `reduction="none"`.

    Guarantee: what the Keras optimizer sees is the output of the Gaussian mechanism, so whatever
    it computes (momentum, second moments, averages of the weights) is post-processing and costs
    no privacy.

    Args:
      keras_optimizer_class: a subclass of `tf.keras.optimizers.Optimizer`.

    Returns:
      The class, registered for saving as `tf_adaptive_dp>DP<name>`; the same for the same argument.

    Raises:
      TypeError: if it is no such subclass.

    >>> DPNadam = make_dp_optimizer_class(tf.keras.optimizers.Nadam)
    >>> optimizer = DPNadam(l2_norm_clip=1.0, noise_multiplier=1.1, learning_rate=0.01)
    >>> optimizer.name
    'DPNadam'
    """
    if not (
        isinstance(keras_optimizer_class, type)
        and issubclass(keras_optimizer_class, tf.keras.optimizers.Optimizer)
    ):
        raise TypeError(
            "`keras_optimizer_class` must be a subclass of `tf.keras.optimizers.Optimizer` (not "
            f"of `tf.keras.optimizers.legacy`). Received: {keras_optimizer_class!r}"
        )
    if keras_optimizer_class is tf.keras.optimizers.Optimizer:
        raise TypeError(
            "`keras_optimizer_class` must be a subclass that can train. Received: "
            f"{keras_optimizer_class!r}"
        )
    if issubclass(keras_optimizer_class, DPOptimizer):
        raise TypeError(f"The optimizer is private already. Received: {keras_optimizer_class!r}")
    name = f"DP{keras_optimizer_class.__name__}"

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        *,
        name: str = name,
        **kwargs,
    ):
        super(dp_class, self).__init__(
            l2_norm_clip, noise_multiplier, num_microbatches, name=name, **kwargs
        )

    doc = (
        f"`tf.keras.optimizers.{keras_optimizer_class.__name__}` on private gradients.\n"
        f"\n    Args:\n{ARGUMENTS}\n{SIDE_INFORMATION}\n"
        f"      **kwargs: those of the Keras optimizer.\n{RAISES}\n    "
    )
    body = {"__init__": __init__, "__doc__": doc, "__module__": __name__}
    dp_class = type(name, (DPOptimizer, keras_optimizer_class), body)
    return tf.keras.saving.register_keras_serializable(PACKAGE, name)(dp_class)


# With `momentum` this is the DPMomentum of the papers.
DPSGD = make_dp_optimizer_class(tf.keras.optimizers.SGD)
DPAdam = make_dp_optimizer_class(tf.keras.optimizers.Adam)
DPAdamW = make_dp_optimizer_class(tf.keras.optimizers.AdamW)
# The papers' DP-RMSProp. Keras has ε inside the root, as AdaDPS's preconditioner.
DPRMSprop = make_dp_optimizer_class(tf.keras.optimizers.RMSprop)
# The papers' DP-AdaGrad is that with `initial_accumulator_value=0.0`; Keras begins at 0.1.
DPAdagrad = make_dp_optimizer_class(tf.keras.optimizers.Adagrad)
