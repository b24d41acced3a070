#!/usr/bin/env bash
# Verifies every file of the release in a folder with the commands that docs/releasing.md has for
# users, and that no file is missing. The public key is the one in the repository, unless another
# one is named for a dry run.
# Usage: verify.sh <folder> [public key]
set -euo pipefail

release=$(readlink -f "$1")
key=${2:+$(readlink -f "$2")}
cd "$(dirname "$(readlink -f "$0")")/../../.."
internal/tools/packages.sh openssl:openssl jq:jq
page=$PWD/docs/releasing.md
key=${key:-$PWD/docs/slicecast-release.pub}
[[ -f $key ]] || { echo "$key is missing: name the public key of a dry run" >&2; exit 1; }
# The commands write files of their own.
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
ln -s "$release"/* "$download"
ln -sfn "$key" "$download/slicecast-release.pub"
cd "$download"

blocks=()
for block in fingerprint verify provenance; do
	found=$(sed -n "/^<!-- $block: /,/^\`\`\`\$/{ /^<!--/d; /^\`\`\`/d; p }" "$page")
	[[ -n $found ]] || { echo "docs/releasing.md has no block $block" >&2; exit 1; }
	blocks+=("$found")
done
for FILE in *; do
	[[ -f $FILE && $FILE != @(SHA256SUMS|SHA256SUMS.sig|provenance.intoto.json|slicecast-release.pub) ]] || continue
	for commands in "${blocks[@]}"; do
		# A block ends with the commands whose status counts: -e does not look at the first part of "&&".
		FILE=$FILE bash -e -o pipefail -c "$commands" || { echo "$FILE: not verified" >&2; exit 1; }
	done
done
# The list is verified by now, unless the folder has no file at all.
[[ -s SHA256SUMS ]] || { echo "SHA256SUMS is missing or empty" >&2; exit 1; }
while read -r _ FILE; do
	[[ -f $FILE ]] || { echo "$FILE: missing, and SHA256SUMS lists it" >&2; exit 1; }
done < SHA256SUMS
