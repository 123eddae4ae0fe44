# Plain pip and venv do it all. `make demo` and `make test` work on a fresh clone.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv demo test canary canary-long explore sim mutants soak faults faults-long tables lint format protos bench bench-admission bench-stream gpu-test gpu-faults gpu-bench gpu-pair images compose-test voice-data voice-train voice-eval clean

BIN := .venv/bin
GPUS ?= 0,1
STAMP := .venv/.installed
PROJECTS := pyproject.toml models/pyproject.toml $(wildcard libs/*/pyproject.toml services/*/pyproject.toml)

DOCKER ?= docker
REVISION ?= $(shell git describe --always --dirty --abbrev=40 2>/dev/null)
SOURCE ?= $(shell git config --get remote.origin.url)
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' libs/unit/pyproject.toml)

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

venv: $(STAMP)  ## .venv with everything installed

# A name on PATH is not enough: a pyenv shim can exist and not run.
$(STAMP): requirements.txt requirements-dev.txt constraints.txt $(PROJECTS)
	@if ! [ -x $(BIN)/python ]; then \
	  for candidate in $(PYTHON) python3.12 python3.11 python3.13 python3; do \
	    if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	        2>/dev/null; then \
	      echo "creating .venv with $$candidate"; "$$candidate" -m venv .venv; break; \
	    fi; \
	  done; \
	  [ -x $(BIN)/python ] || { echo "no Python >= 3.11 with venv found (Debian, Ubuntu: apt install python3-venv);" \
	    "name another one with PYTHON=…" >&2; exit 1; }; \
	fi
	@echo "installing into .venv: this takes some minutes"
	$(BIN)/python -m pip install -q -c constraints.txt hatchling editables
	$(BIN)/python -m pip install -q --no-build-isolation -r requirements.txt -r requirements-dev.txt
	@touch $@

demo: $(STAMP)  ## a unit on the CPU: texts in every voice, speech and rows in demo-out/
	@$(BIN)/duplet demo

test: $(STAMP)  ## all tests
	@$(BIN)/pytest

soak: $(STAMP)  ## 10,000 requests with cancels, disconnects, slow readers; SOAK_REQUESTS=n
	@$(BIN)/python -m bench.soak

explore: $(STAMP)  ## exhaustive search of the safety core at small scopes; SCOPE=name for one
	@$(BIN)/python -m duplet_sim.explore $(if $(SCOPE),--scope $(SCOPE))

COMPILED ?= $(if $(TRACE),0,1)
SIM_BUILD := $(if $(filter-out 0,$(COMPILED)),.build/sim)
sim: $(STAMP)  ## seeded faults over larger worlds; SEEDS=n, JOBS=n, COMPILED=0, or SEED=k TRACE=1
	@$(if $(SIM_BUILD),$(BIN)/python libs/sim/compile.py $(SIM_BUILD))
	@PYTHONPATH=$(SIM_BUILD) $(BIN)/python -m duplet_sim.simulate \
	  --seeds $(or $(SEEDS),20000) $(if $(SEED),--seed $(SEED)) --jobs $(or $(JOBS),1) \
	  $(if $(TRACE),--trace)

mutants: $(STAMP)  ## each safety rule switched off must be noticed
	@$(BIN)/python -m tests.mutants.all_mutants

faults: $(STAMP)  ## every fault on real processes, and a control run with one rule off
	@$(BIN)/python -m tests.faults.run_faults

faults-long: $(STAMP)  ## faults in random order until FAULTS_CHECKS=n KV checks (20,000)
	@FAULTS_CHECKS=$${FAULTS_CHECKS:-20000} $(BIN)/python -m tests.faults.run_faults

tables: $(STAMP)  ## tables in docs/safety.md, and docs/settings.md and docs/metrics.md, from the code
	@$(BIN)/python -m docs.machine_tables
	@$(BIN)/python -m docs.settings_tables
	@$(BIN)/python -m docs.metric_tables

gpu-test: $(STAMP)  ## handles, moves and faults between two GPUs; the engine on one
	@$(BIN)/pytest tests/gpu tests/gpu_engine

gpu-faults: $(STAMP)  ## pauses and kills of a unit on two GPUs; FAULTS_CHECKS=n for a long run
	@$(BIN)/python -m tests.faults.run_faults --gpu $(GPUS)

gpu-bench: $(STAMP)  ## docs/measurements/kv_move.md, on two GPUs; products.md, decode_step.md, on one
	$(BIN)/python -m bench.kv_move
	$(BIN)/python -m bench.products
	$(BIN)/python -m bench.decode_step

gpu-pair: $(STAMP)  ## docs/measurements/pair.md: a unit beside two monoliths on two GPUs; TRACE=file to replay
	$(BIN)/python -m bench.pair --gpu $(GPUS) --model random:s2-pro \
	  $(if $(TRACE),--replay $(TRACE),--items unit,waterfall,unpacked,monoliths)
	$(BIN)/python -m bench.pair_figures run/pair

images:  ## the four container images; CUDA=13.0 for GPUs, BUILD_FLAGS=… for docker build
	@for service in kvproxy prefill decode lb; do \
	  DOCKER_BUILDKIT=1 $(DOCKER) build -f docker/$$service.Dockerfile \
	    --build-arg VERSION=$(VERSION) --build-arg CUDA=$(CUDA) \
	    --build-arg "REVISION=$(REVISION)" --build-arg "SOURCE=$(SOURCE)" \
	    $(BUILD_FLAGS) -t duplet-$$service:$(VERSION)$(if $(CUDA),-gpu) .; \
	done

compose-test: $(STAMP)  ## a unit of containers, used and broken; COMPOSE='docker compose'
	@$(BIN)/python -m tests.compose.run_compose

canary: $(STAMP)  ## KV damaged on purpose must raise the alarm; then 200 pairs of unit and monolith
	@code=0; $(BIN)/duplet canary --start --lengths short --pairs 16 --inject 2 || code=$$?; \
	  [ $$code = 3 ] || { echo "damaged KV raised no alarm (exit code $$code)" >&2; exit 1; }
	@$(BIN)/duplet canary --start --lengths short --pairs 200

canary-long: $(STAMP)  ## the equivalence test by ear, other seeds on each side, from 1,000 pairs until it has power; LOG=file
	@$(BIN)/duplet canary --start --other-seeds --lengths medium,long --enough-power 0.85 \
	  --pairs $(or $(PAIRS),6000) $(if $(LOG),--log $(LOG))

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy libs services tests bench training models

format: $(STAMP)  ## lay the code out
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(STAMP)  ## is anything slower than it was? UPDATE=1 writes the figures down
	@$(BIN)/python -m bench.regression $(if $(UPDATE),--update)

VOICE := run/voice
WREN := models/duplet_models/wren
DEBIAN := fortunes fortunes-min bible-kjv bible-kjv-text wamerican
VOICE_TEXTS ?= 14000
VOICE_HOURS ?= 11
VOICE_SECONDS ?= 500

voice-data: $(STAMP)  ## texts, speech and codes for training/; VOICE_TEXTS=n VOICE_HOURS=n
	@$(BIN)/python -m pip install -q --no-build-isolation -r training/requirements.txt
	@mkdir -p $(VOICE)/debian
	@cd $(VOICE)/debian && apt-get -q download $(DEBIAN) && for f in *.deb; do dpkg -x $$f .; done
	@$(BIN)/python -m training.texts --debian $(VOICE)/debian --count $(VOICE_TEXTS) \
	  --out $(VOICE)/texts.jsonl
	@$(BIN)/python -m training.texts --debian $(VOICE)/debian --count 1500 --seed 4 --held-out \
	  --out $(VOICE)/held-out.jsonl
	@OMP_NUM_THREADS=1 $(BIN)/python -m training.speak --texts $(VOICE)/texts.jsonl \
	  --hours $(VOICE_HOURS) --out $(VOICE)/speech
	@$(BIN)/python -m training.make_codes --shards $(VOICE)/speech --out $(VOICE)/codes

voice-train:  ## a voice's weights, on this machine's GPU; VOICE_SECONDS=n VOICE_TRAIN="options"
	@mkdir -p $(WREN)
	@for f in config generation_config phonemes; do \
	  [ -e $(WREN)/$$f.json ] || cp models/duplet_models/wren/$$f.json $(WREN)/; \
	done
	@$(BIN)/python -m training.train_model --codes $(VOICE)/codes/codes.npz --model $(WREN) \
	  --seconds $(VOICE_SECONDS) --out $(VOICE)/weights $(VOICE_TRAIN)
	@cp $(VOICE)/weights/model.safetensors $(VOICE)/codes/codec.safetensors $(WREN)/
	@$(BIN)/python -m training.make_voices --model $(WREN)

voice-eval: $(STAMP)  ## docs/measurements/voice.md: phoneme error rates; VOICE_EVAL="options"
	@$(BIN)/python -m bench.voice --model $(WREN) --texts $(VOICE)/held-out.jsonl $(VOICE_EVAL)

bench-admission: $(STAMP)  ## what it costs to take a prompt
	@$(BIN)/python -m bench.admission

bench-stream: $(STAMP)  ## rows/s that one lb carries
	@$(BIN)/python -m bench.stream

protos: $(STAMP)  ## stubs from protos/
	$(BIN)/python libs/wire/generate.py

clean:  ## remove the environment and caches
	rm -rf .venv .build .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-out
