# Each target sets up .venv by itself; what is installed already is not installed again.
# PYTHON=python3.12 picks the interpreter, ARGS="-k softmax" goes to pytest, JOBS=2 is the number
# of test processes: three keep two cores at work, since some tests wait for others' processes.

PYTHON ?= python3
JOBS ?= 3
ARGS ?=
CHAOS ?= 10

VENV := .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python
CONSTRAINTS := tests/constraints.txt
# Most of what is installed is never imported: Python compiles a module where it is.
INSTALL := $(RUN) -m pip install --disable-pip-version-check --no-compile -c $(CONSTRAINTS)
REQUIREMENTS := pyproject.toml $(CONSTRAINTS)
OLDER := VENV=.venv-jax CONSTRAINTS=tests/constraints-jax-older.txt

# Some images set it. Hundreds of processes would each compile a framework's sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-core test-all durations defects chaos test-cuda-build jax-older test-jax-older test-installs test-oldest-torch try grist lint types docs wheel bench bench-gpu test-gpu test-long rounding wild test-array-api clean newest test-newest test-newest-torch

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile | while IFS='	' read -r name what; do \
		printf '  make %-14s %s\n' "$$name" "$$what"; done

demo: $(VENV)/demo.stamp ## Break a small model and print the report
	$(RUN) -m anynan demo

# One thread per test process: they share the cores already.
PYTEST := $(RUN) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: export OMP_NUM_THREADS = 1
test: $(VENV)/test.stamp ## Run the tests: the core, and each framework in its first form
	$(PYTEST) --tiers 0-1 $(ARGS)

test-core: export OMP_NUM_THREADS = 1
test-core: $(VENV)/test.stamp ## Run the tests of the core, which import no framework
	$(PYTEST) --tiers 0 $(ARGS)

test-all: export OMP_NUM_THREADS = 1
test-all: $(VENV)/test.stamp ## Run what `make test` leaves out: variants, processes, pages
	$(PYTEST) --tiers 2 $(ARGS)

# On a machine with nothing else to do: both tiers, then the tables of docs/contributing.md.
durations: export OMP_NUM_THREADS = 1
durations: $(VENV)/test.stamp ## Measure what each test takes (writes tests/durations.json)
	mkdir -p build
	$(if $(ARGS),cp tests/durations.json build,rm -f build/durations.json)
	$(PYTEST) --durations-to build/durations.json $(ARGS)
	mv build/durations.json tests
	$(RUN) -m tests.tiers

# Each is planted in a copy. ARGS="--all-tests a_word" takes some, and runs all of `make test` for each.
defects: $(VENV)/test.stamp ## Plant defects one by one, and see which test catches each
	$(RUN) -m tests.defects --write $(ARGS)

# The conformance suite, the tracker itself, and the demo from beginning to end.
test-jax-older: export OMP_NUM_THREADS = 1
test-jax-older: ## Run what matters of the tests with an older JAX, in .venv-jax
	$(MAKE) jax-older
	.venv-jax/bin/python -m pytest -n $(JOBS) --backends jax.numpy \
		tests/conformance tests/jax_adapter/test_tracking.py $(ARGS)
	.venv-jax/bin/python -m anynan demo --framework jax --bug mask

jax-older:
	$(MAKE) $(OLDER) .venv-jax/jax.stamp

# What pip installs today, nothing pinned and nothing kept from the last time, under Python 3.13.
# A release of a framework can fail it: the versions are what it prints first.
NEWEST ?= python3.13
NEWEST_TESTS := tests/conformance tests/jax_adapter tests/keras_adapter tests/tensorflow_adapter \
	tests/keras_backends/test_on_jax.py tests/test_recorder*.py
UPGRADE = -m pip install -q --disable-pip-version-check --no-compile --upgrade --upgrade-strategy eager
VERSIONS = -c "import importlib.metadata as m, sys; print(sys.version.split()[0], \
	*sorted({f'{d.name}=={d.version}' for d in m.distributions()}, key=str.lower))"

newest:
	$(MAKE) VENV=.venv-newest PYTHON='$(NEWEST)' .venv-newest/python.stamp
	.venv-newest/bin/python $(UPGRADE) -e '.[jax,keras,save]' array-api-strict dm-haiku equinox hypothesis ml-dtypes \
		pytest pytest-xdist tensorflow-cpu

test-newest: export OMP_NUM_THREADS = 1
test-newest: newest ## Run what matters of the tests with today's JAX, TensorFlow, Keras and NumPy
	@.venv-newest/bin/python $(VERSIONS)
	.venv-newest/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder \
		--backends numpy,jax.numpy,tensorflow $(NEWEST_TESTS) $(ARGS)

# Its build on the registry is for CUDA: some gigabytes.
test-newest-torch: export OMP_NUM_THREADS = 1
test-newest-torch: ## Run the tests of the PyTorch adapter with today's PyTorch, in .venv-newest-torch
	$(MAKE) VENV=.venv-newest-torch .venv-newest-torch/python.stamp
	.venv-newest-torch/bin/python $(UPGRADE) -e '.[torch,lightning,transformers]' expecttest \
		hypothesis pytest pytest-xdist
	@.venv-newest-torch/bin/python $(VERSIONS)
	.venv-newest-torch/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder \
		--backends torch tests/conformance tests/torch_adapter $(ARGS)

# CHAOS=20 walks twenty times as many random programs as the tests do.
chaos: export OMP_NUM_THREADS = 1
chaos: $(VENV)/test.stamp ## Walk many random programs beside untracked twins, and run the long tests
	$(RUN) -m pytest -n $(JOBS) tests/chaos --chaos $(CHAOS) $(ARGS)

# The oldest and the newest of each, in an environment of its own: import, smoke test and demo.
test-installs: ## Try the oldest and the newest frameworks, each installed by itself
	$(MAKE) PARTS=numpy SET=oldest-numpy WHAT='numpy==2.0.0 array-api-compat==1.10 rich==13.0.0' try
	$(MAKE) PARTS='numpy jax' SET=oldest-jax WHAT='jax==0.7.2 jaxlib==0.7.2 numpy==2.0.2' try
	$(MAKE) PARTS='tensorflow keras' SET=oldest-tensorflow \
		WHAT='tensorflow-cpu==2.18.0 keras==3.8.0 numpy==2.0.2' try
	$(MAKE) PARTS=numpy SET=newest-numpy WHAT=numpy try
	$(MAKE) PARTS=jax SET=newest-jax WHAT=jax try
	$(MAKE) PARTS='tensorflow keras' SET=newest-tensorflow WHAT='tensorflow-cpu keras' try
	$(MAKE) PARTS=torch SET=newest-torch WHAT=torch try

# Its builds on the registry are for CUDA: some gigabytes.
test-oldest-torch: ## Try the oldest PyTorch
	$(MAKE) PARTS=torch SET=oldest-torch WHAT='torch==2.8.0' try

try:
	$(MAKE) VENV=.venv-try/$(SET) .venv-try/$(SET)/python.stamp
	.venv-try/$(SET)/bin/python -m pip install -q --disable-pip-version-check -e . $(WHAT)
	.venv-try/$(SET)/bin/python -m tests.smoke $(PARTS)

lint: $(VENV)/lint.stamp ## Check style and formatting
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/test.stamp $(VENV)/lint.stamp ## Check types
	$(RUN) -m mypy

docs: $(VENV)/test.stamp $(VENV)/docs.stamp ## Build the docs, warnings as errors (make test runs their code)
	$(RUN) -m sphinx -W --keep-going -n -E -b html docs build/docs

wheel: $(VENV)/wheel.stamp ## Build the sdist, and the wheel from it, into dist/
	rm -rf dist
	$(RUN) -m build

bench: $(VENV)/bench.stamp ## Run the benchmarks on the CPU (writes docs/benchmarks.md)
	$(RUN) -m tests.benchmarks $(ARGS)

bench-gpu: $(VENV)/bench.stamp ## Run the benchmarks on the GPU (prints only)
	$(RUN) -m tests.benchmarks --device cuda --write build/bench-gpu.md $(ARGS)

rounding: $(VENV)/test.stamp ## Count the planted bugs that anynan.compare finds (prints docs/rounding-measured.md's table)
	$(RUN) -m tests.benchmarks.rounding $(ARGS)

grist: $(VENV)/test.stamp ## Run and stress the programs of GRIST: GRIST=<checkout> RANUM=<checkout> (prints the tables of docs/stress-measured.md)
	$(RUN) -m tests.benchmarks.grist $(GRIST) $(RANUM) $(ARGS)

test-long: export OMP_NUM_THREADS = 1
test-long: $(VENV)/test.stamp ## Run the tests that take long by themselves
	$(RUN) -m pytest -n $(JOBS) -m long $(ARGS)

# In .venv-wild: the suites need packages that nothing else here does. A run that is stopped goes on.
# ARRAY_API_TESTS=<a checkout of array-api-tests, with its submodule> runs those too.
wild: export OMP_NUM_THREADS = 1
wild: export HF_HUB_OFFLINE = 1
wild: ## Run programs nobody here wrote, as ARGS="transformers --only gpt2" (writes docs/proof.md)
	$(MAKE) VENV=.venv-wild .venv-wild/wild.stamp
	.venv-wild/bin/python -m tests.wild --write docs/proof.md $(ARGS)

# They are on no package index. ARRAY_API_TESTS=<a checkout with its submodule> runs that one.
ARRAY_API_COMMIT := 55fcc60179efa2680ddd6cd926ddf17b83530e2b
ARRAY_API_TESTS ?= build/array-api-tests
test-array-api: export OMP_NUM_THREADS = 1
test-array-api: ## Run the public array-api-tests, plain and tracked, NumPy and strict (prints the table)
	$(MAKE) VENV=.venv-wild .venv-wild/wild.stamp
	@test -d '$(ARRAY_API_TESTS)/array_api_tests' || { \
		git clone https://github.com/data-apis/array-api-tests '$(ARRAY_API_TESTS)' && \
		git -C '$(ARRAY_API_TESTS)' checkout -q $(ARRAY_API_COMMIT) && \
		git -C '$(ARRAY_API_TESTS)' submodule update --init; }
	ARRAY_API_TESTS='$(abspath $(ARRAY_API_TESTS))' .venv-wild/bin/python -m tests.wild \
		array_api $(ARGS)

# The build that pip gets on most machines, in .venv-cuda: some gigabytes.
test-cuda-build: ## Run README and demo with PyTorch for CUDA on a machine without a GPU
	$(MAKE) VENV=.venv-cuda .venv-cuda/cuda.stamp
	.venv-cuda/bin/python -m pytest tests/torch_adapter/test_without_driver.py $(ARGS)

test-gpu: $(VENV)/test.stamp ## Run the tests that need an accelerator
	$(RUN) -m pytest -m gpu $(ARGS)

clean: ## Remove everything the other targets made
	rm -rf $(VENV) .venv-jax .venv-cuda .venv-newest .venv-newest-torch .venv-try .venv-wild build dist .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find anynan adapters tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

# Some systems' Python has venv without ensurepip; then the system's pip fills the folder.
$(VENV)/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'anynan needs Python 3.11 or newer; choose one with PYTHON=python3.12' >&2; exit 1; }
	@echo 'Creating $(VENV)'
	@mkdir -p $(dir $(VENV))
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(RUN) install pip; }
	@touch $@

$(VENV)/demo.stamp: EXTRA = torch
$(VENV)/test.stamp: EXTRA = test
# What the tests import is compiled here: each of their processes would do it at the same time.
$(VENV)/test.stamp: COMPILE = $(RUN) -m pytest --tiers 0-1 --collect-only -q >/dev/null || true
$(VENV)/bench.stamp: EXTRA = bench
$(VENV)/lint.stamp: EXTRA = lint
$(VENV)/docs.stamp: EXTRA = docs
$(VENV)/wild.stamp: EXTRA = wild
$(VENV)/demo.stamp $(VENV)/test.stamp $(VENV)/bench.stamp $(VENV)/lint.stamp $(VENV)/docs.stamp $(VENV)/wild.stamp: $(VENV)/python.stamp $(REQUIREMENTS)
	$(INSTALL) -e '.[$(EXTRA)]'
	$(COMPILE)
	@touch $@

$(VENV)/jax.stamp: $(VENV)/python.stamp $(REQUIREMENTS)
	$(INSTALL) -e '.[jax]' hypothesis pytest pytest-xdist
	@touch $@

# Without the constraints: they may hold back a build for the CPU.
$(VENV)/cuda.stamp: $(VENV)/python.stamp $(REQUIREMENTS)
	$(RUN) -m pip install --disable-pip-version-check -e '.[torch]' pytest
	@touch $@

$(VENV)/wheel.stamp: $(VENV)/python.stamp $(REQUIREMENTS)
	$(INSTALL) build
	@touch $@
