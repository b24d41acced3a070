// These tests prove that check counts a kube-proxy as a failure only where an agent programs the
// same Services. Wherever a node needs its kube-proxy, check says so and does not advise to remove
// it.
package plugin

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// kubeProxyLabels are those of kube-proxy's Pods.
var kubeProxyLabels = map[string]string{"k8s-app": "kube-proxy"}

// settings creates a ConfigMap, and removes it at the end of the test.
func (e *environment) settings(namespace, name, key, content string) {
	e.Helper()
	maps := plane.Client().CoreV1().ConfigMaps(namespace)
	_, err := maps.Create(e.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{key: content}}, metav1.CreateOptions{})
	require.NoError(e, err)
	e.Cleanup(func() { require.NoError(e, maps.Delete(context.Background(), name, metav1.DeleteOptions{})) })
}

// configured returns a function that gives a Pod a command line and, if there is a name, the
// ConfigMap of this name as the folder /config.
func configured(name string, args ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		c := &p.Spec.Containers[0]
		c.Args = append(c.Args, args...)
		if name != "" {
			source := &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: name}}
			p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "config", VolumeSource: corev1.VolumeSource{ConfigMap: source}})
			c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "config", MountPath: "/config"})
		}
	}
}

func TestCheckOfKubeProxies(t *testing.T) {
	e := newEnvironment(t)
	address := e.server("server-1")
	e.settings(agentNamespace, "slicecast-config", "agent.yaml", "besideKubeProxy: true\n")
	agentWith := func(node, programmer string, change func(*corev1.Pod)) *agent {
		e.programmer, e.change = programmer, change
		defer func() { e.programmer, e.change = "", nil }()
		return e.agent(node, address)
	}
	agentWith("shadow", "shadow", nil)
	agentWith("beside", "nftables", configured("slicecast-config", "--config=/config/agent.yaml"))
	e.nodeWith("waits", corev1.NodeSystemInfo{OperatingSystem: "linux"})
	e.pod(agentNamespace, "agent-waits", "slicecast-agent", "agent", "waits", nil, corev1.PodPending)
	e.nodeWith("before", corev1.NodeSystemInfo{OperatingSystem: "linux"})
	for _, node := range []string{"shadow", "beside", "waits", "before"} {
		e.hostPod("kube-proxy-"+node, node, 10256, kubeProxyLabels)
	}
	// The node whose agent does not run is a failure by itself, and none of kube-proxy's.
	r := e.eventually(wrong, []string{"WARNING: other proxies: waits: a kube-proxy runs"}, "check", "-o", "wide")
	for _, text := range []string{
		`other proxies +shadow +a kube-proxy runs, and the agent programs nothing, so the node needs it`,
		`other proxies +beside +a kube-proxy runs beside the agent, as it is meant to \(besideKubeProxy\)`,
		`other proxies +before +a kube-proxy runs and no agent, so the node needs it`,
		`waits: a kube-proxy runs, and its agent is in the state "agent not running: Pending"\n +do +keep kube-proxy until`,
	} {
		require.Regexp(t, text, r.out)
	}
	require.NotContains(t, r.out, "FAILED: other proxies")
	require.NotContains(t, r.out, removeKubeProxy)

	// These have two proxies for the same Services: one agent says so, and of others the settings do.
	warns := agentWith("warns", "nftables", configured("", "--beside-kube-proxy=false"))
	require.NoError(t, warns.send(&pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{
		Key:     &pb.ObjectKey{Kind: pb.ObjectKind_OBJECT_KIND_NODE, Name: "warns"},
		Warning: pb.NodeWarning_NODE_WARNING_KUBE_PROXY, Reason: "kube-proxy runs here",
	}}}))
	agentWith("moved", "nftables", configured("slicecast-config", "--config=/config/agent.yaml", "--beside-kube-proxy=false"))
	for _, node := range []string{"warns", "moved"} {
		e.hostPod("kube-proxy-"+node, node, 10256, kubeProxyLabels)
	}
	r = e.eventually(wrong, []string{"FAILED: other proxies: warns: kube_proxy: kube-proxy runs here"}, "check", "-o", "wide")
	require.Contains(t, r.out, "FAILED: other proxies: moved: a kube-proxy runs, and the agent programs the same Services\n  do   "+removeKubeProxy)
	require.NotContains(t, r.out, "warns: a kube-proxy runs", "it is one failure")
	require.NotRegexp(t, `FAILED: other proxies: .*(shadow|beside|before|waits)`, r.out)
}

// TestServedServices checks what is known of an agent by its status and by its Pod's settings.
func TestServedServices(t *testing.T) {
	e := newEnvironment(t)
	e.settings(agentNamespace, "chosen", "c.yaml", "serviceProxyName: slicecast\nprogrammer: nftables\n")
	e.settings(agentNamespace, "shadows", "c.yaml", "programmer: shadow\n")
	e.settings(agentNamespace, "broken", "c.yaml", "{")
	o := &options{kubeconfig: plane.Kubeconfig(t, plane.AdminConfig()), serviceAccount: fleet.DefaultServiceAccount, timeout: patience}
	o.overrides.Context.Namespace = fleet.DefaultNamespace
	f, err := o.fleet()
	require.NoError(t, err)
	defer f.Close()
	const file = "--config=/config/c.yaml"
	for name, test := range map[string]struct {
		change func(*corev1.Pod)
		want   services
		fails  string
	}{
		"nothing is set":               {configured(""), allServices, ""},
		"the name of a proxy":          {configured("", "--service-proxy-name", "x"), chosenServices, ""},
		"beside kube-proxy":            {configured("", "--beside-kube-proxy"), chosenServices, ""},
		"by the file":                  {configured("chosen", file), chosenServices, ""},
		"a shadow by the file":         {configured("shadows", file), noServices, ""},
		"a flag wins over the file":    {configured("shadows", file, "--programmer=ipvs"), allServices, ""},
		"no file where the flag says":  {configured("chosen", "--config=/config/other.yaml"), unknownServices, "has no key other.yaml"},
		"a file that is no YAML":       {configured("broken", file), unknownServices, "c.yaml of the ConfigMap slicecast-agents/broken"},
		"no such ConfigMap":            {configured("missing", file), unknownServices, "not found"},
		"a file of no ConfigMap":       {configured("chosen", "--config=/etc/c.yaml"), unknownServices, "is in no ConfigMap"},
		"a folder with a like name":    {configured("chosen", "--config=/configs/c.yaml"), unknownServices, "is in no ConfigMap"},
		"a file by another name there": {renamed(configured("chosen", "--config=/config/other.yaml")), chosenServices, ""},
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: agentNamespace, Name: "agent-x"}, Spec: corev1.PodSpec{Containers: make([]corev1.Container, 1)}}
		test.change(pod)
		n := &node{Node: "x"}
		served, err := settingsReader{f.ConfigFiles()}.served(t.Context(), n, &nodesReport{pods: []*fleet.Agent{{Node: "x", Pod: pod}}})
		require.Equal(t, test.want, served, name)
		if test.fails == "" {
			require.NoError(t, err, name)
		} else {
			require.ErrorContains(t, err, test.fails, name)
		}
	}
	served, err := settingsReader{f.ConfigFiles()}.served(t.Context(), &node{Node: "x"}, &nodesReport{})
	require.NoError(t, err)
	require.Equal(t, unknownServices, served, "the agent runs in no Pod")
}

// renamed returns a function that changes a Pod with the key c.yaml as other.yaml.
func renamed(change func(*corev1.Pod)) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		change(p)
		p.Spec.Volumes[0].ConfigMap.Items = []corev1.KeyToPath{{Key: "c.yaml", Path: "other.yaml"}}
	}
}

// TestCheckOfOtherProxies checks that another proxy is a failure only if an agent may program the
// same Services, and that only Pods that run in the network of their nodes are evidence of one.
func TestCheckOfOtherProxies(t *testing.T) {
	pod := func(namespace, app string, phase corev1.PodPhase, args ...string) corev1.Pod {
		return corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: app + "-x", Labels: map[string]string{"k8s-app": app},
				OwnerReferences: []metav1.OwnerReference{{Name: app, Controller: new(true)}},
			},
			Spec:   corev1.PodSpec{HostNetwork: true, Containers: []corev1.Container{{Args: args}}},
			Status: corev1.PodStatus{Phase: phase},
		}
	}
	router := pod("kube-system", "kube-router", corev1.PodRunning)
	set := func(app string) appsv1.DaemonSet {
		return appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "tenant", Name: app, Labels: map[string]string{"k8s-app": app}}}
	}
	tenants := []appsv1.DaemonSet{set("cilium"), set("kube-router")}
	shadow := node{Node: "a", State: programmed, agent: &pb.AgentStatus{Programmer: "shadow"}}
	programs := node{Node: "b", State: programmed, agent: &pb.AgentStatus{Programmer: "nftables"}}
	agents := &nodesReport{nodes: []node{shadow, programs}}
	for name, test := range map[string]struct {
		nodes *nodesReport
		host  []corev1.Pod
		want  string
	}{
		"before the installation":    {nil, []corev1.Pod{router, router}, failed},
		"shadows only":               {&nodesReport{nodes: []node{shadow}}, []corev1.Pod{router}, passed},
		"an agent that programs":     {agents, []corev1.Pod{router}, failed},
		"the nodes of a relay":       {&nodesReport{relays: []node{{}}}, []corev1.Pod{router}, failed},
		"agents that are not listed": {&nodesReport{agentsErr: errors.New("forbidden")}, []corev1.Pod{router}, failed},
		"DaemonSets of tenants":      {agents, nil, passed},
		"a Pod that does not run":    {agents, []corev1.Pod{pod("tenant", "kube-router", corev1.PodPending)}, passed},
		"a router without a proxy":   {agents, []corev1.Pod{pod("kube-system", "kube-router", corev1.PodRunning, "--run-service-proxy=false")}, passed},
	} {
		out := &checks{}
		(&cluster{host: test.host, sets: tenants}).checkProxies(t.Context(), out, test.nodes)
		require.Len(t, out.list, 1, name)
		require.Equal(t, test.want, out.list[0].Result, name)
		if test.want == failed {
			require.Contains(t, out.list[0].Do, "once agents have programmed its nodes", name)
			require.Equal(t, "kube-system/kube-router", out.list[0].Subject, name)
		}
	}
}

// TestUnknownProxyHidesNoOther checks that a proxy whose settings cannot be read is not the end of
// the check.
func TestUnknownProxyHidesNoOther(t *testing.T) {
	e := newEnvironment(t)
	e.hostPod("a-cilium", "node-0", 1, map[string]string{"k8s-app": "cilium"}) // has no ConfigMap
	e.hostPod("kube-router", "node-0", 2, map[string]string{"k8s-app": "kube-router"})
	r := runAs(t.Context(), plane.Kubeconfig(t, plane.AdminConfig()), "check", "--pre")
	require.Regexp(t, `NOT CHECKED: other proxies: slicecast-agents/a-cilium: .*cilium-config`, r.out)
	require.Contains(t, r.out, "FAILED: other proxies: slicecast-agents/kube-router: kube-router serves Services, too")
}
