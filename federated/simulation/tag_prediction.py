"""The task of `stackoverflow_dp`: posts, public counts of words, the model and its test."""

from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple

import tensorflow as tf

from federated.datasets import stackoverflow
from federated.datasets.clients import ClientBatches, in_memory, random_clients
from federated.datasets.vocabulary import UserCounts, Vocabulary, count_users

TEST_POSTS = 10_000


class Data(NamedTuple):
    """The posts, and what is known of their words.

    Attributes:
      client_ids: of the training split.
      batches: from a client id to the batches of a round.
      spec: of a batch.
      test: batches of test posts.
      counts: public counts.
      known: words and tags.
    """

    client_ids: list[str]
    batches: Callable[[str], tf.data.Dataset]
    spec: Any
    test: tf.data.Dataset
    counts: UserCounts
    known: Vocabulary


@functools.cache  # trials share what was read
def load(data_dir: str | None, public_users: int, words: int, tags: int) -> Data:
    """Training and test posts by client, and public counts."""
    train, held_out, test = stackoverflow.load_stackoverflow(data_dir)
    number = min(public_users, len(held_out.client_ids))
    users = random_clients(held_out.client_ids, number, seed=0)
    counts = count_users(held_out, users).require_other_users(train.client_ids)
    known = counts.vocabulary(words, tags)
    prepared = stackoverflow.preprocess_fn(
        known, ClientBatches(500, shuffle_buffer=1), labels="most_frequent"
    )
    posts = train.preprocess(prepared)
    judged = test.create_tf_dataset_from_all_clients(seed=0).take(TEST_POSTS)
    return Data(
        train.client_ids,
        in_memory(posts, ClientBatches(100)),
        posts.element_type_structure,
        prepared(judged).cache(),
        counts,
        known,
    )


def network(words: int, tags: int) -> tf.keras.Model:
    """Softmax regression that begins at zero; it returns logits."""
    return tf.keras.Sequential(
        [tf.keras.Input([words]), tf.keras.layers.Dense(tags, kernel_initializer="zeros")]
    )


def judge(data: Data) -> Callable[[Any], dict[str, float]]:
    """What evaluates weights: loss and accuracy on the test posts."""
    model = network(len(data.known.words), len(data.known.tags))
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )

    def evaluate(weights: Any) -> dict[str, float]:
        weights.assign_weights_to(model)
        return model.evaluate(data.test, verbose=0, return_dict=True)

    return evaluate
