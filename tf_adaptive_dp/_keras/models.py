"""What the library reads from compiled Keras models, and tells Keras about its callbacks."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import tensorflow as tf

from tf_adaptive_dp._keras.generation import GENERATION, keras


def compiled_mean_loss(model: tf.keras.Model, batch: Any) -> tf.Tensor:
    """The mean loss of a batch in training mode; the model's metrics do not count it.

    Args:
      model: a compiled model.
      batch: x, (x, y) or (x, y, sample_weight).

    Returns:
      A scalar.
    """
    x, y, sample_weight = tf.keras.utils.unpack_x_y_sample_weight(batch)
    outputs = model(x, training=True)
    # The loss keeps running means for the progress line; it creates them when it is built.
    if GENERATION == 3:
        of_model = model._compile_loss
        if not of_model.built:
            of_model.build(y, outputs)
    else:
        of_model = model.compiled_loss
        if not of_model._built:
            of_model.build(outputs)
    states = [v for metric in of_model.metrics for v in metric.variables]
    values = [tf.identity(v) for v in states]
    loss = tf.reduce_mean(of_model(y, outputs, sample_weight))
    for state, value in zip(states, values):
        state.assign(value)
    return loss


def start_at_epoch(model: tf.keras.Model, epoch: int) -> None:
    """Has the call of `fit` that has just begun start with a later epoch, in Keras 3.

    Args:
      model: the model that is trained.
      epoch: the first epoch, counted from 0.
    """
    model._initial_epoch = epoch


def steps_per_call(model: tf.keras.Model) -> int:
    """How many training steps one call of the model's training function makes."""
    if GENERATION == 3:
        return int(model.steps_per_execution)
    steps = model._steps_per_execution
    return 1 if steps is None else int(steps)


def overruns_epochs(steps_per_call: int, steps_per_epoch: int) -> bool:
    """Whether the last call of an epoch makes more steps than are left, if the data go on.

    Args:
      steps_per_call: see the function of that name.
      steps_per_epoch: that of `fit`.
    """
    return GENERATION == 3 and bool(steps_per_epoch % steps_per_call)


def tunes_steps_per_call(model: tf.keras.Model) -> bool:
    """Whether Keras changes `steps_per_call` on its own while it trains."""
    return getattr(model, "enable_tune_steps_per_execution", False)


def allow_tensors_as_logs(callback: tf.keras.callbacks.Callback) -> None:
    """Spares a callback that does not read `logs` the wait for their values in each step.

    Keras 3 always waits for a callback that acts on batches.
    """
    callback._supports_tf_logs = True


def callbacks_beside(callback: tf.keras.callbacks.Callback) -> list[tf.keras.callbacks.Callback]:
    """All callbacks of the call of `fit` that is calling one of them; itself alone outside of one.

    Keras does not show a callback the list that it is in, so it is looked for among the callers.

    Args:
      callback: one whose method is running.
    """
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList) and callback in owner.callbacks:
            return list(owner.callbacks)
        frame = frame.f_back
    return [callback]


def leave_padding_out_of_metrics(model: keras.Model) -> None:
    """Gives metrics that were compiled without weights those of the batches.

    The padding of Poisson batches has weight 0, and other metrics would count it. Without weights
    in the data, as in validation, the values stay the same.

    Args:
      model: a compiled model. If its metrics exist already, there is a warning instead.
    """
    container = model._compile_metrics if GENERATION == 3 else model.compiled_metrics
    if container is None or not container._user_metrics:
        return
    built = container.built if GENERATION == 3 else container._built
    names = ("_user_metrics", "_user_weighted_metrics")
    if built or container._user_weighted_metrics:
        warnings.warn(
            "Metrics in `metrics` count the padding of Poisson batches as examples. Pass them as "
            "`weighted_metrics` to `compile`. Received: "
            f"metrics={container._user_metrics!r}",
            stacklevel=4,
        )
        return
    if GENERATION == 2:
        names = ("_metrics", "_weighted_metrics")
    setattr(container, names[1], getattr(container, names[0]))
    setattr(container, names[0], None)
