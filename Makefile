# make train     train a byte-level GPT on this machine, two processes (ARGS=--help lists its options)
# make test      ruff, mypy and the tests (8 to 12 minutes on 2 cores, 20 on a slow day of a shared machine)
# make lint      ruff and mypy alone
# make test-all  the deep version: more examples, more ranks (two hours and more)
# make test-kernels  tests that compare numbers, with the kernels of older processors; tests with threads, on one core
# make faults    tests of checkpoints: killed saves, damaged files, full disks, forged manifests; 9 minutes (ARGS=--short: 1)
# make examples  run the examples, about 5 minutes
# make bench     measure against FSDP2, DDP and DCP (25 to 40 minutes on 2 cores that do nothing else); PEERS=all adds DeepSpeed
# make bench-wire  formats of 8 and 4 bits: bytes a step, loss reached, steps at 1 Gbit/s (root alone; half an hour on 2 cores)
# make docs     build the site of docs/, with pages of the reference, in build/site; a warning is an error (1 minute)
# make package   build wheel and sdist, install each into an empty environment, and train a step there
# make clean     remove .venv, build, dist and *.egg-info

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
# One thread a process: ranks share the cores, and sums keep their order.
export OMP_NUM_THREADS ?= 1
# Tests and examples start a hundred processes: without bytecode each of them compiles the package for a second.
unexport PYTHONDONTWRITEBYTECODE
ARGS ?=
PEERS ?= default

.PHONY: help train test test-all test-kernels lint faults bench bench-wire examples docs package clean

help:
	@sed -n 's/^# make/make/p' Makefile

# The pip of Python 3.11 takes three times as long to choose versions. Modules are compiled when they are first imported: pip
# would compile 20,000 files, of which tests import a quarter.
# torchtitan asks for a release of datasets before 4.8. The example needs neither this nor most of what it asks for.
INSTALL := $(RUN)/pip install -qq --no-compile -c constraints.txt
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	$(INSTALL) torch
	$(INSTALL) -e '.[train,test,examples,jax,docs]'
	$(INSTALL) --no-deps torchtitan spmd_types
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

# Tests of processes wait for each other and for time limits: with a worker more than there are cores no core waits with them.
# mypy, which has one thread, runs beside the tests, and its findings come last.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(1 + os.cpu_count())')
test: $(VENV)/.installed
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	@mkdir -p build; $(RUN)/mypy > build/mypy.txt & mypy=$$!; \
		$(RUN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not deep"; tests=$$?; \
		wait $$mypy; types=$$?; cat build/mypy.txt; exit $$((tests | types))

test-all: lint
	FSHARP_DEEP=1 $(RUN)/python -m pytest -n auto --dist worksteal --timeout 900
	$(MAKE) test-kernels

# Instruction sets by which torch, oneDNN and XLA choose kernels. A tolerance that holds with one of them alone is no tolerance.
# XLA has no float16 below AVX2.
NUMBERS := tests/functional tests/interop tests/stateful/modules tests/stateful/runtime
THREADS := tests/distributed tests/functional/comm tests/stateful/transport tests/stateful/runtime tests/inspect/test_measure.py
test-kernels: $(VENV)/.installed
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 XLA_FLAGS=--xla_cpu_max_isa=AVX2 \
		$(RUN)/python -m pytest -n auto --dist worksteal -m "not deep" --timeout 900 $(NUMBERS)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 XLA_FLAGS=--xla_cpu_max_isa=AVX2 \
		$(RUN)/python -m pytest -n auto --dist worksteal -m "not deep" --timeout 900 $(NUMBERS)
	taskset -c 0 $(RUN)/python -m pytest -m "not deep" --timeout 900 $(THREADS)

faults: $(VENV)/.installed
	@$(RUN)/python -m tests.faults $(ARGS)

bench-wire: $(VENV)/.installed
	@$(RUN)/python -m benchmarks.wire $(ARGS)

bench: $(VENV)/.installed $(if $(filter all,$(PEERS)),$(VENV)/.deepspeed)
	@$(RUN)/python -m benchmarks --peers $(PEERS) $(ARGS)

examples: $(VENV)/.installed
	@echo "--- functional_train_step: a training step written with pure functions"
	@$(RUN)/torchrun --nproc-per-node 2 examples/functional_train_step.py
	@echo "--- resume_elsewhere: saved by four ranks under ZeRO-3, resumed by three under DDP"
	@$(RUN)/python examples/resume_elsewhere.py
	@echo "--- finetune_llama: loads and exports Hugging Face weights; ZeRO-3, activation checkpointing, gradient accumulation"
	@$(RUN)/python examples/finetune_llama.py
	@echo "--- lora_gpt2: ZeRO-2 with tied embeddings, then LoRA on the frozen model"
	@$(RUN)/python examples/lora_gpt2.py
	@echo "--- train_mixtral: expert parallelism along one axis, and ZeRO-3"
	@$(RUN)/python examples/train_mixtral.py
	@echo "--- te_llama: TransformerEngine's modules in FP8 under ZeRO-3"
	@$(RUN)/python examples/te_llama.py
	@echo "--- train_with_optax: a Llama under ZeRO-3, updated by an optax chain; compared with JAX"
	@$(RUN)/python examples/train_with_optax.py
	@echo "--- jax_unit: Flax modules as units, sharded and scheduled; exports their trained weights"
	@$(RUN)/python examples/jax_unit.py
	@echo "--- accelerate_gpt2: a loop of accelerate, which saves and resumes; compared with DDP"
	@$(RUN)/python examples/accelerate_gpt2.py
	@echo "--- peft_lora: PEFT's LoRA, by transformers' Trainer; compared with DDP"
	@$(RUN)/python examples/peft_lora.py
	@echo "--- trl_dpo: TRL's DPO; the reference is the model without its adapter; compared with DDP"
	@$(RUN)/python examples/trl_dpo.py
	@echo "--- fabric_gpt2: a loop of Lightning's Fabric, which saves and resumes; compared with DDP"
	@$(RUN)/python examples/fabric_gpt2.py
	@echo "--- lightning_gpt2: Lightning's Trainer, which saves and resumes; compared with DDP"
	@$(RUN)/python examples/lightning_gpt2.py
	@echo "--- torchdata_stream: a stream read by workers goes on at the same byte"
	@$(RUN)/python examples/torchdata_stream.py
	@echo "--- torchtitan_llama: torchtitan's Llama, compared with torchtitan's FSDP2"
	@$(RUN)/python examples/torchtitan_llama.py
	@echo "--- train_cnn: BatchNorm with statistics for each rank"
	@$(RUN)/python examples/train_cnn.py
	@echo "--- dp_sgd: per-sample clipping and noise under ZeRO-3"
	@$(RUN)/python examples/dp_sgd.py
	@echo "--- lose_a_rank: a rank killed in a step comes back alone"
	@$(RUN)/python examples/lose_a_rank.py
	@echo "--- survive_a_kill: killed three times, restarted, and ends with the bits of an undisturbed run"
	@$(RUN)/python examples/survive_a_kill.py
	@echo "--- property_test_roundtrip: a hypothesis test of sharding, for your own tree"
	@$(RUN)/python -m pytest -q examples/property_test_roundtrip.py

docs: $(VENV)/.installed
	@$(RUN)/python -m sphinx -W --keep-going -q -b html docs build/site
	@echo "open build/site/index.html"

package: $(VENV)/.installed
	rm -rf build dist
	$(RUN)/pip install --quiet build
	$(RUN)/python -m build --outdir dist
	for file in dist/*.whl dist/*.tar.gz; do \
		rm -rf build/empty && $(PYTHON) -m venv build/empty && \
		build/empty/bin/pip install --quiet -c constraints.txt "$$file" && \
		(cd build && empty/bin/python ../examples/functional_train_step.py) || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist *.egg-info
