"""What `search` was called with, read as `Model.fit` would read it, before anything is trained."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp.privacy import batches


@dataclasses.dataclass(frozen=True)
class FitArguments:
    """The arguments of `Model.fit` for every trial.

    Attributes:
      arguments: what is passed to `fit` besides `callbacks`, by name.
      callbacks: the user's.
      validation: `(x, y)` or `(x, y, sample_weight)`, or a data set.
      epochs: of a trial.
      steps_per_epoch: calls of the optimizer in an epoch.
      batch_size: of arrays; `None` where the data come in batches.
    """

    arguments: dict[str, Any]
    callbacks: list
    validation: Any
    epochs: int
    steps_per_epoch: int
    batch_size: int | None

    @classmethod
    def read(cls, args: tuple, kwargs: dict, *, releases_all: bool) -> FitArguments:
        """Reads the call.

        Args:
          args: of `search`.
          kwargs: of `search`.
          releases_all: whether what `fit` prints of every trial may be seen.

        Raises:
          TypeError: if `fit` would not take them.
          ValueError: for what does not go with a search, or a number of steps that is not known.
        """
        bound = inspect.signature(tf.keras.Model.fit).bind(None, *args, **kwargs)
        given = dict(list(bound.arguments.items())[1:])
        _refuse_unsuitable(given)
        callbacks = list(given.pop("callbacks", None) or [])
        if not releases_all:
            if given.get("verbose", 0) not in (0, "auto"):
                raise ValueError(
                    "Only the winner may be shown, and `fit` would print the figures of every "
                    "candidate: leave `verbose` out, or choose the strategy 'composition'. "
                    f"Received: verbose={given['verbose']!r}"
                )
            given["verbose"] = 0
        epochs = checks.integer("epochs", given.get("epochs", 1), 1)
        in_batches = _comes_in_batches(given)
        batch_size = None if in_batches else int(given.get("batch_size") or 32)
        steps = _steps_per_epoch(given, batch_size)
        _check_lasts(given.get("x"), epochs, steps)
        return cls(given, callbacks, given["validation_data"], epochs, steps, batch_size)

    @property
    def num_rows(self) -> int | None:
        """Training examples in arrays; `None` where the data come in batches."""
        return None if self.batch_size is None else _rows(self.arguments["x"])

    @property
    def epoch_is_pass(self) -> bool:
        """Whether each epoch is known to have every example once: of arrays, read to their end."""
        rows = self.num_rows
        return rows is not None and self.steps_per_epoch == -(-rows // self.batch_size)

    def training(self, with_validation: bool) -> dict[str, Any]:
        """Arguments for `fit`, without callbacks.

        Args:
          with_validation: whether the validation data may be looked at in every epoch.
        """
        left_out = () if with_validation else ("validation_data",)
        return {name: value for name, value in self.arguments.items() if name not in left_out}

    def scores(self, model: tf.keras.Model) -> dict[str, float]:
        """The metrics of a model on the validation data, named as in `fit`'s logs."""
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
        return {f"val_{name}": float(value) for name, value in found.items()}


def _refuse_unsuitable(given: dict[str, Any]) -> None:
    if given.get("validation_data") is None or given.get("validation_split"):
        raise ValueError(
            "Candidates are compared on validation data of their own: pass `validation_data`, and "
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
            "Arrays must be shuffled in each epoch, for which the noise is computed: leave "
            f"`shuffle` out. Received: shuffle={given['shuffle']!r}"
        )
    if batches.is_repeatable(given.get("x")):
        raise ValueError(
            "Batches that were drawn with a `key` or a seed come again when a search goes on in "
            "another process, and the noise is computed for batches that are independent: leave it "
            f"out. Received: x={given['x']!r}"
        )
    for name in ("x", "validation_data"):
        if hasattr(given.get(name), "__next__"):
            raise ValueError(
                f"`{name}` is read anew for every candidate, and an iterator or a generator can be "
                "read once only: pass arrays, a `tf.data.Dataset` or a `keras.utils.Sequence`. "
                f"Received: {name}={given[name]!r}"
            )


def _comes_in_batches(given: dict[str, Any]) -> bool:
    x = given.get("x")
    return isinstance(x, (tf.data.Dataset, tf.keras.utils.Sequence)) or callable(x)


def _rows(x: Any) -> int:
    return int(tf.nest.flatten(x)[0].shape[0])


def _cardinality(x: Any) -> int:
    """Of a data set, in batches; negative if it is infinite or not known."""
    return int(x.cardinality()) if isinstance(x, tf.data.Dataset) else -1


def _check_lasts(x: Any, epochs: int, steps_per_epoch: int) -> None:
    """Raises ValueError if a data set would end before the last epoch does."""
    cardinality = _cardinality(x)
    # Keras reads it anew in each epoch only if it has just the steps of an epoch.
    if cardinality != steps_per_epoch and 0 <= cardinality < epochs * steps_per_epoch:
        raise ValueError(
            "The data set must last for all epochs: let it be longer, or have `steps_per_epoch` "
            f"batches, or repeat itself. Received: {cardinality} batches, epochs={epochs}, "
            f"steps_per_epoch={steps_per_epoch}"
        )


def _steps_per_epoch(given: dict[str, Any], batch_size: int | None) -> int:
    """As `fit` would count them; ValueError if it would find out only by training."""
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
            "The noise depends on the number of steps, so it must be known beforehand: pass "
            f"`steps_per_epoch`. Received: x={x!r}"
        )
    return cardinality
