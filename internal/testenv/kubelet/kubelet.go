// Package kubelet stands in for the kubelets of a control plane that has none. It does three things
// of what they do, in the protocols that a real API server speaks with it: it forwards ports of
// Pods, returns logs and runs commands. Processes and functions of the test stand in for the Pods'
// containers.
package kubelet

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/remotecommand"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"

	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// Kubelet is the kubelet of a node on loopback.
type Kubelet struct {
	t    *testing.T
	node string

	mu sync.Mutex // guards the fields below
	// logs has the logs of containers, by namespace/pod/container, and commands what runs commands in
	// Pods, by namespace/pod.
	logs     map[string]string
	commands map[string]func(command []string) (output string, err error)
	// ports has the address that a port of a Pod is forwarded to, by namespace/pod:port.
	ports map[string]string
	conns sync.WaitGroup
}

// Start registers a node, and serves its kubelet's port until the end of the test.
func Start(t *testing.T, cluster *controlplane.ControlPlane, node string) *Kubelet {
	t.Helper()
	k := &Kubelet{t: t, node: node, ports: make(map[string]string), logs: make(map[string]string), commands: make(map[string]func([]string) (string, error))}
	server := httptest.NewTLSServer(http.HandlerFunc(k.serve))
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
		k.conns.Wait()
	})
	nodes := cluster.Client().CoreV1().Nodes()
	_, err := nodes.Create(t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: node},
		Status: corev1.NodeStatus{
			Addresses:       []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "127.0.0.1"}},
			DaemonEndpoints: corev1.NodeDaemonEndpoints{KubeletEndpoint: corev1.DaemonEndpoint{Port: int32(server.Listener.Addr().(*net.TCPAddr).Port)}},
			NodeInfo:        corev1.NodeSystemInfo{OperatingSystem: "linux", Architecture: "amd64", KernelVersion: "6.12.1"},
		},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, nodes.Delete(context.Background(), node, metav1.DeleteOptions{})) })
	return k
}

// Serve forwards a port of a Pod to an address. An empty address refuses connections from now on.
func (k *Kubelet) Serve(namespace, pod string, port int, address string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.ports[fmt.Sprintf("%s/%s:%d", namespace, pod, port)] = address
}

// Log sets the log of a Pod's container.
func (k *Kubelet) Log(namespace, pod, container, log string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.logs[namespace+"/"+pod+"/"+container] = log
}

// Exec sets what runs commands in a Pod. It returns what a command prints.
func (k *Kubelet) Exec(namespace, pod string, run func(command []string) (output string, err error)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.commands[namespace+"/"+pod] = run
}

func (k *Kubelet) serve(w http.ResponseWriter, r *http.Request) {
	what, path, _ := strings.Cut(strings.Trim(r.URL.Path, "/"), "/")
	switch what {
	case "containerLogs":
		k.mu.Lock()
		log, ok := k.logs[path]
		k.mu.Unlock()
		if !ok {
			http.NotFound(w, r)
			return
		}
		_, _ = io.WriteString(w, log) // it fails if the client is gone
	case "exec":
		k.exec(w, r, path)
	default:
		k.forward(w, r)
	}
}

// exec serves /exec/NAMESPACE/POD/CONTAINER, and with a UID before the container. The client opens
// streams for the error, the output and the errors of the command. If it also opens one for the
// input, the input is read before the command runs, which does not get it.
func (k *Kubelet) exec(w http.ResponseWriter, r *http.Request, path string) {
	parts := strings.Split(path, "/")
	k.mu.Lock()
	run := k.commands[strings.Join(parts[:min(2, len(parts))], "/")]
	k.mu.Unlock()
	if run == nil {
		http.NotFound(w, r)
		return
	}
	if _, err := httpstream.Handshake(r, w, []string{remotecommand.StreamProtocolV4Name}); err != nil {
		return // Handshake has answered
	}
	wanted := 3
	if stdin, err := strconv.ParseBool(r.URL.Query().Get(corev1.ExecStdinParam)); err == nil && stdin {
		wanted++
	}
	streams := make(chan httpstream.Stream, wanted)
	conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(s httpstream.Stream, replied <-chan struct{}) error {
		go func() {
			<-replied
			streams <- s
		}()
		return nil
	})
	if conn == nil {
		return // UpgradeResponse has answered
	}
	k.conns.Add(1)
	defer k.conns.Done()
	defer func() { _ = conn.Close() }() // the client may have closed it
	by := make(map[string]httpstream.Stream)
	for range wanted {
		select {
		case s := <-streams:
			by[s.Headers().Get(corev1.StreamType)] = s
		case <-conn.CloseChan():
			return
		}
	}
	if in := by[corev1.StreamTypeStdin]; in != nil {
		_, _ = io.Copy(io.Discard, in) // it fails if the client is gone
	}
	output, err := run(r.URL.Query()["command"])
	status := metav1.Status{Status: metav1.StatusSuccess}
	_, _ = io.WriteString(by[corev1.StreamTypeStdout], output) // it fails if the client is gone
	if err != nil {
		status = metav1.Status{Status: metav1.StatusFailure, Message: err.Error()}
		_, _ = io.WriteString(by[corev1.StreamTypeStderr], err.Error())
	}
	_ = json.NewEncoder(by[corev1.StreamTypeError]).Encode(status)
	for _, s := range by {
		_ = s.Close()
	}
	<-conn.CloseChan()
}

// forward serves /portForward/NAMESPACE/POD, and with a UID after it.
func (k *Kubelet) forward(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	if len(parts) < 3 || parts[0] != "portForward" {
		http.NotFound(w, r)
		return
	}
	if _, err := httpstream.Handshake(r, w, []string{portforward.PortForwardProtocolV1Name}); err != nil {
		return // Handshake has answered
	}
	f := &forwarding{kubelet: k, pod: parts[1] + "/" + parts[2], failures: make(map[string]httpstream.Stream)}
	conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, f.accept)
	if conn == nil {
		return // UpgradeResponse has answered
	}
	k.conns.Add(1)
	defer k.conns.Done()
	<-conn.CloseChan()
}

// forwarding is a connection of the API server.
type forwarding struct {
	kubelet *Kubelet
	pod     string

	mu sync.Mutex // guards failures
	// failures are the streams for errors, by request.
	failures map[string]httpstream.Stream
}

// accept accepts the two streams of a request, the one for errors first.
func (f *forwarding) accept(stream httpstream.Stream, replied <-chan struct{}) error {
	request := stream.Headers().Get(corev1.PortForwardRequestIDHeader)
	f.mu.Lock()
	defer f.mu.Unlock()
	if stream.Headers().Get(corev1.StreamType) == corev1.StreamTypeError {
		f.failures[request] = stream
		return nil
	}
	failure := f.failures[request]
	go func() {
		<-replied
		defer failure.Close()
		if err := f.copy(stream); err != nil {
			_, _ = fmt.Fprint(failure, err) // it fails if the client is gone
		}
	}()
	return nil
}

func (f *forwarding) copy(stream httpstream.Stream) error {
	defer func() { _ = stream.Reset() }() // nobody reads from it any more
	name := f.pod + ":" + stream.Headers().Get(corev1.PortHeader)
	f.kubelet.mu.Lock()
	address := f.kubelet.ports[name]
	f.kubelet.mu.Unlock()
	if address == "" {
		return fmt.Errorf("failed to connect to %s inside its namespace: connection refused", name)
	}
	conn, err := net.Dial("tcp", address)
	if err != nil {
		return err
	}
	defer conn.Close()
	var both sync.WaitGroup
	both.Go(func() {
		_, _ = io.Copy(conn, stream)
		_ = conn.(*net.TCPConn).CloseWrite()
	})
	_, err = io.Copy(stream, conn)
	_ = stream.Reset() // ends the other direction
	both.Wait()
	return err
}
