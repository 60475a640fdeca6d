"""Private means and deviations of features in unknown units.

`released_statistics` makes at most seven releases, which `PrivateNormalization` describes. Each is
a sum to which an example (or a user) adds a vector of norm at most 1.

From top to bottom: the examples, as they are and in units of their features; the two rounds, and
the release between them; the sums that are released; and how histograms with noise are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from scipy import stats

from tf_adaptive_dp import checks
from tf_adaptive_dp.mechanism.secure_noise import on_grid
from tf_adaptive_dp.sampling.users import UserRecords

NUM_RELEASES = 7  # two rounds of three, and one between them
# Octaves around 1, for magnitudes of features; norms of examples have four bins in each of these.
_OCTAVES = 128
_BINS_OF_NORMS = 4 * _OCTAVES
_CHUNK = 1 << 22  # numbers
# What rounding may add to the norm of what one example adds to a sum.
_ROUNDING = 1 - 1e-6
# The chance that noise alone stands out anywhere in a histogram, which could spoil a feature.
_FALSE_ALARM = 1e-5
_QUARTILE = 0.75
# In standard deviations of their noise: means below the first count as 0, variances are at least
# the second, and clear from the third on.
_LEAST_MEAN, _LEAST_VARIANCE, _CLEAR_VARIANCE = 3.0, 2.0, 5.0
# How far the only value of a feature may be from its mean: this many standard errors of the mean,
# and this fraction of the mean besides, since clipping makes means smaller.
_ERRORS, _SHRUNK = 4.0, 1 / 16
# The share of the examples that must be so close to it, and the least one where that is noisy.
_NEARLY_ALL, _MOST = 0.8, 0.5
# A feature that is lost in the noise is not scaled up beyond this, whatever the noise is.
_LARGEST_TYPICAL = 10.0


class _Statistics(NamedTuple):
    """What a round has found, for the next one.

    Attributes:
      mean: [features].
      stddev: [features].
      error: [features], the standard deviation of the noise in the mean.
      is_clear: [features], whether the deviation stands out of the noise.
      is_constant: [features], whether nearly all examples seem to have the same value. The
        deviation is then the size of this value.
      stddev_if_varying: [features], the deviation of a feature that turns out not to be constant.
      smallest: the deviation that a feature which is lost in the noise has at least.
    """

    mean: np.ndarray
    stddev: np.ndarray
    error: np.ndarray
    is_clear: np.ndarray
    is_constant: np.ndarray
    stddev_if_varying: np.ndarray
    smallest: float


class Examples:
    """The inputs, with the features last, and the share that each has of its user."""

    def __init__(self, x: np.ndarray, axis: int | None, user_ids: Any):
        _, self.num_features = kept_shape(x.shape, axis)
        self._x = x.reshape(len(x), -1, 1) if axis is None else np.moveaxis(x, axis, -1)
        self.num_units = len(x)
        self._weights = np.ones(len(x))
        if user_ids is not None:
            users = user_ids if isinstance(user_ids, UserRecords) else UserRecords(user_ids)
            if users.num_records != len(x):
                raise ValueError(
                    "`user_ids` must have one id for each example. Received: "
                    f"{users.num_records} ids, {len(x)} examples"
                )
            self.num_units, self._weights = users.num_users, users.shares()

    def parts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Inputs [b, positions, features] and weights [b], which add up to 1 for each user."""
        rows = max(1, _CHUNK // max(1, self._x[0].size))
        for start in range(0, len(self._x), rows):
            part = self._x[start : start + rows]
            inputs = part.astype(np.float64).reshape(len(part), -1, self.num_features)
            yield inputs, self._weights[start : start + rows]


class _InUnits(NamedTuple):
    """The examples in units of their features, around a mean.

    Attributes:
      examples: n examples, or those of n users.
      mean: [features].
      unit: [features].
      dead_zone: [features], or 0. Features no further from their means count as 0, in units of x.
    """

    examples: Examples
    mean: np.ndarray
    unit: np.ndarray
    dead_zone: np.ndarray | float = 0.0

    def parts(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Means [b, features], root mean squares [b, features] and weights [b].

        Examples with a value that is not finite are zeros, and so are their weights.
        """
        for inputs, weights in self.examples.parts():
            with np.errstate(over="ignore", invalid="ignore"):
                y = (inputs - self.mean) / self.unit
                means, squares = y.mean(1), np.square(y).mean(1)
                finite = np.isfinite(np.square(squares).sum(1))[:, np.newaxis]
            there = finite & (squares > np.square(self.dead_zone / self.unit))
            means, squares = (np.where(there, v, 0.0) for v in (means, squares))
            yield means, np.sqrt(squares), np.where(finite[:, 0], weights, 0.0)


def released_statistics(examples: Examples, noise: float) -> tuple[np.ndarray, np.ndarray, bool]:
    """The mean and the deviation of each feature, and whether any stands out of the noise.

    Args:
      examples: n examples, or those of n users.
      noise: the standard deviation of the noise of each release.
    """
    found = _first_round(examples, noise)
    last = found and _second_round(examples, noise, _located(examples, noise, found))
    if last is not None:
        return *last, True
    if found is None:
        return np.zeros(examples.num_features), np.ones(examples.num_features), False
    return found.mean, found.stddev, False


def _first_round(examples: Examples, noise: float) -> _Statistics | None:
    """Three releases; `None` if the examples do not stand out of the noise.

    Args:
      examples: see `released_statistics`.
      noise: see `released_statistics`.
    """
    size = examples.num_features
    seen = _InUnits(examples, np.zeros(size), np.ones(size))
    counts = _release(_sum_of_magnitudes(seen), noise)
    typical = _typical_unit(counts, noise)
    if typical is None:
        return None
    units = _units(counts, noise)
    lost = units == 0
    units = np.where(lost, typical, units)
    moments = _moments(seen._replace(unit=units), noise)
    if moments is None:
        return None
    shift, variance, noise_of_mean, noise_of_variance = moments
    smallest = typical / _LARGEST_TYPICAL
    deviation = _deviation(units, variance, noise_of_variance, np.where(lost, smallest, 0.0))
    is_clear = variance > _CLEAR_VARIANCE * noise_of_variance
    # A feature that is 0 in half of the examples has a smaller mean, in units of its other values.
    is_constant = ~lost & ~is_clear & (np.abs(shift) > 0.5)
    return _Statistics(
        mean=units * shift,
        stddev=np.where(is_constant, units, deviation),
        error=units * noise_of_mean,
        is_clear=is_clear,
        is_constant=is_constant,
        stddev_if_varying=deviation,
        smallest=smallest,
    )


def _second_round(
    examples: Examples, noise: float, found: _Statistics
) -> tuple[np.ndarray, np.ndarray] | None:
    """Three releases: means and deviations; `None` if nothing stands out of the noise.

    With the mean μ and the deviation s of the first round, a histogram of the magnitudes of
    (x − μ)/s has the root mean square q, for each feature. The moments of y = (x − μ)/u then give

        u = s·q, or s·max(q, 1) where s is clear, or s where nothing stands out
        mean = μ + u·E[y]
        stddev = u·√Var[y]

    `_deviation` says what it is where the variance is lost in its noise. All values of a feature
    are off by what μ is off, which must not pass for their size: u ≥ 4·error(μ), and the deviation
    is at least error(μ). If a feature is constant, what is in the dead zone, |x − μ| ≤ 4·error(μ),
    counts as x = μ.

    Args:
      examples: see `released_statistics`.
      noise: see `released_statistics`.
      found: μ, s and what else is known already.
    """
    # If the mean is slightly off, what is left around it is that error.
    dead_zone = np.where(found.is_constant, _ERRORS * found.error, 0.0)
    seen = _InUnits(examples, found.mean, found.stddev, dead_zone)
    units = _units(_release(_sum_of_magnitudes(seen), noise), noise)
    lost = units == 0
    units = np.where(lost, 1.0, units)
    # Of a few large values, the histogram may show no more than what is around 0.
    units = found.stddev * np.where(found.is_clear, np.maximum(units, 1.0), units)
    units = np.maximum(units, _ERRORS * found.error)
    moments = _moments(seen._replace(unit=units), noise)
    if moments is None:
        return None
    shift, variance, _, noise_of_variance = moments
    floor = np.where(found.is_constant, found.stddev, np.minimum(found.smallest, found.stddev))
    deviation = _deviation(units, variance, noise_of_variance, np.where(lost, floor, 0.0))
    return found.mean + units * shift, np.maximum(deviation, found.error)


def _deviation(
    units: np.ndarray, variance: np.ndarray, noise_of_variance: float, floor: np.ndarray
) -> np.ndarray:
    """The deviation of each feature.

    Where the variance is lost in the noise, it is at least the floor. It is at most a unit, the
    root mean square of the values other than 0, unless the variance is clear: then large values
    are too rare for the histogram that the unit comes from.

    Args:
      units: [features].
      variance: [features], in squares of these units.
      noise_of_variance: the standard deviation of the noise in it.
      floor: [features], or 0 if the unit of a feature comes from its own values.
    """
    least = _LEAST_VARIANCE * noise_of_variance
    is_bounded = (floor == 0) & (variance <= _CLEAR_VARIANCE * noise_of_variance)
    plausible = np.maximum(variance, least)
    plausible = np.where(is_bounded, np.minimum(plausible, 1.0), plausible)
    deviation = units * np.sqrt(plausible)
    return np.where(variance < least, np.maximum(deviation, floor), deviation)


def _moments(seen: _InUnits, noise: float) -> tuple[np.ndarray, np.ndarray, float, float] | None:
    """Two releases: means and variances in these units, with the deviations of their noise.

    For each of n examples let m be its means, and v either these or its mean squares r². The clip
    C is the upper quartile of ‖v‖ in a histogram with noise, and

        E[v] = C·√2/n · (Σ v / (√2·max(‖v‖, C)) + noise)
        variance = E[r²] − E[m]²

    up to `_ROUNDING`, by which the sum is multiplied before the noise and divided after it. A mean
    within three deviations of its noise, noise·C·√2/n, counts as 0.

    Returns:
      `None` if the norms of the examples do not stand out of the noise.
    """
    norms = _release(_sum_of_norms(seen), noise)
    clips = [_quantile(row, _BINS_OF_NORMS) for row in _standing_out(norms, noise, 8)]
    if not all(clips):
        return None
    sums = _release(_sum_of_moments(seen, clips), noise)
    units = np.asarray(clips) * math.sqrt(2) / (_ROUNDING * seen.examples.num_units)
    first, second = sums * units[:, np.newaxis]
    noise_of_mean, noise_of_square = (noise * units).tolist()
    first = np.where(np.abs(first) > _LEAST_MEAN * noise_of_mean, first, 0.0)
    return first, second - np.square(first), noise_of_mean, noise_of_square


def _located(examples: Examples, noise: float, found: _Statistics) -> _Statistics:
    """One release: where the value of features is that nearly all examples seem to share.

    Around the mean μ of each of k constant features, a window reaches w = 4·error(μ) + |μ|/16 to
    both sides. Of the examples whose own mean m is within it,

        share = √(2k)/n · (Σ 1/√(2k) + noise)
        mean = μ + w/share · √(2k)/n · (Σ (m − μ)/(w·√(2k)) + noise)
        error = w/share · √(2k)/n · noise

    up to `_ROUNDING`, as in `_moments`. A feature whose share is less than .8, by more than twice
    its noise, or at most a half, is not constant, and its mean remains.

    Args:
      examples: see `released_statistics`.
      noise: see `released_statistics`.
      found: what the first round found.
    """
    constant = found.is_constant
    if not constant.any():
        return found
    width = _ERRORS * found.error + _SHRUNK * np.abs(found.mean)
    seen = _InUnits(examples, found.mean, np.where(constant, width, 1.0))
    within_window = _release(_sum_within_window(seen, constant), noise)
    of_sums = math.sqrt(2 * constant.sum()) / (_ROUNDING * examples.num_units)
    shares, sums = within_window * of_sums
    settled = constant & (shares > max(_MOST, _NEARLY_ALL - 2 * noise * of_sums))
    shares = np.where(settled, shares, 1.0)
    return found._replace(
        mean=found.mean + np.where(settled, width * sums / shares, 0.0),
        stddev=np.where(constant & ~settled, found.stddev_if_varying, found.stddev),
        error=np.where(settled, width * noise * of_sums / shares, found.error),
        is_constant=settled,
    )


def _release(total: np.ndarray, noise: float) -> np.ndarray:
    """A sum with noise; the only place where what examples add up to is looked at.

    Args:
      total: a sum to which no example (or user) adds a vector of a norm above 1.
      noise: the standard deviation.
    """
    return on_grid(total, noise, sensitivity=1.0)


def _sum_of_magnitudes(seen: _InUnits) -> np.ndarray:
    """Histograms of the octaves of magnitudes, [features, 128].

    An example has one entry in each row: half of a unit vector along its magnitudes, and half of
    one along those that are not 0. The first shows what is rare and large, the second what is
    small compared with other features.
    """
    size = seen.examples.num_features
    total = np.zeros(size * _OCTAVES)
    for _, magnitudes, weights in seen.parts():
        norm = np.sqrt(np.square(magnitudes).sum(1))
        rows, features = np.nonzero(magnitudes)
        values = magnitudes[rows, features]
        present = np.bincount(rows, minlength=len(norm))
        entries = (values / norm[rows] + 1 / np.sqrt(present[rows])) * (_ROUNDING / 2)
        places = features * _OCTAVES + _bins(values, _OCTAVES)
        total += np.bincount(places, entries * weights[rows], minlength=len(total))
    return total.reshape(size, _OCTAVES)


def _sum_of_norms(seen: _InUnits) -> np.ndarray:
    """Histograms of the norms of an example's means and of its mean squares, [2, 512]."""
    total = np.zeros([2, _BINS_OF_NORMS])
    entry = _ROUNDING / math.sqrt(2)
    for means, magnitudes, weights in seen.parts():
        for row, vectors in zip(total, (means, np.square(magnitudes))):
            norms = np.sqrt(np.square(vectors).sum(1))
            there = norms > 0
            bins = _bins(norms[there], _BINS_OF_NORMS)
            row += np.bincount(bins, entry * weights[there], minlength=len(row))
    return total


def _sum_of_moments(seen: _InUnits, clips: list[float]) -> np.ndarray:
    """Sums of an example's means and mean squares, each clipped and of norm 1/√2, [2, features]."""
    total = np.zeros([2, seen.examples.num_features])
    for means, magnitudes, weights in seen.parts():
        for row, clip, vectors in zip(total, clips, (means, np.square(magnitudes))):
            norms = np.sqrt(np.square(vectors).sum(1))
            factors = _ROUNDING / math.sqrt(2) / np.maximum(norms, clip)
            row += (factors * weights) @ vectors
    return total


def _sum_within_window(seen: _InUnits, features: np.ndarray) -> np.ndarray:
    """How many examples are within a unit of the mean, and the sum of their distances from it.

    An example has at most 1/√(2k) in each of the two, for each of these k features.

    Args:
      seen: the examples.
      features: [features], which ones count.

    Returns:
      [2, features].
    """
    total = np.zeros([2, seen.examples.num_features])
    entry = _ROUNDING / math.sqrt(2 * features.sum())
    for means, _, weights in seen.parts():
        within_window = features & (np.abs(means) <= 1)
        distances = np.where(within_window, means, 0.0)
        total += entry * np.stack([weights @ within_window, weights @ distances])
    return total


def _units(counts: np.ndarray, noise: float) -> np.ndarray:
    """The root mean square of what stands out in each histogram, [features]; 0 where nothing does.

    Args:
      counts: [features, 128], noisy.
      noise: the standard deviation of each entry's noise.
    """
    kept = _standing_out(counts, noise, 2)
    total = kept.sum(1)
    squares = kept @ np.exp2(2 * (np.arange(_OCTAVES) + 0.5 - _OCTAVES // 2))
    return np.sqrt(np.divide(squares, total, out=np.zeros_like(total), where=total > 0))


def _typical_unit(counts: np.ndarray, noise: float) -> float | None:
    """The lower quartile of the magnitudes of all features together, if they stand out.

    Args:
      counts: see `_units`.
      noise: see `_units`.
    """
    (kept,) = _standing_out(counts.sum(0, keepdims=True), noise * math.sqrt(len(counts)), 2)
    upper = _quantile(kept, _OCTAVES, 1 - _QUARTILE)
    return upper / math.sqrt(2) if upper else None


def _standing_out(counts: np.ndarray, noise: float, window: int) -> np.ndarray:
    """Histograms without what may be noise: zeros except in windows whose sums stand out.

    Args:
      counts: [rows, bins].
      noise: the standard deviation of each entry's noise.
      window: the number of neighboring bins that are added up.
    """
    windows = np.lib.stride_tricks.sliding_window_view(counts, window, axis=1)
    sums = windows.sum(-1)
    full = sums > stats.norm.isf(_FALSE_ALARM / sums.size) * noise * math.sqrt(window)
    around = np.pad(full, [(0, 0), (window - 1, window - 1)])
    kept = np.lib.stride_tricks.sliding_window_view(around, window, axis=1).any(-1)
    return np.where(kept, np.maximum(counts, 0.0), 0.0)


def _quantile(counts: np.ndarray, num_bins: int, share: float = _QUARTILE) -> float:
    """The upper edge of the bin in which a quantile lies; 0 if there are no counts."""
    if not counts.any():
        return 0.0
    place = int(np.searchsorted(np.cumsum(counts), share * counts.sum()))
    return 2.0 ** ((place + 1 - num_bins // 2) * _OCTAVES / num_bins)


def _bins(values: np.ndarray, num_bins: int) -> np.ndarray:
    """The bins of positive values; all bins together cover 128 octaves around 1."""
    places = np.floor(np.log2(values) * (num_bins // _OCTAVES)).astype(np.int64) + num_bins // 2
    return np.clip(places, 0, num_bins - 1)


def array_of(name: str, values: Any) -> np.ndarray:
    """Inputs or targets as an array, [n, ...]; a single column as [n, 1].

    Args:
      name: `"x"` or `"y"`, what they are called.
      values: all of them.

    Raises:
      TypeError, ValueError: if they are not one array of numbers, [n, ...].
    """
    hint = {
        "x": "`x` must be an array [n, ...] of all training inputs, as the layer will see them. "
        "Join several inputs into one, or normalize one of them: `plan.normalization(x['name'])`.",
        "y": "`y` must be an array [n, ...] of all targets of one output.",
    }[name]
    if isinstance(values, tf.data.Dataset):
        raise TypeError(
            f"{hint} Read a data set into memory: `numpy.stack([{name} for x, y in "
            f"dataset.as_numpy_iterator()])`. Received: {type(values).__name__}"
        )
    if isinstance(values, (dict, list, tuple)) or not hasattr(values, "shape"):
        raise TypeError(f"{hint} Received: {type(values).__name__}")
    checks.not_masked(name, values)
    array = checks.array(values)
    if array.dtype.kind not in "iufb":
        raise TypeError(f"{hint} Received: an array of {array.dtype}")
    if not array.ndim or not array.size:
        raise ValueError(f"{hint} Received: shape {array.shape}")
    return array[:, None] if array.ndim == 1 else array


def kept_shape(input_shape: tuple, axis: int | None) -> tuple[list[int], int]:
    """The shape in which statistics meet inputs, and their number.

    Args:
      input_shape: that of the inputs, the axis of the examples included.
      axis: that of the features; `None` for one mean and one deviation in all.

    Raises:
      ValueError: if `axis` is none of the inputs', or has an unknown size.
    """
    rank = len(input_shape)
    if axis is None:
        return [1] * rank, 1
    if not -rank < axis < rank or axis % rank == 0:
        raise ValueError(
            "`axis` must be an axis of the inputs, not that of the examples. Received: "
            f"axis={axis!r}, inputs of shape {input_shape}"
        )
    size = input_shape[axis]
    if size is None:
        raise ValueError(
            "The axis of the features must have a known size. Received: inputs of shape "
            f"{input_shape}, axis={axis!r}"
        )
    return [size if k == axis % rank else 1 for k in range(rank)], size
