# `make demo` and `make test` are all a newcomer needs: every target sets up .venv by itself.

.PHONY: help demo test test-all bench bench-peers lint lock wheel clean
.ONESHELL:
.SHELLFLAGS := -ec

# Where to look for Python, in this order; `make demo PYTHON=/path/to/python` names another one.
PYTHON ?= python3.11 python3.10 python3.9 python3 python
BIN := .venv/bin
# Written last, so that it is there only after a complete set-up.
READY := .venv/ready

# Each peer of the benchmarks has an environment of its own, and a Python that its lock is for.
PEERS := benchmarks/peers
PEERS_READY := $(PEERS)/opacus/.venv/ready $(PEERS)/jax_privacy/.venv/ready
$(PEERS)/opacus/.venv/ready: MINOR := 11
$(PEERS)/jax_privacy/.venv/ready: MINOR := 12

export TF_CPP_MIN_LOG_LEVEL := 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help:
	@echo "make demo      train with differential privacy: examples/quickstart.py"
	echo "make test      the quick tests and the examples in the docstrings"
	echo "make test-all  all tests, the slow ones too"
	echo "make bench     time and memory of training steps: an hour or more, on an idle machine"
	echo "make bench-peers  the same beside Opacus and JAX-Privacy (needs Python 3.11 and 3.12)"
	echo "make lint      ruff: rules and format; mypy: types"
	echo "make lock      re-make requirements/lock.txt from requirements/lock.in"
	echo "make wheel     build dist/*.whl"
	echo "make clean     remove .venv, caches and build files"

demo: $(READY)
	$(BIN)/python examples/quickstart.py

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow" --doctest-modules tests tf_adaptive_dp federated

test-all: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadgroup --doctest-modules tests tf_adaptive_dp federated

# For example: make bench ARGS="--models mlp --batch_sizes 50,100,200,400 --widths 1,2,4"
BENCH = $(BIN)/python -m benchmarks.steps.run --models all \
    --output benchmarks/steps/results.json --report docs/performance.md

bench: $(READY)
	$(BENCH) $(ARGS)

bench-peers: $(READY) $(PEERS_READY)
	$(BENCH) --engines keras_sgd,dpsgd --peers $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lock:
	requirements/lock.sh

wheel: $(READY)
	$(BIN)/python -m pip wheel -qq --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf .venv $(PEERS)/*/.venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Tried in turn: does it run at all (a pyenv shim may not), is it of a fitting version, can it make
# a venv with pip (Debian keeps ensurepip in a package of its own)?
$(READY): requirements/lock.txt
	@fits='import sys; sys.exit(not (3, 9) <= sys.version_info[:2] <= (3, 11))'
	if [ "$$(uname -sm)" != "Linux x86_64" ]; then
	    echo "The locked TensorFlow and TFF are for Linux x86-64, this is $$(uname -sm)." >&2
	    exit 1
	fi
	if ! $(BIN)/python -c "import pip; $$fits" 2>/dev/null; then
	    found= bare=
	    for python in $(PYTHON); do
	        $$python -c "$$fits" >/dev/null 2>&1 || continue
	        if $$python -c "import ensurepip, venv" 2>/dev/null; then found=$$python; break; fi
	        bare="$$bare $$python"
	    done
	    if [ -z "$$found" ]; then
	        echo "No Python to work with. Needed: 3.11, 3.10 or 3.9. Tried: $(PYTHON)." >&2
	        for python in $$bare; do
	            echo "$$python has no venv module (Debian, Ubuntu: apt install python3-venv)." >&2
	        done
	        echo "Name another one with: make PYTHON=/path/to/python3.11 <target>" >&2
	        exit 1
	    fi
	    $$found -m venv --clear .venv
	fi
	echo "Setting up .venv with $$($(BIN)/python -V): 2 to 3 minutes and 2.3 GB, once."
	if ! { $(BIN)/python -m pip install -qq --no-deps --require-hashes -r requirements/lock.txt &&
	       $(BIN)/python -m pip install -qq --no-deps --no-build-isolation -e .; }; then
	    echo "The set-up failed, for the reason above. The next make goes on from here." >&2
	    exit 1
	fi
	touch $@

$(PEERS)/%/.venv/ready: $(PEERS)/%/lock.txt
	@for python in $(PEER_PYTHON) python3.$(MINOR) $(HOME)/.pyenv/versions/3.$(MINOR).*/bin/python; do
	    $$python -c "import sys, ensurepip, venv; sys.exit(sys.version_info[1] != $(MINOR))" \
	        >/dev/null 2>&1 && break
	    python=
	done
	if [ -z "$$python" ]; then
	    echo "$* needs Python 3.$(MINOR) with venv and pip; none was found." >&2
	    echo "Name one with: make PEER_PYTHON=/path/to/python3.$(MINOR) $@" >&2
	    exit 1
	fi
	echo "Setting up $(@D) with Python 3.$(MINOR): a minute, once."
	$$python -m venv --clear $(@D)
	$(@D)/bin/python -m pip install -qq --no-deps -r $<
	touch $@
