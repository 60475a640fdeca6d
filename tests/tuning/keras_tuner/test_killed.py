"""Searches that are killed at any moment: nothing drawn anew, nothing spent twice."""

import collections
import json
import random
import time

import pytest

from tests.helpers import killable_search
from tests.helpers.crash_injection import CrashInjector
from tf_adaptive_dp.tuning.keras_tuner.search_journal import SearchJournal

ALLOWANCE = killable_search.EPOCHS * killable_search.STEPS


@pytest.fixture(scope="module")
def injector():
    with CrashInjector("killable_search") as made:
        yield made


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill_and_finish(injector, folder, kills, job, randomness):
    """Kills a search so often at random moments, then lets it finish."""
    journals = []
    for kill in range(kills + 1):
        before = len(lines(folder / "releases"))

        def random_moment(before=before, starting=kill % 4 == 3):
            # While it starts or builds; or in a trial, at its end or between two.
            seconds = randomness.uniform(0, 3) if starting else 60
            releases = ALLOWANCE if starting else randomness.randint(1, ALLOWANCE + 2)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if len(lines_whole(folder / "releases")) >= before + releases:
                    break
                if (folder / "search" / "result.json").exists():
                    break
                time.sleep(0.001)
            time.sleep(randomness.uniform(0, 0.05))

        code = injector.run({"folder": str(folder), **job}, random_moment if kill < kills else None)
        if code == 0:
            break  # it was done before the kill
        assert code == -9 and kill < kills, f"run {kill} ended with {code}"
        path = folder / "search" / "secret" / "journal"
        if path.exists():
            journal = SearchJournal(path)
            journals.append((journal.begun, len(journal.ended), journal._drawn))
            journal.close()
    return journals


def lines_whole(path):
    return path.read_text().splitlines() if path.exists() else []


def check(injector, folder, kills, strategy, num_trials):
    job = {"strategy": strategy, "num_trials": num_trials}
    journals = kill_and_finish(injector, folder, kills, job, random.Random(kills))
    # The journal never goes back, and its draws stay: those that were made once before it.
    plans = [plan for _, _, plan in journals if plan is not None]
    assert all(plan == plans[0] for plan in plans)
    assert [j[:2] for j in journals] == sorted(j[:2] for j in journals)
    drawn = plans[0]["draws"]
    assert lines(folder / "draws")[-1] == drawn and len(drawn) == num_trials
    # Trials began in that order, each with the candidate that was drawn for it.
    begun = lines(folder / "begun")
    order = list(dict.fromkeys(name for name, _ in begun))
    assert order == [f"trial_{trial_id}" for trial_id in plans[0]["ids"]]
    for name, rate in begun:
        assert rate == pytest.approx(drawn[order.index(name)]["rate"])
    # One after the other; no trial comes again after the next one began.
    assert [order.index(name) for name, _ in begun] == sorted(order.index(n) for n, _ in begun)
    # No noise is repeated.
    releases = lines(folder / "releases")
    assert len({digest for _, digest in releases}) == len(releases)
    made = collections.Counter(name for name, _ in releases)
    for _, outcome, segments, updates in lines(folder / "ended"):
        assert outcome["error"] is None and outcome["score"] is not None
        assert segments == [[1.0, 4.0, ALLOWANCE]]
        if strategy == "composition":
            assert 0 < updates <= ALLOWANCE
        else:
            assert updates == ALLOWANCE
    if strategy == "composition":
        # All processes together stay within the allowance of each trial.
        assert set(made) == set(order) and all(count <= ALLOWANCE for count in made.values())
    shown = lines(folder / "end")[-1]
    kept = {path.name for path in (folder / "search").glob("trial_*")}
    assert kept == {f"trial_{outcome['id']}" for outcome in shown}
    assert len(shown) == (num_trials if strategy == "composition" else 1)
    scores = {name: outcome["score"] for name, outcome, _, _ in lines(folder / "ended")}
    assert shown[0]["score"] == min(scores.values())
    assert not (folder / "search" / "secret").exists()
    return journals, begun


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["composition", "repeat_and_select"])
def test_a_search_that_is_killed_draws_once_and_spends_once(injector, tmp_path, strategy):
    journals, begun = check(injector, tmp_path, 4, strategy, 2)
    assert len(begun) > 2 and len(journals) > 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["composition", "repeat_and_select"])
def test_a_search_that_is_killed_often(injector, tmp_path, strategy):
    journals, begun = check(injector, tmp_path, 25, strategy, 10)
    assert len(begun) > 10 and len(journals) > 5
