"""Changes a batch and observes which losses change, without any knowledge of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

import numpy as np
import tensorflow as tf

from tf_adaptive_dp.validation.findings import Finding
from tf_adaptive_dp.validation.layer_findings import named_layers
from tf_adaptive_dp.validation.per_example import Losses
from tf_adaptive_dp.validation.repeatable import reset


class Probe(NamedTuple):
    """The findings of the probe, and what it ran, without a full stop."""

    findings: list[Finding]
    probed: str


def probe(
    model: tf.keras.Model, losses: Losses, batch: tuple, expected_batch_size: float | None
) -> Probe:
    """Runs a model eagerly on changed batches; call it within `unchanged`.

    The probe replaces one example by another, by zeros and by shuffled entries; the losses of the
    others must stay. Losses must also be the same when the batch is shown again, and must depend
    neither on the position in the batch nor on its size. Random layers such as dropout draw the
    same numbers each time. If they cannot, and for positions and sizes, a random model runs with
    `training=False`. If it draws random numbers then, too, as a variational autoencoder does,
    examples that move get other numbers, so positions and sizes are left out.

    A loss may differ by √u times the largest loss, where u is the rounding error of the type (√u is
    2.4e-4 in float32). Rounding over n operations in a row adds up to about u√n, which is far less.
    Replacing an example changes no shapes and hence no rounding; another position or size may.

    Args:
      model: may have random layers.
      losses: maps a batch, and whether the model trains, to the loss vector.
      batch: nests of tensors, with at least two examples.
      expected_batch_size: the attribute of the optimizer.
    """
    run = _Runner(model, losses)
    first, again = run(batch, True), run(batch, True)
    training = run.same(first, again)
    random = not (training and run.same(first, run(batch, True, seed=2)))
    found = _independence(run, batch, training)
    if random and training and not found:
        found = _independence(run, batch, False)
    always = random and not run.same(run(batch, False), run(batch, False, seed=2))
    if not found and not always:
        found = _position(run, batch, not random)
        found += _size(run, batch, not random, expected_batch_size)
    ran = f"Checked with {run.count} forward passes"
    if always:
        ran += " (positions and sizes left out, since the model is random with training=False too)"
    elif random and training:
        ran += " (positions and sizes with training=False)"
    elif random:
        ran += " (with training=False, because two with training=True differ)"
    return Probe(found, "; ".join([ran, *run.left_out]))


# Half of the distance from 1 to the next larger number.
_EPSILON = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Logits of size 10 have rounding errors of 1e-6, so small losses are compared no more closely.
_SMALLEST_SCALE = 0.01


class _Runner:
    """Runs the model with fixed seeds, and compares losses."""

    def __init__(self, model: tf.keras.Model, losses: Losses):
        self.model, self.losses, self.count = model, losses, 0
        self.left_out: list[str] = []
        types = {layer.compute_dtype for _, layer in named_layers(model)} | {model.compute_dtype}
        self.tolerance = np.sqrt(max(_EPSILON.get(t, _EPSILON["float32"]) for t in types))

    def __call__(self, batch: tuple, training: bool, seed: int = 1) -> np.ndarray:
        reset(self.model, seed)
        self.count += 1
        return tf.cast(self.losses(batch, training), tf.float64).numpy()

    def attempt(self, what: str, batch: tuple, training: bool) -> np.ndarray | None:
        """Does the same for data that the model may reject; then it records that in `left_out`."""
        try:
            return self(batch, training)
        except (ValueError, TypeError, tf.errors.OpError) as error:
            self.left_out.append(f"{what} left out ({type(error).__name__})")
            return None

    def moved(self, one: np.ndarray, other: np.ndarray, smallest: float = 0.0) -> np.ndarray:
        """Which losses differ, [B]; the largest loss counts as at least `smallest`."""
        scale = max(np.max(np.abs(one), initial=0.0, where=np.isfinite(one)), smallest)
        near = np.isclose(one, other, rtol=0.0, atol=self.tolerance * scale, equal_nan=True)
        return np.logical_not(near)

    def same(self, one: np.ndarray, other: np.ndarray, smallest: float = 0.0) -> bool:
        """Whether all losses agree."""
        return not self.moved(one, other, smallest).any()


def _rows(batch: tuple, rows: np.ndarray) -> tuple:
    return tf.nest.map_structure(lambda t: None if t is None else tf.gather(t, rows), batch)


def _replacements(batch: tuple, one: int) -> Iterator[tuple[str, tuple]]:
    """Yields batches in which one example is replaced, with a name for the replacement."""
    num_examples = tf.nest.flatten(batch)[0].shape[0]
    rows = np.arange(num_examples)
    rows[one] = (one + 1) % num_examples
    copied = _rows(batch, rows)
    yield "another example", copied

    def set_inputs(change: Callable[[np.ndarray], Any]) -> tuple:
        def of(tensor: tf.Tensor) -> tf.Tensor:
            if not tensor.dtype.is_floating:
                return tensor
            array = tensor.numpy()
            array[one] = change(array[one])
            return tf.constant(array)

        return (tf.nest.map_structure(of, copied[0]), *copied[1:])

    def shuffled(row: np.ndarray) -> np.ndarray:
        order = np.random.default_rng(one).permutation(row.size)
        return 3 * row.reshape(-1)[order].reshape(row.shape)

    if any(t.dtype.is_floating for t in tf.nest.flatten(batch[0])):
        yield "zeros", set_inputs(np.zeros_like)
        yield "its own entries, shuffled and tripled", set_inputs(shuffled)


def _independence(run: _Runner, batch: tuple, training: bool) -> list[Finding]:
    """Checks whether losses of others move when an example is replaced, or from run to run."""
    before = run(batch, training)
    for one in sorted({0, len(before) // 2, len(before) - 1}):
        for kind, changed in _replacements(batch, one):
            after = run.attempt(f"replacing by {kind}", changed, training)
            if after is None:
                continue
            others = np.delete(before, one), np.delete(after, one)
            if run.same(*others):
                continue
            if not run.same(before, run(batch, training)):
                return [_state(training)]
            num_moved = int(run.moved(*others).sum())
            largest = float(np.max(np.abs(others[0] - others[1])))
            return [
                Finding(
                    "probe",
                    "model",
                    f"Replacing example {one} by {kind} changes the losses of {num_moved} "
                    f"others, by up to {largest:.2g} (training={training}): the examples of a "
                    "batch are not independent.",
                    "Find what works on the whole batch, in the loss and outside of TensorFlow too "
                    "(`py_function`, `numpy_function`), and restrict it to one example.",
                )
            ]
    return [] if run.same(before, run(batch, training)) else [_state(training)]


def _state(training: bool) -> Finding:
    return Finding(
        "state",
        "model",
        "The losses of a batch change when it is shown again with the same weights and seeds "
        f"(training={training}): the model keeps state from batch to batch, or its random numbers "
        "cannot be repeated.",
        "Remove the state (stateful layers, moving averages, Python attributes), or draw random "
        "numbers from TensorFlow's or Keras's generators.",
    )


def _position(run: _Runner, batch: tuple, training: bool) -> list[Finding]:
    before = run(batch, training)
    after = run(_rows(batch, np.roll(np.arange(len(before)), 1)), training)
    if run.same(before, np.roll(after, -1), _SMALLEST_SCALE):
        return []
    return [
        Finding(
            "position",
            "model",
            "The loss of an example depends on its position in the batch, so one more example "
            "changes the gradients of the examples after it.",
            "Do not count along axis 0 (`tf.range(batch_size)`, tables with a row per position).",
        )
    ]


def counting(expected_batch_size: float | None) -> Finding:
    """The finding about a loss that depends on the batch size.

    Args:
      expected_batch_size: the attribute of the optimizer; if set, batches may vary in size.
    """
    random = expected_batch_size is not None
    return Finding(
        "batch size",
        "loss",
        "The loss of each example depends on the number of examples in the batch"
        + (", which is not public for batches of random size." if random else "."),
        "Do not divide by the batch size (the optimizer does so), or make all batches equal "
        "(`drop_remainder=True`, no `expected_batch_size`).",
        "error" if random else "warning",
    )


def _size(
    run: _Runner, batch: tuple, training: bool, expected_batch_size: float | None
) -> list[Finding]:
    before = run(batch, training)
    fewer = len(before) - len(before) // 2
    after = run.attempt("smaller batches", _rows(batch, np.arange(fewer)), training)
    if after is None or run.same(before[:fewer], after, _SMALLEST_SCALE):
        return []
    return [counting(expected_batch_size)]
