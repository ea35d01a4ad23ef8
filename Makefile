# Everything here works on a machine with Python 3.10+, g++ and make; all else comes from pip into .venv.
PYTHON ?= python3
ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check

# cmake, ninja, ruff, ... are those of the virtual environment.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# A build folder that stays, so that only what changed is compiled again.
export TIMELYFREEZE_BUILD_DIR := $(CURDIR)/build/ext

# One stamp a step of the set-up; a step runs again only when what it reads is newer than its stamp.
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed
EXTENSION := build/.extension-installed
CXX_SOURCES := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

# Stages are the unit of parallelism: one thread each, also in the tests.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help setup train test test-long lint format bench sanitize check-cuda-build check-gpu clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(EXTENSION)  ## make .venv, install what is pinned, build the extension

train: $(EXTENSION)  ## run the main job; pass options as ARGS="--steps 200"
	$(PY) -m timelyfreeze train $(ARGS)

test: $(EXTENSION) $(DEV)  ## run the test suite
	$(ONE_THREAD) $(PY) -m pytest -n 2 --dist loadgroup -m "not long" $(ARGS)

test-long: $(EXTENSION) $(DEV)  ## run the tests that take minutes
	$(ONE_THREAD) $(PY) -m pytest -n 2 --dist loadgroup -m long -o faulthandler_timeout=1800 $(ARGS)

lint: $(DEV)  ## check style and types: ruff, mypy, clang-format
	ruff check .
	ruff format --check .
	mypy timelyfreeze
	clang-format --dry-run -Werror $(CXX_SOURCES)

format: $(DEV)  ## rewrite the sources in the style that lint checks
	ruff check --fix-only .
	ruff format .
	clang-format -i $(CXX_SOURCES)

bench: $(EXTENSION) $(DEV)  ## run the benchmarks; rows go to bench/results
	$(ONE_THREAD) $(PY) -m pytest bench -s $(ARGS)

sanitize: sanitize-thread sanitize-address sanitize-kernels  ## run the C++ tests under Thread-, Address- and UBSanitizer

sanitize-%: $(RUNTIME)
	cmake -S . -B build/$@ -G Ninja -DTIMELYFREEZE_TESTS_ONLY=ON -DTIMELYFREEZE_SANITIZE=$*
	cmake --build build/$@ --target timelyfreeze_core_tests
	ctest --test-dir build/$@ --output-on-failure

sanitize-kernels: $(RUNTIME)
	cmake -S . -B build/$@ -G Ninja -DTIMELYFREEZE_SANITIZE=address -DPython_EXECUTABLE=$(abspath $(PY))
	cmake --build build/$@ --target timelyfreeze_kernel_tests
	build/$@/timelyfreeze_kernel_tests

check-cuda-build: CUDA_VENV := build/cuda-venv
check-cuda-build:  ## build and import the extension against a CUDA build of torch (5.5 GB), GPU or not, and look for its kernels
	test -x $(CUDA_VENV)/bin/pip || $(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements/cuda.txt
	PATH="$(CURDIR)/$(CUDA_VENV)/bin:$$PATH" TIMELYFREEZE_BUILD_DIR=$(CURDIR)/build/ext-cuda \
	  $(CUDA_VENV)/bin/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall .
	cd build && cuda-venv/bin/python $(CURDIR)/tests/check_cuda_build.py

# With the machine's own Python and packages, as they are: no virtual environment, no download. WHEELS names a folder of
# wheels for what is missing there.
check-gpu:  ## on a machine with a GPU: build, parity, compute-sanitizer, a pipeline step, the kernels' bandwidth
	@$(PYTHON) -m tests.gpu.check $(if $(WHEELS),--wheels $(abspath $(WHEELS))) $(ARGS)

clean:  ## remove what was built; .venv stays
	rm -rf build timelyfreeze/_C*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find timelyfreeze tests bench -name __pycache__ -prune -exec rm -rf {} +

$(RUNTIME): requirements/runtime.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	  sys.exit(v < (3, 10) and "expected Python 3.10 or newer, got %d.%d. Run make PYTHON=<a newer python3>." % v[:2])'
	@echo "Installing the packages of $< into $(VENV)"
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -r $<
	@touch $@

$(DEV): requirements/dev.txt $(RUNTIME)
	@echo "Installing the packages of $< into $(VENV)"
	$(PIP_INSTALL) -r $<
	@touch $@

# Editable: a change in Python needs no new install.
$(EXTENSION): $(RUNTIME) setup.py pyproject.toml CMakeLists.txt $(filter-out csrc/tests/%,$(CXX_SOURCES))
	@echo "Building the extension (about a minute)"
	$(PIP_INSTALL) --no-build-isolation --no-deps --editable .
	@touch $@
