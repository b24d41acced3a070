// Package kubernetes tests the manifests in its folder with a real API server. The API server must
// accept them. Both commands must work when they are started with exactly the arguments,
// ServiceAccounts, rights, files, users and capabilities of the manifests.
package kubernetes

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/restmapper"
	"sigs.k8s.io/yaml"

	"github.com/slicecast/slicecast/agent/config"
)

const namespace = "slicecast-system"

// kustomization is the part of a kustomization that the tests need.
type kustomization struct {
	Namespace string
	Resources []string
	Images    []struct{ Name string }
}

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

// template returns the Pod template of the only workload of a kind.
func template(t *testing.T, objects []*unstructured.Unstructured, kind string) corev1.PodTemplateSpec {
	t.Helper()
	i := slices.IndexFunc(objects, func(o *unstructured.Unstructured) bool { return o.GetKind() == kind })
	require.NotEqual(t, -1, i, kind)
	// The template is at the same path in a Deployment as in a DaemonSet.
	var d appsv1.DaemonSet
	require.NoError(t, runtime.DefaultUnstructuredConverter.FromUnstructured(objects[i].Object, &d))
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

func TestAPIServerAcceptsTheManifests(t *testing.T) {
	for _, dir := range []string{".", "cleanup", "cleanup-kube-proxy"} {
		_, objects := load(t, dir)
		if objects[0].GetKind() == "Namespace" {
			apply(t, objects[:1]) // a dry run of the objects in it needs the namespace
		}
		apply(t, objects, metav1.DryRunAll)
	}
}

func TestKustomizationsIncludeEverything(t *testing.T) {
	for _, dir := range []string{".", "cleanup", "cleanup-kube-proxy"} {
		k, objects := load(t, dir)
		files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
		require.NoError(t, err)
		for i := range files {
			files[i] = filepath.Base(files[i])
		}
		require.ElementsMatch(t, files, append(k.Resources, "kustomization.yaml"))
		for _, kind := range []string{"Deployment", "DaemonSet"} {
			if !slices.ContainsFunc(objects, func(o *unstructured.Unstructured) bool { return o.GetKind() == kind }) {
				continue
			}
			spec := template(t, objects, kind).Spec
			for _, c := range append(spec.Containers, spec.InitContainers...) {
				ours := slices.ContainsFunc(k.Images, func(i struct{ Name string }) bool { return i.Name == c.Image })
				require.True(t, ours || strings.HasPrefix(c.Image, "registry.k8s.io/pause:"), c.Image)
			}
		}
	}
}

func TestRBACIsMinimal(t *testing.T) {
	_, objects := load(t, ".")
	apply(t, objects)
	may := func(account, verb, group, resource, in string) bool {
		review, err := cluster.Client().AuthorizationV1().SubjectAccessReviews().Create(t.Context(), &authorizationv1.SubjectAccessReview{
			Spec: authorizationv1.SubjectAccessReviewSpec{
				User: "system:serviceaccount:" + namespace + ":" + account,
				ResourceAttributes: &authorizationv1.ResourceAttributes{
					Verb: verb, Group: group, Resource: resource, Namespace: in,
				},
			},
		}, metav1.CreateOptions{})
		require.NoError(t, err)
		return review.Status.Allowed
	}
	mayGet := func(account, path string) bool {
		review, err := cluster.Client().AuthorizationV1().SubjectAccessReviews().Create(t.Context(), &authorizationv1.SubjectAccessReview{
			Spec: authorizationv1.SubjectAccessReviewSpec{
				User:                  "system:serviceaccount:" + namespace + ":" + account,
				NonResourceAttributes: &authorizationv1.NonResourceAttributes{Verb: "get", Path: path},
			},
		}, metav1.CreateOptions{})
		require.NoError(t, err)
		return review.Status.Allowed
	}
	// The authorizer learns about new roles through a watch.
	require.Eventually(t, func() bool {
		return mayGet("slicecast-server", "/openid/v1/jwks") && mayGet("slicecast-server", "/.well-known/openid-configuration") &&
			may("slicecast-server", "watch", "", "services", "") && may("slicecast-server", "list", "networking.k8s.io", "servicecidrs", "") &&
			may("slicecast-agent", "list", "discovery.k8s.io", "endpointslices", namespace)
	}, deadline, pollInterval)
	for _, resource := range []string{"secrets", "pods", "configmaps"} {
		require.False(t, may("slicecast-server", "list", "", resource, ""), resource)
	}
	require.False(t, may("slicecast-server", "update", "", "services", ""))
	require.False(t, mayGet("slicecast-server", "/metrics"))
	require.False(t, may("slicecast-agent", "list", "discovery.k8s.io", "endpointslices", "default"))
	require.False(t, may("slicecast-agent", "get", "discovery.k8s.io", "endpointslices", namespace))
	require.False(t, may("slicecast-agent", "watch", "discovery.k8s.io", "endpointslices", namespace))
	require.False(t, may("slicecast-agent", "list", "", "services", namespace))
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
	packages, err := os.ReadFile("../../internal/tools/images/packages.txt")
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
	var settings string
	for _, o := range objects {
		if o.GetName() == "slicecast-config" {
			settings, _, _ = unstructured.NestedString(o.Object, "data", "agent.yaml")
		}
	}
	c, err := config.Parse([]byte(settings))
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1:8475,:10256", *c.HealthzBindAddress)
	for _, probe := range []*corev1.Probe{agent.ReadinessProbe, agent.LivenessProbe} {
		require.Equal(t, "127.0.0.1:8475", probe.HTTPGet.Host+":"+probe.HTTPGet.Port.String())
	}
}

// snippet returns the shell script that follows a marker in the README.
func snippet(t *testing.T, marker string) string {
	t.Helper()
	readme, err := os.ReadFile("../README.md")
	require.NoError(t, err)
	found := regexp.MustCompile("(?s)<!-- " + marker + ": .*?-->\n```sh\n(.*?)```").FindSubmatch(readme)
	require.NotNil(t, found, marker)
	return string(found[1])
}

// createFiles creates the secret and the ConfigMap as the README says, from the certificates in
// dir.
func createFiles(ctx context.Context, t *testing.T, dir string) {
	t.Helper()
	read := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		return b
	}
	_, err := cluster.Client().CoreV1().Secrets(namespace).Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "slicecast-server-tls"}, Type: corev1.SecretTypeTLS,
		Data: map[string][]byte{"tls.crt": read("tls.crt"), "tls.key": read("tls.key"), "ca.crt": read("ca.crt")},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	_, err = cluster.Client().CoreV1().ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "slicecast-ca"}, Data: map[string]string{"ca.crt": string(read("ca.crt"))},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
}
