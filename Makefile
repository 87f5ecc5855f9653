# One command each; every target sets up what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PORT   ?= 8000
ARGS   ?=

.PHONY: serve test test-long test-native lint format clean bench-ops bench-peers bench-budgets

serve: $(VENV)/.installed
	$(BIN)/headrace serve --port $(PORT) $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not long" --durations=5

test-long: test-native $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m long --durations=20

# The kernels against brute force, under the address and undefined-behaviour sanitizers: about two minutes with the compiling.
test-native:
	$(MAKE) -C native/tests check SANITIZE=1 OUT=$(CURDIR)/build/native-tests-sanitized

# GOPS and GB/s of every kernel beside the peaks of the same run: some minutes.
bench-ops:
	$(MAKE) -C native/tests time OUT=$(CURDIR)/build/native-tests

# ARGS="--quick", "--only llama.cpp,ik_llama.cpp", "--no-http" and so on; --help tells all.
bench-peers: $(VENV)/.installed
	$(BIN)/python -m benchmarks.peers $(ARGS)

# What serving costs beside the model: engine overhead, start, memory, idling, size.
bench-budgets: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.budgets
	$(BIN)/python -m benchmarks.simulator_speed

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Headrace needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

NATIVE := $(wildcard native/*.h native/*.cpp native/*.inl native/CMakeLists.txt)

$(VENV)/.installed: pyproject.toml $(NATIVE) | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(NATIVE) | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(VENV)/.installed $@
