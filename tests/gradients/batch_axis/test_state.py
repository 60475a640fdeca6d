"""State that a step writes from the data, before `minimize` or after it, and the loss reads."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers.zoo import floats
from tf_adaptive_dp.gradients import api

X, LATER = floats(4, 3), 0.5 * floats(4, 3)[::-1].copy()
KEY = tf.constant([0], tf.int64)


class Step:
    """A step whose loss is ⟨x − read(), w⟩, and that calls `write(x, w, loss)` afterwards."""

    def __init__(self, state, read=None, write=None, optimizer=None):
        self.w = tf.Variable([1.0, -1.0, 0.5])
        self.state = state()
        self.optimizer = optimizer or dp.DPSGD(1.0, 0.0, learning_rate=1.0, expected_batch_size=1)
        self._read, self._write = read, write
        self.function = tf.function(self._step, autograph=False)

    def _step(self, x):
        with tf.GradientTape() as tape:
            shift = self._read(self.state) if self._read else 0.0
            loss = tf.linalg.matvec(x - shift, self.w)
        self.optimizer.minimize(loss, [self.w], tape)
        if self._write:
            self._write(self.state, x, self.w, loss)

    def trace(self):
        self.function.get_concrete_function(tf.TensorSpec([None, 3]))

    def later_sum(self, x):
        """The clipped sum of a later batch, after a step on `x`."""
        self.w.assign([1.0, -1.0, 0.5])
        forget(self.state)
        self.function(tf.constant(x))
        before = self.w.numpy()
        self.function(tf.constant(LATER))
        return before - self.w.numpy()


def forget(state):
    if isinstance(state, tuple):
        for part in state:
            forget(part)
    elif isinstance(state, tf.Variable):
        state.assign(tf.zeros_like(state))
    elif isinstance(state, tf.queue.QueueBase):
        state.dequeue_many(state.size())
        state.enqueue(tf.zeros([3]))
    elif isinstance(state, Store):
        state.value = np.zeros(3, "float32")
    elif isinstance(state, tf.keras.metrics.Metric):
        state.reset_state()
    else:
        state.remove(KEY)


def vector():
    return tf.Variable(tf.zeros([3]))


def two_vectors():
    return vector(), vector()


def bank():
    """Earlier examples, of which the oldest is overwritten."""
    return tf.Variable(tf.zeros([6, 3]))


def table():
    return tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, [0.0, 0.0, 0.0])


def queue():
    made = tf.queue.FIFOQueue(9, [tf.float32], [[3]])
    made.enqueue(tf.zeros([3]))
    return made


class Store:
    """What Python remembers."""

    def __init__(self):
        self.value = np.zeros(3, "float32")

    def put(self, value):
        self.value = value

    def get(self):
        return self.value


def mean(x):
    return tf.reduce_mean(x, axis=0)


def lookup(state):
    return tf.ensure_shape(state.lookup(KEY), [1, 3])


def from_python(store):
    return tf.ensure_shape(tf.numpy_function(store.get, [], tf.float32), [3])


def foreign_sgd(state, x, w, loss):
    """What `tf.keras.optimizers.legacy.SGD` does to a variable."""
    tf.raw_ops.ResourceApplyGradientDescent(var=state.handle, alpha=0.5, delta=state - mean(x))


def by_way_of_another(state, x, w, loss):
    state[1].assign(mean(x))
    state[0].assign(state[1])


def in_branch(state, x, w, loss):
    tf.cond(
        tf.reduce_sum(x) > 0,
        lambda: state.assign_add([0.5, 0.5, 0.5]),
        lambda: state.read_value(),
    )


def in_loop(state, x, w, loss):
    tf.while_loop(
        lambda i: i < 2, lambda i: (tf.tuple([i + 1, state.assign_add(mean(x))])[0],), [0]
    )


def in_function(state, x, w, loss):
    tf.function(lambda m: state.assign(m))(mean(x))


def weighted_by_metric(metric):
    return metric.result()


# State, how the loss reads it, how the data gets there, and by how much the clipped sum of a later
# batch moves at least when a row of an earlier one is replaced, if nothing is refused. Allowed: 0.
CARRIES = {
    "MoCo queue": (
        bank,
        lambda bank: tf.reduce_mean(bank, 0),
        lambda bank, x, w, loss: bank.assign(tf.concat([x, bank[:-4]], 0)),
        0.5,
    ),
    "DINO centre": (
        vector,
        tf.identity,
        lambda centre, x, w, loss: centre.assign(0.9 * centre + 0.1 * mean(x)),
        0.1,
    ),
    "data decides": (vector, tf.identity, in_branch, 0.2),
    "two variables": (two_vectors, lambda state: state[0], by_way_of_another, 0.5),
    "metric": (
        tf.keras.metrics.Mean,
        weighted_by_metric,
        lambda metric, x, w, loss: metric.update_state(loss),
        0.5,
    ),
    "in a loop": (vector, tf.identity, in_loop, 0.5),
    "in a function": (vector, tf.identity, in_function, 0.5),
    "hash table": (table, lookup, lambda table, x, w, loss: table.insert(KEY, [mean(x)]), 0.5),
    "FIFOQueue": (
        queue,
        lambda queue: queue.dequeue(),
        lambda queue, x, w, loss: queue.enqueue(mean(x)),
        0.5,
    ),
    "numpy_function": (
        Store,
        from_python,
        lambda store, x, w, loss: tf.numpy_function(store.put, [mean(x)], []),
        0.5,
    ),
    "another optimizer": (vector, tf.identity, foreign_sgd, 0.5),
}


@pytest.mark.in_turns
@pytest.mark.slow_after(4)
@pytest.mark.parametrize("name", CARRIES)
def test_state_written_after_minimize_is_refused(name):
    state, read, write, _ = CARRIES[name]
    step = Step(state, read, write)
    with pytest.raises(dp.NotPrivateError, match="The step (writes|passes) data of the batch"):
        step.trace()
    assert step.optimizer.ledger.num_releases == 0


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", CARRIES)
def test_such_state_moves_later_batches(name, monkeypatch):
    """Without the search, a row that a later batch does not hold changes its clipped sum."""
    monkeypatch.setattr(api, "refuse_state", lambda *args: None)
    monkeypatch.setattr(api, "search_when_complete", lambda *args: None)
    state, read, write, least = CARRIES[name]
    replaced = X.copy()
    replaced[0] = -9 * np.sign(X.sum()), 7.0, -8.0
    step = Step(state, read, write)
    one, other = map(step.later_sum, (X, replaced))
    assert np.linalg.norm(one - other) > least


@pytest.mark.parametrize("name", ["hash table", "FIFOQueue", "numpy_function", "another optimizer"])
def test_state_written_before_minimize_is_refused(name):
    state, read, write, _ = CARRIES[name]
    holder = []

    def write_and_read(state):
        write(state, holder[0], step.w, None)
        return read(state)

    step = Step(state, write_and_read)
    original = step._step

    def traced(x):
        holder.append(x)
        original(x)

    with pytest.raises(dp.NotPrivateError, match="in this step or in later|comes back from there"):
        tf.function(traced, autograph=False).get_concrete_function(tf.TensorSpec([None, 3]))


def test_the_error_names_the_line_that_writes():
    state, read, _, _ = CARRIES["DINO centre"]
    with pytest.raises(dp.NotPrivateError, match=r"AssignVariableOp.*, line \d+ of .*test_state"):
        Step(state, read, lambda centre, x, w, loss: centre.assign(mean(x))).trace()


def test_an_iterator_over_the_batch_is_refused():
    """Elements of a data set that was made in the step come from the batch."""
    w, optimizer = vector(), dp.DPSGD(1.0, 0.0)

    @tf.function(input_signature=[tf.TensorSpec([4, 3])])
    def step(x):
        iterator = iter(tf.data.Dataset.from_tensors(x - mean(x)))
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(next(iterator), w)
        optimizer.minimize(loss, [w], tape)

    with pytest.raises(dp.NotPrivateError, match="MakeIterator"):
        step.get_concrete_function()


def with_optimizer(optimizer):
    def made():
        state = vector()
        optimizer.build([state])
        return state, optimizer

    return made


def test_state_that_only_a_gradient_reads_is_refused():
    """A custom gradient that is scaled by a variable."""
    w, scale, optimizer = vector(), tf.Variable(1.0), dp.DPSGD(1.0, 0.0)
    optimizer.build([w])

    @tf.custom_gradient
    def scaled(x):
        return tf.identity(x), lambda upstream: upstream * scale

    def step(write):
        @tf.function(input_signature=[tf.TensorSpec([None, 3])], autograph=False)
        def step(x):
            with tf.GradientTape() as tape:
                loss = scaled(tf.linalg.matvec(x, w))
            optimizer.minimize(loss, [w], tape)
            scale.assign(write(x))

        return step

    step(lambda x: 0.9 * scale).get_concrete_function()
    with pytest.raises(dp.NotPrivateError, match="writes data of the batch"):
        step(tf.reduce_mean).get_concrete_function()


def trains_a_probe(state, x, w, loss):
    """An ordinary optimizer, on a variable that no private loss reads."""
    probe, optimizer = state
    with tf.GradientTape() as tape:
        other = tf.reduce_mean(tf.square(tf.linalg.matvec(x, probe)))
    optimizer.apply_gradients([(tape.gradient(other, probe), probe)])


def distils(state, x, w, loss):
    """Trained from the weights alone."""
    foreign_sgd(state, tf.expand_dims(w, 0), w, loss)


def applies_public_gradients(state, x, w, loss):
    state[1].apply_gradients([(mean(x), state[0])], non_private_gradients=True)


def log_step():
    return tf.summary.create_noop_writer(), tf.Variable(0, dtype=tf.int64)


def summarizes(state, x, w, loss):
    with state[0].as_default(step=state[1].assign_add(1)):
        tf.summary.scalar("loss", tf.reduce_mean(loss))
        tf.summary.histogram("x", x)
    tf.print(loss, output_stream="file:///dev/null")
    tf.debugging.assert_all_finite(loss, "loss")


# Nothing of the data comes back into the loss.
CARRIES_NOTHING = {
    "EMA of the weights": (
        vector,
        tf.identity,
        lambda state, x, w, loss: state.assign(0.9 * state + 0.1 * w),
    ),
    "a metric that the loss does not read": (
        tf.keras.metrics.Mean,
        None,
        lambda metric, x, w, loss: metric.update_state(loss),
    ),
    "a counter": (vector, tf.identity, lambda state, x, w, loss: state.assign_add(tf.ones([3]))),
    "a counter of batches with rows": (
        vector,
        tf.identity,
        lambda state, x, w, loss: state.assign_add(tf.ones_like(state) + 0.0 * w),
    ),
    "a function that is also given data": (
        vector,
        tf.identity,
        lambda state, x, w, loss: tf.function(lambda m, v: (state.assign(v), m + 1)[1])(mean(x), w),
    ),
    "a loop that is also given data": (
        vector,
        tf.identity,
        lambda state, x, w, loss: tf.while_loop(
            lambda i, m: i < 2,
            lambda i, m: (tf.tuple([i + 1, state.assign_add(w)])[0], m + mean(x)),
            [0, mean(x)],
        ),
    ),
    "a table that is only read": (
        table,
        lookup,
        lambda table, x, w, loss: table.lookup(tf.cast(x[:, 0], tf.int64)),
    ),
    "a queue that is only filled": (
        queue,
        None,
        lambda queue, x, w, loss: queue.enqueue(mean(x)),
    ),
    "Python that only logs": (
        Store,
        None,
        lambda store, x, w, loss: tf.numpy_function(store.put, [mean(x)], []),
    ),
    "Python that only answers": (Store, from_python, None),
    "a generator": (
        lambda: tf.random.Generator.from_seed(1),
        lambda generator: generator.normal([3]),
        lambda generator, x, w, loss: generator.normal([7, 3]),
    ),
    "an ordinary optimizer elsewhere": (
        with_optimizer(tf.keras.optimizers.SGD()),
        None,
        trains_a_probe,
    ),
    "an ordinary optimizer fed by the weights": (vector, tf.identity, distils),
    "gradients that the user vouches for": (
        with_optimizer(dp.DPSGD(1.0, 0.0)),
        lambda state: tf.identity(state[0]),
        applies_public_gradients,
    ),
    "summaries and checks": (log_step, None, summarizes),
}


def test_a_generator_that_goes_on_by_the_size_of_a_random_batch_is_refused():
    made = tf.random.Generator.from_seed(1)
    step = Step(
        lambda: made,
        lambda generator: generator.normal([3]),
        lambda generator, x, w, loss: generator.normal(tf.shape(x)),
    )
    with pytest.raises(dp.NotPrivateError, match="or the size of the batch, which is random"):
        step.trace()


@pytest.mark.in_turns
@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", CARRIES_NOTHING)
def test_state_that_carries_no_data_is_accepted(name):
    Step(*CARRIES_NOTHING[name]).trace()


@pytest.mark.in_turns
@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "make",
    [
        lambda: dp.DPAdamWOSM(1.0, 1.0, expected_batch_size=4, clipping="adaptive"),
        lambda: dp.ADADP(1.0, 1.0, expected_batch_size=4, discard=True, use_ema=True),
        lambda: dp.DPSGD(1.0, 1.0, expected_batch_size=4, gradient_accumulation_steps=2),
        lambda: dp.DPSGD(1.0, 1.0, expected_batch_size=4, secure_noise=True),
    ],
    ids=["adaptive clipping", "ADADP", "accumulation", "secure noise"],
)
def test_what_our_optimizers_write_is_accepted(make):
    """Also where the next step's loss reads all of it, and Python is asked for a number."""
    step = Step(Store, from_python, optimizer=make())
    step.trace()


class CentredModel(tf.keras.Sequential):
    """Subtracts a centre that its own step moves, after Keras's."""

    def __init__(self, moves):
        super().__init__([tf.keras.layers.Dense(2)])
        self.centre, self.moves = tf.Variable(tf.zeros([3]), trainable=False), moves

    def call(self, x, training=None, mask=None):
        return super().call(x - self.centre)

    def train_step(self, data):
        logs = super().train_step(data)
        if self.moves:
            self.centre.assign(0.9 * self.centre + 0.1 * mean(data[0]))
        return logs


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"jit_compile": True}, {"steps_per_execution": 2}], ids=str
)
def test_a_step_of_the_model_is_searched_to_its_end(options):
    for moves in (True, False):
        model = CentredModel(moves)
        optimizer = dp.DPSGD(1.0, 1.0)
        loss = tf.keras.losses.MeanSquaredError("none")
        model.compile(optimizer, loss, metrics=["mae"], **options)
        data = tf.data.Dataset.from_tensors((X, floats(4, 2))).repeat(4)
        if moves:
            with pytest.raises(dp.NotPrivateError, match="writes data of the batch"):
                model.fit(data, verbose=0)
            assert optimizer.ledger.num_releases == 0
        else:
            model.fit(data, verbose=0)
