"""Plans with correlated noise: the best strategy, and runs that go on after a kill."""

import json
import random
import shutil
import stat
import time

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import killable_plan
from tests.helpers.crash_injection import CrashInjector
from tf_adaptive_dp.accounting import BandedNoise, IndependentNoise, ToeplitzNoise, TreeNoise
from tf_adaptive_dp.accounting.noise_strategies import prefix_error
from tf_adaptive_dp.callbacks.run_directory import RunDirectory
from tf_adaptive_dp.durable.key_file import KeyFile
from tf_adaptive_dp.mechanism.noise import normal_numbers
from tf_adaptive_dp.sampling import CyclicPoissonSampling

N, B, EPOCHS, BANDS = 80, 4, 2, 3
SIZES = [(0, 12), (16, 20)]  # the kernel and the bias in the vector of all numbers


def plan_of(**kwargs):
    arguments = {"noise_multiplier": 1.0, "noise": BandedNoise(BANDS), **kwargs}
    return dp.PrivacyPlan(
        **{"delta": 1e-3, "num_examples": N, "batch_size": B, "epochs": EPOCHS, **arguments},
        accountant="rdp",
    )


def expected_noise(keys, steps, bands=BANDS):
    """[steps, 16], w: from the keys of a run, by dense algebra."""
    firsts = np.array([first for first, _ in keys])
    z = []
    for t in range(steps):
        key = keys[int((firsts <= t).sum()) - 1][1]
        z.append(normal_numbers(32, tf.constant(key, tf.int64), tf.constant(t + 1, tf.int64)))
    matrix = np.zeros([steps, steps])
    for k, c in enumerate(BandedNoise(bands).coefficients):
        matrix += c * np.eye(steps, k=-k)
    w = np.linalg.solve(matrix, np.stack(z).astype("float64"))
    return np.concatenate([w[:, a:b] for a, b in SIZES], axis=1)


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


def test_an_interrupted_run_goes_on_with_the_noise_of_its_past(tmp_path):
    keys = tmp_path / "run" / "noise.key"
    for stop_at in (7, 5):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, stop_at)
        assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    shutil.copy(keys, tmp_path / "kept")
    before = releases(tmp_path / "releases")
    held = json.loads((tmp_path / "kept").read_bytes()[:-10])
    with pytest.warns(UserWarning, match="releases? were not in the checkpoint"):
        optimizer = run(tmp_path)
    assert not keys.exists()  # the run is finished
    assert optimizer.ledger.num_releases == N // B * EPOCHS
    numbers = [number for number, _ in releases(tmp_path / "releases")]
    assert numbers == sorted(set(numbers))  # no number, and so no noise, comes twice
    # All of the noise is that of one matrix, across the interruptions.
    expected = expected_noise(held["noise_keys"], numbers[len(before) - 1] + 1)
    for number, values in before:
        np.testing.assert_allclose(values, expected[number] / B, atol=1e-5)
    assert len(held["noise_keys"]) == 2 and len({key for _, key in held["noise_keys"]}) == 2


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


def test_a_finished_run_that_was_killed_before_it_was_closed_loses_its_keys(tmp_path):
    arguments = {"settings": {"epsilon": 1.0}, "steps": 10, "keeps_keys": True}
    killed = RunDirectory(tmp_path, **arguments)
    killed.log._file.write([(1.0, 4.0, 9)])  # as `announce` does before a step
    killed.log.close()
    unfinished = RunDirectory(tmp_path, **arguments)
    assert len(unfinished.keys.keys) == 2
    unfinished.log._file.write([(1.0, 4.0, 10)])
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
    assert plan.optimizer(dp.DPAdam).noise == BandedNoise(BANDS)
    assert "drawn from 3 groups" in plan.describe() and "BandedNoise(bands=3)" in repr(plan)
    with pytest.raises(ValueError, match="`noise` must be IndependentNoise"):
        plan.optimizer(dp.ADADP)
    with pytest.raises(TypeError, match="Received: noise"):
        plan.optimizer(dp.DPSGD, noise=BandedNoise(2))
    other = dp.DPSGD(1.0, 1.0, expected_batch_size=plan.expected_batch_size)
    with pytest.raises(ValueError, match="noise strategy of the plan"):
        plan._check_optimizer(other)
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


def test_the_best_noise_needs_a_budget():
    with pytest.raises(ValueError, match="is the best one for an `epsilon`"):
        plan_of(noise="best")
    with pytest.raises(TypeError, match="`noise` must be"):
        plan_of(noise="banded")
    with pytest.raises(ValueError, match="as the noise has bands, and this noise has none"):
        plan_of(noise=TreeNoise(4))
    with pytest.raises(ValueError, match="larger than the data"):
        plan_of(noise=BandedNoise(40))


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_with_the_noise_of_its_past(tmp_path):
    kills, moments, bands = 4, random.Random(2), 3
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

            job = {"folder": str(tmp_path), "bands": bands}
            code = injector.run(job, moment if kill < kills else None)
            assert code == (-9 if kill < kills else 0), f"run {kill} ended with {code}"
    released = [json.loads(line) for line in lines("releases")]
    numbers = [number for number, _ in released]
    assert numbers == sorted(set(numbers)) and len(numbers) > steps - 3 * kills
    keys = json.loads(lines("keys")[-1][:-9])["noise_keys"]
    assert len(keys) > 2
    expected = expected_noise(keys, steps, bands)
    for number, values in released:
        np.testing.assert_allclose(values, expected[number] / 4, atol=1e-5)
    segments, _, _ = json.loads(lines("end")[-1])
    assert segments == [[1.0, 4.0, steps]]
    assert not (tmp_path / "run" / "noise.key").exists()
