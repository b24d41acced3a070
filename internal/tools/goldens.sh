#!/usr/bin/env bash
# Compares what this tree does with what another commit does, for a change that must not be seen. It
# compares what TestGolden of the packages prints, such as the rules in the kernel and the number of
# operations that lead to them, and the packages of other modules that the programs are linked from.
# It prints the differences and fails if there are any.
# Usage: goldens.sh COMMIT
set -euo pipefail
cd "$(dirname "$0")/../.."

other=$(mktemp -d)
trap 'git worktree remove --force "$other/tree"; rm -rf "$other"' EXIT
git worktree add --quiet --detach "$other/tree" "$1"

# goldens writes what the tree in the current folder does to files in a folder.
goldens() {
	mkdir "$1"
	local package
	for package in $(git grep -l '^func TestGolden(' -- '*_test.go' | xargs -n 1 dirname); do
		echo "$package of $(git describe --always --dirty)" >&2
		go test -count 1 -v "./$package" -run '^TestGolden$' | grep -v '^\(ok\|---\) ' >"$1/$(basename "$package")"
	done
	for program in server agent loadtest deploy/kubectl-slicecast; do
		go list -deps "./$program" | grep -v '^github.com/slicecast/slicecast/' >"$1/${program//\//.}.deps"
	done
}

(cd "$other/tree" && goldens "$other/before")
goldens "$other/after"
diff -r "$other/before" "$other/after" && echo "the same as $1" >&2
