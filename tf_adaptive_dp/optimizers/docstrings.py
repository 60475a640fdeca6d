"""What the docstrings of all optimizers share."""

from __future__ import annotations

# The part of "Args:" that all private optimizers share.
ARGUMENTS = """\
      l2_norm_clip: C ≥ 1e-12, the bound of the L2 norm of each example's gradient.
      noise_multiplier: σ ≥ 0; noise of standard deviation σ·C is added to the sum. 0 is for tests
        and gives no privacy.
      num_microbatches: `None` clips the gradient of every example. A number clips the mean
        gradient of each of so many groups instead: faster, but one example in another's place
        changes the sum by up to 2C, and the ledger counts σ/2. For batches of one size only.
      expected_batch_size: L, the public number that the noisy sum is divided by. `None` means
        that all batches have one size, and that it is L; batches of random size need a number.
      clipping: `"flat"`; `"automatic"`, which normalises every gradient; `"per_layer"` or a
        `PerLayerClipping`; `"adaptive"` or an `AdaptiveClipping`, for which `l2_norm_clip` is the
        first bound.
      gradients: how per-example gradients are computed: `"auto"`, `"traced"` or `"materialized"`.
      gradient_accumulation_steps: k; a batch comes in k parts, one call each, and is released and
        applied with the last. `expected_batch_size` is that of all k together.
      loss_scale: a power of two, from 1 to 2**24, that the loss is multiplied by before it is
        differentiated; undone before clipping. `None` takes 1024 for layers with a mixed policy
        and else 1.
      secure_noise: draw the noise from the operating system's cryptographic generator, safe
        against floating-point attacks (see `mechanism.secure_noise`); slower, not under XLA.
      seed: seed of the noise, for tests only; `None` takes the operating system's entropy."""

# Of those whose side information is optional.
SIDE_INFORMATION = """\
      side_information: `None`, or a `FixedPreconditioner` or `PublicGradients` by which gradients
        are divided before they are clipped, as `AdaDPS` does; the update rule is as always."""

RAISES = """
    Raises:
      TypeError, ValueError: for an argument of the wrong type or out of its range.
      NotPrivateError: in training, for what would void the guarantee: a scalar loss, layers that
        mix examples, gradients that did not come from the mechanism."""
