#!/usr/bin/env bash
# Generates the plain manifests from the chart, into deploy/kubernetes or the given folder. They
# have no labels about Helm and versions, because kustomization.yaml sets the images' versions.
set -euo pipefail
cd "$(dirname "$0")/../.."

out=${1-deploy/kubernetes}
rendered=$(mktemp -d)
trap 'rm -rf "$rendered"' EXIT

# render writes what the chart makes of values to a folder below $rendered. The two settings that
# differ from cluster to cluster cannot be used as they are, so that nobody forgets them.
render() {
	local name=$1
	shift
	internal/tools/helm.sh template slicecast deploy/helm/slicecast --namespace=kube-system --skip-schema-validation \
		--set=apiServer=EDIT-THE-API-SERVER:6443,podCIDRs=EDIT-THE-POD-RANGES --output-dir="$rendered/$name" "$@" >/dev/null
}

# plain writes a rendered template to a file.
plain() {
	mkdir -p "$(dirname "$2")"
	{
		echo "# Generated from the chart deploy/helm/slicecast: change that, and run 'make generate'."
		sed -E -e '1{/^---$/d}' -e '/^# Source: /d' -e '/^ +(helm\.sh\/chart|app\.kubernetes\.io\/(managed-by|version|instance)): /d' \
			-e '/^ +slicecast\.io\/config: /d' -e '/^ +annotations:$/d' -e '/^[[:space:]]*$/d' "$1"
	} >"$2"
}

render install
for file in "$rendered"/install/slicecast/templates/*.yaml; do
	plain "$file" "$out/$(basename "$file")"
done
render cleanup --set=cleanup.agents=true
plain "$rendered/cleanup/slicecast/templates/agent.yaml" "$out/cleanup/cleanup.yaml"
render cleanup-kube-proxy --set=cleanup.kubeProxy=true
plain "$rendered/cleanup-kube-proxy/slicecast/templates/cleanup-kube-proxy.yaml" "$out/cleanup-kube-proxy/cleanup.yaml"
