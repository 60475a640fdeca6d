"""Every release of a normalization is paid for once, by plans and without them."""

import re
import warnings
from types import SimpleNamespace

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers.normalized import (
    N,
    adapted,
    columns,
    data,
    model_of,
    model_of_layers,
    of_layer,
    planned,
)
from tf_adaptive_dp._keras.generation import GENERATION, keras
from tf_adaptive_dp.normalization import (
    PrivateNormalization,
    normalizations_in,
    of_other_unit,
    unpaid_in,
)

# The layer has quick tests with both versions of Keras.
pytestmark = pytest.mark.slow_on(2)


def epsilon_of(event, delta):
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(event)
    return accountant.get_epsilon(delta)


def test_the_plan_pays_for_it():
    plan = planned()
    assert plan._epsilon_after(plan.steps) <= 3.0
    without = planned(normalize_inputs=False).noise_multiplier
    assert 1.002 * without < plan.noise_multiplier < 1.06 * without
    of_noise = planned(noise_multiplier=plan.noise_multiplier)
    assert of_noise.epsilon == pytest.approx(3.0, rel=0.01)
    assert "normalize_inputs=True" in repr(plan)


@pytest.mark.parametrize("num_examples, part", [(10_000_000, 0.2), (20_000, None), (1_000, 0.4)])
def test_fewer_examples_take_more_of_the_budget(num_examples, part):
    """ε/5, or what noise of n/1000 would spend, but at most 2ε/5."""
    plan = planned(epsilon=1.0, delta=1e-6, num_examples=num_examples)
    (event,) = plan.other_events
    if part is None:
        assert event.noise_multiplier == num_examples / 1000
    else:
        assert epsilon_of(event, 1e-6) == pytest.approx(part, rel=2e-3)
    assert plan._epsilon_after(plan.steps) <= 1.0


def test_a_budget_that_pays_for_no_normalization_says_so():
    with pytest.raises(ValueError, match="No noise of the normalization.*`normalize_inputs`") as e:
        planned(epsilon=1e-12, delta=1e-300)
    assert "sampling_probability" not in str(e.value)


@pytest.mark.slow
def test_correlated_noise_is_chosen_for_what_is_left():
    plan = planned(noise="best")
    assert plan.other_events == planned().other_events
    assert plan._epsilon_after(plan.steps) <= 3.0


@pytest.mark.filterwarnings("ignore:The private normalization found nothing")
def test_other_inputs_do_not_get_statistics_of_the_first_without_a_word(recwarn):
    plan, x = planned(), data()[0]
    layer = plan.normalization(x)
    assert plan.normalization(x.copy()) is layer and not len(recwarn)
    with pytest.raises(ValueError, match=r"another shape.*new plan.*Received: .*after \(\d"):
        plan.normalization(x[..., :-1])
    with pytest.warns(UserWarning, match="other values or another order.*new plan") as caught:
        assert plan.normalization(100 * x) is layer
    assert [w.filename for w in caught] == [__file__]


def test_a_normalization_of_which_the_user_was_warned_is_the_only_one():
    plan = planned(num_examples=50, batch_size=10, epsilon=0.1)
    x = columns()[:50]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="found nothing that stands out"):
            plan.normalization(x)
    with pytest.raises(RuntimeError, match="`adapt` has already been called"):
        plan.normalization(x)


@pytest.mark.slow
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


@pytest.mark.parametrize("by_plan", [True, False])
def test_a_copy_of_an_optimizer_does_not_pay_for_other_statistics_with_the_same_event(by_plan):
    """In a second phase the event of the first statistics paid for the second, too."""
    x, y = data()
    plan = planned(normalize_inputs=False, other_events=[dp_accounting.GaussianDpEvent(20.0)])

    def fit(layer, dense, optimizer):
        model = keras.Sequential([keras.Input([6]), layer, dense])
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        if by_plan:
            stop = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda *_: setattr(model, "stop_training", True)
            )
            plan.fit(model, x, y, verbose=0, callbacks=[stop])
        else:
            model.fit(x, y, batch_size=200, verbose=0)

    layer, dense = adapted(x, noise_multiplier=20.0), keras.layers.Dense(2)
    first = dp.DPSGD(1.0, plan.noise_multiplier, expected_batch_size=200, learning_rate=0.1)
    first.ledger.other_events = plan.other_events
    fit(layer, dense, first)
    other = adapted(x, noise_multiplier=20.0)
    with pytest.raises(dp.NotPrivateError, match="release is not in the optimizer's ledger"):
        fit(other, dense, type(first).from_config(first.get_config()))
    fit(layer, dense, type(first).from_config(first.get_config()))


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


def prices():
    """A regression in raw units: five inputs explain nearly all of a price."""
    x = np.random.default_rng(0).normal(size=[N, 5]).astype("float32")
    return x, 300_000.0 + 80_000 * x @ np.array([0.6, -0.5, 0.4, 0.3, -0.35])


def of_prices(plan, y, *last):
    model = keras.Sequential([keras.Input([5]), keras.layers.Dense(1), *last])
    model.compile(plan.optimizer(dp.ADADP), "mse")
    return model


def test_a_regression_in_raw_units_by_the_plan(tmp_path, recwarn):
    """Also one that resumes; without the layer, R² is far below 0."""
    x, y = prices()

    def made():
        plan = planned(epochs=8, normalize_inputs=False, normalize_targets=True)
        layer = plan.denormalization(y)
        assert plan.denormalization(y) is layer and layer.invert
        return plan, of_prices(plan, y, layer), layer

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 3:
                raise InterruptedError

    plan, model, first = made()
    assert plan.other_events == (first.dp_event,)
    with pytest.raises(InterruptedError):
        plan.fit(model, x, y, directory=tmp_path / "run", callbacks=[Stop()], verbose=0)
    plan, model, second = made()
    assert second.mean != first.mean
    plan.fit(model, x, y, directory=tmp_path / "run", verbose=0)
    assert second.mean == first.mean and second.stddev == first.stddev
    assert model.optimizer.ledger.other_events == plan.other_events
    assert model.optimizer.ledger.num_releases == plan.steps
    predicted = model.predict(x, verbose=0)
    assert np.mean(np.square(predicted[:, 0] - y)) < 0.2 * np.var(y)
    assert not [w for w in recwarn if "Targets" in str(w.message)]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), predicted, rtol=1e-5)


def test_normalizations_of_inputs_and_targets_are_two_releases():
    x, y = prices()
    plan = planned(normalize_targets=True)
    one = planned(normalize_inputs=False, normalize_targets=True)
    assert one.noise_multiplier == planned().noise_multiplier < plan.noise_multiplier
    assert plan.other_events == 2 * one.other_events and plan._epsilon_after(plan.steps) <= 3.0
    assert "normalize_inputs=True, normalize_targets=True" in repr(plan)
    inputs, targets = plan.normalization(x), plan.denormalization(y)
    assert inputs.dp_event == targets.dp_event == plan.other_events[0]
    assert inputs.release_id != targets.release_id
    # One event does not pay for both.
    optimizer = one.optimizer(dp.ADADP)
    model = keras.Sequential([keras.Input([5]), inputs, keras.layers.Dense(1), targets])
    model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match="that the plan's budget does not pay for"):
        one.fit(model, x, y, verbose=0)
    model.compile(plan.optimizer(dp.ADADP), "mse")
    plan.fit(model, x, y, verbose=0)


def test_targets_that_nobody_pays_for_are_refused():
    x, y = prices()
    with pytest.raises(ValueError, match="no budget for normalizing targets.*normalize_targets=F"):
        planned().denormalization(y)
    plan = planned(normalize_inputs=False, normalize_targets=True)
    with pytest.raises(TypeError, match="`y` must be an array .* Received: dict"):
        plan.denormalization({"y": y})
    with pytest.raises(ValueError, match="`num_examples` must be the number of examples"):
        plan.denormalization(y[:-1])
    with pytest.raises(ValueError, match=r"normalizing the targets.*denormalization\(y\)` last"):
        plan.fit(of_prices(plan, y), x, y, verbose=0)
    plan.denormalization(y)
    with pytest.warns(UserWarning, match="whose targets had other values"):
        plan.denormalization(2 * y)
    # A layer for the inputs is none for the targets.
    wrong = of_prices(plan, y, adapted(y[:, None], plan.other_events[0].noise_multiplier))
    with pytest.raises(ValueError, match="that the plan's budget does not pay for"):
        plan.fit(wrong, x, y, verbose=0)


@pytest.mark.slow
def test_a_longer_plan_takes_over_the_release_of_the_first():
    x, y = data()
    plan = planned(epsilon=8.0, epochs=1)  # the longer one would spend more on its own release
    model = model_of(plan, plan.normalization(x))
    plan.fit(model, x, y, verbose=0)

    def longer(**kwargs):
        return planned(noise_multiplier=plan.noise_multiplier, epochs=2, **kwargs)

    for other in (longer(), longer(normalize_inputs=False)):  # another release, or none
        with pytest.raises(ValueError, match="Pass the events to the plan as `other_events`"):
            other.fit(model, x, y, verbose=0)
    taken_over = longer(normalize_inputs=False, other_events=plan.other_events)
    taken_over.fit(model, x, y, verbose=0)
    assert model.optimizer.ledger.num_releases == taken_over.steps == 2 * plan.steps
    stated = float(re.search(r"epsilon = ([\d.]+)", taken_over.statement())[1])
    assert taken_over.epsilon <= stated < taken_over.epsilon + 1e-3  # rounded up


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
    with pytest.raises(ValueError, match="cannot continue without `normalization.json`"):
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
    with pytest.raises(ValueError, match="has no budget for normalizing inputs"):
        without.normalization(x)
    with pytest.raises(TypeError, match="`x` must be an array .* Received: dict"):
        planned().normalization({"x": x})
    with pytest.raises(ValueError, match="`num_examples` must be the number of examples"):
        planned().normalization(x[:-1])
    model = model_of(without, adapted(x, 20.0))
    with pytest.raises(ValueError, match="that the plan's budget does not pay for"):
        without.fit(model, x, y)
    plan = planned()
    model = model_of(plan, keras.layers.Rescaling(1e-3))
    with pytest.raises(ValueError, match="reserves budget for normalizing the inputs, but"):
        plan.fit(model, x, y, verbose=0)
    # The inputs may be normalized outside of the model.
    inputs = plan.normalization(x)(x).numpy()
    with pytest.warns(UserWarning, match="reserves budget for normalizing the inputs, but"):
        plan.fit(model, inputs, y, verbose=0)


def by_hand(layers, **kwargs):
    """A plan that pays for layers which the user made, and a model of them."""
    paid = [layer.dp_event for layer in layers]
    plan = planned(normalize_inputs=False, noise_multiplier=2.0, other_events=paid, **kwargs)
    return plan, model_of_layers(plan, layers)


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            raise InterruptedError


@pytest.mark.slow
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
    for layers in ([], [PrivateNormalization(20.0, axis=None)]):
        other = model_of_layers(plan, layers)
        with pytest.raises(ValueError, match="layers that the run in `directory` began with"):
            plan.fit(other, x, y, directory=tmp_path, verbose=0)
    # Nor does a run begin to normalize.
    plan, model = by_hand([], epochs=1)
    with pytest.raises(InterruptedError):
        plan.fit(model, x, y, directory=tmp_path / "without", callbacks=[Stop()], verbose=0)
    (tmp_path / "normalization.json").rename(tmp_path / "without" / "normalization.json")
    with pytest.raises(ValueError, match="layers that the run in `directory` began with"):
        plan.fit(model, x, y, directory=tmp_path / "without", verbose=0)


@pytest.mark.filterwarnings("ignore:The plan reserves budget for normalizing")
def test_inputs_normalized_outside_of_the_model_are_not_released_again(tmp_path):
    x, y = data()

    def run(*callbacks):
        plan = planned(epochs=1)
        layer = plan.normalization(x)
        model = model_of_layers(plan, [])
        try:
            plan.fit(model, layer(x).numpy(), y, directory=tmp_path, callbacks=callbacks, verbose=0)
        finally:  # no later statistics are paid for by the event of these
            noted = {} if not model.optimizer.ledger.num_releases else layer.releases
            assert model.optimizer.ledger.statistics == noted

    with pytest.raises(InterruptedError):
        run(Stop())
    with pytest.raises(ValueError, match="data that were normalized with a second release"):
        run()


def test_each_release_is_paid_for_once():
    x, y = data()
    unpaid = "that the plan's budget does not pay for"
    # Two layers of one noise are two releases.
    plan = planned(normalize_inputs=False, other_events=[adapted(x, 20.0).dp_event])
    two = model_of_layers(plan, [adapted(x, 20.0), adapted(x, 20.0)])
    with pytest.raises(ValueError, match=unpaid):
        plan.fit(two, x, y)
    assert unpaid_in(two, two.optimizer) is normalizations_in(two)[1]  # also without the plan
    # A layer and its copy are one.
    layer = adapted(x, 20.0)
    again = PrivateNormalization(20.0)
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


def small_model(first, run_eagerly=False):
    model = keras.Sequential([keras.Input([6]), first, keras.layers.Dense(2)])
    optimizer = dp.DPSGD(1.0, 1.0, learning_rate=0.1, expected_batch_size=50)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    model.compile(optimizer, loss, run_eagerly=run_eagerly)
    return model


def trained(model, x, y):
    model.fit(x, y, batch_size=50, steps_per_epoch=2, verbose=0)


def trained_in_a_loop(model, x, y):
    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True))
        model.optimizer.minimize(loss, model.trainable_variables, tape=tape)

    step(tf.constant(x[:50]), tf.constant(y[:50]))


class Wrapped(keras.layers.Layer):
    """A layer in which Keras finds no other, since it holds a function only."""

    def __init__(self, layer):
        super().__init__()
        self._apply = lambda x: layer(x)

    def call(self, x):
        return self._apply(x)


@pytest.mark.parametrize(
    ("kept_in", "train", "run_eagerly"),
    [
        (lambda layer: layer, trained, False),
        pytest.param(
            lambda layer: layer,
            trained,
            True,
            marks=pytest.mark.skipif(GENERATION == 3, reason="Keras 3 trains in graphs only"),
        ),
        (lambda layer: layer, trained_in_a_loop, False),
        (Wrapped, trained, False),
    ],
    ids=["fit", "eager fit", "loop", "hidden"],
)
def test_an_optimizer_alone_refuses_statistics_that_its_ledger_lacks(kept_in, train, run_eagerly):
    x, y = data()
    layer = adapted(x, 20.0)
    model = small_model(kept_in(layer), run_eagerly)
    weights = model.get_weights()
    with pytest.raises(dp.NotPrivateError, match="not in the optimizer's ledger.*dp_event"):
        train(model, x, y)
    assert model.optimizer.ledger.num_releases == 0
    for before, after in zip(weights, model.get_weights()):
        np.testing.assert_array_equal(before, after)
    if not run_eagerly:
        (finding,) = dp.validate(model, (x[:4], y[:4])).findings
        assert layer.name in finding.where + finding.what
    model.optimizer.ledger.other_events += (layer.dp_event,)
    train(model, x, y)
    assert model.optimizer.ledger.num_releases > 0


def test_statistics_that_are_released_between_two_calls_of_fit_are_noticed():
    """The second one traces no step, and has no callback that would look."""
    x, y = data()
    layer = PrivateNormalization(4.0)
    model = of_layer(layer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = dp.DPSGD(1.0, 1.0, expected_batch_size=200, learning_rate=0.1)
    model.compile(optimizer, loss)
    model.fit(x, y, batch_size=200, verbose=0)
    layer.adapt(x)
    with pytest.raises(dp.NotPrivateError, match="release is not in the optimizer's ledger"):
        model.fit(x, y, batch_size=200, verbose=0)
    optimizer.ledger.other_events += (layer.dp_event,)
    model.fit(x, y, batch_size=200, verbose=0)


def test_statistics_that_a_loss_does_not_read_need_no_event():
    x, y = data()
    adapted(x, 20.0)(x)
    model = small_model(keras.layers.Dense(3))
    trained(model, x, y)
    assert model.optimizer.ledger.num_releases == 2


def test_an_event_of_side_information_pays_for_nothing_else():
    x, y = data()
    event = dp_accounting.GaussianDpEvent(20.0)
    fixed = dp.side_information.FixedPreconditioner(
        lambda v: np.ones(v.shape, "float32"), provenance=event
    )
    of_optimizer = {"optimizer_class": dp.AdaDPS, "side_information": fixed}
    plan = planned(normalize_inputs=False, other_events=[event])
    model = model_of_layers(plan, [adapted(x, 20.0)], **of_optimizer)
    with pytest.raises(ValueError, match="in addition to the events of side information"):
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
    numbers = {"delta": 1e-3, "num_examples": len(x), "full_passes": False, "accountant": "rdp"}
    budget, monitor = dp.PrivacyBudget(epsilon=50.0, **numbers), dp.PrivacyMonitor(**numbers)
    before = [v.numpy() for v in model.trainable_variables]
    for callback in (budget, monitor):
        with pytest.raises(dp.errors.NotPrivateError, match="not in the optimizer's ledger"):
            model.fit(x, y, callbacks=[callback], verbose=0)
    for ask in (monitor.epsilon, monitor.statement):
        with pytest.raises(dp.errors.NotPrivateError, match="not in the optimizer's ledger"):
            ask()
    for variable, value in zip(model.trainable_variables, before):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert model.optimizer.ledger.num_releases == 0
    # A layer without statistics costs nothing.
    fresh = model_of_layers(plan, [PrivateNormalization(20.0)])
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


def test_among_several_layers_one_of_examples_is_found_where_users_are_protected():
    x, _ = data()
    layers = [adapted(x, user_ids=np.arange(len(x)) // 2), PrivateNormalization(1.0), adapted(x)]
    assert of_other_unit(layers, SimpleNamespace(examples_per_user=2)) is layers[2]
    assert of_other_unit(layers[:2], SimpleNamespace(examples_per_user=2)) is None
    assert of_other_unit(layers, SimpleNamespace(examples_per_user=None)) is None


def test_statistics_of_examples_do_not_pay_for_users(tmp_path):
    """A user with 400 records moved sums by 400 whose noise was for 1; ε called it proven."""
    x, y = data()
    ids = np.arange(N) // 2
    layer = adapted(x, 20.0)
    kwargs = {"num_examples": None, "user_ids": ids, "examples_per_user": 2, "batch_size": 100}
    plan, model = by_hand([layer], **kwargs)
    released_for_examples = "were released for examples, but the optimizer protects users"
    with pytest.raises(dp.NotPrivateError, match=released_for_examples):
        plan.fit(model, x, y, verbose=0)
    (finding,) = dp.validate(model, (x[:4], y[:4])).findings
    assert finding.kind == "statistics" and finding.where == layer.name
    monitor = dp.PrivacyMonitor(len(set(ids)), 1e-4, sampling="poisson")
    with pytest.raises(dp.NotPrivateError, match=released_for_examples):
        model.fit(x, y, callbacks=[monitor], verbose=0)
    # Copies and saved layers are no better, and those of users are accepted.
    model.save(tmp_path / "model.keras")
    assert not keras.models.load_model(tmp_path / "model.keras").layers[0].protects_users
    of_users = adapted(x, 20.0, user_ids=ids)
    assert of_users.protects_users and not layer.protects_users
    plan, model = by_hand([of_users], **kwargs)
    plan.fit(model, x, y, verbose=0)
    of_users.set_weights(layer.get_weights())  # which were released for examples
    with pytest.raises(dp.NotPrivateError, match=released_for_examples):
        plan.fit(model, x, y, verbose=0)
