# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` do all their own set-up: a virtual environment with the pinned versions, then the work.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

export HF_HUB_OFFLINE := 1
export JAX_PLATFORMS ?= cpu

.PHONY: demo test lint clean

demo: $(VENV)/.installed
	$(BIN)/pagedweight demo --out demo

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/lint-imports

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) --version 2>&1); set PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) --editable '.[test]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) demo build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
