"""Nobody can foretell a draw, and none comes twice, unless it is asked for."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers.sampled import drawn_ids, numbered
from tf_adaptive_dp.sampling import datasets, draws


def test_keys_come_from_the_operating_system_unless_seeded(monkeypatch):
    assert draws.new_key() != draws.new_key()
    assert draws.new_key(3) == draws.new_key(3) != draws.new_key(4)
    asked = []
    monkeypatch.setattr(draws.os, "urandom", lambda size: asked.append(size) or bytes(size))
    assert draws.new_key() == bytes(32) and asked == [32]
    draws.new_key(3)
    assert asked == [32]


def test_what_is_drawn_for_one_purpose_tells_nothing_of_another():
    key = draws.new_key()
    of = [(key, b"rows", 4), (key, b"poisson", 4), (key, b"rows", 5), (draws.new_key(), b"rows", 4)]
    assert len({draws.derived_key(*each) for each in of}) == 4
    assert len({draws.generator(*each).integers(2**62) for each in of}) == 4


def test_two_datasets_and_two_passes_differ_and_seeded_ones_repeat():
    sampling = dp.PoissonSampling(0.3, 30, 6)
    first = dp.poisson_batches(numbered(), sampling)
    passes = [drawn_ids(d) for d in (first, first, dp.poisson_batches(numbered(), sampling))]
    assert passes[0] != passes[1] != passes[2] != passes[0]
    seeded = dp.PoissonSampling(0.3, 30, 6, seed=5)
    a, b = (dp.poisson_batches(numbered(), seeded) for _ in range(2))
    runs_a, runs_b = ([drawn_ids(d) for _ in range(3)] for d in (a, b))
    assert runs_a == runs_b
    every = [tuple(batch) for run in runs_a for batch in run]
    assert len(set(every)) == len(every)
    rest = dp.poisson_batches(numbered(), seeded, start_step=4)  # without those before
    assert drawn_ids(rest) == runs_a[0][4:]


@pytest.mark.slow
def test_start_step_continues_the_same_sequence():
    for make, sampling in [
        (dp.poisson_batches, dp.PoissonSampling(0.3, 30, 8)),
        (dp.sampling.fixed_size_batches, dp.sampling.FixedSizeSampling(4, 8)),
        (dp.sampling.shuffled_batches, dp.sampling.ShuffledEpochs(4, 8)),
    ]:
        key = draws.new_key()
        whole = [b[1] for b in make(numbered(), sampling, key=key).as_numpy_iterator()]
        for start in (0, 3, 7):
            rest = make(numbered(), sampling, key=key, start_step=start)
            assert int(rest.cardinality()) == 8 - start
            ids = [b[1] for b in rest.as_numpy_iterator()]
            np.testing.assert_array_equal(ids, whole[start:])
    again = dp.PoissonSampling(0.3, 30, 8, seed=2)
    whole = drawn_ids(dp.poisson_batches(numbered(), again))
    assert drawn_ids(dp.poisson_batches(numbered(), again, start_step=5)) == whole[5:]
    expected = [again.draw(30, t, draws.new_key(2)).tolist() for t in range(8)]
    assert whole == expected


@pytest.mark.parametrize("seed", [None, 5])
def test_forked_processes_do_not_draw_the_same_batches(monkeypatch, seed):
    """Two children that had a data set of their parent drew the same batches from it."""
    batches = dp.poisson_batches(numbered(), dp.PoissonSampling(0.3, 30, 6, seed=seed))
    monkeypatch.setattr(datasets.os, "getpid", lambda: 1)
    if seed is None:
        with pytest.raises(tf.errors.OpError, match="Make the data set in the child"):
            drawn_ids(batches)
    else:
        drawn_ids(batches)
