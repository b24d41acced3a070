// TestMetricsPage holds docs/metrics.md to the code. It creates the server and the agent as their
// commands do, in all configurations that have metrics of their own, and lists the metrics that
// they register.
package metricsdoc

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	agent "github.com/slicecast/slicecast/agent/app"
	"github.com/slicecast/slicecast/internal/testca"
	server "github.com/slicecast/slicecast/server/app"
)

var update = flag.Bool("update", false, "write docs/metrics.md instead of comparing it")

// TestMetricsPage requires that docs/metrics.md is current.
func TestMetricsPage(t *testing.T) {
	const path = "../../../docs/metrics.md"
	want, err := page(t.TempDir())
	require.NoError(t, err)
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(want), 0o644))
	}
	have, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, want, string(have), "docs/metrics.md is not current: run 'make generate'")
}

// variant is a way to start a command.
type variant struct {
	args []string
	// with holds the properties of the variant that may have metrics of their own, by their names
	// on the page.
	with []string
}

// command is a command that has metrics.
type command struct {
	name, about string
	variants    []variant
	// make creates the command with flags, as far as its metrics need, and registers them with r.
	make func(args []string, r *recorder) error
}

// page returns the content of docs/metrics.md. dir is an empty folder.
func page(dir string) (string, error) {
	if err := makeFiles(dir); err != nil {
		return "", err
	}
	var page strings.Builder
	page.WriteString(`# Metrics

<!-- Generated from the code by internal/tools/metricsdoc. Do not edit; run 'make generate'. -->

The server and the agent serve these metrics at /metrics of their --metrics-bind-address, in the Prometheus format. They
also serve client_golang's metrics of the process (process_*) and the Go runtime (go_*). The names of counters end with
_total, as do those of two gauges of kube-proxy. A histogram has the series _bucket, _sum and _count.
`)
	for _, c := range []command{serverCommand(dir), agentCommand(dir)} {
		metrics, err := c.metrics()
		if err != nil {
			return "", fmt.Errorf("%s: %w", c.name, err)
		}
		fmt.Fprintf(&page, "\n## %s\n\n%s\n\n| metric | type | labels | |\n| --- | --- | --- | --- |\n", c.name, c.about)
		for _, m := range metrics {
			fmt.Fprintf(&page, "| `%s` | %s | %s | %s |\n", m.name, m.kind, strings.Join(m.labels, ", "), m.text())
		}
	}
	return page.String(), nil
}

func serverCommand(dir string) command {
	fileSource := []string{"--source=file", "--manifests=" + dir}
	tls := []string{
		"--tls-cert-file=" + dir + "/server.crt", "--tls-private-key-file=" + dir + "/server.key",
		"--client-ca-file=" + dir + "/ca.crt",
	}
	secret := []string{"--tls-secret=a/b", "--ca-config-map=a/b", "--server-service=a/b"}
	kubeconfig := "--kubeconfig=" + dir + "/kubeconfig"
	return command{
		name: "slicecast-server", about: "For operators and observers; see [internal/auth](../internal/auth/doc.go).",
		variants: []variant{
			{slices.Concat(fileSource, []string{"--insecure-plaintext"}), []string{"--source=file"}},
			{slices.Concat(fileSource, tls), []string{"--source=file", "TLS"}},
			{slices.Concat(fileSource, tls, []string{kubeconfig, "--agent-service-account=a/b"}),
				[]string{"--source=file", "TLS", "--agent-service-account"}},
			{slices.Concat(fileSource, secret, []string{kubeconfig, "--agent-service-account=a/b"}),
				[]string{"--source=file", "TLS", "--agent-service-account", "--tls-secret"}},
			{slices.Concat([]string{kubeconfig}, tls), []string{"--source=kube", "TLS"}},
			{slices.Concat([]string{"--source=upstream", "--upstream-servers=127.0.0.1:1", "--upstream-insecure-plaintext"}, tls),
				[]string{"--source=upstream", "TLS"}},
		},
		make: func(args []string, r *recorder) error {
			o := server.Options{Config: server.Config{Registry: r}}
			fs := pflag.NewFlagSet("", pflag.ContinueOnError)
			o.AddFlags(fs)
			if err := fs.Parse(append(args, "--bind-address=127.0.0.1:0", "--metrics-bind-address=127.0.0.1:0")); err != nil {
				return err
			}
			config, err := o.Complete(slog.New(slog.DiscardHandler))
			if err != nil {
				return err
			}
			s, err := server.New(config)
			if err != nil {
				return err
			}
			return s.Run(ended) // closes what New has opened
		},
	}
}

func agentCommand(dir string) command {
	servers := []string{"--servers=127.0.0.1:1", "--insecure-plaintext"}
	secure := []string{"--secure-metrics-bind-address=127.0.0.1:0"}
	certificates := []string{
		"--metrics-cert-file=" + dir + "/server.crt", "--metrics-key-file=" + dir + "/server.key",
		"--metrics-client-ca-file=" + dir + "/ca.crt",
	}
	const programs = "another --programmer than shadow"
	return command{
		name: "slicecast-agent", about: `For everybody on the node, and at --secure-metrics-bind-address for [others](configuration.md#metrics-over-tls): clients
with a certificate of --metrics-client-ca-file, and those of --metrics-service-accounts.

Metrics that begin with kubeproxy_ have the names, types, labels and buckets of kube-proxy 1.37, and its meaning unless
the description says otherwise. [configuration.md](configuration.md#kube-proxys-pages) says which are missing.`,
		variants: []variant{
			{servers, []string{"servers", programs}},
			{slices.Concat(servers, []string{"--checkpoint=" + dir + "/checkpoint"}), []string{"servers", programs, "--checkpoint"}},
			{[]string{"--source=file", "--manifests=" + dir}, []string{programs, "--source=file"}},
			{[]string{"--source=kube", "--kubeconfig=" + dir + "/kubeconfig"}, []string{programs, "--source=kube"}},
			{slices.Concat(servers, []string{"--programmer=shadow"}), []string{"servers", "--programmer=shadow"}},
			{slices.Concat(servers, secure, certificates), []string{"servers", programs, "--secure-metrics-bind-address"}},
			{slices.Concat(servers, secure, []string{"--metrics-token-audience=a", "--metrics-service-accounts=a/b", "--kubeconfig=" + dir + "/kubeconfig"}),
				[]string{"servers", programs, "--secure-metrics-bind-address", "--metrics-token-audience"}},
		},
		make: func(args []string, r *recorder) error {
			o := agent.Options{Registry: r}
			fs := pflag.NewFlagSet("", pflag.ContinueOnError)
			o.AddFlags(fs)
			// Only the shadow has other metrics, and the printer needs nothing from the machine.
			if err := fs.Parse(append([]string{"--programmer=printer"}, args...)); err != nil {
				return err
			}
			return agent.Run(ended, o, slog.New(slog.DiscardHandler), io.Discard)
		},
	}
}

// ended is a context that has ended, so that what runs with it stops at once.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// documented is a metric with the description of the variants that have it.
type documented struct {
	metric
	only string // empty if all variants have the metric
}

func (m *documented) text() string {
	text := strings.ReplaceAll(m.help, "|", `\|`)
	if m.only != "" {
		text += " *Only with " + m.only + ".*"
	}
	return text
}

// metrics returns the metrics of all variants by name.
func (c *command) metrics() ([]documented, error) {
	all := make(map[string]documented)
	has := make(map[string]variants)
	for i, v := range c.variants {
		r := newRecorder()
		if err := c.make(v.args, r); err != nil {
			return nil, fmt.Errorf("%s: %w", strings.Join(v.args, " "), err)
		}
		metrics, err := r.metrics()
		if err != nil {
			return nil, err
		}
		for _, m := range metrics {
			has[m.name] |= 1 << i
			all[m.name] = documented{m, c.only(has[m.name])}
		}
	}
	return slices.SortedFunc(maps.Values(all), func(a, b documented) int { return cmp.Compare(a.name, b.name) }), nil
}

// variants is a set of a command's variants, a bit for each.
type variants uint

func (v variants) contains(o variants) bool { return o&^v == 0 }

// only returns the names of the properties that exactly these variants have, or "" if they are all
// variants.
func (c *command) only(these variants) string {
	if these == 1<<len(c.variants)-1 {
		return ""
	}
	// A property describes the variants if no other variant has it. It is redundant if a property
	// of more of these variants implies it.
	having := make(map[string]variants)
	for i, v := range c.variants {
		for _, name := range v.with {
			having[name] |= 1 << i
		}
	}
	maps.DeleteFunc(having, func(_ string, in variants) bool { return !these.contains(in) })
	var names []string
	for _, name := range slices.Sorted(maps.Keys(having)) {
		implied := false
		for _, wider := range having {
			implied = implied || wider != having[name] && wider.contains(having[name])
		}
		if !implied {
			names = append(names, name)
		}
	}
	return cmp.Or(strings.Join(names, " or "), "some configurations")
}

// makeFiles writes the files that the commands' flags name. dir itself is the folder of manifests.
func makeFiles(dir string) error {
	ca, err := testca.New()
	if err != nil {
		return err
	}
	certificate, err := ca.Server("localhost")
	if err != nil {
		return err
	}
	_, writeCA := ca.WriteCA(dir)
	_, _, write := testca.Write(dir, "server", certificate)
	return errors.Join(writeCA, write, os.WriteFile(filepath.Join(dir, "kubeconfig"), []byte(kubeconfig), 0o600))
}

// kubeconfig is for an API server that does not exist.
const kubeconfig = `
apiVersion: v1
kind: Config
current-context: none
contexts: [{name: none, context: {cluster: none, user: none}}]
clusters: [{name: none, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: none, user: {}}]
`
