package kubeproxy

import (
	"context"
	"crypto/tls"
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
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/slicecast/slicecast/agent/app"
	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/programmer/nftables"
	"github.com/slicecast/slicecast/agent/reconcile"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/wire"
	"github.com/slicecast/slicecast/internal/xtables"
	"github.com/slicecast/slicecast/loadtest/generate"
	"github.com/slicecast/slicecast/loadtest/target"
)

const (
	// flips are made one after the other, flipRate a second.
	flips    = 1000
	flipRate = 50
	// rolloverRate is how many endpoints go or come a second when a large Service is rolled over: as many of either.
	rolloverRate = 200
	// largeEnough is the size from which on a large Service is rolled over.
	largeEnough = 1000
	// repeats is how often everything is programmed, anew or again.
	repeats = 5
)

// BenchmarkAgent runs the parts of an agent that lead from the stream to nftables in this process, which runs as an agent does
// and does nothing else: the server with a generated cluster is another one. It tells
//
//   - sync-s: the time from the start until the kernel holds everything;
//   - flip-p50-µs, flip-p99-µs: the time from an endpoint's flip, as a frame that is just received, until the kernel has it; flip-cpu-µs:
//     this process's CPU time for each, all that it does included; apply-…: the programmer's part of the former; rollover-… are the same while
//     all endpoints of a large Service are replaced by others, rollover-cpu-% the CPU time of that in percent of one CPU;
//   - bare-p50-µs, bare-p99-µs: the time in which one element comes into a set of its own, or goes, through google/nftables, as often a second as
//     the endpoints flip: a peer of the programmer, as both find the caches of a CPU that has slept;
//   - repair-s: the time from somebody's "nft flush ruleset" until the kernel holds everything again;
//   - program-s: the time in which a programmer that finds nothing programs everything; restart-s: one that finds all in place (medians);
//   - heap-MiB: what all this has in memory, without garbage.
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

// agent is the parts of one.
type agent struct {
	size   size
	host   *testenv.Host
	server *target.Process
	view   *view.View
	client *client.Client
	*reconcile.Reconciler
	// received is when the first frame came that is not programmed yet, in nanoseconds since began; 0: there is none.
	received atomic.Int64
	began    time.Time

	// replaced gets a value whenever everything has been programmed.
	replaced chan struct{}

	mu             sync.Mutex
	flips, applies []time.Duration // what they took
}

// timed is the agent's programmer.
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
	setup.Certificate, setup.PrivateKey, err = testca.EncodePEM(serving)
	require.NoError(b, err)
	a.server, err = target.Start(b.Context(), os.Stderr, []string{serveArgument}, setup)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, a.server.Close()) })
	name := generate.NodeName(0)
	identity, err := authority.Node(name)
	require.NoError(b, err)
	cache, logger := client.NewCache(), slog.New(slog.DiscardHandler)
	a.view = view.New(view.Options{NodeName: name, ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix(clusterCIDR)}})
	a.client = client.New(client.Options{
		Servers: client.Static(a.server.Address), NodeName: name, Programmer: "nftables", Cache: cache, Decode: a.decode, Logger: logger,
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

// Watch opens its socket on the node.
func (t *timed) Watch(ctx context.Context, lost func(string)) {
	_ = t.agent.host.Do(func() error {
		t.Programmer.Watch(ctx, lost)
		return nil
	})
}

// Replace is on the node for its sysctls, too.
func (t *timed) Replace(ctx context.Context, state view.State) error {
	err := t.agent.host.Do(func() error { return t.Programmer.Replace(ctx, state) })
	select {
	case t.agent.replaced <- struct{}{}:
	default:
	}
	return err
}

// Apply applies, and takes the time.
func (t *timed) Apply(ctx context.Context, changes []view.Change) error {
	received := time.Duration(t.agent.received.Swap(0))
	start := time.Since(t.agent.began)
	err := t.Programmer.Apply(ctx, changes)
	end := time.Since(t.agent.began)
	t.agent.mu.Lock()
	defer t.agent.mu.Unlock()
	t.agent.applies = append(t.agent.applies, end-start)
	if received > 0 { // else it came while the one before was taken for this one
		t.agent.flips = append(t.agent.flips, end-received)
	}
	return err
}

func (a *agent) measure(b *testing.B) {
	ctx, cancel := context.WithCancel(b.Context())
	var running sync.WaitGroup
	start := time.Now()
	running.Go(func() { _ = a.client.Run(ctx) }) // which ends with the context only
	running.Go(func() { a.Run(ctx) })
	select {
	case <-a.Programmed():
	case <-time.After(programTimeout):
		b.Error("not programmed")
	}
	b.ReportMetric(time.Since(start).Seconds(), "sync-s")
	b.ReportMetric(0, "ns/op")
	a.churn(b, "flip", flips, flipRate)
	a.measureBare(b)
	if a.size.large >= largeEnough {
		a.churn(b, "rollover", 2*a.size.large, rolloverRate)
	}
	b.ReportMetric(heap(), "heap-MiB")
	<-a.replaced // the first time
	start = time.Now()
	_, err := a.host.Run(b.Context(), "nft", "flush", "ruleset")
	require.NoError(b, err)
	select {
	case <-a.replaced:
		b.ReportMetric(time.Since(start).Seconds(), "repair-s")
	case <-time.After(programTimeout):
		b.Error("not repaired")
	}
	cancel()
	running.Wait()
	a.measurePrograms(b)
}

// churn has endpoints flip, and reports what it takes.
func (a *agent) churn(b *testing.B, what string, count int, rate float64) {
	b.Helper()
	a.flips, a.applies = nil, nil
	a.received.Store(0) // of what changed nothing
	runtime.GC()
	start, before := time.Now(), cpu(b)
	plan := generate.Plan{Kind: generate.Flip, Schedule: generate.Schedule{Start: start.Add(200 * time.Millisecond), Count: count, Rate: rate}}
	require.NoError(b, a.server.Play(b.Context(), plan))
	_, err := a.server.Played(b.Context())
	require.NoError(b, err)
	require.Eventually(b, func() bool { return a.received.Load() == 0 }, changeTimeout, time.Millisecond)
	spent, took := cpu(b)-before, time.Since(start)
	a.mu.Lock()
	defer a.mu.Unlock()
	// Some may have waited for each other.
	require.GreaterOrEqual(b, len(a.flips), count/2)
	reportTimes(b, what, a.flips)
	reportTimes(b, what+"-apply", a.applies)
	b.ReportMetric(micros(spent)/float64(count), what+"-cpu-µs")
	b.ReportMetric(100*spent.Seconds()/took.Seconds(), what+"-cpu-%")
}

// measureBare measures a library's changes of a set that has nothing to do with Services.
func (a *agent) measureBare(b *testing.B) {
	b.Helper()
	var kernel *gnft.Conn
	require.NoError(b, a.host.Do(func() (err error) {
		kernel, err = gnft.New(gnft.AsLasting())
		return err
	}))
	defer func() { require.NoError(b, kernel.CloseLasting()) }()
	set := &gnft.Set{Table: kernel.AddTable(&gnft.Table{Name: "bare", Family: gnft.TableFamilyIPv4}), Name: "bare", KeyType: gnft.TypeIPAddr}
	require.NoError(b, kernel.AddSet(set, nil))
	require.NoError(b, kernel.Flush())
	element := []gnft.SetElement{{Key: []byte{10, 0, 0, 1}}}
	times := make([]time.Duration, 0, flips)
	pace := time.NewTicker(time.Second / flipRate)
	defer pace.Stop()
	for i := range flips {
		<-pace.C
		change := kernel.SetAddElements
		if i%2 == 1 {
			change = kernel.SetDeleteElements
		}
		start := time.Now()
		require.NoError(b, change(set, element))
		require.NoError(b, kernel.Flush())
		times = append(times, time.Since(start))
	}
	kernel.DelTable(set.Table)
	require.NoError(b, kernel.Flush())
	reportTimes(b, "bare", times)
}

// reportTimes reports the median of times and their 99th percentile.
func reportTimes(b *testing.B, what string, times []time.Duration) {
	b.Helper()
	slices.Sort(times)
	for _, p := range []int{50, 99} {
		b.ReportMetric(micros(times[len(times)*p/100]), fmt.Sprintf("%s-p%d-µs", what, p))
	}
}

// measurePrograms measures programmers that program everything, anew and again.
func (a *agent) measurePrograms(b *testing.B) {
	b.Helper()
	var anew, again []time.Duration
	generation := func() (g uint32) {
		require.NoError(b, a.host.Do(func() (err error) {
			g, err = xtables.Generation()
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
		require.Equal(b, before, generation(), "nothing is touched")
	}
	slices.Sort(anew)
	slices.Sort(again)
	b.ReportMetric(anew[repeats/2].Seconds(), "program-s")
	b.ReportMetric(again[repeats/2].Seconds(), "restart-s")
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }

// cpu gives the CPU time of this process so far, with the kernel's.
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

// serveArgument makes this binary the server's process of a BenchmarkAgent.
const serveArgument = "serve-generated"

func serve(in io.Reader, out io.WriteCloser) int {
	if err := target.Serve(context.Background(), in, out, slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))); err != nil {
		fmt.Fprintln(os.Stderr, "server:", err)
		return 1
	}
	return 0
}
