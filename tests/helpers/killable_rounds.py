"""Federated rounds of a cheap process that keep a record of their own, made to be killed.

As a program it reads jobs from its input, a line of JSON each, and runs each in a fork of itself,
in a process group of its own: so TensorFlow Federated is imported once. Nothing here may use
TensorFlow's runtime before the fork, since its threads would not be in the child.
"""

import dataclasses
import json
import os
import pathlib
import signal
import sys
import warnings
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np

KEY = bytes(range(32))
# As large as an array that gets a file of its own, and of `bytes`, like what TFF returns.
SAME = np.frombuffer(np.ones(2**17).tobytes())


def append(folder, **entry):
    """Writes a line that is in the record, whole, when this returns."""
    file = os.open(folder / "record", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{json.dumps(entry)}\n".encode())
    os.close(file)


def record(folder):
    """What was written, oldest first."""
    path = folder / "record"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def contents(folder):
    """All files under a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Process:
    """Its model is a number that nobody can guess; what is run is written down before and after.

    One large array of its state repeats the model, and another one never changes.
    """

    def __init__(self, folder, failing=()):
        self.folder, self.failing = folder, list(failing)

    def initialize(self):
        return self._state(0.0, np.int64(0), (np.zeros([2, 3]),))

    @staticmethod
    def _state(model, rounds, more):
        copies = np.full(len(SAME), model)
        return OrderedDict(
            model=np.float64(model), rounds=rounds, more=more, copies=copies, same=SAME
        )

    def next(self, state, datasets):
        rounds, model = int(state["rounds"]), float(state["model"])
        append(self.folder, event="began", rounds=rounds, model=model, clients=datasets)
        if self.failing and self.failing.pop(0):
            raise ConnectionError("a worker is gone")
        model = np.frombuffer(os.urandom(6) + b"\x00\x40").item()
        append(self.folder, event="ended", model=model)
        state = self._state(model, state["rounds"] + 1, state["more"])
        metrics = {"client_work": {"train": {"loss": np.float32(model), "num_examples": 8}}}
        return SimpleNamespace(state=state, metrics=metrics)

    def get_model_weights(self, state):
        return state["model"]


@dataclasses.dataclass(frozen=True)
class Privacy:
    mechanism: str = "gaussian"
    noise_multiplier: float = 2.0
    clip: float = 1.0
    total_clients: int = 8
    clients_per_round: float = 2.0
    is_adaptive = False
    value_noise_multiplier = 2.0


class Ledger:
    """Counts rounds, and how many of them were lost."""

    def __init__(self, privacy):
        self.privacy, self.num_releases, self.lost = privacy, 0, 0
        self.sampling, self.order, self.rounds_drawn = None, None, 0

    @property
    def segments(self):
        is_tree = self.privacy.mechanism == "tree"
        return [] if is_tree else [SimpleNamespace(num_releases=self.num_releases)]

    def check_noise(self, state):
        pass

    def record(self, state):
        self.num_releases += 1

    def record_lost(self, rounds, state=None):
        self.num_releases += rounds
        self.lost += rounds

    def to_dict(self):
        names = ("num_releases", "lost", "sampling", "order", "rounds_drawn")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_dict(cls, content, privacy):
        ledger = cls(privacy)
        for name, value in content.items():
            setattr(ledger, name, value)
        return ledger


class Sampler:
    """Cohort r is client r."""

    def __init__(self, client_ids, sampling, key=KEY):
        self.client_ids, self.sampling, self.key = tuple(client_ids), sampling, key

    def checked(self, privacy):
        return self

    def for_new_run(self):
        return self

    def cohort(self, round_num):
        return [f"client {round_num}"]


@dataclasses.dataclass(frozen=True)
class Sampling:
    steps: int = 1000
    seed: int | None = None


def witness(folder):
    """A release manager that writes down what it is given."""
    import tensorflow_federated as tff

    class Witness(tff.program.ReleaseManager):
        async def release(self, value, key):
            figures = {name: np.asarray(figure).tolist() for name, figure in value.items()}
            append(folder, event="released", number=key, figures=figures)

    return Witness()


def ledger(mechanism):
    return None if mechanism is None else Ledger(Privacy(mechanism))


def evaluation(every=1):
    """One whose figure nobody can guess, another one each time that it is asked."""
    from federated.training.evaluation import Evaluation

    class Random(Evaluation):
        def __init__(self):
            self.every, self.best, self.client_ids, self._sign = every, "luck", ("b",), 1.0

        def check(self, weights):
            pass

        def figures(self, weights):
            return {"luck": float(np.frombuffer(os.urandom(6) + b"\x00\x40").item())}

    return Random()


def train(folder, rounds, mechanism="gaussian", failing=(), evaluated=False, **kwargs):
    """A run of `rounds` rounds in `folder`, or what is left of it; no ledger without mechanism."""
    from federated.training import program

    if evaluated:
        kwargs["evaluation"] = evaluation()
    return program.train(
        Process(folder, failing),
        lambda client: client,
        Sampler(["a"], Sampling()),
        rounds,
        folder / "run",
        ledger=ledger(mechanism),
        evaluate=lambda model: {"model": model},
        release_managers=[witness(folder)],
        **kwargs,
    )


def opened(folder, mechanism="gaussian"):
    """The run in a folder, as another program would find it."""
    from federated.training.run import Run

    sampler = Sampler(["a"], Sampling())
    run = Run(Process(folder), sampler, folder / "run", ledger(mechanism), max_failures=0)
    run.journal.close()
    return run


def check_record(record, mechanism):
    """What the run did, against what it said at that time."""
    models, began, released, clients = [0.0], 0, {}, []
    for entry in record:
        if entry["event"] == "began":
            began += 1
            # A round goes on from the last model that was released, or a later one.
            newest = list(released.values())[-1]["test/model"] if released else 0.0
            assert models.index(entry["model"]) >= models.index(newest)
            clients += entry["clients"]
            if mechanism != "gaussian":
                assert entry["clients"] == [f"client {entry['rounds']}"]
        elif entry["event"] == "ended":
            models.append(entry["model"])
        else:
            number, figures = entry["number"], entry["figures"]
            assert not released or number >= max(released)
            # A round that is released again is released as it was.
            assert released.setdefault(number, figures) == figures
            assert figures["test/model"] in models
            if mechanism is not None:
                assert figures["privacy/rounds_counted"] == number >= began
    if mechanism == "gaussian":
        assert len(set(clients)) == len(clients)
    return models, began, released


def check(folder, mechanism):
    """Counts and model of a run that was ended, against its record."""
    models, began, released = check_record(record(folder), mechanism)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rounds that were lost
        run = opened(folder, mechanism)
    assert began <= run.journal.begun
    if mechanism is not None:
        assert run.ledger.num_releases == run.journal.begun
        assert run.ledger.lost == run.journal.begun - run.finished
    assert max(released, default=0) <= run.number
    model = float(run.state["model"])
    assert model == released.get(run.number, {"test/model": model})["test/model"]
    assert model in models
    assert int(run.state["rounds"]) == run.finished
    # Its arrays are of the same round, wherever they were written.
    assert (run.state["copies"] == model).all() and (run.state["same"] == 1.0).all()
    return run


def kill_at(moment, also=()):
    """Ends this process at the so-manieth moment where something outside of it changes."""
    left = [moment]

    def tick():
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(owner, name):
        original = getattr(owner, name)

        def hooked(*args, **kwargs):
            tick()
            result = original(*args, **kwargs)
            tick()
            return result

        setattr(owner, name, hooked)

    hook(os, "pwrite")
    hook(pathlib.Path, "rename")
    hook(pathlib.Path, "unlink")
    hook(sys.modules[__name__], "append")
    for owner, name in also:
        hook(owner, name)


def train_really(folder, rounds, mechanism):
    """The same with everything real."""
    import tensorflow_federated as tff

    from tests.helpers import real_rounds

    # The default context has a thread, which did not come along with the fork.
    tff.backends.native.set_sync_local_cpp_execution_context()
    made = real_rounds.process(mechanism)
    real_rounds.report(folder, mechanism, made)
    real_rounds.train(folder, rounds, mechanism, made)
    real_rounds.report(folder, mechanism, made)
    # TFF's own process would outlive this one.
    os.killpg(0, signal.SIGKILL)


def run(job):
    os.setpgid(0, 0)
    if "kill_at" in job:
        files = [(pathlib.Path, "rename")] if job.get("evaluated") else []
        kill_at(job.pop("kill_at"), files)
    globals()[job.pop("what")](**job)


if __name__ == "__main__":
    import tensorflow_federated  # noqa: F401

    import federated.training.program  # noqa: F401
    from tests.helpers import killable

    killable.serve(run)
