#!/usr/bin/env bash
# Renders the alerts and the dashboard of kubernetes-mixin about kube-proxy into
# internal/e2e/testdata/kubernetes-mixin.json. To renew it, set commit to a newer one, and the
# others to those in the jsonnetfile.lock.json of that commit. FORGE is where the repositories are.
set -euo pipefail
cd "$(dirname "$0")"

forge=${FORGE:-https://github.com}
jsonnet=github.com/google/go-jsonnet/cmd/jsonnet@v0.21.0
commit=aa38e2bfa7ea6ec6870420b483046afe790a6411
grafonnet=82a19822e54a0a12a51e24dbd48fcde717dc0864
docsonnet=6ac6c69685b8c29c54515448eaca583da2d88150
xtd=63d430b69a95741061c2f7fc9d84b1a778511d9c

vendor=$(mktemp -d)
trap 'rm -rf "$vendor"' EXIT

# get REPOSITORY COMMIT checks a commit out where imports look for its repository.
get() {
  local to=$vendor/github.com/$1
  git init -q "$to"
  git -C "$to" fetch -q --depth=1 "$forge/$1" "$2"
  git -C "$to" checkout -q FETCH_HEAD
}
get kubernetes-monitoring/kubernetes-mixin "$commit"
get grafana/grafonnet "$grafonnet"
get jsonnet-libs/docsonnet "$docsonnet"
get jsonnet-libs/xtd "$xtd"
ln -s github.com/jsonnet-libs/xtd "$vendor/xtd"
ln -s github.com/jsonnet-libs/docsonnet/doc-util "$vendor/doc-util"

go run "$jsonnet" -J "$vendor" -J "$vendor/github.com/kubernetes-monitoring/kubernetes-mixin" --ext-str commit="$commit" \
  -o ../../e2e/testdata/kubernetes-mixin.json extract.jsonnet
