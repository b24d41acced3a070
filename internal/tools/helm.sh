#!/usr/bin/env bash
# Runs Helm in the version that internal/tools/helm pins; "helm.sh --path" prints its path.
set -euo pipefail

tools=$(dirname "$(readlink -f "$0")")
helm=$("$tools/build.sh" "$tools/helm" helm.sh/helm/v4/cmd/helm)
if [[ ${1-} == --path ]]; then
	echo "$helm"
	exit
fi
exec "$helm" "$@"
