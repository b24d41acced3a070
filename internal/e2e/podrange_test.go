// This test proves that a pod range that does not match the cluster is reported at run time: by the
// agent, by the server, and in an Event about the Node. It is over once the Node has other
// podCIDRs.
package e2e

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testenv"
)

func TestWrongPodRange(t *testing.T) {
	c := newCluster(t)
	socket := filepath.Join(c.dir, "agent.sock")
	c.a.agent.Terminate()
	args := slices.Concat(c.a.agent.args, []string{"--status-socket=" + socket})
	args[slices.Index(args, "--cluster-cidr="+clusterCIDRs)] = "--cluster-cidr=10.99.0.0/16,fd00:10:180::/48"
	c.a.agent.args = args
	c.a.agent.Start()
	c.a.agent.AwaitReady()
	status := func(binary string, args ...string) string {
		t.Helper()
		out, err := c.a.Run(t.Context(), filepath.Join(binaries, binary), append([]string{"status"}, args...)...)
		require.NoError(t, err)
		return out
	}
	await := func(has bool) {
		t.Helper()
		testenv.Eventually(t, settleTimeout, func() error {
			agent, server := status(agentCommand, "--status-socket="+socket), status(serverCommand, "--debug-socket="+c.debugSocket, "--errors")
			if strings.Contains(agent, "pod_range_ipv4") != has || strings.Contains(server, "pod_range_ipv4 on 1 node") != has {
				return fmt.Errorf("a warning, which should be %v:\n%s\n%s", has, agent, server)
			}
			return nil
		})
	}
	await(true)
	reason := fmt.Sprintf("IPv4 pods at %v are not in clusterCIDR (10.99.0.0/16)", c.a.PodCIDR4)
	require.Contains(t, status(agentCommand, "--status-socket="+socket), reason)
	server := status(serverCommand, "--debug-socket="+c.debugSocket, "--errors")
	require.Regexp(t, `\na +pod_range_ipv4 +\S+ +`+regexp.QuoteMeta(reason), server)
	require.NotContains(t, server, "pod_range_ipv6")
	testenv.Eventually(t, settleTimeout, func() error {
		events, err := c.api.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=a,reason=PodRangeMismatch"})
		if err == nil && (len(events.Items) != 1 || !strings.HasPrefix(events.Items[0].Message, reason)) {
			err = fmt.Errorf("events: %+v", events.Items)
		}
		return err
	})

	// podCIDRs cannot be changed, so another Node takes the place of this one.
	nodes := c.api.CoreV1().Nodes()
	require.NoError(t, nodes.Delete(t.Context(), c.a.Name, metav1.DeleteOptions{}))
	_, err := nodes.Create(t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: c.a.Name},
		Spec:       corev1.NodeSpec{PodCIDR: "10.99.3.0/24", PodCIDRs: []string{"10.99.3.0/24", c.a.PodCIDR6.String()}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	await(false)
}
