// This test proves that what watches kube-proxy works with an agent as the chart installs it. Only
// what the chart keeps in the job kube-proxy counts. Each query of kubernetes-mixin's dashboard
// that returns data of a kube-proxy returns data of an agent. The alerts fire on the same failures.
package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/prometheus"
)

// mixin is what kubernetes-mixin has about kube-proxy, with its default settings, as
// internal/tools/mixin/render.sh renders it from the mixin's jsonnet.
type mixin struct {
	Groups             []any `json:"groups"` // of alerts, as in a file of rules
	Queries, Variables []string
}

// readMixin returns the mixin. The queries of its variables become those of the series that the
// values come from.
func readMixin(t *testing.T) (rules string, queries []string) {
	t.Helper()
	content, err := os.ReadFile("testdata/kubernetes-mixin.json")
	require.NoError(t, err)
	var m mixin
	require.NoError(t, json.Unmarshal(content, &m))
	require.NotEmpty(t, m.Groups)
	labelValues := regexp.MustCompile(`^label_values\((.+), (\w+)\)$`)
	for _, v := range m.Variables {
		parts := labelValues.FindStringSubmatch(v)
		require.NotNil(t, parts, v)
		m.Queries = append(m.Queries, parts[1])
	}
	groups, err := json.Marshal(map[string]any{"groups": m.Groups}) // JSON is YAML
	require.NoError(t, err)
	return string(groups), m.Queries
}

// startLikeTheChart starts the agent on a node anew, with the flags of the DaemonSet and the
// settings of the ConfigMap that are made from the chart. Files, names and ranges are those of the
// test. There is no Pod, so a kubeconfig takes the place of the Pod's account, and a certificate
// that of its token.
func (c *cluster) startLikeTheChart(n *node) {
	c.t.Helper()
	var daemonSet appsv1.DaemonSet
	var settings corev1.ConfigMap
	for path, object := range map[string]any{"agent.yaml": &daemonSet, "config.yaml": &settings} {
		content, err := os.ReadFile(filepath.Join("../../deploy/kubernetes", path))
		require.NoError(c.t, err)
		first, _, _ := strings.Cut(string(content), "\n---\n")
		require.NoError(c.t, yaml.Unmarshal([]byte(first), object))
	}
	var config map[string]any
	require.NoError(c.t, yaml.Unmarshal([]byte(settings.Data["agent.yaml"]), &config))
	require.NotEmpty(c.t, config)
	config["clusterCIDR"] = clusterCIDRs
	content, err := yaml.Marshal(config)
	require.NoError(c.t, err)
	cert, key := writeClientCertificate(c.t, c.dir, n.Name, c.cp.ConfigFor("system:node:"+n.Name, "system:nodes"))
	replacements := map[string][]string{
		"--config":         {"--config=" + writeFile(c.t, c.dir, "agent.yaml", content)},
		"--node-name":      {"--node-name=" + n.Name},
		"--server-service": {"--server-service=" + c.replicas.service(), "--kubeconfig=" + c.replicas.kubeconfig()},
		"--server-name":    {"--server-name=" + replicaName},
		"--ca-file":        {"--ca-file=" + c.serverCA},
		"--ca-config-map":  nil, // there is the file
		"--token-file":     {"--client-cert-file=" + cert, "--client-key-file=" + key},
		"--checkpoint":     {"--checkpoint=" + filepath.Join(c.dir, "checkpoint")},
		"--status-socket":  {"--status-socket=" + filepath.Join(c.dir, "agent.sock")},
	}
	var args []string
	for _, arg := range daemonSet.Spec.Template.Spec.Containers[0].Args {
		name, _, _ := strings.Cut(arg, "=")
		require.Contains(c.t, replacements, name, "a new flag of the chart")
		args = append(args, replacements[name]...)
	}
	n.agent.Terminate()
	n.agent = newProcess(c.t, n.Host, agentCommand, "agent on "+n.Name, "127.0.0.1:10256", args)
	n.agent.Start()
	n.agent.AwaitReady()
}

// keptInJob returns a function that leaves out of a page of metrics what the chart's PodMonitor for
// the job kube-proxy does not keep.
func keptInJob(t *testing.T) func(page string) string {
	t.Helper()
	template, err := os.ReadFile("../../deploy/helm/slicecast/templates/monitoring.yaml")
	require.NoError(t, err)
	rule := regexp.MustCompile(`\{sourceLabels: \[__name__\], regex: (\S+), action: keep\}`).FindAllStringSubmatch(string(template), -1)
	require.Len(t, rule, 1)
	kept := regexp.MustCompile(`^(# \w+ )?` + rule[0][1] + `$`)
	name := regexp.MustCompile(`^(# \w+ )?\w+`)
	return func(page string) string {
		var lines []string
		for line := range strings.Lines(page) {
			if kept.MatchString(name.FindString(line)) {
				lines = append(lines, line)
			}
		}
		return strings.Join(lines, "")
	}
}

var networkProgramming = regexp.MustCompile(`(?m)^kubeproxy_network_programming_duration_seconds_count.*$`)

func TestKubernetesMixin(t *testing.T) {
	c := startCluster(t, shared, fromReplicas)
	c.b.agent.Terminate()
	out, err := c.b.Run(t.Context(), binaries+"/"+agentCommand, "cleanup")
	require.NoError(t, err, out)
	c.setAddresses(c.b)
	proxy := c.startKubeProxy(c.b, "iptables", "kube-proxy")
	c.startLikeTheChart(c.a)
	const page = "http://127.0.0.1:10249/metrics"
	proxy.AwaitOK(t, startTimeout, page)
	pods := c.Deployment("web", 4)
	c.Service("web", selecting("web", tcp("tcp", 80, onPodPort())))

	names := []string{"agent", "kube-proxy"}
	hosts := map[string]*testenv.Host{"agent": c.a.Host, "kube-proxy": c.b.Host}
	timelines := map[string]*prometheus.Timeline{"agent": {}, "kube-proxy": {}}
	keep := map[string]func(string) string{"agent": keptInJob(t), "kube-proxy": func(page string) string { return page }}
	scrape := func() {
		for name, l := range timelines {
			l.Scrape(t.Context(), prometheus.Target{Job: "kube-proxy", Instance: name, Scrape: func(ctx context.Context) (string, error) {
				text, err := scraper(hosts[name], nil, page)(ctx)
				return keep[name](text), err
			}})
		}
	}
	// programmed returns the counts of changes whose time to the kernel is known.
	programmed := func(name string) (string, error) {
		text, err := scraper(hosts[name], nil, page)(t.Context())
		return strings.Join(networkProgramming.FindAllString(text, -1), " "), err
	}
	scrape()
	changes := 0
	for range 4 {
		for _, name := range names {
			before, err := programmed(name)
			require.NoError(t, err)
			// A change has a time unless another one had the same second.
			testenv.Eventually(t, settleTimeout, func() error {
				c.SetReady(pods[changes%4], changes/4%2 == 1)
				changes++
				now, err := programmed(name)
				if err == nil && now == before {
					err = errors.New(name + " has not programmed a change")
				}
				return err
			})
		}
		scrape()
	}
	busy := timelines["agent"].Now()
	healthy := make(map[string]time.Time)
	for name, l := range timelines {
		l.Hold(time.Hour)
		healthy[name] = l.Now()
	}
	c.a.agent.Kill()
	require.NoError(t, proxy.Kill())
	scrape()
	killed := make(map[string]time.Time)
	for name, l := range timelines {
		l.Hold(20 * time.Minute)
		killed[name] = l.Now()
		l.Scrape(t.Context()) // the target is gone
		l.Hold(20 * time.Minute)
	}

	rules, mixinQueries := readMixin(t)
	variables := strings.NewReplacer("$cluster", "", "$instance", ".+", "$__rate_interval", "2m")
	data := make(map[string][]string) // the queries with data
	for _, name := range names {
		l := timelines[name]
		var queries []prometheus.Query
		for _, q := range mixinQueries {
			queries = append(queries, prometheus.Query{Expression: variables.Replace(q), Time: busy})
		}
		result, err := l.Evaluate(t.Context(), rules, queries...)
		require.NoError(t, err)
		for i, samples := range result.Samples {
			if slices.ContainsFunc(samples, func(s prometheus.Sample) bool { return s.Value != "NaN" }) {
				data[name] = append(data[name], mixinQueries[i])
			}
		}
		require.Empty(t, result.Firing(time.Time{}, healthy[name]), name)
		require.Equal(t, []string{"KubeProxyInstanceUnreachable"}, result.Firing(healthy[name], killed[name]), name)
		require.Equal(t, []string{"KubeProxyDown"}, result.Firing(killed[name].Add(time.Minute), l.Now()), name)
	}
	require.Subset(t, data["agent"], data["kube-proxy"])
	require.Greater(t, len(data["kube-proxy"]), 9)
	t.Logf("%d of %d queries return data of kube-proxy, %d of an agent", len(data["kube-proxy"]), len(mixinQueries), len(data["agent"]))
}
