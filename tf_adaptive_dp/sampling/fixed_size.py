"""Batches of a fixed size: random subsets, with their own accounting."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp
from dp_accounting.pld import pld_pmf, privacy_loss_mechanism

from tf_adaptive_dp import checks
from tf_adaptive_dp.accounting import accountants, composition
from tf_adaptive_dp.accounting.accountants import unprotected
from tf_adaptive_dp.sampling import draws


@dataclasses.dataclass(frozen=True)
class FixedSizeSampling(draws.FullBatches):
    """Each batch is a uniformly random subset of a fixed size, independent of all others.

    Guarantee: (ε, δ)-DP for replacing one example by another, with the ε of `epsilon_spent`. With
    the RDP accountant, for each order, the Rényi divergence is at most that of Theorem 27 of Wang,
    Balle and Kasiviswanathan 2019 for sampling without replacement, and at most that without
    amplification by sampling; the smaller one counts. The PLD accountant composes the dominating
    pair of `privacy_profile`. Replacing an example moves the sum by up to 2C, so the
    effective noise multiplier is half the nominal one. The adjacency differs from that of Poisson
    sampling: do not compare the two values of ε. The examples are placed in uniformly random rows.
    Couple neighbors so that the replacement takes the row of the replaced example and all others
    keep theirs. Then only the gradient of that row changes, even if the loss depends on the row.

    References:
      - Wang et al., "Subsampled Rényi Differential Privacy and Analytical Moments Accountant"
        (2018), arXiv:1808.00087.
      - Balle, Barthe and Gaboardi, "Privacy Amplification by Subsampling: Tight Analyses via
        Couplings and Divergences" (2018), arXiv:1807.01647.
      - Zhu, Dong and Wang, "Optimal Accounting of Differential Privacy via Characteristic Function"
        (2022), arXiv:2106.08567.

    Attributes:
      batch_size: number of examples in each batch, at least 1.
      steps: number of batches in the whole run, at least 1.
      seed: `None` for the operating system's entropy; a number is for tests only.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range.

    >>> FixedSizeSampling(3, steps=1).draw(6, step=0, key=draws.new_key(seed=1))
    array([0, 1, 3])
    """

    label: ClassVar[str] = "fixed"

    def draw(self, num_examples: int, step: int, key: bytes) -> np.ndarray:
        """Indices of the examples in the batch of a step: all subsets are equally likely.

        Guarantee: a pure function of its arguments; different steps and keys are independent.
        """
        generator = draws.generator(key, b"fixed", step)
        return np.sort(generator.choice(num_examples, self.batch_size, replace=False))

    def account(self, ledger: Any, num_examples: int, delta: float, accountant: str) -> float:
        """ε of a ledger; see the class."""
        return fixed_size_epsilon(ledger, num_examples, delta, accountant)


def fixed_size_epsilon(
    ledger: Any, num_examples: int, delta: float, accountant: str = "rdp"
) -> float:
    """ε of a ledger whose batches were subsets of a fixed size; see `FixedSizeSampling`.

    Args:
      ledger: a ledger, or an optimizer with the attribute `ledger`.
      num_examples: number of examples in the training set.
      delta: δ, in (0, 1).
      accountant: `"rdp"` or `"pld"`.

    Raises:
      ValueError: if a batch size is not an integer; if there are `other_events`, which hold for
        adding or removing an example.
    """
    delta = checks.probability("delta", delta)
    segments, events = composition.counted_ledger(ledger, num_examples, in_epochs=False)
    if unprotected(events):
        return math.inf  # for any adjacency
    if events:
        raise ValueError(
            "The ledger's `other_events` hold for adding or removing an example, and cannot be "
            "composed with batches of fixed size, whose epsilon is for replacing one; use "
            f"PoissonSampling. Received: other_events={events!r}"
        )
    divergences = np.zeros(len(rdp.RdpAccountant().orders))
    for noise_multiplier, batch_size, count in segments:
        if not batch_size.is_integer():
            raise ValueError(
                "Batches of fixed size have a whole number of examples. Received: "
                f"batch_size={batch_size!r}"
            )
        if noise_multiplier < 2 * accountants.MIN_NOISE_MULTIPLIER:
            return math.inf
        noise_multiplier = min(noise_multiplier, accountants.MAX_NOISE_MULTIPLIER)
        divergences += count * _rdp_without_replacement(
            noise_multiplier, int(batch_size), num_examples
        )
    divergences[np.isnan(divergences)] = math.inf
    bound = float(rdp.compute_epsilon(rdp.RdpAccountant().orders, divergences, delta)[0])
    counts = {(z, batch_size / num_examples): 0 for z, batch_size, _ in segments}
    for z, batch_size, count in segments:
        counts[z, batch_size / num_examples] += count
    costly = accountants.pld_is_too_costly(counts, bound) or delta < accountants.PLD_MIN_DELTA
    if accountant == "rdp" or costly or not counts:
        return bound
    return min(bound, _pld_epsilon(tuple(sorted(counts.items())), delta))


def privacy_profile(
    epsilons: np.ndarray, noise_multiplier: float, sampling_fraction: float
) -> np.ndarray:
    """δ(ε) of one release on a random subset, for replacing an example; ε may be negative.

    With z = `noise_multiplier` / 2, since a replacement moves the sum by up to 2C, with γ the
    fraction, and with δ_z the profile of the Gaussian mechanism of sensitivity 1 (Balle and Wang),

        δ(log(1 + γ (e^ε - 1))) = γ δ_z(ε) for ε ≥ 0,    δ(-ε) = 1 - e^-ε + e^-ε δ(ε).

    Guarantee: for each two data sets that differ in one example, the hockey-stick divergence of
    their releases is at most δ(ε), whatever the clipped gradients are; and δ is the profile of a
    pair of distributions, so its compositions bound those of the releases, adaptive ones too (Zhu,
    Dong and Wang, Theorem 10). Proof of the first half: the release is (1 - γ)·R + γ·P, where R and
    P are its laws without and with the example, and (1 - γ)·R + γ·P' after the replacement. By
    advanced joint convexity (Balle, Barthe and Gaboardi, Theorem 2), the divergence at
    log(1 + γ (e^ε - 1)) is γ times that of P and (1 - β)·R + β·P' at ε, for some β. By convexity it
    is at most the larger one of those of (P, R) and (P, P'). Coupled by the subsets, or by
    exchanging the example with a random one outside, both are pairs of Gaussians whose means are at
    most 2C apart. For negative ε exchange the two data sets, since
    H_α(A, B) = 1 - α + α H_{1/α}(B, A). Proof of the second: a function of α = e^ε is a profile if
    it decreases from 1 at α = 0, is convex, and at least max(0, 1 - α). Both halves of δ are
    convex, as profiles are. At α = 1 the slope is -(1 - γ) Φ(1/2z) - γ Φ(-1/2z) from below, which
    is at most the -Φ(-1/2z) from above.

    Args:
      epsilons: ε, any shape.
      noise_multiplier: standard deviation of the noise / C, above 0.
      sampling_fraction: γ, batch size / number of examples, in (0, 1].

    Returns:
      δ, of the same shape.

    >>> privacy_profile(np.array([-1.0, 0.0, 1.0]), 2.0, 0.1).round(5)
    array([6.322e-01, 3.829e-02, 2.100e-04])
    """
    gaussian = privacy_loss_mechanism.GaussianPrivacyLoss(noise_multiplier / 2)
    distance = np.abs(epsilons)
    # log(1 + (e^ε - 1) / γ), without overflow.
    of_whole = distance + np.log1p((sampling_fraction - 1) * np.exp(-distance))
    of_whole = np.maximum(of_whole - math.log(sampling_fraction), 0.0)
    delta = np.reshape(gaussian.get_delta_for_epsilon(np.ravel(of_whole)), np.shape(of_whole))
    delta = sampling_fraction * delta
    below = -np.expm1(-distance) + np.exp(-distance) * delta
    return np.clip(np.where(epsilons >= 0, delta, below), 0.0, 1.0)


_TAIL = 10.0  # standard deviations of the Gaussian beyond which the privacy loss counts as infinite


@functools.lru_cache(maxsize=8)
def _pld_of_release(
    noise_multiplier: float, sampling_fraction: float
) -> pld.privacy_loss_distribution.PrivacyLossDistribution:
    """The privacy loss distribution of one release, rounded up between points of its profile.

    Straight lines between points of a convex profile lie above it, so they are the profile of a
    pair that dominates it (Doroshenko et al. 2022, arXiv:2207.04380).
    """
    interval = accountants.PLD_INTERVAL
    z = min(noise_multiplier, accountants.MAX_NOISE_MULTIPLIER) / 2
    of_whole = 1 / (2 * z * z) + _TAIL / z
    largest = of_whole + math.log(sampling_fraction - (sampling_fraction - 1) * math.exp(-of_whole))
    points = max(1, math.ceil(largest / interval))
    epsilons = np.arange(-points, points + 1) * interval
    deltas = privacy_profile(epsilons, 2 * z, sampling_fraction)
    # Rounding errors must not make it increase: upwards is the safe side.
    deltas = np.maximum.accumulate(deltas[::-1])[::-1]
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -points, points, deltas)
    return pld.privacy_loss_distribution.PrivacyLossDistribution(pmf)


@functools.lru_cache(maxsize=1024)
def _pld_epsilon(counts: tuple[tuple[tuple[float, float], int], ...], delta: float) -> float:
    total = accountants.pld_of_releases(counts, _pld_of_release)
    return float(total.get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=1024)
def _rdp_without_replacement(
    noise_multiplier: float, batch_size: int, num_examples: int
) -> np.ndarray:
    # Replacing an example moves the sum by 2C, so relative to that the noise is half as large.
    event = dp_accounting.GaussianDpEvent(noise_multiplier / 2)
    # By convexity no batch costs more than one that surely holds the example. With little noise
    # the bound with sampling is above that.
    divergences = _rdp_of_release(event)
    if batch_size < num_examples:
        sampled = dp_accounting.SampledWithoutReplacementDpEvent(num_examples, batch_size, event)
        divergences = np.fmin(divergences, _rdp_of_release(sampled))
    return np.maximum(divergences, accountants.RDP_PRECISION)


def _rdp_of_release(event: dp_accounting.DpEvent) -> np.ndarray:
    replaced = dp_accounting.NeighboringRelation.REPLACE_ONE
    return rdp.RdpAccountant(neighboring_relation=replaced).compose(event).rdp
