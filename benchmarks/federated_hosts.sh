#!/bin/sh
# Workers in network namespaces of their own, as on separate hosts: a federated round over them,
# and what happens when the network to one of them is cut. Needs root, Linux and iproute2.
#
#   sudo benchmarks/federated_hosts.sh [python]      (default: .venv/bin/python)
#
# Hosts h1 and h2 have the addresses 10.77.1.2 and 10.77.2.2, this side 10.77.1.1 and 10.77.2.1.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${1:-.venv/bin/python}
export TF_CPP_MIN_LOG_LEVEL=2 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
HOSTS="1 2"
PORT=8000
pids=

clean_up() {
    for pid in $pids; do kill "$pid" 2>/dev/null || true; done
    wait
    for k in $HOSTS; do
        ip netns del "tff-h$k" 2>/dev/null || true
        ip link del "tff-v$k" 2>/dev/null || true
    done
}
trap clean_up EXIT
trap 'exit 1' INT TERM

for k in $HOSTS; do
    ip netns add "tff-h$k"
    ip link add "tff-v$k" type veth peer name eth0 netns "tff-h$k"
    ip addr add "10.77.$k.1/24" dev "tff-v$k"
    ip link set "tff-v$k" up
    ip -n "tff-h$k" addr add "10.77.$k.2/24" dev eth0
    ip -n "tff-h$k" link set eth0 up
    ip -n "tff-h$k" link set lo up
    ip netns exec "tff-h$k" "$PYTHON" -m federated.worker --port "$PORT" &
    pids="$pids $!"
done

"$PYTHON" - "10.77.1.2:$PORT" "10.77.2.2:$PORT" <<'END'
import subprocess
import sys
import time

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from federated import runtime


@tff.tensorflow.computation(np.int32)
def count(n):
    return tf.while_loop(lambda i: i < n, lambda i: [i + 1], [0])[0]


@tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
def count_on_clients(numbers):
    return tff.federated_sum(tff.federated_map(count, numbers))


with runtime.remote_context(sys.argv[1:], timeout=20):
    start = time.monotonic()
    assert count_on_clients([10, 20, 30, 40]) == 100
    print(f"A round over {len(sys.argv) - 1} hosts: {time.monotonic() - start:.2f} s.")

with runtime.remote_context(sys.argv[1:], timeout=3):
    count_on_clients([1, 2])
    # The host is cut off: no packet comes back, and no connection is closed.
    subprocess.run(["ip", "-n", "tff-h2", "link", "set", "eth0", "down"], check=True)
    start = time.monotonic()
    try:
        count_on_clients([1, 2])
    except runtime.WorkerLostError as error:
        print(f"After {time.monotonic() - start:.1f} s: {error}")
        assert error.addresses == (sys.argv[2],)
    else:
        sys.exit("a host that is cut off was not noticed")
    subprocess.run(["ip", "-n", "tff-h2", "link", "set", "eth0", "up"], check=True)

with runtime.remote_context(sys.argv[1:], timeout=20):
    assert count_on_clients([1, 2]) == 3
    print("A new context goes on when the host is back.")
END
