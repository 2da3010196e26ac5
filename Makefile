.DEFAULT_GOAL := help
.PHONY: help setup test test-slow test-core test-vllm test-vllm-kill setup-vllm lint format docs demo bench build clean

BIN := .venv/bin
# Two processes; one thread each, or torch would start a pool per process and fight for the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
ELSEWHERE := not gpu and not vllm and not live

help: ## list what can be made
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: ## make .venv with the CPU or GPU packages (only when something changed)
	@bash scripts/setup

test: setup ## run the quick tests
	@$(PYTEST) -m "$(ELSEWHERE) and not slow"

test-slow: setup ## run the slow tests
	@# 5 means that nothing is marked slow
	@$(PYTEST) -m "$(ELSEWHERE) and slow" || [ $$? -eq 5 ]

# Another interpreter may have been prepared by hand: make test-core CORE_PYTHON=python3.13
CORE_PYTHON ?= $(BIN)/python
test-core: $(if $(filter $(BIN)/%,$(CORE_PYTHON)),setup) ## run the tests that need no torch, without it
	@PYTHONPATH=$(CURDIR)/tests/without_torch OMP_NUM_THREADS=1 $(CORE_PYTHON) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder \
	  -m "$(ELSEWHERE) and not slow"

# Also another vLLM, as on a machine with a GPU: make test-vllm VLLM_PYTHON=/path/to/bin/python
VLLM_PYTHON ?= .venv-vllm/bin/python
VLLM_SETUP := setup $(if $(filter .venv-vllm/%,$(VLLM_PYTHON)),setup-vllm)
# One process: one server for all tests.
VLLM_PYTEST := OMP_NUM_THREADS=1 SOULKIT_VLLM_PYTHON=$(abspath $(VLLM_PYTHON)) $(BIN)/python -m pytest -q -p no:xdist
test-vllm: $(VLLM_SETUP) ## run the tests that need a vLLM server, with one for a CPU (2.5 GB)
	@$(VLLM_PYTEST) -m "vllm and not slow" tests/vllm

test-vllm-kill: $(VLLM_SETUP) ## kill soulkit, supervisor and server twenty times, at random moments
	@SOULKIT_KILLS=20 $(VLLM_PYTEST) tests/vllm/test_killed.py

setup-vllm:
	@bash scripts/setup_vllm

lint: setup ## check format, style, types and layers
	@$(BIN)/ruff format --check --quiet . || { echo "not formatted: run 'make format'" >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: setup ## format the code and sort the imports
	@$(BIN)/ruff check --quiet --fix-only --select I .
	@$(BIN)/ruff format .

docs: setup ## build the documentation into site/, with links and anchors checked
	@$(BIN)/zensical build --clean --strict

demo: setup ## try the whole road: no GPU, no key, no network
	@$(BIN)/soul demo

bench: setup ## measure the start-up time
	@$(BIN)/python benchmarks/startup.py

build: setup ## build the wheel and the source archive into dist/
	@$(BIN)/python -m build

clean: ## delete .venv, .venv-vllm and caches (runs/ stays)
	rm -rf .venv .venv-vllm dist build site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
