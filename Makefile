# Needs make and a Python 3.10 to 3.13 with venv; everything else is installed into .venv when first asked for.
PYTHON  ?= python3
WORKERS ?= 2
ARGS    ?=

VENV    := .venv
OLDEST  := .venv-oldest
BIN     := $(VENV)/bin
PINS    := pyproject.toml constraints.txt
PIP     := -m pip install --quiet --disable-pip-version-check

# One thread a worker: the workers already fill the cores.
PYTEST   = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -n $(WORKERS) $(ARGS)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test check fix docs test-oldest clean

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  ARGS=...     passed on by demo, test and test-oldest: make demo ARGS=--quick, make test ARGS='-k router'"
	@echo "  WORKERS=2    test processes"
	@echo "  PYTHON=...   the Python that makes .venv (3.10 to 3.13)"

demo: $(VENV)/.demo ## run the demo on the model that ships with the package
	$(BIN)/moebudget demo $(ARGS)

test: $(VENV)/.dev ## run the tests
	$(call PYTEST,$(VENV))

check: $(VENV)/.dev ## lint, formatting, types, spelling
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/codespell

fix: $(VENV)/.dev ## repair what ruff can repair
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/.docs ## build the site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test-oldest: $(OLDEST)/.dev ## run the tests against the oldest supported transformers, in a venv of its own
	$(call PYTEST,$(OLDEST))

clean: ## remove caches and build products; the venvs stay
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache
	find src tests scripts -type d -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.demo: $(PINS) | $(BIN)/python
	$(BIN)/python $(PIP) --editable '.[demo]' --constraint constraints.txt
	@touch $@

# The dev extra holds the demo extra.
$(VENV)/.dev: $(PINS) | $(BIN)/python
	$(BIN)/python $(PIP) --editable '.[dev]' --constraint constraints.txt
	@touch $(VENV)/.demo $@

$(VENV)/.docs: $(PINS) | $(BIN)/python
	$(BIN)/python $(PIP) --editable '.[docs]' --constraint constraints.txt
	@touch $@

$(OLDEST)/.dev: $(PINS) | $(OLDEST)/bin/python
	sed 's/^transformers==[^;]*/transformers==5.0.0/' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python $(PIP) --editable '.[dev]' --constraint $(OLDEST)/constraints.txt
	@touch $@

$(BIN)/python $(OLDEST)/bin/python: %/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "moebudget needs Python 3.10 to 3.13, but PYTHON=$(PYTHON) is: $$($(PYTHON) --version 2>&1)."; \
	  echo "Name another one: make PYTHON=python3.12 ..."; exit 1; } >&2
	@$(PYTHON) -m venv $* || { \
	  rm -rf $*; echo "$(PYTHON) could not make $*: install its venv module (python3-venv on Debian)." >&2; exit 1; }
