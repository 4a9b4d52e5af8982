# make train   train a byte-level GPT on this machine, two processes
# make test    lint, types, tests (about 12 minutes on 2 cores)
# make test-all  the deep version: more examples, more ranks
# make bench   measure against FSDP2 and DDP (5 minutes on 2 cores that do nothing else); PEERS=all adds DeepSpeed

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
# One thread a process: ranks share the cores, and sums keep their order.
export OMP_NUM_THREADS ?= 1
ARGS ?=
PEERS ?= default

.PHONY: train test test-all lint bench examples clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet -c constraints.txt torch
	$(RUN)/pip install --quiet -c constraints.txt -e '.[train,test]'
	touch $@

# DeepSpeed asks for torch while it is built, and wants to compile what a CPU does not need.
$(VENV)/.deepspeed: $(VENV)/.installed benchmarks/constraints-deepspeed.txt
	$(RUN)/pip install --quiet setuptools wheel
	DS_BUILD_OPS=0 $(RUN)/pip install --quiet --no-build-isolation -c constraints.txt -c benchmarks/constraints-deepspeed.txt deepspeed
	touch $@

train: $(VENV)/.installed
	@$(RUN)/python -m examples.gpt $(ARGS)

lint: $(VENV)/.installed
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

test: lint
	$(RUN)/python -m pytest -m "not deep"

test-all: lint
	FSHARP_DEEP=1 $(RUN)/python -m pytest --timeout 900

bench: $(VENV)/.installed $(if $(filter all,$(PEERS)),$(VENV)/.deepspeed)
	@$(RUN)/python -m benchmarks --peers $(PEERS) $(ARGS)

examples: $(VENV)/.installed
	$(RUN)/python examples/functional_train_step.py
	$(RUN)/python -m pytest -q examples/property_test_roundtrip.py

clean:
	rm -rf $(VENV) build *.egg-info
