#!/usr/bin/env bash
# Builds etcd or a Kubernetes component into the cache and prints the path of the binary. All are in one folder.
# Usage: build.sh etcd|kube-apiserver|kube-controller-manager|kube-proxy
set -euo pipefail

cd "$(dirname "$0")"
package=k8s.io/kubernetes/cmd/$1
[[ $1 != etcd ]] || package=go.etcd.io/etcd/server/v3
version=$(grep -oP 'k8s\.io/kubernetes \Kv[0-9.]+' go.mod)
flags=
# Of etcd they say nothing, but decide its folder as well.
for setting in gitVersion="$version" gitMajor=1 gitMinor="$(cut -d. -f2 <<<"$version")" gitTreeState=clean; do
	flags+=" -X k8s.io/component-base/version.$setting"
done
exec ../../tools/build.sh . "$package" "$flags" "$1"
