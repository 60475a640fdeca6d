"""Checks that reject what would break the optimizers' guarantee; they change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_adaptive_dp._keras.callers import RunningFit
from tf_adaptive_dp._keras.datasets import rearranges_parts
from tf_adaptive_dp._keras.optimizers import APPLYING, HOW_TO_STEP, has_slots_for
from tf_adaptive_dp._keras.tied_examples import choices_of_batches, copies_in_batches, takes_apart
from tf_adaptive_dp._keras.variables import path_of
from tf_adaptive_dp.accounting.noise_strategies import IndependentNoise, NoiseStrategy
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.batch_axis.analysis import comes_from_data
from tf_adaptive_dp.gradients.released import completion
from tf_adaptive_dp.gradients.source import PerExampleGradients
from tf_adaptive_dp.mechanism.replicas import num_replicas, refuse_unsupported_strategy
from tf_adaptive_dp.sampling.datasets import is_drawn
from tf_adaptive_dp.sampling.sources import is_draw, refuse_ties
from tf_adaptive_dp.side_information.provenance import uncounted_events

# What to do about parts that are rearranged after batches were repeated or drawn.
_BEFORE = {
    "repeated": "Rearrange them before `repeat`.",
    "drawn": "Leave that out: the draws are random, and their parts come in turn.",
}
# How a batch comes to hold an example several times, by method, and what to do about it.
_COPIES = {
    "repeat": (
        "with `repeat` before `batch`, where a batch may span two passes. Batch before you repeat: "
        "`dataset.shuffle(n).batch(size).repeat()`. To balance classes, give the examples weights."
    ),
    "concatenate": (
        "with `concatenate` of a data set and itself before `batch`. Use each example once, as it "
        "is or changed at random."
    ),
    "sample_from_datasets": (
        "with `sample_from_datasets`, `choose_from_datasets` or `rejection_resample`, which take "
        "examples from several data sets that hold the same ones. Use each example once; to "
        "balance classes, give the examples weights."
    ),
    **dict.fromkeys(
        ("flat_map", "interleave"),
        "with a `flat_map` or `interleave` before `batch` whose function gives the same examples "
        "for several elements. Use each example once: have the function read a part of its own, as "
        "with `shard`.",
    ),
    "random indices": (
        "whose functions draw rows of an array by random indices, of which several may be the "
        "same. Draw with `poisson_batches` or `fixed_size_batches`, or make the data set of the "
        "array, and shuffle it."
    ),
    "equal indices": (
        "of `Dataset.range` whose function makes the same of several numbers, as `i % n` does, "
        "before `batch`. Count each example once, and batch before you repeat."
    ),
    "zip": (
        "with `zip` of a data set and itself in another order, as for MixUp. Use each example "
        "once; `zip` features and labels before you shuffle."
    ),
}

_SET_RATES = (
    tf.keras.callbacks.LearningRateScheduler,
    tf.keras.callbacks.ReduceLROnPlateau,
)


def refuse_unsupported_setting(optimizer: Any) -> None:
    """Rejects strategies, settings and places of creation for which replicas are not proven."""
    refuse_unsupported_strategy()
    if num_replicas() == 1:
        return
    needed = {
        "num_microbatches": (optimizer.num_microbatches, None),
        "examples_per_user": (optimizer.examples_per_user, None),
        "gradient_accumulation_steps": (optimizer.parts_per_batch, 1),
        "noise": (optimizer.noise, IndependentNoise()),
    }
    for name, (value, only) in needed.items():
        if value != only:
            raise NotPrivateError(
                f"`{name}` must be {only} on several replicas. Received: {name}={value} on "
                f"{num_replicas()} replicas"
            )
    if not optimizer.ledger.was_created_in(tf.distribute.get_strategy()):
        raise NotPrivateError(
            "`optimizer` must be created within `strategy.scope()`, so that each replica has a "
            "ledger of its own: in one ledger, every step would count once for each replica. "
            f"Received: an optimizer created outside of it, on {num_replicas()} replicas. Create "
            "and compile both model and optimizer in the scope."
        )


def refuse_uncounted_side_information(optimizer: Any) -> None:
    """Rejects a ledger from which the release of the side information was taken away.

    Setting `other_events`, rather than adding to them, does that.
    """
    missing = uncounted_events(optimizer.side_information, optimizer.ledger.other_events)
    if missing:
        raise NotPrivateError(
            "The ledger lacks the release of the optimizer's side information, so epsilon would be "
            "too small. Add it: `optimizer.ledger.other_events += "
            "(optimizer.side_information.provenance,)`. If it was computed from data that have "
            "nothing to do with this training, declare it with `provenance='public'`. Received: "
            f"provenance={missing[0]!r}, other_events={optimizer.ledger.other_events!r}"
        )


def refuse_data(optimizer: Any, fit: RunningFit) -> None:
    """Rejects data by which an example moves a sum by more than C, or decides if there is one.

    The trace of a step cannot see what a later `fit` trains on, so callbacks and the end of `fit`
    ask, too.
    """
    if fit.dataset is not None:
        _refuse_dataset(fit.dataset)
    _refuse_batches_over_two_passes(optimizer, fit)


def _refuse_dataset(data: tf.data.Dataset) -> None:
    """Rejects data sets that leave out batches by what they hold, or tie or copy examples.

    Whether there is a release would show what a batch holds (how large it is, and its number, are
    public), and one example could move the sum by more than C.
    """
    for method, result in choices_of_batches(data):
        if result is None or comes_from_data(result):
            raise NotPrivateError(
                "Whether a batch is released must not depend on what it holds: no noise hides that "
                "a release is missing, so epsilon does not hold. Received: a `tf.data.Dataset` "
                f"with `{method}` after its examples were batched. Remove it: an empty batch is a "
                "release like any other, and padding does no harm. Filter examples before they "
                "are batched."
            )
    regroups = takes_apart(data, is_draw)
    if regroups is not None:
        raise NotPrivateError(
            "Batches must stay as they were drawn: one that holds examples of two draws may hold "
            "an example twice, which moves the sum by 2C. Received: a `tf.data.Dataset` with "
            f"`{regroups}` after its batches were drawn. Leave it out: the sampling sets the size "
            "of batches."
        )
    refuse_ties(data, batched=True)
    for method in copies_in_batches(data):
        raise NotPrivateError(
            "No batch may hold an example several times: it would move the sum by that many times "
            f"C. Received: a `tf.data.Dataset` {_COPIES[method]}"
        )


def _refuse_batches_over_two_passes(optimizer: Any, fit: RunningFit) -> None:
    """Rejects a `fit` whose accumulated batches reach from one pass over the data into the next.

    An example that is in parts of both moves the sum by 2C, and so does one in parts of two draws.
    A draw of the samplings holds none twice, however many epochs its parts reach into.
    """
    parts = optimizer.parts_per_batch
    if parts == 1:
        return
    passes, drawn = fit.batches_of_passes(), is_drawn(fit.dataset)
    if passes is not None and passes % parts and not drawn:
        raise over_two_passes(f"{passes} batches in each pass, gradient_accumulation_steps={parts}")
    if fit.dataset is None:
        return
    kind = rearranges_parts(fit.dataset, parts, is_draw)
    if kind is not None:
        after = "drawn" if drawn else "repeated"
        raise NotPrivateError(
            "An accumulated batch must consist of the parts of one draw, or of one pass over the "
            "data: otherwise an example could join it twice. Received: a `tf.data.Dataset` that "
            f"rearranges batches after they were {after}, of type {kind}, and "
            f"gradient_accumulation_steps={parts}. {_BEFORE[after]}"
        )


def over_two_passes(received: str) -> NotPrivateError:
    """What is raised of an accumulated batch that reaches from one pass into the next."""
    return NotPrivateError(
        "An accumulated batch must not reach from one pass over the data into the next, where an "
        "example could join it twice. Make the number of batches of a pass a multiple of "
        "`gradient_accumulation_steps` (`batch_size`, `drop_remainder`, `take` before `repeat`), "
        f"or draw batches with a sampling of tf_adaptive_dp. Received: {received}"
    )


def refuse_rates(optimizer: Any, callbacks: Sequence[tf.keras.callbacks.Callback]) -> None:
    """Rejects Keras's callbacks that set a learning rate which the optimizer adapts."""
    for callback in callbacks:
        if isinstance(callback, _SET_RATES) and optimizer.adapts_learning_rate:
            raise ValueError(
                f"{type(optimizer).__name__} adapts its learning rate, which the callback would "
                "overwrite. Leave the callback out, or compile with an optimizer that keeps its "
                f"rate, such as `DPSGD`. Received: {type(callback).__name__}"
            )


def refuse_16_bit_rewrites() -> None:
    """Rejects options by which TensorFlow rewrites operations of float32 in 16 bits."""
    options = tf.config.optimizer.get_experimental_options()
    rewritten = [name for name in options if "mixed_precision" in name and options[name]]
    if rewritten:
        raise NotPrivateError(
            "TensorFlow must not rewrite operations in 16 bits, as norms would be too small. "
            f"Received: tf.config.optimizer options {', '.join(rewritten)}. Turn them off, and use "
            "`keras.mixed_precision` for layers that compute in 16 bits."
        )


def refuse_correlated_noise(optimizer: Any, noise: NoiseStrategy) -> None:
    """Rejects correlated noise for update rules that assume independent noise.

    Raises:
      ValueError: if the optimizer's rule, or its side information, assumes that the noise of each
        step is independent.
    """
    if noise.is_independent:
        return
    why, side_information = optimizer.needs_independent_noise, optimizer.side_information
    if why is not None:
        raise ValueError(
            f"`noise` must be IndependentNoise() for {type(optimizer).__name__}: {why}. Leave "
            "`noise` out, in a plan of `PrivacyPlan(...)`; or keep it and use ADADP, which needs "
            "no tuning either and takes banded noise, or DPSGD or DPAdam, which take any. "
            f"Received: noise={noise!r}"
        )
    if side_information is not None and side_information.learns:
        raise ValueError(
            "`noise` must be IndependentNoise() for side information that learns from released "
            "gradients: it tells them from their noise as if that were independent. Leave out "
            f"`side_information` or `noise`. Received: noise={noise!r}, side_information="
            f"{type(side_information).__name__}"
        )


def refuse_measuring_once(optimizer: Any) -> None:
    """Rejects a measured clip norm where later gradients have other norms than the first ones.

    Raises:
      ValueError: with side information that learns, whose scales change all norms.
    """
    information = optimizer.side_information
    if optimizer.measures_clip and information is not None and information.learns:
        raise ValueError(
            "The first batches cannot show the norms of gradients that a "
            f"`{type(information).__name__}` will rescale later. Pass a number as `l2_norm_clip`, "
            "such as 1.0, or use `UntunedSGD`, which measures again. Received: "
            f"l2_norm_clip='measured', side_information={information!r}"
        )


def refuse_other_variables(optimizer: Any, variables: Sequence[tf.Variable]) -> None:
    """Rejects variables without slots, as Keras would, and variables that are listed twice.

    Their gradients would be released and applied twice, and two places of one histogram would hold
    the counts of one example.
    """
    listed = {id(v): 0 for v in variables}
    for variable in variables:
        listed[id(variable)] += 1
    twice = sorted({path_of(v) for v in variables if listed[id(v)] > 1})
    if twice:
        raise ValueError(
            "`var_list` must hold each variable once. Received more than once: "
            f"{', '.join(twice)}. Models that share layers list these in each of their "
            "`trainable_variables`."
        )
    others = [path_of(v) for v in variables if not has_slots_for(optimizer, v)]
    if others:
        raise ValueError(
            "`var_list` must hold variables that the optimizer was built for. Received: "
            f"{', '.join(others)}. Call `optimizer.build(variables)` with all of them before the "
            "first step. To continue with other variables, as after unfreezing layers, compile "
            "with `type(optimizer).from_config(optimizer.get_config())`, whose ledger holds the "
            "releases so far. The ledger of a new optimizer would lack them."
        )


def refuse_counting(optimizer: Any, source: PerExampleGradients) -> None:
    """Rejects losses that depend on a random batch size, as one more example would change all."""
    with tf.init_scope():
        size = optimizer.expected_batch_size
    if source.loss.counts_batch and size is not None and optimizer.num_microbatches is None:
        raise NotPrivateError(
            "The loss of each example depends on the number of examples in the batch, which is "
            f"not public here. Received: expected_batch_size={size} and "
            "batches whose size is not fixed. Do not divide the loss by the batch size (the "
            "optimizer does so), or make all batches equal (`plan.fit(..., equal_rows=True)`, or "
            "`drop_remainder=True` without a plan)."
        )


def refuse_foreign_gradients(grads_and_vars: Sequence[tuple]) -> None:
    """Rejects gradients that did not come from the mechanism."""
    foreign = [path_of(v) for g, v in grads_and_vars if g is not None and completion(g) is None]
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise NotPrivateError(
            f"{APPLYING} only gradients that were clipped and noised by this library. "
            f"Received: other gradients, for {', '.join(foreign[:3])}{more}. (Only gradients "
            "that you processed after their release may go to `apply_gradients` with "
            "`non_private_gradients=True`; with any others there is no privacy.) "
            f"{HOW_TO_STEP}."
        )


def refuse_gradients_of_one_replica(
    name: str | None = None,
    skip_gradients_aggregation: bool = False,
    experimental_aggregate_gradients: bool = True,
    **kwargs: Any,
) -> None:
    """Rejects applying gradients without summing them: only the sum has all of the noise.

    The arguments are those of Keras's `apply_gradients`.
    """
    del name, kwargs
    if num_replicas() > 1 and (skip_gradients_aggregation or not experimental_aggregate_gradients):
        raise NotPrivateError(
            "The gradients of one replica have only a part of the noise, so they must be summed. "
            "Received: skip_gradients_aggregation=True on several replicas. Leave it out."
        )
