"""Keys of noise and draws are in nothing that a run shows, logs, saves or sends away."""

import copy
import pickle

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import zoo
from tests.helpers.secrets_shown import contents, forms, found, recorded, shown
from tf_adaptive_dp import sampling as samplings
from tf_adaptive_dp._keras.generation import GENERATION, keras
from tf_adaptive_dp.accounting import BandedNoise
from tf_adaptive_dp.mechanism import noise as noise_module
from tf_adaptive_dp.mechanism.noise import GaussianNoise

pytestmark = pytest.mark.filterwarnings("ignore:Under eager execution")

OPTIMIZERS = {
    "plain": {},
    "secure": {"secure_noise": True},
    "correlated": {"noise": BandedNoise(3)},
    "adaptive, accumulated": {"clipping": "adaptive", "gradient_accumulation_steps": 2},
}


def compiled(**arguments):
    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(2)])
    optimizer = dp.DPSGD(1.0, 1.0, expected_batch_size=4, **arguments)
    model.compile(optimizer, loss=tf.keras.losses.MeanSquaredError(reduction="none"))
    return model


BATCH = tf.ones([4, 3]), tf.ones([4, 2])


def logs_of(model, folder):
    """The graph and a profile in TensorBoard's log, and the graph of a trace."""
    board = tf.keras.callbacks.TensorBoard(folder, profile_batch=1)
    model.fit(*BATCH, batch_size=2, verbose=0, callbacks=[board])
    assert list(folder.rglob("*.xplane.pb"))
    writer = tf.summary.create_file_writer(str(folder / "trace"))
    step = tf.function(model.train_step)
    tf.summary.trace_on(graph=True)
    step(BATCH)
    with writer.as_default():
        tf.summary.trace_export("step", step=0)
    return contents(folder)


def graph_of(model):
    step = tf.function(model.train_step).get_concrete_function(BATCH)
    yield step.graph.as_graph_def().SerializeToString()  # with its library of functions
    yield str(step.graph.as_graph_def()).encode()


def saved(model, folder):
    folder.mkdir()
    if GENERATION == 2:
        model.save(folder / "saved_model")
        model.save_weights(folder / "weights")
    else:  # a SavedModel for inference
        model.export(folder / "saved_model", verbose=False)
    model.save(folder / "model.keras")
    model.save(folder / "model.h5")
    model.save_weights(folder / "model.weights.h5")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    checkpoint.save(folder / "checkpoint")
    return contents(folder)


def told(model):
    optimizer = model.optimizer
    texts = [*shown(optimizer), *shown(optimizer._mechanism), repr(optimizer.get_config())]
    values = [v.numpy() for v in optimizer.variables]
    yield "\n".join([*texts, repr(values)]).encode()
    yield b"".join(value.tobytes() for value in values)
    yield pickle.dumps(optimizer._mechanism.generator)
    yield pickle.dumps(copy.deepcopy(optimizer._mechanism.generator))


ARTEFACTS = {
    "logs": lambda model, folder: logs_of(model, folder),
    "graph": lambda model, _: graph_of(model),
    "saved": lambda model, folder: saved(model, folder),
    "told": lambda model, _: told(model),
}


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("arguments", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_nothing_shows_the_key_of_the_noise(arguments, monkeypatch, tmp_path):
    secrets = recorded(monkeypatch)
    model = compiled(**arguments)
    for name, artefact in ARTEFACTS.items():
        pieces = list(artefact(model, tmp_path / name))
        assert sum(map(len, pieces)) > 150, name
        assert not [found(piece, secrets) for piece in pieces if found(piece, secrets)], name
    assert secrets and min(map(len, secrets)) >= 8


@pytest.mark.slow
def test_nothing_shows_noise_that_is_still_to_be_taken_back(tmp_path):
    model = compiled(noise=BandedNoise(3))
    model.fit(*BATCH, batch_size=4, epochs=3, verbose=0)
    (past,) = model.optimizer._mechanism.generator._secret.past.values()
    rows = past.numpy()
    # Of two numbers that follow each other, since a file of a model may hold four bytes by chance.
    secrets = [rows[k, :2].tobytes() for k in range(2)]
    assert np.abs(rows[:, :8]).min() > 0
    for name in ("saved", "told"):
        pieces = list(ARTEFACTS[name](model, tmp_path / name))
        assert not [found(piece, secrets) for piece in pieces if found(piece, secrets)], name


@pytest.mark.slow
def test_the_search_finds_a_key_that_is_a_constant_of_the_graph(monkeypatch, tmp_path):
    secrets, model = recorded(monkeypatch), compiled()
    stream = model.optimizer._mechanism.generator._stream

    class Shown:
        def next(self):
            with tf.init_scope():
                key = int(stream._state[2].numpy())
            return tf.constant(key, tf.int64), stream.next()[1]

    model.optimizer._mechanism.generator._stream = Shown()
    for name in ("logs", "graph"):
        pieces = ARTEFACTS[name](model, tmp_path / name)
        assert any(found(piece, secrets) for piece in pieces), name


def test_the_search_finds_a_key_that_is_saved_or_told(monkeypatch, tmp_path):
    secrets, model = recorded(monkeypatch), compiled()
    stream = model.optimizer._mechanism.generator._stream
    model.optimizer.mine = stream._state  # tracked
    kept = stream._state if GENERATION == 2 else keras.Variable(stream._state, dtype="int64")
    model.optimizer._variables.append(kept)  # saved
    model.optimizer._mechanism.kept = int(stream._state[2].numpy())
    for name in ("saved", "told"):
        pieces = ARTEFACTS[name](model, tmp_path / name)
        assert any(found(piece, secrets) for piece in pieces), name


@pytest.mark.parametrize("form", forms(bytes(range(17, 33))))
def test_the_search_finds_every_form(form):
    secret = bytes(range(17, 33))
    assert form in found(b"before" + forms(secret)[form] + b"after", [secret])
    assert form not in found(b"before" + forms(secret)[form][:-1] + b"\0after", [secret])


def test_a_pickled_noise_has_another_key():
    noise = GaussianNoise(zoo.add_variable)
    again = pickle.loads(pickle.dumps(noise))
    keys = [int(n._stream.next()[0]) for n in (noise, again, copy.deepcopy(noise))]
    assert len(set(keys)) == 3
    seeded = GaussianNoise(zoo.add_variable, seed=5)
    assert int(pickle.loads(pickle.dumps(seeded))._stream.next()[0]) == 5


def datasets(x, y):
    yield dp.poisson_batches((x, y), dp.PoissonSampling(0.5, max_batch_size=8, steps=3))
    fixed = samplings.FixedSizeSampling(batch_size=4, steps=3)
    yield samplings.fixed_size_batches((x, y), fixed)
    shuffled = samplings.ShuffledEpochs(batch_size=4, steps=3)
    yield samplings.shuffled_batches((x, y), shuffled)
    canaries = dp.auditing.Canaries(x, y)
    yield dp.poisson_batches(
        canaries.mix((x, y)), dp.PoissonSampling(0.5, max_batch_size=20, steps=3)
    )


def serialized(dataset):
    return tf.raw_ops.DatasetToGraphV2(
        input_dataset=dataset._variant_tensor, external_state_policy=0, strip_device_assignment=True
    ).numpy()


def test_no_data_set_shows_the_key_of_its_draws(monkeypatch):
    secrets = recorded(monkeypatch)
    x, y = np.ones([8, 3], "float32"), np.zeros(8, "int32")
    for dataset in datasets(x, y):
        assert len(list(dataset)) == 3
        step = tf.function(lambda d=dataset: d.reduce(0, lambda n, _: n + 1))
        graph = step.get_concrete_function().graph.as_graph_def().SerializeToString()
        texts = [repr(dataset).encode(), repr(vars(dataset)).encode()]
        for piece in (serialized(dataset), graph, *texts):
            assert not found(piece, secrets)
    assert len(secrets) == 5 and set(map(len, secrets)) == {32}  # that of the coins, too
    key = secrets[0]
    open_key = dataset.map(lambda *batch: (tf.constant(key), *batch))
    assert found(serialized(open_key), secrets)


def test_a_computation_that_is_sent_away_holds_no_key(monkeypatch):
    tff = pytest.importorskip("tensorflow_federated")
    secrets = recorded(monkeypatch)

    def sent(function):
        computation = tff.tensorflow.computation(function)
        return tff.framework.serialize_computation(computation).SerializeToString()

    numbers = sent(lambda: noise_module.fresh_normal_numbers(3))
    assert b"/proc/sys/kernel/random/uuid" in numbers
    # There is no secret at all that could be in it.
    assert not secrets
    secret = bytes(range(17, 25))
    key = int.from_bytes(secret, "little")
    assert found(sent(lambda: tf.constant(key, tf.int64)), [secret])


def test_bits_of_the_kernel_are_other_ones_in_each_run_of_a_graph():
    draw = tf.function(lambda: tf.stack([noise_module._bits_of_the_kernel() for _ in range(4)]))
    words = np.concatenate([draw().numpy() for _ in range(100)])
    assert len({tuple(pair) for pair in words.tolist()}) == 400
    bits = words[..., np.newaxis] >> np.arange(32, dtype=np.uint32) & 1
    # Each of the 64 is a fair coin: 6 standard deviations of 400.
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.15
    pairs = np.corrcoef(bits.reshape([400, 64]).T) - np.eye(64)
    assert np.abs(pairs).max() < 0.3
