// This test proves that the source follows the largest objects that a real API server accepts, and
// leaves out and reports what exceeds the bounds.
package kube

import (
	"context"
	"fmt"
	"sort"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/source/sourcetest"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
	"github.com/slicecast/slicecast/internal/wire"
)

// most returns the highest n below limit with which an object can be created, and creates the
// object with it. The bound is that of the API server or of etcd.
func most(t *testing.T, limit int, create func(n int) error, remove func() error) int {
	t.Helper()
	n := sort.Search(limit, func(n int) bool {
		if create(n+1) != nil {
			return true
		}
		require.NoError(t, remove())
		return false
	})
	require.Less(t, n, limit)
	require.NoError(t, create(n))
	return n
}

// reported returns how many objects of a kind have lists of which a part is left out.
func reported(t *testing.T, r *running, kind string) (n float64) {
	t.Helper()
	families, err := r.registry.Gather()
	require.NoError(t, err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if l := m.GetLabel(); f.GetName() == "slicecast_source_skipped_objects" && l[0].GetValue() == kind && l[1].GetValue() == string(source.TooMany) {
				n += m.GetGauge().GetValue()
			}
		}
	}
	return n
}

// TestTheLargestObjectsOfARealAPIServer checks that the largest objects that a real API server
// accepts are followed. Parts beyond the bounds are left out, so their frames have a bounded size.
func TestTheLargestObjectsOfARealAPIServer(t *testing.T) {
	cp := controlplane.Start(t, controlplane.Options{})
	config, err := Config(cp.Kubeconfig(t, cp.AdminConfig()))
	require.NoError(t, err)
	r := start(t, config)
	r.awaitSynced(t)
	ctx := context.Background()
	meta := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Name: name, Namespace: "default", Labels: map[string]string{discoveryv1.LabelServiceName: "huge"}}
	}

	ips := most(t, 1<<18, func(n int) error {
		s := &corev1.Service{ObjectMeta: meta("huge"), Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
		for i := range n {
			s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprintf("100.%d.%d.%d", 100+i>>16, i>>8&0xff, i&0xff))
		}
		_, err := cp.Client().CoreV1().Services("default").Create(ctx, s, metav1.CreateOptions{})
		return err
	}, func() error {
		return cp.Client().CoreV1().Services("default").Delete(ctx, "huge", metav1.DeleteOptions{})
	})
	hints := most(t, 1<<10, func(n int) error {
		s := &discoveryv1.EndpointSlice{ObjectMeta: meta("hints"), AddressType: discoveryv1.AddressTypeIPv4}
		for i := range 1000 {
			e := discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.0.%d.%d", i>>8, i&0xff)}, Hints: &discoveryv1.EndpointHints{}}
			for j := range min(n, 8) {
				e.Hints.ForZones = append(e.Hints.ForZones, discoveryv1.ForZone{Name: fmt.Sprint(strings.Repeat("z", 60), j)})
			}
			for j := range max(0, n-8) {
				e.Hints.ForNodes = append(e.Hints.ForNodes, discoveryv1.ForNode{Name: fmt.Sprint(strings.Repeat("n", 60), j)})
			}
			s.Endpoints = append(s.Endpoints, e)
		}
		_, err := cp.Client().DiscoveryV1().EndpointSlices("default").Create(ctx, s, metav1.CreateOptions{})
		return err
	}, func() error {
		return cp.Client().DiscoveryV1().EndpointSlices("default").Delete(ctx, "hints", metav1.DeleteOptions{})
	})
	ports := most(t, 1<<16, func(n int) error {
		s := &discoveryv1.EndpointSlice{ObjectMeta: meta("ports"), AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{}}
		for i := range n {
			s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: ptr.To(fmt.Sprint("p", i)), Port: ptr.To(int32(i%65535 + 1)), Protocol: ptr.To(corev1.ProtocolTCP)})
		}
		_, err := cp.Client().DiscoveryV1().EndpointSlices("default").Create(ctx, s, metav1.CreateOptions{})
		return err
	}, func() error {
		return cp.Client().DiscoveryV1().EndpointSlices("default").Delete(ctx, "ports", metav1.DeleteOptions{})
	})
	t.Logf("%d external IPs, %d hints of each of 1000 endpoints, %d ports", ips, hints, ports)
	require.Greater(t, ips, model.MaxFrontends, "the API server takes what nodes do not use")

	// Objects that most has created before may come first.
	want, err := directList(ctx, cp.Client())
	require.NoError(t, err)
	eventually(t, "all objects", func() bool { return len(sourcetest.Difference(r.Objects(), want)) == 0 })
	get := func(kind model.Kind, name string) model.Object {
		return r.Get(model.Key{Kind: kind, Namespace: "default", Name: name}).(model.Object)
	}
	service := get(model.KindService, "huge").(*model.Service)
	require.Len(t, service.ExternalIPs, model.MaxFrontends)
	slices := []*model.Slice{get(model.KindSlice, "hints").(*model.Slice), get(model.KindSlice, "ports").(*model.Slice)}
	require.Equal(t, 1.0, reported(t, r, "Service"))
	require.Len(t, slices[0].Endpoints, 1000)
	e := slices[0].Endpoints[0]
	require.Equal(t, hints, len(e.ZoneHints)+len(e.NodeHints))
	require.Len(t, slices[1].Ports, ports)
	require.Zero(t, reported(t, r, "EndpointSlice"), "bounds are not below the API server's")

	for _, s := range slices {
		frames, err := wire.EncodeParts(&model.Update{Services: []*model.Service{service}, Slices: []*model.Slice{s}})
		require.NoError(t, err)
		for _, f := range frames {
			require.Less(t, len(f), wire.MaxFrame/8)
		}
	}
}
