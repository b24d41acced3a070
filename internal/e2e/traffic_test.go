// This file sends real connections to all addresses of a Service from pods, nodes and outside, once
// or all the time, and requires who answers.
package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/slicecast/slicecast/internal/testenv"
)

// way is a source, a protocol and an address for connections to a port of a Service.
type way struct {
	from  *testenv.Host
	proto testenv.Proto
	to    netip.AddrPort
}

// String returns a description such as "client-a to 10.96.0.1:80 over tcp".
func (w way) String() string { return fmt.Sprintf("%s to %s over %s", w.from.Name, w.to, w.proto) }

// sourcePorts provides a new source port for each UDP probe. For a port that was used recently,
// conntrack would still use the backend of that time.
var sourcePorts atomic.Uint32

func (w way) try(ctx context.Context) testenv.Result {
	// The timeout is longer than the retransmission of a lost packet takes.
	options := testenv.ProbeOptions{Timeout: 5 * time.Second}
	if w.proto == testenv.UDP {
		options.Source = netip.AddrPortFrom(netip.Addr{}, uint16(10000+sourcePorts.Add(1)%20000))
	}
	return w.from.Probe(ctx, w.proto, w.to, 1, options)
}

// ways returns all ways to a port in both families, and over both protocols if the port has both.
// They lead to the cluster IPs from a pod on each node and from each node, and to each node's node
// port from that node and from outside.
func (c *cluster) ways(s *service, port int32) []way {
	c.t.Helper()
	var list []way
	for _, p := range s.portsNumbered(port) {
		proto := testenv.Proto(strings.ToLower(string(p.Protocol)))
		for _, f := range s.frontends(p) {
			for _, n := range c.nodes() {
				if f.Address.IsUnspecified() {
					to := netip.AddrPortFrom(n.Addr(f.Address.Is6()), f.Port)
					list = append(list, way{outside.Host, proto, to}, way{n.Host, proto, to})
				} else {
					to := netip.AddrPortFrom(f.Address, f.Port)
					list = append(list, way{n.client.Host, proto, to}, way{n.Host, proto, to})
				}
			}
		}
	}
	require.NotEmpty(c.t, list, "Service %s has no port %d", s.Name, port)
	return list
}

func (s *service) portsNumbered(port int32) []corev1.ServicePort {
	return slices.DeleteFunc(slices.Clone(s.Spec.Ports), func(p corev1.ServicePort) bool { return p.Port != port })
}

// RequireAnswers waits until the nodes' rules match the API. It then requires that on all ways all
// of these pods answer, and no others.
func (c *cluster) RequireAnswers(s *service, port int32, pods ...*pod) {
	c.t.Helper()
	c.await(s, port, pods)
	for _, w := range c.ways(s, port) {
		missing := names(pods)
		// If 17 pods are picked at random 1000 times, the chance that one of them is never picked
		// is 10^-26.
		for i := 0; len(missing) > 0 || i < 4*len(pods); i++ {
			require.Less(c.t, i, 1000, "%s: %v never answer", w, missing)
			result := w.try(c.t.Context())
			require.True(c.t, result.All(testenv.Answered), "%s: %s", w, result)
			for name := range result.Backends() {
				require.Contains(c.t, names(pods), name, "%s: %s", w, result)
				missing = slices.DeleteFunc(missing, func(m string) bool { return m == name })
			}
		}
	}
}

// RequireRejected requires that the port has no endpoints and that connections are refused on all
// ways.
func (c *cluster) RequireRejected(s *service, port int32) {
	c.t.Helper()
	c.await(s, port, nil)
	for _, w := range c.ways(s, port) {
		result := w.try(c.t.Context())
		require.True(c.t, result.All(testenv.Refused), "%s: %s", w, result)
	}
}

// await waits until a port leads to these pods in the API, and the nodes' rules match the API.
func (c *cluster) await(s *service, port int32, pods []*pod) {
	c.t.Helper()
	c.AwaitAPI(s, port, pods)
	c.AwaitTruth()
}

// AwaitAPI waits until a port leads to these pods in the API, where the controllers write the
// slices.
func (c *cluster) AwaitAPI(s *service, port int32, pods []*pod) {
	c.t.Helper()
	testenv.Eventually(c.t, settleTimeout, func() error {
		truth, err := c.truth(c.t.Context())
		if err != nil {
			return err
		}
		for _, p := range s.portsNumbered(port) {
			for _, f := range s.frontends(p) {
				if err := leadsTo(truth[f], f.Address.Is6(), pods); err != nil {
					return fmt.Errorf("in the API, %s: %w", f, err)
				}
			}
		}
		return nil
	})
}

// leadsTo compares the addresses of a lead, without the ports, with the addresses of pods.
func leadsTo(lead string, ipv6 bool, pods []*pod) error {
	have, want := []string{}, []string{}
	if lead != rejected {
		for _, backend := range strings.Fields(lead) {
			address, err := netip.ParseAddrPort(backend)
			if err != nil {
				return err
			}
			have = append(have, address.Addr().String())
		}
	}
	for _, p := range pods {
		want = append(want, p.Addr(ipv6).String())
	}
	slices.Sort(have)
	slices.Sort(want)
	if !slices.Equal(have, want) {
		return fmt.Errorf("it leads to %v, want %v", have, want)
	}
	return nil
}

// connections is a set of open TCP connections to a port, one on each way.
type connections struct {
	c     *cluster
	ways  []way
	conns []*testenv.Conn
}

// Connect opens a TCP connection to a port on each way.
func (c *cluster) Connect(s *service, port int32) *connections {
	c.t.Helper()
	open := &connections{c: c}
	for _, w := range c.ways(s, port) {
		if w.proto != testenv.TCP {
			continue
		}
		conn, err := w.from.Dial(c.t.Context(), w.proto, w.to, testenv.ProbeOptions{Timeout: 5 * time.Second})
		require.NoError(c.t, err, "%s", w)
		c.t.Cleanup(conn.Close)
		open.ways, open.conns = append(open.ways, w), append(open.conns, conn)
	}
	open.RequireAlive()
	return open
}

// RequireAlive requires an answer on each connection.
func (o *connections) RequireAlive() {
	o.c.t.Helper()
	ctx, cancel := context.WithTimeout(o.c.t.Context(), 10*time.Second)
	defer cancel()
	for i, conn := range o.conns {
		_, err := conn.Echo(ctx, "alive?")
		require.NoError(o.c.t, err, "established connection from %s", o.ways[i])
	}
}

// prober continuously opens new connections on all ways.
type prober struct {
	c      *cluster
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu       sync.Mutex // guards attempts and failures
	attempts int
	failures []string
}

// probeInterval is the interval between two attempts on one way. There are about thirty ways.
const probeInterval = 20 * time.Millisecond

// ProbeAllTheTime starts a prober. It runs until RequireNoFailure is called or the test ends.
func (c *cluster) ProbeAllTheTime(s *service, port int32) *prober {
	c.t.Helper()
	ctx, cancel := context.WithCancel(c.t.Context())
	p := &prober{c: c, cancel: cancel}
	for _, w := range c.ways(s, port) {
		p.wg.Go(func() { p.run(ctx, w) })
	}
	c.t.Cleanup(p.stop)
	return p
}

func (p *prober) run(ctx context.Context, w way) {
	pause := time.NewTicker(probeInterval)
	defer pause.Stop()
	for ctx.Err() == nil {
		result := w.try(ctx)
		if w.proto == testenv.UDP && !result.All(testenv.Answered) {
			// When an endpoint is removed, its UDP flows are deleted, which may lose the answer to
			// a request that is under way. Clients of UDP must repeat requests.
			result = w.try(ctx)
		}
		p.mu.Lock()
		p.attempts++
		// The result of an attempt that was interrupted by the end says nothing.
		if !result.All(testenv.Answered) && ctx.Err() == nil {
			p.failures = append(p.failures, fmt.Sprintf("%s %s: %s", time.Now().Format(time.TimeOnly), w, result))
		}
		p.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-pause.C:
		}
	}
}

func (p *prober) stop() {
	p.cancel()
	p.wg.Wait()
}

// RequireNoFailure ends the prober and requires that every attempt was answered.
func (p *prober) RequireNoFailure() {
	p.c.t.Helper()
	p.stop()
	require.Empty(p.c.t, p.failures, "of %d attempts", p.attempts)
	require.NotZero(p.c.t, p.attempts)
	p.c.t.Logf("%d new connections, none failed", p.attempts)
}
