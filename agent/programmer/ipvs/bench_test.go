// BenchmarkProgrammer measures what programming a real kernel takes, from nothing, at a restart and
// from the frame of a change on, beside the part that no program can avoid.
package ipvs

import (
	"context"
	"flag"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/wire"
)

var large = flag.Bool("large", false, "run benchmarks of large clusters, too")

// sliceSize is the highest number of endpoints that Kubernetes puts into a slice.
const sliceSize = 100

// benchCluster is a number of Services with a cluster IP each, in the form in which an agent has
// them.
type benchCluster struct {
	view     *view.View
	services map[model.ServiceKey]*model.Service
	slices   map[model.ServiceKey][]*model.Slice
}

func newBenchCluster() *benchCluster {
	c := &benchCluster{
		view:     view.New(view.Options{NodeName: "a", ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.180.0.0/16")}}),
		services: map[model.ServiceKey]*model.Service{}, slices: map[model.ServiceKey][]*model.Slice{},
	}
	c.view.SetNode(&model.Node{Name: "a", Addresses: []netip.Addr{netip.MustParseAddr("192.168.0.2")}})
	return c
}

func benchKey(number int) model.ServiceKey {
	return model.ServiceKey{Namespace: "bench", Name: fmt.Sprint("service-", number)}
}

// add adds a Service with this number of endpoints on other nodes.
func (c *benchCluster) add(number, endpoints int) {
	key := benchKey(number)
	c.services[key] = model.NewService(model.Service{
		Namespace: key.Namespace, Name: key.Name, Type: model.ClusterIP,
		ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96 + byte(number>>16), byte(number >> 8), byte(number)})},
		Ports:      []model.ServicePort{{Name: "http", Protocol: model.TCP, Port: 80}},
	})
	for first := 0; first < endpoints; first += sliceSize {
		s := model.Slice{
			Namespace: key.Namespace, Name: fmt.Sprint(key.Name, "-", first), Service: key.Name, Family: model.IPv4,
			Ports: []model.SlicePort{{Name: "http", Protocol: model.TCP, Port: 8080}},
		}
		for e := first; e < min(first+sliceSize, endpoints); e++ {
			s.Endpoints = append(s.Endpoints, model.Endpoint{
				Address:    netip.AddrFrom4([4]byte{11 + byte(number>>12), byte(number >> 4), byte(number<<4) | byte(e>>8), byte(e)}),
				Conditions: model.Conditions{Ready: true, Serving: true}, NodeName: fmt.Sprint("node-", e%1000),
			})
		}
		c.slices[key] = append(c.slices[key], model.NewSlice(s))
	}
	c.view.Set(key, c.services[key], c.slices[key])
}

// frame returns the frame that announces the change of a slice.
func frame(t testing.TB, before, after *model.Slice) wire.Frame {
	t.Helper()
	f, err := wire.EncodeUpdate(&model.Update{Deltas: []*model.SliceDelta{model.Diff(before, after)}})
	require.NoError(t, err)
	return f
}

// follow programs the change of a Service's slice that a frame announces.
func (c *benchCluster) follow(t testing.TB, p *inHost, key model.ServiceKey, slice int, f wire.Frame) {
	t.Helper()
	received, err := wire.Decode(f)
	require.NoError(t, err)
	held := slices.Clone(c.slices[key])
	held[slice], err = received.Update.Deltas[0].Apply(held[slice])
	require.NoError(t, err)
	c.slices[key] = held
	c.view.Set(key, c.services[key], held)
	changes, _ := c.view.Update()
	require.NoError(t, p.Apply(t.Context(), changes))
}

// report reports the median and the 99th percentile of times.
func report(b *testing.B, times []time.Duration) {
	b.Helper()
	slices.Sort(times)
	for _, percent := range []int{50, 99} {
		b.ReportMetric(float64(times[len(times)*percent/100].Nanoseconds())/1000, fmt.Sprintf("p%d-µs", percent))
	}
}

// BenchmarkProgrammer measures these operations:
//
//   - Load is a first Replace.
//   - Restart is a Replace by a new process that finds everything in place.
//   - Flip removes or adds an endpoint. It takes from the frame that announces the endpoint until
//     the kernel has it, with decoding, the view and the programmer.
//   - FlipBig is the same for a Service with 5000 endpoints, which IPVS keeps in a list. Rollover
//     replaces all of them.
//   - FlipBare, FlipBigBare and RestartBare are the part that no program can avoid: a message to
//     IPVS and its answer, and the time in which IPVS lists all backends, unread.
//
// In the virtual machine, a program takes many times as long as elsewhere.
func BenchmarkProgrammer(b *testing.B) {
	sizes := []struct{ services, endpoints, big int }{{1000, 5, 0}}
	if *large {
		sizes = []struct{ services, endpoints, big int }{{1000, 50, 5000}, {10000, 50, 0}}
	}
	for _, size := range sizes {
		b.Run(fmt.Sprintf("services=%d/endpoints=%d/big=%d", size.services, size.endpoints, size.big), func(b *testing.B) {
			c := newBenchCluster()
			for i := range size.services {
				c.add(i, size.endpoints)
			}
			if size.big > 0 {
				c.add(size.services, size.big)
			}
			c.view.Update()
			state := c.view.State()
			network := testenv.NewNetwork(b)
			host := network.AddNode("a")
			// As long as anybody listens to nf_tables, in whatever namespace, the kernel makes notifications
			// for all changes. While the agent of a real node loads, nobody need listen.
			load := func(b *testing.B, host *testenv.Host) {
				first := newInHost(b, host, Options{})
				b.StartTimer()
				require.NoError(b, first.Replace(b.Context(), state))
				b.StopTimer()
				first.nft.Watcher.Close()
			}
			load(b, host.Host) // makes the kernel load what it needs
			b.Run("Load", func(b *testing.B) {
				// Each run has a node of its own. For two minutes, IPVS searches the backends that were removed
				// for each one that is added.
				for b.Loop() {
					b.StopTimer()
					fresh := network.AddNode("fresh")
					load(b, fresh.Host)
					fresh.Delete()
					b.StartTimer()
				}
			})
			h := newInHost(b, host.Host, Options{})
			require.NoError(b, h.Replace(b.Context(), state))
			b.Run("Restart", func(b *testing.B) {
				for b.Loop() {
					b.StopTimer()
					again := newInHost(b, host.Host, Options{})
					runtime.GC() // a new process has no garbage of other benchmarks
					b.StartTimer()
					require.NoError(b, again.Replace(b.Context(), state))
				}
			})
			b.Run("RestartBare", func(b *testing.B) {
				for b.Loop() {
					for id := range state.Ports {
						for _, v := range h.virtuals(id) {
							require.NoError(b, h.ipvs.entries.read(v.serviceKey, func(heldBackend) {}))
						}
					}
				}
			})
			flip := func(name string, number int) {
				b.Run(name, func(b *testing.B) {
					key := benchKey(number)
					whole := c.slices[key][0]
					changed := *whole
					changed.Endpoints = slices.Clone(whole.Endpoints)
					changed.Endpoints[len(changed.Endpoints)/2].Conditions = model.Conditions{}
					less := model.NewSlice(changed)
					frames := []wire.Frame{frame(b, whole, less), frame(b, less, whole)}
					var times []time.Duration
					for i := 0; b.Loop() || i%2 == 1; i++ {
						start := time.Now()
						c.follow(b, h, key, 0, frames[i%2])
						times = append(times, time.Since(start))
					}
					report(b, times)
				})
			}
			flip("Flip", 7)
			if size.big > 0 {
				flip("FlipBig", size.services)
			}
			bare := func(name string, number int) {
				b.Run(name, func(b *testing.B) {
					v := h.virtuals(view.ServicePortID{Service: benchKey(number), Port: "http", Protocol: model.TCP, Family: model.IPv4})[0]
					// The address that a flip uses.
					backend := v.backends.List()[min(v.backends.Len(), sliceSize)/2].Address
					var times []time.Duration
					for b.Loop() {
						start := time.Now()
						if err := h.family(model.IPv4).run(newChange(), []command{{kind: commandSetBackend, service: v.serviceKey, backend: backend, weight: 1}}); err != nil {
							b.Fatal(err)
						}
						times = append(times, time.Since(start))
					}
					report(b, times)
				})
			}
			bare("FlipBare", 7)
			if size.big > 0 {
				bare("FlipBigBare", size.services)
				b.Run("Rollover", func(b *testing.B) {
					for b.Loop() {
						c.rollover(b, h, benchKey(size.services))
					}
				})
			}
		})
	}
}

// rolloverRate is the number of endpoints that are replaced by others per second.
const rolloverRate = 100

// rollover replaces all endpoints of a Service, one after the other. Each is removed before another
// one is added. It reports how long a change takes from the time at which it is due until the
// kernel has it, including everything else that the programmer does meanwhile. It also reports the
// CPU time in percent of one CPU.
func (c *benchCluster) rollover(b *testing.B, p *inHost, key model.ServiceKey) {
	b.Helper()
	type change struct {
		slice int
		frame wire.Frame
	}
	var changes []change
	for i, held := range c.slices[key] {
		for _, old := range held.Endpoints {
			less := *held
			less.Endpoints = slices.DeleteFunc(slices.Clone(held.Endpoints), func(e model.Endpoint) bool { return e.Address == old.Address })
			more := less
			address := old.Address.As4()
			address[2] ^= 1 << 5 // an address that add does not use
			old.Address = netip.AddrFrom4(address)
			more.Endpoints = append(slices.Clone(less.Endpoints), old)
			gone, come := model.NewSlice(less), model.NewSlice(more)
			changes = append(changes, change{i, frame(b, held, gone)}, change{i, frame(b, gone, come)})
			held = come
		}
	}
	ctx, cancel := context.WithCancel(b.Context())
	var watching sync.WaitGroup
	watching.Go(func() { p.watchInHost(ctx, func(reason string) { b.Error(reason) }) })
	defer watching.Wait()
	defer cancel()
	var before, after unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &before))
	var times []time.Duration
	start := time.Now()
	for i, change := range changes {
		due := start.Add(time.Duration(i) * time.Second / (2 * rolloverRate))
		<-time.After(time.Until(due))
		c.follow(b, p, key, change.slice, change.frame)
		times = append(times, time.Since(due))
	}
	took := time.Since(start)
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &after))
	report(b, times)
	spent := after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano()
	b.ReportMetric(100*float64(spent)/float64(took), "cpu-%")
}
