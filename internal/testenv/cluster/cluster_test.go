// These tests prove that a cluster is one, with kube-proxy and with Slicecast: pods on two nodes
// reach each other, and a Service by its name, in both IP families, also after a node has rebooted.
// kubelets, containers and proxies are real, and Slicecast is installed from its manifests.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testenv"
)

func TestCluster(t *testing.T) {
	for _, options := range []Options{
		{Nodes: 2, Proxy: KubeProxy, Programmer: "nftables"},
		{Nodes: 2, Proxy: Slicecast, Programmer: "iptables"},
	} {
		t.Run(string(options.Proxy), func(t *testing.T) { testCluster(t, options) })
	}
}

func testCluster(t *testing.T, options Options) {
	ctx := t.Context()
	options.Logf = t.Logf
	c, err := Start(ctx, options)
	require.NoError(t, err)
	t.Cleanup(func() {
		for _, node := range c.Nodes {
			if t.Failed() {
				t.Log(node.logTails())
			}
		}
		require.NoError(t, c.Stop())
	})
	for i, zone := range []string{"a", "b"} {
		node, err := c.Client.CoreV1().Nodes().Get(ctx, c.Nodes[i].Name, metav1.GetOptions{})
		require.NoError(t, err)
		require.Equal(t, zone, node.Labels[corev1.LabelTopologyZone])
		require.Len(t, node.Status.Addresses, 3, "host name and an address of each family")
	}
	_, err = c.Kubectl(ctx, Web, "apply", "-f", "-")
	require.NoError(t, err)
	require.NoError(t, c.AwaitRollout(ctx, "default", "daemonset/web"))
	requireReach(t, c)

	// Kubelet relies on being started again.
	node := c.Node("node-2")
	killKubelet := "kill -9 $(grep -la '^[^ ]*/kubelet' /proc/[0-9]*/cmdline | cut -d/ -f3)"
	require.NoError(t, node.Command(ctx, "sh", "-c", killKubelet).Run())
	testenv.Eventually(t, patience, func() error {
		if tails := node.logTails(); !strings.Contains(tails, "kubelet has ended") {
			return errors.New(tails)
		}
		return nil
	})
	requireReach(t, c)

	// A node that reboots has its disk, but no rules. Everything comes back by itself.
	hostname, err := node.Command(ctx, "hostname").Output()
	require.NoError(t, err)
	require.Equal(t, "node-2\n", string(hostname))
	require.NoError(t, node.Command(ctx, "sh", "-c", "echo kept >/var/lib/kept; echo lost >/run/lost; nft add table lost").Run())
	require.NoError(t, node.Stop())
	require.NoError(t, node.Start(ctx))
	found, err := node.Command(ctx, "sh", "-c", "cat /var/lib/kept; ls /run/lost; nft list table lost").CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(found), "kept\n")
	require.Equal(t, 2, strings.Count(string(found), "No such file"), string(found))
	requireReach(t, c)
}

// requireReach requires that the pods of all nodes reach each other and the Service.
func requireReach(t *testing.T, c *Cluster) {
	t.Helper()
	began := time.Now()
	testenv.Eventually(t, patience, func() error {
		pods, err := c.Client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{LabelSelector: "app=web"})
		if err != nil {
			return err
		}
		if len(pods.Items) != len(c.Nodes) {
			return fmt.Errorf("%d pods", len(pods.Items))
		}
		for _, from := range pods.Items {
			if err := reach(t.Context(), c, from, pods.Items); err != nil {
				return err
			}
		}
		return nil
	})
	t.Logf("all pods reach each other and the Service after %s", time.Since(began).Round(100*time.Millisecond))
}

// reach returns an error unless a pod reaches all others, and all of them through the Service.
func reach(ctx context.Context, c *Cluster, from corev1.Pod, all []corev1.Pod) error {
	var names, urls []string
	for _, pod := range all {
		names = append(names, pod.Name)
		if len(pod.Status.PodIPs) != 2 {
			return fmt.Errorf("%s has the addresses %v", pod.Name, pod.Status.PodIPs)
		}
		for i, format := range []string{"http://%s:8080/hostname", "http://[%s]:8080/hostname"} {
			urls = append(urls, fmt.Sprintf(format, pod.Status.PodIPs[i].IP))
		}
	}
	direct, err := c.Kubectl(ctx, "", append([]string{"exec", from.Name, "--", "curl", "-sS", "-m5", "-w", `\n`}, urls...)...)
	if err != nil {
		return err
	}
	for _, name := range names {
		if n := slices.Index(names, name); strings.Count(direct, name+"\n") != 2 {
			return fmt.Errorf("%s reaches %s (%d of %d) not in both families: %s", from.Name, name, n, len(names), direct)
		}
	}
	for _, family := range []string{"-4", "-6"} {
		script := "for i in $(seq 20); do curl -sS -m5 -w '\\n' " + family + " http://web.default.svc.cluster.local/hostname || exit; done"
		answers, err := c.Kubectl(ctx, "", "exec", from.Name, "--", "sh", "-c", script)
		if err != nil {
			return err
		}
		for _, name := range names {
			if !strings.Contains(answers, name) {
				return fmt.Errorf("%s reaches %s not through the Service: %s", from.Name, name, answers)
			}
		}
	}
	return nil
}
