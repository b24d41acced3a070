// This test proves that what Trim removes does not matter to Converter.
package source_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/slicecast/slicecast/internal/source"
)

func TestTrim(t *testing.T) {
	t.Parallel()
	big := strings.Repeat("x", 10_000)
	meta := metav1.ObjectMeta{
		Namespace: "default", Name: "a", CreationTimestamp: metav1.Unix(1_754_000_000, 0), Finalizers: []string{big},
		Labels: map[string]string{discoveryv1.LabelServiceName: "a", source.LabelServiceProxyName: "other", "x": big},
		Annotations: map[string]string{
			"x": big, source.AnnotationIPVSScheduler: "lc", corev1.EndpointsLastChangeTriggerTime: "2026-01-02T03:04:05.678Z",
		},
		OwnerReferences: []metav1.OwnerReference{{Name: big}},
		ManagedFields:   []metav1.ManagedFieldsEntry{{Manager: big}},
	}
	for _, o := range []metav1.Object{
		&corev1.Service{
			ObjectMeta: meta,
			Spec: corev1.ServiceSpec{
				Type: corev1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.1", Selector: map[string]string{"x": big}, SessionAffinity: corev1.ServiceAffinityClientIP,
				ExternalIPs: []string{"192.0.2.1"}, LoadBalancerSourceRanges: []string{"192.0.2.0/24"}, HealthCheckNodePort: 30001,
				InternalTrafficPolicy: ptr.To(corev1.ServiceInternalTrafficPolicyLocal), ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal,
				TrafficDistribution: ptr.To("PreferClose"), Ports: []corev1.ServicePort{{Name: "http", Port: 80, NodePort: 30000, Protocol: corev1.ProtocolTCP}},
			},
			Status: corev1.ServiceStatus{
				LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: "192.0.2.2"}}},
				Conditions:   []metav1.Condition{{Message: big}},
			},
		},
		&discoveryv1.EndpointSlice{
			ObjectMeta: meta, AddressType: discoveryv1.AddressTypeIPv4,
			Ports: []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To(int32(8080))}},
			Endpoints: []discoveryv1.Endpoint{{
				Addresses: []string{"10.1.2.3"}, NodeName: ptr.To("node-1"), Zone: ptr.To("zone-a"), Hostname: &big,
				Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(false), Serving: ptr.To(true), Terminating: ptr.To(true)},
				TargetRef:  &corev1.ObjectReference{Name: big}, DeprecatedTopology: map[string]string{"x": big},
				Hints: &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "zone-a"}}, ForNodes: []discoveryv1.ForNode{{Name: "node-1"}}},
			}},
		},
		&networkingv1.ServiceCIDR{ObjectMeta: meta, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/16"}}},
	} {
		converter := source.NewConverter("other")
		key, before, _ := converter.Convert(o.(runtime.Object).DeepCopyObject().(metav1.Object))
		require.NotNil(t, before, "%v", key)
		source.Trim(o)
		_, after, _ := converter.Convert(o)
		require.Equal(t, before, after)
		text, err := json.Marshal(o)
		require.NoError(t, err)
		require.Less(t, len(text), 1500, "%s", text)
	}
	headless := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "a", Labels: map[string]string{corev1.IsHeadlessService: ""}}}
	source.Trim(headless)
	_, slice, _ := source.NewConverter("").Convert(headless)
	require.Nil(t, slice)
}
