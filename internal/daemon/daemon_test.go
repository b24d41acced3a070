// These tests prove what all commands share: the log's options, the signal that ends a command,
// health answers, the version, and an HTTP server that ends at once when its context does.
package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"runtime/debug"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func logOptions(t *testing.T, args ...string) *LogOptions {
	t.Helper()
	o := &LogOptions{}
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	o.AddFlags(fs)
	require.NoError(t, fs.Parse(args))
	return o
}

func TestLogging(t *testing.T) {
	for _, test := range []struct {
		args []string
		want string
	}{
		{nil, "level=INFO msg=info"},
		{[]string{"--log-level", "debug", "--log-format=json"}, `"level":"DEBUG","msg":"debug"`},
		{[]string{"--log-level=error"}, ""},
		// As people type it for other components of Kubernetes.
		{[]string{"-v=0"}, "level=INFO msg=info"},
		{[]string{"-v", "2"}, "level=INFO msg=info"},
		{[]string{"--v=3"}, "level=DEBUG msg=debug"},
		{[]string{"-v10"}, "level=DEBUG msg=debug"},
		{[]string{"-v=4", "--log-level=error"}, ""},
		{[]string{"--log-level=error", "-v=2"}, "level=INFO msg=info"},
	} {
		var out bytes.Buffer
		log, err := logOptions(t, test.args...).NewLogger(&out)
		require.NoError(t, err)
		log.Debug("debug")
		log.Info("info")
		require.Contains(t, out.String(), test.want)
		if test.want == "" {
			require.Empty(t, out.String())
		}
	}
}

func TestInvalidLogOptionsAreReported(t *testing.T) {
	_, err := logOptions(t, "--log-level=4").NewLogger(io.Discard)
	require.EqualError(t, err, `--log-level is "4": use debug, info, warn or error`)
	for _, wrong := range []string{"-v=debug", "-v=-1", "--v=99999999999999999999", "-v="} {
		fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
		(&LogOptions{}).AddFlags(fs)
		require.ErrorContains(t, fs.Parse([]string{wrong}), "use a number from 0 to 10, or --log-level")
	}
	_, err = logOptions(t, "--log-format=xml").NewLogger(io.Discard)
	require.EqualError(t, err, `--log-format is "xml": use text or json`)
}

func TestSignalEndsTheContext(t *testing.T) {
	ctx, stop := SignalContext(t.Context())
	defer stop()
	require.NoError(t, syscall.Kill(syscall.Getpid(), syscall.SIGTERM))
	select {
	case <-ctx.Done():
	case <-time.After(30 * time.Second):
		require.Fail(t, "the context is still active after SIGTERM")
	}
}

func TestHealthHandler(t *testing.T) {
	var problem error
	handler := HealthHandler(func() error { return problem })
	get := func(path string) (int, string) {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		return w.Code, w.Body.String()
	}
	for _, problem = range []error{nil, errors.New("not synced")} {
		for _, path := range []string{"/healthz", "/livez"} {
			code, body := get(path)
			require.Equal(t, http.StatusOK, code)
			require.Equal(t, "ok\n", body)
		}
		code, body := get("/readyz")
		if problem == nil {
			require.Equal(t, http.StatusOK, code)
		} else {
			require.Equal(t, http.StatusServiceUnavailable, code)
			require.Equal(t, "not synced\n", body)
		}
	}
	code, _ := get("/metrics")
	require.Equal(t, http.StatusNotFound, code)
}

func TestMetricsHandler(t *testing.T) {
	w := httptest.NewRecorder()
	MetricsHandler(NewRegistry()).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	require.Contains(t, w.Body.String(), "go_goroutines")
	require.Contains(t, w.Body.String(), "process_resident_memory_bytes")
}

func TestVersion(t *testing.T) {
	require.NotEmpty(t, Version())
	commit := func(version, modified string) *debug.BuildInfo {
		return &debug.BuildInfo{Main: debug.Module{Version: version}, Settings: []debug.BuildSetting{
			{Key: "vcs.revision", Value: "abc"}, {Key: "vcs.modified", Value: modified},
		}}
	}
	for want, info := range map[program]*debug.BuildInfo{
		{"v1.2.3", "unknown"}:      {Main: debug.Module{Version: "v1.2.3"}},
		{"v1.2.3", "abc"}:          commit("v1.2.3", "false"),
		{"abc", "abc"}:             commit("(devel)", "false"),
		{"abc-dirty", "abc-dirty"}: commit("(devel)", "true"),
		{"devel", "unknown"}:       {},
	} {
		require.Equal(t, want, recorded(info))
	}
}

func TestTheLinkersVersionWins(t *testing.T) {
	defer func(r, c string) { release, commit = r, c }(release, commit)
	release, commit = "v1.2.3-test", "0123abc"
	root := &cobra.Command{Use: "tool", Run: func(*cobra.Command, []string) {}}
	AddVersion(root)
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetArgs([]string{"--version"})
	require.NoError(t, root.Execute())
	require.Equal(t, fmt.Sprintf("tool v1.2.3-test\ncommit: 0123abc\nGo: %s\nplatform: %s/%s\n",
		runtime.Version(), runtime.GOOS, runtime.GOARCH), out.String())
	require.Equal(t, "v1.2.3-test", Version())
}
