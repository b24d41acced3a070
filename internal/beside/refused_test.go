// This test proves that a Service without endpoints is refused at once, whatever rules the proxy
// that does not serve it has for the ranges of cluster IPs. That holds before an agent starts,
// while it runs, with the rules that it leaves, and after kube-proxy has registered its chains
// anew.
package beside

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// refusal is how long a client waits for being refused. It is much longer than a refusal takes, so
// only what is dropped takes as long.
const refusal = 3 * time.Second

// refuses returns an error unless a pod and the node are refused at the cluster IP of a Service,
// and a client outside at the node port.
func (n *node) refuses(s *corev1.Service, outside *testenv.Client) error {
	for _, way := range n.ways(s, outside) {
		result := way.from.Probe(n.t.Context(), testenv.TCP, way.to, 1, testenv.ProbeOptions{Timeout: refusal})
		if !result.All(testenv.Refused) {
			return fmt.Errorf("on %s: %s from %s to %s: %v", n.Name, s.Name, way.from.Name, way.to, result)
		}
	}
	return nil
}

func TestRefusals(t *testing.T) {
	network := testenv.NewNetwork(t)
	control := controlplane.Start(t, controlplane.Options{Address: network.World.IPv4})
	w := &world{t: t, api: control.Client(), outside: network.AddClient("outside")}
	programmers := map[*node]string{}
	for _, mode := range []string{"iptables", "nftables"} {
		for _, programmer := range []string{"iptables", "nftables"} {
			n := newNode(t, network, control, mode+"-"+programmer, mode)
			w.nodes = append(w.nodes, n)
			programmers[n] = programmer
		}
	}
	awaitRefused := func(s *corev1.Service, nodes ...*node) {
		t.Helper()
		for _, n := range nodes {
			testenv.Eventually(t, settleTimeout, func() error { return n.refuses(s, w.outside) })
		}
	}
	for _, n := range w.nodes {
		n.proxy = n.startProxy()
	}
	theirs, ours := w.createService("theirs", ""), w.createService("ours", proxyName)
	awaitRefused(theirs, w.nodes...)

	// Of chains with the same priority, the kernel would ask the agent's first, as they are newer.
	for _, n := range w.nodes {
		n.agent = n.startAgent("--programmer=" + programmers[n])
		if programmers[n] == "nftables" {
			n.awaitRanges()
		}
		require.NoError(t, n.refuses(theirs, w.outside), "the agent runs")
		// Beside kube-proxy's mode nftables, it depends on the order what rules of iptables do.
		if programmers[n] == "nftables" || n.mode == "iptables" {
			awaitRefused(ours, n)
		}
	}
	for _, n := range w.nodes {
		require.NoError(t, n.agent.Stop())
		require.NoError(t, n.refuses(theirs, w.outside), "the agent has left its rules")
	}

	// A kube-proxy that starts registers its chains of nf_tables anew.
	for _, n := range w.nodes {
		require.NoError(t, n.proxy.Stop())
		n.proxy = n.startProxy()
	}
	awaitRefused(w.createService("later", ""), w.nodes...)
	for _, n := range w.nodes {
		require.NoError(t, n.refuses(theirs, w.outside), "kube-proxy was restarted beside rules that an agent has left")
	}
}

// awaitRanges waits until an agent's table drops packets to unused addresses in the ranges of
// cluster IPs.
func (n *node) awaitRanges() {
	n.t.Helper()
	testenv.Eventually(n.t, settleTimeout, func() error {
		out, err := n.Run(n.t.Context(), "nft", "list", "chain", "ip", "slicecast", "output-filter")
		if err == nil && !strings.Contains(out, "no Service has this address") {
			err = fmt.Errorf("no rule for the ranges: %s", out)
		}
		return err
	})
}
