# Everything sets itself up: `make demo` and `make test` work on a bare machine with Python 3.10+, git and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OUT ?= out

# DeepSpeed compiles an op on first use: with the ninja of .venv, into a cache of .venv, whatever else the machine has.
export PATH := $(abspath $(BIN)):$(PATH)
export TORCH_EXTENSIONS_DIR ?= $(abspath $(VENV))/torch_extensions
# Two local ranks share the machine's cores; DeepSpeed looks for an accelerator unless told not to.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test lint bench wheel clean
.DEFAULT_GOAL := help

help: ## Show this list
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Create .venv with everything the other commands need

$(READY): pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, found " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@echo "building DeepSpeed's communication op once, so that the first run does not wait for it"
	-DS_ACCELERATOR=cpu $(BIN)/python -c 'from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as B; B().load(verbose=False)' >/dev/null 2>&1
	touch $@

demo: $(READY) ## Train a recommender on real data, dense and with DCT: table in the terminal, plot in out/
	$(BIN)/dct demo --out $(OUT)

test: $(READY) ## Run the whole test suite
	$(BIN)/python -m pytest

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY) ## Selection kernels beside their alternatives
	$(BIN)/python benchmarks/selection.py

wheel: $(READY) ## Build a wheel into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## Remove what the commands made
	rm -rf $(VENV) $(OUT) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
