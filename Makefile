# SPDX-License-Identifier: Apache-2.0
# `make demo`, `make test` and `make aot` do all their own set-up: a virtual environment with the pinned versions, then
# the work. `make aot` compiles the kernels and whole steps of a full-size model for an H200; it needs no GPU.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

export HF_HUB_OFFLINE := 1
export JAX_PLATFORMS ?= cpu

.PHONY: demo test lint aot aot-install clean

demo: $(VENV)/.installed
	$(BIN)/pagedweight demo --out demo

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/lint-imports

# Its compiler must not be seen by the tests, which would look for a GPU: a virtual environment of its own.
aot: aot-install
	$(VENV)-aot/bin/python -W ignore benchmarks/aot_h200.py
	$(VENV)-aot/bin/python -W ignore benchmarks/aot_cases_attention.py
	$(VENV)-aot/bin/python -W ignore benchmarks/aot_steps.py --layers 2

aot-install:
	$(MAKE) VENV=$(VENV)-aot $(VENV)-aot/.installed-cuda

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

# XLA's compiler for CUDA alone, in the version of jax that is there: no CUDA libraries, no driver.
$(VENV)/.installed-cuda: $(VENV)/.installed
	$(PIP_INSTALL) --no-deps $$($(BIN)/python -c 'import jax; v = jax.__version__; print(f"jax-cuda13-plugin=={v} jax-cuda13-pjrt=={v}")')
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-aot demo build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
