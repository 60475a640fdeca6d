# `make demo` and `make test` are all a newcomer needs: every target sets up .venv by itself.

.PHONY: help demo test test-all test-today bench bench-peers lint lock wheel clean
.ONESHELL:
.SHELLFLAGS := -ec

# Where to look for Python, in this order; `make demo PYTHON=/path/to/python` names another one.
PYTHON ?= python3.11 python3.10 python3.9 python3 python
BIN := .venv/bin
# Written last, so that it is there only after a complete set-up.
READY := .venv/ready
# The newest TensorFlow and Keras 3, in an environment of its own.
PYTHON_TODAY ?= python3.13 python3.12 python3.11 python3.10 python3 python
READY_TODAY := .venv-today/ready
TODAY := tests/_keras tests/accounting tests/update_rules tests/sampling

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
	echo "make test-today  what runs on today's TensorFlow and Keras 3, in .venv-today"
	echo "make bench     time and memory of training steps: an hour or more, on an idle machine"
	echo "make bench-peers  the same beside Opacus and JAX-Privacy (needs Python 3.11 and 3.12)"
	echo "make lint      ruff: rules and format; mypy: types"
	echo "make lock      re-make the locks in requirements/"
	echo "make wheel     build dist/*.whl"
	echo "make clean     remove .venv, caches and build files"

demo: $(READY)
	$(BIN)/python examples/quickstart.py

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow" --doctest-modules tests tf_adaptive_dp federated

test-all: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadgroup --doctest-modules tests tf_adaptive_dp federated

# What runs on Keras 3 so far.
test-today: $(READY_TODAY)
	KERAS_BACKEND=tensorflow .venv-today/bin/python -m pytest -n 2 --dist loadgroup -m "not slow" $(TODAY)

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
	rm -rf .venv .venv-today $(PEERS)/*/.venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): requirements/lock.txt
	@requirements/environment.sh .venv $< 9 11 $(PYTHON)
	$(BIN)/python -m pip install -qq --no-deps --no-build-isolation -e .
	touch $@

$(READY_TODAY): requirements/today.txt
	@requirements/environment.sh .venv-today $< 10 13 $(PYTHON_TODAY)
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
