"""The AdaDPS experiments on MNIST and on Stack Overflow, and what reads and tunes for them."""

import os
import pathlib
import sqlite3

import numpy as np
import pytest
import tensorflow as tf

from examples.experiments.lib import grids
from examples.experiments.lib.datasets import stackoverflow
from examples.experiments.lib.harness import Trial
from tests.helpers.programs import run_experiment

POSTS = [
    ("train", "b", "brew it hot", "coffee", "brewing|taste"),
    ("train", "a", "a qubit", "spin", "physics"),
    ("train", "a", "a a qubit zzz", "", "taste"),
    ("test", "c", "brew", "qubit", "unheard-of"),
    ("heldout", "d", "a qubit brew", "a", "taste"),
    ("heldout", "d", "a a a", "", "taste"),
    ("heldout", "e", "a brew", "", "taste|brewing"),
]


def serialized(**fields):
    feature = {
        name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value.encode()]))
        for name, value in fields.items()
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def write(folder, rows):
    with sqlite3.connect(folder / "stackoverflow.sqlite") as file:
        file.execute(
            "CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, "
            "serialized_example_proto BLOB NOT NULL)"
        )
        file.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
    file.close()
    return str(folder)


@pytest.fixture
def data_dir(tmp_path):
    return write(
        tmp_path,
        [
            (split, user, serialized(tokens=tokens, title=title, tags=tags))
            for split, user, tokens, title, tags in POSTS
        ],
    )


def test_posts_come_by_user_with_title_and_all_tags(data_dir):
    first, second, third = stackoverflow.posts(data_dir, "train")
    assert first == stackoverflow.Post("a", ("a", "qubit", "spin"), ("physics",))
    assert second.words == ("a", "a", "qubit", "zzz")
    assert third == stackoverflow.Post("b", ("brew", "it", "hot", "coffee"), ("brewing", "taste"))


def test_vocabulary_counts_users_not_posts(data_dir):
    known = stackoverflow.vocabulary(stackoverflow.posts(data_dir, "heldout"), 10, 10)
    assert known.words == ("a", "brew", "qubit")  # by users: 2, 2, 1; ties by name
    assert known.users.tolist() == [2, 2, 1]
    assert known.tags == ("taste", "brewing")


def test_vocabulary_is_cut_to_the_most_frequent(data_dir):
    known = stackoverflow.vocabulary(stackoverflow.posts(data_dir, "heldout"), 2, 1)
    assert known.words == ("a", "brew") and known.tags == ("taste",)


def test_bags_are_means_over_all_words_and_the_class_is_the_most_frequent_tag(data_dir):
    known = stackoverflow.vocabulary(stackoverflow.posts(data_dir, "heldout"), 10, 10)
    train = stackoverflow.posts(data_dir, "train")
    x, y = stackoverflow.bags_of_words(train, known)
    assert len(stackoverflow.authors(train, known)) == len(x)
    assert set(stackoverflow.authors(train, known)) <= {post.user for post in train}
    # "physics" is unknown: that post is left out. "zzz", "it" … count in the length alone.
    np.testing.assert_allclose(x, [[0.5, 0, 0.25], [0, 0.25, 0]])
    assert y.tolist() == [0, 0]  # "brewing|taste" is of the class that more users wrote
    x, y = stackoverflow.bags_of_words(stackoverflow.posts(data_dir, "test"), known)
    assert x.shape == (0, 3) and y.shape == (0,)


def test_a_post_changes_no_row_but_its_own(data_dir):
    known = stackoverflow.vocabulary(stackoverflow.posts(data_dir, "heldout"), 10, 10)
    train = stackoverflow.posts(data_dir, "train")
    x, _ = stackoverflow.bags_of_words(train, known)
    without, _ = stackoverflow.bags_of_words(train[:2], known)
    np.testing.assert_array_equal(x[:1], without)


def test_by_users_keeps_each_user_on_one_side(data_dir):
    first, rest = stackoverflow.by_users(stackoverflow.posts(data_dir, "train"), 1)
    assert {p.user for p in first} == {"a"} and {p.user for p in rest} == {"b"}


def test_reader_refuses_what_is_not_there_or_not_tff(tmp_path):
    with pytest.raises(FileNotFoundError, match="TFF_CACHE_DIR"):
        stackoverflow.posts(str(tmp_path / "none"), "train")
    with pytest.raises(FileNotFoundError, match="stackoverflow.sqlite"):
        stackoverflow.posts(str(tmp_path), "train")
    with pytest.raises(ValueError, match="`split` must be one of.*'validation'"):
        stackoverflow.posts(str(tmp_path), "validation")
    (tmp_path / "stackoverflow.sqlite").write_text("no database")
    with pytest.raises(ValueError, match="not in TFF's format"):
        stackoverflow.posts(str(tmp_path), "train")


@pytest.mark.parametrize(
    "blob, message",
    [
        (serialized(tokens="a", title="b"), r"'u' lacks \['tags'\]"),
        (b"\xff", "no tf.train.Example"),
    ],
    ids=["no tags", "no example"],
)
def test_reader_names_the_user_of_a_broken_post(tmp_path, blob, message):
    data_dir = write(tmp_path, [("train", "u", blob)])
    with pytest.raises(ValueError, match=message):
        stackoverflow.posts(data_dir, "train")
    with pytest.raises(ValueError, match="no posts of split='test'"):
        stackoverflow.posts(data_dir, "test")


def part(**kwargs):
    candidates = {"a": [{"rate": 1.0}, {"rate": 2.0}], "b": [{"rate": 5.0}]}
    return grids.Part({"part": "p", "epochs": 4}, candidates, "loss", seeds=2, **kwargs)


def trial(settings, *losses):
    epochs = list(range(1, len(losses) + 1))
    result = {"loss": list(losses), "epochs": epochs, "epsilon": [1.0] * len(losses)}
    return Trial(settings, result, 1.0)


@pytest.mark.parametrize(
    "larger, first, second, best",
    [
        (False, 0.5, 0.4, 2.0),
        (True, 0.5, 0.4, 1.0),
        (False, 0.5, np.nan, 1.0),
        (True, 0.5, np.nan, 1.0),
    ],
)
def test_best_candidate_gets_the_seeds(larger, first, second, best):
    chosen = part(larger_is_better=larger, tuning={"epochs": 1})
    grid = chosen.plan([])
    assert [(s["method"], s["rate"], s["epochs"]) for s in grid] == [
        ("a", 1.0, 1),
        ("a", 2.0, 1),
        ("b", 5.0, 4),  # one candidate needs no choice
        ("b", 5.0, 4),
    ]
    done = [trial(grid[0], 0.9, first), trial(grid[1], 0.1, second)]  # the last epoch counts
    wanted = [s for s in chosen.plan(done) if s["method"] == "a" and s["epochs"] == 4]
    assert [(s["rate"], s["seed"]) for s in wanted] == [(best, 0), (best, 1)]


def test_table_is_ordered_and_shows_finals_only():
    chosen = part(larger_is_better=False)
    grid = chosen.plan([])
    done = [trial(grid[0], 3.0, 2.0), trial(grid[1], 3.0, 2.5)]
    done = [*done, *(trial(s, 1.0, 1.5) for s in chosen.plan(done) if s["method"] == "b")]
    done = [*done, trial(chosen.settings("a", {"rate": 1.0}, 1), 3.0, 4.0)]
    lines = grids.table([chosen], done, {"a": "A", "b": "B"}).splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == ["B", "A"]
    assert "| 3.00000 | 1.41421 | 3.00000 (epoch 1) |" in lines[1]


def data(variable, inside):
    folder = os.environ.get(variable)
    if not folder or not (pathlib.Path(folder) / inside).exists():
        pytest.skip(f"set {variable} to a folder that has {inside}")


def check(trials, out, titles):
    assert {t["settings"]["method"] for t in trials} == set(titles)
    for t in trials:
        private = t["settings"]["method"] not in ("sgd", "adam", "adas", "adas_frequency", "ideal")
        epsilon = t["result"]["epsilon"][-1]
        assert epsilon > 0 if private else epsilon is None
    assert all(title in out for title in titles.values())


@pytest.mark.slow
def test_adadps_mnist_runs_every_method(tmp_path):
    data("TFDS_DATA_DIR", "mnist")
    from examples.experiments.lib.adadps_methods import TITLES

    out, trials = run_experiment("adadps_mnist", tmp_path, "--jobs", 1)
    of_text = ("ideal", "adadps_frequency", "adas_frequency")
    check(trials, out, {k: v for k, v in TITLES.items() if k not in of_text})


@pytest.mark.slow
def test_adadps_stackoverflow_runs_every_method(tmp_path):
    data("TFF_CACHE_DIR", "stackoverflow.sqlite")
    from examples.experiments.lib.adadps_methods import TITLES

    out, trials = run_experiment("adadps_stackoverflow", tmp_path, "--jobs", 1)
    check(trials, out, TITLES)
