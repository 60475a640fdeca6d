"""The trials of `stackoverflow_dp`: scales, settings, methods, and the best of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from federated.simulation import trials
from federated.simulation.trials import Settings, Trial

LAST = 3  # the number of last evaluations to average
# A grid of (clip norm, client rate) for each method, around the best of short runs.
CENTRES = {
    "fed_avg": (1.0, 100.0),
    "fed_adam": (1.0, 100.0),
    "adadps": (1.0, 10.0),
    "adadps_server": (1.0, 100.0),
    "ftrl": (1.0, 100.0),
    "ftrl_adadps": (1.0, 10.0),
}
SERVER_ADAM_RATE = 0.3
MAX_POSTS = 256  # of a client; dense bags of 10,000 words are then 10 MB at most


@dataclasses.dataclass(frozen=True)
class Scale:
    """The size of the experiment.

    Attributes:
      rounds: the number of rounds of each trial, by setting.
      words: the largest number of words.
      tags: the largest number of classes.
      public_users: the largest number of counted users of the held-out split.
      factors: the factors of the step length and of the client rate in the grid. The length of a
        step is the clip norm, or Adam's own rate.
      seeds: the number of runs of each method with its best pair.
    """

    rounds: Mapping[str, int]
    words: int
    tags: int
    public_users: int
    factors: tuple[tuple[float, float], ...]
    seeds: int


SCALES = {
    "smoke": Scale(
        rounds={"paper": 2, "private": 2},
        words=300,
        tags=20,
        public_users=50,
        factors=((1.0, 1.0),),
        seeds=1,
    ),
    "small": Scale(
        rounds={"paper": 200, "private": 100},
        words=500,
        tags=10,
        public_users=1000,
        factors=((1, 1), (0.3, 1), (3, 1), (1, 0.1)),
        seeds=3,
    ),
    "paper": Scale(
        rounds={"paper": 500, "private": 500},
        words=10_000,
        tags=500,
        public_users=10_000,
        factors=tuple(itertools.product((0.3, 1.0, 3.0), (0.3, 1.0, 3.0))),
        seeds=3,
    ),
}
# The paper's setting, and one with a meaningful ε. sigma is for Poisson cohorts, tree_sigma for
# each node of DP-FTRL's trees; a client's update is in several nodes.
SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {"clients": 400, "clients_per_round": 20, "sigma": 0.3},
    "private": {"clients": None, "clients_per_round": 50, "sigma": 0.7, "tree_sigma": 3.3},
}
METHODS = {
    "paper": ("fed_avg", "fed_adam", "adadps", "adadps_server"),
    "private": ("fed_avg", "adadps", "ftrl", "ftrl_adadps"),
}


def plan(scale: str, finished: Sequence[Trial]) -> list[Settings]:
    """The wanted trials: a search with seed 0, then more seeds for the best pair."""
    how = SCALES[scale]
    wanted = []
    for name, methods in METHODS.items():
        for method in methods:
            clip, rate = CENTRES[method]
            grid = [
                {
                    "method": method,
                    "rate": float(f"{rate * by_rate:.3g}"),
                    **_step(method, clip, length),
                    "setting": name,
                    **_constants(name, method),
                    "rounds": how.rounds[name],
                    "words": how.words,
                    "tags": how.tags,
                    "public_users": how.public_users,
                    "max_posts": MAX_POSTS,
                    "seed": 0,
                }
                for length, by_rate in how.factors
            ]
            wanted += grid
            done = [t for t in finished if t.settings in grid]
            if len(done) == len(grid):
                chosen = trials.best(done, accuracy).settings
                wanted += [{**chosen, "seed": seed} for seed in range(1, how.seeds)]
    return wanted


def _step(method: str, clip: float, length: float) -> Settings:
    """The clip norm; with Adam its rate, since the clip norm does not change its steps."""
    if method == "fed_adam":
        return {"clip": clip, "server_adam_rate": float(f"{SERVER_ADAM_RATE * length:.3g}")}
    return {"clip": float(f"{clip * length:.3g}")}


def _constants(setting: str, method: str) -> Settings:
    """The settings that no trial varies but its result depends on."""
    how, is_tree = SETTINGS[setting], method.startswith("ftrl")
    return {
        "clients": how["clients"],
        "clients_per_round": how["clients_per_round"],
        "sigma": how["tree_sigma" if is_tree else "sigma"],
        "mechanism": "tree" if is_tree else "gaussian",
    }


def accuracy(trial: Trial) -> float:
    """The mean test accuracy of the last evaluations."""
    return trial.last("test/accuracy", LAST)


def best_runs(finished: Sequence[Trial]) -> dict[tuple[str, str], list[Trial]]:
    """The runs of the pair that was best with seed 0, by setting and method."""
    found = {}
    for name, methods in METHODS.items():
        for method in methods:
            runs = [
                t
                for t in finished
                if (t.settings["setting"], t.settings["method"]) == (name, method)
            ]
            first = [t for t in runs if t.settings["seed"] == 0]
            if first:
                chosen = {**trials.best(first, accuracy).settings, "seed": None}
                found[name, method] = [t for t in runs if {**t.settings, "seed": None} == chosen]
    return found
