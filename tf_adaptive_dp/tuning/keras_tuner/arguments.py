"""Reads and checks the arguments of a tuner before anything is drawn or trained.

From top to bottom: the arguments of the tuner, those of its `search` (`FitArguments`), and the
callbacks, of which every trial gets copies.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras_tuner
import numpy as np
import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras import process_state
from tf_adaptive_dp.callbacks import PrivacyBudget, PrivacyMonitor
from tf_adaptive_dp.callbacks.release_log import ReleaseLog
from tf_adaptive_dp.durable import files
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.sampling import datasets, draws, sampling_epsilon, sources
from tf_adaptive_dp.sampling.draws import Sampling
from tf_adaptive_dp.tuning.keras_tuner import space
from tf_adaptive_dp.tuning.strategies import (
    Composition,
    LiuTalwar,
    RepeatAndSelect,
    Score,
    Strategy,
)

# --- arguments of the tuner ----------------------------------------------------------------------


_NAMES = ("composition", "liu_talwar", "repeat_and_select")


def read_strategy(named: str | Strategy, num_trials: float | None) -> Strategy | None:
    """The strategy for a name; `None` for the composition of a whole space.

    Raises:
      TypeError, ValueError: if there is no such strategy, or the number of trials is missing or
        given twice.
    """
    if isinstance(named, (Composition, LiuTalwar, RepeatAndSelect)):
        if num_trials is not None:
            raise ValueError(
                "The strategy says how many trials there are: leave out `num_trials`. Received: "
                f"num_trials={num_trials!r}, strategy={named!r}"
            )
        return named
    name = checks.choice("strategy", named, _NAMES)
    if name == "composition":
        if num_trials is None:
            return None
        return Composition(checks.integer("num_trials", num_trials, 1))
    if num_trials is None:
        raise ValueError(
            f"`num_trials` is required with strategy={name!r}: the mean number of trials. "
            "Received: num_trials=None"
        )
    mean = checks.number("num_trials", num_trials, 1)
    return LiuTalwar(gamma=1 / mean) if name == "liu_talwar" else RepeatAndSelect(mean)


def strategy_for_space(
    strategy: Strategy | None, hyperparameters: keras_tuner.HyperParameters
) -> Strategy:
    """Fits a strategy to a space: composition has at most one trial per candidate.

    Raises:
      ValueError: if the whole of an infinite space is requested.
    """
    if strategy is not None and not isinstance(strategy, Composition):
        return strategy
    candidates = space.listed(hyperparameters)
    if candidates is None:
        if strategy is None:
            raise ValueError(
                "The space is not finite, or very large: pass `num_trials`, or give its numbers a "
                "`step`. Received: num_trials=None"
            )
        return strategy
    if strategy is None:
        return Composition(len(candidates))
    return dataclasses.replace(strategy, num_trials=min(strategy.num_trials, len(candidates)))


def check_score(score: Score) -> Score:
    """Returns `score` if it is a valid score; raises TypeError otherwise."""
    if isinstance(score, type) or not isinstance(score, Score):
        raise TypeError(
            "`score` must say what the validation data are: PublicScore(), NoisyScore(...) or "
            f"UnprotectedScore(). Received: score={score!r}"
        )
    return score


def check_sampling(sampling: Sampling | str) -> Sampling | str:
    """Returns `sampling`, or raises ValueError if a search cannot account for it."""
    sampling_epsilon.check_sampling(sampling)
    if sampling_epsilon.label_of(sampling) not in ("poisson", "shuffled"):
        raise ValueError(
            "A search accounts for Poisson batches and for shuffled ones only: the epsilon of "
            "batches of a fixed size has another adjacency, and other samplings are for correlated "
            f"noise. Draw Poisson batches instead. Received: sampling={sampling!r}"
        )
    if getattr(sampling, "examples_per_user", None) is not None:
        raise ValueError(
            "A search protects examples; it does not draw users. Leave out `examples_per_user`. "
            f"Received: sampling={sampling!r}"
        )
    if getattr(sampling, "seed", None) is not None:
        raise ValueError(
            "With a seed all trials would have the same batches, which anyone can predict: leave "
            f"it out. Received: sampling={sampling!r}"
        )
    return sampling


def check_objective(objective: keras_tuner.Objective) -> None:
    """Raises NotPrivateError if scores would not be computed from the validation data."""
    names = list(getattr(objective, "name_to_direction", {objective.name: None}))
    if not all(name.startswith("val_") for name in names):
        raise NotPrivateError(
            "Candidates are compared by metrics of the validation data, because those of the "
            "training data are not private. Pass an `objective` that begins with 'val_'. Received: "
            f"objective={names}"
        )


def check_hypermodel(hypermodel: keras_tuner.HyperModel) -> None:
    """Raises ValueError if the hypermodel trains models itself."""
    if type(hypermodel).fit is not keras_tuner.HyperModel.fit or "fit" in vars(hypermodel):
        raise ValueError(
            "Every candidate is trained with the arguments of `search`, so that all cost the same: "
            f"leave out the hypermodel's method `fit`. Received: hypermodel={hypermodel!r}"
        )


def check_folder(folder: Path, overwrite: bool) -> None:
    """Raises an error if a project folder cannot be used, before anything is changed.

    Raises:
      ValueError: if it belongs to another tuner.
      RuntimeError: if it should be overwritten but another process is using it.
      NotImplementedError: if KerasTuner's parallel search is requested.
    """
    if "KERASTUNER_ORACLE_IP" in os.environ:
        raise NotImplementedError(
            "HonestTuner cannot search in parallel: its journal is for one process. Unset "
            "KERASTUNER_ORACLE_IP. Received: "
            f"KERASTUNER_ORACLE_IP={os.environ['KERASTUNER_ORACLE_IP']!r}"
        )
    if not overwrite and list(folder.glob("tuner*.json")):
        raise ValueError(
            "The folder holds a search of another tuner: pass another `project_name`. Received: "
            f"{str(folder)!r}"
        )
    if overwrite and is_in_use(folder):
        raise RuntimeError(
            "The search is in progress in another process, so it cannot be overwritten. "
            f"Received: {str(folder)!r}"
        )


def is_in_use(folder: Path) -> bool:
    """Whether a process is running the search in this folder."""
    try:
        file = os.open(folder / "secret" / "journal", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        files.lock(file, "")
    except RuntimeError:
        return True
    finally:
        os.close(file)
    return False


# Arguments of KerasTuner's tuners and oracles that do not apply here, and what to do instead.
_CANDIDATES = (
    "candidates must not depend on the results of others; see `strategy` for the ways to search"
)
_GROWS = (
    "the space is fixed before the search: declare all hyperparameters in `build_model`, or pass "
    "those that may be tuned as `hyperparameters`"
)
_COMPILED = "compile the models in `build_model`, which all cost the same"
_KERAS_TUNER = {
    "max_trials": (
        "the number of trials, or its mean, is `num_trials`; with 'composition' it may be left out"
    ),
    "seed": "candidates are secret, drawn with the operating system's entropy",
    "executions_per_trial": (
        "a trial trains one model, and a second model would cost as much as another trial: let "
        "`num_trials` be larger"
    ),
    "max_retries_per_trial": "a trial that crashed is paid for and counts as the worst",
    "max_consecutive_failed_trials": (
        "no number of crashes ends a search, since that would reveal something about its trials"
    ),
    "tune_new_entries": _GROWS,
    "allow_new_entries": _GROWS,
    "max_model_size": "leave models that are too large out of the space",
    "optimizer": _COMPILED,
    "loss": _COMPILED,
    "metrics": _COMPILED,
    "distribution_strategy": "make it a part of `build_model`, if its optimizer allows replicas",
    "oracle": _CANDIDATES,
    "max_epochs": "`epochs` is an argument of `search`, the same for all trials",
    "logger": "KerasTuner no longer uses it",
    "tuner_id": "only one process at a time can run a search",
    **dict.fromkeys(
        ("factor", "hyperband_iterations", "num_initial_points", "alpha", "beta"), _CANDIDATES
    ),
}


def refuse_keras_tuners(given: dict[str, Any]) -> None:
    """Raises TypeError for unexpected arguments, with advice for those of KerasTuner.

    Args:
      given: arguments beyond those of HonestTuner, by name.
    """
    for name, value in given.items():
        if name not in _KERAS_TUNER:
            raise TypeError(f"HonestTuner got an unexpected keyword argument: {name}={value!r}")
        raise TypeError(
            f"HonestTuner has no `{name}`: {_KERAS_TUNER[name]}. Leave it out. Received: "
            f"{name}={value!r}"
        )


# --- arguments of `search`, which are those of `fit` ---------------------------------------------


# Arguments of `fit` that the plan of a search describes, and those that do not matter to a trial.
_OF_SCHEDULE = ("epochs", "steps_per_epoch")
_OF_PROCESS = ("verbose", "workers", "use_multiprocessing", "max_queue_size")


@dataclasses.dataclass(frozen=True)
class FitArguments:
    """The arguments of `Model.fit` for every trial.

    Attributes:
      arguments: the arguments of `fit` other than `callbacks`, by name.
      callbacks: the user's callbacks.
      validation: `(x, y)` or `(x, y, sample_weight)`, or a data set.
      epochs: number of epochs per trial.
      steps_per_epoch: number of calls of the optimizer per epoch.
      batch_size: the batch size of arrays; `None` if the data come in batches.
    """

    arguments: dict[str, Any]
    callbacks: list
    validation: Any
    epochs: int
    steps_per_epoch: int
    batch_size: int | None

    @classmethod
    def read(cls, args: tuple, kwargs: dict, *, releases_all: bool) -> FitArguments:
        """Reads the arguments of a call of `search`.

        Args:
          args: positional arguments of `search`.
          kwargs: keyword arguments of `search`.
          releases_all: whether the output of every trial may be seen.

        Raises:
          TypeError: if `fit` does not accept the arguments, or the data are lists of numbers.
          ValueError: if an argument does not suit a search, or the number of steps is unknown.
        """
        bound = inspect.signature(tf.keras.Model.fit).bind(None, *args, **kwargs)
        given = dict(list(bound.arguments.items())[1:])
        _refuse_unsuitable(given)
        callbacks = list(given.pop("callbacks", None) or [])
        if not releases_all:
            if given.get("verbose", 0) not in (0, "auto"):
                raise ValueError(
                    "Only the winner may be shown, but `fit` would print the figures of every "
                    "candidate: leave `verbose` out, or choose the strategy 'composition'. "
                    f"Received: verbose={given['verbose']!r}"
                )
            given["verbose"] = 0
        epochs = checks.integer("epochs", given.get("epochs", 1), 1)
        in_batches = _comes_in_batches(given)
        if not in_batches:
            _require_arrays(given)
        batch_size = None if in_batches else int(given.get("batch_size") or 32)
        steps = _steps_per_epoch(given, batch_size)
        _check_lasts(given.get("x"), epochs, steps)
        return cls(given, callbacks, given["validation_data"], epochs, steps, batch_size)

    def describe(self) -> dict[str, Any]:
        """What must stay the same when the search is resumed, as plain JSON; of data the shapes."""
        return {
            name: _described(value)
            for name, value in self.arguments.items()
            if name not in (*_OF_SCHEDULE, *_OF_PROCESS) and value is not None
        }

    def fingerprints(self, salt: bytes) -> list[str]:
        """A `sources.fingerprint` of each array for training or validation. They are NOT private.

        Data that come in batches have none.

        Args:
          salt: 16 random bytes.
        """
        given = [self.arguments.get(name) for name in ("x", "y", "sample_weight")]
        arrays = (
            leaf
            for leaf in tf.nest.flatten([*given, self.validation])
            if isinstance(leaf, (np.ndarray, tf.Tensor)) or hasattr(leaf, "to_numpy")
        )
        return [
            sources.fingerprint(sources.Arrays((array,)), salt)
            for array in arrays
            if len(array.shape)
        ]

    @property
    def num_rows(self) -> int | None:
        """The number of rows of training arrays; `None` if the data come in batches."""
        return None if self.batch_size is None else _rows(self.arguments["x"])

    @property
    def batches_of_pass(self) -> int | None:
        """The number of batches that the data come in; `None` if an epoch may show only some."""
        x = self.arguments["x"]
        batches = len(x) if isinstance(x, tf.keras.utils.Sequence) else _cardinality(x)
        return batches if batches == self.steps_per_epoch else None

    @property
    def epoch_is_pass(self) -> bool:
        """Whether each epoch is known to contain every example once, as with whole arrays."""
        rows, size = self.num_rows, self.batch_size
        if rows is None or size is None:
            return False
        return self.steps_per_epoch == -(-rows // size)

    def training(self, with_validation: bool) -> dict[str, Any]:
        """The arguments for `fit`, without callbacks.

        Args:
          with_validation: whether the validation data may be evaluated in every epoch.
        """
        left_out = () if with_validation else ("validation_data",)
        return {name: value for name, value in self.arguments.items() if name not in left_out}

    def scores(self, model: tf.keras.Model) -> dict[str, float]:
        """The metrics of a model on the validation data, named as in `fit`'s logs.

        Metrics with several numbers, such as one for each class, are left out.
        """
        given = self.arguments
        data = self.validation
        if isinstance(data, (tuple, list)):
            x, y, weight = tf.keras.utils.unpack_x_y_sample_weight(tuple(data))
            of_data = {"x": x, "y": y, "sample_weight": weight}
            of_data["batch_size"] = given.get("validation_batch_size") or self.batch_size
        else:
            of_data = {"x": data}
        found = model.evaluate(
            **of_data, steps=given.get("validation_steps"), verbose=0, return_dict=True
        )
        numbers = {name: value for name, value in found.items() if np.ndim(value) == 0}
        return {f"val_{name}": float(value) for name, value in numbers.items()}


def check_rows(
    data: FitArguments,
    num_examples: int,
    batch_size: float,
    parts: int,
    sampling: Sampling | str,
) -> None:
    """Raises ValueError if the data do not fit `num_examples` or the batches of the plan."""
    if isinstance(sampling, Sampling):
        draws.require_drawn(sampling, num_examples)
    if data.num_rows is None or data.batch_size is None:
        batches, rows = data.batches_of_pass, batch_size / parts
        # The last batch of a pass may be dropped.
        if sampling == "shuffled" and batches and num_examples >= (batches + 1) * rows:
            raise ValueError(
                "`num_examples` must be the size of the training set, or epsilon would be too "
                f"small. Received: num_examples={num_examples}, and a data set of {batches} "
                f"batches, which are {rows:g} examples each, says `expected_batch_size`"
            )
        return
    if data.num_rows < num_examples:
        raise ValueError(
            "`num_examples` must be the size of the training set, or epsilon would be too small. "
            f"Received: num_examples={num_examples}, and arrays of {data.num_rows} rows"
        )
    if sampling != "shuffled" and getattr(sampling, "label", None) != "shuffled":
        raise ValueError(
            "`fit` shuffles arrays: pass the data set that the sampling made, such as "
            "`tuner.search(poisson_batches((x, y), sampling), steps_per_epoch=...)`, or leave out "
            f"`sampling`. Received: sampling={sampling!r}"
        )
    if data.batch_size * parts != batch_size:
        raise ValueError(
            "`batch_size` of `search`, times the optimizer's `gradient_accumulation_steps`, must "
            f"be the optimizer's `expected_batch_size`. Received: batch_size={data.batch_size}, "
            f"gradient_accumulation_steps={parts}, expected_batch_size={batch_size:g}"
        )


def _refuse_unsuitable(given: dict[str, Any]) -> None:
    if given.get("validation_data") is None or given.get("validation_split"):
        raise ValueError(
            "Candidates are compared on separate validation data: pass `validation_data`, and "
            "no `validation_split`. Received: validation_data="
            f"{type(given.get('validation_data')).__name__}, "
            f"validation_split={given.get('validation_split', 0.0)!r}"
        )
    if given.get("initial_epoch"):
        raise ValueError(
            "Every candidate is trained from its first epoch. Received: "
            f"initial_epoch={given['initial_epoch']!r}"
        )
    if given.get("shuffle", True) is not True and not _comes_in_batches(given):
        raise ValueError(
            "The noise is computed for arrays that are shuffled in each epoch: leave out "
            f"`shuffle`. Received: shuffle={given['shuffle']!r}"
        )
    if datasets.is_repeatable(given.get("x")):
        raise ValueError(
            "Batches that are drawn with a `key` or a seed come back when a search is resumed in "
            "another process, but the noise is computed for independent batches: leave the `key` "
            f"or the seed out. Received: x={given['x']!r}"
        )
    for name in ("x", "validation_data"):
        if hasattr(given.get(name), "__next__"):
            raise ValueError(
                f"`{name}` is read anew for every candidate, but an iterator or a generator can be "
                "read once only: pass arrays, a `tf.data.Dataset` or a `keras.utils.Sequence`. "
                f"Received: {name}={given[name]!r}"
            )


def _require_arrays(given: dict[str, Any]) -> None:
    """Raises unless training data that `fit` draws batches from are whole: all trials would crash.

    Raises:
      TypeError: if they are no arrays.
      ValueError: if `y` is missing, or an array has another number of rows.
    """
    if given.get("y") is None:
        raise ValueError(
            "`y` is missing. To learn to reproduce the inputs, pass them as `y` too. If the models "
            "need no targets, as with a `train_step` of their own, pass zeros. Received: x of type "
            f"{type(given.get('x')).__name__}, y=None"
        )
    checks.equal_rows({name: given.get(name) for name in ("x", "y", "sample_weight")})


def _steps_per_epoch(given: dict[str, Any], batch_size: int | None) -> int:
    """The number of steps per epoch in `fit`; ValueError if only training would reveal it."""
    if given.get("steps_per_epoch") is not None:
        return checks.integer("steps_per_epoch", given["steps_per_epoch"], 1)
    x = given.get("x")
    if batch_size is not None:
        return -(-_rows(x) // batch_size)
    if isinstance(x, tf.keras.utils.Sequence):
        return len(x)
    cardinality = _cardinality(x)
    if cardinality < 1:
        raise ValueError(
            "The noise depends on the number of steps, which must be known in advance: pass "
            f"`steps_per_epoch`. Received: x={x!r}"
        )
    return cardinality


def _check_lasts(x: Any, epochs: int, steps_per_epoch: int) -> None:
    """Raises ValueError if a data set would end before the last epoch does."""
    cardinality = _cardinality(x)
    # Keras starts it again in each epoch only if it has exactly the steps of one epoch.
    if cardinality != steps_per_epoch and 0 <= cardinality < epochs * steps_per_epoch:
        raise ValueError(
            "The data set must last for all epochs: make it longer, give it `steps_per_epoch` "
            f"batches, or let it repeat. Received: {cardinality} batches, epochs={epochs}, "
            f"steps_per_epoch={steps_per_epoch}"
        )


def _comes_in_batches(given: dict[str, Any]) -> bool:
    x = given.get("x")
    return isinstance(x, (tf.data.Dataset, tf.keras.utils.Sequence)) or callable(x)


def _described(value: Any) -> Any:
    """An argument as plain JSON: numbers and text as they are, the shapes of data."""
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _described(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(part) for part in value]
    if isinstance(value, tf.data.Dataset):
        return str(value.element_spec)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{tf.as_dtype(value.dtype).name} {list(value.shape)}"
    return type(value).__name__


def _rows(x: Any) -> int:
    return int(tf.nest.flatten(x)[0].shape[0])


def _cardinality(x: Any) -> int:
    """The number of batches of a data set; negative if it is infinite or unknown."""
    return int(x.cardinality()) if isinstance(x, tf.data.Dataset) else -1


# --- callbacks -----------------------------------------------------------------------------------


_keras = tf.keras.callbacks

# Callbacks that suit no strategy, and why.
_NEVER = {
    ReleaseLog: "the tuner keeps a log of each candidate itself",
    PrivacyBudget: "the tuner keeps every candidate within its share of `epsilon` itself",
    _keras.BackupAndRestore: "the tuner saves the candidate in progress itself",
    _keras.EarlyStopping: (
        "every candidate makes the same number of releases, and the score is that of its last epoch"
    ),
    _keras.ReduceLROnPlateau: (
        "it decides by figures that are not private, and loses them when a search is resumed"
    ),
    _keras.TerminateOnNaN: (
        "it would end a candidate by the exact loss, which a single example can make NaN, and "
        "every candidate makes the same number of releases"
    ),
}
# These keep data of every trial where the tuner cannot delete it.
_NOT_FOR_LOSERS = tuple(
    getattr(_keras, name)
    for name in ("ModelCheckpoint", "OrbaxCheckpoint", "CSVLogger", "RemoteMonitor")
    if hasattr(_keras, name)  # Orbax came with Keras 3.14
)


def check_callbacks(
    callbacks: Sequence[tf.keras.callbacks.Callback],
    *,
    releases_all: bool,
    num_examples: int,
    sampling: Sampling | str,
) -> None:
    """Raises ValueError for callbacks that would not work in a search, or cannot be copied.

    Args:
      callbacks: the callbacks passed to `search`.
      releases_all: whether every trial may be shown.
      num_examples: the `num_examples` of the tuner.
      sampling: the `sampling` of the tuner.
    """
    for callback in callbacks:
        for kind, reason in _NEVER.items():
            if isinstance(callback, kind):
                raise ValueError(
                    f"Leave {kind.__name__} out of `callbacks`: {reason}. Received: {callback!r}"
                )
        if not releases_all and isinstance(callback, _NOT_FOR_LOSERS):
            raise ValueError(
                f"{type(callback).__name__} would keep figures or weights of candidates that lost, "
                "and only the winner may be shown. Use TensorBoard, whose files go with the "
                "candidate, and save the winner from `get_best_models()`; or choose the strategy "
                f"'composition'. Received: {callback!r}"
            )
        if isinstance(callback, PrivacyMonitor):
            own = (callback.num_examples, callback.sampling)
            if own != (num_examples, sampling):
                raise ValueError(
                    "PrivacyMonitor must have the `num_examples` and the `sampling` of the tuner. "
                    f"Received: {own}, instead of {(num_examples, sampling)}"
                )
        _check_copy(callback)


def _check_copy(callback: tf.keras.callbacks.Callback) -> None:
    # Inside a trial this error would crash every candidate and waste the search.
    try:
        callback_copies([callback], "", releases_all=True)
    except Exception as error:
        raise ValueError(
            "Every candidate gets copies of the callbacks, so it must be possible to copy them: "
            "create anything that cannot be copied in `on_train_begin`, or define `__deepcopy__`. "
            f"Received: {callback!r}, whose copy failed with {error!r}"
        ) from error


def callback_copies(
    callbacks: Sequence[tf.keras.callbacks.Callback],
    folder: str | os.PathLike,
    *,
    releases_all: bool,
) -> list[tf.keras.callbacks.Callback]:
    """Copies the callbacks for one trial, as KerasTuner does, so that trials share no state.

    The files of TensorBoard and PrivacyMonitor go into the trial's folder. If only the winner may
    be shown, TensorBoard writes neither graphs nor profiles: both number the functions of the
    process, which would reveal how many trials came before.

    Args:
      callbacks: the callbacks passed to `search`, which no trial uses itself.
      folder: the folder of the trial.
      releases_all: whether every trial may be shown.
    """
    made = []
    copied: tf.keras.callbacks.Callback
    for callback in callbacks:
        if isinstance(callback, PrivacyMonitor):
            # It sets all its state when a run begins. A deep copy of one that was already used
            # would copy its model.
            copied = copy.copy(callback)
            copied.set_model(None)
        else:
            copied = copy.deepcopy(callback)
        if isinstance(callback, (_keras.TensorBoard, PrivacyMonitor)) and callback.log_dir:
            copied.log_dir = str(Path(folder) / "tensorboard")
        if isinstance(callback, _keras.TensorBoard) and not releases_all:
            process_state.turn_off_profiling(copied)
            # Keras relies on the graph writer to create the folder of the embeddings.
            os.makedirs(copied.log_dir, exist_ok=True)
        made.append(copied)
    return made
