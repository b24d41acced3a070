#!/usr/bin/env bash
# Builds one Kubernetes component into the cache and prints the path of the binary.
# Usage: build.sh kube-apiserver|kube-controller-manager|kube-proxy
set -euo pipefail

cd "$(dirname "$0")"
version=$(grep -oP 'k8s\.io/kubernetes \Kv[0-9.]+' go.mod)
flags=
for setting in gitVersion="$version" gitMajor=1 gitMinor="$(cut -d. -f2 <<<"$version")" gitTreeState=clean; do
	flags+=" -X k8s.io/component-base/version.$setting"
done
exec ../../tools/build.sh . "k8s.io/kubernetes/cmd/$1" "$flags"
