"""Plans with correlated noise: the best strategy, and runs that go on after a kill."""

import collections
import json
import random
import shutil
import stat
import time
import types

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import killable_plan
from tests.helpers.crash_injection import CrashInjector
from tests.helpers.gaussianity import assert_gaussian
from tests.helpers.strategies import noise_matrix, tree_nodes, whitened
from tf_adaptive_dp.accounting import (
    BandedNoise,
    IndependentNoise,
    Releases,
    ToeplitzNoise,
    TreeNoise,
    noise_strategies,
)
from tf_adaptive_dp.accounting.noise_strategies import prefix_error
from tf_adaptive_dp.callbacks.run_directory import RunDirectory
from tf_adaptive_dp.durable import key_file
from tf_adaptive_dp.durable.key_file import KeyFile
from tf_adaptive_dp.mechanism import draw_numbers
from tf_adaptive_dp.mechanism.correlated_noise import _recurrence
from tf_adaptive_dp.mechanism.noise import normal_numbers
from tf_adaptive_dp.plan_refusals import check_optimizer
from tf_adaptive_dp.sampling import CyclicPoissonSampling, FixedOrder, draws
from tf_adaptive_dp.wording import format_epsilon

# The mechanism and its optimizers have quick tests with both versions of Keras.
pytestmark = pytest.mark.slow_on(2)

N, B, EPOCHS, BANDS = 80, 4, 2, 3
PASS = N // B
SIZES = [(0, 12), (16, 20)]  # the kernel and the bias in the vector of all numbers
# Trees that end with a pass, within one, and after all steps.
TREES = (TreeNoise(PASS), TreeNoise(7), TreeNoise(PASS * EPOCHS))
each = pytest.mark.parametrize("noise", [BandedNoise(BANDS), *TREES], ids=repr)


def plan_of(**kwargs):
    arguments = {"noise_multiplier": 1.0, "noise": BandedNoise(BANDS), **kwargs}
    return dp.PrivacyPlan(
        **{"delta": 1e-3, "num_examples": N, "batch_size": B, "epochs": EPOCHS, **arguments},
        accountant="rdp",
    )


def key_of(keys, step):
    return tf.constant([key for first, key in keys if first <= step][-1], tf.int64)


def of_variables(w):
    return np.concatenate([w[:, a:b] for a, b in SIZES], axis=1)


def expected_noise(keys, steps, noise):
    """[steps, 16], w: from the keys of a run, by dense algebra."""
    draws = [(t, t + 1) for t in range(steps)]
    if isinstance(noise, TreeNoise):  # one of each node, at the step that finishes it
        draws = [(last, 32 * last + level + 1) for _, last, level in tree_nodes(noise, steps)]
    z = [normal_numbers(32, key_of(keys, t), tf.constant(n, tf.int64)) for t, n in draws]
    return of_variables(noise_matrix(noise, steps) @ np.stack(z).astype("float64"))


def noise_of_one_process(keys, steps, noise):
    """[steps, 16], w: from the keys of a run, as a process draws it that never ends."""
    recurrence = _recurrence(noise)
    step = tf.function(lambda key, t, state: recurrence.step(32, key, t, state))
    state, found = tf.zeros([recurrence.rows, 32]), []
    for t in range(steps):
        w, state = step(key_of(keys, t), tf.constant(t, tf.int64), state)
        found.append(w.numpy())
    return of_variables(np.stack(found))


class StopAt(tf.keras.callbacks.Callback):
    """Interrupts the training after some batches, as Ctrl-C would."""

    def __init__(self, batches):
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def run(folder, stop_at=10**9, plan=None, noted="releases", others=()):
    """Trains in `folder`, or goes on; all examples have weight 0, so noise is what is released."""
    plan = plan_of() if plan is None else plan
    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(4)])
    optimizer = plan.optimizer(dp.DPSGD, learning_rate=0.1)
    killable_plan.record_values(optimizer, folder / noted)
    model.compile(optimizer, "mse")
    data = np.ones([N, 3], "float32"), np.zeros([N, 4], "float32"), np.zeros(N, "float32")
    plan.fit(
        model, *data, directory=folder / "run", callbacks=[StopAt(stop_at), *others], verbose=0
    )
    return optimizer


def releases(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow_after(1)
@each
def test_an_interrupted_run_goes_on_with_the_noise_of_its_past(tmp_path, noise):
    keys = tmp_path / "run" / "noise.key"
    for stop_at in (7, 5):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, stop_at, plan_of(noise=noise))
        assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    shutil.copy(keys, tmp_path / "kept")
    before = releases(tmp_path / "releases")
    held = json.loads((tmp_path / "kept").read_bytes()[:-10])
    with pytest.warns(UserWarning, match="releases? were not in the checkpoint"):
        optimizer = run(tmp_path, plan=plan_of(noise=noise))
    assert not keys.exists()  # the run is finished
    assert optimizer.ledger.num_releases == N // B * EPOCHS
    numbers = [number for number, _ in releases(tmp_path / "releases")]
    assert numbers == sorted(set(numbers))  # no number, and so no noise, comes twice
    # All of the noise is that of one matrix, across the interruptions.
    steps = numbers[len(before) - 1] + 1
    expected = expected_noise(held["noise_keys"], steps, noise)
    undisturbed = noise_of_one_process(held["noise_keys"], steps, noise)
    for number, values in before:
        np.testing.assert_allclose(values, expected[number] / B, atol=1e-5)
        np.testing.assert_array_equal(values, undisturbed[number] / B)
    assert len(held["noise_keys"]) == 2 and len({key for _, key in held["noise_keys"]}) == 2


class StopBefore(tf.keras.callbacks.Callback):
    """Interrupts the training between two epochs, when the first of them is saved."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise KeyboardInterrupt


def learn(folder, noise, stop_before=None, epochs=3, parts=1, make=dp.DPSGD):
    """The weights of a model that learns from data, with real gradients and noise."""
    plan = plan_of(noise=noise, epochs=epochs)
    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(4)])
    model.set_weights([np.full([3, 4], 0.5, "float32"), np.zeros(4, "float32")])
    optimizer = plan.optimizer(make, learning_rate=0.1, gradient_accumulation_steps=parts)
    model.compile(optimizer, "mse")
    random_numbers = np.random.default_rng(0)
    data = [random_numbers.normal(size=[N, n]).astype("float32") for n in (3, 4)]
    callbacks = [] if stop_before is None else [StopBefore(stop_before)]
    plan.fit(model, *data, directory=folder, callbacks=callbacks, verbose=0)
    return model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, noise, parts",
    [
        (dp.DPSGD, TreeNoise(7), 1),
        (dp.DPSGD, BandedNoise(BANDS), 1),
        (dp.ADADP, BandedNoise(BANDS), 1),
        (dp.DPSGD, TreeNoise(60), 2),
        (dp.DPSGD, BandedNoise(BANDS), 2),
        (dp.ADADP, BandedNoise(BANDS), 2),
    ],
    ids=repr,
)
def test_an_interrupted_run_ends_at_the_weights_of_an_uninterrupted_one(
    tmp_path, monkeypatch, make, noise, parts
):
    # Processes have keys of their own, so without this the noise would be another one. The batches
    # are the same, too, so none may know what another released, as in a process of its own.
    same = types.SimpleNamespace(urandom=lambda size: bytes(range(1, size + 1)))
    monkeypatch.setattr(key_file, "os", same)
    monkeypatch.setattr(draws, "new_key", lambda: bytes(32))
    monkeypatch.setattr(draw_numbers, "_OF_PROCESS", collections.deque(maxlen=0))
    whole = learn(tmp_path / "whole", noise, parts=parts, make=make)
    for stops in ([2], [1, 2]):
        folder = tmp_path / "-".join(map(str, stops))
        for epoch in stops:
            with pytest.raises(KeyboardInterrupt):
                learn(folder, noise, epoch, parts=parts, make=make)
        for one, other in zip(whole, learn(folder, noise, parts=parts, make=make)):
            np.testing.assert_array_equal(one, other)


class AtEnd(tf.keras.callbacks.Callback):
    """Notes at the end of each epoch, before it is saved, whether a file exists."""

    def __init__(self, path):
        super().__init__()
        self.path, self.exists = path, []

    def on_epoch_end(self, epoch, logs=None):
        self.exists.append(self.path.exists())


def test_the_keys_are_deleted_after_the_last_release(tmp_path):
    keys = AtEnd(tmp_path / "run" / "noise.key")
    run(tmp_path, others=[keys])
    assert keys.exists == [True, False] and not (tmp_path / "run" / "noise.key").exists()


@pytest.mark.slow
def test_the_keys_are_deleted_after_the_last_call_of_several_steps(tmp_path):
    def fit(calls):
        plan = plan_of()
        model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(4)])
        model.compile(plan.optimizer(dp.DPSGD), "mse", steps_per_execution=calls)
        data = np.ones([N, 3], "float32"), np.zeros([N, 4], "float32")
        plan.fit(model, *data, directory=tmp_path / "run", verbose=0)
        return model.optimizer.ledger.num_releases

    with pytest.raises(ValueError, match="`steps_per_execution` must divide the steps of an epoch"):
        fit(N // B - 1)
    assert fit(N // B // 2) == N // B * EPOCHS
    assert not (tmp_path / "run" / "noise.key").exists()
    assert fit(N // B // 2) == N // B * EPOCHS  # restored


def test_a_finished_run_that_was_killed_before_it_was_closed_loses_its_keys(tmp_path):
    arguments = {"settings": {"epsilon": 1.0}, "steps": 10, "keeps_keys": True}
    killed = RunDirectory(tmp_path, **arguments)
    killed.log._file.write([(1.0, 4.0, 9)], None)  # as `announce` does before a step
    killed.log.close()
    unfinished = RunDirectory(tmp_path, **arguments)
    assert len(unfinished.keys.keys) == 2
    unfinished.log._file.write([(1.0, 4.0, 10)], None)
    unfinished.log.close()  # a kill closes files, and calls nothing
    (tmp_path / "noise.new").write_bytes((tmp_path / "noise.key").read_bytes())
    RunDirectory(tmp_path, **arguments).close()
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json", "releases.log"}


def test_keys_that_were_half_written_are_deleted_with_the_others(tmp_path):
    file = KeyFile(tmp_path / "noise.key", 0)
    (tmp_path / "noise.new").write_bytes(b"half of it")
    file.delete()
    assert not list(tmp_path.iterdir())


def test_a_run_without_its_keys_is_not_continued(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, 5)
    keys = tmp_path / "run" / "noise.key"
    content = keys.read_bytes()
    keys.unlink()
    with pytest.raises(ValueError, match="keys of this run's noise are missing"):
        run(tmp_path)
    keys.write_bytes(content.replace(b"groups", b"groupz"))
    with pytest.raises(ValueError, match="keys of the run's noise are damaged"):
        run(tmp_path)
    assert len(releases(tmp_path / "releases")) == 5
    keys.write_bytes(content)
    with pytest.raises(ValueError, match="a run of another plan"):
        run(tmp_path, plan=plan_of(noise=BandedNoise(4)))
    with pytest.raises(ValueError, match="a run of another plan"):
        run(tmp_path, plan=plan_of(noise=ToeplitzNoise((3, 2, 1))))
    with pytest.raises(ValueError, match="a run of another plan"):
        run(tmp_path, plan=plan_of(noise=TreeNoise(7)))


def test_a_checkpoint_alone_is_not_continued(tmp_path):
    optimizer = run(tmp_path)
    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(4)])
    model.compile(type(optimizer).from_config(optimizer.get_config()), "mse")
    data = np.ones([8, 3], "float32"), np.zeros([8, 4], "float32")
    with pytest.raises(dp.NotPrivateError, match="with the noise of 0 known"):
        model.fit(*data, batch_size=4, verbose=0)


@pytest.mark.slow
def test_copies_of_a_directory_draw_noise_of_their_own(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, 6)
    shutil.copytree(tmp_path / "run", tmp_path / "copy" / "run")
    after = []
    for folder in (tmp_path, tmp_path / "copy"):
        with pytest.raises(KeyboardInterrupt), pytest.warns(UserWarning):
            run(folder, 2, noted="later")
        after.append(dict(releases(folder / "later")))
    both = set(after[0]) & set(after[1])
    assert both and all(not np.allclose(after[0][t], after[1][t], atol=1e-2) for t in both)


def test_the_keys_are_shown_nowhere(tmp_path):
    file = KeyFile(tmp_path / "noise.key", 0)
    again = KeyFile(tmp_path / "noise.key", 5)
    assert again.groups == file.groups and again.keys[0] == file.keys[0]
    assert [first for first, _ in again.keys] == [0, 5]
    assert str(file.keys[0][1]) not in repr(file) and file.groups.hex() not in repr(file)
    with pytest.raises(ValueError, match="keys of this run's noise are missing"):
        KeyFile(tmp_path / "other.key", 5)
    again.delete()
    assert not list(tmp_path.iterdir())


def test_a_plan_has_the_sampling_and_the_noise_of_its_bands():
    plan = plan_of()
    assert isinstance(plan.sampling, CyclicPoissonSampling)
    assert plan.sampling.num_groups == BANDS and plan.steps == N // B * EPOCHS
    for make in (dp.DPAdam, dp.ADADP):
        assert plan.optimizer(make).noise == BandedNoise(BANDS)
    assert "drawn from 3 groups" in plan.describe() and "BandedNoise(bands=3)" in repr(plan)
    with pytest.raises(ValueError, match="`noise` must be IndependentNoise"):
        plan.optimizer(dp.DPAdamWOSM)
    with pytest.raises(TypeError, match="Received: noise"):
        plan.optimizer(dp.DPSGD, noise=BandedNoise(2))
    other = dp.DPSGD(1.0, 1.0, expected_batch_size=plan.expected_batch_size)
    with pytest.raises(ValueError, match="noise strategy of the plan"):
        check_optimizer(plan, other)
    assert all(offer.signal_to_noise > 0 for offer in plan.recommend([B], epochs=[2]))


def test_the_budget_is_kept_with_the_noise_found_for_it():
    arguments = {"epsilon": 3.0, "delta": 1e-5, "num_examples": 5_000, "batch_size": 50}
    plan = dp.PrivacyPlan(**arguments, epochs=4, accountant="rdp", noise=BandedNoise(8))
    ledger = dp.accounting.Releases(
        [(plan.noise_multiplier, 50.0, plan.steps)], noise=BandedNoise(8)
    )
    spent = plan.sampling.epsilon_spent(ledger, 5_000, 1e-5)
    assert 0.99 * 3.0 < spent <= 3.0
    assert plan._epsilon_after(plan.steps) == pytest.approx(spent)


ARGUMENTS = {"delta": 1e-5, "num_examples": 5_000, "batch_size": 50, "epochs": 4}


def test_independent_noise_is_best_for_a_small_budget():
    small = dp.PrivacyPlan(0.3, **ARGUMENTS, accountant="rdp", noise="best")
    assert small.noise == IndependentNoise() and isinstance(small.sampling, dp.PoissonSampling)


@pytest.mark.slow
def test_bands_are_best_for_a_larger_budget():
    large = dp.PrivacyPlan(4.0, **ARGUMENTS, accountant="rdp", noise="best")
    assert large.noise.bands > 1 and large.sampling.num_groups == large.noise.bands


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.3, 2.0, 6.0])
def test_the_best_noise_has_the_least_noise_in_sums(epsilon):
    arguments = {"epsilon": epsilon, "delta": 1e-5, "num_examples": 5_000, "batch_size": 100}
    plan = dp.PrivacyPlan(**arguments, epochs=4, accountant="rdp", noise="best")
    errors = {}
    for noise in (IndependentNoise(), *map(BandedNoise, (2, 4, 8, 16, 32))):
        other = dp.PrivacyPlan(**arguments, epochs=4, accountant="rdp", noise=noise)
        errors[noise] = other.noise_multiplier * prefix_error(noise, other.steps)
    assert errors[plan.noise] <= min(errors.values()) * 1.01


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_examples, batch_size, epochs, epsilon, bands, expected",
    [
        (60_000, 200, 20, 0.5, 1, 1.0),
        (60_000, 200, 20, 1.0, 2, 0.98),
        (60_000, 200, 20, 3.0, 16, 0.72),
        (60_000, 200, 20, 8.0, 32, 0.50),
        (60_000, 512, 40, 3.0, 4, 0.96),
        (25_000, 64, 32, 8.0, 32, 0.52),
    ],
)
def test_the_table_of_the_documentation_is_right(
    num_examples, batch_size, epochs, epsilon, bands, expected
):
    arguments = {"num_examples": num_examples, "batch_size": batch_size, "epochs": epochs}
    best, plain = (
        dp.PrivacyPlan(epsilon, delta=1e-5, **arguments, accountant="rdp", noise=noise)
        for noise in ("best", None)
    )
    assert best.noise.bands == bands
    errors = [p.noise_multiplier * prefix_error(p.noise, p.steps) for p in (best, plain)]
    assert errors[0] / errors[1] == pytest.approx(expected, abs=0.006)


def test_the_best_noise_needs_a_budget():
    with pytest.raises(ValueError, match="is the best strategy for a given `epsilon`"):
        plan_of(noise="best")
    with pytest.raises(TypeError, match="`noise` must be"):
        plan_of(noise="banded")
    with pytest.raises(ValueError, match="larger than the data"):
        plan_of(noise=BandedNoise(40))


@pytest.mark.slow
@pytest.mark.parametrize("noise", [BandedNoise(3), TreeNoise(10), TreeNoise(50)], ids=repr)
def test_a_run_that_is_killed_goes_on_with_the_noise_of_its_past(tmp_path, noise):
    kills, moments = 4, random.Random(2)
    steps = killable_plan.EPOCHS * killable_plan.NUM_EXAMPLES // 4

    def lines(name):
        path = tmp_path / name
        return path.read_text().splitlines() if path.exists() else []

    with CrashInjector("killable_plan") as injector:
        for kill in range(kills + 1):
            enough = len(lines("releases")) + moments.randint(3, 9)

            def moment(enough=enough):
                end = time.monotonic() + 60
                while len(lines("releases")) < enough and time.monotonic() < end:
                    time.sleep(0.001)
                time.sleep(moments.uniform(0, 0.02))

            job = {"folder": str(tmp_path), "noise": noise_strategies.serialize(noise)}
            code = injector.run(job, moment if kill < kills else None)
            assert code == (-9 if kill < kills else 0), f"run {kill} ended with {code}"
    released = [json.loads(line) for line in lines("releases")]
    numbers = [number for number, _ in released]
    assert numbers == sorted(set(numbers)) and len(numbers) > steps - 3 * kills
    keys = json.loads(lines("keys")[-1][:-9])["noise_keys"]
    assert len(keys) > 2
    expected = expected_noise(keys, steps, noise)
    undisturbed = noise_of_one_process(keys, steps, noise)
    for number, values in released:
        np.testing.assert_allclose(values, expected[number] / 4, atol=1e-5)
        np.testing.assert_array_equal(values, undisturbed[number] / 4)
    segments, _, _ = json.loads(lines("end")[-1])
    assert segments == [[1.0, 4.0, steps]]
    assert not (tmp_path / "run" / "noise.key").exists()


def test_a_plan_with_trees_passes_over_the_data_in_one_order():
    plan = plan_of(num_examples=N + 3, noise=TreeNoise(PASS))
    assert plan.sampling == FixedOrder(B, steps=PASS * EPOCHS) and plan.steps_per_epoch == PASS
    assert plan.optimizer(dp.DPAdam).noise == TreeNoise(PASS)
    assert "2 passes of 20 batches, all in one order" in plan.describe()
    assert "; 3 examples are in none" in plan.describe() and "noise=TreeNoise(" in repr(plan)
    assert "Poisson" not in plan.describe()
    x = np.arange(N + 3, dtype="float32")
    batches = [x.ravel() for x, *_ in plan.batches(x[:, None], x).as_numpy_iterator()]
    first, second = np.split(np.stack(batches), 2)
    np.testing.assert_array_equal(first, second)
    assert len(np.unique(first)) == N
    assert all(offer.signal_to_noise > 0 for offer in plan.recommend())


@pytest.mark.slow
def test_what_a_plan_with_trees_says_of_its_noise_is_that_at_the_same_epsilon():
    plan = dp.PrivacyPlan(
        noise_multiplier=1.0, delta=1e-5, num_examples=60_000, batch_size=256, epochs=5,
        noise=TreeNoise(234),
    )  # fmt: skip
    assert "cumulative noise: 0.33 times that of independent noise" in plan.describe()


@pytest.mark.parametrize(
    "refused, message",
    [
        ({"noise": TreeNoise(4), "batch_size": N + 1}, "`batch_size` must be at most"),
        (
            {"noise": TreeNoise(4), "user_ids": [0] * N, "examples_per_user": 2},
            "proven for examples as the unit",
        ),
    ],
)
def test_what_is_not_accounted_for_with_trees_is_refused(refused, message):
    with pytest.raises(ValueError, match=message):
        plan_of(**refused)


def test_an_optimizer_with_other_trees_or_rules_is_not_one_of_the_plan():
    plan = plan_of(noise=TreeNoise(7))
    for make in (dp.ADADP, dp.UntunedSGD):
        with pytest.raises(ValueError, match="`noise` must be IndependentNoise"):
            plan.optimizer(make)
    other = plan_of(noise=TreeNoise(8)).optimizer(dp.DPSGD)
    with pytest.raises(ValueError, match="noise strategy of the plan"):
        check_optimizer(plan, other)
    poisson = dp.PoissonSampling.for_batch_size(B, N, PASS)
    with pytest.raises(ValueError, match="noise of these releases is correlated"):
        poisson.epsilon_spent(dp.accounting.Releases([(1.0, B, 1)], noise=plan.noise), N, 1e-3)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("passes", [1, 3])
def test_the_budget_of_trees_is_that_of_dp_accounting(accountant, passes):
    """One tree of a pass is a Gaussian mechanism for each of its levels, and no more."""
    arguments = {"delta": 1e-5, "num_examples": 5_000, "batch_size": 50, "epochs": passes}
    plan = dp.PrivacyPlan(3.0, **arguments, accountant=accountant, noise=TreeNoise(100))

    def spent(sigma):
        # PLD knows no trees, so they are composed by hand.
        event = dp_accounting.GaussianDpEvent(sigma)
        if accountant == "pld":
            made = dp_accounting.pld.PLDAccountant().compose(event, 7 * passes)
        else:
            special = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
            tree = dp_accounting.SingleEpochTreeAggregationDpEvent(sigma, 100)
            made = dp_accounting.rdp.RdpAccountant(neighboring_relation=special)
            made.compose(tree, passes)
        return made.get_epsilon(1e-5)

    assert spent(plan.noise_multiplier) <= 3.0 * (1 + 1e-3) < spent(0.99 * plan.noise_multiplier)
    assert plan._epsilon_after(plan.steps) == pytest.approx(spent(plan.noise_multiplier), rel=1e-3)
    assert plan._epsilon_after(plan.steps) <= 3.0


@pytest.mark.parametrize("noise", TREES, ids=repr)
def test_epsilon_of_a_plan_with_trees_is_that_of_each_part_of_the_run(noise):
    plan = plan_of(epsilon=4.0, noise_multiplier=None, noise=noise)
    spent = []
    for steps in range(1, plan.steps + 1):  # in the middle of a pass and of a tree, too
        parts = Releases([(plan.noise_multiplier, float(B), steps)], noise=noise)
        expected = FixedOrder(B, plan.steps).epsilon_spent(parts, N, 1e-3)
        assert plan._epsilon_after(steps) == expected
        spent.append(expected)
    assert spent == sorted(spent) and 0.99 * 4.0 < spent[-1] <= 4.0


def big_run(folder, noise, stop_at=10**9, **budget):
    """Trains with a budget, with weights of 0; returns the plan, the ledger and the values."""
    plan = dp.PrivacyPlan(
        **{"delta": 1e-3, "num_examples": 24, "batch_size": 4, "epochs": 2, **budget},
        noise=noise,
        accountant="rdp",
    )
    model = tf.keras.Sequential([tf.keras.Input([70]), tf.keras.layers.Dense(70, use_bias=False)])
    optimizer = plan.optimizer(dp.DPSGD, l2_norm_clip=0.5, learning_rate=0.1)
    killable_plan.record_values(optimizer, folder / "releases")
    model.compile(optimizer, "mse")
    data = np.ones([24, 70], "float32"), np.ones([24, 70], "float32"), np.zeros(24, "float32")
    plan.fit(model, *data, directory=folder / "run", callbacks=[StopAt(stop_at)], verbose=0)
    return plan, model, np.array([values for _, values in releases(folder / "releases")])


@pytest.mark.parametrize("noise", [TreeNoise(6), BandedNoise(3)], ids=repr)
def test_the_noise_of_a_run_has_the_scale_of_the_plan_and_its_ledger_the_epsilon(tmp_path, noise):
    plan, model, values = big_run(tmp_path, noise, epsilon=3.0)
    assert values.shape == (12, 4_900)
    assert_gaussian(whitened(noise, values * 4), plan.noise_multiplier * 0.5)
    ledger = model.optimizer.ledger
    assert ledger.segments == [(plan.noise_multiplier, 4.0, 12)] and ledger.noise == noise
    assert plan.sampling.epsilon_spent(ledger, 24, 1e-3) == plan._epsilon_after(12) <= 3.0
    assert f"epsilon = {format_epsilon(plan._epsilon_after(12))} " in plan.statement()


def test_the_statement_and_the_report_say_what_trees_are(tmp_path):
    plan, _, _ = big_run(tmp_path, TreeNoise(6), noise_multiplier=2.0)
    text = " ".join(plan.statement().split())
    assert "one example is blank or not" in text
    assert "drawn in one order that every pass over the data repeats" in text
    assert "noise multiplier is that of a node of the trees, which have 6 steps each" in text
    report = (tmp_path / "run" / "report.md").read_text()
    assert "| batches verified to come in their order | 0 of 12 |" in report
    settings = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert settings["noise"] == {"steps_per_tree": 6}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("stop_at", [9, 3, 20, 26])
def test_a_resumed_run_with_trees_keeps_the_order_of_its_batches(tmp_path, stop_at):
    """What is left of a release without its noise is the clipped sum of the batch of its step."""
    noise = TreeNoise(7)
    generator = np.random.default_rng(0)
    x, y = (generator.normal(size=[N, n]).astype("float32") for n in (3, 4))
    for stops in (stop_at, 6):
        plan = plan_of(noise=noise)
        model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(4)])
        model.set_weights([np.zeros([3, 4], "float32"), np.zeros(4, "float32")])
        optimizer = plan.optimizer(dp.DPSGD, learning_rate=0.0)
        killable_plan.record_values(optimizer, tmp_path / "releases")
        model.compile(optimizer, "mse")
        with pytest.raises(KeyboardInterrupt):
            plan.fit(
                *(model, x, y), directory=tmp_path / "run", callbacks=[StopAt(stops)], verbose=0
            )
    keys = KeyFile(tmp_path / "run" / "noise.key", stop_at + 6)
    found = releases(tmp_path / "releases")
    assert [number for number, _ in found] == list(range(stop_at + 6))
    w = expected_noise(keys.keys[:2], stop_at + 6, noise)
    inputs = np.concatenate([x, np.ones([N, 1], "float32")], axis=1)
    gradients = np.einsum("na,nb->nab", inputs, -y / 2).reshape(N, 16)
    gradients /= np.maximum(1, np.linalg.norm(gradients, axis=1))[:, np.newaxis]
    for number, values in found:
        batch = plan.sampling.draw(N, number, keys.groups)
        np.testing.assert_allclose(
            np.array(values) * B - w[number], gradients[batch].sum(axis=0), atol=1e-4
        )


@pytest.mark.parametrize(
    "noise, steps", [(TreeNoise(7), 5), (BandedNoise(2), 5), (BandedNoise(2), 1)], ids=str
)
def test_a_run_does_not_go_on_in_another_order_or_in_other_groups(tmp_path, noise, steps):
    # Batches of one example have too little padding to show their step.
    plan = plan_of(noise=noise, batch_size=1)
    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(4)])
    model.compile(plan.optimizer(dp.DPSGD, learning_rate=0.1), "mse")
    data = np.ones([N, 3], "float32"), np.zeros([N, 4], "float32")
    with pytest.raises(KeyboardInterrupt):
        plan.fit(model, *data, callbacks=[StopAt(steps)], verbose=0)
    assert [known.checked for known in model.optimizer.ledger.checks] == [0]
    with pytest.raises(ValueError, match=f"Only the directory of a run.*with {steps} releases"):
        plan.fit(model, *data, verbose=0)
    with pytest.raises(ValueError, match="The log belongs to another run"):
        plan.fit(model, *data, directory=tmp_path, verbose=0)
    assert model.optimizer.ledger.num_releases == steps


SOURCES = {
    "arrays": lambda x, y: (x, y),
    "a dataset": lambda x, y: (tf.data.Dataset.from_tensor_slices((x, y)),),
    "records": lambda x, y: (killable_plan.Pairs(x, y),),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("noise", [TreeNoise(7), BandedNoise(2), None], ids=repr)
def test_a_run_with_correlated_noise_does_not_go_on_with_examples_in_another_order(
    tmp_path, noise, source
):
    def fit(order, stop_at):
        plan = plan_of(noise=noise)
        model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
        model.compile(plan.optimizer(dp.DPSGD, learning_rate=0.1), "mse")
        x = np.arange(N, dtype="float32")[order, np.newaxis]
        data = SOURCES[source](x, np.zeros([N, 1], "float32"))
        plan.fit(model, *data, directory=tmp_path, callbacks=[StopAt(stop_at)], verbose=0)

    same = np.arange(N)
    with pytest.raises(KeyboardInterrupt):
        fit(same, 5)
    kept = tmp_path / "examples_NOT_PRIVATE.json"
    assert kept.exists() == (noise is not None)
    if noise is None:  # each batch is drawn from all examples, wherever they are
        with pytest.raises(KeyboardInterrupt), pytest.warns(UserWarning):
            fit(same[::-1], 5)
        return
    with pytest.raises(ValueError, match="those that the run began with, in the same order"):
        fit(np.roll(same, 1), 5)
    text = kept.read_text()
    kept.unlink()
    with pytest.raises(ValueError, match="cannot continue without `examples_NOT_PRIVATE.json`"):
        fit(same, 5)
    kept.write_text(text)
    with pytest.raises(KeyboardInterrupt), pytest.warns(UserWarning):
        fit(same, 5)


def test_the_state_of_other_trees_is_not_continued(tmp_path):
    """As if somebody put the backup of one run into the directory of another."""
    for trees in (5, 7):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / f"{trees}", PASS + 3, plan_of(noise=TreeNoise(trees)))
    shutil.rmtree(tmp_path / "7" / "run" / "backup")
    shutil.copytree(tmp_path / "5" / "run" / "backup", tmp_path / "7" / "run" / "backup")
    before = len(releases(tmp_path / "7" / "releases"))
    with pytest.raises((ValueError, dp.NotPrivateError), match="noise"):
        run(tmp_path / "7", plan=plan_of(noise=TreeNoise(7)))
    assert len(releases(tmp_path / "7" / "releases")) == before
