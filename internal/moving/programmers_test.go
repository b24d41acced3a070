// TestBetweenProgrammers proves that a node moves between programmers in both directions without a
// refused connection, while Services change and real connections go on.
package moving

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"text/template"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/command"
)

const (
	settleTimeout = 2 * time.Minute
	podPort       = 8080
	clusterCIDRs  = "10.180.0.0/16,fd00:10:180::/48"
)

// manifests is the template of the manifests for a node and its Services.
var manifests = template.Must(template.New("").Parse(`
apiVersion: v1
kind: Node
metadata: {name: a}
status: {addresses: [{type: InternalIP, address: {{.Node.IPv4}}}, {type: InternalIP, address: "{{.Node.IPv6}}"}]}
{{range .Services}}
---
apiVersion: v1
kind: Service
metadata: {name: {{.Name}}}
spec:
  type: NodePort
  clusterIPs: [{{range .ClusterIPs}}"{{.}}", {{end}}]
  ipFamilies: [IPv4, IPv6]
  ports:
  - {name: tcp, port: 80, nodePort: {{.NodePort}}}
  - {name: udp, port: 80, nodePort: {{.NodePort}}, protocol: UDP}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: {{.Name}}-4, labels: {kubernetes.io/service-name: {{.Name}}}}
addressType: IPv4
ports: [{name: tcp, port: 8080}, {name: udp, port: 8080, protocol: UDP}]
endpoints: [{{range .Pods}}{addresses: [{{.IPv4}}], nodeName: {{.Node.Name}}}, {{end}}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: {{.Name}}-6, labels: {kubernetes.io/service-name: {{.Name}}}}
addressType: IPv6
ports: [{name: tcp, port: 8080}, {name: udp, port: 8080, protocol: UDP}]
endpoints: [{{range .Pods}}{addresses: ["{{.IPv6}}"], nodeName: {{.Node.Name}}}, {{end}}]
{{end}}`))

// service is a Service of the tests.
type service struct {
	Name             string
	Number, NodePort uint16
	ClusterIPs       []string
	Pods             []*testenv.Pod
}

// newService returns a Service whose addresses and NodePort derive from its number.
func newService(name string, number uint16, pods ...*testenv.Pod) service {
	return service{name, number, 30080 + number, []string{fmt.Sprint("10.96.0.", number), fmt.Sprint("fd00:10:96::", number)}, pods}
}

// world is the node that moves, another node, pods and a client outside.
type world struct {
	t       *testing.T
	network *testenv.Network
	node    *testenv.Node
	client  *testenv.Pod
	outside *testenv.Client
	pods    []*testenv.Pod
	dir     string // the folder of the manifests
	agent   *command.Command
}

func newWorld(t *testing.T) *world {
	t.Helper()
	network := testenv.NewNetwork(t)
	w := &world{t: t, network: network, node: network.AddNode("a"), dir: t.TempDir()}
	for _, node := range []*testenv.Node{w.node, network.AddNode("b")} {
		pod := node.AddPod("web-" + node.Name)
		pod.Serve(testenv.TCP, podPort)
		pod.Serve(testenv.UDP, podPort)
		w.pods = append(w.pods, pod)
	}
	w.client, w.outside = w.node.AddPod("client"), network.AddClient("outside")
	w.outside.RouteVia(w.node, testenv.ServiceCIDRs()...)
	w.agent = command.New(t, w.node.Host, "slicecast-agent")
	return w
}

// write replaces the manifests in one step.
func (w *world) write(services ...service) {
	w.t.Helper()
	var b bytes.Buffer
	require.NoError(w.t, manifests.Execute(&b, map[string]any{"Node": w.node, "Services": services}))
	path := filepath.Join(w.dir, "all.yaml")
	require.NoError(w.t, os.WriteFile(path+".new", b.Bytes(), 0o600))
	require.NoError(w.t, os.Rename(path+".new", path))
}

// ways returns the ways to a Service: from a pod, the node and outside, to the cluster IPs and the
// node ports.
func (w *world) ways(s service) (ways []way) {
	for _, proto := range []testenv.Proto{testenv.TCP, testenv.UDP} {
		for _, ip := range s.ClusterIPs {
			vip := netip.AddrPortFrom(netip.MustParseAddr(ip), 80)
			nodePort := netip.AddrPortFrom(w.node.Addr(vip.Addr().Is6()), s.NodePort)
			for _, from := range []*testenv.Host{w.client.Host, w.node.Host, w.outside.Host} {
				ways = append(ways, way{from, proto, vip}, way{from, proto, nodePort})
			}
		}
	}
	return ways
}

// agentFlags returns the flags for a programmer with a name such as "iptables-nft".
func agentFlags(programmer string) []string {
	name, variant, ok := strings.Cut(programmer, "-")
	flags := []string{
		"--programmer=" + name, "--programmer-fallback=false", "--ipvs-drain-limit=40s", "--cluster-cidr=" + clusterCIDRs, "--healthz-bind-address=127.0.0.1:8475", "--log-level=debug",
		// Only the initial network namespace may change these settings.
		"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
	}
	if ok {
		flags = append(flags, "--iptables-variant="+variant)
	}
	return flags
}

// start starts the agent with a programmer and waits until it has programmed the node.
func (w *world) start(programmer string, feed ...string) {
	w.t.Helper()
	require.NoError(w.t, w.agent.Start([]string{agentVariable + "=1"}, "/proc/self/exe", append(agentFlags(programmer), feed...)...))
	w.agent.AwaitOK(w.t, settleTimeout, "http://127.0.0.1:8475/readyz")
}

// left returns the programmers that have rules or devices on the node.
func (w *world) left() []string {
	w.t.Helper()
	has := func(what string, name string, args ...string) bool {
		out, err := w.node.Run(w.t.Context(), name, args...)
		require.NoError(w.t, err)
		return strings.Contains(out, what)
	}
	var programmers []string
	for _, p := range []struct {
		name     string
		commands [][]string // the first word is the text to look for in the output of the others
	}{
		{"nftables", [][]string{{"table ip slicecast\n", "nft", "list", "tables"}, {"table ip6 slicecast\n", "nft", "list", "tables"}}},
		{"iptables-nft", [][]string{{"SLICECAST-", "iptables-nft-save"}, {"SLICECAST-", "ip6tables-nft-save"}}},
		{"iptables-legacy", [][]string{{"SLICECAST-", "iptables-legacy-save"}, {"SLICECAST-", "ip6tables-legacy-save"}}},
		{"ipvs", [][]string{{"table ip slicecast-ipvs\n", "nft", "list", "tables"}, {"slicecast-ipvs0", "ip", "link"}}},
	} {
		for _, c := range p.commands {
			if has(c[0], c[1], c[2:]...) {
				programmers = append(programmers, p.name)
				break
			}
		}
	}
	return programmers
}

// TestBetweenProgrammers moves a node between programmers in both directions. New connections are
// made all the time, and the Services change while no agent runs.
func TestBetweenProgrammers(t *testing.T) {
	var order []string
	for pair := range strings.SplitSeq(*programmers, ",") {
		first, second, _ := strings.Cut(pair, ":")
		order = append(order, first, second, first)
	}
	w := newWorld(t)
	web, changed := newService("web", 1, w.pods...), newService("changed", 2)
	w.write(web, changed)
	feed := []string{"--node-name=a", "--source=file", "--manifests=" + w.dir}
	w.start(order[0], feed...)
	s := startStream(t, w.ways(web))
	var o open
	defer o.close()
	now := order[0]
	for _, next := range order {
		if next == now {
			continue
		}
		t.Logf("from %s to %s", now, next)
		o.openAll(t, w.ways(web))
		require.NoError(t, w.agent.Stop())
		if changed.Pods == nil {
			changed.Pods = w.pods[1:]
		} else {
			changed.Pods = nil
		}
		w.write(web, changed)
		w.start(next, feed...)
		o.requireAlive(t, testenv.TCP)
		o.requireAlive(t, testenv.UDP)
		if now != "ipvs" {
			require.Equal(t, []string{next}, w.left())
		}
		s.RequireSome()
		for _, w := range w.ways(changed) {
			if want := map[bool]testenv.Outcome{true: testenv.Refused, false: testenv.Answered}[changed.Pods == nil]; w.proto == testenv.TCP {
				require.True(t, w.try(t.Context()).All(want), "%s from %s", want, w)
			}
		}
		if now == "ipvs" {
			// IPVS keeps its open connections until they end or the drain limit is reached.
			o.close()
			testenv.Eventually(t, settleTimeout, func() error {
				if left := w.left(); len(left) > 1 {
					return fmt.Errorf("rules of %v are left, want those of one programmer", left)
				}
				return nil
			})
			s.RequireSome()
		}
		now = next
	}
	s.RequireNoFailure()
}
