"""Argument texts that the optimizers' docstrings share, and the decorator that fills them in."""

from __future__ import annotations

import functools
import inspect

# By placeholder: "{{mechanism_args}}" in a docstring stands for the first of these texts. The
# first line of a text takes the place of the placeholder; the others bring their indentation, that
# of a docstring without the indentation that all of its lines share.
SHARED_TEXTS = {
    "mechanism_args": """\
l2_norm_clip: C, the bound on the L2 norm of each example's gradient; at least 1e-12. Or
    `"measured"`: the first W = 2 + ⌊(25·σ/L)²/2⌋ batches, or one more to make them even, release
    a noisy histogram of the gradients' norms in place of gradients, and change no weights. From
    then on C is a tenth of the upper quartile.
  noise_multiplier: σ. Gaussian noise of standard deviation σ·C is added to the sum of the
    clipped gradients. 0 adds none: it gives no privacy and is for tests only.
  num_microbatches: `None` clips the gradient of every example. A number splits each batch into
    that many groups and clips the mean gradient of each group. This is faster, but adding or
    removing one example can change the sum by up to 2C, so the ledger records σ/2, unless each
    group is a single example. All batches must have the same size.
  expected_batch_size: L, the public constant that divides the noisy sum. `None` uses
    `batch_size` of `fit` for arrays, that of `batch` for a `tf.data.Dataset`, and the attribute
    `batch_size` of a `keras.utils.PyDataset`, if their last batch may be smaller, and otherwise the
    size of the first batch, which all batches must have. Batches of random size need a number.
  clipping: `"flat"`; `"automatic"`, which normalizes every gradient; `"per_layer"` or a
    `PerLayerClipping`; `"adaptive"` or an `AdaptiveClipping`, whose first bound is
    `l2_norm_clip`.
  gradients: how to compute per-example gradients: `"auto"`, `"traced"` or `"materialized"`.
  gradient_accumulation_steps: k. Each batch arrives in k parts, one call per part. The
    optimizer releases and applies one gradient, after the last part. `expected_batch_size`
    counts the examples of all k parts.
  loss_scale: a power of two from 1 to 2**24. The loss is multiplied by it before
    differentiation, and gradients are divided by it before clipping. `None` uses 1024 for
    layers with a mixed-precision policy and 1 otherwise.
  noise: how the noise of a step depends on that of earlier steps: `None` or
    `accounting.IndependentNoise()`; or `accounting.BandedNoise(bands)`, which cancels part of
    earlier noise, for batches of a `sampling.CyclicPoissonSampling` with as many groups; or
    `accounting.TreeNoise(steps_per_tree)`, DP-FTRL, for batches of a `sampling.FixedOrder`.
  secure_noise: whether to draw noise from the operating system's cryptographic generator,
    which resists floating-point attacks (see `mechanism.secure_noise`). It is slower, and
    rejected under XLA and on several replicas.
  seed: seed of the noise, for tests only. `None` uses the operating system's entropy.
  examples_per_user: `None` protects single examples. A number k says that each k neighboring
    rows of a batch belong to one user, whose gradient, the sum over these rows, is clipped as
    one. `expected_batch_size` then counts users. `PrivacyPlan(user_ids=...)` sets it, and only
    the batches of such a plan or of `poisson_batches(user_ids=...)` fit.""",
    "side_information_args": """\
side_information: `None`, or the `FixedPreconditioner`, `PublicGradients` or
    `DelayedPreconditioner` that preconditions gradients before they are clipped, as in `AdaDPS`.
    The update rule stays the same.""",
    "public_data_args": """\
side_information: `PublicGradients` or `FixedPreconditioner`. Also pass `PublicGradients` to
    `fit` as a callback.""",
    "raises": """\
TypeError, ValueError: if an argument has the wrong type or is out of range.
  NotPrivateError: in training, for anything that would void the guarantee: a loss that is
    not a sum or a mean over examples, layers that mix examples, or gradients that did not
    come from the mechanism.""",
}


def fill_docstring(cls: type) -> type:
    """Replaces the `{{placeholders}}` in a class's docstring by the texts of `SHARED_TEXTS`.

    Args:
      cls: a class whose docstring is a literal, so that editors and linters see it too.

    Returns:
      The same class.
    """
    if cls.__doc__:  # None under `python -OO`
        # As Python 3.13 does by itself.
        cls.__doc__ = functools.reduce(
            lambda text, item: text.replace("{{" + item[0] + "}}", item[1]),
            SHARED_TEXTS.items(),
            inspect.cleandoc(cls.__doc__),
        )
    return cls
