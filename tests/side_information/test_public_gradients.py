"""PublicGradients with every optimizer: what data it takes, and when it is refreshed."""

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tf_adaptive_dp.side_information import disjoint


def compiled(optimizer, **kwargs):
    model = catalogue.mlp()
    model.compile(optimizer, loss=catalogue.loss(), **kwargs)
    return model


def public(dataset=catalogue.PUBLIC, provenance="public", **kwargs):
    return dp.side_information.PublicGradients(dataset, provenance=provenance, **kwargs)


def refreshes(optimizer):
    ((number,), *_) = optimizer.side_information_state
    return int(number)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["DPRPub", "DPAdamPub", "PDADPMD", "ADADP public"])
@pytest.mark.parametrize("run_eagerly", catalogue.EAGERLY)
def test_missing_public_data_is_an_error_before_anything_is_released(name, run_eagerly):
    model = compiled(catalogue.make(name), run_eagerly=run_eagerly)
    x, y = catalogue.data()
    start = model.get_weights()
    with pytest.raises(tf.errors.InvalidArgumentError, match="has seen no public data"):
        model.fit(x, y, 8, verbose=0)
    assert model.optimizer.ledger.num_releases == 0
    assert int(model.optimizer.iterations) == 0
    for a, b in zip(model.get_weights(), start):
        np.testing.assert_array_equal(a, b)


def steps(optimizer, numbers, information):
    """What `fit` tells the callback, and a counter in place of the optimizer's own steps."""
    information.set_model(compiled(optimizer))
    information.on_epoch_begin(0)
    found = []
    for number in numbers:
        before = refreshes(optimizer) if found else 0
        optimizer.iterations.assign(number)
        information.on_train_batch_begin(number)
        found.append(refreshes(optimizer) - before)
    return found


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    "every, numbers, expected",
    [
        (1, range(7), [1, 0, 1, 0, 1, 0, 1]),
        (2, range(7), [1, 0, 1, 0, 1, 0, 1]),
        (3, range(7), [1, 0, 0, 0, 1, 0, 0]),
        (1, range(0, 13, 3), [1, 0, 1, 0, 1]),  # executions of three minibatches
        (4, range(0, 13, 3), [1, 0, 1, 0, 1]),
    ],
)
def test_it_is_refreshed_between_the_steps_of_adadp_only(every, numbers, expected):
    information = public(every=every)
    optimizer = dp.ADADP(1.0, 1.0, side_information=information)
    assert steps(optimizer, numbers, information) == expected


def test_the_minibatches_between_refreshes_are_whole_ones():
    # `fit` counts the parts of a batch.
    information = public(every=2)
    optimizer = dp.AdaDPS(information, 1.0, 1.0, gradient_accumulation_steps=3)
    found = steps(optimizer, range(13), information)
    assert [k for k, refreshed in enumerate(found) if refreshed] == [0, 6, 12]


def test_a_custom_loop_cannot_refresh_in_the_middle_of_a_step_of_adadp():
    information = public()
    optimizer = dp.ADADP(1.0, 1.0, side_information=information)
    model = compiled(optimizer)
    for number, expected in enumerate([1, 1, 2, 2, 3]):
        optimizer.iterations.assign(number)
        information.update(model)
        assert refreshes(optimizer) == expected


@pytest.mark.slow
def test_the_parts_of_an_accumulated_batch_share_the_statistics():
    information = public()
    optimizer = dp.AdaDPS(information, 1.0, 1.0, gradient_accumulation_steps=3)
    model = compiled(optimizer)
    seen = []
    note = tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(refreshes(optimizer))
    )
    x, y = catalogue.data()
    model.fit(x[:24], y[:24], 4, 2, 0, [information, note], shuffle=False)  # 6 parts an epoch
    assert seen == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert optimizer.ledger.num_releases == 4


X, Y = catalogue.data()


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        tf.data.Dataset.from_tensor_slices((X[:5], Y[:5])).batch(2),  # 2, 2 and 1 examples
        tf.data.Dataset.from_tensor_slices((3 * X[:6] + 1, Y[:6])).batch(3),  # another kind
        tf.data.Dataset.from_tensor_slices((X[:6], Y[:6], np.arange(6.0))).batch(3),
        tf.data.Dataset.from_tensors((X[:20], Y[:20])),  # larger than the private batches
    ],
)
def test_public_batches_may_be_of_another_structure_than_the_private_ones(data):
    model = compiled(dp.DPSGD(1.0, 1.0, side_information=public(data), seed=1))
    catalogue.fit(model)
    assert model.optimizer.ledger.segments == [(1.0, 8.0, 4)]
    assert refreshes(model.optimizer) == 4
    assert all(np.isfinite(w).all() for w in model.get_weights())


@pytest.mark.slow
def test_the_ideal_of_the_paper_trains_and_says_that_it_is_not_private():
    # Statistics of the private gradients themselves: an upper bound, without any guarantee.
    private = tf.data.Dataset.from_tensor_slices(catalogue.data()).batch(8)
    event = dp_accounting.NonPrivateDpEvent()
    model = compiled(dp.AdaDPS(public(private, provenance=event), 1.0, 1.0))
    catalogue.fit(model)
    assert model.optimizer.ledger.num_releases == 4
    assert model.optimizer.ledger.other_events == (event,)


@pytest.mark.parametrize("optimizer_class", [dp.DPSGD, dp.ADADP, dp.DPAdamWOSM])
def test_a_private_release_of_side_information_joins_every_ledger(optimizer_class):
    event = dp_accounting.GaussianDpEvent(3.0)
    fixed = dp.side_information.FixedPreconditioner({}, provenance=event)
    assert optimizer_class(1.0, 1.0, side_information=fixed).ledger.other_events == (event,)
    assert optimizer_class(1.0, 1.0).ledger.other_events == ()


def test_examples_that_are_private_too_are_refused():
    pytest.importorskip("tf_adaptive_dp.side_information.disjoint")
    generator = np.random.default_rng(8)
    others = tf.data.Dataset.from_tensor_slices(
        (generator.normal(size=(9, 6)).astype("float32"), np.arange(9) % 3)
    ).batch(2)
    public(private_dataset=others)
    with pytest.raises(dp.NotPrivateError):
        public(private_dataset=others.concatenate(catalogue.PUBLIC.take(1)))


EXAMPLES = tf.data.Dataset.from_tensor_slices(catalogue.data())


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "dataset",
    [
        EXAMPLES.batch(8),
        EXAMPLES.shuffle(9).repeat(2).map(lambda x, y: (-x, y)).batch(4).prefetch(1),
        EXAMPLES.padded_batch(4).unbatch().batch(8, num_parallel_calls=2, deterministic=True),
    ],
)
def test_training_on_the_public_data_set_itself_is_refused(dataset):
    information = public(dataset.with_options(tf.data.Options()))
    model = compiled(dp.DPSGD(1.0, 1.0, learning_rate=0.1, side_information=information))
    with pytest.raises(dp.NotPrivateError, match="the one that is trained on"):
        model.fit(EXAMPLES.cache().batch(8), callbacks=[information], verbose=0)
    assert model.optimizer.ledger.num_releases == 0
    model.fit(EXAMPLES.skip(8).batch(8), callbacks=[information], verbose=0)  # for all that is seen
    assert model.optimizer.ledger.num_releases > 0


def of_all(x, y):
    return tf.data.Dataset.from_tensor_slices((x, y))


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("part", "private"),
    [
        (lambda x, y: of_all(x[5:20], y[5:20]).batch(4), lambda x, y: {"x": x, "y": y}),
        (
            lambda x, y: (
                of_all(x[::2].copy(), y[::2]).shuffle(9).map(lambda x, y: (-x, y)).batch(4)
            ),
            lambda x, y: {"x": of_all(x, y).shuffle(9).batch(8)},
        ),
        (lambda x, y: of_all(x, y).take(9).batch(4), lambda x, y: {"x": x[:16], "y": y[:16]}),
    ],
)
def test_training_on_the_arrays_of_the_public_data_warns(part, private):
    x, y = catalogue.data()
    information = public(part(x, y))
    model = compiled(dp.DPSGD(1.0, 1.0, learning_rate=0.1, side_information=information))
    with pytest.warns(UserWarning, match=r"The first \d+ examples of the public data set"):
        model.fit(**private(x, y), batch_size=None, callbacks=[information], verbose=0)


@pytest.mark.slow_on(2)
def test_a_plan_warns_of_public_data_among_its_arrays():
    x, y = catalogue.data()
    budget = {"noise_multiplier": 1.0, "delta": 1e-3}
    plan = dp.PrivacyPlan(num_examples=len(x), batch_size=8, epochs=1, **budget)
    information = public(of_all(x[3:9], y[3:9]).batch(4))
    model = compiled(plan.optimizer(dp.DPSGD, learning_rate=0.1, side_information=information))
    with pytest.warns(UserWarning, match="The first 6 examples of the public data set"):
        plan.fit(model, x, y, callbacks=[information], verbose=0)


def test_public_data_of_other_examples_are_not_warned_of():
    x, y = catalogue.data()
    apart = {
        "others": ((x[:9], y[:9]), (x[9:], y[9:])),
        "some of them": ((x[:9], y[:9]), (x[8:], y[8:])),
        "other features": ((x[:, :3], y), (x, y)),
        "texts": ((np.array(["a", "b"]), y[:2]), (x, y)),
        "nan": ((np.full([2, 6], np.nan, np.float32), y[:2]), (np.full([2, 6], np.nan), y[:2])),
    }
    for name, (of_public, (private_x, private_y)) in apart.items():
        for private in (private_x, of_all(private_x, private_y).batch(4), [1, 2], None):
            found = disjoint.copies_of_first(of_all(*of_public).batch(2), private)
            assert not found, name
    assert disjoint.copies_of_first(of_all(x, y).batch(2), x) == 32
    assert disjoint.copies_of_first(of_all({"a": x}, y).batch(2), {"a": tf.constant(x)}) == 32


def test_a_plan_refuses_to_train_on_the_public_data_set_itself():
    budget = {"noise_multiplier": 1.0, "delta": 1e-3}
    plan = dp.PrivacyPlan(num_examples=len(EXAMPLES), batch_size=8, epochs=1, **budget)
    information = public(EXAMPLES.batch(4))
    model = compiled(plan.optimizer(dp.DPSGD, learning_rate=0.1, side_information=information))
    with pytest.raises(dp.NotPrivateError, match="the one that is trained on"):
        plan.fit(model, EXAMPLES, callbacks=[information], verbose=0)
    assert model.optimizer.ledger.num_releases == 0


@pytest.mark.parametrize("kwargs", [{"private_dataset": [1]}, {"dataset": None}])
def test_data_that_cannot_be_compared_is_refused(kwargs):
    with pytest.raises(TypeError, match="`private_dataset` must be a `tf.data.Dataset`"):
        public(**{"private_dataset": catalogue.PUBLIC, **kwargs})


@pytest.mark.parametrize("name", ["DPRPub", "DPAdamPub", "PDADPMD"])
def test_the_release_waits_for_the_check_of_the_public_data(name):
    # Where noise comes first the release needs nothing of it, and could run before the check.
    optimizer, w = catalogue.make(name), tf.Variable([1.0, 2.0])
    optimizer.build([w])

    @tf.function(autograph=False)
    def release():
        ((gradient, _),) = optimizer.compute_gradients(lambda: w[0] * tf.ones([4]), [w])
        return gradient

    graph = release.get_concrete_function().graph
    ((number,), *_) = optimizer.side_information_state
    handles = {id(outer): inner for outer, inner in graph.captures}
    counts = handles[id(optimizer.ledger._counts.handle)]
    refreshed = handles[id(number.handle)]
    seen = set()
    additions = [op for op in graph.get_operations() if op.type == "AssignAddVariableOp"]
    todo = [op for op in additions if op.inputs[0] is counts]
    assert todo
    while todo:
        op = todo.pop()
        if op not in seen:
            seen.add(op)
            todo += [t.op for t in op.inputs] + list(op.control_inputs)
    reads = [op for op in seen if op.type == "ReadVariableOp" and op.inputs[0] is refreshed]
    assert reads


ROWS = np.random.default_rng(5).normal(size=(16, 3)).astype("float32")
TARGETS = ROWS[:, :1] + 1


class OwnLoss(tf.keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 10 * tf.reduce_mean(tf.reduce_sum((y - y_pred) ** 2, axis=-1))


class Penalized(tf.keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(tf.reduce_mean(tf.reduce_sum(inputs**2, axis=-1)))
        return inputs


def regression(*layers, model_class=tf.keras.Sequential, **kwargs):
    return model_class([tf.keras.Input([3]), tf.keras.layers.Dense(1, **kwargs), *layers])


def of_two_outputs():
    inputs = tf.keras.Input([3])
    return tf.keras.Model(inputs, [tf.keras.layers.Dense(1)(inputs) for _ in range(2)])


def with_penalty():
    return regression(kernel_regularizer=tf.keras.regularizers.L2(0.5))


def test_penalties_that_keras_cannot_add_to_unreduced_losses_are_refused_with_a_cure():
    data = tf.data.Dataset.from_tensors((tf.ones([4, 3]), tf.zeros([4, 1])))
    model, information = with_penalty(), public(data)
    loss = tf.keras.losses.MeanSquaredError(reduction="none")
    model.compile(dp.AdaDPS(information, 1.0, 1.0), loss=loss)
    with pytest.raises(ValueError, match="Leave `reduction` out.*Received: a loss for each"):
        information.update(model)


def squared(reduction):
    return tf.keras.losses.MeanSquaredError(reduction=reduction)


MEAN, SUM = "sum_over_batch_size", "sum"


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "make, loss",
    [
        (with_penalty, squared(SUM)),
        (lambda: regression(Penalized(), model_class=OwnLoss), None),
        (lambda: regression(Penalized()), squared(MEAN)),
        (with_penalty, squared(MEAN)),
        (regression, squared("none")),
        (lambda: regression(model_class=OwnLoss), squared(MEAN)),
        (of_two_outputs, [squared(SUM), squared(SUM)]),
        (of_two_outputs, [squared(MEAN), squared(SUM)]),
    ],
)
def test_public_gradients_are_those_of_a_private_step_without_noise(make, loss):
    """Whatever the reduction and the added terms. The public batch has each example twice."""
    model = make()
    x, y = ROWS[:8], TARGETS[:8]
    several = len(model.outputs) > 1
    twice = tf.data.Dataset.from_tensors((ROWS, (TARGETS,) * 2 if several else TARGETS))
    twice = twice.map(
        lambda x, y: tf.nest.map_structure(lambda a: tf.concat([a[:8]] * 2, 0), (x, y))
    )
    start, steps = model.get_weights(), []
    for mixing in (0.0, 1.0):
        information = public(twice, rule="gradient")
        optimizer = dp.optimizers.baselines.PDADPMD(
            information, 1e6, 0.0, expected_batch_size=8, mixing=mixing, learning_rate=1.0
        )
        model.set_weights(start)
        model.compile(optimizer, loss=loss)
        model.fit(x, [y, y] if several else y, 8, verbose=0, callbacks=[information])
        steps.append([a - b for a, b in zip(start, model.get_weights())])
    assert np.abs(steps[1][0]).max() > 0.1
    for of_public, of_private in zip(*steps):
        np.testing.assert_allclose(of_public, of_private, rtol=1e-4, atol=1e-5)


def test_a_model_may_be_unbuilt_and_leave_variables_out_of_the_loss():
    class TwoHeads(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.unused = tf.keras.layers.Dense(1), tf.keras.layers.Dense(1)

        def call(self, inputs):
            return self.used(inputs) + 0 * tf.stop_gradient(self.unused(inputs))

    information = public(tf.data.Dataset.from_tensors((ROWS, TARGETS)))
    model = TwoHeads()
    model.compile(dp.AdaDPS(information, 1.0, 1.0), loss="mse")
    information.update(model)
    _, moments = model.optimizer.side_information_state
    largest = [float(tf.reduce_max(m)) for m in moments]
    assert len(largest) == 4 and sorted(m > 0 for m in largest) == [False, False, True, True]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("rule", ["adam", "rmsprop", "gradient"])
def test_each_variable_has_its_own_statistics_whatever_the_optimizer_was_built_for(rule):
    def moments(reverse, freeze):
        """Of each variable by its name, after two refreshes."""
        tf.keras.utils.set_random_seed(1)
        layers = [tf.keras.layers.Dense(3, name=name) for name in "abc"]
        model = tf.keras.Sequential([tf.keras.Input([3]), *layers])
        information = public(tf.data.Dataset.from_tensors((ROWS, ROWS)), rule=rule)
        if rule == "gradient":
            optimizer = dp.optimizers.baselines.PDADPMD(information, 1.0, 1.0, mixing=0.5)
        else:
            optimizer = dp.AdaDPS(information, 1.0, 1.0)
        variables = model.trainable_variables[:: -1 if reverse else 1]
        optimizer.build(variables)
        layers[0].trainable = not freeze
        model.compile(optimizer, loss="mse")
        information.update(model)
        information.update(model)
        _, *kept = optimizer.side_information_state
        values = [[v.numpy() for v in of_variable] for of_variable in zip(*kept)]
        names = [getattr(v, "path", v.name).split("/")[-2:] for v in variables]
        return {"/".join(name): found for name, found in zip(names, values)}

    plain = moments(reverse=False, freeze=False)
    for reverse, freeze in ((True, False), (False, True), (True, True)):
        found = moments(reverse, freeze)
        for name, values in found.items():
            expected = [np.zeros_like(v) for v in values] if freeze and name[0] == "a" else None
            np.testing.assert_array_equal(values, plain[name] if expected is None else expected)


def test_an_optimizer_inside_of_loss_scaling_is_found():
    information = public(tf.data.Dataset.from_tensors((ROWS, TARGETS)))
    optimizer = dp.optimizers.baselines.AdaS(information)
    model = regression(dtype="mixed_float16")
    model.compile(tf.keras.mixed_precision.LossScaleOptimizer(optimizer), loss="mse")
    model.fit(ROWS, TARGETS, 8, verbose=0, callbacks=[information])
    assert refreshes(optimizer) == 2


def test_empty_public_data_is_refused():
    information = public(tf.data.Dataset.from_tensors((ROWS, TARGETS)).take(0))
    model = regression()
    model.compile(dp.AdaDPS(information, 1.0, 1.0), loss="mse")
    with pytest.raises(ValueError, match="`dataset` must hold at least one batch.*Received: an em"):
        model.fit(ROWS, TARGETS, 8, verbose=0, callbacks=[information])


def test_metrics_do_not_count_public_batches():
    class Counts(OwnLoss):
        def compute_loss(self, *args, **kwargs):
            self.seen.update_state(1.0)
            return super().compute_loss(*args, **kwargs)

        @property
        def metrics(self):
            return [*super().metrics, self.seen]

    information = public(tf.data.Dataset.from_tensors((ROWS, TARGETS)))
    model = regression(model_class=Counts)
    model.seen = tf.keras.metrics.Sum(name="seen")
    model.compile(dp.AdaDPS(information, 1.0, 1.0), loss="mse")
    information.update(model)
    assert refreshes(model.optimizer) == 1
    assert float(model.seen.result()) == 0
