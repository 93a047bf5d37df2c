# Every target creates the environment it needs in .venv. Required: python3 (3.11 or newer), make, access to PyPI.
# The default torch build on PyPI includes gigabytes of CUDA packages. To use the CPU build instead:
#   make demo PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# To use another torch version, see docs/testing.md.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)
CODE := src tests benchmarks examples
# Test processes: one per core, at most eight, because each of them imports torch and starts nodes.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
# Tests of real processes wait for at least a third of their time: for leases to expire and for emulated compute.
REAL_JOBS ?= $(shell echo $$(($(JOBS) * 2)))
# Exit status 2: on a busy machine the workers of mypy may not start in time. It then checks without them.
mypy = $(BIN)/mypy --num-workers $(JOBS) $(1) || { [ $$? -eq 2 ] && $(BIN)/mypy $(1); }
PYTEST = $(BIN)/pytest -q --dist worksteal
# More options for pytest, for example: make test TEST_OPTIONS='--reruns 2'
TEST_OPTIONS ?=

# Many processes read the same files: let Python write bytecode, so that each file is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## Train a small GPT on 8 local nodes, lose some, compare the weights with a run without losses
	rm -rf runs/demo runs/undisturbed runs/market.csv
	mkdir -p runs
	$(BIN)/culm trace generate --market nodes=9,hours=4,rate=0.7,group=1.5,zones=3 --seed 2 --out runs/market.csv
	$(BIN)/culm run examples/gpt.py --pipelines 4 --stages 2 --steps 240 --exact --out runs/demo --checkpoint-every 60 \
		--trace runs/market.csv --speedup 120
	$(BIN)/culm run examples/gpt.py --steps 240 --exact --out runs/undisturbed --quiet
	$(BIN)/python examples/same.py runs/demo runs/undisturbed
	$(BIN)/culm report runs/demo

test: lint ## Check style and types, then run all tests, fast ones first
	$(PYTEST) -n $(JOBS) -m "not real" $(TEST_OPTIONS)
	$(PYTEST) -n $(REAL_JOBS) -m real $(TEST_OPTIONS)

lint: $(VENV)/.developing
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(call mypy)

bench: $(VENV)/.installed ## Compare the speed with torch.distributed.pipelining
	$(BIN)/culm bench pipeline

clean: ## Remove the environment, the caches and the output of the demo
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist runs/demo runs/undisturbed runs/market.csv
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("culm needs Python 3.11 or newer: choose one with make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable .
	$(BIN)/python -m compileall -q src  # pip does not compile editable installs
	touch $@

$(VENV)/.developing: $(VENV)/.installed
	$(INSTALL) --editable '.[dev]'
	echo 'import aiohttp, hypothesis, msgspec, numpy, pytest, rich, torch.distributed.checkpoint, typer' > $(VENV)/libraries.py
	$(call mypy,$(VENV)/libraries.py)  # caches the types of the libraries
	$(PYTEST) --collect-only > $(VENV)/tests.txt  # compiles the tests once, before several processes import them
	touch $@
