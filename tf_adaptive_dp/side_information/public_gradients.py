"""Statistics of the model's gradients on public data, refreshed during training."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any, Callable

import dp_accounting
import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.callers import running_fit
from tf_adaptive_dp._keras.datasets import holds_the_same
from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp._keras.models import uncounted_loss_of_step
from tf_adaptive_dp._keras.optimizers import has_slots_for, slot_index
from tf_adaptive_dp._keras.tracebacks import level_of_caller
from tf_adaptive_dp._keras.variables import dense_gradients
from tf_adaptive_dp.accounting.ledger import has_ledger
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.api import check_loss
from tf_adaptive_dp.gradients.batch_axis.analysis import follow
from tf_adaptive_dp.gradients.scalar_losses import take_apart
from tf_adaptive_dp.side_information.disjoint import check_disjoint, copies_of_first
from tf_adaptive_dp.side_information.provenance import SideInformation, check_provenance
from tf_adaptive_dp.update_rules import effective_step_size, second_moment

_AMONG_PRIVATE = (
    "The first {number} examples of the public data set of PublicGradients have the features of "
    "examples that are trained on. If they are the same, nothing protects them: their gradients "
    "enter training without noise. Take them out of the private data, as "
    "`side_information.split_public` does; `private_dataset=...` compares all. If they are others "
    "that happen to be equal, nothing is wrong."
)

RULES = (*second_moment.RULES, "gradient")


def _mean_gradients(
    model: tf.keras.Model, batch: Any, is_private: bool, expected_batch_size: float | None
) -> list[tf.Tensor]:
    """The gradients of the model's mean loss on a batch; its metrics do not count the batch.

    Optimizers without privacy follow a scalar as Keras reduces it, and so does this for them.
    """
    with tf.GradientTape() as tape:
        try:
            loss = uncounted_loss_of_step(model, batch)
        except ValueError as error:
            if not model.losses or "Shapes must be equal rank" not in str(error):
                raise
            raise ValueError(
                '`model` must not be compiled with a loss of `reduction="none"` if its layers '
                "have regularizers, whose penalties Keras cannot add to it. Leave `reduction` "
                "out: private steps find the losses of examples in their mean. Received: "
                f"a loss for each example, and {len(model.losses)} scalars to add to it"
            ) from None
        if loss.shape.rank != 0:
            loss = tf.reduce_mean(loss)
        elif is_private:
            loss = _mean_over_examples(loss, expected_batch_size)
    return dense_gradients(tape, loss, model.trainable_variables)


@tf.autograph.experimental.do_not_convert
def _mean_over_examples(loss: tf.Tensor, expected_batch_size: float | None) -> tf.Tensor:
    """The mean of the losses of which Keras made a sum or a mean, as private steps take it.

    Sums would grow with the public batch, whose size is not that of the private ones.
    """
    check_loss(loss)
    vector, _, penalties = take_apart(loss, *follow(loss), expected_batch_size)
    shared = [p.term * tf.cast(p.factor, p.term.dtype) for p in penalties]
    return tf.add_n([tf.reduce_mean(vector), *(tf.cast(t, vector.dtype) for t in shared)])


def _unwrapped(model: tf.keras.Model) -> tf.keras.optimizers.Optimizer:
    """The model's optimizer; Keras may have wrapped it to scale losses in float16."""
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


@keras.saving.register_keras_serializable("tf_adaptive_dp")
class PublicGradients(SideInformation, tf.keras.callbacks.Callback):
    """Side information from public data, and the callback that refreshes it in `fit`.

    Every `every` minibatches the callback computes the gradient g of the model's mean loss on the
    next public batch, with the penalties and `add_loss` terms of a step of `fit`. With
    `reduction="sum"`, too, g is that of the mean. It updates statistics by one of these rules:

    - `"rmsprop"`: v ← β·v + (1 − β)·g², with A = √(v + ε).
    - `"adagrad"`: v ← v + g², with A = √(v + ε).
    - `"adam"`: like RMSProp, and m ← β·m + (1 − β)·g. Then gᵢ ← (β·gᵢ + (1 − β)·m) / A.
    - `"gradient"`: keeps g itself, for `PDADPMD`, and preconditions nothing.

    The public data may resemble the private data, come from a related source, or come from people
    who waived protection. Its batches need neither the size of the private ones nor sample weights.

    Guarantee: only `dataset` is read. It must not overlap the private data, and its examples are
    not protected. With `private_dataset` the constructor checks that no example is in both. `fit`
    refuses only a data set of all the examples of `dataset`, shuffled, changed or batched anew, and
    warns if the first examples of `dataset` are in the arrays that are trained on. What
    `poisson_batches` drew outside of a plan shows it neither.

    Pass the same object to the optimizer and to `fit`:

        public = PublicGradients(public_dataset, provenance="public")
        model.compile(AdaDPS(public, l2_norm_clip=1.0, noise_multiplier=1.1), loss=...)
        model.fit(private_dataset, callbacks=[public])

    Refreshes happen only between steps of the optimizer: the two minibatches of an `ADADP` step,
    and the parts of an accumulated batch, share A. With `steps_per_execution` > 1 a refresh waits
    for the next execution. After a delayed refresh, the count of `every` minibatches starts again.

    Args:
      dataset: a `tf.data.Dataset` of batches, as `fit` takes them. It is repeated.
      rule: `"rmsprop"`, `"adam"`, `"adagrad"` or `"gradient"`.
      beta: β in [0, 1).
      epsilon: ε > 0.
      every: the number of minibatches between refreshes. A refresh costs a backward pass over the
        public batch.
      provenance: `"public"`, or the `dp_accounting.DpEvent` of the release of the data.
      private_dataset: batches of the private examples. The constructor checks that none of them is
        in `dataset`, and does not keep them. `None` skips the check.

    Raises:
      NotPrivateError: if `provenance` is missing, or an example is in both datasets.
      TypeError, ValueError: if an argument has the wrong type or is out of its range.

    References:
      - Li et al., "Private Adaptive Optimization with Side Information" (2022), arXiv:2202.05963,
        section 4, option 1.

    >>> data = tf.data.Dataset.from_tensors(([[1.0]], [1.0]))
    >>> PublicGradients(data, rule="adam", provenance="public").rule
    'adam'
    """

    def __init__(
        self,
        dataset: tf.data.Dataset | None,
        rule: str = "rmsprop",
        beta: float = 0.9,
        epsilon: float = 1e-8,
        every: int = 1,
        *,
        provenance: str | dp_accounting.DpEvent | None = None,
        private_dataset: tf.data.Dataset | None = None,
    ):
        super().__init__()
        self.provenance = check_provenance(provenance)
        if dataset is not None and not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"`dataset` must be a `tf.data.Dataset` of batches. Received: dataset={dataset!r}"
            )
        self.dataset = dataset
        self.rule = checks.choice("rule", rule, RULES)
        self.beta = checks.number("beta", beta, 0)
        if self.beta >= 1:
            raise ValueError(f"`beta` must be below 1. Received: beta={beta!r}")
        self.epsilon = checks.number("epsilon", epsilon, 0, strict=True)
        self.every = checks.integer("every", every, 1)
        self._prepared_for = None
        if private_dataset is not None:
            self._check_disjoint(private_dataset)

    def _check_disjoint(self, private_dataset: tf.data.Dataset) -> None:
        if self.dataset is None or not isinstance(private_dataset, tf.data.Dataset):
            raise TypeError(
                "`private_dataset` must be a `tf.data.Dataset` of batches, to compare with "
                f"`dataset`. Received: private_dataset={private_dataset!r}, "
                f"dataset={self.dataset!r}"
            )
        check_disjoint(self.dataset, private_dataset)

    def refuse_private_data(self, data: Any) -> None:
        """Rejects the examples of `dataset` as those to train on in private.

        It warns if `dataset` seems to be a part of arrays that are trained on.

        Args:
          data: what `fit` was given to train on.

        Raises:
          NotPrivateError: if `data` and `dataset` are made of the same data set.
        """
        if self.dataset is None:
            return
        if isinstance(data, tf.data.Dataset) and holds_the_same(data, self.dataset):
            raise NotPrivateError(
                "The public data set of PublicGradients is the one that is trained on, and its "
                "gradients enter training without noise, so no example is protected. Received: "
                f"dataset={self.dataset!r}, and {data!r} of the same examples. Use other public "
                "data, or take some of these out: `side_information.split_public`."
            )
        number = copies_of_first(self.dataset, data)
        if number:
            message = _AMONG_PRIVATE.format(number=number)
            warnings.warn(message, stacklevel=level_of_caller())

    def build(
        self, variables: Sequence[tf.Variable], add_slot: Callable[..., tf.Variable]
    ) -> list[list[tf.Variable]]:
        """Creates the number of refreshes, v or g, and for Adam m; see `SideInformation`."""
        moments = 2 if self.rule == "adam" else 1
        return [
            [add_slot(variables[0], "num_refreshes", shape=[])],
            *([add_slot(v, f"public_moment_{k + 1}") for v in variables] for k in range(moments)),
        ]

    def scale_and_shift(
        self, state: list[list[tf.Variable]], indices: Sequence[int]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor] | None]:
        """1/A, or for Adam β/A and the shift (1 − β)/β·m; see `SideInformation`.

        The rule `"gradient"` gives the scale 1 and the shift g.
        """
        (num_refreshes,), seconds, *firsts = state
        check = tf.debugging.Assert(
            num_refreshes > 0,
            [
                "PublicGradients has seen no public data. Pass it to `fit(callbacks=[...])` as "
                "well, or call its `update(model)` before each step."
            ],
        )
        with tf.control_dependencies([check] if check is not None else []):
            seconds = [tf.cast(seconds[i], tf.float32) for i in indices]
        if self.rule == "gradient":
            return [tf.ones_like(g) for g in seconds], seconds
        scales = [1.0 / second_moment.preconditioner(v, self.epsilon) for v in seconds]
        if not firsts or self.beta == 0:
            return scales, None
        ratio = (1.0 - self.beta) / self.beta
        shifts = [ratio * tf.cast(firsts[0][i], tf.float32) for i in indices]
        return [self.beta * scale for scale in scales], shifts

    def update(self, model: tf.keras.Model) -> None:
        """Refreshes the statistics with the next public batch.

        In the middle of a step of the optimizer it does nothing, since the minibatches of a step
        share the statistics.

        Args:
          model: the compiled model whose optimizer holds this object.

        Raises:
          NotPrivateError: if the loss is no sum or mean over examples, so that private steps would
            be refused, too.
          ValueError: if there is no dataset, as after loading, or it is empty, or another optimizer
            holds this.
        """
        optimizer = _unwrapped(model)
        if getattr(optimizer, "side_information", None) is not self:
            raise ValueError(
                "The model's optimizer must be the one that holds this PublicGradients: pass it "
                f"as `side_information`. Received: {optimizer!r}"
            )
        if not optimizer.is_between_steps():
            return
        if self._prepared_for is not optimizer:
            self._prepare(model, optimizer)
        self._refresh(next(self._batches))

    def _prepare(self, model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer) -> None:
        if self.dataset is None:
            raise ValueError(
                "PublicGradients was loaded without its dataset. Set "
                "`model.optimizer.side_information.dataset` to the public data first."
            )
        batches = iter(self.dataset.repeat())
        first = next(batches, None)
        if first is None:  # Keras would take the end of the data for that of its own
            raise ValueError(
                "`dataset` must hold at least one batch: check its filters, and `drop_remainder`. "
                f"Received: an empty dataset, {self.dataset!r}"
            )
        if not model.built:
            with model.distribute_strategy.scope():
                model(tf.keras.utils.unpack_x_y_sample_weight(first)[0], training=False)
        model.optimizer.build(model.trainable_variables)
        self._prepared_for = optimizer
        self._batches = itertools.chain([first], batches)

        strategy = model.distribute_strategy
        is_private = has_ledger(optimizer)
        expected_batch_size = optimizer.expected_batch_size if is_private else None

        def refresh(batch: Any) -> None:
            gradients = _mean_gradients(model, batch, is_private, expected_batch_size)
            if strategy.num_replicas_in_sync > 1:  # workers may read the data in different orders
                context = tf.distribute.get_replica_context()
                gradients = context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
            # The optimizer may have been built for more variables, or in another order. One that it
            # was not built for is refused by the step.
            pairs = zip(model.trainable_variables, gradients)
            known = [(slot_index(optimizer, v), g) for v, g in pairs if has_slots_for(optimizer, v)]
            self._record(optimizer.side_information_state, known)

        self._refresh = tf.function(lambda batch: strategy.run(refresh, args=(batch,)))

    def _record(
        self, state: list[list[tf.Variable]], gradients: Sequence[tuple[int, tf.Tensor]]
    ) -> None:
        """Takes in the public gradients of variables, each with its place in the state."""
        (num_refreshes,), seconds, *firsts = state
        for k, g in gradients:
            moment = seconds[k]
            if self.rule == "gradient":
                moment.assign(g)
                continue
            moment.assign(second_moment.next_second_moment(self.rule, moment, g, self.beta))
            for of_variables in firsts:
                first = of_variables[k]
                first.assign(effective_step_size.first_moment(first, g, self.beta))
        num_refreshes.assign_add(1)

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Rejects training on the public data; called by Keras."""
        if has_ledger(_unwrapped(self.model)):
            fit = running_fit(self.model.optimizer)
            self.refuse_private_data(None if fit is None else fit.x)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Counts minibatches anew, since a resumed epoch may begin in its middle."""
        self._next_refresh = 0

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Refreshes if a refresh is due; called by Keras."""
        if batch < self._next_refresh:
            return
        self.update(self.model)
        optimizer = _unwrapped(self.model)
        if optimizer.is_between_steps():
            # Keras counts each part of an accumulated batch.
            parts = getattr(optimizer, "parts_per_batch", 1)
            self._next_refresh = batch + self.every * parts

    def get_config(self) -> dict:
        """The arguments except for the dataset, which must be set again after loading."""
        return {
            "dataset": None,
            "rule": self.rule,
            "beta": self.beta,
            "epsilon": self.epsilon,
            "every": self.every,
            "provenance": self.serialized_provenance(),
        }
