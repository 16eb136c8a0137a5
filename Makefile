# The two commands of the README: `make adapt` and `make test`. Each does its own set-up, once.
SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
EXAMPLE ?= smol-moe
BUILT := .cache/examples/$(EXAMPLE)
RUN ?= runs/$(EXAMPLE)-$(shell date +%Y%m%d-%H%M%S)
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.PHONY: help setup adapt test test-gpu lint types contract docs schemas clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 14

setup: ## .venv from the lock
	@scripts/setup.sh $(VENV)

adapt: setup ## build the example, then adapt it headless on two CPU ranks
	$(BIN)/python examples/$(EXAMPLE)/build.py --out $(BUILT)
	$(BIN)/shardwright adapt $(BUILT)/checkpoint --cluster cpu-2 --recipe $(BUILT)/recipe.yaml \
	  --headless --policy examples/$(EXAMPLE)/policy.yaml --run-dir $(RUN)

test: setup ## all tests that need no GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m 'not gpu'

test-gpu: ## GPU tests from source, with the python3 that holds torch
	PYTHONPATH=src python3 -m pytest -m gpu

lint: setup ## ruff, check and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## mypy over the package
	$(BIN)/mypy

contract: setup ## layers and bare imports
	$(BIN)/python -m pytest tests/test_import_contract.py

schemas: setup ## rewrite the shipped JSON Schemas
	$(BIN)/python -m shardwright.schemas.registry

docs: setup ## rewrite docs/performance.md and docs/reference
	$(BIN)/python benchmarks/render.py
	$(BIN)/python docs/generate_reference.py

clean: ## remove caches, runs and the environment
	rm -rf .venv .cache runs .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
