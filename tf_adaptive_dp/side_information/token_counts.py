"""How often tokens occur in a public corpus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_adaptive_dp import checks


class TokenCounts(NamedTuple):
    """What a corpus tells of its tokens.

    Attributes:
      counts: [V], how often each token occurs.
      document_counts: [V], in how many documents it occurs.
      num_documents: how many documents there are.
    """

    counts: np.ndarray
    document_counts: np.ndarray
    num_documents: int


def token_counts(corpus: Any, num_tokens: int | None = None) -> TokenCounts:
    """Counts the tokens of a corpus.

    Guarantee: none. The counts are as private as the corpus: of public text they are public, of
    the private training data they are not.

    Args:
      corpus: without `num_tokens` bags of words, rows of V counts; with it sequences of token ids.
        An array [N, V] or [N, T]; a list of documents of any length; or a `tf.data.Dataset` of
        documents or batches of them, alone or as (x, y[, sample_weight]), of which x is read.
        Ragged and sparse tensors are taken, too.
      num_tokens: V, which makes sequences of ids in [0, V) of the documents. Every id counts, that
        of padding as well.

    Returns:
      `TokenCounts`.

    Raises:
      TypeError, ValueError: for anything else, counts below 0, ids that are out of range, or a
        corpus without documents.

    >>> token_counts([[0, 2, 2], [2]], num_tokens=4).counts.tolist()
    [1, 0, 3, 0]
    >>> token_counts([[1, 0, 2, 0], [0, 0, 1, 0]]).document_counts.tolist()
    [1, 0, 2, 0]
    """
    if num_tokens is not None:
        checks.integer("num_tokens", num_tokens, 1)
    counts = documents = None
    num_documents = 0
    for batch in _batches(corpus):
        if num_tokens is None:
            found = _count_rows(batch)
        else:
            found = _count_ids(batch, num_tokens)
        if counts is None:
            counts, documents = np.zeros_like(found.counts), np.zeros_like(found.document_counts)
        if counts.shape != found.counts.shape:
            raise ValueError(
                "The bags of words of `corpus` must have one length; pass `num_tokens` if they are "
                f"sequences of token ids. Received: {len(counts)} and {len(found.counts)}"
            )
        counts = counts + found.counts
        documents = documents + found.document_counts
        num_documents += found.num_documents
    if not num_documents:
        raise ValueError("`corpus` must hold at least one document. Received: none")
    return TokenCounts(counts, documents, num_documents)


def _batches(corpus: Any) -> Iterator[Any]:
    """Batches of documents, each an array of rank 2 or a ragged tensor."""
    if isinstance(corpus, tf.data.Dataset):
        if corpus.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ValueError("`corpus` must end; remove `repeat()`. Received: an endless dataset")
        parts: Any = (tf.keras.utils.unpack_x_y_sample_weight(element)[0] for element in corpus)
    elif isinstance(corpus, (list, tuple)):
        parts = (np.atleast_1d(_array(document))[np.newaxis] for document in corpus)
    else:
        parts = [corpus]
    for part in parts:
        part = part if isinstance(part, tf.RaggedTensor) else _array(part)
        rank = part.shape.rank if isinstance(part, tf.RaggedTensor) else part.ndim
        if rank == 1 and isinstance(corpus, tf.data.Dataset):
            part, rank = part[np.newaxis], 2
        if rank != 2:
            raise ValueError(
                "`corpus` must hold documents of one axis, in an array of two, a list, or a "
                f"dataset. Received: shape {tuple(part.shape)}"
            )
        yield part


def _array(tensor: Any) -> np.ndarray:
    if isinstance(tensor, tf.sparse.SparseTensor):
        tensor = tf.sparse.to_dense(tensor)
    array = np.asarray(tensor)
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)  # an empty list
    if array.dtype.kind not in "iuf":
        raise TypeError(
            "`corpus` must hold counts or token ids; look words up in the vocabulary first "
            f"(`tf.keras.layers.TextVectorization`). Received: {array.dtype} {array!r:.80}"
        )
    return array


def _count_rows(batch: Any) -> TokenCounts:
    rows = batch.to_tensor().numpy() if isinstance(batch, tf.RaggedTensor) else batch
    if not (np.isfinite(rows).all() and (rows >= 0).all()):
        raise ValueError(
            "The bags of words of `corpus` must be finite and at least 0. Received: "
            f"{rows[~(np.isfinite(rows) & (rows >= 0))].flat[0]!r}"
        )
    wide = np.int64 if rows.dtype.kind in "iu" else np.float64
    return TokenCounts(rows.sum(0, dtype=wide), (rows > 0).sum(0), len(rows))


def _count_ids(batch: Any, num_tokens: int) -> TokenCounts:
    if isinstance(batch, tf.RaggedTensor):
        ids, rows = batch.flat_values.numpy(), batch.value_rowids().numpy()
        num_rows = int(batch.nrows())
    else:
        num_rows, ids = len(batch), batch.reshape(-1)
        rows = np.repeat(np.arange(num_rows), batch.shape[1])
    if ids.dtype.kind not in "iu" or (ids.size and not 0 <= ids.min() <= ids.max() < num_tokens):
        found = sorted({ids.min(), ids.max()}) if ids.size else []
        raise ValueError(
            f"The token ids of `corpus` must be whole numbers from 0 to {num_tokens - 1}, below "
            f"`num_tokens`. Received: {ids.dtype} from {found}"
        )
    ids = ids.astype(np.int64)
    distinct = np.unique(rows * num_tokens + ids) % num_tokens
    return TokenCounts(
        np.bincount(ids, minlength=num_tokens),
        np.bincount(distinct, minlength=num_tokens),
        num_rows,
    )


def check_vector(name: str, values: Any) -> np.ndarray:
    """Returns numbers, one a token, as a float64 vector, or raises.

    Raises:
      TypeError: if they are no numbers.
      ValueError: if they are no vector, negative or not finite.
    """
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{name}` must be a vector of numbers, one a token. Received: {values!r:.80}"
        ) from error
    if array.ndim != 1 or not array.size:
        raise ValueError(
            f"`{name}` must be a vector [V], one number a token. Received: shape {array.shape}"
        )
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if wrong.size:
        raise ValueError(
            f"`{name}` must be finite and at least 0. Received: {array[wrong[0]]!r} for token "
            f"{wrong[0]}"
        )
    return array


def look_up(counts: Any, vocabulary: Sequence[str]) -> np.ndarray:
    """[V], the counts of the words of a vocabulary; 0 for those that were not counted.

    Raises:
      ValueError: if a word comes twice in the vocabulary, or none of them was counted.
    """
    words = list(vocabulary)
    if len(set(words)) < len(words):
        twice = sorted({str(w) for w in words if words.count(w) > 1})
        raise ValueError(f"`vocabulary` must name each token once. Received twice: {twice[:5]}")
    if not any(word in counts for word in words):
        raise ValueError(
            "None of the words of `vocabulary` was counted. Received: vocabulary="
            f"{words[:3]!r}…, counts of {list(counts)[:3]!r}…"
        )
    return check_vector("counts", [counts.get(word, 0) for word in words])
