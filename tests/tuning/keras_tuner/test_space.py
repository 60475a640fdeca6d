"""The candidates that a search draws."""

import collections
import json
import random

import keras_tuner
import pytest

from tf_adaptive_dp.tuning.keras_tuner import space


def conditional():
    hp = keras_tuner.HyperParameters()
    hp.Choice("kind", ["a", "b"])
    hp.Boolean("wide", parent_name="kind", parent_values=["b"])
    hp.Int("units", 2, 8, step=2, sampling="log")
    return hp


def test_a_finite_space_is_listed_once_and_only_what_is_active_has_a_value():
    found = space.listed(conditional())
    expected = [{"kind": "a", "units": u} for u in (2, 4, 8)]
    expected += [{"kind": "b", "wide": w, "units": u} for w in (True, False) for u in (2, 4, 8)]
    assert found == expected
    assert all(type(values["units"]) is int for values in found)


def test_steps_and_whole_numbers_are_listed_and_intervals_are_not():
    hp = keras_tuner.HyperParameters()
    hp.Int("n", 1, 3)
    hp.Float("x", 0.5, 0.5)
    hp.Fixed("f", "same")
    assert space.listed(hp) == [{"n": n, "x": 0.5, "f": "same"} for n in (1, 2, 3)]
    hp.Float("y", 0.0, 1.0)
    assert space.listed(hp) is None
    large = keras_tuner.HyperParameters()
    large.Int("n", 1, 20_000)
    assert space.listed(large) is None


@pytest.mark.parametrize("default", [None, 0, 0.0])
def test_stepped_floats_are_listed_as_floats_whatever_their_default(default):
    hp = keras_tuner.HyperParameters()
    hp.Float("dropout", 0, 0.5, step=0.125, default=default)
    (values,) = zip(*(candidate.values() for candidate in space.listed(hp)))
    assert values == (0.0, 0.125, 0.25, 0.375, 0.5)
    assert all(type(value) is float for value in values)


def test_defaults_do_not_tell_whether_a_number_is_whole():
    hp = keras_tuner.HyperParameters()
    hp.Float("clip", 0.1, 10.0, sampling="log", default=1)
    assert space.listed(hp) is None
    hp = keras_tuner.HyperParameters()
    hp.Int("n", 1, 3, default=2.0)
    hp.Int("m", 2, 8, step=2, sampling="log", default=4.0)
    found = space.listed(hp)
    assert found == [{"n": n, "m": m} for n in (1, 2, 3) for m in (2, 4, 8)]
    assert all(type(value) is int for values in found for value in values.values())


def test_an_empty_space_has_one_candidate():
    assert space.listed(keras_tuner.HyperParameters()) == [{}]


def test_draws_are_uniform_with_replacement():
    hp, randomness = conditional(), random.Random(1)
    drawn = collections.Counter(
        json.dumps(space.draw(hp, randomness), sort_keys=True) for _ in range(6_000)
    )
    # Each hyperparameter uniform where it is active: 1/2 · 1/3, and 1/2 · 1/2 · 1/3.
    for values, count in drawn.items():
        expected = 6_000 / (6 if json.loads(values)["kind"] == "a" else 12)
        assert abs(count - expected) < 5 * expected**0.5
    assert len(drawn) == 9


def test_draws_do_not_follow_the_seeds_of_the_process():
    hp = keras_tuner.HyperParameters()
    hp.Float("x", 0.0, 1.0)
    found = set()
    for _ in range(3):
        random.seed(1)
        found.add(space.draw(hp)["x"])
        found.add(space.without_replacement(hp, 1)[0]["x"])
    assert len(found) == 6


def test_without_replacement_no_candidate_comes_twice():
    hp = conditional()
    assert space.without_replacement(hp, 20) == space.listed(hp)
    counts = collections.Counter()
    for seed in range(900):
        chosen = space.without_replacement(hp, 2, random.Random(seed))
        keys = {json.dumps(values, sort_keys=True) for values in chosen}
        assert len(keys) == 2
        counts.update(keys)
    # Of 9 candidates each is chosen with probability 2/9.
    assert len(counts) == 9 and all(130 < count < 270 for count in counts.values())


def test_without_replacement_from_a_space_that_is_not_listed():
    hp = keras_tuner.HyperParameters()
    hp.Float("x", 0.0, 1.0)
    assert len({values["x"] for values in space.without_replacement(hp, 30)}) == 30
    with pytest.raises(ValueError, match="num_trials=10001"):
        space.without_replacement(hp, 10_001)


def test_a_space_with_another_value_has_another_description():
    def described(last):
        hp = keras_tuner.HyperParameters()
        hp.Choice("rate", [0.1, last])
        return space.description(hp)

    assert described(1.0) == described(1.0) != described(2.0)
