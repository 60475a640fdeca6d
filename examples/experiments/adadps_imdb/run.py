"""AdaDPS on film reviews (IMDB): all tables and figure 4 of the AdaDPS paper on this data.

The parts are logistic regression on bags of words (tables 2, 3, 6, 7, 8; "ideal" of table 4) and on
TF-IDF values (table 4), the LSTM (table 6), and the same without privacy (table 9), with σ = 1,
batches of 64 and δ = 1/25,000. In every part each private method gets the same number of pairs of
clip norm and rate, with per-example clipping. The part "16 microbatches" uses the paper's
microbatches of 4 reviews and its pairs. All private runs also average their weights (`use_ema`),
which costs no privacy; the tables show both, and pairs are chosen by the averaged weights. Figures
are means over the last three epochs.

A for token frequencies is that of the authors, bounded by 1, which keeps the weights of padding and
of the most common words from drifting (see `reviews.token_frequencies`). "As released" has no
bound.

`--scale small` is smaller than the paper: two pairs per method instead of twelve, found by earlier
trials on the same test reviews; one seed outside the part "bag of words"; 8 epochs without privacy;
an LSTM on the first 40 words for 8 epochs, with three of its methods.

The following is public: 1% of the training reviews with their labels, which are excluded from the
private ones; the texts (never the labels) of the test reviews, for the vocabulary, inverse document
frequencies, and the token frequencies of "25,000 other reviews"; posts and word counts of a Stack
Exchange site. The paper takes its token frequencies and TF-IDF values from the private reviews.
"Not private" marks rows that use private reviews without protection, to measure the effect of that
leak; their ε is infinite. As data from another distribution, the paper uses Amazon reviews; here
they are posts, labeled by whether they are questions.

Privacy claim: each run of a private method alone is (ε, δ)-DP for adding or removing one of the
private reviews. Batches are drawn by Poisson sampling, so ε is a proven upper bound. With
microbatches they are shuffled, so ε is only approximate; and since one review changes a sum by up
to 2C, ε is computed from half the noise multiplier. Accuracy is measured on the test reviews, and
pairs are chosen by it, as in the paper; ε does not include the cost of this choice.

    python examples/experiments/adadps_imdb/run.py --scale small --data_dir ~/tensorflow_datasets

The environment variable TFF_CACHE_DIR names the folder with `stackoverflow.sqlite` and
`stackoverflow.word_count` of `tff.simulation.datasets.stackoverflow`.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from examples.experiments.lib import grids, harness, report, reviews

Candidates = Sequence[Mapping[str, float]]


def pairs(*chosen: tuple[float, float]) -> list[dict[str, float]]:
    """Candidates from pairs of clip norm and rate."""
    return [{"clip": clip, "rate": rate} for clip, rate in chosen]


# Small scale: two pairs per method, around the best of earlier trials.
BAG_OF_WORDS: dict[str, Candidates] = {
    "dp_sgd": pairs((0.5, 10), (0.5, 20)),
    "dp_adam": pairs((0.5, 0.1), (0.5, 0.03)),
    "adadps_rmsprop": pairs((100, 0.1), (100, 0.05)),
    "adadps_frequency": pairs((0.3, 30), (1, 5)),
}
MORE_METHODS: dict[str, Candidates] = {
    "dp_rmsprop": pairs((0.5, 0.3), (0.5, 1)),
    "adadps_adam": pairs((100, 0.1), (100, 0.05)),
    "adadps_ood": pairs((100, 0.1), (100, 0.05)),
    "ideal": pairs((100, 0.1), (100, 0.05)),
    "adadps_frequency_released": pairs((0.3, 30), (1, 5)),
    "adadps_frequency_of_public": pairs((0.3, 30), (1, 5)),
    "adadps_frequency_elsewhere": pairs((0.3, 30), (1, 5)),
    "adadps_frequency_of_private": pairs((0.3, 30), (1, 5)),
    "dp_r_pub": pairs((0.5, 0.001), (0.5, 0.002)),
    "dp_adam_pub": pairs((0.5, 0.005), (0.5, 0.002)),
    "pda_dpmd": pairs((0.5, 1), (0.5, 5)),
    "warm_start": [
        {"clip": 0.5, "rate": 10, "public_rate": 0.1},
        {"clip": 0.5, "rate": 10, "public_rate": 1},
    ],
}
TF_IDF: dict[str, Candidates] = {
    "dp_sgd": pairs((0.5, 10), (0.5, 5)),
    "dp_adam": pairs((0.5, 0.1), (0.5, 0.03)),
    "adadps_tf_idf": pairs((3, 1), (1, 1)),
    "adadps_frequency": pairs((0.3, 30), (1, 5)),
    "ideal": pairs((100, 0.1), (100, 0.05)),
}
# The paper's table 5; it has no pair for token frequencies, which get that of DP-SGD.
MICROBATCHES: dict[str, Candidates] = {
    "dp_sgd": pairs((0.1, 1)),
    "dp_adam": pairs((0.02, 0.1)),
    "adadps_rmsprop": pairs((2, 0.5)),
    "adadps_frequency": pairs((0.1, 1)),
}
LSTM: dict[str, Candidates] = {
    "dp_sgd": pairs((0.1, 0.1), (0.1, 1)),
    "dp_adam": pairs((0.1, 0.001), (0.1, 0.003)),
    "dp_rmsprop": pairs((0.1, 0.001), (0.1, 0.003)),
    "adadps_rmsprop": pairs((0.2, 0.1), (10, 0.01)),
    "adadps_adam": pairs((0.2, 0.05), (10, 0.01)),
}
NOT_PRIVATE: dict[str, Candidates] = {
    "sgd": [{"rate": rate} for rate in (0.1, 1, 10)],
    "adam": [{"rate": rate} for rate in (0.001, 0.01, 0.1)],
    "adas": [{"rate": rate} for rate in (0.001, 0.01, 0.1)],
    "adas_frequency": [{"rate": rate} for rate in (1, 10, 100)],
}
# Paper scale: twelve pairs per method, around those.
FACTORS = list(itertools.product((0.3, 1, 3), (0.3, 1, 3, 10)))

COMMON: dict[str, Any] = {
    "batch_size": 64,
    "sigma": 1.0,
    "delta": 1 / 25_000,
    "public_share": 0.01,
    "public_batch": 20,
    "every": 8,
    "steps_per_execution": 8,
    "epsilon_root": 1e-8,
    "largest": 1.0,
    "length": 290,
    "number": None,
    "public_epochs": 20,
    "public_rate": 0.01,
}
PRIVATE = {"ema": 0.998}


def _wider(candidates: Candidates) -> Candidates:
    first = candidates[0]
    return [
        {"clip": round(first["clip"] * c, 9), "rate": round(first["rate"] * r, 9)}
        for c, r in FACTORS
    ]


def parts(scale: str) -> list[grids.Part]:
    """What is compared at a scale."""
    all_parts = {
        "bag of words": ({"features": "bow", **PRIVATE}, BAG_OF_WORDS),
        "bag of words, more methods": ({"features": "bow", **PRIVATE}, MORE_METHODS),
        "TF-IDF": ({"features": "tf_idf", **PRIVATE}, TF_IDF),
        "bag of words, 16 microbatches": (
            {"features": "bow", "microbatches": 16, "largest": None, **PRIVATE},
            MICROBATCHES,
        ),
        "bag of words, not private": ({"features": "bow"}, NOT_PRIVATE),
        "LSTM": ({"features": "lstm", **PRIVATE}, LSTM),
    }
    how = {"scale": scale, "epochs": 32, "judge_every": 1 if scale == "paper" else 8}
    if scale == "smoke":
        how |= {"epochs": 1, "number": 1000, "public_share": 0.1}
    made = []
    for name, (own, candidates) in all_parts.items():
        common = {**COMMON, **how, **own, "part": name}
        seeds = 3 if scale == "paper" or (scale, name) == ("small", "bag of words") else 1
        if scale == "smoke":
            candidates = {m: c[:1] for m, c in candidates.items()}
        elif scale == "paper" and "microbatches" not in own and "ema" in own:
            candidates = {m: _wider(c) for m, c in candidates.items()}
        if scale != "paper" and name == "LSTM":
            # A recurrence over 290 words takes most of a second a step on one core.
            common |= {"length": 40, "epochs": 1 if scale == "smoke" else 8}
            candidates = {m: candidates[m] for m in ("dp_sgd", "dp_adam", "adadps_rmsprop")}
        elif scale == "small" and name == "bag of words, not private":
            common["epochs"] = 8
        made.append(grids.Part(common, candidates, "accuracy_of_3", seeds=seeds))
    return made


def table(
    made: Sequence[grids.Part], trials: Sequence[harness.Trial], titles: Mapping[str, str]
) -> str:
    """The table of all parts, and another with the weights as they are instead of averaged ones."""
    averaged = grids.table(made, trials, titles)
    rows = []
    for part in made:
        for method, runs in part.finals(trials).items():
            if "accuracy_unaveraged_of_3" not in runs[0].result:
                continue
            values = [grids.final(t, "accuracy_unaveraged_of_3") for t in runs]
            figures = [f"{np.mean(values):.5f}", report.deviation(values, digits=5)]
            rows.append([part.common["part"], titles[method], *figures])
    columns = ["part", "method", "without averaging: mean", "std"]
    return f"{averaged}\n\n{report.table(columns, rows)}"


EXPERIMENT = grids.experiment("adadps_imdb", __doc__, parts, reviews.train, reviews.TITLES, table)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
