"""On several replicas: the step of a single device, noise of the right scale, one ledger entry."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tests.helpers.catalogue import KINDS, assert_same_weights
from tests.helpers.gaussianity import (
    assert_gaussian,
    assert_independent,
    assert_uncorrelated,
    drawn,
    fits,
)
from tf_adaptive_dp._keras.generation import GENERATION
from tf_adaptive_dp.accounting import BandedNoise
from tf_adaptive_dp.mechanism import replicas
from tf_adaptive_dp.mechanism.noise import GaussianNoise
from tf_adaptive_dp.sampling import draws

SIZE = catalogue.SIZE


def trained(name, strategy, epochs=2, **kwargs):
    with strategy.scope():
        model = catalogue.mlp()
        model.compile(catalogue.make(name, **kwargs), loss=catalogue.loss())
    catalogue.fit(model, epochs)
    return model


@pytest.mark.slow_on(3)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", KINDS)
def test_the_step_is_that_of_a_single_device(name):
    on_two = trained(name, catalogue.mirrored(), noise_multiplier=0.0)
    on_one = trained(name, tf.distribute.get_strategy(), noise_multiplier=0.0)
    assert_same_weights(on_two, on_one)
    assert on_two.optimizer.ledger.segments == on_one.optimizer.ledger.segments
    assert on_two.optimizer.iterations.numpy() == on_one.optimizer.iterations.numpy() == 8


@pytest.mark.slow
def test_a_plan_trains_on_replicas(tmp_path):
    x, y = catalogue.data(64)
    plan = dp.PrivacyPlan(
        **{"noise_multiplier": 1.0, "delta": 1e-3, "num_examples": 64, "batch_size": 16},
        epochs=2,
        accountant="rdp",
    )
    with catalogue.mirrored().scope():
        model = catalogue.mlp()
        model.compile(plan.optimizer(dp.DPSGD, learning_rate=0.1), loss=catalogue.loss())
    plan.fit(model, x, y, directory=tmp_path, verbose=0)
    assert model.optimizer.ledger.segments == [(1.0, 16.0, 8)]


def test_a_plan_without_targets_says_what_replicas_need():
    class WithAddedLoss(tf.keras.Sequential):
        def call(self, x, training=None):
            outputs = super().call(x)
            self.add_loss(tf.reduce_mean(outputs**2))
            return outputs

    plan = dp.PrivacyPlan(
        noise_multiplier=1.0, delta=1e-3, num_examples=8, batch_size=4, epochs=1, accountant="rdp"
    )
    with catalogue.mirrored().scope():
        model = WithAddedLoss([tf.keras.Input([3]), tf.keras.layers.Dense(2)])
        model.compile(plan.optimizer(dp.DPSGD, learning_rate=0.1))
    with pytest.raises(ValueError, match="no batches without targets to .* zeros as `y`.*2 repl"):
        plan.fit(model, np.ones([8, 3], "float32"), verbose=0)


@pytest.mark.slow_on(2)
def test_metrics_leave_padding_out_on_replicas():
    # The model predicts class 1, which all examples have and padding, of class 0, has not.
    plan = dp.PrivacyPlan(
        noise_multiplier=1.0, delta=1e-3, num_examples=64, batch_size=16, epochs=1
    )
    bias = tf.keras.initializers.Constant([0.0, 1.0])
    with catalogue.mirrored().scope():
        dense = tf.keras.layers.Dense(2, kernel_initializer="zeros", bias_initializer=bias)
        model = tf.keras.Sequential([tf.keras.Input([6]), dense])
        optimizer = plan.optimizer(dp.DPSGD, learning_rate=0.0)
        model.compile(optimizer, catalogue.loss(), metrics=["accuracy"])
    x, _ = catalogue.data(64)
    assert plan.fit(model, x, np.ones(64, int), verbose=0).history["accuracy"] == [1.0]


SAMPLING = dp.PoissonSampling(0.25, max_batch_size=128, steps=3)


def of_known_size(batches):
    return tf.data.Dataset.from_tensor_slices(tuple(tf.stack(part) for part in zip(*batches)))


def of_unknown_size(batches):
    signature = tuple(tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in batches[0])
    return tf.data.Dataset.from_generator(lambda: batches, output_signature=signature)


class WithoutWeights(tf.keras.Sequential):
    """Drops sample weights, so that padding contributes to its loss."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, **kwargs):
        return super().compute_loss(x, y, y_pred, None, **kwargs)


def trained_on_padded(strategy, sizes=of_known_size, kind=tf.keras.Sequential):
    """The half of a batch that a replica gets has enough padding to show the marks."""
    x, y = catalogue.data(256)
    with strategy.scope():
        tf.keras.utils.set_random_seed(5)
        model = kind([tf.keras.Input([6]), tf.keras.layers.Dense(3)])
        optimizer = catalogue.make("DPSGD", noise_multiplier=0.0, expected_batch_size=64)
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)
    # As a list, since Keras 3 begins the data anew on several replicas, and then others are drawn.
    batches = list(dp.poisson_batches((x, y), SAMPLING, key=draws.new_key(seed=7)))
    model.fit(sizes(batches), steps_per_epoch=3, shuffle=False, verbose=0)
    return model


@pytest.mark.slow_on(3)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("sizes", [of_known_size, of_unknown_size])
def test_the_padding_of_one_replica_is_not_that_of_another(sizes):
    on_two = trained_on_padded(catalogue.mirrored(), sizes)
    on_one = trained_on_padded(tf.distribute.get_strategy())
    assert_same_weights(on_two, on_one)
    assert on_two.optimizer.ledger.segments == [(0.0, 64.0, 3)]


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("sizes", [of_known_size, of_unknown_size])
def test_padding_that_contributes_is_refused_on_replicas(sizes):
    with pytest.raises(tf.errors.InvalidArgumentError, match="Padding contributes to the loss"):
        trained_on_padded(catalogue.mirrored(), sizes, WithoutWeights)


@pytest.mark.slow
def test_padding_is_told_apart_in_loops_of_users():
    x, y = catalogue.data(256)
    strategy = catalogue.mirrored()
    with strategy.scope():
        weights = tf.Variable(tf.zeros([6]))
        optimizer = dp.DPSGD(1.0, 0.0, learning_rate=1.0, expected_batch_size=64)

    def of_replica(uses_weights, batch):
        x, _, w = batch
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(x, weights)
            loss = loss * w if uses_weights else loss
        optimizer.minimize(loss, [weights], tape)

    batches = dp.poisson_batches((x, y), SAMPLING)
    for uses_weights in (True, False):
        run = functools.partial(of_replica, uses_weights)
        step = tf.function(lambda batch, run=run: strategy.run(run, (batch,)))
        given = iter(strategy.experimental_distribute_dataset(batches))
        if uses_weights:
            step(next(given))
            continue
        with pytest.raises(tf.errors.InvalidArgumentError, match="Padding contributes"):
            step(next(given))
    assert optimizer.ledger.segments == [(0.0, 64.0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("clipping", ["automatic", "per_layer"])
def test_every_clipping_is_that_of_a_single_device(clipping):
    kwargs = {"noise_multiplier": 0.0, "clipping": clipping, "l2_norm_clip": 0.1}
    on_one = trained("DPSGD", tf.distribute.get_strategy(), **kwargs)
    assert_same_weights(trained("DPSGD", catalogue.mirrored(), **kwargs), on_one)


@pytest.mark.slow
def test_adaptive_clipping_counts_the_examples_of_all_replicas():
    clipping = dp.AdaptiveClipping(count_noise_multiplier=1e-6)
    kwargs = {"noise_multiplier": 1e-6, "clipping": clipping, "l2_norm_clip": 0.1}
    on_two = trained("DPSGD", catalogue.mirrored(), **kwargs)
    on_one = trained("DPSGD", tf.distribute.get_strategy(), **kwargs)
    assert_same_weights(on_two, on_one)
    assert on_two.optimizer.l2_norm_clip == pytest.approx(on_one.optimizer.l2_norm_clip, rel=1e-5)
    copies = [v.numpy() for v in on_two.optimizer._mechanism.clip_norm._clip.values]
    assert copies[0] == copies[1] != 0.1


@pytest.mark.slow
def test_a_measured_clip_norm_counts_the_examples_of_all_replicas():
    kwargs = {"noise_multiplier": 0.0, "l2_norm_clip": "measured"}
    on_two = trained("ADADP", catalogue.mirrored(), **kwargs)
    on_one = trained("ADADP", tf.distribute.get_strategy(), **kwargs)
    assert_same_weights(on_two, on_one)
    copies = [v.numpy() for v in on_two.optimizer._mechanism.clip_norm._clip.values]
    assert copies[0] == copies[1] == pytest.approx(on_one.optimizer.l2_norm_clip, rel=1e-5)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "num_examples, batch_size, num_steps",
    [
        (33, 6, 6),  # two on one replica and one on the other in the last batch
        pytest.param(
            *(32, 5, 7),
            marks=pytest.mark.skipif(
                GENERATION == 3, reason="The first batch must divide evenly for Keras 3 to build"
            ),
        ),
    ],
)
def test_batches_that_do_not_divide_evenly_are_one_global_batch(
    num_examples, batch_size, num_steps
):
    x, y = catalogue.data(num_examples)

    def trained_in(strategy):
        with strategy.scope():
            model = catalogue.mlp()
            optimizer = catalogue.make(
                "DPSGD", noise_multiplier=0.0, expected_batch_size=batch_size
            )
            model.compile(optimizer, loss=catalogue.loss())
        model.fit(x, y, batch_size, epochs=2, shuffle=False, verbose=0)
        return model

    on_one = trained_in(tf.distribute.get_strategy())
    on_two = trained_in(catalogue.mirrored())
    assert_same_weights(on_two, on_one)
    assert on_two.optimizer.ledger.segments == [(0.0, float(batch_size), 2 * num_steps)]


class WithPenalty(tf.keras.Model):
    """Its loss has a term that no example owns."""

    def __init__(self):
        super().__init__()
        self.dense = tf.keras.layers.Dense(3, kernel_initializer="ones")

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x, y, y_pred, sample_weight):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + tf.reduce_sum(tf.square(self.dense.kernel))


@pytest.mark.slow
def test_a_term_of_the_loss_that_no_example_owns_counts_once():
    weights = []
    for strategy in (catalogue.mirrored(), tf.distribute.get_strategy()):
        with strategy.scope():
            model = WithPenalty()
            model.compile(catalogue.make("DPSGD", noise_multiplier=0.0), loss=catalogue.loss())
        catalogue.fit(model)
        weights.append(model)
    assert_same_weights(*weights)


def steps_of_noise(num_steps, **kwargs):
    kwargs = {"noise_multiplier": 1.5, "expected_batch_size": 8, "l2_norm_clip": 2.0, **kwargs}
    return catalogue.steps_of_noise(catalogue.mirrored(), num_steps, **kwargs)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("seed", [None, 4])
def test_the_noise_has_the_scale_that_was_asked_for(seed):
    (first, second), optimizer = steps_of_noise(2, seed=seed)
    for noise in (first, second):
        assert_gaussian(noise, 1.5 * 2.0 / 8)
    assert_independent(first, second)
    assert optimizer.ledger.segments == [(1.5, 8.0, 2)]
    for variable in (optimizer.ledger._counts, optimizer._mechanism.generator._counter):
        assert [v.numpy().sum() for v in variable.values] == [2, 2]


def test_noise_that_replicas_share_would_be_found(monkeypatch):
    monkeypatch.setattr(replicas, "replica_id", lambda: tf.constant(0, tf.uint32))
    ((noise,), _) = steps_of_noise(1)
    assert fits(noise, 2**0.5 * 1.5 * 2.0 / 8) and not fits(noise, 1.5 * 2.0 / 8)


def test_replicas_draw_from_streams_of_their_own():
    strategy = catalogue.mirrored()
    with strategy.scope():
        noise = GaussianNoise(
            lambda shape, dtype, name: tf.Variable(tf.zeros(shape, dtype), trainable=False), seed=3
        )
    found = strategy.run(tf.function(lambda: drawn(noise, [[SIZE]])[0])).values
    alone = GaussianNoise(lambda shape, dtype, name: tf.Variable(tf.zeros(shape, dtype)), seed=3)
    streams = [d.numpy() for d in found] + [drawn(alone, [[SIZE]])[0].numpy()]
    for k in range(3):
        assert_gaussian(streams[k], 1.0)
        assert_uncorrelated(streams[k], streams[k - 1])


def assert_refused(strategy, message, run=True, **kwargs):
    with strategy.scope():
        w = tf.Variable([1.0])
        optimizer = dp.DPSGD(1.0, 1.0, **kwargs)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.constant([1.0, 2.0]) * w
        optimizer.minimize(loss, [w], tape)

    with pytest.raises(dp.NotPrivateError, match=message), strategy.scope():
        strategy.run(tf.function(step)) if run else tf.function(step)()
    assert optimizer.ledger.num_releases == 0 and w.numpy() == 1.0


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"num_microbatches": 2}, "`num_microbatches` must be None on several replicas"),
        ({"examples_per_user": 2}, "`examples_per_user` must be None on several replicas"),
        ({"gradient_accumulation_steps": 2}, "`gradient_accumulation_steps` must be 1 on several"),
        ({"secure_noise": True}, "summing across replicas rounds after the noise"),
        ({"noise": BandedNoise(2)}, r"`noise` must be IndependentNoise\(\) on several replicas"),
    ],
)
def test_what_is_not_proven_on_several_replicas_is_refused(kwargs, message):
    assert_refused(catalogue.mirrored(), message, **kwargs)


def test_a_step_outside_of_strategy_run_is_refused():
    assert_refused(catalogue.mirrored(), "outside of `strategy.run`", run=False)


def linear(expected_batch_size, layers=()):
    model = tf.keras.Sequential([tf.keras.Input([3]), *layers, tf.keras.layers.Dense(2)])
    model.compile(
        dp.DPSGD(1.0, 0.0, learning_rate=1.0, expected_batch_size=expected_batch_size),
        loss=tf.keras.losses.MeanSquaredError(),
    )
    return model


SHARED = "Two replicas compute their losses from the same data"


@pytest.mark.skipif(GENERATION == 2, reason="Keras 2 splits the batch")
def test_a_batch_that_keras_hands_to_all_replicas_is_refused():
    with catalogue.mirrored().scope():
        model = linear(4)
    with pytest.raises(dp.NotPrivateError, match=SHARED):
        model.train_on_batch(np.ones([4, 3], "f"), np.ones([4, 2], "f"))
    assert model.optimizer.ledger.num_releases == 0


def in_a_function(step):
    return tf.function(step)


def as_it_is(step):
    return step


def of_replica_with():
    """The step of a replica on its rows, its weights and their optimizer."""
    with catalogue.mirrored().scope():
        w = tf.Variable([1.0, 1.0])
        optimizer = dp.DPSGD(1.0, 0.0, learning_rate=1.0, expected_batch_size=4)

    def of_replica(x):
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(x, w)
        optimizer.minimize(loss, [w], tape)

    return of_replica, w, optimizer


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("inner", [as_it_is, in_a_function])
@pytest.mark.parametrize("own", [False, True])
def test_every_replica_needs_a_batch_of_its_own(inner, own):
    strategy = catalogue.mirrored()
    of_replica, w, optimizer = of_replica_with()
    of_replica = inner(of_replica)

    @tf.function
    def step(x):
        strategy.run(of_replica, (x,))

    x = tf.constant([[1.0, 0.0], [0.0, 1.0]])
    if own:
        step(strategy.experimental_distribute_values_from_function(lambda context: x))
        np.testing.assert_allclose(w.numpy(), 1 - 2 / 4)
    else:
        with pytest.raises(dp.NotPrivateError, match=SHARED):
            step(x)
        assert optimizer.ledger.num_releases == 0


def test_replicas_that_read_a_captured_batch_are_refused():
    of_replica, _, optimizer = of_replica_with()
    x = tf.constant([[1.0, 0.0], [0.0, 1.0]])

    with pytest.raises(dp.NotPrivateError, match="depends on no input of the step"):
        catalogue.mirrored().run(tf.function(lambda: of_replica(x)))
    assert optimizer.ledger.num_releases == 0


def test_an_eager_step_is_refused_on_several_replicas():
    of_replica, *_ = of_replica_with()
    with pytest.raises(dp.NotPrivateError, match="only a compiled step"):
        catalogue.mirrored().run(of_replica, (tf.constant([[1.0, 0.0]]),))


class SumOverReplicas(tf.keras.layers.Layer):
    """Adds up what all replicas compute, in operations that look harmless one by one."""

    def compute_output_shape(self, shape):
        return shape

    def call(self, x):
        context = tf.distribute.get_replica_context()
        if context is None:
            return x
        summed = context.merge_call(
            lambda strategy, values: strategy.extended.reduce_to(
                tf.distribute.ReduceOp.SUM, values, destinations=values
            ),
            args=(x,),
        )
        return x + tf.stop_gradient(summed)


@pytest.mark.in_turns
@pytest.mark.parametrize("batch_size", [2, 4])
def test_replicas_that_exchange_activations_are_refused(batch_size):
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    with strategy.scope():
        model = linear(batch_size, [SumOverReplicas()])
    data = tf.data.Dataset.from_tensor_slices((np.ones([4, 3], "f"), np.ones([4, 2], "f")))
    with pytest.raises(dp.NotPrivateError, match=SHARED):
        model.fit(data.batch(batch_size, drop_remainder=True), verbose=0)
    assert model.optimizer.ledger.num_releases == 0


@pytest.mark.slow_on(3)
def test_one_example_for_each_replica_is_searched_for_what_mixes_them():
    x, y = np.float32([[1, 2, 3], [4, 5, 6]]), np.zeros([2, 2], "f")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(2, drop_remainder=True)
    normalization = tf.keras.layers.BatchNormalization(synchronized=True)
    with catalogue.mirrored().scope():
        model = linear(2, [normalization])
        alone = linear(2)
    with pytest.raises(dp.NotPrivateError, match="Examples in a batch affect each other"):
        model.fit(data, verbose=0)
    assert model.optimizer.ledger.num_releases == 0
    alone.fit(data, verbose=0)
    assert alone.optimizer.ledger.segments == [(0.0, 2.0, 1)]


def test_a_strategy_without_common_steps_is_refused(monkeypatch):
    monkeypatch.setattr(
        tf.distribute, "ParameterServerStrategy", type(tf.distribute.get_strategy())
    )
    assert_refused(tf.distribute.get_strategy(), "needs a `MirroredStrategy`")


def test_a_strategy_of_several_replicas_that_is_not_proven_is_refused():
    strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
    assert strategy.num_replicas_in_sync == 2
    assert_refused(strategy, "Received: CentralStorageStrategy.* with 2 replicas")


@pytest.mark.slow
def test_figures_of_all_replicas_are_added_up():
    model = trained("DPSGD", catalogue.mirrored(), epochs=1)
    assert model.optimizer.statistics.summary(reset=True).num_examples == 32
    assert model.optimizer.statistics.summary().num_examples == 0


@pytest.mark.parametrize(
    "kwargs", [{"skip_gradients_aggregation": True}, {"experimental_aggregate_gradients": False}]
)
def test_gradients_of_one_replica_alone_are_refused(kwargs):
    # They have a part of the noise only.
    with catalogue.mirrored().scope():
        w = tf.Variable([1.0])
        optimizer = dp.DPSGD(1.0, 1.0)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.constant([1.0, 2.0]) * w
        pairs = optimizer.compute_gradients(loss, [w], tape)
        optimizer.apply_gradients(pairs, **kwargs)

    with pytest.raises(dp.NotPrivateError, match="must be summed"):
        catalogue.mirrored().run(tf.function(step))
    assert w.numpy() == 1.0


def test_gradients_and_count_of_adaptive_clipping_have_their_noise_once(monkeypatch):
    # In place of noise each of two replicas adds its standard deviation, in all √2 times that.
    monkeypatch.setattr(
        GaussianNoise,
        "add_to",
        lambda self, sums, stddev, clip: [s + tf.cast(stddev, s.dtype) for s in sums],
    )
    clipping = dp.AdaptiveClipping(learning_rate=0.1, count_noise_multiplier=1.7)
    (moved,), optimizer = steps_of_noise(1, clipping=clipping)
    gradient_noise = (1.5**-2 - 3.4**-2) ** -0.5
    np.testing.assert_allclose(moved, -(2**0.5) * gradient_noise * 2.0 / 8, rtol=1e-5)
    count = -np.log(optimizer.l2_norm_clip / 2.0) / 0.1 * 8
    assert count == pytest.approx(2**0.5 * 1.7, rel=1e-4)
    assert optimizer.ledger.segments == [(1.5, 8.0, 1)]


def test_the_histogram_of_a_measured_clip_norm_has_its_noise_once(monkeypatch):
    monkeypatch.setattr(
        GaussianNoise,
        "add_to",
        lambda self, sums, stddev, clip: [s + tf.cast(stddev, s.dtype) for s in sums],
    )
    (moved,), optimizer = steps_of_noise(1, l2_norm_clip="measured")
    for counts in optimizer._mechanism.histograms._counts.values:
        np.testing.assert_allclose(counts, 2**0.5 * 1.5, rtol=1e-5)
    assert not moved.any()
    assert optimizer.ledger.segments == [(1.5, 8.0, 1)]


def test_an_optimizer_that_replicas_share_is_refused():
    # They would count each step twice in its one ledger.
    optimizer = catalogue.make("DPSGD", expected_batch_size=8)
    with catalogue.mirrored().scope():
        model = catalogue.mlp()
        model.compile(optimizer, loss=catalogue.loss())
    with pytest.raises(dp.NotPrivateError, match=r"must be created within `strategy.scope\(\)`"):
        catalogue.fit(model)
    assert optimizer.ledger.num_releases == 0


@pytest.mark.slow_on(2)
def test_a_model_on_replicas_can_be_validated():
    with catalogue.mirrored().scope():
        model = catalogue.mlp()
        model.compile(catalogue.make("DPSGD", expected_batch_size=8), loss=catalogue.loss())
        groups = catalogue.mlp()
        groups.compile(catalogue.make("DPSGD", num_microbatches=2), loss=catalogue.loss())
    batch = catalogue.data(8)
    report = dp.validate(model, batch)
    assert not report.errors and "match those of batches of one" in str(report)
    refused = str(dp.validate(groups, batch))
    assert "`num_microbatches` must be None on several replicas" in refused
    with catalogue.mirrored().scope(), pytest.raises(RuntimeError, match="outside of it"):
        dp.validate(model, batch)


@pytest.mark.slow_on(3)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_16_bits_are_rounded_after_the_sum_over_replicas(dtype):
    # Just above 1/4, means of 32,768 examples in bfloat16 lie 64 examples apart, in float16 8. If
    # each replica rounded its own, one example would move a sum halfway between two of them, with
    # nothing but the noise of that replica to hide it.
    size, width = 32_768, 2_000
    apart = {"bfloat16": 64, "float16": 8}[dtype]
    strategy = catalogue.mirrored()
    with strategy.scope():
        weights = tf.Variable(tf.zeros([width], dtype))
        # Each example has 0 or 1 in every coordinate; the noise of each has a deviation of 1.
        norm = width**0.5
        optimizer = dp.DPSGD(norm, 1 / norm, expected_batch_size=size, learning_rate=1.0)

    @tf.function
    def step(batch):
        def of_replica(batch):
            with tf.GradientTape() as tape:
                loss = batch * tf.reduce_sum(tf.cast(weights, tf.float32))
            ((gradient, _),) = optimizer.compute_gradients(loss, [weights], tape)
            return tf.cast(gradient, tf.float32)

        return strategy.run(of_replica, (batch,))

    def released(sums):
        def rows(context):
            of_replica = np.zeros(size // 2, "float32")
            total = sums[context.replica_id_in_sync_group]
            of_replica[: int(total)], of_replica[int(total)] = 1, total % 1
            return tf.constant(of_replica)

        found = step(strategy.experimental_distribute_values_from_function(rows))
        return sum(g.numpy() for g in found.values) * size

    halfway = size // 4 + apart / 2
    low, high = (released([halfway + d, size // 4]) for d in (-0.5, 0.5))
    shown = max(abs(np.mean(low > at) - np.mean(high > at)) for at in np.unique([low, high]))
    # Gaussian noise of deviation 1 allows for 0.383, the total variation of N(0, 1) and N(1, 1).
    assert shown < 0.383 + 0.05


def test_without_expected_batch_size_the_global_batch_divides():
    (_, optimizer) = steps_of_noise(1, expected_batch_size=None)
    assert optimizer.ledger.segments == [(1.5, 8.0, 1)]
