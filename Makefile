.DEFAULT_GOAL := help
.PHONY: help setup test test-slow test-hostile test-core test-gpu test-ray test-vllm test-vllm-kill setup-clients setup-vllm lint format docs demo bench build clean

BIN := .venv/bin
# Two processes with one thread each: torch would otherwise start a thread pool in every process.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
ELSEWHERE := not gpu and not vllm and not ray and not live and not hostile

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: ## create or update .venv (CPU or GPU packages, as this machine needs)
	@bash scripts/setup

test: setup ## run the quick tests, with those for a GPU on the CPU
	@SOULKIT_GPU_TESTS_ON=cpu $(PYTEST) -m "(on_cpu or $(ELSEWHERE)) and not slow"

test-slow: setup-clients ## run the slow tests
	@# pytest exits with 5 when no test is marked slow.
	@$(PYTEST) -m "$(ELSEWHERE) and slow" || [ $$? -eq 5 ]

test-hostile: setup ## run all attacks of tests/hostile (a quick part is in `make test`)
	@$(PYTEST) -m "not gpu and not vllm and not ray and not live" tests/hostile

# To use an interpreter that you prepared yourself: make test-core CORE_PYTHON=python3.13
CORE_PYTHON ?= $(BIN)/python
test-core: $(if $(filter $(BIN)/%,$(CORE_PYTHON)),setup) ## run the tests that do not need torch, with torch blocked
	@PYTHONPATH=$(CURDIR)/tests/without_torch OMP_NUM_THREADS=1 $(CORE_PYTHON) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder \
	  -m "$(ELSEWHERE) and not slow"

SOULKIT_GPU_TESTS_ON ?= cuda
test-gpu: setup ## run the tests for a GPU (SOULKIT_GPU_TESTS_ON=cpu runs them on the CPU)
	@SOULKIT_GPU_TESTS_ON=$(SOULKIT_GPU_TESTS_ON) $(BIN)/python -m pytest -q -p no:xdist -m gpu tests/gpu

test-ray: setup ## run the tests that start a Ray cluster (needs the extra `ray`)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -p no:xdist -m ray tests/train/ranks

# To use another vLLM, for example one for a GPU: make test-vllm VLLM_PYTHON=/path/to/bin/python
VLLM_PYTHON ?= .venv-vllm/bin/python
VLLM_SETUP := setup $(if $(filter .venv-vllm/%,$(VLLM_PYTHON)),setup-vllm)
# One process, so that all tests share one server.
VLLM_PYTEST := OMP_NUM_THREADS=1 SOULKIT_VLLM_PYTHON=$(abspath $(VLLM_PYTHON)) $(BIN)/python -m pytest -q -p no:xdist
test-vllm: $(VLLM_SETUP) ## run the tests that need a vLLM server (installs a CPU build, 2.5 GB)
	@$(VLLM_PYTEST) -m "vllm and not slow" tests/vllm

test-vllm-kill: $(VLLM_SETUP) ## kill soulkit, supervisor and server 20 times at random moments
	@SOULKIT_KILLS=20 $(VLLM_PYTEST) tests/vllm/test_killed.py

CLIENTS := inspect_ai litellm pydantic_ai
setup-clients: setup
	@$(BIN)/python -c "import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, '$(CLIENTS)'.split())))" \
	  || $(BIN)/python -m pip install --quiet -e '.[clients]'

setup-vllm:
	@bash scripts/setup_vllm

lint: setup ## check format, style, types and import layers
	@$(BIN)/ruff format --check --quiet . || { echo "not formatted: run 'make format'" >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: setup ## format the code and sort the imports
	@$(BIN)/ruff check --quiet --fix-only --select I .
	@$(BIN)/ruff format .

docs: setup ## build the documentation into site/ and check links and anchors
	@$(BIN)/zensical build --clean --strict

demo: setup ## train and evaluate a tiny model: no GPU, no key, no network
	@$(BIN)/soul demo

bench: setup ## measure the start-up time of soul
	@$(BIN)/python benchmarks/startup.py

build: setup ## build the wheel and the source archive into dist/
	@$(BIN)/python -m build

clean: ## delete .venv, .venv-vllm, build output and caches (keeps runs/)
	rm -rf .venv .venv-vllm dist build site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
