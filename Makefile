# The two commands to know: `make demo` to see it work, `make test` to test it. Both set everything up first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python
INSTALLED := $(VENV)/.installed

.PHONY: help setup demo test test-slow check format docs clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(INSTALLED)  ## Make .venv and install the pinned packages

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "elbowroom needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(INSTALLED)

demo: setup  ## Teach the demo model a new concept and show the pictures (a few minutes on a laptop CPU)
	$(RUN) examples/shapes/demo.py $(OPTIONS)

test: setup  ## Run the tests
	$(RUN) -m pytest -n auto

test-slow: setup  ## Run the long sweeps too
	$(RUN) -m pytest -n auto -m "slow or not slow"

check: setup  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: setup  ## Put the code into the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup  ## Write docs/options.md anew from the definitions
	$(RUN) -m elbowroom.options.export > docs/options.md

clean:  ## Remove what setup and runs have made
	rm -rf $(VENV) build runs
