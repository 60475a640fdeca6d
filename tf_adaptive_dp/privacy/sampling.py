"""How batches are drawn: `tf.data` of it for `fit`, and the ε that each way of drawing allows.

A sampling is a frozen dataclass of public values. The data, the number of examples and the secret
key of the draws come at the call, so nothing private gets into a configuration.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Callable

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp.privacy import accounting, batches
from tf_adaptive_dp.privacy.draws import Sampling
from tf_adaptive_dp.privacy.fixed_size import FixedSizeSampling, ShuffledEpochs, fixed_size_epsilon
from tf_adaptive_dp.privacy.ledger import Ledger, Segment
from tf_adaptive_dp.privacy.poisson import PoissonSampling, refuse_microbatches

__all__ = [
    "FixedSizeSampling",
    "PoissonSampling",
    "Sampling",
    "ShuffledEpochs",
    "fixed_size_batches",
    "poisson_batches",
    "shuffled_batches",
]

LABELS = ("shuffled", "poisson", "fixed")


def epsilon_spent(
    sampling: Sampling | str,
    ledger: Any,
    num_examples: int,
    delta: float,
    *,
    accountant: str = "rdp",
) -> float:
    """ε of a ledger for the sampling that was used.

    Guarantee: that of the sampling's class. A label alone, of `LABELS`, is the caller's word:
    nothing is checked but that `"poisson"` has no microbatches, and it means that no batch was
    truncated.
    """
    check_sampling(sampling)
    if sampling == "poisson":
        refuse_microbatches(ledger)
    if isinstance(sampling, Sampling):
        return sampling.epsilon_spent(ledger, num_examples, delta, accountant=accountant)
    if sampling == "fixed":
        return fixed_size_epsilon(ledger, num_examples, delta, accountant)
    passes = sampling != "poisson"
    return accounting.epsilon_spent(
        ledger, num_examples, delta, accountant=accountant, passes=passes
    )


def releases_left(
    sampling: Sampling | str,
    ledger: Any,
    noise_multiplier: float,
    batch_size: float,
    num_examples: int,
    epsilon: float,
    delta: float,
    *,
    accountant: str = "rdp",
) -> int:
    """How many more releases a budget allows; `accounting.releases_left` for any sampling.

    Guarantee: with so many more ε stays within the budget, in the sense of `epsilon_spent`; with
    one more it does not. The `steps` of a sampling are no limit here.
    """
    check_sampling(sampling)
    if isinstance(sampling, Sampling):
        sampling.check_ledger(ledger, num_examples)
        to_come = [(noise_multiplier, batch_size, 1)]
        sampling.check_ledger(SimpleNamespace(segments=to_come, other_events=()), num_examples)
        account = sampling.account
    elif sampling == "fixed":
        account = fixed_size_epsilon
    elif sampling == "poisson":
        refuse_microbatches(ledger)
    if label_of(sampling) == "shuffled" or sampling == "poisson":
        return accounting.releases_left(
            *(ledger, noise_multiplier, batch_size, num_examples, epsilon, delta),
            accountant=accountant,
            passes=sampling != "poisson",
        )
    segments, events = accounting.counted_ledger(ledger, num_examples, passes=False)

    def fits(n: int) -> bool:
        then = Ledger.extended(segments, Segment(noise_multiplier, batch_size, n))
        ledger = SimpleNamespace(segments=then, other_events=events)
        return account(ledger, num_examples, delta, accountant) <= epsilon

    return accounting.largest(fits)


def check_sampling(sampling: Sampling | str) -> Sampling | str:
    """Returns `sampling` if it is a sampling or a label of one; raises ValueError if not."""
    if isinstance(sampling, Sampling):
        return sampling
    return checks.choice("sampling", sampling, LABELS)


def label_of(sampling: Sampling | str) -> str:
    """`"poisson"`, `"fixed"` or `"shuffled"`."""
    return getattr(sampling, "label", sampling)


def poisson_batches(
    data: Any,
    sampling: PoissonSampling,
    *,
    start_step: int = 0,
    gradient_accumulation_steps: int = 1,
    preprocess: Callable[[Any], tuple] | None = None,
    padding: tuple | None = None,
    key: bytes | None = None,
) -> tf.data.Dataset:
    """Poisson batches (x, y, sample_weight) for `fit`, all of one static shape.

    A batch has `sampling.max_batch_size` rows, unless it is divided: the examples drawn, in random
    rows, and between them padding with sample weight 0, whose losses and gradients are exactly zero
    under a loss with `reduction="none"`, so that the mechanism counts it as absent. The zeros have
    random signs, by which the optimizer knows a draw that comes again. Empty batches come too, and
    have to be released.

    Padding is zeros (empty strings), which are public. A real example would not be: weight 0 times
    an infinite loss is NaN, and shows. If all zeros are no proper input of the model (log 0, the
    norm of 0), pass a public example as `padding`.

    Guarantee: every example joins each batch independently with probability q, up to truncation,
    and its row says nothing about the others, see `PoissonSampling`. Each iterator has a sequence
    of its own, so no draw comes twice; that of the first one is a pure function of key and step.
    Without a seed or `key` the key is made anew by each call and kept nowhere, so a resumed run
    draws new batches, which ε allows, since batches are independent. To continue the very same
    sequence make a key (`draws.new_key()`), pass it to both calls, and keep it where the data are,
    not in a checkpoint that is given away.

    Args:
      data: `(x, y)` or `(x, y, sample_weight)` of arrays, or nests of arrays, that share their
        first axis; or anything with `__len__` and `__getitem__` of single examples (or of lists of
        indices, or `__getitems__`), such as `tfds.data_source`. Shapes and dtypes are taken from
        the first example and count as public. Arrays of up to 2 GiB in all are copied, so that
        TensorFlow can gather rows by itself; of larger ones Python does, which takes longer.
      sampling: q, the size of a batch, and the number of batches.
      start_step: the number of draws to pass over, made in an earlier run.
      gradient_accumulation_steps: k, the number of batches that each draw comes as, one after the
        other; the optimizer has to accumulate as many. Each has ceil(`max_batch_size` / k) rows,
        and the examples drawn are in random rows of all k.
      preprocess: makes (x, y) or (x, y, sample_weight) of one example of a source.
      padding: (x, y) of one public example, instead of zeros.
      key: 32 secret bytes, to continue a sequence.

    Returns:
      A dataset of k · (`sampling.steps` - `start_step`) batches. Pass `steps_per_epoch` to `fit`.

    Raises:
      TypeError, ValueError: for an argument of the wrong type or shape, or out of its range.

    Example:
      >>> import numpy as np
      >>> from tf_adaptive_dp.privacy.sampling import PoissonSampling, poisson_batches
      >>> sampling = PoissonSampling(0.5, max_batch_size=4, steps=1, seed=1)
      >>> x, y = np.arange(1, 7, dtype=np.float32), np.arange(6)
      >>> [[t.tolist() for t in b] for b in poisson_batches((x, y), sampling).as_numpy_iterator()]
      [[[3.0, 0.0, 0.0, 0.0], [2, 0, 0, 0], [1.0, -0.0, -0.0, -0.0]]]
    """
    _require(sampling, PoissonSampling)
    source = batches.source(data, preprocess)
    return batches.dataset(
        *(source, sampling, start_step, key, gradient_accumulation_steps),
        masked=True,
        padding=padding,
    )


def fixed_size_batches(
    data: Any,
    sampling: FixedSizeSampling,
    *,
    start_step: int = 0,
    gradient_accumulation_steps: int = 1,
    preprocess: Callable[[Any], tuple] | None = None,
    key: bytes | None = None,
) -> tf.data.Dataset:
    """Batches (x, y[, sample_weight]) for `fit`, each a random subset of a fixed size.

    Guarantee: all subsets are equally likely and different batches independent; see
    `FixedSizeSampling` for the adjacency and `poisson_batches` for keys and iterators.

    Args:
      data: see `poisson_batches`, as for the other arguments.
      sampling: size and number of the batches.
      start_step: the number of draws to pass over, made in an earlier run.
      gradient_accumulation_steps: k, a divisor of the batch size: each draw comes as k batches.
      preprocess: makes (x, y) or (x, y, sample_weight) of one example of a source.
      key: 32 secret bytes, to continue a sequence.

    Returns:
      A dataset of k · (`sampling.steps` - `start_step`) batches.

    Raises:
      TypeError, ValueError: for an argument of the wrong type or shape, or out of its range.
    """
    _require(sampling, FixedSizeSampling)
    source = batches.source(data, preprocess)
    _require_examples(len(source), sampling.batch_size)
    return batches.dataset(source, sampling, start_step, key, gradient_accumulation_steps)


def shuffled_batches(
    data: Any,
    sampling: ShuffledEpochs,
    *,
    start_step: int = 0,
    gradient_accumulation_steps: int = 1,
    preprocess: Callable[[Any], tuple] | None = None,
    key: bytes | None = None,
) -> tf.data.Dataset:
    """Batches (x, y[, sample_weight]) for `fit`, of passes over shuffled data.

    Guarantee: no amplification by sampling is proven; see `ShuffledEpochs`. To resume within a
    pass needs the same `key` or seed, or examples come twice in that pass.

    Args:
      data: see `poisson_batches`, as for the other arguments.
      sampling: size and number of the batches.
      start_step: the number of draws to pass over, made in an earlier run.
      gradient_accumulation_steps: k, a divisor of the batch size: each draw comes as k batches.
      preprocess: makes (x, y) or (x, y, sample_weight) of one example of a source.
      key: 32 secret bytes, to continue a sequence.

    Returns:
      A dataset of k · (`sampling.steps` - `start_step`) batches.

    Raises:
      TypeError, ValueError: for an argument of the wrong type or shape, or out of its range.
    """
    _require(sampling, ShuffledEpochs)
    source = batches.source(data, preprocess)
    _require_examples(len(source), sampling.batch_size)
    return batches.dataset(source, sampling, start_step, key, gradient_accumulation_steps)


def _require(sampling: Any, kind: type[Sampling]) -> None:
    if not isinstance(sampling, kind):
        raise TypeError(f"`sampling` must be a {kind.__name__}. Received: sampling={sampling!r}")


def _require_examples(num_examples: int, batch_size: int) -> None:
    if num_examples < batch_size:
        raise ValueError(
            "`data` must hold at least one batch; make `batch_size` smaller. Received: "
            f"{num_examples} examples, batch_size={batch_size!r}"
        )
