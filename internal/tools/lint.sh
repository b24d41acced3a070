#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")/../.."

go vet ./...
golangci=$(internal/tools/build.sh internal/tools/lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint)
"$golangci" run --allow-parallel-runners
internal/tools/prose.sh
internal/tools/buf.sh lint

# From the first release on, the wire API must stay compatible with every release. Before it there
# is nothing to compare with.
release=$(git describe --tags --abbrev=0 --match 'v[0-9]*' 2>/dev/null || true)
if [[ -z $release ]]; then
	echo "no release yet to compare the wire API with (buf breaking), or the programs (internal/skew)" >&2
	exit
fi
earlier=$(mktemp -d)
trap 'rm -rf "$earlier"' EXIT
git archive "$release" buf.yaml proto | tar -x -C "$earlier"
internal/tools/buf.sh breaking --against "$earlier"
