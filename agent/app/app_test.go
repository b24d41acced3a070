// These tests prove how an agent starts and serves its ports, with the whole agent in the test's
// process. It prints the Services of a directory of manifests, is not ready before it has
// programmed something, and names the flag in an error. Nothing but programming keeps it from
// programming: neither a port that is taken nor a file that cannot be used.
package app

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/logtest"
	"github.com/slicecast/slicecast/internal/testenv"
)

// pretendVariable is set in processes that only look like an agent; see pretendAgent.
const pretendVariable = "SLICECAST_PRETEND_AGENT"

func TestMain(m *testing.M) {
	if os.Getenv(pretendVariable) != "" {
		_, _ = io.Copy(io.Discard, os.Stdin)
		return
	}
	testenv.Main(m)
}

// pretendAgent starts a process on a node that has the name and the arguments of an agent, and does
// nothing. It ends with the test.
func pretendAgent(t *testing.T, node *testenv.Node, args ...string) {
	t.Helper()
	name, err := os.ReadFile("/proc/self/comm")
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), strings.TrimSpace(string(name)))
	program, err := os.Executable()
	require.NoError(t, err)
	require.NoError(t, os.Symlink(program, path))
	c := exec.CommandContext(t.Context(), path, args...)
	c.Env = append(os.Environ(), pretendVariable+"=1")
	in, err := c.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, node.Do(c.Start))
	t.Cleanup(func() {
		require.NoError(t, in.Close())
		_ = c.Wait() // it may have been killed by the end of the test's context
	})
}

// start runs an agent until the test ends.
func start(t *testing.T, args ...string) *logtest.Buffer {
	t.Helper()
	out, _ := startLogged(t, args...)
	return out
}

// startLogged runs an agent until the test ends. It returns what the agent prints and logs.
func startLogged(t *testing.T, args ...string) (out, log *logtest.Buffer) {
	t.Helper()
	o, out, log := parse(t, args...), &logtest.Buffer{}, &logtest.Buffer{}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, o, slog.New(slog.NewTextHandler(log, nil)), out) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	return out, log
}

// freeAddress returns a loopback address on which nobody listens.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	return l.Addr().String()
}

const manifest = `
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIP: 10.96.0.80, ports: [{name: http, port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: %d}]
endpoints: [{addresses: [10.180.0.1], nodeName: node-1}]
`

func TestStandalone(t *testing.T) {
	dir := t.TempDir()
	write := func(port int) {
		path := filepath.Join(dir, "web.yaml")
		require.NoError(t, os.WriteFile(path+".new", fmt.Appendf(nil, manifest, port), 0o600))
		require.NoError(t, os.Rename(path+".new", path))
	}
	write(8080)
	health := freeAddress(t)
	out := start(t, "--source=file", "--manifests="+dir, "--programmer=printer", "--healthz-bind-address="+health)
	require.Eventually(t, func() bool { return readyz(t, health) == http.StatusOK }, 10*time.Second, 10*time.Millisecond)
	require.Contains(t, out.String(), "10.180.0.1:8080 on this node")
	write(9090)
	require.Eventually(t, func() bool {
		return strings.Contains(out.String(), "10.180.0.1:9090")
	}, 10*time.Second, 10*time.Millisecond)
}

func readyz(t *testing.T, address string) int {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := client.Get("http://" + address + "/readyz")
	if err != nil {
		return 0
	}
	defer func() { require.NoError(t, r.Body.Close()) }()
	return r.StatusCode
}

func TestUseOneCPU(t *testing.T) {
	before := runtime.GOMAXPROCS(2)
	defer runtime.GOMAXPROCS(before)
	t.Setenv("GOMAXPROCS", "2")
	UseOneCPU()
	require.Equal(t, 2, runtime.GOMAXPROCS(0), "as the operator says")
	t.Setenv("GOMAXPROCS", "")
	UseOneCPU()
	require.Equal(t, 1, runtime.GOMAXPROCS(0))
}

// TestNotReadyWithoutServer asserts that an agent that has never reached a server is alive but not
// ready.
func TestNotReadyWithoutServer(t *testing.T) {
	health := freeAddress(t)
	out := start(t, "--servers="+freeAddress(t), "--insecure-plaintext", "--programmer=printer", "--healthz-bind-address="+health)
	require.Eventually(t, func() bool { return readyz(t, health) == http.StatusServiceUnavailable }, 10*time.Second, 10*time.Millisecond)
	require.Empty(t, out.String(), "nothing is programmed before the agent knows something")
}

func TestStartErrorsNameTheFlag(t *testing.T) {
	dir := t.TempDir()
	for name, c := range map[string]struct {
		args []string
		says string
	}{
		"no manifests":          {[]string{"--source=file", "--manifests=" + filepath.Join(dir, "none")}, "directory of manifests"},
		"no address":            {[]string{"--source=file", "--manifests=" + dir, "--healthz-bind-address=nowhere"}, "--healthz-bind-address"},
		"no address of metrics": {[]string{"--source=file", "--manifests=" + dir, "--secure-metrics-bind-address=nowhere", "--metrics-token-audience=a", "--metrics-service-accounts=a/b"}, "--secure-metrics-bind-address"},
		"no kubeconfig":         {[]string{"--source=kube", "--kubeconfig=" + filepath.Join(dir, "none")}, "kubeconfig"},
		"not in cluster":        {[]string{"--server-service=a/b", "--insecure-plaintext"}, "kubeconfig"},
		"options invalid":       {[]string{"--source=kube", "--programmer=magic"}, "--programmer"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("KUBERNETES_SERVICE_HOST", "")
			o := parse(t, append(c.args, "--programmer=printer")...)
			if name == "options invalid" {
				o = parse(t, c.args...)
			}
			require.ErrorContains(t, Run(t.Context(), o, slog.New(slog.DiscardHandler), io.Discard), c.says)
		})
	}
}
