"""The candidates of a search space: all of a finite space, or secret draws from any space.

Spaces are those of KerasTuner. Conditional hyperparameters have a value only if they are active.
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
    """Describes a space as plain JSON, for comparison with that of a resumed search.

    Args:
      hyperparameters: `keras_tuner.HyperParameters`.
    """
    return json.loads(json.dumps(hyperparameters.get_config()["space"]))


def draw(hyperparameters: Any, randomness: random.Random | None = None) -> Values:
    """Draws a candidate uniformly from the space, on the scale of each hyperparameter's `sampling`.

    Guarantee: independent of every other draw and of the data. The entropy is that of the operating
    system unless `randomness` is given, for tests.

    Args:
      hyperparameters: `keras_tuner.HyperParameters`; its values do not matter.
      randomness: the source of randomness.
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
      The candidates; `None` if a number can have any value in an interval, or there are more than
      `_MOST_LISTED` candidates.
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
    """Distinct candidates: the whole space in its order if it is small enough, else at random.

    Args:
      hyperparameters: `keras_tuner.HyperParameters`.
      num_trials: the largest number of candidates.
      randomness: the source of randomness, by default the operating system's entropy.
    """
    randomness = randomness or random.SystemRandom()
    candidates = listed(hyperparameters)
    if candidates is not None:
        few = len(candidates) <= num_trials
        return candidates if few else randomness.sample(candidates, num_trials)
    if num_trials > _MOST_LISTED:
        raise ValueError(
            f"At most {_MOST_LISTED} candidates of a space this large can be tried. Received: "
            f"num_trials={num_trials!r}"
        )
    drawn: dict[str, Values] = {}
    while len(drawn) < num_trials:  # the space has more than `_MOST_LISTED`, so this ends soon
        candidate = draw(hyperparameters, randomness)
        drawn[json.dumps(candidate, sort_keys=True)] = candidate
    return list(drawn.values())


def _values(hyperparameter: Any) -> list | None:
    """The values that a hyperparameter can have; `None` if they cannot be listed."""
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
    """All completions of the chosen values through the rest of the space."""
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
