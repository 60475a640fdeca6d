"""Inputs in units of their own size: a layer whose means and deviations are released privately."""

from __future__ import annotations

import inspect
import math
import secrets
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
import tensorflow as tf
from scipy import stats

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras import graphs
from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp._keras.layers import layers_within
from tf_adaptive_dp.accounting.ledger import missing_events
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.mechanism.noise import fresh_normal_numbers
from tf_adaptive_dp.sampling.users import UserRecords
from tf_adaptive_dp.side_information import provenance

__all__ = ["PrivateNormalization"]

_RELEASES = 7  # two rounds of three, and one between them
# Octaves around 1, for magnitudes of features; norms of examples have four bins in each of these.
_OCTAVES = 128
_BINS_OF_NORMS = 4 * _OCTAVES
_CHUNK = 1 << 22  # numbers
# What rounding may add to the norm of what one example adds to a sum.
_ROUNDING = 1 - 1e-6
# The chance that noise alone stands out anywhere in a histogram.
_FALSE_ALARM = 1e-3
_QUARTILE = 0.75
# In standard deviations of their noise: means below the first count as 0, variances are at least
# the second, and clear from the third on.
_LEAST_MEAN, _LEAST_VARIANCE, _CLEAR_VARIANCE = 3.0, 2.0, 5.0
# How far from its mean the only value of a feature may be: so many errors of the mean, and, since
# the clip makes means smaller, this part of it.
_NEAR, _SHRUNK = 4.0, 1 / 16
# A feature that is lost in the noise is not scaled up beyond this, whatever the noise is.
_LARGEST_TYPICAL = 10.0
_ID_BITS = 52  # which float64 holds exactly


@keras.saving.register_keras_serializable("tf_adaptive_dp")
class PrivateNormalization(keras.layers.Layer):
    """Keras's `Normalization` with means and deviations that are released with noise.

    Private training works best where inputs have mean 0 and variance 1, and it suffers in other
    units: the noise is the same for all weights, so features that are small beside others are lost
    in it. `adapt` finds the units, whatever they are, and the layer returns

        (inputs - mean) / stddev

    `PrivacyPlan(normalize_inputs=True)` decides how much noise that takes, and accounts for it:

        model = keras.Sequential([plan.normalization(x), keras.layers.Dense(10)])

    Without a plan, the optimizer's ledger must have the release, too:

        layer = PrivateNormalization(noise_multiplier=20.0)
        layer.adapt(x)
        optimizer.ledger.other_events += (layer.dp_event,)

    Where that is forgotten, `validate` says so, and `PrivacyMonitor` and `PrivacyBudget` raise
    `NotPrivateError` before training. `HonestTuner` refuses such layers. An optimizer alone does
    not see them.

    `adapt` makes two rounds of three releases, with y = (x − mean) / stddev, at first x itself. For
    each example and feature j let m_j be the mean of y over all other axes, and r_j the root of the
    mean of y²; for inputs [n, features] these are y and |y|.

    - Of magnitudes: each feature has a histogram of log₂ r_j, in which an example counts with
      weight (r_j/‖r‖ + 1/√(number of r_j > 0))/2. Of what stands out of the noise, the root mean
      square is the unit of the feature. A feature in which nothing stands out gets the lower
      quartile of the magnitudes of all features.
    - Of norms: histograms of ‖m‖ and ‖r²‖, in these units.
    - Of moments: the sums of m and of r², clipped to the upper quartiles of these norms.

    After the first round a feature may have a mean and nothing around it: nearly all examples seem
    to have the same value, as the pixels of a white or a standardized background do. Between the
    rounds, one release locates this value: the number of examples near the mean, and their mean. In
    the second round the value counts as 0.

    So features are found that are a million times larger than others, or rare, or far from 0. What
    is lost in the noise is scaled with care: a variance counts as at least twice its noise, and
    around a value that nearly all examples have, the deviation is at least about this value. A
    feature far from 0 that varies by less than the error of its located value counts as constant;
    subtract a public start from timestamps.

    Guarantee: `adapt` is as private as one release of the Gaussian mechanism with this noise
    multiplier, `dp_event`, for adding or removing one example (or one user with all of their
    examples). Each of its seven releases is a sum in which an example has a vector of norm 1 at
    most, with noise of standard deviation σ√7, and the seven compose to one with σ. The number of
    examples (or users) is public. Examples with a value that is not finite are left out. That there
    was a release is a weight of the layer like its result, so that a layer which was copied, saved
    or loaded refuses another one. A layer that `clone_model` makes has the weights of a new layer:
    what its `adapt` releases costs `dp_event` again.

    Args:
      noise_multiplier: σ > 0.
      axis: the axis of the features, not 0. All other axes share the statistics of a feature, as
        the pixels of a channel should. With `None`, everything shares one mean and one deviation.
      **kwargs: arguments of `keras.layers.Layer`. `dtype` is float32 unless given.

    Attributes:
      mean: [features], the weight that holds the means; zeros before `adapt`.
      stddev: [features], the weight that holds the deviations; ones before `adapt`.
      released: [2], the weight that says which release they came from: a random number, and σ.
        Zeros before `adapt`.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of its range.

    References:
      - Tramèr and Boneh, "Differentially Private Learning Needs Better Features (or Much More
        Data)" (2020), arXiv:2011.11660, normalize by noisy means and variances. Units are ours.

    >>> import numpy as np
    >>> x = np.stack([np.linspace(1990, 2010, 5000), np.linspace(-1e-3, 1e-3, 5000)], axis=1)
    >>> layer = PrivateNormalization(noise_multiplier=5.0)
    >>> layer.adapt(x)
    >>> y = layer(x).numpy()
    >>> bool(abs(y.mean(0)).max() < 0.3 and 0.5 < y.std(0).min() < y.std(0).max() < 2)
    True
    """

    def __init__(self, noise_multiplier: float, axis: int | None = -1, **kwargs: Any):
        # Raw units may not fit into the half precision of a policy.
        super().__init__(**{"dtype": "float32", **kwargs})
        self.noise_multiplier = checks.number("noise_multiplier", noise_multiplier, 0, strict=True)
        if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int) or not axis):
            raise ValueError(
                "`axis` must be the number of the axis of the features, or None. Axis 0 is that of "
                f"the examples. Received: axis={axis!r}"
            )
        self.axis = axis
        # Beside the weight, which can be set to what it was before.
        self._released_here = 0.0

    @property
    def dp_event(self) -> dp_accounting.DpEvent:
        """What `adapt` costs, or did cost: one release of the Gaussian mechanism."""
        _, noise_multiplier = self._release_made()
        return dp_accounting.GaussianDpEvent(noise_multiplier or self.noise_multiplier)

    @property
    def release_id(self) -> int:
        """A random number for each call of `adapt`, which copies share; 0 before it."""
        return max(self.releases, default=0)

    @property
    def releases(self) -> dict[int, dp_accounting.DpEvent]:
        """What was released for this layer, by `release_id`: for its weights, and by itself.

        There are several if `adapt` was called and then the weights of another layer were set.
        """
        number, noise_multiplier = self._release_made()
        made = {number: noise_multiplier, self._released_here: self.noise_multiplier}
        return {int(n): dp_accounting.GaussianDpEvent(z) for n, z in made.items() if n}

    def resume_with(self, weights: Sequence[np.ndarray]) -> None:
        """Sets the weights that a run began with, before anything was trained behind others.

        Args:
          weights: of `get_weights`. What this layer released itself has met no gradient and counts
            no more; nobody may have looked at it.
        """
        self.set_weights(weights)
        self._released_here = 0.0

    def _release_made(self) -> tuple[float, float]:
        """The number of the release and its σ; zeros before it."""
        if not self.built:
            return 0.0, 0.0
        with tf.init_scope():
            number, noise_multiplier = np.asarray(tf.convert_to_tensor(self.released)).tolist()
        return number, noise_multiplier

    def build(self, input_shape: Any) -> None:
        """Creates the mean and the deviation; see `keras.layers.Layer`."""
        self._keep, size = _kept_shape(tuple(input_shape), self.axis)
        add = self.add_weight
        self.mean = add(name="mean", shape=[size], initializer="zeros", trainable=False)
        self.stddev = add(name="stddev", shape=[size], initializer="ones", trainable=False)
        # Not an attribute of Python, which a copy or a loaded model would not have.
        kind = {"dtype": "float64", "initializer": "zeros", "trainable": False}
        self.released = add(name="released", shape=[2], **kind)
        super().build(input_shape)

    def call(self, inputs: Any) -> Any:
        """(inputs - mean) / stddev."""
        mean, stddev = (tf.reshape(v, self._keep) for v in (self.mean, self.stddev))
        return (tf.cast(inputs, self.compute_dtype) - mean) / stddev

    def compute_output_shape(self, input_shape: Any) -> Any:
        """That of the inputs."""
        return input_shape

    def adapt(self, x: Any, user_ids: Any = None) -> None:
        """Releases means and deviations of the training inputs.

        Args:
          x: [n, ...], an array of all training inputs as the layer will see them.
          user_ids: [n], whose each example is, if users are protected; or their `UserRecords`. Each
            user then counts once, in equal parts for each of their examples.

        Raises:
          NotPrivateError: if TensorFlow must be deterministic, as secret noise is not.
          TypeError, ValueError: if the inputs are not an array of numbers, or do not fit.
          RuntimeError: if the layer was adapted before, or is a copy of one that was, since that
            would be another release.
        """
        x = input_array(x)
        if not self.built:
            self.build((None, *x.shape[1:]))  # which may restore a checkpoint's values
        if self.release_id:
            raise RuntimeError(
                "`adapt` has been called, of this layer or of the one that it is a copy of. To "
                "call it again would release more about the same examples than `dp_event` says: "
                "make another layer, and account for both."
            )
        examples = _Examples(x, self.axis, user_ids)
        if examples.num_features != self.mean.shape[0]:
            raise ValueError(
                f"`x` must have the {self.mean.shape[0]} features that the layer was built for. "
                f"Received: shape {x.shape} with axis={self.axis!r}"
            )
        if graphs.must_be_deterministic():
            raise NotPrivateError(
                "`tf.config.experimental.enable_op_determinism` forbids secret noise. Nothing was "
                "released: call `adapt` before it, or train without it."
            )
        # Before the first sum: what fails after it has been released all the same.
        self._released_here = 1.0 + secrets.randbits(_ID_BITS)
        self.released.assign([self._released_here, self.noise_multiplier])
        noise = self.noise_multiplier * math.sqrt(_RELEASES)
        mean, stddev, is_clear = _released_statistics(examples, noise)
        self.mean.assign(mean.astype(np.float32))
        self.stddev.assign(stddev.astype(np.float32))
        if not is_clear:  # last, since a warning may be an error
            warnings.warn(
                "The private normalization found nothing that stands out of its noise, and leaves "
                "inputs as they are from here on. It takes more examples, or less noise. Received: "
                f"{examples.num_units} of them, noise with standard deviation {noise:.3g}",
                stacklevel=_level_of_caller(),
            )

    def get_config(self) -> dict:
        """The arguments; means and deviations are weights."""
        own = {"noise_multiplier": self.noise_multiplier, "axis": self.axis}
        return {**super().get_config(), **own}


def normalizations_in(model: tf.keras.Model) -> list[PrivateNormalization]:
    """The `PrivateNormalization` layers in a model, those inside of other layers too."""
    return [layer for layer in layers_within(model) if isinstance(layer, PrivateNormalization)]


def first_unpaid(
    layers: Sequence[PrivateNormalization],
    optimizer: tf.keras.optimizers.Optimizer,
    events: Sequence[dp_accounting.DpEvent],
    known: dict[int, dp_accounting.DpEvent] | None = None,
) -> PrivateNormalization | None:
    """The first layer whose release no event is left to pay for; `None` if all are paid for.

    Each event pays for one release: of side information, or of the statistics of one layer and its
    copies.

    Args:
      layers: what the optimizer trains behind; layers without statistics will need an event, too.
      optimizer: the one whose side information is paid for first.
      events: what is paid for.
      known: releases that are paid for already, by their numbers.
    """
    information = optimizer.side_information
    of_information = () if information is None else provenance.events(information.provenance)
    known = dict(known or {})
    left = missing_events(events, among=[*of_information, *known.values()])
    for layer in layers:
        for number, event in layer.releases.items() or [(0, layer.dp_event)]:
            if number in known:
                continue  # it has been paid for, or is a copy of one that has
            if missing_events([event], among=left):
                return layer
            left = missing_events(left, among=[event])
            if number:
                known[number] = event
    return None


def unpaid_in(
    model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer
) -> PrivateNormalization | None:
    """A layer in a model whose statistics the optimizer's ledger does not count; see above."""
    adapted = [layer for layer in normalizations_in(model) if layer.release_id]
    return first_unpaid(adapted, optimizer, optimizer.ledger.other_events)


class _Statistics(NamedTuple):
    """What a round has found, for the next one.

    Attributes:
      mean: [features].
      stddev: [features].
      error: [features], the standard deviation of the noise in the mean.
      is_clear: [features], whether the deviation stands out of the noise.
      is_still: [features], whether nearly all examples seem to have the same value. The deviation
        is then the size of this value.
      smallest: the deviation that a feature which is lost in the noise has at least.
    """

    mean: np.ndarray
    stddev: np.ndarray
    error: np.ndarray
    is_clear: np.ndarray
    is_still: np.ndarray
    smallest: float


class _Examples:
    """The inputs, with the features last, and whose each is."""

    def __init__(self, x: np.ndarray, axis: int | None, user_ids: Any):
        _, self.num_features = _kept_shape(x.shape, axis)
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
      hidden: [features], or 0. Features no further from their means count as 0, in units of x.
    """

    examples: _Examples
    mean: np.ndarray
    unit: np.ndarray
    hidden: np.ndarray | float = 0.0

    def parts(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Means [b, features], root mean squares [b, features] and weights [b].

        Examples with a value that is not finite are zeros, and so are their weights.
        """
        for inputs, weights in self.examples.parts():
            with np.errstate(over="ignore", invalid="ignore"):
                y = (inputs - self.mean) / self.unit
                means, squares = y.mean(1), np.square(y).mean(1)
                finite = np.isfinite(np.square(squares).sum(1))[:, np.newaxis]
            there = finite & (squares > np.square(self.hidden / self.unit))
            means, squares = (np.where(there, v, 0.0) for v in (means, squares))
            yield means, np.sqrt(squares), np.where(finite[:, 0], weights, 0.0)


def _released_statistics(examples: _Examples, noise: float) -> tuple[np.ndarray, np.ndarray, bool]:
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


def _level_of_caller() -> int:
    """The `stacklevel` with which a function warns of the line that called the library.

    `adapt` is called by users, and by `PrivacyPlan.normalization`.
    """
    library, _, _ = __name__.partition(".")
    here = inspect.currentframe()
    level, frame = 1, here and here.f_back
    while frame and frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == library:
        level, frame = level + 1, frame.f_back
    return level


def _first_round(examples: _Examples, noise: float) -> _Statistics | None:
    """Three releases; `None` if the examples do not stand out of the noise.

    Args:
      examples: see `_released_statistics`.
      noise: see `_released_statistics`.
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
    is_still = ~lost & ~is_clear & (np.abs(shift) > 0.5)
    deviation = np.where(is_still, units, deviation)
    return _Statistics(
        units * shift, deviation, units * noise_of_mean, is_clear, is_still, smallest
    )


def _second_round(
    examples: _Examples, noise: float, found: _Statistics
) -> tuple[np.ndarray, np.ndarray] | None:
    """Three releases: means and deviations; `None` if nothing stands out of the noise.

    Args:
      examples: see `_released_statistics`.
      noise: see `_released_statistics`.
      found: what is known already.
    """
    # Near a mean that is a little wrong there is the error, not the feature.
    hidden = np.where(found.is_still, _NEAR * found.error, 0.0)
    seen = _InUnits(examples, found.mean, found.stddev, hidden)
    units = _units(_release(_sum_of_magnitudes(seen), noise), noise)
    lost = units == 0
    units = np.where(lost, 1.0, units)
    # Of a few large values, the histogram may show no more than what is around 0.
    units = found.stddev * np.where(found.is_clear, np.maximum(units, 1.0), units)
    moments = _moments(seen._replace(unit=units), noise)
    if moments is None:
        return None
    shift, variance, _, noise_of_variance = moments
    floor = np.where(found.is_still, found.stddev, np.minimum(found.smallest, found.stddev))
    deviation = _deviation(units, variance, noise_of_variance, np.where(lost, floor, 0.0))
    return found.mean + units * shift, deviation


def _deviation(
    units: np.ndarray, variance: np.ndarray, noise_of_variance: float, floor: np.ndarray
) -> np.ndarray:
    """The deviation of each feature; where its variance is lost in the noise, at least the floor.

    Args:
      units: [features].
      variance: [features], in squares of these units.
      noise_of_variance: the standard deviation of the noise in it.
      floor: [features].
    """
    least = _LEAST_VARIANCE * noise_of_variance
    deviation = units * np.sqrt(np.maximum(variance, least))
    return np.where(variance < least, np.maximum(deviation, floor), deviation)


def _moments(seen: _InUnits, noise: float) -> tuple[np.ndarray, np.ndarray, float, float] | None:
    """Two releases: means and variances in these units, with the deviations of their noise.

    Means that are lost in the noise are 0. `None` if the norms of the examples do not stand out of
    the noise.
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


def _located(examples: _Examples, noise: float, found: _Statistics) -> _Statistics:
    """One release: where the value of features is that nearly all examples seem to share.

    Args:
      examples: see `_released_statistics`.
      noise: see `_released_statistics`.
      found: what the first round found.
    """
    still = found.is_still
    if not still.any():
        return found
    width = _NEAR * found.error + _SHRUNK * np.abs(found.mean)
    seen = _InUnits(examples, found.mean, np.where(still, width, 1.0))
    near = _release(_sum_near(seen, still), noise)
    of_sums = math.sqrt(2 * still.sum()) / (_ROUNDING * examples.num_units)
    shares, sums = near * of_sums
    settled = still & (shares > 0.5)
    shares = np.where(settled, shares, 1.0)
    mean = found.mean + np.where(settled, width * sums / shares, 0.0)
    error = np.where(settled, width * noise * of_sums / shares, found.error)
    return found._replace(mean=mean, error=error)


def _release(total: np.ndarray, noise: float) -> np.ndarray:
    """A sum with noise; the only place where what examples add up to is looked at.

    Args:
      total: a sum to which no example (or user) adds a vector of a norm above 1.
      noise: the standard deviation.
    """
    return total + noise * fresh_normal_numbers(total.size).numpy().reshape(total.shape)


def _sum_of_magnitudes(seen: _InUnits) -> np.ndarray:
    """Histograms of the octaves of magnitudes, [features, 128].

    An example has one entry in each row: half of a unit vector along its magnitudes, and half of
    one along those that are not 0. The first shows what is rare and large, the second what is
    small beside other features.
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


def _sum_near(seen: _InUnits, features: np.ndarray) -> np.ndarray:
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
        near = features & (np.abs(means) <= 1)
        total += entry * np.stack([weights @ near, weights @ np.where(near, means, 0.0)])
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
    """Histograms without what may be noise: windows of which the sum stands out, the rest zeros.

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


def input_array(x: Any) -> np.ndarray:
    """The inputs as an array.

    Raises:
      TypeError, ValueError: if they are not one array of numbers, [n, ...].
    """
    hint = (
        "`x` must be an array [n, ...] of all training inputs, as the layer will see them. Join "
        "several inputs into one, or give each a layer of its own and account for all."
    )
    if isinstance(x, (dict, list, tuple)) or not hasattr(x, "shape"):
        raise TypeError(f"{hint} Received: {type(x).__name__}")
    checks.not_masked("x", x)
    array = np.asarray(x)
    if array.dtype.kind not in "iufb":
        raise TypeError(f"{hint} Received: an array of {array.dtype}")
    if array.ndim < 2 or not array.size:
        raise ValueError(f"{hint} Received: shape {array.shape}")
    return array


def _kept_shape(input_shape: tuple, axis: int | None) -> tuple[list[int], int]:
    """The shape in which statistics meet inputs, and their number."""
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
