// This file writes a bug report of an installation, and requires that it has what real servers,
// agents and kubelets say.
package e2e

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"strings"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/plugin"
)

// requireBugreport requires that an administrator's bug report lacks nothing.
func (i install) requireBugreport() {
	i.Helper()
	var out, progress bytes.Buffer
	c := plugin.NewCommand()
	c.SetOut(&out)
	c.SetErr(&progress)
	c.SetArgs([]string{"--kubeconfig=" + i.Kubeconfig, "bugreport", "--output=-"})
	_, err := daemon.Execute(i.Context(), c)
	code := plugin.Code(c, err)
	i.Logf("kubectl slicecast bugreport: %d bytes\n%s", out.Len(), progress.String())
	zip, err := gzip.NewReader(&out)
	require.NoError(i, err)
	files := make(map[string]string)
	for archive := tar.NewReader(zip); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(i, err)
		content, err := io.ReadAll(archive)
		require.NoError(i, err)
		_, path, _ := strings.Cut(h.Name, "/")
		files[path] = string(content)
	}
	_, missing, _ := strings.Cut(files["index.html"], "What is missing</h2>")
	require.Zero(i, code, missing)
	for _, node := range []string{"node-1", "node-2"} {
		for file, text := range map[string]string{
			"status.json": `"nodeName"`, "log.txt": "level=INFO", "pod.yaml": "--node-name=$(NODE_NAME)", "rules/nftables.txt": "slicecast",
			"rules/iptables-nft-save.txt": "", "kernel/version.txt": "Linux", "kernel/conntrack.txt": "nf_conntrack_max",
			"agent/metrics.txt": "slicecast_agent_", "agent/configz.txt": "{",
		} {
			path := "nodes/" + node + "/" + file
			require.Contains(i, files, path)
			require.Contains(i, files[path], text, path)
		}
	}
	servers := 0
	for path, content := range files {
		require.NotContains(i, content, "PRIVATE KEY", path)
		require.NotRegexp(i, `eyJ[\w-]{10,}\.eyJ`, content, path)
		if strings.HasPrefix(path, "servers/") && strings.HasSuffix(path, "/metrics.txt") {
			servers++
			require.Contains(i, content, "slicecast_server_", path)
		}
	}
	require.Equal(i, 2, servers)
	require.Contains(i, files["cluster/slicecast-agents/config.yaml"], "programmer")
}
