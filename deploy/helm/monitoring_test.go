// These tests prove that the chart has nothing for Prometheus and Grafana unless asked. Asked, it
// has what Prometheus' operator and Grafana's sidecar expect: PodMonitors that fit the Pods, their
// ports, and certificates or tokens, the generated rules, and the generated dashboards.
package helm

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/testenv/repository"
)

// monitored are values with everything for Prometheus and Grafana.
var monitored = []string{
	"--set=monitoring.podMonitors.enabled=true,monitoring.podMonitors.clientSecret=prometheus,monitoring.podMonitors.interval=15s",
	"--set=monitoring.podMonitors.labels.release=stack,monitoring.agents.servingSecret=agents,monitoring.agents.port=9999",
	"--set=monitoring.rules.enabled=true,monitoring.rules.labels.release=stack",
	"--set=monitoring.dashboards.enabled=true,monitoring.dashboards.annotations.folder=Network",
}

// strictly converts an object into a type that must have all of its fields.
func strictly(t *testing.T, from *unstructured.Unstructured, to any) {
	t.Helper()
	text, err := json.Marshal(from.Object)
	require.NoError(t, err)
	require.NoError(t, yaml.UnmarshalStrict(text, to))
}

func TestNothingIsMonitoredByDefault(t *testing.T) {
	for _, flags := range [][]string{nil, {"--set=monitoring=null"}} {
		objects := render(t, flags...)
		for _, o := range objects {
			require.NotContains(t, o.GetAPIVersion(), "monitoring.coreos.com")
			require.NotContains(t, o.GetName(), "dashboard")
		}
		var agent appsv1.DaemonSet
		convert(t, find(t, objects, "DaemonSet", "slicecast-agents", "slicecast-agent"), &agent)
		require.NotContains(t, strings.Join(agent.Spec.Template.Spec.Containers[0].Args, " "), "metrics")
	}
	args := append([]string{"template", "slicecast", chart, "--namespace=kube-system", "--set=monitoring.podMonitors.enabled=true"}, required...)
	_, err := helm(t, args...)
	require.ErrorContains(t, err, "needs monitoring.podMonitors.clientSecret")
	_, err = helm(t, append(args, "--set=monitoring.podMonitors.clientSecret=a,monitoring.podMonitors.tokenSecret=b")...)
	require.ErrorContains(t, err, "exclude each other")
	_, err = helm(t, append(args, "--set=monitoring.podMonitors.tokenSecret=b,monitoring.agents.servingSecret=agents")...)
	require.ErrorContains(t, err, "needs agent.metrics.enabled")
	for _, o := range render(t, monitored[0]) {
		require.False(t, o.GetKind() == "PodMonitor" && o.GetName() == "slicecast-agent", "agents have no certificate")
	}
}

func TestPodMonitors(t *testing.T) {
	objects := render(t, monitored...)
	var server appsv1.Deployment
	convert(t, find(t, objects, "Deployment", "slicecast-system", "slicecast-server"), &server)
	var agent appsv1.DaemonSet
	convert(t, find(t, objects, "DaemonSet", "slicecast-agents", "slicecast-agent"), &agent)
	for _, test := range []struct {
		namespace, name, serverName string
		pod                         corev1.PodTemplateSpec
	}{
		{"slicecast-system", "slicecast-server", "slicecast-server.slicecast-system.svc", server.Spec.Template},
		{"slicecast-agents", "slicecast-agent", "slicecast-agent", agent.Spec.Template},
	} {
		var m monitoringv1.PodMonitor
		strictly(t, find(t, objects, "PodMonitor", test.namespace, test.name), &m)
		require.Equal(t, "stack", m.Labels["release"])
		require.Equal(t, test.name, test.pod.Labels[m.Spec.JobLabel], "the job in rules and dashboards")
		require.NotEmpty(t, m.Spec.Selector.MatchLabels)
		for key, value := range m.Spec.Selector.MatchLabels {
			require.Equal(t, value, test.pod.Labels[key])
		}
		require.Len(t, m.Spec.PodMetricsEndpoints, 1)
		endpoint := m.Spec.PodMetricsEndpoints[0]
		require.EqualValues(t, "15s", endpoint.Interval)
		require.EqualValues(t, "https", strings.ToLower(string(*endpoint.Scheme)))
		require.Equal(t, test.serverName, *endpoint.TLSConfig.ServerName)
		require.Equal(t, "prometheus", endpoint.TLSConfig.KeySecret.Name)
		require.Equal(t, "prometheus", endpoint.TLSConfig.Cert.Secret.Name)
		if test.pod.Spec.HostNetwork {
			requireAgentTargets(t, endpoint, test.pod.Spec, "9999")
			continue
		}
		var ports []string
		for _, p := range test.pod.Spec.Containers[0].Ports {
			ports = append(ports, p.Name)
		}
		require.Contains(t, ports, *endpoint.Port)
	}
	pod := agent.Spec.Template.Spec
	require.Subset(t, pod.Containers[0].Args, []string{"--secure-metrics-bind-address=:9999", "--metrics-cert-file=/run/slicecast/metrics/tls.crt"})
	require.Contains(t, pod.Volumes, corev1.Volume{Name: "metrics", VolumeSource: corev1.VolumeSource{
		Secret: &corev1.SecretVolumeSource{SecretName: "agents", DefaultMode: new(int32(0o400)), Optional: new(true)},
	}})
}

// requireAgentTargets requires an endpoint to lead to a port of agents by its relabelings, as
// Prometheus applies them to a Pod without ports. A port that the Pod declared would be one of the
// node, and if another Pod had it, the node would have no agent.
func requireAgentTargets(t *testing.T, endpoint monitoringv1.PodMetricsEndpoint, pod corev1.PodSpec, port string) {
	t.Helper()
	require.Nil(t, endpoint.Port)
	address := func(container, ip string) string {
		labels := map[string]string{
			"__meta_kubernetes_pod_container_name": container, "__meta_kubernetes_pod_ip": ip, "__address__": ip,
		}
		for _, r := range endpoint.RelabelConfigs {
			if r.TargetLabel != "__address__" && r.Action != "keep" {
				continue
			}
			require.Len(t, r.SourceLabels, 1)
			match := regexp.MustCompile("^(?:" + r.Regex + ")$").FindStringSubmatchIndex(labels[string(r.SourceLabels[0])])
			switch {
			case r.Action == "keep" && match == nil:
				return ""
			case r.Action != "keep" && match != nil:
				labels[r.TargetLabel] = string(regexp.MustCompile(r.Regex).ExpandString(nil, *r.Replacement, labels[string(r.SourceLabels[0])], match))
			}
		}
		return labels["__address__"]
	}
	for _, c := range pod.InitContainers {
		require.Empty(t, c.Ports)
		require.Empty(t, address(c.Name, "192.0.2.1"), "it serves nothing")
	}
	for _, c := range pod.Containers {
		require.Empty(t, c.Ports)
		require.Equal(t, "192.0.2.1:"+port, address(c.Name, "192.0.2.1"))
		require.Equal(t, "[2001:db8::1]:"+port, address(c.Name, "2001:db8::1"))
	}
}

// TestPodMonitorsWithTokens proves that Prometheus shows a token and no certificate, that it
// verifies servers, and that it verifies agents if they have a certificate.
func TestPodMonitorsWithTokens(t *testing.T) {
	const token = "--set=monitoring.podMonitors.enabled=true,monitoring.podMonitors.tokenSecret=prometheus"
	endpoint := func(objects []*unstructured.Unstructured, namespace, name string) monitoringv1.PodMetricsEndpoint {
		var m monitoringv1.PodMonitor
		strictly(t, find(t, objects, "PodMonitor", namespace, name), &m)
		require.Len(t, m.Spec.PodMetricsEndpoints, 1)
		e := m.Spec.PodMetricsEndpoints[0]
		require.Equal(t, "prometheus", e.Authorization.Credentials.Name)
		require.Equal(t, "token", e.Authorization.Credentials.Key)
		require.Nil(t, e.TLSConfig.Cert.Secret)
		require.Nil(t, e.TLSConfig.KeySecret)
		return e
	}
	for _, o := range render(t, token) {
		require.False(t, o.GetKind() == "PodMonitor" && o.GetName() == "slicecast-agent", "agents accept no tokens")
	}
	objects := render(t, token, "--set=agent.metrics.enabled=true")
	server := endpoint(objects, "slicecast-system", "slicecast-server")
	require.Equal(t, "slicecast-server.slicecast-system.svc", *server.TLSConfig.ServerName)
	require.Equal(t, "slicecast-ca", server.TLSConfig.CA.ConfigMap.Name)
	require.Nil(t, server.TLSConfig.InsecureSkipVerify)
	require.True(t, *endpoint(objects, "slicecast-agents", "slicecast-agent").TLSConfig.InsecureSkipVerify)
	var agent appsv1.DaemonSet
	convert(t, find(t, objects, "DaemonSet", "slicecast-agents", "slicecast-agent"), &agent)
	settings := func(objects []*unstructured.Unstructured) string {
		var m corev1.ConfigMap
		convert(t, find(t, objects, "ConfigMap", "slicecast-agents", "slicecast-config"), &m)
		return m.Data["agent.yaml"]
	}
	require.Contains(t, settings(objects), "metricsServiceAccounts:\n- slicecast-system/slicecast-prometheus\n")
	require.Contains(t, settings(render(t, token, "--set=agent.metrics.enabled=true,agent.metrics.serviceAccounts={monitoring/a}")),
		"metricsServiceAccounts:\n- monitoring/a\n")
	requireAgentTargets(t, endpoint(objects, "slicecast-agents", "slicecast-agent"), agent.Spec.Template.Spec, "8476")

	objects = render(t, token, "--set=agent.metrics.enabled=true,monitoring.agents.servingSecret=agents")
	verified := endpoint(objects, "slicecast-agents", "slicecast-agent").TLSConfig
	require.Nil(t, verified.InsecureSkipVerify)
	require.Equal(t, "agents", verified.CA.Secret.Name)
	require.Equal(t, "slicecast-agent", *verified.ServerName)
}

// TestKubeProxyJob proves that the job kube-proxy has the same targets as that of agents. It has
// all metrics that kubernetes-mixin asks for, and none of Slicecast's own.
func TestKubeProxyJob(t *testing.T) {
	const job = "--set=monitoring.podMonitors.kubeProxyJob=true"
	with := map[string][]string{
		"certificates": append(slices.Clone(monitored), job),
		"tokens":       {"--set=monitoring.podMonitors.enabled=true,monitoring.podMonitors.tokenSecret=prometheus,agent.metrics.enabled=true", job},
	}
	for name, flags := range with {
		objects := render(t, flags...)
		var own, second monitoringv1.PodMonitor
		strictly(t, find(t, objects, "PodMonitor", "slicecast-agents", "slicecast-agent"), &own)
		strictly(t, find(t, objects, "PodMonitor", "slicecast-agents", "slicecast-agent-kube-proxy"), &second)
		require.Equal(t, own.Labels, second.Labels, name)
		require.Empty(t, own.Spec.PodMetricsEndpoints[0].MetricRelabelConfigs, name)

		endpoint, common := &second.Spec.PodMetricsEndpoints[0], own.Spec.PodMetricsEndpoints[0].RelabelConfigs
		require.Equal(t, append(slices.Clone(common),
			monitoringv1.RelabelConfig{TargetLabel: "job", Replacement: new("kube-proxy")},
			monitoringv1.RelabelConfig{SourceLabels: []monitoringv1.LabelName{"__meta_kubernetes_pod_node_name"}, TargetLabel: "instance"},
		), endpoint.RelabelConfigs, name)
		require.Len(t, endpoint.MetricRelabelConfigs, 1, name)
		kept := endpoint.MetricRelabelConfigs[0]
		require.Equal(t, monitoringv1.RelabelConfig{SourceLabels: []monitoringv1.LabelName{"__name__"}, Regex: kept.Regex, Action: "keep"}, kept, name)
		requireMetricsOfKubeProxy(t, kept.Regex)
		endpoint.RelabelConfigs, endpoint.MetricRelabelConfigs, second.Spec.JobLabel = common, nil, own.Spec.JobLabel
		require.Equal(t, own.Spec, second.Spec, name)
	}

	args := slices.Concat([]string{"template", "slicecast", chart, "--namespace=kube-system"}, required, with["tokens"])
	for values, says := range map[string]string{
		"agent.config.programmer=shadow":    "kube-proxy still runs",
		"agent.config.besideKubeProxy=true": "kube-proxy still runs",
		"agent.metrics.enabled=false":       "needs agents that Prometheus can scrape",
	} {
		_, err := helm(t, append(slices.Clone(args), "--set="+values)...)
		require.ErrorContains(t, err, says)
	}
	for _, o := range render(t, monitored...) {
		require.NotEqual(t, "slicecast-agent-kube-proxy", o.GetName())
	}
}

// requireMetricsOfKubeProxy requires an expression, which Prometheus anchors, to match the names of
// metrics that kubernetes-mixin asks for, but for up, and none of Slicecast's own.
func requireMetricsOfKubeProxy(t *testing.T, expression string) {
	t.Helper()
	kept, err := regexp.Compile("^(?:" + expression + ")$")
	require.NoError(t, err)
	mixin, err := os.ReadFile("../../internal/e2e/testdata/kubernetes-mixin.json")
	require.NoError(t, err)
	asked := regexp.MustCompile(`(\w+)\{`).FindAllStringSubmatch(string(mixin), -1)
	require.Greater(t, len(asked), 10)
	for _, name := range asked {
		require.True(t, name[1] == "up" || kept.MatchString(name[1]), name[1])
	}
	page, err := os.ReadFile("../../docs/metrics.md")
	require.NoError(t, err)
	for _, name := range regexp.MustCompile("(?m)^\\| `(\\w+)`").FindAllStringSubmatch(string(page), -1) {
		require.Equal(t, !strings.HasPrefix(name[1], "slicecast_"), kept.MatchString(name[1]), name[1])
	}
}

// TestNotesWarnOfAgentsThatAreNotScraped proves that an install says so if no alert about agents
// can fire.
func TestNotesWarnOfAgentsThatAreNotScraped(t *testing.T) {
	for values, warns := range map[string]bool{
		"monitoring.rules.enabled=false":                                                                                   false,
		"monitoring.rules.enabled=true":                                                                                    true,
		"monitoring.podMonitors.enabled=true,monitoring.podMonitors.clientSecret=a":                                        true,
		"monitoring.podMonitors.enabled=true,monitoring.podMonitors.tokenSecret=a":                                         true,
		"monitoring.podMonitors.enabled=true,monitoring.podMonitors.tokenSecret=a,agent.metrics.enabled=true":              false,
		"monitoring.podMonitors.enabled=true,monitoring.podMonitors.clientSecret=a,monitoring.agents.servingSecret=agents": false,
	} {
		args := append([]string{"install", "slicecast", chart, "--namespace=kube-system", "--dry-run=client", "--set=" + values}, required...)
		out, err := helm(t, args...)
		require.NoError(t, err)
		_, notes, found := strings.Cut(out, "\nNOTES:")
		require.True(t, found, out)
		require.Equal(t, warns, strings.Contains(notes, "no PodMonitor for agents"), "%s: %s", values, notes)
	}
}

// TestCertificateOfAgents runs the commands of deploy/README.md that make the agents' certificate.
func TestCertificateOfAgents(t *testing.T) {
	dir := t.TempDir()
	authority, err := testca.New()
	require.NoError(t, err)
	_, err = authority.WriteCA(dir)
	require.NoError(t, err)
	key, err := authority.KeyPEM()
	require.NoError(t, err)
	commands, err := repository.Commands("deploy/README.md", "agents")
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), "bash", "-euc", "ca_key() { echo \"$CA_KEY\"; }\n"+commands)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "CA_KEY="+string(key))
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "agents.crt"), filepath.Join(dir, "agents.key"))
	require.NoError(t, err)
	_, err = pair.Leaf.Verify(x509.VerifyOptions{DNSName: "slicecast-agent", Roots: authority.Pool()})
	require.NoError(t, err)
}

func TestRulesAndDashboards(t *testing.T) {
	objects := render(t, monitored...)
	var rule monitoringv1.PrometheusRule
	strictly(t, find(t, objects, "PrometheusRule", "slicecast-system", "slicecast"), &rule)
	require.Equal(t, "stack", rule.Labels["release"])
	text, err := os.ReadFile(filepath.Join(chart, "monitoring", "rules.yaml"))
	require.NoError(t, err)
	var want monitoringv1.PrometheusRuleSpec
	require.NoError(t, yaml.UnmarshalStrict(text, &want))
	require.NotEmpty(t, want.Groups)
	require.Equal(t, want, rule.Spec)

	files, err := filepath.Glob(filepath.Join(chart, "monitoring", "dashboards", "*.json"))
	require.NoError(t, err)
	require.Len(t, files, 4)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		name := filepath.Base(file)
		var m corev1.ConfigMap
		convert(t, find(t, objects, "ConfigMap", "slicecast-system", strings.TrimSuffix(name, ".json")+"-dashboard"), &m)
		require.Equal(t, "1", m.Labels["grafana_dashboard"])
		require.Equal(t, "Network", m.Annotations["folder"])
		require.JSONEq(t, string(text), m.Data[name])
	}
}
