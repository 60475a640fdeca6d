"""What a process would show of the models that it trained before: its counters and its seeds.

TensorFlow numbers the functions and the variables that a process makes, and writes these numbers
into graphs, profiles and SavedModels. Whoever knows the seed of the process can tell from the
initial value of a weight how much was drawn before it. Both would tell, of a winner, how many
candidates there were.
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
from keras.src import backend
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context

# A tiny model takes some 8,000 numbers to train, so that few searches make 60 times as many trials
# as they do on average. Numbers cannot be set, only used up: these take half a second.
NUMBERS, _TRIALS = 2**22, 8


@contextlib.contextmanager
def hidden(expected_trials: float) -> Iterator[None]:
    """Whatever is trained within leaves no number in the process that tells how much it was.

    Guarantee: within, unseeded randomness of Python, NumPy, TensorFlow and Keras comes from the
    operating system's entropy, whatever seed was set before. Afterwards their seeds and states are
    what they were, and TensorFlow's counter of functions and variables has moved on by `NUMBERS`
    for every 8 trials expected (by a multiple of that if more were needed). Python's
    `random.Random` objects, NumPy's and TensorFlow's generators that the caller made are left
    alone.

    Args:
      expected_trials: the mean number of trials, which is public.
    """
    first, step = pywrap_tfe.TFE_Py_UID(), NUMBERS * math.ceil(expected_trials / _TRIALS)
    with _unseeded():
        try:
            yield
        finally:
            _skip(-(1 + pywrap_tfe.TFE_Py_UID() - first) % step)


def _skip(numbers: int) -> None:
    """Uses up so many of TensorFlow's numbers, as fast as Python can."""
    used = itertools.starmap(pywrap_tfe.TFE_Py_UID, itertools.repeat((), numbers))
    collections.deque(used, maxlen=0)


@contextlib.contextmanager
def _unseeded() -> Iterator[None]:
    of_python, of_numpy = random.getstate(), np.random.get_state()
    of_keras = getattr(backend._SEED_GENERATOR, "generator", None)
    eager = context.context()
    of_tensorflow = eager._seed, getattr(eager, "_rng", None)
    random.seed()
    np.random.seed()
    backend._SEED_GENERATOR.generator = None
    if eager._seed is not None:
        tf.random.set_seed(None)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        backend._SEED_GENERATOR.generator = of_keras
        if of_tensorflow[0] is not None:
            tf.random.set_seed(of_tensorflow[0])
            eager._rng = of_tensorflow[1]
