"""What is among the callers of a step or a callback: Keras's `fit`, its data and its callbacks.

Keras does not tell an optimizer which model and data it trains on. While a step is built, `fit` is
among the callers, and these are in its local variables.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras import datasets
from tf_adaptive_dp._keras.generation import GENERATION, internal_module, keras

# What the ends of a `PyDataset` have shown, by the callbacks of the `fit` that it was given to: a
# step may be traced twice, and an eager one asks each time, while a batch may be slow to make.
_ENDS: weakref.WeakKeyDictionary[keras.callbacks.CallbackList, tuple[int, int] | None] = (
    weakref.WeakKeyDictionary()
)


def callbacks_beside(callback: tf.keras.callbacks.Callback) -> list[tf.keras.callbacks.Callback]:
    """All callbacks of the call of `fit` that is calling one of them; itself alone outside of one.

    Keras does not show a callback the list that it is in, so it is looked for among the callers.

    Args:
      callback: one whose method is running.
    """
    for owner in _owners():
        if isinstance(owner, keras.callbacks.CallbackList) and callback in owner.callbacks:
            return list(owner.callbacks)
    return [callback]


def is_in_train_step_of_users() -> bool:
    """Whether a `train_step` that is not Keras's own is running, and may unpack batches its way."""
    for caller in _callers():
        name = caller.f_code.co_name.removeprefix("tf__")  # AutoGraph's copy has this prefix
        if name == "train_step" and not _is_of_keras(caller):
            return True
    return False


def batch_of_step() -> Any:
    """What Keras's training function gives the `train_step` that is running; `None` without one."""
    for caller in _callers():
        name = caller.f_code.co_name.removeprefix("tf__")
        if name in ("run_step", "one_step_on_data") and (_is_of_keras(caller) or _is_own(caller)):
            return caller.f_locals.get("data")
    return None


def running_models() -> list[keras.Model]:
    """The models with a method that is running, such as `fit`."""
    return list({id(o): o for o in _owners() if isinstance(o, keras.Model)}.values())


def running_callbacks() -> list[keras.callbacks.Callback]:
    """The callbacks with a method that is running, the innermost first."""
    return [owner for owner in _owners() if isinstance(owner, keras.callbacks.Callback)]


def trained_variables_of_loaded_model() -> list[tf.Variable]:
    """Those of the model whose `.h5` file or SavedModel Keras is reading, if it is.

    Keras makes the model first, and does not build its optimizer for them.
    """
    for caller in _callers():
        if caller.f_code.co_name in ("load_model_from_hdf5", "load") and _is_of_keras(caller):
            model = caller.f_locals.get("model")
            return list(model.trainable_variables) if isinstance(model, keras.Model) else []
    return []


def is_in_fit() -> bool:
    """Whether a model's `fit` is among the callers.

    Its batches have a public size in the trace of a step (`batch_size`, or that of a data set with
    `drop_remainder=True`), or the trace leaves their size open.
    """
    return next(_running_fits(_callers()), None) is not None


def is_in_search_of_keras_tuner() -> bool:
    """Whether a search of KerasTuner's is among the callers, which trains one model after another.

    `HonestTuner`, which accounts for its searches, does not count.
    """
    callers = itertools.chain(_callers(), _waiting_for_replica())
    modules = [caller.f_globals.get("__name__", "") for caller in callers]
    of_ours = any(name.startswith("tf_adaptive_dp.tuning.") for name in modules)
    return not of_ours and any(name.partition(".")[0] == "keras_tuner" for name in modules)


class RunningFit:
    """A call of Keras's `fit` that is running.

    Attributes:
      model: the one that it trains.
      x: what it was given, or what a strategy divided.
      dataset: the same, if that is a `tf.data.Dataset`.
      callbacks: all that it calls, or `None` before there are any.
      num_epochs: how many it was told to train, without those before `initial_epoch`.
    """

    def __init__(self, variables: Mapping[str, Any]):
        """Of the local variables of `fit`."""
        self._variables = variables
        self.model: keras.Model = variables["self"]
        x, callbacks = variables.get("x"), variables.get("callbacks")
        if isinstance(x, tf.distribute.DistributedDataset):
            x = getattr(x, "_original_dataset", x)
        self.x: Any = x
        self.dataset = x if isinstance(x, tf.data.Dataset) else None
        is_list = isinstance(callbacks, keras.callbacks.CallbackList)
        self.callbacks: keras.callbacks.CallbackList | None = callbacks if is_list else None
        self.num_epochs: int = variables["epochs"] - variables["initial_epoch"]

    def batches_of_passes(self) -> int | None:
        """How many batches a pass over the data has, if it trains on more than one pass.

        Returns:
          `None` within one pass, or if the number is unknown.
        """
        of_pass, of_epoch = self._batches_of_pass(), self._batches_of_epoch()
        if not of_pass or not of_epoch or of_epoch * self.num_epochs <= of_pass:
            return None
        return of_pass

    def _batches_of_pass(self) -> int | None:
        """How many batches a pass over the data has; `None` if that is unknown."""
        if self.dataset is None:
            of_pass = _number_in(self._variables)
        else:
            of_pass = datasets.batches_of_a_pass(self.dataset)
        if of_pass is None and self._variables["steps_per_epoch"] is None:
            return self._batches_of_epoch()  # Keras reads the data once in each epoch
        return of_pass

    def _batches_of_epoch(self) -> int | None:
        """How many batches an epoch has; `None` if that is unknown."""
        if self._variables["steps_per_epoch"]:
            return self._variables["steps_per_epoch"]
        number = -1 if self.dataset is None else datasets.num_elements(self.dataset)
        told = getattr(self.callbacks, "params", None) or {}
        return number if number > 0 else told.get("steps")

    def sizes_of_batches(self) -> tuple[int, int | None] | None:
        """The size of the batches, and that of the last one if it differs.

        Returns:
          The size of the last one is `None` for a data set of an unknown number of examples, and
          for a `PyDataset` (a `Sequence` in Keras 2) that says its `batch_size`. `None` in place of
          both if all batches have one size, or if that is unknown: for other data than these,
          arrays and batches of a `tf.data.Dataset`, and for arrays with `steps_per_epoch`, which
          may end epochs before the last batch.
        """
        steps, x = self._variables.get("steps_per_epoch"), self._variables.get("x")
        if isinstance(x, keras.utils.Sequence):  # a name of `PyDataset`, too
            declared: Any = getattr(x, "batch_size", None)
            is_size = isinstance(declared, (int, np.integer)) and declared > 0
            return (int(declared), None) if is_size else None
        if self.dataset is not None:
            drawn = None if steps is None else steps * self._variables["epochs"]
            return datasets.sizes_of_batches(self.dataset, drawn)
        return None if steps is not None else _sizes_in(self._variables)

    def sizes_of_ends(self) -> tuple[int, int] | None:
        """The sizes of the first and the last batch of a `PyDataset`, if they differ.

        Returns:
          `None` if they are the same or cannot be told, and with `steps_per_epoch`, which may end
          epochs before the last batch.
        """
        if self.callbacks is None:
            return self._read_ends()
        if self.callbacks not in _ENDS:
            _ENDS[self.callbacks] = self._read_ends()
        return _ENDS[self.callbacks]

    def _read_ends(self) -> tuple[int, int] | None:
        x = self._variables.get("x")
        if not isinstance(x, keras.utils.Sequence) or self._variables["steps_per_epoch"]:
            return None
        with tf.init_scope():  # a step may be traced now
            number = (len(x) if GENERATION == 2 else x.num_batches) or 0
            if number < 2:
                return None
            first, last = _rows(x[0]), _rows(x[number - 1])
        return None if first is None or last is None or first == last else (first, last)

    def num_examples(self) -> int | None:
        """How many examples it was given, without those that it validates on.

        Returns:
          `None` if the number is unknown: for data that are neither arrays nor batches of a finite
          `tf.data.Dataset`.
        """
        if self.dataset is not None:
            return datasets.num_examples(self.dataset)
        parts = tf.nest.flatten(self._variables.get("x"))
        shape = getattr(parts[0], "shape", None) if parts else None
        return int(shape[0]) if shape and shape[0] is not None else None

    def some_examples(self, most: int) -> tuple | None:
        """Examples from all over the arrays, at most so many.

        Returns:
          (x, y, weights), nests of arrays; the weights are those of all examples, or those of
          `class_weight` if there are no others. `None` for data that are not dense arrays, or
          batches of their rows in a `tf.data.Dataset` that changes nothing.
        """
        x, y, weights = self._given_arrays()
        parts = [part for part in tf.nest.flatten((x, y, weights)) if part is not None]
        if not parts or not all(hasattr(part, "__array__") and np.ndim(part) for part in parts):
            return None  # sparse and ragged ones among them

        def some(part: Any) -> np.ndarray | None:
            return None if part is None else np.asarray(part[:: -(-len(part) // most) or 1])

        x, y = tf.nest.map_structure(some, (x, y))
        weights = tf.nest.map_structure(np.asarray, weights) if weights is not None else None
        if weights is None and self._variables.get("class_weight"):
            weights = np.array(list(self._variables["class_weight"].values()))
        return x, y, weights

    def _given_arrays(self) -> tuple:
        """(x, y, weights) as they were given, or as a data set was made of them; else `None`s."""
        if self.dataset is None:
            return tuple(self._variables.get(name) for name in ("x", "y", "sample_weight"))
        given = datasets.unchanged_arrays_of(self.dataset)
        given = given if isinstance(given, tuple) else (given,)
        return (None, None, None) if len(given) > 3 else (*given, None, None)[:3]


def running_fit(
    optimizer: tf.keras.optimizers.Optimizer, on_replicas: bool = True
) -> RunningFit | None:
    """The `fit` that trains with an optimizer; `None` if there is no such.

    Args:
      optimizer: that of the model that is trained.
      on_replicas: whether to find it from a step on several replicas, too, of which each looks.
    """
    waiting = _waiting_for_replica() if on_replicas else ()
    for found in _running_fits(itertools.chain(_callers(), waiting)):
        if found["self"].optimizer is optimizer:
            return RunningFit(found)
    return None


def _adapter_in(variables: Mapping[str, Any]) -> Any:
    """What Keras reads the data of a `fit` by; `None` before it has made that."""
    if GENERATION == 3:
        return getattr(variables.get("epoch_iterator"), "data_adapter", None)
    return getattr(variables.get("data_handler"), "_adapter", None)


def _number_in(variables: Mapping[str, Any]) -> int | None:
    """How many batches Keras makes of the data of a `fit` in one pass; `None` if it is unknown."""
    data = _adapter_in(variables)
    if GENERATION == 3:
        return getattr(data, "num_batches", None)
    return None if data is None else data.get_size()


def _sizes_in(variables: Mapping[str, Any]) -> tuple[int, int] | None:
    """The sizes of the batches that Keras makes of arrays, and of the last one, if it differs."""
    data = _adapter_in(variables)
    if GENERATION == 3:
        if not isinstance(data, internal_module("trainers.data_adapters").ArrayDataAdapter):
            return None
        size, last, num_batches = data.batch_size, data.partial_batch_size, data.num_batches
    else:
        if data is None or not data.has_partial_batch():
            return None
        size, last, num_batches = data.batch_size(), data.partial_batch_size(), data.get_size()
    several = num_batches is not None and num_batches > 1
    return (int(size), int(last)) if several and size and last and last != size else None


def _rows(batch: Any) -> int | None:
    """How many rows a batch has, by the first of its parts."""
    shape = getattr(tf.nest.flatten(batch)[0], "shape", None)
    return int(shape[0]) if shape else None


def _running_fits(callers: Iterable[types.FrameType]) -> Iterator[Mapping[str, Any]]:
    """The local variables of each of Keras's `fit` among the callers, the innermost first.

    A user's class may have its own `fit` around it, with other arguments.
    """
    for caller in callers:
        # Reading the variables of a frame copies them; those of the user's functions would live on.
        if caller.f_code.co_name == "fit" and _is_of_keras(caller):
            found = caller.f_locals
            if isinstance(found.get("self"), keras.Model):
                yield found


def _is_of_keras(caller: types.FrameType) -> bool:
    package, _, _ = caller.f_globals.get("__name__", "").partition(".")
    return package in ("keras", "tf_keras")


def _is_own(caller: types.FrameType) -> bool:
    return caller.f_globals.get("__name__", "").startswith("tf_adaptive_dp.")


def _owners() -> Iterator[Any]:
    """The objects whose methods are running, the innermost first."""
    for caller in _callers():
        # Before Python 3.13, a look at the variables of a function keeps what they hold until it
        # ends. So no other function is looked at.
        if caller.f_code.co_varnames[:1] == ("self",):
            yield caller.f_locals.get("self")


def _callers() -> Iterator[types.FrameType]:
    """The frames of the functions that are running, the innermost first."""
    return _frames_from(inspect.currentframe())


def _waiting_for_replica() -> Iterator[types.FrameType]:
    """The frames of the functions that wait for this replica, the innermost first.

    A step on several replicas is built in a thread for each of them. `fit` is in another one, which
    waits for these.
    """
    thread = threading.current_thread()
    if not tf.distribute.in_cross_replica_context() and tf.distribute.has_strategy():
        for innermost in sys._current_frames().values():
            frame: types.FrameType | None = innermost
            while frame is not None and not _waits_for(frame, thread):
                frame = frame.f_back
            yield from _frames_from(frame)


def _waits_for(frame: types.FrameType, thread: threading.Thread) -> bool:
    """Whether it is the function of TensorFlow that runs replicas in threads, with this one."""
    if frame.f_code.co_name != "_call_for_each_replica":
        return False
    return thread in frame.f_locals.get("threads", ())


def _frames_from(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
