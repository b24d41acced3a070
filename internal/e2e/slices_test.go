// These tests prove that slices of one Service change separately and can change hands, and that a
// replaced pod is sent as deltas of single slices.
package e2e

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

func TestSlicesOfOneServiceChangeSeparately(t *testing.T) {
	c := newCluster(t)
	pods := c.Deployment("web", 3)
	web := c.Service("web", withoutSelector(tcp("http", 80, onPodPort())))
	ports := []discoveryv1.EndpointPort{tcpSlicePort("http", podPort)}
	first, second := c.Slices("first", web, ports, pods[0]), c.Slices("second", web, ports, pods[1])
	c.RequireAnswers(web, 80, pods[0], pods[1])

	first.SetPods(pods[2])
	c.RequireAnswers(web, 80, pods[2], pods[1])
	second.SetPods()
	c.RequireAnswers(web, 80, pods[2])
	second.SetPods(pods[0], pods[2]) // both slices have pods[2]
	c.RequireAnswers(web, 80, pods[0], pods[2])
	first.Delete()
	c.RequireAnswers(web, 80, pods[0], pods[2])
	second.Delete()
	c.RequireRejected(web, 80)
}

func TestSliceIsHandedToAnotherService(t *testing.T) {
	c := newCluster(t)
	pods := c.Deployment("web", 2)
	blue := c.Service("blue", withoutSelector(tcp("http", 80, onPodPort())))
	green := c.Service("green", withoutSelector(tcp("http", 81, onPodPort())))
	slice := c.Slices("handed", blue, []discoveryv1.EndpointPort{tcpSlicePort("http", podPort)}, pods...)
	c.RequireAnswers(blue, 80, pods...)
	c.RequireRejected(green, 81)

	slice.HandTo(green)
	c.RequireAnswers(green, 81, pods...)
	c.RequireRejected(blue, 80)
	slice.HandTo(blue)
	c.RequireAnswers(blue, 80, pods...)
	c.RequireRejected(green, 81)
}

func TestServicesSharePods(t *testing.T) {
	c := newCluster(t)
	pods := c.Deployment("web", 2)
	one := c.Service("one", selecting("web", tcp("http", 80, onPodPort())))
	two := c.Service("two", selecting("web", tcp("http", 80, onPodPort())))
	c.RequireAnswers(one, 80, pods...)
	c.RequireAnswers(two, 80, pods...)

	c.SetReady(pods[1], false)
	c.RequireAnswers(one, 80, pods[0])
	c.RequireAnswers(two, 80, pods[0])
	c.DeleteService(one)
	c.SetReady(pods[1], true)
	c.RequireAnswers(two, 80, pods...)
}

// TestReplacedPodTouchesOneSlice replaces one of 17 pods, which are in four slices of at most 5.
// Each step must be a single delta of a single slice.
func TestReplacedPodTouchesOneSlice(t *testing.T) {
	c := startCluster(t, controlplane.Start(t, controlOptions("--max-endpoints-per-slice=5")), fromServer)
	pods := c.Deployment("web", 17)
	spec := selecting("web", tcp("http", 80, onPodPort()))
	spec.IPFamilyPolicy = new(corev1.IPFamilyPolicySingleStack)
	web := c.Service("web", spec)
	c.RequireAnswers(web, 80, pods...)
	_, endpointSlices, err := c.list(t.Context())
	require.NoError(t, err)
	require.Len(t, endpointSlices, 4)
	o := c.Observe()

	o.Forget()
	c.DeletePod("web-7", 600)
	c.RequireAnswers(web, 80, append(pods[:7:7], pods[8:]...)...)
	terminating, _ := o.RequireOneDelta()
	require.Equal(t, 1, terminating.Len(), "endpoints in the delta")
	require.Len(t, terminating.Conditions, 1)
	require.Equal(t, model.Conditions{Serving: true, Terminating: true}, terminating.Conditions[0].Conditions)

	o.Forget()
	c.DeletePod("web-7", 0)
	removal, _ := o.RequireOneDelta()
	require.Equal(t, terminating.Key(), removal.Key())
	require.Equal(t, []netip.Addr{pods[7].IPv4}, removal.Removed)
	require.Equal(t, 1, removal.Len(), "endpoints in the delta")

	o.Forget()
	pods[7] = c.Pod("web-17", "web", c.b)
	c.RequireAnswers(web, 80, pods...)
	addition, _ := o.RequireOneDelta()
	require.Equal(t, terminating.Key(), addition.Key(), "the new pod is not in the slice with the gap")
	require.Len(t, addition.Endpoints, 1)
	require.Equal(t, pods[7].IPv4, addition.Endpoints[0].Address)
	require.Equal(t, 1, addition.Len(), "endpoints in the delta")
}
