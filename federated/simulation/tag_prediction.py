"""The task of `stackoverflow_dp`: posts, public counts of words, the model and its test data."""

from __future__ import annotations

import collections
import contextlib
import functools
import sqlite3
from typing import Any, Callable, NamedTuple

import tensorflow as tf

from federated.datasets import stackoverflow
from federated.datasets.clients import ClientBatches, in_memory, random_clients
from federated.datasets.folder import folder
from federated.datasets.vocabulary import UserCounts, Vocabulary, count_users

TEST_POSTS = 10_000
CACHE_BYTES = 4e9  # for dense bags of words: 40 KB per post with 10,000 words


class Data(NamedTuple):
    """The posts, and the public knowledge of their words.

    Attributes:
      client_ids: the clients of the training split.
      posts: the number of posts in the training split, including those that are dropped later.
      batches: maps a client id to the batches of a round.
      spec: the structure of a batch.
      test: batches of test posts.
      counts: the public counts.
      known: the known words and tags.
    """

    client_ids: list[str]
    posts: int
    batches: Callable[[str], tf.data.Dataset]
    spec: Any
    test: tf.data.Dataset
    counts: UserCounts
    known: Vocabulary


@functools.cache  # trials share what was read
def load(data_dir: str | None, public_users: int, words: int, tags: int, max_posts: int) -> Data:
    """Loads training posts by client, test posts, and public counts.

    Args:
      data_dir: see `federated.datasets.stackoverflow.load_stackoverflow`.
      public_users: the largest number of counted users of the held-out split.
      words: the largest number of words.
      tags: the largest number of classes.
      max_posts: the largest number of posts of a client: the first ones with a known tag. It bounds
        a client's work, message and memory; no guarantee depends on it.
    """
    train, held_out, test = stackoverflow.load_stackoverflow(data_dir)
    number = min(public_users, len(held_out.client_ids))
    users = random_clients(held_out.client_ids, number, seed=0)
    counts = count_users(held_out, users).require_other_users(train.client_ids)
    known = counts.vocabulary(words, tags)

    def prepared(most: int | None) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
        batches = ClientBatches(500, max_examples=most, shuffle_buffer=1)
        return stackoverflow.bags_of_words(known, batches, labels="most_frequent")

    posts = train.preprocess(prepared(max_posts))
    num_posts = _num_posts(data_dir)
    usual = min(max_posts, num_posts / len(train.client_ids))
    kept = max(1, int(CACHE_BYTES / (4 * len(known.words) * usual)))
    judged = test.create_tf_dataset_from_all_clients(seed=0).take(TEST_POSTS)
    return Data(
        train.client_ids,
        num_posts,
        in_memory(posts, ClientBatches(100), kept),
        posts.element_type_structure,
        prepared(None)(judged).cache(),
        counts,
        known,
    )


def _num_posts(data_dir: str | None) -> int:
    """The number of posts in the training split, from the metadata of the file."""
    path = folder("data_dir", data_dir, "TFF_CACHE_DIR", "It has to have stackoverflow.sqlite.")
    uri = f"{(path / 'stackoverflow.sqlite').resolve().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as file:
        query = "SELECT SUM(num_examples) FROM client_metadata WHERE split_name = 'train'"
        return int(file.execute(query).fetchone()[0])


def describe(data: Data) -> str:
    """Describes the size of the data, which may be less than requested."""
    judged = sum(len(labels) for _, labels in data.test)
    return (
        f"Data: {len(data.client_ids):,} users with {data.posts:,} posts, of which those with a "
        f"known tag are trained on, {len(data.known.words):,} words and "
        f"{len(data.known.tags):,} tags, from {data.counts.source}; {judged:,} test posts."
    )


def majority(data: Data) -> float:
    """The accuracy of the best constant answer on the test posts."""
    counts = collections.Counter(label for _, labels in data.test for label in labels.numpy())
    return max(counts.values()) / sum(counts.values())


def network(words: int, tags: int) -> tf.keras.Model:
    """Softmax regression with zero initial weights; it returns logits."""
    return tf.keras.Sequential(
        [tf.keras.Input([words]), tf.keras.layers.Dense(tags, kernel_initializer="zeros")]
    )
