"""Searches that are interrupted, called again, called otherwise, or cannot begin."""

import json
import shutil

import keras_tuner
import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import tuned
from tf_adaptive_dp.durable.journal import encoded
from tf_adaptive_dp.tuning import budgets, strategies

RATES = [0.01, 0.1, 1.0]
DRAWS = [{"learning_rate": rate} for rate in (0.1, 1.0)]


def test_draws_are_on_the_disk_before_the_first_model_is_built_for_them(tmp_path, monkeypatch):
    tuned.Fake(monkeypatch, KeyboardInterrupt())
    made = tuned.tuner(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        tuned.search(made)
    drawn, begun = (json.loads(line[:-9]) for line in tuned.journal_lines(tmp_path))
    assert [values["learning_rate"] for values in drawn["plan"]["draws"]] == RATES
    assert begun["begun"] == 1 and len(begun["models"]) == 3
    assert (tmp_path / "search").stat().st_mode & 0o777 == 0o700


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("strategy", ["composition", "repeat_and_select"])
def test_an_interrupted_search_goes_on_without_drawing_anew(tmp_path, monkeypatch, strategy):
    arguments = {"strategy": strategy, "num_trials": 3}
    monkeypatch.setattr(strategies.RepeatAndSelect, "draw_num_trials", lambda strategy: 3)
    first = tuned.Fake(monkeypatch, 0.25, 0.75, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        tuned.search(tuned.tuner(tmp_path, **arguments))
    drawn = json.loads(tuned.journal_lines(tmp_path)[0][:-9])["plan"]["draws"]
    assert len(tuned.journal_lines(tmp_path)) == 6
    folders = tuned.folders(tmp_path)
    second = tuned.Fake(monkeypatch, 0.5)
    made = tuned.search(tuned.tuner(tmp_path, **arguments))
    np.testing.assert_allclose(
        first.trained + second.trained, [values["learning_rate"] for values in drawn]
    )
    assert tuned.winner(made) == drawn[1]["learning_rate"]
    assert set(second.folders_seen[0]) == set(folders)
    assert second.went_on == [True]  # where it was


@pytest.mark.slow_after(2)
@pytest.mark.slow_on(2)
@pytest.mark.parametrize("content", [None, b""], ids=["gone", "empty"])
@pytest.mark.parametrize("lost", ["journal", "releases"])
def test_an_interrupted_search_that_lost_its_record_is_refused(
    tmp_path, monkeypatch, lost, content
):
    tuned.Fake(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        tuned.search(tuned.tuner(tmp_path))
    (path,) = (tmp_path / "search").rglob(lost)
    path.unlink() if content is None else path.write_bytes(content)
    tuned.Fake(monkeypatch)  # which would fail
    for _ in range(2):
        with pytest.raises(ValueError, match="gone, so nobody knows what it spent"):
            tuned.search(tuned.tuner(tmp_path))


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("strategy", ["composition", "repeat_and_select"])
def test_a_journal_that_is_older_than_the_trials_is_refused(tmp_path, monkeypatch, strategy):
    def interrupted(*results):
        tuned.Fake(monkeypatch, *results, KeyboardInterrupt(), draws=DRAWS)
        with pytest.raises(KeyboardInterrupt):
            tuned.search(tuned.tuner(tmp_path, strategy=strategy, num_trials=2))

    interrupted()
    journal = tmp_path / "search" / "secret" / "journal"
    older = journal.read_bytes()
    interrupted(0.5)
    before = tuned.everything_in(tmp_path)
    newest = journal.read_bytes()
    journal.write_bytes(older)
    tuned.Fake(monkeypatch)  # which would fail
    with pytest.raises(ValueError, match="journal of the search is older than its candidates"):
        tuned.search(tuned.tuner(tmp_path, strategy=strategy, num_trials=2))
    journal.write_bytes(newest)
    assert tuned.everything_in(tmp_path) == before
    tuned.Fake(monkeypatch, 0.25)
    tuned.search(tuned.tuner(tmp_path, strategy=strategy, num_trials=2))


@pytest.mark.slow
def test_a_finished_search_returns_at_once(tmp_path, monkeypatch, capsys):
    tuned.Fake(monkeypatch, *[0.5] * 3)
    statement = tuned.search(tuned.tuner(tmp_path)).privacy_statement()
    before = tuned.everything_in(tmp_path)
    tuned.Fake(monkeypatch)  # which would fail
    made = tuned.tuner(tmp_path)
    assert made.privacy_statement() == statement  # also before `search` is called
    assert tuned.search(made).privacy_statement() == statement
    assert tuned.everything_in(tmp_path) == before
    assert "was finished before" in capsys.readouterr().out
    for trial in tuned.folders(tmp_path):
        shutil.rmtree(tmp_path / "search" / trial)
    with pytest.raises(FileNotFoundError, match="weights of the candidate are gone.*no file"):
        made.get_best_models()


@pytest.mark.slow
def test_a_search_that_ended_while_it_tidied_up_is_finished(tmp_path, monkeypatch):
    tuned.Fake(monkeypatch, 0.25, 0.75, draws=DRAWS[:2])
    made = tuned.tuner(tmp_path, strategy="repeat_and_select", num_trials=2)
    monkeypatch.setattr(type(made), "_tidy", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tuned.search(made)
    monkeypatch.undo()
    (tmp_path / "search" / "trial_loser").mkdir()
    tuned.search(tuned.tuner(tmp_path, strategy="repeat_and_select", num_trials=2))
    assert len(tuned.folders(tmp_path)) == 1
    assert not (tmp_path / "search" / "secret").exists()


@pytest.mark.slow
def test_draws_that_a_killed_process_left_go_when_results_are_read(tmp_path, monkeypatch):
    from tf_adaptive_dp.tuning.keras_tuner.search_journal import SearchJournal

    arguments = {"strategy": "repeat_and_select", "num_trials": 2}
    tuned.Fake(monkeypatch, 0.25, 0.75, draws=DRAWS)
    made = tuned.tuner(tmp_path, **arguments)
    monkeypatch.setattr(type(made), "_tidy", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tuned.search(made)
    monkeypatch.undo()
    journal = SearchJournal(tmp_path / "search" / "secret" / "journal")
    tuned.tuner(tmp_path, **arguments)  # while the other process is still at it
    assert len(tuned.journal_lines(tmp_path)) == 5
    journal.close()
    (tmp_path / "search" / "trial_loser").mkdir()
    made = tuned.tuner(tmp_path, **arguments)
    assert not (tmp_path / "search" / "secret").exists()
    assert tuned.folders(tmp_path) == [f"trial_{made.oracle.get_best_trials()[0].trial_id}"]


OTHER = {
    "epsilon": {"epsilon": 9.0},
    "delta": {"delta": 1e-4},
    "num_examples": {"num_examples": 15},
    "score": {"score": strategies.UnprotectedScore()},
    "strategy": {"strategy": "composition", "num_trials": 2},
    "objective": {"objective": "val_loss"},
    "space": {"build_model": lambda hp: tuned.model(tuned.optimizer(hp.Choice("rate", [0.1])))},
}


def interrupted(tmp_path, monkeypatch, strategy):
    """A search of three trials that a fake interruption ended in the second, and its arguments."""
    monkeypatch.setattr(strategies.RepeatAndSelect, "draw_num_trials", lambda strategy: 3)
    arguments = {"strategy": strategy, "num_trials": 3}
    tuned.Fake(monkeypatch, 0.5, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        tuned.search(tuned.tuner(tmp_path, **arguments))
    return arguments


@pytest.mark.slow_on(2)
def test_where_only_the_winner_is_shown_trials_have_the_same_data(tmp_path, monkeypatch):
    """Trials before and after an interruption would follow two distributions."""
    arguments = interrupted(tmp_path, monkeypatch, "repeat_and_select")
    before = tuned.everything_in(tmp_path)
    tuned.Fake(monkeypatch, 0.25, 0.75)
    (x, y), validation = tuned.data(), tuned.data(16, seed=1)
    changed = {
        "inputs": (x + np.eye(len(x), 3, dtype="float32"), y, validation),
        "targets": (x, 1 - y, validation),
        "validation": (x, y, tuned.data(16, seed=2)),
    }
    for train_x, train_y, validation_data in changed.values():
        with pytest.raises(ValueError, match="must be those that the search began with"):
            made = tuned.tuner(tmp_path, **arguments)
            made.search(train_x, train_y, 8, 2, validation_data=validation_data)
    assert tuned.everything_in(tmp_path) == before
    assert "data" in json.loads(tuned.journal_lines(tmp_path)[0][:-9])["plan"]
    as_tensors = tuple(map(tf.constant, validation))
    made = tuned.tuner(tmp_path, **arguments)
    made.search(x.copy(), y.copy(), 8, 2, validation_data=as_tensors)
    # No trace of the data is left to guess them by.
    result = (tmp_path / "search" / "result.json").read_text()
    assert "digest" not in result and not (tmp_path / "search" / "secret").exists()


@pytest.mark.slow_on(2)
def test_where_all_trials_are_shown_they_may_have_other_data(tmp_path, monkeypatch):
    """Whatever each example met, it was in no more releases than are counted."""
    arguments = interrupted(tmp_path, monkeypatch, "composition")
    tuned.Fake(monkeypatch, 0.25, 0.75)
    x, y = tuned.data()
    made = tuned.tuner(tmp_path, **arguments)
    made.search(x + 1e-7, y, 8, 2, verbose=0, validation_data=tuned.data(16, seed=1))
    assert len(made.oracle.get_best_trials(3)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("finished", [False, True])
def test_other_arguments_are_refused_and_change_nothing(tmp_path, monkeypatch, finished):
    tuned.Fake(monkeypatch, 0.5, *([0.5] * 2 if finished else [KeyboardInterrupt()]))
    try:
        tuned.search(tuned.tuner(tmp_path))
    except KeyboardInterrupt:
        pass
    before = tuned.everything_in(tmp_path)
    for changed, arguments in OTHER.items():
        with pytest.raises(ValueError, match=f"with other arguments.*{changed}: was"):
            tuned.search(tuned.tuner(tmp_path, **arguments))
    others_of_fit = {
        "epochs: was 2, is 3": {"epochs": 3},
        "class_weight": {"class_weight": {0: 1.0, 1: 0.0}},
        "sample_weight": {"sample_weight": np.ones(tuned.NUM_EXAMPLES, "float32")},
        "validation_data": {"validation_data": tuned.data(7)},
        "validation_steps": {"validation_steps": 1},
    }
    for changed, arguments in others_of_fit.items():
        with pytest.raises(ValueError, match=f"with other arguments.*{changed}"):
            tuned.search(tuned.tuner(tmp_path), **arguments)
    assert tuned.everything_in(tmp_path) == before


@pytest.mark.slow
def test_overwrite_forgets_a_search_unless_it_is_in_use(tmp_path, monkeypatch):
    from tf_adaptive_dp.tuning.keras_tuner.search_journal import SearchJournal

    tuned.Fake(monkeypatch, 0.5, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        tuned.search(tuned.tuner(tmp_path))
    journal = SearchJournal(tmp_path / "search" / "secret" / "journal")
    with pytest.raises(RuntimeError, match="cannot be overwritten"):
        tuned.tuner(tmp_path, overwrite=True)
    with pytest.raises(RuntimeError, match="in progress in another process"):
        tuned.search(tuned.tuner(tmp_path))
    journal.close()
    fake = tuned.Fake(monkeypatch, *[0.5] * 3)
    with pytest.warns(UserWarning, match="up to epsilon = 10 and delta = 0.001. What it spent"):
        made = tuned.tuner(tmp_path, epsilon=5.0, overwrite=True)
    tuned.search(made)
    assert len(fake.trained) == 3
    with pytest.warns(UserWarning, match="up to epsilon = 5 and delta = 0.001. What it spent"):
        tuned.tuner(tmp_path, overwrite=True)


DISCARDED = {  # what is in the folder, and whether somebody may have spent something
    "an empty folder": ({}, False),
    "other files": ({"notes.txt": b"{}"}, False),
    "an empty journal": ({"secret/journal": b""}, False),
    "draws alone": ({"secret/journal": encoded({"search": {"epsilon": 1}, "plan": {}})}, False),
    "a damaged journal": ({"secret/journal": b"0\n"}, True),
    "a damaged result": ({"result.json": b"{"}, True),
    "another result": ({"result.json": b"[1]"}, True),
    "a result of text": ({"result.json": b'{"search": {"epsilon": "1", "delta": "1"}}'}, True),
}


@pytest.mark.parametrize("case", DISCARDED)
def test_whatever_is_in_a_folder_may_be_overwritten(case, tmp_path, recwarn):
    contents, warned = DISCARDED[case]
    for name, content in contents.items():
        path = tmp_path / "search" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    tuned.tuner(tmp_path, overwrite=True)
    assert not list((tmp_path / "search").iterdir())
    found = [str(w.message) for w in recwarn if "discards a search" in str(w.message)]
    assert len(found) == warned
    assert all("an unknown epsilon and delta" in text for text in found)


@pytest.mark.slow
def test_overwrite_deletes_nothing_if_an_argument_is_refused(tmp_path, monkeypatch):
    tuned.Fake(monkeypatch, *[0.5] * 3)
    tuned.search(tuned.tuner(tmp_path))
    before = tuned.everything_in(tmp_path)

    class Own(keras_tuner.HyperModel):
        build = staticmethod(tuned.build)

        def fit(self, hp, model, *args, **kwargs):
            return model.fit(*args, **kwargs)

    def endless(hp):
        return tuned.model(tuned.optimizer(hp.Float("rate", 0.1, 1.0)))

    for build, match in (
        (Own(), "leave out the hypermodel's method `fit`"),
        (endless, "not finite"),
    ):
        with pytest.raises(ValueError, match=match):
            tuned.tuner(tmp_path, build, overwrite=True)
        assert tuned.everything_in(tmp_path) == before
    made = tuned.tuner(tmp_path, overwrite=True)
    assert not list((tmp_path / "search").iterdir())
    with pytest.raises(RuntimeError, match="not finished"):
        made.privacy_statement()


@pytest.mark.slow
def test_overwriting_another_tuners_search_asks_for_the_space(tmp_path, monkeypatch, capsys):
    keras_tuner.RandomSearch(
        tuned.build, "val_accuracy", max_trials=1, directory=tmp_path, project_name="search"
    ).save()
    fake = tuned.Fake(monkeypatch, *[0.5] * 3)
    tuned.search(tuned.tuner(tmp_path, overwrite=True))
    assert len(fake.trained) == 3 and "Reloading" not in capsys.readouterr().out
    assert not list((tmp_path / "search").glob("tuner*.json"))


@pytest.mark.slow
def test_a_budget_that_cannot_be_met_leaves_nothing_behind(tmp_path, monkeypatch):
    def none(strategy, make_trial, epsilon, delta, **kwargs):
        raise ValueError("No noise multiplier meets the budget")

    monkeypatch.setattr(budgets, "noise_multiplier_for_selection", none)
    with pytest.raises(ValueError, match="No noise multiplier"):
        tuned.search(tuned.tuner(tmp_path, epsilon=0.1))
    assert tuned.journal_lines(tmp_path) == [] and not tuned.folders(tmp_path)
    # So another budget is no other search.
    tuned.Fake(monkeypatch, *[0.5] * 3)
    tuned.search(tuned.tuner(tmp_path, epsilon=0.2))


def single(hp, *more, units=2, kind=dp.DPSGD):
    layers = [tf.keras.Input([3]), *more, tf.keras.layers.Dense(units)]
    made = tf.keras.Sequential(layers)
    rate = hp.Choice("learning_rate", RATES)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    optimizer = kind(1.0, 1.0, learning_rate=rate, expected_batch_size=8.0)
    made.compile(optimizer, loss, metrics=["accuracy"])
    return made


CHANGED = {
    "layers: .*; weights": lambda hp: single(hp, tf.keras.layers.Dense(4)),
    r"Changed: layers: was \[.*, is \[.*'ReLU'.*\]. Received": (
        lambda hp: single(hp, tf.keras.layers.ReLU())
    ),
    r"weights: was .*\[3, 2\].* is .*\[3, 5\]": lambda hp: single(hp, units=5),
    "optimizer: was 'DPSGD', is 'DPAdam'": lambda hp: single(hp, kind=dp.DPAdam),
}


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ended"), [("composition", 0), ("repeat_and_select", 1)])
def test_another_model_in_mid_search_is_refused(tmp_path, monkeypatch, strategy, ended):
    arguments = {"strategy": strategy, "num_trials": 2}
    monkeypatch.setattr(strategies.RepeatAndSelect, "draw_num_trials", lambda strategy: 2)
    tuned.Fake(monkeypatch, *[0.5] * ended, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        tuned.search(tuned.tuner(tmp_path, **arguments))
    before = tuned.everything_in(tmp_path)
    fake = tuned.Fake(monkeypatch)
    for told, build in CHANGED.items():
        with pytest.raises(ValueError, match=f"no longer makes the same model.*{told}"):
            tuned.search(tuned.tuner(tmp_path, build, **arguments))
        assert not fake.trained and tuned.everything_in(tmp_path) == before
    # The same model, made in another way, goes on.
    fake = tuned.Fake(monkeypatch, *[0.5] * (2 - ended))
    tuned.search(tuned.tuner(tmp_path, single, **arguments))
    assert len(fake.trained) == 2 - ended


def test_a_model_that_changes_between_its_trials_is_refused(tmp_path, monkeypatch):
    widths = iter([2, 2, 2, 2, 2, 2, 3])  # the space, the plan, three candidates, two trials
    fake = tuned.Fake(monkeypatch, 0.5)
    with pytest.raises(ValueError, match="no longer makes the same model"):
        tuned.search(tuned.tuner(tmp_path, lambda hp: single(hp, units=next(widths))))
    assert len(fake.trained) == 1


@pytest.mark.slow
def test_a_journal_that_knows_no_models_is_gone_on_with(tmp_path, monkeypatch):
    from tf_adaptive_dp.tuning.keras_tuner.search_journal import SearchJournal

    tuned.Fake(monkeypatch, KeyboardInterrupt())
    real = SearchJournal.note_begun
    monkeypatch.setattr(SearchJournal, "note_begun", lambda journal, models: real(journal))
    with pytest.raises(KeyboardInterrupt):
        tuned.search(tuned.tuner(tmp_path))
    monkeypatch.setattr(SearchJournal, "note_begun", real)
    fake = tuned.Fake(monkeypatch, *[0.5] * 3)
    tuned.search(tuned.tuner(tmp_path))
    assert len(fake.trained) == 3


def test_a_trial_whose_log_of_releases_is_gone_is_not_gone_on_with(tmp_path, monkeypatch):
    tuned.Fake(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        tuned.search(tuned.tuner(tmp_path))
    (trial,) = tuned.folders(tmp_path)
    shutil.rmtree(tmp_path / "search" / trial)
    before = tuned.everything_in(tmp_path)
    again = tuned.Fake(monkeypatch, *[0.5] * 3)
    with pytest.raises(ValueError, match="nobody knows what it spent.*Received: no releases"):
        tuned.search(tuned.tuner(tmp_path))
    assert not again.trained and tuned.everything_in(tmp_path) == before
