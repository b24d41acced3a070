#!/usr/bin/env bash
# Gets what the tests need: Debian packages, installed if this is root, and etcd and Kubernetes
# components, in the cache.
set -euo pipefail
cd "$(dirname "$0")/../.."

# A command and the Debian package that has it. The race detector needs a C compiler.
missing=()
while read -r command package; do
	command -v "$command" >/dev/null || missing+=("$package")
done <<'END'
iptables iptables
nft nftables
conntrack conntrack
ip iproute2
gcc gcc
git git
END
if ((${#missing[@]})); then
	if [[ $EUID != 0 ]] || ! command -v apt-get >/dev/null; then
		echo "the tests need these Debian packages: as root, run 'apt-get install ${missing[*]}'" >&2
		exit 1
	fi
	apt-get -q update
	DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "${missing[@]}"
fi

internal/tools/etcd.sh >/dev/null
for component in kube-apiserver kube-controller-manager; do
	internal/testenv/kubernetes/build.sh "$component" >/dev/null
done
