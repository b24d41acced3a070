// These tests prove that check asks for exactly those rights of servers that the manifests give
// them, and that it finds each that is missing.
package plugin

import (
	"bufio"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
)

// manifests calls see with each object of a manifest, as JSON, and its kind.
func manifests(t *testing.T, file string, see func(kind string, decode func(any))) {
	t.Helper()
	f, err := os.Open(filepath.Join("../../deploy/kubernetes", file))
	require.NoError(t, err)
	defer f.Close()
	for reader := utilyaml.NewYAMLReader(bufio.NewReader(f)); ; {
		text, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return
		}
		require.NoError(t, err)
		var meta metav1.TypeMeta
		require.NoError(t, yaml.Unmarshal(text, &meta))
		see(meta.Kind, func(into any) { require.NoError(t, yaml.UnmarshalStrict(text, into)) })
	}
}

// given returns the rights in the rules of a role.
func given(rules []rbacv1.PolicyRule, namespace string) (out []authorizationv1.SubjectAccessReviewSpec) {
	for _, rule := range rules {
		for _, verb := range rule.Verbs {
			for _, path := range rule.NonResourceURLs {
				out = append(out, authorizationv1.SubjectAccessReviewSpec{NonResourceAttributes: &authorizationv1.NonResourceAttributes{Verb: verb, Path: path}})
			}
			for _, group := range rule.APIGroups {
				for _, resource := range rule.Resources {
					names := rule.ResourceNames
					if len(names) == 0 {
						names = []string{""}
					}
					for _, name := range names {
						out = append(out, rightOn(verb, group, resource, namespace, name))
					}
				}
			}
		}
	}
	return out
}

func TestServerRightsAreThoseOfTheManifests(t *testing.T) {
	var want []string
	manifests(t, "server-rbac.yaml", func(kind string, decode func(any)) {
		var rights []authorizationv1.SubjectAccessReviewSpec
		switch kind {
		case "ClusterRole":
			var role rbacv1.ClusterRole
			decode(&role)
			rights = given(role.Rules, "")
		case "Role":
			var role rbacv1.Role
			decode(&role)
			rights = given(role.Rules, role.Namespace)
		}
		for _, r := range rights {
			want = append(want, rightText(r))
		}
	})
	var server *fleet.Server
	manifests(t, "server.yaml", func(kind string, decode func(any)) {
		if kind == "Deployment" {
			var d appsv1.Deployment
			decode(&d)
			server = &fleet.Server{Pod: &corev1.Pod{Spec: d.Spec.Template.Spec}, Container: d.Spec.Template.Spec.Containers[0].Name}
		}
	})
	var have []string
	for _, r := range serverRights(server) {
		have = append(have, rightText(r))
	}
	require.Greater(t, len(want), 15)
	require.ElementsMatch(t, want, have)

	// With certificates of its own, a server keeps none.
	c := &server.Pod.Spec.Containers[0]
	c.Args = slices.DeleteFunc(c.Args, func(arg string) bool { return strings.HasPrefix(arg, "--tls-secret=") })
	for _, r := range serverRights(server) {
		require.NotContains(t, rightText(r), "secrets")
		require.NotContains(t, rightText(r), "configmaps")
	}
}

// TestCheckOfServersRights checks that rights are missed which the servers no longer have.
func TestCheckOfServersRights(t *testing.T) {
	e := newEnvironment(t)
	e.server("server-1")
	e.eventually(fine, []string{"the servers' ServiceAccount has its rights"}, "check", "-o", "wide")
	rbac := plane.Client().RbacV1()
	for namespace, name := range map[string]string{metav1.NamespaceDefault: "slicecast-events", agentNamespace: "slicecast-certificates"} {
		require.NoError(t, rbac.Roles(namespace).Delete(t.Context(), name, metav1.DeleteOptions{}))
	}
	const may = "RBAC: slicecast-system/slicecast-server: the servers' ServiceAccount may not "
	r := e.eventually(wrong, []string{"create events in default"}, "check")
	require.Contains(t, r.out, "FAILED: "+may+"create events in default, get configmaps slicecast-ca in slicecast-agents, update configmaps slicecast-ca in slicecast-agents\n")
	require.Contains(t, r.out, "WARNING: "+may+"create configmaps in slicecast-agents\n  do   nothing, if the Secret and the ConfigMaps")
}
