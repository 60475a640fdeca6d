"""Hosts on one machine, each a network namespace with a TFF worker and a cable to this one.

Linux lets a program make them that has a network namespace of its own; most systems give one to
everybody:

    unshare --user --map-root-user --net python PROGRAM

Needs `ip` (and `tc` for slow cables) of iproute2.
"""

from __future__ import annotations

import subprocess
import sys

OWN_NETWORK = ("unshare", "--user", "--map-root-user", "--net")
PORT = 8000
# Its namespace is there once it has said so; the cable is, once it is answered.
_START = 'ip link set lo up && echo && read -r _ && exec "$@"'


class Host:
    """A host with a TFF worker, at the other end of a cable.

    Args:
      number: from 1 to 254, another one for each host.
      max_concurrency: how many clients its worker computes at a time.
      rate: of the cable, in each direction, as `tc` writes it, such as `"1gbit"`; as fast as it can
        be if `None`.

    Raises:
      RuntimeError: if this program may not do that.
    """

    def __init__(self, number: int, max_concurrency: int = 1, rate: str | None = None):
        self.address = f"10.77.{number}.2:{PORT}"
        worker = [sys.executable, "-m", "federated.runtime.worker", "--port", str(PORT)]
        worker += ["--max_concurrency", str(max_concurrency)]
        self._process = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", _START, "sh", *worker],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            self._connect(number, rate)
        except BaseException:
            self.close()
            raise

    def _connect(self, number: int, rate: str | None) -> None:
        pid, cable = str(self._process.pid), f"host{number}"
        if not self._process.stdout.readline():
            raise RuntimeError(
                "No namespace for a host. Run the program that makes it as "
                f"`{' '.join(OWN_NETWORK)} python PROGRAM`."
            )
        _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", pid)
        _run("ip", "addr", "add", f"10.77.{number}.1/24", "dev", cable)
        self._there("ip", "addr", "add", f"10.77.{number}.2/24", "dev", "eth0")
        if rate:
            shape = ("root", "tbf", "rate", rate, "burst", "1mb", "latency", "50ms")
            _run("tc", "qdisc", "add", "dev", cable, *shape)
            self._there("tc", "qdisc", "add", "dev", "eth0", *shape)
        _run("ip", "link", "set", cable, "up")
        self.plug()
        print(file=self._process.stdin, flush=True)
        said = self._process.stdout.readline()
        if "ready" not in said:
            raise RuntimeError(f"The worker of host {number} did not start. It said: {said}")

    def _there(self, *command: str) -> None:
        _run("nsenter", "--target", str(self._process.pid), "--net", *command)

    def unplug(self) -> None:
        """Cuts it off: no packet comes back, and no connection is closed."""
        self._there("ip", "link", "set", "eth0", "down")

    def plug(self) -> None:
        """Puts the cable in (again)."""
        self._there("ip", "link", "set", "eth0", "up")

    def close(self) -> None:
        """Ends its worker, and the host with it."""
        self._process.terminate()
        self._process.communicate()


def start_loopback() -> None:
    """Lets this program reach workers of its own, in a namespace that has just been made."""
    _run("ip", "link", "set", "lo", "up")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"`{' '.join(command)}` failed: {done.stderr.strip()}. Run the program as "
            f"`{' '.join(OWN_NETWORK)} python PROGRAM`."
        )
