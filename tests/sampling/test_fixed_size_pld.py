"""The PLD of subsets of a fixed size bounds the worst data, tightly, alone and composed."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting import pld
from scipy import stats
from scipy.integrate import trapezoid

from tf_adaptive_dp.accounting import Releases
from tf_adaptive_dp.sampling.fixed_size import (
    FixedSizeSampling,
    _pld_of_release,
    fixed_size_epsilon,
    privacy_profile,
)

# NumPy and dp_accounting alone; both versions of Keras would run the same.
pytestmark = pytest.mark.slow_on(2)

EPSILONS = np.array([-3.0, -1.0, -0.3, 0.0, 0.2, 0.7, 1.5, 3.0])
X = np.linspace(-16, 16, 8_001)


def density(data, size, sigma):
    """Of the noisy sum over a random subset, by all subsets."""
    sums = [sum(subset) for subset in itertools.combinations(data, size)]
    return np.mean([stats.norm.pdf(X, mean, sigma) for mean in sums], axis=0)


def divergence(p, q, epsilons):
    return np.array([trapezoid(np.maximum(p - math.exp(e) * q, 0), X) for e in epsilons])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("sigma", "size"), [(0.8, 2), (2.0, 1), (2.0, 2), (2.0, 3)])
def test_the_profile_is_that_of_the_worst_data(sigma, size):
    bound = privacy_profile(EPSILONS, sigma, size / 4)
    worst = np.zeros_like(EPSILONS)
    for others in itertools.product([-1.0, 0.0, 1.0], repeat=3):
        for one, other in itertools.permutations([-1.0, 0.0, 1.0], 2):
            p = density([one, *others], size, sigma)
            q = density([other, *others], size, sigma)
            worst = np.maximum(worst, divergence(p, q, EPSILONS))
    # Some data reach it, so nothing smaller would do; the tolerance is that of the integration.
    np.testing.assert_allclose(worst, bound, atol=2e-6)
    # Adding and removing is not replacing: with half of the noise it would not be a bound.
    assert (privacy_profile(EPSILONS, 2 * sigma, size / 4) < worst - 1e-4).sum() > 4


@pytest.mark.parametrize(("sigma", "fraction"), [(0.7, 0.05), (2.0, 0.3), (5.0, 1.0)])
def test_the_profile_is_one_of_a_pair_of_distributions(sigma, fraction):
    alphas = np.concatenate([np.linspace(0.02, 1.98, 197), np.geomspace(2, 50, 60)])
    deltas = privacy_profile(np.log(alphas), sigma, fraction)
    slopes = np.diff(deltas) / np.diff(alphas)
    assert (np.diff(slopes) >= -1e-9).all() and (slopes <= 1e-12).all() and slopes[0] >= -1 - 1e-9
    assert (deltas >= np.maximum(0, 1 - alphas) - 1e-12).all()


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("sigma", "fraction"), [(2.0, 0.3), (3.0, 1.0), (0.8, 0.05)])
def test_the_distribution_of_one_release_has_the_profile(sigma, fraction):
    made = _pld_of_release(sigma, fraction)
    for epsilon in (0.0, 0.1, 0.5, 1.0):
        exact = float(privacy_profile(np.array(epsilon), sigma, fraction))
        found = made.get_delta_for_epsilon(epsilon)
        assert exact - 1e-12 <= found <= exact + 1e-6


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("steps", [1, 2, 40])
def test_compositions_lie_between_one_direction_and_the_rdp_bound(steps):
    sigma, size, number, delta = 1.6, 20, 400, 1e-5
    ledger = Releases([(sigma, float(size), steps)])
    found = fixed_size_epsilon(ledger, number, delta, "pld")
    # Each direction alone is a Poisson sampling of Gaussians of half of the noise.
    below = pld.privacy_loss_distribution.from_gaussian_mechanism(
        sigma / 2, value_discretization_interval=1e-4, sampling_prob=size / number
    ).self_compose(steps)
    assert below.get_epsilon_for_delta(delta) <= found + 1e-6
    assert found < fixed_size_epsilon(ledger, number, delta, "rdp")
    # Larger by little: the directions differ for large losses only.
    assert found < 1.1 * below.get_epsilon_for_delta(delta) + 1e-3


def test_whole_data_sets_are_gaussian_mechanisms_of_half_of_the_noise():
    found = fixed_size_epsilon(Releases([(6.0, 10.0, 9)]), 10, 1e-5, "pld")
    exact = pld.privacy_loss_distribution.from_gaussian_mechanism(6.0 / 2 / math.sqrt(9))
    assert found == pytest.approx(exact.get_epsilon_for_delta(1e-5), abs=2e-4)


def test_releases_of_several_kinds_are_composed():
    both = Releases([(2.0, 10.0, 30), (4.0, 10.0, 50)])
    found = fixed_size_epsilon(both, 200, 1e-5, "pld")
    assert found < fixed_size_epsilon(both, 200, 1e-5, "rdp")
    for alone in both.segments:
        assert found > fixed_size_epsilon(Releases([alone]), 200, 1e-5, "pld")


def test_the_sampling_takes_the_accountant():
    sampling = FixedSizeSampling(10, steps=50)
    ledger = Releases([(2.0, 10.0, 50)])
    by_pld = sampling.epsilon_spent(ledger, 200, 1e-5, accountant="pld")
    assert by_pld == fixed_size_epsilon(ledger, 200, 1e-5, "pld")
    # What costs minutes, and what arithmetic cannot tell, has the bound of RDP.
    for releases, delta in (([(0.2, 10.0, 50)], 1e-5), ([(2.0, 10.0, 50)], 1e-12)):
        ledger = Releases(releases)
        found = [fixed_size_epsilon(ledger, 200, delta, a) for a in ("rdp", "pld")]
        assert found[0] == found[1]
    assert fixed_size_epsilon(Releases([(0.0, 10.0, 1)]), 200, 1e-5, "pld") == math.inf
    assert fixed_size_epsilon(Releases([]), 200, 1e-5, "pld") == 0.0
