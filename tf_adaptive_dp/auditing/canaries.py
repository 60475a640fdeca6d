"""Audits Keras training: canaries, and the callback that attacks them."""

from __future__ import annotations

import functools
import warnings
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.variables import dense_gradients
from tf_adaptive_dp.auditing import bounds
from tf_adaptive_dp.auditing.example_losses import loss_of_examples
from tf_adaptive_dp.sampling import draws
from tf_adaptive_dp.sampling.users import checked_ids
from tf_adaptive_dp.validation.per_example import labels_for

SCORES = ("loss", "gradient")
_ROWS = 512  # canaries per call of the model


class Canaries:
    """Examples that are each included in the training data if a fair coin says so.

    The audit proves more if the canaries have large gradients and differ from each other. For a
    model with a dense first layer, give each canary its own input: append m columns that are zero
    in all data, and let canary i be 10 in column i. With an embedding, give each its own row. Wrong
    labels and random inputs require no change of the model but prove less.

    In training that protects users, each canary is a user with one example: pass
    `canaries.mix_user_ids(user_ids)` as the `user_ids` of the plan. The bound is then a bound on
    the ε of a user.

    Attributes:
      x: inputs, an array or a nest of arrays whose first axis has length m.
      y: labels, likewise.
      included: [m], bool. Secret: guesses must not use it.

    >>> canaries = Canaries(np.eye(4), np.ones(4), seed=1)
    >>> canaries.included
    array([ True,  True, False, False])
    >>> x, y = canaries.mix((np.zeros([6, 4]), np.zeros(6)))
    >>> x.shape, y.shape
    ((8, 4), (8,))
    """

    def __init__(self, x: Any, y: Any, *, seed: int | None = None):
        """Tosses the coins.

        Args:
          x: inputs of the canaries.
          y: their labels.
          seed: `None` for the operating system's entropy; a number is for tests.

        Raises:
          TypeError, ValueError: if the seed is invalid or the parts have different lengths.
        """
        if seed is not None:
            seed = checks.integer("seed", seed, 0)
        self.x, self.y = (tf.nest.map_structure(np.asarray, part) for part in (x, y))
        lengths = _lengths((self.x, self.y))
        if len(lengths) != 1 or not lengths[0]:
            raise ValueError(
                f"`x` and `y` must hold the same number of canaries. Received: lengths {lengths}"
            )
        generator = draws.generator(draws.new_key(seed), b"canaries", 0)
        self.included = generator.integers(2, size=lengths[0]).astype(bool)

    def __len__(self) -> int:
        return len(self.included)

    def mix(self, data: tuple) -> tuple:
        """Appends the included canaries to the training data.

        Args:
          data: `(x, y)` or `(x, y, sample_weight)` of arrays, or nests of arrays.

        Returns:
          The same structure and types; strings get as long as those of the canaries need. Canaries
          have sample weight 1.

        Raises:
          TypeError, ValueError: if the parts differ in length or do not match the canaries, or if
            the type of the data would change the values of the canaries by more than rounding.
        """
        if not isinstance(data, (tuple, list)) or len(data) not in (2, 3):
            raise TypeError(
                "`data` must be (x, y) or (x, y, sample_weight). Received: data of type "
                f"{type(data).__name__}"
            )
        lengths = _lengths(tf.nest.map_structure(np.asarray, tuple(data)))
        if len(lengths) != 1:
            raise ValueError(
                f"The parts of `data` must have the same length. Received: lengths {lengths}"
            )
        x, y, *sample_weight = data
        included = [tf.nest.map_structure(lambda a: a[self.included], c) for c in (self.x, self.y)]
        if sample_weight:
            included.append(np.ones(int(self.included.sum()), np.float32))
        return tuple(
            tf.nest.map_structure(functools.partial(_join, name), ours, canaries)
            for name, ours, canaries in zip(
                ("x", "y", "sample_weight"), (x, y, *sample_weight), included
            )
        )

    def mix_user_ids(self, user_ids: Any) -> np.ndarray:
        """Appends a user of its own for each included canary, as `mix` appends the canaries.

        Args:
          user_ids: [n], the user each example of the data belongs to, whole numbers or strings.

        Returns:
          [n + number of included canaries], strings: the ids of users and of canaries never agree.

        Raises:
          TypeError, ValueError: as for the `user_ids` of a plan.

        >>> Canaries(np.eye(4), np.ones(4), seed=1).mix_user_ids([7, 7, 9]).tolist()
        ['user 7', 'user 7', 'user 9', 'canary 0', 'canary 1']
        """
        ids = checked_ids(user_ids)
        own = [f"user {i.decode() if isinstance(i, bytes) else i}" for i in ids.tolist()]
        return np.array([*own, *(f"canary {i}" for i in np.flatnonzero(self.included))])


def _lengths(arrays: Any) -> list[int]:
    """The distinct lengths; 0 stands for an array without an axis."""
    return sorted({leaf.shape[0] if leaf.shape else 0 for leaf in tf.nest.flatten(arrays)})


def _join(name: str, ours: Any, canaries: np.ndarray) -> np.ndarray:
    """Appends canaries to one array of the data; `name` is for errors."""
    ours = np.asarray(ours)
    dtype = ours.dtype
    if dtype.kind == canaries.dtype.kind and dtype.kind in "US":
        dtype = np.promote_types(dtype, canaries.dtype)  # the shorter type would cut strings
    # The audit would attack other canaries than those that were trained on.
    if not _keeps_values(canaries, dtype):
        raise TypeError(
            f"`{name}` of the canaries must keep its values in the type of `{name}` of the data. "
            "Convert either of them before you mix. Received: canaries of type "
            f"{canaries.dtype} that differ as {dtype}"
        )
    return np.concatenate([ours.astype(dtype, copy=False), canaries.astype(dtype, copy=False)])


def _keeps_values(array: np.ndarray, dtype: np.dtype) -> bool:
    """Whether a cast to a type changes no value, except that it may round floats."""
    if array.dtype == dtype or dtype.kind == "O":
        return True
    if array.dtype.kind != dtype.kind and (array.dtype.kind in "US" or dtype.kind in "US"):
        return False  # a number and its digits
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cast = array.astype(dtype)
    except (TypeError, ValueError):
        return False
    if array.dtype.kind == dtype.kind and dtype.kind in "fc":
        rounding, smallest = float(np.finfo(dtype).eps), float(np.finfo(dtype).tiny)
        return np.allclose(cast, array, rtol=rounding, atol=smallest, equal_nan=True)
    return bool(np.all(cast == array))


class PrivacyAudit(tf.keras.callbacks.Callback):
    """Attacks the training run that it is part of, and reports the ε that the attack proves.

    Train on `canaries.mix(data)`. At the end of each epoch the callback adds `audit_epsilon` to the
    logs. The score of a canary measures how strongly it seems to be included:

    - `"loss"`: its loss before training minus its current loss. Costs a forward pass per epoch.
    - `"gradient"`: Σ over epochs of ⟨θ before - θ after, clipped gradient of the canary⟩, over all
      variables and over each alone; these tests share the probability of error. Detects a single
      variable without noise. TensorFlow alone computes the gradients, one canary at a time, so the
      audit shares no code with what it audits. Costs a forward and a backward pass per canary.

    Guarantee: the bound of one epoch that was chosen in advance, such as the last, holds with
    probability `confidence` over the run and the inclusion of the canaries. The largest bound of
    several epochs does not. The bound is about the training as a whole, canaries included, at the
    given δ. It bounds the ε of an example, or that of a user if users are protected and each canary
    is a user (`Canaries.mix_user_ids`). A low bound does not prove privacy. A bound of the last
    epoch above `claimed_epsilon` refutes the claim, and `fit` warns of it when it ends. A sound
    `fit` whose number of epochs was chosen in advance warns falsely with a probability of at most
    1 - `confidence`. Scores that are NaN count as the lowest, which keeps the bound valid. Like the
    training loss, the bound is not covered by ε.

    Args:
      canaries: the `Canaries` whose `mix` made the training data.
      delta: the δ of the ε to compare with.
      score: `"loss"`, `"gradient"`, or a function of (model, x, y) that returns [m] or [m, k]
        scores, higher for canaries that seem to be included.
      loss: `loss(y_true, y_pred)` → [B]; by default the loss of the compiled model, without its
        reduction over the batch.
      confidence: in (0, 1).
      num_guesses: see `one_run_epsilon`.
      claimed_epsilon: the claimed ε of the training; a larger bound of the last epoch causes a
        warning when training ends.

    Attributes:
      report: the `OneRunReport` of the last epoch, or `None`.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range; and when training
        begins, if the model has no loss or several.

    >>> canaries = Canaries(np.eye(400), np.ones(400))
    >>> audit = PrivacyAudit(canaries, delta=1e-5, claimed_epsilon=2.0)
    """

    def __init__(
        self,
        canaries: Canaries,
        delta: float,
        *,
        score: str | Callable[[tf.keras.Model, Any, Any], Any] = "loss",
        loss: Callable[..., tf.Tensor] | None = None,
        confidence: float = 0.95,
        num_guesses: Any = None,
        claimed_epsilon: float | None = None,
    ):
        super().__init__()
        if not isinstance(canaries, Canaries):
            raise TypeError(f"`canaries` must be `Canaries`. Received: canaries={canaries!r}")
        self.canaries = canaries
        self.score = score if callable(score) else checks.choice("score", score, SCORES)
        if loss is not None and not callable(loss):
            raise TypeError(
                f"`loss` must be a function of (y_true, y_pred). Received: loss={loss!r}"
            )
        self.loss = loss
        if claimed_epsilon is not None:
            claimed_epsilon = checks.number("claimed_epsilon", claimed_epsilon, 0)
        self.claimed_epsilon = claimed_epsilon
        self._audit = {"delta": delta, "confidence": confidence, "num_guesses": num_guesses}
        # A test with empty scores finds wrong arguments before the training.
        bounds.one_run_epsilon(np.zeros(len(canaries)), canaries.included, **self._audit)
        self.report: bounds.OneRunReport | None = None
        self._attacked: tf.keras.Model | None = None
        self._warned_of_nan = False

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Records the state before the training; called by Keras."""
        if self._attacked is not self.model:  # otherwise this `fit` continues the same training
            self._attacked = self.model
            self._scores = np.zeros([])
            self._warned_of_nan = False
            if not callable(self.score):
                if not self.model.built:  # without an input layer there are no weights yet
                    self.model(self._rows(0, _ROWS)[0], training=False)
                self._loss = self.loss or self._loss_of_model()
                self._gradients = tf.function(self._one_gradient)
            if self.score == "loss":
                self._first_losses = self._losses()
        if self.score == "gradient":
            self._before = self._weights()

    def _loss_of_model(self) -> Callable[..., tf.Tensor]:
        loss = self.model.loss
        if not isinstance(loss, str) and not callable(loss):
            raise ValueError(
                "The audit needs the loss of a canary: pass it `loss`, a function of (y_true, "
                f"y_pred). Received: a model with {loss!r}"
            )
        return loss_of_examples(loss)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Attacks and reports; called by Keras."""
        scores = self._without_nan(bounds.as_numbers("scores", self._attack()))
        self.report = bounds.one_run_epsilon(scores, self.canaries.included, **self._audit)
        if logs is not None:
            logs["audit_epsilon"] = self.report.epsilon_lower_bound

    def _without_nan(self, scores: np.ndarray) -> np.ndarray:
        """Ranks NaN lowest: a rule that does not know the coins keeps the bound valid."""
        missing = np.isnan(scores)
        if not missing.any():
            return scores
        if not self._warned_of_nan:
            self._warned_of_nan = True
            warnings.warn(
                "Scores of the audit must be numbers: NaN counts as the lowest score, so that the "
                "bound is valid but may be low. If the losses became NaN, lower the learning rate. "
                f"Received: {missing.sum()} NaN among {missing.size} scores",
                stacklevel=3,
            )
        return np.where(missing, -np.inf, scores)

    def on_train_end(self, logs: dict | None = None) -> None:
        """Warns if the last epoch refutes the claim; called by Keras.

        Each epoch has its own chance of a false bound, so a warning after each would be false more
        often than 1 - `confidence`.
        """
        if self.report is None:
            return
        bound = self.report.epsilon_lower_bound
        if self.claimed_epsilon is not None and bound > self.claimed_epsilon:
            warnings.warn(
                f"With probability {self.report.confidence:g} this training is not as private as "
                f"claimed: ε is at least {bound:.3f}, not {self.claimed_epsilon:g} or less "
                f"({self.report}).",
                stacklevel=2,
            )

    def _attack(self) -> Any:
        if callable(self.score):
            return self.score(self.model, self.canaries.x, self.canaries.y)
        if self.score == "loss":
            return self._first_losses - self._losses()
        after = self._weights()
        moved = [a - b for a, b in zip(self._before, after)]
        try:  # approximately the gradients that the steps of the epoch used
            self._set_weights(self._before)
            products = self._products(moved)
        finally:
            self._set_weights(after)
        self._before = after
        self._scores = self._scores + products
        return np.hstack([self._scores.sum(1, keepdims=True), self._scores])

    def _rows(self, start: int, end: int) -> tuple:
        """Inputs and labels of some canaries."""
        return tf.nest.map_structure(
            lambda a: tf.convert_to_tensor(a[start:end]), (self.canaries.x, self.canaries.y)
        )

    def _weights(self) -> list[tf.Tensor]:
        return [tf.identity(v) for v in self.model.trainable_variables]

    def _set_weights(self, values: list[tf.Tensor]) -> None:
        for variable, value in zip(self.model.trainable_variables, values):
            variable.assign(value)

    def _losses_of(self, x: Any, y: Any) -> tf.Tensor:
        outputs = self.model(x, training=False)
        return self._loss(labels_for(self._loss, y, outputs), outputs)

    def _losses(self) -> np.ndarray:
        """[m], the loss of each canary."""
        parts = []
        for start in range(0, len(self.canaries), _ROWS):
            x, y = self._rows(start, start + _ROWS)
            parts.append(np.atleast_1d(self._losses_of(x, y)))
        losses = np.concatenate(parts)
        if losses.shape != (len(self.canaries),):
            raise ValueError(
                "The loss must be one number for each canary (`reduction='none'`). Received: "
                f"shape {losses.shape} for {len(self.canaries)} canaries"
            )
        return losses.astype(np.float64)

    def _products(self, moved: list[tf.Tensor]) -> np.ndarray:
        """[m, variables], inner products of `moved` with each canary's clipped gradient."""
        clip = getattr(self.model.optimizer, "l2_norm_clip", np.inf)
        rows = []
        for i in range(len(self.canaries)):
            products, squared_norm = self._gradients(*self._rows(i, i + 1), moved)
            norm = float(squared_norm) ** 0.5
            weight = clip / norm if norm > clip else 1.0
            rows.append(products.numpy().astype(np.float64) * weight)
        return np.stack(rows)

    def _one_gradient(self, x: Any, y: Any, moved: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """Inner products by variable, and the squared norm, of the gradient of one example."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self._losses_of(x, y))
        gradients = dense_gradients(tape, loss, self.model.trainable_variables)
        products = tf.stack(
            [tf.cast(tf.reduce_sum(g * d), tf.float32) for g, d in zip(gradients, moved)]
        )
        return products, tf.add_n([tf.cast(tf.reduce_sum(g * g), tf.float32) for g in gradients])
