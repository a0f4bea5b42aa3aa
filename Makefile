# Everything a person or CI does here. A fresh machine needs Python 3.10+, pip, a C++ compiler and git; no more.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow check format bench clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml setup.py constraints.txt src/astray/stats/_native.cpp
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing astray and its tools into $(VENV) (once; a minute or two)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)  ## Train a small GPT twice, plant a fault in the second run, and find it
	@$(BIN)/python examples/demo.py

test: $(READY)  ## Run the tests, without the slow ones (a few minutes)
	@$(BIN)/python -m pytest -q -m "not slow"

test-slow: $(READY)  ## Run the slow tests, which CI runs too
	@$(BIN)/python -m pytest -q -m slow

check: $(READY)  ## Lint, check the format and the types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(READY)  ## Format the code and mend what the linter can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(READY)  ## Measure kernels, store, compare and start-up; prints tables for benchmarks/RESULTS.md
	@for script in benchmarks/*.py; do echo "## $$script"; $(BIN)/python $$script || exit 1; done

clean:  ## Remove the virtual environment and what was built
	rm -rf $(VENV) build dist src/*.egg-info src/astray/stats/*.so runs out
