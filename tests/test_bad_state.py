"""What must not get lost or moved when something goes wrong: the ledger, and other examples."""

import copy
import math
import pickle

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tf_adaptive_dp.accounting import BandedNoise
from tf_adaptive_dp.optimizers import checked_state


def compiled(name="DPMomentum", **kwargs):
    return catalogue.compiled(name, **kwargs)


def trained(name="DPMomentum", **kwargs):
    model = compiled(name, **kwargs)
    catalogue.fit(model)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("build", [False, True])
def test_a_saved_ledger_is_not_passed_over(build, tmp_path):
    # Keras would skip the optimizer's state with a warning, and ε begin at zero.
    trained("DPAdam").save_weights(tmp_path / "a.weights.h5")
    trained().save_weights(tmp_path / "m.weights.h5")
    model = compiled()
    if build:
        model.optimizer.build(model.trainable_variables)
    advice = r"discard the ledger.*`optimizer.build\(.*Only if .* other data .* before `compile`"
    with pytest.raises(ValueError, match=advice):
        model.load_weights(tmp_path / f"{'a' if build else 'm'}.weights.h5")
    assert model.optimizer.ledger.segments == [(0.5, 8.0, 4)]  # Keras has loaded the weights
    model.optimizer.build(model.trainable_variables)
    model.load_weights(tmp_path / "m.weights.h5")
    assert model.optimizer.ledger.segments == [(0.5, 8.0, 4)]
    plain = catalogue.mlp()
    plain.compile("adam", loss=catalogue.loss())
    catalogue.fit(plain)
    plain.save_weights(tmp_path / "p.weights.h5")
    with pytest.warns(UserWarning, match="not loaded"):  # trained before, on other data
        model.load_weights(tmp_path / "p.weights.h5")
    assert model.optimizer.ledger.segments == [(0.5, 8.0, 4)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Weights that were trained by an optimizer with other slots than `compiled()` has."""
    path = tmp_path_factory.mktemp("saved") / "a.weights.h5"
    model = trained("DPAdam", noise_multiplier=0.7)
    model.optimizer.ledger.note_units(32)
    model.save_weights(path)
    return path


def loaded_with_a_warning(path, trained_before):
    model = trained() if trained_before else compiled()
    model.optimizer.build(model.trainable_variables)
    with pytest.warns(UserWarning, match="could not be loaded|discard the ledger|[Ss]kipping"):
        model.load_weights(path, skip_mismatch=True)
    return model


@pytest.mark.parametrize("trained_before", [False, True])
def test_a_state_that_keras_skips_with_a_warning_stops_training_and_is_counted(
    saved, trained_before
):
    model = loaded_with_a_warning(saved, trained_before)
    counted = [(0.5, 8.0, 4)] * trained_before + [(0.7, 8.0, 4)]
    assert model.optimizer.ledger.segments == counted
    weights = model.get_weights()
    # Of the callbacks each asks, since a step that was compiled before does not.
    callbacks = [dp.PrivacyMonitor(1_000, 1e-3)] if trained_before else []
    with pytest.raises(dp.NotPrivateError, match="a saved state of 4 releases"):
        catalogue.fit(model, callbacks=callbacks)
    for a, b in zip(model.get_weights(), weights):
        np.testing.assert_array_equal(a, b)
    assert model.optimizer.ledger.segments == counted


@pytest.mark.in_turns
@pytest.mark.parametrize("decision", ["count", "discard", "load"])
def test_training_goes_on_after_a_decision(saved, decision, tmp_path):
    model = loaded_with_a_warning(saved, trained_before=False)
    ledger = model.optimizer.ledger
    if decision == "count":
        ledger.restore(ledger.segments, ledger.checks)
        assert ledger.fewest_units == 32
    elif decision == "discard":
        ledger.restore([])
    else:
        trained().save_weights(tmp_path / "m.weights.h5")
        model.load_weights(tmp_path / "m.weights.h5")
    catalogue.fit(model)
    assert ledger.num_releases == {"count": 8, "discard": 4, "load": 8}[decision]


UNITS = {"examples": {}, "users": {"examples_per_user": 2}}
CORRELATED = {"noise": BandedNoise(2)}
N = 1_000


def epsilon(optimizer):
    """That of whatever draws batches of 8 units."""
    if optimizer.noise.is_independent:
        unit = {"examples_per_user": optimizer.examples_per_user}
        sampling = dp.PoissonSampling.for_batch_size(8, N, 100, **unit)
    else:
        sampling = dp.sampling.CyclicPoissonSampling.for_batch_size(8, N, 100, 2)
    # Of the ledger alone: an optimizer knows that no sampler of ours drew the batches of `fit`.
    return sampling.epsilon_spent(optimizer.ledger, N, 1e-3)


def built(**kwargs):
    model = compiled(**{"noise_multiplier": 1.0, "expected_batch_size": 8.0, **kwargs})
    model.optimizer.build(model.trainable_variables)
    return model


def state_of(tmp_path, **kwargs):
    """A model with a ledger of 4 releases, and its weights in a file."""
    model = built(**kwargs)
    model.optimizer.ledger.restore([(1.0, 8.0, 4)])
    model.save_weights(tmp_path / "m.weights.h5")
    return model, tmp_path / "m.weights.h5"


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("saved, own", [("users", "examples"), ("examples", "users")])
def test_what_was_spent_on_another_unit_is_not_taken_for_this_one(saved, own, tmp_path):
    old, path = state_of(tmp_path, **UNITS[saved])
    model = built(**UNITS[own])
    with pytest.raises(ValueError, match="same unit of privacy.*users of at most 2"):
        model.optimizer.set_weights([np.asarray(v) for v in old.optimizer.variables])
    assert model.optimizer.ledger.num_releases == 0
    with pytest.raises(ValueError, match="same unit of privacy.*users of at most 2"):
        model.load_weights(path)
    assert epsilon(model.optimizer) == math.inf
    with pytest.raises(dp.NotPrivateError, match="It counts .* a saved state of 4 releases"):
        catalogue.fit(model)
    model.optimizer.ledger.other_events = ()  # "all that was loaded had other data"
    catalogue.fit(model)
    model.optimizer.ledger.fewest_units = None  # there are more than `fit` had
    assert 0 < epsilon(model.optimizer) < math.inf


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("saved, own", [(CORRELATED, {}), ({}, CORRELATED)])
def test_correlated_and_independent_releases_are_not_counted_together(saved, own, tmp_path):
    _, path = state_of(tmp_path, **saved)
    model = built(**own)
    with pytest.raises(ValueError, match="discard the ledger"):
        model.load_weights(path)
    ledger = model.optimizer.ledger
    assert epsilon(model.optimizer) == math.inf
    for restored in (ledger.segments, []):  # which is no decision here
        ledger.restore(restored)
        with pytest.raises(dp.NotPrivateError, match=r"`sampling.dp_event\(old, num_examples\)`"):
            catalogue.fit(model)
    fitting = built(**own).optimizer.variables
    model.optimizer.set_weights([np.asarray(v) for v in fitting])  # no refused one is left
    assert epsilon(model.optimizer) == 0.0
    catalogue.fit(model)


def test_a_checkpoint_of_another_unit_has_no_epsilon(tmp_path):
    old, _ = state_of(tmp_path, **UNITS["users"])
    path = tf.train.Checkpoint(optimizer=old.optimizer).save(tmp_path / "c")
    model = built()
    tf.train.Checkpoint(optimizer=model.optimizer).restore(path)
    for call in (lambda: dp.epsilon_spent(model.optimizer, N, 1e-3), lambda: catalogue.fit(model)):
        with pytest.raises(ValueError, match="another unit of privacy: examples_per_user=2"):
            call()


def by_weights(old, tmp_path):
    old.save_weights(tmp_path / "m.weights.h5")
    model = built()
    model.load_weights(tmp_path / "m.weights.h5")
    return model


def by_set_weights(old, _):
    model = built()
    model.optimizer.set_weights([np.asarray(v) for v in old.optimizer.variables])
    return model


def by_checkpoint(old, tmp_path):
    path = tf.train.Checkpoint(optimizer=old.optimizer).save(tmp_path / "c")
    model = built()
    tf.train.Checkpoint(optimizer=model.optimizer).restore(path)
    return model


def by_config(old, _):
    model = built()
    new = type(old.optimizer).from_config(old.optimizer.get_config())
    model.compile(new, loss=catalogue.loss())
    return model


def by_file(old, tmp_path):
    old.save(tmp_path / "m.keras")
    return tf.keras.models.load_model(tmp_path / "m.keras")


OF_THE_OPTIMIZER = {
    "weights": by_weights,
    "set_weights": by_set_weights,
    "checkpoint": by_checkpoint,
    "config": by_config,
}
OF_THE_MODEL = {
    "keras": by_file,
    "deepcopy": lambda old, _: copy.deepcopy(old),
    "pickle": lambda old, _: pickle.loads(pickle.dumps(old)),
}


@pytest.mark.parametrize("by", OF_THE_OPTIMIZER)
def test_releases_beside_the_gradients_travel_with_the_ledger(by, tmp_path):
    event = dp_accounting.GaussianDpEvent(2.0)
    old = built()
    old.optimizer.ledger.other_events = (event,)
    old.optimizer.ledger.restore([(1.0, 8.0, 4)])
    model = OF_THE_OPTIMIZER[by](old, tmp_path)
    assert model.optimizer.ledger.other_events == (event,)
    assert epsilon(model.optimizer) == epsilon(old.optimizer) > 1.5


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("by", [*OF_THE_OPTIMIZER, *OF_THE_MODEL])
def test_the_mark_of_a_search_travels_with_the_ledger(by, chosen, tmp_path):
    old = built()
    old.optimizer.ledger.restore([(1.0, 8.0, 4)])
    old.optimizer.ledger.chosen_by_search = chosen
    assert ("chosen_by_search" in old.optimizer.get_config()) == chosen
    model = {**OF_THE_OPTIMIZER, **OF_THE_MODEL}[by](old, tmp_path)
    assert model.optimizer.ledger.num_releases == 4
    assert model.optimizer.ledger.chosen_by_search == chosen


@pytest.mark.parametrize("own", [{}, UNITS["users"]])  # which cannot count its releases
def test_a_refused_state_brings_the_mark_of_a_search(own, tmp_path):
    other = compiled("DPAdam", noise_multiplier=0.7)
    other.optimizer.build(other.trainable_variables)
    other.optimizer.ledger.restore([(0.7, 8.0, 4)])
    other.optimizer.ledger.chosen_by_search = True
    other.save_weights(tmp_path / "a.weights.h5")
    model = built(**own)
    with pytest.raises(ValueError, match="discard the ledger"):
        model.load_weights(tmp_path / "a.weights.h5")
    assert model.optimizer.ledger.chosen_by_search


def test_a_refused_state_brings_its_other_events(tmp_path):
    other = compiled("DPAdam", noise_multiplier=0.7)
    other.optimizer.build(other.trainable_variables)
    other.optimizer.ledger.restore([(0.7, 8.0, 4)])
    other.optimizer.ledger.other_events = (dp_accounting.GaussianDpEvent(2.0),)
    other.save_weights(tmp_path / "a.weights.h5")
    model = built()
    with pytest.raises(ValueError, match="discard the ledger"):
        model.load_weights(tmp_path / "a.weights.h5")
    assert model.optimizer.ledger.other_events == other.optimizer.ledger.other_events
    assert model.optimizer.ledger.segments == [(0.7, 8.0, 4)]
    other.optimizer.ledger.other_events = (dp_accounting.LaplaceDpEvent(2.0),)
    other.save_weights(tmp_path / "a.weights.h5")
    model = built()
    with pytest.raises(ValueError, match="discard the ledger"):
        model.load_weights(tmp_path / "a.weights.h5")
    assert epsilon(model.optimizer) == math.inf
    with pytest.raises(dp.NotPrivateError, match="what else was released"):
        catalogue.fit(model)


def test_the_ledger_of_a_refused_state_is_added_with_its_checks_and_within_the_room_there_is():
    ledger, refused = catalogue.make("DPSGD").ledger, checked_state.RefusedState()
    ledger.restore([(2.0, 8.0, 1)] * 63, [(1, 1, 5, 0.0)] * 63)
    other = catalogue.make("DPSGD")
    other.ledger.restore([(1.0, 4.0, 3), (3.0, 16.0, 2)], [(3, 2, 9, 0.0), (2, 1, 7, 12.0)])
    store = {str(k): v.numpy() for k, v in enumerate(other.variables)}
    refused.require_decision(ledger)
    refused.add_to(ledger, store)
    assert ledger.segments[-2:] == [(2.0, 8.0, 1), (1.0, 16.0, 5)]
    assert ledger.checks[-1] == (5, 3, 7, 12.0)
    with pytest.raises(dp.NotPrivateError, match="5 releases"):
        refused.require_decision(ledger)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("where", ["x", "sample_weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_example_that_is_not_finite_is_left_out_and_no_other(where, value):
    def weights(absent):
        model, x, sample_weight = compiled(), catalogue.data()[0], np.ones(32)
        sample_weight[3] = 0.0 if absent else 1.0
        if not absent:
            {"x": x, "sample_weight": sample_weight}[where][3] = value
        y = catalogue.data()[1]
        model.fit(x, y, 8, verbose=0, shuffle=False, sample_weight=sample_weight)
        assert model.optimizer.ledger.segments == [(0.5, 8.0, 4)]
        return model.get_weights()

    for a, b in zip(weights(absent=False), weights(absent=True)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_what_is_released_was_counted_before():
    # A later operation of the step may fail when weights have moved already.
    optimizer, w = catalogue.make("DPSGD"), tf.Variable([1.0, 2.0])

    @tf.function
    def release():
        ((gradient, _),) = optimizer.compute_gradients(lambda: w[0] * tf.ones([4]), [w])
        return gradient

    graph = release.get_concrete_function().graph
    counts = next(h for v, h in graph.captures if v is optimizer.ledger._counts.handle)
    seen, todo = set(), [graph.outputs[0].op]
    while todo:
        op = todo.pop()
        if op not in seen:
            seen.add(op)
            todo += [t.op for t in op.inputs] + list(op.control_inputs)
    counting = ("AssignVariableOp", "AssignAddVariableOp")
    assert any(op.type in counting and op.inputs[0] is counts for op in seen)
