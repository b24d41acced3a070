// These tests prove what the commands show of several servers, relays and agents, that nothing that
// was not asked is left out in silence, and that the rights of the manifests suffice for it.
package plugin

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/plugin/fleet"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

func TestStatus(t *testing.T) {
	e := newEnvironment(t)
	e.server("server-1")
	e.server("server-2")
	r := e.eventually(fine, []string{"slicecast-system/server-1", "slicecast-system/server-2", "serving"}, "status")
	require.Empty(t, r.errors)
	require.Contains(t, e.eventually(fine, nil, "status", "-o", "wide").out, "127.0.0.1")

	var status struct {
		Servers []struct {
			Namespace, Name, Node string
			Relay                 bool
			Status                struct {
				Source struct{ Synced bool }
				Epoch  string
			}
		}
		Problems []problem
	}
	r = e.eventually(fine, nil, "status", "-o", "json")
	require.NoError(t, json.Unmarshal([]byte(r.out), &status))
	require.Len(t, status.Servers, 2)
	require.Equal(t, "server-1", status.Servers[0].Name)
	require.Equal(t, "node-0", status.Servers[0].Node)
	require.True(t, status.Servers[0].Status.Source.Synced)
	require.NotEqual(t, status.Servers[0].Status.Epoch, status.Servers[1].Status.Epoch)
	require.NotNil(t, status.Problems)
	require.Contains(t, e.run("status", "-o", "yaml").out, "\n  name: server-2\n")
}

// TestWhatIsNotAskedIsNamed checks a server of each kind that cannot be asked, beside one that can.
func TestWhatIsNotAskedIsNamed(t *testing.T) {
	e := newEnvironment(t)
	e.server("server-1")
	e.eventually(fine, nil, "status")
	e.pod(serverNamespace, "pending", "slicecast-server", "server", "", serverArgs(), corev1.PodPending)
	e.pod(serverNamespace, "refusing", "slicecast-server", "server", "node-0", serverArgs(), corev1.PodRunning)
	e.pod(serverNamespace, "silent", "slicecast-server", "server", "node-0", serverArgs(), corev1.PodRunning)
	e.kubelet.Serve(serverNamespace, "silent", 8472, e.silent())
	e.pod(serverNamespace, "nameless", "slicecast-server", "server", "node-0", []string{"--source=kube"}, corev1.PodRunning)
	e.pod(serverNamespace, "ended", "slicecast-server", "server", "node-0", serverArgs(), corev1.PodFailed)

	r := e.run("status", "--timeout=2s")
	require.Equal(t, incomplete, r.code, r.out)
	require.Contains(t, r.out, "slicecast-system/server-1  server  serving")
	require.Contains(t, r.out, "Not asked: 4 of 5 servers")
	for pod, reason := range map[string]string{
		"pending": "the Pod is Pending", "refusing": "failed to connect to slicecast-system/refusing:8472",
		"silent": "no answer within 2s (--timeout), although the Pod runs: the server or its node hangs, or the way to it does; see kubectl logs -n slicecast-system silent", "nameless": "set the Pod's annotation slicecast.io/server-name",
	} {
		require.Regexp(t, "\nslicecast-system/"+pod+` +[^\n]*`+strings.NewReplacer("(", `\(`, ")", `\)`).Replace(reason), r.out)
	}
	require.NotContains(t, r.out, "ended")
	r = e.run("status", "--timeout=2s", "-o", "json")
	require.Equal(t, incomplete, r.code)
	require.Contains(t, r.out, `"error": "the Pod is Pending"`)
	for _, args := range [][]string{{"nodes"}, {"changes"}, {"lacks", "default/kubernetes"}} {
		r := e.run(append(args, "--timeout=2s")...)
		require.Equal(t, incomplete, r.code, r.out)
		require.Regexp(t, `\ANot asked: 4 of 5 servers\n`, r.out, "before what lacks their answers")
	}
}

// TestInterrupt checks that Ctrl-C ends everything at once.
func TestInterrupt(t *testing.T) {
	e := newEnvironment(t)
	e.pod(serverNamespace, "silent", "slicecast-server", "server", "node-0", serverArgs(), corev1.PodRunning)
	e.server("server-1") // it publishes the CAs
	e.caFile(serverNamespace, "slicecast-ca")
	accepted := make(chan struct{})
	e.kubelet.Serve(serverNamespace, "silent", 8472, e.signaling(accepted))
	ctx, interrupt := context.WithCancel(t.Context())
	go func() {
		<-accepted
		interrupt()
	}()
	began := time.Now()
	r := runAs(ctx, e.kubeconfig, "status", "--timeout=5m")
	require.Equal(t, incomplete, r.code)
	require.Contains(t, r.errors, "context canceled")
	require.Less(t, time.Since(began), patience)
}

// TestRights checks that a user who lacks a right is told which.
func TestRights(t *testing.T) {
	e := newEnvironment(t)
	e.server("server-1")
	e.eventually(fine, nil, "status")
	nobody := plane.Kubeconfig(t, plane.ConfigFor("nobody"))
	r := runAs(t.Context(), nobody, "status")
	require.Equal(t, incomplete, r.code)
	require.Empty(t, r.out)
	require.Contains(t, r.errors, `User "nobody" cannot list resource "pods"`)
	require.Contains(t, r.errors, "docs/kubectl.md")

	// A token of another ServiceAccount is refused by the server.
	r = e.run("status", "--service-account=default")
	require.Equal(t, incomplete, r.code)
	require.Contains(t, r.out, `cannot create resource "serviceaccounts/token"`)
	accounts := plane.Client().CoreV1().ServiceAccounts(serverNamespace)
	_, err := accounts.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "other"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, accounts.Delete(t.Context(), "other", metav1.DeleteOptions{})) }()
	admin := plane.Kubeconfig(t, plane.AdminConfig())
	r = runAs(t.Context(), admin, "status", "--service-account=missing")
	require.Contains(t, r.out, `serviceaccounts "missing" not found; upgrade the chart`)
	r = runAs(t.Context(), admin, "status", "--service-account=other")
	require.Equal(t, incomplete, r.code)
	require.Contains(t, r.out, `does not allow "system:serviceaccount:slicecast-system:other" to post "/slicecast.v1.DebugService/GetStatus"`)
}

// TestRightsOfTheServersNamespace checks a user who may not list Pods elsewhere.
func TestRightsOfTheServersNamespace(t *testing.T) {
	e := newEnvironment(t)
	e.agent("node-a", e.server("server-1"))
	e.eventually(fine, nil, "status")
	rbac := plane.Client().RbacV1()
	bind := func(role string, rules ...rbacv1.PolicyRule) {
		if rules != nil {
			_, err := rbac.Roles(serverNamespace).Create(t.Context(), &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: role}, Rules: rules}, metav1.CreateOptions{})
			require.NoError(t, err)
			t.Cleanup(func() {
				require.NoError(t, rbac.Roles(serverNamespace).Delete(context.Background(), role, metav1.DeleteOptions{}))
			})
		}
		name := "narrow-" + role
		_, err := rbac.RoleBindings(serverNamespace).Create(t.Context(), &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "narrow"}},
		}, metav1.CreateOptions{})
		require.NoError(t, err)
		t.Cleanup(func() {
			require.NoError(t, rbac.RoleBindings(serverNamespace).Delete(context.Background(), name, metav1.DeleteOptions{}))
		})
	}
	bind("slicecast-kubectl")
	bind("pods", rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"list"}})
	narrow := plane.Kubeconfig(t, plane.ConfigFor("narrow"))
	require.Eventually(t, func() bool { return runAs(t.Context(), narrow, "status").code == fine }, patience, tick)
	r := runAs(t.Context(), narrow, "nodes")
	require.Equal(t, incomplete, r.code)
	require.Contains(t, r.out, "node-a  programmed")
	require.Contains(t, r.out, "Nodes that are not connected are not shown: find the agents: pods is forbidden")
}

// TestAgentsThatDoNotRun checks that a node whose agent's Pod does not run is behind, in whatever
// phase the Pod is.
func TestAgentsThatDoNotRun(t *testing.T) {
	e := newEnvironment(t)
	e.agent("node-a", e.server("server-1"))
	e.eventually(fine, nil, "nodes", "node-a")
	agent := func(name, node string, phase corev1.PodPhase) *corev1.Pod {
		return e.pod(agentNamespace, name, "slicecast-agent", "agent", node, nil, phase)
	}
	// node-a has an earlier Pod, too, and node-c has a successor that is about to start.
	agent("evicted-a", "node-a", corev1.PodFailed)
	agent("failed-b", "node-b", corev1.PodFailed)
	agent("failed-c", "node-c", corev1.PodFailed)
	pending := agent("pending-c", "node-c", corev1.PodPending)
	pending.Status.ContainerStatuses = []corev1.ContainerStatus{{
		Name: "agent", Image: "none", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff"}},
	}}
	_, err := plane.Client().CoreV1().Pods(agentNamespace).UpdateStatus(t.Context(), pending, metav1.UpdateOptions{})
	require.NoError(t, err)
	agent("unscheduled", "", corev1.PodPending)

	for _, args := range [][]string{{"nodes"}, {"nodes", "--behind"}, {"lacks", "default/kubernetes"}} {
		r := e.run(args...)
		require.Equal(t, wrong, r.code, r.out+r.errors)
		require.Regexp(t, "\nnode-b +agent not running: Failed ", r.out)
		require.Regexp(t, "\nnode-c +agent not running: Pending, ImagePullBackOff ", r.out)
		require.Regexp(t, "(?m)(^3 nodes|^2 nodes|: 2)$", r.out)
		require.NotContains(t, r.out, "node-a  agent not running")
	}
	r := e.run("check")
	require.Equal(t, wrong, r.code, r.out)
	require.Contains(t, r.out, "FAILED: nodes: node-b: agent not running: Failed; the node keeps")
	require.Contains(t, r.out, "FAILED: nodes: node-c: agent not running: Pending, ImagePullBackOff; the node keeps")
}

// TestPodsOfTenants checks that Pods of other namespaces are no servers, whatever their labels and
// flags are, unless the user asks for those of all namespaces.
func TestPodsOfTenants(t *testing.T) {
	e := newEnvironment(t)
	e.agent("node-a", e.server("server-1"))
	tenant := plane.Namespace(t)
	e.pod(tenant, "silent", "default", "server", "node-0", []string{"--agent-service-account=" + tenant + "/default"}, corev1.PodRunning)
	e.pod(tenant, "trap", "default", "agent", "node-0", nil, corev1.PodRunning)

	r := e.eventually(fine, []string{"node-a  programmed"}, "nodes")
	require.NotContains(t, r.out, tenant)
	require.NotContains(t, e.eventually(fine, nil, "status").out, tenant)
	require.Contains(t, e.run("agent", "node-0").out, "no Pod of an agent is on the node")

	r = e.run("status", "-A", "--timeout=2s")
	require.Equal(t, incomplete, r.code, r.out)
	require.Contains(t, r.out, "slicecast-system/server-1")
	require.Regexp(t, "\n"+tenant+"/silent +the name in its certificate is unknown", r.out)
	r = e.run("status", "-n", tenant)
	require.Equal(t, incomplete, r.code, r.out)
	require.NotContains(t, r.out, "slicecast-system/server-1")
	require.Contains(t, e.run("status", "-A", "-n", tenant).errors, "all-namespaces")
	require.Contains(t, e.run("status", "--namespace=").errors, "--namespace is empty")
}

func TestNoServers(t *testing.T) {
	e := newEnvironment(t)
	r := e.run("status")
	require.Equal(t, incomplete, r.code)
	require.Contains(t, r.errors, "no servers: there is no Pod with the labels")
	for args, says := range map[string]string{
		"status --timeout=0s": "--timeout is 0s", "status -o xml": "use table, wide, json or yaml",
		"lacks web": "use NAMESPACE/SERVICE", "status --context=none": "context", "no-such-command": "--help",
	} {
		r := e.run(strings.Fields(args)...)
		require.Equal(t, incomplete, r.code, args)
		require.Contains(t, r.errors, says, args)
	}
}

func TestNodes(t *testing.T) {
	e := newEnvironment(t)
	first, second := e.server("server-1"), e.server("server-2")
	e.agent("node-a", first)
	b := e.agent("node-b", second)
	e.agentPod("node-c")

	r := e.eventually(wrong, []string{"node-a  programmed", "node-b  programmed", "node-c  not connected"}, "nodes")
	require.Contains(t, r.out, "3 nodes\n")
	require.Regexp(t, `node-a +programmed .*slicecast-system/server-1`, r.out)
	require.Regexp(t, `node-b +programmed .*slicecast-system/server-2`, r.out)
	require.Equal(t, fine, e.run("nodes", "node-a", "node-b").code)
	r = e.run("nodes", "node-a", "node-z")
	require.Equal(t, wrong, r.code)
	require.Contains(t, r.out, "No such node: node-z")
	r = e.run("nodes", "--behind")
	require.NotContains(t, r.out, "node-a")
	require.Contains(t, r.out, "node-c")
	require.Equal(t, fine, e.run("nodes", "--errors").code)

	// node-b moves to the other server, which is the newer one of its two streams for a moment.
	pod, err := plane.Client().CoreV1().Pods(agentNamespace).Get(t.Context(), "agent-node-b", metav1.GetOptions{})
	require.NoError(t, err)
	e.connect(pod, first, "slicecast", e.caFile(agentNamespace, "slicecast-ca"), "slicecast-server.slicecast-system.svc")
	r = e.eventually(fine, []string{"1 node\n"}, "nodes", "node-b")
	require.Contains(t, r.out, "server-1")
	b.stop()

	// Of a node that follows a server that cannot be asked, nobody knows.
	e.pod(serverNamespace, "refusing", "slicecast-server", "server", "node-0", serverArgs(), corev1.PodRunning)
	r = e.run("nodes")
	require.Equal(t, incomplete, r.code)
	require.Contains(t, r.out, "node-c  unknown")
}

func TestChangesAndLacks(t *testing.T) {
	e := newEnvironment(t)
	first, second := e.server("server-1"), e.server("server-2")
	e.agent("node-a", first)
	b := e.agent("node-b", second)
	e.eventually(fine, nil, "nodes", "node-a", "node-b")
	b.stuck.Store(true)
	e.service("web")

	// Both servers have published the slice, and one node lacks it.
	r := e.eventually(fine, []string{"default/web", "node-b (lacks it)"}, "changes")
	require.Regexp(t, `default/web +2 +1 `, r.out)
	r = e.eventually(wrong, []string{"The servers have the Service default/web with 1 endpoint", "node-b"}, "lacks", "default/web")
	require.Contains(t, r.out, "Nodes that lack it, or may lack it: 1")
	require.NotContains(t, r.out, "node-a")
	var changes struct {
		Changes []struct {
			Services   []string
			Nodes      int
			AllSeconds *float64
			Servers    []struct{ Server string }
		}
	}
	require.NoError(t, json.Unmarshal([]byte(e.run("changes", "-o", "json").out), &changes))
	require.NotEmpty(t, changes.Changes)
	require.Equal(t, []string{"default/web"}, changes.Changes[0].Services)
	require.Nil(t, changes.Changes[0].AllSeconds)
	require.Len(t, changes.Changes[0].Servers, 2)

	r = e.run("lacks", "default/none")
	require.Equal(t, wrong, r.code)
	require.Contains(t, r.out, "The servers have no Service default/none")

	// A new stream has everything.
	b.stop()
	pod, err := plane.Client().CoreV1().Pods(agentNamespace).Get(t.Context(), "agent-node-b", metav1.GetOptions{})
	require.NoError(t, err)
	e.connect(pod, second, "slicecast", e.caFile(agentNamespace, "slicecast-ca"), "slicecast-server.slicecast-system.svc")
	e.eventually(fine, []string{"0 nodes lack it"}, "lacks", "default/web")
}

// TestAgents checks that agents that cannot be asked are named. The stand-in for the kubelet runs
// no commands; deploy/helm/e2e asks agents in a cluster with kubelets.
func TestAgents(t *testing.T) {
	e := newEnvironment(t)
	e.server("server-1")
	e.pod(agentNamespace, "agent-0", "slicecast-agent", "agent", "node-0", nil, corev1.PodRunning)
	r := e.run("agent", "node-0", "node-z")
	require.Equal(t, incomplete, r.code, r.errors)
	require.Regexp(t, `node-0 was not asked: .* cannot (get|create) resource "pods/exec"`, r.out)
	require.Contains(t, r.out, "node-z was not asked: no Pod of an agent is on the node")
	admin := plane.Kubeconfig(t, plane.AdminConfig())
	r = runAs(t.Context(), admin, "agent", "node-0", "-o", "json")
	require.Equal(t, incomplete, r.code)
	require.Contains(t, r.out, `"error": "run slicecast-agent in the Pod: `)
	require.Contains(t, e.run("__complete", "--kubeconfig="+e.kubeconfig, "agent", "").out, "node-0\n")
}

// TestAgentsThatHang checks what is said of an agent whose command does not end, and when the API
// server was last heard of according to the server that another agent follows.
func TestAgentsThatHang(t *testing.T) {
	e := newEnvironment(t)
	e.server("server-1")
	e.pod(agentNamespace, "agent-0", "slicecast-agent", "agent", "node-0", nil, corev1.PodRunning)
	e.eventually(fine, []string{"serving"}, "status")
	admin := plane.Kubeconfig(t, plane.AdminConfig())
	e.kubelet.Exec(agentNamespace, "agent-0", answersOfAgents)
	r := runAs(t.Context(), admin, "agent", "node-0")
	require.Equal(t, fine, r.code, r.out)
	require.Regexp(t, `API server: last event \d\S*s ago, at slicecast-system/server-1\n`, r.out)
	r = runAs(t.Context(), admin, "agent", "node-0", "-o", "json")
	require.Contains(t, r.out, `"ageSeconds": `)

	ended := make(chan struct{})
	defer close(ended)
	e.kubelet.Exec(agentNamespace, "agent-0", func([]string) (string, error) {
		<-ended
		return "", nil
	})
	r = runAs(t.Context(), admin, "agent", "node-0", "--timeout=1s")
	require.Equal(t, incomplete, r.code)
	for _, text := range []string{
		"slicecast-agent has not answered in its Pod within 1s (--timeout), although the Pod runs", "kubectl logs -n slicecast-agents agent-0",
		"kubectl delete pod -n slicecast-agents agent-0 starts the agent anew, and the kernel keeps its rules",
	} {
		require.Contains(t, r.out, text)
	}
}

// TestLastEvents checks that the age of the last event is that of the server at the root.
func TestLastEvents(t *testing.T) {
	now := time.Now()
	answer := func(name string, s *pb.GetStatusResponse) fleet.Answer[*pb.GetStatusResponse] {
		s.Time = timestamppb.New(now)
		return fleet.Answer[*pb.GetStatusResponse]{Server: &fleet.Server{NamespacedName: types.NamespacedName{Namespace: "n", Name: name}, Addresses: []string{"fd00::" + name[:1]}}, Value: s}
	}
	up := func(name string) *pb.UpstreamStatus {
		return &pb.UpstreamStatus{Server: &pb.ServerConnection{Name: name}}
	}
	answers := []fleet.Answer[*pb.GetStatusResponse]{
		answer("root", &pb.GetStatusResponse{Source: &pb.SourceStatus{LastEventTime: timestamppb.New(now.Add(-time.Minute))}}),
		answer("relay", &pb.GetStatusResponse{Upstream: up("root")}), answer("lonely", &pb.GetStatusResponse{Upstream: &pb.UpstreamStatus{}}),
		answer("file", &pb.GetStatusResponse{}), answer("circle", &pb.GetStatusResponse{Upstream: up("circle")}),
	}
	for name, says := range map[string]string{
		"root": "last event 1m0s ago, at n/root", "relay": "last event 1m0s ago, at n/root", "lonely": "last event unknown: the relay that it follows is connected to no server",
		"file": "last event unknown: n/file does not say it: it follows no API server, or is of an earlier version",
		"none": "last event unknown: no answer of the server none; kubectl slicecast status says why", "circle": "last event unknown: no answer of the server circle; kubectl slicecast status says why",
	} {
		require.Equal(t, says, findLastEvent(answers, &pb.ServerConnection{Name: name, Address: "10.0.0.1:8472"}).String())
	}
	require.Equal(t, "last event 1m0s ago, at n/root", findLastEvent(answers, &pb.ServerConnection{Name: "node-1", Address: "[fd00::r]:8472"}).String())
}

func TestWatch(t *testing.T) {
	e := newEnvironment(t)
	e.server("server-1")
	e.eventually(fine, nil, "status")
	ctx, interrupt := context.WithTimeout(t.Context(), 5*time.Second)
	defer interrupt()
	r := runAs(ctx, e.kubeconfig, "status", "--watch")
	require.Equal(t, fine, r.code, r.errors)
	require.GreaterOrEqual(t, strings.Count(r.out, "slicecast-system/server-1"), 2)
}

// TestWatchThatFails checks that the exit code says it if nothing could be asked after the first
// report.
func TestWatchThatFails(t *testing.T) {
	e := newEnvironment(t)
	e.server("server-1")
	e.eventually(fine, nil, "status")
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	out, in := io.Pipe()
	root := NewCommand()
	root.SetArgs([]string{"--kubeconfig=" + e.kubeconfig, "status", "--watch"})
	root.SetOut(in)
	ended := make(chan error, 1)
	go func() {
		_, err := daemon.Execute(ctx, root)
		ended <- errors.Join(err, in.Close())
	}()
	reports := 0
	for lines := bufio.NewScanner(out); lines.Scan(); {
		switch line := lines.Text(); {
		case strings.HasPrefix(line, "slicecast-system/server-1 "):
			if reports++; reports == 1 {
				now := metav1.DeleteOptions{GracePeriodSeconds: new(int64)}
				require.NoError(t, plane.Client().CoreV1().Pods(serverNamespace).Delete(t.Context(), "server-1", now))
			}
		case strings.Contains(line, "no servers"):
			interrupt()
		}
	}
	require.Positive(t, reports)
	require.Equal(t, incomplete, Code(root, <-ended))
}

func TestCompletion(t *testing.T) {
	e := newEnvironment(t)
	address := e.server("server-1")
	e.agent("node-a", address)
	e.eventually(fine, nil, "nodes", "node-a")
	complete := func(args ...string) string {
		return e.run(append([]string{"__complete", "--kubeconfig=" + e.kubeconfig}, args...)...).out
	}
	require.Contains(t, complete("nodes", ""), "node-a\n")
	require.NotContains(t, complete("nodes", "node-a", ""), "node-a\n")
	require.Contains(t, complete("lacks", ""), "default/kubernetes\n")
	require.Contains(t, complete("status", "-o", ""), "yaml\n")
}

// TestRelays checks that the nodes of a relay are its own, and that a relay that cannot be asked
// stands for them.
func TestRelays(t *testing.T) {
	e := newEnvironment(t)
	root := e.server("server-1")
	ca := e.caFile(serverNamespace, "slicecast-ca")
	accounts := plane.Client().CoreV1().ServiceAccounts(serverNamespace)
	_, err := accounts.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "relay"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, accounts.Delete(t.Context(), "relay", metav1.DeleteOptions{})) }()
	holder := e.pod(serverNamespace, "holder", "relay", "none", "node-0", nil, corev1.PodRunning)
	tokenFile := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(tokenFile, []byte(e.token(holder, "slicecast")), 0o600))
	admin := plane.Kubeconfig(t, plane.AdminConfig())
	relay := e.serverWith("relay-1", admin,
		"--source=upstream", "--upstream-servers="+root, "--upstream-server-name=slicecast-server.slicecast-system.svc",
		"--upstream-ca-file="+ca, "--upstream-token-file="+tokenFile, "--server-service="+serverNamespace+"/slicecast-relay",
		"--tls-secret="+serverNamespace+"/relay-tls", "--ca-config-map="+serverNamespace+"/relay-ca",
		"--agent-service-account="+agentNamespace+"/slicecast-agent", "--drain-window=10ms", "--shutdown-grace-period=5s")
	e.connect(e.agentPod("node-a"), relay, "slicecast-relay", e.caFile(serverNamespace, "relay-ca"), "slicecast-relay.slicecast-system.svc")
	asAdmin := func(code int, prints string, args ...string) (r result) {
		t.Helper()
		require.Eventually(t, func() bool {
			r = runAs(t.Context(), admin, args...)
			return r.code == code && strings.Contains(r.out, prints)
		}, patience, tick, "%v", &r)
		return r
	}
	r := asAdmin(fine, "node-a  programmed", "nodes", "node-a")
	require.Contains(t, r.out, "slicecast-system/relay-1")
	require.NotContains(t, r.out, "Relays that were not asked")
	require.Regexp(t, `slicecast-system/relay-1 +relay +serving`, asAdmin(fine, "", "status").out)
	// A change counts the nodes that the server knew of when it published the change.
	knows := regexp.MustCompile(`server-1 +server +serving +\S+ +\S+ +\d\S+s +\d+ +\d+ +1 +1 `)
	require.Eventually(t, func() bool { r = runAs(t.Context(), admin, "status"); return knows.MatchString(r.out) }, patience, tick, "%v", &r)
	e.service("behind-relay")
	r = asAdmin(fine, "default/behind-relay", "changes", "-o", "wide")
	require.Contains(t, r.out, "slicecast-system/server-1")
	require.NotContains(t, r.out, "slicecast-system/relay-1", "the server counts its nodes")

	e.kubelet.Serve(serverNamespace, "relay-1", 8472, "")
	r = asAdmin(incomplete, "Relays that were not asked, and whose nodes are not shown: 1", "nodes")
	asAdmin(incomplete, "Relays that were not asked, and whose nodes are not shown: 1", "status")
	require.Contains(t, r.out, "node-a  unknown")

	// The relay itself is up, but what it serves is of the past.
	e.kubelet.Serve(serverNamespace, "relay-1", 8472, relay)
	e.stops[root]()
	asAdmin(incomplete, "node-a  stale", "nodes", "--behind")
	require.Regexp(t, `slicecast-system/relay-1 +relay +stale`, asAdmin(incomplete, "it follows no server", "status").out)
	r = asAdmin(incomplete, "node-a  stale", "lacks", "default/behind-relay")
	require.Contains(t, r.out, "Nodes that lack it, or may lack it: 1")
}

// TestWithoutWebSockets checks that an API server, or a proxy before it, need not have WebSockets.
func TestWithoutWebSockets(t *testing.T) {
	e := newEnvironment(t)
	e.server("server-1")
	e.eventually(fine, nil, "status")
	admin := plane.AdminConfig()
	admin.NextProtos = []string{"http/1.1"} // HTTP/2 has no upgrades
	transport, err := rest.TransportFor(admin)
	require.NoError(t, err)
	target, err := url.Parse(admin.Host)
	require.NoError(t, err)
	var refused, upgraded atomic.Int32
	proxy := &httputil.ReverseProxy{Transport: transport, Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }}
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch strings.ToLower(r.Header.Get("Upgrade")) {
		case "websocket":
			refused.Add(1)
			http.Error(w, "no WebSockets here", http.StatusBadRequest)
			return
		case "spdy/3.1":
			upgraded.Add(1)
		}
		proxy.ServeHTTP(w, r)
	}))
	defer front.Close()
	r := runAs(t.Context(), plane.Kubeconfig(t, &rest.Config{Host: front.URL}), "status")
	require.Equal(t, fine, r.code, r.out+r.errors)
	require.Contains(t, r.out, "slicecast-system/server-1  server  serving")
	require.EqualValues(t, 1, refused.Load())
	require.EqualValues(t, 1, upgraded.Load())
}
