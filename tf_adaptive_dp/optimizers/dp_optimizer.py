"""The shell that all optimizers share: private gradients in `compute_gradients`."""

from __future__ import annotations

import collections
import contextlib
import functools
import numbers
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable, ClassVar

import dp_accounting
import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.callers import (
    is_in_fit,
    running_callbacks,
    running_fit,
    running_models,
    trained_variables_of_loaded_model,
)
from tf_adaptive_dp._keras.graphs import is_symbolic
from tf_adaptive_dp._keras.models import have_metrics_made_outside
from tf_adaptive_dp._keras.optimizers import (
    SelfScalingOptimizer,
    add_state,
    is_built,
    slot_index,
)
from tf_adaptive_dp._keras.tracebacks import level_of_caller, short_traceback
from tf_adaptive_dp._keras.variables import (
    layer_path_of,
    native,
    path_of,
    uncounted_variables,
)
from tf_adaptive_dp.accounting import noise_strategies
from tf_adaptive_dp.accounting.earlier_releases import note_ledger, warn_of_earlier_releases
from tf_adaptive_dp.accounting.noise_strategies import NoiseStrategy
from tf_adaptive_dp.gradients.api import check_loss, check_method, per_example_gradients
from tf_adaptive_dp.gradients.frames import handles_read
from tf_adaptive_dp.gradients.released import completion, mark_released, vouch_for
from tf_adaptive_dp.gradients.source import PerExampleGradients
from tf_adaptive_dp.gradients.watch import note_optimizer
from tf_adaptive_dp.mechanism.clipping import MEASURED, Clipping, PerLayerClipping, serialize
from tf_adaptive_dp.mechanism.correlated_noise import CorrelatedNoise
from tf_adaptive_dp.mechanism.draw_numbers import (
    Number,
    SeenDraws,
    lacks_weights,
    number_of,
    order_of,
)
from tf_adaptive_dp.mechanism.gaussian import GaussianMechanism
from tf_adaptive_dp.mechanism.padding import rows_of_padding
from tf_adaptive_dp.mechanism.replicas import num_replicas, total
from tf_adaptive_dp.mechanism.secure_noise import SecureNoise
from tf_adaptive_dp.normalization import refuse_unpaid_behind
from tf_adaptive_dp.optimizers import checked_state, refusals, step_settings
from tf_adaptive_dp.optimizers.compiled_step import check_finished_fit, note_step
from tf_adaptive_dp.optimizers.fit_warnings import warn_in_fit, warn_of_units
from tf_adaptive_dp.optimizers.given_loss import loss_and_variables
from tf_adaptive_dp.optimizers.loss_scaling import LossScaling
from tf_adaptive_dp.optimizers.preconditioning import Preconditioning, check_side_information
from tf_adaptive_dp.optimizers.registration import FullSignature, require_arguments
from tf_adaptive_dp.optimizers.shared_attributes import SharedAttributes
from tf_adaptive_dp.side_information.provenance import SideInformation, events

_OUTSIDE_OF_PLAN = (
    "The optimizer was made by a plan, but the step receives no sample weights, which the plan's "
    "batches have. Train with `plan.fit(model, x, y)`, or in a loop of your own on "
    "`plan.batches(x, y)`: `model.fit(x, y)` forms other batches and may take more steps, so the "
    "plan's epsilon does not hold for it."
)
_building = threading.RLock()  # not an attribute: optimizers can be copied, locks cannot


class DPOptimizer(SharedAttributes, FullSignature, SelfScalingOptimizer):
    """Mixin that turns a `tf.keras.optimizers.Optimizer` into a private one.

    `Model.fit` calls `compute_gradients` through `minimize`. Instead of the gradient of the mean
    loss, it returns the noisy mean of the clipped per-example gradients. Whatever the Keras
    optimizer does with that is post-processing.

    The shell holds the parts that do the work: the `GaussianMechanism` with its ledger, a
    `Preconditioning` and a `LossScaling`. `SharedAttributes` shows what they hold; here is what
    Keras calls: the step (`compute_gradients`, `apply_gradients`), and then saving and loading.

    Guarantee: every gradient that `apply_gradients` accepts was released by the `GaussianMechanism`
    and is in the ledger, unless the caller passes `non_private_gradients=True`.

    Args:
      l2_norm_clip: see `DPSGD` for this and the other arguments of the mechanism.
      side_information: as in `DPSGD`; or the `Preconditioning` of a subclass that uses it in its
        own way.
      **kwargs: the arguments of the Keras optimizer.
    """

    # Why an update rule is not for correlated noise; `None` if it is.
    needs_independent_noise: ClassVar[str | None] = None
    # See `RateAdaptingOptimizer`.
    adapts_learning_rate: ClassVar[bool] = False

    def __init__(
        self,
        l2_norm_clip: float | str,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        *,
        expected_batch_size: float | None = None,
        clipping: str | Clipping = "flat",
        gradients: str = "auto",
        gradient_accumulation_steps: int = 1,
        loss_scale: float | None = None,
        noise: NoiseStrategy | dict | None = None,
        secure_noise: bool = False,
        seed: int | None = None,
        examples_per_user: int | None = None,
        side_information: SideInformation | Preconditioning | None = None,
        **kwargs: Any,
    ):
        if isinstance(kwargs.get("learning_rate"), numbers.Real):  # else a schedule or a function
            checks.number("learning_rate", kwargs["learning_rate"], 0)
        super().__init__(**{"name": type(self).__name__, **kwargs})
        if not isinstance(side_information, Preconditioning):
            if side_information is not None:
                side_information = check_side_information(side_information)
            side_information = Preconditioning(side_information)
        self._preconditioning = side_information
        refusals.refuse_correlated_noise(self, noise_strategies.get_strategy(noise))
        self.gradients = check_method(gradients)
        self._loss_scaling = LossScaling(loss_scale)
        self._refused_state = checked_state.RefusedState()
        self._expects_padding = False
        self._only_inspects = False
        self._mechanism = GaussianMechanism(
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            num_microbatches=num_microbatches,
            expected_batch_size=expected_batch_size,
            clipping=clipping,
            gradient_accumulation_steps=gradient_accumulation_steps,
            secure_noise=secure_noise,
            seed=seed,
            noise=noise,
            add_variable=functools.partial(add_state, self),
            examples_per_user=examples_per_user,
        )
        refusals.refuse_measuring_once(self)
        if self.side_information is not None:
            self.ledger.other_events = events(self.side_information.provenance)

    @tf.autograph.experimental.do_not_convert
    @short_traceback
    def compute_gradients(
        self,
        loss: tf.Tensor | Callable[[], tf.Tensor],
        var_list: Sequence[tf.Variable] | Callable[[], Sequence[tf.Variable]],
        tape: tf.GradientTape | None = None,
    ) -> list[tuple[tf.Tensor | None, tf.Variable]]:
        """Releases the noisy mean of the clipped per-example gradients.

        Args:
          loss: [B], the loss of each example, or in a compiled step also a scalar that is a sum
            or a mean over examples; or a function that returns it.
          var_list: the variables, or a function that returns them.
          tape: the tape that recorded `loss`; needed if `loss` is a tensor.

        Returns:
          Pairs of gradient and variable; the gradient is `None` where the loss does not depend on
          the variable.

        Raises:
          NotPrivateError: if the loss, the model or a setting rules out per-example gradients.
          TypeError: if `loss` is not a tensor.
          ValueError: if `tape` is missing, or the optimizer was built for other variables.
        """
        self._prepare_step()
        loss, variables, tape = loss_and_variables(loss, var_list, tape)
        check_loss(loss)
        self._build_outside(variables, loss)
        refusals.refuse_other_variables(self, variables)
        with tf.init_scope():
            expected_batch_size = self.expected_batch_size
        source = per_example_gradients(
            loss,
            variables,
            tape,
            method=self.gradients,
            num_microbatches=self.num_microbatches,
            loss_scale=self._loss_scaling.scale_for(loss, variables),
            expected_batch_size=expected_batch_size,
            examples_per_user=self.examples_per_user,
        )
        note_optimizer(loss, self)
        if not self._only_inspects:
            note_step(loss, self)
        self.refuse_uncounted_statistics(loss)
        refusals.refuse_counting(self, source)
        return list(zip(self._release(source, variables), variables))

    def refuse_uncounted_statistics(self, loss: tf.Tensor) -> None:
        """Rejects a loss behind a `PrivateNormalization` whose release the ledger lacks.

        Raises:
          NotPrivateError: if epsilon would leave that release out.
        """
        refuse_unpaid_behind(loss, self)

    def _prepare_step(self) -> None:
        """Rejects steps that cannot be private, whatever their loss is, and changes settings.

        It turns TensorFloat-32 off in the whole process, and sets `expected_batch_size` where the
        last batch of `fit` is smaller than the others.
        """
        self.require_known_state()
        refusals.refuse_unsupported_setting(self)
        fit = running_fit(self)
        if fit is not None:
            refusals.refuse_data(self, fit)
        refusals.refuse_16_bit_rewrites()
        step_settings.turn_off_tensor_float_32()
        if isinstance(self._mechanism.generator, CorrelatedNoise):
            with tf.init_scope():
                num_releases = self.ledger.num_releases
            self._mechanism.generator.require_fit(num_releases)
        if not self._only_inspects:  # `validate` in a callback of `fit` says nothing in its place
            warn_in_fit(self)
            warn_of_units(self)
        step_settings.settle_batch_size(self)
        self._loss_scaling.refuse_wrapper(self)

    def _build_outside(self, variables: Sequence[tf.Variable], loss: tf.Tensor) -> None:
        """Creates slots in the first step without having its `tf.function` traced twice.

        Nor do metrics that its model has yet to make cause that.
        """
        read = handles_read(loss)
        if is_symbolic(loss):
            for model in running_models():
                have_metrics_made_outside(model)
        with _one_at_a_time(), uncounted_variables():
            self.build(variables)
            if tf.executing_eagerly() and not self._only_inspects:
                own = [native(v) for v in variables]
                self._mechanism.continue_after(warn_of_earlier_releases(own, self.ledger, read))

    def _release(
        self, source: PerExampleGradients, of_keras: Sequence[tf.Variable]
    ) -> list[tf.Tensor | None]:
        """Releases the gradients of each variable, which `apply_gradients` accepts.

        Args:
          source: the gradients of the examples.
          of_keras: the variables.

        Returns:
          Gradients of the variables' dtypes; `None` where the loss does not depend on the variable.
        """
        variables = [native(v) for v in of_keras]
        losses, rows_per_unit = source.example_losses, self.examples_per_user or 1
        scale, shift = self._preconditioning.scale_and_shift(self, variables)
        layers = _layers_of(of_keras, self.clipping)
        # Missing side information must fail the step before anything is released.
        with tf.control_dependencies([*(scale or ()), *(shift or ())]):
            if not self._preconditioning.before_clipping:
                scale = shift = None
            self._check_rows(losses)
            number = number_of(losses, rows_per_unit)
            noisy = self._mechanism.release(
                source,
                tf.shape(losses)[0],
                scale=scale,
                shift=shift,
                layers=layers,
                places=[slot_index(self, v) for v in variables],
                number=number,
                padding=rows_of_padding(losses, rows_per_unit),
                order=None if self.noise.is_independent else order_of(losses),
                public_size=_has_public_size(losses, number),
            )
            self._mark(noisy)  # before others read it
            # After the release, which has read A by then.
            with tf.control_dependencies([g for g in noisy if g is not None]):
                self._preconditioning.observe(
                    self,
                    variables,
                    released=noisy,
                    scales=scale,
                    noise_stddev=self._mechanism.noise_stddev(),
                    counts=self._mechanism.released_gradients(),
                )
        penalties = source.penalty_gradients
        if self._mechanism.histograms is not None:  # batches that measure must move nothing
            counts = self._mechanism.released_gradients()
            penalties = [
                None if p is None else tf.where(counts, p, tf.zeros_like(p)) for p in penalties
            ]
        released = _with_penalties(noisy, penalties, scale)
        released = [None if g is None else _rounded(g, v) for g, v in zip(released, variables)]
        self._mark(released)
        return released

    def _mark(self, gradients: Sequence[tf.Tensor | None]) -> None:
        """Marks what the mechanism has released, or what was computed from that alone."""
        for gradient in gradients:
            if gradient is not None:
                mark_released(gradient, self._mechanism.complete)

    def _check_rows(self, losses: tf.Tensor) -> None:
        """Rejects, or warns of, batches whose number of rows says that they are not as expected.

        Args:
          losses: [B], the losses of the examples.
        """
        self._mechanism.sizes.refuse_known_rows(losses.shape[0])
        unweighted = lacks_weights(losses)  # so all rows are examples
        num_examples = losses.shape[0] if unweighted else None  # padding has weights
        self._mechanism.sizes.warn_if_too_large(num_examples)
        if not tf.executing_eagerly() and not is_in_fit():
            self._mechanism.sizes.refuse_another_trace(num_examples)
        if self._expects_padding and unweighted:
            self._expects_padding = False  # a step may be traced several times
            warnings.warn(_OUTSIDE_OF_PLAN, stacklevel=level_of_caller())

    @tf.autograph.experimental.do_not_convert
    @short_traceback
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[tf.Tensor | None, tf.Variable]],
        *args: Any,
        non_private_gradients: bool = False,
        **kwargs: Any,
    ) -> tf.Tensor:
        """Applies released gradients.

        Args:
          grads_and_vars: pairs, as `compute_gradients` returns them.
          *args: passed on to Keras.
          non_private_gradients: whether to accept other tensors: released gradients that you
            processed further, which are still private, or gradients that are public or not
            private. The optimizer cannot tell these apart, so the guarantee becomes yours.
          **kwargs: passed on to Keras.

        Raises:
          NotPrivateError: if a gradient did not come from `compute_gradients`, or if replicas
            would apply their gradients without summing them.
        """
        grads_and_vars = list(grads_and_vars)
        if not non_private_gradients:
            refusals.refuse_gradients_of_one_replica(*args, **kwargs)
            grads_and_vars = self.pairs_of_step(grads_and_vars)
            refusals.refuse_foreign_gradients(grads_and_vars)
        elif not tf.executing_eagerly():
            grads_and_vars = [(vouch_for(g), v) for g, v in grads_and_vars]
        gradients = [g for g, _ in grads_and_vars if g is not None]
        apply = functools.partial(super().apply_gradients, grads_and_vars, *args, **kwargs)
        # After the gradients: a step that fails on its data must not move slots and counters.
        with tf.control_dependencies(gradients):
            if self.parts_per_batch == 1:
                return apply()
            return self._apply_when_complete(apply, gradients)

    def _apply_when_complete(self, apply: Callable, gradients: list[tf.Tensor]) -> tf.Tensor:
        """Applies gradients with the last part of a batch, and nothing before that."""
        flags = {id(f): f for f in map(completion, gradients)}
        if len(flags) != 1 or None in flags.values():
            raise ValueError(
                "With `gradient_accumulation_steps` the optimizer applies what `compute_gradients` "
                "returned, in the same step, and nothing else. Received: other gradients. Create "
                "it with `gradient_accumulation_steps=1` to process gradients after their release."
            )
        (complete,) = flags.values()
        return tf.cond(
            complete,
            lambda: tf.convert_to_tensor(apply()),
            lambda: tf.convert_to_tensor(self.iterations),
        )

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Creates all slots, those of the side information first.

        Args:
          var_list: the variables to train. Without any, nothing is created, so that the first step
            still can.
        """
        var_list = list(var_list)
        if not var_list:
            warnings.warn(
                "The optimizer was built without variables, as Keras 3 does when it loads an "
                "`.h5` file. It keeps its ledger, but its slots and `iterations` start from zero. "
                "Save models as `.keras`, which keeps all of their state.",
                stacklevel=level_of_caller(),
            )
            return
        self._preconditioning.build_in(self, var_list)
        super().build(var_list)
        self._note_ledger(var_list)

    def _note_ledger(self, var_list: Sequence[tf.Variable]) -> None:
        """Lets the variables know the ledger, which may be loaded, as a later optimizer has to."""
        if tf.executing_eagerly() and not self._only_inspects:
            note_ledger([native(v) for v in var_list], self.ledger)

    def is_between_steps(self) -> bool:
        """Whether side information may change now: not between the minibatches of one step."""
        between = self._preconditioning.is_between_steps(self.iterations)
        return between and not self.unfinished_parts

    def finalize_variable_values(self, var_list: Sequence[tf.Variable]) -> None:
        """Ends a `fit`, which calls this: variables may get their moving averages.

        Args:
          var_list: the variables that were trained.

        Raises:
          NotPrivateError: if epsilon does not hold for that `fit`; see `check_finished_fit`.
        """
        check_finished_fit(self)
        super().finalize_variable_values(var_list)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets all variables of the optimizer, its ledger included.

        Args:
          weights: arrays or variables, in the order of `variables`.

        Raises:
          ValueError: if they belong to another kind of optimizer, or this one is not built.
        """
        weights = list(weights)
        if is_built(self):
            checked_state.require_same_shapes(self.variables, weights)
            checked_state.require_same_terms(self.ledger, weights)
        self._refused_state.settle(self.ledger)
        super().set_weights(weights)

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Sets all variables from a saved model or saved weights; called by Keras.

        Args:
          store: arrays by their number.

        Raises:
          ValueError: if they do not fit and hold releases that the ledger lacks. The ledger counts
            these from then on, and training raises `NotPrivateError` until a state is loaded that
            fits or `ledger.restore` says what counts: Keras may turn the error into a warning.
        """
        try:
            fits = checked_state.can_load(self.variables, self.ledger, store)
        except ValueError:
            self._refused_state.add_to(self.ledger, store)
            raise
        if fits:
            self._refused_state.settle(self.ledger)
            super().load_own_variables(store)

    def require_known_state(self) -> None:
        """Raises if it is not known what the weights have cost.

        Raises:
          NotPrivateError: if saved state was refused and it is still undecided what it cost, see
            `load_own_variables`; or if the ledger lacks the release of the side information.
          ValueError: if a checkpoint of another unit of privacy was restored, for example; see
            `Ledger.require_own_terms`.
        """
        self._refused_state.require_decision(self.ledger)
        if not self._only_inspects:
            refusals.refuse_uncounted_side_information(self)

    def copy_to_inspect(self) -> DPOptimizer:
        """Another optimizer with the same arguments, with which `validate` traces a step.

        It shares the side information, which Keras may be unable to save, as with a function or a
        private provenance. Its ledger lacks the `other_events`, so do not train with it.
        """
        information, events = self.side_information, self.ledger.other_events
        self._preconditioning.side_information, self.ledger.other_events = None, ()
        try:
            config = self.get_config()
        finally:
            self._preconditioning.side_information = information
            self.ledger.other_events = events
        if information is not None:
            config["side_information"] = information
        config["expected_batch_size"] = self.expected_batch_size
        copy = type(self).from_config(config)
        # The weights would remember its ledger in place of this one, and this one goes on. Nor may
        # its batches, which are none, take the place of those of another optimizer.
        copy._only_inspects = True
        copy.compare_draws_with(SeenDraws(is_remembered=False))
        return copy

    def get_config(self) -> dict:
        """The arguments that make the same optimizer, and the ledger.

        The ledger is the only state included. Keras restores no state of an optimizer from the
        SavedModel format, and what was spent must not be forgotten.

        Raises:
          ValueError: if the ledger has `other_events` that Keras cannot save: any but those of the
            Gaussian mechanism.
        """
        others = self.ledger.other_events
        if any(type(event) is not dp_accounting.GaussianDpEvent for event in others):
            raise ValueError(
                "An optimizer whose ledger has `other_events` cannot be saved with its "
                "configuration, which would lose them. Save the weights (`tf.train.Checkpoint`), "
                "create a new optimizer and set `other_events` before you restore. Received: "
                f"other_events={others!r}"
            )
        other_releases = [event.noise_multiplier for event in others]
        fewest = self.ledger.fewest_units
        return {
            **super().get_config(),
            **self._preconditioning.get_config(),
            "l2_norm_clip": MEASURED if self.measures_clip else self.l2_norm_clip,
            "noise_multiplier": self.noise_multiplier,
            "num_microbatches": self.num_microbatches,
            "examples_per_user": self.examples_per_user,
            "expected_batch_size": self._mechanism.sizes.declared,
            "clipping": serialize(self.clipping),
            "gradients": self.gradients,
            "gradient_accumulation_steps": self.parts_per_batch,
            "loss_scale": self._loss_scaling.scale,
            "noise": noise_strategies.serialize(self.noise),
            "secure_noise": isinstance(self._mechanism.generator, SecureNoise),
            "seed": self.seed,
            "ledger": [list(segment) for segment in self.ledger.segments],
            **({"other_releases": other_releases} if other_releases else {}),
            **({} if fewest is None else {"fewest_units": fewest}),
            **({"chosen_by_search": True} if self.ledger.chosen_by_search else {}),
            "ledger_checks": [list(of_segment) for of_segment in self.ledger.checks],
        }

    @classmethod
    def from_config(cls, config: dict, custom_objects: dict | None = None) -> DPOptimizer:
        """Makes the optimizer that `get_config` described, its ledger included.

        Args:
          config: a configuration. Without the key "ledger" the optimizer starts afresh.
          custom_objects: Python objects that Keras needs to read it.

        Raises:
          ValueError: if arguments without a default are missing, as for `compile("ADADP")`.
        """
        config = dict(config)
        require_arguments(cls, config)
        segments, checks_of = config.pop("ledger", None), config.pop("ledger_checks", [])
        others, fewest = config.pop("other_releases", []), config.pop("fewest_units", None)
        chosen = config.pop("chosen_by_search", False)
        optimizer = super().from_config(config, custom_objects)
        if segments is not None:
            # All of them: the release of the side information is among them.
            optimizer.ledger.other_events = [dp_accounting.GaussianDpEvent(n) for n in others]
            optimizer.ledger.restore(segments, checks_of)
            optimizer.ledger.fewest_units = fewest
            optimizer.ledger.chosen_by_search = chosen
            optimizer._note_ledger(trained_variables_of_loaded_model())
        return optimizer


class RateAdaptingOptimizer(DPOptimizer):
    """Base of private optimizers that set their learning rate, so that nothing else may."""

    adapts_learning_rate = True

    @property
    def learning_rate(self) -> Any:
        """The adapted rate. Callbacks that set rates read it first, and get an error."""
        refusals.refuse_rates(self, running_callbacks())
        return super().learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        super(RateAdaptingOptimizer, type(self)).learning_rate.fset(self, value)


def _one_at_a_time() -> contextlib.AbstractContextManager:
    """Lets one thread at a time build an optimizer, except replicas' threads, which cooperate."""
    if num_replicas() == 1:
        return _building
    return contextlib.nullcontext()


def _layers_of(variables: Sequence[tf.Variable], clipping: Clipping) -> list[str]:
    """The layer of each variable; warns if clipping by layer takes several layers for one."""
    paths = collections.Counter(path_of(v) for v in variables)
    alike = [path for path, count in paths.items() if count > 1]
    if alike and isinstance(clipping, PerLayerClipping):
        warnings.warn(
            f"Several variables have the name {', '.join(alike)}. Per-layer clipping tells layers "
            "apart by name, so it clips the layers of these variables as one, within the share of "
            "one. The guarantee holds. Give layers different names to clip each on its own.",
            stacklevel=level_of_caller(),
        )
    return [layer_path_of(v) for v in variables]


def _has_public_size(losses: tf.Tensor, number: Number | None) -> bool | tf.Tensor:
    """Whether the number of rows is known to be no random one, a bool or a bool scalar.

    It is public if all batches share it, as those do for which `fit` traces a step of that size,
    and if our samplers padded the batch to it.
    """
    unknown = tf.executing_eagerly() or losses.shape[0] is None
    if not unknown and (is_in_fit() or lacks_weights(losses)):
        return True
    # That padding fills batches is no secret, so the searches for data may end here.
    return False if number is None else vouch_for(number.marked)


def _rounded(gradient: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
    """Converts a released gradient to the type of its variable.

    Variables of 16 bits have less precision than the noise needs. Rounding the sum over replicas is
    post-processing of the release, but the gradient of one replica has only a part of the noise. So
    such gradients are summed before that, and each replica returns an equal part of the sum.
    """
    if num_replicas() > 1 and variable.dtype.size < gradient.dtype.size:
        gradient = total(gradient) / num_replicas()
    return tf.cast(gradient, variable.dtype)


def _with_penalties(
    noisy: Sequence, penalties: Sequence, scale: Sequence | None
) -> list[tf.Tensor | None]:
    """Adds gradients that depend on no example, and so need neither clipping nor noise.

    Every replica has them, and the sum over replicas must contain them once. They are scaled like
    the other gradients, or the objective would change.
    """
    share = 1 / num_replicas()
    own = [None if p is None else share * p for p in penalties]
    if scale is not None:
        own = [None if p is None else p * tf.cast(a, p.dtype) for p, a in zip(own, scale)]
    return [g if p is None else p if g is None else g + p for g, p in zip(noisy, own)]
