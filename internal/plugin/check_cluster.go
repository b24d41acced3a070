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
	healthPort, kubeProxyHealthPort = 8475, 10256
)

// cluster is what the API server says of a cluster. What could not be read has an error.
type cluster struct {
	client kubernetes.Interface
	// ahead is by how much the API server's clock is ahead of this machine's.
	ahead    time.Duration
	aheadErr error

	nodes    []corev1.Node
	nodesErr error
	leases   []coordinationv1.Lease
	leaseErr error
	// host are the Pods in the network of their nodes.
	host    []corev1.Pod
	hostErr error
}

// readCluster reads what several checks need.
func readCluster(ctx context.Context, f *fleet.Fleet) *cluster {
	c := &cluster{client: f.Client()}
	c.ahead, c.aheadErr = f.ServerClock(ctx)
	nodes, err := c.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if c.nodesErr = err; err == nil {
		c.nodes = nodes.Items
	}
	leases, err := c.client.CoordinationV1().Leases(corev1.NamespaceNodeLease).List(ctx, metav1.ListOptions{})
	if c.leaseErr = err; err == nil {
		c.leases = leases.Items
	}
	host, err := c.client.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: "spec.hostNetwork=true"})
	if c.hostErr = err; err == nil {
		c.host = host.Items
	}
	return c
}

func (c *cluster) checkAPIServer(ctx context.Context, out *checks) {
	out.begin("API version", "deploy/README.md#slicecast-in-a-cluster")
	info, err := c.client.Discovery().ServerVersion()
	if err != nil {
		out.unknown("", err)
		return
	}
	v, err := version.ParseGeneric(info.GitVersion)
	switch {
	case err != nil:
		out.bad(notChecked, "", fmt.Sprintf("the API server has the version %q: %v", info.GitVersion, err), "look up what it is derived from")
	case v.LessThan(oldestKubernetes):
		out.bad(failed, "", fmt.Sprintf("Kubernetes %s", info.GitVersion),
			"upgrade to Kubernetes 1.32 or later, or give agents client certificates and run them outside of Pods")
	default:
		out.ok("", "Kubernetes %s", info.GitVersion)
	}

	out.begin("token issuer", "docs/configuration.md#tokens")
	raw, err := c.client.Discovery().RESTClient().Get().AbsPath("/.well-known/openid-configuration").Do(ctx).Raw()
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
		case info.Architecture != "amd64" && info.Architecture != "arm64":
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
	for _, err := range []error{c.nodesErr, c.leaseErr, c.aheadErr} {
		if err != nil {
			out.unknown("", err)
			return
		}
	}
	now := time.Now().Add(c.ahead)
	const do = "let the node follow a time server (chrony, systemd-timesyncd)"
	for _, n := range c.nodes {
		i := slices.IndexFunc(c.leases, func(l coordinationv1.Lease) bool { return l.Name == n.Name })
		if i < 0 || c.leases[i].Spec.RenewTime == nil || !ready(&n) {
			continue // nothing says what time it is there
		}
		switch age := now.Sub(c.leases[i].Spec.RenewTime.Time); {
		case age < -maxClockDifference:
			out.bad(failed, n.Name, fmt.Sprintf("its clock is %s ahead of the API server's", show.Age(-age)), do)
		case age > leaseAge:
			out.bad(failed, n.Name, fmt.Sprintf("the node is ready, but its Lease is %s old: its clock is behind the API server's", show.Age(age)), do)
		default:
			out.ok(n.Name, "within %v of the API server's", leaseAge)
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
		answer, err := c.client.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, &authorizationv1.SelfSubjectAccessReview{
			Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &a},
		}, metav1.CreateOptions{})
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
		held, err := c.client.CoreV1().ConfigMaps(metav1.NamespaceSystem).Get(ctx, where.name, metav1.GetOptions{})
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
	pods, err := c.client.CoreV1().Pods("").List(ctx, metav1.ListOptions{Limit: sampledPods})
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

// checkPorts looks for Pods that have the ports of agents on their nodes.
func (c *cluster) checkPorts(out *checks) {
	out.begin("ports", "deploy/README.md#ports")
	if c.hostErr != nil {
		out.unknown("", c.hostErr)
		return
	}
	free := true
	for _, p := range c.host {
		for _, container := range p.Spec.Containers {
			for _, port := range container.Ports {
				if kubeProxy := isKubeProxy(&p); port.ContainerPort == healthPort || port.ContainerPort == kubeProxyHealthPort && !kubeProxy {
					free = false
					out.bad(failed, p.Namespace+"/"+p.Name, fmt.Sprintf("the port %d of its node is taken", port.ContainerPort),
						"give the agents other ports with agent.config.healthzBindAddress")
				}
			}
		}
	}
	if free {
		out.ok("", "no Pod says that it uses %d or %d of its node", healthPort, kubeProxyHealthPort)
	}
}

// isKubeProxy reports whether a Pod is a kube-proxy, by the label of kubeadm and of the manifests
// of Kubernetes.
func isKubeProxy(p *corev1.Pod) bool {
	return p.Labels["k8s-app"] == "kube-proxy" || p.Labels["component"] == "kube-proxy"
}

// otherProxies are DaemonSets that may serve Services, by their label k8s-app.
var otherProxies = map[string]string{
	"cilium": "set kubeProxyReplacement: false in Cilium, or do not install Slicecast", "kube-router": "set --run-service-proxy=false",
}

// checkProxies looks for other Service proxies. installed means that agents run, which kube-proxy
// must not do for long.
func (c *cluster) checkProxies(ctx context.Context, out *checks, installed bool) {
	out.begin("other proxies", "deploy/README.md#3-remove-kube-proxy")
	if c.hostErr != nil {
		out.unknown("", c.hostErr)
		return
	}
	result, do := warning, "remove it after the installation"
	if installed {
		result, do = failed, "remove it: the nodes have two proxies, and pay for both"
	}
	found := false
	for i := range c.host {
		if p := &c.host[i]; isKubeProxy(p) && p.Status.Phase == corev1.PodRunning {
			found = true
			out.bad(result, p.Spec.NodeName, "a kube-proxy runs", do)
		}
	}
	sets, err := c.client.AppsV1().DaemonSets("").List(ctx, metav1.ListOptions{})
	if err != nil {
		out.unknown("", err)
		return
	}
	for _, set := range sets.Items {
		what := set.Labels["k8s-app"]
		do, ok := otherProxies[what]
		if !ok {
			continue
		}
		serves, err := c.serves(ctx, &set)
		if err != nil {
			out.unknown(set.Namespace+"/"+set.Name, err)
			return
		}
		if serves {
			found = true
			out.bad(failed, set.Namespace+"/"+set.Name, what+" serves Services, too", do)
		}
	}
	if !found {
		out.ok("", "there is none")
	}
}

// serves reports whether a DaemonSet of otherProxies serves Services, according to its settings.
func (c *cluster) serves(ctx context.Context, set *appsv1.DaemonSet) (bool, error) {
	if set.Labels["k8s-app"] == "cilium" {
		config, err := c.client.CoreV1().ConfigMaps(set.Namespace).Get(ctx, "cilium-config", metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		return config.Data["kube-proxy-replacement"] == "true", nil
	}
	return !slices.ContainsFunc(set.Spec.Template.Spec.Containers, func(c corev1.Container) bool {
		return slices.Contains(slices.Concat(c.Command, c.Args), "--run-service-proxy=false")
	}), nil
}
