#!/usr/bin/env bash
# Makes the figures of docs/performance.md again, one after the other: about 15 minutes. What the commands report is in
# bin/bench. DURATION is how long each churn is measured, 30s by default.
set -euo pipefail
cd "$(dirname "$0")/../.."
duration=${DURATION:-30s}
mkdir -p bin/bench

# run NAME FLAG...: a load test, its report as JSON and as text.
run() {
	local name=$1
	shift
	echo "== $name: slicecast-loadtest run $*"
	bin/slicecast-loadtest run --output=json "$@" >"bin/bench/$name.json"
	bin/slicecast-loadtest show "bin/bench/$name.json" | tee "bin/bench/$name.txt"
}

# benchmark NAME ARGUMENT...: a Go benchmark.
benchmark() {
	local name=$1
	shift
	echo "== $name: go test $*"
	go test -run '^$' -timeout 1h "$@" | tee "bin/bench/$name.txt"
}

for nodes in 100 1000 3000; do
	run "nodes-$nodes" --nodes="$nodes" --duration="$duration" --floor --restart
done
run rate-50 --nodes=1000 --churn=50 --duration="$duration"
run rate-200 --nodes=1000 --churn=200 --duration="$duration"
run rate-200-spread --nodes=1000 --churn=200 --duration="$duration" --large-services=50 --large-endpoints=100
run cold-3000 --nodes=3000 --connecting=3000 --churn=0 --duration=1s --floor
run grpc-go-1000 --nodes=1000 --duration="$duration" --grpc-go
benchmark apiserver -bench BenchmarkWatch -benchtime=150x ./loadtest/apiserver
benchmark ingest -bench BenchmarkIngest ./internal/store
