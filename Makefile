# StateFlow: `make help` lists what can be done. Everything runs from a virtual environment that is built here.

VENV ?= .venv
# The first interpreter that runs and is new enough. (A pyenv shim may exist and still not run.)
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST = $(BIN)/python -m pytest -m "not gpu" $(ARGS)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  Settings: VENV=.venv  PYTHON=python3.12  ARGS="-k checker" (more arguments for pytest or the demo)'

demo: $(STAMP) ## train a small model on this machine's CPU, two processes, a few minutes
	@rm -rf outputs/demo
	@CUDA_VISIBLE_DEVICES= $(BIN)/stateflow train titan_configs/demo.toml $(ARGS)

test: $(STAMP) ## run the tests that need no GPU
	@$(PYTEST)

test-all: $(STAMP) ## the same with ten times the random examples
	@HYPOTHESIS_PROFILE=nightly $(PYTEST) --timeout 3600

lint: $(STAMP) ## check style with ruff
	@$(BIN)/ruff check .

clean: ## remove caches and builds; keep the virtual environment and the outputs of runs
	@rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	@find . \( -path './.venv*' -o -path ./.git \) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# Rebuilt when the dependencies change, otherwise left alone.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and was not found; set PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "Making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing into $(VENV) (torch and torchtitan: a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@
