"""Sentiment of film reviews (IMDB) with the methods of the AdaDPS paper: data, models, one run."""

from __future__ import annotations

import functools
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf

import tf_adaptive_dp
from examples.experiments.lib import adadps_methods
from examples.experiments.lib.datasets import text

TITLES = {
    **adadps_methods.TITLES,
    "adadps_ood": "AdaDPS (RMSProp), posts of Stack Exchange as public data",
    "adadps_frequency": "AdaDPS, token frequency in 25,000 other reviews",
    "adadps_frequency_released": "AdaDPS, the same without a bound of A, as released",
    "adadps_frequency_of_public": "AdaDPS, token frequency in the public 1%",
    "adadps_frequency_elsewhere": "AdaDPS, token frequency on Stack Exchange",
    "adadps_frequency_of_private": "AdaDPS, token frequency in private reviews (not private)",
    "adadps_tf_idf": "AdaDPS, TF-IDF in 25,000 other reviews",
}
LSTM_UNITS = 64


@functools.lru_cache(maxsize=1)
def arrays(data_dir: str | None, kind: str, length: int, number: int | None) -> dict[str, Any]:
    """What all runs of one kind of input share.

    Args:
      data_dir: tensorflow-datasets' folder.
      kind: `"bags"` of words or `"rows"` of word numbers.
      length: of rows.
      number: of reviews in each split; `None` takes all.

    Returns:
      "train" and "test": inputs, [n, 10,000] or [n, length], and labels.
    """
    rows = {s: text.imdb(data_dir, s, length=length, number=number) for s in ("train", "test")}
    if kind == "rows":
        return rows
    return {split: (text.bag_of_words(x), y) for split, (x, y) in rows.items()}


def _special_as_frequent(counts: np.ndarray) -> np.ndarray:
    """Padding, start and unknown are no words: another corpus does not count them."""
    counts = np.asarray(counts, np.float64).copy()
    counts[: text.UNKNOWN + 1] = counts.max()
    return counts


def token_frequencies(
    counts: np.ndarray, provenance: Any, *, offset: float = 0.1, largest: float | None = None
) -> Any:
    """A = 100 / min(10,000, max f / f), the authors' released setting, from counts f.

    Where no count is 10,000 times another, A is scaled so that the rarest have 0.01 as well.

    Padding and the commonest words have A up to 100 there. Noise moves their weights as much as
    those of all others, and their gradients, divided by 100, hardly bring them back: so they drift
    through the whole run. `largest` stops that.

    Args:
      counts: [10,000], of each token.
      provenance: of the counts.
      offset: added to each count.
      largest: larger A are replaced by this; `None` leaves them.
    """
    floor = max((counts.max() + offset) / 10_000, counts.min() + offset)
    return tf_adaptive_dp.side_information.token_frequencies(
        counts,
        floor=floor,
        cap=None if largest is None else 100 * floor * largest,
        offset=offset,
        divisor=100 * floor,
        provenance=provenance,
    )


def _tf_idf(test_bags: np.ndarray, length: int) -> Any:
    """A = 1 / (10 Σ TF-IDF) as released, and 100 for padding, start and unknown."""
    weights = text.inverse_document_frequencies(test_bags) / length
    scores = test_bags.sum(0, dtype=np.float64) * weights
    scores[: text.UNKNOWN + 1] = 1e-3
    return tf_adaptive_dp.side_information.tf_idf(
        scores, offset=1e-4, divisor=0.1, cap=100, provenance="public"
    )


def known_tokens(
    settings: dict[str, Any], public: np.ndarray, private: np.ndarray, test: np.ndarray
) -> Any:
    """The side information of methods that go by tokens, or `None` for others.

    Args:
      settings: "method", "length", and "largest" of `token_frequencies`.
      public: bags of words of the public reviews.
      private: those of the private ones, which "adadps_frequency_of_private" alone looks at.
      test: those of the test reviews, whose texts are public.
    """
    method, length, largest = settings["method"], settings["length"], settings["largest"]
    if method == "adadps_tf_idf":
        return _tf_idf(test, length)
    if method in ("adadps_frequency", "adas_frequency"):
        return token_frequencies(test.sum(0, dtype=np.float64), "public", largest=largest)
    if method == "adadps_frequency_released":
        return token_frequencies(test.sum(0, dtype=np.float64), "public")
    if method == "adadps_frequency_of_public":
        counts = public.sum(0, dtype=np.float64)
        return token_frequencies(counts, "public", offset=1.0, largest=largest)
    if method == "adadps_frequency_of_private":
        leak, counts = dp_accounting.NonPrivateDpEvent(), private.sum(0, dtype=np.float64)
        return token_frequencies(counts, leak, largest=largest)
    if method == "adadps_frequency_elsewhere":
        counts = text.stack_exchange_counts(None, text.review_vocabulary(*_vocabulary_of(settings)))
        counts = _special_as_frequent(counts)
        return token_frequencies(counts, "public", offset=1.0, largest=largest)
    return None


def _vocabulary_of(settings: dict[str, Any]) -> tuple[str | None, int | None]:
    return settings["data_dir"], settings["number"]


def posts(settings: dict[str, Any], number: int) -> adadps_methods.Arrays:
    """Posts of Stack Exchange as bags of words; the label is whether a post is a question.

    Args:
      settings: "length", "data_dir" and "number" of reviews.
      number: of posts.
    """
    ids = text.review_vocabulary(*_vocabulary_of(settings))
    rows, labels = text.stack_exchange_posts(None, number, ids, length=settings["length"])
    return text.bag_of_words(rows), labels


def make_model(settings: dict[str, Any], test_bags: np.ndarray | None) -> tf.keras.Model:
    """Logistic regression on bags of words or TF-IDF, or the LSTM, as the authors have them.

    Args:
      settings: "features": `"bow"`, `"tf_idf"` or `"lstm"`; and "length".
      test_bags: public texts, for inverse document frequencies.
    """
    layers, length = tf.keras.layers, settings["length"]
    if settings["features"] == "lstm":
        return tf.keras.Sequential(
            [
                tf.keras.Input([length], dtype=tf.int32),
                layers.Embedding(text.VOCABULARY_SIZE, LSTM_UNITS),
                layers.Dropout(0.2),
                layers.LSTM(LSTM_UNITS, return_sequences=True),
                layers.LSTM(LSTM_UNITS, return_sequences=True),
                layers.Dropout(0.2),
                layers.GlobalAveragePooling1D(),
                layers.Dense(2),
            ]
        )
    scale = np.float32(1 / length)
    if settings["features"] == "tf_idf":
        scale = text.inverse_document_frequencies(test_bags) / length
    return tf.keras.Sequential(
        [tf.keras.Input([text.VOCABULARY_SIZE]), layers.Rescaling(scale), layers.Dense(2)]
    )


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run.

    Args:
      settings: of `adadps_methods.run`; "features", "length", "number" of reviews in each split,
        "public_share" of the training reviews, and "seed".
      data_dir: tensorflow-datasets' folder.

    Returns:
      See `training.fit`. "accuracy_of_3" is the mean of the last three evaluations.
    """
    kind = "rows" if settings["features"] == "lstm" else "bags"
    found = arrays(data_dir, kind, settings["length"], settings["number"])
    public, private, _ = tf_adaptive_dp.side_information.split_public(
        found["train"], settings["public_share"], seed=settings["seed"]
    )
    test = found["test"]
    settings = {**settings, "data_dir": data_dir}
    bags = None if kind == "rows" else test[0]
    known = None if kind == "rows" else known_tokens(settings, public[0], private[0], bags)
    if settings["method"] == "adadps_ood":
        public = posts(settings, len(public[1]))
    tf.keras.utils.set_random_seed(settings["seed"])
    result = adadps_methods.run(
        make_model(settings, bags),
        settings,
        public,
        private,
        test,
        loss=tf.keras.losses.SparseCategoricalCrossentropy,
        from_logits=True,
        metrics=["accuracy"],
        judge_every=settings["judge_every"],
        judge_last=3,
        known=known,
    )
    if settings["method"] == "adadps_frequency_of_private":
        result["epsilon"] = [None] * len(result["epochs"])
    for name in ("accuracy", "accuracy_unaveraged"):
        if name in result:
            result[f"{name}_of_3"] = [
                round(float(np.mean(result[name][max(0, k - 2) : k + 1])), 5)
                for k in range(len(result[name]))
            ]
    return {**result, "num_public": len(public[1]), "num_private": len(private[1])}
