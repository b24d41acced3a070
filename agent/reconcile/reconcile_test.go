// These tests prove that the kernel gets all Services first and then only changes, that what fails
// is nacked and tried again with back-off, and that an ack means the kernel has the state. The
// client's cache and the store are real; the kernel is a fake that fails on request.
package reconcile

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// kernel is a programmer that keeps its Service ports in memory. It changes them in one step or not
// at all, and asserts that its caller keeps the contract of programmer.Programmer.
type kernel struct {
	t        *testing.T
	mu       sync.Mutex // guards all other fields
	ports    map[view.ServicePortID]*view.ServicePort
	unknown  bool // an Apply has failed, and no Replace has succeeded since
	replaces int
	applies  int
	// failures is how many of the next operations fail as a whole.
	failures int
	// out contains the families of which nothing can be programmed.
	out map[model.Family]error
	// families are the families that the machine has; nil means both.
	families []model.Family
	// leftOut contains the families that the last Replace left out.
	leftOut map[model.Family]error
	// broken contains the names of Services that cannot be programmed.
	broken map[string]bool
	// lasting means that it would be in vain to try them again.
	lasting bool
	// served has an element for each error of one of them: whether they are led where they should
	// nevertheless. nil means one error of Services that are not.
	served []bool
	// busy, if not nil, blocks each operation until it is closed.
	busy chan struct{}
	// lost is the function that Watch was called with.
	lost func(string)
	// node is the Node of the last Replace.
	node view.Node
}

var (
	errKernel = errors.New("no more memory")
	errPort   = errors.New("no such port")
)

func (k *kernel) fail() bool {
	if k.busy != nil {
		<-k.busy
	}
	if k.failures == 0 {
		return false
	}
	k.failures--
	k.unknown = true
	return true
}

func (k *kernel) refusals(id view.ServicePortID) (errs []error) {
	of := k.served
	if of == nil {
		of = []bool{false}
	}
	for _, served := range of {
		errs = append(errs, &programmer.PortError{ID: id, Err: errPort, Lasting: k.lasting, Served: served})
	}
	return errs
}

func (k *kernel) Families() []model.Family {
	if k.families != nil {
		return k.families
	}
	return []model.Family{model.IPv4, model.IPv6}
}

func (k *kernel) Replace(_ context.Context, state view.State) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.replaces++
	if k.fail() {
		return errKernel
	}
	k.unknown = false
	var errs []error
	ports := map[view.ServicePortID]*view.ServicePort{}
	for family, err := range k.out {
		errs = append(errs, &programmer.FamilyError{Family: family, Err: err})
		for id, p := range k.ports {
			if id.Family == family {
				ports[id] = p
			}
		}
	}
	k.leftOut = maps.Clone(k.out)
	if family := programmer.CheckPrimary(state.Node, k.Families()); family != nil {
		errs = append(errs, family)
		k.leftOut = map[model.Family]error{state.Node.Primary: family}
	}
	for id, p := range state.Ports {
		if k.out[id.Family] != nil {
			continue
		}
		if k.broken[id.Service.Name] {
			errs = append(errs, k.refusals(id)...)
			if old := k.ports[id]; old != nil {
				ports[id] = old
			}
			continue
		}
		ports[id] = p
	}
	k.ports, k.node = ports, state.Node
	return errors.Join(errs...)
}

func (k *kernel) Apply(_ context.Context, changes []view.Change) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	require.False(k.t, k.unknown, "an Apply on an unknown state")
	require.NotEmpty(k.t, changes)
	k.applies++
	if k.fail() {
		return errKernel
	}
	var errs []error
	for _, c := range changes {
		id := c.ID()
		require.NotContains(k.t, k.leftOut, id.Family, "an Apply of a family that was left out")
		switch {
		case k.out[id.Family] != nil:
			errs = append(errs, &programmer.FamilyError{Family: id.Family, Err: k.out[id.Family]})
			k.unknown = true
		case k.broken[id.Service.Name]:
			errs = append(errs, k.refusals(id)...)
		case c.After == nil:
			delete(k.ports, id)
		default:
			k.ports[id] = c.After
		}
	}
	return errors.Join(errs...)
}

func (k *kernel) Cleanup(context.Context) error { return nil }

// Watch keeps lost, so that tests can report a loss.
func (k *kernel) Watch(ctx context.Context, lost func(string)) {
	k.mu.Lock()
	k.lost = lost
	k.mu.Unlock()
	<-ctx.Done()
}

// names returns the Services that the kernel holds with their numbers of backends, as "name=n",
// sorted.
func (k *kernel) names() []string {
	var out []string
	for id, p := range k.ports {
		out = append(out, fmt.Sprintf("%s=%d", id.Service.Name, p.Cluster.Len()))
	}
	slices.Sort(out)
	return out
}

// reports implements Reporter and records its calls.
type reports struct {
	mu    sync.Mutex
	acked map[uint32]uint64
	epoch uint64
	acks  int
	nacks []string
}

func (r *reports) Ack(epoch uint64, positions map[uint32]uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.epoch = epoch
	if len(positions) > 0 {
		r.acks++
	}
	maps.Copy(r.acked, positions)
}

func (r *reports) Nack(service model.ServiceKey, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.nacks = append(r.nacks, service.Name+": "+reason)
}

func (r *reports) NackNode(reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.nacks = append(r.nacks, "the node: "+reason)
}

func (r *reports) ResolveNode() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.nacks = append(r.nacks, "the node: resolved")
}

func (r *reports) Resolve(service model.ServiceKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.nacks = append(r.nacks, service.Name+": resolved")
}

// node is a Reconciler that follows a store.
type node struct {
	*Reconciler
	t       *testing.T
	kernel  *kernel
	reports *reports
	store   *store.Store
}

type idle struct{}

func (idle) Run(ctx context.Context, _ source.Sink) error {
	<-ctx.Done()
	return nil
}

// run runs a test in a synctest bubble, with a node whose store has one shard and has not synced.
func run(t *testing.T, test func(t *testing.T, n *node), edit ...func(*Options)) {
	runSharded(t, 1, test, edit...)
}

// runSharded is like run, but the store has this many shards.
func runSharded(t *testing.T, shards uint32, test func(t *testing.T, n *node), edit ...func(*Options)) {
	synctest.Test(t, func(t *testing.T) {
		s, err := store.New(store.Options{Shards: shards})
		require.NoError(t, err)
		cache := client.NewCache()
		local := &client.Local{Source: idle{}, Store: s, Cache: cache, NodeName: "node-1"}
		n := &node{
			t: t, store: s, reports: &reports{acked: map[uint32]uint64{}},
			kernel: &kernel{t: t, ports: map[view.ServicePortID]*view.ServicePort{}, broken: map[string]bool{}},
		}
		o := Options{
			Cache: cache, View: view.New(view.Options{NodeName: "node-1"}), Programmer: n.kernel, Reporter: n.reports,
			Logger: slog.New(slog.DiscardHandler),
		}
		for _, f := range edit {
			f(&o)
		}
		n.Reconciler = New(o)
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() {
			if err := local.Run(ctx); err != nil {
				panic(err)
			}
		})
		running.Go(func() { n.Run(ctx) })
		test(t, n)
		cancel()
		running.Wait()
	})
}

// clusterIP returns the cluster IP of a Service, which depends on the first letter of its name.
func clusterIP(name string) netip.Addr { return netip.AddrFrom4([4]byte{10, 96, 0, name[0]}) }

// write writes Services with these numbers of backends in the order of their names, and waits until
// nothing moves. -1 removes the Service.
func (n *node) write(backends map[string]int) {
	n.t.Helper()
	for _, name := range slices.Sorted(maps.Keys(backends)) { // a step may begin between two of them
		count := backends[name]
		service := model.NewService(model.Service{
			Namespace: "default", Name: name, Type: model.ClusterIP, ClusterIPs: []netip.Addr{clusterIP(name)},
			Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80}},
		})
		slice := model.Slice{
			Namespace: "default", Name: name, Service: name, Family: model.IPv4, Ports: []model.SlicePort{{Protocol: model.TCP, Port: 80}},
		}
		for i := range count {
			slice.Endpoints = append(slice.Endpoints, model.Endpoint{
				Address: netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), Conditions: model.Conditions{Ready: true},
			})
		}
		if count < 0 {
			n.store.Remove(service.Key(), 0)
			n.store.Remove(slice.Key(), 0)
		} else {
			n.store.Upsert(service, 0)
			n.store.Upsert(model.NewSlice(slice), 0)
		}
	}
	synctest.Wait()
}

// pass lets time pass, and waits until nothing moves.
func (n *node) pass(d time.Duration) {
	n.kernel.mu.Lock()
	n.kernel.mu.Unlock() //nolint:staticcheck // for the order only
	time.Sleep(d)        //nolint:forbidigo // the bubble's time
	synctest.Wait()
}

// sync marks the source of the store as synced, so that the store serves.
func (n *node) sync() {
	n.store.Synced()
	synctest.Wait()
}

func (n *node) isProgrammed() bool {
	select {
	case <-n.Programmed():
		return true
	default:
		return false
	}
}

// requireAcked asserts that everything that the store has published was programmed and
// acknowledged.
func (n *node) requireAcked() {
	n.t.Helper()
	require.Equal(n.t, map[uint32]uint64{0: n.store.Snapshot(0).Sequence()}, n.reports.acked)
	require.Equal(n.t, n.store.Epoch(), n.reports.epoch)
}

func TestNothingIsProgrammedBeforeSync(t *testing.T) {
	run(t, func(t *testing.T, n *node) {
		n.write(map[string]int{"a": 1})
		n.pass(time.Hour)
		require.Zero(t, n.kernel.replaces)
		require.False(t, n.isProgrammed())
		_, pending := n.Pending(model.IPv4)
		require.False(t, pending)
		n.sync()
		require.Equal(t, []string{"a=1"}, n.kernel.names())
		require.True(t, n.isProgrammed())
		n.requireAcked()
	})
}

func TestReplaceThenApply(t *testing.T) {
	run(t, func(t *testing.T, n *node) {
		n.write(map[string]int{"a": 1, "b": 2})
		n.sync()
		require.Equal(t, 1, n.kernel.replaces)
		n.write(map[string]int{"b": 3, "c": 0})
		n.requireAcked()
		n.write(map[string]int{"a": -1})
		require.Equal(t, []string{"b=3", "c=0"}, n.kernel.names())
		require.Equal(t, 1, n.kernel.replaces)
		require.EqualValues(t, 2, testutil.ToFloat64(n.metrics.ports))
		n.requireAcked()

		acks, applies := n.reports.acks, n.kernel.applies
		n.store.Upsert(model.NewService(model.Service{Namespace: "default", Name: "headless", Type: model.ClusterIP}), 0)
		synctest.Wait()
		require.Equal(t, acks+1, n.reports.acks, "what changes nothing here is programmed already")
		require.Equal(t, applies, n.kernel.applies)
		n.requireAcked()
	})
}

func TestEmptyStateIsProgrammed(t *testing.T) {
	run(t, func(t *testing.T, n *node) {
		n.sync()
		require.Equal(t, 1, n.kernel.replaces, "there may be rules of an earlier agent")
		require.True(t, n.isProgrammed())
	})
}

func TestChangesAreCombinedWhileTheKernelIsBusy(t *testing.T) {
	run(t, func(t *testing.T, n *node) {
		n.sync()
		n.kernel.busy = make(chan struct{})
		acks := n.reports.acks
		n.write(map[string]int{"a": 1})
		for i := range 10 {
			n.write(map[string]int{"a": i, "b": i})
		}
		require.Equal(t, acks, n.reports.acks, "nothing is acked before it is programmed")
		close(n.kernel.busy)
		synctest.Wait()
		require.Equal(t, 2, n.kernel.applies)
		require.Equal(t, []string{"a=9", "b=9"}, n.kernel.names())
		n.requireAcked()
	})
}

func TestFailedApplyLeadsToReplace(t *testing.T) {
	run(t, func(t *testing.T, n *node) {
		n.sync()
		n.kernel.failures = 1
		n.write(map[string]int{"a": 1})
		require.Equal(t, 2, n.kernel.replaces, "at once")
		require.Equal(t, []string{"a=1"}, n.kernel.names())
		n.requireAcked()
		n.write(map[string]int{"a": 2})
		require.Equal(t, 2, n.kernel.replaces)
		require.EqualValues(t, 1, testutil.ToFloat64(n.metrics.errors.WithLabelValues("apply")))
	})
}

func TestFailedReplaceIsRetriedWithBackoff(t *testing.T) {
	run(t, func(t *testing.T, n *node) {
		n.write(map[string]int{"a": 1})
		n.kernel.failures = 4
		n.sync()
		begin := time.Now()
		for i, pause := range []time.Duration{minRetry, 2 * minRetry, 4 * minRetry} {
			require.Equal(t, i+1, n.kernel.replaces)
			require.Empty(t, n.reports.acked)
			require.False(t, n.isProgrammed())
			since, pending := n.Pending(model.IPv4)
			require.True(t, pending)
			require.Equal(t, begin, since, "the first try")
			n.write(map[string]int{"a": 2 + i}) // changes do not bring the retry forward
			n.pass(pause - 1)
			require.Equal(t, i+1, n.kernel.replaces)
			n.pass(1)
		}
		n.pass(8 * minRetry)
		require.Equal(t, 5, n.kernel.replaces)
		require.Equal(t, []string{"a=4"}, n.kernel.names())
		require.True(t, n.isProgrammed())
		n.requireAcked()
		require.Equal(t, []string{"the node: nothing of IPv4 and IPv6 is programmed: no more memory", "the node: resolved"}, n.reports.nacks)

		// The back-off is bounded, and starts anew after a success.
		n.kernel.failures = 3
		n.write(map[string]int{"a": 9}) // an Apply, and the Replace that follows
		require.Equal(t, 6, n.kernel.replaces)
		n.pass(minRetry)
		require.Equal(t, 7, n.kernel.replaces)
		n.pass(2 * minRetry)
		n.requireAcked()
		n.kernel.failures = 100
		n.write(map[string]int{"a": 1})
		before := n.kernel.replaces
		n.pass(10 * maxRetry)
		require.GreaterOrEqual(t, n.kernel.replaces-before, 10)
		require.LessOrEqual(t, n.kernel.replaces-before, 16)
	})
}

// TestFailedPort covers a Service port that the kernel refuses. The port is nacked and tried
// again, while everything else is programmed and acked.
func TestFailedPort(t *testing.T) {
	run(t, func(t *testing.T, n *node) {
		n.kernel.broken["bad"] = true
		n.write(map[string]int{"good": 1, "bad": 1})
		n.sync()
		require.Equal(t, []string{"good=1"}, n.kernel.names())
		require.Equal(t, []string{"bad: default/bad:/TCP/IPv4: no such port"}, n.reports.nacks)
		n.requireAcked()

		// Meanwhile, changes of other Services are programmed by Apply, and the failed port is not
		// forgotten.
		n.pass(minRetry / 2)
		n.write(map[string]int{"good": 2})
		require.Equal(t, 1, n.kernel.replaces)
		require.Equal(t, 1, n.kernel.applies)
		n.requireAcked()
		n.pass(minRetry / 2)
		require.Equal(t, 2, n.kernel.replaces)
		require.Len(t, n.reports.nacks, 1, "the same reason is no news")

		delete(n.kernel.broken, "bad")
		n.pass(2 * minRetry)
		require.Equal(t, []string{"bad=1", "good=2"}, n.kernel.names())
		require.Equal(t, []string{"bad: resolved"}, n.reports.nacks[1:])

		// If an Apply fails for the port, the kernel keeps what it had.
		n.kernel.broken["bad"] = true
		n.write(map[string]int{"good": 3, "bad": 3})
		require.Equal(t, []string{"bad=1", "good=3"}, n.kernel.names())
		require.Len(t, n.reports.nacks, 3)
		n.requireAcked()
		replaces := n.kernel.replaces
		delete(n.kernel.broken, "bad")
		n.pass(minRetry)
		require.Equal(t, replaces+1, n.kernel.replaces)
		require.Equal(t, []string{"bad=3", "good=3"}, n.kernel.names())
		n.pass(time.Hour)
		require.Equal(t, replaces+1, n.kernel.replaces, "nothing is left to try")
	})
}

// TestPortThatKeepsFailing covers a Service port that it would be in vain to try again. It is
// nacked, and tried again only when it changes or when something else causes a Replace.
func TestPortThatKeepsFailing(t *testing.T) {
	run(t, func(t *testing.T, n *node) {
		n.kernel.broken["bad"], n.kernel.lasting = true, true
		n.write(map[string]int{"good": 1, "bad": 1})
		n.sync()
		require.Equal(t, []string{"bad: default/bad:/TCP/IPv4: no such port"}, n.reports.nacks)
		n.pass(10 * maxRetry)
		require.Equal(t, 1, n.kernel.replaces)
		n.kernel.lasting = false
		n.write(map[string]int{"bad": 2}) // broken in another way
		n.pass(minRetry)
		require.Equal(t, 2, n.kernel.replaces)
		n.kernel.lasting = true
		n.kernel.lost("it is there now")
		delete(n.kernel.broken, "bad")
		n.pass(minRetry)
		require.Equal(t, []string{"bad=2", "good=1"}, n.kernel.names())
		require.Equal(t, []string{"bad: resolved"}, n.reports.nacks[1:])
	})
}

// TestServiceWithSeveralFailedPorts asserts that a Service with several failed ports is nacked as
// one, nacked again when the reasons change, and resolved when it is removed.
func TestServiceWithSeveralFailedPorts(t *testing.T) {
	run(t, func(t *testing.T, n *node) {
		n.sync()
		service := func(ports ...model.ServicePort) *model.Service {
			return model.NewService(model.Service{Namespace: "default", Name: "bad", Type: model.ClusterIP,
				ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")}, Ports: ports})
		}
		a, b := model.ServicePort{Name: "a", Protocol: model.TCP, Port: 80}, model.ServicePort{Name: "b", Protocol: model.TCP, Port: 81}
		n.kernel.broken["bad"] = true
		n.store.Upsert(service(a, b), 0)
		synctest.Wait()
		n.pass(10 * maxRetry)
		require.Equal(t, []string{"bad: default/bad:a/TCP/IPv4: no such port; default/bad:b/TCP/IPv4: no such port"}, n.reports.nacks)
		n.kernel.broken["bad"] = false
		n.store.Upsert(service(b), 0) // by an Apply, which does not mention port b
		synctest.Wait()
		require.Equal(t, []string{"bad: default/bad:b/TCP/IPv4: no such port"}, n.reports.nacks[1:])
		n.write(map[string]int{"bad": -1})
		require.Equal(t, []string{"bad: resolved"}, n.reports.nacks[2:])
		n.pass(10 * maxRetry)
		require.Len(t, n.reports.nacks, 3)
	})
}
