# sandboxd: build, try, test, measure. `make help` lists the targets.
SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS   += --no-builtin-rules --no-print-directory
.DEFAULT_GOAL := help

BUILD   := $(CURDIR)/build
BIN     := $(BUILD)/bin
LDFLAGS := -s -w -X github.com/sandboxd/sandboxd/internal/release.described=$(shell \
             git describe --tags --match 'v[0-9]*' --always --long --dirty 2>/dev/null)
GO      := go

# MODULES=DIR takes Go modules from the archive of `make vendor-archive` and from nowhere else. The
# go command still checks each against go.sum.
ifdef MODULES
export GOPROXY     := file://$(abspath $(MODULES))
export GOSUMDB     := off
export GOTOOLCHAIN := local
export GONOPROXY   := none
endif

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

.PHONY: go
go:
	@scripts/need-go.sh $(GO)

.PHONY: deps
deps: ## install the Debian packages that building and running need
	@scripts/deps.sh

.PHONY: build
build: go $(BUILD)/man/sandboxctl.1 ## compile everything into build/bin, and write the man pages
	@mkdir -p $(BIN)/agent
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN)/ ./cmd/sandboxd ./cmd/sandboxctl
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN)/agent/ ./cmd/sandbox-agent
	ln -sfn /opt/code-interpreter/code-interpreter.sh $(BIN)/agent/code-interpreter.sh
	@for f in mitmproxy-ca-cert.pem ca-bundle.pem; do [ -e $(BIN)/agent/$$f ] || install -m 644 /dev/null $(BIN)/agent/$$f; done
	CGO_ENABLED=1 $(GO) build -trimpath -tags seccomp -ldflags '$(LDFLAGS)' -o $(BIN)/ ./cmd/sandboxd-runc
	tools/runsc/build.sh $(BIN)/runsc

.PHONY: weak
weak: build ## compile into build/weak what test/attacks needs: programs that take walls down
	@mkdir -p $(BUILD)/weak
	CGO_ENABLED=0 $(GO) build -trimpath -tags weak -ldflags '$(LDFLAGS)' -o $(BUILD)/weak/ ./cmd/sandboxd
	CGO_ENABLED=1 $(GO) build -trimpath -tags seccomp,weak -ldflags '$(LDFLAGS)' -o $(BUILD)/weak/ ./cmd/sandboxd-runc
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $(BUILD)/weak/guest ./test/attacks/guest
	rm -rf $(BUILD)/weak/agent && cp -a $(BIN)/agent $(BUILD)/weak/
	ln -f $(BIN)/runsc $(BUILD)/weak/runsc

.PHONY: quickstart
quickstart: deps build ## build, start a development daemon, run Python in a sandbox on both runtimes
	@scripts/quickstart.sh

.PHONY: dev-up dev-down dev-pid dev-env
dev-up: ## start the development daemon (instance d) if it is not running
	@scripts/dev.sh up
dev-down: ## stop it and remove everything that it holds, except images
	@scripts/dev.sh down
dev-pid: ## print the pid of the development daemon
	@scripts/dev.sh pid
dev-env: ## print the environment for clients: eval "$(make -s dev-env)"
	@scripts/dev.sh env

.PHONY: lint
lint: go ## gofumpt, vet, staticcheck, govulncheck, archtest, shellcheck
	@scripts/lint.sh

.PHONY: promtool
promtool: ## fetch promtool, which checks the alert rules
	@scripts/promtool.sh

.PHONY: s3
s3: go ## build the S3-compatible server with which backups are tested
	@scripts/s3.sh >/dev/null

.PHONY: deps-test
deps-test:
	@scripts/deps.sh test

.PHONY: test
test: ## all that a push must pass: lint, unit, root, end to end, crash, SDK; fails on a skip
	@$(MAKE) deps
	@$(MAKE) -j2 deps-test weak packager
	@$(MAKE) promtool s3
	@scripts/test.sh push

.PHONY: test-all
test-all: ## all tests, in five parts of at most an hour; PART=K runs one, without it those that have not passed on this tree
	@$(MAKE) deps
	@$(MAKE) -j2 deps-test weak packager
	@$(MAKE) promtool s3
	@scripts/test-all.sh $(PART)

.PHONY: fuzz
fuzz: go ## run each fuzz target for FUZZTIME (1m); TARGETS=regexp chooses, RESUME=1 goes on
	@scripts/fuzz.sh $(or $(FUZZTIME),1m)

.PHONY: test-compat
test-compat: deps build ## run the official clients against the daemon; UPDATE=1 writes the results to docs/compatibility.md
	SANDBOXD_TEST=root SANDBOXD_BIN=$(BIN) $(GO) test -count=1 -tags seccomp,all -timeout 20m ./test/compat $(if $(UPDATE),-update)

.PHONY: test-attacks
test-attacks: deps weak ## run all attacks of test/attacks, and show that each succeeds without its wall
	SANDBOXD_TEST=root SANDBOXD_BIN=$(BIN) $(GO) test -count=1 -v -tags seccomp,all -timeout 40m ./test/attacks | grep -v '^=== '

.PHONY: bench
bench: deps build ## measure; writes build/bench.json and the table of docs/benchmarks.md
	@scripts/bench.sh

.PHONY: year
year: deps build ## simulate a year of load, backups, upgrades and kill -9; DAYS=30; writes the table of docs/benchmarks.md
	SANDBOXD_TEST=root SANDBOXD_BIN=$(BIN) $(GO) test -count=1 -v -tags seccomp,all -timeout 0 -run '^TestYear$$' ./test/year \
	  -days $(or $(DAYS),365) -seed $(or $(SEED),1) $(if $(DAYS),,-doc $(CURDIR)/docs/benchmarks.md)

.PHONY: man
man: $(BUILD)/man/sandboxctl.1 ## write the man pages of all commands into build/man
	@ls $(BUILD)/man | wc -l | xargs echo "pages in build/man:"

# The man pages are generated from the help texts of the commands.
$(BUILD)/man/sandboxctl.1: $(wildcard internal/cli/*.go internal/cli/*/*.go cmd/sandboxd/*.go internal/manual/*.go)
	@$(MAKE) go
	@rm -rf $(BUILD)/man
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) MAN_DIR=$(BUILD)/man $(GO) test -count=1 -trimpath -vet=off -run '^TestManual$$' ./internal/cli ./cmd/sandboxd || { rm -rf $(BUILD)/man; exit 1; }

.PHONY: vendor-archive
vendor-archive: go ## write all Go modules into build/modules.tar.zst, for make build MODULES=DIR without a network
	@scripts/vendor-archive.sh $(BUILD)/modules.tar.zst

.PHONY: sbom
IMAGES ?= $(wildcard $(BUILD)/images/*.tar)
sbom: build ## write build/sbom.cdx.json: what is in the programs, and in IMAGES (all archives in build/images)
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/sandboxd sbom -o $(BUILD)/sbom.cdx.json $(addprefix --image ,$(IMAGES)) \
	  $(addprefix --program $(BIN)/,sandboxd sandboxctl sandboxd-runc runsc agent/sandbox-agent)

.PHONY: images
images: deps build ## build all images and write them to build/images, for hosts without a network
	@scripts/images.sh

.PHONY: packager
packager: go
	cd tools/packages && $(GO) build -trimpath -o $(BUILD)/tools/packages .

# What another architecture lacks here, scripts/packages.sh says.
.PHONY: packages
packages: build packager ## write .deb and .rpm of the programs and of build/images to build/packages; ARCH=arm64, SIGN=KEY of gpg, PASSPHRASE_FILE=FILE
	@SIGN="$(SIGN)" PASSPHRASE_FILE="$(PASSPHRASE_FILE)" scripts/packages.sh $(or $(ARCH),$(shell $(GO) env GOARCH))

.PHONY: bundle
bundle: build ## sign one file with build/packages, build/images and their SBOM, for hosts without a network; KEY=SECRETKEY DEBIAN=bookworm, PASSWORD_FILE=FILE
	@PASSWORD_FILE="$(PASSWORD_FILE)" scripts/bundle.sh "$(KEY)" $(FORMS)

.PHONY: test-vm
test-vm: deps build ## install and break the service in emulated machines; STORIES="service power" selects stories
	@scripts/test-vm.sh $(STORIES)

.PHONY: clean
clean: ## remove build, and what tests left in /var/lib
	rm -rf $(BUILD)
	@scripts/clean.sh
