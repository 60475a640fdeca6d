# `make demo` and `make test` are all a newcomer needs: they set up what they run in by themselves.
#
# There are two stacks, each with a lock and an environment of its own: `today` (the newest TensorFlow
# and Keras 3; .venv-today) and `tff` (TensorFlow 2.14, the last one that TensorFlow Federated accepts,
# with Keras 2 and TF Privacy; .venv-tff). docs/stacks.md compares them.

.PHONY: help set-up demo docs quick test test-all bench bench-peers lint lock wheel clean
.ONESHELL:
.SHELLFLAGS := -ec
MAKEFLAGS += --no-print-directory

# Where to look for Python, newest first; `make demo PYTHON=/path/to/python` names another one, or
# several for several stacks.
PYTHON ?= $(foreach v,3.13 3.12 3.11 3.10 3.9, \
    python$(v) $(wildcard $(HOME)/.pyenv/versions/$(v).*/bin/python)) python3 python
STACKS = requirements/environment.sh stacks $(PYTHON)
TFF := .venv-tff/bin

# The tests run in many processes, two at a time: TensorFlow keeps every graph that it has compiled,
# and one process for all of them would need 10 GB.
PARTS := 12
PYTEST := -m pytest --doctest-modules tests tf_adaptive_dp federated
QUICK := -m "not slow"
# Its arguments: stacks, the number of parts of each, and which tests of these.
define RUN
echo "Two parts of the tests run at a time; each shows its results when it has ended."
$(MAKE) -k -j2 --output-sync=target PARTS=$2 SELECTED='$3' \
    $$(for stack in $1; do seq -f "part-$$stack-%.0f" $2; done)
endef

# Each peer of the benchmarks has an environment of its own, and a Python that its lock is for.
PEERS := benchmarks/peers
PEERS_READY := $(foreach p,opacus jax_privacy pfl,$(PEERS)/$p/.venv/ready)
$(PEERS)/opacus/.venv/ready $(PEERS)/pfl/.venv/ready: MINOR := 11
$(PEERS)/jax_privacy/.venv/ready: MINOR := 12

export TF_CPP_MIN_LOG_LEVEL := 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Keras 3 has other backends; ~/.keras/keras.json may name one.
export KERAS_BACKEND := tensorflow

help:
	@echo "make demo      train with differential privacy: examples/quickstart.py"
	echo "make set-up    the environments, all at once; every other target sets up what it needs"
	echo "make test      the quick tests and the examples in the docstrings, on both stacks"
	echo "make quick     one case of each quick test, on the newest stack, while you work"
	echo "make test-all  all tests, the slow ones too, on both stacks"
	echo "               demo-today, test-tff, ...: on one stack. today: Keras 3, Python 3.10 to 3.13;"
	echo "               tff: Keras 2 with TensorFlow Federated and TF Privacy, Python 3.9 to 3.11"
	echo "make docs      the documentation site, in site/"
	echo "make bench     time and memory of training steps: an hour or more, on an idle machine"
	echo "make bench-peers  the same beside Keras 3, Opacus, JAX-Privacy and pfl (needs Python 3.11 and 3.12)"
	echo "make lint      ruff: rules and format; mypy: types (needs Python 3.9 to 3.11)"
	echo "make lock      re-make the locks in requirements/"
	echo "make wheel     build dist/*.whl"
	echo "make clean     remove the environments, caches and build files"

# All environments side by side: most of the time they wait for the network and the disk.
set-up:
	@stacks=$$($(STACKS))
	$(MAKE) -s -j3 $$(printf '.venv-%s/ready ' $$stacks docs)

# On the newest stack that there is a Python for.
demo quick wheel:
	@stacks=$$($(STACKS))
	$(MAKE) $@-$${stacks%% *}

# On every stack that there is a Python for; then a sentence about what was left out.
test: SELECTED := $(QUICK)

test test-all:
	@stacks=$$($(STACKS)) status=0
	$(MAKE) -s -j2 $$(printf '.venv-%s/ready ' $$stacks)
	$(call RUN,$$stacks,$(PARTS),$(SELECTED)) || status=1
	requirements/environment.sh left-out $(PYTHON)
	exit $$status

demo-today demo-tff: demo-%: .venv-%/ready
	.venv-$*/bin/python examples/quickstart.py

test-today test-tff: test-%: .venv-%/ready
	@$(call RUN,$*,$(PARTS),$(QUICK))

test-all-today test-all-tff: test-all-%: .venv-%/ready
	@$(call RUN,$*,$(PARTS))

quick-today quick-tff: quick-%: .venv-%/ready
	@$(call RUN,$*,2,$(QUICK) --one-case)

# part-today-3: the tests of the third part, on one stack.
part-%:
	@set -- $(subst -, ,$*)
	.venv-$$1/bin/python $(PYTEST) $(SELECTED) --part $$2/$(PARTS)

wheel-today wheel-tff: wheel-%: .venv-%/ready
	.venv-$*/bin/python -m pip wheel -qq --no-deps --no-build-isolation --wheel-dir dist .

# For example: make bench ARGS="--models mlp --batch_sizes 50,100,200,400 --widths 1,2,4"
BENCH = $(TFF)/python -m benchmarks.steps.run --models all \
    --output benchmarks/steps/results.json --report docs/performance.md

bench: .venv-tff/ready
	$(BENCH) $(ARGS)

bench-peers: .venv-tff/ready .venv-today/ready $(PEERS_READY)
	$(BENCH) --engines keras_sgd,dpsgd --peers $(ARGS)
	$(TFF)/python -m benchmarks.federated.peers
	$(TFF)/python -m benchmarks.accounting.strategies

# `--strict` fails on broken links; with `--quiet` it would not notice them. Nothing is loaded from the network, neither now nor by readers.
docs: .venv-docs/ready
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict $(ARGS)
	echo "The site is in site/; start with site/index.html."

# The oldest Python that the library is for also has the oldest stubs, so types are checked there.
lint: .venv-tff/ready
	$(TFF)/ruff check .
	$(TFF)/ruff format --check .
	$(TFF)/mypy

lock:
	requirements/lock.sh

clean:
	rm -rf .venv-today .venv-tff .venv-docs $(PEERS)/*/.venv build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv-today/ready .venv-tff/ready .venv-docs/ready: .venv-%/ready: requirements/%.txt
	@requirements/environment.sh set-up $* $(PYTHON)

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
