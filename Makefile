# Everything sets itself up: `make demo` and `make test` work on a bare machine with Python 3.10+, git and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TEST_READY := $(VENV)/.ready-test
OUT ?= out

# DeepSpeed compiles an op on first use: with the ninja of .venv, into a cache of .venv, whatever else the machine has.
export PATH := $(abspath $(BIN)):$(PATH)
export TORCH_EXTENSIONS_DIR ?= $(abspath $(VENV))/torch_extensions
# Two local ranks share the machine's cores; DeepSpeed looks for an accelerator unless told not to.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Tests start a hundred interpreters: none is to compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# Not needed where there is no C++ compiler: DeepSpeed then works without it.
BUILD_OP := DS_ACCELERATOR=cpu $(BIN)/python -c 'from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as B; B().load(verbose=False)'

# $(call step,what is done,command): one line with the seconds it took; the output is shown if it fails.
define step
@printf '  %-64s' '$(1)'; began=$$(date +%s); log=$$(mktemp); \
if { $(2); } > $$log 2>&1; then printf '%4d s\n' $$(($$(date +%s) - began)); rm -f $$log; \
else printf 'failed\n'; cat $$log; rm -f $$log; exit 1; fi
endef

.PHONY: help gpu-wheels gpu-hour setup demo test test-fast test-slow test-hosts test-gpu test-oldest test-newest test-onebit test-aarch64 lint docs bench bench-gpu links \
  soak fuzz audit wheels release-check clean
.DEFAULT_GOAL := help

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(TEST_READY) ## Create .venv with everything the other commands need

$(READY): pyproject.toml setup.py constraints.txt locks/demo.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, found " + sys.version)'
	@echo 'Setting up $(VENV), once:'
	$(call step,virtual environment,$(PYTHON) -m venv $(VENV))
	$(call step,pip,$(BIN)/python -m pip install --upgrade pip)
	$(call step,torch (several minutes on a slow line),$(BIN)/python -m pip install -c constraints.txt torch)
	$(call step,DeepSpeed and what the demo needs,$(BIN)/python -m pip install --require-hashes --no-deps -r locks/demo.lock)
	$(call step,dct-plugin,$(BIN)/python -m pip install --no-deps -e .)
	$(call step,DeepSpeed communication op (compiled once),$(BUILD_OP) || true)
	@touch $@

$(TEST_READY): $(READY) locks/dev.lock
	$(call step,Megatron-core and Triton and test tools,$(BIN)/python -m pip install --require-hashes --no-deps -r locks/dev.lock)
	@touch $@

demo: $(READY) ## Train a recommender on real data, dense and with DCT: table in the terminal, plot in out/
	@$(BIN)/dct demo --out $(OUT)

# Files of tests side by side, one more than there are cores: fixtures of a file start processes once. Most tests
# have two or four processes.
IN_PARALLEL = -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: $(TEST_READY) ## Run the whole test suite
	@$(BIN)/python -m pytest $(IN_PARALLEL)

test-fast: $(TEST_READY) ## Run the tests that start no processes, in about two minutes
	@$(BIN)/python -m pytest -m 'not slow' $(IN_PARALLEL)

test-slow: $(TEST_READY) ## Run the tests that take minutes each, once a week
	@HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest --long

# What wheels do not have is fetched at a tag, into a folder of .venv.
test-hosts: $(TEST_READY) ## Run the own tests of torch, DeepSpeed, Accelerate, torchft with the plugin (needs github.com)
	@$(BIN)/python tests/frameworks/run.py --sources $(VENV)/hosts --out $(OUT)/hosts.json

# The last DeepSpeed that has 1-bit Adam, in a folder of its own that only these tests import.
ONEBIT := $(VENV)/onebit
$(ONEBIT)/.ready: $(TEST_READY) locks/onebit.lock
	$(call step,DeepSpeed with 1-bit optimizers,$(BIN)/python -m pip install --upgrade --require-hashes --no-deps --target $(ONEBIT) -r locks/onebit.lock)
	$(call step,its communication op (compiled once),PYTHONPATH=$(ONEBIT) TORCH_EXTENSIONS_DIR=$(abspath $(ONEBIT))/torch_extensions $(BUILD_OP) || true)
	@touch $@

test-onebit: $(ONEBIT)/.ready ## Run the tests of the slot of 1-bit optimizers with an older DeepSpeed
	@DCT_ONEBIT_DEEPSPEED=$(abspath $(ONEBIT)) $(BIN)/python -m pytest tests/deepspeed/test_onebit.py

# The lowest version of everything that pyproject.toml names, in an environment of its own: 6 GB, as torch is
# the build with CUDA there.
OLDEST := $(VENV)/oldest
OLDEST_TEST = DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 \
TORCH_EXTENSIONS_DIR=$(abspath $(OLDEST))/torch_extensions $(OLDEST)/bin/python -m pytest
$(OLDEST)/.ready: pyproject.toml
	$(call step,virtual environment,$(PYTHON) -m venv $(OLDEST))
	$(call step,uv,$(OLDEST)/bin/python -m pip install uv)
	$(call step,the oldest versions (several minutes),$(OLDEST)/bin/uv pip install --python $(OLDEST) --resolution lowest-direct -r pyproject.toml --extra test setuptools)
	$(call step,dct-plugin,$(OLDEST)/bin/uv pip install --python $(OLDEST) --no-deps -e .)
	@touch $@

test-oldest: $(OLDEST)/.ready ## Run tests with the oldest torch, pydantic, DeepSpeed, Megatron allowed (6 GB on disk)
	@$(OLDEST_TEST) -m 'not slow'
	@$(OLDEST_TEST) tests/ddp/test_ddp.py tests/deepspeed/test_deepspeed.py tests/megatron/test_megatron_hooks.py

# The newest version of everything that pyproject.toml allows, in an environment of its own. Where there are several
# Pythons, PYTHON=python3.12: new releases of megatron-core need it.
NEWEST := $(VENV)/newest
NEWEST_TEST = DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 \
TORCH_EXTENSIONS_DIR=$(abspath $(NEWEST))/torch_extensions $(NEWEST)/bin/python -m pytest
$(NEWEST)/.ready: pyproject.toml
	$(call step,virtual environment,$(PYTHON) -m venv $(NEWEST))
	$(call step,uv,$(NEWEST)/bin/python -m pip install uv)
	$(call step,the newest versions (several minutes),$(NEWEST)/bin/uv pip install --python $(NEWEST) --upgrade -r pyproject.toml --extra test setuptools)
	$(call step,dct-plugin,$(NEWEST)/bin/uv pip install --python $(NEWEST) --no-deps -e .)
	@touch $@

test-newest: $(NEWEST)/.ready ## Run tests with the newest torch, DeepSpeed, Megatron, transformers (6 GB on disk)
	@$(NEWEST_TEST) -m 'not slow'
	@$(NEWEST_TEST) tests/ddp/test_ddp.py tests/deepspeed/test_deepspeed.py tests/megatron/test_megatron_hooks.py tests/fsdp tests/huggingface

# On a machine with a GPU, which may have no network: nothing is installed, $(PYTHON) has torch, triton and pytest.
test-gpu: ## Run the GPU tests with $(PYTHON), installing nothing (under 8 minutes)
	@PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest tests/gpu

bench-gpu: ## GPU figures with $(PYTHON), installing nothing, into out/ (under 8 minutes)
	@mkdir -p $(OUT)
	@PYTHONPATH=$(CURDIR) $(PYTHON) benchmarks/gpu.py --json $(OUT)/gpu.json

# Both take the options of benchmarks/gpu_hour.py in ARGS.
gpu-wheels: ## Gather what a machine with a GPU and without a network lacks, into .gpu-wheels (60 MB)
	@$(PYTHON) benchmarks/gpu_hour.py wheels --into .gpu-wheels $(ARGS)

gpu-hour: ## What thirty minutes of a GPU can show, in calls of nine: ARGS="--call ranks", tests, figures; into out/gpu-hour
	@$(PYTHON) benchmarks/gpu_hour.py run $(if $(wildcard .gpu-wheels),--wheels .gpu-wheels) $(ARGS)

lint: $(TEST_READY) ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

DOCS_READY := $(VENV)/.ready-docs
$(DOCS_READY): $(TEST_READY) locks/docs.lock
	$(call step,Sphinx and its theme,$(BIN)/python -m pip install --require-hashes --no-deps -r locks/docs.lock)
	@touch $@

docs: $(DOCS_READY) ## Build the documentation into out/site; a warning or a dead link is an error
	@$(BIN)/python -m sphinx -q -W --keep-going -d $(OUT)/doctrees docs $(OUT)/site

bench: $(READY) ## Selection kernels beside their alternatives
	@$(BIN)/python benchmarks/selection.py

SECONDS ?= 1800
soak: $(TEST_READY) ## Kill training again and again; it must end bitwise as without (SECONDS=1800)
	@$(BIN)/python tests/reliability/soak.py --seconds $(SECONDS)

fuzz: $(TEST_READY) ## Mutated payloads, state files, configurations, scripts, under sanitizers (SECONDS=1800)
	@$(BIN)/python tests/reliability/fuzz.py --seconds $(SECONDS)

AUDIT := $(VENV)/audit
audit: ## Look up what locks/ names in the database of known faults (needs pypi.org)
	@test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/python -m pip install --quiet pip-audit; }
	$(AUDIT)/bin/pip-audit --strict --disable-pip --require-hashes -r locks/dev.lock -r locks/demo.lock -r locks/docs.lock -r locks/release.lock

links: $(READY) ## Step times on links of limited rate, beside other methods: tables and plot in out/links
	@$(BIN)/python -m benchmarks.links --out $(OUT)/links

RELEASE := $(VENV)/release
$(RELEASE)/.ready: locks/release.lock
	$(call step,virtual environment,$(PYTHON) -m venv $(RELEASE))
	$(call step,compiler for all platforms and release tools,$(RELEASE)/bin/python -m pip install --require-hashes --no-deps -r locks/release.lock)
	@touch $@

wheels: $(RELEASE)/.ready ## Build wheels for every platform and a source distribution into dist/
	@$(RELEASE)/bin/python release/wheels.py

release-check: $(RELEASE)/.ready $(TEST_READY) ## Do all of a release that can be done here: build twice, check, test, SBOM
	@TEST_PYTHON=$(BIN)/python $(RELEASE)/bin/python release/check.py

test-aarch64: $(RELEASE)/.ready ## Run kernel tests of the aarch64 wheel under qemu (root, Debian's packages, 1 GB)
	@$(RELEASE)/bin/python release/aarch64.py

clean: ## Remove what the commands made
	rm -rf $(VENV) $(OUT) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
