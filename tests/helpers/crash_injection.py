"""The other end of `killable.serve`: starts jobs and ends them."""

import json
import os
import subprocess
import sys

from tests.helpers import ROOT


class CrashInjector:
    """Runs a program that `killable.serve`s, and kills what it does.

    Args:
      program: its module in `tests.helpers`.
      kill: `os.killpg` if each job leads a group of processes, which then end together.
    """

    def __init__(self, program, kill=os.kill):
        self._program, self._kill = program, kill

    def __enter__(self):
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", f"tests.helpers.{self._program}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        return self

    def __exit__(self, *error):
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()

    def run(self, job, kill_when=None):
        """Exit code of a run; killed as soon as `kill_when()` has returned, unless it is None."""
        pid = int(self._ask(json.dumps(job)))
        if kill_when:
            kill_when()
            self._kill(pid, 9)
        return int(self._ask(""))

    def _ask(self, line):
        self._server.stdin.write(line + "\n")
        self._server.stdin.flush()
        return self._server.stdout.readline()
