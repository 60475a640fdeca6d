"""Preconditioners from token statistics: counts, frequencies and TF-IDF scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp._keras.variables import path_of, paths_named
from tf_adaptive_dp.side_information.fixed import FixedPreconditioner


class TokenCounts(NamedTuple):
    """How often the tokens of a corpus occur.

    Attributes:
      counts: [V], the number of occurrences of each token.
      document_counts: [V], the number of documents that contain each token.
      num_documents: the number of documents.
    """

    counts: np.ndarray
    document_counts: np.ndarray
    num_documents: int


def token_counts(corpus: Any, num_tokens: int | None = None) -> TokenCounts:
    """Counts the tokens of a corpus.

    Guarantee: none. The counts are as private as the corpus. Counts of public text are public;
    counts of the private training data are not.

    Args:
      corpus: bags of words (rows of V counts) without `num_tokens`, sequences of token ids with it.
        Pass an array [N, V] or [N, T]; a list of documents of any length; or a `tf.data.Dataset` of
        documents or batches, alone or as (x, y[, sample_weight]), where only x is read. Ragged and
        sparse tensors are accepted too.
      num_tokens: V. Documents are then sequences of ids in [0, V). Every id counts, including
        padding.

    Returns:
      `TokenCounts`.

    Raises:
      TypeError, ValueError: if the corpus is anything else or has no documents, counts are
        negative, or ids are out of range.

    >>> token_counts([[0, 2, 2], [2]], num_tokens=4).counts.tolist()
    [1, 0, 3, 0]
    >>> token_counts([[1, 0, 2, 0], [0, 0, 1, 0]]).document_counts.tolist()
    [1, 0, 2, 0]
    """
    if num_tokens is not None:
        num_tokens = checks.integer("num_tokens", num_tokens, 1)
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
                "The bags of words of `corpus` must have one length. Pass `num_tokens` if they are "
                f"sequences of token ids. Received: {len(counts)} and {len(found.counts)}"
            )
        counts = counts + found.counts
        documents = documents + found.document_counts
        num_documents += found.num_documents
    if counts is None or documents is None or not num_documents:
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
                "`corpus` must hold documents with one axis, in an array with two, a list or a "
                f"dataset. Received: shape {tuple(part.shape)}"
            )
        yield part


def _array(tensor: Any) -> np.ndarray:
    if isinstance(tensor, tf.sparse.SparseTensor):
        tensor = tf.sparse.to_dense(tensor)
    checks.not_masked("corpus", tensor)
    array = np.asarray(tensor)
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)  # an empty list
    if array.dtype.kind not in "iuf":
        raise TypeError(
            "`corpus` must hold counts or token ids. Look up words in the vocabulary first "
            f"(`tf.keras.layers.TextVectorization`). Received: {array.dtype} {array!r:.80}"
        )
    return array


def _count_rows(batch: Any) -> TokenCounts:
    rows = batch.to_tensor().numpy() if isinstance(batch, tf.RaggedTensor) else batch
    if not (np.isfinite(rows).all() and (rows >= 0).all()):
        raise ValueError(
            "The bags of words of `corpus` must be finite and at least 0. Received: "
            f"{float(rows[~(np.isfinite(rows) & (rows >= 0))].flat[0])!r}"
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
    """Returns one number per token as a float64 vector, or raises.

    Raises:
      TypeError: if the values are not numbers.
      ValueError: if they are not a vector, or some are negative or not finite.
    """
    checks.not_masked(name, values)
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{name}` must be a vector of numbers, one per token. Received: {values!r:.80}"
        ) from error
    if array.ndim != 1 or not array.size:
        raise ValueError(
            f"`{name}` must be a vector [V], one number per token. Received: shape {array.shape}"
        )
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if wrong.size:
        raise ValueError(
            f"`{name}` must be finite and at least 0. Received: {float(array[wrong[0]])!r} for "
            f"token {wrong[0]}"
        )
    return array


def look_up(counts: Any, vocabulary: Sequence[str]) -> np.ndarray:
    """[V], the counts of the words of a vocabulary; 0 for words without a count.

    Raises:
      ValueError: if the vocabulary repeats a word, or none of its words has a count.
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


@keras.saving.register_keras_serializable("tf_adaptive_dp")
class TokenPreconditioner(FixedPreconditioner):
    """One number A_j per token, for the rows of the input layer.

    Row j of the variable [V, ...] has A_j. All other variables have A = 1. Memory and time are
    those for V numbers, not for V·K. `token_frequencies` and `tf_idf` make such preconditioners.

    Guarantee: the same as that of `FixedPreconditioner`.

    Args:
      values: [V], A.
      variable: the name of the variable, as for `FixedPreconditioner`. `None` takes the first
        trainable variable.
      description: what A was made from, for the privacy statement.
      provenance: see `FixedPreconditioner`.

    Raises:
      NotPrivateError: if `provenance` is missing.
      TypeError, ValueError: if the values are not positive finite numbers.

    >>> TokenPreconditioner([0.5, 2.0], provenance="public").description
    'a number for each token'
    """

    def __init__(
        self,
        values: Any,
        variable: str | None = None,
        description: str = "a number for each token",
        *,
        provenance: str | dp_accounting.DpEvent | None = None,
    ):
        super().__init__({}, provenance=provenance)
        if variable is not None and not isinstance(variable, str):
            raise TypeError(
                f"`variable` must be a variable's name or None. Received: variable={variable!r}"
            )
        self.values = _usable(values)
        self.variable = variable
        self._description = description

    @property
    def description(self) -> str:
        """See `SideInformation`."""
        return self._description

    def _arrays(self, variables: Sequence[tf.Variable]) -> list[np.ndarray]:
        chosen = self._choose(variables)
        arrays = [np.ones([], np.float32)] * len(variables)
        arrays[chosen] = self.values.reshape([-1] + [1] * (variables[chosen].shape.rank - 1))
        return arrays

    def _choose(self, variables: Sequence[tf.Variable]) -> int:
        """The place of the input layer among the variables."""
        names = [path_of(v) for v in variables]
        fits = [v.shape.rank > 0 and v.shape[0] == len(self.values) for v in variables]
        if self.variable is None:
            found = [0]
        else:
            meant = paths_named(self.variable.split(":")[0], names)
            found = [k for k, n in enumerate(names) if n in meant]
        if len(found) == 1 and fits[found[0]]:
            return found[0]
        listed = [f"{name} {tuple(v.shape)}" for name, v in zip(names, variables)]
        candidates = [text for text, fit in zip(listed, fits) if fit] or ["none"]
        wanted = "the first of them" if self.variable is None else repr(self.variable)
        raise ValueError(
            "`variable` must name the first kernel or the embedding table, with one row for each "
            f"of the {len(self.values)} tokens. Candidates: {', '.join(candidates)}. Received: "
            f"{wanted}, of the trained variables {', '.join(listed)}"
        )

    def get_config(self) -> dict:
        """The arguments."""
        return {
            "values": self.values.tolist(),
            "variable": self.variable,
            "description": self.description,
            "provenance": self.serialized_provenance(),
        }

    @classmethod
    def from_config(cls, config: dict) -> TokenPreconditioner:
        """Makes the object that `get_config` described."""
        return cls(**config)


def token_frequencies(
    counts: Any,
    *,
    vocabulary: Sequence[str] | None = None,
    cap: float | None = None,
    floor: float | None = None,
    offset: float = 1.0,
    divisor: float = 1.0,
    variable: str | None = None,
    provenance: str | dp_accounting.DpEvent | None = None,
) -> TokenPreconditioner:
    """Side information for AdaDPS: A is proportional to the frequency of each token.

        A_j = min(max(counts_j + offset, floor), cap) / divisor

    The gradient of row j of the input layer is divided by A_j. Rare tokens carry the most
    information and get larger steps. For the largest count M, `floor=M / 1e4` and
    `divisor=M / 100` give the multiplier 1 / A_j = min(M / (counts_j + offset), 10⁴) / 100 that the
    code of the paper's authors uses for IMDB.

    Guarantee: see `FixedPreconditioner`. Counts of the private texts are not public.

    Args:
      counts: [V], the number of occurrences of each token, in the order of the input; or the
        `TokenCounts` of `token_counts(corpus)`; or a mapping from words to counts, with
        `vocabulary`.
      vocabulary: the V words in the order of the input, such as
        `TextVectorization.get_vocabulary()`. Words without a count have 0.
      cap: greater than 0, in units of counts. Tokens with higher counts are treated alike.
      floor: greater than 0, in units of counts. Tokens with lower counts are treated alike, so no
        gradient is multiplied by more than divisor / floor.
      offset: at least 0; keeps A positive for tokens that do not occur.
      divisor: greater than 0.
      variable: the name of the kernel [V, K] or embedding table [V, E], as for
        `FixedPreconditioner`. `None` takes the first trainable variable, which must have V rows.
      provenance: `"public"`, or the `dp_accounting.DpEvent` of the release of the counts.

    Returns:
      A `FixedPreconditioner` with A = 1 for all other variables.

    Raises:
      NotPrivateError: if `provenance` is missing.
      TypeError, ValueError: if arguments are wrong or give an A of 0; when the optimizer is built,
        if the variable does not fit.

    References:
      - Li et al., "Private Adaptive Optimization with Side Information" (2022), arXiv:2202.05963,
        section 6.1.2.

    >>> import tf_adaptive_dp
    >>> side_information = token_frequencies([99, 9, 0], cap=50, divisor=10, provenance="public")
    >>> side_information.values.tolist()
    [5.0, 1.0, 0.10000000149011612]
    >>> optimizer = tf_adaptive_dp.AdaDPS(side_information, 1.0, noise_multiplier=1.1)
    """
    if isinstance(counts, TokenCounts):
        counts = counts.counts
    if isinstance(counts, Mapping) != (vocabulary is not None):
        raise ValueError(
            "`vocabulary` defines the order of the words in a mapping `counts`; pass both or an "
            f"array. Received: counts={type(counts).__name__}, vocabulary={vocabulary!r:.80}"
        )
    array = check_vector("counts", counts) if vocabulary is None else look_up(counts, vocabulary)
    values = array + checks.number("offset", offset, 0)
    values = _bounded(values, floor, cap) / checks.number("divisor", divisor, 0, strict=True)
    return TokenPreconditioner(values, variable, "token frequencies", provenance=provenance)


def tf_idf(
    scores: Any,
    *,
    cap: float | None = None,
    floor: float | None = None,
    offset: float = 0.0,
    divisor: float = 1.0,
    variable: str | None = None,
    provenance: str | dp_accounting.DpEvent | None = None,
) -> TokenPreconditioner:
    """Side information for AdaDPS: A is inversely proportional to each token's TF-IDF score.

        A_j = min(max(divisor / (score_j + offset), floor), cap)

    The gradient of row j of the input layer is divided by A_j. With `TokenCounts` of N documents,
    the score is the mean of count · idf over the documents:

        score_j = counts_j / N · (ln((1 + N) / (1 + document_counts_j)) + 1)

    This is scikit-learn's smooth idf with unnormalized rows. If your features are computed
    differently, pass the mean (or the sum) of each feature over public documents as `scores`.

    Guarantee: see `FixedPreconditioner`. Scores of the private texts are not public.

    Args:
      scores: [V], at least 0; or the `TokenCounts` of `token_counts(corpus)`.
      cap: greater than 0, the largest A. A score of 0 needs a `cap` or an `offset`.
      floor: greater than 0, the smallest A. No gradient is multiplied by more than 1 / floor.
      offset: at least 0, in units of scores.
      divisor: greater than 0.
      variable: see `token_frequencies`.
      provenance: see `token_frequencies`.

    Returns:
      A `FixedPreconditioner` with A = 1 for all other variables.

    Raises:
      NotPrivateError: if `provenance` is missing.
      TypeError, ValueError: if arguments are wrong or give an A that is not finite; when the
        optimizer is built, if the variable does not fit.

    References:
      - Li et al., "Private Adaptive Optimization with Side Information" (2022), arXiv:2202.05963,
        section 6.1.2.

    >>> tf_idf([0.5, 0.25, 0.0], cap=8.0, provenance="public").values.tolist()
    [2.0, 4.0, 8.0]
    """
    array = _scores(scores) if isinstance(scores, TokenCounts) else check_vector("scores", scores)
    array = array + checks.number("offset", offset, 0)
    divisor = checks.number("divisor", divisor, 0, strict=True)
    if cap is None and not array.all():
        raise ValueError(
            "A token with a score of 0 has an infinite A; pass `cap` or a positive `offset`. "
            f"Received: scores[{np.flatnonzero(array == 0)[0]}] = 0"
        )
    with np.errstate(divide="ignore", over="ignore"):
        values = _bounded(divisor / array, floor, cap)
    return TokenPreconditioner(values, variable, "TF-IDF scores", provenance=provenance)


def _scores(counted: TokenCounts) -> np.ndarray:
    counts = check_vector("counts", counted.counts)
    documents = check_vector("document_counts", counted.document_counts)
    number = checks.integer("num_documents", counted.num_documents, 1)
    if counts.shape != documents.shape or documents.max() > number:
        raise ValueError(
            "`document_counts` must have one number per token, at most `num_documents`. Received: "
            f"{len(documents)} numbers up to {documents.max():g}, {len(counts)} tokens, "
            f"num_documents={number}"
        )
    return counts / number * (np.log((1 + number) / (1 + documents)) + 1)


def _bounded(values: np.ndarray, floor: float | None, cap: float | None) -> np.ndarray:
    """The values, clipped to the range from `floor` to `cap`."""
    low = None if floor is None else checks.number("floor", floor, 0, strict=True)
    high = None if cap is None else checks.number("cap", cap, 0, strict=True)
    if low is not None and high is not None and low > high:
        raise ValueError(f"`floor` must be at most `cap`. Received: floor={floor!r}, cap={cap!r}")
    values = values if low is None else np.maximum(values, low)
    return values if high is None else np.minimum(values, high)


def _usable(values: Any) -> np.ndarray:
    """A as float32; raises unless A and its inverse are positive and finite."""
    array = check_vector("values", values)
    with np.errstate(divide="ignore", over="ignore"):
        small = array.astype(np.float32)
        wrong = np.flatnonzero(~((small > 0) & np.isfinite(small) & np.isfinite(1 / small)))
    if wrong.size:
        raise ValueError(
            "A must be positive and finite for each token, and its inverse too; pass a positive "
            f"`offset` or a `floor`. Received: A = {array[wrong[0]]:g} for token {wrong[0]}"
        )
    return small
