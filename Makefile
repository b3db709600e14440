# make demo | make quick | make test | make check | make bench: each sets up .venv first, on a fresh
# machine too. make test TORCH=2.15.0 PYTHON=python3.13: other versions, in an environment of their own.
PYTHON ?= python3
TORCH ?=
WORKERS ?= 3
OTHER_PYTHON := $(if $(filter-out python3,$(PYTHON)),$(shell $(PYTHON) -c 'import sys; print("-python%d.%d" % sys.version_info[:2])'))
VENV := .venv$(OTHER_PYTHON)$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
RESULTS := benchmarks/results
AGAINST_OPTIMAL := default 'by_bytes 4/1/1' 'by_bytes 16/1/1' 'by_bytes 25/1/1' 'by_percent 96.54/3.46' optimal
# Bytecode of the package is kept: the tests start some hundred interpreters, and each would compile it.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

.PHONY: demo quick test coverage test-gpu check format bench clean help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(CONSTRAINTS))
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	touch $@

$(DEMO): pyproject.toml constraints.txt
	@echo "Installing slipstream into $(VENV), once: torch (0.2 GB for the CPU, more with CUDA) and 55 MB more"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[report]'
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
	$(BIN)/mypy tests conftest.py

format: $(READY)  ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## all benchmarks (about five hours), tables under benchmarks/results
	$(BIN)/python benchmarks/exchange.py --model resnet50 --json $(RESULTS)/exchange-resnet50.json
	$(BIN)/python benchmarks/exchange.py --model vgg16 --json $(RESULTS)/exchange-vgg16.json
	$(BIN)/python benchmarks/exchange.py --model bert --json $(RESULTS)/exchange-bert.json
	for rate in 1gbit 300mbit; do for model in resnet50 vgg16 bert; do $(BIN)/python benchmarks/exchange.py \
	    --model $$model --rate $$rate --splits $(AGAINST_OPTIMAL) --finals 20 --json $(RESULTS)/optimal-$$model-$$rate.json \
	    || exit 1; done; done
	for rate in 1gbit 300mbit; do for model in resnet50 vgg16 bert; do \
	    $(BIN)/python benchmarks/exchange.py --model $$model --rate $$rate --ddp 4 50 --splits default \
	    --codecs bf16 'bf16 / by_bytes 16/1/1' fp16 --hooks fp16 --json $(RESULTS)/codecs-$$model-$$rate-half.json && \
	    $(BIN)/python benchmarks/exchange.py --model $$model --rate $$rate --ddp 4 50 --splits default \
	    --codecs int8 onebit dgc powersgd 'adaptive onebit' --hooks PowerSGD \
	    --json $(RESULTS)/codecs-$$model-$$rate.json || exit 1; done; done
	$(BIN)/python benchmarks/convergence.py --task digits --json $(RESULTS)/convergence-digits.json
	$(BIN)/python benchmarks/convergence.py --task text --ranks 2 --steps 1600 --json $(RESULTS)/convergence-text.json
	for task in digits text speed; do \
	    $(BIN)/python benchmarks/precision.py --task $$task --json $(RESULTS)/precision-$$task.json || exit 1; done
	$(BIN)/python benchmarks/large_batch.py --json $(RESULTS)/large-batch.json
	$(BIN)/python benchmarks/soak.py --json $(RESULTS)/soak.json
	$(BIN)/python benchmarks/blame.py --json $(RESULTS)/blame.json
	$(BIN)/python benchmarks/prediction.py --json $(RESULTS)/prediction.json
	$(BIN)/python benchmarks/tuner.py --json $(RESULTS)/tuner.json
	for model in resnet50 vgg16 bert swin-t; do \
	    $(BIN)/python benchmarks/auto.py --model $$model --json $(RESULTS)/auto-$$model.json || exit 1; done
	$(BIN)/python benchmarks/overhead.py --json $(RESULTS)/overhead.json
	$(BIN)/python benchmarks/transports.py --json $(RESULTS)/transports-1gbit.json
	for numbering in contiguous permuted; do $(BIN)/python benchmarks/allreduce.py --numbering $$numbering \
	    --json $(RESULTS)/allreduce-$$numbering.json || exit 1; done
	for ranks in 2 4; do $(BIN)/python benchmarks/allreduce.py --nodes 1 --ranks-per-node $$ranks --transports flat \
	    shared_memory --kilobytes 256 1024 4096 16384 65536 --json $(RESULTS)/allreduce-$$ranks-ranks.json || exit 1; done
	$(BIN)/python benchmarks/times.py --json $(RESULTS)/times.json
	$(BIN)/python benchmarks/operators.py --json $(RESULTS)/operators.json
	$(BIN)/python benchmarks/tensor_parallel.py --json $(RESULTS)/tensor-parallel.json
	$(BIN)/python benchmarks/bubbles.py --json $(RESULTS)/bubbles.json
	$(BIN)/python benchmarks/recompute.py batch --json $(RESULTS)/recompute-bert-large.json
	for model in bert gpt2 swin; do \
	    $(BIN)/python benchmarks/recompute.py time --model $$model --json $(RESULTS)/recompute-$$model.json || exit 1; done
	$(BIN)/python benchmarks/offload.py --json $(RESULTS)/offload.json
	$(BIN)/python benchmarks/torch_operators.py --markdown docs/operators.md
	$(BIN)/python benchmarks/tables.py

clean:  ## remove the virtual environments and caches
	rm -rf .venv* .coverage* .mypy_cache .ruff_cache .pytest_cache
