# One environment in .venv, built from constraints.txt; every target below prepares it first.
# PYTHON may name another interpreter (3.11 or 3.12); EXTRA_PIP is passed to pip as it stands.

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EXTRAS := dev$(shell [ "$$(uname -s)" = Linux ] && echo ,triton)

export PIP_DISABLE_PIP_VERSION_CHECK = 1
export HYBRIDSTATE := $(BIN)/hybridstate

.PHONY: help install demo test test-triton check format figures/generate plans/generate generate clean

help: ## this list
	@grep -hE '^[a-z/-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

install: $(STAMP) ## the environment alone
	@:

demo: $(STAMP) ## the whole path on both embedded models, into ./demo
	@bash scripts/demo.sh

test: $(STAMP) ## all tests that this machine can run, on up to four cores
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

test-triton: $(STAMP) ## compile the kernels with every supported Triton from PyPI (needs the network, 2 GB in build/)
	@$(BIN)/python tests/kernels/triton_versions/record.py

check: $(STAMP) ## formatting, lint, types, and generated pages against their sources
	@$(BIN)/ruff format --check --quiet . || ($(BIN)/ruff format --check . ; exit 1)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/python scripts/generate.py --check

format: $(STAMP) ## apply formatting and the safe lint fixes
	@$(BIN)/ruff format --quiet . && $(BIN)/ruff check --quiet --fix .

generate: $(STAMP) ## rewrite the README tables and docs pages from benchmarks/ and --help
	@$(BIN)/python scripts/generate.py

figures/generate: $(STAMP) ## redraw figures/ with the CSV behind each
	@$(BIN)/python scripts/generate.py --figures

plans/generate: $(STAMP) ## rebuild the example bundles in plans/ (calibrates both models: some minutes)
	@for model in tiny-gdn tiny-kda; do \
	  rm -rf plans/$$model build/$$model-calibration && \
	  $(BIN)/hybridstate calibrate $$model --profile quick -o build/$$model-calibration && \
	  $(BIN)/hybridstate export-plan $$model --w-max 64 --calibration build/$$model-calibration \
	    --no-weights -o plans/$$model || exit 1; \
	done

clean: ## remove the environment, caches and the demo's output
	rm -rf $(VENV) demo .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed and not on the PATH: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# Reinstalled only when the requirements change: the package itself is installed in place. Bytecode is made on all cores
# instead of pip's one; some packages carry templates that are no Python, hence no status.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (the first time takes a few minutes)"
	@$(BIN)/python -m pip install -qq --no-compile --no-warn-script-location -c constraints.txt -e '.[$(EXTRAS)]' $(EXTRA_PIP)
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib > /dev/null || true
	@touch $@
