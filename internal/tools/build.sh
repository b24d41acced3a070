#!/usr/bin/env bash
# Builds one command of a nested module into the cache, unless it is there, and prints the path of
# the binary.
# Usage: build.sh <module folder> <package> [extra linker flags] [name of the binary]
# The name of the binary defaults to the last element of the package path. If it ends with .test,
# the binary is that of the package's tests.
#
# The cache is outside the tree. The name of the folder depends on everything that determines the
# binary: the module's go.mod and go.sum, the Go version and the linker flags. Concurrent callers
# wait for one build.
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
		echo "building $name in $dir (once; later runs use the cache)" >&2
		build=(go build)
		[[ $name != *.test ]] || build=(go test -c)
		"${build[@]}" -trimpath -ldflags "-s -w $ldflags" -o "$binary.partial" "$package" >&2
		mv "$binary.partial" "$binary"
	fi
fi
echo "$binary"
