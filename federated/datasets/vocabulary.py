"""Words and tags of Stack Overflow, and how many users wrote each.

A vocabulary, and side information made of counts, must be public: what is counted over the users
of the training is private. So counts say whose they are.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from federated.datasets.folder import folder
from tf_adaptive_dp import checks
from tf_adaptive_dp.errors import NotPrivateError

_FILES = {"words": "stackoverflow.word_count", "tags": "stackoverflow.tag_count"}


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What is known; all else is ignored.

    Attributes:
      words: columns of the bags of words, the most frequent first.
      tags: classes, the most frequent first.

    Raises:
      ValueError: if there are none, or one is there twice.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]

    def __post_init__(self):
        for name in ("words", "tags"):
            names = getattr(self, name)
            if not names or len(set(names)) < len(names):
                twice = [n for n, k in collections.Counter(names).items() if k > 1][:3]
                raise ValueError(
                    f"`{name}` must have at least one entry and none twice. Received: "
                    f"{len(names)} entries, twice: {twice}"
                )


@dataclasses.dataclass(frozen=True)
class UserCounts:
    """How many users wrote each word and each tag, the most frequent first.

    For `tf_adaptive_dp.side_information.token_frequencies(counts.words,
    vocabulary=vocabulary.words, provenance="public")`, once
    `require_other_users(training_clients)` has passed.

    Attributes:
      words: users of each word.
      tags: users of each tag.
      source: whose counts they are, in words.
      users: the users that were counted; `None` if that is not known.

    >>> counts = UserCounts({"the": 2, "qubit": 1}, {"physics": 2}, "two users", ("a", "b"))
    >>> counts.vocabulary(num_words=1)
    Vocabulary(words=('the',), tags=('physics',))
    """

    words: Mapping[str, int]
    tags: Mapping[str, int]
    source: str
    users: tuple[str, ...] | None

    def vocabulary(self, num_words: int = 10_000, num_tags: int = 500) -> Vocabulary:
        """The most frequent words and tags, at most so many; AdaDPS's numbers by default."""
        checks.integer("num_words", num_words, 1)
        checks.integer("num_tags", num_tags, 1)
        return Vocabulary(tuple(self.words)[:num_words], tuple(self.tags)[:num_tags])

    def require_other_users(self, private_client_ids: Iterable[str]) -> UserCounts:
        """Returns these counts if none of those clients was counted.

        Guarantee: then they are no function of the private clients' data. Whether the users who
        were counted agreed to be public is for the caller to say.

        Args:
          private_client_ids: the clients of the training.

        Raises:
          NotPrivateError: if one of them was counted, or if it is not known who was.
        """
        if self.users is None:
            raise NotPrivateError(
                "Counts must be of users who are known and not trained on; take "
                f"`count_users(heldout, ...)`. Received: {self.source}"
            )
        both = sorted(set(self.users) & set(private_client_ids))
        if both:
            raise NotPrivateError(
                "`private_client_ids` must not have users that were counted; leave them out of "
                f"the training or of the counts. Received: {len(both)} such users: {both[:5]}"
            )
        return self


def count_users(client_data: Any, client_ids: Sequence[str], source: str = "heldout") -> UserCounts:
    """Counts the users of words (of text and title) and of tags, each user once for each.

    Guarantee: none. The counts are exact, so these users must have agreed to be public; by
    declaration those of the heldout split may be. No other users are read.

    Args:
      client_data: posts, such as the heldout part of `load_stackoverflow`.
      client_ids: whom to count; all are read, so choose some of many (`random_clients`).
      source: name of the split, for the description.

    Raises:
      ValueError: if `client_ids` is empty or names a user that is not there.
    """
    unknown = sorted(set(client_ids) - set(client_data.client_ids))
    if unknown or not client_ids:
        raise ValueError(
            "`client_ids` must name users of `client_data`, at least one. Received: "
            f"{unknown[:5] or 'none at all'}"
        )
    users = tuple(sorted(set(client_ids)))

    def posts(user):
        return client_data.serializable_dataset_fn(user).map(
            lambda post: (user, post["tokens"], post["title"], post["tags"])
        )

    seen = {"words": collections.defaultdict(set), "tags": collections.defaultdict(set)}
    for user, *texts in tf.data.Dataset.from_tensor_slices(list(users)).flat_map(posts):
        name = user.numpy()
        tokens, title, tags = (text.numpy().decode() for text in texts)
        for word in (*tokens.split(), *title.split()):
            seen["words"][word].add(name)
        for tag in filter(None, tags.split("|")):
            seen["tags"][tag].add(name)
    words, tags = (
        _ranked({what: len(names) for what, names in sorted(found.items())})
        for found in seen.values()
    )
    return UserCounts(words, tags, f"counts of {len(users):,} users of the {source} split", users)


def load_counts(cache_dir: str | None = None) -> UserCounts:
    """TFF's published counts, from files that are there; nothing is downloaded.

    Guarantee: none. They were counted over all users of the train split, those that are trained on.
    As a vocabulary they are usual in the literature, which takes them for public knowledge.

    Args:
      cache_dir: folder of `stackoverflow.word_count` and `stackoverflow.tag_count`, or of both as
        `.tar.bz2`, or of a folder `datasets` that has them, where TFF's `load_word_counts` and
        `load_tag_counts` leave them. `None` takes the environment's `TFF_CACHE_DIR`.

    Raises:
      FileNotFoundError: if one of them is missing.
      ValueError: if one is not in TFF's format.
    """
    words, tags = (_read(cache_dir, what) for what in _FILES)
    return UserCounts(words, tags, "TFF's published counts of all users of the train split", None)


def _ranked(counts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _read(cache_dir: str | None, what: str) -> dict[str, int]:
    name = _FILES[what]
    loader = f"tff.simulation.datasets.stackoverflow.load_{what[:-1]}_counts"
    how = f"Get {name} with `{loader}(cache_dir=FOLDER)`."
    path = folder("cache_dir", cache_dir, "TFF_CACHE_DIR", how)
    places = [path / sub / (name + end) for sub in ("", "datasets") for end in ("", ".tar.bz2")]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise FileNotFoundError(
            f"`cache_dir` or the environment's TFF_CACHE_DIR must name a folder that has {name}. "
            f"{how} Received: {str(path)!r}"
        )
    try:
        text = _text(found, name)
        counts = json.loads(text) if what == "tags" else dict(map(_entry, text.splitlines()))
        counts = {str(key): checks.integer("count", count, 0) for key, count in counts.items()}
    except (ValueError, TypeError, AttributeError, KeyError, tarfile.TarError) as error:
        raise ValueError(f"{found} is not in TFF's format: {error}. {how}") from error
    if not counts:
        raise ValueError(f"{found} is not in TFF's format: it has no counts. {how}")
    return _ranked(counts)


def _text(path: pathlib.Path, member: str) -> str:
    if path.name == member:
        return path.read_text(encoding="utf-8")
    with tarfile.open(path, "r:bz2") as archive:
        inside = next((m for m in archive if m.isfile() and m.name.endswith(member)), None)
        if inside is None:
            raise ValueError(f"it has no {member}")
        return archive.extractfile(inside).read().decode("utf-8")


def _entry(line: str) -> tuple[str, int]:
    word, _, count = line.rpartition(" ")
    return word, int(count)
