#!/usr/bin/env bash
# Builds one command of a nested module into the cache, once, and prints the path of the binary.
# Usage: build.sh <module folder> <package> [extra linker flags] [name of the binary, if the package's path does not end with it]
#
# The cache lies outside the tree, in a folder named by what decides the result: the module's
# go.mod and go.sum and the Go version. Concurrent callers wait for one build.
set -euo pipefail

module=$1 package=$2 ldflags=${3-} name=${4-$(basename "$2")}
cd "$module"
export CGO_ENABLED=0 GOWORK=off

hash=$( { cat go.mod go.sum; go env GOVERSION GOARCH; echo "$ldflags"; } | sha256sum | cut -c1-12)
dir=${SLICECAST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/slicecast}/$(basename "$PWD")-$hash
binary=$dir/$name

if [[ ! -x $binary ]]; then
	mkdir -p "$dir"
	exec 9>"$binary.lock"
	flock 9
	if [[ ! -x $binary ]]; then
		echo "building $name into $dir (once; the next run uses the cache)" >&2
		go build -trimpath -ldflags "-s -w $ldflags" -o "$binary.partial" "$package" >&2
		mv "$binary.partial" "$binary"
	fi
fi
echo "$binary"
