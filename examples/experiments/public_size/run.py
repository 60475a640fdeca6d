"""How much public data AdaDPS needs: film reviews (IMDB), logistic regression on bags of words.

Repeats the IMDB row of table 10 of the AdaDPS paper: public data of 1% of the training reviews, of
a fifth and of a 25th of that, and the upper bound "ideal", whose second moments come from the
private gradients. Each gets the same number of pairs of clip norm and rate. Everything else is as
in `adadps_imdb`.

Privacy claim: each private run alone is (ε, δ)-DP for adding or removing one private review, with
an exact ε, since batches are drawn by Poisson sampling; "ideal" has no privacy. Public reviews are
excluded from the private ones. Accuracy is measured on the test reviews, and pairs are chosen by
it, as in the paper; ε does not include the cost of this choice.

    python examples/experiments/public_size/run.py --scale small --data_dir ~/tensorflow_datasets
"""

from __future__ import annotations

import pathlib

from examples.experiments.adadps_imdb import run as adadps_imdb
from examples.experiments.lib import grids, harness, reviews

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


EXPERIMENT = grids.experiment("public_size", __doc__, parts, reviews.train, reviews.TITLES)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
