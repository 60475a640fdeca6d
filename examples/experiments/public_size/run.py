"""How much public data AdaDPS needs: film reviews (IMDB), logistic regression on bags of words.

The AdaDPS paper's table 10, its row of IMDB: public data of 1% of the training reviews, of 5 and of
25 times less, and the upper bound "ideal", whose second moments come from the private gradients.
Each gets equally many pairs of clip norm and rate. The rest is as in `adadps_imdb`.

Privacy claim: as there. Each private run alone is (ε, δ)-DP for adding or removing one private
review, with an exact ε, since batches are drawn by Poisson sampling; "ideal" gives no privacy.
Public reviews are kept out of the private ones. Accuracy is that of the test reviews, and pairs are
chosen by it, as in the paper; what the choice costs is not counted.

    python examples/experiments/public_size/run.py --scale small --data_dir ~/tensorflow_datasets
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from examples.experiments import grids, harness, reviews
from examples.experiments.adadps_imdb import run as adadps_imdb

FEWER = {"1% public": 1, "5 times less": 5, "25 times less": 25}


def parts(scale: str) -> list[grids.Part]:
    """What is compared at a scale."""
    main, more = adadps_imdb.parts(scale)[:2]
    seeds = 1 if scale == "smoke" else 3
    made = []
    for name, divisor in FEWER.items():
        common = {
            **main.common,
            "part": name,
            "public_share": main.common["public_share"] / divisor,
        }
        candidates = {"adadps_rmsprop": main.candidates["adadps_rmsprop"]}
        if divisor == 1:
            candidates["ideal"] = more.candidates["ideal"]
        made.append(grids.Part(common, candidates, "accuracy_of_3", seeds=seeds))
    return made


def _parts_of(trials: Sequence[harness.Trial]) -> list[grids.Part]:
    return parts(trials[0].settings["scale"])


EXPERIMENT = harness.Experiment(
    "public_size",
    __doc__,
    plan=lambda scale, trials: grids.plan(parts(scale), trials),
    train=reviews.train,
    table=lambda trials: grids.table(_parts_of(trials), trials, reviews.TITLES),
    plot=lambda trials: grids.plot(_parts_of(trials), trials, reviews.TITLES),
)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
