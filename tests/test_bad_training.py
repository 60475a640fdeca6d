"""Wrong calls in the middle of training: refused, and every variable stays as it was."""

import functools
import math

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tests.helpers.unchanged import assert_refused, snapshot
from tf_adaptive_dp._keras.generation import GENERATION

X, Y = catalogue.data()
OUT_OF_RANGE = np.where(np.arange(32) == 3, 7, Y)
SCALAR = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
CANARIES = dp.auditing.Canaries(X, Y, seed=1)
N, DELTA = 1_000, 1e-5


def compiled(name="DPMomentum", loss=None, compile_with=(), **kwargs):
    model = catalogue.mlp()
    optimizer = catalogue.make(name, **kwargs)
    model.compile(optimizer, loss=loss or catalogue.loss(), **dict(compile_with))
    return model


@functools.cache  # no row changes it
def trained(name="DPMomentum", **kwargs):
    model = compiled(name, **kwargs)
    catalogue.fit(model)
    return model


def fit(model, x=X, y=Y, batch_size=8, callbacks=None, **kwargs):
    callbacks = catalogue.callbacks_of(model.optimizer) if callbacks is None else callbacks
    model.fit(x, y, batch_size, callbacks=callbacks, shuffle=False, verbose=0, **kwargs)


def step(model, y=OUT_OF_RANGE):
    """One step of a loop with shapes that are known, so that nothing has to wait for data."""

    @tf.function
    def run(x, y):
        with tf.GradientTape() as tape:
            loss = catalogue.loss()(y, model(x, training=True))
        model.optimizer.minimize(loss, model.trainable_variables, tape)

    run(tf.constant(X[:8]), tf.constant(y[:8]))


def minimize(model, loss, variables=None, tape=None):
    variables = model.trainable_variables if variables is None else variables
    model.optimizer.minimize(loss, variables, tape)


def minimize_other(model):
    w = tf.Variable(1.0, name="other")
    minimize(model, lambda: w * tf.ones([8]), [w])


def apply_foreign(model):
    model.optimizer.apply_gradients([(tf.ones_like(v), v) for v in model.trainable_variables])


def source(model, loss, variables=None, tape=None, **kwargs):
    variables = model.trainable_variables if variables is None else variables
    dp.gradients.per_example_gradients(loss, variables, tape or tf.GradientTape(), **kwargs)


def setting(name, value):
    return lambda model: setattr(model.optimizer, name, value)


def calling(name, *args):
    return lambda model: getattr(model.optimizer, name)(*args)


def with_callback(callback):
    return lambda model: fit(model, callbacks=[callback])


def on_two_replicas(model):
    strategy = catalogue.mirrored()
    with strategy.scope():
        w = tf.Variable([1.0])
        optimizer = catalogue.make("DPSGD", gradient_accumulation_steps=2)
        optimizer.build([w])
    strategy.run(lambda: optimizer.minimize(lambda: w * tf.ones([4]), [w]))


T, V, P = TypeError, ValueError, dp.NotPrivateError
FAILED = tf.errors.InvalidArgumentError
PARTS, ADAPTIVE = {"gradient_accumulation_steps": 3}, {"clipping": "adaptive"}
LABEL = "label value of 7"
# The train step of Keras 3 asks for gradients when its tape is gone, so it must be compiled.
NOT_COMPILED = "Received: a step that is not compiled" if GENERATION == 3 else None

TRAINED = {
    "labels": ({}, lambda m: fit(m, y=OUT_OF_RANGE), FAILED, LABEL),
    "labels in a loop": ({}, step, FAILED, LABEL),
    "labels of ADADP": ({"name": "ADADP euler"}, step, FAILED, LABEL),
    "labels in a part": (PARTS, step, FAILED, LABEL),
    "labels, adaptive": (ADAPTIVE, step, FAILED, LABEL),
    "labels, secure": ({"secure_noise": True, "seed": None}, step, FAILED, LABEL),
    "sizes vary": ({}, lambda m: fit(m, batch_size=5), V, "vary.*`expected_batch_size"),
    "parts vary": (PARTS, lambda m: fit(m, batch_size=5), V, "Batches vary in size"),
    "no rows": (
        {},
        lambda m: m.fit(tf.data.Dataset.from_tensors((X[:0], Y[:0])), verbose=0),
        FAILED,
        "Batches vary in size",
    ),
    "no data": (
        {},
        lambda m: fit(m, X[:0], Y[:0]),
        *((V, "non-empty") if GENERATION == 2 else (Warning, "ran out of data")),
    ),
    "not batched": (
        {},
        lambda m: m.fit(tf.data.Dataset.from_tensor_slices((X, Y)), verbose=0),
        V,  # in Keras 3 from the layers
        "a vector .B.. Received: a loss of unknown rank|shape with unknown rank",
    ),
    "four parts": (
        {},
        lambda m: m.fit(tf.data.Dataset.from_tensors((X, Y, Y, Y)), verbose=0),
        V,
        "Data is expected to be in format",
    ),
    "weights 8x2": ({}, lambda m: fit(m, sample_weight=np.ones([32, 2])), V, "imension"),
    "weights 31": ({}, lambda m: fit(m, sample_weight=np.ones(31)), V, "sample_weight'? sizes: 31"),
    "labels 2d": ({}, lambda m: fit(m, y=np.eye(3)[Y]), V, "(labels|target).shape"),
    "noise -1": ({}, setting("noise_multiplier", -1), V, "Received: noise_multiplier=-1"),
    "noise None": ({}, setting("noise_multiplier", None), T, "Received: noise_multiplier=None"),
    "clip 0": ({}, setting("l2_norm_clip", 0), V, "Received: l2_norm_clip=0"),
    "clip nan": (ADAPTIVE, setting("l2_norm_clip", math.nan), V, "Received: l2_norm_clip=nan"),
    "size bool": ({}, setting("expected_batch_size", True), T, "expected_batch_size=True"),
    "no noise": (
        {"name": "DPAdamWOSM"},
        setting("noise_multiplier", 0),
        V,
        "`noise_multiplier` must be greater than 0.*Received: noise_multiplier=0",
    ),
    "groups": ({}, setting("num_microbatches", 2), AttributeError, "num_microbatches"),
    "clipping": ({}, setting("clipping", "automatic"), AttributeError, "clipping"),
    "foreign": (
        {},
        apply_foreign,
        P,
        r"only gradients .*: other gradients, for \S*hidden/kernel, \S+, \S+ and \d+ more\. ",
    ),
    "no pairs": ({}, calling("apply_gradients", 5), T, "not iterable"),
    "no tape": ({}, lambda m: minimize(m, tf.ones([3])), V, "`tape` must be the tape"),
    "list": ({}, lambda m: minimize(m, [1.0], tape=tf.GradientTape()), T, r"loss=\[1.0\]"),
    "other tape": (
        {},
        lambda m: minimize(m, tf.ones([3]), tape=tf.GradientTape()),
        V,
        r"depends on none of the variables. Received: \S*hidden/kernel",
    ),
    "other variable": ({}, minimize_other, V, r"`var_list` must hold .*Received: other\. "),
    "source, method": ({}, lambda m: source(m, tf.ones([3]), method="x"), V, "gradients='x'"),
    "source, eager": (
        {},
        lambda m: source(m, tf.ones([3]), method="traced"),
        V,
        "Received: gradients='traced' under eager",
    ),
    "source, int": ({}, lambda m: source(m, tf.ones([3]), [tf.Variable(1)]), V, "type int32"),
    "source, array": ({}, lambda m: source(m, np.ones(3)), T, "`loss` must be a tensor"),
    "source, tape": (
        {},
        lambda m: dp.gradients.per_example_gradients(tf.ones([3]), m.trainable_variables, None),
        V,
        "Received: tape=None",
    ),
    "replicas": ({}, on_two_replicas, P, "On several replicas only a compiled step"),
    "weights of Adam": (
        {},
        lambda m: m.optimizer.set_weights(trained("DPAdam").optimizer.variables),
        V,
        "`weights` must be .*Received: shapes",
    ),
    "few weights": ({}, calling("set_weights", [np.zeros([])]), V, r"Received: shapes \[\(\)\]"),
    "ledger of 65": (
        {},
        lambda m: m.optimizer.ledger.restore([(1.0, 8.0, 1)] * 65),
        V,
        "`segments` must .*Received: 65",
    ),
    "ledger of -1": (
        {},
        lambda m: m.optimizer.ledger.restore([(1.0, 8.0, -1)]),
        V,
        "Received: num_releases=-1",
    ),
    "monitor": (
        {},
        with_callback(dp.PrivacyMonitor(5, DELTA, full_passes=False)),
        V,
        "batch_size=8, num_examples=5",
    ),
    "monitor, passes": (
        {},
        with_callback(dp.PrivacyMonitor(5, DELTA)),
        V,
        "these are 32 examples, but `num_examples` says 5",
    ),
    "sampling": (
        {},
        with_callback(dp.PrivacyMonitor(32, DELTA, sampling=dp.sampling.ShuffledEpochs(4, 9))),
        V,
        "`expected_batch_size=4.0`.*Received: expected_batch_size=8.0",
    ),
    "budget": (
        {},
        with_callback(dp.PrivacyBudget(1e-3, DELTA, N, full_passes=False)),
        dp.BudgetExceededError,
        "Received: epsilon=0.001, delta=1e-05, with 4 releases",
    ),
    "budget, size": (
        {},
        with_callback(dp.PrivacyBudget(9.0, DELTA, N, batch_size=2, full_passes=False)),
        V,
        "`batch_size` must be .*Received: batch_size=2",
    ),
    "audit": (
        {},
        with_callback(dp.auditing.PrivacyAudit(CANARIES, DELTA, loss=SCALAR)),
        V,
        "one number for each canary",
    ),
    "other public": (
        {"name": "AdaDPS adam"},
        with_callback(dp.side_information.PublicGradients(catalogue.PUBLIC, provenance="public")),
        V,
        "must be the one that holds this PublicGradients",
    ),
}

COMPILED = {
    "first labels": ({}, step, FAILED, LABEL),
    "scalar": (
        {"loss": SCALAR, "compile_with": {"run_eagerly": True}},
        fit,
        P,
        NOT_COMPILED or 'Received: a scalar loss.*reduction="none"',
    ),
    "strings": (
        {},
        lambda m: fit(m, y=np.array(["cat", "dog"], object)[Y % 2]),
        T,
        "must be numbers. Received: strings.*Number them before training",
    ),
    "groups": ({"num_microbatches": 3}, fit, V, "`num_microbatches` must divide.*Received: 3"),
    "layer": ({"clipping": dp.PerLayerClipping({"hiden": 1.0})}, fit, V, "`shares` .*for hiden"),
    "eager": (
        {"gradients": "traced", "compile_with": {"run_eagerly": True}},
        fit,
        V,
        NOT_COMPILED or "Received: gradients='traced' under eager",
    ),
    "no callback": (
        {"name": "AdaDPS adam"},
        lambda m: fit(m, callbacks=[]),
        FAILED,
        "no public data.*`fit.callbacks",
    ),
    "unpriced": ({}, with_callback(dp.PrivacyBudget(1.0, DELTA, N)), V, "`expected_batch_size`"),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("row", TRAINED.values(), ids=TRAINED)
@pytest.mark.filterwarnings("error:Your input ran out of data")
def test_wrong_calls_change_nothing(row):
    kwargs, call, error, match = row
    model = trained(**kwargs)
    assert_refused(model, lambda: call(model), error, match)


@pytest.mark.slow
@pytest.mark.parametrize("row", COMPILED.values(), ids=COMPILED)
def test_wrong_first_calls_change_nothing(row):
    kwargs, call, error, match = row
    model = compiled(**kwargs)
    assert_refused(model, lambda: call(model), error, match)


@pytest.mark.slow_on(3)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("call", [step, apply_foreign, minimize_other, setting("l2_norm_clip", 0)])
def test_training_goes_on_as_if_nothing_had_happened(call):
    model, other = compiled(), compiled()
    for m in (model, other):
        catalogue.fit(m)
        if m is model:
            with pytest.raises((FAILED, V)):
                call(m)
        catalogue.fit(m)
    assert model.optimizer.ledger.segments == [(0.5, 8.0, 8)]
    assert snapshot(model) == snapshot(other)


def test_logs_refuse_what_is_not_theirs(tmp_path):
    model = trained()
    log = dp.ReleaseLog(tmp_path / "log")
    rows = [
        (lambda: fit(model, callbacks=[log]), V, r"another run.*Received: ledger=.*log=\[\]"),
        (lambda: dp.ReleaseLog(tmp_path / "log"), RuntimeError, "in use by another.*path="),
        (lambda: log.adopt(tf.keras.optimizers.SGD()), T, "Received: optimizer=<keras"),
        (lambda: log.announce(model.optimizer, 0), V, "`num_releases` .*num_releases=0"),
        (lambda: log.announce(compiled().optimizer), V, "Pass `expected_batch_size`"),
    ]
    for row in rows:
        assert_refused(model, *row)
        assert log.segments == []


@pytest.mark.slow
def test_a_budget_with_a_wrong_batch_size_ends_with_an_error():
    model = compiled()
    with pytest.raises(ValueError, match="`batch_size` must be .*is 8.*Received: batch_size=2"):
        fit(model, callbacks=[dp.PrivacyBudget(9.0, DELTA, N, batch_size=2)])
    assert model.optimizer.ledger.num_releases == 1
