// These tests prove that shards full of the largest objects that an API server accepts reach every
// client, in frames that are bounded: at once or as changes, and through relays.
package fabric

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/wire"
)

// mostBytes is the size of the largest object that an API server and etcd accept: 1.5 MiB.
const mostBytes = 3 << 19

// largestService returns a Service with as many external IPs as an object can have.
func largestService(name string) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "huge", Name: name},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"},
			Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}},
		},
	}
	for n, bytes := 0, 1<<10; bytes < mostBytes; n++ {
		ip := fmt.Sprintf("100.%d.%d.%d", 100+n>>16, n>>8&0xff, n&0xff)
		s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, ip)
		bytes += len(ip) + 2
	}
	return s
}

// largestSlice returns a slice with as many endpoints as possible, each as large as fits into the
// object.
func largestSlice(service string, ready bool) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "huge", Name: service + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: service},
		},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Port: ptr.To(int32(8080))}},
	}
	hints := &discoveryv1.EndpointHints{}
	for n := range 6 {
		hints.ForNodes = append(hints.ForNodes, discoveryv1.ForNode{Name: fmt.Sprint(strings.Repeat("n", 245), n)})
	}
	for n := range 1000 {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{fmt.Sprintf("10.0.%d.%d", n>>8, n&0xff)}, NodeName: ptr.To(nodes[0]), Hints: hints,
			Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(ready || n%2 == 0)},
		})
	}
	return s
}

// inShard returns names of Services that are all in the same shard.
func inShard(count int) (names []string) {
	for n := 0; len(names) < count; n++ {
		key := model.ServiceKey{Namespace: "huge", Name: fmt.Sprint("s", n)}
		if key.Shard(64) == 0 {
			names = append(names, key.Name)
		}
	}
	return names
}

func converted(t *testing.T, o metav1.Object) model.Keyed {
	t.Helper()
	_, c, _ := source.NewConverter("").Convert(o)
	require.NotNil(t, c)
	return c
}

// TestAThousandLargestObjects checks a shard of more than a thousand objects, hundreds of which are
// as large as an API server accepts. It must reach a node that holds nothing.
func TestAThousandLargestObjects(t *testing.T) {
	t.Parallel()
	const services, full, count = 200, 190, 500
	c := newCluster()
	// Names and addresses of slices need not differ between Services, so most of their memory can
	// be shared.
	template := converted(t, largestSlice("s", true)).(*model.Slice)
	ips := converted(t, largestService("s")).(*model.Service).ExternalIPs
	for i, name := range inShard(count) {
		service := model.Service{Namespace: "huge", Name: name, Type: model.ClusterIP, InternalTrafficPolicy: model.TrafficCluster}
		if i < services {
			service.ExternalIPs = ips
		}
		slice := *template
		slice.Name, slice.Service = name+"-1", name
		if i >= full {
			slice.Endpoints = slice.Endpoints[:1]
		}
		c.upsert(model.NewService(service))
		c.upsert(model.NewSlice(slice))
	}
	s := serve(t, &watch{cluster: c}, quietServer)
	frame, err := wire.EncodeUpdate(&model.Update{Slices: []*model.Slice{template}})
	require.NoError(t, err)
	require.Greater(t, full*len(frame), 256<<20, "in one frame it would be more than agents ever took")
	a := follow(t, agentOptions{node: nodes[0], servers: []string{s.address()}})
	// However long it takes, the first stream must complete it.
	for a.inSyncs.Load() == 0 {
		require.LessOrEqual(t, s.metric(t, "slicecast_server_stream_starts_total"), 1.0, "the agent comes again, as it did not get in sync")
		<-time.After(10 * tick)
	}
	require.NoError(t, a.differs(c.state()))
}

// largestFrame has the size of the largest frame that a client has received.
type largestFrame struct{ atomic.Int64 }

func (l *largestFrame) add(f wire.Frame) { // called on one goroutine
	l.Store(max(l.Load(), int64(len(f))))
}

// TestLargeUpdatesOnAllWays checks that large updates reach every client on each way: at once or
// later, whole or as changes, and through relays.
func TestLargeUpdatesOnAllWays(t *testing.T) {
	t.Parallel()
	const count, services = 4, 1
	c := newCluster()
	names := inShard(count)
	change := func(ready bool) {
		for i, name := range names {
			if i < services {
				service := largestService(name)
				service.Spec.Ports[0].Port = map[bool]int32{false: 81, true: 80}[ready]
				c.upsert(converted(t, service))
			}
			c.upsert(converted(t, largestSlice(name, ready)))
		}
	}
	change(true)
	root := serve(t, &watch{cluster: c}, quietServer)
	below := serve(t, nil, quietServer, upstreamOf(root.address()))
	sizes := make([]largestFrame, 2)
	agents := []*agent{
		follow(t, agentOptions{node: nodes[0], servers: []string{root.address()}, before: sizes[0].add}),
		follow(t, agentOptions{node: nodes[1], servers: []string{below.address()}, before: sizes[1].add}),
	}
	r := newResumer(t, c, below.address())
	same := func() {
		t.Helper()
		for _, a := range agents {
			a.waitEquals(t, c)
		}
	}
	same()
	change(false) // as a publish
	same()
	r.waitEquals(t, c)
	r.leave()
	change(true) // as a catch-up, from the same server and from another one
	same()
	r.proxy.Lead(below.address())
	r.waitEquals(t, c)
	r.leave()
	change(false)
	same()
	r.proxy.Lead(root.address())
	r.waitEquals(t, c)
	for _, name := range names[1:] {
		c.remove(model.Key{Kind: model.KindSlice, Namespace: "huge", Name: name + "-1"})
	}
	same()
	r.waitEquals(t, c)
	for i := range sizes {
		require.Less(t, sizes[i].Load(), int64(3<<20), i)
	}
}
