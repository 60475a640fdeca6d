"""Words and tags of Stack Overflow, and the number of users of each.

A vocabulary and side information made from counts must be public, but counts over the users of the
training split are private. So counts record which users were counted.
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
import tensorflow_federated as tff

from federated.datasets.folder import folder
from tf_adaptive_dp import checks
from tf_adaptive_dp.errors import NotPrivateError

_FILES = {"words": "stackoverflow.word_count", "tags": "stackoverflow.tag_count"}


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The known words and tags; all others are ignored.

    Attributes:
      words: the columns of the bags of words, the most frequent first.
      tags: the classes, the most frequent first.

    Raises:
      TypeError: if they are no strings.
      ValueError: if one of them is empty or has duplicates.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("words", "tags"):
            names = checks.strings(name, getattr(self, name))
            if not names or len(set(names)) < len(names):
                twice = [n for n, k in collections.Counter(names).items() if k > 1][:3]
                raise ValueError(
                    f"`{name}` must have at least one entry and none twice. Received: "
                    f"{len(names)} entries, twice: {twice}"
                )


@dataclasses.dataclass(frozen=True)
class UserCounts:
    """The number of users of each word and each tag, the most frequent first.

    For `tf_adaptive_dp.side_information.token_frequencies(counts.words,
    vocabulary=vocabulary.words, provenance="public")`, once
    `require_other_users(training_clients)` has passed.

    Attributes:
      words: the number of users of each word.
      tags: the number of users of each tag.
      source: a description of the counted users.
      users: the counted users; `None` if unknown.

    Raises:
      TypeError: if an attribute has the wrong type.

    >>> counts = UserCounts({"the": 2, "qubit": 1}, {"physics": 2}, "two users", ("a", "b"))
    >>> counts.vocabulary(num_words=1)
    Vocabulary(words=('the',), tags=('physics',))
    """

    words: Mapping[str, int]
    tags: Mapping[str, int]
    source: str
    users: tuple[str, ...] | None

    def __post_init__(self) -> None:
        for name in ("words", "tags"):
            checks.instance(name, getattr(self, name), Mapping)
        checks.instance("source", self.source, str)
        if self.users is not None:
            checks.strings("users", self.users)

    def vocabulary(self, num_words: int = 10_000, num_tags: int = 500) -> Vocabulary:
        """The most frequent words and tags; the default numbers are those of AdaDPS."""
        checks.integer("num_words", num_words, 1)
        checks.integer("num_tags", num_tags, 1)
        return Vocabulary(tuple(self.words)[:num_words], tuple(self.tags)[:num_tags])

    def require_other_users(self, private_client_ids: Iterable[str]) -> UserCounts:
        """Returns these counts if none of the private clients was counted.

        Guarantee: the returned counts do not depend on the private clients' data. The caller
        asserts that the counted users agreed to be public.

        Args:
          private_client_ids: the clients of the training.

        Raises:
          TypeError: if they are no list of strings, which could not equal the counted users.
          NotPrivateError: if one of them was counted, or the counted users are unknown.
        """
        private = checks.strings("private_client_ids", private_client_ids)
        if self.users is None:
            raise NotPrivateError(
                "Counts must be of users who are known and not trained on; use "
                f"`count_users(heldout, ...)`. Received: {self.source}"
            )
        both = sorted(set(self.users) & set(private))
        if both:
            raise NotPrivateError(
                "`private_client_ids` must not contain users that were counted; leave them out of "
                f"the training or out of the counts. Received: {len(both)} such users: {both[:5]}"
            )
        return self


def count_users(client_data: Any, client_ids: Sequence[str], source: str = "heldout") -> UserCounts:
    """Counts the users of each word (in text or title) and of each tag.

    Guarantee: none. The counts are exact, so the counted users must have agreed to be public, as
    users of the heldout split may have by declaration. No other users are read.

    Args:
      client_data: posts, such as the heldout part of `load_stackoverflow`.
      client_ids: the users to count. All their posts are read, so choose a sample of a large split
        (`random_clients`).
      source: the name of the split, for the description.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if `client_ids` is empty or names an unknown user.
    """
    checks.instance("client_data", client_data, tff.simulation.datasets.ClientData)
    client_ids = checks.strings("client_ids", client_ids)
    checks.instance("source", source, str)
    unknown = sorted(set(client_ids) - set(client_data.client_ids))
    if unknown or not client_ids:
        raise ValueError(
            "`client_ids` must name users of `client_data`, at least one. Received: "
            f"{unknown[:5] or 'none at all'}"
        )
    users = tuple(sorted(set(client_ids)))

    def posts(user: tf.Tensor) -> tf.data.Dataset:
        return client_data.serializable_dataset_fn(user).map(
            lambda post: (user, post["tokens"], post["title"], post["tags"])
        )

    seen: dict[str, dict[str, set[bytes]]] = {
        "words": collections.defaultdict(set),
        "tags": collections.defaultdict(set),
    }
    for user, *texts in tf.data.Dataset.from_tensor_slices(list(users)).flat_map(posts):
        name = user.numpy()
        tokens, title, tagged = (text.numpy().decode() for text in texts)
        for word in (*tokens.split(), *title.split()):
            seen["words"][word].add(name)
        for tag in tagged.split("|"):
            if tag:
                seen["tags"][tag].add(name)
    words, tags = (
        _ranked({what: len(names) for what, names in sorted(found.items())})
        for found in seen.values()
    )
    return UserCounts(words, tags, f"counts of {len(users):,} users of the {source} split", users)


def load_counts(cache_dir: str | None = None) -> UserCounts:
    """Loads TFF's published counts without downloading anything.

    Guarantee: none. They were counted over all users of the train split, which are trained on. The
    literature commonly uses them as a vocabulary and treats them as public knowledge.

    Args:
      cache_dir: the folder of `stackoverflow.word_count` and `stackoverflow.tag_count`, of both as
        `.tar.bz2`, or of a folder `datasets` with them, where TFF's `load_word_counts` and
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
        file = None if inside is None else archive.extractfile(inside)
        if file is None:
            raise ValueError(f"it has no {member}")
        return file.read().decode("utf-8")


def _entry(line: str) -> tuple[str, int]:
    word, _, count = line.rpartition(" ")
    return word, int(count)
