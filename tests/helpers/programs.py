"""Runs the programs of `examples/` as a user would."""

import json
import os
import pathlib
import subprocess
import sys

from examples.experiments.lib import harness
from tests.helpers import ROOT


def run_example(program, *arguments):
    """Runs a program of `examples/` to its end, which must be a success; returns what it prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / program), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_experiment(name, folder, *arguments, dataset=None):
    """Runs an experiment at the smoke scale; its figure must not be empty.

    Args:
      name: the folder of the program.
      folder: of the results.
      *arguments: more of the command line.
      dataset: for programs with several data sets.

    Returns:
      What it prints, and the trials that it stored.
    """
    chosen = ["--dataset", dataset] if dataset else []
    program = f"experiments/{name}/run.py"
    out = run_example(program, "--output", folder, *chosen, *arguments)
    end = f"_{dataset}_smoke" if dataset else "_smoke"
    assert (folder / f"{name}{end}.png").stat().st_size > 10_000
    return out, json.loads((folder / f"results{end}.json").read_text())["trials"]


def assert_stored_trials_are_those_of_the_plan(module, dataset):
    """Checks that the committed trials are those of the small scale; returns their table."""
    folder = pathlib.Path(module.__file__).parent
    results = harness.Results(folder / f"results_{dataset}_small.json")
    experiment = module.EXPERIMENTS[dataset]
    assert results.trials and not results.missing(experiment.plan("small", results.trials))
    return experiment.table(results.trials)
