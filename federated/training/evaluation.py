"""Evaluation on held-out clients, the best state of a run, and its Keras model."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from federated.privacy.client_sampling import distinct_client_ids
from federated.training.saved_states import SavedStates
from tf_adaptive_dp import checks
from tf_adaptive_dp.durable import files

MODES = ("auto", "min", "max")
# Parts of the names of Keras metrics for which more is better.
_MORE_IS_BETTER = ("acc", "auc", "precision", "recall", "f1", "fbeta", "iou", "r2", "similarity")


class Best(NamedTuple):
    """The best state of a run, by an `Evaluation`.

    Attributes:
      state: the state of the process, for `federated.export` or to train on.
      number: the round that it was saved with, which counts lost rounds.
      figures: the figures of its evaluation.
    """

    state: Any
    number: int
    figures: dict[str, float]


def export(state: Any, model_fn: Callable[[], tf.keras.Model]) -> tf.keras.Model:
    """Makes a Keras model with the weights of a process's state, to save or to serve.

    Guarantee: the model has the state's model weights and nothing else from it, so it is protected
    as these are: in a private run, by the ε of all rounds that were begun. With mechanism="tree" or
    "banded" the state must stay secret, and the model need not.

    Args:
      state: the state of a process of `federated.training.processes` or of TFF's own algorithms,
        such as `Trained.state`; or its weights, `process.get_model_weights(state)`.
      model_fn: a function that returns a Keras model with the layers of the trained one, such as
        the `model_fn` of the process if that returns compiled models.

    Returns:
      The new model.

    Raises:
      TypeError: if an argument is something else.
      ValueError: if the weights do not fit the model.

    >>> def model_fn():
    ...     return tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
    >>> weights = tff.learning.models.ModelWeights([[[1.0], [2.0]], [3.0]], [])
    >>> float(export(weights, model_fn)(tf.constant([[1.0, 1.0]])))
    6.0
    """
    weights = getattr(state, "global_model_weights", state)
    if not isinstance(weights, tff.learning.models.ModelWeights):
        raise TypeError(
            "`state` must be the state of a learning process, or its model weights. Received: "
            f"state of type {type(state).__name__}"
        )
    model = _made_by(model_fn)
    if not isinstance(model, tf.keras.Model):
        raise TypeError(
            "`model_fn` must be a function that returns a Keras model. Received: "
            f"model_fn={model_fn!r}"
        )
    _assign(weights, model)
    return model


def _made_by(model_fn: Any) -> Any:
    """What a function returns; `None` for anything else, such as a model, which is callable too."""
    is_function = callable(model_fn) and not isinstance(model_fn, tf.keras.Model)
    return model_fn() if is_function else None


def _assign(weights: tff.learning.models.ModelWeights, model: tf.keras.Model) -> None:
    """Gives a Keras model all of the weights of another model, or raises ValueError."""
    for kind, given, own in (
        ("trainable", weights.trainable, model.trainable_weights),
        ("non-trainable", weights.non_trainable, model.non_trainable_weights),
    ):
        # Otherwise the excess weights of either would be ignored silently.
        trained, made = ([tuple(np.shape(weight)) for weight in part] for part in (given, own))
        if trained != made:
            raise ValueError(
                "`model_fn` must return a model with the weights of the trained one, such as the "
                f"`model_fn` of the process. Received: a model with {kind} weights of shapes "
                f"{made}, the trained one has {trained}"
            )
    weights.assign_weights_to(model)


class Evaluation:
    """Evaluates the server's model on held-out clients after every few rounds.

    The figures are the model's compiled loss and metrics over all examples of these clients, with
    equal weights for all examples. `federated.train` releases them as `held_out/…`, or as
    `not_private/held_out/…` in a private run, and keeps the state whose figure `best` is the best.

    Guarantee: none for the held-out clients: the figures are exact, and which state is the best
    depends on their data, which ε does not cover. For clients that were trained on, the ε of all
    rounds covers the best state too, if none of them is held out: then the choice is computed from
    what was released and from other people's data. `federated.train` warns if this is not the case.

    Args:
      model_fn: a function that returns a new Keras model, compiled with its loss and metrics.
      client_data: the held-out clients' data: a `tff.simulation.datasets.ClientData`, or a function
        from a client id to batches, with `client_ids`. A batch is (x, y), or a mapping with the
        keys `x` and `y`.
      client_ids: the held-out clients, distinct strings; `None` takes all clients of `client_data`.
      every: the number of finished rounds between evaluations. The last round is always evaluated.
      best: the name of the figure to choose the best state by; `None` keeps no best state.
      mode: `"min"` if a smaller figure is better, `"max"` if a larger one is, `"auto"` to decide by
        its name.

    Raises:
      TypeError, ValueError: if an argument is invalid.

    >>> def model_fn():
    ...     model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
    ...     model.compile(loss="mse", metrics=["mae"])
    ...     return model
    >>> def of_client(name):
    ...     return tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.ones([2, 1])))
    >>> evaluation = Evaluation(model_fn, of_client, ["a", "b"], best="mae")
    >>> evaluation.figures(tff.learning.models.ModelWeights([[[0.5]], [0.0]], []))
    {'loss': 0.25, 'mae': 0.5}
    """

    def __init__(
        self,
        model_fn: Callable[[], tf.keras.Model],
        client_data: tff.simulation.datasets.ClientData | Callable[[str], tf.data.Dataset],
        client_ids: Sequence[str] | None = None,
        *,
        every: int = 1,
        best: str | None = "loss",
        mode: str = "auto",
    ):
        self.every = checks.integer("every", every, 1)
        self.best = None if best is None else checks.instance("best", best, str)
        checks.choice("mode", mode, MODES)
        datasets = getattr(client_data, "create_tf_dataset_for_client", client_data)
        if client_ids is None:
            client_ids = getattr(client_data, "client_ids", None)
        if not callable(datasets) or client_ids is None:
            raise TypeError(
                "`client_data` must be a `tff.simulation.datasets.ClientData`, or a function from "
                "a client id to a `tf.data.Dataset` with at least one of `client_ids`. Received: "
                f"client_data={client_data!r}, client_ids={client_ids!r}"
            )
        # Of another type, none would be found among those that are trained on.
        self.client_ids = distinct_client_ids(client_ids)
        self._datasets = datasets
        self._model_fn = model_fn
        self._model = _made_by(model_fn)
        if not isinstance(self._model, tf.keras.Model) or self._model.optimizer is None:
            raise TypeError(
                "`model_fn` must be a function that returns a Keras model, compiled with its "
                f"loss and metrics. Received: model_fn={model_fn!r}"
            )
        if mode == "auto":
            more = best is not None and any(part in best.lower() for part in _MORE_IS_BETTER)
            mode = "max" if more else "min"
        self._sign = 1.0 if mode == "max" else -1.0

    @property
    def mode(self) -> str:
        """`"min"` if a smaller figure is better, `"max"` if a larger one is."""
        return "max" if self._sign > 0 else "min"

    def figures(self, weights: tff.learning.models.ModelWeights) -> dict[str, float]:
        """Loss and metrics of a model on the held-out clients.

        Args:
          weights: the weights of the model, `process.get_model_weights(state)`.

        Returns:
          Each figure by its name in Keras. A metric with several numbers, such as one for each
          class, is several figures, `f1_score_0`, `f1_score_1` and so on.

        Raises:
          TypeError: if a batch is not (x, y).
          ValueError: if the weights do not fit the model, the held-out clients have no examples,
            or no figure is named `best`.
        """
        self._prepare(weights)
        found: Mapping[str, float] = {}
        for client in self.client_ids:
            for batch in self._datasets(client):
                found = self._of_batch(batch, client)
        return self._named(found)

    def check(self, weights: tff.learning.models.ModelWeights) -> None:
        """Evaluates one batch, so that mistakes show before the first round.

        Args:
          weights: see `figures`.

        Raises:
          TypeError, ValueError: if a batch is not (x, y), or as `figures`.
        """
        self._prepare(weights)
        batches = ((b, client) for client in self.client_ids for b in self._datasets(client))
        first = next(batches, None)
        self._named({} if first is None else self._of_batch(*first))

    def _prepare(self, weights: tff.learning.models.ModelWeights) -> None:
        """Gives the model these weights, and new metrics."""
        if not checks.works_eagerly(self._model):
            self._model = self._model_fn()
            if not checks.works_eagerly(self._model):
                raise TypeError(
                    "`model_fn` must return a new Keras model at each call. TFF made models since "
                    "the one that it returned was made, and with these an older one no longer "
                    f"works. Received: model_fn={self._model_fn!r}, which returned an older model"
                )
        _assign(weights, self._model)
        self._model.reset_metrics()

    def _of_batch(self, batch: Any, client: str) -> Mapping[str, float]:
        """The figures of all batches since the metrics were reset, with this one."""
        if isinstance(batch, Mapping) and set(batch) == {"x", "y"}:
            x, y = batch["x"], batch["y"]
        elif isinstance(batch, (tuple, list)) and len(batch) == 2:
            x, y = batch
        else:
            received = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
            if isinstance(batch, (tuple, list)):
                received = f"{len(batch)} parts"
            raise TypeError(
                "`client_data` must give batches (x, y) or {'x': x, 'y': y} of a held-out client, "
                "as for training; every example counts with weight 1. Leave other parts out with "
                f"`dataset.map`. Received: a batch of {received} for client {client!r}"
            )
        if any(part.shape.rank == 0 for part in tf.nest.flatten((x, y)) if tf.is_tensor(part)):
            raise TypeError(
                "`client_data` must give batches of a held-out client. Batch its examples, as for "
                f"training, with `dataset.batch(16)`. Received: a single example {batch!r:.200} of "
                f"client {client!r}"
            )
        return self._model.test_on_batch(x, y, reset_metrics=False, return_dict=True)

    def _named(self, found: Mapping[str, float]) -> dict[str, float]:
        """The figures as plain numbers, or ValueError if `best` is none of them."""
        figures: dict[str, float] = {}
        for name, value in found.items():
            numbers = np.ravel(value)
            names = [name] if np.ndim(value) == 0 else [f"{name}_{i}" for i in range(len(numbers))]
            figures.update(zip(names, numbers.astype(float).tolist()))
        if self.best is not None and self.best not in figures:
            raise ValueError(
                "`best` must name a figure of the evaluation, of clients that have examples. "
                f"Received: best={self.best!r}, the figures are {sorted(figures)}"
            )
        return figures

    def is_better(self, figure: float, than: float) -> bool:
        """Whether a value of the figure `best` is better than another; NaN never is.

        Args:
          figure: the value.
          than: the other value.
        """
        if math.isnan(figure):
            return False
        return math.isnan(than) or self._sign * figure > self._sign * than

    def export(self, state: Any) -> tf.keras.Model:
        """A compiled Keras model with the weights of a state; see `federated.export`.

        Args:
          state: the state of the process, or its weights.
        """
        return export(state, self._model_fn)


class BestState:
    """What a run stores about its evaluations.

    A round's figures are on the disk before anything is done with them. So if the program ends in
    between, the same figures are released and compared when the run resumes.

    Args:
      folder: the run's folder `secret`.
      evaluation: the evaluation.
      initial_state: a state of the process, for its structure.
    """

    def __init__(self, folder: Path, evaluation: Evaluation, initial_state: Any):
        self._evaluation = evaluation
        self._initial_state = initial_state
        self._file = folder / "held_out"
        self._identity = folder / "evaluation"
        self._states = SavedStates(folder / "best")
        self._best = self._record()
        self._require_same()
        named = self._best and self._best["best"]
        if self._best and evaluation.best not in (None, named):
            raise ValueError(
                "`evaluation` must choose the best state as the run in this directory did. Pass "
                f"best={named!r}, or start a new run. Nothing was changed. Received: "
                f"best={evaluation.best!r}"
            )

    def _of_evaluation(self) -> dict[str, Any]:
        """What figures must have in common to be compared; without a choice, `best` is `None`."""
        evaluation = self._evaluation
        clients = "\0".join(sorted(evaluation.client_ids)).encode()
        chooses = evaluation.best is not None
        return {
            "held-out clients": hashlib.blake2b(clients, digest_size=16).hexdigest(),
            "best": evaluation.best,
            "mode": evaluation.mode if chooses else None,
        }

    def _require_same(self) -> None:
        """Raises ValueError if the run's figures are of another evaluation.

        A run that was evaluated by an earlier version has no note of it.
        """
        if not self._identity.exists():
            return
        was, now = json.loads(self._identity.read_text()), self._of_evaluation()
        # A run may begin to choose, or no longer choose.
        free = ("best", "mode") if None in (was["best"], now["best"]) else ()
        changed = [name for name in was if name not in free and was[name] != now[name]]
        if not changed:
            return
        if changed[0] == "held-out clients":
            received = f"{len(self._evaluation.client_ids)} other held-out clients"
        else:
            received = f"{changed[0]}={now[changed[0]]!r}"
        raise ValueError(
            "`evaluation` must choose the best state as the run in this directory did, on the same "
            "held-out clients: figures of different evaluations cannot be compared. Pass that "
            "evaluation, or begin a new run in another directory. To evaluate once more on other "
            "clients, call `Evaluation.figures` on the result. Nothing was changed. Received: "
            f"{received}, the run had best={was['best']!r}, mode={was['mode']!r}"
        )

    def _note(self) -> None:
        """Writes down what was evaluated, before its first figure."""
        now = self._of_evaluation()
        was = json.loads(self._identity.read_text()) if self._identity.exists() else None
        if was is None or (was["best"] is None and now["best"] is not None):
            files.write(self._identity, json.dumps(now).encode())

    def _record(self) -> dict | None:
        number = self._states.latest()
        return None if number is None else self._states.load(number, self._initial_state)[1]

    def figures(self, number: int, weights: Any) -> dict[str, float]:
        """The figures of a round, which are computed once.

        Args:
          number: the number of the round.
          weights: the weights of its model.
        """
        if self._file.exists():
            known = json.loads(self._file.read_text())
            # Unless an earlier call did not choose, and its model had no such figure.
            if known["number"] == number and self._evaluation.best in (None, *known["figures"]):
                return known["figures"]
        self._note()
        figures = self._evaluation.figures(weights)
        text = json.dumps({"number": number, "figures": figures})
        files.write(self._file, text.encode())
        return figures

    def consider(self, number: int, state: Any, figures: Mapping[str, float]) -> None:
        """Keeps a state if it is the best one so far, on the disk when this returns.

        Args:
          number: the number of its round.
          state: the state.
          figures: what its evaluation found.
        """
        name = self._evaluation.best
        if name is None:
            return
        known = math.nan if self._best is None else self._best["figures"][name]
        if self._evaluation.is_better(figures[name], known):
            record = {"number": number, "best": name, "figures": dict(figures)}
            self._states.save(number, state, record)
            self._best = record

    def best(self) -> Best | None:
        """The best state; `None` if there is none."""
        if self._best is None:
            return None
        number = self._best["number"]
        state, record = self._states.load(number, self._initial_state)
        return Best(state, number, record["figures"])


def warn_of_choice(evaluation: Evaluation, client_ids: Sequence[str], stacklevel: int) -> None:
    """Warns what ε does not cover when the best state of a private run is chosen.

    Args:
      evaluation: the evaluation.
      client_ids: the clients that are trained on.
      stacklevel: see `warnings.warn`.
    """
    if evaluation.best is None:
        return
    both = sorted(set(evaluation.client_ids) & set(client_ids))
    named = ", ".join(both[:3]) + (", …" if len(both) > 3 else "")
    whom = (
        f"{len(both)} of them are trained on too ({named}), and for these the "
        "best state has no ε: hold other clients out, or publish the last state."
        if both
        else "ε holds for the clients that are trained on."
    )
    warnings.warn(
        f"The best state is chosen by {evaluation.best!r} on {len(evaluation.client_ids)} held-out "
        f"clients. ε does not cover what this choice reveals about their data. {whom}",
        stacklevel=stacklevel + 1,
    )
