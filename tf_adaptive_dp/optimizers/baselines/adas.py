"""AdaS: AdaDPS without privacy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_adaptive_dp._keras.variables import native
from tf_adaptive_dp.mechanism import replicas
from tf_adaptive_dp.optimizers.given_loss import loss_and_variables
from tf_adaptive_dp.optimizers.preconditioning import Preconditioning, check_side_information
from tf_adaptive_dp.optimizers.registration import FullSignature, register
from tf_adaptive_dp.side_information.provenance import SideInformation


@register
class AdaS(FullSignature, tf.keras.optimizers.SGD):
    """SGD on preconditioned gradients. It gives NO PRIVACY: it neither clips nor adds noise.

    AdaS uses the preconditioner of `AdaDPS` in ordinary training, to measure what the side
    information is worth by itself. With the gradient g of the mean loss:

        θ ← θ − α·g / A

    In the Adam form the numerator is β·g + (1 − β)·m.

    Guarantee: none. AdaS has no ledger, and `PrivacyMonitor` and `PrivacyBudget` reject it.

    Args:
      side_information: `FixedPreconditioner` or `PublicGradients`. Also pass `PublicGradients` to
        `fit` as a callback.
      learning_rate: α, a number or a schedule.
      name: the optimizer's name; the default is a warning.
      **kwargs: the arguments of `tf.keras.optimizers.SGD`, such as `momentum`.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of its range.

    References:
      - Li et al., "Private Adaptive Optimization with Side Information" (2022), arXiv:2202.05963,
        Appendix C.2.

    >>> from tf_adaptive_dp.side_information import FixedPreconditioner
    >>> AdaS(FixedPreconditioner({}, provenance="public"), learning_rate=0.1)
    <AdaS, which gives no privacy>
    """

    def __init__(
        self,
        side_information: SideInformation,
        learning_rate: Any = 0.01,
        *,
        name: str = "AdaS_not_private",
        **kwargs: Any,
    ):
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        side_information = check_side_information(side_information)
        if side_information.learns:
            raise ValueError(
                "`side_information` must not depend on released gradients, since `AdaS` releases "
                f"none. Received: side_information={side_information!r}. Choose `PublicGradients` "
                "or a `FixedPreconditioner`, or a private optimizer."
            )
        self._preconditioning = Preconditioning(side_information)

    def __repr__(self) -> str:
        return "<AdaS, which gives no privacy>"

    @property
    def side_information(self) -> SideInformation | None:
        """What preconditions gradients."""
        return self._preconditioning.side_information

    def is_between_steps(self) -> bool:
        """Whether side information may change now: always, as each minibatch is one step."""
        return self._preconditioning.is_between_steps(self.iterations)

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Creates all slots, those of the side information first.

        Args:
          var_list: the variables to train. Without any, as when Keras 3 loads an `.h5` file, it
            does nothing: the variables come later.
        """
        if not var_list:
            return
        self._preconditioning.build_in(self, var_list)
        super().build(var_list)

    def compute_gradients(
        self,
        loss: tf.Tensor | Callable[[], tf.Tensor],
        var_list: Sequence[tf.Variable] | Callable[[], Sequence[tf.Variable]],
        tape: tf.GradientTape | None = None,
    ) -> list[tuple[tf.Tensor | None, tf.Variable]]:
        """The gradients of the mean loss. Not private.

        Args:
          loss: the mean loss, a scalar; or [B], the loss of each example, which is averaged here;
            or a function that returns either.
          var_list: the variables, or a function that returns them.
          tape: the tape that recorded `loss`; needed if `loss` is a tensor.

        Returns:
          Pairs of gradient and variable.

        Raises:
          ValueError: if `tape` is missing.
        """
        loss, variables, tape = loss_and_variables(loss, var_list, tape)
        gradients = tape.gradient(loss, [native(v) for v in variables])
        if loss.shape.rank:
            # `tape` sums the gradients of a vector, and Keras those of all replicas.
            size = tf.cast(replicas.total(tf.size(loss)), tf.float32)
            gradients = [None if g is None else g / tf.cast(size, g.dtype) for g in gradients]
        return list(zip(gradients, variables))

    @tf.autograph.experimental.do_not_convert
    def minimize(
        self,
        loss: tf.Tensor | Callable[[], tf.Tensor],
        var_list: Sequence[tf.Variable] | Callable[[], Sequence[tf.Variable]],
        tape: tf.GradientTape | None = None,
    ) -> None:
        """Makes one step, also in Keras 3; see `compute_gradients` for the arguments."""
        self.apply_gradients(self.compute_gradients(loss, var_list, tape))

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """The mean loss, which Keras 3 differentiates in place of calling `compute_gradients`.

        Args:
          loss: the mean loss, a scalar; or [B], the loss of each example.
        """
        if loss.shape.rank:
            # Keras sums the gradients of all replicas.
            size = replicas.total(tf.size(loss))
            loss = tf.reduce_sum(loss) / tf.cast(size, loss.dtype)
        return super().scale_loss(loss)

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, *rate: Any) -> None:
        """Takes the SGD step of one variable along g / A.

        Args:
          gradient: g, the gradient of the mean loss.
          variable: the variable.
          *rate: the learning rate, which Keras 3 passes.
        """
        super().update_step(self._preconditioning.apply(self, gradient, variable), variable, *rate)

    def get_config(self) -> dict:
        """The arguments that make the same optimizer; its state is not among them."""
        return {**super().get_config(), **self._preconditioning.get_config()}
