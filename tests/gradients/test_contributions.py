"""Contributions, views and reshapes against plain NumPy in float64, on shapes drawn at random."""

import itertools

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tf_adaptive_dp.gradients import contributions
from tf_adaptive_dp.gradients.batch_axis.reshaping import find_axis
from tf_adaptive_dp.gradients.batch_axis.sizes import ONE, Size
from tf_adaptive_dp.gradients.contributions import (
    DenseGradient,
    OuterGradient,
    SparseGradient,
    SummedContribution,
    VariableContribution,
)
from tf_adaptive_dp.gradients.variable_uses import AxisTransform

few = hypothesis.settings(max_examples=20)
sizes = st.integers(1, 4)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def narrowed(shape):
    """All shapes that broadcast to it, with its rank."""
    return sorted(set(itertools.product(*((1, n) for n in shape))))


def answers(make, pairs, weights):
    """Norms for pairs of scale and shift, and a weighted sum, of what `make` makes."""
    norms = [make().squared_norms(a, b) for a, b in pairs]
    return norms, make().weighted_sum(weights)


def check(ask, rows):
    """Compares the answers of `ask(pairs, weights)` with float64 rows [B, *shape]."""
    generator = np.random.default_rng(9)
    shape = rows.shape[1:]
    scales = [generator.uniform(0.3, 3.0, s).astype("float32") for s in narrowed(shape)]
    shift = generator.normal(size=shape).astype("float32")
    weights = generator.uniform(0.1, 2.0, len(rows)).astype("float32")
    weights[:1] = 0.0
    axes = tuple(range(1, rows.ndim))
    pairs = list(itertools.product((None, *scales), (None, shift)))
    found, total = ask(
        [[None if t is None else tf.constant(t) for t in pair] for pair in pairs],
        tf.constant(weights),
    )
    for actual, (a, b) in zip(found, pairs):
        wide = rows + (0.0 if b is None else b.astype("float64"))
        wide = wide * (1.0 if a is None else a.astype("float64"))
        # Never too small by more than rounding, and never much too large.
        size = (rows**2).sum(axes).max(initial=1.0) + (0 if b is None else (b**2).sum())
        size *= 1.0 if a is None else 9.0
        np.testing.assert_allclose(actual, (wide**2).sum(axes), rtol=1e-5, atol=3e-6 * size)
    expected = np.tensordot(weights.astype("float64"), rows, axes=1)
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5)


def check_eagerly(contribution, rows):
    check(lambda pairs, weights: answers(lambda: contribution, pairs, weights), rows)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_no_norm_misses_a_huge_number_times_a_tiny_one(times, swapped, scaled):
    """The square of the tiny one is no float32: the norm would be 0, and nothing would clip."""
    huge, tiny = np.zeros([2, times, 1, 40], np.float32), np.zeros([2, times, 1, 300], np.float32)
    huge[:, 0, 0, 0], tiny[0, 0] = 1.2e18, 1e-19
    x, delta = (tiny, huge) if swapped else (huge, tiny)
    made = OuterGradient(tf.constant(x), tf.constant(delta))
    scale = tf.fill([1, 1, made.shape[2]], 2.0) if scaled else None
    expected = 300 * (1.2e-1 * (2 if scaled else 1)) ** 2
    norms = made.squared_norms(scale, None).numpy()
    assert expected <= norms[0] < 1000 * expected and norms[1] == 0


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("shape", [(1, 1), (40, 1), (1, 30), (40, 30)])
@pytest.mark.parametrize(
    "x, a, delta", [(1e12, 1e-20, 1e9), (1e17, 1e-30, 1e14), (1e-10, 1e-10, 1e18)]
)
def test_no_norm_misses_what_a_tiny_scale_leaves_of_huge_numbers(times, shape, x, a, delta):
    """The square of the scale is no float32: the norm would be 0, and nothing would clip."""
    inputs, outputs = (
        np.zeros([3, times, 1, 40], np.float32),
        np.zeros([3, times, 1, 30], np.float32),
    )
    inputs[:2, 0, 0, 0], outputs[::2, 0, 0, 0] = x, delta  # the others have a gradient of 0
    made = OuterGradient(tf.constant(inputs), tf.constant(outputs))
    norms = made.squared_norms(tf.fill([1, *shape], a), None).numpy()
    assert (x * a * delta) ** 2 * (1 - 1e-5) <= norms[0] < np.inf
    assert norms[1] == norms[2] == 0


@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (5, 1000)])
def test_no_norm_of_rows_of_a_table_misses_what_a_scale_brings_back(shape):
    made = SparseGradient([5, 1000], tf.constant([[1]]), tf.fill([1, 1, 1000], 1e-20))
    norms = made.squared_norms(tf.fill(shape, 1e19), None)
    np.testing.assert_allclose(norms, [1000 * 0.1**2], rtol=1e-5)


class UnknownBatch:
    """Makes contributions in a function that is traced once, for batches of any size."""

    def __init__(self, make):
        self._make, self._function = make, None

    def check(self, tensors, rows):
        def ask(pairs, weights):
            if self._function is None:
                self._function = tf.function(
                    lambda weights, *t: answers(lambda: self._make(*t), pairs, weights),
                    [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in (weights, *tensors)],
                    autograph=False,
                )
            return self._function(weights, *tensors)

        check(ask, rows)


def outer_rows(x, delta):
    return np.einsum("btgn,btgm->bgnm", x.astype("float64"), delta.astype("float64"))


def sparse_rows(size, ids, delta):
    rows = np.zeros([len(ids), size, delta.shape[-1]])
    for i, t in itertools.product(*map(range, ids.shape)):
        rows[i, ids[i, t]] += delta[i, t]
    return rows


@few
@hypothesis.given(
    b=st.integers(0, 5), t=sizes, g=sizes, n=sizes, m=sizes, largest=st.sampled_from([1, 7, 2**24])
)
def test_outer_products(b, t, g, n, m, largest):
    x, delta = normal(0, b, t, g, n), normal(1, b, t, g, m)
    with pytest.MonkeyPatch.context() as patch:
        # A small limit forces the Gram form, or chunks.
        patch.setattr(contributions, "_LARGEST", largest)
        check_eagerly(OuterGradient(tf.constant(x), tf.constant(delta)), outer_rows(x, delta))


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("largest", [1, 30, 2**24])
@pytest.mark.parametrize("shape", [(1, 1, 3, 4), (2, 1, 5, 6), (6, 1, 2, 2), (3, 2, 2, 3)], ids=str)
def test_outer_products_of_batches_of_unknown_size(shape, largest, monkeypatch):
    monkeypatch.setattr(contributions, "_LARGEST", largest)
    t, g, n, m = shape
    made = UnknownBatch(OuterGradient)
    for b in (5, 1, 0):
        x, delta = normal(0, b, t, g, n), normal(1, b, t, g, m)
        made.check([tf.constant(x), tf.constant(delta)], outer_rows(x, delta))


@few
@hypothesis.given(b=st.integers(0, 4), t=sizes, size=sizes, width=sizes, seed=st.integers(0, 99))
def test_rows_of_tables(b, t, size, width, seed):
    ids, delta = np.random.default_rng(seed).integers(0, size, [b, t]), normal(1, b, t, width)
    made = SparseGradient((size, width), tf.constant(ids), tf.constant(delta))
    check_eagerly(made, sparse_rows(size, ids, delta))


def mixed_total(x, delta, ids, wide, rows):
    """One variable of shape [4, 3], read in every way, twice in some."""
    parts = [
        VariableContribution(OuterGradient(x, delta), AxisTransform((4, 3)).reshape([1, 4, 3])),
        VariableContribution(
            OuterGradient(x[:, :1], delta[:, :1]), AxisTransform((4, 3)).reshape([1, 4, 3])
        ),
        VariableContribution(
            OuterGradient(delta, x),
            AxisTransform((4, 3)).transpose([1, 0]).negate().reshape([1, 3, 4]),
        ),
        VariableContribution(SparseGradient((4, 3), ids, wide), AxisTransform((4, 3))),
        VariableContribution(
            SparseGradient((4, 3), ids[:, :1], wide[:, :1]), AxisTransform((4, 3))
        ),
        VariableContribution(DenseGradient((12,), rows), AxisTransform((4, 3)).reshape([12])),
        VariableContribution(DenseGradient((12,), rows), AxisTransform((4, 3)).reshape([12])),
    ]
    return SummedContribution(parts)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("largest", [1, 30, 2**24])
@pytest.mark.parametrize("known", [True, False])
def test_sums_of_contributions_of_all_kinds(known, largest, monkeypatch):
    monkeypatch.setattr(contributions, "_LARGEST", largest)
    x, delta, wide, rows = (
        normal(0, 5, 2, 1, 4),
        normal(1, 5, 2, 1, 3),
        normal(2, 5, 3, 3),
        normal(3, 5, 12),
    )
    ids = np.random.default_rng(0).integers(0, 4, [5, 3])
    expected = outer_rows(x, delta)[:, 0] + outer_rows(x[:, :1], delta[:, :1])[:, 0]
    expected -= np.swapaxes(outer_rows(delta, x)[:, 0], 1, 2)
    expected += sparse_rows(4, ids, wide) + sparse_rows(4, ids[:, :1], wide[:, :1])
    expected += 2.0 * rows.astype("float64").reshape(5, 4, 3)
    tensors = [tf.constant(t) for t in (x, delta, ids, wide, rows)]
    if known:
        check_eagerly(mixed_total(*tensors), expected)
    else:
        UnknownBatch(mixed_total).check(tensors, expected)


def test_chunks_are_no_larger_than_the_batch(monkeypatch):
    padded = []
    monkeypatch.setattr(
        contributions.tf, "pad", lambda t, p, pad=tf.pad: padded.append(pad(t, p)) or padded[-1]
    )
    x = tf.constant(normal(0, 2, 50, 1, 4))
    ids, wide = tf.zeros([2, 3], tf.int32), tf.zeros([2, 3, 3])

    @tf.function(input_signature=[tf.TensorSpec([None, 50, 1, 4])])
    def count(x):
        mixed_total(x, x[..., :3], ids, wide, tf.zeros([2, 12])).squared_norms(None, None)
        return tf.reduce_max([tf.shape(p)[0] for p in padded])

    assert count(x) < 1000


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("largest", [1, 2**24])
def test_an_example_that_is_not_finite_stays_alone(bad, largest, monkeypatch):
    monkeypatch.setattr(contributions, "_LARGEST", largest)
    arrays = normal(0, 4, 2, 1, 5), normal(1, 4, 2, 1, 6), normal(2, 4, 3, 3), normal(3, 4, 12)
    ids = tf.constant([[0, 1, 0]] * 4)

    def answers(x, delta, wide, rows):
        made = [
            OuterGradient(tf.constant(x), tf.constant(delta)),
            OuterGradient(tf.constant(x[:, :1]), tf.constant(delta[:, :1])),
            SparseGradient((4, 3), ids, tf.constant(wide)),
            DenseGradient((12,), tf.constant(rows)),
        ]
        for form in made:
            for scale, shift in itertools.product((None, 2.0), (None, 0.5)):
                filled = [None if v is None else tf.fill(form.shape, v) for v in (scale, shift)]
                yield (
                    form.squared_norms(*filled).numpy(),
                    form.weighted_sum(tf.constant([1.0, 0.0, 2.0, 0.5])).numpy(),
                )

    spoilt = [a.copy() for a in arrays]
    for array in spoilt:
        array[1].reshape(-1)[0] = bad
    for (norms, total), (bad_norms, bad_total) in zip(answers(*arrays), answers(*spoilt)):
        np.testing.assert_array_equal(bad_norms[[0, 2, 3]], norms[[0, 2, 3]])
        assert not np.isfinite(bad_norms[1])
        np.testing.assert_allclose(bad_total, total, rtol=1e-6)


@pytest.mark.parametrize("n, m", [(50, 60), (900, 1000)])
def test_norms_are_not_too_small_where_a_shift_cancels_the_gradient(n, m):
    x, delta = normal(0, 4, 1, 1, n), normal(1, 4, 1, 1, m)
    shift = -(outer_rows(x, delta)[1]).astype("float32")
    norms = OuterGradient(tf.constant(x), tf.constant(delta)).squared_norms(
        None, tf.constant(shift)
    )
    truth = ((outer_rows(x, delta) + shift.astype("float64")) ** 2).sum((1, 2, 3))
    assert (norms.numpy() >= truth * (1 - 1e-6)).all()


@pytest.mark.parametrize("jit", [False, True])
def test_ids_out_of_range_stay_within_their_example(jit):
    ids, delta = np.array([[1, 0, 1], [7, -3, 40], [2, 2, 0]]), normal(3, 3, 3, 2)
    within = np.clip(ids, 0, 2)
    rows = np.zeros([3, 3, 2])
    for b, t in np.ndindex(3, 3):
        rows[b, within[b, t]] += delta[b, t]

    @tf.function(jit_compile=jit)
    def found(ids, delta):
        made = SparseGradient((3, 2), ids, delta)
        weights = tf.constant([0.5, 2.0, 1.0])
        return made.all_rows(), made.squared_norms(None, None), made.weighted_sum(weights)

    all_rows, norms, total = found(tf.constant(ids), tf.constant(delta))
    np.testing.assert_allclose(all_rows, rows, rtol=1e-5)
    np.testing.assert_allclose(norms, (rows**2).sum((1, 2)), rtol=1e-5)
    np.testing.assert_allclose(total, np.tensordot([0.5, 2.0, 1.0], rows, 1), rtol=1e-5)


def nearly_cancelled(rng, times, n, m, deviation):
    """Rows that are almost the same, with output gradients whose sum is 0."""
    same = rng.normal(size=n) / np.sqrt(n)
    x = same + deviation * rng.normal(size=[times, n]) / np.sqrt(n)
    signs = rng.permutation(np.repeat([1.0, -1.0], times // 2))
    return x.astype("float32"), np.outer(signs, rng.normal(size=m) / np.sqrt(m)).astype("float32")


FORMS = {
    "gram": lambda x, delta: OuterGradient(x[:, :, None], delta[:, :, None]),
    "chunks": lambda x, delta: InChunks(OuterGradient(x[:, :, None], delta[:, :, None])),
    "several uses": lambda x, delta: SummedContribution(
        [
            VariableContribution(
                OuterGradient(x[:, k::2, None], delta[:, k::2, None]),
                AxisTransform((x.shape[2], delta.shape[2])).reshape([1, x.shape[2], -1]),
            )
            for k in range(2)
        ]
    ),
    "rows of a table": lambda x, delta: SparseGradient(
        (3, delta.shape[2]), tf.ones(x.shape[:2], tf.int32), delta * x[:, :, :1]
    ),
}


class InChunks:
    def __init__(self, outer):
        self._outer, self.weighted_sum = outer, outer.weighted_sum

    def squared_norms(self, scale, shift):
        return contributions.in_chunks([self._outer], scale, shift)


@pytest.mark.in_turns
@pytest.mark.slow_after(4)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_what_an_example_adds_is_bounded_although_its_terms_cancel(form, jit):
    @tf.function(jit_compile=jit)
    def clipped(x, delta, clip):
        made = FORMS[form](x, delta)
        norms = tf.sqrt(made.squared_norms(None, None))
        return norms, made.weighted_sum(tf.minimum(1.0, clip / norms))

    rng = np.random.default_rng(0)
    n, m = (300, 1) if form == "rows of a table" else (300, 500)
    for deviation, clip in itertools.product((1e-2, 1e-3, 1e-4, 1e-7, 0.0), (1e-3, 1e-9)):
        x, delta = (t[np.newaxis] for t in nearly_cancelled(rng, 128, n, m, deviation))
        norms, total = clipped(tf.constant(x), tf.constant(delta), tf.constant(clip))
        assert np.linalg.norm(total) <= clip * (1 + 1e-3)
        if form != "rows of a table":
            exact = np.linalg.norm(np.einsum("btn,btm->bnm", np.float64(x), np.float64(delta)))
            assert exact * (1 - 1e-4) <= norms[0] <= exact * 1.01 + 1.5


def used_twice(form, first, second):
    """Two uses of a 4-by-4 variable, the second of them in another view; rows of 16 numbers."""
    shape = first.shape[0], 4, 4
    first, second = (tf.reshape(tf.constant(t), shape) for t in (first, second))
    second = tf.transpose(second, [0, 2, 1])
    parts = {
        "dense": lambda rows: DenseGradient((4, 4), rows),
        # The only row in use is the first one, or with the view the first column.
        "rows of a table": lambda rows: SparseGradient(
            (4, 4), tf.zeros([shape[0], 1], tf.int32), rows[:, :1]
        ),
        "products": lambda rows: OuterGradient(
            rows[:, tf.newaxis, tf.newaxis, :, 0], tf.ones([shape[0], 1, 1, 4])
        ),
    }
    view = AxisTransform((4, 4))
    same = view.reshape([1, 4, 4]) if form == "products" else view
    other = view.transpose([1, 0])
    other = other.reshape([1, 4, 4]) if form == "products" else other
    return SummedContribution(
        [
            VariableContribution(parts[form](first), same),
            VariableContribution(parts[form](second), other),
        ]
    )


@pytest.mark.parametrize("size", [1e8, 1e12])
@pytest.mark.parametrize("form", ["dense", "rows of a table", "products"])
def test_an_example_whose_uses_of_a_variable_cancel_takes_nothing_from_the_others(form, size):
    """Sums over the batch are rounded to the size of the terms, not to that of what is left."""
    first, second = normal(0, 50, 16), normal(1, 50, 16)
    # The same gradient through both views: it is symmetric, and its only entry for the table.
    symmetric = {
        "dense": np.ones(16),
        "rows of a table": np.eye(16)[0],
        "products": np.ones(16),
    }[form]
    first[7], second[7] = size * symmetric, -size * symmetric
    made = used_twice(form, first, second)
    assert_takes_nothing_from_the_others(made)


@pytest.mark.parametrize("size", [1e8, 1e12])
def test_a_row_that_an_example_reads_several_times_takes_nothing_from_the_others(size):
    delta = np.stack([normal(0, 50, 4), normal(1, 50, 4)], axis=1)
    delta[7, 0], delta[7, 1] = size, -size
    ids = tf.zeros([50, 2], tf.int32)
    assert_takes_nothing_from_the_others(SparseGradient((4, 4), ids, tf.constant(delta)))


def assert_takes_nothing_from_the_others(made):
    """Example 7 of 50 moves the clipped sum by C at most, also by its rounding."""
    norms = tf.sqrt(made.squared_norms(None, None))
    weights = tf.minimum(1.0, 1.0 / norms)
    others = weights * (1.0 - tf.one_hot(7, 50))
    moved = made.weighted_sum(weights) - made.weighted_sum(others)
    assert np.linalg.norm(moved) <= 1 + 1e-3


@pytest.mark.parametrize("a", [1e-20, 1e-25])
def test_terms_that_cancel_count_although_the_square_of_the_scale_vanishes(a):
    """Otherwise nothing is left of the sum's rounding in the norm, and nothing is clipped."""
    x, delta = np.ones([2, 4, 1, 30], np.float32), np.ones([2, 4, 1, 40], np.float32)
    x[0] = 1.2 * a**-0.7
    delta[0] = (a**-0.7 * np.array([1, 1, -1, -1]))[:, None, None]
    delta[1] = 0.0
    made = OuterGradient(tf.constant(x), tf.constant(delta))
    terms = made.terms(tf.fill([1, 30, 40], np.float32(a))).numpy()
    expected = 4 * 30 * 40 * (1.2 * a**-1.4 * a) ** 2
    assert expected * (1 - 1e-5) <= terms[0] < np.inf and terms[1] == 0


@pytest.mark.parametrize("form", ["dense", "product", "rows of a table"])
def test_what_an_example_adds_is_bounded_although_a_shift_cancels_it(form):
    """Rounding in the sum of weighted rows and shift is that of the row, not of what is left."""
    x, delta = normal(0, 1, 1, 30), normal(1, 1, 1, 40)
    made = {
        "dense": lambda: DenseGradient((30, 40), tf.constant(x[:, 0, :, None] * delta)),
        "product": lambda: OuterGradient(
            tf.constant(x[:, :, None]), tf.constant(delta[:, :, None])
        ),
        "rows of a table": lambda: SparseGradient(
            (3, 40), tf.ones([1, 1], tf.int32), tf.constant(delta)
        ),
    }[form]()
    (row,) = made.all_rows().numpy()
    for left in (0.0, 1e-7, 1e-6, 1e-4):
        shift = (-row * (1 + left)).astype("float32")
        norm = np.sqrt(made.squared_norms(None, tf.constant(shift)).numpy())
        weight = (np.float32(1e-7) / norm).astype("float32")
        total = made.weighted_sum(tf.constant(weight)).numpy() + weight * shift
        assert np.linalg.norm(total) <= 1e-7 * (1 + 1e-3)


@few
@hypothesis.given(data=st.data())
def test_views_lead_there_and_back(data):
    shape = tuple(data.draw(st.lists(sizes, min_size=1, max_size=4)))
    view, reference = AxisTransform(shape), np.arange(float(np.prod(shape))).reshape(shape)
    start = reference
    for _ in range(data.draw(st.integers(0, 4))):
        kind = data.draw(st.sampled_from(["transpose", "reshape", "negate"]))
        if kind == "transpose":
            order = data.draw(st.permutations(range(reference.ndim)))
            view, reference = view.transpose(order), reference.transpose(order)
        elif kind == "reshape":
            new = [reference.shape[0], -1] if data.draw(st.booleans()) else [-1]
            reference = reference.reshape(new)
            view = view.reshape(reference.shape)
        else:
            view, reference = view.negate(), -reference
    assert view.shapes[-1] == reference.shape
    np.testing.assert_array_equal(view.apply(tf.constant(start)), reference)
    np.testing.assert_array_equal(view.invert(tf.constant(reference)), start)
    batch = tf.constant(np.stack([reference, 2 * reference]))
    np.testing.assert_array_equal(view.invert(batch, leading=1), np.stack([start, 2 * start]))


@few
@hypothesis.given(data=st.data())
def test_what_broadcasts_to_a_variable_broadcasts_to_its_view(data):
    shape = tuple(data.draw(st.lists(sizes, min_size=1, max_size=4)))
    narrow = [data.draw(st.sampled_from([1, n])) for n in shape]
    narrow = narrow[data.draw(st.integers(0, len(shape))) :]
    view, start = (
        AxisTransform(shape),
        np.random.default_rng(1).normal(size=narrow).astype("float32"),
    )
    reference = np.broadcast_to(start, shape)
    for _ in range(data.draw(st.integers(0, 3))):
        if data.draw(st.booleans()):
            order = data.draw(st.permutations(range(reference.ndim)))
            view, reference = view.transpose(order), reference.transpose(order)
        else:
            parts = factorizations(reference.size, data.draw(st.integers(1, 3)))
            new = data.draw(st.sampled_from(parts))
            view, reference = view.reshape(new), reference.reshape(new)
    found = view.apply(tf.constant(start))
    assert found.shape.rank == reference.ndim
    np.testing.assert_array_equal(np.broadcast_to(found, reference.shape), reference)


def test_a_view_keeps_short_axes_short():
    kernel = AxisTransform((6, 5)).reshape([1, 6, 5])
    assert kernel.apply(tf.ones([6, 1])).shape == (1, 6, 1)
    assert kernel.apply(tf.ones([5])).shape == (1, 1, 5)
    heads = AxisTransform((6, 2, 3)).reshape([1, 6, 6])
    assert heads.apply(tf.ones([6, 1, 1])).shape == (1, 6, 1)
    assert heads.apply(tf.ones([6, 1, 3])).shape == (1, 6, 6)
    assert AxisTransform((2, 3, 4)).transpose([2, 0, 1]).apply(tf.ones([3, 1])).shape == (1, 1, 3)


def owners(outer, batch_size, inner, target):
    """Which example each entry of the reshaped tensor belongs to."""
    examples = np.arange(batch_size)[np.newaxis, :, np.newaxis]
    return np.broadcast_to(examples, [outer, batch_size, inner]).reshape(target)


def axes_that_hold(outer, batch_size, inner, target):
    """All (axis, outer, inner) for which the index along the axis tells the example."""
    labels, found = owners(outer, batch_size, inner, target), set()
    for axis, size in enumerate(target):
        for before in range(1, size // batch_size + 1):
            if size % (before * batch_size):
                continue
            after = size // (before * batch_size)
            example = np.arange(size) // after % batch_size
            wanted = example.reshape([-1] + [1] * (len(target) - axis - 1))
            if (labels == wanted).all():
                found.add((axis, before, after))
    return found


def factorizations(number, axes):
    """All shapes with so many axes and so many entries."""
    if axes == 1:
        return [(number,)]
    return [
        (n, *rest)
        for n in range(1, number + 1)
        if number % n == 0
        for rest in factorizations(number // n, axes - 1)
    ]


@pytest.mark.parametrize("batch_size", [2, 3, 4])
@pytest.mark.parametrize("outer", [1, 2, 4])
def test_a_reshape_finds_the_batch_if_and_only_if_an_axis_holds_it(outer, batch_size):
    for inner, axes in itertools.product((1, 2, 4, 6), (1, 2, 3)):
        for target in factorizations(outer * batch_size * inner, axes):
            truths = axes_that_hold(outer, batch_size, inner, target)
            for hidden in range(-1, axes):
                asked = [None if a == hidden else Size(n) for a, n in enumerate(target)]
                found = find_axis(Size(batch_size), Size(outer), Size(inner), asked)
                if found is None:
                    assert not truths, target
                else:
                    assert (found.axis, found.outer.static, found.inner.static) in truths, target


def test_a_reshape_of_unknown_sizes_is_not_guessed():
    batch, time = Size(1, ("batch",)), Size(1, ("time",))
    assert find_axis(batch, ONE, time, [time, None]) is None
    assert find_axis(batch, ONE, time.times(Size(2)), [None, Size(4)]) is None
    assert find_axis(batch, ONE, Size(6), [None, None]) is None
    assert find_axis(batch, ONE, time, [batch, time]).axis == 0
    assert find_axis(batch, time, ONE, [time, batch]).axis == 1
