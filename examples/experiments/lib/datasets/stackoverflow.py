"""Tag prediction on posts in TFF's Stack Overflow format, as arrays.

The file is what `tff.simulation.datasets.stackoverflow.load_data` reads: SQLite with the tables
`examples` (split_name, client_id, serialized_example_proto) and `client_metadata`, one serialized
`tf.train.Example` a post. It is read here without TFF, which would start a process of its own.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sqlite3
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from federated.datasets.folder import folder

SPLITS = ("train", "heldout", "test")
_FIELDS = ("tokens", "title", "tags")


@dataclasses.dataclass(frozen=True)
class Post:
    """A question or an answer.

    Attributes:
      user: who wrote it.
      words: of the text and the title.
      tags: of the question.
    """

    user: str
    words: tuple[str, ...]
    tags: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Words and tags that are known, the most frequent first.

    Attributes:
      words: columns of the bags of words.
      tags: classes.
      users: of each word, how many users wrote it, [len(words)].
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    users: np.ndarray


def posts(data_dir: str | None, split: str) -> list[Post]:
    """All posts of a split, ordered by user and then as they are in the file.

    Args:
      data_dir: folder of `stackoverflow.sqlite`; `None` takes the environment's `TFF_CACHE_DIR`.
      split: `"train"`, `"heldout"` (other users) or `"test"` (later posts).

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it is none of TFF's, or has no posts of that split.
    """
    if split not in SPLITS:
        raise ValueError(f"`split` must be one of {SPLITS}. Received: split={split!r}")
    how = "It must hold TFF's stackoverflow.sqlite."
    path = folder("--data_dir", data_dir, "TFF_CACHE_DIR", how) / "stackoverflow.sqlite"
    if not path.is_file():
        raise FileNotFoundError(
            f"There must be a file {path.name}, as TFF's load_data leaves it once unpacked. "
            f"Received: {str(path)!r}"
        )
    query = (
        "SELECT client_id, serialized_example_proto FROM examples "
        "WHERE split_name = ? ORDER BY client_id, rowid"
    )
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as file:
            found = [_post(user, blob) for user, blob in file.execute(query, [split])]
    except (sqlite3.Error, ValueError) as error:
        raise ValueError(f"{path} is not in TFF's format: {error}") from error
    if not found:
        raise ValueError(f"{path} has no posts of split={split!r}.")
    return found


def _post(user: str, blob: bytes) -> Post:
    try:
        features = tf.train.Example.FromString(blob).features.feature
    except Exception as error:  # protobuf's DecodeError is no ValueError
        raise ValueError(f"a post of {user!r} is no tf.train.Example") from error
    if missing := [name for name in _FIELDS if not features[name].bytes_list.value]:
        raise ValueError(f"a post of {user!r} lacks {missing}")
    tokens, title, tags = (features[name].bytes_list.value[0].decode() for name in _FIELDS)
    return Post(user, (*tokens.split(), *title.split()), tuple(t for t in tags.split("|") if t))


def vocabulary(public: Sequence[Post], num_words: int, num_tags: int) -> Vocabulary:
    """The words and tags that most users wrote.

    Args:
      public: posts; what is known afterwards is known from them, so they must be public.
      num_words: at most so many.
      num_tags: at most so many.
    """
    words, tags = (_users(public, name) for name in ("words", "tags"))
    known = words.most_common(num_words)
    return Vocabulary(
        words=tuple(word for word, _ in known),
        tags=tuple(tag for tag, _ in tags.most_common(num_tags)),
        users=np.asarray([count for _, count in known], np.float32),
    )


def _users(public: Sequence[Post], name: str) -> collections.Counter:
    """How many users wrote each; ties by name, so that the order is always the same."""
    pairs = {(post.user, what) for post in public for what in getattr(post, name)}
    counts = collections.Counter(what for _, what in pairs)
    return collections.Counter(dict(sorted(counts.items())))


def bags_of_words(chosen: Sequence[Post], known: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Posts as rows of word frequencies, and the class of each.

    A row is the mean of the indicators of all words of the post, unknown ones among them. The class
    is the most frequent known tag of the post, as in the AdaDPS authors' code. Posts without a
    known tag are left out, each whatever the others are.

    Args:
      chosen: posts.
      known: words and tags.

    Returns:
      Float32 [N, words] and int32 [N].
    """
    column = {word: k for k, word in enumerate(known.words)}
    classes = {tag: k for k, tag in enumerate(known.tags)}
    labelled = list(_labelled(chosen, classes))
    x = np.zeros([len(labelled), len(column)], np.float32)
    for row, (post, _) in zip(x, labelled):
        for word, count in collections.Counter(post.words).items():
            if word in column:
                row[column[word]] = count / len(post.words)
    return x, np.asarray([label for _, label in labelled], np.int32)


def authors(chosen: Sequence[Post], known: Vocabulary) -> np.ndarray:
    """Who wrote each row that `bags_of_words` makes of the same posts: strings [N].

    Args:
      chosen: posts.
      known: words and tags.
    """
    classes = {tag: k for k, tag in enumerate(known.tags)}
    return np.asarray([post.user for post, _ in _labelled(chosen, classes)])


def _labelled(chosen: Sequence[Post], classes: dict[str, int]) -> Iterator[tuple[Post, int]]:
    for post in chosen:
        labels = [classes[tag] for tag in post.tags if tag in classes]
        if labels:
            yield post, min(labels)


def by_users(chosen: Sequence[Post], num_users: int) -> tuple[list[Post], list[Post]]:
    """Splits posts into those of the first users, by name, and those of all others."""
    first = sorted({post.user for post in chosen})[:num_users]
    return (
        [post for post in chosen if post.user in first],
        [post for post in chosen if post.user not in first],
    )
