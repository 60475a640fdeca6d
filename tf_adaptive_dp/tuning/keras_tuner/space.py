"""The candidates of a search space: all of a finite one, or secret draws from any.

Spaces are KerasTuner's; conditional hyperparameters have a value only where they are active.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

Values = dict[str, Any]

# Spaces with more candidates are drawn from without listing them.
_MOST_LISTED = 10_000


def description(hyperparameters: Any) -> list:
    """What a space is, as plain JSON, to be compared with that of a resumed search.

    Args:
      hyperparameters: `keras_tuner.HyperParameters`.
    """
    return json.loads(json.dumps(hyperparameters.get_config()["space"]))


def draw(hyperparameters: Any, randomness: random.Random | None = None) -> Values:
    """One candidate, uniformly from the space, as each hyperparameter's `sampling` has it.

    Guarantee: independent of every other draw and of the data; by the operating system's entropy
    unless `randomness` is given, for tests.

    Args:
      hyperparameters: `keras_tuner.HyperParameters`; its values do not matter.
      randomness: where to draw from.
    """
    randomness = randomness or random.SystemRandom()
    drawn = type(hyperparameters)()
    for hyperparameter in hyperparameters.space:
        drawn.merge([hyperparameter])
        if drawn.is_active(hyperparameter):
            drawn.values[hyperparameter.name] = hyperparameter.prob_to_value(randomness.random())
    return drawn.values


def listed(hyperparameters: Any) -> list[Values] | None:
    """Every candidate of a finite space once, in the order of its values.

    Returns:
      The candidates; `None` if a number may have any value in an interval, or there are more than
      `_MOST_LISTED`.
    """
    space = hyperparameters.space
    if any(_values(hyperparameter) is None for hyperparameter in space):
        return None
    found = _extended(type(hyperparameters)(), space)
    candidates = list(itertools.islice(found, _MOST_LISTED + 1))
    return candidates if len(candidates) <= _MOST_LISTED else None


def without_replacement(
    hyperparameters: Any, num_trials: int, randomness: random.Random | None = None
) -> list[Values]:
    """Candidates that all differ: the whole space in its order if it has no more, else at random.

    Args:
      hyperparameters: `keras_tuner.HyperParameters`.
      num_trials: how many at most.
      randomness: where to draw from, by default the operating system's entropy.
    """
    randomness = randomness or random.SystemRandom()
    candidates = listed(hyperparameters)
    if candidates is not None:
        few = len(candidates) <= num_trials
        return candidates if few else randomness.sample(candidates, num_trials)
    if num_trials > _MOST_LISTED:
        raise ValueError(
            f"Of so large a space at most {_MOST_LISTED} candidates can be tried. Received: "
            f"num_trials={num_trials!r}"
        )
    drawn: dict[str, Values] = {}
    while len(drawn) < num_trials:  # the space has more than `_MOST_LISTED`, so this ends soon
        candidate = draw(hyperparameters, randomness)
        drawn[json.dumps(candidate, sort_keys=True)] = candidate
    return list(drawn.values())


def _values(hyperparameter: Any) -> list | None:
    """The values that a hyperparameter may have, `None` if they are not a list."""
    if not hasattr(hyperparameter, "min_value"):
        return list(hyperparameter.values)
    kind = type(hyperparameter.min_value)  # the user may have given a default of another type
    if hyperparameter.step is not None:
        return [kind(value) for value in hyperparameter.values]
    if kind is int:
        return list(range(hyperparameter.min_value, hyperparameter.max_value + 1))
    fixed = hyperparameter.min_value == hyperparameter.max_value
    return [hyperparameter.min_value] if fixed else None


def _extended(chosen: Any, space: list) -> Iterator[Values]:
    """All ways to go on from what was chosen through the rest of the space."""
    if not space:
        yield dict(chosen.values)
        return
    first, *rest = space
    chosen = chosen.copy()
    chosen.merge([first])
    if not chosen.is_active(first):
        yield from _extended(chosen, rest)
        return
    values = _values(first)
    if values is None:
        raise ValueError(f"`{first.name}` must have a list of values.")
    for value in values:
        chosen.values[first.name] = value
        yield from _extended(chosen, rest)
