package plugin

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/show"
	"github.com/slicecast/slicecast/internal/source"
)

var (
	// oldestKubernetes is the first version whose tokens name the node of their Pod.
	oldestKubernetes = version.MustParseGeneric("1.32")
	// oldestNftables is the first kernel with all that the nftables programmer needs.
	oldestNftables = version.MustParseGeneric("5.10")
)

const (
	// maxClockDifference is how much clocks may differ. Servers and agents tolerate more; changes
	// would seem to take longer or shorter than they do.
	maxClockDifference = 5 * time.Second
	// leaseAge is how old the Lease of a ready node is at most: kubelets renew it every 10 s, and
	// nodes are no longer ready after 50 s.
	leaseAge = time.Minute
	// sampledPods is how many Pods are compared with the pod ranges.
	sampledPods = 500
	// The ports of agents on their nodes.
	healthPort, kubeProxyHealthPort, pagesPort = 8475, 10256, 10249
)

// cluster is what the API server says of a cluster. What could not be read has an error.
type cluster struct {
	fleet  *fleet.Fleet
	client kubernetes.Interface

	api    fleet.APIServer
	apiErr error

	nodes    []corev1.Node
	nodesErr error
	leases   []coordinationv1.Lease
	leaseErr error
	// host are the Pods in the network of their nodes.
	host    []corev1.Pod
	hostErr error
	sets    []appsv1.DaemonSet
	setsErr error
}

// readCluster reads what several checks need.
func readCluster(ctx context.Context, f *fleet.Fleet) *cluster {
	c := &cluster{fleet: f, client: f.Client()}
	c.api, c.apiErr = f.APIServer(ctx)
	nodes, err := fleet.List(ctx, f, c.client.CoreV1().Nodes().List, metav1.ListOptions{})
	if c.nodesErr = err; err == nil {
		c.nodes = nodes.Items
	}
	leases, err := fleet.List(ctx, f, c.client.CoordinationV1().Leases(corev1.NamespaceNodeLease).List, metav1.ListOptions{})
	if c.leaseErr = err; err == nil {
		c.leases = leases.Items
	}
	host, err := fleet.List(ctx, f, c.client.CoreV1().Pods("").List, metav1.ListOptions{FieldSelector: "spec.hostNetwork=true"})
	if c.hostErr = err; err == nil {
		c.host = host.Items
	}
	sets, err := fleet.List(ctx, f, c.client.AppsV1().DaemonSets("").List, metav1.ListOptions{})
	if c.setsErr = err; err == nil {
		c.sets = sets.Items
	}
	return c
}

func (c *cluster) checkAPIServer(out *checks) {
	out.begin("API version", "deploy/README.md#slicecast-in-a-cluster")
	if c.apiErr != nil {
		out.unknown("", c.apiErr)
		return
	}
	of := c.api.Version
	v, err := version.ParseGeneric(of)
	switch {
	case err != nil:
		out.bad(notChecked, "", fmt.Sprintf("the API server has the version %q: %v", of, err), "look up what it is derived from")
	case v.LessThan(oldestKubernetes):
		out.bad(failed, "", "Kubernetes "+of,
			"upgrade to Kubernetes 1.32 or later, or give agents client certificates and run them outside of Pods")
	default:
		out.ok("", "Kubernetes %s", of)
	}
}

// checkIssuer checks that servers can verify tokens by the keys that the API server publishes.
func (c *cluster) checkIssuer(ctx context.Context, out *checks) {
	out.begin("token issuer", "docs/configuration.md#tokens")
	raw, err := fleet.Within(ctx, c.fleet, func(ctx context.Context) ([]byte, error) {
		return c.client.Discovery().RESTClient().Get().AbsPath("/.well-known/openid-configuration").Do(ctx).Raw()
	})
	var discovery struct{ Issuer string }
	switch {
	case apierrors.IsNotFound(err):
		discovery.Issuer = "none"
	case err != nil:
		out.unknown("", err)
		return
	default:
		if err := json.Unmarshal(raw, &discovery); err != nil {
			out.unknown("", err)
			return
		}
	}
	if !strings.HasPrefix(discovery.Issuer, "https://") {
		out.bad(failed, "", fmt.Sprintf("the API server publishes no keys, because the issuer of its tokens is no https URL (%s)", discovery.Issuer),
			"set the API server's --service-account-issuer to an https URL, or give agents client certificates")
		return
	}
	out.ok("", "the API server publishes the keys of %s", discovery.Issuer)
}

func (c *cluster) checkNodes(out *checks) {
	out.begin("kernel", "docs/configuration.md#programmers")
	if c.nodesErr != nil {
		out.unknown("", c.nodesErr)
		return
	}
	for _, n := range c.nodes {
		info := n.Status.NodeInfo
		v, err := version.ParseGeneric(info.KernelVersion)
		switch {
		case info.OperatingSystem != "linux":
			out.bad(warning, n.Name, fmt.Sprintf("the node runs %s", info.OperatingSystem), "keep its own proxy there: agents need Linux")
		case !hasImages(info.Architecture):
			out.bad(failed, n.Name, fmt.Sprintf("there are no images for %s", info.Architecture), "build the agent for it and run it with systemd")
		case err != nil:
			out.bad(notChecked, n.Name, fmt.Sprintf("the kernel has the version %q", info.KernelVersion), "look up which kernel it is derived from")
		case v.LessThan(oldestNftables):
			out.bad(warning, n.Name, fmt.Sprintf("Linux %s is older than what nftables needs, 5.10", info.KernelVersion),
				"nothing, if agents may use iptables there, which the programmer auto does; otherwise upgrade the kernel")
		default:
			out.ok(n.Name, "Linux %s, %s", info.KernelVersion, info.Architecture)
		}
	}
}

// hasImages reports whether there are images for an architecture.
func hasImages(architecture string) bool { return architecture == "amd64" || architecture == "arm64" }

// ready reports whether a node is ready.
func ready(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// checkClocks compares the clock of each node with the API server's. A kubelet writes its time to
// its Lease.
func (c *cluster) checkClocks(out *checks) {
	out.begin("clock", "docs/kubectl.md#clocks")
	for _, err := range []error{c.nodesErr, c.leaseErr, c.apiErr} {
		if err != nil {
			out.unknown("", err)
			return
		}
	}
	now := time.Now().Add(c.api.Ahead)
	const do = "let the node follow a time server (chrony, systemd-timesyncd)"
	for _, n := range c.nodes {
		i := slices.IndexFunc(c.leases, func(l coordinationv1.Lease) bool { return l.Name == n.Name })
		switch {
		case !ready(&n):
			out.bad(warning, n.Name, "its clock is unknown, because the node is not ready", "check again when the node is ready")
			continue
		case i < 0 || c.leases[i].Spec.RenewTime == nil:
			out.bad(warning, n.Name, "its clock is unknown, because its kubelet renews no Lease", "compare it by hand: date, on the node")
			continue
		}
		switch age := now.Sub(c.leases[i].Spec.RenewTime.Time); {
		case age < -maxClockDifference:
			out.bad(failed, n.Name, fmt.Sprintf("its clock is %s ahead of the API server's", show.Age(-age)), do)
		case age > leaseAge:
			out.bad(failed, n.Name, fmt.Sprintf("the node is ready, but its Lease is %s old: its clock is behind the API server's", show.Age(age)), do)
		default:
			out.ok(n.Name, "at most %v ahead of the API server's, and at most %v behind it", maxClockDifference, leaseAge)
		}
	}
}

// installs are what an installation has to create.
var installs = []authorizationv1.ResourceAttributes{
	{Resource: "namespaces"}, {Resource: "serviceaccounts"}, {Resource: "services"}, {Resource: "configmaps"},
	{Group: "apps", Resource: "deployments"}, {Group: "apps", Resource: "daemonsets"},
	{Group: "policy", Resource: "poddisruptionbudgets"}, {Group: "networking.k8s.io", Resource: "networkpolicies"},
	{Group: "rbac.authorization.k8s.io", Resource: "roles"}, {Group: "rbac.authorization.k8s.io", Resource: "rolebindings"},
	{Group: "rbac.authorization.k8s.io", Resource: "clusterroles"}, {Group: "rbac.authorization.k8s.io", Resource: "clusterrolebindings"},
}

func (c *cluster) checkRights(ctx context.Context, out *checks) {
	out.begin("RBAC", "deploy/README.md#2-install-the-chart")
	var lacks []string
	for _, a := range installs {
		a.Verb = "create"
		answer, err := fleet.Within(ctx, c.fleet, func(ctx context.Context) (*authorizationv1.SelfSubjectAccessReview, error) {
			return c.client.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, &authorizationv1.SelfSubjectAccessReview{
				Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &a},
			}, metav1.CreateOptions{})
		})
		if err != nil {
			out.unknown("", err)
			return
		}
		if !answer.Status.Allowed {
			lacks = append(lacks, strings.TrimSuffix(a.Resource+"."+a.Group, "."))
		}
	}
	if len(lacks) > 0 {
		out.bad(failed, "", "you may not create "+strings.Join(lacks, ", "), "install as an administrator of the cluster")
		return
	}
	out.ok("", "you may create what an installation consists of")
}

// podRanges returns where the chart would find the ranges of pods, and the ranges; none means that
// it would not find any.
func (c *cluster) podRanges(ctx context.Context) (from string, ranges []netip.Prefix, err error) {
	for _, where := range []struct{ name, key, from string }{
		{"kubeadm-config", "ClusterConfiguration", "podSubnet of kubeadm-config"}, {"kube-proxy", "config.conf", "clusterCIDR of kube-proxy"},
	} {
		held, err := c.fleet.ConfigMap(ctx, metav1.NamespaceSystem, where.name)
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return "", nil, err
		}
		var config struct {
			ClusterCIDR string
			Networking  struct{ PodSubnet string }
		}
		if err := yaml.Unmarshal([]byte(held.Data[where.key]), &config); err != nil {
			return "", nil, fmt.Errorf("ConfigMap kube-system/%s: %w", where.name, err)
		}
		if text := config.Networking.PodSubnet + config.ClusterCIDR; text != "" {
			for _, s := range strings.Split(text, ",") {
				p, ok := source.ParsePrefix(strings.TrimSpace(s))
				if !ok {
					return "", nil, fmt.Errorf("%s is %q, which is no list of ranges", where.from, text)
				}
				ranges = append(ranges, p)
			}
			return where.from, ranges, nil
		}
	}
	for _, n := range c.nodes {
		if len(n.Spec.PodCIDRs) == 0 {
			return "", nil, nil
		}
		for _, s := range n.Spec.PodCIDRs {
			if p, ok := source.ParsePrefix(s); ok {
				ranges = append(ranges, p)
			}
		}
	}
	return "podCIDRs of the Nodes", ranges, nil
}

func (c *cluster) checkPodRanges(ctx context.Context, out *checks) {
	out.begin("pod ranges", "deploy/README.md#2-install-the-chart")
	if c.nodesErr != nil {
		out.unknown("", c.nodesErr)
		return
	}
	from, ranges, err := c.podRanges(ctx)
	if err != nil {
		out.unknown("", err)
		return
	}
	const do = "set podCIDRs to the ranges of all pods when you install the chart"
	if len(ranges) == 0 {
		out.bad(failed, "", "nothing says which addresses pods have: there is neither podSubnet in kubeadm-config, nor clusterCIDR of kube-proxy, "+
			"nor podCIDRs on all Nodes", do)
		return
	}
	pods, err := fleet.List(ctx, c.fleet, c.client.CoreV1().Pods("").List, metav1.ListOptions{Limit: sampledPods})
	if err != nil {
		out.unknown("", err)
		return
	}
	outside := 0
	for _, p := range pods.Items {
		for _, ip := range p.Status.PodIPs {
			a, err := netip.ParseAddr(ip.IP)
			if err != nil || p.Spec.HostNetwork || p.Status.Phase != corev1.PodRunning {
				continue
			}
			if !slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Contains(a) }) {
				outside++
				out.bad(failed, p.Namespace+"/"+p.Name, fmt.Sprintf("pods have addresses outside of what the chart would use (%s)", from), do)
			}
		}
	}
	if outside == 0 {
		out.ok("", "%s; none of %s is outside", from, show.Plural("pod", len(pods.Items)))
	}
}

// checkPorts looks for Pods that have the ports of agents on their nodes. It looks at all Pods in
// the network of their nodes, and at the DaemonSets whose Pods are in another one. A DaemonSet
// counts if Pods of its present template were admitted: anybody may write one whose Pods are not.
func (c *cluster) checkPorts(out *checks) {
	out.begin("ports", "deploy/README.md#ports")
	for _, err := range []error{c.hostErr, c.setsErr} {
		if err != nil {
			out.unknown("", err)
			return
		}
	}
	free := true
	look := func(name string, spec *corev1.PodSpec, kubeProxy bool) {
		for _, container := range slices.Concat(spec.InitContainers, spec.Containers) {
			for _, p := range container.Ports {
				port := p.HostPort
				if spec.HostNetwork {
					port = p.ContainerPort
				}
				setting := agentPorts[port]
				// Agents wait for the ports of a kube-proxy.
				if setting == "" || p.Protocol != corev1.ProtocolTCP && p.Protocol != "" || kubeProxy && port != healthPort {
					continue
				}
				free = false
				out.bad(failed, name, fmt.Sprintf("the port %d of its node is taken", port), "give the agents another one with agent.config."+setting)
			}
		}
	}
	for i := range c.host {
		if phase := c.host[i].Status.Phase; phase == corev1.PodSucceeded || phase == corev1.PodFailed {
			continue
		}
		look(c.host[i].Namespace+"/"+c.host[i].Name, &c.host[i].Spec, isKubeProxy(c.host[i].Labels))
	}
	for i := range c.sets {
		if set := &c.sets[i]; !set.Spec.Template.Spec.HostNetwork && set.Status.UpdatedNumberScheduled > 0 &&
			set.Status.ObservedGeneration == set.Generation {
			look(set.Namespace+"/"+set.Name, &set.Spec.Template.Spec, false)
		}
	}
	if free {
		out.ok("", "no Pod in the network of its node and no DaemonSet says that it uses %d, %d or %d of its node; others were "+
			"not looked at", healthPort, kubeProxyHealthPort, pagesPort)
	}
}

// agentPorts are the ports of agents on their nodes, with the settings that change them.
var agentPorts = map[int32]string{
	healthPort: "healthzBindAddress", kubeProxyHealthPort: "healthzBindAddress", pagesPort: "metricsBindAddress",
}
