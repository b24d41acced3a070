// This test proves that agents find replicas in the pods of a Service, move when one dies or joins,
// and keep what they have while all are gone. They ask the real API server once at the start, and
// again only when all known servers are gone.
package e2e

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/cespare/xxhash/v2"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/testenv"
)

// replicaName is the name in the certificate of all replicas.
const replicaName = "slicecast-server.test"

// replicas is a set of slicecast-servers in pods that a Service selects, as in deploy/. Agents find
// the servers in the Service's EndpointSlices, which the controllers write. Servers find each other
// by watching these slices and name each other to agents.
type replicas struct {
	c         *cluster
	cert, key string
	all       []*replica

	mu sync.Mutex
	// asked lists the agents' requests to the API server; guarded by mu.
	asked []string
}

// replica is a server in a pod.
type replica struct {
	*process
	pod *pod
}

func (r *replica) address() string { return netip.AddrPortFrom(r.pod.IPv4, serverPort).String() }

// newReplicas starts one replica on each node.
func newReplicas(c *cluster) *replicas {
	c.t.Helper()
	r := &replicas{c: c}
	c.serverCA, r.cert, r.key = writeServingCertificate(c.t, c.dir, replicaName)
	spec := selecting("slicecast-server", tcp("grpc", serverPort, intstr.FromInt32(serverPort)))
	spec.Type, spec.IPFamilyPolicy = corev1.ServiceTypeClusterIP, new(corev1.IPFamilyPolicySingleStack)
	service := c.Service("slicecast-server", spec)
	for _, n := range c.nodes() {
		r.start(n)
	}
	c.AwaitAPI(service, serverPort, []*pod{r.all[0].pod, r.all[1].pod})
	return r
}

func (r *replicas) service() string { return r.c.namespace + "/slicecast-server" }

// start adds a replica on a node and waits until it is ready. Its pod has the given address, or the
// next free one.
func (r *replicas) start(n *node, address ...netip.Addr) *replica {
	c := r.c
	c.t.Helper()
	name := fmt.Sprint("slicecast-server-", len(r.all))
	s := &replica{pod: &pod{n.AddPod(name, address...)}}
	r.all = append(r.all, s)
	s.process = newProcess(c.t, s.pod.Host, serverCommand, name, "127.0.0.1:8473", []string{
		"--kubeconfig=" + c.cp.Kubeconfig(c.t, c.cp.AdminConfig()),
		"--server-service=" + r.service(),
		fmt.Sprintf("--bind-address=:%d", serverPort),
		"--tls-cert-file=" + r.cert,
		"--tls-private-key-file=" + r.key,
		"--client-ca-file=" + writeFile(c.t, c.dir, name+"-clients.crt", c.cp.AdminConfig().CAData),
		"--drain-window=100ms",
	})
	s.Start()
	s.AwaitReady()
	c.createPod(c.t.Context(), podObject(name, "slicecast-server", n), s.pod.IPv4.String(), s.pod.IPv6.String())
	return s
}

// preferred returns an address that makes a replica come before another one in a node's order of
// servers.
func preferred(n *node, before *replica) netip.Addr {
	weight := func(address string) uint64 { return xxhash.Sum64String(n.Name + "\x00" + address) }
	ip := n.PodCIDR4.Addr()
	for range 100 { // skip the addresses of pods
		ip = ip.Next()
	}
	for weight(netip.AddrPortFrom(ip, serverPort).String()) < weight(before.address()) {
		ip = ip.Next()
	}
	return ip
}

// at returns the replica that the agent on a node is connected to.
func (r *replicas) at(n *node) *replica {
	r.c.t.Helper()
	var address string
	testenv.Eventually(r.c.t, startTimeout, func() error {
		found := connected.FindAllStringSubmatch(n.agent.Log(), -1)
		if len(found) == 0 {
			return fmt.Errorf("the agent on %s is not connected", n.Name)
		}
		address = found[len(found)-1][1]
		return nil
	})
	for _, s := range r.all {
		if s.address() == address {
			return s
		}
	}
	require.Fail(r.c.t, "no such server", "the agent on %s is connected to %s", n.Name, address)
	return nil
}

// awaitAt waits until an agent is connected to a replica.
func (r *replicas) awaitAt(n *node, s *replica) {
	r.c.t.Helper()
	testenv.Eventually(r.c.t, settleTimeout, func() error {
		if at := r.at(n); at != s {
			return fmt.Errorf("the agent on %s is connected to %s, not %s", n.Name, at.Name(), s.Name())
		}
		return nil
	})
}

var (
	connected = regexp.MustCompile(`msg=Connected server=(\S+)`)
	// whole matches an update that does not consist of deltas only.
	whole = regexp.MustCompile(`msg=Update .*(full=true|services=[1-9]|slices=[1-9])`)
)

// requireResumed requires that the agent has received no whole objects since it last connected,
// unless it has connected only once.
func (n *node) requireResumed(t *testing.T) {
	t.Helper()
	if strings.Count(n.agent.Log(), "msg=Connected") == 1 {
		return
	}
	require.Empty(t, whole.FindAllString(n.agent.Log()[n.lastConnected():], -1), n.Name)
}

// lastConnected returns the offset in the agent's log at which it last connected.
func (n *node) lastConnected() int {
	all := connected.FindAllStringIndex(n.agent.Log(), -1)
	return all[len(all)-1][0]
}

// kubeconfig returns the path of a kubeconfig for an agent. The requests of its user are recorded.
func (r *replicas) kubeconfig() string {
	t := r.c.t
	t.Helper()
	transport, err := rest.TransportFor(r.c.cp.AdminConfig())
	require.NoError(t, err)
	target, err := url.Parse(r.c.cp.URL())
	require.NoError(t, err)
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.Transport = transport
	l, err := net.Listen("tcp", netip.AddrPortFrom(network.World.IPv4, 0).String())
	require.NoError(t, err)
	server := &httptest.Server{Listener: l, Config: &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		r.mu.Lock()
		r.asked = append(r.asked, q.Method+" "+q.URL.String())
		r.mu.Unlock()
		proxy.ServeHTTP(w, q)
	})}}
	server.Start()
	t.Cleanup(server.Close)
	return r.c.cp.Kubeconfig(t, &rest.Config{Host: server.URL})
}

// questions returns the agents' requests to the API server so far.
func (r *replicas) questions() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]string(nil), r.asked...)
}

// TestReplicasComeAndGo kills and starts servers. Each agent finds the servers with a single
// request to the API server and learns of others from the servers. If a server dies, its agents
// connect to another one, which has nothing to send. If a server is added, agents move to it over
// time. If all servers are gone, nodes keep what they have, until the agents find new servers with
// another request.
func TestReplicasComeAndGo(t *testing.T) {
	c := startCluster(t, shared, fromReplicas)
	r := c.replicas
	pods := c.Deployment("web", 3)
	web := c.Service("web", selecting("web", tcp("tcp", 80, onPodPort())))
	c.RequireAnswers(web, 80, pods...)
	asked := fmt.Sprintf("GET /apis/discovery.k8s.io/v1/namespaces/%s/endpointslices?labelSelector=kubernetes.io%%2Fservice-name%%3Dslicecast-server",
		c.namespace)
	require.Equal(t, []string{asked, asked}, r.questions(), "want one request of each agent")
	prober := c.ProbeAllTheTime(web, 80)

	first, second := r.all[0], r.all[1]
	if r.at(c.a) == second {
		first, second = second, first
	}
	first.Kill()
	for _, n := range c.nodes() {
		r.awaitAt(n, second)
	}
	c.SetReady(first.pod, false) // a kubelet notices some time later
	c.AwaitTruth()
	for _, n := range c.nodes() {
		n.requireResumed(t)
	}

	third := r.start(c.a, preferred(c.a, second))
	r.awaitAt(c.a, third)
	require.Contains(t, c.a.agent.Log(), "Moving to the preferred server")
	c.SetReady(pods[0], false)
	c.RequireAnswers(web, 80, pods[1:]...)
	for _, n := range c.nodes() {
		n.requireResumed(t)
		require.LessOrEqual(t, strings.Count(n.agent.Log(), "Lost the connection to the server"), 1, "moving counts as losing the server")
	}
	require.Len(t, r.questions(), 2, "the agents asked the API server although servers name each other")

	second.Kill()
	third.Kill()
	c.SetReady(second.pod, false)
	c.SetReady(third.pod, false)
	for _, n := range c.nodes() {
		n.agent.AwaitLine("Cannot reach the server, trying again; the rules in the kernel stay")
	}
	c.SetReady(pods[0], true)
	fourth := r.start(c.b)
	for _, n := range c.nodes() {
		r.awaitAt(n, fourth)
	}
	c.RequireAnswers(web, 80, pods...)
	for _, n := range c.nodes() {
		require.NotContains(t, n.agent.Log()[n.lastConnected():], "full=true", "the agent received more than what differs")
	}
	require.Greater(t, len(r.questions()), 2)
	prober.RequireNoFailure()
}
