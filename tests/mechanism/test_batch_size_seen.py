"""Batches that are larger than they were said to be count with the size that they have."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import warnings

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import tf_adaptive_dp as dp
from tests.helpers import zoo
from tf_adaptive_dp.accounting.composition import epsilon, epsilon_spent
from tf_adaptive_dp.accounting.releases import BatchChecks, Releases
from tf_adaptive_dp.mechanism import batch_sizes
from tf_adaptive_dp.sampling import sampling_epsilon

DELTA = 1e-5


def release(sizes, expected, rows=200, **kwargs):
    """A mechanism after batches of so many rows, of which the first have a gradient."""
    mechanism = zoo.make_mechanism(l2_norm_clip=1.0, expected_batch_size=expected, **kwargs)
    mechanism.noise_multiplier = 2.0

    @tf.function
    def step(gradients):
        return mechanism.release(zoo.Rows(gradients), tf.shape(gradients)[0])

    for size in sizes:
        step(tf.cast(tf.range(rows)[:, None] < size, tf.float32))
    return mechanism


def test_a_batch_of_200_is_none_of_one_example():
    mechanism = release([200, 3, 200], expected=1.0)
    # Also the small one between, which nobody can tell from the others by what is recorded.
    assert mechanism.ledger.segments == [(2.0, 200.0, 3)]
    assert mechanism.ledger.checks[0].declared == 1.0
    with pytest.warns(UserWarning, match="size of 1, so.*computed for 200 rows") as found:
        spent = epsilon_spent(mechanism.ledger, 60_000, DELTA)
        assert sampling_epsilon.epsilon_spent("shuffled", mechanism.ledger, 60_000, DELTA)
    assert {w.filename for w in found} == {__file__}
    assert spent == epsilon(2.0, 200 / 60_000, 3, DELTA) > epsilon(2.0, 1 / 60_000, 3, DELTA)
    assert mechanism.batch_size() == 200.0
    with pytest.warns(UserWarning, match="more examples"):  # more rows than examples
        assert epsilon_spent(mechanism.ledger, 150, DELTA) == epsilon(2.0, 1.0, 3, DELTA)
    mechanism.sizes.expected = 250.0
    assert mechanism.batch_size() == 250.0


@pytest.mark.slow_on(2)
def test_under_xla_batches_larger_than_the_first_count_with_their_size():
    """XLA drops the assertion that batches do not vary in size: ε was .57 where it is .97."""
    mechanism = zoo.make_mechanism(l2_norm_clip=1.0, expected_batch_size=None)
    mechanism.noise_multiplier = 2.0

    @tf.function(jit_compile=True)
    def step(gradients):
        return mechanism.release(zoo.Rows(gradients), tf.shape(gradients)[0])

    for rows in (30, 10, 60, 30):
        step(tf.ones([rows, 3]))
    assert mechanism.ledger.segments == [(2.0, 30.0, 2), (2.0, 60.0, 2)]
    assert mechanism.ledger.checks == [BatchChecks(), BatchChecks(declared=30.0)]
    with pytest.warns(UserWarning, match="size of 30, so.*computed for 60 rows"):
        assert epsilon_spent(mechanism.ledger, 1_000, DELTA) > epsilon(2.0, 0.03, 4, DELTA)


def test_what_was_released_before_with_the_same_declaration_counts_as_large():
    mechanism = release([1, 2, 100], expected=1.0)
    assert mechanism.ledger.segments == [(2.0, 1.0, 2), (2.0, 200.0, 1)]
    assert mechanism.ledger.checks == [BatchChecks(), BatchChecks(declared=1.0)]
    mechanism.ledger.restore(
        [(2.0, 1.0, 2), (2.0, 200.0, 1), (2.0, 50.0, 4)],
        [BatchChecks(), BatchChecks(declared=1.0), BatchChecks()],
    )
    both = Releases([(2.0, 200.0, 3), (2.0, 50.0, 4)])
    with pytest.warns(UserWarning, match="size of 1, so.*computed for 200 rows") as warned:
        spent = epsilon_spent(mechanism.ledger, 1_000, DELTA)
    assert spent == epsilon_spent(both, 1_000, DELTA)
    assert len(warned) == 1


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("parts", [1, 2])
def test_batches_of_a_fixed_size_have_the_size_that_was_declared(parts):
    """30 of 26 where 20 were declared passed for draws with a mean of 20."""
    declared, rows = 20, 26
    subsets = dp.sampling.FixedSizeSampling(declared, steps=9)
    for expected in (declared, rows):
        optimizer = dp.DPSGD(
            1.0, 2.0, expected_batch_size=expected, gradient_accumulation_steps=parts
        )
        step = tf.function(functools.partial(_one_step, optimizer, tf.Variable([0.1])))
        for _ in range(3 * parts):
            step(tf.random.normal([rows // parts, 1]))
        assert optimizer.ledger.segments == [(2.0, expected, 3)]
        asks = (
            lambda o=optimizer: sampling_epsilon.epsilon_spent("fixed", o, 400, DELTA),
            lambda o=optimizer: sampling_epsilon.releases_left(
                "fixed", o, 2.0, 20.0, 400, 9.0, DELTA
            ),
            lambda o=optimizer: dp.privacy_statement(o, 400, DELTA, sampling="fixed"),
            lambda o=optimizer: _same_size(subsets, o).epsilon_spent(o, 400, DELTA),
            lambda o=optimizer: dp.privacy_statement(
                o, 400, DELTA, sampling=_same_size(subsets, o)
            ),
        )
        for ask in asks:
            if expected == rows:
                assert ask()
                continue
            with pytest.raises(ValueError, match="batches of 26 rows, expected_batch_size=20.*=26"):
                ask()


def _same_size(sampling, optimizer):
    """The sampling, of batches of the size that the optimizer was told."""
    return dataclasses.replace(sampling, batch_size=int(optimizer.expected_batch_size))


def _one_step(optimizer, variable, x):
    with tf.GradientTape() as tape:
        loss = (x[:, 0] * variable[0] - 1.0) ** 2
    optimizer.minimize(loss, [variable], tape)


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(2)
@pytest.mark.parametrize("expected", [0.01, 1.0, 7.0, 40.0, 150.0])
def test_no_plausible_draw_is_doubted(expected):
    sizes = np.arange(math.ceil(expected), 400)
    doubted = [
        batch_sizes.log_tail(s, expected, math.log) < batch_sizes.LOG_FALSE_ALARM if s else False
        for s in sizes
    ]
    first = sizes[doubted.index(True)]
    assert stats.poisson.sf(first - 1, expected) <= 1e-12  # as of any binomial with this mean
    assert stats.poisson.sf(first - 1, expected) >= 1e-16  # and not much later than it has to
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size, seen in ((first - 1, expected), (first, 400.0)):
            mechanism = release([size], expected, rows=400)
            assert mechanism.ledger.segments == [(2.0, seen, 1)]


@pytest.mark.parametrize(
    "size, detected_at", [(150, 3), (110, 58)], ids=["half too large", "a tenth too large"]
)
def test_batches_that_are_too_large_together_are_noticed(size, detected_at):
    """Each of them may be a draw of 100 examples, as far as its size shows; ε was too small."""
    ledger = release([size] * (detected_at + 3), 100.0).ledger
    assert ledger.segments == [(2.0, 100.0, detected_at - 1), (2.0, 200.0, 4)]
    assert ledger.checks[1].declared == 100.0


def test_the_mean_counts_where_the_rows_are_fewer():
    mechanism = zoo.make_mechanism(l2_norm_clip=1.0, expected_batch_size=100.0)
    mechanism.noise_multiplier = 2.0
    for size in (150, 150, 140):  # no padding: the last one is smaller than their mean
        mechanism.release(zoo.Rows(tf.ones([size, 1])), tf.constant(size))
    assert mechanism.ledger.segments == [(2.0, 100.0, 2), (2.0, 147.0, 1)]


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("seed", range(3))
def test_no_plausible_run_is_doubted(seed):
    sizes = np.random.default_rng(seed).poisson(100.0, size=300)
    assert sizes.sum() != 30_000
    assert release(sizes, 100.0).ledger.segments == [(2.0, 100.0, 300)]
    assert release([100] * 300, 100.0).ledger.segments == [(2.0, 100.0, 300)]
    # The power to fail: the same draws with a declared mean of a tenth less.
    assert release(sizes, 90.0).ledger.segments[-1].batch_size == 200.0


def test_padding_is_no_example_and_larger_declarations_are_believed():
    for expected in (20.0, 400.0):
        mechanism = release([20, 30, 0], expected)
        assert mechanism.ledger.segments == [(2.0, expected, 3)]
        assert mechanism.ledger.checks == [BatchChecks()]


@pytest.mark.slow
def test_parts_count_together():
    assert release([30, 30], 40.0, gradient_accumulation_steps=2).ledger.segments == [
        (2.0, 40.0, 1)
    ]
    ledger = release([60, 60], 40.0, gradient_accumulation_steps=2).ledger
    assert ledger.segments == [(2.0, 400.0, 1)]


@pytest.mark.filterwarnings("ignore:Under eager execution")
def test_the_step_warns_when_it_can():
    variable = tf.Variable([0.5, 0.5])
    x = tf.random.normal([200, 2])

    def step(optimizer, weights=None):
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(x + 0, variable) ** 2
            loss = loss if weights is None else loss * weights
        optimizer.minimize(loss, [variable], tape)

    def optimizer():
        return dp.DPSGD(1.0, 1.0, expected_batch_size=1.0, learning_rate=0.1)

    @tf.function
    def traced(x, optimizer):
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(x, variable) ** 2
        optimizer.minimize(loss, [variable], tape)

    received = "Received: an expected batch size of 1, batches of 200 rows"
    with pytest.warns(UserWarning, match=received) as eager:
        step(optimizer())
    with pytest.warns(UserWarning, match=received) as found:  # before it is run
        traced.get_concrete_function(tf.TensorSpec([200, 2]), optimizer())
    lines = [w.filename for w in [*eager, *found] if re.search(received, str(w.message))]
    assert lines == [__file__] * len(lines), "warnings name a line of the library"


def saved_size(expected, weights=None, rows=(5, 9, 7), eager=False):
    """What is saved of the sizes of batches, and what the process knows."""
    w, optimizer = tf.Variable([0.0, 0.0]), dp.DPSGD(1.0, 1.0, expected_batch_size=expected)
    specs = [tf.TensorSpec([None, 2])] + [tf.TensorSpec([None])] * (weights is not None)

    def step(x, of_rows=1.0):
        with tf.GradientTape() as tape:
            loss = of_rows * tf.linalg.matvec(x, w)
        optimizer.minimize(loss, [w], tape)

    step = step if eager else tf.function(step, input_signature=specs, autograph=False)
    for size in rows:
        step(tf.ones([size, 2]), *[] if weights is None else [tf.constant(weights[:size])])
    (saved,) = [int(v.numpy()) for v in optimizer.variables if "fixed_batch_size" in v.name]
    return saved, optimizer.rows_per_batch


@pytest.mark.slow_on(3)
@pytest.mark.filterwarnings("ignore:Under eager execution")
def test_a_random_size_which_is_private_is_not_saved_with_the_optimizer():
    assert saved_size(expected=7) == (0, 5)
    assert saved_size(expected=7, eager=True) == (0, 5)
    # Weights of classes, say, are no sign of padding.
    assert saved_size(expected=7, weights=[2.0, 1.0] * 5) == (0, 5)
    # Our padding is, and the size that it fills is public. Without L all batches have one size.
    assert saved_size(expected=7, weights=[1.0, -0.0] + [1.0] * 7, rows=(9, 9)) == (9, 9)
    assert saved_size(expected=None, rows=(5, 5)) == (5, 5)
    assert saved_size(expected=None, rows=(5, 5), eager=True) == (5, 5)


def test_the_size_of_padded_batches_is_saved_even_if_the_first_has_no_padding():
    weights = np.array([1.0] * 9 + [-0.0], np.float32)
    assert saved_size(expected=7, weights=weights, rows=(9, 10)) == (10, 10)


def sizes_of(expected=None, num_microbatches=None, examples_per_user=None, parts=1):
    """What a mechanism knows of sizes, without a step."""
    return batch_sizes.BatchSizes(
        *(expected, num_microbatches, examples_per_user, parts),
        lambda shape, dtype, name: tf.Variable(tf.zeros(shape, dtype), trainable=False),
    )


def seen_as(sizes, size, present):
    """The size that a batch counts with if it is too large; 0 otherwise."""
    found = sizes.too_large(
        sizes.divisor(), sizes.per_group(), tf.constant(size, tf.int64), tf.constant(present)
    )
    return float(found)


def test_a_batch_may_hold_as_many_examples_as_full_ones_and_no_more():
    sizes = sizes_of()
    sizes.expect_at_most(8)
    sizes.check(tf.constant(8, tf.int64))
    with pytest.raises(tf.errors.InvalidArgumentError, match="Batches vary in size"):
        sizes.check(tf.constant(9, tf.int64))
    sizes.expected = 8  # declared: the sizes of random batches vary around it
    sizes.check(tf.constant(9, tf.int64))


@pytest.mark.filterwarnings("ignore:The batches hold more examples")
def test_examples_are_counted_and_not_microbatches_or_parts():
    groups = sizes_of(expected=8, num_microbatches=4)
    groups.remember(tf.constant(40, tf.int64))  # ten examples in each
    assert seen_as(groups, size=40, present=4) == 40.0
    parts = sizes_of(expected=16, parts=2)
    with pytest.warns(UserWarning, match="size of 16, batches of 100 rows"):
        parts.warn_if_too_large(50)
    assert seen_as(parts, size=50, present=60) == 100.0  # their rows, since those are public
    assert seen_as(sizes_of(expected=16, parts=2), size=8, present=16) == 0.0
    parts.expected = None
    parts.remember(tf.constant(50, tf.int64))
    assert parts.first == float(parts.divisor()) == 100.0
    full = sizes_of(parts=2)
    full.expect_at_most(8)
    assert seen_as(full, size=8, present=16) == 0.0
    # Of what XLA lets through, the last part may be small: what is there counts, not the mean.
    assert seen_as(full, size=8, present=30) == 30.0


@pytest.mark.parametrize("first, second", [(184, 200), (200, 184)])
def test_of_two_optimizers_the_smaller_room_counts(first, second):
    own, before = (sizes_of(expected=100) for _ in range(2))
    own.remember(tf.constant(first, tf.int64))
    before.remember(tf.constant(second, tf.int64))
    own.continue_after(before)
    assert own.rows_per_batch == 184
    others = sizes_of(expected=100, parts=2), sizes_of(expected=100, examples_per_user=2)
    for other in others:  # whose sizes mean something else
        other.continue_after(before)
        assert other.rows_per_batch == 0
