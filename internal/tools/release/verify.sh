#!/usr/bin/env bash
# Verifies the release in a folder with the commands that docs/releasing.md has for users.
# Usage: verify.sh <folder>
set -euo pipefail

release=$(readlink -f "$1")
cd "$(dirname "$(readlink -f "$0")")/../../.."
internal/tools/packages.sh openssl:openssl jq:jq
page=$PWD/docs/releasing.md
# The commands write files of their own.
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
ln -s "$release"/* "$download"
cd "$download"

for block in verify provenance; do
	commands=$(sed -n "/^<!-- $block: /,/^\`\`\`\$/{ /^<!--/d; /^\`\`\`/d; p }" "$page")
	[[ -n $commands ]] || { echo "docs/releasing.md has no block $block" >&2; exit 1; }
	bash -e -o pipefail -c "$commands"
done
