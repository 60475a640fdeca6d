"""AdaDPS on tag prediction for Stack Overflow posts.

Repeats figure 4, tables 2, 3, 6, 7, 8 and 9, and the first half of table 10 of the AdaDPS paper on
Stack Overflow: softmax regression from bags of words to the most frequent tag of a post, with
σ = 0.95 and batches of 64. "Ideal" takes its second moments from the private gradients and shows
the best that side information could achieve. The smaller scales have fewer words and tags.

The following is public: the known words and tags, and how many users wrote each word, from the
users of the held-out split, who are assumed to have waived their protection; in the part
"1% public" a random 1% of the training posts; and in the part "4 users public" all posts of the
first four users, who belong to one site. All of these are excluded from the private data.

Privacy claim: each run of a private method alone is (ε, δ)-DP for adding or removing one post,
where δ is one over the number of private posts. A user with several posts has weaker protection.
Batches are drawn by Poisson sampling, so the ε shown is a proven upper bound. Accuracy is measured
on the test posts. Clip norms and rates are chosen on these, as in the paper, and ε does not include
the cost of this choice.

    python examples/experiments/adadps_stackoverflow/run.py --scale small --data_dir FOLDER

FOLDER holds `stackoverflow.sqlite` from `tff.simulation.datasets.stackoverflow.load_data`.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

import tf_adaptive_dp
from examples.experiments.lib import adadps_methods, grids, harness
from examples.experiments.lib.datasets import stackoverflow

ONE_PERCENT, FOUR_USERS = "1% public", "4 users public"

# For each method three (C, rate), or four, chosen by short runs of the small scale.
_PUBLIC = {"epsilon_root": 1e-6}
_WARM = {"public_rate": 0.01, "public_epochs": 20}


def _pairs(clip: float, rates: Sequence[float], **others: float) -> list[dict[str, float]]:
    return [{"clip": clip, "rate": rate, **others} for rate in rates]


CANDIDATES: Mapping[str, Sequence[Mapping[str, float]]] = {
    "dp_sgd": _pairs(0.1, [30.0, 100.0, 300.0]),
    "dp_adam": _pairs(0.1, [0.03, 0.1, 0.3]),
    "dp_rmsprop": _pairs(0.1, [0.01, 0.03, 0.1, 0.3]),
    "adadps_rmsprop": _pairs(1.0, [3.0, 10.0, 30.0], **_PUBLIC),
    "adadps_adam": _pairs(1.0, [3.0, 10.0, 30.0], **_PUBLIC),
    "adadps_frequency": _pairs(1.0, [3.0, 10.0, 30.0]),
    "ideal": _pairs(1.0, [3.0, 10.0, 30.0], **_PUBLIC),
    "dp_r_pub": _pairs(0.1, [0.03, 0.1, 0.3], **_PUBLIC),
    "dp_adam_pub": _pairs(0.1, [0.03, 0.1, 0.3], **_PUBLIC),
    "pda_dpmd": _pairs(0.1, [30.0, 100.0, 300.0]),
    "warm_start": _pairs(0.1, [30.0, 100.0, 300.0], **_WARM),
    "sgd": [{"rate": rate} for rate in (3.0, 10.0, 30.0)],
    "adam": [{"rate": rate} for rate in (0.01, 0.03, 0.1)],
    "adas": [{"rate": rate, **_PUBLIC} for rate in (0.03, 0.1, 0.3)],
    "adas_frequency": [{"rate": rate} for rate in (3.0, 10.0, 30.0)],
}

SIZES = {
    "smoke": {"words": 300, "tags": 20, "epochs": 1, "max_posts": 600},
    "small": {"words": 2000, "tags": 100, "epochs": 50, "max_posts": None},
    "paper": {"words": 10_000, "tags": 500, "epochs": 50, "max_posts": None},
}


def parts(scale: str) -> list[grids.Part]:
    """What is compared at a scale."""
    common = {"scale": scale, **SIZES[scale], "batch_size": 64, "sigma": 0.95}
    candidates = {m: c[:1] if scale == "smoke" else c for m, c in CANDIDATES.items()}
    seeds = 1 if scale == "smoke" else 3
    of_users = {"adadps_rmsprop": candidates["adadps_rmsprop"]}
    return [
        grids.Part({**common, "part": part}, chosen, "accuracy", seeds=seeds)
        for part, chosen in [(ONE_PERCENT, candidates), (FOUR_USERS, of_users)]
    ]


@functools.lru_cache(maxsize=2)
def load(data_dir: str | None, words: int, tags: int, part: str, max_posts: int | None) -> tuple:
    """Public, private and test arrays, and what is known of words and tags."""
    held_out, train, test = (stackoverflow.posts(data_dir, s) for s in ("heldout", "train", "test"))
    known = stackoverflow.vocabulary(held_out, words, tags)
    if part == FOUR_USERS:
        arrays = [stackoverflow.bags_of_words(p, known) for p in stackoverflow.by_users(train, 4)]
    else:
        everything = stackoverflow.bags_of_words(train, known)
        arrays = tf_adaptive_dp.side_information.split_public(everything, 0.01)[:2]
    arrays = [*arrays, stackoverflow.bags_of_words(test, known)]
    return *[(x[:max_posts], y[:max_posts]) for x, y in arrays], known


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run."""
    names = ("words", "tags", "part", "max_posts")
    public, private, test, known = load(data_dir, *(settings[name] for name in names))
    tf.keras.utils.set_random_seed(settings["seed"])
    model = tf.keras.Sequential(
        [tf.keras.Input([len(known.words)]), tf.keras.layers.Dense(len(known.tags))]
    )
    result = adadps_methods.run(
        model,
        settings,
        public,
        private,
        test,
        loss=tf.keras.losses.SparseCategoricalCrossentropy,
        from_logits=True,
        metrics=["accuracy"],
        judge_every=2,
        word_counts=known.users,
    )
    return {**result, "num_public": len(public[1]), "num_private": len(private[1])}


EXPERIMENT = grids.experiment("adadps_stackoverflow", __doc__, parts, train, adadps_methods.TITLES)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
