#!/usr/bin/env bash
# Builds the command of this folder into the cache, puts cert-manager's CRDs beside it, into the
# folder crds, and prints the path of the binary.
set -euo pipefail
cd "$(dirname "$0")"

# The linker ignores the flag, but the name of the cache folder depends on it.
binary=$(../../tools/build.sh . . "-X main.source=$(sha256sum <main.go | cut -c1-12)" certmanager)
crds=$(dirname "$binary")/crds
if [[ ! -d $crds ]]; then
	module=$(GOWORK=off go list -m -f '{{.Dir}}' github.com/cert-manager/cert-manager)
	rm -rf "$crds.partial"
	cp -r "$module/deploy/crds" "$crds.partial"
	chmod -R u+w "$crds.partial"
	mv "$crds.partial" "$crds"
fi
echo "$binary"
