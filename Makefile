# make demo | make quick | make test | make check | make bench | make docs: each sets up .venv first, on a fresh
# machine too. make test TORCH=2.15.0 PYTHON=python3.13: other versions, in an environment of their own.
# make quick MINIMUM=1: the oldest version of each dependency that pyproject.toml allows.
PYTHON ?= python3
TORCH ?=
MINIMUM ?=
WORKERS ?= 4
OTHER_PYTHON := $(if $(filter-out python3,$(PYTHON)),$(shell $(PYTHON) -c 'import sys; print("-python%d.%d" % sys.version_info[:2])'))
VENV := .venv$(OTHER_PYTHON)$(if $(TORCH),-torch-$(TORCH))$(if $(MINIMUM),-minimum)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo
PINNED := $(if $(MINIMUM),constraints-minimum.txt,constraints.txt)
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,$(PINNED))
# Bytecode of the package is kept: the tests start some hundred interpreters, and each would compile it.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

.PHONY: demo quick test coverage test-gpu check format bench site docs clean help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml $(PINNED)
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/' $(PINNED) > $(CONSTRAINTS))
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	touch $@

$(DEMO): pyproject.toml constraints.txt
	@echo "Installing slipstream into $(VENV), once: torch (0.2 GB for the CPU, more with CUDA) and 55 MB more"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[demo]'
	touch $@

demo: $(DEMO)  ## the main job: DDP against slipstream, exact and lossy, on a slow network
	$(BIN)/slipstream demo

quick: $(READY)  ## the tests that start no ranks, no processes and no namespaces
	$(PYTEST) -n 2 --dist worksteal -m "not ranks and not process and not namespace and not gpu"

test: $(READY)  ## the whole suite; a file stays with one worker, which keeps its ranks
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder

coverage: $(READY)  ## the whole suite with its coverage, which takes a fifth longer
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder --cov --cov-report=term

test-gpu: $(READY)  ## the tests that need a CUDA device, alone
	$(PYTEST) -m gpu tests/gpu

check: $(READY)  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy examples  # apart: as scripts they import one another by name
	$(BIN)/mypy tests conftest.py

format: $(READY)  ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## all benchmarks (half a day), or some of them: make bench PART="'accelerator-*' soak"
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[bench]'
	$(BIN)/python -m benchmarks $(PART)
	$(if $(PART),,$(BIN)/python -m benchmarks.torch_operators --markdown docs/operators.md)

# What is a page goes to pages/, in the same folders, as both builders of mkdocs.yml read one folder alone.
PAGES := README.md README.zh.md CONTRIBUTING.md CHANGELOG.md RELEASING.md SECURITY.md docs examples benchmarks/results/README.md
MERMAID := mermaid@11.12.0

site: $(READY)  ## the documentation, into site/; a broken link or anchor is an error
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[docs]'
	rm -rf pages && mkdir pages && cp -r --parents $(PAGES) benchmarks/results/*.png pages
	if npm pack --silent --pack-destination pages $(MERMAID); then \
	  tar xzf pages/mermaid-*.tgz -C pages/docs/site --strip-components 2 package/dist/mermaid.min.js && rm pages/mermaid-*.tgz; \
	else echo "No npm: the two diagrams load mermaid from unpkg.com where they are read."; fi
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs: site  ## build the documentation and serve it: http://127.0.0.1:8000
	$(BIN)/python -m http.server 8000 --bind 127.0.0.1 --directory site

clean:  ## remove the virtual environments and caches
	rm -rf .venv* pages site .coverage* .mypy_cache .ruff_cache .pytest_cache
