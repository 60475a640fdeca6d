"""Tag prediction on Stack Overflow with one client per user, as in AdaDPS, section 6.2.

TFF's own data set and format: an SQLite file of posts in three splits, "train", "heldout" (other
users) and "test" (later posts of users who are not held out). Posts are read lazily, when a
client's dataset is read.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from federated.datasets.clients import ClientBatches
from federated.datasets.folder import folder
from federated.datasets.vocabulary import Vocabulary
from tf_adaptive_dp import checks

SPLITS = ("train", "heldout", "test")
LABELS = ("multi_hot", "most_frequent")

_HOW = "Get TFF's file with `tff.simulation.datasets.stackoverflow.load_data(cache_dir=FOLDER)`."


def load_stackoverflow(cache_dir: str | None = None) -> tuple[Any, Any, Any]:
    """Loads the posts of each user without downloading anything.

    Args:
      cache_dir: the folder of `stackoverflow.sqlite`; `None` takes the environment's
        `TFF_CACHE_DIR`.

    Returns:
      `tff.simulation.datasets.ClientData` of train, heldout and test, as from TFF's `load_data`.
      Their datasets refer to the file, so a worker on another machine needs it at the same path.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it is not in TFF's format, or a split has no users.
    """
    path = folder("cache_dir", cache_dir, "TFF_CACHE_DIR", _HOW)
    # Checked first, since TFF would download a missing file.
    if not (path / "stackoverflow.sqlite").is_file():
        raise FileNotFoundError(
            "`cache_dir` or the environment's TFF_CACHE_DIR must name a folder that has "
            f"stackoverflow.sqlite. {_HOW} Received: {str(path)!r}"
        )
    try:
        return tff.simulation.datasets.stackoverflow.load_data(cache_dir=str(path))
    except StopIteration as error:
        problem = f"a split has no users; there must be some in each of {SPLITS}"
        raise ValueError(f"`cache_dir`: {path}/stackoverflow.sqlite: {problem}") from error
    except Exception as error:
        # DatabaseFormatError is not part of TFF's public API.
        if not isinstance(error, sqlite3.Error) and type(error).__name__ != "DatabaseFormatError":
            raise
        raise ValueError(
            f"`cache_dir`: {path}/stackoverflow.sqlite is not in TFF's format ({error}). {_HOW}"
        ) from error


def bags_of_words(
    vocabulary: Vocabulary, batches: ClientBatches, *, labels: str = "multi_hot"
) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    """Makes batches of bags of words and tags.

    A bag of words has the relative frequencies of the known words in text and title, as in
    `tff.simulation.baselines.stackoverflow.create_tag_prediction_task`; it is zero if no word is
    known. (TFF's code makes a matrix of words × vocabulary for each post, which took four to seven
    times as long.)

    Args:
      vocabulary: the V known words and T known tags.
      batches: how a client reads its examples. For testing: `ClientBatches(500, shuffle_buffer=1)`.
      labels: `"multi_hot"`: float32 [B, T], 1 for each known tag, as in TFF's task. Or
        `"most_frequent"`: int32 [B], the most frequent of the post's known tags, the classification
        of AdaDPS. Posts without a known tag are dropped, independently of other posts.

    Returns:
      A function of a dataset of posts, for `ClientData.preprocess`; x is float32 [B, V].

    Raises:
      TypeError: if `vocabulary` is something else, such as counts, or `batches` is.
      ValueError: if `labels` is neither of these.
    """
    if not isinstance(vocabulary, Vocabulary):
        raise TypeError(
            "`vocabulary` must be a `federated.datasets.Vocabulary`, such as "
            "`counts.vocabulary(num_words=..., num_tags=...)`. Received: vocabulary of type "
            f"{type(vocabulary).__name__}"
        )
    checks.instance("batches", batches, ClientBatches)
    checks.choice("labels", labels, LABELS)
    num_words, num_tags = len(vocabulary.words), len(vocabulary.tags)

    @tf.autograph.experimental.do_not_convert  # TFF traces it, which breaks dataclasses
    def preprocess(posts: tf.data.Dataset) -> tf.data.Dataset:
        # Created here, so that they belong to the graph in which TFF traces this function.
        word_ids, tag_ids = _table(vocabulary.words), _table(vocabulary.tags)

        def has_known_tag(post: dict[str, tf.Tensor]) -> tf.Tensor:
            return tf.reduce_any(tag_ids.lookup(tf.strings.split(post["tags"], sep="|")) >= 0)

        def examples(batch: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
            text = tf.strings.join([batch["tokens"], batch["title"]], separator=" ")
            bags = _counts(word_ids.lookup(tf.strings.split(text)), num_words)
            bags = tf.math.divide_no_nan(bags, tf.reduce_sum(bags, axis=1, keepdims=True))
            tags = tag_ids.lookup(tf.strings.split(batch["tags"], sep="|"))
            tags = tf.minimum(_counts(tags, num_tags), 1.0)
            # The first of the known tags is the most frequent.
            return bags, tags if labels == "multi_hot" else tf.argmax(tags, 1, tf.int32)

        known = (lambda p: p.filter(has_known_tag)) if labels == "most_frequent" else None
        # Maps batches instead of posts. It is faster, and TensorFlow 2.14 would fuse `map` and the
        # following `batch` into an operation that fails where TFF traces a dataset of clients.
        return batches(posts, known).map(examples)

    return preprocess


def _counts(ids: tf.RaggedTensor, size: int) -> tf.Tensor:
    """Counts each id from 0 to size - 1 in each row, [B, size]; ignores other ids."""
    cells = tf.where(ids.values < 0, tf.int64.min, ids.value_rowids() * size + ids.values)
    flat = tf.ones_like(cells, tf.float32)
    return tf.reshape(tf.math.unsorted_segment_sum(flat, cells, ids.nrows() * size), [-1, size])


def _table(names: tuple[str, ...]) -> tf.lookup.StaticHashTable:
    rows = tf.range(len(names), dtype=tf.int64)
    initializer = tf.lookup.KeyValueTensorInitializer(tf.constant(names), rows)
    return tf.lookup.StaticHashTable(initializer, default_value=-1)
