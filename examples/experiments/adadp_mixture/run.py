"""ADADP against DP-SGD for variational inference of a Gaussian mixture.

Repeats figure 1 of the supplement of the ADADP paper: the log-likelihood of test data while the
posterior is learned, by ε at δ = 10⁻⁶ and σ = 1.2, for ADADP and for DP-SGD with several learning
rates. The supplement gives only σ and δ. Our choices are five components in two dimensions, at
(0, 0) and (±2, ±2) with standard deviation 1/2; 10,000 private and 1,000 test points; batches of
100; and C = 1.

    weights ~ Dirichlet(1, …, 1),  means ~ N(0, I),  variances ~ InverseGamma(1, 1)
    x | weights, means, variances ~ Σ_k weight_k N(mean_k, variance_k I)

q is an independent Gaussian for each unconstrained parameter z. One draw of z per minibatch (doubly
stochastic) gives the loss of example i, -log p(x_i | z) + (log q(z) - log p(z)) / N. The second
part depends on no example: the optimizers detect it, exclude it from clipping and add its gradient
without noise. The figure shows the log of the predictive density per test point, from 100 draws of
q.

ADADP runs with its default arguments and with the tolerance of `suggest_tolerance`, √(d / 2T),
since the paper expects fewer parameters to need a smaller tolerance.

Privacy claim: each run alone is (ε, δ)-DP for adding or removing one of the private points, which
are synthetic. Batches are drawn by Poisson sampling, so the ε shown is a proven upper bound. All
learning rates are shown, so nothing is selected.

    python examples/experiments/adadp_mixture/run.py --scale small
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp

import tf_adaptive_dp
from examples.experiments.lib import harness, report
from examples.experiments.lib.harness import Trial

tfd, tfb = tfp.distributions, tfp.bijectors

CENTRES = np.asarray([[0, 0], [2, 2], [2, -2], [-2, 2], [-2, -2]], np.float32)
COMPONENTS, DIMENSIONS = CENTRES.shape
SIZES = [COMPONENTS - 1, COMPONENTS * DIMENSIONS, COMPONENTS]  # the parts of z
NUM_PARAMETERS = 2 * sum(SIZES)  # a mean and a deviation for each entry of z
NUM_TEST, DRAWS = 1000, 100

# Of each scale: private points, epochs, seeds, exponents k of DP-SGD's learning rates 10^(k/2).
SCALES = {
    "smoke": (1000, 2, 1, range(1)),
    "small": (10_000, 20, 5, range(-4, 2)),
    "paper": (10_000, 50, 10, range(-6, 3)),
}


def plan(scale: str, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """ADADP, ADADP with the suggested tolerance, DP-SGD with each rate; all with all seeds."""
    num_train, epochs, seeds, exponents = SCALES[scale]
    batch_size = 100
    tolerance = tf_adaptive_dp.tuning.suggest_tolerance(
        num_steps=epochs * num_train // batch_size // 2, num_parameters=NUM_PARAMETERS
    )
    methods: list[tuple[str, dict[str, float]]] = [
        ("ADADP", {}),
        ("ADADP", {"tolerance": tolerance, "tolerance_decay": 0.0, "initial_factor": 1.0}),
    ]
    methods += [("DPSGD", {"learning_rate": float(f"{10 ** (k / 2):.3g}")}) for k in exponents]
    return [
        {
            "optimizer": optimizer,
            "arguments": arguments,
            "noise_multiplier": 1.2,
            "seed": seed,
            "epochs": epochs,
            "num_train": num_train,
            "batch_size": batch_size,
            "l2_norm_clip": 1.0,
            "delta": 1e-6,
        }
        for optimizer, arguments in methods
        for seed in range(seeds)
    ]


def points(num: int, seed: int) -> np.ndarray:
    """[num, 2] points of the true mixture."""
    draws = np.random.default_rng(seed)
    chosen = CENTRES[draws.integers(COMPONENTS, size=num)]
    return (chosen + 0.5 * draws.normal(size=chosen.shape)).astype(np.float32)


def mixture(z: tf.Tensor) -> tfd.Distribution:
    """The mixture with the unconstrained parameters z: [..., 19]."""
    weights, means, log_variances = tf.split(z, SIZES, -1)
    means = tf.reshape(means, tf.concat([tf.shape(means)[:-1], CENTRES.shape], 0))
    deviations = tf.exp(log_variances / 2)[..., tf.newaxis] * tf.ones(DIMENSIONS)
    return tfd.MixtureSameFamily(
        tfd.Categorical(probs=tfb.SoftmaxCentered()(weights)),
        tfd.MultivariateNormalDiag(means, deviations),
    )


def prior_log_prob(z: tf.Tensor) -> tf.Tensor:
    """log p(z) of one z: the priors, with the change of volume to unconstrained parameters."""
    weights, means, log_variances = tf.split(z, SIZES, -1)
    of_weights = tfb.Invert(tfb.SoftmaxCentered())(tfd.Dirichlet(tf.ones(COMPONENTS)))
    of_log_variances = tfb.Invert(tfb.Exp())(tfd.InverseGamma(1.0, 1.0))
    return (
        of_weights.log_prob(weights)
        + tf.reduce_sum(tfd.Normal(0.0, 1.0).log_prob(means), -1)
        + tf.reduce_sum(of_log_variances.log_prob(log_variances), -1)
    )


def first_location(seed: int) -> tf.Tensor:
    """Equal weights, variances of one, and means drawn from the prior."""
    weights, log_variances = tf.zeros(SIZES[0]), tf.zeros(SIZES[2])
    means = np.random.default_rng(seed).normal(size=SIZES[1]).astype(np.float32)
    return tf.concat([weights, means, log_variances], 0)


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One private run of variational inference, in a custom training loop."""
    tf.keras.utils.set_random_seed(settings["seed"])
    num_train, batch_size = settings["num_train"], settings["batch_size"]
    location = tf.Variable(first_location(settings["seed"]))
    log_deviation = tf.Variable(tf.fill([sum(SIZES)], tf.math.log(0.1)))
    optimizer = getattr(tf_adaptive_dp, settings["optimizer"])(
        l2_norm_clip=settings["l2_norm_clip"],
        noise_multiplier=settings["noise_multiplier"],
        expected_batch_size=batch_size,
        gradients="materialized",  # 38 parameters: the whole Jacobian is small
        **settings["arguments"],
    )

    def posterior() -> tfd.Distribution:
        return tfd.MultivariateNormalDiag(location, tf.exp(log_deviation))

    @tf.function
    def step(x: tf.Tensor, is_there: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            q = posterior()
            z = q.sample()
            penalty = (q.log_prob(z) - prior_log_prob(z)) / num_train
            loss = penalty - is_there * mixture(z).log_prob(x)
        optimizer.minimize(loss, [location, log_deviation], tape)

    @tf.function
    def test_log_likelihood() -> tf.Tensor:
        each = mixture(posterior().sample(DRAWS)[:, tf.newaxis]).log_prob(test)
        return tf.reduce_mean(tf.reduce_logsumexp(each, 0)) - np.log(DRAWS)

    test = points(NUM_TEST, seed=1)
    steps = num_train // batch_size
    sampling = tf_adaptive_dp.PoissonSampling.for_batch_size(
        batch_size, num_train, steps=steps * settings["epochs"]
    )
    private = points(num_train, seed=0)
    batches = tf_adaptive_dp.poisson_batches((private, np.zeros(num_train)), sampling)
    result = collections.defaultdict(list)
    for number, (x, _, is_there) in enumerate(batches, start=1):
        step(x, is_there)
        if number % steps == 0:
            epsilon = sampling.epsilon_spent(optimizer, num_train, settings["delta"])
            result["epochs"].append(number // steps)
            result["epsilon"].append(round(epsilon, 4))
            result["log_likelihood"].append(round(float(test_log_likelihood()), 5))
            result["learning_rate"].append(float(f"{float(optimizer.learning_rate):.4g}"))
    return dict(result)


def by_method(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    """The runs of each optimizer and its arguments."""
    found = collections.defaultdict(list)
    for trial in sorted(trials, key=lambda t: str(t.settings["arguments"])):
        words = [{"DPSGD": "DP-SGD"}.get(trial.settings["optimizer"], "ADADP")]
        words += [f"{k} {v:.3g}" for k, v in trial.settings["arguments"].items()]
        found[", ".join(words).replace("_", " ")].append(trial)
    return found


def table(trials: Sequence[Trial]) -> str:
    """Mean and spread of the log-likelihood halfway and at the end."""
    rows = []
    for name, runs in by_method(trials).items():
        cells = [name]
        for at in (len(runs[0].result["epochs"]) // 2 - 1, -1):
            values = [t.result["log_likelihood"][at] for t in runs]
            cells += [f"{runs[0].result['epsilon'][at]:.3f}", report.mean(values, digits=3)]
        rows.append([*cells, len(runs)])
    columns = ["method", "halfway: ε", "log-likelihood", "end: ε", "log-likelihood", "seeds"]
    return report.table(columns, rows)


def plot(trials: Sequence[Trial]) -> Any:
    """The mean log-likelihood by ε, and that of the true mixture."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5))
    for name, runs in by_method(trials).items():
        mean = np.mean([t.result["log_likelihood"] for t in runs], axis=0)
        width = 2.5 if name.startswith("ADADP") else 1.2
        axis.plot(runs[0].result["epsilon"], mean, label=name, linewidth=width)
    truth = tfd.MixtureSameFamily(
        tfd.Categorical(logits=tf.zeros(COMPONENTS)),
        tfd.MultivariateNormalDiag(CENTRES, tf.fill(CENTRES.shape, 0.5)),
    )
    best = float(tf.reduce_mean(truth.log_prob(points(NUM_TEST, seed=1))))
    axis.axhline(best, color="black", linestyle=":", label="the true mixture")
    delta = trials[0].settings["delta"]
    axis.set(xlabel=f"ε at δ = {delta:g}", ylabel="log-likelihood of a test point")
    axis.legend(fontsize=8)
    figure.tight_layout()
    return figure


EXPERIMENT = harness.Experiment("adadp_mixture", __doc__, plan, train, table, plot)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
