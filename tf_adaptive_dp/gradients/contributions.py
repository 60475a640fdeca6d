"""What one use of a variable contributes to its per-example gradients, in three forms.

The gradient of example i with respect to one variable, in a view of it, is one of

- `DenseGradient`: stored explicitly, [B, ...];
- `OuterGradient`: Σ_t x_it δ_itᵀ, from the inputs x and the output gradients δ of a product;
- `SparseGradient`: Σ_t e(id_it) δ_itᵀ, rows of a table.

Each form computes ‖(gᵢ + shift) ∘ scale‖² and Σᵢ wᵢ gᵢ by itself, in float32.
`SummedContribution` adds several of them for a variable with several uses.

Guarantee: rows stay apart. An example whose x or δ is not finite has a norm that is not finite, and
with weight 0 it adds exactly 0. The results for other examples do not change.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence

import tensorflow as tf

from tf_adaptive_dp._keras.tracing import in_xla
from tf_adaptive_dp.gradients.variable_uses import AxisTransform

# Per-example products are stored up to this size (64 MiB); larger ones are computed in chunks.
_LARGEST = 2**24
# Norms of sums whose terms may cancel are raised by this fraction of the terms' squares, so that
# the rounding of norms and of weighted sums, which add the terms in different orders, stays small
# beside them. Squares of norms that cancel have larger errors: they are computed in float64, or
# raised by all that float32 can lose.
_ROUNDING = 2.0**-21
# The relative error of one addition or multiplication in float32.
_ONE_OPERATION = 2.0**-24
# The most that a Gram form may raise the squares of norms of terms that are at right angles.
_MOST_RAISED = 2.0**-4
# Squares below the smallest normal float32 count as zero. Norms are raised by what they may lack,
# which matters only for gradients that are the product of a huge number and a tiny one.
_UNSEEN = 2.0**-126


def keep_rows(tensor: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Sets examples of weight 0 in a tensor [B, ...] to exactly 0, even if they are NaN."""
    return weigh_rows(tensor, tf.cast(weights != 0, tensor.dtype))  # faster than `tf.where`


def weigh_rows(tensor: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Multiplies a tensor [B, ...] by weights [B]; a weight of 0 turns NaN into 0."""
    weights = tf.reshape(weights, [-1] + [1] * (tensor.shape.rank - 1))
    return tf.math.multiply_no_nan(tensor, weights)


def _row_sums(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tensor, axis=list(range(1, tensor.shape.rank)))


def _wide(*tensors: tf.Tensor | None) -> list:
    """Tensors in float64, in which the product of two numbers of float32 is exact."""
    return [None if t is None else tf.cast(t, tf.float64) for t in tensors]


class Contribution(abc.ABC):
    """One form of per-example gradients, in the shape of a view of the variable.

    Attributes:
      shape: the shape of the view.
      tensors: the tensors that represent the gradients, [B, ...] each.
    """

    def __init__(self, shape: Sequence[int], *tensors: tf.Tensor):
        self.shape = tuple(shape)
        self.tensors = [t if t.dtype.is_integer else tf.cast(t, tf.float32) for t in tensors]

    @abc.abstractmethod
    def of(self, *tensors: tf.Tensor) -> tf.Tensor:
        """Computes the gradients of some examples, [b, *shape], from their rows of `tensors`."""

    @abc.abstractmethod
    def squared_norms(self, scale: tf.Tensor | None, shift: tf.Tensor | None) -> tf.Tensor:
        """Computes ‖(gᵢ + shift) ∘ scale‖², [B].

        Args:
          scale: has the rank of the view, and broadcasts to it.
          shift: has the shape of the view.
        """

    @abc.abstractmethod
    def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
        """Computes Σᵢ weightsᵢ·gᵢ in the shape of the view; a weight of 0 adds exactly 0."""

    @abc.abstractmethod
    def terms(self, scale: tf.Tensor | None) -> tf.Tensor:
        """Computes Σ_t ‖g_it ∘ scale‖² of the terms that are added up to gᵢ, [B]; not too small."""

    def all_rows(self) -> tf.Tensor:
        """Computes all gradients, [B, *shape]."""
        return self.of(*self.tensors)


def dense_norms(rows: tf.Tensor, scale: tf.Tensor | None, shift: tf.Tensor | None) -> tf.Tensor:
    """Computes ‖(rowᵢ + shift) ∘ scale‖², [B], from rows [B, ...].

    Rows and shift may cancel, and are added up in another order in weighted sums. So norms are
    raised by a part of their squares, see `_ROUNDING`; ‖row‖² is at most twice the sum of the
    squares of the result and of the shift.
    """
    if shift is None:
        return _row_sums(tf.square(rows if scale is None else rows * scale))
    rows, shift = rows + shift, tf.broadcast_to(shift, tf.shape(rows)[1:])
    if scale is not None:
        rows, shift = rows * scale, shift * scale
    norms, constant = _row_sums(tf.square(rows)), tf.reduce_sum(tf.square(shift))
    return norms + _ROUNDING * (2.0 * norms + 3.0 * constant)


def in_chunks(
    contributions: Sequence, scale: tf.Tensor | None, shift: tf.Tensor | None
) -> tf.Tensor:
    """Computes norms of the sum of contributions, for a few examples at a time.

    They are raised by a part of the squares of the terms, see `_ROUNDING`.

    Args:
      contributions: their methods `of` return gradients of the same shape.
      scale: see `Contribution.squared_norms`.
      shift: see `Contribution.squared_norms`.

    Returns:
      [B].
    """
    tensors = [t for c in contributions for t in c.tensors]
    size = max(1, _LARGEST // max(math.prod(contributions[0].shape), 1))
    num_rows = tf.shape(tensors[0])[0]
    static = tensors[0].shape[0]
    if static is None:
        size = tf.clip_by_value(size, 1, tf.maximum(num_rows, 1))

    def norms(chunk: Sequence[tf.Tensor]) -> tf.Tensor:
        rest, total = list(chunk), 0.0
        for c in contributions:
            total += c.of(*rest[: len(c.tensors)])
            rest = rest[len(c.tensors) :]
        return dense_norms(total, scale, shift)

    raised = _ROUNDING * sum(c.terms(scale) for c in contributions)
    if static is not None and static <= size:
        return norms(tensors) + raised
    chunks = tf.maximum(-(-num_rows // size), 1)  # an empty batch has one chunk of padding
    padded = [
        tf.reshape(
            tf.pad(t, [[0, chunks * size - num_rows]] + [[0, 0]] * (t.shape.rank - 1)),
            tf.concat([[chunks, size], tf.shape(t)[1:]], axis=0),
        )
        for t in tensors
    ]
    for new, old in zip(padded, tensors):
        new.set_shape([None, None if static is None else size, *old.shape[1:]])
    signature = tf.TensorSpec([None if static is None else size])
    found = tf.map_fn(norms, padded, fn_output_signature=signature, parallel_iterations=1)
    return tf.reshape(found, [-1])[:num_rows] + raised


class DenseGradient(Contribution):
    """Explicit gradients, [B, *shape]; sizes of the shape may be unknown."""

    def __init__(self, shape: Sequence[int], rows: tf.Tensor):
        if None not in shape and rows.shape[1:] != shape:
            rows = tf.reshape(rows, tf.concat([tf.shape(rows)[:1], shape], 0))
        super().__init__(shape, rows)

    def of(self, rows: tf.Tensor) -> tf.Tensor:
        """The rows themselves."""
        return rows

    def squared_norms(self, scale: tf.Tensor | None, shift: tf.Tensor | None) -> tf.Tensor:
        """From the rows."""
        return dense_norms(self.tensors[0], scale, shift)

    def terms(self, scale: tf.Tensor | None) -> tf.Tensor:
        """The squares of the rows, each of which is one term."""
        return dense_norms(self.tensors[0], scale, None)

    def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
        """From the rows."""
        return tf.reduce_sum(weigh_rows(self.tensors[0], weights), axis=0)


class OuterGradient(Contribution):
    """gᵢ[g] = Σ_t x_itg δ_itgᵀ for groups g, in a view of shape [G, n, m].

    For T = 1 without groups, ‖gᵢ‖² = ‖xᵢ‖²‖δᵢ‖², and with scale A and shift s

        ‖(gᵢ + s) ∘ A‖² = (xᵢ∘xᵢ) A² (δᵢ∘δᵢ)ᵀ + 2 xᵢ (A²s) δᵢᵀ + ‖s ∘ A‖²

    A scale [n, 1] needs no product with an n·m matrix: with the vector a of its entries,
    ‖gᵢ ∘ A‖² = (xᵢ∘xᵢ)·(a∘a) ‖δᵢ‖².

    Sequences and convolutions take the cheaper of the Gram form Σ_ts ⟨x_t, x_s⟩⟨δ_t, δ_s⟩ and
    per-example products. The Gram form is raised by what float32 may have lost of it, at most
    (n + m + 2T + 4)·2⁻²⁴·(Σ_t ‖x_t‖‖δ_t‖)²; if this is much, the norm is that of the product.
    Σᵢ wᵢgᵢ = xᵀ(w∘δ) is one product over all examples and times.
    """

    def __init__(self, x: tf.Tensor, delta: tf.Tensor):
        """Takes x [B, T, G, n] and δ [B, T, G, m]; only B and T may be unknown."""
        super().__init__((x.shape[2], x.shape[3], delta.shape[3]), x, delta)
        self._products: tf.Tensor | None = None

    @property
    def _single(self) -> bool:
        return self.tensors[0].shape[1] == 1 and self.shape[0] == 1

    def of(self, x: tf.Tensor, delta: tf.Tensor) -> tf.Tensor:
        """One product of matrices per example."""
        if self.shape[0] == 1:
            x, delta = (tf.squeeze(t, 2) for t in (x, delta))  # slices take several operations
            return tf.expand_dims(tf.matmul(x, delta, transpose_a=True), 1)
        return tf.einsum("btgn,btgm->bgnm", x, delta)

    def _keeps_products(self) -> bool:
        rows, times = self.tensors[0].shape[:2]
        _, n, m = self.shape
        small = math.prod(self.shape) * (256 if rows is None else rows) <= _LARGEST
        return small and not self._single and (times is None or times * (n + m) >= n * m)

    def _lost_in_gram(self, times: int) -> float:
        _, n, m = self.shape
        return (n + m + 2 * times + 4) * _ONE_OPERATION

    def _gram_is_better(self, times: int) -> bool:
        _, n, m = self.shape
        return times * (n + m) < n * m and times * self._lost_in_gram(times) <= _MOST_RAISED

    def squared_norms(self, scale: tf.Tensor | None, shift: tf.Tensor | None) -> tf.Tensor:
        """Takes the cheapest way for these shapes."""
        if self._single:
            return self._single_norms(scale, shift)
        if self._keeps_products():
            if self._products is None:
                self._products = self.all_rows()
            return dense_norms(self._products, scale, shift)
        times = self.tensors[0].shape[1]
        if shift is None and times is not None and self._gram_is_better(times):
            if scale is None:
                return self._gram_norms()
            if 1 in scale.shape.as_list()[1:]:  # it varies along one side of the product only
                x, delta = self.tensors
                along_x = scale.shape[2] == 1
                one_side = (x * scale[:, :, 0], delta) if along_x else (x, delta * scale[:, 0])
                return OuterGradient(*one_side)._gram_norms()
        return in_chunks([self], scale, shift)

    def terms(self, scale: tf.Tensor | None) -> tf.Tensor:
        """From the lengths of x and δ, or with one product of matrices."""
        x, delta = map(tf.square, self.tensors)
        whole = _row_sums(x), _row_sums(delta)
        if scale is None:
            found = _row_sums(tf.reduce_sum(x, 3) * tf.reduce_sum(delta, 3))
            return found + self._unseen(*whole)
        squares = tf.broadcast_to(tf.square(scale), self.shape)
        found = _row_sums(tf.einsum("btgn,gnm->btgm", x, squares) * delta)
        return found + self._unseen_with_scale(squares, *whole)

    def _single_norms(self, scale: tf.Tensor | None, shift: tf.Tensor | None) -> tf.Tensor:
        x, delta = (tf.squeeze(t, [1, 2]) for t in self.tensors)
        if shift is not None:
            x, delta, scale, shift = _wide(x, delta, scale, shift)
        lengths = [tf.reduce_sum(tf.square(t), 1) for t in (x, delta)]
        if scale is None:
            norms = lengths[0] * lengths[1] + self._unseen(*lengths)
        else:
            squares = tf.square(scale[0])
            if squares.shape[0] == 1:
                weighted = tf.reduce_sum(tf.square(x), 1, keepdims=True) * squares
            else:
                weighted = tf.matmul(tf.square(x), squares)  # [B, m], or [B, 1]: one number per row
            norms = tf.reduce_sum(weighted * tf.square(delta), axis=1)
            norms += self._unseen_with_scale(squares, *lengths)
        if shift is None:
            return norms
        scaled = shift[0] if scale is None else squares * shift[0]
        constant = tf.reduce_sum(scaled * shift[0])
        cross = tf.reduce_sum(tf.matmul(x, scaled) * delta, axis=1)
        exact = tf.maximum(norms + 2.0 * cross + constant, 0.0)
        return tf.cast(exact + _ROUNDING * (norms + constant), tf.float32)

    def _gram_norms(self) -> tf.Tensor:
        x, delta = (tf.transpose(t, [0, 2, 1, 3]) for t in self.tensors)
        gram = tf.matmul(x, x, transpose_b=True) * tf.matmul(delta, delta, transpose_b=True)
        gram = tf.reduce_sum(gram, 3)  # in two steps, so that few additions follow each other
        squares = [tf.reduce_sum(tf.square(t), 3) for t in (x, delta)]
        unseen = x.shape[2] * self._unseen(*map(_row_sums, squares))
        lengths = squares[0] * squares[1]
        most = _row_sums(tf.square(tf.reduce_sum(tf.sqrt(lengths), 2)))
        lost = self._lost_in_gram(x.shape[2]) * most + _ROUNDING * _row_sums(lengths)
        return tf.maximum(_row_sums(gram), 0.0) + lost + unseen

    def _unseen(self, x_squared: tf.Tensor, delta_squared: tf.Tensor) -> tf.Tensor:
        """The most that underflow can have taken from ‖x‖²·‖δ‖², given the computed factors."""
        *_, n, m = self.shape
        return self._unless_zero(m * _UNSEEN * x_squared + n * _UNSEEN * delta_squared)

    def _unseen_with_scale(
        self, squares: tf.Tensor, x_squared: tf.Tensor, delta_squared: tf.Tensor
    ) -> tf.Tensor:
        """The most that underflow of x², δ², A² and x²A² can have taken from Σ x²A²δ²."""
        _, n, _ = self.shape
        of_scale = self._unless_zero((_UNSEEN * x_squared + n * _UNSEEN) * delta_squared)
        return tf.reduce_max(squares) * self._unseen(x_squared, delta_squared) + of_scale

    def _unless_zero(self, unseen: tf.Tensor) -> tf.Tensor:
        """Leaves a gradient of exactly 0, such as that of an absent example, with the norm 0."""
        for tensor in self.tensors:
            axes = list(range(1, tensor.shape.rank))
            largest = tf.reduce_max(tf.abs(tensor), axes)  # faster than `tensor != 0`
            unseen = tf.where(tf.equal(largest, 0.0), tf.zeros_like(unseen), unseen)
        return unseen

    def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
        """One product over all examples, or the sum of products that are stored already."""
        if self._products is not None:
            if in_xla():  # one loop over the products, without a copy of them
                return tf.reduce_sum(weigh_rows(self._products, weights), 0)
            rows = tf.reshape(keep_rows(self._products, weights), [-1, math.prod(self.shape)])
            return tf.reshape(tf.matmul(weights[tf.newaxis], rows), self.shape)
        x, delta = self.tensors
        x, delta = keep_rows(x, weights), weigh_rows(delta, weights)
        groups, n, m = self.shape
        if groups == 1:
            total = tf.matmul(tf.reshape(x, [-1, n]), tf.reshape(delta, [-1, m]), transpose_a=True)
            return total[tf.newaxis]
        return tf.einsum("btgn,btgm->gnm", x, delta)


class SparseGradient(Contribution):
    """gᵢ = Σ_t e(id_it) δ_itᵀ: rows of a table [V, d], possibly repeated."""

    def __init__(self, shape: Sequence[int], ids: tf.Tensor, delta: tf.Tensor):
        """Takes ids [B, T] and δ [B, T, d].

        XLA reads the nearest row for an id that is out of range, where other kernels fail. It
        counts as that row here, too: it must not reach into the rows of another example.
        """
        ids = tf.clip_by_value(tf.cast(ids, tf.int32), 0, shape[0] - 1)
        super().__init__(shape, ids, delta)

    def of(self, ids: tf.Tensor, delta: tf.Tensor) -> tf.Tensor:
        """The whole table for each example."""
        rows, (size, width) = tf.shape(ids)[0], self.shape
        places = ids + size * tf.range(rows)[:, tf.newaxis]
        return tf.reshape(self._add_up(delta, places, rows * size), [rows, size, width])

    def _add_up(self, delta: tf.Tensor, places: tf.Tensor, size: tf.Tensor | int) -> tf.Tensor:
        return tf.math.unsorted_segment_sum(
            tf.reshape(delta, [-1, self.shape[1]]), tf.reshape(places, [-1]), size
        )

    def _rows_once(self) -> tuple[tf.Tensor, tf.Tensor]:
        """The distinct ids of each example and the sums of their rows; unused places are zero."""
        ids, delta = self.tensors
        order = tf.argsort(ids, axis=1, stable=True)
        ids = tf.gather(ids, order, batch_dims=1)
        first = tf.concat(
            [tf.ones_like(ids[:, :1]), tf.cast(ids[:, 1:] != ids[:, :-1], tf.int32)], 1
        )
        shape = tf.shape(ids)
        places = tf.cumsum(first, axis=1) - 1 + shape[1] * tf.range(shape[0])[:, tf.newaxis]
        count = shape[0] * shape[1]
        sums = self._add_up(tf.gather(delta, order, batch_dims=1), places, count)
        once = tf.math.unsorted_segment_max(tf.reshape(ids, [-1]), tf.reshape(places, [-1]), count)
        return (
            tf.reshape(tf.maximum(once, 0), shape),
            tf.reshape(sums, [shape[0], shape[1], self.shape[1]]),
        )

    def squared_norms(self, scale: tf.Tensor | None, shift: tf.Tensor | None) -> tf.Tensor:
        """Adds up the rows in use, and the part of the shift in all others."""
        ids, rows = self._rows_once()
        raised = 0.0 if ids.shape[1] == 1 else _ROUNDING * self.terms(scale)
        if shift is None:
            # Squares of tiny rows would vanish before a large scale brings them back.
            at_rows = 1.0 if scale is None else scale
            if scale is not None and scale.shape[0] == self.shape[0]:
                at_rows = tf.gather(scale, ids)  # [B, T, d], or [B, T, 1]: one number per row
            return _row_sums(tf.square(rows * at_rows)) + raised
        rows, scale, shift = _wide(rows, scale, shift)
        squares = None if scale is None else tf.square(scale)
        at_rows = 1.0 if squares is None else squares
        if squares is not None and squares.shape[0] == self.shape[0]:
            at_rows = tf.gather(squares, ids)
        norms = _row_sums(tf.square(rows) * at_rows)
        constant = tf.reduce_sum(tf.square(shift) * (1.0 if squares is None else squares))
        cross = _row_sums(rows * tf.gather(shift, ids) * at_rows)
        exact = tf.maximum(norms + 2.0 * cross + constant, 0.0)
        return tf.cast(exact + _ROUNDING * (norms + constant), tf.float32) + raised

    def terms(self, scale: tf.Tensor | None) -> tf.Tensor:
        """From the lengths of δ."""
        ids, delta = self.tensors
        if scale is not None and scale.shape[0] == self.shape[0]:
            scale = tf.gather(scale, ids)
        return _row_sums(tf.square(delta if scale is None else delta * scale))

    def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
        """Adds up the weighted rows."""
        ids, delta = self.tensors
        return self._add_up(weigh_rows(delta, weights), ids, self.shape[0])


class VariableContribution:
    """A contribution, with arguments and results in the shape of the variable."""

    def __init__(self, contribution: Contribution, view: AxisTransform):
        self.contribution, self.view = contribution, view
        self.shape, self.tensors = view.shape, contribution.tensors

    def of(self, *tensors: tf.Tensor) -> tf.Tensor:
        """Computes the gradients of some examples, [b, *shape]."""
        return self.view.invert(self.contribution.of(*tensors), leading=1)

    def terms(self, scale: tf.Tensor | None) -> tf.Tensor:
        """Computes Σ_t ‖g_it ∘ scale‖² of the terms that are added up, [B]."""
        return self.contribution.terms(None if scale is None else self.view.apply(scale))

    def squared_norms(self, scale: tf.Tensor | None, shift: tf.Tensor | None) -> tf.Tensor:
        """Computes ‖(gᵢ + shift) ∘ scale‖², [B]; both arguments may broadcast to the variable."""
        if shift is not None and shift.shape != self.shape:
            shift = tf.broadcast_to(shift, self.shape)
        return self.contribution.squared_norms(
            *(None if t is None else self.view.apply(t) for t in (scale, shift))
        )

    def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
        """Computes Σᵢ weightsᵢ·gᵢ."""
        return self.view.invert(self.contribution.weighted_sum(weights))


class SummedContribution:
    """The sum of several contributions to one variable: shared layers, tied weights."""

    def __init__(self, parts: Sequence[VariableContribution]):
        self.parts = _joined(parts)

    def squared_norms(self, scale: tf.Tensor | None, shift: tf.Tensor | None) -> tf.Tensor:
        """Computes ‖(gᵢ + shift) ∘ scale‖², [B]; contributions add up before the norm."""
        if len(self.parts) == 1:
            return self.parts[0].squared_norms(scale, shift)
        return in_chunks(self.parts, scale, shift)

    def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
        """Computes Σᵢ weightsᵢ·gᵢ."""
        return tf.add_n([p.weighted_sum(weights) for p in self.parts])


def _joined(parts: Sequence[VariableContribution]) -> list[VariableContribution]:
    """Joins contributions of the same form and view, as if they were further time steps."""
    groups: dict = {}
    for part in parts:
        groups.setdefault((type(part.contribution), part.view), []).append(part)
    joined = []
    for (form, view), same in groups.items():
        if len(same) == 1:
            joined += same
        elif form is DenseGradient:
            rows = tf.add_n([p.tensors[0] for p in same])
            joined.append(
                VariableContribution(DenseGradient(same[0].contribution.shape, rows), view)
            )
        elif form in (OuterGradient, SparseGradient):
            tensors = [tf.concat(t, axis=1) for t in zip(*(p.tensors for p in same))]
            arguments = [same[0].contribution.shape] * (form is SparseGradient) + tensors
            joined.append(VariableContribution(form(*arguments), view))
        else:
            joined += same
    return joined
