"""ADADP and AdaDPS on the clients of federated averaging, as optimizers of TFF.

Clipping and noise are elsewhere: the aggregator clips each client's update once per round and adds
noise to the sum (see `federated.privacy.user_level`).
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from federated.clients.preconditioner import ClientPreconditioner
from tf_adaptive_dp import checks
from tf_adaptive_dp.update_rules import step_doubling

LEARNING_RATE = tff.learning.optimizers.LEARNING_RATE_KEY
TOLERANCE, ALPHA_MIN, ALPHA_MAX = "tolerance", "alpha_min", "alpha_max"
_HPARAMS = (LEARNING_RATE, TOLERANCE, ALPHA_MIN, ALPHA_MAX)
# The rest of the state; the last one only between the two minibatches of `next_in_turn`.
_MINIBATCHES, _DISCARDED, _START = "minibatches", "discarded", "start"
_FIRST_HALF = "first_half"
_BASE = "base"

State = collections.OrderedDict


def build_adadp(
    learning_rate: Any = 0.1,
    tolerance: float = 0.3,
    alpha_min: float = 0.9,
    alpha_max: float = 1.1,
    discard: bool = False,
    keep: str = "half_steps",
    shorten: bool = True,
    tolerance_decay: float = 1.0,
) -> tff.learning.optimizers.Optimizer:
    """SGD for clients that adapts its own learning rate (ADADP).

    It compares one step of size η with two steps of size η/2, over two minibatches with the
    gradients G₁ and G₂:

        even minibatch:  θ̂ = θ − η·G₁ (the Euler point),  θ ← θ − (η/2)·G₁
        odd minibatch:   θ̃ = θ − (η/2)·G₂,  err = ‖(θ̃ − θ̂) / max(1, |θ̃|)‖₂ over all weights
                         θ ← θ₀ + min(1, tol / err)·(θ̃ − θ₀),  θ₀: θ before both minibatches
                         η ← η · min(max(tol / err, alpha_min), alpha_max)

    A step whose error exceeds the tolerance is not lost but shortened, so that its error equals
    tol. So every minibatch moves the client, and no η₀ and no single gradient can throw it far off.
    From round to round the tolerance falls: tol = tolerance / √(1 + tolerance_decay·r) after r
    rounds. So clients with different data drift apart less and less.

    The paper returns to θ₀ instead of shortening a step, and keeps the tolerance constant:
    `build_adadp(tolerance=0.1, discard=True, tolerance_decay=0)` is its form. See docs/results.md
    for both.

    An infinite or NaN err discards the step, and η shrinks. A client with an odd number of
    minibatches ends on the half step of the last one, which is not judged. The state stays on the
    client: every client starts every round with η₀, and learning rates are neither averaged nor
    sent.

    `report(state)` returns scalars of one client: the final `learning_rate`, `judged_steps`, and
    `discarded_steps`, the number of judged steps that were discarded. Do not wrap this optimizer in
    a learning-rate schedule, which would overwrite η. TFF's Mime keeps the state at the server, so
    there is nothing to adapt.

    Args:
      learning_rate: η₀, a number or a scalar tensor.
      tolerance: tol of the first round, in the units of the weights; 0.1 in the paper. Ours lies
        between 0.2 and 0.4, which did equally well on held-out training images of CIFAR-10 (see
        docs/results.md).
      alpha_min: the smallest factor of one adaptation.
      alpha_max: the largest factor of one adaptation.
      discard: whether to return to the earlier weights when err > tol, as the paper does on
        clients.
      keep: the point after a whole step: `"half_steps"` for θ̃, or `"euler"` for θ̂.
      shorten: whether to shorten steps with err > tol. Without it, and without `discard`, they are
        taken whole, even if err is infinite or NaN. With `discard` it has no effect.
      tolerance_decay: how fast the tolerance falls; 0 keeps it constant, as in the paper. The
        processes of this package count the rounds (`next_hparams`). In one that does not, such as
        `tff.learning.algorithms.build_weighted_fed_avg`, every round is the first.

    Returns:
      A `tff.learning.optimizers.Optimizer`. The first four arguments are its hyperparameters, under
      the same names; `tolerance` is that of the coming round.

    Raises:
      TypeError, ValueError: if an argument is invalid.

    References:
      Koskela and Honkela (2018), "Learning Rate Adaptation for Federated and Differentially Private
      Learning", arXiv:1809.03832: "Adaptive federated averaging algorithm" (supplement,
      Algorithm 1).

    >>> optimizer = build_adadp(learning_rate=0.1)
    >>> w = tf.zeros([1])
    >>> state = optimizer.initialize(tf.TensorSpec([1]))
    >>> for _ in range(2):
    ...     state, w = optimizer.next(state, w, gradients=tf.constant([-1.0]))
    >>> print(f"w = {w.numpy()[0]:.2f}, next η = {state['learning_rate'].numpy():.2f}")
    w = 0.10, next η = 0.11
    """
    return _ADADP(
        learning_rate,
        tolerance,
        alpha_min,
        alpha_max,
        discard=discard,
        keep=keep,
        shorten=shorten,
        tolerance_decay=tolerance_decay,
    )


def build_adadps(
    preconditioner: ClientPreconditioner, base: tff.learning.optimizers.Optimizer | None = None
) -> tff.learning.optimizers.Optimizer:
    """AdaDPS for clients: scales gradients by side information, then applies any optimizer.

    It divides the gradient of each minibatch by A and leaves the step to `base`:

        g ← g / A,   θ ← base(θ, g)        with SGD: θ ← θ − α·g

    With `base=build_adadp()`, err compares two points of the preconditioned flow, since both
    minibatches share A.

    Guarantee: A is a constant that is either public or was released on its own, so a client's
    update depends only on its own data and on published values. The optimizer's `side_information`
    (with `provenance` and `description`) records which, for the ledger. `NonPrivateDpEvent` makes ε
    infinite. A wrapper of this optimizer must pass `side_information` on. TFF's
    `schedule_learning_rate` does not, and fails: schedule the base instead.

    Args:
      preconditioner: A; see `ClientPreconditioner`.
      base: the optimizer that makes the step; `None` takes
        `tff.learning.optimizers.build_sgdm(learning_rate=0.1)`.

    Returns:
      A `tff.learning.optimizers.Optimizer` with the hyperparameters of `base`, and with its
      `report` if it has one.

    Raises:
      TypeError: if `preconditioner` is not a `ClientPreconditioner`, or `base` is not an optimizer.
      ValueError: if `base` has side information already; in the first step, if A does not fit.

    References:
      Li et al. (2022), "Private Adaptive Optimization with Side Information", arXiv:2202.05963,
      section 6.2 and Algorithm 3.

    >>> halved = ClientPreconditioner.from_arrays([2.0], provenance="public")
    >>> optimizer = build_adadps(halved)
    >>> state = optimizer.initialize([tf.TensorSpec([1])])
    >>> _, (w,) = optimizer.next(state, [tf.zeros([1])], gradients=[tf.constant([-1.0])])
    >>> print(f"w = {w.numpy()[0]:.2f}; A is {optimizer.side_information.provenance}")
    w = 0.05; A is public
    """
    if base is None:
        base = tff.learning.optimizers.build_sgdm(learning_rate=0.1)
    return _AdaDPS(preconditioner, base)


class _ADADP(tff.learning.optimizers.Optimizer):
    """See `build_adadp`."""

    def __init__(
        self,
        learning_rate: Any,
        tolerance: float,
        alpha_min: float,
        alpha_max: float,
        discard: bool,
        keep: str,
        shorten: bool,
        tolerance_decay: float,
    ):
        # It is a hyperparameter, so it cannot wait for the model.
        tolerance = checks.number("tolerance", tolerance, 0, strict=True)
        settings = step_doubling.StepDoublingSettings(
            tolerance, tolerance_decay, alpha_min, alpha_max, keep, discard
        )
        self._hparams = {
            LEARNING_RATE: _checked_learning_rate(learning_rate),
            TOLERANCE: tolerance,
            ALPHA_MIN: settings.alpha_min,
            ALPHA_MAX: settings.alpha_max,
        }
        self._discard, self._keep = settings.discard, settings.keep
        self._shorten = checks.boolean("shorten", shorten) and not discard
        self._tolerance_decay = settings.tolerance_decay
        # Whether a step may end elsewhere than its second half step does.
        self._limits = self._discard or self._shorten

    def initialize(self, specs: Any) -> State:
        state = State((key, self._hparams[key]) for key in _HPARAMS)
        state[_MINIBATCHES] = tf.zeros([], tf.int32)
        state[_DISCARDED] = tf.zeros([], tf.int32)
        state[_START] = tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), specs)
        return state

    def next(self, state: State, weights: Any, gradients: Any) -> tuple[State, Any]:
        points, half_step = self._half_step(state, weights, gradients)
        if not points:  # a model without trainable weights
            return state, weights

        def unjudged() -> tuple:
            reached = [point - h for point, h in zip(points, half_step)]
            rate = tf.cast(state[LEARNING_RATE], tf.float32)
            return rate, tf.identity(state[_DISCARDED]), reached

        def judged() -> tuple:
            # Not kept in the state: what it holds costs time at each minibatch.
            starts = tf.nest.flatten(state[_START])
            first_half = [start - point for start, point in zip(starts, points)]
            return self._second_half(state, points, first_half, half_step)

        # One branch for all that only odd minibatches do: each costs time, even if it is not taken.
        odd = tf.equal(state[_MINIBATCHES] % 2, 1)
        rate, discarded, reached = tf.cond(odd, judged, unjudged)
        state = _after_minibatch(state)
        state[LEARNING_RATE], state[_DISCARDED] = rate, discarded
        # Written at each minibatch, read at odd ones.
        state[_START] = tf.nest.pack_sequence_as(weights, points)
        return state, tf.nest.pack_sequence_as(weights, reached)

    @property
    def next_in_turn(self) -> tuple:
        """`next` for even and for odd minibatches, for loops that know which is which.

        Between the two the state holds the first half step as well.
        """
        return self._next_even, self._next_odd

    def _next_even(self, state: State, weights: Any, gradients: Any) -> tuple[State, Any]:
        points, half_step = self._half_step(state, weights, gradients)
        reached = [point - h for point, h in zip(points, half_step)]
        state = _after_minibatch(state)
        state[_START] = tf.nest.pack_sequence_as(weights, points)
        state[_FIRST_HALF] = half_step
        return state, tf.nest.pack_sequence_as(weights, reached)

    def _next_odd(self, state: State, weights: Any, gradients: Any) -> tuple[State, Any]:
        points, half_step = self._half_step(state, weights, gradients)
        state = _after_minibatch(state)
        first_half = state.pop(_FIRST_HALF)
        if not points:
            return state, weights
        rate, discarded, reached = self._second_half(state, points, first_half, half_step)
        state[LEARNING_RATE], state[_DISCARDED] = rate, discarded
        return state, tf.nest.pack_sequence_as(weights, reached)

    def _half_step(
        self, state: State, weights: Any, gradients: Any
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The weights of a minibatch, and how far its half step goes, both flat."""
        gradients = tff.learning.optimizers.handle_indexed_slices_gradients(gradients)
        tff.learning.optimizers.check_weights_gradients_match(weights, gradients)
        _check_state_fits(state[_START], weights)
        points = [tf.convert_to_tensor(w) for w in tf.nest.flatten(weights)]
        half_rate = state[LEARNING_RATE] / 2
        return points, [
            tf.zeros_like(point) if g is None else tf.cast(half_rate, point.dtype) * g
            for point, g in zip(points, tf.nest.flatten(gradients))
        ]

    def _second_half(
        self,
        state: State,
        points: list[tf.Tensor],
        first_half: list[tf.Tensor],
        half_step: list[tf.Tensor],
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Ends a step of two minibatches: judges it, and adapts the learning rate.

        Args:
          state: the state after the first minibatch.
          points: the weights after the first half step.
          first_half: how far that one went.
          half_step: how far the second one goes.

        Returns:
          The next learning rate, how many steps were discarded so far, and the weights to keep.
        """
        starts = tf.nest.flatten(state[_START])
        reached = [point - h for point, h in zip(points, half_step)]
        error = _error(first_half, half_step, reached)
        kept = reached
        if self._keep == "euler":
            kept = [point - h for point, h in zip(points, first_half)]
        discarded = tf.constant(False)
        if self._limits:
            share = step_doubling.share_of_step(error, state[TOLERANCE])
            discarded = share < 1.0 if self._discard else tf.equal(share, 0.0)
        if self._discard:
            kept = tf.cond(discarded, lambda: starts, lambda kept=kept: kept)
        elif self._shorten:
            kept = _shortened(starts, kept, share)
        adapted = step_doubling.adapted_learning_rate(
            state[LEARNING_RATE], error, state[TOLERANCE], state[ALPHA_MIN], state[ALPHA_MAX]
        )
        return adapted, state[_DISCARDED] + tf.cast(discarded, tf.int32), kept

    def get_hparams(self, state: State) -> State:
        return State((key, state[key]) for key in _HPARAMS)

    def set_hparams(self, state: State, hparams: Any) -> State:
        unknown = sorted(set(hparams) - set(_HPARAMS))
        if unknown:
            raise KeyError(f"`hparams` may have the keys {_HPARAMS}. Received: {unknown}")
        state = State(state)
        state.update(hparams)
        return state

    def next_hparams(self, hparams: State) -> State:
        """The hyperparameters of the round after that of `hparams`.

        The tolerance of a round tells how many rounds were before it, so states hold no counter,
        and the tolerance may be set at any time.
        """
        hparams = State(hparams)
        hparams[TOLERANCE] = step_doubling.next_tolerance(
            hparams[TOLERANCE], self._hparams[TOLERANCE], self._tolerance_decay
        )
        return hparams

    def report(self, state: State) -> State:
        """Scalars of one client, float32; see `build_adadp`."""
        return State(
            learning_rate=tf.cast(state[LEARNING_RATE], tf.float32),
            judged_steps=tf.cast(state[_MINIBATCHES] // 2, tf.float32),
            discarded_steps=tf.cast(state[_DISCARDED], tf.float32),
        )


class _AdaDPS(tff.learning.optimizers.Optimizer):
    """See `build_adadps`.

    The state of the base is nested one level down, although it is the only entry, so that a wrapper
    which sets the learning rate in the state fails instead of hiding `side_information`.
    """

    def __init__(
        self, preconditioner: ClientPreconditioner, base: tff.learning.optimizers.Optimizer
    ):
        if not isinstance(preconditioner, ClientPreconditioner):
            raise TypeError(
                "`preconditioner` must be a `ClientPreconditioner`, which states the provenance of "
                "A: `ClientPreconditioner.from_arrays(..., provenance=...)` or "
                "`.from_side_information(...)`. Received: preconditioner="
                f"{type(preconditioner).__name__}"
            )
        if not isinstance(base, tff.learning.optimizers.Optimizer):
            raise TypeError(
                f"`base` must be a `tff.learning.optimizers.Optimizer`. Received: base={base!r}"
            )
        if getattr(base, "side_information", None) is not None:
            raise ValueError(
                "`base` must not have side information: the ledger can account for one "
                "only. Multiply the arrays of both. Received: base with side_information="
                f"{base.side_information.description!r}"
            )
        self.side_information = preconditioner
        self._base = base
        if hasattr(base, "report"):
            self.report = lambda state: base.report(state[_BASE])
        if hasattr(base, "next_hparams"):
            self.next_hparams = base.next_hparams
        if hasattr(base, "next_in_turn"):
            self.next_in_turn = tuple(
                functools.partial(self._next_of, f) for f in base.next_in_turn
            )

    def initialize(self, specs: Any) -> State:
        return State([(_BASE, self._base.initialize(specs))])

    def next(self, state: State, weights: Any, gradients: Any) -> tuple[State, Any]:
        return self._next_of(self._base.next, state, weights, gradients)

    def _next_of(
        self,
        next_of_base: Callable[[Any, Any, Any], tuple],
        state: State,
        weights: Any,
        gradients: Any,
    ) -> tuple[State, Any]:
        gradients = tff.learning.optimizers.handle_indexed_slices_gradients(gradients)
        tff.learning.optimizers.check_weights_gradients_match(weights, gradients)
        scaled = self.side_information.precondition(tf.nest.flatten(gradients))
        gradients = tf.nest.pack_sequence_as(gradients, scaled)
        base_state, weights = next_of_base(state[_BASE], weights, gradients)
        return State([(_BASE, base_state)]), weights

    def get_hparams(self, state: State) -> State:
        return self._base.get_hparams(state[_BASE])

    def set_hparams(self, state: State, hparams: Any) -> State:
        return State([(_BASE, self._base.set_hparams(state[_BASE], hparams))])


def _after_minibatch(state: State) -> State:
    """A copy of a state that counts one more minibatch."""
    state = State(state)
    state[_MINIBATCHES] = state[_MINIBATCHES] + 1
    return state


def _checked_learning_rate(value: Any) -> Any:
    if tf.is_symbolic_tensor(value):
        return tf.cast(value, tf.float32)
    if tf.is_tensor(value) and value.shape.rank == 0:
        value = float(value.numpy())
    return checks.number("learning_rate", value, 0, strict=True)


def _shortened(starts: list, reached: list, share: tf.Tensor) -> list:
    """A share of the way from `starts` to `reached`; 0 times infinity or NaN is 0 here."""

    def part_of_the_way() -> list:
        return [
            s + tf.math.multiply_no_nan(r - s, tf.cast(share, s.dtype))
            for s, r in zip(starts, reached)
        ]

    # Early steps are whole ones, and a branch costs little even if they are not.
    return tf.cond(share < 1.0, part_of_the_way, lambda: reached)


def _error(first_half: list, second_half: list, reached: list) -> tf.Tensor:
    """The err of two minibatches; θ̃ - θ̂ = (η/2)(G₁ - G₂) is the difference of the half steps."""
    pairs = zip(first_half, second_half)
    differences = [tf.cast(a, tf.float32) - tf.cast(b, tf.float32) for a, b in pairs]
    return step_doubling.relative_norm(differences, [tf.cast(p, tf.float32) for p in reached])


def _check_state_fits(points: Any, weights: Any) -> None:
    def described(nest: Any) -> Any:
        return tf.nest.map_structure(lambda t: (tuple(t.shape), t.dtype.name), nest)

    try:
        tf.nest.assert_same_structure(points, weights)
        fits = described(points) == described(weights)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(
            "`weights` must have the structure, shapes and dtypes of the `specs` that the state "
            f"was initialized with, {described(points)}. Received: {described(weights)}"
        )
