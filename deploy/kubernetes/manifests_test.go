// Package kubernetes tests the manifests in its folder with a real API server. The API server must
// accept them. Both commands must work when they are started with exactly the arguments,
// ServiceAccounts, rights, files, users and capabilities of the manifests.
package kubernetes

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"sigs.k8s.io/yaml"

	"github.com/slicecast/slicecast/agent/config"
	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/testenv"
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
			may("slicecast-agent", "get", "", "configmaps", agentNamespace, "slicecast-ca") &&
			mayGet("slicecast-viewer", "/page/metrics")
	}, deadline, pollInterval)
	for _, account := range []string{"slicecast-server", "slicecast-agent", "slicecast-viewer"} {
		require.False(t, mayGet(account, "/metrics"), "the API server's metrics are there, too")
	}
	require.False(t, mayGet("slicecast-server", "/.well-known/openid-configuration"), "the keys are enough")
	require.False(t, may("slicecast-agent", "list", "discovery.k8s.io", "endpointslices", "default"))
	require.False(t, may("slicecast-agent", "get", "discovery.k8s.io", "endpointslices", serverNamespace))
	require.False(t, may("slicecast-agent", "watch", "discovery.k8s.io", "endpointslices", serverNamespace))
	require.False(t, may("slicecast-agent", "list", "", "services", serverNamespace))
	require.False(t, may("slicecast-agent", "get", "", "configmaps", agentNamespace, "slicecast-config"))
	require.False(t, may("slicecast-agent", "get", "", "configmaps", serverNamespace, "slicecast-ca"))
	for _, verb := range []string{"list", "watch", "update", "patch", "delete"} {
		require.False(t, may("slicecast-agent", verb, "", "configmaps", agentNamespace, "slicecast-ca"), verb)
	}
}

// TestServersCannotActAsOthers requires that a compromised server cannot make itself a token of
// another ServiceAccount. Its token has no rights but these, and they reach no objects but its own.
// RBAC cannot limit the right to create by name.
func TestServersCannotActAsOthers(t *testing.T) {
	_, objects := load(t, ".")
	apply(t, objects)
	as := func(account string) *rest.Config {
		token, err := cluster.Client().CoreV1().ServiceAccounts(serverNamespace).CreateToken(t.Context(), account,
			&authenticationv1.TokenRequest{}, metav1.CreateOptions{})
		require.NoError(t, err)
		config := rest.AnonymousClientConfig(cluster.AdminConfig())
		config.BearerToken = token.Status.Token
		return config
	}
	account := as("slicecast-server")
	publish := []string{"create configmaps", "get configmaps slicecast-ca", "update configmaps slicecast-ca"}
	for namespace, also := range map[string][]string{
		serverNamespace: append(publish, "create secrets", "get secrets slicecast-server-tls", "update secrets slicecast-server-tls"),
		agentNamespace:  publish, metav1.NamespaceDefault: {"create events"}, metav1.NamespaceSystem: nil,
	} {
		everybody := rights(t, as("slicecast-viewer"), namespace) // which has none of its own for objects
		// The API server learns about new roles through a watch.
		require.EventuallyWithT(t, func(c *assert.CollectT) {
			own := slices.DeleteFunc(rights(t, account, namespace), func(r string) bool { return slices.Contains(everybody, r) })
			assert.ElementsMatch(c, append([]string{
				"list services", "watch services", "list nodes", "watch nodes", "list endpointslices", "watch endpointslices",
				"list servicecidrs", "watch servicecidrs", "create tokenreviews", "create subjectaccessreviews",
			}, also...), own, namespace)
		}, deadline, pollInterval)
	}

	client, err := dynamic.NewForConfig(account)
	require.NoError(t, err)
	write := func(verb, namespace, resource, name string, kind corev1.SecretType, dryRun ...string) error {
		o := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "ConfigMap"}}
		o.SetName(name)
		if resource == "secrets" {
			o.SetKind("Secret")
			o.Object["type"] = string(kind)
			o.Object["data"] = map[string]any{corev1.TLSCertKey: "", corev1.TLSPrivateKeyKey: ""}
			o.SetAnnotations(map[string]string{corev1.ServiceAccountNameKey: "slicecast-viewer"})
		}
		of := client.Resource(corev1.SchemeGroupVersion.WithResource(resource)).Namespace(namespace)
		if verb == "update" {
			_, err := of.Update(t.Context(), o, metav1.UpdateOptions{DryRun: dryRun})
			return err
		}
		_, err := of.Create(t.Context(), o, metav1.CreateOptions{DryRun: dryRun})
		return err
	}
	const (
		own                        = "slicecast-server-tls"
		refused, forbidden         = "the servers may create only", "is forbidden"
		token, opaque, certificate = corev1.SecretTypeServiceAccountToken, corev1.SecretTypeOpaque, corev1.SecretTypeTLS
	)
	// It also learns about new policies that way.
	testenv.Eventually(t, deadline, func() error {
		err := write("create", serverNamespace, "secrets", "mine", token, metav1.DryRunAll)
		if err == nil || !strings.Contains(err.Error(), refused) {
			return fmt.Errorf("not refused: %w", err)
		}
		return nil
	})
	// Updates need it, and servers that ran before may have left it.
	if err := write("create", serverNamespace, "secrets", own, certificate); !apierrors.IsAlreadyExists(err) {
		require.NoError(t, err)
		t.Cleanup(func() {
			require.NoError(t, cluster.Client().CoreV1().Secrets(serverNamespace).Delete(context.Background(), own, metav1.DeleteOptions{}))
		})
	}
	for _, c := range []struct {
		verb, namespace, resource, name string
		kind                            corev1.SecretType
		says                            string
	}{
		{"create", serverNamespace, "secrets", own, token, refused},
		{"create", serverNamespace, "secrets", own, opaque, refused},
		{"create", serverNamespace, "secrets", "other", certificate, refused},
		{"create", agentNamespace, "secrets", own, certificate, forbidden},
		{"update", serverNamespace, "secrets", own, token, "field is immutable"},
		{"update", serverNamespace, "secrets", own, certificate, ""},
		{"update", serverNamespace, "secrets", "other", certificate, forbidden},
		{"create", agentNamespace, "configmaps", "slicecast-config", "", refused},
		{"create", serverNamespace, "configmaps", "slicecast-ca", "", ""},
		{"create", agentNamespace, "configmaps", "slicecast-ca", "", ""},
		{"update", agentNamespace, "configmaps", "slicecast-config", "", forbidden},
	} {
		err := write(c.verb, c.namespace, c.resource, c.name, c.kind, metav1.DryRunAll)
		if c.says == "" {
			// What the policy refuses is refused before the API server looks whether the object exists.
			require.True(t, err == nil || apierrors.IsAlreadyExists(err), "%+v: %v", c, err)
			continue
		}
		require.ErrorContains(t, err, c.says, "%+v", c)
	}
}

// rights returns what the API server says that a user may do in a namespace.
func rights(t *testing.T, user *rest.Config, namespace string) (all []string) {
	t.Helper()
	client, err := kubernetes.NewForConfig(user)
	require.NoError(t, err)
	review, err := client.AuthorizationV1().SelfSubjectRulesReviews().Create(t.Context(), &authorizationv1.SelfSubjectRulesReview{
		Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: namespace},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	require.False(t, review.Status.Incomplete)
	for _, r := range review.Status.ResourceRules {
		names := r.ResourceNames
		if len(names) == 0 {
			names = []string{""}
		}
		for _, verb := range r.Verbs {
			for _, resource := range r.Resources {
				for _, name := range names {
					all = append(all, strings.TrimSpace(verb+" "+resource+" "+name))
				}
			}
		}
	}
	for _, r := range review.Status.NonResourceRules {
		for _, verb := range r.Verbs {
			for _, path := range r.NonResourceURLs {
				all = append(all, verb+" "+path)
			}
		}
	}
	return all
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
// address of the probe. It is for readiness only, because nothing but programming may end the
// agent.
func TestHealthAddressesAreSettings(t *testing.T) {
	_, objects := load(t, ".")
	agent := template(t, objects, "DaemonSet").Spec.Containers[0]
	for _, a := range agent.Args {
		require.NotContains(t, a, "--healthz-bind-address")
	}
	c, err := config.Parse([]byte(agentSettings(t, objects)))
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1:8475,:10256", *c.HealthzBindAddress)
	require.Equal(t, "127.0.0.1:8475", agent.ReadinessProbe.HTTPGet.Host+":"+agent.ReadinessProbe.HTTPGet.Port.String())
	require.Nil(t, agent.LivenessProbe)
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
