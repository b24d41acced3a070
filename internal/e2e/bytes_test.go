// This test proves that a change of one endpoint costs a node at most 200 bytes, a fiftieth of what
// the API server sends to each of its watchers for it.
package e2e

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/testenv"
)

// TestBytesOfOneChange compares what a node receives when one of 100 endpoints of a slice becomes
// unready with what the API server sends to each of its watchers.
func TestBytesOfOneChange(t *testing.T) {
	const (
		replicas  = 100 // the controller's default limit for a slice
		maxBytes  = 200
		leastGain = 50
	)
	c := newCluster(t)
	var wg sync.WaitGroup
	address := c.a.PodCIDR4.Addr()
	for i := range replicas {
		address = address.Next()
		ip, n := address.String(), c.nodes()[i%2]
		wg.Go(func() { c.createPod(t.Context(), podObject(fmt.Sprintf("web-%d", i), "web", n), ip) })
	}
	wg.Wait()
	spec := selecting("web", tcp("http", 80, onPodPort()))
	spec.IPFamilyPolicy = new(corev1.IPFamilyPolicySingleStack)
	c.Service("web", spec)

	o := c.Observe()
	var slice discoveryv1.EndpointSlice
	testenv.Eventually(t, settleTimeout, func() error {
		_, list, err := c.list(t.Context())
		if err != nil {
			return err
		}
		for i := range list {
			if list[i].Namespace == c.namespace && len(list[i].Endpoints) == replicas {
				slice = list[i]
				return nil
			}
		}
		return fmt.Errorf("no slice has %d endpoints", replicas)
	})
	c.AwaitTruth()
	o.AwaitTruth()

	events := c.watchBytes(&slice)
	o.Forget()
	require.NoError(t, c.setReady(t.Context(), "web-42", false))
	delta, size := o.RequireOneDelta()
	event := <-events

	require.Equal(t, slice.Name, delta.Name)
	require.Len(t, delta.Conditions, 1)
	require.Equal(t, 1, delta.Len(), "endpoints in the delta")
	require.Equal(t, placeOf(t, &slice, "web-42"), delta.Conditions[0].Index)
	t.Logf("one endpoint of %d became unready: %d bytes to each node; the API server's watch event: %d bytes, %d times as many",
		replicas, size, event, event/size)
	require.LessOrEqual(t, size, maxBytes)
	require.GreaterOrEqual(t, event, leastGain*size)
}

// placeOf returns the index of a pod's endpoint when the slice's endpoints are sorted by address.
func placeOf(t *testing.T, slice *discoveryv1.EndpointSlice, pod string) (place uint32) {
	t.Helper()
	i := slices.IndexFunc(slice.Endpoints, func(e discoveryv1.Endpoint) bool { return e.TargetRef != nil && e.TargetRef.Name == pod })
	require.GreaterOrEqual(t, i, 0, "no endpoint of %s", pod)
	of := netip.MustParseAddr(slice.Endpoints[i].Addresses[0])
	for _, e := range slice.Endpoints {
		if netip.MustParseAddr(e.Addresses[0]).Less(of) {
			place++
		}
	}
	return place
}

// watchBytes watches a slice in protobuf, as kube-proxy does. The channel receives the size in
// bytes of the next event, and is closed without a value if the watch fails.
func (c *cluster) watchBytes(slice *discoveryv1.EndpointSlice) <-chan int {
	c.t.Helper()
	client, err := rest.HTTPClientFor(c.cp.AdminConfig())
	require.NoError(c.t, err)
	query := url.Values{
		"watch": {"true"}, "fieldSelector": {"metadata.name=" + slice.Name}, "resourceVersion": {slice.ResourceVersion},
	}
	ctx, cancel := context.WithCancel(context.Background())
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf(
		"%s/apis/discovery.k8s.io/v1/namespaces/%s/endpointslices?%s", c.cp.URL(), c.namespace, query.Encode()), nil)
	require.NoError(c.t, err)
	request.Header.Set("Accept", runtime.ContentTypeProtobuf+";stream=watch")
	response, err := client.Do(request)
	require.NoError(c.t, err)
	require.Equal(c.t, http.StatusOK, response.StatusCode)

	sizes := make(chan int, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(sizes)
		// Each event is preceded by its length in four bytes.
		var length [4]byte
		if _, err := io.ReadFull(response.Body, length[:]); err != nil {
			return
		}
		event := make([]byte, binary.BigEndian.Uint32(length[:]))
		if _, err := io.ReadFull(response.Body, event); err == nil {
			sizes <- len(length) + len(event)
		}
	})
	c.t.Cleanup(func() {
		cancel()
		wg.Wait()
		require.NoError(c.t, response.Body.Close())
		client.CloseIdleConnections()
	})
	return sizes
}
