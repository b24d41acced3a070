#!/usr/bin/env bash
# Builds the command of this folder into the cache, and prints the path of the binary.
set -euo pipefail
cd "$(dirname "$0")"

# The linker ignores the flag, but the name of the cache folder depends on it.
../../../tools/build.sh . . "-X main.source=$(sha256sum <main.go | cut -c1-12)" prometheus
