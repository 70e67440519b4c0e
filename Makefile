# make train   the main job: torchtitan's Llama 3 debug model three times (none, full recomputation, regions) and a table
# make test    lint, types, import contracts, tests on two torch releases, multi-process tests
#
# Each makes its own virtual environments when there are none. Needed beforehand: Python 3.11+ and make.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The first interpreter on PATH that is new enough; override with `make PYTHON=...`.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
    if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)

# The oldest torch that is tested; its CPU wheel is enough. Where pip's index offers only CUDA builds, that one is used;
# FLOOR_PIP_ARGS="--index-url https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple" asks for CPU.
FLOOR_TORCH := 2.13.0
# The torchtitan that goes with it; the main environment has the newest one.
FLOOR_TITAN := 0.2.2
FLOOR_PIP_ARGS ?=

# A stamp in each environment names the pyproject.toml it was installed from: a changed one installs again.
HASH := $(shell cksum pyproject.toml | cut -d' ' -f1)
MAIN_STAMP := .venv/.installed-$(HASH)
FLOOR_STAMP := .venv-floor/.installed-$(HASH)-$(FLOOR_TORCH)-$(FLOOR_TITAN)

WORKERS ?= 2
# The order of the tests is shuffled by it; another one finds tests that lean on others.
SEED ?= 2
PYTEST := -m pytest -n $(WORKERS) --dist worksteal --randomly-seed=$(SEED)
# Memory reports show what lives in the whole process: their tests, and the pages with their output, run without others.
REPORT_TESTS := tests/diagnostics tests/tensorboard
OTHER_TESTS := tests --ignore=tests/diagnostics --ignore=tests/tensorboard --ignore=tests/docs -m "not job"
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Modules are compiled when first imported: most of what is installed never is.
PIP_INSTALL := -m pip install --quiet --prefer-binary --no-compile

.PHONY: help train test environments lint contracts floor-tests multi-gpu-tests main-tests titan-jobs compiled-tests clean

help:
	@sed -n '1,4p' Makefile | sed 's/^# \{0,1\}//'

train: $(MAIN_STAMP)
	@.venv/bin/python scripts/train.py $(TRAIN_ARGS)

# In this order, so that the last lines are the summary of the main test run.
test:
	@$(MAKE) --no-print-directory -j2 environments
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory contracts
	@$(MAKE) --no-print-directory floor-tests
	@$(MAKE) --no-print-directory multi-gpu-tests
	@$(MAKE) --no-print-directory main-tests

environments: $(MAIN_STAMP) $(FLOOR_STAMP)

lint: $(MAIN_STAMP)
	@echo "== lint and types"
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/pyright --pythonpath .venv/bin/python

contracts: $(MAIN_STAMP)
	@echo "== import contracts"
	@.venv/bin/lint-imports

floor-tests: $(FLOOR_STAMP)
	@echo "== tests on torch $(FLOOR_TORCH) and torchtitan $(FLOOR_TITAN)"
	@.venv-floor/bin/python $(PYTEST) $(REPORT_TESTS)
	@.venv-floor/bin/python $(PYTEST) tests/docs
	@.venv-floor/bin/python $(PYTEST) $(OTHER_TESTS)

multi-gpu-tests: $(MAIN_STAMP)
	@echo "== multi-process tests under torchrun"
	@.venv/bin/python multi_gpu_tests/run.py

main-tests: $(MAIN_STAMP)
	@echo "== tests on the newest torch"
	@.venv/bin/python $(PYTEST) $(REPORT_TESTS)
	@.venv/bin/python $(PYTEST) tests/docs
	@.venv/bin/python $(PYTEST) $(OTHER_TESTS)

$(MAIN_STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer found. To fix: install one, or name it with make PYTHON=/path/to/python"; exit 2; }
	@echo "== making .venv (torch, torchtitan, development tools; a few minutes the first time)"
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@.venv/bin/python $(PIP_INSTALL) -e '.[dev,titan]'
	@rm -f .venv/.installed-* && touch $@

$(FLOOR_STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer found. To fix: install one, or name it with make PYTHON=/path/to/python"; exit 2; }
	@echo "== making .venv-floor (torch $(FLOOR_TORCH), torchtitan $(FLOOR_TITAN), test tools)"
	@test -x .venv-floor/bin/python || $(PYTHON) -m venv .venv-floor
	@.venv-floor/bin/python $(PIP_INSTALL) $(FLOOR_PIP_ARGS) 'torch==$(FLOOR_TORCH)' 'torchtitan==$(FLOOR_TITAN)' -e '.[test,titan,tensorboard]'
	@rm -f .venv-floor/.installed-* && touch $@

# Every torchtitan job of the documentation, on both versions; about three quarters of an hour on two cores.
titan-jobs: $(MAIN_STAMP) $(FLOOR_STAMP)
	@.venv-floor/bin/python -m pytest -m job tests/titan
	@.venv/bin/python -m pytest -m job tests/titan

# What of the contract suite is inherited by compiled checkpoints, on both versions; ten minutes on two cores.
compiled-tests: $(MAIN_STAMP) $(FLOOR_STAMP)
	@.venv-floor/bin/python $(PYTEST) -m compiled tests/contract
	@.venv/bin/python $(PYTEST) -m compiled tests/contract

clean:
	rm -rf .venv .venv-floor .cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
