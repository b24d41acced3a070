#!/bin/bash
# Breaks a cluster of `make cluster`, for docs/debug.md: `break.sh shop` deploys a Service and its
# clients, `break.sh FAILURE [NODE]` breaks one thing, and `break.sh mend` undoes all of them.
# `break.sh` lists the failures. KUBECONFIG names the cluster, and kubectl must be on the PATH.
set -euo pipefail

image=registry.k8s.io/e2e-test-images/agnhost:2.66.1
failure=${1:-} node=${2:-node-2}

usage() {
	sed -n 's/^fail_\([a-z_]*\)() { # \(.*\)/  \1\t\2/p' "$0" | tr _ - | expand -t 18
}

# on runs a command in the namespaces of a node.
on() {
	local pid
	pid=$(pgrep -f "^slicecast-node .*$(basename "$(dirname "$KUBECONFIG")")/$1\$")
	shift
	nsenter --all --target="$pid" "$@"
}

# agent sends a signal to the agent of a node.
agent() { on "$1" pkill "$2" slicecast-agent; }

cluster_ip() { kubectl -n shop get service web --output=jsonpath='{.spec.clusterIP}'; }

shop() {
	kubectl apply -f - <<EOF
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: shop}
spec:
  replicas: 3
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1
      topologySpreadConstraints:
      - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: DoNotSchedule, labelSelector: {matchLabels: {app: web}}}
      containers:
      - name: web
        image: $image
        command: [/agnhost, netexec]
        readinessProbe: {httpGet: {path: /hostname, port: 8080}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  selector: {app: web}
  ports: [{name: http, port: 80, targetPort: 8080}]
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: client, namespace: shop}
spec:
  selector: {matchLabels: {app: client}}
  template:
    metadata: {labels: {app: client}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: client, image: $image}]
EOF
	kubectl -n shop rollout status deployment/web daemonset/client --timeout=2m
}

# patch patches an object of the shop with a list of operations.
patch() { kubectl -n shop patch "$1" --type=json --patch="$2"; }

readiness=/spec/template/spec/containers/0/readinessProbe

fail_wrong_port() { # the Service leads to a port that no pod serves
	patch service/web '[{"op": "replace", "path": "/spec/ports/0/targetPort", "value": 8081}]'
}

fail_not_ready() { # the pods' readiness probe asks for a page that they do not have
	patch deployment/web '[{"op": "replace", "path": "/spec/strategy", "value": {"type": "Recreate"}},
		{"op": "replace", "path": "'$readiness'/httpGet/port", "value": 8079}]'
	# The pods themselves come and go meanwhile.
	kubectl -n shop wait deployment/web --for=jsonpath='{.status.unavailableReplicas}'=3 --timeout=1m
}

fail_local_policy() { # the Service leads to pods of the client's node only, and this node has none
	patch service/web '[{"op": "replace", "path": "/spec/internalTrafficPolicy", "value": "Local"}]'
	kubectl cordon "$node"
	kubectl -n shop delete pod --field-selector="spec.nodeName=$node" --selector=app=web
}

fail_firewall() { # a firewall of the node drops what goes to the pods
	on "$node" nft 'table inet firewall { chain forward { type filter hook forward priority 10; tcp dport 8080 drop; }; chain output { type filter hook output priority 10; tcp dport 8080 drop; }; }'
}

fail_hung_agent() { # the agent of the node hangs, and the kernel loses a backend
	agent "$node" -STOP
	local element
	element=$(on "$node" nft list map ip slicecast cluster-endpoints | grep -Eo '0x[0-9a-f]+ \. 0x[0-9a-f]+ : [0-9.]+ \. 8080' | head -1)
	on "$node" nft "delete element ip slicecast cluster-endpoints { $element }"
}

fail_old_rule() { # a rule of somebody else sends a part of the node's traffic to where a pod was
	on "$node" nft "table ip legacy {
		chain prerouting { type nat hook prerouting priority -110; ip daddr $(cluster_ip) tcp dport 80 dnat to 10.180.9.9:8080; }
	}"
}

fail_cut_off() { # the node does not reach the servers, and the Service changes
	on "$node" nft 'table inet firewall { chain output { type filter hook output priority 10; tcp dport 8472 drop; }; }'
	kubectl -n shop scale deployment/web --replicas=2
}

fail_lossy_node() { # the node loses most of what the servers send, and the Service changes
	on "$node" nft "table inet firewall {
		chain input { type filter hook input priority 10; tcp sport 8472 numgen random mod 10 < 8 drop; }
	}"
	kubectl -n shop scale deployment/web --replicas=6
}

fail_slow_pod() { # pods of a new version are not ready for half a minute
	patch deployment/web '[{"op": "add", "path": "'$readiness'/initialDelaySeconds", "value": 30}]'
}

fail_kube_proxy() { # kube-proxy runs beside the agent of the node
	kubectl apply -f - <<EOF
apiVersion: v1
kind: ServiceAccount
metadata: {name: kube-proxy, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: kube-proxy}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: system:node-proxier}
subjects: [{kind: ServiceAccount, name: kube-proxy, namespace: kube-system}]
---
apiVersion: v1
kind: Pod
metadata: {name: kube-proxy, namespace: kube-system}
spec:
  nodeName: $node
  serviceAccountName: kube-proxy
  hostNetwork: true
  containers:
  - name: kube-proxy
    image: registry.k8s.io/kube-proxy:v1.37.2
    args: [--proxy-mode=nftables, --hostname-override=$node, --cluster-cidr=10.180.0.0/16, --conntrack-max-per-core=0, --conntrack-min=0]
    securityContext: {privileged: true}
EOF
	kubectl -n kube-system wait pod/kube-proxy --for=condition=Ready --timeout=1m
}

fail_deaf_server() { # a server hears nothing from the API server any more, and the Service changes
	local ip host api
	api=$(kubectl -n default get endpointslice kubernetes --output=jsonpath="{.ports[0].port}")
	read -r ip host < <(kubectl -n slicecast-system get pods --selector=app.kubernetes.io/component=server \
		--output=jsonpath='{range .items[*]}{.status.podIP} {.spec.nodeName}{"\n"}{end}' | head -1)
	on "$host" nft "table inet firewall {
		chain forward { type filter hook forward priority 10; ip daddr $ip tcp sport $api drop; }
	}"
	kubectl -n shop scale deployment/web --replicas=2
}

# mend undoes everything that this script has done, and leaves the shop as it was.
mend() {
	local name table
	kubectl delete namespace shop --ignore-not-found
	kubectl -n kube-system delete pod,serviceaccount kube-proxy --ignore-not-found
	kubectl delete clusterrolebinding kube-proxy --ignore-not-found
	for name in $(kubectl get nodes --output=jsonpath='{.items[*].metadata.name}'); do
		agent "$name" -CONT || true
		for table in 'inet firewall' 'ip legacy' 'ip kube-proxy' 'ip6 kube-proxy'; do
			on "$name" nft "table $table; delete table $table"
		done
		kubectl uncordon "$name"
	done
	shop
}

case $failure in
shop | mend) action=$failure ;;
*) action=fail_${failure//-/_} ;;
esac
if ! declare -F "$action" >/dev/null; then
	echo "usage: $0 shop | mend | FAILURE [NODE]; the failures are:" >&2
	usage >&2
	exit 2
fi
if ! kubectl version >/dev/null; then
	echo "export KUBECONFIG and PATH as \`make cluster\` says" >&2
	exit 2
fi
"$action"
