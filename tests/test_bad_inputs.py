"""Wrong arguments all over the public API: the error names them, and no state changes."""

import dataclasses
import functools
import math
from fractions import Fraction
from types import SimpleNamespace

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tests.helpers.unchanged import assert_refused
from tf_adaptive_dp.accounting.releases import Releases

X, Y = catalogue.data()
NAN, INF = math.nan, math.inf
LEDGER = Releases([(2.0, 100.0, 50)])
TRIAL = dp_accounting.GaussianDpEvent(20.0)
BANDS = dp.accounting.BandedNoise(4)
POISSON = dp.PoissonSampling(0.25, 33, steps=20)
CANARIES = dp.auditing.Canaries(X, Y, seed=1)
CLASS_ERROR = "`keras_optimizer_class` must be a subclass .*Received: "
BATCH = (X[:4], Y[:4])


def sgd(clip=1.0, noise=1.0, *args, **kwargs):
    return dp.DPSGD(clip, noise, *args, **kwargs)


def public(**kwargs):
    return dp.side_information.PublicGradients(None, provenance="public", **kwargs)


def fixed(preconditioners, provenance="public"):
    return dp.side_information.FixedPreconditioner(preconditioners, provenance=provenance)


def mixed(mixing):
    return dp.optimizers.baselines.PDADPMD(public(rule="gradient"), 1, 1, mixing=mixing)


def built(preconditioner):
    """The error of a preconditioner's values comes with the variables."""
    dp.AdaDPS(fixed(preconditioner), 1.0, 1.0).build([tf.Variable(tf.ones([2]), name="w")])


def seg(*segments, **kwargs):
    return SimpleNamespace(segments=segments, other_events=(), **kwargs)


def scored(scores, **kwargs):
    return dp.auditing.one_run_epsilon(scores, [True, False], 1e-5, **kwargs)


def audit(**kwargs):
    return dp.auditing.PrivacyAudit(CANARIES, **{"delta": 1e-5, **kwargs})


def inference(**kwargs):
    model, loss = catalogue.mlp(), catalogue.loss()
    return dp.auditing.membership_inference(model, kwargs.pop("loss", loss), BATCH, BATCH, **kwargs)


def compared(loss=None, batch=BATCH, **kwargs):
    loss = loss or catalogue.loss()
    return dp.validation.check_per_example(catalogue.mlp(), batch, loss=loss, **kwargs)


def validated(loss=None, batch=BATCH, model=None):
    model, loss = model or catalogue.mlp(), loss or catalogue.loss()
    return dp.validate(model, batch, loss=loss, optimizer=sgd())


def received(name, value):
    """The name of the argument and what was received."""
    return rf"`{name}` .*Received: {name}={value}"


T, V, P = TypeError, ValueError, dp.NotPrivateError

OPTIMIZERS = {
    "clip str": (lambda: sgd("1"), T, received("l2_norm_clip", "'1'")),
    "clip None": (lambda: sgd(None), T, received("l2_norm_clip", "None")),
    "clip bool": (lambda: sgd(True), T, received("l2_norm_clip", "True")),
    "clip nan": (lambda: sgd(NAN), V, received("l2_norm_clip", "nan")),
    "clip zero": (lambda: sgd(0), V, received("l2_norm_clip", "0")),
    "rate negative": (lambda: sgd(learning_rate=-1), V, received("learning_rate", "-1")),
    "rate nan": (lambda: sgd(learning_rate=NAN), V, received("learning_rate", "nan")),
    "noise negative": (lambda: sgd(1, -1), V, received("noise_multiplier", "-1")),
    "noise inf": (lambda: sgd(1, INF), V, received("noise_multiplier", "inf")),
    "noise tensor": (lambda: sgd(1, tf.ones([])), T, received("noise_multiplier", "<tf.Tensor")),
    "groups float": (lambda: sgd(1, 1, 2.0), T, received("num_microbatches", "2.0")),
    "size zero": (lambda: sgd(expected_batch_size=0), V, received("expected_batch_size", "0")),
    "size str": (lambda: sgd(expected_batch_size="8"), T, received("expected_batch_size", "'8'")),
    "clipping ghost": (lambda: sgd(clipping="ghost"), V, received("clipping", "'ghost'")),
    "clipping array": (lambda: sgd(clipping=np.ones(2)), V, received("clipping", "array")),
    "clipping dict": (lambda: sgd(clipping={"hidden": 1.0}), V, received("clipping", "{")),
    "gradients": (lambda: sgd(gradients="ghost"), V, received("gradients", "'ghost'")),
    "parts": (
        lambda: sgd(gradient_accumulation_steps=1.5),
        T,
        received("gradient_accumulation_steps", "1.5"),
    ),
    "loss scale 3": (lambda: sgd(loss_scale=3), V, received("loss_scale", "3")),
    "secure str": (lambda: sgd(secure_noise="no"), T, received("secure_noise", "'no'")),
    "secure None": (lambda: sgd(secure_noise=None), T, received("secure_noise", "None")),
    "secure seed": (lambda: sgd(secure_noise=True, seed=1), V, "no `seed`.*Received: .*seed=1"),
    "seed 2**63": (lambda: sgd(seed=2**63), V, received("seed", "9223372036854775808")),
    "seed bool": (lambda: sgd(seed=True), T, received("seed", "True")),
    "discard": (lambda: dp.ADADP(1, 1, discard="no"), T, received("discard", "'no'")),
    "no noise": (lambda: dp.DPAdamWOSM(1, 0.0), V, received("noise_multiplier", "0.0")),
    "beta_1": (lambda: dp.DPAdamWOSM(1, 1, beta_1=-0.1), V, received("beta_1", "-0.1")),
    "information class": (
        lambda: dp.AdaDPS(dp.side_information.FixedPreconditioner, 1, 1),
        T,
        received("side_information", "<class"),
    ),
    "information dict": (
        lambda: dp.AdaDPS({"w": 1.0}, 1, 1),
        T,
        received("side_information", "{'w': 1.0}"),
    ),
    "information of SGD": (
        lambda: sgd(side_information=1.0),
        T,
        received("side_information", "1.0"),
    ),
    "information rule": (
        lambda: sgd(side_information=public(rule="gradient")),
        V,
        "`side_information` must give a preconditioner.*Received: rule='gradient'",
    ),
    "order": (lambda: dp.AdaDPS(fixed({}), 1, 1, order="both"), V, received("order", "'both'")),
    "pub without": (
        lambda: dp.optimizers.baselines.DPRPub(None, 1, 1),
        T,
        received("side_information", "None"),
    ),
    "pub beta_1": (
        lambda: dp.optimizers.baselines.DPAdamPub(fixed({}), 1, 1, beta_1=1.0),
        V,
        received("beta_1", "1.0"),
    ),
    "adas without": (
        lambda: dp.optimizers.baselines.AdaS(0.1),
        T,
        received("side_information", "0.1"),
    ),
    "pda fixed": (
        lambda: dp.optimizers.baselines.PDADPMD(fixed({}), 1, 1, mixing=0.5),
        V,
        "`side_information` must be .*rule='gradient'.*Received: FixedPreconditioner",
    ),
    "pda rule": (
        lambda: dp.optimizers.baselines.PDADPMD(public(), 1, 1, mixing=0.5),
        V,
        "rule='gradient'.*Received: PublicGradients with rule='rmsprop'",
    ),
    "mixing 1.5": (lambda: mixed(1.5), V, received("mixing", "1.5")),
    "mixing -1": (lambda: mixed(-1), V, received("mixing", "-1")),
    "mixing str": (lambda: mixed("cosine"), T, received("mixing", "'cosine'")),
    "mixing steps": (
        lambda: dp.optimizers.baselines.CosineMixing(0),
        V,
        received("num_steps", "0"),
    ),
    "class instance": (
        lambda: dp.make_dp_optimizer_class(tf.keras.optimizers.SGD()),
        T,
        CLASS_ERROR,
    ),
    "class legacy": (
        lambda: dp.make_dp_optimizer_class(tf.keras.optimizers.legacy.Adam),
        T,
        CLASS_ERROR + ".*[lL]egacy",  # in Keras 3 such a name gives a class that warns
    ),
    "class base": (
        lambda: dp.make_dp_optimizer_class(tf.keras.optimizers.Optimizer),
        T,
        "`keras_optimizer_class` must be a subclass that can train",
    ),
    "shares empty": (lambda: dp.PerLayerClipping({}), T, received("shares", "{}")),
    "shares keys": (lambda: dp.PerLayerClipping({1: 1.0}), T, received("shares", "{1: 1.0}")),
    "shares inf": (lambda: dp.PerLayerClipping({"a": INF}), V, r"`shares\['a'\]`.*=inf"),
    "quantile": (lambda: dp.AdaptiveClipping(1.5), V, received("target_quantile", "1.5")),
    "count noise": (
        lambda: sgd(1, 4, clipping=dp.AdaptiveClipping(count_noise_multiplier=1)),
        V,
        "`count_noise_multiplier` must be .*Received: count_noise_multiplier=1",
    ),
    "no provenance": (lambda: fixed({}, None), P, received("provenance", "None")),
    "provenance": (lambda: fixed({}, "own"), P, received("provenance", "'own'")),
    "preconditioners": (lambda: fixed([1.0]), T, received("preconditioners", r"\[1.0\]")),
    "preconditioner str": (lambda: fixed({"w": "x"}), T, "of 'w' must be .*Received: 'x'"),
    "preconditioner 0": (lambda: built({"w": 0.0}), V, "of 'w' must be positive.*Received: 0.0"),
    "preconditioner -1": (lambda: built({"w": [1, -1]}), V, "of 'w' must .*Received: -1.0"),
    "preconditioner nan": (lambda: built({"w": NAN}), V, "of 'w' must .*Received: nan"),
    "preconditioner tiny": (
        lambda: built({"w": 1e-45}),
        V,
        r"its inverse too. Received: 1\.4\d*e-45",
    ),
    "preconditioner shape": (lambda: built({"w": np.ones(3)}), V, r"broadcast .*shape \(3,\)"),
    "preconditioner name": (
        lambda: built({"v": 1.0}),
        V,
        r"`preconditioners` names .*for v; there are w$",
    ),
    "public beta": (lambda: public(beta=1.0), V, received("beta", "1.0")),
    "public every": (lambda: public(every=0), V, received("every", "0")),
    "private data": (
        lambda: public(private_dataset=catalogue.PUBLIC),
        T,
        "`private_dataset` must be .*dataset=None",
    ),
    "public data": (
        lambda: dp.side_information.PublicGradients(X, provenance="public"),
        T,
        received("dataset", "array"),
    ),
}

ACCOUNTING = {
    "q bool": (
        lambda: dp.accounting.epsilon(1, True, 1, 0.1),
        T,
        received("sampling_probability", "True"),
    ),
    "q 2": (lambda: dp.accounting.epsilon(1, 2, 1, 0.1), V, received("sampling_probability", "2")),
    "noise nan": (
        lambda: dp.accounting.epsilon(NAN, 0.1, 1, 0.1),
        V,
        received("noise_multiplier", "nan"),
    ),
    "steps": (lambda: dp.accounting.epsilon(1, 0.1, 1.5, 0.1), T, received("steps", "1.5")),
    "delta 0": (lambda: dp.accounting.epsilon(1, 0.1, 1, 0), V, received("delta", "0")),
    "delta 1": (lambda: dp.accounting.epsilon(1, 0.1, 1, 1), V, received("delta", "1")),
    "delta nan": (lambda: dp.accounting.epsilon(1, 0.1, 1, NAN), V, received("delta", "nan")),
    "accountant": (
        lambda: dp.accounting.epsilon(1, 0.1, 1, 0.1, ["pld"]),
        V,
        received("accountant", r"\["),
    ),
    "no ledger": (
        lambda: dp.epsilon_spent(tf.keras.optimizers.SGD(), 10, 0.1),
        T,
        received("ledger", "<keras"),
    ),
    "few examples": (lambda: dp.epsilon_spent(LEDGER, 50, 0.1), V, "batch_size=100, num_ex.*=50"),
    "negative count": (
        lambda: dp.epsilon_spent(seg((1, 2, -3)), 50, 0.1),
        V,
        received("num_releases", "-3"),
    ),
    "impossible": (
        lambda: dp.noise_multiplier_for(1e-9, 1e-12, 1.0, 10**6),
        V,
        "No noise multiplier up to 1e.06 meets the budget.*Received: epsilon=1e-09",
    ),
    "budget 0": (lambda: dp.noise_multiplier_for(0, 0.1, 0.1, 9), V, received("epsilon", "0")),
    "fixed steps": (lambda: dp.sampling.FixedSizeSampling(3, None), T, received("steps", "None")),
    "shuffled size": (lambda: dp.sampling.ShuffledEpochs(2.5, 3), T, received("batch_size", "2.5")),
    "lengths": (lambda: dp.poisson_batches((X, Y[:5]), POISSON), V, r"`data` .*\[5, 32\]"),
    "dict": (lambda: dp.poisson_batches({"x": X}, POISSON), T, "`data` must .*Received: dict"),
    "dataset": (
        lambda: dp.poisson_batches(tf.data.Dataset.from_tensor_slices(X), POISSON),
        T,
        "Each element of the dataset must be one example, .*Received: ",
    ),
    "empty": (lambda: dp.poisson_batches((X[:0], Y[:0]), POISSON), V, "`data` .*Received: none"),
    "sampling": (lambda: dp.poisson_batches((X, Y), "poisson"), T, received("sampling", "'poi")),
    "start": (
        lambda: dp.poisson_batches((X, Y), POISSON, start_step=20),
        V,
        "`start_step` must be below .*Received: start_step=20, steps=20",
    ),
    "key": (lambda: dp.poisson_batches((X, Y), POISSON, key="k" * 32), V, "`key` must be 32"),
    "padding": (
        lambda: dp.poisson_batches((X, Y), POISSON, padding=3),
        (T, V),
        received("padding", "3"),
    ),
    "preprocess": (
        lambda: dp.poisson_batches([1], POISSON, preprocess=3),
        T,
        received("preprocess", "3"),
    ),
    "parts of fixed": (
        lambda: dp.sampling.fixed_size_batches(
            (X, Y), dp.sampling.FixedSizeSampling(8, 3), gradient_accumulation_steps=3
        ),
        V,
        "Received: gradient_accumulation_steps=3, batch size 8",
    ),
    "too few": (
        lambda: dp.sampling.shuffled_batches((X, Y), dp.sampling.ShuffledEpochs(99, 3)),
        V,
        "`batch_size` smaller. Received: 32 examples, batch_size=99",
    ),
    "statement": (
        lambda: dp.privacy_statement(
            LEDGER, 1000, 1e-5, sampling=dp.sampling.ShuffledEpochs(99, 50)
        ),
        V,
        "released with batch size 100.0.*Received: sampling=Shuffled",
    ),
    "users": (
        lambda: dp.privacy_statement(LEDGER, 1000, 1e-5, max_examples_per_user=0),
        V,
        received("max_examples_per_user", "0"),
    ),
    "accounting": (
        lambda: dp.tuning.composition_epsilon(TRIAL, 3, 1e-5, accounting="pld"),
        T,
        received("accounting", "'pld'"),
    ),
    "accounting of a search": (
        lambda: dp.tuning.mean_trials_for_budget(TRIAL, 1.0, 1e-5, accounting="pld"),
        T,
        received("accounting", "'pld'"),
    ),
    "strategy": (
        lambda: dp.tuning.noise_multiplier_for_selection("composition", None, 1.0, 1e-5),
        T,
        received("strategy", "'composition'"),
    ),
    "at most": (
        lambda: dp.accounting.releases_left(LEDGER, 2.0, 100, 1000, 9.0, 1e-5, at_most="9"),
        T,
        received("at_most", "'9'"),
    ),
    "segments": (lambda: Releases(3), T, received("segments", "3")),
    "checks": (lambda: Releases(checks=None), T, received("checks", "None")),
    "groups of None": (
        lambda: dp.sampling.CyclicPoissonSampling.for_batch_size(4, None, 10, 4),
        T,
        received("num_examples", "None"),
    ),
    "backup": (lambda: dp.callbacks.epoch_backup(None), T, received("folder", "None")),
    "tolerance": (lambda: dp.tuning.suggest_tolerance(0, 1), V, received("num_steps", "0")),
}

AUDITS = {
    "monitor n": (lambda: dp.PrivacyMonitor(1e3, 0.1), T, received("num_examples", "1000.0")),
    "monitor delta": (lambda: dp.PrivacyMonitor(9, "x"), T, received("delta", "'x'")),
    "monitor sampling": (
        lambda: dp.PrivacyMonitor(9, 0.1, sampling=dp.PoissonSampling),
        V,
        received("sampling", "<class"),
    ),
    "monitor alone": (lambda: dp.PrivacyMonitor(9, 0.1).epsilon(), T, "passed to `fit`.*=None"),
    "budget inf": (lambda: dp.PrivacyBudget(INF, 0.1, 9), V, received("epsilon", "inf")),
    "budget alone": (lambda: dp.PrivacyBudget(1, 0.1, 9).releases_left(), T, "passed to `fit`"),
    "log path": (lambda: dp.ReleaseLog(None), T, received("path", "None")),
    "log steps": (lambda: dp.ReleaseLog("x", steps=0), V, received("steps", "0")),
    "scores str": (lambda: scored(["a", "b"]), T, received("scores", r"\['a', 'b'\]")),
    "scores nan": (lambda: scored([0.0, NAN]), V, "`scores` must be numbers. Received: 1 NaN"),
    "scores shape": (lambda: scored([1.0]), V, r"`scores` must .*Received: shape \(1,\)"),
    "guesses": (lambda: scored([0, 1], num_guesses=3), V, received("num_guesses", "3")),
    "confidence": (lambda: scored([0, 1], confidence=1), V, received("confidence", "1")),
    "included": (
        lambda: dp.auditing.one_run_epsilon([0, 1], [0, 1], 0.1),
        V,
        "`included` .*dtype int64",
    ),
    "runs": (
        lambda: dp.auditing.many_run_epsilon([1], [0, 1], 0.1),
        V,
        r"`scores_with` .*shape \(1,\)",
    ),
    "runs str": (
        lambda: dp.auditing.many_run_epsilon(["a"], [0], 0.1),
        T,
        received("scores_with", ".'a'"),
    ),
    "canaries": (lambda: dp.auditing.Canaries(X, Y[:3]), V, r"`x` and `y` .*lengths \[3, 32\]"),
    "canaries scalar": (lambda: dp.auditing.Canaries(1, 2), V, r"`x` and `y` .*lengths \[0\]"),
    "mix array": (lambda: CANARIES.mix(X), T, "`data` must be .*Received: data of type ndarray"),
    "mix lengths": (lambda: CANARIES.mix((X, Y[:4])), V, r"`data` must .*lengths \[4, 32\]"),
    "audit of arrays": (
        lambda: dp.auditing.PrivacyAudit((X, Y), 0.1),
        T,
        received("canaries", r"\(array"),
    ),
    "audit score": (lambda: audit(score="norm"), V, received("score", "'norm'")),
    "audit loss": (lambda: audit(loss="mse"), T, received("loss", "'mse'")),
    "audit delta": (lambda: audit(delta=1.0), V, received("delta", "1.0")),
    "attacks str": (lambda: inference(attacks="lr"), T, received("attacks", "'lr'")),
    "attacks none": (lambda: inference(attacks=[]), T, received("attacks", r"\[\]")),
    "attack": (lambda: inference(attacks=["nn"]), V, received("attacks", "'nn'")),
    "compare one": (lambda: compared(batch=(X[:1], Y[:1])), V, "`batch` must .*Received: 1"),
    "compare str": (lambda: compared("mse"), T, received("loss", "'mse'")),
    "compare number": (lambda: compared(5), T, received("loss", "5")),
    "compare array": (lambda: compared(batch=X), T, "`batch` must be .*x alone, of type ndarray"),
    "compare scalar": (lambda: compared(lambda y, z: tf.reduce_sum(z)), P, "Received: a scalar"),
    "validate loss": (lambda: validated(5), T, received("loss", "5")),
    "validate model": (lambda: validated(model="m"), T, received("model", "'m'")),
    "validate dict": (
        lambda: validated(batch={"x": X}),
        T,
        "`batch` must be .*x alone, of type dict",
    ),
}


@pytest.fixture(scope="module")
def bystander():
    """A model in training, which a wrong call somewhere else must not touch."""
    model = catalogue.mlp()
    model.compile(catalogue.make("DPMomentum"), loss=catalogue.loss())
    catalogue.fit(model)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "call, error, match",
    [
        pytest.param(*row, id=f"{name}-{row_id}")
        for name, table in (
            ("optimizer", OPTIMIZERS),
            ("accounting", ACCOUNTING),
            ("audit", AUDITS),
        )
        for row_id, row in table.items()
    ],
)
def test_wrong_arguments_are_named(bystander, call, error, match):
    assert_refused(bystander, call, error, match)


def numbers_of(value):
    """All numbers and texts in a nest, without their types."""
    if dataclasses.is_dataclass(value):
        value = dataclasses.astuple(value)
    return [numbers_of(v) for v in value] if isinstance(value, tuple) else value


CYCLIC = functools.partial(dp.sampling.CyclicPoissonSampling.for_batch_size, 100, 1_000, 8)
CROWDED = dp.PoissonSampling(0.1, 160, steps=50)  # δ = 0.01 has room for overflow


@pytest.mark.parametrize(
    "call, number",
    [
        (lambda q: dp.PoissonSampling(q, 33, 50).expected_batch_size(10**5), np.float16(1 / 3)),
        (lambda q: dp.PoissonSampling(q, 160, 50), np.float32(0.1)),
        (lambda b: dp.sampling.FixedSizeSampling(b, 20), np.uint8(100)),
        (lambda b: dp.sampling.CyclicPoissonSampling.for_batch_size(b, 1_000, 8, 4), np.uint8(200)),
        (lambda b: CYCLIC(b), np.int8(3)),
        (lambda d: CROWDED.epsilon_spent(LEDGER, 1_000, d), np.float16(1e-2)),
        (lambda d: CROWDED.delta_for_noise(1.0, 1_000, d), np.float16(1e-2)),
        (lambda d: dp.privacy_statement(LEDGER, 1_000, d), np.float32(1e-4)),
        (lambda t: dp.accounting.noise_multiplier_for(2.0, 1e-5, 0.01, t), np.uint8(200)),
        (lambda s: dp.accounting.noise_strategies.sensitivity(BANDS, 300, s), np.uint8(200)),
        (lambda g: dp.tuning.LiuTalwar(g).epsilon(TRIAL, 1e-5), np.float16(0.1)),
        (lambda m: dp.tuning.RepeatAndSelect(m).epsilon(TRIAL, 1e-5), np.float16(10)),
        (lambda c: dp.AdaptiveClipping(count_noise_multiplier=c), np.float16(0.7)),
    ],
)
def test_numbers_of_numpy_count_as_those_of_python(call, number):
    """They were computed with in their own few bits: 4 groups of 200 examples were 32 examples."""
    found, wanted = (numbers_of(call(n)) for n in (number, number.item()))
    assert repr(found) == repr(wanted)


@pytest.mark.parametrize("huge", [10**400, Fraction(10**400, 3)])
def test_numbers_beyond_floats_are_refused(huge):
    with pytest.raises(ValueError, match="`noise_multiplier` must be finite"):
        sgd(noise=huge)


@pytest.mark.parametrize(
    "arguments, name",
    [((-1.0, 1_000, 1e-3), "epsilon"), ((1.0, 0, 1e-3), "num_examples"), ((1.0, 9, NAN), "delta")],
)
def test_the_delta_for_noise_checks_its_arguments(arguments, name):
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        CROWDED.delta_for_noise(*arguments)


def test_one_example_cannot_be_validated():
    report = validated(batch=(X[:1], Y[:1]))
    assert not report.ok and "at least two examples" in str(report)
