// This test bounds the memory that a comparison takes in an agent's container, and its allocations,
// which are most of its CPU time.
package verify

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/source/file"
)

// endpointsEach is the number of endpoints of each Service.
const endpointsEach = 50

// writeCluster writes a list as kubectl prints it: a Node, and Services with endpoints. Each
// Service and each slice has an annotation of so many bytes.
func writeCluster(to io.Writer, services, annotation int) error {
	encoder := json.NewEncoder(to)
	fat := map[string]string{"tenant.example/notes": strings.Repeat("x", annotation)}
	write := func(o any) error {
		_, _ = io.WriteString(to, ",")
		return encoder.Encode(o)
	}
	_, _ = io.WriteString(to, `{"apiVersion": "v1", "items": [`)
	err := encoder.Encode(&corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: "node-1"}})
	yes, host, zone := true, "node-2.example", "zone-b"
	for i := range services {
		name := fmt.Sprintf("service-%d", i)
		service := corev1.Service{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Annotations: fat},
			Spec: corev1.ServiceSpec{
				ClusterIP: netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}).String(),
				Ports:     []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}},
			},
		}
		port, portName := int32(8080), "http"
		slice := discoveryv1.EndpointSlice{
			TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
			ObjectMeta: metav1.ObjectMeta{
				Namespace: "default", Name: name + "-abcde", Annotations: fat, Labels: map[string]string{discoveryv1.LabelServiceName: name},
			},
			AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: &portName, Port: &port}},
		}
		for e := range endpointsEach {
			n := i*endpointsEach + e
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
				Addresses: []string{netip.AddrFrom4([4]byte{10, byte(128 + n>>16), byte(n >> 8), byte(n)}).String()}, NodeName: &host, Zone: &zone,
				Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes},
				TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: fmt.Sprintf("%s-7d9c5b6f8-%05d", name, e), UID: "9a1c8a0e-6b0f-4f0e-9f0a-0a1b2c3d4e5f"},
			})
		}
		if err == nil {
			err = write(&service)
		}
		if err == nil {
			err = write(&slice)
		}
	}
	_, _ = io.WriteString(to, `], "kind": "List"}`)
	return err
}

// sampler counts the bytes that are read, and samples the heap.
type sampler struct {
	io.Reader
	read int
	next int
	peak uint64
}

func (s *sampler) Read(b []byte) (int, error) {
	n, err := s.Reader.Read(b)
	if s.read += n; s.read >= s.next {
		s.next = s.read + 1<<20
		s.sample()
	}
	return n, err
}

func (s *sampler) sample() {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	s.peak = max(s.peak, m.HeapAlloc)
}

// TestMemory asserts that a comparison of many endpoints needs little heap for each of them, and
// none for annotations. It also asserts that it allocates little: packets to a set of backends are
// followed without copies of what does not differ.
func TestMemory(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(10))
	read := func(services, annotation int) (state view.State, perEndpoint uint64) {
		runtime.GC()
		in, out := io.Pipe()
		go func() { _ = out.CloseWithError(writeCluster(out, services, annotation)) }()
		s := &sampler{Reader: in}
		s.sample()
		before := s.peak
		objects := &Objects{}
		require.NoError(t, file.Read(s, "objects", file.Options{Log: slog.New(slog.DiscardHandler)}, objects))
		s.sample()
		state, err := objects.State(view.Options{NodeName: "node-1"})
		require.NoError(t, err)
		require.Len(t, state.Ports, services)
		s.sample()
		runtime.KeepAlive(objects)
		return state, (s.peak - before) / uint64(services*endpointsEach)
	}
	const services = 300
	state, perEndpoint := read(services, 0)
	require.Less(t, perEndpoint, uint64(500), "bytes of heap for each endpoint that is read")
	_, perEndpoint = read(services, 100_000) // annotations of 4,000 bytes for each endpoint
	require.Less(t, perEndpoint, uint64(600), "bytes of heap for each endpoint that is read, with annotations")

	node := newNode(t)
	replaceNFT(t, node, state)
	s := &sampler{}
	runtime.GC()
	s.sample()
	before := s.peak
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for tick := time.NewTicker(50 * time.Millisecond); ; <-tick.C {
			select {
			case <-stop:
				tick.Stop()
				return
			default:
				s.sample()
			}
		}
	}()
	var start, end runtime.MemStats
	runtime.ReadMemStats(&start)
	r := compare(t, node, state)
	runtime.ReadMemStats(&end)
	close(stop)
	<-stopped
	require.Empty(t, sentences(r))
	require.Less(t, (s.peak-before)/(services*endpointsEach), uint64(1500), "bytes of heap for each endpoint that is compared")
	require.Less(t, (end.Mallocs-start.Mallocs)/(services*endpointsEach), uint64(40), "allocations for each endpoint that is compared")
	require.Less(t, (end.TotalAlloc-start.TotalAlloc)/(services*endpointsEach), uint64(6000), "bytes allocated for each endpoint that is compared")
}
