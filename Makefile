# Everything sets itself up in .venv: python3 (3.11 or newer), make and the network to PyPI are all it takes.
# torch comes with the packages of CUDA, gigabytes of them, unless pip is shown builds without:
#   make demo PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
CODE := src tests benchmarks examples
# Tests in so many processes: one for each core, but no more than eight, since each holds torch and starts nodes.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
# Tests of real processes wait a third of their time and more, for leases that run out and for nodes that nap.
REAL_JOBS ?= $(shell echo $$(($(JOBS) * 2)))
PYTEST = $(BIN)/pytest -q --dist worksteal

# Tests and types are read by several processes, and programs are started many times: compile each file once.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench clean

help: ## Show what there is to make
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.installed ## Train a small GPT on 8 local nodes of a spot market, lose some, learn the same; into runs/demo
	rm -rf runs/demo runs/undisturbed runs/market.csv
	mkdir -p runs
	$(BIN)/culm trace generate --market nodes=9,hours=4,rate=0.7,group=1.5,zones=3 --seed 2 --out runs/market.csv
	$(BIN)/culm run examples/gpt.py --pipelines 4 --stages 2 --steps 240 --exact --out runs/demo --checkpoint-every 60 \
		--trace runs/market.csv --speedup 120
	$(BIN)/culm run examples/gpt.py --steps 240 --exact --out runs/undisturbed --quiet
	$(BIN)/python examples/same.py runs/demo runs/undisturbed
	$(BIN)/culm report runs/demo

test: lint ## Check style, types and promises; the fast tests come first
	$(PYTEST) -n $(JOBS) -m "not real"
	$(PYTEST) -n $(REAL_JOBS) -m real

lint: .venv/.developing
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy --num-workers $(JOBS)

bench: .venv/.installed ## Measure culm beside torch.distributed.pipelining
	$(BIN)/culm bench pipeline

clean: ## Remove the environment, the caches and the demo
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist runs/demo runs/undisturbed runs/market.csv
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("culm needs Python 3.11 or newer: say which with make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable .
	$(BIN)/python -m compileall -q src  # as pip does with what it does not leave in place
	touch $@

.venv/.developing: .venv/.installed
	$(INSTALL) --editable '.[dev]'
	echo 'import aiohttp, hypothesis, msgspec, numpy, pytest, rich, torch.distributed.checkpoint, typer' > .venv/libraries.py
	$(BIN)/mypy --num-workers $(JOBS) .venv/libraries.py  # the types of libraries, which do not change with the code
	$(PYTEST) --collect-only > .venv/tests.txt  # compiles the tests once, and not in each of the processes that run them
	touch $@
