#!/bin/sh
# environment.sh FOLDER LOCK OLDEST NEWEST PYTHON...: makes a virtual environment from a lock.
#
# OLDEST and NEWEST are the minor versions of Python 3 that the lock is for. The PYTHONs are tried in
# turn: does it run at all (a pyenv shim may not), is it of a fitting version, can it make a venv with
# pip (Debian keeps ensurepip in a package of its own)? An environment that fits is kept.
set -eu
folder=$1 lock=$2 oldest=$3 newest=$4
shift 4

fits="import sys; sys.exit(not (3, $oldest) <= sys.version_info[:2] <= (3, $newest))"
if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "The locked TensorFlow is for Linux x86-64, this is $(uname -sm)." >&2
    exit 1
fi
if ! "$folder/bin/python" -c "import pip; $fits" 2>/dev/null; then
    found='' bare=''
    for python in "$@"; do
        "$python" -c "$fits" >/dev/null 2>&1 || continue
        if "$python" -c "import ensurepip, venv" 2>/dev/null; then
            found=$python
            break
        fi
        bare="$bare $python"
    done
    if [ -z "$found" ]; then
        echo "No Python to work with. Needed: 3.$oldest to 3.$newest. Tried: $*." >&2
        for python in $bare; do
            echo "$python has no venv module (Debian, Ubuntu: apt install python3-venv)." >&2
        done
        echo "Name another one with: make PYTHON=/path/to/python3.$newest <target>" >&2
        exit 1
    fi
    "$found" -m venv --clear "$folder"
fi
echo "Setting up $folder with $("$folder/bin/python" -V): 2 to 3 minutes and about 2 GB, once."
if ! "$folder/bin/python" -m pip install -qq --no-deps --require-hashes -r "$lock"; then
    echo "The set-up failed, for the reason above. The next make goes on from here." >&2
    exit 1
fi
