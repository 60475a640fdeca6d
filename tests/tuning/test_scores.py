"""What scores cost, and what they release."""

import math

import dp_accounting
import numpy as np
import pytest
from scipy.stats import chi2

from tf_adaptive_dp.mechanism import noise
from tf_adaptive_dp.tuning.strategies import NoisyScore, PublicScore, UnprotectedScore


@pytest.mark.parametrize("score", [PublicScore(), UnprotectedScore()])
def test_scores_without_noise(score):
    assert score.event == dp_accounting.NoOpDpEvent()
    assert score.released(np.float32(0.5)) == 0.5
    assert isinstance(score.released(np.float32(0.5)), float)


def test_a_noisy_score_is_a_gaussian_mechanism():
    score = NoisyScore(noise_multiplier=4.0, sensitivity=0.05)
    assert score.event == dp_accounting.GaussianDpEvent(4.0)
    # Each number takes some 20 ms; that they are normal is proven with `fresh_normal_numbers`.
    drawn = np.array([score.released(0.7) - 0.7 for _ in range(60)]) / (4.0 * 0.05)
    probability = chi2.cdf(np.sum(drawn**2), df=60)
    assert 1e-6 < probability < 1 - 1e-6
    for wrong in (1 / 2, 2):
        probability = chi2.cdf(np.sum((wrong * drawn) ** 2), df=60)
        assert not 1e-3 < probability < 1 - 1e-3


def test_a_noisy_score_is_shifted_by_the_noise(monkeypatch):
    monkeypatch.setattr(noise, "fresh_normal_numbers", lambda size: np.full(size, -1.5))
    assert NoisyScore(4.0, 0.05).released(0.7) == pytest.approx(0.7 - 1.5 * 4.0 * 0.05)


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
