# sandboxd: build, try, test, measure. `make help` lists the targets.
SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS   += --no-builtin-rules --no-print-directory
.DEFAULT_GOAL := help

BUILD   := $(CURDIR)/build
BIN     := $(BUILD)/bin
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION)
GO      := go

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

.PHONY: go
go:
	@scripts/need-go.sh $(GO)

.PHONY: deps
deps: ## install the Debian packages that building and running need
	@scripts/deps.sh

.PHONY: build
build: go ## compile everything into build/bin
	@mkdir -p $(BIN)/agent
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN)/ ./cmd/sandboxd ./cmd/sandboxctl
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN)/agent/ ./cmd/sandbox-agent
	CGO_ENABLED=1 $(GO) build -trimpath -tags seccomp -ldflags '$(LDFLAGS)' -o $(BIN)/ ./cmd/sandboxd-runc
	tools/runsc/build.sh $(BIN)/runsc

.PHONY: quickstart
quickstart: deps build ## from a fresh clone to Python in a sandbox, on both runtimes
	@scripts/quickstart.sh

.PHONY: dev-up dev-down dev-pid dev-env
dev-up: ## start the development daemon (instance d) if it is not running
	@scripts/dev.sh up
dev-down: ## stop it and give back everything it holds but images
	@scripts/dev.sh down
dev-pid: ## print its pid
	@scripts/dev.sh pid
dev-env: ## print the environment for clients: eval "$(make -s dev-env)"
	@scripts/dev.sh env

.PHONY: lint
lint: go ## gofumpt, vet, staticcheck, govulncheck, archtest, shellcheck
	@scripts/lint.sh

.PHONY: test
test: deps build ## every test: unit, root, end to end, crash, SDK; fails on a skip
	@scripts/test.sh

.PHONY: bench
bench: deps build ## measure; writes build/bench.json and prints a table
	@scripts/bench.sh

.PHONY: clean
clean: ## remove build
	rm -rf $(BUILD)
