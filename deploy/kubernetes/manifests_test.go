// Package kubernetes tests the manifests in its folder with a real API server. The API server must
// accept them. Both commands must work when they are started with exactly the arguments,
// ServiceAccounts, rights, files, users and capabilities of the manifests.
package kubernetes

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/restmapper"
	"sigs.k8s.io/yaml"

	"github.com/slicecast/slicecast/agent/config"
	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/testenv/repository"
)

// The namespaces of the manifests.
const (
	serverNamespace = "slicecast-system"
	agentNamespace  = "slicecast-agents"
)

// kustomization is the part of a kustomization that the tests need.
type kustomization struct {
	Resources []string
	Images    []image
}

// image is what a kustomization sets for an image.
type image struct{ Name, NewTag string }

// load reads all objects of a kustomization in order.
func load(t *testing.T, dir string) (kustomization, []*unstructured.Unstructured) {
	t.Helper()
	var k kustomization
	b, err := os.ReadFile(filepath.Join(dir, "kustomization.yaml"))
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(b, &k))
	var objects []*unstructured.Unstructured
	for _, name := range k.Resources {
		content, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		documents := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(content), 4096)
		for {
			o := &unstructured.Unstructured{}
			err := documents.Decode(o)
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(t, err, name)
			objects = append(objects, o)
		}
	}
	return k, objects
}

// template returns the Pod template of the only workload of a kind, with the workload's namespace.
func template(t *testing.T, objects []*unstructured.Unstructured, kind string) corev1.PodTemplateSpec {
	t.Helper()
	i := slices.IndexFunc(objects, func(o *unstructured.Unstructured) bool { return o.GetKind() == kind })
	require.NotEqual(t, -1, i, kind)
	// The template is at the same path in a Deployment as in a DaemonSet.
	var d appsv1.DaemonSet
	require.NoError(t, runtime.DefaultUnstructuredConverter.FromUnstructured(objects[i].Object, &d))
	d.Spec.Template.Namespace = d.Namespace
	return d.Spec.Template
}

// apply applies objects with server-side apply, which rejects unknown fields.
func apply(t *testing.T, objects []*unstructured.Unstructured, dryRun ...string) {
	t.Helper()
	client, err := dynamic.NewForConfig(cluster.AdminConfig())
	require.NoError(t, err)
	groups, err := restmapper.GetAPIGroupResources(cluster.Client().Discovery())
	require.NoError(t, err)
	mapper := restmapper.NewDiscoveryRESTMapper(groups)
	for _, o := range objects {
		gvk := o.GroupVersionKind()
		mapping, err := mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
		require.NoError(t, err)
		_, err = client.Resource(mapping.Resource).Namespace(o.GetNamespace()).Apply(t.Context(), o.GetName(), o,
			metav1.ApplyOptions{FieldManager: "slicecast-test", Force: true, DryRun: dryRun})
		require.NoError(t, err, "%s %s", o.GetKind(), o.GetName())
	}
}

// TestManifestsAreCurrent requires that the manifests are what the chart makes now.
func TestManifestsAreCurrent(t *testing.T) {
	rendered := t.TempDir()
	out, err := exec.CommandContext(t.Context(), "../../internal/tools/manifests.sh", rendered).CombinedOutput()
	require.NoError(t, err, string(out))
	for _, dir := range []string{".", "cleanup", "cleanup-kube-proxy"} {
		k, _ := load(t, dir)
		files, err := filepath.Glob(filepath.Join(rendered, dir, "*.yaml"))
		require.NoError(t, err)
		for i, path := range files {
			files[i] = filepath.Base(path)
			want, err := os.ReadFile(path)
			require.NoError(t, err)
			have, err := os.ReadFile(filepath.Join(dir, files[i]))
			require.NoError(t, err)
			require.Equal(t, string(want), string(have), "%s is not current: run 'make generate'", files[i])
		}
		require.ElementsMatch(t, files, k.Resources, "kustomization.yaml in %s does not list what the chart makes", dir)
	}
}

// TestKustomizations requires that kustomizations set the images of the version of the chart, and
// that the API server accepts what they make.
func TestKustomizations(t *testing.T) {
	chart, err := os.ReadFile("../helm/slicecast/Chart.yaml")
	require.NoError(t, err)
	for _, dir := range []string{".", "cleanup", "cleanup-kube-proxy"} {
		k, objects := load(t, dir)
		if objects[0].GetKind() == "Namespace" {
			apply(t, objects[:2]) // a dry run of the objects in them needs the namespaces
		}
		apply(t, objects, metav1.DryRunAll)
		for _, i := range k.Images {
			require.Contains(t, string(chart), "\nappVersion: "+i.NewTag+"\n")
		}
		for _, kind := range []string{"Deployment", "DaemonSet"} {
			if !slices.ContainsFunc(objects, func(o *unstructured.Unstructured) bool { return o.GetKind() == kind }) {
				continue
			}
			spec := template(t, objects, kind).Spec
			for _, c := range append(spec.Containers, spec.InitContainers...) {
				ours := slices.ContainsFunc(k.Images, func(i image) bool { return i.Name+":"+i.NewTag == c.Image })
				require.True(t, ours || strings.HasPrefix(c.Image, "registry.k8s.io/pause:"), c.Image)
			}
		}
	}
}

// TestUneditedManifests requires that agents do not run with settings that nobody has edited, and
// that the error says which these are.
func TestUneditedManifests(t *testing.T) {
	command := images["slicecast-agent"]()
	path := filepath.Join(t.TempDir(), "agent.yaml")
	_, objects := load(t, ".")
	require.NoError(t, os.WriteFile(path, []byte(agentSettings(t, objects)), 0o600))
	command.SetArgs([]string{"--config=" + path, "--init-only"})
	command.SetOut(io.Discard)
	command.SetErr(io.Discard)
	require.ErrorContains(t, command.ExecuteContext(t.Context()), "EDIT-THE-POD-RANGES")
}

// agentSettings returns the agents' settings in a ConfigMap.
func agentSettings(t *testing.T, objects []*unstructured.Unstructured) string {
	t.Helper()
	for _, o := range objects {
		if o.GetName() == "slicecast-config" && o.GetNamespace() == agentNamespace {
			settings, _, err := unstructured.NestedString(o.Object, "data", "agent.yaml")
			require.NoError(t, err)
			return settings
		}
	}
	require.Fail(t, "no settings")
	return ""
}

func TestRBACIsMinimal(t *testing.T) {
	_, objects := load(t, ".")
	apply(t, objects)
	accounts := map[string]string{
		"slicecast-server": "system:serviceaccount:" + serverNamespace + ":slicecast-server",
		"slicecast-agent":  "system:serviceaccount:" + agentNamespace + ":slicecast-agent",
		"slicecast-viewer": "system:serviceaccount:" + serverNamespace + ":slicecast-viewer",
	}
	may := func(account, verb, group, resource, in string, name ...string) bool {
		review, err := cluster.Client().AuthorizationV1().SubjectAccessReviews().Create(t.Context(), &authorizationv1.SubjectAccessReview{
			Spec: authorizationv1.SubjectAccessReviewSpec{
				User: accounts[account],
				ResourceAttributes: &authorizationv1.ResourceAttributes{
					Verb: verb, Group: group, Resource: resource, Namespace: in, Name: strings.Join(name, ""),
				},
			},
		}, metav1.CreateOptions{})
		require.NoError(t, err)
		return review.Status.Allowed
	}
	mayGet := func(account, path string) bool {
		review, err := cluster.Client().AuthorizationV1().SubjectAccessReviews().Create(t.Context(), &authorizationv1.SubjectAccessReview{
			Spec: authorizationv1.SubjectAccessReviewSpec{
				User:                  accounts[account],
				NonResourceAttributes: &authorizationv1.NonResourceAttributes{Verb: "get", Path: path},
			},
		}, metav1.CreateOptions{})
		require.NoError(t, err)
		return review.Status.Allowed
	}
	// The authorizer learns about new roles through a watch.
	require.Eventually(t, func() bool {
		return mayGet("slicecast-server", "/openid/v1/jwks") &&
			may("slicecast-server", "watch", "", "services", "") && may("slicecast-server", "list", "networking.k8s.io", "servicecidrs", "") &&
			may("slicecast-server", "update", "", "secrets", serverNamespace, "slicecast-server-tls") &&
			may("slicecast-server", "update", "", "configmaps", agentNamespace, "slicecast-ca") &&
			may("slicecast-agent", "list", "discovery.k8s.io", "endpointslices", serverNamespace) &&
			mayGet("slicecast-viewer", "/page/metrics")
	}, deadline, pollInterval)
	for _, resource := range []string{"secrets", "pods", "configmaps"} {
		require.False(t, may("slicecast-server", "list", "", resource, ""), resource)
	}
	for _, verb := range []string{"get", "update", "list", "watch", "delete"} {
		require.False(t, may("slicecast-server", verb, "", "secrets", serverNamespace), verb)
		require.False(t, may("slicecast-server", verb, "", "secrets", agentNamespace, "slicecast-server-tls"), verb)
		require.False(t, may("slicecast-server", verb, "", "configmaps", agentNamespace, "slicecast-config"), verb)
	}
	require.False(t, may("slicecast-server", "update", "", "services", ""))
	for _, account := range []string{"slicecast-server", "slicecast-agent", "slicecast-viewer"} {
		require.False(t, mayGet(account, "/metrics"), "the API server's metrics are there, too")
	}
	require.False(t, may("slicecast-agent", "list", "discovery.k8s.io", "endpointslices", "default"))
	require.False(t, may("slicecast-agent", "get", "discovery.k8s.io", "endpointslices", serverNamespace))
	require.False(t, may("slicecast-agent", "watch", "discovery.k8s.io", "endpointslices", serverNamespace))
	require.False(t, may("slicecast-agent", "list", "", "services", serverNamespace))
}

// TestServersCreateOnlyTheirOwnObjects requires that a compromised server cannot make itself a
// token of another ServiceAccount with the right to create Secrets, which RBAC cannot limit by
// name.
func TestServersCreateOnlyTheirOwnObjects(t *testing.T) {
	_, objects := load(t, ".")
	apply(t, objects)
	server, err := kubernetes.NewForConfig(cluster.ConfigFor("system:serviceaccount:" + serverNamespace + ":slicecast-server"))
	require.NoError(t, err)
	create := func(namespace, resource, name string, kind corev1.SecretType) error {
		meta, o := metav1.ObjectMeta{Name: name}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
		if resource == "configmaps" {
			_, err := server.CoreV1().ConfigMaps(namespace).Create(t.Context(), &corev1.ConfigMap{ObjectMeta: meta}, o)
			return err
		}
		secret := &corev1.Secret{ObjectMeta: meta, Type: kind}
		switch kind {
		case corev1.SecretTypeServiceAccountToken:
			secret.Annotations = map[string]string{corev1.ServiceAccountNameKey: "slicecast-viewer"}
		case corev1.SecretTypeTLS:
			secret.Data = map[string][]byte{corev1.TLSCertKey: nil, corev1.TLSPrivateKeyKey: nil}
		}
		_, err := server.CoreV1().Secrets(namespace).Create(t.Context(), secret, o)
		return err
	}
	const refused = "the servers may create only"
	// The API server learns about new roles and policies through a watch.
	require.Eventually(t, func() bool {
		err := create(serverNamespace, "secrets", "mine", corev1.SecretTypeServiceAccountToken)
		return err != nil && strings.Contains(err.Error(), refused)
	}, deadline, pollInterval)
	for _, c := range []struct {
		namespace, resource, name string
		kind                      corev1.SecretType
		says                      string
	}{
		{serverNamespace, "secrets", "slicecast-server-tls", corev1.SecretTypeServiceAccountToken, refused},
		{serverNamespace, "secrets", "slicecast-server-tls", corev1.SecretTypeOpaque, refused},
		{serverNamespace, "secrets", "other", corev1.SecretTypeTLS, refused},
		{agentNamespace, "configmaps", "slicecast-config", "", refused},
		{agentNamespace, "secrets", "slicecast-server-tls", corev1.SecretTypeTLS, "is forbidden"},
		{serverNamespace, "secrets", "slicecast-server-tls", corev1.SecretTypeTLS, ""},
		{serverNamespace, "configmaps", "slicecast-ca", "", ""},
		{agentNamespace, "configmaps", "slicecast-ca", "", ""},
	} {
		err := create(c.namespace, c.resource, c.name, c.kind)
		if c.says == "" {
			// What the policy refuses is refused before the API server looks whether the object exists.
			require.True(t, err == nil || apierrors.IsAlreadyExists(err), "%+v: %v", c, err)
			continue
		}
		require.ErrorContains(t, err, c.says, "%+v", c)
	}
}

// TestPrivilegesOfAgentContainersAreMinimal requires that the privileged container has no token,
// and the other one only two capabilities. Only the privileged one can load modules of the node's
// kernel.
func TestPrivilegesOfAgentContainersAreMinimal(t *testing.T) {
	_, objects := load(t, ".")
	spec := template(t, objects, "DaemonSet").Spec
	require.False(t, *spec.AutomountServiceAccountToken)
	require.Len(t, spec.InitContainers, 1)
	for _, m := range spec.InitContainers[0].VolumeMounts {
		i := slices.IndexFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
		require.Nil(t, spec.Volumes[i].Projected, m.Name)
		require.Nil(t, spec.Volumes[i].Secret, m.Name)
	}
	require.Equal(t, []corev1.Capability{"NET_ADMIN", "NET_RAW"}, spec.Containers[0].SecurityContext.Capabilities.Add)

	modules := corev1.VolumeMount{Name: "modules", MountPath: "/lib/modules", ReadOnly: true}
	require.Contains(t, spec.InitContainers[0].VolumeMounts, modules)
	require.NotContains(t, spec.Containers[0].VolumeMounts, modules)
	require.Contains(t, spec.Volumes, corev1.Volume{Name: "modules", VolumeSource: corev1.VolumeSource{
		HostPath: &corev1.HostPathVolumeSource{Path: "/lib/modules"},
	}})
	packages, err := os.ReadFile("../../internal/tools/release/packages.txt")
	require.NoError(t, err)
	require.Contains(t, string(packages), "/kmod_", "the image lacks modprobe")
}

// TestHealthAddressesAreSettings requires that no flag overrides the ConfigMap, which has the
// address of the probes.
func TestHealthAddressesAreSettings(t *testing.T) {
	_, objects := load(t, ".")
	agent := template(t, objects, "DaemonSet").Spec.Containers[0]
	for _, a := range agent.Args {
		require.NotContains(t, a, "--healthz-bind-address")
	}
	c, err := config.Parse([]byte(agentSettings(t, objects)))
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1:8475,:10256", *c.HealthzBindAddress)
	for _, probe := range []*corev1.Probe{agent.ReadinessProbe, agent.LivenessProbe} {
		require.Equal(t, "127.0.0.1:8475", probe.HTTPGet.Host+":"+probe.HTTPGet.Port.String())
	}
}

// snippet returns the shell script that follows a marker in the README.
func snippet(t *testing.T, marker string) string {
	t.Helper()
	block, err := repository.Commands("deploy/README.md", marker)
	require.NoError(t, err)
	return block
}

// TestCertificatesOfYourOwn requires that the README's certificate is what agents expect.
func TestCertificatesOfYourOwn(t *testing.T) {
	dir := t.TempDir()
	shell(t, dir, snippet(t, "certificates"))
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"))
	require.NoError(t, err)
	ca, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	require.NoError(t, err)
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(ca))
	_, err = pair.Leaf.Verify(x509.VerifyOptions{DNSName: "slicecast-server.slicecast-system.svc", Roots: roots})
	require.NoError(t, err)

	shell(t, dir, snippet(t, "servers-ca"))
	_, err = testca.Load(filepath.Join(dir, "own.crt"), filepath.Join(dir, "own.key"))
	require.NoError(t, err, "a CA that the servers can use")
}
