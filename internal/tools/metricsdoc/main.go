// Command metricsdoc writes docs/metrics.md. It creates the server and the agent as their commands
// do, in all configurations that have metrics of their own, and lists the metrics that they
// register.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	agent "github.com/slicecast/slicecast/agent/app"
	server "github.com/slicecast/slicecast/server/app"
)

func main() {
	if err := run(os.Args); err != nil {
		fmt.Fprintln(os.Stderr, "metricsdoc:", err)
		os.Exit(1)
	}
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

func run(args []string) error {
	if len(args) != 2 {
		return errors.New("usage: metricsdoc <path of the page to write>")
	}
	dir, err := os.MkdirTemp("", "slicecast-metrics-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	files, err := makeFiles(dir)
	if err != nil {
		return err
	}
	var page strings.Builder
	page.WriteString(`# Metrics

<!-- Generated from the code by internal/tools/metricsdoc. Do not edit; run 'make generate'. -->

The server and the agent serve these metrics at /metrics of their --metrics-bind-address, in the Prometheus format. They
also serve client_golang's metrics of the process (process_*) and the Go runtime (go_*). The names of counters end with
_total. A histogram has the series _bucket, _sum and _count.
`)
	for _, c := range []command{serverCommand(files), agentCommand(files)} {
		metrics, err := c.metrics()
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		fmt.Fprintf(&page, "\n## %s\n\n%s\n\n| metric | type | labels | |\n| --- | --- | --- | --- |\n", c.name, c.about)
		for _, m := range metrics {
			fmt.Fprintf(&page, "| `%s` | %s | %s | %s |\n", m.name, m.kind, strings.Join(m.labels, ", "), m.text())
		}
	}
	return os.WriteFile(args[1], []byte(page.String()), 0o644)
}

func serverCommand(f *files) command {
	fileSource := []string{"--source=file", "--manifests=" + f.manifests}
	tls := []string{"--tls-cert-file=" + f.cert, "--tls-private-key-file=" + f.key, "--client-ca-file=" + f.ca}
	return command{
		name: "slicecast-server", about: "For operators and observers; see [server/auth](../server/auth/doc.go).",
		variants: []variant{
			{slices.Concat(fileSource, []string{"--insecure-plaintext"}), []string{"--source=file"}},
			{slices.Concat(fileSource, tls), []string{"--source=file", "TLS"}},
			{slices.Concat(fileSource, tls, []string{"--kubeconfig=" + f.kubeconfig, "--agent-service-account=a/b"}),
				[]string{"--source=file", "TLS", "--agent-service-account"}},
			{slices.Concat([]string{"--kubeconfig=" + f.kubeconfig}, tls), []string{"--source=kube", "TLS"}},
			{slices.Concat([]string{"--source=upstream", "--upstream-servers=127.0.0.1:1", "--upstream-insecure-plaintext"}, tls),
				[]string{"--source=upstream", "TLS"}},
		},
		make: func(args []string, r *recorder) error {
			o := server.Options{Registry: r}
			fs := pflag.NewFlagSet("", pflag.ContinueOnError)
			o.AddFlags(fs)
			if err := fs.Parse(append(args, "--bind-address=127.0.0.1:0")); err != nil {
				return err
			}
			config, err := o.Config(slog.New(slog.DiscardHandler))
			if err != nil {
				return err
			}
			s, err := server.New(config)
			if err != nil {
				return err
			}
			return s.Run(ended()) // closes what New has opened
		},
	}
}

func agentCommand(f *files) command {
	servers := []string{"--servers=127.0.0.1:1", "--insecure-plaintext"}
	return command{
		name: "slicecast-agent", about: "For clients with a certificate of --metrics-client-ca-file.",
		variants: []variant{
			{servers, []string{"servers"}},
			{slices.Concat(servers, []string{"--checkpoint=" + f.checkpoint}), []string{"servers", "--checkpoint"}},
			{[]string{"--source=file", "--manifests=" + f.manifests}, []string{"--source=file"}},
			{[]string{"--source=kube", "--kubeconfig=" + f.kubeconfig}, []string{"--source=kube"}},
		},
		make: func(args []string, r *recorder) error {
			o := agent.Options{Registry: r}
			fs := pflag.NewFlagSet("", pflag.ContinueOnError)
			o.AddFlags(fs)
			// No programmer has metrics of its own, and the printer needs nothing from the machine.
			if err := fs.Parse(append(args, "--programmer=printer")); err != nil {
				return err
			}
			return agent.Run(ended(), o, slog.New(slog.DiscardHandler), io.Discard)
		},
	}
}

// ended returns a context that has ended, so that what runs with it stops at once.
func ended() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

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
	has := make(map[string][]int) // the variants that have a metric
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
			all[m.name] = documented{metric: m}
			has[m.name] = append(has[m.name], i)
		}
	}
	var out []documented
	for _, name := range slices.Sorted(maps.Keys(all)) {
		m := all[name]
		m.only = c.only(has[name])
		out = append(out, m)
	}
	return out, nil
}

// only returns the names of the properties that exactly these variants have, or "" if they are all
// variants.
func (c *command) only(variants []int) string {
	if len(variants) == len(c.variants) {
		return ""
	}
	// A property describes the variants if no other variant has it. It is redundant if a property
	// of more of these variants implies it.
	having := make(map[string][]int)
	for i, v := range c.variants {
		for _, w := range v.with {
			having[w] = append(having[w], i)
		}
	}
	subset := func(a, b []int) bool {
		return !slices.ContainsFunc(a, func(i int) bool { return !slices.Contains(b, i) })
	}
	var names []string
	for name, in := range having {
		if !subset(in, variants) {
			continue
		}
		implied := false
		for other, wider := range having {
			implied = implied || other != name && subset(in, wider) && subset(wider, variants) && len(wider) > len(in)
		}
		if !implied {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return cmp.Or(strings.Join(names, " or "), "some configurations")
}

// files are the files that the commands' flags name.
type files struct{ manifests, cert, key, ca, kubeconfig, checkpoint string }

func makeFiles(dir string) (*files, error) {
	f := &files{
		manifests: filepath.Join(dir, "manifests"), kubeconfig: filepath.Join(dir, "kubeconfig"), checkpoint: filepath.Join(dir, "checkpoint"),
	}
	if err := os.Mkdir(f.manifests, 0o700); err != nil {
		return nil, err
	}
	if err := os.WriteFile(f.kubeconfig, []byte(kubeconfig), 0o600); err != nil {
		return nil, err
	}
	return f, f.makeTLS(dir)
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
