# One virtual environment, made on first use. `make VENV=/path/to/venv ...` uses another.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.sglang-indexcache

.PHONY: help demo test check clean

help:
	@echo "make demo    serve a small model with all and with a quarter of its indexers, side by side"
	@echo "make test    run the tests"
	@echo "make check   ruff and mypy"
	@echo "make clean   remove what the above made, but the virtual environment"

demo: $(INSTALLED)
	$(BIN)/indexcache demo run

test: $(INSTALLED)
	# The servers' tests want the whole machine; the others do not.
	$(BIN)/python -m pytest -m 'not e2e' -n 2 --dist loadfile --durations 15
	$(BIN)/python -m pytest -m e2e --durations 15

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "error: Python 3.10 or later is needed; say which with: make PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing SGLang and its dependencies: about 11 GB and a few minutes, once"
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
