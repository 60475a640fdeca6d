"""What must not get lost or moved when something goes wrong: the ledger, and other examples."""

import math

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tf_adaptive_dp.optimizers import checked_state


def compiled(name="DPMomentum", **kwargs):
    model = catalogue.mlp()
    model.compile(catalogue.make(name, **kwargs), loss=catalogue.loss())
    return model


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
    with pytest.raises(ValueError, match=r"discard the ledger.*`optimizer.build\("):
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
    trained("DPAdam", noise_multiplier=0.7).save_weights(path)
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


@pytest.mark.parametrize("decision", ["count", "discard", "load"])
def test_training_goes_on_after_a_decision(saved, decision, tmp_path):
    model = loaded_with_a_warning(saved, trained_before=False)
    ledger = model.optimizer.ledger
    if decision == "count":
        ledger.restore(ledger.segments, ledger.checks)
    elif decision == "discard":
        ledger.restore([])
    else:
        trained().save_weights(tmp_path / "m.weights.h5")
        model.load_weights(tmp_path / "m.weights.h5")
    catalogue.fit(model)
    assert ledger.num_releases == {"count": 8, "discard": 4, "load": 8}[decision]


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
