# Run `make help` for the list of targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build

VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
GOLANGCI_LINT_VERSION := v2.15.0
GOLANGCI_LINT := .cache/golangci-lint-$(GOLANGCI_LINT_VERSION)/golangci-lint
DEADCODE_VERSION := v0.52.0
DEADCODE := .cache/deadcode-$(DEADCODE_VERSION)/deadcode
CLUSTER := .cache/cluster
CLUSTER_VERSION := k8s.io/component-base/version
CLUSTER_LDFLAGS := -s -w -X $(CLUSTER_VERSION).gitVersion=v1.37.1 -X $(CLUSTER_VERSION).gitMajor=1 -X $(CLUSTER_VERSION).gitMinor=37
FUZZTIME ?= 5s
FUZZRELAY ?= 1m
BENCHTIME ?= 1x
TESTFLAGS ?=
SOURCES := $(shell find . -path ./.cache -prune -o -name '*.go' -print) go.mod go.sum
# One way to compile for all but the race detector and fuzzing, which compile
# everything anew anyway: as bin/sluice is compiled.
INSTRUMENTED := CGO_ENABLED=1 GOFLAGS="$(GOFLAGS)"
export GOFLAGS := $(GOFLAGS) -trimpath
export CGO_ENABLED := 0
# The race detector; what it has found is told without its second of waiting at
# the end of each program.
RACE := $(INSTRUMENTED) GORACE=atexit_sleep_ms=50
# Root can make network namespaces, so no test has a reason to skip itself.
REQUIRE_ROOT := $(if $(filter 0,$(shell id -u)),SLUICE_REQUIRE_ROOT=1)

.PHONY: help
help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: bin/sluice ## Build the static binary bin/sluice

bin/sluice: $(SOURCES)
	go build -buildvcs=false -ldflags '-s -w -X main.version=$(VERSION)' -o $@ ./cmd/sluice

.PHONY: demo
demo: build ## Build and play the demo: no cluster needed, nothing on this machine changes
	bin/sluice demo --once

.PHONY: test
test: deps build ## Run every test with the race detector (root: end-to-end tests too)
	$(REQUIRE_ROOT) $(RACE) go test -race -timeout 30m $(TESTFLAGS) $$(go list ./... | grep -v /test/e2e)
	go test $(TESTFLAGS) -run 'Model|Agrees' $$(grep -rl --include=*_test.go 'race\.Fewer(' . | xargs dirname | sort -u)
	$(REQUIRE_ROOT) $(RACE) go test -race -count=1 -parallel 4 -timeout 30m $(TESTFLAGS) ./test/e2e
	cd test/quic && $(REQUIRE_ROOT) SLUICE_BIN=$(CURDIR)/bin/sluice go test -count=1 $(TESTFLAGS) .

.PHONY: test-full
test-full: deps build ## As test, with the end-to-end tests at their full size (10,000 connections of 1 MiB)
	$(REQUIRE_ROOT) SLUICE_TEST_FULL=1 go test -count=1 -timeout 30m -v ./test/e2e
	cd test/quic && $(REQUIRE_ROOT) SLUICE_TEST_FULL=1 SLUICE_BIN=$(CURDIR)/bin/sluice go test -count=1 -v .

.PHONY: test-copy
test-copy: deps ## The end-to-end tests on a relay that only copies (--splice=off)
	$(REQUIRE_ROOT) SLUICE_TEST_FLAGS=--splice=off go test -count=1 $(TESTFLAGS) ./test/e2e

.PHONY: test-cluster
test-cluster: deps build $(CLUSTER)/.built ## The tests against a real control plane, and the same against kube-proxy
	$(REQUIRE_ROOT) SLUICE_BIN=$(CURDIR)/bin/sluice SLUICE_CLUSTER_BIN=$(CURDIR)/$(CLUSTER) \
	go test -tags cluster -count=1 -timeout 10m -parallel 8 $(TESTFLAGS) ./test/cluster
	cd test/helm && go test $(TESTFLAGS) .

.PHONY: test-programs
test-programs: deps build ## Put Debian's PostgreSQL, Redis, nginx and mosquitto behind Services (2 minutes)
	@test/programs/install-deps.sh
	$(REQUIRE_ROOT) SLUICE_TEST_FULL=1 SLUICE_BIN=$(CURDIR)/bin/sluice \
	go test -tags programs -count=1 -timeout 15m -parallel 8 -v $(TESTFLAGS) ./test/programs

.PHONY: test-programs-quick
test-programs-quick: deps build ## As test-programs, in half a minute: nobody pauses for longer than two seconds
	@test/programs/install-deps.sh
	$(REQUIRE_ROOT) SLUICE_BIN=$(CURDIR)/bin/sluice \
	go test -tags programs -count=1 -timeout 5m -parallel 8 $(TESTFLAGS) ./test/programs

.PHONY: bench-cluster
bench-cluster: deps build $(CLUSTER)/.built ## Compare with kube-proxy at 5,000 Services, 50,000 endpoints, through a real API server (5 minutes)
	$(REQUIRE_ROOT) SLUICE_TEST_FULL=1 SLUICE_BIN=$(CURDIR)/bin/sluice SLUICE_CLUSTER_BIN=$(CURDIR)/$(CLUSTER) \
	go test -tags cluster -count=1 -timeout 30m -run 'TestScale$$' -v $(TESTFLAGS) ./test/cluster

# The programs of the control plane. They take some minutes to build, once.
$(CLUSTER)/.built: test/cluster/controlplane/go.mod test/cluster/controlplane/go.sum
	@mkdir -p $(@D)
	for package in $$(cd test/cluster/controlplane && go list tool); do \
	  name=$${package##*/}; [ "$$name" = v3 ] && name=etcd; \
	  (cd test/cluster/controlplane && go build -ldflags '$(CLUSTER_LDFLAGS)' -o $(CURDIR)/$(@D)/$$name $$package); \
	done
	touch $@

.PHONY: deps
deps: ## Install, or name, the Debian packages that the tests need
	@test/install-deps.sh

.PHONY: lint
lint: $(GOLANGCI_LINT) $(DEADCODE) ## Run the linters, at the version pinned here
	go mod verify >/dev/null
	go mod tidy -diff
	$(GOLANGCI_LINT) config verify
	$(GOLANGCI_LINT) run --build-tags cluster,programs ./...
	@unreachable=$$($(DEADCODE) ./cmd/sluice); [ -z "$$unreachable" ] || { echo "$$unreachable"; \
	  echo 'lint: the program never calls these functions: remove them, or move them into a _test.go file'; exit 1; }

$(GOLANGCI_LINT):
	GOBIN=$(CURDIR)/$(@D) go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_LINT_VERSION)

$(DEADCODE):
	GOBIN=$(CURDIR)/$(@D) go install golang.org/x/tools/cmd/deadcode@$(DEADCODE_VERSION)

.PHONY: fuzz
fuzz: ## Run each fuzz target for FUZZTIME (5s), on one CPU each
	@grep -rnE --include='*_test.go' '^func Fuzz' . | sed -E 's|^\./(.*)/[^/]*_test.go:[0-9]+:func (Fuzz[A-Za-z0-9_]*).*|\1 \2|' | sort | \
	xargs -P "$$(nproc)" -L 1 bash -c 'status=0; \
	  said=$$($(INSTRUMENTED) go test -run "^$$" -fuzz "^$$1\$$" -fuzztime $(FUZZTIME) -parallel 1 "./$$0" 2>&1) || status=1; \
	  printf "== %s %s\n%s\n" "$$0" "$$1" "$$said"; exit $$status'

.PHONY: fuzz-relay
fuzz-relay: deps ## Attack the data path at random in every mode for FUZZRELAY (1m); SEED repeats a run
	$(REQUIRE_ROOT) SLUICE_FUZZ_RELAY_FOR=$(FUZZRELAY) SLUICE_FUZZ_RELAY_SEED=$(SEED) \
	go test -count=1 -parallel 6 -timeout 24h -v -run TestFuzzRelay $(TESTFLAGS) ./test/e2e

.PHONY: bench-go
bench-go: ## Run each Go benchmark for BENCHTIME (once)
	$(REQUIRE_ROOT) go test -run '^$$' -bench . -benchmem -benchtime $(BENCHTIME) ./...

.PHONY: bench
bench: build ## Compare with HAProxy, nginx, kernel DNAT and others; writes docs/benchmarks.md
	@test/bench/install-deps.sh
	go run ./test/bench

.PHONY: bench-quick
bench-quick: build ## As bench, under a minute, writes nothing
	@test/bench/install-deps.sh
	go run ./test/bench --quick

.PHONY: bench-sync
bench-sync: build ## Measure start, changes and memory with 100 to 30,000 services; writes its part of docs/benchmarks.md
	go run ./test/bench -sync

.PHONY: cover
cover: deps ## Run the tests and show how much of each package they cover
	@mkdir -p .cache
	$(REQUIRE_ROOT) go test -coverpkg=./... -coverprofile=.cache/cover.out ./...
	go tool cover -func=.cache/cover.out | tail -n 1
	@echo 'go tool cover -html=.cache/cover.out shows the lines.'

.PHONY: clean
clean: ## Remove what the other targets made
	rm -rf bin .cache
