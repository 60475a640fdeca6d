"""The layer: what it keeps of a release, and when it makes one."""

from __future__ import annotations

import math
import secrets
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras import graphs
from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp._keras.tracebacks import level_of_caller
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.normalization.estimator import (
    NUM_RELEASES,
    Examples,
    array_of,
    kept_shape,
    released_statistics,
)

_ID_BITS = 52  # which float64 holds exactly
# Those that were called, which training steps are searched for.
_applied: weakref.WeakSet[PrivateNormalization] = weakref.WeakSet()


def applied_normalizations() -> list[PrivateNormalization]:
    """The layers of this process that were applied to something."""
    return list(_applied)


@keras.saving.register_keras_serializable("tf_adaptive_dp")
class PrivateNormalization(keras.layers.Layer):
    """Keras's `Normalization` with means and deviations that are released with noise.

    Private training works best where inputs have mean 0 and variance 1, and it suffers in other
    units: the noise is the same for all weights, so features that are smaller than others are lost
    in it. `adapt` finds the units, whatever they are, and the layer then returns

        (inputs - mean) / stddev

    or, with `invert`, as the last layer of a regression whose targets were passed to `adapt`,

        inputs * stddev + mean

    `PrivacyPlan(normalize_inputs=True)` decides how much noise this takes, and accounts for it:

        model = keras.Sequential([plan.normalization(x), keras.layers.Dense(10)])

    Without a plan, you must add the release to the optimizer's ledger:

        layer = PrivateNormalization(noise_multiplier=20.0)
        layer.adapt(x)
        optimizer.ledger.other_events += (layer.dp_event,)

    If you forget this, `validate` says so, and the optimizer raises `NotPrivateError` before the
    first step of a model that contains the layer. `HonestTuner` refuses such layers. Nothing
    notices a layer that is applied outside the model, in a `map` for example.

    `adapt` makes two rounds of three releases, with y = (x − mean) / stddev, at first x itself. For
    each example and feature j let m_j be the mean of y over all other axes, and r_j the root of the
    mean of y²; for inputs [n, features] these are y and |y|.

    - Of magnitudes: each feature has a histogram of log₂ r_j, in which an example counts with
      weight (r_j/‖r‖ + 1/√(number of r_j > 0))/2. The root mean square of what stands out from the
      noise is the unit of the feature. A feature in which nothing stands out gets the lower
      quartile of the magnitudes of all features.
    - Of norms: histograms of ‖m‖ and ‖r²‖, in these units.
    - Of moments: the sums of m and of r², clipped to the upper quartiles of these norms.

    After the first round a feature may have a mean and nothing around it: nearly all examples seem
    to have the same value, as the pixels of a white or a standardized background do. Between the
    rounds, one release locates this value: the number of examples near the mean, and their mean. In
    the second round the value counts as 0. If clearly fewer than four fifths of the examples are
    near it, the feature is treated like any other.

    So the layer finds features that are a million times larger than others, or rare, or far from 0.
    What is lost in the noise is scaled with care: a variance counts as at least twice its noise, a
    deviation is at least the error of the mean, and around a value that nearly all examples have,
    it is at least about this value. A feature far from 0 that varies by less than the error of its
    located value counts as constant; subtract a public start from timestamps.

    Guarantee: `adapt` is as private as one release of the Gaussian mechanism with this noise
    multiplier, `dp_event`, for adding or removing one example (or one user with all of their
    examples). Each of its releases, seven at most, is a sum to which an example contributes a
    vector of norm at most 1, with noise of standard deviation σ√7, and seven of them compose to one
    with σ. The number of examples (or users) is public. Examples with a value that is not finite
    are left out. A weight of the layer records that it has released, so a copied, saved or loaded
    layer refuses to release again. A layer that `clone_model` makes has the weights of a new layer:
    what its `adapt` releases costs `dp_event` again.

    Args:
      noise_multiplier: σ > 0.
      axis: the axis of the features, not 0. All other axes share the statistics of a feature, as
        the pixels of a channel should. With `None`, all values share one mean and one deviation.
      invert: whether to turn outputs of a model into the units of the targets, as
        `keras.layers.Normalization(invert=True)` does.
      **kwargs: arguments of `keras.layers.Layer`. `dtype` is float32 unless given.

    Attributes:
      mean: [features], the weight that holds the means; zeros before `adapt`.
      stddev: [features], the weight that holds the deviations; ones before `adapt`.
      released: [3], the weight that says which release they came from: a random number, σ, and 1
        if it protects users or 0 if it protects examples. Zeros before `adapt`.

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
    >>> bool(abs(y.mean(0)).max() < 0.3 and 0.1 < y.std(0).min() < y.std(0).max() < 2)
    True
    """

    def __init__(
        self,
        noise_multiplier: float,
        axis: int | None = -1,
        invert: bool = False,
        **kwargs: Any,
    ):
        # Raw units may not fit into the half precision of a policy.
        super().__init__(**{"dtype": "float32", **kwargs})
        self.noise_multiplier = checks.number("noise_multiplier", noise_multiplier, 0, strict=True)
        if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int) or not axis):
            raise ValueError(
                "`axis` must be the number of the axis of the features, or None. Axis 0 is that of "
                f"the examples. Received: axis={axis!r}"
            )
        self.axis = axis
        self.invert = checks.boolean("invert", invert)
        # `set_weights` could undo the mark in the weight, so Python remembers the release too.
        self._released_here, self._noise_here, self._of_users_here = 0.0, 0.0, False

    @property
    def dp_event(self) -> dp_accounting.DpEvent:
        """What `adapt` costs, or did cost: one release of the Gaussian mechanism."""
        _, of_weights, _ = self._release_made()
        made = of_weights or self._noise_here
        return dp_accounting.GaussianDpEvent(made or self.noise_multiplier)

    @property
    def release_id(self) -> int:
        """A random number for each call of `adapt`, which copies share; 0 before it."""
        return max(self.releases, default=0)

    @property
    def releases(self) -> dict[int, dp_accounting.DpEvent]:
        """What was released for this layer, by `release_id`: for its weights, and by itself.

        There are several if `adapt` was called and then the weights of another layer were set.
        """
        number, noise_multiplier, _ = self._release_made()
        # Not `self.noise_multiplier`, which may have been set to something else since.
        made = {number: noise_multiplier, self._released_here: self._noise_here}
        return {int(n): dp_accounting.GaussianDpEvent(z) for n, z in made.items() if n}

    @property
    def protects_users(self) -> bool:
        """Whether all that was released counts each user once, not each example."""
        number, _, of_users = self._release_made()
        units = ((number, of_users), (self._released_here, self._of_users_here))
        return all(of_users for number, of_users in units if number)

    def resume_with(self, weights: Sequence[np.ndarray]) -> None:
        """Sets the weights that a run began with, before anything is trained on other ones.

        Args:
          weights: of `get_weights`. What this layer released itself then no longer counts, since no
            gradient was computed with it; nobody may have looked at it.
        """
        self.set_weights(weights)
        self._released_here = self._noise_here = 0.0

    def _release_made(self) -> tuple[float, float, bool]:
        """The number of the release, its σ and whether it protects users; zeros before it."""
        if not self.built:
            return 0.0, 0.0, False
        with tf.init_scope():
            made = np.asarray(tf.convert_to_tensor(self.released)).tolist()
        number, noise_multiplier, of_users = made
        return number, noise_multiplier, bool(of_users)

    def build(self, input_shape: Any) -> None:
        """Creates the mean and the deviation; see `keras.layers.Layer`."""
        self._keep, size = kept_shape(tuple(input_shape), self.axis)
        add = self.add_weight
        self.mean = add(name="mean", shape=[size], initializer="zeros", trainable=False)
        self.stddev = add(name="stddev", shape=[size], initializer="ones", trainable=False)
        # Not an attribute of Python, which a copy or a loaded model would not have.
        kind = {"dtype": "float64", "initializer": "zeros", "trainable": False}
        self.released = add(name="released", shape=[3], **kind)
        super().build(input_shape)

    def call(self, inputs: Any) -> Any:
        """(inputs - mean) / stddev, or inputs * stddev + mean."""
        _applied.add(self)
        mean, stddev = (tf.reshape(v, self._keep) for v in (self.mean, self.stddev))
        inputs = tf.cast(inputs, self.compute_dtype)
        return inputs * stddev + mean if self.invert else (inputs - mean) / stddev

    def compute_output_shape(self, input_shape: Any) -> Any:
        """That of the inputs."""
        return input_shape

    def adapt(self, x: Any, user_ids: Any = None) -> None:
        """Releases means and deviations of the training inputs, or of the targets.

        Args:
          x: [n, ...], an array of all training inputs as the layer will see them; with `invert`, of
            all targets.
          user_ids: [n], the user each example belongs to, if users are protected; or their
            `UserRecords`. Each user then counts once, in equal parts for each of their examples.

        Raises:
          NotPrivateError: if TensorFlow must be deterministic, as secret noise is not.
          TypeError, ValueError: if the inputs are not an array of numbers, or do not fit.
          RuntimeError: if the layer was adapted before, or is a copy of one that was, since that
            would be another release.
        """
        x = array_of("x", x)
        if not self.built:
            self.build((None, *x.shape[1:]))  # which may restore a checkpoint's values
        if self.release_id:
            raise RuntimeError(
                "`adapt` has already been called, on this layer or on the layer that it is a copy "
                "of. Calling it again would release more about the same examples than `dp_event` "
                "says: make another layer, and account for both."
            )
        examples = Examples(x, self.axis, user_ids)
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
        self._noise_here, self._of_users_here = self.noise_multiplier, user_ids is not None
        self.released.assign([self._released_here, self._noise_here, float(self._of_users_here)])
        noise = self.noise_multiplier * math.sqrt(NUM_RELEASES)
        mean, stddev, is_clear = released_statistics(examples, noise)
        self.mean.assign(mean.astype(np.float32))
        self.stddev.assign(stddev.astype(np.float32))
        if not is_clear:  # last, since a warning may be an error
            warnings.warn(
                "The private normalization found nothing that stands out from its noise, and "
                f"leaves {'outputs' if self.invert else 'inputs'} as they are from now on. It "
                "needs more examples, or less noise, that is, a plan with a larger epsilon. "
                "Otherwise scale them by public constants (`keras.layers.Rescaling`) and leave "
                "this layer out. Received: "
                f"{examples.num_units} of them, noise with standard deviation "
                f"{noise:.3g}",
                stacklevel=level_of_caller(),
            )

    def get_config(self) -> dict:
        """The arguments; means and deviations are weights."""
        own = {
            "noise_multiplier": self.noise_multiplier,
            "axis": self.axis,
            "invert": self.invert,
        }
        return {**super().get_config(), **own}
