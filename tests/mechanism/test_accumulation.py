"""A batch in parts is one batch: the same step, one release, nothing before the last part."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue, zoo
from tests.helpers.catalogue import KINDS
from tests.helpers.gaussianity import assert_gaussian
from tf_adaptive_dp.mechanism import accumulation

pytestmark = pytest.mark.filterwarnings("ignore:Under eager execution")


def trained(name, parts=1, fit=(), compile_with=(), **kwargs):
    model = catalogue.mlp()
    if parts > 1:
        kwargs["gradient_accumulation_steps"] = parts
    model.compile(catalogue.make(name, **kwargs), loss=catalogue.loss(), **dict(compile_with))
    catalogue.fit(model, 2, **{"batch_size": 8 // parts, **dict(fit)})
    return model


def assert_same_state(actual, expected):
    for a, b in zip(actual.get_weights(), expected.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert actual.optimizer.ledger.segments == expected.optimizer.ledger.segments
    assert int(actual.optimizer.iterations) == int(expected.optimizer.iterations)


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", KINDS)
def test_the_step_is_that_of_the_whole_batch(name):
    whole = trained(name)
    in_parts = trained(name, parts=4)
    assert_same_state(in_parts, whole)
    assert in_parts.optimizer.ledger.segments == [(0.5, 8.0, 8)]
    assert in_parts.optimizer.next_release() == (0.5, 8.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        {"jit_compile": True},
        {"steps_per_execution": 4},
        pytest.param({"run_eagerly": True}, marks=catalogue.WITHOUT_TAPE),
    ],
)
def test_modes_of_keras_accumulate_alike(mode):
    kwargs = {"noise_multiplier": 0.0} if "jit_compile" in mode else {}
    assert_same_state(
        trained("DPAdam", 2, compile_with=mode, **kwargs), trained("DPAdam", **kwargs)
    )


@pytest.mark.slow
@pytest.mark.parametrize("clipping", ["automatic", "per_layer", "adaptive"])
def test_every_clipping_accumulates(clipping):
    kwargs = {"clipping": clipping, "l2_norm_clip": 0.1}
    whole, in_parts = trained("DPSGD", **kwargs), trained("DPSGD", parts=2, **kwargs)
    assert_same_state(in_parts, whole)
    assert in_parts.optimizer.l2_norm_clip == pytest.approx(whole.optimizer.l2_norm_clip, rel=1e-5)


@pytest.mark.slow_on(2)
def test_nothing_moves_before_the_last_part():
    model = catalogue.mlp()
    optimizer = catalogue.make("ADADP", gradient_accumulation_steps=3)
    model.compile(optimizer, loss=catalogue.loss())
    start = model.get_weights()
    catalogue.fit(model, steps_per_epoch=2)
    state = [v.numpy() for v in optimizer.variables]
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), start))
    assert optimizer.ledger.num_releases == int(optimizer.iterations) == 0
    assert int(optimizer._mechanism.generator._counter) == 0
    catalogue.fit(model, steps_per_epoch=1)
    assert optimizer.ledger.segments == [(0.5, 24.0, 1)]
    assert int(optimizer.iterations) == 1
    assert any(not np.array_equal(a, b.numpy()) for a, b in zip(state, optimizer.variables))


@pytest.mark.slow
def test_raw_sums_are_in_no_checkpoint(tmp_path):
    model = catalogue.mlp()
    optimizer = catalogue.make("DPSGD", gradient_accumulation_steps=3, noise_multiplier=0.0)
    model.compile(optimizer, loss=catalogue.loss())
    catalogue.fit(model, steps_per_epoch=2)
    ((_, sums),) = optimizer._mechanism.accumulator._held.values()
    # Beside the sums, numbers: of rows that were present, and of parts.
    held = {tuple(v.shape) for v in sums} - {()}
    assert held == {(6, 5), (5,), (5, 3), (3,)}
    assert max(float(tf.norm(v)) for v in sums) > 0
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).write(str(tmp_path / "c"))
    saved = [name for name, _ in tf.train.list_variables(path) if name.startswith("optimizer")]
    stored = [tf.train.load_variable(path, name) for name in saved]
    # Keras 3 stores the model's weights with the optimizer, which have the same shapes.
    weights = model.get_weights()
    stored = [a for a in stored if not any(np.array_equal(a, w) for w in weights)]
    assert not any(np.shape(a) in held and np.any(a) for a in stored)


def release_in_parts(mechanism, parts, clip_before_last=None):
    for k, rows in enumerate(parts):
        if clip_before_last is not None and k == len(parts) - 1:
            mechanism.clip_norm.value = clip_before_last
        (released,) = mechanism.release(zoo.Rows(rows), len(rows))
    return released.numpy()


@pytest.mark.parametrize("noise_multiplier", [0.5, 2.0])
def test_noise_is_added_once_and_counted_once(noise_multiplier):
    mechanism = zoo.make_mechanism(
        gradient_accumulation_steps=4, noise_multiplier=noise_multiplier, l2_norm_clip=3.0
    )
    released = release_in_parts(mechanism, [np.zeros([2, 20_000])] * 4)
    assert_gaussian(released, noise_multiplier * 3.0 / 8)
    assert mechanism.ledger.segments == [(noise_multiplier, 8.0, 1)]
    assert float(mechanism.noise_stddev()) == pytest.approx(noise_multiplier * 3.0 / 8)


@pytest.mark.parametrize("last_clip", [0.1, 10.0])
def test_a_clip_that_is_set_within_a_batch_bounds_what_came_before(last_clip):
    # The noise is that of the last clip; so no example may weigh more than it.
    mechanism = zoo.make_mechanism(
        gradient_accumulation_steps=2, expected_batch_size=1, l2_norm_clip=3.0
    )
    parts = [np.full([1, 1], 100.0), np.zeros([1, 1])]
    assert release_in_parts(mechanism, parts, last_clip) == pytest.approx(last_clip, rel=1e-5)


def test_other_gradients_cannot_be_applied():
    w = tf.Variable([1.0])
    optimizer = dp.DPSGD(1.0, 1.0, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=1` to process gradients"):
        optimizer.apply_gradients([(tf.ones([1]), w)], non_private_gradients=True)
    assert w.numpy() == 1.0


def test_other_variables_in_the_middle_of_a_batch_are_refused():
    mechanism = zoo.make_mechanism(gradient_accumulation_steps=2)
    mechanism.release(zoo.Rows(np.ones([2, 3])), 2)
    with pytest.raises(ValueError, match="changed in the middle of a batch. Received: 1 of 2"):
        mechanism.release(zoo.Rows(np.ones([2, 4])), 2)
    mechanism.release(zoo.Rows(np.ones([2, 3])), 2)
    mechanism.release(zoo.Rows(np.ones([2, 4])), 2)
    assert mechanism.ledger.num_releases == 1


@pytest.mark.parametrize("compiled", [True, False])
def test_two_sets_of_variables_in_one_step_are_refused(compiled):
    # Equal shapes: one set would get what was meant for the other.
    first, second = (tf.Variable(tf.zeros([3])) for _ in range(2))
    optimizer = dp.DPSGD(1.0, 0.0, gradient_accumulation_steps=2, learning_rate=1.0)
    optimizer.build([first, second])

    def step(x):
        for w in (first, second):
            with tf.GradientTape() as tape:
                losses = tf.linalg.matvec(x, w)
            optimizer.minimize(losses, [w], tape)

    why = "must train the same variables" if compiled else "changed in the middle of a batch"
    with pytest.raises(ValueError, match=why):
        (tf.function(step) if compiled else step)(tf.ones([4, 3]))
    assert not optimizer.ledger.num_releases


def test_parts_of_different_sizes_need_an_expected_batch_size():
    mechanism = zoo.make_mechanism(gradient_accumulation_steps=2)
    mechanism.release(zoo.Rows(np.ones([2, 3])), 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Batches vary in size"):
        mechanism.release(zoo.Rows(np.ones([3, 3])), 3)
    assert mechanism.ledger.num_releases == 0


def test_steps_of_other_variables_that_were_traced_before_never_mix_batches():
    # Retraced steps must not leave parts behind which a later batch would release besides its own.
    mechanism = zoo.make_mechanism(gradient_accumulation_steps=2, expected_batch_size=1)
    small, large = (
        tf.function(lambda rows: mechanism.release(zoo.Rows(rows), 1)[0]) for _ in range(2)
    )
    one, other = tf.eye(1, 3), tf.eye(1, 4)
    for step, rows in [(small, one), (small, one), (large, other), (large, other)]:
        step(rows)
    for _ in range(4):
        released = small(one).numpy(), large(other).numpy()
        for r in released:
            assert r.sum() in (0.0, 2.0)
    assert mechanism.ledger.num_releases == 2 + 4
    assert mechanism.accumulator.num_parts == 0
    small(one)
    large(other)
    assert mechanism.accumulator.num_parts == 2


CALLBACKS = {
    "monitor": lambda parts: dp.PrivacyMonitor(1000, 1e-5, full_passes=False),
    "budget": lambda parts: dp.PrivacyBudget(
        1e6, 1e-5, 1000, batch_size=8 * parts, full_passes=False
    ),
}


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("make", CALLBACKS.values(), ids=CALLBACKS)
def test_an_epoch_that_ends_within_a_batch_is_refused(make):
    model = catalogue.mlp()
    model.compile(catalogue.make("DPSGD", gradient_accumulation_steps=3), loss=catalogue.loss())
    with pytest.raises(dp.NotPrivateError, match="2 parts of 3 at the end of an epoch"):
        model.fit(*catalogue.data(40), batch_size=8, verbose=0, callbacks=[make(3)])
    assert model.optimizer.ledger.num_releases == 1


class Interruption(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("make", CALLBACKS.values(), ids=CALLBACKS)
def test_parts_of_an_interrupted_run_do_not_join_a_batch_of_the_next(make):
    # Otherwise an example of the first part could come twice in one release: a sensitivity of 2C.
    model = catalogue.mlp()
    model.compile(catalogue.make("DPSGD", gradient_accumulation_steps=2), loss=catalogue.loss())
    with pytest.raises(KeyboardInterrupt):
        catalogue.fit(model, callbacks=[Interruption()])
    assert model.optimizer.unfinished_parts == 1
    ((_, sums),) = model.optimizer._mechanism.accumulator._held.values()
    assert max(float(tf.norm(v)) for v in sums) > 0
    with pytest.warns(UserWarning, match="1 of 2 parts are dropped"):
        model.fit(*catalogue.data(16), batch_size=8, verbose=0, callbacks=[make(2)])
    assert model.optimizer.ledger.num_releases == 1
    assert max(float(tf.norm(v)) for v in sums) == 0


def test_every_part_is_in_one_sum_and_none_in_two():
    sums = accumulation.Accumulator(steps=2)

    def after(part):
        (total,), complete = sums.add([tf.constant([part])])
        return float(total[0]), bool(complete), sums.num_parts

    assert [after(part) for part in (1.0, 2.0)] == [(1.0, False, 1), (3.0, True, 0)]
    assert [after(part) for part in (4.0, 8.0)] == [(4.0, False, 1), (12.0, True, 0)]
    after(16.0)
    sums.drop()
    assert sums.num_parts == 0 and after(32.0) == (32.0, False, 1)
