"""One draw may come as several batches, whose gradients are accumulated."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tests.helpers.sampled import DELTA, N, drawn_ids, numbered, records, to_pair
from tf_adaptive_dp.sampling import draws, sources

POISSON = dp.PoissonSampling(0.3, 19, 40, seed=5)
RARE = dp.PoissonSampling(0.02, 9, 40, seed=5)
FIXED, SHUFFLED = (
    dp.sampling.FixedSizeSampling(12, 20, seed=5),
    dp.sampling.ShuffledEpochs(12, 20, seed=5),
)


def in_parts(dataset, k):
    """The ids of each draw, out of those of its k batches, ascending."""
    ids = drawn_ids(dataset)
    assert len(ids) % k == 0
    return [sorted(sum(ids[i : i + k], [])) for i in range(0, len(ids), k)]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("k", [1, 2, 3, 8, 25])
@pytest.mark.parametrize("sampling", [POISSON, RARE])
def test_the_parts_of_a_poisson_draw_are_that_draw(sampling, k):
    whole = drawn_ids(dp.poisson_batches(numbered(), sampling))
    parts = dp.poisson_batches(numbered(), sampling, gradient_accumulation_steps=k)
    assert in_parts(parts, k) == whole
    assert int(parts.cardinality()) == 40 * k
    rows = -(-sampling.max_batch_size // k)
    assert [s.shape for s in parts.element_spec] == [(rows, 1), (rows,), (rows,)]
    sizes = []
    for x, y, weight in parts.as_numpy_iterator():
        there = weight == 1
        np.testing.assert_array_equal(x[there, 0], y[there] + 1)
        assert not weight[~there].any() and (x[~there] == 1).all() and not y[~there].any()
        sizes.append(there.sum())
    assert k == 1 or sampling is POISSON or 0 in sizes


@pytest.mark.parametrize(
    ("make", "sampling"),
    [(dp.sampling.fixed_size_batches, FIXED), (dp.sampling.shuffled_batches, SHUFFLED)],
)
def test_the_parts_of_a_batch_without_padding_are_that_batch(make, sampling):
    whole = [y.tolist() for _, y in make(numbered(), sampling).as_numpy_iterator()]
    assert [sorted(ids) for ids in whole] != whole  # and so are their rows
    for k in (2, 3, 12):
        parts = make(numbered(), sampling, gradient_accumulation_steps=k)
        assert int(parts.cardinality()) == 20 * k
        assert [s.shape for s in parts.element_spec] == [(12 // k, 1), (12 // k,)]
        ids = np.array([y for _, y in parts.as_numpy_iterator()])
        np.testing.assert_array_equal(ids.reshape(20, 12), whole)


def test_start_step_counts_draws_and_not_parts():
    whole = drawn_ids(dp.poisson_batches(numbered(), POISSON))
    for start in (1, 17, 39):
        options = {"start_step": start, "gradient_accumulation_steps": 3}
        rest = dp.poisson_batches(numbered(), POISSON, **options)
        assert int(rest.cardinality()) == 3 * (40 - start)
        assert in_parts(rest, 3) == whole[start:]


def test_each_pass_draws_anew_and_each_draw_is_made_once(monkeypatch):
    drawn, draw = [], dp.PoissonSampling.draw

    def counting(self, num_examples, step, key):
        drawn.append((key, step))
        return draw(self, num_examples, step, key)

    monkeypatch.setattr(dp.PoissonSampling, "draw", counting)
    parts = dp.poisson_batches(numbered(), POISSON, gradient_accumulation_steps=4)
    first, second = in_parts(parts, 4), in_parts(parts, 4)
    assert not {tuple(ids) for ids in first} & {tuple(ids) for ids in second}
    assert len(set(drawn)) == len(drawn) == 80
    assert [step for _, step in drawn] == 2 * list(range(40))


def test_sources_and_padding_in_parts():
    padding = (np.full([2, 2], 9, np.float32), np.int64(77))
    options = {"preprocess": to_pair, "padding": padding, "gradient_accumulation_steps": 4}
    parts = dp.poisson_batches(records(), POISSON, **options)
    assert in_parts(parts, 4) == drawn_ids(dp.poisson_batches(numbered(), POISSON))
    for x, y, weight in parts.as_numpy_iterator():
        there = weight == 1
        assert (x[~there] == 9).all() and (y[~there] == 77).all() and (x[there] < 1).all()


@pytest.mark.slow
def test_large_arrays_are_read_where_they_lie_and_give_the_same(monkeypatch):
    n = 30
    x = {"a": np.arange(n, dtype=np.float16)[:, None], "b": np.array([f"w{i}" for i in range(n)])}
    data = (x, np.arange(n) % 2 == 0, np.linspace(1, 2, n))
    padding = ({"a": np.float16([-5]), "b": np.array("none")}, np.array(True))

    def both(**kwargs):
        return [
            dp.poisson_batches(data, POISSON, gradient_accumulation_steps=k, **kwargs)
            for k in (1, 3)
        ]

    copied = both() + both(padding=padding)
    monkeypatch.setattr(sources, "MAX_COPIED_BYTES", 0)
    read = both() + both(padding=padding)
    for a, b in zip(copied, read):
        assert a.element_spec == b.element_spec
        for (ax, ay, aw), (bx, by, bw) in zip(a.as_numpy_iterator(), b.as_numpy_iterator()):
            for left, right in [(ax["a"], bx["a"]), (ax["b"], bx["b"]), (ay, by), (aw, bw)]:
                np.testing.assert_array_equal(left, right)
            assert (ax["a"][aw == 0] == ax["a"][aw == 0][:1]).all() and not (aw < 0).any()
            assert np.isin(ax["b"][aw == 0], [b"[UNK]", b"none"]).all()
            assert not np.isin(ax["b"][aw > 0], [b"[UNK]", b"none"]).any()


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        (0, ValueError, "`gradient_accumulation_steps` must be at least 1. Received: grad"),
        (1.5, TypeError, "`gradient_accumulation_steps` must be a whole number"),
        (5, ValueError, "must divide the batch size.*gradient_accumulation_steps=5, batch size 12"),
    ],
)
def test_bad_numbers_of_parts_are_refused(steps, error, message):
    cases = [(dp.sampling.fixed_size_batches, FIXED), (dp.sampling.shuffled_batches, SHUFFLED)]
    if steps != 5:
        cases.append((dp.poisson_batches, POISSON))
    for make, sampling in cases:
        with pytest.raises(error, match=message):
            make(numbered(), sampling, gradient_accumulation_steps=steps)


def trained_on(rows, k):
    return SimpleNamespace(rows_per_batch=rows, parts_per_batch=k)


@pytest.mark.parametrize(
    ("sampling", "rows", "k", "fits"),
    [
        (POISSON, 19, 1, True),
        (POISSON, 5, 4, True),  # 20 rows, padded from 19
        (POISSON, 4, 4, False),
        (POISSON, 19, 4, False),
        (POISSON, 5, 1, False),
        (FIXED, 4, 3, True),
        (FIXED, 12, 3, False),
    ],
)
def test_the_monitor_knows_the_rows_of_a_part(sampling, rows, k, fits):
    monitor = dp.PrivacyMonitor(N, DELTA, sampling=sampling)
    monitor._new_run = True
    if fits:
        monitor._check_rows(trained_on(rows, k))
    else:
        with pytest.raises(ValueError, match=f"got batches of {rows} rows"):
            monitor._check_rows(trained_on(rows, k))


@pytest.mark.parametrize(("steps", "k"), [(1, 1), (6, 1), (1, 4), (4, 4), (5, 4), (8, 4), (9, 4)])
def test_the_budget_counts_releases_and_not_parts(steps, k, monkeypatch):
    budget = dp.PrivacyBudget(1.0, DELTA, N)
    optimizer = SimpleNamespace(parts_per_batch=k, ledger=None, require_known_state=lambda: None)
    budget.set_model(
        SimpleNamespace(optimizer=optimizer, _steps_per_execution=steps, steps_per_execution=steps)
    )
    needed = -(-steps // k)
    for left in (needed - 1, needed):
        monkeypatch.setattr(budget, "_left", lambda *_, left=left: left)
        assert budget._next_call_fits(optimizer, None) == (left == needed)


def test_a_seeded_draw_in_parts_is_the_draw_of_its_key():
    parts = dp.poisson_batches(numbered(), POISSON, gradient_accumulation_steps=2)
    expected = [POISSON.draw(30, step, draws.new_key(5)).tolist() for step in range(40)]
    assert in_parts(parts, 2) == expected


@pytest.mark.slow
def test_fit_releases_once_a_draw_and_the_callbacks_agree():
    sampling = dp.PoissonSampling.for_batch_size(8, num_examples=32, steps=6)
    model = catalogue.mlp()
    optimizer = catalogue.make("DPSGD", expected_batch_size=8, gradient_accumulation_steps=3)
    model.compile(optimizer, loss=catalogue.loss())
    monitor = dp.PrivacyMonitor(32, 1e-3, sampling=sampling)
    budget = dp.PrivacyBudget(1e3, 1e-3, 32, sampling=sampling)
    batches = dp.poisson_batches(catalogue.data(), sampling, gradient_accumulation_steps=3)
    # Epochs of 5 parts: a batch of one draw may reach from one epoch into the next.
    model.fit(batches, steps_per_epoch=5, epochs=3, verbose=0, callbacks=[monitor, budget])
    assert optimizer.ledger.segments == [(0.5, 8.0, 5)]
    assert monitor.epsilon() == sampling.epsilon_spent(optimizer, 32, 1e-3) > 0


@pytest.mark.slow
def test_a_batch_over_two_passes_of_shuffled_data_is_refused():
    model = catalogue.mlp()
    model.compile(catalogue.make("DPSGD", gradient_accumulation_steps=3), loss=catalogue.loss())
    for callback in (
        dp.PrivacyMonitor(32, 1e-3),
        dp.PrivacyBudget(1e3, 1e-3, 32, batch_size=24),
    ):
        with pytest.raises(dp.NotPrivateError, match="Received: . parts of 3 at the end of"):
            catalogue.fit(model, callbacks=[callback])
