#!/usr/bin/env bash
# Checks that generated code is current, Go files are formatted and modules are tidy.
set -euo pipefail
cd "$(dirname "$0")/../.."

generated=$(mktemp -d)
trap 'rm -rf "$generated"' EXIT
internal/tools/buf.sh generate --template proto/buf.gen.yaml --output "$generated"
sums() { (cd "$1" && find proto -name '*.pb.go' -exec sha256sum {} + | sort -k 2); }
if ! diff <(sums .) <(sums "$generated"); then
	echo "generated code is not current: run 'make generate'" >&2
	exit 1
fi

go run ./internal/tools/monitoring "$generated/monitoring"
if ! diff -r deploy/helm/slicecast/monitoring "$generated/monitoring"; then
	echo "rules or dashboards are not current: run 'make generate'" >&2
	exit 1
fi

unformatted=$(gofmt -l .)
if [[ -n $unformatted ]]; then
	printf "not formatted, run 'gofmt -w .':\n%s\n" "$unformatted" >&2
	exit 1
fi

find . -name go.mod -printf '%h\n' | while read -r module; do
	if ! go -C "$module" mod tidy -diff; then
		echo "$module/go.mod is not tidy: run 'go mod tidy' there" >&2
		exit 1
	fi
done
