# Longer recipes are scripts in internal/tools. What they build or fetch for themselves is kept in
# $SLICECAST_CACHE, by default ~/.cache/slicecast. Debian packages that are missing are installed if
# this is root; otherwise they are named.
SHELL := /bin/bash
COMMANDS := server agent loadtest

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

.PHONY: build
build: ## build the commands into bin/
	mkdir -p bin
	$(foreach c,$(COMMANDS),go build -o bin/slicecast-$(c) ./$(c)$(newline))
	go build -o bin/kubectl-slicecast ./deploy/kubectl-slicecast
	install deploy/kubectl-slicecast/kubectl_complete-slicecast bin/

.PHONY: generate
generate: ## generate the Go code of the wire API, next to its .proto files, the rules and dashboards in the chart, the manifests in deploy/kubernetes, docs/metrics.md, docs/conformance.md, docs/performance.md and the pages behind it, the sample report, and the schemas of what the load tester writes
	internal/tools/buf.sh generate --template proto/buf.gen.yaml
	go run ./internal/tools/monitoring deploy/helm/slicecast/monitoring
	internal/tools/manifests.sh
	go test ./internal/tools/metricsdoc ./internal/tools/conformancedoc ./internal/tools/reportschema -update
	go run ./internal/tools/performance

.PHONY: lint
lint: ## go vet, golangci-lint, prose, buf lint, and buf breaking against the API of the last release
	internal/tools/lint.sh

.PHONY: prose
prose: ## the width, sentences, words and spelling of comments and Markdown
	internal/tools/prose.sh

.PHONY: verify
verify: ## check that generated code, formatting and go.mod files are current
	internal/tools/verify.sh

.PHONY: setup
setup: ## fetch or build what the tests need: Debian packages, etcd, Kubernetes components
	internal/tools/setup.sh

# Tests wait a quarter of their time, so one more package runs than there are processors.
PARALLEL ?= $(shell expr $$(nproc) + 1)

.PHONY: test
test: setup lint verify ## all checks and all tests, under the race detector, as CI runs them; shows which share of each package's statements its own tests run
	go test -race -cover -p $(PARALLEL) -timeout 40m ./...
	go run ./internal/simulate/deterministic $(SIMULATE)
	go test -overlay $(SIMULATE)/overlay.json -vet=off ./internal/simulate -run 'TestSeed|TestReport'

# Tests and benchmarks of a real kube-proxy are of the version that everything else of Kubernetes
# has, or with KUBE_PROXY=1.36 of an earlier one.
ifdef KUBE_PROXY
export SLICECAST_KUBE_PROXY := $(KUBE_PROXY)
endif

.PHONY: conformance
conformance: ## hold a real kube-proxy to the conformance cases in its modes, beside Slicecast, and on moving from it; KUBE_PROXY=1.36 takes the one before
	go test -count 1 -timeout 30m ./internal/conformance -conformance.kube-proxy=nftables,iptables-nft,iptables-legacy -conformance.slicecast=
	go test -count 1 -timeout 30m ./internal/beside ./internal/moving

.PHONY: verify-ipvs
verify-ipvs: ## that verify finds what is wrong with IPVS, Slicecast's and kube-proxy's, and nothing else, in the virtual machine, on an idle machine; kube-proxy needs hours there
	go test -count 1 -timeout 15m ./agent/programmer/ipvs -run '^TestVerify$$'
	go test -count 1 -timeout 6h ./internal/testenv/vm/oldkernel -oldkernel.programmers=false -oldkernel.slicecast=ipvs \
		-oldkernel.kube-proxy=ipvs -oldkernel.broken=ipvs

.PHONY: conformance-record
conformance-record: ## record for docs/conformance.md how both versions of kube-proxy do with the cases of known bugs, in about twenty minutes
	for version in '' 1.36; do \
		SLICECAST_KUBE_PROXY=$$version go test -count 1 -timeout 30m ./internal/conformance -run TestKubeProxy -conformance.slicecast= \
			-conformance.kube-proxy=nftables,iptables-nft,iptables-legacy -conformance.record=$(CURDIR)/internal/conformance/bugs/results && \
		SLICECAST_KUBE_PROXY=$$version go test -count 1 -timeout 30m ./internal/testenv/vm/oldkernel \
			-oldkernel.record=$(CURDIR)/internal/conformance/bugs/results || exit 1; \
	done

.PHONY: conntrack
conntrack: ## time the search for stale flows in a connection tracking table with a million entries, or as many as nf_conntrack_max admits, in about a minute
	go test -run '^$$' -bench Clean -benchtime 1x -timeout 10m ./agent/conntrack

.PHONY: performance
performance: build ## measure everything and write docs/performance.md and the pages behind it, in about six hours on an idle machine; ONLY=steady chooses reports
	internal/tools/bench.sh

MODES ?= nftables,iptables-nft,iptables-legacy
SIZES ?= 1000x50+5000,10000x5

.PHONY: bench-node
bench-node: ## a node's figures beside a real kube-proxy's, on an idle machine; MODES=nftables SIZES=10000x50 choose
	go test -run '^$$' -bench Node -benchtime 1x -timeout 8h ./loadtest/kubeproxy -kubeproxy.modes=$(MODES) -kubeproxy.sizes=$(SIZES)

STALL_SIZES ?= 44125x1,5005x49+4766

.PHONY: stall
stall: ## how long packets wait while a node's rules are loaded, loaded again and repaired, beside kube-proxy's, on an idle machine; MODES=nftables STALL_SIZES=1000x5 choose
	go test -run '^$$' -bench Stall -benchtime 1x -timeout 8h ./loadtest/kubeproxy -kubeproxy.modes=$(MODES) -kubeproxy.sizes=$(STALL_SIZES)

DURATION ?=
SOAK_MODES ?= nftables,iptables-nft

.PHONY: soak
soak: ## whether memory, descriptors and the kernel's objects level off while names come that never come back; DURATION=1h shortens it, PAUSE=125ms makes up for that; writes docs/soak
	go test -run '^$$' -bench Soak -benchtime 1x -timeout 0 ./loadtest/kubeproxy -kubeproxy.modes=$(SOAK_MODES) \
		-kubeproxy.sizes=1000x45+5000 -kubeproxy.duration=$(or $(DURATION),4h) -kubeproxy.pause=$(or $(PAUSE),500ms) -kubeproxy.soak="$(CURDIR)/docs/soak"

.PHONY: screencast
screencast: build ## record the demo and draw it, docs/demo.svg
	go build -o bin/slicecast-demo ./internal/demo
	go run ./internal/tools/screencast docs/demo 'make demo' bin/slicecast-demo

.PHONY: screenshots
screenshots: ## take the pictures of the server's page in the documentation, docs/page-*.png, and measure how soon 10,000 nodes are drawn
	internal/tools/packages.sh chromium-headless-shell:chromium-headless-shell
	go test -count 1 -v ./server/page -run TestPage -page.screenshots="$(CURDIR)/docs"

FUZZTIME ?= 1m

.PHONY: fuzz
fuzz: ## fuzz every decoder of bytes from outside, a minute each or FUZZTIME=30s, 10m...
	FUZZTIME=$(FUZZTIME) internal/tools/fuzz.sh

VULNDB ?=

.PHONY: vulncheck
vulncheck: ## fail if the module calls a function known to be vulnerable; VULNDB=URL is another database than https://vuln.go.dev
	go run ./internal/tools/vulncheck -db=$(VULNDB) \
		"$$(internal/tools/build.sh internal/tools/govulncheck golang.org/x/vuln/cmd/govulncheck)" internal/tools/vulncheck/exceptions.yaml ./...

.PHONY: demo
demo: build ## traffic to Services on this machine, without a cluster; HOLD=1 keeps it running
	internal/tools/packages.sh iptables:iptables
	go build -o bin/slicecast-demo ./internal/demo
	bin/slicecast-demo $(if $(HOLD),--hold)

IMAGES := bin/images
VERSION ?=

.PHONY: images
images: ## make the images of server and agent into bin/images, for amd64 and arm64: an OCI layout, archives for containerd and Docker, SBOMs; VERSION=v1.2.3 is their tag
	go run ./internal/tools/release images --version=$(VERSION) $(IMAGES)

.PHONY: chart
chart: ## package the Helm chart into bin/chart; VERSION=v1.2.3 is its version, and the tag of its images
	internal/tools/chart.sh bin/chart $(VERSION)

.PHONY: push
push: images chart ## push the images, their SBOMs and the chart; REGISTRY=registry.example.com/team
	@test -n "$(REGISTRY)" || { echo "say where to: make push REGISTRY=registry.example.com/team" >&2; exit 1; }
	go run ./internal/tools/release push $(IMAGES) $(REGISTRY)
	internal/tools/helm.sh push bin/chart/slicecast-*.tgz oci://$(REGISTRY)

RELEASE := bin/release
PLATFORMS ?=

.PHONY: release-dry-run
release-dry-run: ## make everything that a release consists of into bin/release, signed with a key that is not kept, and verify it as users do; VERSION=v1.2.3; PLATFORMS=linux/amd64 shortens it
	go run ./internal/tools/release build --version=$(VERSION) --platforms=$(PLATFORMS) $(RELEASE)
	internal/tools/release/verify.sh $(RELEASE) $(RELEASE).dry-run.pub

KEY ?=

.PHONY: release
release: ## make the release of the tag that is checked out into bin/release, as docs/releasing.md says; VERSION=v1.2.3 KEY=FILE
	@test -n "$(VERSION)" -a -n "$(KEY)" || { echo "name the tag and the key: make release VERSION=v1.2.3 KEY=FILE" >&2; exit 1; }
	go run ./internal/tools/release build --version=$(VERSION) --key=$(KEY) $(RELEASE)
	internal/tools/release/verify.sh $(RELEASE)

.PHONY: release-push
release-push: ## push the images and the chart in bin/release; REGISTRY=registry.example.com/team
	@test -n "$(REGISTRY)" || { echo "say where to: make release-push REGISTRY=registry.example.com/team" >&2; exit 1; }
	go run ./internal/tools/release push $(RELEASE)/images $(REGISTRY)
	internal/tools/helm.sh push $(RELEASE)/slicecast-*.tgz oci://$(REGISTRY)

NODES ?= 3
PROXY ?= slicecast
PROGRAMMER ?= nftables

.PHONY: cluster
cluster: ## a real Kubernetes cluster on this machine until Ctrl-C; NODES=3 PROXY=slicecast|kube-proxy|none PROGRAMMER=nftables|iptables
	mkdir -p bin
	go build -o bin/slicecast-cluster ./internal/testenv/cluster/run
	go build -o bin/kubectl-slicecast ./deploy/kubectl-slicecast
	@bin/slicecast-cluster --nodes=$(NODES) --proxy=$(PROXY) --programmer=$(PROGRAMMER)

FOCUS ?=

.PHONY: e2e-upstream
e2e-upstream: ## Kubernetes' own tests of the network in such a cluster, in about half an hour; PROXY=slicecast|kube-proxy PROGRAMMER=nftables|iptables FOCUS='session affinity'; RECORD=1 keeps the outcomes for docs/conformance.md
	mkdir -p bin
	go build -o bin/slicecast-e2e ./internal/testenv/upstream/run
	@bin/slicecast-e2e --nodes=$(NODES) --proxy=$(PROXY) --programmer=$(PROGRAMMER) --focus='$(FOCUS)' $(if $(RECORD),--record)

.PHONY: e2e-cert-manager
e2e-cert-manager: ## the chart with certificates of cert-manager, whose controllers are built once; about five minutes
	go test -count 1 -timeout 30m -v ./deploy/helm/e2e -e2e.installs=cert-manager

.PHONY: e2e-network-policies
e2e-network-policies: ## the chart's NetworkPolicies, enforced by kube-router, which is built once; about two minutes
	go test -count 1 -timeout 30m -v ./deploy/helm/e2e -e2e.installs=network-policies

.PHONY: e2e-connectivity
e2e-connectivity: ## kubectl slicecast connectivity with Slicecast, with a broken node, and with kube-proxy, in about ten minutes; PROGRAMMER=nftables|iptables
	go test -count 1 -timeout 30m -v ./deploy/helm/e2e -e2e.installs=connectivity,connectivity-kube-proxy -e2e.programmer=$(PROGRAMMER)

PATHS ?= all
OUTAGE ?= 10m
FROM ?=

.PHONY: adopt
adopt: ## the paths of docs/adopt.md in real clusters, in about 35 minutes; PATHS=node-by-node,new-node chooses, PROGRAMMER=nftables|iptables, OUTAGE=1m shortens outages, FROM=HEAD~50 is the commit to upgrade from
	go test -count 1 -timeout 3h -v ./internal/adopt -adopt.paths=$(PATHS) -adopt.programmer=$(PROGRAMMER) -adopt.outage=$(OUTAGE) $(if $(FROM),-adopt.from=$(FROM))

STEPS ?= 3500000
FIRST ?= 1
SEED ?=
SIMULATE := $(or $(SLICECAST_CACHE),$(HOME)/.cache/slicecast)/deterministic

.PHONY: simulate
simulate: ## everything from an API server to the nodes' kernels in virtual time under a million faults, in about 20 minutes; STEPS=20000 shortens it, FIRST=14001 takes other seeds, SEED=4 shows what one seed does
	go run ./internal/simulate/deterministic $(SIMULATE)
	nice -n 10 go test -overlay $(SIMULATE)/overlay.json -vet=off -count 1 -timeout 3h -v ./internal/simulate \
		-run '$(if $(SEED),TestSimulate,TestSeed|TestSimulate)' -simulate.steps=$(STEPS) -simulate.first=$(FIRST) $(if $(SEED),-simulate.seed=$(SEED) -simulate.verbose)

FAULTS ?=

.PHONY: chaos
chaos: ## a cluster with traffic and churn under one fault after the other, and a report in bin/chaos; DURATION=15m SEED=7 PROXY=slicecast|kube-proxy PROGRAMMER=nftables|iptables FAULTS=cut,flush
	mkdir -p bin
	go build -o bin/slicecast-chaos ./internal/chaos/run
	@bin/slicecast-chaos --duration=$(or $(DURATION),1h) --seed=$(or $(SEED),0) --proxy=$(PROXY) --programmer=$(PROGRAMMER) --faults=$(FAULTS)

ONLY ?=

.PHONY: mutations
mutations: ## put each bug of internal/simulate/mutations into a copy of the tree, and list what catches it, in about an hour; ONLY=tombstone chooses by name
	mkdir -p bin
	go build -o bin/slicecast-mutations ./internal/simulate/mutations
	nice -n 10 bin/slicecast-mutations -only='$(ONLY)'

PACKAGES ?= internal/model internal/store internal/wire agent/view agent/client/cache

.PHONY: mutation-testing
mutation-testing: ## change PACKAGES="internal/model ..." in one place at a time, and fail if their tests do not notice; ONLY=delta.go chooses changes
	mkdir -p bin
	go build -o bin/slicecast-mutation-testing ./internal/tools/mutationtesting
	nice -n 10 bin/slicecast-mutation-testing -only='$(ONLY)' internal/tools/mutationtesting/explained.yaml $(PACKAGES)

.PHONY: clean
clean: ## remove what build made
	rm -rf bin

define newline


endef
