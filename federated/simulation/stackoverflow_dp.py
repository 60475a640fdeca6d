"""Tag prediction on Stack Overflow with user-level differential privacy: AdaDPS against baselines.

The AdaDPS paper's figure 6: softmax regression from bags of 10,000 words to 500 tags, one client a
user, 400 clients of whom 20 are drawn in each round, σ = 0.3, local batches of 100, one local
epoch, server rate 1 with momentum 0.9. Compared: DP-FedAvg (SGD on the clients), DP-FedAdam (Adam
at the server, after the noise) and AdaDPS, whose clients divide each gradient by how frequent the
words are. The "server" variant divides each client's whole update instead; the paper finds it
worse. A second setting, "private", takes all users of the training split, more of them a round and
so much noise that ε means something; its third mechanism is DP-FTRL ("tree"), which asks nothing of
the sampling.

Public by declaration: the words, the tags and how frequent the words are, all counted over users of
the held-out split, none of whom is trained on.

Privacy claim: each run alone is (ε, δ)-DP for adding or removing one user with all posts, δ one
over the number of users; clients are drawn by Poisson sampling, so ε is exact (for DP-FTRL:
replacing a user by one without posts). σ = 0.3 gives an ε that promises next to nothing, as the
paper says itself. Accuracy is that of the test split's posts; clip norms and rates are chosen by
it, and what the choice costs is not counted.

    python -m federated.simulation.stackoverflow_dp --scale smoke --data_dir FOLDER

FOLDER has `stackoverflow.sqlite` as `tff.simulation.datasets.stackoverflow.load_data` leaves it:
the whole Stack Overflow, or any other data in that format. At most 10,000 test posts are judged.

| scale | rounds | words, tags | clip norms and rates a method | seeds |
| --- | --- | --- | --- | --- |
| smoke | 2 | 300, 20 | 1 | 1 |
| small | 100 | 10,000, 500 | 4 | 3 |
| paper | 500 | 10,000, 500 | 9 | 3 |
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import dataclasses  # noqa: E402
import itertools  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import tensorflow_federated as tff  # noqa: E402

import tf_adaptive_dp  # noqa: E402
from federated import accounting, monitor, processes, program  # noqa: E402
from federated.client_optimizers import build_adadps  # noqa: E402
from federated.client_preconditioner import ClientPreconditioner  # noqa: E402
from federated.datasets.clients import random_clients  # noqa: E402
from federated.sampling import ClientSampler, ShuffledEpochs  # noqa: E402
from federated.simulation import tag_prediction, trials  # noqa: E402
from federated.simulation.trials import Settings, Trial  # noqa: E402
from federated.user_level_privacy import UserLevelPrivacy  # noqa: E402

TITLES = {
    "fed_avg": "DP-FedAvg",
    "fed_adam": "DP-FedAdam",
    "adadps": "AdaDPS at the clients",
    "adadps_server": "AdaDPS on whole updates",
    "ftrl": "DP-FTRL",
    "ftrl_adadps": "DP-FTRL, AdaDPS at the clients",
}
LAST = 3  # evaluations whose mean counts
# A grid of (clip norm, client rate) for each method, around the best of short runs.
CENTRES = {
    "fed_avg": (1.0, 10.0),
    "fed_adam": (1.0, 10.0),
    "adadps": (1.0, 1.0),
    "adadps_server": (1.0, 1.0),
    "ftrl": (1.0, 10.0),
    "ftrl_adadps": (1.0, 1.0),
}
SERVER_ADAM_RATE = 0.01


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of the experiment is done.

    Attributes:
      rounds: of each trial.
      words: of the vocabulary.
      tags: classes.
      public_users: of the held-out split, who are counted.
      factors: of clip norm and of rate, for the grid.
      seeds: runs of each method with its best pair.
    """

    rounds: int
    words: int
    tags: int
    public_users: int
    factors: tuple[tuple[float, float], ...]
    seeds: int


SCALES = {
    "smoke": Scale(2, 300, 20, 50, ((1.0, 1.0),), 1),
    "small": Scale(100, 10_000, 500, 1000, ((1, 1), (0.3, 1), (1, 0.3), (1, 3)), 3),
    "paper": Scale(
        *(500, 10_000, 500, 10_000),
        tuple(itertools.product((0.3, 1.0, 3.0), (0.3, 1.0, 3.0))),
        3,
    ),
}
# The paper's setting, and one whose ε means something.
SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {"clients": 400, "clients_per_round": 20, "sigma": 0.3},
    "private": {"clients": None, "clients_per_round": 100, "sigma": 1.5},
}
METHODS = {
    "paper": ("fed_avg", "fed_adam", "adadps", "adadps_server"),
    "private": ("fed_avg", "adadps", "ftrl", "ftrl_adadps"),
}


def plan(scale: str, finished: Sequence[Trial]) -> list[Settings]:
    """The trials that are wanted: a search with seed 0, then more seeds for the best pair."""
    how = SCALES[scale]
    wanted = []
    for name, methods in METHODS.items():
        for method in methods:
            clip, rate = CENTRES[method]
            grid = [
                {
                    "method": method,
                    "rate": float(f"{rate * by_rate:.3g}"),
                    "clip": float(f"{clip * by_clip:.3g}"),
                    "setting": name,
                    "rounds": how.rounds,
                    "words": how.words,
                    "tags": how.tags,
                    "public_users": how.public_users,
                    "seed": 0,
                }
                for by_clip, by_rate in how.factors
            ]
            wanted += grid
            done = [t for t in finished if t.settings in grid]
            if len(done) == len(grid):
                best = max(done, key=accuracy).settings
                wanted += [{**best, "seed": seed} for seed in range(1, how.seeds)]
    return wanted


def accuracy(trial: Trial) -> float:
    """Share of the test posts whose tag is right, in the mean of the last evaluations."""
    return trial.last("test/accuracy", LAST)


def build_process(
    settings: Settings, data: tag_prediction.Data, total_clients: int
) -> processes.PrivateLearningProcess:
    """The process of a method.

    Args:
      settings: of the trial.
      data: what is known of words and tags is public.
      total_clients: how many clients there are.
    """
    method, how = settings["method"], SETTINGS[settings["setting"]]
    shape = len(data.known.words), len(data.known.tags)
    frequencies = tf_adaptive_dp.token_frequencies(
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
        server = tff.learning.optimizers.build_adam(SERVER_ADAM_RATE, epsilon=1e-5)
    return processes.build_dp_fed_avg(
        lambda: tff.learning.models.from_keras_model(
            tag_prediction.network(*shape),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            input_spec=data.spec,
        ),
        client,
        UserLevelPrivacy(
            noise_multiplier=how["sigma"],
            clients_per_round=how["clients_per_round"],
            total_clients=total_clients,
            clip=settings["clip"],
            mechanism="tree" if method.startswith("ftrl") else "gaussian",
        ),
        server,
        preconditioner=known_a if method == "adadps_server" else None,
    )


def train(settings: Settings, folder: Path, data_dir: str | None) -> None:
    """One trial, or the rest of it; prints what it protects."""
    how = SETTINGS[settings["setting"]]
    data = tag_prediction.load(
        data_dir, *(settings[name] for name in ("public_users", "words", "tags"))
    )
    clients = data.client_ids
    if how["clients"]:
        number = min(how["clients"], len(clients))
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
        evaluate=tag_prediction.judge(data),
        evaluate_every=max(1, settings["rounds"] // 20),
        release_managers=monitor.monitors(folder, settings["rounds"]),
    )
    statement = accounting.privacy_statement(trained.ledger, delta, sampling=sampler.sampling)
    (folder / "privacy.txt").write_text(statement)
    print(statement.split("\n\n")[0])


def best_runs(finished: Sequence[Trial]) -> dict[tuple[str, str], list[Trial]]:
    """By setting and method, the runs of the pair that was best with seed 0."""
    found = {}
    for name, methods in METHODS.items():
        for method in methods:
            runs = [
                t
                for t in finished
                if (t.settings["setting"], t.settings["method"]) == (name, method)
            ]
            first = [t for t in runs if t.settings["seed"] == 0]
            if first:
                best = {**max(first, key=accuracy).settings, "seed": None}
                found[name, method] = [t for t in runs if {**t.settings, "seed": None} == best]
    return found


def table(finished: Sequence[Trial]) -> str:
    """Accuracy of the best pair of each method, and its ε, in Markdown."""
    lines = [
        "| setting | method | (C, client rate) | test accuracy | ε | seeds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (name, method), runs in best_runs(finished).items():
        chosen = runs[0].settings
        lines.append(
            f"| {name} | {TITLES[method]} | ({chosen['clip']:g}, {chosen['rate']:g}) "
            f"| {trials.spread([accuracy(t) for t in runs])} "
            f"| {runs[0].last('privacy/epsilon'):.2f} | {len(runs)} |"
        )
    return "\n".join(lines)


def plot(finished: Sequence[Trial]) -> Any:
    """Test accuracy by round, a panel for each setting; bands show the range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(METHODS), figsize=(6 * len(METHODS), 5), squeeze=False)
    for axis, name in zip(axes.flat, METHODS):
        for (setting, method), runs in best_runs(finished).items():
            if setting == name:
                curves = [run.curve("test/accuracy") for run in runs]
                values = np.asarray([values for _, values in curves])
                epsilon = runs[0].last("privacy/epsilon")
                label = f"{TITLES[method]}, ε = {epsilon:.3g}"
                axis.plot(curves[0][0], values.mean(0), label=label)
                axis.fill_between(curves[0][0], values.min(0), values.max(0), alpha=0.2)
        axis.set(title=name, xlabel="round", ylabel="test accuracy")
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
        table,
        plot,
        argv,
    )


if __name__ == "__main__":
    main()
