"""Tag prediction on Stack Overflow with user-level differential privacy: AdaDPS against baselines.

The AdaDPS paper's figure 6: softmax regression from bags of 10,000 words to 500 tags, one client a
user, 400 clients of whom 20 are drawn in each round, σ = 0.3, local batches of 100, one local
epoch, server rate 1 with momentum 0.9. The experiment compares DP-FedAvg (SGD on the clients),
DP-FedAdam (Adam at the server, after the noise) and AdaDPS, whose clients divide each gradient by
the frequency of the words. The "server" variant divides each client's whole update instead; the
paper finds it worse. A second setting, "private", takes all users of the training split, more users
per round and enough noise for a meaningful ε (σ = 0.7, 50 users per round). It also has DP-FTRL,
which needs no secret sampling. The σ of its tree's nodes is 3.3, so that with 966 users and 100
rounds ε is 6.33, while Poisson cohorts have 6.39. With other numbers of users or rounds the two
differ more.

Public by declaration: the words, the tags and the frequencies of the words, all counted over users
of the held-out split, none of whom is trained on.

Privacy claim: each run alone is (ε, δ)-DP for adding or removing one user with all training posts,
δ one over the number of users; clients are drawn by Poisson sampling, so ε is a proven upper
bound (for DP-FTRL: replacing a user by one without posts). Lost rounds count. σ = 0.3 gives an ε
that promises almost nothing, as the paper itself says. Accuracy is measured on the test split,
later posts of the same users: these figures are exact and outside the guarantee. Clip norms and
rates are chosen by them, and ε does not include the cost of this choice.

    python -m federated.simulation.stackoverflow_dp --scale smoke --data_dir FOLDER

FOLDER has `stackoverflow.sqlite` as `tff.simulation.datasets.stackoverflow.load_data` leaves it:
the whole Stack Overflow, or any other data in that format. If the data have fewer words or tags
than the table says, all of them are used; the program prints the sizes above the results. Training
uses at most the first 256 posts with a known tag of each user, 10 MB as dense bags of words, and
the evaluation at most 10,000 test posts. Up to 4 GB of posts are kept in memory. DP-FedAdam tries
rates at the server in place of clip norms, which do not change its steps.

| scale | rounds | words, tags, at most | clip norms and rates per method | seeds |
| --- | --- | --- | --- | --- |
| smoke | 2 | 300, 20 | 1 | 1 |
| small | 200, "private" 100 | 500, 10 | 4 | 3 |
| paper | 500 | 10,000, 500 | 9 | 3 |
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

import tf_adaptive_dp
from federated.clients.client_optimizers import build_adadps
from federated.clients.preconditioner import ClientPreconditioner
from federated.datasets.clients import random_clients
from federated.privacy import user_epsilon
from federated.privacy.client_sampling import ClientSampler, ShuffledEpochs
from federated.privacy.user_level import UserLevelPrivacy
from federated.simulation import tag_prediction, trials
from federated.simulation.evaluator import evaluator
from federated.simulation.tag_trials import METHODS, SCALES, accuracy, best_runs, plan
from federated.simulation.trials import Settings, Trial
from federated.training import monitor, processes, program

TITLES = {
    "fed_avg": "DP-FedAvg",
    "fed_adam": "DP-FedAdam",
    "adadps": "AdaDPS at the clients",
    "adadps_server": "AdaDPS on whole updates",
    "ftrl": "DP-FTRL",
    "ftrl_adadps": "DP-FTRL, AdaDPS at the clients",
}


def build_process(
    settings: Settings, data: tag_prediction.Data, total_clients: int
) -> processes.PrivateLearningProcess:
    """Builds the process of a method.

    Args:
      settings: the settings of the trial.
      data: the data, with public words, tags and counts.
      total_clients: the number of clients.
    """
    method = settings["method"]
    shape = len(data.known.words), len(data.known.tags)
    frequencies = tf_adaptive_dp.side_information.token_frequencies(
        data.counts.words,
        vocabulary=data.known.words,
        divisor=float(max(data.counts.words.values())),
        provenance="public",
    )
    known_a = ClientPreconditioner.from_side_information(
        frequencies, [tf.TensorSpec(shape, name="kernel"), tf.TensorSpec(shape[1:], name="bias")]
    )
    client = tff.learning.optimizers.build_sgdm(learning_rate=settings["rate"])
    if method in ("adadps", "ftrl_adadps"):
        client = build_adadps(known_a, client)
    server = None  # rate 1, momentum 0.9
    if method == "fed_adam":
        server = tff.learning.optimizers.build_adam(settings["server_adam_rate"], epsilon=1e-5)
    return processes.build_dp_fed_avg(
        lambda: tff.learning.models.from_keras_model(
            tag_prediction.network(*shape),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            input_spec=data.spec,
        ),
        client,
        UserLevelPrivacy(
            noise_multiplier=settings["sigma"],
            clients_per_round=settings["clients_per_round"],
            total_clients=total_clients,
            clip=settings["clip"],
            mechanism=settings["mechanism"],
        ),
        server,
        preconditioner=known_a if method == "adadps_server" else None,
    )


def data_of(settings: Settings, data_dir: str | None) -> tag_prediction.Data:
    """The data of a trial; read once."""
    names = ("public_users", "words", "tags", "max_posts")
    return tag_prediction.load(data_dir, *(settings[name] for name in names))


def describe(scale: str, data_dir: str | None) -> str:
    """Describes the data, which all trials of a scale share."""
    return tag_prediction.describe(data_of(plan(scale, [])[0], data_dir))


def train(settings: Settings, folder: Path, data_dir: str | None) -> dict[str, float]:
    """Runs or resumes one trial; prints its privacy statement and returns ε, δ and a baseline."""
    data = data_of(settings, data_dir)
    clients = data.client_ids
    if settings["clients"]:
        number = min(settings["clients"], len(clients))
        clients = random_clients(clients, number, settings["seed"])
    process = build_process(settings, data, len(clients))
    privacy, delta = process.privacy, 1 / len(clients)
    if privacy.mechanism == "tree":
        sampler = ClientSampler(
            clients, ShuffledEpochs(int(privacy.clients_per_round), settings["rounds"])
        ).checked(privacy)
    else:
        sampler = ClientSampler.poisson(clients, privacy, settings["rounds"])
    trained = program.train(
        process,
        data.batches,
        sampler,
        settings["rounds"],
        folder,
        ledger=process.new_ledger(),
        delta=delta,
        evaluate=evaluator(
            tag_prediction.network(len(data.known.words), len(data.known.tags)), data.test
        ),
        evaluate_every=max(1, settings["rounds"] // 20),
        release_managers=monitor.monitors(folder, settings["rounds"]),
    )
    if trained.ledger is None:
        raise ValueError("The run must have a ledger. Received: none")
    # The accountant of the stored results, so that all rows of the table are comparable.
    statement = user_epsilon.privacy_statement(
        trained.ledger, delta, sampling=sampler.sampling, accountant="rdp"
    )
    (folder / "privacy.txt").write_text(statement)
    print(statement.split("\n\n")[0])
    # For all rounds that were begun; the last one may have no figures.
    epsilon = user_epsilon.epsilon_spent(
        trained.ledger, delta, sampling=sampler.sampling, accountant="rdp"
    )
    return {"epsilon": epsilon, "delta": delta, "majority": tag_prediction.majority(data)}


def largest_epsilon(runs: Sequence[Trial]) -> float:
    """The ε of the run that lost the most rounds."""
    return max(run.final["epsilon"] for run in runs)


def delta_of(runs: Sequence[Trial]) -> str:
    """δ of the runs, one over the number of users, in short."""
    deltas = {f"{run.final['delta']:.2g}" for run in runs if "delta" in run.final}
    return ", ".join(sorted(deltas)) or "1 / users"


def table(finished: Sequence[Trial]) -> str:
    """Accuracy of the best pair of each method, and the largest ε of its seeds, in Markdown."""
    lines = [
        "| setting | method | (C, client rate, Adam's) | test accuracy | ε | δ | seeds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (name, method), runs in best_runs(finished).items():
        chosen = runs[0].settings
        rates = [chosen[n] for n in ("clip", "rate", "server_adam_rate") if n in chosen]
        lines.append(
            f"| {name} | {TITLES[method]} | ({', '.join(f'{v:g}' for v in rates)}) "
            f"| {trials.spread([accuracy(t) for t in runs])} "
            f"| {largest_epsilon(runs):.2f} | {delta_of(runs)} | {len(runs)} |"
        )
    return "\n".join(lines)


def mean_curve(runs: Sequence[Trial]) -> tuple[list[int], list[float]]:
    """The mean accuracy of several runs by round.

    A run that lost rounds was evaluated in other ones: between its evaluations, and from the last
    one on, its accuracy is interpolated.
    """
    curves = [curve for run in runs if (curve := run.curve("test/accuracy"))[0]]
    if not curves:
        return [], []
    rounds = max((rounds for rounds, _ in curves), key=len)
    return rounds, np.mean([np.interp(rounds, *curve) for curve in curves], axis=0).tolist()


def plot(finished: Sequence[Trial]) -> Any:
    """Test accuracy by round: a panel for each setting, the mean of the seeds, and each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(METHODS), figsize=(6 * len(METHODS), 5), squeeze=False)
    for axis, name in zip(axes.flat, METHODS):
        chosen = {m: runs for (setting, m), runs in best_runs(finished).items() if setting == name}
        for position, (method, runs) in enumerate(chosen.items()):
            how = trials.style(position)
            for run in runs:  # each run lost other rounds
                of_seed = {**how, "marker": "", "alpha": 0.3, "linewidth": 1}
                axis.plot(*run.curve("test/accuracy"), **of_seed)
            label = f"{TITLES[method]}, ε = {largest_epsilon(runs):.3g}"
            axis.plot(*mean_curve(runs), label=label, linewidth=1.8, **how)
        if chosen:
            runs = next(iter(chosen.values()))
            if "majority" in runs[0].final:
                trials.draw_baseline(axis, runs[0].final["majority"], "the most frequent tag")
            axis.set_title(f"{name}, δ = {delta_of(runs)}")
        axis.set_ylabel("test accuracy")
        trials.by_round(axis)
        axis.legend(fontsize=8)
    figure.tight_layout()
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program."""
    trials.run_program(
        "stackoverflow_dp",
        __doc__,
        "folder of stackoverflow.sqlite, else TFF_CACHE_DIR",
        SCALES,
        plan,
        train,
        describe,
        table,
        plot,
        argv,
    )


if __name__ == "__main__":
    main()
