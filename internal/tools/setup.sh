#!/usr/bin/env bash
# Provides what the tests need: Debian packages, and etcd, Kubernetes components and a kernel in the
# cache.
set -euo pipefail
cd "$(dirname "$0")/../.."

# The race detector needs a C compiler.
internal/tools/packages.sh iptables:iptables nft:nftables conntrack:conntrack ip:iproute2 gcc:gcc git:git openssl:openssl \
	ipset:ipset systemd-analyze:systemd qemu-system-x86_64:qemu-system-x86 \
	containerd:containerd runc:runc /usr/lib/cni/ptp:containernetworking-plugins curl:curl nc:netcat-openbsd dig:bind9-dnsutils \
	wget:wget jq:jq chromium-headless-shell:chromium-headless-shell
internal/tools/kernel.sh >/dev/null

# Linking uses one processor, so two programs are built at a time. The large ones come first.
{
	printf 'internal/testenv/kubernetes/build.sh %s\n' e2e.test kubelet kube-apiserver kube-controller-manager kube-scheduler \
		kubectl kube-proxy etcd agnhost regression-issue-74839 ginkgo
	cat <<-END
		internal/tools/build.sh internal/testenv/coredns github.com/coredns/coredns
		internal/tools/build.sh internal/tools/h2spec github.com/summerwind/h2spec/cmd/h2spec
		internal/tools/helm.sh --path
		internal/testenv/prometheus/engine/build.sh
	END
} | xargs -d '\n' -n 1 -P 2 sh -c '$0 >/dev/null'
