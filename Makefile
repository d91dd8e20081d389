# make demo   trains examples/train_gpt.py on 2 processes (or on all GPUs), stock and patched, and compares
# make test   ruff, the style of prose, mypy --strict and all tests
# make docs   the documentation site, in build/site
#
# Both set .venv up by themselves. A torch >= 2.11 that $(PYTHON) can import is reused; otherwise $(TORCH) is installed.

PYTHON ?= python3
VENV ?= .venv
DOCS_VENV ?= .venv-docs
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=
# How many processes share the tests, file by file; 0: one after the other in this one. Four keep two cores busy, as
# tests wait for half of the time. GPUs are for one test at a time.
WORKERS ?= $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo 0 || echo 4)
VERSIONS_ARGS ?=
FUZZ_SECONDS ?= 300

# Tests start hundreds of processes. Where a container sets this, each of them would compile all sources anew.
unexport PYTHONDONTWRITEBYTECODE

READY := $(VENV)/.ready
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test pytest test-hosts test-versions lint format docs tables figures fuzz faults clean

help:
	@echo "make demo    train a small GPT stock and patched, side by side (DEMO_ARGS=--quick: half a minute)"
	@echo "make test    lint, then all tests (PYTEST_ARGS='-k name -x'), WORKERS=0 for one at a time"
	@echo "make test-hosts   all tests of several hosts, which are network namespaces (by sudo unless you are root)"
	@echo "make test-versions   the core of the tests on every torch from 2.11 on and every Python here (VERSIONS_ARGS=--help)"
	@echo "make pytest  only the tests"
	@echo "make lint    ruff, the style of prose, and mypy --strict but for tests/ and examples/"
	@echo "make format  ruff format; python tools/same_ast.py then shows that no program has changed"
	@echo "make fuzz    random programs, stock and patched (FUZZ_SECONDS=300 each for data parallelism and pipelines)"
	@echo "make faults  which tests catch the faults of tools/faults/, in more than an hour"
	@echo "make docs    the documentation site in build/site; a warning or a broken link is an error"
	@echo "make tables  the tables of README.md, docs/ and benchmarks/NOTES.md, from benchmarks/results"
	@echo "make figures the pictures in docs/pictures, from benchmarks/results and tools/diagrams.py"
	@echo "make setup   only the environment $(VENV), which the others make as well"
	@echo "make clean   remove $(VENV), $(DOCS_VENV) and everything that was built"
	@echo
	@echo "PYTHON=$(PYTHON)   Python >= 3.10; if it can import torch >= 2.11, that torch is used"
	@echo "TORCH=$(TORCH)   otherwise this is installed (TORCH_INDEX=URL: from there)"

setup: $(READY)

$(READY): setup.cfg setup.py pyproject.toml tools/bootstrap.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" bash tools/bootstrap.sh

demo: $(READY)
	@$(BIN)/python examples/demo.py $(DEMO_ARGS)

lint: $(READY)
	@PYTHON="$(BIN)/python" bash tools/lint.sh

format: $(READY)
	@$(BIN)/python -m ruff check --select I --fix --quiet .
	@$(BIN)/python -m ruff format .

# mypy uses one core, so tests begin beside it. The last line says whether both passed.
test: $(READY)
	@$(MAKE) --no-print-directory -j2 lint pytest
	@echo "== lint and tests passed"

PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

pytest: $(READY)
	@echo "== pytest $(PYTEST_ARGS)"
	@$(PYTEST) $(PYTEST_ARGS)

# Network namespaces need root.
test-hosts: $(READY)
	@$$(test $$(id -u) = 0 || echo sudo) env "PATH=$$PATH" ALL_CASES=1 $(PYTEST) tests/hosts $(PYTEST_ARGS)

test-versions: $(READY)
	@$(BIN)/python tools/test_versions.py $(VERSIONS_ARGS)

# Pages are rendered from Markdown and from the text of the sources, so neither torch nor ovpatch is installed here.
$(DOCS_VENV)/.ready: pyproject.toml
	@echo "== installing what renders the documentation"
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet $$(sed -n 's/^docs = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d '",')
	@touch $@

docs: $(DOCS_VENV)/.ready
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html; the search needs a server: $(PYTHON) -m http.server --directory build/site"

tables: $(READY)
	@$(BIN)/python -m benchmarks.tables

figures: $(READY)
	@$(BIN)/python -m benchmarks.figures
	@$(BIN)/python -m tools.diagrams

fuzz: $(READY)
	@$(BIN)/python -m tools.fuzz --seconds $(FUZZ_SECONDS)
	@$(BIN)/python -m tools.fuzz_pipelines --seconds $(FUZZ_SECONDS)
	@$(BIN)/python -m tools.fuzz_tensor_parallel --seconds $(FUZZ_SECONDS)

faults: $(READY)
	@$(BIN)/python tools/plant_faults.py

clean:
	rm -rf $(VENV) $(DOCS_VENV) build dist *.egg-info .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
