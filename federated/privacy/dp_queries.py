"""Noisy sums of clipped client updates, as the DP queries that TFF's aggregators use.

They replace three queries of TF Privacy whose noise is not safe in TFF. The noise of its tree query
is a function of a seed in the state (the time of day). A round that is run again from a saved state
therefore adds the same noise to different data, and the difference of the two results has no noise
at all.

All use of TF Privacy's protected methods and attributes is in this module.

References:
  Andrew et al. (2021), "Differentially Private Learning with Adaptive Clipping", arXiv:1905.03871.
  Kairouz et al. (2021), "Practical and Private (Deep) Learning without Sampling or Shuffling",
  arXiv:2103.00039.
  Kalinin and Lampert (2024), "Banded Square Root Matrix Factorization for Differentially Private
  Model Training", arXiv:2405.13763.
"""

from __future__ import annotations

import collections
import math
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
import tensorflow as tf
import tensorflow_privacy as tfp

from tf_adaptive_dp.accounting.noise_strategies import BandedNoise
from tf_adaptive_dp.mechanism.clipping import LARGEST, SMALLEST
from tf_adaptive_dp.mechanism.correlated_noise import take_back
from tf_adaptive_dp.mechanism.noise import fresh_normal_numbers

# The noise is larger by this factor, which exceeds the rounding errors in float32 of the norm, the
# clip, the standard deviation and their quotient.
MARGIN = 1 + 2.0**-16
# `tf.linalg.global_norm` adds up half of the squares: that of this one is a normal float32.
_UNSEEN = 2.0**-62


def clipped(record: Any, clip: tf.Tensor) -> tuple[Any, tf.Tensor]:
    """Scales a client's update down to an L2 norm of at most `clip`.

    Guarantee: the norm over all tensors together is at most `clip`, up to float32 rounding. An
    update that is not finite, or whose norm overflows, becomes zeros: NaN would cancel all noise
    and reveal that this client took part. Numbers whose squares underflow in float32 become zeros
    too, since the norm would miss them.

    Args:
      record: a nest of float32 tensors.
      clip: scalar.

    Returns:
      The clipped nest, and the norm before clipping; infinity if the update became zeros.
    """
    record = tf.nest.map_structure(lambda x: tf.where(tf.abs(x) < _UNSEEN, 0.0, x), record)
    norm = tf.linalg.global_norm(tf.nest.flatten(record))
    usable = tf.math.is_finite(norm)
    scale = tf.math.divide_no_nan(clip, tf.maximum(norm, clip))

    def scaled(values: tf.Tensor) -> tf.Tensor:
        return tf.where(usable, values, 0.0) * tf.where(usable, scale, 0.0)

    norm = tf.where(usable, norm, math.inf)
    return tf.nest.map_structure(scaled, record), norm


class _WideSum(tfp.SumAggregationDPQuery):
    """A query that adds up records in float64, to which subclasses bring them (`_wide`).

    In float32 a client could change how the numbers of all later clients are rounded, and so the
    sum by several times its clip: the guarantees of the queries allow for less (`MARGIN`). With
    float64 n clients change it by at most 2·n²·2⁻⁵³·clip more, 2⁻¹⁸·clip for 100,000 of them.
    """

    def initial_sample_state(self, template: Any = None) -> Any:
        """Zeros of the shapes of a record."""
        return tf.nest.map_structure(lambda t: tf.zeros_like(t, tf.float64), _as_tensors(template))


def _as_tensors(template: Any) -> Any:
    """A nest of tensors, of which some may be given by their specifications."""

    def as_tensor(part: Any) -> tf.Tensor:
        return tf.zeros(part.shape, part.dtype) if isinstance(part, tf.TensorSpec) else part

    return tf.nest.map_structure(as_tensor, template)


def _wide(record: Any) -> Any:
    return tf.nest.map_structure(lambda t: tf.cast(t, tf.float64), record)


def _with_noise(sums: Any, noise: tf.Tensor) -> Any:
    """Sums in float64 plus the noise of all their numbers in a row, in float32."""
    noisy = _flat(sums) + tf.cast(noise, tf.float64)
    return _like(sums, tf.cast(noisy, tf.float32))


def _flat(record: Any) -> tf.Tensor:
    return tf.concat([tf.reshape(values, [-1]) for values in tf.nest.flatten(record)], axis=0)


def _like(record: Any, flat: tf.Tensor) -> Any:
    leaves = tf.nest.flatten(record)
    parts = tf.split(flat, [math.prod(leaf.shape) for leaf in leaves])
    shaped = [tf.reshape(part, leaf.shape) for part, leaf in zip(parts, leaves)]
    return tf.nest.pack_sequence_as(record, shaped)


class GaussianSum(_WideSum, tfp.GaussianSumQuery):
    """The sum of clipped updates plus Gaussian noise: N(0, (`MARGIN`·stddev)²) for each number.

    Guarantee: the Gaussian mechanism with noise multiplier stddev / clip for adding or removing one
    client, whatever the client sends. Each run of the graph draws fresh noise (see
    `tf_adaptive_dp.mechanism.noise.fresh_normal_numbers`), also for an empty sum.
    """

    def preprocess_record_impl(self, params: tf.Tensor, record: Any) -> tuple[Any, tf.Tensor]:
        """The clipped update, in float64, and its norm."""
        update, norm = clipped(record, params)
        return _wide(update), norm

    def get_noised_result(self, sample_state: Any, global_state: Any) -> tuple:
        """The sum with noise, the unchanged state, and the event."""
        stddev = MARGIN * global_state.stddev
        size = _flat(sample_state).shape[0]
        noisy = _with_noise(sample_state, stddev * fresh_normal_numbers(size))
        event = dp_accounting.GaussianDpEvent(stddev / global_state.l2_norm_clip)
        return noisy, global_state, event


class SumOfGroups(tfp.SumAggregationDPQuery):
    """A query whose records are the sums of whole groups of clients.

    A group of clients starts with `inner.initial_sample_state`, adds each client's update to it
    with `inner.accumulate_record`, which clips, and sends only the result. This query adds up what
    the groups sent, and leaves the rest to `inner`.

    Guarantee: that of `inner`. Its sample state is the sum of what it makes of each record, in
    whatever order they are added; it is released by the same `inner.get_noised_result`, so with the
    same noise, added once. The number of groups enters nowhere.

    Args:
      inner: a query for sums, which makes no difference between clients.
    """

    def __init__(self, inner: tfp.SumAggregationDPQuery):
        self._inner = inner

    def initial_global_state(self) -> Any:
        """That of `inner`, as is the next state."""
        return self._inner.initial_global_state()

    def derive_sample_params(self, global_state: Any) -> Any:
        """What a group needs for `inner.accumulate_record`."""
        return self._inner.derive_sample_params(global_state)

    def get_noised_result(self, sample_state: Any, global_state: Any) -> tuple:
        """That of `inner` for all clients of all groups."""
        return self._inner.get_noised_result(sample_state, global_state)

    def derive_metrics(self, global_state: Any) -> collections.OrderedDict:
        """Those of `inner`."""
        return self._inner.derive_metrics(global_state)


class _QuantileEstimator(tfp.QuantileEstimatorQuery):
    """Counts the norms below an estimate, with the noise of `GaussianSum`.

    It overrides TF Privacy's `_construct_below_estimate_query` (0.9.0), which its constructor
    calls. Without that method the count would have the noise of TF Privacy.
    """

    def _construct_below_estimate_query(
        self, stddev: float, expected_num_records: float
    ) -> tfp.NormalizedQuery:
        # Counts are shifted by one half, so a client changes them by ±0.5.
        return tfp.NormalizedQuery(GaussianSum(0.5, stddev), expected_num_records)

    def get_noised_result(self, sample_state: Any, global_state: Any) -> tuple:
        """The next estimate, from `SMALLEST` to `LARGEST`, the next state, and the event."""
        estimate, state, event = super().get_noised_result(sample_state, global_state)
        estimate = tf.clip_by_value(estimate, SMALLEST, LARGEST)
        return estimate, state._replace(current_estimate=estimate), event


class AdaptiveClipSum(tfp.QuantileAdaptiveClipSumQuery):
    """`GaussianSum` with a clip that follows a quantile of the updates' norms (Andrew et al. 2021).

    Each round multiplies the clip by exp(-`learning_rate` · (share of norms below it -
    `target_unclipped_quantile`)), where the share comes from a noisy count. It stays between 1e-12
    and 1e12: a median of zeros, as of many clients without data, would otherwise lower it for ever,
    until float32 has neither a clip nor its noise.

    Guarantee: with σ = `clipped_count_stddev`, each round composes two Gaussian mechanisms on the
    same cohort, with multipliers `noise_multiplier` and 2σ. The clip is computed from earlier
    results alone, so it may be published with them.

    It replaces TF Privacy's `_sum_query` and `_quantile_estimator_query` (0.9.0), which all other
    methods use.
    """

    def __init__(
        self,
        initial_l2_norm_clip: float,
        noise_multiplier: float,
        target_unclipped_quantile: float,
        learning_rate: float,
        clipped_count_stddev: float,
        expected_num_records: float,
    ):
        super().__init__(
            initial_l2_norm_clip,
            noise_multiplier,
            target_unclipped_quantile,
            learning_rate,
            clipped_count_stddev,
            expected_num_records,
        )
        self._sum_query = GaussianSum(initial_l2_norm_clip, noise_multiplier * initial_l2_norm_clip)
        self._quantile_estimator_query = _QuantileEstimator(
            initial_l2_norm_clip,
            target_unclipped_quantile,
            learning_rate,
            clipped_count_stddev,
            expected_num_records,
            geometric_update=True,
        )


class TreeState(NamedTuple):
    """The state of `TreeSum`. It holds the noise that protects the releases: keep it secret.

    Attributes:
      rounds: the number of finished rounds.
      period: the number of rounds in a tree.
      clip: the largest norm of an update after clipping.
      stddev: the standard deviation of a node's noise.
      nodes: for each level, [d], the estimated noise (unscaled) of the node of that level which is
        part of the sum so far; [0] if none is.
    """

    rounds: tf.Tensor
    period: tf.Tensor
    clip: tf.Tensor
    stddev: tf.Tensor
    nodes: tuple[tf.Tensor, ...]


class TreeSum(_WideSum):
    """Sums of clipped updates whose noise cancels over rounds: DP-FTRL (Kairouz et al. 2021).

    Each `period` rounds are the leaves of a binary tree, and every node has independent noise
    N(0, (clip·`noise_multiplier`)²). The sum of rounds 1 to t is released with the noise of the
    nodes that cover it, where the estimate of a node also uses all nodes below it (Honaker 2015,
    estimation from below): a node of level k has the estimate
    e = (own + (e_left + e_right)/2) / (2 - 2⁻ᵏ) in terms of unscaled e, with variance
    1 / (2 - 2⁻ᵏ). A round's result is the difference of two such sums. After `period` rounds a new
    tree begins.

    Guarantee: all results of one tree are computed from the noisy sums of its nodes. A client that
    takes part in one round of a tree is in at most ⌈log₂(steps + 1)⌉ of the nodes that are finished
    after `steps` rounds, each of sensitivity clip. That is
    `dp_accounting.SingleEpochTreeAggregationDpEvent(noise_multiplier, steps)` for replacing a
    client's update by zeros, even if a round's updates depend on earlier results. Noise is drawn in
    the round that releases it: a round that is run again from a saved state adds fresh noise to all
    nodes that it finishes, so an abandoned sequence of rounds counts as one more tree.

    Args:
      clip: the largest norm of an update after clipping.
      noise_multiplier: the noise multiplier of each node.
      period: the number of rounds in a tree, at least 1.
      size: the number of values in an update.
    """

    def __init__(self, clip: float, noise_multiplier: float, period: int, size: int):
        self._clip = clip
        self._stddev = MARGIN * noise_multiplier * clip
        self._period = period
        self._size = size
        self._levels = period.bit_length()

    def initial_global_state(self) -> TreeState:
        """A tree without leaves."""
        return TreeState(
            rounds=tf.constant(0, tf.int64),
            period=tf.constant(self._period, tf.int64),
            clip=tf.constant(self._clip, tf.float32),
            stddev=tf.constant(self._stddev, tf.float32),
            # Their length must not be part of the type of the state.
            nodes=tuple(_of_any_length(tf.zeros([0])) for _ in range(self._levels)),
        )

    def derive_sample_params(self, global_state: TreeState) -> tf.Tensor:
        """The clip."""
        return global_state.clip

    def preprocess_record(self, params: tf.Tensor, record: Any) -> Any:
        """The clipped update, in float64."""
        return _wide(clipped(record, params)[0])

    def derive_metrics(self, global_state: TreeState) -> collections.OrderedDict:
        """The clip."""
        return collections.OrderedDict(clip=global_state.clip)

    def _finished_node(
        self, state: TreeState, level: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Joins the nodes below a level with the noise of the round that finishes them.

        The new nodes of this round (a leaf, and all above it up to `level`) matter only through
        their sum Σ 2⁻ⁱ zᵢ, so they are drawn as one normal number of that variance.

        Returns:
          The unscaled estimate of the node, its part of the noise of a sum, and the part of the
          nodes below it in the noise of the sum before, which ends with it.
        """

        def share(k: Any) -> tf.Tensor:
            return 1.0 / (2.0 - 0.5 ** tf.cast(k, tf.float32))

        inherited, taken_back = tf.zeros([self._size]), tf.zeros([self._size])
        for k, stored in enumerate(state.nodes):

            def joined(
                k: int = k,
                stored: tf.Tensor = stored,
                inherited: tf.Tensor = inherited,
                taken_back: tf.Tensor = taken_back,
            ) -> tuple[tf.Tensor, tf.Tensor]:
                left = tf.ensure_shape(_of_any_length(stored), [self._size])
                return 0.5 * (left + inherited), taken_back + share(k) * left

            unchanged = (inherited, taken_back)
            inherited, taken_back = tf.cond(level > k, joined, lambda same=unchanged: same)
        variance = (1.0 - 0.25 ** (tf.cast(level, tf.float32) + 1.0)) / 0.75
        stddev = state.stddev * tf.sqrt(variance)
        node = inherited + stddev * fresh_normal_numbers(self._size)
        return node, share(level) * node, taken_back

    def get_noised_result(self, sample_state: Any, global_state: TreeState) -> tuple:
        """The noisy sum of the round, the next state, and an event that says nothing."""
        leaf = global_state.rounds % self._period
        level = _level_finished_by(leaf)
        node, added, taken_back = self._finished_node(global_state, level)
        result = _with_noise(sample_state, added - taken_back)
        is_last = tf.equal(leaf + 1, self._period)

        def next_node(k: int, stored: tf.Tensor) -> tf.Tensor:
            is_kept, is_new = ~is_last & (level < k), ~is_last & tf.equal(level, k)
            kept = tf.cond(is_kept, lambda: stored, lambda: tf.zeros([0]))
            return tf.cond(is_new, lambda: node, lambda: kept)

        state = global_state._replace(
            rounds=global_state.rounds + 1,
            nodes=tuple(next_node(k, stored) for k, stored in enumerate(global_state.nodes)),
        )
        # One round has no event of its own; `UserLedger` counts the rounds of each tree.
        return result, state, dp_accounting.UnsupportedDpEvent()


def _of_any_length(vector: tf.Tensor) -> tf.Tensor:
    """The vector, whose length a graph learns only when it runs."""
    return tf.compat.v1.placeholder_with_default(vector, [None])


def _level_finished_by(leaf: Any) -> tf.Tensor:
    """The level of the largest node that ends with a leaf, int32.

    It is the number of ones at the end of the leaf's binary digits.
    """
    ones = tf.bitwise.left_shift(tf.constant(1, tf.int64), tf.range(1, 63, dtype=tf.int64)) - 1
    leaf = tf.cast(leaf, tf.int64)
    return tf.reduce_sum(tf.cast(tf.equal(tf.bitwise.bitwise_and(leaf, ones), ones), tf.int32))


def without_idle_nodes(state: TreeState) -> TreeState:
    """A state with numbers without the nodes that the next round neither reads nor writes.

    A round of a tree that has any number of levels reads one node on average, so the others need
    not be sent to where it is computed.

    Args:
      state: the state before the round, of NumPy arrays.

    Returns:
      A state from which the round gives the same result.

    Raises:
      ValueError: if the state does not have the nodes of its round, such as one of an earlier
        version of this library.
    """
    leaf = int(state.rounds) % int(state.period)
    shapes = [np.shape(node) for node in state.nodes]
    if [shape != (0,) for shape in shapes] != [bool(leaf >> k & 1) for k in range(len(shapes))]:
        raise ValueError(
            "The state of the tree mechanism must hold one vector for each node in the sum of the "
            "rounds so far, and nothing for the other levels. States of earlier versions of this "
            "library differ: resume them with the version that saved them. Received: "
            f"rounds={int(state.rounds)}, period={int(state.period)}, nodes of shapes {shapes}"
        )
    level = int(_level_finished_by(leaf))
    nothing = np.zeros([0], np.float32)
    nodes = (node if k < level else nothing for k, node in enumerate(state.nodes))
    return state._replace(nodes=tuple(nodes))


def with_idle_nodes(before: TreeState, after: TreeState) -> TreeState:
    """The state after a round that was given `without_idle_nodes(before)`.

    Guarantee: it is the state that the round returns for `before` (with the same fresh noise).

    Args:
      before: the whole state before the round.
      after: what the round returned.
    """
    leaf, period = int(before.rounds) % int(before.period), int(before.period)
    level = int(_level_finished_by(leaf))
    if leaf + 1 == period:
        return after
    pairs = enumerate(zip(before.nodes, after.nodes))
    return after._replace(nodes=tuple(old if k > level else new for k, (old, new) in pairs))


class BandedState(NamedTuple):
    """The state of `BandedSum`. It holds the noise that protects the releases: keep it secret.

    Attributes:
      rounds: the number of finished rounds.
      clip: the largest norm of an update after clipping.
      stddev: the standard deviation of the fresh noise z of a round.
      coefficients: [b], c_0, ..., c_{b-1}, of norm 1.
      past: [b - 1, d]; the noises of the last rounds, latest first; zeros before the first one.
    """

    rounds: tf.Tensor
    clip: tf.Tensor
    stddev: tf.Tensor
    coefficients: tf.Tensor
    past: tf.Tensor


class BandedSum(_WideSum):
    """Sums of clipped updates whose noise later rounds partly cancel.

    Round t releases g_t + w_t, where g_t is the sum of the clipped updates and
    w_t = (z_t - c_1 w_{t-1} - ... - c_{b-1} w_{t-b+1}) / c_0, with fresh
    z_t ~ N(0, (clip·`noise_multiplier`)²) for each number and the coefficients c of
    `tf_adaptive_dp.accounting.BandedNoise`, which have norm 1.

    The state keeps the last b - 1 noises, which is (b - 1)·d numbers of 4 bytes: as much memory on
    the server, and in each saved state, as b - 1 models. Drawing them again from stored keys would
    take memory for one model, but in each round the time of as many draws as the noise remembers,
    which are more than b - 1.

    Guarantee: c_0 times a round's result, plus the c_k times the results before it, is the row
    y_t = c_0 g_t + ... + c_{b-1} g_{t-b+1} + z_t, to float32 rounding, and the results are a
    function of these rows. z_t is drawn in the round that releases it and used in no other row. A
    client that takes part in round t alone moves these rows by at most clip·‖c‖ = clip, even if the
    updates of a round depend on earlier results. A client that takes part several times, any two of
    them at least b rounds apart, moves each row through one of its updates only. So √k·clip bounds
    k participations, and `tf_adaptive_dp.accounting.noise_strategies.sensitivity` is exact. A round
    that is run again from a saved state releases one more row with fresh noise, which cancels the
    same earlier noise: the client moves it by at most c_0·clip, and m successive rows by at most as
    much as the first m rounds of a run. `UserLedger` counts them so.

    Args:
      clip: the largest norm of an update after clipping.
      noise_multiplier: that of one participation.
      bands: b, at least 2.
      size: the number of values in an update.
    """

    def __init__(self, clip: float, noise_multiplier: float, bands: int, size: int):
        self._clip = clip
        self._stddev = MARGIN * noise_multiplier * clip
        self._strategy = BandedNoise(bands)
        self._size = size

    def initial_global_state(self) -> BandedState:
        """The state before the first round: there is no noise to cancel."""
        return BandedState(
            rounds=tf.constant(0, tf.int64),
            clip=tf.constant(self._clip, tf.float32),
            stddev=tf.constant(self._stddev, tf.float32),
            coefficients=tf.constant(self._strategy.coefficients, tf.float32),
            past=tf.zeros([self._strategy.bands - 1, self._size]),
        )

    def derive_sample_params(self, global_state: BandedState) -> tf.Tensor:
        """The clip."""
        return global_state.clip

    def preprocess_record(self, params: tf.Tensor, record: Any) -> Any:
        """The clipped update, in float64."""
        return _wide(clipped(record, params)[0])

    def derive_metrics(self, global_state: BandedState) -> collections.OrderedDict:
        """The clip."""
        return collections.OrderedDict(clip=global_state.clip)

    def get_noised_result(self, sample_state: Any, global_state: BandedState) -> tuple:
        """The noisy sum of the round, the next state, and an event that says nothing."""
        fresh = global_state.stddev * fresh_normal_numbers(self._size)
        noise, past = take_back(global_state.coefficients, fresh, global_state.past)
        result = _with_noise(sample_state, noise)
        state = global_state._replace(rounds=global_state.rounds + 1, past=past)
        # One round has no event of its own; `UserLedger` counts the rounds in a row.
        return result, state, dp_accounting.UnsupportedDpEvent()
