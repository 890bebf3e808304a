# Millpond: `make help` lists the targets. A bare machine needs only Python 3.11, make and (for the cluster) root.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.millpond-installed
UV_VERSION := $(shell sed -n 's/^uv==\([^ ]*\).*/\1/p' requirements/build.txt)
export PYTHONPATH := hack
# Everything here runs on two cores beside a cluster: without a bound every torch process would take both.
export OMP_NUM_THREADS ?= 1

-include hack/devcluster/devcluster.mk

##@ Everyday
.PHONY: help
help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z][a-zA-Z0-9_-]*:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: install
install: $(STAMP) ## Make the virtual environment with everything the targets need

$(STAMP): requirements/dev.txt pyproject.toml
	@hack/install "$(PYTHON)" "$(VENV)" "$(UV_VERSION)"
	@touch $@

.PHONY: test
test: install ## Run the tests but the slow ones (brings up the cluster they need; see MILLPOND_KUBECONFIG); ARGS='tests/unit -k x' narrows
	@hack/prepare test
	@hack/test $(ARGS)

.PHONY: test-slow
test-slow: install ## The tests marked `slow`, which `make test` leaves out: the same proofs at full length (CI runs both)
	@hack/prepare test
	@hack/test -m slow $(ARGS)

.PHONY: test-model
test-model: install ## 200 prompts of the real model against transformers (ten minutes or more; not part of `make test`)
	@$(BIN)/pytest tests/model/suite_greedy_200.py $(ARGS)

.PHONY: test-keda
test-keda: install ## KEDA owns a pool's count: builds the real KEDA once (8 minutes on two cores), then runs it (4 minutes)
	@hack/prepare keda
	@$(BIN)/pytest tests/keda/suite_keda.py $(ARGS)

.PHONY: demo
demo: install ## Bring up a real cluster, install the chart, apply the quickstart, stream a real answer
	@hack/prepare demo
	@$(BIN)/python -m demo

.PHONY: demo-local
demo-local: install ## The same requests without Kubernetes or root: two engines and a gateway as processes
	@$(BIN)/python -m demo --local

.PHONY: demo-clean
demo-clean: install ## Remove what the demo made, its cluster included
	@$(BIN)/python -m demo --clean

.PHONY: test-kernels
test-kernels: install ## GPU kernels without a GPU: all sweeps under the interpreter, every form compiled ahead of time
	@MILLPOND_WIDE_SWEEP=1 $(BIN)/pytest tests/unit/millpond_engine/kernels/gpu --timeout 1900 $(ARGS)

.PHONY: gateway-compiled
gateway-compiled: install ## Compile the gateway's hot modules into build/gateway-compiled, as its image does (a minute)
	@$(BIN)/python gateway/compile.py build/gateway-compiled

.PHONY: test-compiled
test-compiled: gateway-compiled ## The gateway's tests against its compiled form, the one that images ship
	@PYTHONPATH=build/gateway-compiled:hack MILLPOND_GATEWAY_FORM=compiled $(BIN)/pytest -p no:cacheprovider \
		tests/unit/millpond_gateway tests/property/gateway tests/gateway $(ARGS)

.PHONY: check
check: install ## Format, lint, types, layers, generated files, import guard
	@hack/check

##@ Upkeep
.PHONY: format
format: install ## Format and fix what ruff can fix
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

.PHONY: lock
lock: ## Resolve the hashed pins under requirements/ again
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m uv --version >/dev/null 2>&1 || $(BIN)/python -m pip --quiet install uv==$(UV_VERSION)
	@$(BIN)/python hack/lock

.PHONY: clean
clean: ## Remove the virtual environment and caches of this checkout
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
