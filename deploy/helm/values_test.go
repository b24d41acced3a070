// These tests prove that Helm finds nothing wrong with the chart, that wrong values are refused
// with a message that names them, and that values reach the objects that they are about.
package helm

import (
	"fmt"
	"log/slog"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/slicecast/slicecast/agent/config"
)

func TestLint(t *testing.T) {
	out, err := helm(t, append([]string{"lint", chart, "--strict"}, required...)...)
	require.NoError(t, err, out)
	require.Contains(t, out, "0 chart(s) failed")
}

func TestWrongValues(t *testing.T) {
	for _, test := range []struct{ set, says string }{
		{"unknown=1", "'unknown' not allowed"},
		{"agent.unknown=1", "at '/agent': additional properties 'unknown' not allowed"},
		{"apiServer=api.example.com", "at '/apiServer'"},
		{"apiServer=https://api.example.com:6443", "at '/apiServer'"},
		{"apiServer=fd00::1:6443", "at '/apiServer'"},
		{"podCIDRs={10.244.0.0}", "at '/podCIDRs/0'"},
		{"podCIDRs={10.0.0.0/8,fd00::/56,10.1.0.0/16}", "at '/podCIDRs': maxItems"},
		{"podCIDRs=10.244.0.0/16", "at '/podCIDRs': got string, want array"},
		{"logLevel=verbose", "at '/logLevel': value must be one of"},
		{"image.tag=latest", "at '/image/tag'"},
		{"image.registry=ghcr.io/slicecast/", "at '/image/registry'"},
		{"image.pullPolicy=Sometimes", "at '/image/pullPolicy': value must be one of"},
		{"image.pullSecrets={Not_A_Name}", "at '/image/pullSecrets/0'"},
		{"namespaces.agents=UPPER", "at '/namespaces/agents'"},
		{"namespaces.create=maybe", "at '/namespaces/create': got string, want boolean"},
		{"namespaces.servers=kube-system", "The release is in the namespace kube-system"},
		{"namespaces.servers=slicecast-agents", "the Pod Security levels of servers and agents differ"},
		{"certificates.mode=none", "at '/certificates/mode': value must be one of"},
		{"certificates.mode=existing", "at '/certificates/caBundle'"},
		{"certificates.mode=certManager", "at '/certificates"},
		{"certificates.caBundle=-----BEGIN CERTIFICATE-----", "at '/certificates/caBundle': maxLength"},
		{"server.replicas=0", "at '/server/replicas': minimum"},
		{"server.extraArgs={log-level=debug}", "at '/server/extraArgs/0'"},
		{"agent.config.programmer=ebpf", "at '/agent/config/programmer': value must be one of"},
		{"agent.config.iptables.variant=new", "at '/agent/config/iptables/variant': value must be one of"},
		{"agent.config.healthzBindAddress=:10256", "at '/agent/config/healthzBindAddress'"},
		{"agent.config.metricsBindAddress=:10249", "at '/agent/config/metricsBindAddress'"},
		{"agent.config.pages={secrets}", "at '/agent/config/pages/0'"},
		{"agent.config.clusterCIDR=10.244.0.0/16", "at '/agent/config/clusterCIDR'"},
		{"agent.config.detectLocalMode=NodeCIDR", "podCIDRs and agent.config.detectLocalMode exclude each other"},
		{"agent.metrics.enabled=true,agent.config.secureMetricsBindAddress=:9000", "agent.config.secureMetricsBindAddress is another address"},
		{"agent.metrics.serviceAccounts={prometheus}", "at '/agent/metrics/serviceAccounts/0'"},
		{"agent.capabilities={SYS_ADMIN}", "at '/agent/capabilities/0': value must be one of"},
		{"agent.maxUnavailable=0%", "at '/agent/maxUnavailable'"},
		{"agent.maxUnavailable=0", "at '/agent/maxUnavailable'"},
		{"kubectl.users[0].kind=Team", "at '/kubectl/users/0"},
		{"monitoring.podMonitors.interval=often", "at '/monitoring/podMonitors/interval'"},
		{"monitoring.podMonitors.clientSecret=Not_A_Name", "at '/monitoring/podMonitors/clientSecret'"},
		{"monitoring.agents.port=0", "at '/monitoring/agents/port': minimum"},
		{"monitoring.dashboards.enabled=1", "at '/monitoring/dashboards/enabled': got number, want boolean"},
		{"cleanup.agents=1", "at '/cleanup/agents': got number, want boolean"},
		{"cleanup.doneImage=registry.k8s.io/pause", "at '/cleanup/doneImage'"},
	} {
		t.Run(test.set, func(t *testing.T) {
			t.Parallel()
			args := append([]string{"template", "slicecast", chart, "--namespace=kube-system"}, required...)
			_, err := helm(t, append(args, "--set="+test.set)...)
			require.ErrorContains(t, err, test.says)
		})
	}
}

// TestEveryValueHasAComment requires a comment above each value that is not a section.
func TestEveryValueHasAComment(t *testing.T) {
	b, err := os.ReadFile("slicecast/values.yaml")
	require.NoError(t, err)
	lines := strings.Split(string(b), "\n")
	value := regexp.MustCompile(`^ *[a-zA-Z]+:( .*)?$`)
	// Values whose names say everything, or whose parent's comment does.
	plain := regexp.MustCompile(`^ +(name|kind|iptables|issuer|operator|effect|requests|limits|nodeSelector|affinity|podAnnotations):`)
	for i, line := range lines {
		section := i+1 < len(lines) && regexp.MustCompile(`^[a-zA-Z]+:$`).MatchString(line)
		if !value.MatchString(line) || section || plain.MatchString(line) {
			continue
		}
		require.Contains(t, lines[i-1], "# ", "the value in line %d has no comment: %s", i+1, line)
	}
}

// changed sets every value that changes an object.
const changed = `
logLevel: debug
image: {registry: registry.example.com/team, tag: v9@sha256:abc, pullPolicy: Always, pullSecrets: [credentials]}
namespaces: {servers: up, agents: down, create: false}
certificates: {secret: own}
networkPolicies: {metricsFrom: [{namespaceSelector: {matchLabels: {team: monitoring}}}]}
kubectl: {users: [{kind: Group, name: sre, apiGroup: rbac.authorization.k8s.io}]}
server:
  {image: s, replicas: 5, extraArgs: [--tombstones=7], nodeSelector: {a: b}, tolerations: [{key: t}], podAnnotations: {note: "1"},
   resources: {limits: {memory: 8Gi}}, affinity: {podAntiAffinity: {}}}
agent:
  {image: a, config: {programmer: ipvs, iptables: {masqueradeAll: true}}, initContainer: false,
   capabilities: [NET_ADMIN], tokenAudience: slicecast-relay, maxUnavailable: 3, nodeSelector: {c: d}, tolerations: [{key: u}],
   podAnnotations: {note: "2"}, resources: {limits: {memory: 1Gi}}, affinity: {nodeAffinity: {}}}
`

// renderChanged renders the chart with these values.
func renderChanged(t *testing.T) []*unstructured.Unstructured {
	t.Helper()
	file := t.TempDir() + "/values.yaml"
	require.NoError(t, os.WriteFile(file, []byte(changed), 0o600))
	return render(t, "--values="+file)
}

func TestValuesReachServers(t *testing.T) {
	objects := renderChanged(t)
	var server appsv1.Deployment
	convert(t, find(t, objects, "Deployment", "up", "slicecast-server"), &server)
	pod := server.Spec.Template.Spec
	require.EqualValues(t, 5, *server.Spec.Replicas)
	require.Equal(t, "registry.example.com/team/s:v9@sha256:abc", pod.Containers[0].Image)
	require.Equal(t, corev1.PullAlways, pod.Containers[0].ImagePullPolicy)
	require.Equal(t, []corev1.LocalObjectReference{{Name: "credentials"}}, pod.ImagePullSecrets)
	require.Subset(t, pod.Containers[0].Args, []string{
		"--tombstones=7", "--log-level=debug", "--tls-secret=up/own", "--ca-config-map=up/slicecast-ca", "--ca-config-map=down/slicecast-ca",
		"--agent-service-account=down/slicecast-agent", "--server-service=up/slicecast-server",
	})
	require.Equal(t, map[string]string{"a": "b"}, pod.NodeSelector)
	require.Equal(t, "t", pod.Tolerations[0].Key)
	require.Equal(t, "1", server.Spec.Template.Annotations["note"])
	require.Equal(t, "8Gi", pod.Containers[0].Resources.Limits.Memory().String())
	require.NotNil(t, pod.Affinity.PodAntiAffinity)
}

func TestValuesReachAgents(t *testing.T) {
	objects := renderChanged(t)
	var agent appsv1.DaemonSet
	convert(t, find(t, objects, "DaemonSet", "down", "slicecast-agent"), &agent)
	pod := agent.Spec.Template.Spec
	require.Empty(t, pod.InitContainers)
	require.Equal(t, "registry.example.com/team/a:v9@sha256:abc", pod.Containers[0].Image)
	require.Equal(t, corev1.PullAlways, pod.Containers[0].ImagePullPolicy)
	require.Equal(t, []corev1.LocalObjectReference{{Name: "credentials"}}, pod.ImagePullSecrets)
	require.Subset(t, pod.Containers[0].Args, []string{"--server-service=up/slicecast-server", "--server-name=slicecast-server.up.svc", "--ca-config-map=down/slicecast-ca"})
	require.Equal(t, []corev1.Capability{"NET_ADMIN"}, pod.Containers[0].SecurityContext.Capabilities.Add)
	require.Equal(t, 3, agent.Spec.UpdateStrategy.RollingUpdate.MaxUnavailable.IntValue())
	require.Contains(t, fmt.Sprint(pod.Volumes), "slicecast-relay")
	require.Equal(t, map[string]string{"c": "d"}, pod.NodeSelector)
	require.Equal(t, "u", pod.Tolerations[0].Key)
	require.Equal(t, "2", agent.Spec.Template.Annotations["note"])
	require.Equal(t, "1Gi", pod.Containers[0].Resources.Limits.Memory().String())
	require.NotNil(t, pod.Affinity.NodeAffinity)

	settings := settings(t, objects, "down")
	require.Equal(t, "10.244.0.0/16,fd00:10:244::/56", *settings.ClusterCIDR)
	require.Equal(t, "ipvs", *settings.Programmer)
	require.Equal(t, "debug", *settings.Logging.Level)
	require.True(t, *settings.IPTables.MasqueradeAll)
	require.Equal(t, "nft", *settings.IPTables.Variant)
}

func TestValuesReachTheRest(t *testing.T) {
	objects := renderChanged(t)
	var policy networkingv1.NetworkPolicy
	convert(t, find(t, objects, "NetworkPolicy", "up", "slicecast-server"), &policy)
	require.Equal(t, "monitoring", policy.Spec.Ingress[1].From[0].NamespaceSelector.MatchLabels["team"])
	for _, o := range objects {
		require.NotEqual(t, "Namespace", o.GetKind())
	}
	for _, o := range render(t, "--set=networkPolicies.enabled=false") {
		require.NotEqual(t, "NetworkPolicy", o.GetKind())
		require.False(t, o.GetName() == "slicecast-kubectl" && strings.HasSuffix(o.GetKind(), "Binding"), "there are no users")
	}
	want := []rbacv1.Subject{{Kind: "Group", Name: "sre", APIGroup: rbacv1.GroupName}}
	var inServers rbacv1.RoleBinding
	convert(t, find(t, objects, "RoleBinding", "up", "slicecast-kubectl"), &inServers)
	require.Equal(t, want, inServers.Subjects)
	var everywhere rbacv1.ClusterRoleBinding
	convert(t, find(t, objects, "ClusterRoleBinding", "", "slicecast-kubectl"), &everywhere)
	require.Equal(t, want, everywhere.Subjects)
}

// TestValuesOfAnEarlierRelease renders the chart with the values of a release without users of the
// plugin. Helm's --reuse-values gives an upgrade these values, without the chart's defaults.
func TestValuesOfAnEarlierRelease(t *testing.T) {
	objects := render(t, "--set=kubectl=null", "--set=cleanup.agents=true")
	find(t, objects, "ServiceAccount", "slicecast-system", "slicecast-viewer")
	for _, o := range objects {
		require.False(t, o.GetName() == "slicecast-kubectl" && strings.HasSuffix(o.GetKind(), "Binding"), "there are no users")
	}
}

// TestChangedSettingsReplacePods requires that Pods of both workloads are replaced when something
// changes that they read only when they start.
func TestChangedSettingsReplacePods(t *testing.T) {
	annotations := func(flags ...string) (server, agent string) {
		objects := render(t, flags...)
		var d appsv1.Deployment
		convert(t, find(t, objects, "Deployment", "slicecast-system", "slicecast-server"), &d)
		var s appsv1.DaemonSet
		convert(t, find(t, objects, "DaemonSet", "slicecast-agents", "slicecast-agent"), &s)
		return d.Spec.Template.Annotations["slicecast.io/config"], s.Spec.Template.Annotations["slicecast.io/config"]
	}
	server, agent := annotations()
	require.NotEmpty(t, server)
	require.NotEmpty(t, agent)
	sameServer, otherAgent := annotations("--set=agent.config.programmer=iptables")
	require.Equal(t, server, sameServer)
	require.NotEqual(t, agent, otherAgent)
	otherServer, otherAgent := annotations("--set=apiServer=other.example.com:6443")
	require.NotEqual(t, server, otherServer)
	require.NotEqual(t, agent, otherAgent)
}

// TestNotesAboutKubeProxy proves that an install advises to remove kube-proxy only where agents
// serve what it serves.
func TestNotesAboutKubeProxy(t *testing.T) {
	const (
		removed, some, kept = "it can be removed now. deploy/README.md", "it can be removed now from nodes whose agent is ready", "Do not remove kube-proxy"
		programs, warning   = "the kernel of their node has the rules", "WARNING"
		shadow, beside      = "agent.config.programmer=shadow", "agent.config.besideKubeProxy=true"
		named               = "server.extraArgs={--service-proxy-name=chosen}"
	)
	all := []string{removed, some, kept, programs, warning}
	for values, says := range map[string][]string{
		"logLevel=info":                    {removed, programs},
		"agent.config.programmer=nftables": {removed, programs},
		"agent.nodeSelector.a=b":           {some, programs},
		"agent.affinity.nodeAffinity.a=b":  {some, programs},
		shadow:                             {kept},
		shadow + ",agent.nodeSelector.a=b": {kept},
		beside + "," + named:               {kept, programs},
		beside:                             {kept, programs, warning},
		named:                              {kept, programs, warning},
		"cleanup.kubeProxy=true":           {programs},
		"cleanup.kubeProxy=true," + shadow: {kept, warning},
		"cleanup.kubeProxy=true," + beside + "," + named: {kept, programs, warning},
	} {
		t.Run(values, func(t *testing.T) {
			t.Parallel()
			args := append([]string{"install", "slicecast", chart, "--namespace=kube-system", "--dry-run=client", "--set=" + values}, required...)
			out, err := helm(t, args...)
			require.NoError(t, err)
			_, notes, found := strings.Cut(out, "\nNOTES:")
			require.True(t, found, out)
			for _, text := range all {
				require.Equal(t, slices.Contains(says, text), strings.Contains(notes, text), "%q: %s", text, notes)
			}
			require.Equal(t, strings.HasPrefix(values, "cleanup."), strings.Contains(notes, "  4. "), notes)
		})
	}
}

// TestCertificates renders the ways to get certificates.
func TestCertificates(t *testing.T) {
	ca := t.TempDir() + "/ca.crt"
	const bundle = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
	require.NoError(t, os.WriteFile(ca, []byte(bundle), 0o600))
	for _, flags := range [][]string{
		{"--set=certificates.mode=existing", "--set=certificates.secret=own"},
		{"--set=certificates.mode=certManager", "--set=certificates.secret=own", "--set=certificates.issuer.name=vault"},
	} {
		objects := render(t, append(flags, "--set-file=certificates.caBundle="+ca)...)
		for _, namespace := range []string{"slicecast-system", "slicecast-agents"} {
			published, _, err := unstructured.NestedString(find(t, objects, "ConfigMap", namespace, "slicecast-ca").Object, "data", "ca.crt")
			require.NoError(t, err)
			require.Equal(t, bundle, published)
			// Servers that make certificates themselves leave it alone, and an upgrade to these keeps it.
			require.Equal(t, map[string]string{"slicecast.io/provided-cas": "true", "helm.sh/resource-policy": "keep"},
				find(t, objects, "ConfigMap", namespace, "slicecast-ca").GetAnnotations())
		}
		var server appsv1.Deployment
		convert(t, find(t, objects, "Deployment", "slicecast-system", "slicecast-server"), &server)
		pod := server.Spec.Template.Spec
		require.Contains(t, fmt.Sprint(pod.Volumes), "own")
		require.Contains(t, pod.Containers[0].Args, "--client-ca-file=/run/slicecast/tls/ca.crt")
		require.NotContains(t, strings.Join(pod.Containers[0].Args, " "), "--tls-secret")
		for _, o := range objects {
			require.NotEqual(t, "slicecast-certificates", o.GetName(), "servers need no rights to Secrets")
		}
		if flags[0] != "--set=certificates.mode=certManager" {
			continue
		}
		spec := find(t, objects, "Certificate", "slicecast-system", "slicecast-server").Object["spec"]
		require.Equal(t, map[string]any{
			"secretName": "own", "dnsNames": []any{"slicecast-server.slicecast-system.svc"}, "usages": []any{"digital signature", "server auth"},
			"issuerRef": map[string]any{"group": "cert-manager.io", "kind": "ClusterIssuer", "name": "vault"},
		}, spec)
	}
}

func convert(t *testing.T, from *unstructured.Unstructured, to any) {
	t.Helper()
	require.NoError(t, runtime.DefaultUnstructuredConverter.FromUnstructured(from.Object, to))
}

// settings returns the agents' settings. It requires that the agent understands all of them.
func settings(t *testing.T, objects []*unstructured.Unstructured, namespace string) *config.Agent {
	t.Helper()
	text, _, err := unstructured.NestedString(find(t, objects, "ConfigMap", namespace, "slicecast-config").Object, "data", "agent.yaml")
	require.NoError(t, err)
	parsed, err := config.Parse([]byte(text))
	require.NoError(t, err, text)
	return parsed
}

// TestPackage packages the chart, which must then install the images of its version.
func TestPackage(t *testing.T) {
	for tag, version := range map[string]string{"v1.2.3": "1.2.3", "v1.2.3-4-gabc": "1.2.3-4-gabc", "0123abc-dirty": "0.0.0-g0123abc-dirty"} {
		dir := t.TempDir() + "/chart"
		out, err := exec.CommandContext(t.Context(), "../../internal/tools/chart.sh", dir, tag).CombinedOutput()
		require.NoError(t, err, string(out))
		manifest, err := helm(t, append([]string{"template", "slicecast", dir + "/slicecast-" + version + ".tgz"}, required...)...)
		require.NoError(t, err)
		require.Contains(t, manifest, "image: ghcr.io/slicecast/slicecast-server:"+tag+"\n")
		require.Contains(t, manifest, "helm.sh/chart: slicecast-"+version+"\n")
	}
}

// TestPush pushes the chart to a registry, from which Helm must be able to install it.
func TestPush(t *testing.T) {
	server := httptest.NewServer(registry.New(registry.Logger(slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo))))
	defer server.Close()
	repository := "oci://" + server.Listener.Addr().String() + "/team"
	dir := t.TempDir() + "/chart"
	out, err := exec.CommandContext(t.Context(), "../../internal/tools/chart.sh", dir, "v1.2.3").CombinedOutput()
	require.NoError(t, err, string(out))
	_, err = helm(t, "push", dir+"/slicecast-1.2.3.tgz", repository, "--plain-http")
	require.NoError(t, err)
	pulled := []string{"template", "slicecast", repository + "/slicecast", "--version=1.2.3", "--plain-http"}
	manifest, err := helm(t, append(pulled, required...)...)
	require.NoError(t, err)
	require.Contains(t, manifest, "image: ghcr.io/slicecast/slicecast-server:v1.2.3\n")
}
