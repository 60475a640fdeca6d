"""A batch that is released several times is one draw, and counts as such."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue, zoo
from tf_adaptive_dp.accounting.composition import (
    dp_event,
    epsilon,
    epsilon_spent,
    epsilon_without_amplification,
)
from tf_adaptive_dp.accounting.releases import BatchChecks, Releases, Segment
from tf_adaptive_dp.mechanism import draw_numbers
from tf_adaptive_dp.sampling import draws, sampling_epsilon
from tf_adaptive_dp.statement import privacy_statement
from tf_adaptive_dp.tuning.keras_tuner.trial import TrialBudget

N, Q, SIGMA, DELTA = 100, 0.25, 4.0, 1e-3
SAMPLING = dp.PoissonSampling(Q, N + 1, 1_000)  # no draw overflows
SIZE = SAMPLING.expected_batch_size(N)


def data(n=N):
    random = np.random.default_rng(0)
    return random.normal(size=[n, 2]).astype(np.float32), random.integers(2, size=n)


class Run:
    """A private step on a tiny model."""

    def __init__(self, per_step=1, jit=False, **kwargs):
        self.optimizer = dp.DPSGD(1.0, SIGMA, learning_rate=0.1, **kwargs)
        self.variable = tf.Variable([0.1, 0.2])

        @tf.function(jit_compile=jit, reduce_retracing=True)
        def step(x, y, weights):
            for _ in range(per_step):
                with tf.GradientTape() as tape:
                    outputs = tf.linalg.matvec(x, self.variable) - tf.cast(y, tf.float32)
                    loss = outputs**2 * weights
                self.optimizer.minimize(loss, [self.variable], tape)

        self.step = step

    def __call__(self, dataset):
        """What the ledger says after a run on a data set."""
        self.optimizer.ledger.restore([])
        for x, y, *weights in dataset:
            self.step(x, y, *(weights or [tf.ones(len(x))]))
        return self.optimizer.ledger


@functools.cache
def poisson_run():
    return Run(expected_batch_size=SIZE)


def true_epsilon(batches, times):
    """Of batches that are each released several times, by one mechanism with less noise."""
    accountant = dp_accounting.rdp.RdpAccountant()
    gaussian = dp_accounting.GaussianDpEvent(SIGMA / math.sqrt(times))
    accountant.compose(dp_accounting.PoissonSampledDpEvent(Q, gaussian), batches)
    return accountant.get_epsilon(DELTA)


def counted_epsilon(new, again, probability=Q):
    accountant = dp_accounting.rdp.RdpAccountant()
    gaussian = dp_accounting.GaussianDpEvent(SIGMA)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(probability, gaussian), new)
    accountant.compose(gaussian, again)
    return accountant.get_epsilon(DELTA)


def augmented(x, y, weights):
    return x + tf.random.normal(tf.shape(x)), 1 - y, weights


def weighted_anew(x, y, weights):
    return x, y, weights * tf.random.uniform(tf.shape(weights), 0.5, 1.5)


def _interleaved(kept):
    return tf.data.Dataset.range(3).interleave(lambda _: kept, cycle_length=1)


WAYS = {
    "cache": lambda drawn, folder: drawn.cache().repeat(3),
    "cache in a file": lambda drawn, folder: drawn.cache(f"{folder}/cache").repeat(3),
    "augmented": lambda drawn, folder: drawn.cache().map(augmented).repeat(3),
    "weighted anew": lambda drawn, folder: drawn.cache().repeat(3).map(weighted_anew),
    "shuffled": lambda drawn, folder: drawn.cache().repeat(3).shuffle(20),
    "interleaved": lambda drawn, folder: _interleaved(drawn.cache()),
    "flat map": lambda drawn, folder: drawn.flat_map(
        lambda *batch: tf.data.Dataset.from_tensors(batch).repeat(3)
    ),
    "list": lambda drawn, folder: 3 * list(drawn),
    "one key": lambda drawn, folder: [
        batch
        for _ in range(3)
        for batch in dp.poisson_batches(data(), SAMPLING, key=bytes(range(32))).take(4)
    ],
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("way", WAYS)
def test_draws_that_come_again_count_without_amplification(way, tmp_path):
    drawn = dp.poisson_batches(data(), SAMPLING).take(4)
    ledger = poisson_run()(WAYS[way](drawn, tmp_path))
    assert ledger.segments == [(SIGMA, SIZE, 12)]
    assert ledger.checks[0][:2] == (12, 8)
    spent = SAMPLING.epsilon_spent(ledger, N, DELTA)
    assert spent == pytest.approx(counted_epsilon(4, 8), rel=1e-9)
    assert epsilon(SIGMA, Q, 12, DELTA) < true_epsilon(4, 3) <= spent


def test_new_draws_are_all_checked_and_cost_what_they_did():
    run = poisson_run()
    ledger = run(dp.poisson_batches(data(), SAMPLING).take(40))
    assert ledger.checks == [BatchChecks(checked=40)]
    assert SAMPLING.epsilon_spent(ledger, N, DELTA) == epsilon(SIGMA, Q, 40, DELTA)
    text = " ".join(privacy_statement(run.optimizer, N, DELTA, sampling=SAMPLING).split())
    assert "were drawn by Poisson sampling, for which this epsilon is a proven upper bound" in text
    ledger = run(dp.poisson_batches(data(), SAMPLING).take(2).cache().repeat(2))
    text = " ".join(privacy_statement(run.optimizer, N, DELTA, sampling=SAMPLING).split())
    assert "of these, 2 on batches that had been released before" in text
    assert "TF Privacy's statement" not in text  # of independent draws


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("jit", [False, True])
def test_two_releases_in_one_step_share_its_batch(jit):
    ledger = Run(per_step=2, jit=jit, expected_batch_size=SIZE)(
        dp.poisson_batches(data(), SAMPLING).take(3)
    )
    assert ledger.segments == [(SIGMA, SIZE, 6)]
    assert ledger.checks == [BatchChecks(checked=6, repeated=3, nearest=1)]
    assert SAMPLING.epsilon_spent(ledger, N, DELTA) >= true_epsilon(3, 2)


def test_numbers_cost_no_second_trace():
    traces = []
    variable = tf.Variable([0.1, 0.2])
    optimizer = dp.DPSGD(1.0, SIGMA, learning_rate=0.1, expected_batch_size=SIZE)

    @tf.function
    def step(x):
        traces.append(x)
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(x, variable) ** 2
        optimizer.minimize(loss, [variable], tape)

    step(data(20)[0])
    assert len(traces) == 1 and optimizer.ledger.checks == [BatchChecks(checked=1)]


@pytest.mark.slow_on(2)
def test_two_optimizers_may_share_their_batches():
    drawn = list(dp.poisson_batches(data(), SAMPLING).take(3))
    for run in (Run(expected_batch_size=SIZE), Run(expected_batch_size=SIZE)):
        assert run(drawn).checks == [BatchChecks(checked=3)]


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "sampling",
    [
        dp.PoissonSampling(1e-6, 9, 60),  # all of them empty
        dp.PoissonSampling(0.3, 5, 60),  # four examples: the same batches come by chance
        dp.PoissonSampling(0.9, 5, 60),
    ],
)
def test_small_and_empty_batches_that_look_the_same_are_no_repetitions(sampling):
    run = Run(expected_batch_size=max(1.0, sampling.expected_batch_size(4)))
    ledger = run(dp.poisson_batches(data(4), sampling))
    assert ledger.num_releases == 60
    assert ledger.checks == [BatchChecks()]
    ledger = Releases([(2.0, 0.5, 60)], checks=ledger.checks)
    text = " ".join(privacy_statement(ledger, 4, 1e-2, sampling="poisson").split())
    assert "stated to have been drawn by Poisson sampling; if so, this epsilon is an upper" in text
    assert "not verify that the batch was a fresh draw for 60 of the noisy gradients" in text
    assert "proven" not in text


@pytest.mark.slow_on(2)
def test_masks_that_are_not_ours_are_no_numbers():
    # Two different batches with their padding at the end have the same mask.
    x, y = data()
    mask = tf.cast(tf.range(50) < 20, tf.float32)
    batches = [(x[i : i + 50], y[i : i + 50], mask) for i in (0, 10, 20)]
    run = poisson_run()
    assert run(batches).checks == [BatchChecks(checked=3)]  # by their contents
    assert run([*batches[:1], *batches]).checks[0].repeated == 4
    same_rows = (np.ones([50, 2], np.float32), np.ones(50, np.int64), mask)
    assert run([same_rows] * 3).checks == [BatchChecks()]


@pytest.mark.slow
def test_numbers_of_draws_differ_and_their_entropy_is_measured():
    @tf.function
    def number(weights, values):
        return draw_numbers.number_of(weights * values)

    def random():
        return tf.random.uniform([64], 0.5, 1.5)

    values = random()
    weights = [w for _, _, w in dp.poisson_batches(data(), dp.PoissonSampling(0.1, 64, 400))]
    numbers = [number(w, values) for w in weights]
    assert all(n.known[0] and not any(n.known[1:]) and n.marked for n in numbers)
    assert len({int(n.digests[0]) for n in numbers}) == 400
    # Whatever became of the examples, and of their weights.
    again = [number(w * random(), random()) for w in weights]
    assert [int(n.digests[0]) for n in again] == [int(n.digests[0]) for n in numbers]
    for w in weights[:9]:
        np.testing.assert_array_equal(w, tf.cast(w > 0, tf.float32))  # zeros all the same
    short = tf.constant([-0.0] * 10 + [0.0] * 20 + [1.0] * 2)
    full = tf.constant([-0.0] * 10 + [0.0] * 20 + [1.0] * 4)
    same = tf.ones([1])
    # 30 bits and log2 C(32, 2) = 8.95 are too few, log2 C(34, 4) = 15.5 suffice.
    known = [number(w, same[0] * tf.ones_like(w)).known for w in (short, full)]
    assert [any(k.numpy()) for k in known] == [False, True]


@pytest.mark.slow_on(2)
def test_what_is_fed_besides_the_batch_may_have_another_size():
    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([None])])
    def number(x, settings):
        return draw_numbers.number_of(tf.reduce_sum(x, 1) + 0 * tf.reduce_sum(settings))

    x = tf.random.normal([20, 2])
    for settings in (tf.ones([3]), tf.ones([40])):
        first, again, other = (number(rows, settings) for rows in (x, x + 0, x[::-1]))
        assert all(first.digests == again.digests) and first.known[0]
        assert first.digests[0] != other.digests[0]


class TwoTasks(Run):
    """A step that releases twice on each batch, by losses that read different parts of it."""

    def __init__(self, shared=True, **kwargs):
        super().__init__(**kwargs)

        @tf.function(reduce_retracing=True)
        def step(x, labels, weights):
            for k in range(2):
                inputs = x if shared else x[k]
                with tf.GradientTape() as tape:
                    outputs = tf.linalg.matvec(inputs, self.variable) - labels[k]
                    loss = outputs**2 * weights[k]
                self.optimizer.minimize(loss, [self.variable], tape)

        self.step = step


def two_labels():
    x, _ = data()
    return x, tuple(np.random.default_rng(1).normal(size=[2, N]).astype(np.float32))


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("weights", ["ours", "one for each task", "none"])
def test_two_losses_that_share_a_batch_are_releases_on_one_draw(weights):
    x, labels = two_labels()
    of_tasks = tuple(np.random.default_rng(2).uniform(0.5, 1.5, [2, N]).astype(np.float32))
    arrays = (x, labels, of_tasks) if weights == "one for each task" else (x, labels)
    batches = list(dp.poisson_batches(arrays, SAMPLING).take(3))
    if weights == "none":  # somebody else's batches
        batches = [(x[i : i + 20], (labels[0][i : i + 20], labels[1][i : i + 20])) for i in (0, 9)]
    run = TwoTasks(expected_batch_size=SIZE)
    run.optimizer.ledger.restore([])
    for of_batch in batches:
        x, y, w = of_batch if len(of_batch) == 3 else (*of_batch, tf.ones([20]))
        run.step(x, y, w if isinstance(w, tuple) else (w, w))
    twice = len(batches)
    assert run.optimizer.ledger.checks == [BatchChecks(2 * twice, repeated=twice, nearest=1)]


@pytest.mark.slow_on(2)
def test_losses_of_different_batches_are_releases_on_different_draws():
    x, labels = two_labels()
    run = TwoTasks(shared=False, expected_batch_size=SIZE)
    for i in range(0, 60, 20):
        parts = x[i : i + 20], x[i + 20 : i + 40]
        run.step(parts, (labels[0][i : i + 20], labels[1][i : i + 20]), 2 * (tf.ones([20]),))
    # The first batch of a step is the second one of the step before.
    assert run.optimizer.ledger.checks[0].repeated == 2


def cached(budget, epochs=2, **fit):
    """Trains on four Poisson batches that repeat, with a budget."""
    model, (x, y) = catalogue.mlp(), catalogue.data()
    x, y = np.tile(x, [7, 1])[:N], np.tile(y, 7)[:N]
    optimizer = dp.DPSGD(1.0, SIGMA, learning_rate=0.1, expected_batch_size=SIZE)
    model.compile(optimizer, loss=catalogue.loss())
    drawn = dp.poisson_batches((x, y), SAMPLING).take(4).cache().repeat()
    budget = dp.PrivacyBudget(budget, DELTA, N, sampling=SAMPLING)
    try:
        model.fit(drawn, steps_per_epoch=4, epochs=epochs, verbose=0, callbacks=[budget])
    finally:
        spent = SAMPLING.epsilon_spent(optimizer, N, DELTA)
        cached.ledger = optimizer.ledger
    return spent


@pytest.mark.slow_on(2)
def test_a_budget_that_a_repeated_batch_exceeds_ends_in_an_error():
    # There is room for many new draws, but not for a batch without amplification.
    new = epsilon(SIGMA, Q, 5, DELTA)
    assert new < counted_epsilon(4, 1)
    budget = (new + counted_epsilon(4, 1)) / 2
    with pytest.raises(dp.BudgetExceededError, match="cost more than the budget.*1 of them on"):
        cached(budget)
    assert cached.ledger.checks[0][:2] == (5, 1)


@pytest.mark.slow_on(2)
def test_a_budget_prices_the_next_batch_like_those_that_were_repeated():
    budget = (counted_epsilon(4, 3) + counted_epsilon(4, 4)) / 2
    assert counted_epsilon(5, 3) < budget  # if it were new
    assert cached(budget) == pytest.approx(counted_epsilon(4, 3), rel=1e-9)


@pytest.mark.slow
def test_a_batch_is_counted_however_fit_runs_the_steps():
    x, y = catalogue.data()
    x, y = np.tile(x, [7, 1])[:N], np.tile(y, 7)[:N]
    for options in ({"steps_per_execution": 4}, {"jit_compile": True}):
        model = catalogue.mlp()
        optimizer = dp.DPSGD(1.0, SIGMA, learning_rate=0.1, expected_batch_size=SIZE)
        model.compile(optimizer, loss=catalogue.loss(), **options)
        drawn = dp.poisson_batches((x, y), SAMPLING).take(4).cache().repeat()
        monitor = dp.PrivacyMonitor(N, DELTA, sampling=SAMPLING)
        model.fit(drawn, steps_per_epoch=8, verbose=0, callbacks=[monitor])
        assert optimizer.ledger.checks[0][:3] == (8, 4, 4)
        assert monitor.epsilon() == pytest.approx(counted_epsilon(4, 4), rel=1e-9)
        assert "4 on batches that had been" in " ".join(monitor.statement().split())


def known_as(number):
    """What the mechanism is told of a batch, or of a part of one."""
    return draw_numbers.Number(
        tf.constant([number], tf.int64), tf.constant([True]), tf.constant(True)
    )


def test_parts_that_repeat_others_are_counted_until_they_are_dropped():
    seen = draw_numbers.SeenDraws()

    def add(number, complete=False):
        draw = seen.add(known_as(number), tf.constant(complete))
        return int(draw.distance), float(draw.copies)

    assert [add(5), add(5), add(6, complete=True)] == [(0, 0), (0, 1), (0, 1)]
    assert [add(7), add(8, complete=True)] == [(0, 0), (0, 0)]
    assert [add(8), add(6, complete=True)] == [(1, 0), (1, 0)]  # the nearest counts
    assert [add(9), add(9)] == [(0, 0), (0, 1)]
    seen.drop_parts()
    assert [add(9), add(10, complete=True)] == [(0, 0), (0, 0)]


@pytest.mark.filterwarnings("ignore:Under eager execution")
def test_an_example_in_two_parts_of_a_batch_counts_twice():
    mechanism = zoo.make_mechanism(
        expected_batch_size=4.0, noise_multiplier=3.0, gradient_accumulation_steps=3
    )
    for number in (1, 2, 1, 3, 3, 3):
        mechanism.release(zoo.Rows(np.ones([2, 3], "float32")), 2, number=known_as(number))
    assert mechanism.ledger.segments == [(1.5, 4.0, 1), (1.0, 4.0, 1)]


@pytest.mark.slow
def test_parts_of_a_batch_have_numbers_and_may_not_come_twice_in_one():
    run = Run(expected_batch_size=SIZE, gradient_accumulation_steps=2)
    sampling = dp.PoissonSampling(Q, 2 * N, 50)
    parts = list(dp.poisson_batches(data(), sampling, gradient_accumulation_steps=2).take(6))
    assert run(parts).checks == [BatchChecks(checked=3)]
    assert run([parts[0], parts[1]]).checks == [BatchChecks(checked=1, repeated=1, nearest=3)]
    # In other pairs, too.
    new = list(dp.poisson_batches(data(), sampling, gradient_accumulation_steps=2).take(6))
    assert run([*new[:3], new[2]]).checks[0].repeated == 0
    assert run.optimizer.ledger.segments == [(SIGMA, SIZE, 1), (SIGMA / 2, SIZE, 1)]
    # A batch that was dropped before its release may come again.
    last = new[4:]
    run(last[:1])
    run.optimizer._mechanism.drop_parts()
    assert run(last).checks == [BatchChecks(checked=1)]
    assert run.optimizer.ledger.segments == [(SIGMA, SIZE, 1)]


@pytest.mark.slow_on(2)
def test_batches_without_padding_are_known_by_their_contents():
    run = Run()
    fixed = dp.sampling.FixedSizeSampling(20, 50)
    drawn = dp.sampling.fixed_size_batches(data(), fixed).take(5)
    assert run(drawn).checks == [BatchChecks(checked=5)]
    ledger = run(drawn.cache().repeat(2))
    assert ledger.checks == [BatchChecks(checked=10, repeated=5, nearest=5)]
    spent = fixed.epsilon_spent(ledger, N, DELTA)
    alone = dp_accounting.rdp.RdpAccountant()
    alone.compose(dp_accounting.GaussianDpEvent(SIGMA / 2), 5)
    fresh = Releases([(SIGMA, 20.0, 5)])
    assert spent > max(alone.get_epsilon(DELTA), fixed.epsilon_spent(fresh, N, DELTA))
    few = dp.sampling.FixedSizeSampling(8, 50)
    assert run.optimizer.ledger.num_releases == 10
    assert Run()(dp.sampling.fixed_size_batches(data(9), few)).checks == [BatchChecks()]


def test_draws_that_come_again_after_a_pass_are_repetitions_unless_said_otherwise():
    ledger = poisson_run()(dp.poisson_batches(data(), SAMPLING).take(4).cache().repeat(3))
    assert ledger.checks[0].nearest == 4 == N // SIZE
    spent = epsilon_spent(ledger, N, DELTA)
    assert spent == SAMPLING.epsilon_spent(ledger, N, DELTA)
    assert spent > epsilon_spent(ledger, N, DELTA, in_epochs=True)


@pytest.mark.slow_on(2)
def test_passes_over_the_same_batches_are_passes_and_within_one_they_are_not():
    x, y = data()
    in_order = tf.data.Dataset.from_tensor_slices((x, y)).batch(20)
    run = Run()
    ledger = run(in_order.repeat(3))
    assert ledger.checks == [BatchChecks(checked=15, repeated=10, nearest=5)]
    plain = Releases(ledger.segments)
    customary = epsilon_spent(ledger, N, DELTA, in_epochs=True)
    assert customary == epsilon_spent(plain, N, DELTA) < epsilon_spent(ledger, N, DELTA)
    bounds = [epsilon_without_amplification(of, N, DELTA) for of in (ledger, plain)]
    assert bounds[0] == bounds[1]
    assert "released before" not in privacy_statement(run.optimizer, N, DELTA)
    # Not for a sampling in which no batch comes again.
    strict = sampling_epsilon.epsilon_spent("poisson", ledger, N, DELTA)
    assert strict == pytest.approx(counted_epsilon(5, 10, probability=0.2), rel=1e-9)
    ledger = run([next(iter(in_order))] * 10)
    assert ledger.checks[0].nearest == 1
    gaussian = dp_accounting.rdp.RdpAccountant()
    gaussian.compose(dp_accounting.GaussianDpEvent(SIGMA / math.sqrt(10)))
    for spent in (epsilon_spent, epsilon_without_amplification):
        assert spent(ledger, N, DELTA) >= gaussian.get_epsilon(DELTA) * 0.95
    assert epsilon_spent(ledger, N, DELTA) >= true_epsilon(1, 10)


@pytest.mark.slow
def test_training_on_all_data_in_each_step_costs_what_it_did():
    x, y = data()
    run = Run()
    ledger = run([(x, y)] * 6)
    assert ledger.checks == [BatchChecks(checked=6, repeated=5, nearest=1)]
    assert epsilon_spent(ledger, N, DELTA) == epsilon(SIGMA, 1.0, 6, DELTA)
    whole = dp.PoissonSampling(1.0, N + 1, 9)
    ledger = Run(expected_batch_size=float(N))(dp.poisson_batches((x, y), whole))
    assert whole.epsilon_spent(ledger, N, DELTA) == epsilon(SIGMA, 1.0, 9, DELTA)
    ledger = Releases(ledger.segments, checks=[BatchChecks()])
    text = privacy_statement(ledger, N, DELTA, sampling=whole)
    assert "proven upper bound" in " ".join(text.split())  # nothing is amplified


def test_what_was_seen_is_neither_saved_nor_forgotten_in_the_ledger():
    run = poisson_run()
    drawn = dp.poisson_batches(data(), SAMPLING).take(3).cache().repeat(2)
    known = run(drawn).checks
    assert known == [BatchChecks(checked=6, repeated=3, nearest=3)]
    optimizer = run.optimizer
    assert all(np.prod(v.shape) < 1_000 for v in optimizer.variables)
    copied = dp.DPSGD.from_config(optimizer.get_config())
    assert (copied.ledger.segments, copied.ledger.checks) == (optimizer.ledger.segments, known)
    copied.build([run.variable])
    copied.ledger.restore([])
    copied.set_weights([v.numpy() for v in optimizer.variables])
    assert copied.ledger.checks == known


def test_dp_events_and_budgets_count_repetitions():
    again = SimpleNamespace(
        segments=[Segment(SIGMA, SIZE, 12)], checks=[BatchChecks(12, 8, 2)], other_events=()
    )
    event = dp_event(again, N)
    assert "GaussianDpEvent(noise_multiplier=4.0), count=8" in str(event)
    full = counted_epsilon(4, 8)
    left = functools.partial(sampling_epsilon.releases_left, SAMPLING, again)
    assert left(SIGMA, SIZE, N, full * 1.0001, DELTA) == 0
    assert left(SIGMA, SIZE, N, counted_epsilon(9, 8) * 1.0001, DELTA) == 5
    with pytest.raises(ValueError, match="released with batch size"):
        left(SIGMA, SIZE + 1, N, full, DELTA)
    paid = {**vars(again), "other_events": (dp_accounting.GaussianDpEvent(2.0),)}
    left = functools.partial(sampling_epsilon.releases_left, SAMPLING, SimpleNamespace(**paid))
    assert left(SIGMA, SIZE, N, counted_epsilon(9, 8) * 1.0001, DELTA) == 0
    # Where batches are drawn at random, no pass makes them new.
    late = SimpleNamespace(**{**vars(again), "checks": [BatchChecks(12, 8, nearest=N)]})
    left = functools.partial(sampling_epsilon.releases_left, "poisson", late)
    assert left(SIGMA, SIZE, N, full * 1.0001, DELTA) == 0
    known = list(zip(late.segments, late.checks))
    counts = [
        sampling_epsilon.num_repeated(sampling, known, N)
        for sampling in ("poisson", SAMPLING, "shuffled")
    ]
    assert counts == [8, 8, 0]


def test_a_trial_may_not_release_a_batch_twice():
    batches = SimpleNamespace(sampling=SAMPLING, num_examples=N)
    checking = SimpleNamespace(_batches=batches)
    for known, fits in ((BatchChecks(12, 0, 0), True), (BatchChecks(12, 1, 4), False)):
        ledger = SimpleNamespace(segments=[Segment(SIGMA, SIZE, 12)], checks=[known])
        checking.model = SimpleNamespace(optimizer=SimpleNamespace(ledger=ledger))
        if fits:
            TrialBudget._check_draws(checking)
        else:
            with pytest.raises(dp.NotPrivateError, match="released 4 releases earlier"):
                TrialBudget._check_draws(checking)


def test_marks_come_from_the_key_and_from_nothing_else():
    placed = [SAMPLING.place(N, step, draws.new_key(1)) for step in range(200)]
    marks = np.concatenate([p[p >= N] for p in placed]) - N
    assert set(marks) == {0, 1}
    assert abs(marks.mean() - 0.5) < 5 * 0.5 / math.sqrt(len(marks))
    weighted = (*data(), np.linspace(0.5, 2, N).astype(np.float32))
    for (_, _, w), rows in zip(
        dp.poisson_batches(weighted, SAMPLING, key=draws.new_key(1)).take(5), placed
    ):
        np.testing.assert_array_equal(np.signbit(w.numpy()), rows.ravel() == N + 1)


def _from_config(optimizer, variable, folder):
    del variable, folder
    return type(optimizer).from_config(optimizer.get_config())


def _restored(optimizer, variable, folder):
    new = dp.DPSGD(1.0, SIGMA, learning_rate=0.1, expected_batch_size=SIZE)
    new.build([variable])
    path = tf.train.Checkpoint(optimizer=optimizer).write(f"{folder}/state")
    tf.train.Checkpoint(optimizer=new).read(path).assert_existing_objects_matched()
    return new


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("successor", [_from_config, _restored])
def test_an_optimizer_that_goes_on_knows_the_batches_of_the_one_before(successor, tmp_path):
    kept = list(dp.poisson_batches(data(), SAMPLING).take(4))
    first = Run(expected_batch_size=SIZE)
    assert first(kept).checks == [BatchChecks(checked=4)]
    second = Run()
    second.optimizer = successor(first.optimizer, second.variable, tmp_path)
    for x, y, weights in [*kept, *dp.poisson_batches(data(), SAMPLING).take(2)]:
        second.step(x, y, weights)
    ledger = second.optimizer.ledger
    assert ledger.segments == [(SIGMA, SIZE, 10)]
    assert ledger.checks == [BatchChecks(checked=10, repeated=4, nearest=4)]
    spent = SAMPLING.epsilon_spent(ledger, N, DELTA)
    assert spent == pytest.approx(counted_epsilon(6, 4), rel=1e-9)
    # One that begins anew has an epsilon of its own, in which each of them is a first release.
    third = Run(expected_batch_size=SIZE)
    assert third(kept).checks == [BatchChecks(checked=4)]


def test_a_loaded_model_knows_the_batches_that_trained_it(tmp_path):
    x, y = catalogue.data()
    x, y = np.tile(x, [7, 1])[:N], np.tile(y, 7)[:N]
    model = catalogue.mlp()
    optimizer = dp.DPSGD(1.0, SIGMA, learning_rate=0.1, expected_batch_size=SIZE)
    model.compile(optimizer, loss=catalogue.loss())
    drawn = dp.poisson_batches((x, y), SAMPLING).take(4).cache()
    model.fit(drawn, verbose=0)
    model.save(f"{tmp_path}/model.keras")
    del model, optimizer
    loaded = tf.keras.models.load_model(f"{tmp_path}/model.keras")
    loaded.fit(drawn, verbose=0)
    ledger = loaded.optimizer.ledger
    assert ledger.checks == [BatchChecks(checked=8, repeated=4, nearest=4)]
    spent = SAMPLING.epsilon_spent(ledger, N, DELTA)
    assert epsilon(SIGMA, Q, 8, DELTA) < spent == pytest.approx(counted_epsilon(4, 4), rel=1e-9)


@pytest.mark.slow_on(2)
def test_optimizers_that_only_inspect_displace_no_batches():
    """After 17 new models were validated, ε of one that trained on was that of new batches."""
    kept = list(dp.poisson_batches(data(), SAMPLING).take(2))
    first, second = Run(expected_batch_size=SIZE), Run()
    first(kept)
    remembered = list(draw_numbers._OF_PROCESS)
    inspecting = Run(expected_batch_size=SIZE)
    inspecting.optimizer = inspecting.optimizer.copy_to_inspect()
    inspecting.step.get_concrete_function(*map(tf.TensorSpec.from_tensor, kept[0]))
    assert list(draw_numbers._OF_PROCESS) == remembered
    second.optimizer = type(first.optimizer).from_config(first.optimizer.get_config())
    for batch in kept:
        second.step(*batch)
    assert second.optimizer.ledger.checks == [BatchChecks(checked=4, repeated=2, nearest=2)]


def numbered(number, is_known=True):
    numbers = tf.constant([number], tf.int64)
    return draw_numbers.Number(numbers, tf.constant([is_known]), tf.constant(False))


def test_batches_without_a_number_displace_none():
    """Batches too small to be told apart would make room for each other, and forget the others."""
    seen = draw_numbers.SeenDraws(is_remembered=False)
    one_bucket = [5 + 8192 * k for k in range(16)]
    for number in one_bucket:
        seen.add(numbered(number), tf.constant(True))
    unknown = 5 + 8192 * 16
    for number in (unknown, unknown, unknown + 8192):
        draw = seen.add(numbered(number, is_known=False), tf.constant(True))
        assert not draw.checked and draw.distance == 0
    for number in one_bucket:
        draw = seen.add(numbered(number), tf.constant(True))
        assert draw.checked and draw.distance == 19


def test_numbers_of_several_optimizers_keep_their_distance_and_the_newest_of_each_bucket():
    def with_releases(numbers):
        seen = draw_numbers.SeenDraws()
        for number in numbers:
            seen.add(numbered(number), tf.constant(True))
        return seen

    # Seventeen numbers of one bucket, of which one has no place; the last two are known to both.
    one_bucket = [5 + 8192 * k for k in range(1, 18)]
    several = [with_releases(one_bucket), with_releases([7, *one_bucket[-2:]])]
    draw_numbers._OF_PROCESS.clear()
    draw_numbers._OF_PROCESS.extend(several)
    following = draw_numbers.SeenDraws(SimpleNamespace(num_releases=1))
    for number, distance in ((7, 3), (one_bucket[-1], 2), (one_bucket[1], 18), (one_bucket[0], 0)):
        draw = following.add(numbered(number), tf.constant(True))
        assert draw.distance == distance


@pytest.mark.slow_on(2)
def test_numbers_outlive_many_later_optimizers(monkeypatch):
    """After 17 others, ε of an optimizer that went on was that of new batches: 3.4 for 12.5."""
    monkeypatch.setattr(draw_numbers, "_REMEMBERED", 4)
    draw_numbers._OF_PROCESS.clear()
    for number in range(2 * draw_numbers._REMEMBERED):
        seen = draw_numbers.SeenDraws()
        for own in (number, number + 1000):
            tf.function(lambda s=seen, n=own: s.add(numbered(n), tf.constant(True)).distance)()
    assert len(draw_numbers._OF_PROCESS) == draw_numbers._REMEMBERED + 1
    following = draw_numbers.SeenDraws(SimpleNamespace(num_releases=1))
    for number, distance in ((0, 2), (1000, 2), (3, 4), (7, 5), (8, 0)):
        assert following.add(numbered(number), tf.constant(True)).distance == distance


@pytest.mark.slow_on(2)
def test_batches_without_their_weights_have_no_epsilon_by_their_sampling():
    """Their padding contributes: ε by the sampling would be 2.8 where it is 12."""
    batches = list(dp.poisson_batches(data(), SAMPLING))[:6]
    with_weights, without = Run(expected_batch_size=SIZE), Run(expected_batch_size=SIZE)
    for x, y, weights in batches:
        with_weights.step(x, y, weights)
        without.step(x, y, tf.ones_like(weights))
    assert with_weights.optimizer.batches_seen == (6, 6)
    assert without.optimizer.batches_seen == (6, 0)
    assert SAMPLING.epsilon_spent(with_weights.optimizer, N, DELTA) > 0
    match = "6 of 6 batches reached the optimizer without the sample weights"
    with pytest.raises(dp.NotPrivateError, match=match):
        SAMPLING.epsilon_spent(without.optimizer, N, DELTA)
    with pytest.raises(dp.NotPrivateError, match=match):
        privacy_statement(without.optimizer, N, DELTA, sampling=SAMPLING)
    assert dp.privacy_statement(without.optimizer, N, DELTA, sampling="poisson")


@pytest.mark.slow_on(2)
def test_a_map_that_drops_the_weights_is_refused_by_fit_and_one_that_keeps_them_not(monkeypatch):
    sampling = dp.PoissonSampling.for_batch_size(8, 40, steps=16)
    x, y = catalogue.data()
    batches = dp.poisson_batches((np.tile(x, [2, 1])[:40], np.tile(y, 2)[:40]), sampling)
    monitor = dp.PrivacyMonitor(40, DELTA, sampling=sampling)

    def fit(dataset):
        model = catalogue.mlp()
        optimizer = dp.DPSGD(1.0, SIGMA, learning_rate=0.1, expected_batch_size=8.0)
        model.compile(optimizer, catalogue.loss())
        model.fit(dataset, steps_per_epoch=8, verbose=0, shuffle=False, callbacks=[monitor])

    fit(batches.map(lambda x, y, weights: (-x, y, 2 * weights)))
    with pytest.raises(dp.NotPrivateError, match="8 of 8 batches reached"):
        fit(batches.map(lambda x, y, weights: (x, y)))
    # Several replicas, say, see no marks, but the batches are too large.
    monkeypatch.setattr(dp.PoissonSampling, "_refuse_lost_marks", lambda *args: None)
    with pytest.raises(
        dp.NotPrivateError, match="more examples than the 8 that the sampling draws"
    ):
        fit(batches.map(lambda x, y, weights: (x, y)))


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("in_fit", [True, False])
def test_targets_that_were_rounded_are_no_marks(in_fit):
    """`np.round` makes -0.0 of small negative numbers, which looked like marks: ε was proven."""
    x = np.random.default_rng(0).normal(size=[N, 4]).astype("float32")
    y = np.round(x[:, 0], 1)
    assert (np.signbit(y) & (y == 0)).sum() > N // 100
    batches = dp.poisson_batches((x, y), SAMPLING).map(lambda x, y, weights: (x, y))
    model = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(1)])
    optimizer = dp.DPSGD(1.0, SIGMA, learning_rate=0.01, expected_batch_size=SIZE)
    model.compile(optimizer, "mse")
    if in_fit:
        model.fit(batches, steps_per_epoch=4, verbose=0, shuffle=False)
    else:

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = (tf.squeeze(model(x), 1) - y) ** 2
            optimizer.minimize(loss, model.trainable_variables, tape)

        for x, y in batches.take(4):
            step(x, y)
    assert optimizer.batches_seen == (4, 0)
    with pytest.raises(dp.NotPrivateError, match="4 of 4 batches reached"):
        SAMPLING.epsilon_spent(optimizer, N, DELTA)


def test_weights_that_are_an_input_of_the_model_show_their_marks():
    inputs = tf.keras.Input([2]), tf.keras.Input([1])
    outputs = tf.keras.layers.Dense(1)(inputs[0]) * inputs[1]
    model = tf.keras.Model(inputs, outputs)
    optimizer = dp.DPSGD(1.0, SIGMA, learning_rate=0.01, expected_batch_size=SIZE)
    model.compile(optimizer, tf.keras.losses.MeanAbsoluteError())
    x = np.random.default_rng(0).normal(size=[N, 2]).astype("float32")
    batches = dp.poisson_batches((x, np.zeros(N, "float32")), SAMPLING)
    batches = batches.map(lambda x, y, w: ((x, w[:, tf.newaxis]), y))
    model.fit(batches, steps_per_epoch=4, verbose=0, shuffle=False)
    assert optimizer.batches_seen == (4, 4)
    assert SAMPLING.epsilon_spent(optimizer, N, DELTA) > 0


@pytest.mark.slow_on(2)
def test_weights_of_tokens_show_their_marks_in_a_step_of_ones_own():
    run = Run(expected_batch_size=SIZE)

    @tf.function
    def step(x, y, weights):
        with tf.GradientTape() as tape:
            outputs = tf.linalg.matvec(x, run.variable) - tf.cast(y, tf.float32)
            loss = tf.reduce_mean(outputs[:, None] ** 2 * weights, axis=1)
        run.optimizer.minimize(loss, [run.variable], tape)

    for x, y, weights in dp.poisson_batches(data(), SAMPLING).take(4):
        step(x, y, weights[:, None] * [[1.0, 0.0, 2.0]])
    assert run.optimizer.batches_seen == (4, 4)


@pytest.mark.slow_on(2)
def test_batches_too_small_to_show_marks_are_not_missed():
    sampling = dp.PoissonSampling(0.1, 10, 100)
    run = Run(expected_batch_size=sampling.expected_batch_size(N))
    for x, y, weights in list(dp.poisson_batches(data(), sampling))[:5]:
        run.step(x, y, tf.ones_like(weights))
    assert run.optimizer.batches_seen == (5, 0)
    assert sampling.epsilon_spent(run.optimizer, N, DELTA) > 0
