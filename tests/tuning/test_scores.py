"""What scores cost, and what they release."""

import math

import dp_accounting
import numpy as np
import pytest

from tests.helpers.gaussianity import assert_gaussian
from tf_adaptive_dp.mechanism import secure_noise
from tf_adaptive_dp.tuning.strategies import NoisyScore, PublicScore, UnprotectedScore


@pytest.mark.parametrize("score", [PublicScore(), UnprotectedScore()])
def test_scores_without_noise(score):
    assert score.event == dp_accounting.NoOpDpEvent()
    assert score.released(np.float32(0.5)) == 0.5
    assert isinstance(score.released(np.float32(0.5)), float)


@pytest.mark.parametrize("sensitivity", [0.05, 30.0])
def test_a_noisy_score_is_a_gaussian_mechanism(sensitivity):
    score = NoisyScore(noise_multiplier=4.0, sensitivity=sensitivity)
    assert score.event == dp_accounting.GaussianDpEvent(4.0)
    assert_gaussian(np.array([score.released(0.7) - 0.7 for _ in range(5000)]), 4.0 * sensitivity)


def test_a_noisy_score_is_shifted_by_the_noise(monkeypatch):
    monkeypatch.setattr(secure_noise, "_normal_numbers", lambda size: np.full(size, -1.5))
    assert NoisyScore(4.0, 0.05).released(0.7) == pytest.approx(0.7 - 1.5 * 4.0 * 0.05)


@pytest.mark.parametrize("correct, examples", [(4000, 5000), (4000, 4999), (1, 3), (0, 7)])
def test_the_last_bits_of_a_noisy_score_do_not_reveal_it(correct, examples):
    # With 24 bits of noise and 53 of the sum, the exact score could be told from its neighbors:
    # only this one was a number of float32 away.
    score = NoisyScore(noise_multiplier=10.0, sensitivity=1 / 5000)
    grid = 2.0 ** math.floor(math.log2(2.0**-26 / 5000))
    for _ in range(100):
        released = score.released(correct / examples)
        assert released / grid == np.rint(released / grid)  # whatever the score


def test_each_score_has_noise_of_its_own():
    first, second = (NoisyScore(1.0, 1.0) for _ in range(2))
    assert len({first.released(0.0), first.released(0.0), second.released(0.0)}) == 3


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_noise_does_not_hide_a_score_that_is_not_finite(score):
    with pytest.raises(ValueError, match="`score` must be finite for every data set"):
        NoisyScore(1.0, 0.1).released(score)


def test_sentences_say_whose_data_are_covered():
    assert "public" in PublicScore().sentence
    assert "NOT PRIVATE for the validation data" in UnprotectedScore().sentence
    assert "does not cover" in UnprotectedScore().sentence
    noisy = NoisyScore(4.0, 0.05).sentence
    assert "deviation 0.2 " in noisy and "multiplier 4," in noisy and "sensitivity 0.05" in noisy


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0.0, 1.0), ValueError, "`noise_multiplier` must be finite and greater than 0"),
        ((1.0, 0.0), ValueError, "`sensitivity` must be finite and greater than 0"),
        ((math.nan, 1.0), ValueError, "`noise_multiplier`"),
        ((1.0, "x"), TypeError, "`sensitivity` must be a number"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        NoisyScore(*arguments)
