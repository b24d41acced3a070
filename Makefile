# Longer recipes are scripts in internal/tools. What they build or fetch for themselves is kept in $SLICECAST_CACHE, by
# default ~/.cache/slicecast. Debian packages that are missing are installed if this is root; otherwise they are named.
SHELL := /bin/bash
COMMANDS := server agent loadtest

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

.PHONY: build
build: ## build the commands into bin/
	mkdir -p bin
	$(foreach c,$(COMMANDS),go build -o bin/slicecast-$(c) ./$(c)$(newline))

.PHONY: generate
generate: ## generate the Go code of the wire API, next to its .proto files, docs/metrics.md, docs/performance.md, and the schemas of what the load tester writes
	internal/tools/buf.sh generate --template proto/buf.gen.yaml
	go run ./internal/tools/metricsdoc docs/metrics.md
	go run ./internal/tools/reportschema .
	go run ./internal/tools/performance

.PHONY: lint
lint: ## go vet, golangci-lint, buf lint, and buf breaking against the API of the last release
	internal/tools/lint.sh

.PHONY: verify
verify: ## check that generated code, formatting and go.mod files are current
	internal/tools/verify.sh

.PHONY: setup
setup: ## fetch or build what the tests need: Debian packages, etcd, Kubernetes components
	internal/tools/setup.sh

.PHONY: test
test: setup lint verify ## all checks and all tests, under the race detector, as CI runs them
	go test -race -timeout 40m ./...

# Tests and benchmarks of a real kube-proxy are of the version that everything else of Kubernetes has, or with
# KUBE_PROXY=1.36 of an earlier one.
ifdef KUBE_PROXY
export SLICECAST_KUBE_PROXY := $(KUBE_PROXY)
endif

.PHONY: conformance
conformance: ## hold a real kube-proxy to the conformance cases in its modes, beside Slicecast, and on moving from it; KUBE_PROXY=1.36 takes the one before
	go test -count 1 -timeout 30m ./internal/conformance -conformance.kube-proxy=nftables,iptables-nft,iptables-legacy -conformance.slicecast=
	go test -count 1 -timeout 30m ./internal/beside ./internal/moving

.PHONY: bench
bench: build ## measure anew, on a machine that has nothing else to do, and make docs/performance.md of it; reports in bin/bench
	internal/tools/bench.sh

MODES ?= nftables,iptables-nft,iptables-legacy
SIZES ?= 1000x50+5000,10000x5

.PHONY: bench-node
bench-node: ## a node's figures beside a real kube-proxy's, on a machine that has nothing else to do; MODES=nftables SIZES=10000x50 choose
	mkdir -p bin/bench
	go test -run '^$$' -bench Node -benchtime 1x -timeout 8h ./loadtest/kubeproxy -kubeproxy.modes=$(MODES) -kubeproxy.sizes=$(SIZES) | tee bin/bench/node.txt

.PHONY: bench-agent
bench-agent: ## an agent's figures with nftables, without kube-proxy, also in the largest clusters
	mkdir -p bin/bench
	go test -run '^$$' -bench Agent -benchtime 1x -timeout 1h ./loadtest/kubeproxy \
		-kubeproxy.sizes=99x50+50,1000x50+5000,9999x50+50,44124x1+1,5005x49+4766 | tee bin/bench/agent.txt

.PHONY: bench-ipvs
bench-ipvs: ## a node's and an agent's figures with IPVS, in the virtual machine, where programs take many times what they take elsewhere
	mkdir -p bin/bench
	go test -run '^$$' -bench 'Programmer/.*/.*/.*/(Load|Restart)' -benchtime 3x -timeout 1h ./agent/programmer/ipvs -large | tee bin/bench/ipvs.txt
	go test -run '^$$' -bench 'Programmer/.*/.*/.*/Flip' -benchtime 1000x -timeout 1h ./agent/programmer/ipvs -large | tee -a bin/bench/ipvs.txt
	go test -run '^$$' -bench 'Programmer/.*/.*/.*/Rollover' -benchtime 1x -timeout 1h ./agent/programmer/ipvs -large | tee -a bin/bench/ipvs.txt
	go test -run TestOldKernel -count 1 -v -timeout 2h ./internal/testenv/vm/oldkernel -oldkernel.figures=1000x50+5000 | tee bin/bench/node-ipvs.txt
	go test -run TestOldKernel -count 1 -v -timeout 3h ./internal/testenv/vm/oldkernel -oldkernel.figures=10000x50 -oldkernel.changes=0 | tee -a bin/bench/node-ipvs.txt

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

.PHONY: clean
clean: ## remove what build made
	rm -rf bin

define newline


endef
