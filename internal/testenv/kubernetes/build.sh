#!/usr/bin/env bash
# Builds etcd or a Kubernetes component into the cache and prints the path of the binary. All are in one folder, but for an
# earlier kube-proxy, which is of the module in the folder named by its version.
# Usage: build.sh etcd|kube-apiserver|kube-controller-manager|kube-proxy [version, if it is an earlier one: 1.36]
set -euo pipefail

cd "$(dirname "$0")"
component=$1 module=${2-.}
if [[ ! -f $module/go.mod ]]; then
	echo "build.sh: there is no Kubernetes $module here, only:" ./*/ >&2
	exit 1
fi
package=k8s.io/kubernetes/cmd/$component
[[ $component != etcd ]] || package=go.etcd.io/etcd/server/v3
version=$(grep -oP 'k8s\.io/kubernetes \Kv[0-9.]+' "$module/go.mod")
flags=
# Of etcd they say nothing, but decide its folder as well.
for setting in gitVersion="$version" gitMajor=1 gitMinor="$(cut -d. -f2 <<<"$version")" gitTreeState=clean; do
	flags+=" -X k8s.io/component-base/version.$setting"
done
exec ../../tools/build.sh "$module" "$package" "$flags" "$component"
