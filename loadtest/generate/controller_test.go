// This test proves that the generated writes to slices are those of the real EndpointSlice
// controller's reconciler, for random changes of pods.
package generate

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes/fake"
	corelisters "k8s.io/client-go/listers/core/v1"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/endpointslice"
	endpointsliceutil "k8s.io/endpointslice/util"
	"k8s.io/klog/v2"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
)

// Writes to a slice.
const (
	created = "created"
	updated = "updated"
	deleted = "deleted"
)

// TestSyncMatchesController compares sync with the reconciler of the real EndpointSlice controller.
// In each round, both start from the slices that the reconciler left behind, and process the same
// pods that go, change their conditions or come.
//
// The reconciler iterates over maps, so the following is random and not compared:
//
//   - which of the new pods are in which slice
//   - which of several equally full slices is filled
//   - which of several slices that lose all pods are deleted, if some of them stay
//
// The test compares, slice by slice, the old pods that remain. It also compares, as numbers, how
// many old pods each slice keeps, how many pods it has at the end, and whether it is created,
// updated or deleted.
func TestSyncMatchesController(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g, err := New(Config{Nodes: 3, Services: []Group{{1, 1, 1}}, Change: Scale})
		require.NoError(t, err)
		s := g.services[0]
		controller := newReconciler(s.object, g.nodes)
		number := func(what string, most int) int {
			return rapid.OneOf(
				rapid.Just(0), rapid.Just(most), rapid.IntRange(0, most), rapid.Map(rapid.IntRange(0, most/10), func(n int) int { return n * 10 }),
			).Draw(t, what)
		}
		for range rapid.IntRange(1, 8).Draw(t, "syncs") {
			s.slices = controller.slices()
			before := contents(s.slices)
			gone := make(map[netip.Addr]struct{})
			conditions := make(map[netip.Addr]model.Conditions)
			if rapid.Bool().Draw(t, "some go or change") {
				for _, slice := range s.slices {
					leave := number("gone", len(slice.endpoints))
					change := number("changed", len(slice.endpoints)-leave)
					to := rapid.SampledFrom([]model.Conditions{{Ready: true, Serving: true}, {}, {Serving: true, Terminating: true}}).Draw(t, "to")
					for i, e := range slice.endpoints[:leave+change] {
						if i < leave {
							gone[e.Address] = struct{}{}
						} else {
							conditions[e.Address] = to
						}
					}
				}
			}
			come := g.pods.some(number("come", rapid.SampledFrom([]int{30, 250}).Draw(t, "at most")))

			controller.sync(t, gone, conditions, come)
			changed, removed := s.sync(gone, conditions, come)
			wrote := make(map[string]string)
			for _, slice := range changed {
				wrote[slice.name] = created
				if before[slice.name] != nil {
					wrote[slice.name] = updated
				}
			}
			for _, slice := range removed {
				wrote[slice.name] = deleted
			}
			require.Len(t, wrote, len(changed)+len(removed), "a slice is written twice")

			have, want := contents(s.slices), contents(controller.slices())
			require.Equal(t, merged(want), merged(have))
			require.Len(t, s.addresses(), len(merged(have)), "a pod is in two slices")
			require.Equal(t, staying(before, want), staying(before, have))
			require.Equal(t, numbers(before, want, controller.wrote), numbers(before, have, wrote))
			for name, was := range before {
				if is, there := have[name]; there && wrote[name] == "" {
					require.Equal(t, was, is, "slice %s differs, but is not among the changed ones", name)
				}
			}
		}
	})
}

// content is the endpoints of slices by the name of the slice and the address of the endpoint.
type content map[string]map[netip.Addr]model.Endpoint

func contents(of []*slice) content {
	out := make(content)
	for _, slice := range of {
		out[slice.name] = make(map[netip.Addr]model.Endpoint)
		for _, e := range slice.endpoints {
			out[slice.name][e.Address] = e
		}
	}
	return out
}

// merged returns the endpoints of all slices.
func merged(c content) map[netip.Addr]model.Endpoint {
	out := make(map[netip.Addr]model.Endpoint)
	for _, endpoints := range c {
		maps.Copy(out, endpoints)
	}
	return out
}

// staying returns the endpoints after a sync that some slice had before it.
func staying(before, after content) content {
	old := merged(before)
	out := make(content)
	for name, endpoints := range after {
		stay := maps.Clone(endpoints)
		maps.DeleteFunc(stay, func(a netip.Addr, _ model.Endpoint) bool { _, ok := old[a]; return !ok })
		if len(stay) > 0 {
			out[name] = stay
		}
	}
	return out
}

// numbers counts slices with the same numbers of pods and the same write, including deleted ones.
func numbers(before, after content, wrote map[string]string) map[string]int {
	out := make(map[string]int)
	stay := staying(before, after)
	for name, endpoints := range after {
		out[fmt.Sprintf("%d stay, then %d: %s", len(stay[name]), len(endpoints), wrote[name])]++
	}
	for name, did := range wrote {
		if _, there := after[name]; !there {
			out[did]++
		}
	}
	return out
}

// reconciler is the reconciler of the EndpointSlice controller, with a Service, its pods and its
// slices.
type reconciler struct {
	*endpointslice.Reconciler
	service *corev1.Service
	pods    map[netip.Addr]*corev1.Pod
	held    map[string]*discoveryv1.EndpointSlice
	// wrote holds the writes of the last sync, by the name of the slice.
	wrote map[string]string
	made  int
}

func newReconciler(of *model.Service, nodes []*model.Node) *reconciler {
	r := &reconciler{
		service: &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: of.Namespace, Name: of.Name, UID: "service"},
			Spec: corev1.ServiceSpec{
				ClusterIP: of.ClusterIPs[0].String(), IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
				Ports: []corev1.ServicePort{{Name: portName, Protocol: corev1.ProtocolTCP, Port: 80, TargetPort: intstr.FromInt32(8080)}},
			},
		},
		pods: make(map[netip.Addr]*corev1.Pod),
		held: make(map[string]*discoveryv1.EndpointSlice),
	}
	known := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})
	for _, n := range nodes {
		_ = known.Add(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name, Labels: n.Labels}})
	}
	client := &fake.Clientset{}
	client.AddReactor("*", "endpointslices", r.write)
	r.Reconciler = endpointslice.NewReconciler(client, corelisters.NewNodeLister(known), sliceSize,
		endpointsliceutil.NewEndpointSliceTracker(), nil, nil, "endpointslice-controller.k8s.io")
	return r
}

// write stands in for the API server: it stores the reconciler's writes.
func (r *reconciler) write(action clienttesting.Action) (bool, runtime.Object, error) {
	var name, did string
	var object runtime.Object
	switch a := action.(type) {
	case clienttesting.DeleteAction:
		name, did = a.GetName(), deleted
		delete(r.held, name)
	case clienttesting.CreateAction: // UpdateAction has the same methods, so updates match, too
		slice := a.GetObject().(*discoveryv1.EndpointSlice)
		did = updated
		if action.GetVerb() == "create" {
			did = created
			slice.Name = fmt.Sprintf("%scontroller-%05x", slice.GenerateName, r.made)
			r.made++
		}
		name, object, r.held[slice.Name] = slice.Name, slice, slice
	}
	if r.wrote[name] != "" {
		return true, nil, fmt.Errorf("slice %s is %s and %s in one sync", name, r.wrote[name], did)
	}
	r.wrote[name] = did
	return true, object, nil
}

func (r *reconciler) sync(t require.TestingT, gone map[netip.Addr]struct{}, conditions map[netip.Addr]model.Conditions, come []model.Endpoint) {
	maps.DeleteFunc(r.pods, func(a netip.Addr, _ *corev1.Pod) bool { _, ok := gone[a]; return ok })
	set := func(pod *corev1.Pod, to model.Conditions) {
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionFalse}}
		if to.Serving {
			pod.Status.Conditions[0].Status = corev1.ConditionTrue
		}
		if pod.DeletionTimestamp = nil; to.Terminating {
			pod.DeletionTimestamp = new(metav1.Now())
		}
	}
	for a, to := range conditions {
		set(r.pods[a], to)
	}
	for _, e := range come {
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: r.service.Namespace, Name: e.Address.String(), UID: types.UID(e.Address.String())},
			Spec:       corev1.PodSpec{NodeName: e.NodeName},
			Status:     corev1.PodStatus{PodIP: e.Address.String(), PodIPs: []corev1.PodIP{{IP: e.Address.String()}}},
		}
		set(pod, e.Conditions)
		r.pods[e.Address] = pod
	}
	r.wrote = make(map[string]string)
	err := r.Reconcile(klog.Background(), r.service, slices.Collect(maps.Values(r.pods)), slices.Collect(maps.Values(r.held)), time.Now())
	require.NoError(t, err)
}

// slices returns the reconciler's slices as slices of this package.
func (r *reconciler) slices() (out []*slice) {
	for _, name := range slices.Sorted(maps.Keys(r.held)) {
		s, _ := source.NewConverter("").FromEndpointSlice(r.held[name])
		out = append(out, &slice{name: s.Name, endpoints: s.Endpoints})
	}
	return out
}
