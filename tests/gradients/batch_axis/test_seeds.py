"""Seeds from variables, with which all random layers of Keras 3 draw."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers.zoo import floats
from tf_adaptive_dp._keras import graphs
from tf_adaptive_dp._keras.generation import GENERATION, keras
from tf_adaptive_dp.gradients import per_example_gradients

X = floats(32, 16)
BATCH = tf.TensorSpec([None, 16])


class Counter:
    """What a `keras.random.SeedGenerator` does."""

    def __init__(self, seed=7, dtype=tf.int64):
        self.state = tf.Variable([seed, 0], dtype=dtype, trainable=False)

    def next(self):
        seed = self.state * 1
        self.state.assign(self.state + tf.constant([0, 1], self.state.dtype))
        return tf.cast(tf.math.floormod(seed, tf.int32.max - 1), tf.int32)


class Draw:
    """Multiplies rows by random numbers."""

    def __init__(self, draw=tf.random.stateless_uniform):
        self.counter, self.draw = Counter(), draw

    def __call__(self, x):
        return x * self.draw(tf.shape(x), self.counter.next())


class Dropout(Draw):
    def __call__(self, x):
        return tf.nn.experimental.stateless_dropout(x, 0.5, self.counter.next())


class TwoDraws(Draw):
    def __call__(self, x):
        return super().__call__(x) + super().__call__(x)


class Split(Draw):
    """Seeds that are made from the seed of the counter."""

    def __call__(self, x):
        one, other = tf.unstack(tf.random.experimental.stateless_split(self.counter.next(), 2))
        return x * self.draw(tf.shape(x), one) + self.draw(tf.shape(x), other)


class Folded(Draw):
    def __call__(self, x):
        seed = tf.random.experimental.stateless_fold_in([1, 2], self.counter.next()[1])
        return x * self.draw(tf.shape(x), seed)


class Unmoved(Draw):
    def __call__(self, x):
        return x * self.draw(tf.shape(x), self.counter.state)


class OldDraw(Draw):
    """An operation that takes a seed, and not a key."""

    def __call__(self, x):
        drawn = tf.random.stateless_poisson(tf.shape(x), self.counter.next(), 3.0)
        return x * tf.cast(drawn, tf.float32)


def make_step(layer, jit_compile=False):
    w = tf.Variable(1.0)

    @tf.function(input_signature=[BATCH], jit_compile=jit_compile)
    def step(x):
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum(layer(w * x), axis=1)
        source = per_example_gradients(losses, [w], tape)
        return losses, source.squared_norms()

    return step


DRAWS = {
    "uniform": Draw,
    "normal": lambda: Draw(tf.random.stateless_normal),
    "truncated": lambda: Draw(tf.random.stateless_truncated_normal),
    "dropout": Dropout,
    "two draws": TwoDraws,
    "split": Split,
    "folded": Folded,
    "a variable that does not move": Unmoved,
    "Poisson": OldDraw,
}


def drawn(make, jit_compile=False):
    """The results of two programs with two steps each, and the counters after each program."""
    found, counters = [], []
    for _ in range(2):
        tf.random.set_seed(3)
        layer = make()
        step = make_step(layer, jit_compile)
        for _ in range(2):
            losses, squares = (np.array(t) for t in step(tf.constant(X)))
            assert len(set(losses)) == 32
            found.append(losses.tobytes() + squares.tobytes())
        counters.append(layer.counter.state.numpy().tolist())
    tf.random.set_seed(None)
    return found, counters


@pytest.mark.in_turns
@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", DRAWS)
def test_seeds_from_variables_are_replaced_by_secret_ones(name):
    found, counters = drawn(DRAWS[name])
    assert len(set(found)) == 4
    moves = {"two draws": 4, "a variable that does not move": 0}.get(name, 2)
    assert counters == [[7, moves]] * 2  # as without a private gradient


@pytest.mark.in_turns
@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", sorted(DRAWS.keys() - {"Poisson"}))  # unknown to XLA
def test_seeds_are_replaced_under_xla(name):
    assert len(set(drawn(DRAWS[name], jit_compile=True)[0])) == 4


def test_without_the_library_two_programs_draw_alike():
    """What the tests above would find if nothing were replaced."""
    results = []
    for _ in range(2):
        layer = tf.function(Draw(), input_signature=[BATCH])
        results.append([layer(tf.constant(X)).numpy() for _ in range(2)])
    np.testing.assert_array_equal(*results)


@pytest.mark.in_turns
@pytest.mark.parametrize("jit_compile", [False, True])
def test_layers_with_the_same_counter_draw_independently(jit_compile):
    one, other = Dropout(), Dropout()
    masks = []

    def layer(x):
        masks[:] = one(tf.ones_like(x)) > 0, other(tf.ones_like(x)) > 0
        return x * tf.cast(masks[0], tf.float32) * tf.cast(masks[1], tf.float32)

    w = tf.Variable(1.0)

    @tf.function(input_signature=[BATCH], jit_compile=jit_compile)
    def step(x):
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum(layer(w * x), axis=1)
        per_example_gradients(losses, [w], tape).squared_norms()
        return tuple(masks)

    first, second = (m.numpy() for m in step(tf.ones([250, 16])))
    assert abs(first.mean() - 0.5) < 0.05 and abs(second.mean() - 0.5) < 0.05
    assert abs((first == second).mean() - 0.5) < 0.05  # 6 standard deviations of 4000 coins


def test_draws_with_one_seed_stay_alike():
    counter, outputs = Counter(), []

    def layer(x):
        seed = counter.next()
        outputs[:] = (tf.random.stateless_uniform(tf.shape(x), seed) for _ in range(2))
        return x * outputs[0] * outputs[1]

    w = tf.Variable(1.0)

    @tf.function(input_signature=[BATCH])
    def step(x):
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum(layer(w * x), axis=1)
        per_example_gradients(losses, [w], tape).squared_norms()
        return tuple(outputs)

    np.testing.assert_array_equal(*step(tf.constant(X)))


@pytest.mark.slow_on(3)
@pytest.mark.slow_after(1)
@pytest.mark.filterwarnings("ignore:Under `jit_compile=True` the source")
@pytest.mark.parametrize("method", ["auto", "materialized"])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_gradients_are_those_of_the_masks_that_were_drawn(method, jit_compile):
    kernel, dropout, hidden = tf.Variable(0.1 * floats(16, 4, seed=1)), Dropout(), []

    def losses_of(x):
        hidden[:] = [dropout(tf.ones([tf.shape(x)[0], 4]))]
        return tf.reduce_sum(tf.tanh(x @ kernel) * hidden[0], axis=1)

    @tf.function(input_signature=[BATCH], jit_compile=jit_compile)
    def step(x):
        with tf.GradientTape() as tape:
            losses = losses_of(x)
        source = per_example_gradients(losses, [kernel], tape, method)
        weights = tf.range(1.0, 1.0 + tf.cast(tf.shape(x)[0], tf.float32))
        return hidden[0], source.squared_norms(), source.weighted_sum(weights)[0]

    for _ in range(2):
        masks, squares, total = (np.array(t) for t in step(tf.constant(X)))
        assert set(np.unique(masks)) == {0.0, 2.0}
        slopes = masks * (1 - np.tanh(X @ kernel.numpy()) ** 2)
        each = X[:, :, None] * slopes[:, None, :]
        np.testing.assert_allclose(squares, (each**2).sum(axis=(1, 2)), rtol=1e-4)
        expected = np.tensordot(np.arange(1.0, 33.0), each, 1)
        np.testing.assert_allclose(total, expected, rtol=1e-3, atol=1e-3)


def test_minimize_may_wait_for_the_draws():
    layer, w = Draw(), tf.Variable(1.0)

    @tf.function(input_signature=[BATCH])
    def step(x):
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum(layer(w * x), axis=1)
        with tf.control_dependencies([losses]):
            return per_example_gradients(losses, [w], tape).squared_norms()

    assert np.all(step(tf.constant(X)).numpy() > 0)


def test_two_gradients_of_one_loss_see_the_same_draw():
    layer, w = Draw(), tf.Variable(1.0)

    @tf.function(input_signature=[BATCH])
    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            losses = tf.reduce_sum(layer(w * x), axis=1)
        return [per_example_gradients(losses, [w], tape).squared_norms() for _ in range(2)]

    np.testing.assert_array_equal(*step(tf.constant(X)))


def test_each_iteration_of_a_loop_over_steps_draws_anew():
    layer, w = Draw(), tf.Variable(1.0)

    def body(i, x, found):
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum(layer(w * x), axis=1)
        squares = per_example_gradients(losses, [w], tape).squared_norms()
        return i + 1, x, found.write(i, squares)

    @tf.function(input_signature=[BATCH])
    def steps(x):
        found = tf.TensorArray(tf.float32, 3, element_shape=[None])
        return tf.while_loop(lambda i, *_: i < 3, body, [0, x, found])[2].stack()

    found = np.concatenate([steps(tf.constant(X)) for _ in range(2)])
    assert len({f.tobytes() for f in found}) == 6
    assert layer.counter.state.numpy().tolist() == [7, 6]


class Constant(Draw):
    def __call__(self, x):
        return x * self.draw(tf.shape(x), [1, 2])


class Argument(Draw):
    """A seed from the data."""

    def __call__(self, x):
        return x * self.draw(tf.shape(x), tf.cast(x[0, :2], tf.int32))


class InFunction(Draw):
    def __call__(self, x):
        return tf.function(super().__call__)(x)


class InLoop(Draw):
    def __call__(self, x):
        call = super().__call__
        return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, call(x)), [0, x])[1]


class InBranch(Draw):
    def __call__(self, x):
        call = super().__call__
        return tf.cond(self.counter.state[1] >= 0, lambda: call(x), lambda: x)


class KeyInLoop(Draw):
    """Each iteration draws with its own seed."""

    def __init__(self, renew):
        super().__init__()
        self.generator, self.renew = tf.random.Generator.from_seed(3), renew

    def __call__(self, x):
        def body(i, seed, x):
            return i + 1, self.renew(seed), x * self.draw(tf.shape(x), seed)

        seed = self.generator.uniform_full_int([2], tf.int32)
        return tf.while_loop(lambda i, *_: i < 2, body, [0, seed, x])[2]


class SplitInLoop(KeyInLoop):
    def __init__(self):
        super().__init__(lambda seed: tf.random.experimental.stateless_split(seed, 2)[1])


class KnownInLoop(KeyInLoop):
    def __init__(self):
        super().__init__(lambda seed: tf.constant([1, 2]))


class InGradient(Draw):
    def __call__(self, x):
        call = super().__call__

        @tf.custom_gradient
        def scaled(x):
            return tf.identity(x), lambda upstream: call(upstream)

        return scaled(x)


class SeededInGradient(InGradient):
    def __init__(self):
        super().__init__(lambda shape, _: tf.random.uniform(shape, seed=5))


class GeneratorInGradient(InGradient):
    def __init__(self):
        generator = tf.random.Generator.from_seed(4)
        super().__init__(lambda shape, _: generator.uniform(shape))


class WrittenFromData(Draw):
    def __call__(self, x):
        total = tf.cast(tf.reduce_sum(x), tf.int64)
        self.counter.state.assign(tf.stack([total, total]))
        return super().__call__(x)


REFUSED = {
    "a constant": (Constant, "with a known seed.*integer variable"),
    "the data": (Argument, "affect each other"),
    "in a function": (InFunction, "with a known seed.*outside of it"),
    "in a loop": (InLoop, "with a known seed.*outside of it"),
    "known from the second iteration on": (KnownInLoop, "with a known seed"),
    "in a branch": (InBranch, "with a known seed.*outside of it"),
    "in a custom gradient": (InGradient, "with a known seed.*in the forward pass"),
    "a seed in a custom gradient": (SeededInGradient, "with a known seed.*in the forward pass"),
    "a generator in a gradient": (GeneratorInGradient, "with a known seed.*in the forward pass"),
    "written from the data": (WrittenFromData, "writes data of the batch into a variable"),
}


@pytest.mark.in_turns
@pytest.mark.parametrize("name", REFUSED)
def test_seeds_that_cannot_be_replaced_are_refused(name):
    make, match = REFUSED[name]
    step = make_step(make())
    with pytest.raises(dp.NotPrivateError, match=match):
        step.get_concrete_function()


def test_a_variable_that_data_is_written_to_later_does_not_reach_the_draws():
    """It is the seed in the program, but not any more in the step."""
    kernel, optimizer = tf.Variable(tf.ones([16])), dp.DPSGD(1.0, 0.0, expected_batch_size=32)
    state, learned = tf.Variable([3, 0]), []

    @tf.function(input_signature=[BATCH], autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            drawn = tf.random.stateless_uniform(tf.shape(x), state)
            loss = tf.linalg.matvec(x * drawn, kernel)
        optimizer.minimize(loss, [kernel], tape)
        state.assign(tf.cast(x[0, :2], tf.int32))

    for _ in range(2):
        kernel.assign(tf.ones([16]))
        state.assign([3, 0])
        step(tf.constant(X))
        learned.append(kernel.numpy())
    assert np.all(learned[0] != learned[1])


def test_a_loop_may_split_a_secret_seed():
    found = []
    for _ in range(2):
        step = make_step(SplitInLoop())
        found += [step(tf.constant(X))[0].numpy().tobytes() for _ in range(2)]
    assert len(set(found)) == 4


def test_determinism_is_refused(monkeypatch):
    monkeypatch.setattr(graphs, "must_be_deterministic", lambda: True)
    step = make_step(Draw())
    with pytest.raises(dp.NotPrivateError, match="enable_op_determinism"):
        step.get_concrete_function()


def test_numbers_of_the_forward_pass_may_scale_gradients():
    """A mask that only a custom gradient uses is drawn once, with a secret seed."""
    counter = Counter()

    def layer(x):
        mask = tf.random.stateless_uniform(tf.shape(x), counter.next())

        @tf.custom_gradient
        def scaled(x):
            return tf.identity(x), lambda upstream: upstream * mask

        return scaled(x)

    found = []
    for _ in range(2):
        counter.state.assign([7, 0])
        step = make_step(layer)
        found += [step(tf.constant(X))[1].numpy().tobytes() for _ in range(2)]
    assert len(set(found)) == 4


def sequence(*layers):
    def make():
        return keras.Sequential([keras.Input([16]), *(layer() for layer in layers)])

    return make


LAYERS = keras.layers
OF_KERAS = {
    "Dropout": sequence(lambda: LAYERS.Dropout(0.5, seed=1)),
    "SpatialDropout1D": sequence(
        lambda: LAYERS.Reshape([8, 2]),
        lambda: LAYERS.SpatialDropout1D(0.5, seed=1),
        LAYERS.Flatten,
    ),
    "GaussianNoise": sequence(lambda: LAYERS.GaussianNoise(1.0, seed=1)),
    "GaussianDropout": sequence(lambda: LAYERS.GaussianDropout(0.5, seed=1)),
    "AlphaDropout": sequence(lambda: LAYERS.AlphaDropout(0.5, seed=1)),
    "LSTM": sequence(
        lambda: LAYERS.Reshape([4, 4]),
        lambda: LAYERS.LSTM(3, dropout=0.5, recurrent_dropout=0.5, seed=1),
    ),
    "RandomFlip": sequence(
        lambda: LAYERS.Reshape([4, 4, 1]), lambda: LAYERS.RandomFlip(seed=1), LAYERS.Flatten
    ),
    "RandomRotation": sequence(
        lambda: LAYERS.Reshape([4, 4, 1]),
        lambda: LAYERS.RandomRotation(0.2, seed=1),
        LAYERS.Flatten,
    ),
}


@pytest.mark.slow_after(4)
@pytest.mark.skipif(GENERATION != 3, reason="random layers of Keras 2 have no such seeds")
@pytest.mark.parametrize("name", OF_KERAS)
def test_random_layers_of_keras_3_draw_with_secret_seeds(name):
    found, states = [], []
    for _ in range(2):
        keras.utils.set_random_seed(3)
        model = OF_KERAS[name]()
        weights = tf.constant(floats(model.output_shape[-1], seed=2))  # flips move entries only
        step = make_step(lambda x, m=model, w=weights: m(x, training=True) * w)
        for _ in range(2):
            losses, squares = step(tf.constant(X))
            found.append(losses.numpy().tobytes() + squares.numpy().tobytes())
        (generator,) = (v for v in model.non_trainable_variables if "seed" in v.path)
        states.append(generator.numpy().tolist())
    assert len(set(found)) == 4
    assert states[0] == states[1] and states[0][0] == 1 and states[0][1] >= 2
