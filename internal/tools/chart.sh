#!/usr/bin/env bash
# Packages the chart into a folder, for the images of a version. Without a version, the images are
# those that "make images" names after the current commit.
# Usage: chart.sh <folder> [version, such as v1.2.3]
set -euo pipefail
cd "$(dirname "$0")/../.."

out=$1 tag=${2:-$(git describe --tags --match='v[0-9]*' --always --abbrev=12 --dirty)}
# Helm requires a semantic version.
version=${tag#v}
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+ ]] || version=0.0.0-g$version
rm -rf "$out"
internal/tools/helm.sh package deploy/helm/slicecast --version="$version" --app-version="$tag" --destination="$out"
