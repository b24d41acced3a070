#!/usr/bin/env bash
# Runs the pinned buf with the pinned Go plugins in the PATH.
set -euo pipefail

module=$(dirname "$0")/proto
build=$(dirname "$0")/build.sh
buf=$("$build" "$module" github.com/bufbuild/buf/cmd/buf)
"$build" "$module" google.golang.org/protobuf/cmd/protoc-gen-go >/dev/null
"$build" "$module" google.golang.org/grpc/cmd/protoc-gen-go-grpc >/dev/null
PATH=$(dirname "$buf"):$PATH exec "$buf" "$@"
