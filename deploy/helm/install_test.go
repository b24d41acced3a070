// These tests prove that a real API server accepts what Helm installs and upgrades, that Pod
// Security admits its Pods, and that nothing is left when Helm has uninstalled it.
package helm

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"github.com/slicecast/slicecast/internal/testenv"
)

const (
	servers, agents = "slicecast-system", "slicecast-agents"
	// patience bounds a step that takes a second or two on an idle machine.
	patience = 3 * time.Minute
)

func TestInstall(t *testing.T) {
	kubeconfig := "--kubeconfig=" + cluster.Kubeconfig(t, cluster.AdminConfig())
	run := func(args ...string) string {
		out, err := helm(t, append(args, "--namespace=kube-system", kubeconfig)...)
		require.NoError(t, err)
		return out
	}
	before := everything(t)
	notes := run(append([]string{"install", "slicecast", chart}, required...)...)
	for _, says := range []string{"api.example.com:6443", "10.244.0.0/16,fd00:10:244::/56", "rollout status daemonset/slicecast-agent"} {
		require.Contains(t, notes, says)
	}
	requireLabelsAndImages(t, decode(t, run("get", "manifest", "slicecast")))
	server, agent := podsOf(t)
	requireAdmitted(t, servers, server)
	requireAdmitted(t, agents, agent)
	_, err := cluster.Client().CoreV1().Pods(servers).Create(t.Context(), podOf("stray", agent), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	require.ErrorContains(t, err, `violates PodSecurity "restricted`)

	createAsServers(t)

	ctx, client := t.Context(), cluster.Client().CoreV1()
	// An upgrade without values keeps what was found, and what the servers have created.
	run("upgrade", "slicecast", chart, "--set=cleanup.kubeProxy=true")
	settings, err := client.ConfigMaps(agents).Get(ctx, "slicecast-config", metav1.GetOptions{})
	require.NoError(t, err)
	require.Equal(t, "api.example.com", settings.Data["apiServerHost"])
	require.Contains(t, settings.Data["agent.yaml"], "clusterCIDR: 10.244.0.0/16,fd00:10:244::/56\n")
	published, err := client.ConfigMaps(agents).Get(ctx, "slicecast-ca", metav1.GetOptions{})
	require.NoError(t, err)
	require.Equal(t, "CA", published.Data["ca.crt"])
	cleaner, err := cluster.Client().AppsV1().DaemonSets(agents).Get(ctx, "slicecast-cleanup-kube-proxy", metav1.GetOptions{})
	require.NoError(t, err)
	requireAdmitted(t, agents, cleaner.Spec.Template)

	// The cleaner takes the agents' place, and an upgrade back would return it.
	notes = run("upgrade", "slicecast", chart, "--set=cleanup.agents=true")
	require.Contains(t, notes, "helm -n kube-system uninstall slicecast")
	_, agent = podsOf(t)
	requireAdmitted(t, agents, agent)
	require.Equal(t, "cleanup", agent.Spec.InitContainers[0].Name)
	require.Len(t, agent.Spec.Containers, 1)
	require.Equal(t, "done", agent.Spec.Containers[0].Name)

	run("uninstall", "slicecast", "--wait", fmt.Sprintf("--timeout=%s", patience))
	testenv.Eventually(t, patience, func() error {
		left := slices.DeleteFunc(everything(t), func(name string) bool { return slices.Contains(before, name) })
		if len(left) > 0 {
			return fmt.Errorf("left: %s", left)
		}
		return nil
	})
}

// TestAPIServerAcceptsEveryMode has a real API server check what other values make.
func TestAPIServerAcceptsEveryMode(t *testing.T) {
	ca := t.TempDir() + "/ca.crt"
	require.NoError(t, os.WriteFile(ca, []byte("-----BEGIN CERTIFICATE-----\n"), 0o600))
	namespace := cluster.Namespace(t)
	for _, flags := range [][]string{
		{"--set=certificates.mode=existing", "--set-file=certificates.caBundle=" + ca, "--set=networkPolicies.metricsFrom=null"},
		{"--set=agent.initContainer=false", "--set=image.pullSecrets={a}", "--set=server.nodeSelector.a=b", "--set=agent.podAnnotations.a=b"},
		{"--set=cleanup.agents=true", "--set=cleanup.kubeProxy=true", "--set=agent.nodeSelector.a=b", "--set=agent.maxUnavailable=1"},
	} {
		args := append([]string{
			"install", "other", chart, "--dry-run=server", "--namespace=kube-system", "--kubeconfig=" + cluster.Kubeconfig(t, cluster.AdminConfig()),
			"--set=namespaces.create=false", "--set=namespaces.servers=" + namespace, "--set=namespaces.agents=default",
		}, required...)
		_, err := helm(t, append(args, flags...)...)
		require.NoError(t, err)
	}
}

// createAsServers creates what servers create when they run.
func createAsServers(t *testing.T) {
	t.Helper()
	client := cluster.Client().CoreV1()
	_, err := client.Secrets(servers).Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "slicecast-server-tls"}, Type: corev1.SecretTypeTLS,
		Data: map[string][]byte{corev1.TLSCertKey: nil, corev1.TLSPrivateKeyKey: nil},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	for _, namespace := range []string{servers, agents} {
		_, err = client.ConfigMaps(namespace).Create(t.Context(), &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: "slicecast-ca"}, Data: map[string]string{"ca.crt": "CA"},
		}, metav1.CreateOptions{})
		require.NoError(t, err)
	}
}

// podsOf returns the templates of the two workloads.
func podsOf(t *testing.T) (server, agent corev1.PodTemplateSpec) {
	t.Helper()
	deployment, err := cluster.Client().AppsV1().Deployments(servers).Get(t.Context(), "slicecast-server", metav1.GetOptions{})
	require.NoError(t, err)
	daemonSet, err := cluster.Client().AppsV1().DaemonSets(agents).Get(t.Context(), "slicecast-agent", metav1.GetOptions{})
	require.NoError(t, err)
	return deployment.Spec.Template, daemonSet.Spec.Template
}

func podOf(name string, template corev1.PodTemplateSpec) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: template.Labels}, Spec: template.Spec}
}

// requireAdmitted requires that the API server admits a Pod.
func requireAdmitted(t *testing.T, namespace string, template corev1.PodTemplateSpec) {
	t.Helper()
	_, err := cluster.Client().CoreV1().Pods(namespace).Create(t.Context(), podOf("admitted", template),
		metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	require.NoError(t, err)
}

// requireLabelsAndImages requires the recommended labels on all objects and Pods, and images with
// versions.
func requireLabelsAndImages(t *testing.T, objects []*unstructured.Unstructured) {
	t.Helper()
	require.Greater(t, len(objects), 15)
	for _, o := range objects {
		all := []map[string]string{o.GetLabels()}
		if o.GetKind() == "Deployment" || o.GetKind() == "DaemonSet" {
			var d appsv1.DaemonSet // the template is at the same path in a Deployment
			convert(t, o, &d)
			all = append(all, d.Spec.Template.Labels)
			for _, c := range append(d.Spec.Template.Spec.InitContainers, d.Spec.Template.Spec.Containers...) {
				require.Contains(t, c.Image, ":v0.1.0", "%s %s", o.GetKind(), o.GetName())
			}
		}
		for _, labels := range all {
			for key, value := range map[string]string{
				"app.kubernetes.io/part-of": "slicecast", "app.kubernetes.io/instance": "slicecast", "app.kubernetes.io/version": "v0.1.0",
				"app.kubernetes.io/managed-by": "Helm", "helm.sh/chart": "slicecast-0.1.0",
			} {
				require.Equal(t, value, labels[key], "%s of %s %s", key, o.GetKind(), o.GetName())
			}
		}
	}
}

// everything lists all objects of the cluster that an install could leave, by name.
func everything(t *testing.T) []string {
	t.Helper()
	client, err := dynamic.NewForConfig(cluster.AdminConfig())
	require.NoError(t, err)
	_, lists, err := cluster.Client().Discovery().ServerGroupsAndResources()
	require.NoError(t, err)
	var names []string
	for _, list := range lists {
		for _, resource := range list.APIResources {
			name := list.GroupVersion + "/" + resource.Name
			if !strings.Contains(fmt.Sprint(resource.Verbs), "list") || strings.Contains(name, "/events") || strings.Contains(name, "leases") {
				continue
			}
			version, err := schema.ParseGroupVersion(list.GroupVersion)
			require.NoError(t, err)
			objects, err := client.Resource(version.WithResource(resource.Name)).List(context.Background(), metav1.ListOptions{})
			if apierrors.IsMethodNotSupported(err) || apierrors.IsNotFound(err) {
				continue
			}
			require.NoError(t, err, name)
			for _, o := range objects.Items {
				names = append(names, name+" "+o.GetNamespace()+"/"+o.GetName())
			}
		}
	}
	return names
}
