// These tests prove that a started control plane behaves like a cluster's: real controllers write
// and mirror slices, RBAC applies to certificates, and bound tokens name their node.
package controlplane

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	patience = 30 * time.Second
	tick     = 50 * time.Millisecond
)

// createNode creates a node and returns its name. The EndpointSlice controller requires the node of
// a scheduled pod to exist.
func createNode(t *testing.T) string {
	t.Helper()
	nodes := shared.Client().CoreV1().Nodes()
	node, err := nodes.Create(t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "node-"},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, nodes.Delete(context.Background(), node.Name, metav1.DeleteOptions{}))
	})
	return node.Name
}

// createPod creates a pod that is ready at ip on node, with the status that a kubelet would report.
func createPod(t *testing.T, namespace, name, node, ip string) *corev1.Pod {
	t.Helper()
	pods := shared.Client().CoreV1().Pods(namespace)
	pod, err := pods.Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": "web"}},
		Spec: corev1.PodSpec{
			NodeName:           node,
			ServiceAccountName: "web",
			Containers:         []corev1.Container{{Name: "web", Image: "none"}},
		},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	pod.Status.Phase = corev1.PodRunning
	pod.Status.PodIP = ip
	pod.Status.PodIPs = []corev1.PodIP{{IP: ip}}
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	pod, err = pods.UpdateStatus(t.Context(), pod, metav1.UpdateOptions{})
	require.NoError(t, err)
	return pod
}

// requireSlices waits until the Service has count slices which together contain exactly the wanted
// addresses.
func requireSlices(t *testing.T, namespace, service string, count int, want ...string) {
	t.Helper()
	slices.Sort(want)
	require.EventuallyWithT(t, func(c *assertT) {
		list, err := shared.Client().DiscoveryV1().EndpointSlices(namespace).List(t.Context(), metav1.ListOptions{
			LabelSelector: discoveryv1.LabelServiceName + "=" + service,
		})
		require.NoError(c, err)
		var got []string
		for _, slice := range list.Items {
			for _, endpoint := range slice.Endpoints {
				require.True(c, *endpoint.Conditions.Ready)
				got = append(got, endpoint.Addresses...)
			}
		}
		slices.Sort(got)
		require.Equal(c, want, got)
		require.Len(c, list.Items, count)
	}, patience, tick)
}

func TestControllersMakeSlices(t *testing.T) {
	namespace := shared.Namespace(t)
	services := shared.Client().CoreV1().Services(namespace)
	service, err := services.Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: corev1.ServiceSpec{
			Selector: map[string]string{"app": "web"},
			Ports:    []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}},
		},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	require.NotEmpty(t, service.Spec.ClusterIP)

	node := createNode(t)
	var want []string
	for i := range 6 {
		ip := fmt.Sprintf("10.1.0.%d", i+1)
		createPod(t, namespace, fmt.Sprintf("web-%d", i), node, ip)
		want = append(want, ip)
	}
	requireSlices(t, namespace, "web", 2, want...)

	require.NoError(t, services.Delete(t.Context(), "web", metav1.DeleteOptions{}))
	requireSlices(t, namespace, "web", 0)
}

func TestControllersMirrorEndpoints(t *testing.T) {
	namespace := shared.Namespace(t)
	_, err := shared.Client().CoreV1().Services(namespace).Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "external"},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	_, err = shared.Client().CoreV1().Endpoints(namespace).Create(t.Context(), &corev1.Endpoints{
		ObjectMeta: metav1.ObjectMeta{Name: "external"},
		Subsets: []corev1.EndpointSubset{{
			Addresses: []corev1.EndpointAddress{{IP: "192.0.2.1"}, {IP: "192.0.2.2"}},
			Ports:     []corev1.EndpointPort{{Port: 8080}},
		}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	requireSlices(t, namespace, "external", 1, "192.0.2.1", "192.0.2.2")
}

func TestNamespaceEndsWithItsTest(t *testing.T) {
	var namespace string
	t.Run("With a Name / that is no DNS label", func(t *testing.T) {
		namespace = shared.Namespace(t)
		createPod(t, namespace, "web", createNode(t), "10.1.0.1")
	})
	require.EventuallyWithT(t, func(c *assertT) {
		_, err := shared.Client().CoreV1().Namespaces().Get(t.Context(), namespace, metav1.GetOptions{})
		require.True(c, apierrors.IsNotFound(err), "%v", err)
	}, patience, tick)
}

func TestCertificateUserHasTheRightsOfRBAC(t *testing.T) {
	namespace := shared.Namespace(t)
	path := shared.Kubeconfig(t, shared.ConfigFor("reader", "readers"))
	config, err := clientcmd.BuildConfigFromFlags("", path)
	require.NoError(t, err)
	client, err := kubernetes.NewForConfig(config)
	require.NoError(t, err)

	_, err = client.CoreV1().Services(namespace).List(t.Context(), metav1.ListOptions{})
	require.True(t, apierrors.IsForbidden(err), "%v", err)

	_, err = shared.Client().RbacV1().Roles(namespace).Create(t.Context(), &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Name: "readers"},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"services"}, Verbs: []string{"list"}}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	_, err = shared.Client().RbacV1().RoleBindings(namespace).Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "readers"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "readers"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "readers"}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	require.EventuallyWithT(t, func(c *assertT) {
		_, err := client.CoreV1().Services(namespace).List(t.Context(), metav1.ListOptions{})
		require.NoError(c, err)
	}, patience, tick)
}

func TestBoundTokenNamesItsNode(t *testing.T) {
	namespace := shared.Namespace(t)
	core := shared.Client().CoreV1()
	node := createNode(t)
	_, err := core.ServiceAccounts(namespace).Create(t.Context(), &corev1.ServiceAccount{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	pod := createPod(t, namespace, "web", node, "10.1.0.1")

	const audience = "slicecast"
	request, err := core.ServiceAccounts(namespace).CreateToken(t.Context(), "web", &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{
			Audiences: []string{audience, Issuer},
			BoundObjectRef: &authenticationv1.BoundObjectReference{
				Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID,
			},
		},
	}, metav1.CreateOptions{})
	require.NoError(t, err)

	review, err := shared.Client().AuthenticationV1().TokenReviews().Create(t.Context(), &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: request.Status.Token, Audiences: []string{audience}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	require.True(t, review.Status.Authenticated, review.Status.Error)
	require.Equal(t, []string{audience}, review.Status.Audiences)
	require.Equal(t, authenticationv1.ExtraValue{node}, review.Status.User.Extra["authentication.kubernetes.io/node-name"])

	config := rest.AnonymousClientConfig(shared.AdminConfig())
	config.BearerToken = request.Status.Token
	client, err := kubernetes.NewForConfig(config)
	require.NoError(t, err)
	self, err := client.AuthenticationV1().SelfSubjectReviews().Create(t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	require.NoError(t, err)
	require.Equal(t, "system:serviceaccount:"+namespace+":web", self.Status.UserInfo.Username)
}
