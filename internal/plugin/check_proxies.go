package plugin

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// isKubeProxy reports whether a Pod with these labels is a kube-proxy, by the label of kubeadm and
// of the manifests of Kubernetes.
func isKubeProxy(labels map[string]string) bool {
	return labels["k8s-app"] == "kube-proxy" || labels["component"] == "kube-proxy"
}

// otherProxies may serve Services. They are known by the label k8s-app of their Pods, with what to
// do so that no node is without a proxy meanwhile.
var otherProxies = map[string]string{
	"cilium":      "once agents have programmed its nodes, set kubeProxyReplacement: false in Cilium; or do without Slicecast",
	"kube-router": "once agents have programmed its nodes, set its --run-service-proxy=false; or do without Slicecast",
}

// removeKubeProxy is what to do about a kube-proxy that is too many. Other nodes may need theirs.
const removeKubeProxy = "once the agents have programmed these nodes, keep kube-proxy off them and remove its rules; " +
	"if it is meant to serve other Services there, set besideKubeProxy"

// checkProxies looks for other Service proxies: Pods that run in the network of their nodes. Nobody
// who may not act as a node has such Pods, but every tenant can write DaemonSets with any labels.
// nodes are those of the agents; nil means that
// Slicecast is not installed yet.
func (c *cluster) checkProxies(ctx context.Context, out *checks, nodes *nodesReport) {
	out.begin("other proxies", "deploy/README.md#3-remove-kube-proxy")
	before := len(out.list)
	settings := settingsReader{c.fleet.ConfigFiles()}
	of := make(map[string]*node)
	if nodes != nil {
		for i := range nodes.nodes {
			of[nodes.nodes[i].Node] = &nodes.nodes[i]
		}
		warnsOfKubeProxy(nodes, out)
	}
	if c.hostErr != nil {
		out.unknown("", c.hostErr)
		return
	}
	for i := range c.host {
		p := &c.host[i]
		switch {
		case p.Status.Phase != corev1.PodRunning || !isKubeProxy(p.Labels):
		case nodes == nil:
			out.bad(warning, p.Spec.NodeName, "a kube-proxy runs", "nothing now; when agents have programmed the nodes, remove it")
		default:
			settings.checkKubeProxy(ctx, p.Spec.NodeName, of[p.Spec.NodeName], nodes, out)
		}
	}
	c.checkOtherProxies(ctx, settings, nodes, out)
	if len(out.list) == before {
		// A kube-proxy outside of Pods is known to the agents, which warn of it.
		out.ok("", "no Pod of kube-proxy runs, and neither Cilium nor kube-router serves Services; no others were looked for")
	}
}

// checkOtherProxies judges each proxy of otherProxies by one of its Pods.
func (c *cluster) checkOtherProxies(ctx context.Context, settings settingsReader, nodes *nodesReport, out *checks) {
	judged := make(map[string]bool)
	for i := range c.host {
		p := &c.host[i]
		what := p.Labels["k8s-app"]
		do, ok := otherProxies[what]
		name := p.Namespace + "/" + p.Name
		if owner := metav1.GetControllerOf(p); owner != nil {
			name = p.Namespace + "/" + owner.Name
		}
		if !ok || p.Status.Phase != corev1.PodRunning || judged[name] {
			continue
		}
		judged[name] = true
		serves, err := c.serves(ctx, what, p)
		switch {
		case err != nil:
			out.unknown(name, err)
		case serves && nodes != nil && !settings.anyServesAll(ctx, nodes):
			out.ok(name, "%s serves Services, and no agent programs the same", what)
		case serves:
			out.bad(failed, name, what+" serves Services, too", do)
		}
	}
}

// warnsOfKubeProxy reports whether the agent of a node says that a kube-proxy there is too many. It
// returns the agent's reason.
func (n *node) warnsOfKubeProxy() (reason string, warns bool) {
	for _, w := range n.agent.GetWarnings() {
		if w.GetWarning() == pb.NodeWarning_NODE_WARNING_KUBE_PROXY {
			return w.GetReason(), true
		}
	}
	return "", false
}

// warnsOfKubeProxy adds a failure for each node whose agent says that a kube-proxy is too many.
func warnsOfKubeProxy(nodes *nodesReport, out *checks) {
	for i := range nodes.nodes {
		n := &nodes.nodes[i]
		if reason, warns := n.warnsOfKubeProxy(); warns {
			out.bad(failed, n.Node, fmt.Sprintf("%s: %s", wire.WarningName(pb.NodeWarning_NODE_WARNING_KUBE_PROXY), reason), removeKubeProxy)
		}
	}
}

// checkKubeProxy judges a kube-proxy in a Pod of a node, on which the agent n runs; nil means that
// none is known. Only an agent that programs the same Services makes it a failure: otherwise the
// node needs its kube-proxy.
func (r settingsReader) checkKubeProxy(ctx context.Context, name string, n *node, nodes *nodesReport, out *checks) {
	if n == nil {
		if len(nodes.relays) > 0 || nodes.agentsErr != nil {
			out.ok(name, "a kube-proxy runs; whether an agent does is not known")
			return
		}
		out.ok(name, "a kube-proxy runs and no agent, so the node needs it")
		return
	}
	if _, warns := n.warnsOfKubeProxy(); warns {
		return // it is a failure already
	}
	if n.agent == nil {
		out.bad(warning, name, fmt.Sprintf("a kube-proxy runs, and its agent is in the state %q", n.State), "keep kube-proxy until the agent has programmed the node")
		return
	}
	switch served, err := r.served(ctx, n, nodes); {
	case err != nil:
		out.unknown(name, fmt.Errorf("a kube-proxy runs, and it is not known whether it is meant to: %w", err))
	case served == noServices:
		out.ok(name, "a kube-proxy runs, and the agent programs nothing, so the node needs it")
	case served == chosenServices:
		out.ok(name, "a kube-proxy runs beside the agent, as it is meant to (besideKubeProxy)")
	case served == unknownServices:
		// The agent runs in no Pod. It looks for kube-proxy itself.
		out.ok(name, "a kube-proxy runs, and the agent does not warn of it")
	default:
		out.bad(failed, name, "a kube-proxy runs, and the agent programs the same Services", removeKubeProxy)
	}
}

// anyServesAll reports whether an agent may program all Services.
func (r settingsReader) anyServesAll(ctx context.Context, nodes *nodesReport) bool {
	return len(nodes.relays) > 0 || nodes.agentsErr != nil || slices.ContainsFunc(nodes.nodes, func(n node) bool {
		served, _ := r.served(ctx, &n, nodes) // with an error, it is not known
		return served == allServices || served == unknownServices
	})
}

// serves reports whether one of otherProxies serves Services, by the settings of a Pod of it.
func (c *cluster) serves(ctx context.Context, what string, p *corev1.Pod) (bool, error) {
	if what == "cilium" {
		config, err := c.fleet.ConfigMap(ctx, p.Namespace, "cilium-config")
		if err != nil {
			return false, err
		}
		// Before Cilium 1.16, there were strict, partial, probe and disabled.
		return slices.Contains([]string{"true", "strict", "partial", "probe"}, config.Data["kube-proxy-replacement"]), nil
	}
	return !slices.ContainsFunc(p.Spec.Containers, func(c corev1.Container) bool {
		return slices.Contains(slices.Concat(c.Command, c.Args), "--run-service-proxy=false")
	}), nil
}
