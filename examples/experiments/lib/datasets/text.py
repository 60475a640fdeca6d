"""Text data sets as arrays: film reviews (IMDB), and posts and word counts of Stack Exchange.

What turns words into columns must not come from private reviews: the vocabulary and the inverse
document frequencies are of the *texts* of the test split, which are taken as a public collection of
reviews. Their labels are used for the accuracy alone.
"""

from __future__ import annotations

import functools
import itertools
import sqlite3
import string
from collections import Counter
from collections.abc import Iterable

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from examples.experiments.lib.datasets.images import Arrays
from federated.datasets.folder import folder

VOCABULARY_SIZE = 10_000
LENGTH = 290  # tokens of a review; the AdaDPS authors' number
PAD, START, UNKNOWN = 0, 1, 2
_FIRST_WORD = 4  # 3 is left out, as in Keras's numbering
_SPACES = str.maketrans({character: " " for character in string.punctuation if character != "'"})


def words(text: str) -> list[str]:
    """Lower-case words without punctuation; apostrophes stay, as in Keras.

    >>> words("It's <br />GOOD, isn't it?")
    ["it's", 'br', 'good', "isn't", 'it']
    """
    return text.lower().translate(_SPACES).split()


def vocabulary(texts: Iterable[str], size: int = VOCABULARY_SIZE) -> dict[str, int]:
    """Numbers the most frequent words: 4 is the most frequent; the alphabet decides ties.

    Args:
      texts: public texts.
      size: the first number that is not given, so that all of them are columns of a table.

    >>> vocabulary(["b a b", "b c a"], size=6)
    {'b': 4, 'a': 5}
    """
    counts = Counter(itertools.chain.from_iterable(map(words, texts)))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: _FIRST_WORD + k for k, word in enumerate(ranked[: size - _FIRST_WORD])}


def encode(texts: Iterable[str], ids: dict[str, int], length: int = LENGTH) -> np.ndarray:
    """Rows of word numbers: a start token, then the words, cut or padded at the end.

    Args:
      texts: n texts.
      ids: as `vocabulary` gives them; other words are "unknown".
      length: of each row.

    Returns:
      int32 of shape [n, length].

    >>> encode(["a film", "a a a a"], {"a": 4}, length=4)
    array([[1, 4, 2, 0],
           [1, 4, 4, 4]], dtype=int32)
    """
    rows = []
    for text in texts:
        row = [START, *(ids.get(word, UNKNOWN) for word in words(text))][:length]
        rows.append(row + [PAD] * (length - len(row)))
    return np.asarray(rows, np.int32)


def bag_of_words(rows: np.ndarray, size: int = VOCABULARY_SIZE) -> np.ndarray:
    """How often each number is in each row; padding counts as a word, as the authors have it.

    Counts stop at 255, which only the padding of very short reviews reaches.

    Args:
      rows: [n, length] of word numbers.
      size: columns.

    Returns:
      uint8 of shape [n, size]: a quarter of what floats would need.

    >>> bag_of_words(np.array([[1, 4, 2, 0], [1, 4, 4, 4]]), size=6)
    array([[1, 1, 1, 0, 1, 0],
           [0, 1, 0, 0, 3, 0]], dtype=uint8)
    """
    bags = np.zeros([len(rows), size], np.uint8)
    for bag, row in zip(bags, rows):
        bag[:] = np.minimum(np.bincount(row, minlength=size), 255)
    return bags


def inverse_document_frequencies(bags: np.ndarray) -> np.ndarray:
    """log10(n / texts with the word) of each column; a column that is in no text counts 0.1 texts.

    Args:
      bags: [n, size], of public texts.

    >>> inverse_document_frequencies(np.array([[1, 0], [3, 1], [1, 0], [1, 0], [1, 0]])).round(3)
    array([0.   , 0.699], dtype=float32)
    """
    texts = np.maximum(np.count_nonzero(bags, axis=0), 0.1)
    return np.log10(len(bags) / texts).astype(np.float32)


def _reviews(data_dir: str | None, split: str, number: int | None) -> tuple[list[str], np.ndarray]:
    path = folder(
        "--data_dir", data_dir, "TFDS_DATA_DIR", "It must hold tensorflow-datasets' imdb_reviews."
    )
    wanted = split if number is None else f"{split}[:{number}]"
    data = tfds.load("imdb_reviews", split=wanted, data_dir=str(path), batch_size=-1)
    return [text.decode() for text in data["text"].numpy()], data["label"].numpy()


@functools.cache
def review_vocabulary(data_dir: str | None, number: int | None = None) -> dict[str, int]:
    """Numbers of the words of the public texts, as `imdb` uses them; see there."""
    return vocabulary(_reviews(data_dir, "test", number)[0])


def imdb(
    data_dir: str | None, split: str, *, length: int = LENGTH, number: int | None = None
) -> Arrays:
    """Film reviews as rows of `length` word numbers, and whether each is favourable.

    Args:
      data_dir: tensorflow-datasets' folder.
      split: `"train"` or `"test"`.
      length: of each row.
      number: of reviews in each split; `None` takes all 25,000.
    """
    texts, labels = _reviews(data_dir, split, number)
    return encode(texts, review_vocabulary(data_dir, number), length), labels.astype(np.int32)


def stack_exchange_posts(
    cache_dir: str | None, number: int, ids: dict[str, int], *, length: int = LENGTH
) -> Arrays:
    """Posts of a Stack Exchange site as rows of word numbers, and whether each is a question.

    Args:
      cache_dir: TensorFlow Federated's folder, with `stackoverflow.sqlite`.
      number: of posts, the first ones.
      ids: numbers of words.
      length: of each row.
    """
    path = folder(
        "cache_dir", cache_dir, "TFF_CACHE_DIR", "It must hold TFF's stackoverflow.sqlite."
    )
    file = (path / "stackoverflow.sqlite").resolve()
    if not file.is_file():
        raise FileNotFoundError(f"TFF_CACHE_DIR must hold stackoverflow.sqlite. Received: {path}")
    # Immutable: the folder may be one where no lock can be written.
    database = sqlite3.connect(f"{file.as_uri()}?mode=ro&immutable=1", uri=True)
    query = "SELECT serialized_example_proto FROM examples WHERE split_name = 'train' LIMIT ?"
    records = [tf.train.Example.FromString(r) for (r,) in database.execute(query, [number])]
    database.close()
    features = [record.features.feature for record in records]
    texts = [f["tokens"].bytes_list.value[0].decode() for f in features]
    questions = [f["type"].bytes_list.value[0] == b"question" for f in features]
    return encode(texts, ids, length), np.asarray(questions, np.int32)


def stack_exchange_counts(cache_dir: str | None, ids: dict[str, int]) -> np.ndarray:
    """How often each word of a vocabulary is used on a Stack Exchange site; 0 if never.

    Args:
      cache_dir: TensorFlow Federated's folder, with `stackoverflow.word_count`.
      ids: numbers of words.

    Returns:
      Counts by number, of shape [10,000].
    """
    how = "It must hold TFF's stackoverflow.word_count."
    path = folder("cache_dir", cache_dir, "TFF_CACHE_DIR", how)
    counts = np.zeros(VOCABULARY_SIZE)
    for line in (path / "stackoverflow.word_count").read_text().splitlines():
        word, _, count = line.rpartition(" ")
        if word in ids:
            counts[ids[word]] = float(count)
    return counts
