"""Federated training with user-level privacy on one page: clients that adapt, without tuning.

Takes the posts of Stack Overflow's users if TFF_CACHE_DIR names a folder that has them, and
otherwise scikit-learn's handwritten digits, divided between 200 simulated users.

Privacy claim: (ε, δ)-DP for adding or removing one user with all their data, for the weights after
every round. Cohorts are drawn by Poisson sampling, as ε assumes. Held-out users, whom nobody trains
on, are used for the accuracy and to choose the best round; nothing protects them.

    python examples/federated_learning.py --out_dir federated_output
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

import federated


def load():
    """Users to train on and held-out ones, with batches (x, y); numbers of features and classes."""
    batches = federated.datasets.ClientBatches(batch_size=8, epochs=4, max_examples=64)
    once = dataclasses.replace(batches, epochs=1)
    if not os.environ.get("TFF_CACHE_DIR"):
        train, held_out = federated.datasets.load_digits(num_clients=200)
        return train.preprocess(batches), held_out.preprocess(once), 64, 10
    train, held_out, _ = federated.datasets.load_stackoverflow()
    public = federated.datasets.random_clients(held_out.client_ids, 100, seed=0)
    known = federated.datasets.count_users(held_out, public).vocabulary(num_words=500, num_tags=10)
    bags, bags_once = (
        federated.datasets.bags_of_words(known, each, labels="most_frequent")
        for each in (batches, once)
    )
    others = sorted(set(held_out.client_ids) - set(public))[:100]
    held_out = federated.datasets.subset(held_out, others)
    return train.preprocess(bags), held_out.preprocess(bags_once), len(known.words), len(known.tags)


def main() -> None:
    """Trains, then prints the accuracy and the privacy statement, and saves the best model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--noise_multiplier", type=float, default=1.0)
    parser.add_argument("--out_dir", type=pathlib.Path, default=pathlib.Path("federated_output"))
    args = parser.parse_args()

    federated.local_context()  # TFF's worker, which ends with Python
    train, held_out, features, classes = load()

    def model_fn():
        model = tf.keras.Sequential(
            [tf.keras.Input([features]), tf.keras.layers.Dense(classes, activation="softmax")]
        )
        model.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    users = len(train.client_ids)
    delta = 0.1 / users
    privacy = federated.UserLevelPrivacy(
        noise_multiplier=args.noise_multiplier,
        clients_per_round=min(50, users / 4),
        total_clients=users,
        initial_clip=0.3,  # it adapts
    )
    process = federated.build_dp_fed_avg(
        model_fn, federated.build_adadp(), privacy, input_spec=train.element_type_structure
    )
    sampler = federated.ClientSampler.poisson(train.client_ids, privacy, args.rounds)
    evaluation = federated.Evaluation(model_fn, held_out, every=4, best="accuracy")
    trained = federated.train(
        process,
        train,
        sampler,
        args.rounds,
        args.out_dir,
        delta=delta,
        evaluation=evaluation,
        release_managers=federated.monitors(args.out_dir, args.rounds),
    )

    best = trained.best
    evaluation.export(best.state).save(args.out_dir / "model.keras")
    accuracy = best.figures["accuracy"]
    print(f"\nAccuracy on held-out users: {accuracy:.1%}, after round {best.number}.\n")
    print(federated.privacy_statement(trained.ledger, delta, sampling=sampler.sampling))
    print(f"Run it again to continue; delete {args.out_dir} to train a new model.")


if __name__ == "__main__":
    main()
