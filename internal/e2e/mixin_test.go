// This test proves that what watches kube-proxy works with an agent: each query of the dashboard of
// kubernetes-mixin that returns data of a kube-proxy returns data of an agent, and its alerts fire
// on the same failures.
package e2e

import (
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/prometheus"
)

// mixinQueries are the queries of dashboards/proxy.libsonnet of
// https://github.com/kubernetes-monitoring/kubernetes-mixin at commit
// aa38e2bfa7ea6ec6870420b483046afe790a6411, rendered with its default settings.
var mixinQueries = []string{
	`sum(up{cluster="$cluster", job="kube-proxy"})`,
	`sum(rate(kubeproxy_sync_proxy_rules_duration_seconds_count{cluster="$cluster", job="kube-proxy", instance=~"$instance"}[$__rate_interval]))`,
	`histogram_quantile(0.99,rate(kubeproxy_sync_proxy_rules_duration_seconds_bucket{cluster="$cluster", job="kube-proxy", instance=~"$instance"}[$__rate_interval]))`,
	`sum(rate(kubeproxy_network_programming_duration_seconds_count{cluster="$cluster", job="kube-proxy", instance=~"$instance"}[$__rate_interval]))`,
	`histogram_quantile(0.99, sum(rate(kubeproxy_network_programming_duration_seconds_bucket{cluster="$cluster", job="kube-proxy", instance=~"$instance"}[$__rate_interval])) by (instance, le))`,
	`sum(rate(rest_client_requests_total{cluster="$cluster",job="kube-proxy", instance=~"$instance",code=~"2.."}[$__rate_interval]))`,
	`sum(rate(rest_client_requests_total{cluster="$cluster",job="kube-proxy", instance=~"$instance",code=~"3.."}[$__rate_interval]))`,
	`sum(rate(rest_client_requests_total{cluster="$cluster",job="kube-proxy", instance=~"$instance",code=~"4.."}[$__rate_interval]))`,
	`sum(rate(rest_client_requests_total{cluster="$cluster",job="kube-proxy", instance=~"$instance",code=~"5.."}[$__rate_interval]))`,
	`histogram_quantile(0.99, sum(rate(rest_client_request_duration_seconds_bucket{cluster="$cluster", job="kube-proxy",instance=~"$instance",verb="POST"}[$__rate_interval])) by (verb, le))`,
	`histogram_quantile(0.99, sum(rate(rest_client_request_duration_seconds_bucket{cluster="$cluster", job="kube-proxy", instance=~"$instance", verb="GET"}[$__rate_interval])) by (verb, le))`,
	`process_resident_memory_bytes{cluster="$cluster", job="kube-proxy",instance=~"$instance"}`,
	`rate(process_cpu_seconds_total{cluster="$cluster", job="kube-proxy",instance=~"$instance"}[$__rate_interval])`,
	`go_goroutines{cluster="$cluster", job="kube-proxy",instance=~"$instance"}`,
	// The values of the variables cluster and instance.
	`up{job="kube-proxy"}`,
	`up{job="kube-proxy", cluster="$cluster", job="kube-proxy"}`,
}

// mixinRules are the alerts of alerts/kube_proxy.libsonnet at the same commit.
const mixinRules = `groups:
- name: kubernetes-system-kube-proxy
  rules:
  - {alert: KubeProxyDown, expr: 'absent(up{job="kube-proxy"})', for: 15m}
  - {alert: KubeProxyInstanceUnreachable, expr: 'up{job="kube-proxy"} == 0', for: 15m}
`

var networkProgramming = regexp.MustCompile(`(?m)^kubeproxy_network_programming_duration_seconds_count.*$`)

func TestKubernetesMixin(t *testing.T) {
	c := startCluster(t, shared, fromReplicas)
	c.b.agent.Terminate()
	out, err := c.b.Run(t.Context(), binaries+"/"+agentCommand, "cleanup")
	require.NoError(t, err, out)
	c.setAddresses(c.b)
	proxy := c.startKubeProxy(c.b, "iptables", "kube-proxy")
	const page = "http://127.0.0.1:10249/metrics"
	proxy.AwaitOK(t, startTimeout, page)
	pods := c.Deployment("web", 4)
	c.Service("web", selecting("web", tcp("tcp", 80, onPodPort())))

	names := []string{"agent", "kube-proxy"}
	hosts := map[string]*testenv.Host{"agent": c.a.Host, "kube-proxy": c.b.Host}
	timelines := map[string]*prometheus.Timeline{"agent": {}, "kube-proxy": {}}
	scrape := func() {
		for name, l := range timelines {
			l.Scrape(t.Context(), prometheus.Target{Job: "kube-proxy", Instance: name, Scrape: scraper(hosts[name], nil, page)})
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

	variables := strings.NewReplacer("$cluster", "", "$instance", ".+", "$__rate_interval", "2m")
	data := make(map[string][]string) // the queries with data
	for _, name := range names {
		l := timelines[name]
		var queries []prometheus.Query
		for _, q := range mixinQueries {
			queries = append(queries, prometheus.Query{Expression: variables.Replace(q), Time: busy})
		}
		result, err := l.Evaluate(t.Context(), mixinRules, queries...)
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
