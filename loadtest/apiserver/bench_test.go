// Package apiserver measures what a Kubernetes API server pays for the changes that the load tester makes: the peer of its
// figures.
package apiserver

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"

	"github.com/slicecast/slicecast/internal/testenv/controlplane"
	"github.com/slicecast/slicecast/loadtest/generate"
	"github.com/slicecast/slicecast/loadtest/usage"
)

const (
	namespace = "team-020"
	service   = "service-01000"
	// The Service's 5000 endpoints, in slices as the controller makes them.
	sliceCount, sliceSize = 50, 100
	// rate of changes, in a second.
	rate = 5
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// BenchmarkWatch has one endpoint of a slice of 100 flip five times a second, beside 0, 1000 and 3000 watchers, each with a TLS
// connection of its own. An operation is a flip. It tells the API server's CPU time for each event that a watcher gets
// (cpu-µs/event), or without watchers for the flip itself (cpu-µs/flip), bytes below TLS, and the time from when a flip was
// due, its way through etcd included, to when a watcher had the event.
func BenchmarkWatch(b *testing.B) {
	cp := controlplane.Start(b, controlplane.Options{})
	endpointSlices := makeSlices(b, cp.Client())
	w := &watchers{config: cp.ConfigFor("system:kube-proxy", "system:masters")}
	b.Cleanup(w.close)
	flipped := 0
	for _, count := range []int{0, 1000, 3000} {
		b.Run(fmt.Sprintf("watchers=%d", count), func(b *testing.B) {
			if more := count - len(w.all); more > 0 {
				list, err := cp.Client().DiscoveryV1().EndpointSlices("").List(b.Context(), metav1.ListOptions{})
				require.NoError(b, err)
				require.NoError(b, w.open(b.Context(), more, list.ResourceVersion))
			}
			start := time.Now().Add(time.Second / rate)
			due := make([]time.Time, b.N)
			for i := range due {
				due[i] = start.Add(time.Duration(i) * time.Second / rate)
			}
			round := w.begin(due)
			received := w.traffic.Received.Load()
			before, err := usage.CPUOf(cp.APIServer.PID())
			require.NoError(b, err)
			b.ResetTimer()
			for _, at := range due {
				<-time.After(time.Until(at))
				flip(b, cp.Client(), &endpointSlices[flipped%sliceCount], flipped/sliceCount%sliceSize)
				flipped++
			}
			select {
			case <-round.done:
			case <-time.After(time.Minute):
				b.Fatalf("%d events have not come", round.left.Load())
			}
			b.StopTimer()
			after, err := usage.CPUOf(cp.APIServer.PID())
			require.NoError(b, err)
			micros := float64(after.Sub(before).Total().Microseconds())
			if count == 0 {
				b.ReportMetric(micros/float64(b.N), "cpu-µs/flip")
				return
			}
			latencies := slices.Concat(round.latencies...)
			slices.Sort(latencies)
			quantile := func(q float64) float64 {
				return float64(latencies[int(q*float64(len(latencies)-1))].Microseconds()) / 1000
			}
			events := float64(len(latencies))
			b.ReportMetric(micros/events, "cpu-µs/event")
			b.ReportMetric(float64(w.traffic.Received.Load()-received)/events, "B/event")
			b.ReportMetric(quantile(0.5), "p50-ms")
			b.ReportMetric(quantile(0.99), "p99-ms")
		})
	}
}

// makeSlices makes a Service's slices, with all that the controller writes.
func makeSlices(b *testing.B, client kubernetes.Interface) []discoveryv1.EndpointSlice {
	b.Helper()
	_, err := client.CoreV1().Namespaces().Create(b.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}},
		metav1.CreateOptions{})
	require.NoError(b, err)
	owner, err := client.CoreV1().Services(namespace).Create(b.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: service},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
	}, metav1.CreateOptions{})
	require.NoError(b, err)
	random := rand.New(rand.NewPCG(1, 1))
	var out []discoveryv1.EndpointSlice
	for i := range sliceCount {
		s := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				GenerateName: service + "-", Name: fmt.Sprintf("%s-%05x", service, i),
				Labels: map[string]string{
					discoveryv1.LabelServiceName: service, discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io",
				},
				Annotations:     map[string]string{corev1.EndpointsLastChangeTriggerTime: time.Now().UTC().Format(time.RFC3339Nano)},
				OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(owner, corev1.SchemeGroupVersion.WithKind("Service"))},
			},
			AddressType: discoveryv1.AddressTypeIPv4,
			Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(8080)), Protocol: new(corev1.ProtocolTCP)}},
		}
		for range sliceSize {
			s.Endpoints = append(s.Endpoints, endpoint(random))
		}
		created, err := client.DiscoveryV1().EndpointSlices(namespace).Create(b.Context(), s, metav1.CreateOptions{})
		require.NoError(b, err)
		out = append(out, *created)
	}
	return out
}

func endpoint(random *rand.Rand) discoveryv1.Endpoint {
	node := random.IntN(3000)
	address := netip.AddrFrom4([4]byte{100, 64 + byte(random.IntN(64)), byte(random.IntN(256)), byte(random.IntN(256))})
	return discoveryv1.Endpoint{
		Addresses:  []string{address.String()},
		Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
		NodeName:   new(generate.NodeName(node)),
		Zone:       new([]string{"zone-a", "zone-b", "zone-c"}[node%3]),
		TargetRef: &corev1.ObjectReference{
			Kind: "Pod", Namespace: namespace, Name: fmt.Sprintf("%s-7d4b9c6f58-%05x", service, random.IntN(1<<20)), UID: uuid.NewUUID(),
		},
	}
}

// flip changes one endpoint's readiness, as the controller does.
func flip(b *testing.B, client kubernetes.Interface, s *discoveryv1.EndpointSlice, endpoint int) {
	b.Helper()
	conditions := &s.Endpoints[endpoint].Conditions
	ready := !*conditions.Ready
	conditions.Ready, conditions.Serving = &ready, &ready
	s.Annotations[corev1.EndpointsLastChangeTriggerTime] = time.Now().UTC().Format(time.RFC3339Nano)
	updated, err := client.DiscoveryV1().EndpointSlices(namespace).Update(b.Context(), s, metav1.UpdateOptions{})
	require.NoError(b, err)
	*s = *updated
}
