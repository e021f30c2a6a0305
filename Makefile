# Every target sets up what it needs, from a bare clone on: a Python environment in .venv, liburing
# where it can be had, torch, and hetero itself with its extension built.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_VERSION := 2.13.0

# What decides whether the installed package is still the one of this tree.
BUILD_INPUTS := setup.py pyproject.toml CMakeLists.txt \
	$(shell find native -type f)

# Files of tests at a time, the longest first (tests/seconds.txt, which ARGS=--record-seconds writes
# anew). Tests of one file may share builds. More than two cores: a third of the time tests wait, for
# a disk, for other ranks, for an end.
TEST_JOBS ?= 5
# A test that hangs says where, by the stacks of all threads after so many seconds.
PYTEST := $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder -x -q \
	-o faulthandler_timeout=900

PYTHON_SOURCES := hetero offload bench tests docs/site docs/examples setup.py
NATIVE_SOURCES = $(shell find native tests -name '*.h' -o -name '*.cpp')
URING_CALLS := native/io/engines/uring_calls.cpp
# Succeeds where liburing's header has all that the io_uring engine calls.
has_liburing = $(CXX) -std=c++20 -fsyntax-only $(URING_CALLS) >/dev/null 2>&1
# Those that may have locks; without liburing its engine cannot be read.
LOCK_SOURCES = $(shell find native -name '*.cpp' -not -path '*/isa/*' -not -path '*/bindings/*' \
	$$($(has_liburing) || echo -not -name 'uring_*'))

# Python keeps what it has compiled, also where the environment says otherwise: tests start hundreds
# of processes, each of which would compile this project anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train test test-all bench bench-io bench-adam bench-bound bench-checkpoint \
	docs cuda-check wheel lint tidy format clean

help:
	@echo "make train   train a language model of 304M parameters in a process of 1.5 GiB, about"
	@echo "             4 to 8 minutes on 2 cores; options: make train ARGS='--max-steps 20'"
	@echo "make test    all checks and tests, the native ones also under AddressSanitizer and UBSan;"
	@echo "             options: make test ARGS='-k arena'"
	@echo "make test-all  these, and: the native tests under ThreadSanitizer, every instruction set's"
	@echo "             kernels against each other and against 64-bit ARM's in an emulator, the"
	@echo "             build without liburing, and a run's page in a browser"
	@echo "make bench   step time and memory beside plain PyTorch; options as for train"
	@echo "make bench-io, bench-adam, bench-bound"
	@echo "             disk, update kernels, training step beside their limits and other systems;"
	@echo "             options: make bench-io ARGS='--path DIR --json'"
	@echo "make bench-checkpoint"
	@echo "             saves and loads beside the disk's limit and PyTorch's; options as for bench-io"
	@echo "make cuda-check  on a machine with a GPU: builds in \$$(PYTHON) as it is, without network,"
	@echo "             runs the tests that need a GPU and measures; skipped where there is none"
	@echo "make docs    the documents as a site, with an API reference, in build/site"
	@echo "make wheel   dist/*.whl, for machines of this architecture that need no compiler"
	@echo "make lint    the checks alone"
	@echo "make tidy    clang-tidy over the native core"
	@echo "make format  puts all sources into the project's format"
	@echo "make clean   removes what was built, $(VENV) included"

train: $(VENV)/train.stamp
	$(BIN)/hetero train --policy nvme --process-memory 1536MiB $(ARGS)

test: lint
	$(PYTEST) -m "not extra" $(ARGS)

test-all: lint $(VENV)/arm.stamp $(VENV)/browser.stamp
	$(PYTEST) --hypothesis-profile=thorough $(ARGS)

bench: $(VENV)/train.stamp
	$(BIN)/python -m bench.train $(or $(ARGS),--peers torch)

bench-io: $(VENV)/train.stamp $(VENV)/fio.stamp
	$(BIN)/python -m bench.io $(or $(ARGS),--path .)

bench-adam: $(VENV)/train.stamp
	$(BIN)/python -m bench.adam $(ARGS)

bench-bound: $(VENV)/train.stamp
	$(BIN)/python -m bench.bound $(or $(ARGS),--nvme-path .)

bench-checkpoint: $(VENV)/train.stamp
	$(BIN)/python -m bench.checkpoint $(or $(ARGS),--path .)

# In the Python at hand: it has the torch that suits the GPU, and nothing may be downloaded.
cuda-check:
	@$(PYTHON) -m bench.cuda_check $(ARGS)

docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

# What an earlier build has left in build/lib* would go into the wheel. auditwheel names the oldest
# glibc and libstdc++ that the extension runs with; liburing is linked statically where it can be.
wheel: $(VENV)/wheel.stamp
	rm -rf build/lib.* build/bdist.* build/wheel
	HETERO_WERROR=1 $(BIN)/pip wheel --quiet --no-deps --no-build-isolation -w build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair -w dist build/wheel/*.whl

lint: $(VENV)/test.stamp
	$(BIN)/ruff check $(PYTHON_SOURCES)
	$(BIN)/ruff format --check $(PYTHON_SOURCES)
	$(BIN)/mypy hetero offload bench
	$(BIN)/lint-imports --no-cache
	$(BIN)/clang-format --dry-run -Werror $(NATIVE_SOURCES)
	@echo "locks: every guarded member is used with its mutex held"
	@$(BIN)/clang-tidy --quiet --warnings-as-errors='*' \
		--checks='-*,clang-diagnostic-thread-safety*,bugprone-unused-raii' \
		$(LOCK_SOURCES) -- -std=c++20 -Inative -Wthread-safety

tidy: $(VENV)/test.stamp
	$(BIN)/cmake -S. -Bbuild/tidy -GNinja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
		-DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DHETERO_PYTHON=OFF
	$(BIN)/clang-tidy -p build/tidy --quiet $(filter-out %_neon.cpp native/bindings/%,$(shell find native -name "*.cpp"))

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix $(PYTHON_SOURCES)
	$(BIN)/ruff format $(PYTHON_SOURCES)
	$(BIN)/clang-format -i $(NATIVE_SOURCES)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f offload/_native.*.so
	find hetero offload bench tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The extras of `test` hold those of `train` and `docs`. For tests, compiler warnings are errors.
$(VENV)/train.stamp: $(BUILD_INPUTS) $(VENV)/torch.stamp $(VENV)/liburing.stamp
	$(BIN)/pip install --quiet -e ".[train]"
	@touch $@

$(VENV)/test.stamp: $(BUILD_INPUTS) $(VENV)/torch.stamp $(VENV)/liburing.stamp
	HETERO_WERROR=1 $(BIN)/pip install --quiet -e ".[test]"
	@touch $@ $(VENV)/train.stamp $(VENV)/docs.stamp

$(VENV)/docs.stamp: $(BUILD_INPUTS) $(VENV)/torch.stamp $(VENV)/liburing.stamp
	$(BIN)/pip install --quiet -e ".[docs]"
	@touch $@

$(VENV)/wheel.stamp: $(BUILD_INPUTS) $(VENV)/torch.stamp $(VENV)/liburing.stamp
	HETERO_WERROR=1 $(BIN)/pip install --quiet -e ".[wheel]"
	@touch $@ $(VENV)/train.stamp

# First and alone, so that the version that the tests pin is the one that stays.
$(VENV)/torch.stamp: | $(BIN)/python
	$(BIN)/pip install --quiet torch==$(TORCH_VERSION)
	@touch $@

# Installs packages of the system, if that can be done without asking: $(call install,for apt-get,
# for dnf,for apk), each a list of names or none. Fails silently.
install = { [ "$$(id -u)" = 0 ] && \
	if command -v apt-get; then [ -n "$(1)" ] && apt-get update -qq && apt-get install -y -qq $(1); \
	elif command -v dnf; then [ -n "$(2)" ] && dnf install -y -q $(2); \
	elif command -v apk; then [ -n "$(3)" ] && apk add --quiet $(3); \
	else false; fi; } >/dev/null 2>&1
cannot = not found and not installed (that takes root and apt-get, dnf or apk):

# Without what these three bring all works, on the thread engine, or with a test skipped, or with a
# comparison left out; so a failure here is told and no error.
$(VENV)/liburing.stamp: | $(BIN)/python
	@if $(has_liburing); then echo "liburing: found"; \
	elif $(call install,liburing-dev pkg-config,liburing-devel pkgconf,liburing-dev pkgconf) && \
		$(has_liburing); then \
		echo "liburing: installed"; \
	else \
		echo "liburing: 2.2 or newer $(cannot)"; \
		echo "liburing: the thread engine will be used instead of io_uring"; \
	fi
	@touch $@

$(VENV)/fio.stamp: | $(BIN)/python
	@if command -v fio >/dev/null; then echo "fio: found"; \
	elif $(call install,fio,fio,fio); then echo "fio: installed"; \
	else echo "fio: $(cannot)"; echo "fio: it will be missing from the comparison"; fi
	@touch $@

$(VENV)/arm.stamp: | $(BIN)/python
	@if ls /usr/bin/aarch64-linux-gnu-g++* >/dev/null 2>&1 && command -v qemu-aarch64 >/dev/null; then \
		echo "ARM compiler and emulator: found"; \
	elif $(call install,g++-aarch64-linux-gnu qemu-user,,); then \
		echo "ARM compiler and emulator: installed"; \
	else \
		echo "ARM compiler and emulator: not found and not installed (that takes root and apt-get):"; \
		echo "ARM compiler and emulator: the tests for ARM will be skipped"; \
	fi
	@touch $@

$(VENV)/browser.stamp: | $(BIN)/python
	@if { command -v chromium-headless-shell || command -v chromium || command -v chromium-browser || \
		command -v google-chrome; } >/dev/null; then \
		echo "browser: found"; \
	elif $(call install,chromium-headless-shell,chromium,chromium); then \
		echo "browser: installed"; \
	else echo "browser: $(cannot)"; echo "browser: no page will be looked at in one"; fi
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "hetero needs Python 3.10 or newer; name one: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "no environment could be made; on Debian and Ubuntu: apt-get install python3-venv"; \
		exit 1; }
