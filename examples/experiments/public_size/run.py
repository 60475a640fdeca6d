"""How much public data AdaDPS needs: film reviews (IMDB), logistic regression on bags of words.

The AdaDPS paper's table 10, its row of IMDB: public data of 1% of the training reviews, of 5 and of
25 times less, and the upper bound "ideal", whose second moments come from the private gradients.
Each gets equally many pairs of clip norm and rate. The rest is as in `adadps_imdb`.

Privacy claim: as there. Each private run alone is (ε, δ)-DP for adding or removing one private
review, with an exact ε, since batches are drawn by Poisson sampling; "ideal" gives no privacy.
Public reviews are kept out of the private ones. Accuracy is that of the test reviews, and pairs are
chosen by it, as in the paper; ε does not include the cost of this choice.

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
