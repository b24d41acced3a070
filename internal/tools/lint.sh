#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")/../.."

go vet ./...
golangci=$(internal/tools/build.sh internal/tools/lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint)
"$golangci" run
internal/tools/buf.sh lint

# The API may not break whoever speaks the one before: that of the main branch or, on it, of the
# previous commit.
head=$(git rev-parse HEAD 2>/dev/null || true)
for reference in origin/main main HEAD~1; do
	base=$(git merge-base HEAD "$reference" 2>/dev/null || true)
	[[ -n $base && $base != "$head" ]] && break
	base=
done
if [[ -z $base ]] || [[ -z $(git ls-tree -r --name-only "$base" -- proto | grep '\.proto$') ]]; then
	echo "buf breaking: nothing earlier to compare the wire API with" >&2
	exit
fi
earlier=$(mktemp -d)
trap 'rm -rf "$earlier"' EXIT
git archive "$base" buf.yaml proto | tar -x -C "$earlier"
internal/tools/buf.sh breaking --against "$earlier"
