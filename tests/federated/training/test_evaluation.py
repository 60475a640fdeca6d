"""Held-out clients evaluate the model, the best state is kept, and no kill changes either."""

import signal
import warnings

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import federated
from federated.privacy.client_sampling import ClientSampler, EveryClient
from federated.training import program
from federated.training.evaluation import Evaluation, export
from federated.training.processes import build_adaptive_fed_avg
from tests.helpers import killable_rounds as rounds
from tests.helpers import real_rounds
from tests.helpers.crash_injection import CrashInjector
from tests.helpers.label_counts import LabelCounts

pytestmark = pytest.mark.filterwarnings("ignore:The best state is chosen", "ignore:.*were begun")


@pytest.fixture(scope="module")
def injector():
    with CrashInjector("killable_rounds") as injector:
        yield injector


def model_fn(units=2):
    model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(units)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, metrics=["accuracy"])
    return model


def weights(kernel, bias=(0.0, 0.0)):
    return tff.learning.models.ModelWeights(
        [np.array(kernel, np.float32), np.array(bias, np.float32)], []
    )


def held_out(folder, prefix="not_private/"):
    """The figure of each round that was released."""
    found = {}
    for entry in rounds.record(folder):
        figure = entry.get("figures", {}).get(f"{prefix}held_out/luck")
        if figure is not None:
            # A round that is released again is released as it was.
            assert found.setdefault(entry["number"], figure) == figure
    return found


def check_best(folder, trained, prefix="not_private/"):
    figures = held_out(folder, prefix)
    best = max(figures, key=figures.get)
    assert trained.best.number == best and trained.best.figures == {"luck": figures[best]}
    (model,) = {
        e["figures"]["test/model"]
        for e in rounds.record(folder)
        if e["event"] == "released" and e["number"] == best
    }
    assert float(trained.best.state["model"]) == model
    return figures


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("mechanism, prefix", [("gaussian", "not_private/"), (None, "")])
def test_the_best_state_of_all_calls_is_kept(tmp_path, mechanism, prefix):
    for number in (3, 6, 6, 10):
        trained = rounds.train(tmp_path, number, mechanism, evaluated=True)
        assert sorted(check_best(tmp_path, trained, prefix)) == list(range(1, number + 1))


def test_rounds_between_evaluations_have_no_figures(tmp_path):
    evaluation = rounds.evaluation(every=3)
    assert rounds.train(tmp_path, 7, evaluation=evaluation).best.number in (3, 6, 7)
    assert sorted(held_out(tmp_path)) == [3, 6, 7]


def test_the_last_state_is_evaluated_if_the_last_round_is_lost(tmp_path):
    with pytest.warns(UserWarning, match="failed: ConnectionError"):
        trained = rounds.train(
            tmp_path,
            3,
            failing=[False, False, True],
            evaluation=rounds.evaluation(every=4),
            max_failures=1,
        )
    assert (trained.num_finished, trained.num_begun) == (2, 3)
    assert sorted(held_out(tmp_path)) == [2] and trained.best.number == 2
    again = rounds.train(tmp_path, 3, evaluation=rounds.evaluation(every=4))
    assert again.best.number == 2 and sorted(held_out(tmp_path)) == [2]
    with pytest.warns(UserWarning, match="failed: ConnectionError"):
        none = rounds.train(
            tmp_path / "none",
            1,
            failing=[True],
            evaluation=rounds.evaluation(every=4),
            max_failures=1,
        )
    assert none.num_finished == 0 and none.best is None


@pytest.mark.parametrize("before", [None, "unchosen"])
def test_a_finished_run_that_is_evaluated_afterwards_has_a_best_state(tmp_path, before):
    if before is not None:
        before = rounds.evaluation()
        before.best, before.figures = None, lambda weights: {"other": 1.0}
    assert rounds.train(tmp_path, 3, evaluation=before).best is None
    trained = rounds.train(tmp_path, 3, evaluated=True)
    assert trained.best.number == trained.num_begun == 3
    assert trained.best.state["model"] == trained.state["model"]
    again = rounds.train(tmp_path, 3, evaluated=True).best
    assert again.figures == trained.best.figures  # found once


def test_figures_that_are_all_nan_choose_nothing_and_are_warned_of(tmp_path):
    evaluation = rounds.evaluation()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "figures", lambda weights: {"luck": np.nan})
        with pytest.warns(UserWarning, match="no best state: 'luck' was NaN whenever"):
            assert rounds.train(tmp_path, 2, evaluation=evaluation).best is None
    assert rounds.train(tmp_path, 3, evaluation=evaluation).best.number == 3


@pytest.mark.slow
@pytest.mark.parametrize("moments", [range(0, 34, 3), range(1, 34, 3), range(2, 34, 3)])
def test_a_run_that_evaluates_may_be_killed_at_every_moment(injector, tmp_path, moments):
    for moment in moments:
        job = {"what": "train", "rounds": 1000, "kill_at": moment, "evaluated": True}
        code = injector.run({"folder": str(tmp_path), **job})
        assert code == -signal.SIGKILL
        before = rounds.check(tmp_path, "gaussian")
    total = 2 + before.journal.begun
    trained = rounds.train(tmp_path, total, evaluated=True)
    assert trained.num_begun == trained.ledger.num_releases == total
    figures = check_best(tmp_path, trained)
    assert len(figures) == trained.num_finished  # none was forgotten
    assert not list((tmp_path / "run/secret/best").glob("*_temp*"))


def test_a_round_that_is_released_again_is_not_evaluated_again(tmp_path, monkeypatch):
    class Full(tff.program.ReleaseManager):
        async def release(self, value, key):
            released.append(value["not_private/held_out/luck"])
            raise OSError("disk full")

    released = []
    for _ in range(3):
        with pytest.raises(OSError, match="disk full"):
            program.train(
                rounds.Process(tmp_path),
                str,
                rounds.Sampler(["a"], rounds.Sampling()),
                1,
                tmp_path / "run",
                ledger=rounds.ledger("gaussian"),
                evaluation=rounds.evaluation(),
                release_managers=[Full()],
            )
    assert len(released) == 3 and len(set(released)) == 1


def test_another_choice_in_the_same_run_is_refused(tmp_path):
    rounds.train(tmp_path, 1, evaluated=True)
    other = rounds.evaluation()
    other.best = "loss"
    with pytest.raises(ValueError, match="choose the best state as the run.*best='luck'"):
        rounds.train(tmp_path, 2, evaluation=other)
    other.best = None
    assert rounds.train(tmp_path, 2, evaluation=other).num_finished == 2


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("client_ids", ("c", "d"), "Received: 2 other held-out clients, the run had best='luck'"),
        ("_sign", -1.0, "Received: mode='min', the run had best='luck', mode='max'"),
    ],
)
def test_another_evaluation_in_the_same_run_is_refused_before_a_round(
    tmp_path, attribute, value, message
):
    """Figures of other people, or the other way round, would be compared with those of before."""
    trained = rounds.train(tmp_path, 2, evaluated=True)
    other = rounds.evaluation()
    setattr(other, attribute, value)
    for number in (2, 3):
        with pytest.raises(ValueError, match=message):
            rounds.train(tmp_path, number, evaluation=other)
    assert len([e for e in rounds.record(tmp_path) if e["event"] == "began"]) == 2
    again = rounds.train(tmp_path, 2, evaluated=True)
    assert again.best.figures == trained.best.figures
    if attribute == "client_ids":
        other.best = None  # it is the same people who must not change
        with pytest.raises(ValueError, match="2 other held-out clients"):
            rounds.train(tmp_path, 3, evaluation=other)


def test_a_run_may_begin_to_choose(tmp_path):
    unchosen = rounds.evaluation()
    unchosen.best = None
    assert rounds.train(tmp_path, 1, evaluation=unchosen).best is None
    assert rounds.train(tmp_path, 2, evaluated=True).best.number == 2
    other = rounds.evaluation()
    other._sign = -1.0
    with pytest.raises(ValueError, match="mode='min'"):  # from now on the choice counts
        rounds.train(tmp_path, 3, evaluation=other)


def test_what_epsilon_does_not_cover_is_said(tmp_path):
    with pytest.warns(UserWarning, match="chosen by 'luck' on 1 held-out clients. ε does not cov"):
        rounds.train(tmp_path, 1, evaluated=True)
    trained_on = rounds.evaluation()
    trained_on.client_ids = ("a",)
    with pytest.warns(UserWarning, match="1 of them are trained on too .*has no ε: hold other"):
        rounds.train(tmp_path / "both", 1, evaluation=trained_on)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rounds.train(tmp_path / "public", 1, None, evaluated=True)
        trained_on.best = None
        rounds.train(tmp_path / "unchosen", 1, evaluation=trained_on)


# --- the evaluation itself


def of_client(name):
    """Batches of two and one: the last is smaller, so a mean of the batches' means is wrong."""
    rng = np.random.default_rng(ord(name))
    x = rng.normal(size=[3, 2]).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, (x[:, 0] > 0).astype(np.int32))).batch(2)


def test_figures_are_those_of_all_examples_together():
    evaluation = Evaluation(model_fn, of_client, ["a", "b", "c"])
    at = weights([[-1.0, 0.5], [0.3, 0.2]], [0.1, -0.1])
    model = export(at, model_fn)
    data = [batch for name in "abc" for batch in of_client(name)]
    x, y = (np.concatenate(parts) for parts in zip(*data))
    expected = model.evaluate(x, y, batch_size=9, verbose=0, return_dict=True)
    for _ in range(2):  # nothing is left of the time before
        assert evaluation.figures(at) == pytest.approx(expected, rel=1e-6)
    assert evaluation.figures(weights(np.zeros([2, 2]))) != pytest.approx(expected, rel=1e-3)


def test_a_process_that_is_built_in_between_does_not_disturb_the_model():
    """Keras 2 breaks all models that were made before one is made in a graph, as TFF does."""
    evaluation = Evaluation(model_fn, of_client, ["a"])
    at = weights(np.ones([2, 2]))
    before = evaluation.figures(at)
    for evaluate in (evaluation.check, evaluation.figures):
        build_adaptive_fed_avg(model_fn, input_spec=of_client("a").element_spec)
        evaluate(at)
    assert evaluation.figures(at) == before


def test_a_model_that_is_returned_again_is_refused_once_it_no_longer_works():
    model = model_fn()
    evaluation = Evaluation(lambda: model, of_client, ["a"])
    with tf.Graph().as_default():
        model_fn()
    with pytest.raises(TypeError, match="`model_fn` must return a new Keras model at each call"):
        evaluation.check(weights(np.ones([2, 2])))


def test_client_data_of_tff_is_evaluated_on_all_of_its_clients():
    data = tff.simulation.datasets.TestClientData(
        {name: (np.ones([2, 2], np.float32), np.ones([2], np.int32)) for name in "ab"}
    ).preprocess(lambda dataset: dataset.batch(2))
    evaluation = Evaluation(model_fn, data, best="accuracy")
    assert evaluation.client_ids == ("a", "b")
    assert evaluation.figures(weights([[0.0, 1.0], [0.0, 1.0]]))["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("best", "mode", "better"),
    [
        ("loss", "auto", -1),
        ("accuracy", "auto", 1),
        ("my_AUC", "auto", 1),
        ("accuracy", "min", -1),
        ("loss", "max", 1),
    ],
)
def test_which_figure_is_better(best, mode, better):
    evaluation = Evaluation(model_fn, of_client, ["a"], best=best, mode=mode)
    assert evaluation.is_better(0.5 + 0.1 * better, 0.5)
    assert not evaluation.is_better(0.5 - 0.1 * better, 0.5)
    assert not evaluation.is_better(0.5, 0.5)
    assert evaluation.is_better(0.5, np.nan) and not evaluation.is_better(np.nan, 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"every": 0}, "`every` must be at least 1"),
        ({"mode": "most"}, "`mode` must be"),
        ({"client_ids": []}, "`client_ids` must be at least one"),
        ({"client_data": of_client, "client_ids": None}, "with at least one of `client_ids`"),
        ({"client_ids": "abc"}, "`client_ids` must be a list of strings"),
        ({"client_ids": ["a", b"b"]}, r"`client_ids` must .*x.decode\(\).*str\(x\)"),
        ({"client_ids": ["a", "a"]}, "`client_ids` must be .* all different.*2 ids, 1 distinct"),
        ({"model_fn": real_rounds.model_fn}, "`model_fn` must .* compiled with its loss"),
        ({"model_fn": model_fn()}, "`model_fn` must be a function that returns a Keras model"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    good = {"model_fn": model_fn, "client_data": of_client, "client_ids": ["a"]}
    with pytest.raises((TypeError, ValueError), match=message):
        Evaluation(**{**good, **change})


def test_each_number_of_a_metric_is_a_figure():
    def counting():
        model = model_fn()
        model.compile(loss=model.loss, metrics=[LabelCounts()])
        return model

    at, labels = weights(np.zeros([2, 2])), np.concatenate([y for _, y in of_client("a")])
    figures = Evaluation(counting, of_client, ["a"]).figures(at)
    assert figures["label_counts_1"] == labels.sum()
    assert figures["label_counts_0"] == len(labels) - labels.sum()
    with pytest.raises(ValueError, match="'label_counts_0', 'label_counts_1', 'loss'"):
        Evaluation(counting, of_client, ["a"], best="label_counts").figures(at)


def test_a_figure_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="best='auc', the figures are .'accuracy', 'loss'"):
        Evaluation(model_fn, of_client, ["a"], best="auc").figures(weights(np.zeros([2, 2])))
    with pytest.raises(ValueError, match="of clients that have examples"):
        Evaluation(model_fn, lambda name: of_client(name).take(0), ["a"]).figures(
            weights(np.zeros([2, 2]))
        )


def as_mapping(name):
    return of_client(name).map(lambda x, y: {"y": y, "x": x})


def test_batches_may_be_mappings_as_in_training():
    at = weights([[-1.0, 0.5], [0.3, 0.2]], [0.1, -0.1])
    found = [Evaluation(model_fn, d, ["a", "b"]).figures(at) for d in (of_client, as_mapping)]
    assert found[0] == found[1] and len(found[0]) == 2


@pytest.mark.parametrize(
    ("change", "received"),
    [
        (lambda x, y: (x, y, tf.ones_like(y)), "a batch of 3 parts for client 'a'"),
        (lambda x, y: {"pixels": x, "label": y}, r"a batch of \['label', 'pixels'\]"),
        (lambda x, y: x, "a batch of EagerTensor"),
    ],
)
def test_other_batches_are_refused_with_a_cure(change, received):
    evaluation = Evaluation(model_fn, lambda name: of_client(name).map(change), ["a"])
    for method in (evaluation.check, evaluation.figures):
        with pytest.raises(TypeError, match=f"must give batches .*`dataset.map`.*{received}"):
            method(weights(np.eye(2)))


class Weights(rounds.Process):
    """Rounds whose model has the weights of `model_fn`."""

    def get_model_weights(self, state):
        return weights(np.full([2, 2], state["model"]))


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        (Evaluation(model_fn, of_client, ["a"], every=9, best="acuracy"), "`best` must name"),
        (Evaluation(lambda: model_fn(3), of_client, ["a"], every=9), "`model_fn` must return"),
        (Evaluation(model_fn, lambda c: of_client(c).map(lambda x, y: x), ["a"]), "batches"),
        (Evaluation(model_fn, lambda c: of_client(c).unbatch(), ["a"]), "a single example"),
    ],
    ids=["best", "model", "batches", "examples"],
)
def test_what_cannot_be_evaluated_is_refused_before_the_first_round(tmp_path, evaluation, message):
    def train(evaluation):
        arguments = (Weights(tmp_path), str, rounds.Sampler(["b"], rounds.Sampling()), 9)
        return program.train(*arguments, tmp_path / "run", evaluation=evaluation)

    with pytest.raises((TypeError, ValueError), match=message):
        train(evaluation)
    assert not rounds.record(tmp_path)
    corrected = Evaluation(model_fn, as_mapping, ["a"], every=9, best="accuracy")
    trained = train(corrected)
    assert trained.num_begun == 9 and set(trained.best.figures) == {"loss", "accuracy"}


def test_what_has_no_weights_is_not_exported():
    with pytest.raises(TypeError, match="`state` must be the state of a learning process"):
        export({"weights": 1}, model_fn)
    with pytest.raises(TypeError, match="`model_fn` must be a function that returns a Keras model"):
        export(weights(np.zeros([2, 2])), real_rounds.model_fn)
    with pytest.raises(TypeError, match="`model_fn` must be a function that returns a Keras model"):
        export(weights(np.zeros([2, 2])), model_fn())
    with pytest.raises(ValueError, match="a model with the weights of the trained one"):
        export(weights(np.zeros([3, 2])), model_fn)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([2, 2], r"weights of shapes \[\(2, 2\), \(2,\), \(2, 2\), \(2,\)\], the trained one has"),
        ([], r"trainable weights of shapes \[\], the trained one has \[\(2, 2\), \(2,\)\]"),
        ([3], r"trainable weights of shapes \[\(2, 3\), \(3,\)\]"),
        ([2, "norm"], r"non-trainable weights of shapes \[\(2,\), \(2,\)\], the trained one has"),
    ],
)
def test_a_model_with_more_or_fewer_weights_is_refused(layers, message):
    def other():
        model = tf.keras.Sequential([tf.keras.Input([2])])
        for units in layers:
            norm = tf.keras.layers.BatchNormalization(center=False, scale=False)
            model.add(norm if units == "norm" else tf.keras.layers.Dense(units))
        model.compile(loss="mse")
        return model

    at = weights(np.eye(2))
    with pytest.raises(ValueError, match=message):
        export(at, other)
    evaluation = Evaluation(other, of_client, ["a"])
    with pytest.raises(ValueError, match=message):
        evaluation.figures(at)


@pytest.mark.slow
def test_the_best_state_becomes_a_model_of_keras(context, tmp_path):
    process = build_adaptive_fed_avg(
        model_fn, input_spec=real_rounds.dataset("client 0").element_spec
    )
    clients, others = real_rounds.CLIENTS[:4], real_rounds.CLIENTS[4:]
    evaluation = federated.Evaluation(model_fn, real_rounds.dataset, others, best="accuracy")
    sampler = ClientSampler(clients, EveryClient())
    arguments = (process, real_rounds.dataset, sampler)
    trained = federated.train(*arguments, 3, tmp_path, evaluation=evaluation)
    assert 1 <= trained.best.number <= 3
    for state, figures in (
        (trained.best.state, trained.best.figures),
        (trained.state, evaluation.figures(process.get_model_weights(trained.state))),
    ):
        model = evaluation.export(state)
        x, y = (
            np.concatenate(parts)
            for parts in zip(*(batch for name in others for batch in real_rounds.dataset(name)))
        )
        found = model.evaluate(x, y, verbose=0, return_dict=True)
        assert found == pytest.approx(figures, rel=1e-5)
