"""Noisy histograms of the sizes of gradients and losses, which the first batches release."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Callable, NamedTuple

import tensorflow as tf

# Octaves of norms around 1, and of 1 + |loss| / 2^-20 on each side of 0.
_OCTAVES = 80
_SMALLEST_LOSS = 2.0**-20
# What rounding may add to the norm of the vector that counts an example.
_ROUNDING = 1 - 1e-6
# Windows of two octaves are empty unless they count more than this many standard deviations of
# their noise. More is asked of norms that are four octaves above those of the fullest window: there
# are some hundred such windows for each variable, and noise in one of them that is taken for
# examples would make the variable's scale useless.
_WINDOW, _NEAR = 2, 4
_SIGNIFICANT, _SIGNIFICANT_FAR_ABOVE = 4.5, 6.0
# Norms ten octaves below the largest belong to examples that the model has fitted by chance.
_RANGE = 10


class Sizes(NamedTuple):
    """What is read from histograms; all float64, zeros until the histograms are complete.

    Attributes:
      norms: [K], for each variable the upper quartile of its gradients' norms, or [1], that of
        whole gradients; 0 if no gradient stands out from the noise.
      loss: the median of the losses; 0 if they are not counted.
      spread: the distance between the quartiles of the losses; 0 if they are not counted.
    """

    norms: tf.Tensor
    loss: tf.Tensor
    spread: tf.Tensor


class Histograms:
    """Counts the examples of the first batches by the norms of their gradients and by their loss.

    Each of these batches gives one release. With K variables, an example counts in K histograms by
    the norm of its gradient for each of them, and in one by its loss; or in one alone, by the norm
    of its whole gradient. In each of R histograms it counts as C/√R, and the sum over all examples
    is released in place of the sum of clipped gradients.

    Guarantee: adding or removing one example changes that sum by at most C in L2 norm, as it
    changes the sum of clipped gradients. An example whose gradient is zero or whose gradient or
    loss is not finite is not counted, so padding counts as absent. Everything that this object
    stores or returns comes from released counts, except the result of `sum`.

    The histograms are complete after

        W = 5 + ⌊(50·σ/L)²·R/2⌋

    batches, or later if no gradient stands out from the noise by then. A single histogram has wider
    bins, so that W is 2 + ⌊(25·σ/L)²/2⌋, or one more to be even. In counts, the noise of a bin has
    the standard deviation σ·√(W·R). They can be opened again, to measure norms anew.
    """

    def __init__(self, num_variables: int | None, add_variable: Callable[..., tf.Variable]):
        """Creates empty histograms.

        Args:
          num_variables: K; or `None` for a single histogram, of whole gradients.
          add_variable: makes a variable that is saved with the optimizer.
        """
        if num_variables is None:
            form = _Form.of_whole_gradients()
        else:
            form = _Form.of_each_variable(num_variables)
        self._form = form
        shape = [form.num_rows, form.num_bins]
        self._counts = add_variable(shape, dtype=tf.float64, name="histograms")
        self._batches = add_variable([], dtype=tf.int64, name="histogram_batches")
        self._sizes = add_variable([form.num_norms + 2], dtype=tf.float64, name="sizes")
        self._earlier = add_variable([form.num_norms + 2], dtype=tf.float64, name="earlier_sizes")
        self._bounds = add_variable([2, form.num_norms], dtype=tf.float64, name="bounds_of_norms")
        self._complete = add_variable([], dtype=tf.bool, name="histograms_complete")
        self._released = add_variable([], dtype=tf.bool, name="histograms_released")

    def sizes(self) -> Sizes:
        """What is read from the histograms."""
        norms, loss, spread = tf.split(self._sizes.read_value(), [self._form.num_norms, 1, 1])
        return Sizes(norms, loss[0], spread[0])

    def are_open(self) -> tf.Tensor:
        """Whether the next release belongs to the histograms; a bool scalar."""
        return ~self._complete.read_value()

    def released(self) -> tf.Tensor:
        """Whether the last release belonged to the histograms; a bool scalar."""
        return self._released.read_value()

    def are_the_first(self) -> tf.Tensor:
        """Whether they were never opened again; a bool scalar."""
        return ~tf.reduce_any(self._earlier.read_value()[:-2] > 0)

    def batches_needed(self, sigma: tf.Tensor, batch_size: tf.Tensor) -> tf.Tensor:
        """W, float64.

        Args:
          sigma: σ, float64.
          batch_size: L, float64.
        """
        # Noise adds up over the bins of a window.
        form = self._form
        wide = 25 * math.sqrt(form.per_octave)
        of_noise = tf.floor(tf.square(wide * sigma / batch_size) * (form.num_rows / 2))
        at_once = form.batches_at_once
        return form.fewest_batches + at_once * tf.math.ceil(of_noise / at_once)

    def open_again(self, when: tf.Tensor, ratios: tf.Tensor) -> None:
        """Empties the histograms, so that the next W batches measure the norms anew.

        The norms are unknown until then. What is known of the losses remains that of the first
        time: as training goes on, losses become small.

        Args:
          when: bool scalar, whether to do so.
          ratios: [2, K], float64, the least and the largest factor by which each norm has changed.
            The new measurement is clipped to these bounds.
        """
        sizes, earlier, complete = (
            v.read_value() for v in (self._sizes, self._earlier, self._complete)
        )
        when &= complete
        without = tf.concat([tf.zeros_like(sizes[:-2]), sizes[-2:]], axis=0)
        self._earlier.assign(tf.where(when, sizes, earlier))
        self._bounds.assign(tf.where(when, ratios * sizes[:-2], self._bounds.read_value()))
        self._sizes.assign(tf.where(when, without, sizes))
        for variable in (self._counts, self._batches):
            value = variable.read_value()
            variable.assign(tf.where(when, tf.zeros_like(value), value))
        self._complete.assign(complete & ~when)

    def sum(
        self,
        counts: tf.Tensor,
        squared_norms: Sequence[tf.Tensor | None],
        places: Sequence[int],
        losses: tf.Tensor,
        clip: tf.Tensor,
    ) -> tf.Tensor:
        """The histograms of one batch, before the noise: NOT private.

        Args:
          counts: bool, [B] or a scalar: which examples may count. None may unless `are_open`, and
            padding never.
          squared_norms: [B] for each variable of this step, ‖gᵢ‖² of its part, or `None`.
          places: the number of each of these variables among the K.
          losses: [B].
          clip: scalar, C.

        Returns:
          [R, bins], float32.
        """
        losses = tf.cast(losses, tf.float32)
        total = tf.add_n([n for n in squared_norms if n is not None])
        there = (total > 0) & tf.math.is_finite(total) & tf.math.is_finite(losses) & counts
        form = self._form
        entry = tf.cast(clip, tf.float32) * (_ROUNDING / math.sqrt(form.num_rows))
        if not form.has_losses:
            bins, present = [form.bin_of(_octaves_of_norms(total))], [there]
        else:
            parts = [(place, n) for place, n in zip(places, squared_norms) if n is not None]
            octaves = [*(_octaves_of_norms(n) for _, n in parts), _octaves_of_losses(losses)]
            rows = [*(place for place, _ in parts), form.num_rows - 1]
            bins = [r * form.num_bins + form.bin_of(o) for r, o in zip(rows, octaves)]
            present = [there & (n > 0) for _, n in parts] + [there]
        entries = tf.where(tf.concat(present, axis=0), entry, 0.0)
        flat = tf.math.unsorted_segment_sum(
            entries, tf.concat(bins, axis=0), form.num_rows * form.num_bins
        )
        return tf.reshape(flat, [form.num_rows, form.num_bins])

    def add(
        self, released: tf.Tensor, clip: tf.Tensor, sigma: tf.Tensor, batch_size: tf.Tensor
    ) -> list[tf.Tensor]:
        """Adds a released sum to the histograms, if they are open.

        Args:
          released: `sum` with its noise, over all replicas.
          clip: scalar, the C of `sum`.
          sigma: σ, float64.
          batch_size: L, float64.

        Returns:
          Tensors that are available when everything is written.
        """
        open_now = self.are_open()
        entry = clip * (_ROUNDING / math.sqrt(self._form.num_rows))
        counts = tf.cast(released, tf.float64) / entry
        counts = self._counts.assign_add(tf.where(open_now, counts, tf.zeros_like(counts)))
        batches = self._batches.assign_add(tf.cast(open_now, tf.int64))
        counts, batches = tf.convert_to_tensor(counts), tf.convert_to_tensor(batches)
        needed = self.batches_needed(sigma, batch_size)
        enough = open_now & (tf.cast(batches, tf.float64) >= needed)
        if self._form.batches_at_once > 1:
            enough &= tf.equal(batches % self._form.batches_at_once, 0)
        earlier, bounds = self._earlier.read_value(), self._bounds.read_value()

        def read() -> tf.Tensor:
            noise = sigma * tf.sqrt(tf.cast(batches, tf.float64) * self._form.num_rows)
            return _bounded(self._form.read(counts, noise), earlier, bounds)

        sizes = tf.cond(enough, read, self._sizes.read_value)
        complete = ~open_now | (enough & tf.reduce_any(sizes[:-2] > 0))
        unknown = tf.concat([tf.zeros_like(sizes[:-2]), earlier[-2:]], axis=0)
        sizes = tf.where(complete, sizes, unknown)
        written = [
            self._sizes.assign(sizes),
            self._complete.assign(complete),
            self._released.assign(open_now),
        ]
        return [tf.convert_to_tensor(variable) for variable in written]


class _Form(NamedTuple):
    """What tells histograms of each variable's norms from a single one, of whole gradients.

    Attributes:
      num_norms: how many histograms are of norms.
      has_losses: whether there is another one, the last, which is of losses.
      per_octave: how many bins there are in an octave.
      fewest_batches: how many batches a measurement takes without noise.
      batches_at_once: it takes a multiple of this number.
    """

    num_norms: int
    has_losses: bool
    per_octave: int
    fewest_batches: int
    batches_at_once: int

    @classmethod
    def of_each_variable(cls, num_variables: int) -> _Form:
        return cls(num_variables, True, per_octave=4, fewest_batches=5, batches_at_once=1)

    @classmethod
    def of_whole_gradients(cls) -> _Form:
        # Less need be known of these. Batches come in twos, so that the pairs of minibatches of
        # `ADADP` begin at even iterations.
        return cls(1, False, per_octave=1, fewest_batches=2, batches_at_once=2)

    @property
    def num_rows(self) -> int:
        """R, one for each histogram."""
        return self.num_norms + self.has_losses

    @property
    def num_bins(self) -> int:
        return _OCTAVES * self.per_octave

    def bin_of(self, octaves: tf.Tensor) -> tf.Tensor:
        position = tf.floor((octaves + _OCTAVES // 2) * self.per_octave)
        return tf.cast(tf.clip_by_value(position, 0, self.num_bins - 1), tf.int32)

    def read(self, counts: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        """The entries of `Sizes`, one after the other.

        Args:
          counts: [R, bins], float64, noisy.
          noise: the standard deviation of that noise.
        """
        # Noise in hundreds of empty bins would add up to more than a quarter of the examples.
        is_norm = tf.range(tf.shape(counts)[0])[:, tf.newaxis] < self.num_norms
        window = _WINDOW * self.per_octave
        full = self._full_windows(counts, noise * math.sqrt(window), is_norm)
        around = [[0, 0], [window - 1, window - 1]]
        kept = _sums_of_windows(tf.pad(tf.cast(full, tf.float64), around), window) > 0
        from_end = tf.argmax(tf.reverse(kept, [1]), axis=1, output_type=tf.int32)
        last = (self.num_bins - 1 - from_end)[:, tf.newaxis]
        near = tf.range(self.num_bins) > last - _RANGE * self.per_octave
        counts = tf.where(kept & (near | ~is_norm), counts, tf.zeros_like(counts))
        norms = _power_of_2(self._quantile(counts[: self.num_norms], 0.75))
        stands_out = tf.reduce_any(full[: self.num_norms], axis=1)
        norms = tf.where(stands_out, norms, tf.zeros_like(norms))
        if not self.has_losses:
            return tf.concat([norms, tf.zeros([2], tf.float64)], axis=0)
        low, median, high = (_loss_at(self._quantile(counts[-1:], q)) for q in (0.25, 0.5, 0.75))
        return tf.concat([norms, median, high - low], axis=0)

    def _full_windows(self, counts: tf.Tensor, noise: tf.Tensor, is_norm: tf.Tensor) -> tf.Tensor:
        """Which windows examples stand out in, [rows, windows], bool.

        Args:
          counts: [rows, n].
          noise: the standard deviation of that of a window.
          is_norm: [rows, 1], bool.
        """
        sums = _sums_of_windows(counts, _WINDOW * self.per_octave)
        fullest = tf.argmax(sums, axis=1, output_type=tf.int32)[:, tf.newaxis]
        far_above = is_norm & (tf.range(sums.shape[1]) > fullest + _NEAR * self.per_octave)
        needed = [tf.constant(s, tf.float64) for s in (_SIGNIFICANT_FAR_ABOVE, _SIGNIFICANT)]
        return sums > tf.where(far_above, *needed) * noise

    def _quantile(self, counts: tf.Tensor, q: float) -> tf.Tensor:
        """The octave below which a share `q` of each row's counts lies, [rows], float64."""
        sums = tf.cumsum(counts, axis=1)
        below = sums < q * sums[:, -1:]
        # Noise may let sums fall, so the last position below the share is what counts.
        positions = tf.cast(tf.range(1, self.num_bins + 1), tf.float64)
        index = tf.reduce_max(tf.where(below, positions, tf.zeros_like(positions)), axis=1)
        index = tf.minimum(index, tf.constant(self.num_bins - 1, tf.float64))
        here = tf.one_hot(tf.cast(index, tf.int32), self.num_bins, dtype=tf.float64)
        count, total = (tf.reduce_sum(here * x, axis=1) for x in (counts, sums))
        inside = (q * sums[:, -1] - (total - count)) / tf.maximum(count, tf.ones_like(count))
        inside = tf.clip_by_value(inside, tf.zeros_like(inside), tf.ones_like(inside))
        return (index + inside) / self.per_octave - _OCTAVES // 2


def _bounded(sizes: tf.Tensor, earlier: tf.Tensor, bounds: tf.Tensor) -> tf.Tensor:
    """The entries of `Sizes`, given those of an earlier measurement.

    Args:
      sizes: what was read now.
      earlier: what was known before; zeros if nothing was.
      bounds: [2, K], between which the norms are if they were known before.
    """
    norms = tf.where(sizes[:-2] > 0, sizes[:-2], earlier[:-2])
    norms = tf.where(earlier[:-2] > 0, tf.clip_by_value(norms, bounds[0], bounds[1]), norms)
    losses = tf.where(tf.reduce_any(earlier[:-2] > 0), earlier[-2:], sizes[-2:])
    return tf.concat([norms, losses], axis=0)


def _octaves_of_norms(squared_norms: tf.Tensor) -> tf.Tensor:
    usable = (squared_norms > 0) & tf.math.is_finite(squared_norms)
    return _log2(tf.where(usable, squared_norms, 1.0)) / 2


def _octaves_of_losses(losses: tf.Tensor) -> tf.Tensor:
    losses = tf.where(tf.math.is_finite(losses), losses, 0.0)
    return tf.sign(losses) * _log2(1 + tf.abs(losses) / _SMALLEST_LOSS)


def _log2(x: tf.Tensor) -> tf.Tensor:
    return tf.math.log(x) / math.log(2.0)


def _sums_of_windows(x: tf.Tensor, window: int) -> tf.Tensor:
    """Sums over so many neighbors in each row, [rows, n] → [rows, n - window + 1]."""
    sums = tf.pad(tf.cumsum(x, axis=1), [[0, 0], [1, 0]])
    return sums[:, window:] - sums[:, :-window]


def _loss_at(octaves: tf.Tensor) -> tf.Tensor:
    return tf.sign(octaves) * _SMALLEST_LOSS * (_power_of_2(tf.abs(octaves)) - 1)


def _power_of_2(exponent: tf.Tensor) -> tf.Tensor:
    return tf.exp(math.log(2.0) * exponent)
