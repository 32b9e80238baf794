# Supported versions. setup.cfg states the same numbers and what they mean; change both together.
NEWEST_TENSORFLOW := 2.21.0
NEWEST_KERAS      := 3.15.1
OLDEST_TENSORFLOW := 2.18.1
OLDEST_KERAS      := 3.8.0

# May be set on the command line:
#   PYTHON         makes the virtual environments
#   OLDEST_PYTHON  the same for test-oldest, where PYTHON is newer than the oldest TensorFlow knows
#   TENSORFLOW     the extra of setup.cfg that brings TensorFlow: cpu, tensorflow or gpu
#   ARGS           passed on to the example, to pytest or to the benchmarks
PYTHON        ?= python3
OLDEST_PYTHON ?= $(PYTHON)
TENSORFLOW    ?= cpu
ARGS          ?=

VENV        := .venv
VENV_OLDEST := .venv-oldest
# Setting up is done once, and again when one of the files that describe it changes. A stamp of another TensorFlow (or
# none: a set-up that was broken off) starts from an empty environment, since two TensorFlows overwrite each other.
READY        := $(VENV)/ready-$(TENSORFLOW)
READY_OLDEST := $(VENV_OLDEST)/ready-$(OLDEST_TENSORFLOW)-$(OLDEST_KERAS)
BENCHMARKS   := $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))

# Users get the newest that pip finds. CI pins it, so that a release of that day does not fail a change that is innocent.
ifdef CI
PINS := $(patsubst %,%==$(NEWEST_TENSORFLOW),$(patsubst cpu,tensorflow-cpu,$(patsubst gpu,tensorflow,$(TENSORFLOW)))) \
        keras==$(NEWEST_KERAS)
endif

# Tests run in as many processes as there are cores: most of their time is tracing, which takes one.
PYTEST := -m pytest --numprocesses $(shell nproc 2>/dev/null || echo 2) --dist worksteal

# A backend chosen in ~/.keras/keras.json would be another one; TensorFlow's start-up notes bury what we print.
export KERAS_BACKEND := tensorflow
export TF_CPP_MIN_LOG_LEVEL ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help example test test-all test-oldest lint format bench clean

help:  ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "%-20s %s\n", $$1, $$2}'
	@echo 'Variables: PYTHON=$(PYTHON) TENSORFLOW=$(TENSORFLOW) (cpu, tensorflow or gpu) ARGS="..."'

example: $(READY)  ## train a ResNet on real images, plain and checkpointed
	$(VENV)/bin/python examples/fit_resnet.py $(ARGS)

test: $(READY)  ## run the tests that CI runs, on the newest TensorFlow and Keras
	$(VENV)/bin/python $(PYTEST) -m "not slow" $(ARGS)

test-all: $(READY)  ## run all tests, the slow ones too
	$(VENV)/bin/python $(PYTEST) $(ARGS)

test-oldest: $(READY_OLDEST)  ## run the tests that CI runs, on the oldest supported pair
	$(VENV_OLDEST)/bin/python $(PYTEST) -m "not slow" $(ARGS)

lint: $(READY)  ## check style, change nothing
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(READY)  ## fix what ruff can fix
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(READY)  ## run the benchmarks behind the README's numbers
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(VENV)/bin/python $$script $(ARGS); done

clean:  ## remove the environments and everything built
	rm -rf $(VENV) $(VENV_OLDEST) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): setup.cfg pyproject.toml
	@test -e $@ || $(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable ".[$(TENSORFLOW),examples,test]" $(PINS)
	@touch $@

$(READY_OLDEST): setup.cfg pyproject.toml
	@test -e $@ || $(OLDEST_PYTHON) -m venv --clear $(VENV_OLDEST)
	$(VENV_OLDEST)/bin/python -m pip install --quiet --editable ".[cpu,examples,test]" \
	    tensorflow-cpu==$(OLDEST_TENSORFLOW) keras==$(OLDEST_KERAS)
	@touch $@
