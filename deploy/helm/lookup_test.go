// These tests prove what the chart finds in a cluster, in which order, and what it says if it finds
// nothing. Helm asks a real API server, which has what kubeadm, kube-proxy and the API server
// itself would have created, or parts of it.
package helm

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
)

// seed is what a cluster has. Empty fields do not exist.
type seed struct {
	kubeadm, kubeconfig, kubeProxy string
	endpoints                      []string
	installed                      map[string]string
	nodes                          map[string][]string
}

const (
	kubeadm = "apiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\n" +
		"controlPlaneEndpoint: cp.example.com:8443\nnetworking: {podSubnet: \"10.1.0.0/16,fd00:1::/56\"}\n"
	kubeconfig = "apiVersion: v1\nkind: Config\nclusters: [{name: default, cluster: {server: \"https://lb.example.com\"}}]\n"
	kubeProxy  = "kind: KubeProxyConfiguration\nclusterCIDR: 10.2.0.0/16\n"
)

// create creates what the cluster has until the end of the test.
func (s seed) create(t *testing.T) {
	t.Helper()
	client := cluster.Client()
	configMap := func(namespace, name string, data map[string]string) {
		// Helm replaces only what it owns.
		owned := metav1.ObjectMeta{
			Name: name, Labels: map[string]string{"app.kubernetes.io/managed-by": "Helm"},
			Annotations: map[string]string{"meta.helm.sh/release-name": "slicecast", "meta.helm.sh/release-namespace": "kube-system"},
		}
		_, err := client.CoreV1().ConfigMaps(namespace).Create(t.Context(), &corev1.ConfigMap{ObjectMeta: owned, Data: data}, metav1.CreateOptions{})
		require.NoError(t, err)
		t.Cleanup(func() {
			require.NoError(t, client.CoreV1().ConfigMaps(namespace).Delete(context.Background(), name, metav1.DeleteOptions{}))
		})
	}
	if s.kubeadm != "" {
		configMap("kube-system", "kubeadm-config", map[string]string{"ClusterConfiguration": s.kubeadm})
	}
	if s.kubeconfig+s.kubeProxy != "" {
		configMap("kube-system", "kube-proxy", map[string]string{"kubeconfig.conf": s.kubeconfig, "config.conf": s.kubeProxy})
	}
	if s.installed != nil {
		configMap("default", "slicecast-config", s.installed)
	}
	for name, ranges := range s.nodes {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{PodCIDRs: ranges}}
		if len(ranges) > 0 {
			node.Spec.PodCIDR = ranges[0]
		}
		_, err := client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{})
		require.NoError(t, err)
		t.Cleanup(func() {
			require.NoError(t, client.CoreV1().Nodes().Delete(context.Background(), name, metav1.DeleteOptions{}))
		})
	}
	if len(s.endpoints) == 0 {
		return
	}
	slices := client.DiscoveryV1().EndpointSlices("default")
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "kubernetes"},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("https"), Port: ptr.To(int32(6443))}},
	}
	for _, address := range s.endpoints {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{address}})
	}
	_, err := slices.Create(t.Context(), slice, metav1.CreateOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, slices.Delete(context.Background(), "kubernetes", metav1.DeleteOptions{})) })
}

// renderInCluster renders the chart with lookups. Its agents are in a namespace that exists.
func renderInCluster(t *testing.T, kubeconfig string, flags ...string) (string, error) {
	t.Helper()
	return helm(t, append([]string{
		"template", "slicecast", chart, "--namespace=kube-system", "--dry-run=server", "--kubeconfig=" + kubeconfig,
		"--set=namespaces.agents=default,namespaces.create=false",
	}, flags...)...)
}

// installed is what an earlier install has left.
var installed = map[string]string{"apiServerHost": "fd00::7", "apiServerPort": "1234", "agent.yaml": "clusterCIDR: 10.7.0.0/16\n"}

// byNodes is the same of an install that has found podCIDRs on all Nodes.
var byNodes = map[string]string{"apiServerHost": "fd00::7", "apiServerPort": "1234", "agent.yaml": "detectLocalMode: NodeCIDR\n"}

// lookups are clusters and values, and what is found in them: the address of the API server, and
// the ranges or else the mode.
var lookups = map[string]struct {
	seed
	set                      []string
	host, port, ranges, mode string
}{
	"values before everything": {
		seed: seed{kubeadm: kubeadm, installed: installed},
		set:  []string{"--set=apiServer=[fd00::9]:443", "--set=podCIDRs={10.9.0.0/16}"},
		host: "fd00::9", port: "443", ranges: "10.9.0.0/16",
	},
	"an earlier install before the cluster": {
		seed: seed{kubeadm: kubeadm, installed: installed},
		host: "fd00::7", port: "1234", ranges: "10.7.0.0/16",
	},
	"kubeadm before kube-proxy": {
		seed: seed{kubeadm: kubeadm, kubeconfig: kubeconfig, kubeProxy: kubeProxy},
		host: "cp.example.com", port: "8443", ranges: "10.1.0.0/16,fd00:1::/56",
	},
	"an endpoint without a port": {
		seed: seed{kubeadm: "controlPlaneEndpoint: \"10.0.0.5\"\nnetworking: {podSubnet: 10.1.0.0/16}"},
		host: "10.0.0.5", port: "6443", ranges: "10.1.0.0/16",
	},
	"kube-proxy where kubeadm tells nothing": {
		seed: seed{kubeadm: "networking: {serviceSubnet: 10.96.0.0/16}", kubeconfig: kubeconfig, kubeProxy: kubeProxy},
		host: "lb.example.com", port: "443", ranges: "10.2.0.0/16",
	},
	"IPv6": {
		seed: seed{kubeconfig: "clusters: [{cluster: {server: \"https://[fd00::5]:6443/\"}}]", kubeProxy: "clusterCIDR: fd00:2::/56"},
		host: "fd00::5", port: "6443", ranges: "fd00:2::/56",
	},
	"the only API server, and the ranges of all Nodes": {
		seed: seed{
			kubeconfig: "clusters: [{cluster: {server: \"https://127.0.0.1:6443\"}}]", kubeProxy: "clusterCIDR: \"\"",
			endpoints: []string{"192.168.0.5"}, nodes: map[string][]string{"a": {"10.3.0.0/24"}, "b": {"10.3.1.0/24"}},
		},
		host: "192.168.0.5", port: "6443", mode: "NodeCIDR",
	},
	"an earlier install by the ranges of Nodes before the cluster": {
		seed: seed{kubeadm: kubeadm, kubeProxy: kubeProxy, installed: byNodes},
		host: "fd00::7", port: "1234", mode: "NodeCIDR",
	},
	"an earlier install by the ranges of Nodes, and a Node that has none yet": {
		seed: seed{installed: byNodes, nodes: map[string][]string{"a": {"10.3.0.0/24"}, "b": nil}},
		host: "fd00::7", port: "1234", mode: "NodeCIDR",
	},
	"values before an earlier install by the ranges of Nodes": {
		seed: seed{installed: byNodes}, set: []string{"--set=podCIDRs={10.9.0.0/16}"},
		host: "fd00::7", port: "1234", ranges: "10.9.0.0/16",
	},
	"another mode needs no ranges": {
		seed: seed{kubeconfig: kubeconfig},
		set:  []string{"--set=agent.config.detectLocalMode=BridgeInterface,agent.config.detectLocal.bridgeInterface=cni0"},
		host: "lb.example.com", port: "443", mode: "BridgeInterface",
	},
}

func TestLookups(t *testing.T) {
	admin := cluster.Kubeconfig(t, cluster.AdminConfig())
	for name, test := range lookups {
		t.Run(name, func(t *testing.T) {
			test.create(t)
			out, err := renderInCluster(t, admin, test.set...)
			require.NoError(t, err)
			objects := decode(t, out)
			for _, namespace := range []string{"default", "slicecast-system"} {
				data, _, err := unstructured.NestedStringMap(find(t, objects, "ConfigMap", namespace, "slicecast-config").Object, "data")
				require.NoError(t, err)
				require.Equal(t, test.host, data["apiServerHost"])
				require.Equal(t, test.port, data["apiServerPort"])
			}
			agent := settings(t, objects, "default")
			require.Equal(t, test.ranges, ptr.Deref(agent.ClusterCIDR, ""))
			require.Equal(t, test.mode, ptr.Deref(agent.DetectLocalMode, ""))
		})
	}
}

func TestLookupsThatFail(t *testing.T) {
	admin := cluster.Kubeconfig(t, cluster.AdminConfig())
	stranger := cluster.Kubeconfig(t, cluster.ConfigFor("stranger"))
	const address, ranges = "--set=apiServer=api.example.com:6443", "--set=podCIDRs={10.244.0.0/16}"
	for name, test := range map[string]struct {
		seed
		kubeconfig string
		set        []string
		says       []string
	}{
		"no address": {
			seed{kubeProxy: kubeProxy},
			admin, []string{ranges}, []string{"apiServer is not set and was not found", "--set apiServer=api.example.com:6443"},
		},
		"several API servers": {
			seed{endpoints: []string{"192.168.0.5", "192.168.0.6"}},
			admin, []string{ranges}, []string{"several API servers (192.168.0.5:6443, 192.168.0.6:6443)", "--set apiServer="},
		},
		"no ranges": {
			seed{kubeadm: "controlPlaneEndpoint: \"10.0.0.5\""},
			admin, []string{address}, []string{"podCIDRs is not set and was not found", "--set 'podCIDRs={10.244.0.0/16"},
		},
		"a Node without ranges": {
			seed{nodes: map[string][]string{"a": {"10.3.0.0/24"}, "b": nil}},
			admin, []string{address}, []string{"podCIDRs is not set and was not found"},
		},
		"no right to look": {
			seed{kubeadm: kubeadm},
			stranger, nil, []string{"forbidden", "slicecast.apiServer"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			test.create(t)
			_, err := renderInCluster(t, test.kubeconfig, test.set...)
			for _, says := range test.says {
				require.ErrorContains(t, err, says)
			}
		})
	}
	t.Run("no cluster", func(t *testing.T) {
		_, err := helm(t, "template", "slicecast", chart, "--namespace=kube-system", ranges)
		require.ErrorContains(t, err, "no cluster was asked")
	})
}
