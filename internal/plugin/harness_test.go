// This file runs real servers, with the rights and objects of the manifests in a real API server.
// The API server forwards ports to them by the protocol of kubelets. Agents are streams with tokens
// of Pods, which acknowledge what a test wants them to.
package plugin

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/restmapper"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
	"github.com/slicecast/slicecast/internal/testenv/kubelet"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/app"
)

// plane is the control plane of all tests.
var plane *controlplane.ControlPlane

// commandVariable is set in processes that tests start to be the command.
const commandVariable = "SLICECAST_TEST_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(commandVariable) != "" {
		os.Exit(Main())
	}
	testenv.Isolate(controlplane.Prepare)
	goleak.VerifyTestMain(controlplane.Around(m, controlplane.Options{Controllers: true}, &plane),
		// If both ends of SPDY close at once, it waits for a second for somebody to take the error.
		goleak.IgnoreTopFunction("github.com/moby/spdystream.(*Connection).shutdown"),
		// If a command's time is over, the heartbeat of its WebSocket ends with the next ping.
		goleak.IgnoreTopFunction("k8s.io/client-go/tools/remotecommand.(*heartbeat).start"))
}

const (
	serverNamespace, agentNamespace = "slicecast-system", "slicecast-agents"
	// operators may use the command; see kubectl.users in the chart.
	operators = "sre"
	// patience bounds waits. It is far more than anything takes.
	patience = time.Minute
	tick     = 10 * time.Millisecond
)

// environment is an installation for one test.
type environment struct {
	*testing.T
	kubelet *kubelet.Kubelet
	// kubeconfig is that of an operator.
	kubeconfig string
	// change changes Pods before they are created; nil means that it does not.
	change func(*corev1.Pod)
	// programmer is that of the agents that connect; empty means nftables.
	programmer string
	// stops are functions that stop servers, by their addresses.
	stops map[string]func()
}

// newEnvironment installs the objects of the manifests, without Pods.
func newEnvironment(t *testing.T) *environment {
	t.Helper()
	e := &environment{T: t, stops: make(map[string]func()), kubelet: kubelet.Start(t, plane, "node-0"), kubeconfig: plane.Kubeconfig(t, plane.ConfigFor("jane", operators))}
	for _, file := range []string{"namespace.yaml", "server-rbac.yaml", "agent-rbac.yaml", "viewer.yaml"} {
		e.apply(file)
	}
	subjects := []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: operators}}
	meta := metav1.ObjectMeta{Name: "slicecast-kubectl", Namespace: serverNamespace}
	rbac := plane.Client().RbacV1()
	_, err := rbac.RoleBindings(serverNamespace).Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: meta, Subjects: subjects, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: meta.Name},
	}, metav1.CreateOptions{})
	require.True(t, err == nil || apierrors.IsAlreadyExists(err), err)
	_, err = rbac.ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: meta.Name}, Subjects: subjects,
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: meta.Name},
	}, metav1.CreateOptions{})
	require.True(t, err == nil || apierrors.IsAlreadyExists(err), err)
	return e
}

// apply applies the objects of a manifest.
func (e *environment) apply(file string) {
	e.Helper()
	content, err := os.ReadFile(filepath.Join("../../deploy/kubernetes", file))
	require.NoError(e, err)
	client, err := dynamic.NewForConfig(plane.AdminConfig())
	require.NoError(e, err)
	groups, err := restmapper.GetAPIGroupResources(plane.Client().Discovery())
	require.NoError(e, err)
	mapper := restmapper.NewDiscoveryRESTMapper(groups)
	documents := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(content), 4096)
	for {
		o := &unstructured.Unstructured{}
		err := documents.Decode(o)
		if errors.Is(err, io.EOF) {
			return
		}
		require.NoError(e, err)
		gvk := o.GroupVersionKind()
		mapping, err := mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
		require.NoError(e, err)
		_, err = client.Resource(mapping.Resource).Namespace(o.GetNamespace()).Apply(e.Context(), o.GetName(), o,
			metav1.ApplyOptions{FieldManager: "test", Force: true})
		require.NoError(e, err, o.GetName())
	}
}

// serverArgs are the arguments of servers, as in the manifests.
func serverArgs() []string {
	return []string{
		"--source=kube", "--server-service=" + serverNamespace + "/slicecast-server",
		"--tls-secret=" + serverNamespace + "/slicecast-server-tls", "--ca-config-map=" + serverNamespace + "/slicecast-ca",
		"--ca-config-map=" + agentNamespace + "/slicecast-ca", "--agent-service-account=" + agentNamespace + "/slicecast-agent",
		"--relay-service-account=" + serverNamespace + "/relay", "--drain-window=10ms", "--shutdown-grace-period=5s",
	}
}

// server runs a server and its Pod, and returns the server's address.
func (e *environment) server(pod string) string {
	e.Helper()
	account := "system:serviceaccount:" + serverNamespace
	config := plane.ConfigFor(account+":slicecast-server", "system:serviceaccounts", account, "system:authenticated")
	return e.serverWith(pod, plane.Kubeconfig(e.T, config), serverArgs()...)
}

func (e *environment) serverWith(pod, kubeconfig string, args ...string) string {
	e.Helper()
	o := &app.Options{}
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	o.AddFlags(fs)
	require.NoError(e, fs.Parse(append([]string{"--bind-address=127.0.0.1:0", "--kubeconfig=" + kubeconfig, "--healthz-bind-address=127.0.0.1:0", "--metrics-bind-address=127.0.0.1:0"}, args...)))
	c, err := o.Complete(slog.New(slog.DiscardHandler))
	require.NoError(e, err)
	s, err := app.New(c)
	require.NoError(e, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	address := s.Addresses().GRPC.String()
	e.stops[address] = sync.OnceFunc(func() {
		cancel()
		require.NoError(e, <-ended)
	})
	e.Cleanup(e.stops[address])
	e.pod(serverNamespace, pod, "slicecast-server", "server", "node-0", append([]string{"--bind-address=:8472", "--metrics-bind-address=:8474"}, args...), corev1.PodRunning)
	e.kubelet.Serve(serverNamespace, pod, 8472, address)
	e.kubelet.Serve(serverNamespace, pod, 8474, s.Addresses().Metrics.String())
	return address
}

// pod creates a Pod with the labels of a component. It is in a phase, and its address is loopback.
func (e *environment) pod(namespace, name, account, component, node string, args []string, phase corev1.PodPhase) *corev1.Pod {
	e.Helper()
	pods := plane.Client().CoreV1().Pods(namespace)
	wanted := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
			"app.kubernetes.io/part-of": "slicecast", "app.kubernetes.io/component": component,
		}},
		Spec: corev1.PodSpec{
			NodeName: node, ServiceAccountName: account, AutomountServiceAccountToken: new(bool),
			// What the namespace of the servers requires.
			SecurityContext: &corev1.PodSecurityContext{
				RunAsNonRoot: new(true), SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			},
			Containers: []corev1.Container{{
				Name: component, Image: "none", Args: args, Ports: []corev1.ContainerPort{{Name: "grpc", ContainerPort: 8472}},
				SecurityContext: &corev1.SecurityContext{
					AllowPrivilegeEscalation: new(bool), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
				},
			}},
		},
	}
	if e.change != nil {
		e.change(wanted)
	}
	pod, err := pods.Create(e.Context(), wanted, metav1.CreateOptions{})
	require.NoError(e, err)
	e.Cleanup(func() {
		err := pods.Delete(context.Background(), name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
		require.True(e, err == nil || apierrors.IsNotFound(err), err)
	})
	pod.Status.Phase = phase
	if phase == corev1.PodRunning {
		pod.Status.PodIPs, pod.Status.PodIP = []corev1.PodIP{{IP: "127.0.0.1"}}, "127.0.0.1"
	}
	pod, err = pods.UpdateStatus(e.Context(), pod, metav1.UpdateOptions{})
	require.NoError(e, err)
	return pod
}

// token returns a token that is bound to a Pod.
func (e *environment) token(pod *corev1.Pod, audience string) string {
	e.Helper()
	answer, err := plane.Client().CoreV1().ServiceAccounts(pod.Namespace).CreateToken(e.Context(), pod.Spec.ServiceAccountName, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{
			Audiences:      []string{audience},
			BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID},
		},
	}, metav1.CreateOptions{})
	require.NoError(e, err)
	return answer.Status.Token
}

// caFile writes the CAs of a ConfigMap to a file, once the servers have published them.
func (e *environment) caFile(namespace, name string) string {
	e.Helper()
	path := filepath.Join(e.TempDir(), "ca.crt")
	require.Eventually(e, func() bool {
		held, err := plane.Client().CoreV1().ConfigMaps(namespace).Get(e.Context(), name, metav1.GetOptions{})
		return err == nil && held.Data["ca.crt"] != "" && os.WriteFile(path, []byte(held.Data["ca.crt"]), 0o600) == nil
	}, patience, tick)
	return path
}

// agent is the stream of a node's agent.
type agent struct {
	// stuck is set while the agent acknowledges nothing.
	stuck atomic.Bool
	stop  func()
	// send sends to the server.
	send func(*pb.StreamRequest) error
	t    *testing.T
}

// nack reports that the agent cannot program a Service.
func (a *agent) nack(service, reason string) {
	a.t.Helper()
	namespace, name, _ := strings.Cut(service, "/")
	require.NoError(a.t, a.send(&pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{
		Key: &pb.ObjectKey{Kind: pb.ObjectKind_OBJECT_KIND_SERVICE, Namespace: namespace, Name: name}, Reason: reason,
	}}}))
}

// agentPod creates the Pod of a node's agent, with the node.
func (e *environment) agentPod(node string) *corev1.Pod {
	e.Helper()
	e.nodeWith(node, corev1.NodeSystemInfo{OperatingSystem: "linux", Architecture: "arm64", KernelVersion: "5.15.0-100-generic"})
	return e.pod(agentNamespace, "agent-"+node, "slicecast-agent", "agent", node, nil, corev1.PodRunning)
}

// nodeWith creates a ready Node.
func (e *environment) nodeWith(name string, info corev1.NodeSystemInfo) {
	e.Helper()
	nodes := plane.Client().CoreV1().Nodes()
	_, err := nodes.Create(e.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Status: corev1.NodeStatus{
			NodeInfo: info, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		},
	}, metav1.CreateOptions{})
	require.NoError(e, err)
	e.Cleanup(func() { require.NoError(e, nodes.Delete(context.Background(), name, metav1.DeleteOptions{})) })
}

// lease creates the Lease of a node, as its kubelet does, which has renewed it at a time.
func (e *environment) lease(node string, at time.Time) {
	e.Helper()
	leases := plane.Client().CoordinationV1().Leases(corev1.NamespaceNodeLease)
	_, err := leases.Create(e.Context(), &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: node}, Spec: coordinationv1.LeaseSpec{RenewTime: &metav1.MicroTime{Time: at}},
	}, metav1.CreateOptions{})
	require.NoError(e, err)
	e.Cleanup(func() { require.NoError(e, leases.Delete(context.Background(), node, metav1.DeleteOptions{})) })
}

// hostPod creates a running Pod in the network of its node, with a port.
func (e *environment) hostPod(name, node string, port int32, labels map[string]string) {
	e.Helper()
	pods := plane.Client().CoreV1().Pods(agentNamespace)
	pod, err := pods.Create(e.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
		Spec: corev1.PodSpec{
			NodeName: node, HostNetwork: true, AutomountServiceAccountToken: new(bool),
			Containers: []corev1.Container{{Name: "c", Image: "none", Ports: []corev1.ContainerPort{{ContainerPort: port, HostPort: port}}}},
		},
	}, metav1.CreateOptions{})
	require.NoError(e, err)
	e.Cleanup(func() {
		require.NoError(e, pods.Delete(context.Background(), name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
	})
	pod.Status.Phase = corev1.PodRunning
	_, err = pods.UpdateStatus(e.Context(), pod, metav1.UpdateOptions{})
	require.NoError(e, err)
}

// hostPortSet creates a DaemonSet whose Pods have a network of their own, and a port of their node.
// So many of them were admitted.
func (e *environment) hostPortSet(name string, port, admitted int32) {
	e.Helper()
	labels := map[string]string{"app": name}
	sets := plane.Client().AppsV1().DaemonSets(agentNamespace)
	set, err := sets.Create(e.Context(), &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{
				Containers: []corev1.Container{{Name: "c", Image: "none", Ports: []corev1.ContainerPort{{ContainerPort: 80, HostPort: port}}}},
			}},
		},
	}, metav1.CreateOptions{})
	require.NoError(e, err)
	e.Cleanup(func() { require.NoError(e, sets.Delete(context.Background(), name, metav1.DeleteOptions{})) })
	set.Status.UpdatedNumberScheduled, set.Status.ObservedGeneration = admitted, set.Generation
	_, err = sets.UpdateStatus(e.Context(), set, metav1.UpdateOptions{})
	require.NoError(e, err)
}

// connect connects the agent in a Pod to a server, for an audience, and waits until it is in sync.
func (e *environment) connect(pod *corev1.Pod, address, audience, ca, serverName string) *agent {
	e.Helper()
	files, err := tlsfiles.Follow(tlsfiles.Files{CA: ca}, slog.New(slog.DiscardHandler))
	require.NoError(e, err)
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(files.ClientCredentials()), grpc.WithAuthority(serverName))
	require.NoError(e, err)
	ctx, cancel := context.WithCancel(metadata.AppendToOutgoingContext(context.Background(), "authorization", "Bearer "+e.token(pod, audience)))
	var stream pb.DistributionService_StreamClient
	require.Eventually(e, func() bool { // the server may not be in sync yet
		if stream, err = pb.NewDistributionServiceClient(conn).Stream(ctx); err != nil {
			return false
		}
		err = stream.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: &pb.Hello{
			Kind: pb.ClientKind_CLIENT_KIND_AGENT, NodeName: pod.Spec.NodeName, ClientVersion: daemon.Version(), Programmer: cmp.Or(e.programmer, "nftables"),
		}}})
		if err == nil {
			_, err = stream.Recv() // Welcome
		}
		return err == nil
	}, patience, tick, "connect to %s", address)
	var sending sync.Mutex // a stream has one sender
	a := &agent{t: e.T, send: func(r *pb.StreamRequest) error {
		sending.Lock()
		defer sending.Unlock()
		return stream.Send(r)
	}}
	inSync, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		var once sync.Once
		for {
			m, err := stream.Recv()
			if err != nil {
				return
			}
			var positions []*pb.ShardPosition
			if s := m.GetInSync(); s != nil {
				for i, sequence := range s.GetSequences() {
					positions = append(positions, &pb.ShardPosition{Shard: uint32(i), Sequence: sequence})
				}
				once.Do(func() { close(inSync) })
			} else if u := m.GetShardUpdate(); u != nil && !a.stuck.Load() {
				positions = append(positions, &pb.ShardPosition{Shard: u.GetShard(), Sequence: u.GetSequence()})
			}
			if len(positions) > 0 {
				// If it fails, so does Recv.
				_ = a.send(&pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: &pb.Ack{Positions: positions}}})
			}
		}
	}()
	a.stop = sync.OnceFunc(func() {
		cancel()
		<-ended
		require.NoError(e, conn.Close())
	})
	e.Cleanup(a.stop)
	select {
	case <-inSync:
	case <-ended:
		e.Fatal("the stream ended before it was in sync")
	}
	return a
}

// agent connects the agent of a new node to a server.
func (e *environment) agent(node, address string) *agent {
	e.Helper()
	return e.connect(e.agentPod(node), address, "slicecast", e.caFile(agentNamespace, "slicecast-ca"), "slicecast-server."+serverNamespace+".svc")
}

// service creates a Service with a slice, and removes it at the end of the test.
func (e *environment) service(name string) {
	e.Helper()
	client := plane.Client()
	_, err := client.CoreV1().Services("default").Create(e.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	require.NoError(e, err)
	e.Cleanup(func() {
		err := client.CoreV1().Services("default").Delete(context.Background(), name, metav1.DeleteOptions{})
		require.True(e, err == nil || apierrors.IsNotFound(err), err)
	})
	_, err = client.DiscoveryV1().EndpointSlices("default").Create(e.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Port: new(int32(8080))}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.1.2.3"}}},
	}, metav1.CreateOptions{})
	require.NoError(e, err)
	e.Cleanup(func() {
		err := client.DiscoveryV1().EndpointSlices("default").Delete(context.Background(), name+"-1", metav1.DeleteOptions{})
		require.True(e, err == nil || apierrors.IsNotFound(err), err)
	})
}

// result is what a command printed, and its exit code.
type result struct {
	out, errors string
	code        int
}

// run runs the command as an operator.
func (e *environment) run(args ...string) result {
	e.Helper()
	return runAs(e.Context(), e.kubeconfig, args...)
}

func runAs(ctx context.Context, kubeconfig string, args ...string) result {
	var out, errs bytes.Buffer
	root := NewCommand()
	root.SetArgs(append([]string{"--kubeconfig=" + kubeconfig}, args...))
	root.SetOut(&out)
	root.SetErr(&errs)
	_, err := daemon.Execute(ctx, root)
	code := Code(root, err)
	return result{out.String(), errs.String(), code}
}

// eventually runs the command until it has an exit code and prints all of these, and returns its
// last result.
func (e *environment) eventually(code int, prints []string, args ...string) (r result) {
	e.Helper()
	ok := func() bool {
		r = e.run(args...)
		if r.code != code {
			return false
		}
		for _, text := range prints {
			if !bytes.Contains([]byte(r.out), []byte(text)) {
				return false
			}
		}
		return true
	}
	for deadline := time.Now().Add(patience); !ok(); {
		if time.Now().After(deadline) {
			require.FailNow(e, "the command does not print that", "want code %d and %q\ncode %d\n%s\n%s", code, prints, r.code, r.out, r.errors)
		}
	}
	return r
}

// silent listens, accepts connections and answers nothing.
func (e *environment) silent() string {
	e.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(e, err)
	e.Cleanup(func() { require.NoError(e, l.Close()) })
	return l.Addr().String()
}

// signaling is silent, and closes accepted with the first connection.
func (e *environment) signaling(accepted chan struct{}) string {
	e.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(e, err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		conn, err := l.Accept()
		if err != nil {
			return
		}
		close(accepted)
		_, _ = io.Copy(io.Discard, conn) // until the client goes
		_ = conn.Close()
	}()
	e.Cleanup(func() {
		require.NoError(e, l.Close())
		<-ended
	})
	return l.Addr().String()
}
