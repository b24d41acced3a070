// These tests prove that inspect reads the pages of the agent that runs on the node. An agent that
// is not meant to serve them, as a shadow or beside kube-proxy, lacks nothing. Inspect then prints
// its settings and says what it does not serve.
package app

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/inspect"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/testenv"
)

// runInspect returns the parts about the agent that inspect prints on a node.
func runInspect(t *testing.T, node *testenv.Node) map[string]inspect.Part {
	t.Helper()
	var out bytes.Buffer
	c := NewCommand()
	c.SetArgs([]string{"inspect"})
	c.SetOut(&out)
	require.NoError(t, node.Do(func() error { return c.ExecuteContext(t.Context()) }))
	parts := make(map[string]inspect.Part)
	for decoder := json.NewDecoder(&out); ; {
		var p inspect.Part
		err := decoder.Decode(&p)
		if errors.Is(err, io.EOF) {
			return parts
		}
		require.NoError(t, err)
		if name, ok := strings.CutPrefix(p.Name, "agent/"); ok {
			parts[name] = p
		}
	}
}

func TestInspectAgentWithoutPages(t *testing.T) {
	for name, test := range map[string]struct {
		file, setting string
		args          []string
	}{
		"shadow":            {"programmer: shadow", `"programmer": "shadow"`, nil},
		"beside kube-proxy": {"besideKubeProxy: true", `"besideKubeProxy": true`, nil},
		"no address":        {"", `"programmer": "ipvs"`, []string{"--metrics-bind-address=", "--programmer=ipvs"}},
	} {
		t.Run(name, func(t *testing.T) {
			node := testenv.NewNetwork(t).AddNode("a")
			path := writeConfig(t, "nodeName: node-7\nservers: [a.example:8472]\n"+test.file)
			pretendAgent(t, node, append([]string{"--config=" + path, "--cluster-cidr=10.9.0.0/16"}, test.args...)...)
			// What answers at the default address is kube-proxy, or nothing.
			parts := runInspect(t, node)
			require.Len(t, parts, 2)
			for _, p := range parts {
				require.Empty(t, p.Error, p.Name)
			}
			for _, text := range []string{`"slicecast.io": {`, `"nodeName": "node-7"`, `"clusterCIDR": "10.9.0.0/16"`, test.setting} {
				require.Contains(t, parts["configz.txt"].Content, text)
			}
			require.Contains(t, parts["not-served.txt"].Content,
				"the agent does not serve metrics, configz, flagz, statusz, proxyMode, healthz: --metrics-bind-address is empty")
		})
	}
}

func TestInspectAgentWithPages(t *testing.T) {
	node := testenv.NewNetwork(t).AddNode("a")
	// Connections are made by other threads, which are not on the node.
	listener, err := net.Listen("tcp", "127.0.0.1:10250")
	require.NoError(t, err)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Server", daemon.AgentServer)
		_, _ = io.WriteString(w, "page "+r.URL.Path)
	})}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { require.NoError(t, server.Close()) })
	// A shadow leaves kube-proxy's port, and keeps the other address.
	path := writeConfig(t, "programmer: shadow\npages: [metrics, configz]\nsecureMetricsBindAddress: ':8476'")
	pretendAgent(t, node, "--config="+path, "--servers=a.example:8472", "--metrics-bind-address=127.0.0.1:10249,127.0.0.1:10250")
	parts := runInspect(t, node)
	require.Len(t, parts, 3)
	require.Equal(t, "page /metrics", parts["metrics.txt"].Content)
	require.Equal(t, "page /configz", parts["configz.txt"].Content)
	require.Equal(t, "By its settings, the agent does not serve flagz, statusz, proxyMode, healthz: --pages does not contain them.\n",
		parts["not-served.txt"].Content)
}

func TestInspectWithoutAgent(t *testing.T) {
	parts := runInspect(t, testenv.NewNetwork(t).AddNode("a"))
	require.Equal(t, map[string]inspect.Part{"configz.txt": {Name: "agent/configz.txt", Error: errNoAgent.Error()}}, parts)
}
