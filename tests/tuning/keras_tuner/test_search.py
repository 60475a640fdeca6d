"""The course of a search, with trials that are not trained: what is drawn, tried, kept, shown."""

import re
import sys

import keras_tuner
import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import tuned
from tf_adaptive_dp.tuning import strategies
from tf_adaptive_dp.tuning.keras_tuner import results

RATES = [0.01, 0.1, 1.0]
DRAWS = [{"learning_rate": rate} for rate in (0.1, 0.1, 1.0, 0.01)]


@pytest.mark.slow
def test_composition_tries_each_candidate_once_and_shows_all(tmp_path, monkeypatch, capsys):
    fake = tuned.Fake(monkeypatch, 0.5, None, 0.75)
    made = tuned.search(tuned.tuner(tmp_path), verbose=1)
    np.testing.assert_allclose(fake.trained, RATES)
    # That which crashed has no rank, and no model.
    assert [hp.values["learning_rate"] for hp in made.get_best_hyperparameters(3)] == [1, 0.01]
    assert len(made.get_best_models(3)) == 2
    assert len(tuned.folders(tmp_path)) == 3
    printed = capsys.readouterr().out
    assert "Trial 2 of 3: {'learning_rate': 0.1}: crashed" in printed
    made.results_summary()
    assert "Score: 0.5" in capsys.readouterr().out
    assert "{'learning_rate': 0.01}: score 0.5, 4 releases" in made.privacy_statement()
    assert "{'learning_rate': 0.1}: crashed" in made.privacy_statement()


def test_the_winner_shows_that_a_search_chose_it(tmp_path, monkeypatch):
    tuned.Fake(monkeypatch, *[0.5] * 3)
    made = tuned.search(tuned.tuner(tmp_path))
    (model,) = made.get_best_models()
    assert model.optimizer.ledger.chosen_by_search
    text = dp.privacy_statement(model.optimizer, tuned.NUM_EXAMPLES, tuned.DELTA)
    assert text.startswith("NOT THE WHOLE COST")
    assert "NOT THE WHOLE COST" not in made.privacy_statement()
    model.save(tmp_path / "winner.keras")
    again = tf.keras.models.load_model(tmp_path / "winner.keras")
    assert again.optimizer.ledger.chosen_by_search


def test_a_trial_is_trained_by_the_search_alone(tmp_path, monkeypatch):
    tuned.Fake(monkeypatch, *[0.5] * 3)
    made = tuned.search(tuned.tuner(tmp_path))
    before = tuned.everything_in(tmp_path)
    (trial,) = made.oracle.get_best_trials()
    x, y = tuned.data()
    with pytest.raises(NotImplementedError, match="trains its trials in `search` alone"):
        made.run_trial(trial, x, y, validation_data=(x, y))
    assert tuned.everything_in(tmp_path) == before


def test_composition_never_has_more_trials_than_candidates(tmp_path, monkeypatch):
    fake = tuned.Fake(monkeypatch, *[0.5] * 3)
    made = tuned.search(tuned.tuner(tmp_path, strategy=strategies.Composition(40)))
    assert len(fake.trained) == 3 and "composition of 3 candidates" in made.privacy_statement()


def test_the_number_of_draws_is_the_strategys_and_draws_may_repeat(tmp_path, monkeypatch):
    fake = tuned.Fake(monkeypatch, *[0.5] * 12)
    monkeypatch.setattr(strategies.RepeatAndSelect, "draw_num_trials", lambda strategy: 12)
    tuned.search(tuned.tuner(tmp_path, strategy="repeat_and_select", num_trials=5))
    assert len(fake.trained) == 12  # of three candidates


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["repeat_and_select", "liu_talwar"])
def test_of_other_strategies_the_winner_alone_is_left(tmp_path, monkeypatch, capsys, strategy):
    fake = tuned.Fake(monkeypatch, 0.1875, 0.8125, 0.6875, None, draws=DRAWS)
    made = tuned.search(tuned.tuner(tmp_path, strategy=strategy, num_trials=4))
    printed = capsys.readouterr()
    assert tuned.winner(made) == 0.1 and len(fake.trained) == 4
    # While the search runs, the best so far and the present one are there.
    assert [len(seen) for seen in fake.folders_seen] == [1, 2, 2, 2]
    (folder,) = tuned.folders(tmp_path)
    assert folder in fake.folders_seen[1]
    made.results_summary()
    made.search_space_summary()
    shown = capsys.readouterr().out + made.privacy_statement() + tuned.everything_in(tmp_path)
    assert "0.8125" in shown
    shown += printed.out + printed.err
    for secret in ("0.1875", "0.6875", "no memory", "draws", "begun", 'error": "Tr'):
        assert secret not in shown
    assert not (tmp_path / "search" / "secret").exists()
    assert made.remaining_trials is None and list(made.oracle.trials) == [folder[6:]]
    for show in (made.get_best_models, made.get_best_hyperparameters):
        with pytest.raises(ValueError, match="only the winner may be shown. Received: 2"):
            show(2)


def test_what_is_left_does_not_tell_how_many_trials_there_were(tmp_path, monkeypatch, capsys):
    left = []
    for number in (1, 4):
        folder = tmp_path / str(number)
        tuned.Fake(monkeypatch, 0.5, *[0.25] * 3, draws=DRAWS[:number])
        made = tuned.search(tuned.tuner(folder, strategy="repeat_and_select", num_trials=2))
        made.results_summary()
        text = "".join(capsys.readouterr()) + made.privacy_statement()
        for path in sorted((folder / "search").rglob("*")):
            text += f"{path}\n"
            # Weights are random, and what TensorBoard gets has the time.
            if path.suffix in (".h5", ".index"):
                text += repr([name for name, _ in tuned.contents(path)])
            elif path.is_file() and not re.search("tfevents|data-", path.name):
                text += path.read_text()
        (trial,) = made.oracle.trials
        text = text.replace(trial, "ID").replace(str(folder), "FOLDER")
        left.append(re.sub(r"tfevents\.[0-9a-f]{16}\.honest", "tfevents", text))
    assert left[0] == left[1] and '"score": 0.5' in left[0]


@pytest.mark.slow
def test_the_name_of_the_winner_does_not_tell_when_it_was_tried(tmp_path, monkeypatch):
    names = set()
    for folder in (tmp_path / "a", tmp_path / "b"):
        tuned.Fake(monkeypatch, 0.5, 0.25, draws=DRAWS[:2])
        tuned.search(tuned.tuner(folder, strategy="repeat_and_select", num_trials=2))
        names.update(tuned.folders(folder))
    assert len(names) == 2


def test_names_of_tensorboards_files_do_not_count_writers(tmp_path, monkeypatch):
    tuned.Fake(monkeypatch, 0.5, draws=DRAWS[:1])
    tuned.search(tuned.tuner(tmp_path, strategy="repeat_and_select", num_trials=2))
    (events,) = (tmp_path / "search" / "tensorboard").rglob("events*")
    assert len(events.name.split(".")[3]) == 16 and events.name.endswith(".honest")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["composition", "repeat_and_select"])
def test_the_smallest_score_wins_where_it_should(tmp_path, monkeypatch, strategy):
    tuned.Fake(monkeypatch, 0.75, None, 0.5, draws=DRAWS[1:])
    made = tuned.tuner(tmp_path, objective="val_loss", strategy=strategy, num_trials=3)
    assert tuned.winner(tuned.search(made)) == 0.01


@pytest.mark.slow
def test_a_crash_is_paid_for_and_no_number_of_them_ends_the_search(tmp_path, monkeypatch):
    draws = [{"learning_rate": 0.1}] * 9
    fake = tuned.Fake(monkeypatch, *[None] * 8, 0.125, draws=draws)
    made = tuned.search(tuned.tuner(tmp_path, strategy="repeat_and_select", num_trials=4))
    assert len(fake.trained) == 9 and tuned.winner(made) == 0.1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["composition", "repeat_and_select"])
def test_if_all_crashed_there_is_a_clear_error_each_time(tmp_path, monkeypatch, strategy):
    fake = tuned.Fake(monkeypatch, *[None] * 3, draws=DRAWS[:3])
    made = tuned.tuner(tmp_path, strategy=strategy, num_trials=3)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Every candidate crashed.*\n.*no memory"):
            tuned.search(made)
    assert len(fake.trained) == 3
    for show in (made.get_best_models, made.privacy_statement, made.plot, made.results_summary):
        with pytest.raises(RuntimeError, match="Every candidate crashed"):
            show()


@pytest.mark.parametrize(
    "releases, resumed, spent", [(0, 0, False), (0, 1, True), (4, 0, True), (4, 1, True)]
)
def test_what_may_have_been_released_before_an_interruption_is_not_denied(releases, resumed, spent):
    outcome = {"score": None, "error": "", "releases": releases, "resumed": resumed}
    text = results.failure([outcome], is_all=False)
    assert ("The budget is spent." in text, "Nothing was released." in text) == (spent, not spent)


def test_no_trial_at_all_is_a_clear_error(tmp_path, monkeypatch):
    tuned.Fake(monkeypatch, draws=[])
    with pytest.raises(RuntimeError, match="drew no trial at all"):
        tuned.search(tuned.tuner(tmp_path, strategy="repeat_and_select", num_trials=3))


def test_results_are_asked_for_too_early(tmp_path):
    made = tuned.tuner(tmp_path)
    for show in (made.get_best_models, made.privacy_statement, made.plot):
        with pytest.raises(RuntimeError, match="not finished"):
            show()


@pytest.mark.slow
def test_a_plot_shows_the_winner_alone_or_all(tmp_path, monkeypatch):
    for strategy, bars in (("composition", 2), ("repeat_and_select", 1)):
        tuned.Fake(monkeypatch, 0.5, None, 0.75, draws=DRAWS[:3])
        made = tuned.tuner(tmp_path / strategy, strategy=strategy, num_trials=3)
        figure = tuned.search(made).plot(tmp_path / f"{strategy}.png")
        candidates, spending = figure.axes
        assert len(candidates.patches) == bars
        assert [label.get_text() for label in spending.get_yticklabels()][2] == "budget"
        assert (tmp_path / f"{strategy}.png").stat().st_size > 1000


@pytest.mark.slow
def test_tensorboards_table_has_what_may_be_shown(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    def table(folder):
        found = {}
        for path in (folder / "search" / "tensorboard").iterdir():
            events = EventAccumulator(str(path)).Reload()
            (score,) = events.Tensors("val_accuracy")
            content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
            data = plugin_data_pb2.HParamsPluginData.FromString(content)
            rate = data.session_start_info.hparams["learning_rate"].number_value
            found[rate] = float(tf.make_ndarray(score.tensor_proto))
        return found

    tuned.Fake(monkeypatch, 0.5, 0.25, 0.75, None, draws=DRAWS[1:])
    tuned.search(tuned.tuner(tmp_path / "a"))
    assert table(tmp_path / "a") == {0.1: 0.5, 1.0: 0.25, 0.01: 0.75}
    tuned.Fake(monkeypatch, 0.5, 0.25, None, 0.75, draws=DRAWS)
    tuned.search(tuned.tuner(tmp_path / "b", strategy="liu_talwar", num_trials=3))
    assert table(tmp_path / "b") == {0.01: 0.75}


@pytest.mark.slow
def test_conditional_spaces_and_one_candidate(tmp_path, monkeypatch):
    def conditional(hp):
        momentum = 0.0
        kind = hp.Choice("kind", ["plain", "momentum"])
        with hp.conditional_scope("kind", ["momentum"]):
            if kind == "momentum":
                momentum = hp.Choice("momentum", [0.5, 0.9])
        return tuned.model(tuned.optimizer(momentum=momentum))

    fake = tuned.Fake(monkeypatch, *[0.5] * 3)
    made = tuned.search(tuned.tuner(tmp_path / "a", conditional))
    assert len(fake.trained) == 3
    assert made.get_best_hyperparameters()[0].values == {"kind": "plain"}
    for strategy in ("composition", "repeat_and_select"):
        fake = tuned.Fake(monkeypatch, *[0.5] * 99)
        folder = tmp_path / strategy
        number = None if strategy == "composition" else 2
        one = tuned.tuner(
            folder, lambda hp: tuned.model(tuned.optimizer()), strategy=strategy, num_trials=number
        )
        assert tuned.search(one).get_best_hyperparameters()[0].values == {}


def test_a_space_that_grows_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    def growing(hp):
        rate = hp.Choice("learning_rate", RATES)
        return tuned.model(
            tuned.optimizer(rate, momentum=hp.Float("m", 0, 0.9) if rate == 1 else 0.0)
        )

    fake = tuned.Fake(monkeypatch, *[0.5] * 3)
    made = tuned.tuner(tmp_path, growing)
    with pytest.raises(dp.NotPrivateError, match=r"space grew.*Received: \['m'\]"):
        tuned.search(made)
    assert not fake.trained and len(tuned.journal_lines(tmp_path)) == 1


def test_without_kerastuner_there_is_a_clear_error(monkeypatch):
    monkeypatch.delitem(sys.modules, "tf_adaptive_dp.tuning.keras_tuner.tuner")
    monkeypatch.setitem(sys.modules, "keras_tuner", None)
    message = "HonestTuner requires KerasTuner: pip install 'tf-adaptive-dp[tuning]'"
    with pytest.raises(ImportError, match=f"^{re.escape(message)}$"):
        dp.tuning.HonestTuner  # noqa: B018


def test_a_folder_of_another_tuner_is_refused(tmp_path):
    keras_tuner.RandomSearch(
        tuned.build, "val_accuracy", max_trials=1, directory=tmp_path, project_name="search"
    ).save()
    with pytest.raises(ValueError, match="search of another tuner"):
        tuned.tuner(tmp_path)
