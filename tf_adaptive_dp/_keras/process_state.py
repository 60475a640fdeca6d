"""Process-wide counters and seeds, which reveal how much a process trained before.

TensorFlow numbers the functions and the variables of a process, and writes these numbers into
graphs, profiles and SavedModels. Anyone who knows the seed of the process can tell from the initial
value of a weight how much was drawn before it. If a search shows only its winner, both would reveal
the number of candidates.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context

from tf_adaptive_dp._keras.generation import GENERATION, internal_module

# Training a tiny model uses some 8,000 numbers, so few searches run 60 times as many trials as they
# do on average. The counter cannot be set, only advanced; this many numbers take half a second.
NUMBERS, _TRIALS = 2**22, 8


@contextlib.contextmanager
def hidden(expected_trials: float) -> Iterator[None]:
    """Hides how much was trained within from the counters and seeds of the process.

    Guarantee: within, unseeded randomness of Python, NumPy, TensorFlow and Keras comes from the
    entropy of the operating system, whatever seed was set before. Afterwards, their seeds and
    states are restored, and TensorFlow's counter of functions and variables has advanced by
    `NUMBERS` for every 8 expected trials, or by a multiple of that if more were needed. Eager
    operations of TensorFlow with a seed of their own begin their numbers again. Generators
    that the caller made (`random.Random`, NumPy's and TensorFlow's) are left alone.

    Args:
      expected_trials: the mean number of trials, which is public.
    """
    first, step = pywrap_tfe.TFE_Py_UID(), NUMBERS * math.ceil(expected_trials / _TRIALS)
    with _unseeded():
        try:
            yield
        finally:
            _advance_counter(-(1 + pywrap_tfe.TFE_Py_UID() - first) % step)


def _advance_counter(numbers: int) -> None:
    """Uses up this many of TensorFlow's numbers, as fast as Python can."""
    used = itertools.starmap(pywrap_tfe.TFE_Py_UID, itertools.repeat((), numbers))
    collections.deque(used, maxlen=0)


@contextlib.contextmanager
def _unseeded() -> Iterator[None]:
    of_python, of_numpy = random.getstate(), np.random.get_state()
    of_keras = _swap_seed_generator(None)
    random.seed()
    np.random.seed()
    try:
        with global_seed_kept():
            tf.random.set_seed(None)
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        _swap_seed_generator(of_keras)


@contextlib.contextmanager
def global_seed_kept() -> Iterator[None]:
    """Within it `tf.random.set_seed` may be called; the seed and its generator are put back.

    TensorFlow keeps the state of eager random operations in their kernels, which it finds by their
    seeds. `set_seed` drops them at the end: else an operation with a seed that was used within
    would go on from there, and show how much was drawn.
    """
    eager = context.context()
    seed, generator = eager._seed, getattr(eager, "_rng", None)
    try:
        yield
    finally:
        tf.random.set_seed(seed)
        eager._rng = generator


def _swap_seed_generator(generator: object | None) -> object | None:
    """Replaces what Keras draws its seeds from, and returns what that was before.

    Args:
      generator: `None` makes Keras create one when it needs it, with a seed from Python's `random`.
    """
    if GENERATION == 2:
        holder = internal_module("backend")._SEED_GENERATOR
        before = getattr(holder, "generator", None)
        holder.generator = generator
        return before
    state = internal_module("backend.common.global_state")
    name = internal_module("random.seed_generator").GLOBAL_SEED_GENERATOR
    before = state.get_global_attribute(name)
    state.set_global_attribute(name, generator)
    return before


def turn_off_profiling(callback: tf.keras.callbacks.TensorBoard) -> None:
    """Keeps a TensorBoard callback from writing graphs and profiles, which hold these numbers."""
    callback.write_graph = False
    callback._init_profile_batch(0)
