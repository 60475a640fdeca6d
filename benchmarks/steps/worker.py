"""One engine on one model: makes the training step and times it on command.

No privacy claim: the data is random. `run.py` starts it in the environment of the engine; see
`protocol.py` for its commands.

    python -m benchmarks.steps.worker --engine dpsgd --model mlp --batch_size 250
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import sys
import time
from typing import Callable

from benchmarks.steps import catalogue, problems, protocol


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """The versions of Python and of the packages."""
    found = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), **found}


def time_steps(step: Callable[[], None], steps: int, untimed: int) -> list[float]:
    """The milliseconds of each of `steps` steps, after `untimed` steps."""
    for _ in range(untimed):
        step()
    milliseconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        milliseconds.append(round(1e3 * (time.perf_counter() - start), 4))
    return milliseconds


def serve(args: argparse.Namespace, answers) -> None:
    """Makes the step and answers commands until it is told to quit."""
    commands = protocol.receive(sys.stdin)
    families = problems.PROBLEMS[args.model].families
    if families and catalogue.ENGINES[args.engine][0] not in families:
        raise protocol.NotSupportedError("this model was not written for it")
    family = catalogue.family_of(args.engine)
    module = importlib.import_module(family.module)
    start_mib = protocol.peak_memory_mib()
    step, num_parameters = module.make(args.engine, args.model, args.batch_size, args.width)
    protocol.send(
        answers,
        ready=True,
        num_parameters=num_parameters,
        start_mib=start_mib,
        versions=versions(family.packages),
    )
    for message in commands:
        if message["command"] == "run":
            milliseconds = time_steps(step, message["steps"], message.get("untimed", 0))
            protocol.send(answers, milliseconds=milliseconds)
        elif message["command"] == "memory":
            protocol.send(answers, peak_mib=protocol.peak_memory_mib())
        else:
            raise ValueError(f"Unknown command. Received: {message}")


def main() -> None:
    """Serves, and reports errors."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", choices=list(catalogue.ENGINES), required=True)
    parser.add_argument("--model", choices=list(problems.PROBLEMS), required=True)
    parser.add_argument("--batch_size", type=int, required=True)
    parser.add_argument("--width", type=int, default=1)
    args = parser.parse_args()
    answers = protocol.take_stdout()
    with protocol.reported_errors(answers):
        serve(args, answers)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # frameworks may hang in their own cleanup
