"""Which optimizers the compiled training step of a model was built with.

`fit` keeps its step until the model is compiled again. If another optimizer is assigned to
`model.optimizer`, the step goes on with those that it was built with, and their ledgers count.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any, Callable, NamedTuple

import tensorflow as tf

from tf_adaptive_dp._keras.callers import RunningFit, running_fit, running_models
from tf_adaptive_dp._keras.graphs import is_symbolic, outer_graph
from tf_adaptive_dp._keras.tracebacks import level_of_caller
from tf_adaptive_dp._keras.variables import native
from tf_adaptive_dp.accounting.earlier_releases import warn_of_releases_since
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.mechanism.replicas import num_replicas
from tf_adaptive_dp.normalization import refuse_unpaid_in
from tf_adaptive_dp.optimizers.fit_warnings import count_lost_releases
from tf_adaptive_dp.optimizers.refusals import refuse_data
from tf_adaptive_dp.sampling.datasets import is_drawn

_UNFINISHED = (
    "Training stopped in the middle of a batch: {held} of {parts} parts are held, and nothing of "
    "them was released. If the same data come next, in another pass or draw, an example could join "
    "the batch twice, and epsilon would not hold: call `optimizer.drop_unfinished_parts()` before."
)

_ONLY_MEASURED = (
    "No weights have changed: all batches of this optimizer measured the norms of gradients. At "
    "this noise and batch size that will need {needed}, and more if few gradients stand out from "
    "the noise. Train for more steps or in larger batches, or use an optimizer with a given clip "
    "norm, such as `ADADP(l2_norm_clip=1.0, ...)`."
)

_OF_ANOTHER = (
    "The training step of the model was built with another optimizer, which goes on to train it. "
    "This one's ledger lacks these releases, so epsilon would be too small, and if the other is "
    "not private, there is no epsilon. `model.compile` sets an optimizer and has the step built "
    "anew; assigning one to `model.optimizer` does not. Received: optimizer={optimizer}"
)


class _Built(NamedTuple):
    """What is known about a training function.

    Attributes:
      graph: that of its first trace.
      optimizers: those whose steps are in this graph.
    """

    graph: weakref.ref[tf.Graph]
    optimizers: weakref.WeakSet[Any]


# By the training function of a model.
_BUILT: weakref.WeakKeyDictionary[Callable, _Built] = weakref.WeakKeyDictionary()


def note_step(loss: tf.Tensor, optimizer: Any) -> None:
    """Notes that the training function which is being traced has a step of an optimizer.

    It also notes of how many examples the releases are, in case that `fit` does not end by itself.

    Args:
      loss: the loss that the optimizer was given; nothing is noted of an eager one.
      optimizer: the optimizer.
    """
    if not is_symbolic(loss):
        return
    fit = running_fit(optimizer) if num_replicas() == 1 else None
    if fit is not None:
        note_num_examples(optimizer, fit)
    graph = loss.graph
    while (around := outer_graph(graph)) is not None and outer_graph(around) is not None:
        graph = around
    functions = [getattr(model, "train_function", None) for model in running_models()]
    for function in (f for f in functions if f is not None):
        built = _BUILT.get(function)
        if built is None or built.graph() is None:  # or its first trace failed
            built = _BUILT[function] = _Built(weakref.ref(graph), weakref.WeakSet())
        if built.graph() is graph:
            built.optimizers.add(optimizer)


def note_num_examples(optimizer: Any, fit: RunningFit) -> None:
    """Notes in the ledger how many examples `fit` draws from, for its epsilon.

    It leaves the number to callbacks that state it, and to the samplings of the library.

    Args:
      optimizer: that of the model that is trained.
      fit: the call that trains it.
    """
    callbacks = fit.callbacks.callbacks if fit.callbacks else ()
    stated = any(hasattr(c, "num_examples") for c in callbacks)
    if stated or optimizer.examples_per_user is not None or is_drawn(fit.dataset):
        return
    number = fit.num_examples()
    if number:
        with tf.init_scope():  # a step may be traced now
            optimizer.ledger.note_units(number)


def _built(model: Any) -> _Built | None:
    """What is known about the training function of a model, if it has one."""
    function = getattr(model, "train_function", None)
    return None if function is None else _BUILT.get(function)


def refuse_step_of_another(model: Any, optimizer: Any) -> None:
    """Rejects an optimizer whose model has a step that was built with others.

    Guarantee: it knows the steps that this process built outside of replicas.

    Args:
      model: the model that `fit` trains, or `None`.
      optimizer: the one whose ledger is to count the training.

    Raises:
      NotPrivateError: if its ledger would lack the releases.
    """
    built = _built(model)
    if built is not None and optimizer not in built.optimizers:
        raise NotPrivateError(_OF_ANOTHER.format(optimizer=repr(optimizer)))


def _refuse_idle(optimizer: Any, fit: RunningFit) -> None:
    """Rejects, when a `fit` ends, an optimizer that has made no step at all.

    The step of the model is that of another one then, which may add no noise.
    """
    steps = int(tf.convert_to_tensor(optimizer.iterations)) + optimizer.unfinished_parts
    if not steps and fit.num_epochs > 0:
        raise NotPrivateError(_OF_ANOTHER.format(optimizer=repr(optimizer)))


def _refuse_unpaid(model: Any, optimizer: Any) -> None:
    """Rejects statistics that were released since the step was traced, and that no event pays for.

    Of several optimizers in one step, only the trace knows which one trains behind them.
    """
    built = _built(model)
    if built is None or len(built.optimizers) <= 1:
        refuse_unpaid_in(model, optimizer)


def check_finished_fit(optimizer: Any) -> None:
    """Does at the end of a `fit` what only the trace of its step would do before.

    A later `fit` traces no step, so what it trains on shows to callbacks alone, and here. It warns
    of parts of an incomplete batch, of what other optimizers released since the last `fit`, and if
    nothing was trained yet, as batches measured norms.

    Args:
      optimizer: that of the model that was trained.

    Raises:
      NotPrivateError: if the data set left out batches by what they hold, if accumulated batches
        reached from one pass into the next, if another optimizer trained the model, or if the
        ledger lacks the release of a normalization in it, or was set back.
    """
    fit = running_fit(optimizer)
    if fit is None:
        return
    if not count_lost_releases(fit.callbacks.callbacks if fit.callbacks else ()):
        optimizer.ledger.require_nothing_lost()
    refuse_data(optimizer, fit)
    refuse_step_of_another(fit.model, optimizer)
    _refuse_unpaid(fit.model, optimizer)
    _refuse_idle(optimizer, fit)
    note_num_examples(optimizer, fit)
    warn_of_releases_since([native(v) for v in fit.model.trainable_variables], optimizer.ledger)
    held = optimizer.unfinished_parts
    if held:
        message = _UNFINISHED.format(held=held, parts=optimizer.parts_per_batch)
        warnings.warn(message, stacklevel=level_of_caller())
    if optimizer.has_only_measured:
        message = _ONLY_MEASURED.format(needed=optimizer.batches_to_measure)
        warnings.warn(message, stacklevel=level_of_caller())
