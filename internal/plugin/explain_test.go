// These tests prove that explain reads a Service from a real API server and compares it with what
// real servers hold. It says why a Service has no rules, and what cannot be asked. The agent's own
// command understands what it is sent and judges the kernel of a real node. The verdict, the marks
// of the steps and the exit code follow from the answers.
package plugin

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agentapp "github.com/slicecast/slicecast/agent/app"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/testenv"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// question is about a Service of default on node-x.
func question(service string) explainQuestion {
	return explainQuestion{
		node: "node-x", name: "default/" + service, service: model.ServiceKey{Namespace: "default", Name: service},
		output: "table", timeout: patience,
	}
}

func TestExplainWithoutAgent(t *testing.T) {
	e := newEnvironment(t)
	e.server("server-1")
	e.service("explained")
	e.nodeWith("node-x", corev1.NodeSystemInfo{OperatingSystem: "linux"})
	admin := plane.Kubeconfig(t, plane.AdminConfig())
	e.eventually(fine, []string{"with 1 endpoint"}, "lacks", "default/explained")
	run := func(args ...string) result { return runAs(t.Context(), admin, append([]string{"explain"}, args...)...) }

	r := run("node-x", "default/explained")
	require.Equal(t, incomplete, r.code, r.errors)
	require.Regexp(t, `(?m)\AWhat node-x does is not known: no Pod of an agent runs there$`, r.out)
	require.Contains(t, r.out, "1. objects in the API server: agrees\n")
	require.Contains(t, r.out, "10.1.2.3 on none, zone none, ready serving\n")
	require.Regexp(t, `2\. servers: agrees\n +slicecast-system/server-1: shard \d+, sequence \d+`, r.out)
	require.Contains(t, r.out, "No Pod with the label k8s-app=kube-proxy runs there in kube-system either")

	// Nodes that still run kube-proxy.
	e.change = func(p *corev1.Pod) { p.Labels = map[string]string{"k8s-app": "kube-proxy"} }
	e.pod(metav1.NamespaceSystem, "kube-proxy-x", "kube-proxy", "kube-proxy", "node-x", nil, corev1.PodRunning)
	require.Contains(t, run("node-x", "default/explained").out, "kube-proxy serves the node: Pod kube-system/kube-proxy-x is Running")

	r = run("node-y", "default/none")
	require.Equal(t, incomplete, r.code)
	require.Contains(t, r.out, "There is no Service default/none\n")
	require.Contains(t, r.out, "! there is no Node node-y: check its name\n")

	services := plane.Client().CoreV1().Services("default")
	for name, s := range map[string]*corev1.Service{
		"headless": {Spec: corev1.ServiceSpec{ClusterIP: corev1.ClusterIPNone, Ports: []corev1.ServicePort{{Port: 80}}}},
		"others": {
			ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"service.kubernetes.io/service-proxy-name": "mesh"}},
			Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
		},
	} {
		s.Name = name
		_, err := services.Create(t.Context(), s, metav1.CreateOptions{})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, services.Delete(context.Background(), name, metav1.DeleteOptions{})) })
	}
	require.Contains(t, run("node-x", "default/headless").out, "No node has rules for default/headless: it is headless, so clients connect")
	require.Contains(t, run("node-x", "default/others").out,
		`Slicecast has no rules for default/others: its label service.kubernetes.io/service-proxy-name says that the proxy "mesh" serves it`)

	require.Contains(t, run("node-x", "web").errors, `"web" is not the name of a Service`)
	require.Contains(t, run("node-x", "default/web", "--from=x").errors, "--from: ")
	r = e.run("explain", "node-x", "default/explained")
	require.Equal(t, incomplete, r.code)
	require.Contains(t, r.errors, "list the EndpointSlices of default/explained")
	require.Contains(t, runAs(t.Context(), admin, "__complete", "--kubeconfig="+admin, "explain", "node-x", "default/e").out, "default/explained\n")
}

// TestExplainBesideKubeProxy proves that a Service of another proxy is no difference, that the
// proxy is named, and that agents learn from the servers' settings which Services are theirs.
func TestExplainBesideKubeProxy(t *testing.T) {
	const label = "service.kubernetes.io/service-proxy-name"
	e := newEnvironment(t)
	account := "system:serviceaccount:" + serverNamespace
	config := plane.ConfigFor(account+":slicecast-server", "system:serviceaccounts", account, "system:authenticated")
	address := e.serverWith("server-1", plane.Kubeconfig(t, config), append(serverArgs(), "--service-proxy-name=slicecast")...)
	e.service("unlabeled")
	e.service("labeled")
	services := plane.Client().CoreV1().Services("default")
	set := fmt.Sprintf(`{"metadata": {"labels": {%q: "slicecast"}}}`, label)
	_, err := services.Patch(t.Context(), "labeled", types.MergePatchType, []byte(set), metav1.PatchOptions{})
	require.NoError(t, err)
	_, err = services.Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "headless"}, Spec: corev1.ServiceSpec{ClusterIP: corev1.ClusterIPNone, Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, services.Delete(context.Background(), "headless", metav1.DeleteOptions{})) })

	pod := e.pod(agentNamespace, "agent-node-0", "slicecast-agent", "agent", "node-0", nil, corev1.PodRunning)
	commands := make(chan string, 100)
	e.kubelet.Exec(agentNamespace, pod.Name, func(command []string) (string, error) {
		commands <- strings.Join(command, " ")
		switch command[1] {
		case "status":
			return `{"status": {"programmer": "nftables"}}`, nil
		case "verify":
			return found(), nil
		}
		if command[2] == "default/labeled" {
			return `{"served": true, "ports": [{"id": "default/labeled:/TCP/IPv4", "endpointCount": 1, "packets": [
				{"frontend": "clusterIP 10.96.0.1:80", "source": "a pod (10.0.0.5)", "wanted": "cluster", "backends": 1, "found": "reaches 1 backend"}]}]}`, nil
		}
		return `{"served": false, "ports": []}`, nil
	})
	e.connect(pod, address, "slicecast", e.caFile(agentNamespace, "slicecast-ca"), "slicecast-server."+serverNamespace+".svc")
	e.eventually(fine, []string{"with 1 endpoint"}, "lacks", "default/labeled")
	e.change = func(p *corev1.Pod) { p.Labels = map[string]string{"k8s-app": "kube-proxy"} }
	e.pod(metav1.NamespaceSystem, "kube-proxy-0", "kube-proxy", "kube-proxy", "node-0", nil, corev1.PodRunning)
	admin := plane.Kubeconfig(t, plane.AdminConfig())
	ran := func(command string) {
		for {
			select {
			case c := <-commands:
				if strings.Contains(c, " "+command+" ") {
					require.Contains(t, c, " --service-proxy-name=slicecast", c)
					return
				}
			default:
				require.Fail(t, "nobody has run "+command)
			}
		}
	}

	r := runAs(t.Context(), admin, "explain", "node-0", "default/unlabeled")
	require.Equal(t, fine, r.code, r.out)
	require.Contains(t, r.out, "Slicecast has no rules for default/unlabeled: the servers serve Services with the label "+label+
		": slicecast, and without it the cluster's default proxy does, such as kube-proxy\n"+
		"kube-proxy serves the node: Pod kube-system/kube-proxy-0 is Running\n")
	require.NotContains(t, r.out, stepDiffers, "it would wait for a change on its way")
	ran("explain")

	r = runAs(t.Context(), admin, "explain", "node-0", "default/labeled")
	require.Equal(t, fine, r.code, r.out)
	require.Contains(t, r.out, "node-0, default/labeled:/TCP/IPv4: reaches 1 of 1 endpoint")
	ran("explain")

	r = runAs(t.Context(), admin, "explain", "node-0", "default/headless")
	require.Equal(t, fine, r.code, r.out)
	require.Contains(t, r.out, "No node has rules for default/headless: it is headless")
	require.NotContains(t, r.out, "kube-proxy serves the node")

	// The flag replaces the servers' settings.
	r = runAs(t.Context(), admin, "explain", "node-0", "default/unlabeled", "--service-proxy-name=other")
	require.Equal(t, fine, r.code, r.out)
	require.Contains(t, r.out, "the servers serve Services with the label "+label+": other")

	r = runAs(t.Context(), admin, "verify", "node-0")
	require.Equal(t, fine, r.code, r.errors+r.out)
	ran("verify")

	// A failure of connectivity is explained in the same way.
	o := &options{kubeconfig: admin, serviceAccount: fleet.DefaultServiceAccount, timeout: patience}
	o.overrides.Context.Namespace = fleet.DefaultNamespace
	f, err := o.fleet()
	require.NoError(t, err)
	defer f.Close()
	run := &connectivityRun{connectivity: &connectivity{options: o}, temporaryNamespace: &temporaryNamespace{fleet: f}}
	results := []scenarioResult{{State: scenarioFailed, Service: "default/unlabeled", Node: "node-0"}}
	run.explain(t.Context(), results)
	require.Len(t, results[0].Reasons, 2, "who serves the Service, and the Pod")
	require.Contains(t, results[0].Reasons[1], "Pod kube-system/kube-proxy-0 is Running")

	// Servers that contradict each other, as in the middle of a change, need the flag.
	e.change = nil
	e.pod(serverNamespace, "server-2", "slicecast-server", "server", "node-0", serverArgs(), corev1.PodRunning)
	const says = "slicecast-system/server-1 has --service-proxy-name=slicecast, and slicecast-system/server-2 has --service-proxy-name=: "
	r = runAs(t.Context(), admin, "explain", "node-0", "default/labeled")
	require.Equal(t, incomplete, r.code)
	require.Contains(t, r.out, "! which Services the servers serve is not known: "+says)
	r = runAs(t.Context(), admin, "verify", "node-0")
	require.Equal(t, incomplete, r.code)
	require.Contains(t, r.errors, says)
	require.Equal(t, fine, runAs(t.Context(), admin, "verify", "node-0", "--service-proxy-name=slicecast").code)
}

// TestExplainOnNode runs the agent's command with the objects of the API server, in a node whose
// kernel has no rules.
func TestExplainOnNode(t *testing.T) {
	e := newEnvironment(t)
	e.service("unprogrammed")
	e.nodeWith("node-x", corev1.NodeSystemInfo{OperatingSystem: "linux"})
	q := question("unprogrammed")
	o, err := readExplained(t.Context(), plane.Client(), q)
	require.NoError(t, err)
	node := testenv.NewNetwork(t).AddNode("a")
	run := func(ctx context.Context, in io.Reader, command ...string) ([]byte, error) {
		if command[1] == "status" {
			return []byte(`{"status": {"programmer": "nftables", "epoch": "7", "shards": [{"shard": 3, "sequence": "8", "programmedSequence": "4"}],
				"byCheckpoint": true, "time": "2026-01-01T00:01:00Z", "staleSince": "2026-01-01T00:00:00Z", "lastError": "connection refused"}}`), nil
		}
		var out bytes.Buffer
		c := agentapp.NewCommand()
		c.SetArgs(append(command[1:], "--", "--node-name=node-x", "--cluster-cidr=10.180.0.0/16"))
		c.SetIn(in)
		c.SetOut(&out)
		err := node.Do(func() error { return c.ExecuteContext(ctx) })
		return out.Bytes(), err
	}
	r := &explainReport{question: q}
	r.objects(o)
	answers := []fleet.Answer[lacking]{{Server: &fleet.Server{}, Value: lacking{
		agents:  agents{status: &pb.GetStatusResponse{Epoch: 7}},
		service: &pb.GetServiceResponse{Shard: 3, Sequence: 8, ChangedSequence: 5},
	}}}
	r.askAgent(t.Context(), o, answers, run)
	require.Equal(t, wrong, r.code())
	text := printed(t, r)
	require.Regexp(t, `\Anode-x, default/unprogrammed:/TCP/IPv4: what comes there is not translated, which is not what was decided\n`+
		`Look at step 2 \(the node's agent\): the node is programmed from the checkpoint`, text)
	require.Contains(t, text, "! it has been in sync with no server for 1m0s: connection refused\n")
	require.Contains(t, text, "! the Service changed at sequence 5, which the node has not programmed yet\n")
	require.Contains(t, text, "should lead to 1 backend of the cluster set, but is not translated")
	require.Contains(t, text, "Flows in conntrack: 0 to the Service")
}

func TestExplainVerdict(t *testing.T) {
	for name, c := range map[string]struct {
		answer  string
		code    int
		verdict string
	}{
		"reaches": {
			`{"served": true, "ports": [{"id": "a/b:/TCP/IPv4", "endpointCount": 3, "packets": [
				{"frontend": "clusterIP 10.96.0.1:80", "source": "a pod (10.0.0.5)", "wanted": "cluster", "backends": 2, "found": "reaches 2 backends"}]}]}`,
			fine, "node-x, a/b:/TCP/IPv4: reaches 2 of 3 endpoints",
		},
		"dropped from outside": {
			`{"served": true, "ports": [{"id": "a/b:/TCP/IPv4", "endpointCount": 1, "packets": [
				{"frontend": "clusterIP 10.96.0.1:80", "source": "a pod (10.0.0.5)", "wanted": "cluster", "backends": 1, "found": "reaches 1 backend"},
				{"frontend": "nodePort 10.0.0.1:30080", "source": "outside (192.0.2.1)", "wanted": "drop", "because": "no local endpoint", "found": "is dropped"}]}]}`,
			wrong, "node-x, a/b:/TCP/IPv4 at nodePort 10.0.0.1:30080 from outside (192.0.2.1): dropped: no local endpoint",
		},
		"kube-proxy's mode leads elsewhere": {
			`{"served": true, "ports": [{"id": "a/b:/TCP/IPv4", "endpointCount": 2, "packets": [
				{"frontend": "nodePort 10.0.0.1:30080", "source": "outside (192.0.2.1)", "wanted": "drop", "because": "no local endpoint", "found": "reaches 2 backends",
				 "deviation": "kube-proxy leads to all"}]}]}`,
			fine, "node-x, a/b:/TCP/IPv4: what comes there reaches 2 backends: kube-proxy leads to all",
		},
		"kube-proxy's mode refuses otherwise": {
			`{"served": true, "ports": [{"id": "a/b:/TCP/IPv4", "packets": [
				{"frontend": "nodePort 10.0.0.1:30080", "source": "outside (192.0.2.1)", "wanted": "reject", "because": "no endpoint", "found": "is dropped",
				 "deviation": "kube-proxy refuses otherwise"}]}]}`,
			wrong, "node-x, a/b:/TCP/IPv4: rejected: no endpoint",
		},
		"another program leads elsewhere": {
			`{"served": true, "unjudged": ["a rule"], "ports": [{"id": "a/b:/TCP/IPv4", "packets": [
				{"frontend": "clusterIP 10.96.0.1:80", "source": "a pod (10.0.0.5)", "wanted": "cluster", "found": "reaches 1 backends", "difference": "it should not",
				 "decidedBy": "rule 1 of chain pre in table ip other (dnat to 10.9.9.9)"}]}]}`,
			wrong, "node-x, a/b:/TCP/IPv4: what comes there reaches 1 backends, which is not what was decided; see rule 1 of chain pre in table ip other " +
				"(dnat to 10.9.9.9), which is another program's\nLook at step 2 (the kernel, compared with the decision): it should not\n",
		},
		"an answer is dropped": {
			`{"served": true, "ports": [{"id": "a/b:/TCP/IPv4", "packets": [
				{"frontend": "clusterIP 10.96.0.1:80", "source": "a pod (10.0.0.5)", "wanted": "cluster", "found": "reaches 1 backend",
				 "refusedBy": ["the answer of 10.0.0.7:80 is dropped by rule 1 of chain f in table ip other (drop)"]}]}]}`,
			wrong, "node-x, a/b:/TCP/IPv4: the answer of 10.0.0.7:80 is dropped by rule 1 of chain f in table ip other (drop), which the proxy has not set\n",
		},
		"stale flows": {
			`{"served": true, "ports": [{"id": "a/b:/UDP/IPv4", "packets": [], "flows": {"total": 3, "stale": 1}}]}`,
			wrong, "Look at step 2 (the kernel, compared with the decision): 1 of 3 flows of a/b:/UDP/IPv4 in conntrack lead to no backend",
		},
		"IPVS": {
			`{"served": true, "unjudged": ["IPVS"], "ports": [{"id": "a/b:/TCP/IPv4", "packets": [
				{"wanted": "reject", "because": "no endpoint"}]}]}`,
			incomplete, "node-x, a/b:/TCP/IPv4: what the kernel does is not known; decided is reject: no endpoint",
		},
		"no such port": {
			`{"served": false, "ports": []}`, wrong, "node-x has no rules for default/b: the Service has no such port or family",
		},
		"another version": {`unknown command`, incomplete, "What the kernel does is not known: the agent has not printed"},
	} {
		t.Run(name, func(t *testing.T) {
			r := &explainReport{question: question("b")}
			o := &explained{service: &corev1.Service{}, node: &corev1.Node{}}
			r.askAgent(t.Context(), o, nil, func(_ context.Context, _ io.Reader, command ...string) ([]byte, error) {
				if command[1] == "status" {
					return []byte(`{"status": {"programmer": "nftables"}}`), nil
				}
				return []byte(c.answer), nil
			})
			require.Equal(t, c.code, r.code(), r.steps)
			require.Contains(t, printed(t, r), c.verdict)
		})
	}
}
