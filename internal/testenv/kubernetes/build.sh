#!/usr/bin/env bash
# Builds etcd, a Kubernetes component or a part of its tests into the cache and prints the path of
# the binary. This folder pins the version, except for an earlier kube-proxy: the folder named by
# its version pins it.
# Usage: build.sh etcd|kubelet|kubectl|kube-apiserver|kube-...|agnhost|e2e.test|ginkgo|... [version]
# The version is that of an earlier kube-proxy, such as 1.36.
set -euo pipefail

cd "$(dirname "$0")"
component=$1 module=${2-.}
if [[ ! -f $module/go.mod ]]; then
	echo "build.sh: no folder for Kubernetes $module here, only:" ./*/ >&2
	exit 1
fi
package=k8s.io/kubernetes/cmd/$component
case $component in
etcd) package=go.etcd.io/etcd/server/v3 ;;
agnhost | regression-issue-74839) package=k8s.io/kubernetes/test/images/$component ;;
e2e.test) package=k8s.io/kubernetes/test/e2e ;;
ginkgo) package=github.com/onsi/ginkgo/v2/ginkgo ;;
esac
version=$(grep -oP 'k8s\.io/kubernetes \Kv[0-9.]+' "$module/go.mod")
flags=
# etcd ignores these settings, but they are part of the name of its cache folder, too.
for setting in gitVersion="$version" gitMajor=1 gitMinor="$(cut -d. -f2 <<<"$version")" gitTreeState=clean; do
	flags+=" -X k8s.io/component-base/version.$setting"
done
exec ../../tools/build.sh "$module" "$package" "$flags" "$component"
