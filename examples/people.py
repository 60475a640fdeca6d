"""The unit is a person: tag prediction on posts, protecting each post or each author.

Trains the same linear model twice with the same ε: once for adding or removing one post, and once
for adding or removing one person with all of their posts. Known words and tags come from the users
of the held-out split, who are assumed to have waived their protection and are not trained on.

Privacy claim: the first run is (ε, δ)-DP for one post and much less for a person with many. The
second is (ε, δ)-DP for one person, whatever the number of their posts. Here δ is one over the
number of people. Each claim is about the weights of its run alone: publishing both spends more.
Batches are drawn by Poisson sampling, as ε assumes. Test posts are used for the accuracy only.

    python examples/people.py --data_dir FOLDER

FOLDER holds `stackoverflow.sqlite` from `tff.simulation.datasets.stackoverflow.load_data`.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from dp_accounting import pld
from scipy import stats

import tf_adaptive_dp
from examples.experiments.lib.datasets import stackoverflow


def parse_args() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--examples_per_user", type=int, default=8, help="posts of one author")
    parser.add_argument(
        "--posts", type=int, nargs="*", default=[2, 6], help="what ε says to people with so many"
    )
    parser.add_argument("--batch_size", type=int, default=128, help="expected posts or authors")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--num_words", type=int, default=2000)
    parser.add_argument("--num_tags", type=int, default=50)
    parser.add_argument("--data_dir", default=os.environ.get("TFF_CACHE_DIR"))
    return parser.parse_args()


def of_a_person(plan: tf_adaptive_dp.PrivacyPlan, posts: int) -> float | None:
    """ε of a person with so many posts at the δ of a plan that protects posts.

    Each post joins a batch by itself, so a binomial number J of them is in it, and moves the sum by
    up to J·C (Ganesh 2024, arXiv:2401.10294). Batches that are cut short are not considered.

    Returns:
      `None` for releases of dp-accounting that lack this mechanism.
    """
    make = getattr(pld.privacy_loss_distribution, "from_mixture_gaussian_mechanism", None)
    if make is None:
        return None
    present = np.arange(posts + 1)
    chances = stats.binom.pmf(present, posts, plan.sampling.sampling_probability)
    present, chances = present[chances > 0], chances[chances > 0]
    release = make(
        plan.noise_multiplier,
        present.astype(float).tolist(),
        (chances / chances.sum()).tolist(),
        value_discretization_interval=1e-3,
    )
    return float(release.self_compose(plan.steps).get_epsilon_for_delta(plan.delta))


def main() -> None:
    """Trains for posts, then for people, and prints both guarantees side by side."""
    args = parse_args()
    public = stackoverflow.posts(args.data_dir, "heldout")
    private = stackoverflow.posts(args.data_dir, "train")
    known = stackoverflow.vocabulary(public, args.num_words, args.num_tags)
    x, y = stackoverflow.bags_of_words(private, known)
    authors = stackoverflow.authors(private, known)
    test = stackoverflow.bags_of_words(stackoverflow.posts(args.data_dir, "test"), known)
    people, counts = np.unique(authors, return_counts=True)
    print(
        f"{len(x)} posts of {len(people)} people, who wrote {counts.min()} to {counts.max()} each"
    )

    common = {
        "epsilon": args.epsilon,
        "delta": 1 / len(people),
        "batch_size": args.batch_size,
        "epochs": args.epochs,
    }
    plans = {
        "post": tf_adaptive_dp.PrivacyPlan(**common, num_examples=len(x)),
        "person": tf_adaptive_dp.PrivacyPlan(
            **common, user_ids=authors, examples_per_user=args.examples_per_user
        ),
    }
    for unit, plan in plans.items():
        model = keras.Sequential(
            [keras.Input([x.shape[1]]), keras.layers.Dense(args.num_tags, activation="softmax")]
        )
        model.compile(
            plan.optimizer(tf_adaptive_dp.UntunedSGD),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
        plan.fit(model, x, y, verbose=0)
        accuracy = model.evaluate(*test, verbose=0)[1]
        result = {
            "unit": unit,
            "epsilon_per_unit": plan.epsilon,
            "epsilon_per_person": {k: of_a_person(plan, k) for k in args.posts}
            if unit == "post"
            else plan.epsilon,
            "delta": plan.delta,
            "noise_multiplier": plan.noise_multiplier,
            "steps": plan.steps,
            "test_accuracy": accuracy,
        }
        print(plan.statement())
        print(json.dumps(result))


if __name__ == "__main__":
    main()
