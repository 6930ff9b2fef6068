# One virtual environment, made on first use. `make VENV=/path/to/venv ...` uses another.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two marks in it: all there is, with SGLang; and what suffices without.
FULL := $(VENV)/.sglang-indexcache
SMALL := $(VENV)/.sglang-indexcache-small

.PHONY: help demo demo-real quick test test-fast soak rehearse check size site full clean

help:
	@echo "make demo       serve a small model with all and with a quarter of its indexers"
	@echo "make demo-real  build a real language model once, and ask it about a document with and without sharing"
	@echo "make quick      run what a change breaks most: walls, pages, the method, patterns, statistics"
	@echo "make test       run the tests; those that need a GPU say so where there is none"
	@echo "make test-fast  run the tests that need no SGLang, without installing it"
	@echo "make soak       run the tests that draw again and again with fresh seeds (ROUNDS=5)"
	@echo "make rehearse   run SGLang's CUDA code here, with references for its kernels"
	@echo "make check      ruff, mypy and import contracts, without installing SGLang"
	@echo "make size       say how many lines, modules and commands there are, and were planned"
	@echo "make site       build the pages and the public names as a site in build/site-html, links held to account"
	@echo "make full       install everything, SGLang included"
	@echo "make clean      remove what the above made, but the virtual environment"

demo: $(FULL)
	$(BIN)/python examples/demo.py

demo-real: $(FULL)
	$(BIN)/python -m benchmarks.smollm2.demo

# A pull request's first run: no server, and nothing that needs SGLang (tests/README.md has the rest).
QUICK := tests/test_structure.py tests/test_docs.py tests/test_pattern.py tests/test_hf.py \
	tests/test_models.py tests/test_checkpoint.py tests/library tests/serving/adapters \
	tests/lab/client tests/lab/data tests/lab/stats tests/lab/runs tests/lab/search/test_methods.py \
	tests/serving/test_protocol.py tests/serving/test_index_buffer.py tests/serving/test_rows.py \
	tests/serving/test_policy.py tests/serving/operating/test_show.py \
	tests/serving/test_resolve.py

quick: $(SMALL)
	$(BIN)/python -m pytest -q $(QUICK) -n 2 --dist loadfile --durations 5

test: $(FULL)
	$(BIN)/python -m pytest -m gpu tests/gpu
	$(BIN)/python -m pytest -m 'not e2e and not gpu' -n 2 --dist loadfile --durations 15
	$(BIN)/python -m pytest -m 'e2e and not matrix' -n 2 --dist loadfile --durations 15

test-fast: $(SMALL)
	$(BIN)/python -m pytest -m 'not e2e and not gpu' -n 2 --dist loadfile

# A seed that fails is printed, with what runs it again.
ROUNDS ?= 5
soak: $(FULL)
	@for round in $$(seq $(ROUNDS)); do \
		seed=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' '); \
		echo "round $$round of $(ROUNDS): INDEXCACHE_TEST_SEED=$$seed"; \
		INDEXCACHE_TEST_SEED=$$seed $(BIN)/python -m pytest -m 'draws and not e2e' --hypothesis-seed=$$seed \
			-n 2 --dist loadfile || { echo "again: INDEXCACHE_TEST_SEED=$$seed python -m pytest --hypothesis-seed=$$seed TEST"; exit 1; }; \
	done

rehearse: $(FULL)
	$(BIN)/python -m pytest tests/rehearsal tests/benchmarks/test_table_1.py -n 2 --dist loadscope --durations 5

check: $(SMALL)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

size: $(SMALL)
	@$(BIN)/python -m tests.size

# In a virtual environment of its own: nothing else needs these packages.
SITE := build/site
site: $(SITE)/bin/mkdocs
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict

$(SITE)/bin/mkdocs: pyproject.toml
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --editable '.[docs]'
	touch $@

full: $(FULL)

define install
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "error: Python 3.11 or later is needed; say which with: make PYTHON=python3.11"; exit 1; }
test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
$(BIN)/python -m pip install --quiet --upgrade pip
$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable
endef

$(FULL): pyproject.toml constraints.txt
	@echo "installing SGLang and its dependencies: about 11 GB and a few minutes, once"
	$(install) '.[dev]'
	touch $@ $(SMALL)

$(SMALL): pyproject.toml constraints.txt
	$(install) '.[lab,test]'
	touch $@

clean:
	rm -rf .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis build
