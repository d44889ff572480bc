# Run `make help` for the list of targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build

VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
GOLANGCI_LINT_VERSION := v2.15.0
GOLANGCI_LINT := go run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_LINT_VERSION)
DEADCODE_VERSION := v0.52.0
DEADCODE := go run golang.org/x/tools/cmd/deadcode@$(DEADCODE_VERSION)
# The programs of the control plane. All checkouts of a user share those of the same versions.
CONTROLPLANE := test/cluster/controlplane/go.mod test/cluster/controlplane/go.sum
CLUSTER := $(shell dirname "$$(go env GOCACHE)")/sluice/cluster-$(shell cat $(CONTROLPLANE) | sha256sum | head -c 16)
CLUSTER_VERSION := k8s.io/component-base/version
CLUSTER_LDFLAGS := -s -w -X $(CLUSTER_VERSION).gitVersion=v1.37.1 -X $(CLUSTER_VERSION).gitMajor=1 -X $(CLUSTER_VERSION).gitMinor=37
FUZZTIME ?= 5s
FUZZRELAY ?= 1m
BENCHTIME ?= 1x
TESTFLAGS ?=
# All builds use the flags of bin/sluice, so that they share the build cache: those with the race
# detector, which needs cgo, share theirs with the end-to-end tests' binary.
INSTRUMENTED := CGO_ENABLED=1
export GOFLAGS := $(GOFLAGS) -trimpath
export CGO_ENABLED := 0
# The race detector's programs do not wait for a second at their end.
QUICK_EXIT := GORACE=atexit_sleep_ms=50
RACE := $(INSTRUMENTED) $(QUICK_EXIT)
# How long the tests of .ci/run may take: a machine can be five times slower than another. What a test
# waits for has a bound of its own.
PATIENCE := 75m
# Root can create network namespaces, so no test may skip itself.
REQUIRE_ROOT := $(if $(filter 0,$(shell id -u)),SLUICE_REQUIRE_ROOT=1)

.PHONY: help
help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build the static binary bin/sluice
	go build -buildvcs=false -ldflags '-s -w -X main.version=$(VERSION)' -o bin/sluice ./cmd/sluice

.PHONY: bpf
bpf: deps ## Compile the BPF programs with Debian's clang-14
	go generate ./flow/bpf ./flow/bypass/bpf ./host/drops/bpf ./redirect/sklookup/bpf

.PHONY: demo
demo: build ## Build and run the demo: it needs no cluster and changes nothing on this machine
	bin/sluice demo --once

# Tests that play fewer rounds with the race detector. They run without it, too.
FEWER = $$(grep -rl --include=*_test.go 'race\.Fewer(' .)

# Packages whose tests take minutes, mostly waiting: they begin first, and the others run
# beside them. make lint vets all.
LONG := ./test/vm ./flow

.PHONY: test
test: test-packages test-e2e ## Run every test with the race detector (the end-to-end tests need root)

.PHONY: test-packages
test-packages: deps
	$(REQUIRE_ROOT) $(RACE) go test -race -vet=off -timeout $(PATIENCE) $(TESTFLAGS) $(LONG) $$(go list ./... | grep -v /test/e2e)
	go test -vet=off $(TESTFLAGS) -run "^($$(awk -F'[ (]' '/^func Test/ { test = $$2 } /race\.Fewer\(/ && test { print test }' $(FEWER) | sort -u | paste -sd'|'))$$|Model|Agrees" $$(dirname $(FEWER) | sort -u)

.PHONY: test-e2e
test-e2e: deps build
	$(REQUIRE_ROOT) $(QUICK_EXIT) SLUICE_TEST_RACE=1 go test -vet=off -count=1 -parallel 4 -timeout $(PATIENCE) $(TESTFLAGS) ./test/e2e
	cd test/quic && $(REQUIRE_ROOT) SLUICE_BIN=$(CURDIR)/bin/sluice go test -count=1 $(TESTFLAGS) .
	cd test/dnscache && $(REQUIRE_ROOT) SLUICE_BIN=$(CURDIR)/bin/sluice go test -count=1 $(TESTFLAGS) ./...

PKG ?= ./...
RUN ?= .
N ?= 200

.PHONY: stress
stress: deps ## Run tests N (200) times beside load, until one fails: make stress PKG=./stream RUN=TestGrace N=200
# Twice as many busy processes as CPUs. A test that waits has to pass this before it lands.
	@trap 'kill $$(jobs -p)' EXIT; for i in $$(seq $$((2 * $$(nproc)))); do (while :; do :; done) & done; \
	$(REQUIRE_ROOT) $(RACE) go test -race -run '$(RUN)' -count $(N) -failfast -timeout 4h $(TESTFLAGS) $(PKG)

.PHONY: test-full
test-full: deps build ## Run the end-to-end tests at full size (10,000 connections of 1 MiB)
	$(REQUIRE_ROOT) SLUICE_TEST_FULL=1 go test -count=1 -timeout 30m -v ./test/e2e
	cd test/quic && $(REQUIRE_ROOT) SLUICE_TEST_FULL=1 SLUICE_BIN=$(CURDIR)/bin/sluice go test -count=1 -v .

.PHONY: test-sctp-full
test-sctp-full: deps ## Run 1,000 associations with 100 messages each, and 20 take-overs, in a guest kernel with SCTP (15 minutes)
	$(REQUIRE_ROOT) SLUICE_TEST_FULL=1 go test -count=1 -timeout 1h -v -run 'TestSCTP$$/(sklookup|take-over|faults)' $(TESTFLAGS) ./test/vm

# Tests of the relay alone: its sockets, buffers, descriptors and resets.
RELAYED := TestPromise8_DeadService|TestDatagramsPassASmallerLink|TestFullConntrack|TestKillResetsConnections|TestRestartEndsOpen|TestNeedsNoMore|TestDescriptorsRunOut|TestFuzzRelay|TestReadersThatStop|TestResourcesOfOneNamespace|TestConnectionsFromTheNodeTake|TestConnectionTrackingIsKept|TestServiceWhoseEndpointsRefuse|TestGonePeer|TestHangupDuringTheStart|TestTakeOver|TestHangupAfterTakeOver

.PHONY: test-flows
test-flows: deps ## Run the end-to-end tests with --datapath=kernel
	$(REQUIRE_ROOT) SLUICE_TEST_FLAGS=--datapath=kernel go test -vet=off -count=1 -parallel 4 -timeout $(PATIENCE) -skip '$(RELAYED)' $(TESTFLAGS) ./test/e2e

.PHONY: test-flows-quick
# The other tests of TestPromise7_ set --datapath themselves: make test-e2e plays the same. What is
# named relay here has no flag of its own, so the kernel forwards in each mode.
test-flows-quick: deps build ## As test-flows, the most important ones
	$(REQUIRE_ROOT) SLUICE_TEST_FLAGS=--datapath=kernel go test -vet=off -count=1 -parallel 4 -timeout $(PATIENCE) $(TESTFLAGS) \
	-run 'TestMatrix|TestPromise[12356]_|TestPromise7_GoodContent|TestPromise7_TakeOverRefuses/relay|TestAffinity|TestSessionsFollow|TestPodCycles|TestDNSServers|TestServiceEdited|TestPortThatAnother' ./test/e2e
	cd test/quic && $(REQUIRE_ROOT) SLUICE_BIN=$(CURDIR)/bin/sluice SLUICE_TEST_FLAGS=--datapath=kernel go test -count=1 $(TESTFLAGS) .

FLOWS ?= 250000
BUSY ?= 0

.PHONY: bench-flows
bench-flows: deps ## Open 250,000 connections at once that the kernel forwards (3 minutes; FLOWS=60000 for fewer)
	$(REQUIRE_ROOT) SLUICE_TEST_FLOWS=$(FLOWS) go test -count=1 -timeout 20m -v -run 'TestManyOpenFlows' ./test/e2e

.PHONY: bench-takeover
bench-takeover: deps ## Have processes take over 9,000 relayed connections, with a full past, and print in what time and how long each paused (1 minute)
	$(REQUIRE_ROOT) SLUICE_TEST_MOVED=9000 SLUICE_TEST_PAST=140000 go test -count=1 -v -run 'TestTakeOverPausesConnections' ./test/e2e

.PHONY: bench-start
bench-start: deps ## Measure what kernel flows cost at a start: the first, after the same build, after another; BUSY=4: beside so many busy processes
	@trap 'kill $$(jobs -p) 2>/dev/null || true' EXIT; for i in $$(seq $(BUSY)); do (while :; do :; done) & done; \
	$(REQUIRE_ROOT) go test -run XXX -bench Start -benchtime 10x $(TESTFLAGS) ./flow/bpf

.PHONY: test-mixed
test-mixed: deps ## Have clients ask Services and their endpoints from few ports, in a million kernel flows and by the kernel's NAT, one after the other (6 minutes)
	$(REQUIRE_ROOT) SLUICE_TEST_FULL=1 go test -count=1 -timeout 1h -parallel 1 -v -run TestClientsMixServicesAndEndpoints $(TESTFLAGS) ./flow

.PHONY: test-copy
test-copy: deps ## Run the end-to-end tests with --splice=off: the relay only copies
	$(REQUIRE_ROOT) SLUICE_TEST_FLAGS=--splice=off go test -count=1 $(TESTFLAGS) ./test/e2e

.PHONY: test-take-over
test-take-over: deps build ## Play 20 take-overs in a row under full load, on both data paths and in each steering mode (15 minutes); SLUICE_TEST_OTHER=sluice-v0.1.0: by turns with another release's binary
	$(REQUIRE_ROOT) SLUICE_TEST_FULL=1 go test -count=1 -timeout 1h -v -run TestPromise7_TakeOversUnderLoad $(TESTFLAGS) ./test/e2e

.PHONY: test-cluster
test-cluster: deps build $(CLUSTER)/.built ## Run the tests with a real control plane, against Sluice and against kube-proxy
	@test/cluster/install-deps.sh
	cd test/helm && go build -o $(CURDIR)/.cache/render ./render
	$(REQUIRE_ROOT) SLUICE_BIN=$(CURDIR)/bin/sluice SLUICE_CLUSTER_BIN=$(CLUSTER) SLUICE_RENDER=$(CURDIR)/.cache/render SLUICE_CLUSTER_GOGC=400 \
	go test -vet=off -tags cluster -count=1 -timeout $(PATIENCE) -parallel 8 $(TESTFLAGS) ./test/cluster
	cd test/helm && go test -count=1 $(TESTFLAGS) ./...

.PHONY: test-programs
test-programs: deps build ## Test Debian's PostgreSQL, Redis, nginx and mosquitto behind Services (2 minutes)
	@test/programs/install-deps.sh
	$(REQUIRE_ROOT) SLUICE_TEST_FULL=1 SLUICE_BIN=$(CURDIR)/bin/sluice \
	go test -tags programs -count=1 -timeout 15m -parallel 8 -v $(TESTFLAGS) ./test/programs
	cd test/pools && $(REQUIRE_ROOT) SLUICE_BIN=$(CURDIR)/bin/sluice go test -count=1 -v $(TESTFLAGS) .

.PHONY: test-programs-quick
test-programs-quick: deps build ## As test-programs in a minute: no pause exceeds two seconds
	@test/programs/install-deps.sh
	$(REQUIRE_ROOT) SLUICE_BIN=$(CURDIR)/bin/sluice \
	go test -vet=off -tags programs -count=1 -timeout $(PATIENCE) -parallel 8 $(TESTFLAGS) ./test/programs
	cd test/pools && $(REQUIRE_ROOT) SLUICE_BIN=$(CURDIR)/bin/sluice go test -count=1 $(TESTFLAGS) .

.PHONY: test-web
test-web: deps build ## Look at the page with Debian's chromium; pictures are left in .cache/web
	@test/web/install-deps.sh
	@mkdir -p .cache/web
	cd test/web && $(REQUIRE_ROOT) SLUICE_BIN=$(CURDIR)/bin/sluice go test -count=1 -timeout $(PATIENCE) -artifacts -outputdir $(CURDIR)/.cache/web $(TESTFLAGS) .

SERVICES ?= 5000
ENDPOINTS ?= 10
ROUNDS ?= 3
CHANGES ?= 21

.PHONY: bench-cluster
bench-cluster: deps build $(CLUSTER)/.built ## Compare with kube-proxy at 5,000 Services with 10 endpoints each of a real API server (5 minutes); SERVICES=44125 ENDPOINTS=1 ROUNDS=1 for others
	$(REQUIRE_ROOT) SLUICE_TEST_SCALE='$(SERVICES) $(ENDPOINTS) $(ROUNDS) $(CHANGES)' SLUICE_BIN=$(CURDIR)/bin/sluice SLUICE_CLUSTER_BIN=$(CLUSTER) \
	go test -tags cluster -count=1 -timeout 120m -run 'TestScale$$' -v $(TESTFLAGS) ./test/cluster

WATCHERS ?= 1000 10 1000 200

.PHONY: bench-watchers
bench-watchers: deps build $(CLUSTER)/.built ## Measure what one proxy, and 200, cost the API server (3 minutes); WATCHERS='1000 10 1000 200': Services, endpoints of each, changes, instances
	$(REQUIRE_ROOT) SLUICE_TEST_WATCHERS='$(WATCHERS)' SLUICE_BIN=$(CURDIR)/bin/sluice SLUICE_CLUSTER_BIN=$(CLUSTER) \
	go test -tags cluster -count=1 -timeout 30m -run 'TestWatchers$$' -v $(TESTFLAGS) ./test/cluster

.PHONY: bench-scale
bench-scale: deps build $(CLUSTER)/.built ## Compare with kube-proxy at the sizes that its users report, and measure a million endpoints (15 minutes); write docs/scale.md
	go run ./test/bench -scale -kube-proxy $(CLUSTER)/kube-proxy

# The programs of the control plane. Their first build takes some minutes.
$(CLUSTER)/.built:
	@mkdir -p $(@D)
	for package in $$(cd test/cluster/controlplane && go list tool); do \
	  name=$${package##*/}; [ "$$name" = v3 ] && name=etcd; \
	  (cd test/cluster/controlplane && go build -ldflags '$(CLUSTER_LDFLAGS)' -o $(@D)/$$name $$package); \
	done
	touch $@

.PHONY: release
release: ## Build archives, image, chart, SBOMs and checksums for amd64 and arm64 in dist; PUSH=registry.example.com/sluice
	cd tools/release && go build -o $(CURDIR)/.cache/release .
	.cache/release -source . -out dist -version '$(VERSION)' $(if $(PUSH),-push '$(PUSH)')

.PHONY: test-release
test-release: ## Build this machine's part of a release twice, compare, and run the image in containerd; SLUICE_TEST_FULL=1: all of it, with an empty cache
	@tools/release/install-deps.sh
	cd tools/release && $(REQUIRE_ROOT) go test -count=1 -timeout 60m $(TESTFLAGS) .

# Packages whose tests pass under qemu-user. The others need netfilter, BPF, namespaces
# or socket options that it does not have.
ARM64 := ./admin ./balancer ./conntrack ./health ./listener ./policy ./relay ./service ./source/... \
	./host/hostnet $(addprefix ./internal/,httpport nearest once poll printable sockfilter) ./cmd/sluice/internal/kubeproxyconfig

.PHONY: test-arm64
test-arm64: ## Run tests as arm64 programs under Debian's qemu-user (5 minutes)
	@command -v qemu-aarch64 >/dev/null || apt-get install -y -qq --no-install-recommends qemu-user >/dev/null
	GOARCH=arm64 go test -p 1 -exec qemu-aarch64 -timeout 30m $(TESTFLAGS) $(ARM64)

.PHONY: deps
deps: ## Install the Debian packages that the tests need, or name them
	@test/install-deps.sh

.PHONY: lint
lint: ## Run the linters, at pinned versions
	go mod verify >/dev/null
	go mod tidy -diff
	$(GOLANGCI_LINT) config verify
	$(GOLANGCI_LINT) run --build-tags cluster,programs ./...
	@unreachable=$$($(DEADCODE) ./cmd/sluice); [ -z "$$unreachable" ] || { echo "$$unreachable"; \
	  echo 'lint: the program never calls these functions: remove them, or move them into a _test.go file'; exit 1; }

.PHONY: fuzz
fuzz: ## Run each fuzz target on one CPU for FUZZTIME (5s); SLUICE_TEST_FULL=1 also guided by the libraries
	@test/fuzz.sh $(FUZZTIME)

.PHONY: mutate
mutate: deps ## Put mistakes into the product, one by one: for each a certain test has to fail; MUTATE=name for some
	$(REQUIRE_ROOT) go run ./test/mutate -run '$(MUTATE)'

.PHONY: fuzz-relay
fuzz-relay: deps ## Run random traffic with faults in every mode for FUZZRELAY (1m); SEED repeats a run
	$(REQUIRE_ROOT) SLUICE_FUZZ_RELAY_FOR=$(FUZZRELAY) SLUICE_FUZZ_RELAY_SEED=$(SEED) \
	go test -count=1 -parallel 6 -timeout 24h -v -run TestFuzzRelay $(TESTFLAGS) ./test/e2e

.PHONY: bench-go
bench-go: ## Run each Go benchmark for BENCHTIME (once)
	$(REQUIRE_ROOT) go test -run '^$$' -bench . -benchmem -benchtime $(BENCHTIME) $$(grep -rl --include=*_test.go '^func Benchmark' . | xargs dirname | sort -u)

# kube-proxy's modes are peers after make test-cluster or bench-scale.
.PHONY: bench
bench: deps build ## Compare with HAProxy, nginx, kernel DNAT and others; write docs/benchmarks.md
	@test/bench/install-deps.sh
	go run ./test/bench -haproxy "$$(test/bench/haproxy.sh .cache/haproxy)" $(if $(wildcard $(CLUSTER)/kube-proxy),-kube-proxy $(CLUSTER)/kube-proxy)
	go run ./test/bench -sctp
	$(BENCH_P2C)
	$(MAKE) bench-takeover

# What power-of-two costs connect-request-close, beside round-robin.
BENCH_P2C = go run ./test/bench -endpoints 4 -peers sluice,sluice-p2c -columns crc -rounds 15

.PHONY: bench-balance
bench-balance: deps build ## Print how evenly each algorithm spreads connections, what a change of endpoints disrupts, what a choice costs, and what clients meet at a black hole, a sick endpoint and a Service from zero (1 minute)
	go test -count 1 -v -run '^(TestSpreadOverNodes|TestDistribution|TestDisruption|TestOneSlowEndpoint|TestMendedEndpointComesBack)$$' -bench Choose $(TESTFLAGS) ./balancer
	$(REQUIRE_ROOT) go test -count 1 -parallel 1 -v -run '^(TestBlackHoleDelaysFewConnections|TestEndpointThatResetsIsEjected|TestHeldConnections)$$' $(TESTFLAGS) ./test/e2e
	$(BENCH_P2C)

.PHONY: bench-sctp
bench-sctp: deps build ## Measure SCTP beside the plain route, DNAT and IPVS in a guest kernel (6 minutes); write that part of docs/benchmarks.md
	@test/bench/install-deps.sh
	go run ./test/bench -sctp

.PHONY: bench-quick
bench-quick: build ## As bench in under a minute; write nothing
	@test/bench/install-deps.sh
	go run ./test/bench --quick

.PHONY: bench-sync
bench-sync: build ## Measure start, changes and memory with 100 to 30,000 services; write that part of docs/scale.md
	go run ./test/bench -sync

.PHONY: bench-neighbours
bench-neighbours: build ## Compare with kernel DNAT on a node with the rules of the kubelet, flannel and portmap (2 minutes); write nothing
	@test/bench/install-deps.sh
	go run ./test/bench -neighbours -peers direct,dnat,sluice,sluice-kernel -columns rr1,rr64,crc,bulk1,udp-rr64

.PHONY: bench-live
bench-live: build ## Measure what sluice top, conns, tap and the page cost connections and cores (7 minutes); write nothing
	go run ./test/bench -looked-at -rounds 3 -seconds 1.5
	go run ./test/bench -page -rounds 3 -seconds 4

.PHONY: cover
cover: deps ## Run the tests and show the coverage
	@mkdir -p .cache
	$(REQUIRE_ROOT) go test -coverpkg=./... -coverprofile=.cache/cover.out ./...
	go tool cover -func=.cache/cover.out | tail -n 1
	@echo 'go tool cover -html=.cache/cover.out shows the lines.'

.PHONY: clean
clean: ## Remove all build output
	rm -rf bin .cache
