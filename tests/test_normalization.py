"""`PrivateNormalization`: what it releases, what that costs, and what it finds."""

import copy
import inspect
import math
import pickle
import re
import warnings

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers.gaussianity import assert_gaussian
from tf_adaptive_dp import normalization
from tf_adaptive_dp._keras import graphs
from tf_adaptive_dp._keras.generation import GENERATION, keras
from tf_adaptive_dp.plan import PrivacyPlan
from tf_adaptive_dp.validation import check_per_example

N = 4000
# Per release, as seven of them compose to one of 1.
SEVEN = math.sqrt(7)


def columns(num_examples=N, seed=0):
    """Years, longitudes, a heavy tail, rare flags, tiny numbers, and huge ones that are often 0."""
    random = np.random.default_rng(seed)
    normal = random.normal(size=[num_examples, 4])
    some, few = random.random([2, num_examples])
    return np.stack(
        [
            2000 + 10 * normal[:, 0],
            -122 + 0.3 * normal[:, 1],
            np.exp(normal[:, 2] + 8),
            (few < 0.05).astype(float),
            1e-6 * normal[:, 3],
            1e6 * (some < 0.3),
        ],
        axis=1,
    )


def adapted(x, noise_multiplier=4.0, axis=-1, user_ids=None):
    layer = normalization.PrivateNormalization(noise_multiplier, axis)
    layer.adapt(x, user_ids)
    return layer


@pytest.fixture
def usual_noise(monkeypatch):
    """The same noise every time, for what holds for nearly all noise."""
    random = np.random.default_rng(11)
    monkeypatch.setattr(
        normalization, "fresh_normal_numbers", lambda size: tf.constant(random.normal(size=size))
    )


@pytest.fixture
def no_deviation_is_clear():
    """The release between the rounds is made for features in which there is little noise, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normalization, "_CLEAR_VARIANCE", math.inf)
        yield


def record(monkeypatch, answers=None):
    """Records the sums; releases them with noise, or what is given instead."""
    sums, released, own = [], [], normalization._release

    def release(total, noise):
        sums.append(total.copy())
        released.append(own(total, noise) if answers is None else answers[len(sums) - 1])
        return released[-1]

    monkeypatch.setattr(normalization, "_release", release)
    return sums, released


@pytest.mark.usefixtures("usual_noise")
def test_it_finds_units_whatever_they_are():
    x = columns()
    layer = adapted(x)
    mean, stddev = layer.mean.numpy(), layer.stddev.numpy()
    # The rare flag is lost in the noise, so it is not scaled up.
    clear = [0, 1, 2, 4, 5]
    # The mean of the heavy tail is that of values clipped together with others.
    assert np.all(np.abs(mean - x.mean(0))[clear] < 0.5 * x.std(0)[clear])
    ratio = stddev / x.std(0)
    # In 400 draws of the noise they were between 0.6 and 1.1, but for one false alarm.
    assert np.all((0.5 < ratio[clear]) & (ratio[clear] < 1.3)), ratio
    assert ratio[3] > 0.3
    np.testing.assert_allclose(
        layer(x[:5]).numpy(), (x[:5].astype(np.float32) - mean) / stddev, rtol=1e-4, atol=1e-4
    )


def strokes(background=0.0, num_examples=N):
    """Pixels: strokes of size 1 to 3, in 2% to 60% of the examples; and one without strokes."""
    random = np.random.default_rng(8)
    frequencies = np.r_[np.geomspace(0.02, 0.6, 29), 0.0]
    is_there = random.random([num_examples, 30]) < frequencies
    return background + is_there * random.uniform(1, 3, size=[num_examples, 30])


@pytest.mark.usefixtures("usual_noise")
@pytest.mark.parametrize("background", [-0.42, -3.0, 20.0])
def test_a_value_that_nearly_all_examples_have_counts_as_absent(background):
    x = strokes(background)
    layer = adapted(x)
    ratio = layer.stddev.numpy()[:29] / x.std(0)[:29]
    frequent = slice(20, 29)  # in more than a fifth
    # As without the background, which is so without any care.
    usual = adapted(strokes()).stddev.numpy()[:29] / x.std(0)[:29]
    for values in (ratio, usual):
        assert np.all((0.7 < values[frequent]) & (values[frequent] < 1.4)), values
    # Rare strokes do not become huge, and the pixel without strokes remains small.
    assert ratio.min() > 0.3
    y = layer(x).numpy()
    assert np.abs(y[:, :29]).max() < 30 and np.abs(y[:, 29]).max() < 0.5


def test_the_value_that_nearly_all_examples_have_is_located(monkeypatch):
    """From values near the noisy mean, whatever the others are."""
    x = np.full([N, 2], 5.0)
    x[: N // 10, 0] = 1e3
    examples = normalization._Examples(x, -1, None)
    found = normalization._Statistics(
        np.array([5.2, 5.2]),
        *np.array([[5.0, 5.0], [0.1, 0.1]]),
        np.zeros(2, bool),
        np.array([True, False]),
        0.1,
    )
    located = normalization._located(examples, 1e-6, found)
    np.testing.assert_allclose(located.mean, [5.0, 5.2], rtol=1e-6)
    # Nine tenths are near: the noise of the release, in widths, per near example.
    width = 4 * 0.1 + 5.2 / 16
    np.testing.assert_allclose(located.error, [1e-6 * width * math.sqrt(2) / (0.9 * N), 0.1], 1e-3)
    draws = [normalization._located(examples, 20.0, found).mean[0] for _ in range(400)]
    expected = 20.0 * width * math.sqrt(2) / (0.9 * N)
    # 400 draws: the deviation's own is 3.5%; that of the shares adds a little.
    assert np.std(draws) == pytest.approx(expected, rel=0.25)
    # Where few are near, the mean remains.
    x[:, 0] = np.linspace(-1e3, 1e3, N)
    assert normalization._located(examples, 1e-6, found).mean[0] == 5.2


@pytest.mark.usefixtures("usual_noise")
@pytest.mark.parametrize("factor", [1e-4, 1e-2, 1e2, 1e4])
def test_the_scale_of_the_inputs_does_not_matter(factor):
    x = np.random.default_rng(1).normal([3.0, 0.0, -5.0], [1.0, 2.0, 0.5], [N, 3])
    usual, rescaled = adapted(x), adapted(factor * x)
    np.testing.assert_allclose(rescaled.stddev / factor, usual.stddev, rtol=0.25)
    distance = np.abs(rescaled.mean / factor - usual.mean) / usual.stddev
    assert np.all(distance < 0.1)


def test_the_noise_of_each_release_has_the_right_scale(monkeypatch):
    sums, released = record(monkeypatch)
    # Twice as many features as elsewhere, or the histograms of magnitudes are too few numbers.
    for _ in range(2):
        adapted(np.tile(columns(), 2), noise_multiplier=3.0)
    assert len(sums) == 14  # twice two rounds of three, and one between them
    noise = [(r - s).ravel() for r, s in zip(released, sums)]
    for number in (0, 1, 4, 5):
        # 1,024 numbers of one release alone fit 2/3 of their scale once in 700 times.
        both = np.concatenate([noise[number], noise[7 + number]])
        assert_gaussian(both, 3.0 * SEVEN)
    # The others are too few numbers for a test of each, and have the same noise.
    monkeypatch.undo()
    many = normalization._release(np.zeros([2, 3000]), 3.0 * SEVEN)
    assert_gaussian(many.ravel(), 3.0 * SEVEN)


@pytest.mark.parametrize(
    "shape, axis", [([60, 6], -1), ([60, 5, 4], -1), ([60, 3, 5], 1), ([60, 7], None)]
)
@pytest.mark.parametrize("of_users", [False, True])
@pytest.mark.usefixtures("no_deviation_is_clear", "usual_noise")
def test_neighbors_move_each_sum_by_at_most_one(monkeypatch, shape, axis, of_users):
    random = np.random.default_rng(2)
    x = 2 + random.normal(size=shape) * 10.0 ** random.integers(-6, 1, size=shape[-1])
    x[0] *= 10  # an outlier
    x[1] = 0
    ids = np.arange(60) // 3 if of_users else None
    sums, released = record(monkeypatch)
    adapted(x, 0.001, axis, ids)
    assert len(sums) == 7
    largest = np.zeros(7)
    for absent in range(20 if of_users else 60):
        keep = ids != absent if of_users else np.arange(60) != absent
        # Both data sets see the same answers, as differential privacy is about, and both divide by
        # the public size.
        monkeypatch.undo()
        others, _ = record(monkeypatch, released)
        size = 20 if of_users else 60
        examples = normalization._Examples(x[keep], axis, None if ids is None else ids[keep])
        examples.num_units = size
        normalization._released_statistics(examples, 0.001 * SEVEN)
        moved = [np.linalg.norm(a - b) for a, b in zip(sums, others)]
        largest = np.maximum(largest, moved)
    assert np.all(largest <= 1)
    # Nor is the bound loose, which would be noise for nothing.
    assert np.all(largest > 0.5)


def test_a_user_counts_once_however_many_examples_they_have(monkeypatch):
    x = np.random.default_rng(3).normal(size=[400, 3])
    ids = np.r_[np.zeros(300, int), 1 + np.arange(100)]
    sums, _ = record(monkeypatch)
    layer = adapted(x, 0.01, user_ids=ids)
    examples = normalization._Examples(x, -1, ids)
    assert examples.num_units == 101
    weights = np.concatenate([w for _, w in examples.parts()])
    np.testing.assert_allclose(np.bincount(ids, weights), 1.0)
    assert layer.stddev.shape == (3,)
    assert sums[1].sum() == pytest.approx(101 * math.sqrt(2), rel=1e-3)


def test_several_axes_share_the_statistics_of_a_channel():
    random = np.random.default_rng(4)
    x = random.normal([0.0, 50.0], [1.0, 5.0], [N // 4, 6, 6, 2])
    layer = adapted(x)
    np.testing.assert_allclose(layer.stddev, [1.0, 5.0], rtol=0.35)
    np.testing.assert_allclose(layer.mean, [0.0, 50.0], atol=2.0)
    first = adapted(np.moveaxis(x, -1, 1), axis=1)
    np.testing.assert_allclose(first.stddev, [1.0, 5.0], rtol=0.35)
    assert first(np.moveaxis(x[:3], -1, 1)).shape == (3, 2, 6, 6)
    whole = adapted(x, axis=None)
    assert whole.mean.shape == (1,) and 20 < float(whole.stddev[0]) < 40


def test_values_that_are_not_finite_leave_their_example_out(monkeypatch):
    x = np.random.default_rng(5).normal(size=[N, 3])
    sums, _ = record(monkeypatch)
    adapted(x, 0.01)
    clean = [s.sum() for s in sums[:2]]
    for value in (np.nan, np.inf, 1e200):
        dirty = x.copy()
        dirty[: N // 2, 1] = value
        sums.clear()
        layer = adapted(dirty, 0.01)
        assert [s.sum() / c for s, c in zip(sums[:2], clean)] == pytest.approx([0.5, 0.5], abs=0.02)
        assert np.all(np.isfinite(layer.stddev)) and np.all(np.isfinite(layer.mean))


def test_too_few_examples_are_left_as_they_are():
    x = 7 + np.random.default_rng(6).normal(size=[5, 3])
    with pytest.warns(UserWarning, match="nothing that stands out of its noise") as found:
        layer = adapted(x, 100.0)
    # Of the line in `adapted` that calls `adapt`, not of the one that calls `adapted`.
    first = inspect.getsourcelines(adapted)[1]
    assert [(w.filename, w.lineno) for w in found] == [(__file__, first + 2)]
    plan = planned(num_examples=5, batch_size=1, epsilon=0.1)
    with pytest.warns(UserWarning, match="nothing that stands out of its noise") as found:
        plan.normalization(x)
    assert [w.filename for w in found] == [__file__]
    np.testing.assert_array_equal(layer.mean, 0)
    np.testing.assert_array_equal(layer.stddev, 1)


@pytest.mark.usefixtures("usual_noise")
def test_a_feature_without_values_is_not_scaled_up():
    x = np.random.default_rng(7).normal(size=[N, 8])
    x[:, 3] = 0
    layer = adapted(x)
    # In 100 draws of the noise it was between 0.010 and 0.035.
    assert 0.005 < float(layer.stddev[3]) < 2 and abs(float(layer.mean[3])) < 0.5


def test_a_second_adaptation_is_refused():
    layer = adapted(columns())
    with pytest.raises(RuntimeError, match="`adapt` has been called"):
        layer.adapt(columns())


def loaded(model, folder, suffix):
    model.save(folder / f"model{suffix}")
    return keras.models.load_model(folder / f"model{suffix}")


def with_weights(model, folder):
    other = of_layer(normalization.PrivateNormalization(1.0))
    model.save_weights(folder / "model.weights.h5")
    other.load_weights(folder / "model.weights.h5")
    return other


def from_checkpoint(model, folder):
    other = of_layer(normalization.PrivateNormalization(1.0))
    path = tf.train.Checkpoint(model=model).save(folder / "checkpoint")
    tf.train.Checkpoint(model=other).restore(path).expect_partial()
    return other


def restored_when_built(model, folder):
    """Keras 2 keeps the values of a checkpoint until there are variables for them."""
    layer = normalization.PrivateNormalization(1.0)
    path = tf.train.Checkpoint(layer=model.layers[0]).save(folder / "checkpoint")
    tf.train.Checkpoint(layer=layer).restore(path).expect_partial()
    with pytest.raises(RuntimeError, match="`adapt` has been called"):
        layer.adapt(columns())
    return of_layer(layer)


def set_weights(model, _):
    other = of_layer(normalization.PrivateNormalization(1.0))
    other.set_weights(model.get_weights())
    return other


def of_layer(layer):
    return keras.Sequential([keras.Input([6]), layer, keras.layers.Dense(2)])


COPIES = {
    "keras": lambda model, folder: loaded(model, folder, ".keras"),
    "h5": lambda model, folder: loaded(model, folder, ".h5"),
    "weights": with_weights,
    "checkpoint": from_checkpoint,
    "set_weights": set_weights,
    "restored when built": restored_when_built,
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
    "SavedModel": lambda model, folder: loaded(model, folder, ""),
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_was_released_as_its_original_was(tmp_path, way):
    if way in ("SavedModel", "restored when built") and GENERATION == 3:
        pytest.skip("Keras 3 does neither")
    model = of_layer(adapted(columns()))
    other = COPIES[way](model, tmp_path)
    (layer,) = (x for x in other.layers if isinstance(x, normalization.PrivateNormalization))
    assert layer is not model.layers[0]
    np.testing.assert_array_equal(layer.mean, model.layers[0].mean)
    # The noise is that of the release, whatever the layer was made with.
    assert layer.dp_event == model.layers[0].dp_event == dp_accounting.GaussianDpEvent(4.0)
    assert layer.release_id == model.layers[0].release_id > 0
    with pytest.raises(RuntimeError, match="or of the one that it is a copy of"):
        layer.adapt(columns())


def test_weights_from_before_do_not_make_it_forget_its_release():
    layer = normalization.PrivateNormalization(4.0)
    model = of_layer(layer)
    first = model.get_weights()
    layer.adapt(columns())
    made = layer.release_id
    model.set_weights(first)
    assert layer.release_id == made and not layer.mean.numpy().any()
    with pytest.raises(RuntimeError, match="`adapt` has been called"):
        layer.adapt(columns())
    # The statistics of another layer and its own are two releases, and each has to be paid for.
    model.set_weights(of_layer(other := adapted(columns(), noise_multiplier=5.0)).get_weights())
    own, others = dp_accounting.GaussianDpEvent(4.0), dp_accounting.GaussianDpEvent(5.0)
    assert layer.releases == {made: own, other.release_id: others}
    optimizer = dp.DPSGD(1.0, 1.0, expected_batch_size=4.0)
    for paid in ([own], [others], []):
        assert normalization.first_unpaid([layer], optimizer, paid) is layer
    assert normalization.first_unpaid([layer], optimizer, [others, own]) is None


def test_a_clone_is_a_new_layer():
    model = of_layer(adapted(columns()))
    layer = keras.models.clone_model(model).layers[0]
    assert layer.release_id == 0 and not layer.mean.numpy().any()
    layer.adapt(columns())
    assert layer.release_id not in (0, model.layers[0].release_id)


def test_determinism_is_refused_before_anything_is_released(monkeypatch):
    layer, x = dp.PrivateNormalization(5.0), np.random.default_rng(0).normal(size=[400, 2])
    with monkeypatch.context() as deterministic:
        deterministic.setattr(graphs, "must_be_deterministic", lambda: True)
        with pytest.raises(dp.NotPrivateError, match="enable_op_determinism.*Nothing was"):
            layer.adapt(x)
    layer.adapt(x)  # as if it had not been called


def test_an_adaptation_that_fails_counts(monkeypatch):
    def failing(total, noise):
        raise MemoryError

    monkeypatch.setattr(normalization, "_release", failing)
    layer = normalization.PrivateNormalization(1.0)
    with pytest.raises(MemoryError):
        layer.adapt(columns())
    with pytest.raises(RuntimeError, match="`adapt` has been called"):
        layer.adapt(columns())


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"noise_multiplier": 0.0}, "`noise_multiplier` must be finite and greater than 0"),
        ({"noise_multiplier": 1.0, "axis": 0}, "`axis` must be the number of the axis"),
        ({"noise_multiplier": 1.0, "axis": True}, "`axis` must be the number of the axis"),
    ],
)
def test_wrong_arguments(wrong, message):
    with pytest.raises(ValueError, match=message):
        normalization.PrivateNormalization(**wrong)


@pytest.mark.parametrize(
    "x, axis, user_ids, message",
    [
        ({"a": np.ones([3, 2])}, -1, None, "must be an array.*Received: dict"),
        ([[1.0, 2.0]], -1, None, "must be an array.*Received: list"),
        (np.array([["a"]]), -1, None, "must be an array.*<U1"),
        (np.ones([3]), -1, None, r"must be an array.*shape \(3,\)"),
        (np.ones([0, 3]), -1, None, r"must be an array.*shape \(0, 3\)"),
        (np.ones([3, 2]), 2, None, "`axis` must be an axis of the inputs.*axis=2"),
        (np.ones([3, 2]), -2, None, "`axis` must be an axis of the inputs.*axis=-2"),
        (np.ones([3, 2]), -1, [1, 2], "`user_ids` must have one id for each example"),
    ],
)
def test_wrong_inputs(x, axis, user_ids, message):
    with pytest.raises((TypeError, ValueError), match=message):
        adapted(x, axis=axis, user_ids=user_ids)
    layer = normalization.PrivateNormalization(1.0)
    layer.build([None, 5])
    with pytest.raises(ValueError, match="must have the 5 features"):
        layer.adapt(np.ones([10, 4]))


def planned(**kwargs):
    numbers = {"epsilon": 3.0, "delta": 1e-4, "num_examples": N, "batch_size": 200, "epochs": 2}
    if "noise_multiplier" in kwargs:
        del numbers["epsilon"]
    return PrivacyPlan(**{**numbers, "accountant": "rdp", "normalize_inputs": True, **kwargs})


def model_of(plan, layer):
    model = keras.Sequential([keras.Input([6]), layer, keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(plan.optimizer(dp.ADADP), loss, metrics=["accuracy"])
    return model


def data():
    x = columns()
    return x, (x[:, 4] + 1e-7 * (x[:, 0] - 2000) > 0).astype(np.int32)


def epsilon_of(event, delta):
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(event)
    return accountant.get_epsilon(delta)


def test_the_plan_pays_for_it():
    plan = planned()
    (event,) = plan.other_events
    assert epsilon_of(event, 1e-4) == pytest.approx(3.0 / 5, rel=2e-3)
    assert plan._epsilon_after(plan.steps) <= 3.0
    without = planned(normalize_inputs=False).noise_multiplier
    assert 1.002 * without < plan.noise_multiplier < 1.06 * without
    of_noise = planned(noise_multiplier=plan.noise_multiplier)
    assert of_noise.epsilon == pytest.approx(3.0, rel=0.01)
    assert "normalize_inputs=True" in repr(plan)


def test_a_budget_that_pays_for_no_normalization_says_so():
    with pytest.raises(ValueError, match="No noise of the normalization.*`normalize_inputs`") as e:
        planned(epsilon=1e-12, delta=1e-300)
    assert "sampling_probability" not in str(e.value)


@pytest.mark.slow
def test_correlated_noise_is_chosen_for_what_is_left():
    plan = planned(noise="best")
    assert plan.other_events == planned().other_events
    assert plan._epsilon_after(plan.steps) <= 3.0


def test_a_normalization_of_which_the_user_was_warned_is_the_only_one():
    plan = planned(num_examples=50, batch_size=10, epsilon=0.1)
    x = columns()[:50]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="found nothing that stands out"):
            plan.normalization(x)
    with pytest.raises(RuntimeError, match="`adapt` has been called"):
        plan.normalization(x)


def test_the_statistics_behind_an_optimizer_are_not_forgotten_for_another():
    x, y = data()
    plan = planned(normalize_inputs=False, other_events=[dp_accounting.GaussianDpEvent(20.0)])

    class OneEpoch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    def fit(first, dense, optimizer):
        model = keras.Sequential([keras.Input([6]), first, dense])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)
        plan.fit(model, x, y, verbose=0, callbacks=[OneEpoch()])

    def normalized():
        return adapted(x, noise_multiplier=20.0)

    dense, one = keras.layers.Dense(2), plan.optimizer(dp.DPSGD)
    fit(normalized(), dense, one)
    with pytest.warns(UserWarning, match="already trained another model"):
        fit(keras.layers.Rescaling(1.0), keras.layers.Dense(2), plan.optimizer(dp.DPSGD))
    with pytest.raises(ValueError, match="`PrivateNormalization` that the plan's budget does not"):
        fit(normalized(), dense, one)


def test_training_in_raw_units_by_the_plan(tmp_path):
    x, y = data()
    plan = planned(epochs=4)
    layer = plan.normalization(x)
    assert plan.normalization(x) is layer  # no second release
    with pytest.raises(ValueError, match="`axis` must be that of the first call"):
        plan.normalization(x, axis=None)
    model = model_of(plan, layer)
    plan.fit(model, x, y, verbose=0)
    assert model.evaluate(x, y, verbose=0)[1] > 0.9
    noise = plan.other_events[0].noise_multiplier
    statement = " ".join(plan.statement().split())
    assert f"one release of the Gaussian mechanism with noise multiplier {noise:g}" in statement
    spent = float(re.search(r"epsilon = ([\d.]+)", statement)[1])
    assert 2.9 < spent <= 3.0
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(x[:50], verbose=0), model.predict(x[:50], verbose=0))
    assert loaded.optimizer.ledger.other_events == plan.other_events


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("stop_after", [0, 1])
def test_a_resumed_run_keeps_the_statistics_it_began_with(tmp_path, stop_after):
    """After the first epoch, which ends before its end is saved, and after the second."""
    x, y = data()

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == stop_after:
                raise InterruptedError

    first = planned(epochs=3)
    layer = first.normalization(x)
    with pytest.raises(InterruptedError):
        model = model_of(first, layer)
        first.fit(model, x, y, directory=tmp_path, callbacks=[Stop()], verbose=0)
    second = planned(epochs=3)
    own = second.normalization(x)
    assert not np.array_equal(own.mean, layer.mean)
    model = model_of(second, own)
    second.fit(model, x, y, directory=tmp_path, verbose=0)
    np.testing.assert_array_equal(own.mean, layer.mean)
    np.testing.assert_array_equal(own.stddev, layer.stddev)
    # The same values train on, so there was one release of them.
    assert model.optimizer.ledger.num_releases == second.steps
    assert model.optimizer.ledger.other_events == second.other_events
    (tmp_path / "normalization.json").unlink()
    third = planned(epochs=3)
    with pytest.raises(ValueError, match="cannot go on without its `normalization.json`"):
        third.fit(model_of(third, third.normalization(x)), x, y, directory=tmp_path, verbose=0)


def test_of_users_the_plan_protects_users():
    x, y = data()
    ids = np.arange(N) // 2
    plan = planned(num_examples=None, user_ids=ids, examples_per_user=2, batch_size=100)
    layer = plan.normalization(x)
    assert np.all(np.isfinite(layer.mean)) and layer.dp_event == plan.other_events[-1]
    model = model_of(plan, layer)
    plan.fit(model, x, y, verbose=0)
    assert "one person" in plan.statement() or "one user" in plan.statement()


def test_what_nobody_pays_for_is_refused():
    x, y = data()
    without = planned(normalize_inputs=False)
    with pytest.raises(ValueError, match="does not pay for a normalization"):
        without.normalization(x)
    with pytest.raises(TypeError, match="`x` must be an array .* Received: dict"):
        planned().normalization({"x": x})
    with pytest.raises(ValueError, match="`num_examples` must be the number of examples"):
        planned().normalization(x[:-1])
    model = model_of(without, adapted(x, 20.0))
    with pytest.raises(ValueError, match="that the plan's budget does not pay for"):
        without.fit(model, x, y)
    plan = planned()
    with pytest.warns(UserWarning, match="pays for a normalization of the inputs, and the model"):
        plan.fit(model_of(plan, keras.layers.Rescaling(1e-3)), x, y, verbose=0)


def by_hand(layers, **kwargs):
    """A plan that pays for layers which the user made, and a model of them."""
    paid = [layer.dp_event for layer in layers]
    plan = planned(normalize_inputs=False, noise_multiplier=2.0, other_events=paid, **kwargs)
    return plan, model_of_layers(plan, layers)


def model_of_layers(plan, layers, **kwargs):
    model = keras.Sequential([keras.Input([6]), *layers, keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    arguments = {"optimizer_class": dp.DPSGD, "learning_rate": 0.1, **kwargs}
    model.compile(plan.optimizer(**arguments), loss)
    return model


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            raise InterruptedError


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("noise_multipliers", [[20.0, 30.0], [20.0]])
def test_layers_made_by_hand_are_kept_with_the_run(tmp_path, noise_multipliers):
    x, y = data()
    first = [adapted(x, noise) for noise in noise_multipliers]
    plan, model = by_hand(first, epochs=1)
    assert model.optimizer.ledger.other_events == plan.other_events
    with pytest.raises(InterruptedError):
        plan.fit(model, x, y, directory=tmp_path, callbacks=[Stop()], verbose=0)
    second = [adapted(x, noise) for noise in noise_multipliers]
    plan, model = by_hand(second, epochs=1)
    assert second[0].release_id != first[0].release_id
    with pytest.warns(UserWarning, match="releases were not in the checkpoint"):
        plan.fit(model, x, y, directory=tmp_path, verbose=0)
    # What the second process released is used nowhere.
    for own, before in zip(second, first):
        for a, b in zip(own.get_weights(), before.get_weights()):
            np.testing.assert_array_equal(a, b)
        assert own.release_id == before.release_id
    assert len(plan.other_events) == len(first)


def test_a_run_goes_on_with_the_layers_that_it_began_with(tmp_path):
    x, y = data()
    plan, model = by_hand([adapted(x, 20.0)], epochs=1)
    with pytest.raises(InterruptedError):
        plan.fit(model, x, y, directory=tmp_path, callbacks=[Stop()], verbose=0)
    for layers in ([], [normalization.PrivateNormalization(20.0, axis=None)]):
        other = model_of_layers(plan, layers)
        with pytest.warns(UserWarning, match="already trained another model"):
            with pytest.raises(ValueError, match="layers that the run in `directory` began with"):
                plan.fit(other, x, y, directory=tmp_path, verbose=0)
    # Nor does a run begin to normalize.
    plan, model = by_hand([], epochs=1)
    with pytest.raises(InterruptedError):
        plan.fit(model, x, y, directory=tmp_path / "without", callbacks=[Stop()], verbose=0)
    (tmp_path / "normalization.json").rename(tmp_path / "without" / "normalization.json")
    with pytest.raises(ValueError, match="layers that the run in `directory` began with"):
        plan.fit(model, x, y, directory=tmp_path / "without", verbose=0)


@pytest.mark.filterwarnings("ignore:The plan pays for a normalization")
def test_inputs_normalized_outside_of_the_model_are_not_released_again(tmp_path):
    x, y = data()

    def run(*callbacks):
        plan = planned(epochs=1)
        inputs = plan.normalization(x)(x).numpy()
        model = model_of_layers(plan, [])
        plan.fit(model, inputs, y, directory=tmp_path, callbacks=callbacks, verbose=0)

    with pytest.raises(InterruptedError):
        run(Stop())
    with pytest.raises(ValueError, match="outside of the model would train on with a second"):
        run()


def test_each_release_is_paid_for_once():
    x, y = data()
    unpaid = "that the plan's budget does not pay for"
    # Two layers of one noise are two releases.
    plan = planned(normalize_inputs=False, other_events=[adapted(x, 20.0).dp_event])
    two = model_of_layers(plan, [adapted(x, 20.0), adapted(x, 20.0)])
    with pytest.raises(ValueError, match=unpaid):
        plan.fit(two, x, y)
    # A layer and its copy are one.
    layer = adapted(x, 20.0)
    again = normalization.PrivateNormalization(20.0)
    again.build([None, 6])
    again.set_weights(layer.get_weights())
    plan.fit(model_of_layers(plan, [layer, again]), x, y, verbose=0)
    # A clone of the plan's own layer is another one.
    plan = planned()
    model = model_of(plan, plan.normalization(x))
    clone = keras.models.clone_model(model)
    clone.layers[0].adapt(x)
    clone.compile(plan.optimizer(dp.DPSGD, learning_rate=0.1), model.loss)
    for _ in range(2):  # with weights of the original it has released its own all the same
        with pytest.raises(ValueError, match=unpaid + ".*`clone_model`"):
            plan.fit(clone, x, y)
        clone.set_weights(model.get_weights())
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    clone.compile(plan.optimizer(dp.DPSGD, learning_rate=0.1), model.loss)
    plan.fit(clone, x, y, verbose=0)
    # Nor may the statistics change while an optimizer goes on.
    plan, model = by_hand([adapted(x, 20.0)])
    with pytest.raises(InterruptedError):
        plan.fit(model, x, y, callbacks=[Stop()], verbose=0)
    model.layers[0].set_weights(adapted(x, 20.0).get_weights())
    with pytest.raises(ValueError, match=unpaid):
        plan.fit(model, x, y)


def test_an_event_of_side_information_pays_for_nothing_else():
    x, y = data()
    event = dp_accounting.GaussianDpEvent(20.0)
    fixed = dp.side_information.FixedPreconditioner(
        lambda v: np.ones(v.shape, "float32"), provenance=event
    )
    of_optimizer = {"optimizer_class": dp.AdaDPS, "side_information": fixed}
    plan = planned(normalize_inputs=False, other_events=[event])
    model = model_of_layers(plan, [adapted(x, 20.0)], **of_optimizer)
    with pytest.raises(ValueError, match="beside the events of side information"):
        plan.fit(model, x, y)
    plan = planned(normalize_inputs=False, other_events=[event, event])
    model = model_of_layers(plan, [adapted(x, 20.0)], **of_optimizer)
    assert model.optimizer.ledger.other_events == (event, event)
    plan.fit(model, x, y, verbose=0)


def test_the_ledger_has_what_the_plan_pays_for():
    x, y = data()
    layer = adapted(x, 20.0)
    plan, model = by_hand([layer])
    numbers = {"noise_multiplier": 2.0, "expected_batch_size": plan.expected_batch_size}
    model.compile(dp.DPSGD(1.0, **numbers), model.loss)
    with pytest.raises(ValueError, match="ledger must have every event that the plan's budget"):
        plan.fit(model, x, y)
    model.optimizer.ledger.other_events += (layer.dp_event,)
    plan.fit(model, x, y, verbose=0)


def test_a_release_that_the_ledger_does_not_count_is_noticed_without_a_plan():
    x, y = data()
    layer = adapted(x, 20.0)
    plan = planned(normalize_inputs=False, noise_multiplier=2.0)
    inner = keras.Sequential([keras.Input([6]), layer], name="inner")
    model = model_of_layers(plan, [inner])
    numbers = {"delta": 1e-3, "num_examples": len(x), "full_passes": False}
    budget, monitor = dp.PrivacyBudget(epsilon=50.0, **numbers), dp.PrivacyMonitor(**numbers)
    before = [v.numpy() for v in model.trainable_variables]
    for callback in (budget, monitor):
        with pytest.raises(dp.errors.NotPrivateError, match="not in the optimizer's ledger"):
            model.fit(x, y, callbacks=[callback], verbose=0)
    for variable, value in zip(model.trainable_variables, before):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert model.optimizer.ledger.num_releases == 0
    # A layer without statistics costs nothing.
    fresh = model_of_layers(plan, [normalization.PrivateNormalization(20.0)])
    assert dp.validate(fresh, (x[:4], y[:4])).ok
    report = dp.validate(model, (x[:4], y[:4]))
    assert [(f.kind, f.where) for f in report.findings] == [("statistics", f"inner/{layer.name}")]
    # The release of another layer, with other noise, does not pay for it.
    model.optimizer.ledger.other_events = (adapted(x, 30.0).dp_event,)
    assert not dp.validate(model, (x[:4], y[:4])).ok
    model.optimizer.ledger.other_events += (layer.dp_event,)
    assert dp.validate(model, (x[:4], y[:4])).ok
    model.fit(x, y, epochs=1, callbacks=[budget, monitor], verbose=0)
    assert model.optimizer.ledger.num_releases


@pytest.mark.usefixtures("usual_noise")
def test_half_precision_sees_raw_units():
    before = keras.mixed_precision.Policy("float32")
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        layer = adapted(np.random.default_rng(8).normal(1e6, 1e4, [N, 2]))
        y = layer(tf.constant([[1e6, 1e6 + 1e4]]))
    finally:
        keras.mixed_precision.set_global_policy(before)
    assert y.dtype == tf.float32 and 0.3 < float(y[0, 1] - y[0, 0]) < 3


def test_gradients_behind_the_layer_are_exact():
    x = columns(64).astype(np.float32)
    layer = adapted(columns())
    model = keras.Sequential([keras.Input([6]), layer, keras.layers.Dense(2)])
    model.compile(dp.DPSGD(1.0, 1.0), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    report = check_per_example(model, (x, (x[:, 4] > 0).astype(np.int32)))
    assert report.norm_error < 1e-4 and not report.without_rules
