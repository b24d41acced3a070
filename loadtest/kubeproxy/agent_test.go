// BenchmarkAgent measures an agent's parts from the stream to a real kernel's nftables, in clusters
// for which kube-proxy would take too long.
package kubeproxy

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	gnft "github.com/google/nftables"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/slicecast/slicecast/agent/app"
	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer/nftables"
	"github.com/slicecast/slicecast/agent/reconcile"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/ca"
	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/wire"
	"github.com/slicecast/slicecast/loadtest/child"
	"github.com/slicecast/slicecast/loadtest/generate"
	"github.com/slicecast/slicecast/loadtest/target"
)

const (
	// flips is the number of flips, made one after the other at flipRate per second.
	flips    = 1000
	flipRate = 50
	// rolloverRate is the number of endpoints per second that go or come while a large Service is
	// rolled over. Half of them go.
	rolloverRate = 200
	// largeEnough is the number of endpoints from which on a large Service is rolled over.
	largeEnough = 1000
	// repeats is the number of times that everything is programmed, from scratch and again.
	repeats = 5
)

// BenchmarkAgent runs the parts of an agent from the stream to nftables in this process, which runs
// like an agent and does nothing else. The server, with a generated cluster, is another process.
// The benchmark reports:
//
//   - sync-s: the time from the start until the kernel is fully programmed
//   - flip-p50-µs, flip-p99-µs: the time from receiving an endpoint's flip until it is in the
//     kernel
//   - flip-cpu-µs, flip-cpu-%: the CPU time of this process for each flip, all its work included,
//     and its share of one CPU
//   - flip-apply-p50-µs, flip-apply-p99-µs: the part of the programmer in the time of a flip
//   - rollover-…: the same figures while all endpoints of a large Service are replaced
//   - floor-p50-µs, floor-p99-µs: the time of two system calls that add or remove one element of a
//     set with no other use, at the rate of the flips. It is a lower bound for any programmer on a
//     machine with equally cold caches
//   - floor-loop-…: the same without pauses
//   - repair-s: the time from a foreign "nft flush ruleset" until the kernel is fully programmed
//     again
//   - program-s: the time of a programmer that finds nothing to program everything (median)
//   - restart-s: the time of a programmer that finds everything in place (median)
//   - heap-MiB: the heap of this process after garbage collection
func BenchmarkAgent(b *testing.B) {
	for text := range strings.SplitSeq(*sizesFlag, ",") {
		size, err := parseSize(text)
		require.NoError(b, err)
		b.Run(text, func(b *testing.B) {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
			app.UseOneCPU()
			newAgent(b, size).measure(b)
		})
	}
}

// agent holds the parts of an agent.
type agent struct {
	size   size
	host   *testenv.Host
	server *child.Process
	view   *view.View
	client *client.Client
	*reconcile.Reconciler
	// received is the time at which the first frame arrived that is not programmed yet, in
	// nanoseconds since began. It is 0 if there is none.
	received atomic.Int64
	began    time.Time

	// replaced receives a value whenever everything has been programmed.
	replaced chan struct{}

	mu             sync.Mutex      // guards flips and applies
	flips, applies []time.Duration // durations
}

// timed is the agent's programmer. It measures how long calls take.
type timed struct {
	*nftables.Programmer
	agent *agent
}

func newAgent(b *testing.B, s size) *agent {
	b.Helper()
	network := testenv.NewNetwork(b)
	a := &agent{size: s, host: network.AddNode("node").Host, began: time.Now(), replaced: make(chan struct{}, 1)}
	authority, err := testca.New()
	require.NoError(b, err)
	serving, err := authority.Server("127.0.0.1")
	require.NoError(b, err)
	addresses, err := target.Addresses(1)
	require.NoError(b, err)
	setup := target.Setup{ClientCA: authority.PEM(), Address: addresses[0], Cluster: &generate.Config{
		Nodes: 3000, Services: []generate.Group{{Count: s.services, Least: s.endpoints, Most: s.endpoints}}, Change: generate.Flip,
	}}
	if s.large > 0 {
		setup.Cluster.Changing = []generate.Group{{Count: 1, Least: s.large, Most: s.large}}
	}
	setup.Certificate, setup.PrivateKey, err = ca.EncodePEM(serving)
	require.NoError(b, err)
	a.server, err = child.Start(b.Context(), "server", os.Stderr, []string{serveArgument}, (*target.Servant).Setup, setup)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, a.server.Close()) })
	name := generate.NodeName(0)
	identity, err := authority.Node(name)
	require.NoError(b, err)
	cache, logger := client.NewCache(), slog.New(slog.DiscardHandler)
	a.view = view.New(view.Options{NodeName: name, ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix(clusterCIDR)}})
	a.client = client.New(client.Options{
		Servers: client.Static(setup.Address), NodeName: name, Programmer: "nftables", Cache: cache, Decode: a.decode, Logger: logger,
		DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
			MinVersion: tls.VersionTLS13, RootCAs: authority.Pool(), Certificates: []tls.Certificate{identity}, NextProtos: []string{wire.Protocol},
		}))},
	})
	a.Reconciler = reconcile.New(reconcile.Options{
		Cache: cache, View: a.view, Programmer: &timed{a.newProgrammer(b), a}, Reporter: a.client, Logger: logger,
	})
	return a
}

func (a *agent) newProgrammer(b *testing.B) (p *nftables.Programmer) {
	b.Helper()
	require.NoError(b, a.host.Do(func() (err error) {
		p, err = nftables.New(nftables.Options{Log: slog.New(slog.DiscardHandler)})
		return err
	}))
	b.Cleanup(p.Close)
	return p
}

func (a *agent) decode(f wire.Frame) (*wire.Response, error) {
	now := time.Since(a.began)
	r, err := wire.Decode(f)
	if err == nil && r.Update != nil {
		a.received.CompareAndSwap(0, int64(now))
	}
	return r, err
}

// Watch opens its socket in the node's network namespace.
func (t *timed) Watch(ctx context.Context, lost func(string)) {
	_ = t.agent.host.Do(func() error {
		t.Programmer.Watch(ctx, lost)
		return nil
	})
}

// Replace runs in the node's network namespace because it also sets sysctls.
func (t *timed) Replace(ctx context.Context, state view.State) error {
	err := t.agent.host.Do(func() error { return t.Programmer.Replace(ctx, state) })
	select {
	case t.agent.replaced <- struct{}{}:
	default:
	}
	return err
}

// Apply applies changes and records how long that took.
func (t *timed) Apply(ctx context.Context, changes []view.Change) error {
	received := time.Duration(t.agent.received.Swap(0))
	start := time.Since(t.agent.began)
	err := t.Programmer.Apply(ctx, changes)
	end := time.Since(t.agent.began)
	t.agent.mu.Lock()
	defer t.agent.mu.Unlock()
	t.agent.applies = append(t.agent.applies, end-start)
	if received > 0 { // 0 if the frame arrived during the last call
		t.agent.flips = append(t.agent.flips, end-received)
	}
	return err
}

func (a *agent) measure(b *testing.B) {
	ctx, cancel := context.WithCancel(b.Context())
	var running sync.WaitGroup
	start := time.Now()
	running.Go(func() { _ = a.client.Run(ctx) }) // it ends only with the context
	running.Go(func() { a.Run(ctx) })
	select {
	case <-a.Programmed():
	case <-time.After(programTimeout):
		b.Error("the kernel was not programmed in time")
	}
	b.ReportMetric(time.Since(start).Seconds(), "sync-s")
	b.ReportMetric(0, "ns/op")
	a.churn(b, "flip", flips, flipRate)
	a.measureFloor(b)
	if a.size.large >= largeEnough {
		a.churn(b, "rollover", 2*a.size.large, rolloverRate)
	}
	b.ReportMetric(heap(), "heap-MiB")
	<-a.replaced // the initial programming
	start = time.Now()
	_, err := a.host.Run(b.Context(), "nft", "flush", "ruleset")
	require.NoError(b, err)
	select {
	case <-a.replaced:
		b.ReportMetric(time.Since(start).Seconds(), "repair-s")
	case <-time.After(programTimeout):
		b.Error("the kernel was not repaired in time")
	}
	cancel()
	running.Wait()
	a.measurePrograms(b)
}

// churn makes endpoints flip and reports the costs.
func (a *agent) churn(b *testing.B, what string, count int, rate float64) {
	b.Helper()
	a.flips, a.applies = nil, nil
	a.received.Store(0) // frames that changed nothing
	runtime.GC()
	start, before := time.Now(), cpu(b)
	plan := generate.Plan{Kind: generate.Flip, Schedule: generate.Schedule{Start: start.Add(200 * time.Millisecond), Count: count, Rate: rate}}
	_, err := child.Call(b.Context(), a.server, (*target.Servant).Play, plan)
	require.NoError(b, err)
	_, err = child.Call(b.Context(), a.server, (*target.Servant).Played, child.None{})
	require.NoError(b, err)
	require.Eventually(b, func() bool { return a.received.Load() == 0 }, changeTimeout, time.Millisecond)
	spent, took := cpu(b)-before, time.Since(start)
	a.mu.Lock()
	defer a.mu.Unlock()
	// Flips that are close together may be applied together.
	require.GreaterOrEqual(b, len(a.flips), count/2)
	reportTimes(b, what, a.flips)
	reportTimes(b, what+"-apply", a.applies)
	b.ReportMetric(micros(spent)/float64(count), what+"-cpu-µs")
	b.ReportMetric(100*spent.Seconds()/took.Seconds(), what+"-cpu-%")
}

// measureFloor measures a lower bound on the time of a change of the tables. A change needs two
// system calls. One sends a prepared transaction that adds or removes one element of a set; the
// other receives the answer.
func (a *agent) measureFloor(b *testing.B) {
	b.Helper()
	var kernel *gnft.Conn
	var fd int
	require.NoError(b, a.host.Do(func() (err error) {
		if kernel, err = gnft.New(gnft.AsLasting()); err != nil {
			return err
		}
		fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		return err
	}))
	defer func() { require.NoError(b, errors.Join(unix.Close(fd), kernel.CloseLasting())) }()
	// Port ID 0 is the kernel.
	require.NoError(b, unix.Connect(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}))
	set := &gnft.Set{Table: kernel.AddTable(&gnft.Table{Name: "floor", Family: gnft.TableFamilyIPv4}), Name: "floor", KeyType: gnft.TypeIPAddr}
	require.NoError(b, kernel.AddSet(set, nil))
	require.NoError(b, kernel.Flush())
	come := elementChange(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, set, []byte{10, 0, 0, 1})
	leave := elementChange(unix.NFT_MSG_DELSETELEM, 0, set, []byte{10, 0, 0, 1})
	answer := make([]byte, 1<<12)
	measure := func(what string, wait func()) {
		times := make([]time.Duration, 0, flips)
		for range flips / 2 {
			for _, transaction := range [][]byte{come, leave} {
				wait()
				start := time.Now()
				require.NoError(b, unix.Send(fd, transaction, 0))
				n, _, err := unix.Recvfrom(fd, answer, unix.MSG_DONTWAIT)
				times = append(times, time.Since(start))
				require.NoError(b, err)
				require.GreaterOrEqual(b, n, unix.NLMSG_HDRLEN+4)
				require.Zero(b, binary.NativeEndian.Uint32(answer[unix.NLMSG_HDRLEN:]), "error of the kernel")
			}
		}
		reportTimes(b, what, times)
	}
	pace := time.NewTicker(time.Second / flipRate)
	defer pace.Stop()
	measure("floor", func() { <-pace.C })
	measure("floor-loop", func() {})
	kernel.DelTable(set.Table)
	require.NoError(b, kernel.Flush())
}

// elementChange returns a transaction that changes one element of a set and requests one answer.
func elementChange(kind, flags int, set *gnft.Set, key []byte) []byte {
	request := func(kind, flags int, family uint8, resource uint16, attributes ...nl.NetlinkRequestData) []byte {
		r := nl.NewNetlinkRequest(kind, flags)
		r.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0, ResId: nl.Swap16(resource)})
		for _, a := range attributes {
			r.AddData(a)
		}
		return r.Serialize()
	}
	elements := nl.NewRtAttr(unix.NFTA_SET_ELEM_LIST_ELEMENTS|unix.NLA_F_NESTED, nil)
	elements.AddRtAttr(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, nil).AddRtAttr(unix.NFTA_SET_ELEM_KEY|unix.NLA_F_NESTED, nil).
		AddRtAttr(unix.NFTA_DATA_VALUE, key)
	return slices.Concat(
		request(unix.NFNL_MSG_BATCH_BEGIN, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES),
		request(unix.NFNL_SUBSYS_NFTABLES<<8|kind, flags|unix.NLM_F_ACK, uint8(set.Table.Family), 0,
			nl.NewRtAttr(unix.NFTA_SET_ELEM_LIST_TABLE, nl.ZeroTerminated(set.Table.Name)),
			nl.NewRtAttr(unix.NFTA_SET_ELEM_LIST_SET, nl.ZeroTerminated(set.Name)), elements),
		request(unix.NFNL_MSG_BATCH_END, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES),
	)
}

// reportTimes reports the median and the 99th percentile of durations.
func reportTimes(b *testing.B, what string, times []time.Duration) {
	b.Helper()
	slices.Sort(times)
	for _, p := range []int{50, 99} {
		b.ReportMetric(micros(times[len(times)*p/100]), fmt.Sprintf("%s-p%d-µs", what, p))
	}
}

// measurePrograms measures programmers that program everything, from scratch and again.
func (a *agent) measurePrograms(b *testing.B) {
	b.Helper()
	var anew, again []time.Duration
	generation := func() (g uint32) {
		require.NoError(b, a.host.Do(func() (err error) {
			g, err = nft.Generation()
			return err
		}))
		return g
	}
	state := a.view.State()
	program := func() time.Duration {
		p := a.newProgrammer(b)
		start := time.Now()
		require.NoError(b, a.host.Do(func() error { return p.Replace(b.Context(), state) }))
		return time.Since(start)
	}
	for range repeats {
		require.NoError(b, a.host.Do(func() error { return nftables.Cleanup(b.Context()) }))
		anew = append(anew, program())
		before := generation()
		again = append(again, program())
		require.Equal(b, before, generation(), "the programmer changed the tables")
	}
	slices.Sort(anew)
	slices.Sort(again)
	b.ReportMetric(anew[repeats/2].Seconds(), "program-s")
	b.ReportMetric(again[repeats/2].Seconds(), "restart-s")
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }

// cpu returns the CPU time that this process has used so far, in user mode and in the kernel.
func cpu(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func heap() float64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc) / (1 << 20)
}

// serveArgument makes this binary run the server of a BenchmarkAgent.
const serveArgument = "serve-generated"

func serve(in io.Reader, out io.WriteCloser) int {
	if err := target.Serve(context.Background(), in, out, slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))); err != nil {
		fmt.Fprintln(os.Stderr, "server:", err)
		return 1
	}
	return 0
}
