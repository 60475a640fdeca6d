#!/bin/sh
# Sets up the environments of the two stacks, .venv-today and .venv-tff, from their locks, and that of
# the documentation, .venv-docs, as if it were a third stack.
#
#   environment.sh set-up STACK PYTHON...   makes or completes .venv-STACK
#   environment.sh stacks PYTHON...         prints the stacks that there is a Python for
#   environment.sh left-out PYTHON...       says of the others what they are and what they need
#
# The PYTHONs are tried in turn: does it run at all (a pyenv shim may not), is it of a fitting version,
# can it make a venv with pip (Debian keeps ensurepip in a package of its own)? An environment that
# fits is kept.
set -eu

# choose STACK: what it is, and the minor versions of Python 3 that its lock is for.
choose() {
    stack=$1 folder=.venv-$1
    case $stack in
        today) what="the stack of today, Keras 3" oldest=10 newest=13 ;;
        tff) what="the older stack, federated/ and Keras 2 with TF Privacy" oldest=9 newest=11 ;;
        docs) what="the documentation" oldest=10 newest=13 ;;
    esac
    fits="import sys; sys.exit(not (3, $oldest) <= sys.version_info[:2] <= (3, $newest))"
}

has_environment() {
    # Earlier checkouts have this environment alone, as .venv.
    if [ $stack = tff ] && [ ! -e $folder ] && [ -e .venv/ready ]; then
        ln -s .venv $folder
    fi
    "$folder/bin/python" -c "import pip; $fits" 2>/dev/null
}

# has_python PYTHON...: sets `found` to the first that will do.
has_python() {
    for found in "$@"; do
        "$found" -c "import ensurepip, venv; $fits" >/dev/null 2>&1 && return
    done
    return 1
}

# complain VERSIONS PYTHON...: that none of them will do.
complain() {
    echo "No Python to work with. Needed: $1, with its venv module" \
        "(Debian, Ubuntu: apt install python3-venv)." >&2
    shift
    echo "Tried: $*." >&2
    echo "Name another one with: make PYTHON=/path/to/python3 <target>" >&2
    exit 1
}

command=$1
shift
case $command in
    stacks)
        stacks=''
        for each in today tff; do
            choose $each
            if has_environment || has_python "$@"; then stacks="$stacks $stack"; fi
        done
        [ -n "$stacks" ] || complain "3.9 to 3.13" "$@"
        echo $stacks
        ;;
    left-out)
        for each in today tff; do
            choose $each
            has_environment || has_python "$@" ||
                echo "Left out: $what, which needs Python 3.$oldest to 3.$newest (get one with" \
                    "\`uv python install 3.$newest\` or \`pyenv install 3.$newest\`)."
        done
        ;;
    set-up)
        choose "$1"
        shift
        costs="2 to 3 minutes and 2 to 3 GB"
        if [ $stack = docs ]; then
            costs="half a minute"
        elif [ "$(uname -sm)" != "Linux x86_64" ]; then
            echo "The locked TensorFlow is for Linux x86-64, this is $(uname -sm)." >&2
            exit 1
        fi
        if ! has_environment; then
            has_python "$@" || complain "3.$oldest to 3.$newest" "$@"
            "$found" -m venv --clear $folder
        fi
        echo "Setting up $folder with $($folder/bin/python -V): $costs, once."
        pip="$folder/bin/python -m pip install -qq --no-deps"
        # The documentation is built from the sources, without importing them.
        if ! $pip --require-hashes -r requirements/$stack.txt ||
            { [ $stack != docs ] && ! $pip --no-build-isolation -e .; }; then
            echo "The set-up failed, for the reason above. The next make goes on from here." >&2
            exit 1
        fi
        # Written last, so that it is there only after a complete set-up.
        touch $folder/ready
        ;;
esac
