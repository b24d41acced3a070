#!/usr/bin/env bash
# Builds the server and the agent of a commit into the cache, unless they are there, and prints the
# folder, in which bin/ has the programs.
# Usage: commit.sh <commit>
set -euo pipefail

if ! commit=$(git rev-parse --quiet --verify "$1^{commit}"); then
	echo "this clone has no commit $1: name another one, such as HEAD~20" >&2
	exit 1
fi
dir=${SLICECAST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/slicecast}/commit-$commit
if [[ ! -d $dir ]]; then
	mkdir -p "$(dirname "$dir")"
	exec 9>"$dir.lock"
	flock 9
fi
if [[ ! -d $dir ]]; then
	echo "building commit $commit in $dir (once; later runs use the cache)" >&2
	rm -rf "$dir.partial"
	mkdir -p "$dir.partial/source"
	git archive "$commit" | tar -x -C "$dir.partial/source"
	for command in server agent; do
		CGO_ENABLED=0 go -C "$dir.partial/source" build -trimpath -ldflags '-s -w' \
			-o "../bin/slicecast-$command" "./$command" >&2
	done
	rm -rf "$dir.partial/source"
	mv "$dir.partial" "$dir"
fi
echo "$dir"
