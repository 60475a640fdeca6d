"""Private versions of Keras's own optimizers, and the factory that makes more of them."""

from __future__ import annotations

import tensorflow as tf

from tf_adaptive_dp.optimizers.docstrings import fill_docstring
from tf_adaptive_dp.optimizers.dp_optimizer import DPOptimizer
from tf_adaptive_dp.optimizers.registration import register


@register
@fill_docstring
class DPSGD(DPOptimizer, tf.keras.optimizers.SGD):
    """`tf.keras.optimizers.SGD` on private gradients.

    With the noisy mean gradient G of a minibatch of per-example gradients gᵢ:

        G = (Σᵢ gᵢ·min(1, C/‖gᵢ‖) + N(0, σ²C²·I)) / L
        θ ← θ − α·G

    With `momentum` μ, v ← μ·v − α·G and θ ← θ + v: the papers' DPMomentum.

    Guarantee: each minibatch is one release of the Gaussian mechanism and one entry in the ledger.
    Everything after G is post-processing.

    Args:
      {{mechanism_args}}
      {{side_information_args}}
      **kwargs: the arguments of `tf.keras.optimizers.SGD`, by name.

    Raises:
      {{raises}}

    References:
      - Abadi et al., "Deep Learning with Differential Privacy" (2016), arXiv:1607.00133.

    >>> optimizer = DPSGD(l2_norm_clip=1.0, noise_multiplier=0.0, learning_rate=0.5)
    >>> w = tf.Variable([0.0])
    >>> with tf.GradientTape() as tape:
    ...     loss = tf.constant([3.0, 0.5]) * w  # gradients 3, clipped to 1, and 0.5
    >>> _ = optimizer.minimize(loss, [w], tape)
    >>> w.numpy()
    array([-0.375], dtype=float32)
    """


@register
@fill_docstring
class DPAdam(DPOptimizer, tf.keras.optimizers.Adam):
    """`tf.keras.optimizers.Adam` on private gradients.

    With the noisy mean gradient G of `DPSGD` at step t:

        m ← β₁·m + (1 − β₁)·G,   v ← β₂·v + (1 − β₂)·G²
        θ ← θ − α·√(1 − β₂ᵗ)/(1 − β₁ᵗ) · m / (√v + ε)

    Guarantee: each minibatch is one release of the Gaussian mechanism and one entry in the ledger.
    Both moments are post-processing.

    Args:
      {{mechanism_args}}
      {{side_information_args}}
      **kwargs: the arguments of `tf.keras.optimizers.Adam`, by name.

    Raises:
      {{raises}}

    References:
      - Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2014), arXiv:1412.6980.
      - Abadi et al., "Deep Learning with Differential Privacy" (2016), arXiv:1607.00133.

    >>> optimizer = DPAdam(l2_norm_clip=1.0, noise_multiplier=1.1, learning_rate=0.01)
    >>> optimizer.ledger.num_releases
    0
    """


@register
@fill_docstring
class DPAdamW(DPOptimizer, tf.keras.optimizers.AdamW):
    """`tf.keras.optimizers.AdamW` on private gradients.

    The update of `DPAdam`, after weights have decayed by the factor `weight_decay` λ:

        θ ← θ − α·λ·θ

    Guarantee: each minibatch is one release of the Gaussian mechanism and one entry in the ledger.
    Both moments are post-processing, and the decay does not use the data.

    Args:
      {{mechanism_args}}
      {{side_information_args}}
      **kwargs: the arguments of `tf.keras.optimizers.AdamW`, by name.

    Raises:
      {{raises}}

    References:
      - Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2017), arXiv:1711.05101.
      - Abadi et al., "Deep Learning with Differential Privacy" (2016), arXiv:1607.00133.

    >>> optimizer = DPAdamW(l2_norm_clip=1.0, noise_multiplier=1.1, weight_decay=0.01)
    >>> optimizer.weight_decay
    0.01
    """


@register
@fill_docstring
class DPRMSprop(DPOptimizer, tf.keras.optimizers.RMSprop):
    """`tf.keras.optimizers.RMSprop` on private gradients: the papers' DP-RMSProp.

    With the noisy mean gradient G of `DPSGD`:

        v ← ρ·v + (1 − ρ)·G²,   θ ← θ − α·G / √(v + ε)

    Keras keeps ε inside the root, like the preconditioner of `AdaDPS`.

    Guarantee: each minibatch is one release of the Gaussian mechanism and one entry in the ledger.
    The second moment is post-processing.

    Args:
      {{mechanism_args}}
      {{side_information_args}}
      **kwargs: the arguments of `tf.keras.optimizers.RMSprop`, by name.

    Raises:
      {{raises}}

    References:
      - Tieleman and Hinton, "Lecture 6.5 - RMSProp" (2012), Coursera.
      - Abadi et al., "Deep Learning with Differential Privacy" (2016), arXiv:1607.00133.

    >>> optimizer = DPRMSprop(l2_norm_clip=1.0, noise_multiplier=1.1, rho=0.99)
    >>> optimizer.rho
    0.99
    """


@register
@fill_docstring
class DPAdagrad(DPOptimizer, tf.keras.optimizers.Adagrad):
    """`tf.keras.optimizers.Adagrad` on private gradients.

    With the noisy mean gradient G of `DPSGD`:

        v ← v + G²,   θ ← θ − α·G / √(v + ε)

    The papers' DP-AdaGrad starts from v = 0: `initial_accumulator_value=0.0`. The default is that
    of Keras, 0.1.

    Guarantee: each minibatch is one release of the Gaussian mechanism and one entry in the ledger.
    The sum of squares is post-processing.

    Args:
      {{mechanism_args}}
      {{side_information_args}}
      **kwargs: the arguments of `tf.keras.optimizers.Adagrad`, by name.

    Raises:
      {{raises}}

    References:
      - Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
        Optimization" (2011), Journal of Machine Learning Research 12.
      - Abadi et al., "Deep Learning with Differential Privacy" (2016), arXiv:1607.00133.

    >>> optimizer = DPAdagrad(1.0, noise_multiplier=1.1, initial_accumulator_value=0.0)
    >>> optimizer.initial_accumulator_value
    0.0
    """


# By Keras optimizer; `make_dp_optimizer_class` adds to it.
_PRIVATE_VERSIONS: dict[type, type] = {
    tf.keras.optimizers.SGD: DPSGD,
    tf.keras.optimizers.Adam: DPAdam,
    tf.keras.optimizers.AdamW: DPAdamW,
    tf.keras.optimizers.RMSprop: DPRMSprop,
    tf.keras.optimizers.Adagrad: DPAdagrad,
}

_DOCSTRING = """{{name}} on private gradients.

    The optimizer sees the noisy mean gradient of `DPSGD` in place of the gradient of the loss.

    Guarantee: each minibatch is one release of the Gaussian mechanism and one entry in the ledger.
    The rest is post-processing.

    Args:
      {{mechanism_args}}
      {{side_information_args}}
      **kwargs: the arguments of the Keras optimizer, by name.

    Raises:
      {{raises}}
    """


def make_dp_optimizer_class(keras_optimizer_class: type) -> type:
    """Makes the private version of a Keras optimizer.

    The new class takes the arguments of `DPSGD` that define the mechanism, and those of the Keras
    optimizer by name.

    Guarantee: the Keras optimizer sees the output of the Gaussian mechanism only. Whatever it
    computes (momentum, second moments, averages of the weights) is post-processing and costs no
    privacy.

    Args:
      keras_optimizer_class: a subclass of `tf.keras.optimizers.Optimizer`.

    Returns:
      The class, registered for saving as `tf_adaptive_dp>DP<name>`. Equal arguments give the same
      class; those of Keras's SGD, Adam, AdamW, RMSprop and Adagrad are `DPSGD` and so on.

    Raises:
      TypeError: if it is not such a subclass.

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
        raise TypeError(
            f"`keras_optimizer_class` is private already. Received: {keras_optimizer_class!r}"
        )
    if keras_optimizer_class not in _PRIVATE_VERSIONS:
        name = f"DP{keras_optimizer_class.__name__}"
        title = f"`{keras_optimizer_class.__name__}`"
        body = {"__doc__": _DOCSTRING.replace("{{name}}", title), "__module__": __name__}
        private = fill_docstring(type(name, (DPOptimizer, keras_optimizer_class), body))
        _PRIVATE_VERSIONS[keras_optimizer_class] = register(private)
    return _PRIVATE_VERSIONS[keras_optimizer_class]
