"""The AdaDPS experiments on text, and on the made-up data that stand for it."""

import os
import pathlib

import numpy as np
import pytest

from examples.experiments.adadps_imdb import run as adadps_imdb
from examples.experiments.adadps_toy import run as adadps_toy
from examples.experiments.embedding_rows import run as embedding_rows
from examples.experiments.embeddings import run as embeddings
from examples.experiments.lib import grids, harness, reviews
from examples.experiments.lib.datasets import text
from examples.experiments.public_size import run as public_size
from tests.helpers.programs import run_experiment


def has(variable, name):
    return os.environ.get(variable) and (pathlib.Path(os.environ[variable]) / name).exists()


needs_reviews = pytest.mark.skipif(
    not has("TFDS_DATA_DIR", "imdb_reviews"),
    reason="needs IMDB: set TFDS_DATA_DIR to a tensorflow-datasets folder that has imdb_reviews",
)
needs_posts = pytest.mark.skipif(
    not has("TFF_CACHE_DIR", "stackoverflow.sqlite"),
    reason="needs posts: set TFF_CACHE_DIR to a folder that has stackoverflow.sqlite",
)


def test_words_keep_apostrophes_and_lose_punctuation_and_case():
    assert text.words("Don't<br />GO-there: 10/10 (really)!\n") == [
        *("don't", "br", "go", "there", "10", "10", "really")
    ]
    assert text.words(" ... ") == []


def test_the_vocabulary_has_the_most_frequent_words_and_fits_the_columns():
    ids = text.vocabulary(["c b a a", "b a z y x"], size=7)
    assert ids == {"a": 4, "b": 5, "c": 6}
    assert max(text.vocabulary(["a b c d e f"], size=6).values()) == 5


def test_rows_start_with_a_token_and_are_cut_or_padded_at_the_end():
    rows = text.encode(["a b a", "", "a a a a a"], {"a": 4}, length=5)
    assert rows.tolist() == [[1, 4, 2, 4, 0], [1, 0, 0, 0, 0], [1, 4, 4, 4, 4]]


def test_bags_count_each_token_of_a_row_and_padding_too():
    rows = np.array([[1, 4, 4, 0, 0], [1, 2, 5, 4, 4]])
    bags = text.bag_of_words(rows, size=6)
    assert bags.tolist() == [[2, 1, 0, 0, 2, 0], [0, 1, 1, 0, 2, 1]]
    assert bags.dtype == np.uint8


def test_counts_above_255_stay_255_instead_of_starting_again_at_0():
    assert text.bag_of_words(np.zeros([1, 290], int), size=3).tolist() == [[255, 0, 0]]


def test_token_frequencies_are_those_of_the_released_program():
    counts = np.zeros(text.VOCABULARY_SIZE)
    counts[:4] = 1e6, 1e4, 200, 10
    a = reviews.token_frequencies(counts, "public", offset=0.0).values
    multipliers = np.minimum(1e4, 1e6 / np.maximum(counts, 1e-20)) / 100
    np.testing.assert_allclose(a, 1 / multipliers, rtol=1e-5)
    assert a[0] == 100 and a[3] == pytest.approx(0.01)
    bounded = reviews.token_frequencies(counts, "public", offset=0.0, largest=1.0).values
    np.testing.assert_allclose(bounded, np.minimum(a, 1.0), rtol=1e-5)


@pytest.mark.parametrize("scale", ["smoke", "small", "paper"])
@pytest.mark.parametrize("program", [adadps_imdb, adadps_toy, public_size])
def test_private_methods_of_a_part_get_equally_many_trials(program, scale):
    for part in program.parts(scale):
        if "sigma" not in part.common or "not private" in part.common["part"]:
            continue
        numbers = {method: len(found) for method, found in part.candidates.items()}
        assert len(set(numbers.values())) == 1, (part.common["part"], numbers)
        for candidates in part.candidates.values():
            distinct = {tuple(sorted(c.items())) for c in candidates}
            assert len(distinct) == len(candidates)


def test_every_method_has_a_title():
    for program in (adadps_imdb, public_size):
        for scale in ("small", "paper"):
            methods = {m for part in program.parts(scale) for m in part.candidates}
            assert methods <= set(reviews.TITLES)


def run(name, folder, *arguments):
    out, trials = run_experiment(name, folder, *arguments)
    for trial in trials:
        kept_secret = trial["settings"]["method"] not in reviews.adadps_methods.NOT_PRIVATE
        unprotected = trial["settings"]["method"] in ("ideal", "adadps_frequency_of_private")
        has_epsilon = trial["result"]["epsilon"][-1] is not None
        assert has_epsilon == (kept_secret and not unprotected)
    rows = [line for line in out.splitlines() if line.startswith("| ")]
    assert len(rows) >= len(trials)
    return trials


@pytest.mark.slow
def test_the_toy_runs_and_has_nothing_left_to_run(tmp_path):
    trials = run("adadps_toy", tmp_path, "--jobs", 1)
    assert {t["settings"]["method"] for t in trials} == {
        *("dp_sgd", "dp_adam", "adadps_frequency", "sgd", "adas_frequency")
    }
    results = harness.Results(tmp_path / "results_smoke.json")
    assert not results.missing(grids.plan(adadps_toy.parts("smoke"), results.trials))


@needs_reviews
def test_reviews_are_balanced_and_padded():
    rows, labels = text.imdb(None, "test", number=500)
    assert rows.shape == (500, 290) and 0.4 < labels.mean() < 0.6
    assert (rows[:, 0] == text.START).all() and rows.max() < text.VOCABULARY_SIZE
    assert 0.2 < (rows == text.PAD).mean() < 0.5


@needs_reviews
def test_public_reviews_are_not_among_the_private_ones():
    part = adadps_imdb.parts("smoke")[0]
    settings = part.settings("dp_sgd", part.candidates["dp_sgd"][0], 0)
    result = reviews.train({**settings, "number": 300}, None)
    assert result["num_public"] == 30 and 260 <= result["num_private"] <= 270
    assert grids.final(_Trial(result), "accuracy_of_3") == result["accuracy"][0]


class _Trial:
    def __init__(self, result):
        self.result = result


@needs_posts
def test_posts_and_counts_use_the_vocabulary_of_the_reviews():
    rows, labels = text.stack_exchange_posts(None, 50, {"the": 4}, length=20)
    assert rows.shape == (50, 20) and set(labels) == {0, 1}
    assert 0 < (rows == 4).mean() < 0.2
    counts = text.stack_exchange_counts(None, {"the": 4, "no such word": 5})
    assert counts[4] > 0 and counts[5] == 0


@needs_reviews
@needs_posts
@pytest.mark.slow
@pytest.mark.parametrize("name", ["adadps_imdb", "public_size"])
def test_experiments_on_reviews_run(name, tmp_path):
    run(name, tmp_path)


def test_the_stored_trials_of_embedding_rows_are_those_of_the_plan():
    results = harness.Results(pathlib.Path(embedding_rows.__file__).parent / "results_small.json")
    plan = embedding_rows.EXPERIMENT.plan
    assert results.trials and not results.missing(plan("small", results.trials))
    for trial in results.trials:
        assert 0 < trial.result["epsilon"][-1] <= trial.settings["epsilon"]
    assert "| ε = 8 | 0.8309 ± 0.0010 |" in embedding_rows.EXPERIMENT.table(results.trials)


@pytest.mark.parametrize("name", embeddings.ROWS)
def test_normalized_models_have_the_weights_of_the_others(name):
    models = [embeddings.build(name, 20, normalized) for normalized in (False, True)]
    plain, normalized = ([tuple(w.shape) for w in m.weights] for m in models)
    assert plain == normalized
    kinds = [type(layer).__name__ for layer in models[1].layers]
    assert kinds.count("LayerNormalization") == 1 and len(kinds) == len(models[0].layers) + 1


@pytest.mark.slow
def test_embeddings_runs(tmp_path):
    out, trials = run_experiment("embeddings", tmp_path, "--jobs", 1)
    assert {t["settings"]["normalized"] for t in trials} == {True, False}
    assert all(title in out for title in embeddings.TITLES.values())


@pytest.mark.slow
def test_embedding_rows_runs(tmp_path):
    out, trials = run_experiment("embedding_rows", tmp_path, "--jobs", 1)
    assert len(trials) == len(embedding_rows.ROWS) * (len(embedding_rows.RATES) + 1)
    assert "| ε = 8 |" in out
