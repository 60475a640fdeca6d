"""What must not get lost or moved when something goes wrong: the ledger, and other examples."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import catalogue


def compiled(name="DPMomentum"):
    model = catalogue.mlp()
    model.compile(catalogue.make(name), loss=catalogue.loss())
    return model


def trained(name="DPMomentum"):
    model = compiled(name)
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
    assert model.optimizer.ledger.num_releases == 0
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
