##@ Cluster
# The driver needs nothing but the standard library, so it also runs before `make install`.
DEVCLUSTER := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m devcluster

.PHONY: cluster-build
cluster-build: ## Compile the cluster's programs (minutes when cold, nothing when cached)
	@$(DEVCLUSTER) build

.PHONY: cluster-up
cluster-up: ## Start the control plane of the development cluster
	@$(DEVCLUSTER) up

.PHONY: cluster-up-node
cluster-up-node: ## Start the development cluster with a node that runs pods (root)
	@$(DEVCLUSTER) up --node

.PHONY: cluster-status
cluster-status: ## Say what runs
	@$(DEVCLUSTER) status

.PHONY: cluster-down
cluster-down: ## Stop the development cluster; keeps programs and images
	@$(DEVCLUSTER) down

.PHONY: cluster-wipe
cluster-wipe: ## Stop the development cluster and remove its programs and images
	@$(DEVCLUSTER) wipe
