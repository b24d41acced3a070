// These tests prove which kubeconfigs are accepted, and which of the client's log lines are shown
// at which level.
package kube

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/klog/v2"
)

const kubeconfig = `apiVersion: v1
kind: Config
current-context: c
clusters: [{name: k, cluster: {server: "https://192.0.2.1:6443", certificate-authority: ca.crt}}]
users: [{name: u, user: {token: t}}]
contexts: [{name: c, context: {cluster: k, user: u}}]
`

func TestConfig(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "kubeconfig")
	load := func(text string) error {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		_, err := Config(path)
		return err
	}
	require.ErrorContains(t, load(kubeconfig), "ca.crt: no such file")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "ca.crt"), nil, 0o600))
	require.NoError(t, load(kubeconfig))
	config, err := Config(path)
	require.NoError(t, err)
	require.Equal(t, "https://192.0.2.1:6443", config.Host)
	require.Equal(t, filepath.Join(dir, "ca.crt"), config.CAFile, "relative to the file")
	require.Equal(t, "application/vnd.kubernetes.protobuf", config.ContentType)
	require.True(t, strings.HasPrefix(config.UserAgent, "slicecast/"), config.UserAgent)
	require.Positive(t, config.QPS)

	require.ErrorContains(t, load(strings.Replace(kubeconfig, "current-context: c\n", "", 1)), "has no current-context: set one")
	require.ErrorContains(t, load(strings.Replace(kubeconfig, "current-context: c", "current-context: d", 1)), `the current-context "d" is not among its contexts`)
	require.ErrorContains(t, load(strings.Replace(kubeconfig, "cluster: k", "cluster: l", 1)), "correct its cluster and user")
	require.ErrorContains(t, load("not: [yaml"), "kubeconfig ")
	_, err = Config(filepath.Join(dir, "none"))
	require.ErrorIs(t, err, os.ErrNotExist)

	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	_, err = Config("")
	require.ErrorContains(t, err, "no kubeconfig, and not running in a pod: set --kubeconfig")
	t.Setenv("KUBERNETES_SERVICE_HOST", "192.0.2.1")
	t.Setenv("KUBERNETES_SERVICE_PORT", "443")
	_, err = Config("")
	require.ErrorContains(t, err, "does the pod mount its ServiceAccount's token?")
}

func TestClientLogsAreQuiet(t *testing.T) {
	var out strings.Builder
	logger := func(level slog.Level) *slog.Logger {
		return slog.New(quietHandler{slog.NewTextHandler(&out, &slog.HandlerOptions{Level: level})})
	}
	for _, c := range []struct {
		level, shown slog.Level
		want         string // level in the output; empty if nothing is written
	}{
		{slog.LevelError, slog.LevelInfo, "WARN"},
		{slog.LevelInfo, slog.LevelInfo, ""},
		{slog.LevelInfo, slog.LevelDebug, "DEBUG"},
		{slog.Level(-4), slog.LevelDebug, "DEBUG"}, // klog's V(4)
		{slog.Level(-8), slog.LevelDebug, ""},
	} {
		out.Reset()
		logger(c.shown).With("a", 1).WithGroup("g").Log(t.Context(), c.level, "message")
		if c.want == "" {
			require.Empty(t, out.String())
		} else {
			require.Contains(t, out.String(), "level="+c.want+" msg=message a=1")
		}
	}
	require.False(t, klog.Background().V(0).Enabled(), "TestMain has routed klog's output to nowhere")
}
