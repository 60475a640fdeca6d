"""A small search, for the tests of the tuner."""

import h5py
import numpy as np
import tensorflow as tf

import tf_adaptive_dp as dp
from tf_adaptive_dp.tuning import HonestTuner, strategies

NUM_EXAMPLES, BATCH, DELTA = 16, 8, 1e-3


def data(num_examples=NUM_EXAMPLES, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(num_examples, 3)).astype("float32")
    return x, (x[:, 0] > 0).astype("int64")


def model(optimizer, **compile_with):
    made = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(2)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    made.compile(optimizer, loss, metrics=["accuracy"], **compile_with)
    return made


def optimizer(learning_rate=0.1, **kwargs):
    arguments = {"expected_batch_size": float(BATCH), "learning_rate": learning_rate, **kwargs}
    return dp.DPSGD(1.0, 1.0, **arguments)


def build(hp):
    return model(optimizer(hp.Choice("learning_rate", [0.01, 0.1, 1.0])))


def tuner(folder, build_model=build, **kwargs):
    arguments = {
        "objective": "val_accuracy",
        "strategy": "composition",
        "epsilon": 10.0,
        "delta": DELTA,
        "num_examples": NUM_EXAMPLES,
        "score": strategies.PublicScore(),
        "directory": folder,
        "project_name": "search",
        **kwargs,
    }
    return HonestTuner(build_model, **arguments)


def search(made, **kwargs):
    """Searches with arrays: 2 steps an epoch."""
    x, y = data()
    arguments = {"batch_size": BATCH, "epochs": 2, "validation_data": data(16, seed=1), **kwargs}
    if made._strategy.releases_all:
        arguments.setdefault("verbose", 0)
    made.search(x, y, **arguments)
    return made


def folders(folder):
    """The folders of trials in a project."""
    return sorted(path.name for path in (folder / "search").glob("trial_*"))


class Fake:
    """Stands for the training of trials: scores and crashes by plan, and a file for each."""

    def __init__(self, monkeypatch, *results, draws=None):
        from tf_adaptive_dp._keras import process_state
        from tf_adaptive_dp.tuning.keras_tuner import oracle, search_plan, trial

        monkeypatch.setattr(process_state, "NUMBERS", 1)  # using them up takes a second
        self.results, self.trained, self.folders_seen = list(results), [], []
        self.went_on = []
        monkeypatch.setattr(trial.PrivateTrial, "run", lambda *args: self.run(*args))
        monkeypatch.setattr(search_plan.SearchPlan, "noise_multiplier", lambda plan: 1.0)
        # Each of them takes a second, and other tests look at them.
        for epsilon in ("epsilon_spent", "epsilon_of_one", "epsilon_without_amplification"):
            monkeypatch.setattr(search_plan.SearchPlan, epsilon, lambda plan, *args: 1.0)
        if draws is not None:
            monkeypatch.setattr(oracle.HonestOracle, "draws", lambda oracle, strategy: draws)

    def run(self, trial, model, data, objective, weights):
        trial._folder.mkdir(exist_ok=True)
        self.went_on.append((trial._folder / "mark").exists())
        (trial._folder / "mark").touch()
        result = self.results[len(self.trained)]
        if isinstance(result, BaseException):
            raise result
        if result is not None:
            model.save_weights(weights)
        self.trained.append(float(model.optimizer.learning_rate.numpy()))
        self.folders_seen.append(sorted(p.name for p in trial._folder.parent.glob("trial_*")))
        error = "Traceback: no memory" if result is None else None
        outcome = {"score": result, "error": error, "releases": 4, "unchecked": 0}
        return {**outcome, "side_information": ""}


def winner(made):
    """The learning rate that won."""
    return made.get_best_hyperparameters()[0].values["learning_rate"]


def journal_lines(folder):
    return (folder / "search" / "secret" / "journal").read_text().splitlines()


def contents(path):
    """Names, and numbers, of what is in a file of weights, which each generation has its own of."""
    if path.suffix == ".index":
        prefix = str(path.with_suffix(""))
        reader = tf.train.load_checkpoint(prefix)
        names = sorted(name for name, _ in tf.train.list_variables(prefix))
        return [(name, np.asarray(reader.get_tensor(name))) for name in names]
    found = []

    def note(name, held):
        found.extend((f"{name}@{key}={value!r}", np.zeros(0)) for key, value in held.attrs.items())
        found.append((name, held[()] if isinstance(held, h5py.Dataset) else np.zeros(0)))

    with h5py.File(path) as file:
        note("", file)
        file.visititems(note)
    return found


def everything_in(folder):
    """Names and contents of all files of a project."""
    return "".join(
        f"{path}\n" + (path.read_bytes().decode(errors="replace") if path.is_file() else "")
        for path in sorted((folder / "search").rglob("*"))
    )
