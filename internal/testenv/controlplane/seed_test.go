// This test proves that the API server takes what Seed writes to etcd for its own objects.
package controlplane

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

func TestSeed(t *testing.T) {
	namespace, client := shared.Namespace(t), shared.Client()
	made := func(name, ip string) (*corev1.Service, error) {
		return client.CoreV1().Services(namespace).Create(t.Context(), &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec:       corev1.ServiceSpec{ClusterIP: ip, Ports: []corev1.ServicePort{{Port: 80}}},
		}, metav1.CreateOptions{})
	}
	service, err := made("made", "")
	require.NoError(t, err)
	address, err := client.NetworkingV1().IPAddresses().Get(t.Context(), service.Spec.ClusterIP, metav1.GetOptions{})
	require.NoError(t, err)

	// More than one transaction takes.
	const seeded, ip = "seeded", "10.96.0.77"
	service.Name, service.UID, service.ResourceVersion, service.Spec.ClusterIP, service.Spec.ClusterIPs = seeded, "1", "", ip, []string{ip}
	address.Name, address.UID, address.ResourceVersion, address.Spec.ParentRef.Name = ip, "2", "", seeded
	objects := []runtime.Object{service, address}
	for i := range seedBatch {
		objects = append(objects, &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: seeded + string(rune('a'+i/26)) + string(rune('a'+i%26)),
				Labels: map[string]string{discoveryv1.LabelServiceName: seeded},
			},
			AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}}},
		})
	}
	require.NoError(t, shared.Seed(t.Context(), objects))
	cached, err := client.DiscoveryV1().EndpointSlices(namespace).List(t.Context(), metav1.ListOptions{ResourceVersion: "0"})
	require.NoError(t, err)
	require.Len(t, cached.Items, seedBatch, "what lists come from has everything")

	got, err := client.CoreV1().Services(namespace).Get(t.Context(), seeded, metav1.GetOptions{})
	require.NoError(t, err)
	require.Equal(t, service.Spec, got.Spec)
	require.NotEmpty(t, got.ResourceVersion)
	list, err := client.DiscoveryV1().EndpointSlices(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + seeded})
	require.NoError(t, err)
	require.Len(t, list.Items, seedBatch)

	_, err = made("other", ip)
	require.True(t, apierrors.IsInvalid(err), "the address of a seeded Service must be taken: %v", err)
	require.Error(t, shared.Seed(t.Context(), []runtime.Object{&corev1.Pod{}}))
}
