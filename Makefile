# StateFlow: `make help` lists what can be done. Everything runs from a virtual environment that is built here.

VENV ?= .venv
# The first interpreter that runs and is new enough. (A pyenv shim may exist and still not run.)
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
# Processes that run tests; each may take 2 GB. Pools of processes and what is built once stay in one of them.
WORKERS ?= $(shell python3 -c 'import os; print(min(8, len(os.sched_getaffinity(0))))' 2>/dev/null || echo 2)
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What PyTorch brings to GPUs today, beside the newest: kernels are compiled and interpreted with both. See
# tests/kernels/aot_testing.py. Its interpreter breaks with numpy 2.4.
OTHER_TRITON := $(VENV)/triton-3.6.0
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help demo quick test test-all lint clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  Settings: VENV=.venv  PYTHON=python3.12  WORKERS=2  ARGS="-k checker" (more arguments for pytest or the demo)'

# A folder of its own, emptied so that the demo starts anew: outputs/demo may hold somebody's run of that config.
demo: $(STAMP) ## train a small model on this machine's CPU, two processes, a few minutes; anew each time
	@rm -rf outputs/make_demo
	@CUDA_VISIBLE_DEVICES= $(BIN)/stateflow train titan_configs/demo.toml --job.dump_folder=outputs/make_demo $(ARGS)

quick: $(STAMP) ## the tests that start no processes and compile nothing, without those of the kernels
	@$(PYTEST) -m "not gpu and not processes and not slow" --ignore=tests/kernels $(ARGS)

test: $(STAMP) $(OTHER_TRITON) ## run the tests that need no GPU
	@$(PYTEST) -m "not gpu" $(ARGS)

test-all: $(STAMP) $(OTHER_TRITON) ## the same with ten times the random examples
	@HYPOTHESIS_PROFILE=nightly $(PYTEST) -m "not gpu" --timeout 3600 $(ARGS)

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

$(OTHER_TRITON): $(STAMP)
	@echo "Installing $@, to compile and interpret kernels with"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@ triton==3.6.0 'numpy<2.4'
	@touch $@
