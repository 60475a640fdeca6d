"""Traced gradients of each model of the zoo are those of batches of one, in each mode."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import zoo
from tests.helpers.gradients_asked import answers, check, figures

pytestmark = pytest.mark.filterwarnings(
    "ignore:No rule covers", "ignore:Under `jit_compile=True`", "ignore:Under eager execution"
)


def everything(problem, scale, shift, num_microbatches=None, method=None, examples_per_user=None):
    """From weights and a batch to all that a source can be asked."""
    method = method or ("traced" if problem.rules else "auto")

    def ask(weights, *batch):
        source = zoo.source(
            *(problem, *batch),
            method=method,
            num_microbatches=num_microbatches,
            examples_per_user=examples_per_user,
        )
        return answers(source, scale, shift, weights)

    return ask


@functools.cache
def compiled(name):
    """`everything`, traced once for batches of any size."""
    problem, (scale, shift, weights) = zoo.problem(name), figures(name)
    batch = (weights, *problem.batch)
    return zoo.in_mode("graph", everything(problem, scale, shift), batch, problem.free)


def models(names=tuple(zoo.ZOO)):
    """Parameters: names of models."""
    return pytest.mark.parametrize("name", names)


@pytest.mark.in_turns
@pytest.mark.slow_after(2)
@models()
def test_batches_of_any_size(name):
    problem, rows = zoo.problem(name), zoo.rows(name)
    scale, shift, weights = figures(name)
    for size in (len(weights), 2, 1):
        actual = compiled(name)(weights[:size], *(a[:size] for a in problem.batch))
        part = [r[:size] for r in rows]
        check(actual, part, scale, shift, weights[:size], problem.tolerance)


# Convolutions cannot be asked: TensorFlow's own (oneDNN) fail on batches without examples.
@pytest.mark.slow_after(1)
@models(["MLP", "embedding with repeated ids", "LayerNormalization", "tied weights"])
def test_batches_without_examples(name):
    problem, (_, _, weights) = zoo.problem(name), figures(name)
    actual = compiled(name)(weights[:0], *(a[:0] for a in problem.batch))
    for key in ("plain", "scaled", "shifted", "both"):
        assert actual[key].shape == [0]
    for total, variable in zip(actual["sums"], problem.variables):
        np.testing.assert_array_equal(total, np.zeros(variable.shape))


def of_known_size(name, mode):
    problem = zoo.problem(name)
    scale, shift, weights = figures(name)
    ask = zoo.in_mode(mode, everything(problem, scale, shift), (weights, *problem.batch))
    actual = ask(weights, *problem.batch)
    check(actual, zoo.rows(name), scale, shift, weights, problem.tolerance)


@pytest.mark.slow
@models()
def test_batches_of_known_size(name):
    of_known_size(name, "graph of fixed size")


IN_XLA_QUICKLY = ["MLP", "CNN", "transformer", "embedding with repeated ids", "tied weights"]


@pytest.mark.in_turns
@pytest.mark.slow_after(2)
@models(IN_XLA_QUICKLY)
def test_batches_of_known_size_in_xla_quickly(name):
    of_known_size(name, "xla")


# By name: to ask each problem would build every model of the zoo in each process that collects.
NOT_IN_XLA = ["branch"]
WITHOUT_RULES = ["branch"]
OF_NUMBERS = ["embedding with repeated ids", "masked embedding", "gathered by hand", "tied weights"]
OF_NUMBERS += ["transformer", "transformer on text of any length"]


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.ZOO)
def test_nothing_is_left_out_that_could_be_asked(name):
    problem = zoo.problem(name)
    assert problem.xla == (name not in NOT_IN_XLA)
    assert problem.rules == (name not in WITHOUT_RULES)
    assert (problem.batch[0].dtype.kind == "f") == (name not in OF_NUMBERS)


@pytest.mark.slow
@models([n for n in zoo.ZOO if n not in [*NOT_IN_XLA, *IN_XLA_QUICKLY]])
def test_batches_of_known_size_in_xla(name):
    of_known_size(name, "xla")


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", ["MLP", "CNN", "transformer", "tied weights", "siamese network"])
def test_eager_execution_agrees(name):
    problem, (scale, shift, weights) = zoo.problem(name), figures(name)
    actual = everything(problem, scale, shift, method="auto")(weights, *problem.batch)
    check(actual, zoo.rows(name), scale, shift, weights, problem.tolerance)


GROUPED = ["MLP", "CNN", "embedding with repeated ids", "layers at each time", "tied weights"]
GROUPED += ["transposed convolutions", "EinsumDense", "normalized images", "time-major"]
GROUPED += ["depthwise and separable"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("mode", ["graph", "graph of fixed size"])
@pytest.mark.parametrize("name", GROUPED)
def test_microbatches(name, mode):
    grouped(name, mode, 2, method="auto")


def test_microbatches_of_one_example():
    grouped("CNN", "graph", 4)


def grouped(name, mode, groups, method=None):
    problem, (scale, shift, weights) = zoo.problem(name), figures(name)
    batch = [a[:4] for a in problem.batch]
    rows = [r[:4].reshape(groups, 4 // groups, *r.shape[1:]).mean(1) for r in zoo.rows(name)]
    ask = everything(problem, scale, shift, groups, method)
    ask = functools.partial(ask, tf.constant(weights[:groups]))
    actual = zoo.in_mode(mode, ask, batch)(*batch)
    check(actual, rows, scale, shift, weights[:groups], problem.tolerance)


OF_USERS = [*GROUPED, "LSTM", "transformer", "layer used twice"]
OF_USERS = [(name, mode) for mode in ("graph of fixed size", "graph") for name in OF_USERS]
OF_USERS += [("MLP", "eager"), ("MLP", "xla"), ("CNN", "xla"), ("tied weights", "xla")]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name, mode", OF_USERS)
def test_the_rows_of_a_user_are_added_up_before_the_norm(name, mode):
    problem, (scale, shift, weights) = zoo.problem(name), figures(name)
    batch = [a[:4] for a in problem.batch]
    rows = [r[:4].reshape(2, 2, *r.shape[1:]).sum(1) for r in zoo.rows(name)]
    method = "auto" if mode == "eager" else None
    ask = everything(problem, scale, shift, method=method, examples_per_user=2)
    ask = functools.partial(ask, tf.constant(weights[:2]))
    actual = zoo.in_mode(mode, ask, batch)(*batch)
    check(actual, rows, scale, shift, weights[:2], problem.tolerance)


def spoilt(name, bad):
    """A batch in which one example is not finite, and that example."""
    problem = zoo.problem(name)
    batch = [a.copy() for a in problem.batch]
    batch[0].reshape(len(batch[0]), -1)[1, 1] = bad
    return batch


APART = [n for n in zoo.ZOO if n not in [*WITHOUT_RULES, *OF_NUMBERS]]


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@models(APART)
def test_an_example_that_is_not_finite_changes_nothing_for_the_others(name, bad):
    problem = zoo.problem(name)
    scale, shift, weights = figures(name)  # the weight of example 1 is 0
    good = compiled(name)(weights, *problem.batch)
    actual = compiled(name)(weights, *spoilt(name, bad))
    for key in ("plain", "scaled", "shifted", "both"):
        others = [0, *range(2, len(weights))]
        np.testing.assert_allclose(
            actual[key].numpy()[others], good[key].numpy()[others], rtol=1e-6, err_msg=key
        )
        # Without what saturates, the gradient of the example itself is not finite.
        assert not np.isfinite(actual[key][1]) or bad == np.inf
    for total, expected in zip(actual["sums"], good["sums"]):
        np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["CNN", "MultiHeadAttention", "products by hand"])
def test_the_mechanism_releases_the_others_when_one_example_is_nan(name):
    problem = zoo.problem(name)

    others = [np.delete(a, 1, axis=0) for a in problem.batch]
    mechanism = zoo.make_mechanism(expected_batch_size=4)

    def step(*batch):
        return mechanism.release(zoo.source(problem, *batch), tf.shape(batch[0])[0])

    step = zoo.in_mode("graph", step, problem.batch)
    for actual, expected in zip(step(*spoilt(name, np.nan)), step(*others)):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert mechanism.ledger.num_releases == 2
