// These tests prove that kube-proxy's metrics about iptables report what happens to packets and how
// many rules there are, for both variants. They also prove that rules do without counters where the
// kernel has none, and that the counters are removed with the rules.
package iptables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// gather returns the values of metrics about rules, by name and the values of labels.
func gather(t *testing.T, r *prometheus.Registry) map[string]float64 {
	t.Helper()
	values := map[string]float64{}
	families, err := r.Gather()
	require.NoError(t, err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			values[name] = m.GetGauge().GetValue()
		}
	}
	return values
}

// collect returns the value of a metric about packets on a node. exists is false if it has none. A
// registry would collect it in another thread, and so on another node.
func collect(t *testing.T, host *testenv.Host, p *packets) (value float64, exists bool) {
	t.Helper()
	found := make(chan prometheus.Metric, 1)
	require.NoError(t, host.Do(func() error {
		p.Collect(found)
		return nil
	}))
	close(found)
	m, exists := <-found
	if !exists {
		return 0, false
	}
	var out dto.Metric
	require.NoError(t, m.Write(&out))
	return out.GetCounter().GetValue(), true
}

// sendInvalid sends a TCP segment that belongs to no connection and begins none.
func sendInvalid(t *testing.T, from *testenv.Host, to netip.Addr) {
	t.Helper()
	segment := make([]byte, 20)
	segment[1], segment[3] = 1, 1 // ports
	segment[12] = 5 << 4          // length of the header
	segment[13] = 1 | 2           // FIN and SYN
	require.NoError(t, from.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		defer func() { _ = unix.Close(fd) }()
		return os.NewSyscallError("sendto", unix.Sendto(fd, segment, 0, rawAddress(to)))
	}))
}

func TestCounters(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		m := NewMetrics(nil)
		c := newCluster(t, Options{Variant: variant, Metrics: m})
		invalid, localhost := m.newPackets(invalidCounter, "a", ""), m.newPackets(localhostCounter, "b", "")
		requireAbsent := func() {
			t.Helper()
			for _, p := range []*packets{invalid, localhost} {
				_, exists := collect(t, c.a.Host, p)
				require.False(t, exists)
			}
		}
		count := func(p *packets) float64 {
			t.Helper()
			value, exists := collect(t, c.a.Host, p)
			require.True(t, exists)
			return value
		}
		requireAbsent()
		c.state.Node.LocalhostNodePorts = true
		for _, tr := range transports {
			c.set(&view.ServicePort{
				ID: serviceID("web", tr.protocol, model.IPv4), Frontends: []view.Frontend{nodePort(30001), nodePort(30002)}, Cluster: c.backends(model.IPv4, tr.port, 0),
			}, &view.ServicePort{
				ID: serviceID("many", tr.protocol, model.IPv4), Frontends: []view.Frontend{nodePort(30003)}, Cluster: c.backends(model.IPv4, tr.port, 0, 1, 2),
			})
		}
		c.a.Serve(testenv.TCP, 30004)
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		c.requireFresh(t)
		require.Zero(t, count(localhost))

		// Only connections to NodePorts on loopback addresses count, each once.
		for _, tr := range transports {
			for _, port := range []uint16{30001, 30002, 30003} {
				result := c.a.Probe(t.Context(), tr.probe, netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port), 5, patient)
				require.True(t, result.All(testenv.Answered), "%v", result)
				result = c.a.Probe(t.Context(), tr.probe, netip.AddrPortFrom(c.a.Addr(false), port), 5, patient)
				require.True(t, result.All(testenv.Answered), "%v", result)
			}
		}
		result := c.a.Probe(t.Context(), testenv.TCP, netip.MustParseAddrPort("127.0.0.1:30004"), 5, patient)
		require.Equal(t, map[string]int{"a": 5}, result.Backends(), "no NodePort")
		require.Equal(t, 30.0, count(localhost))

		before := count(invalid)
		for range 3 {
			sendInvalid(t, c.pods[0].Host, c.pods[2].Addr(false))
		}
		testenv.Eventually(t, 10*time.Second, func() error {
			if n := count(invalid); n != before+3 {
				return fmt.Errorf("%v packets, before %v", n, before)
			}
			return nil
		})

		require.NoError(t, c.inHost.Cleanup(t.Context()))
		requireAbsent()
	})
}

// TestRulesAreCounted asserts that the metrics of rules are what the kernel has, after changes as
// after a Replace.
func TestRulesAreCounted(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		r := prometheus.NewRegistry()
		c := newCluster(t, Options{Variant: variant, Metrics: NewMetrics(r)})
		requireCounts := func() {
			t.Helper()
			values := gather(t, r)
			for _, family := range families {
				rules := c.inHost.rules(t, family, variant)
				for table := range tables {
					want := strings.Count(rules, table.String()+" -A "+ChainPrefix)
					require.Equal(t, float64(want), values[fmt.Sprintf("kubeproxy_sync_proxy_rules_iptables_total %v %v", family, table)])
				}
			}
		}
		web := c.web("web", model.IPv4, 1, 0, 2)
		c.set(web)
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		requireCounts()
		more := c.web("more", model.IPv4, 2, 0)
		require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{After: more}, {Before: web, After: c.web("web", model.IPv4, 1, 0, 1, 2)}}))
		requireCounts()
		values := gather(t, r)
		last := values["kubeproxy_sync_proxy_rules_iptables_last IPv4 nat"]
		require.NotZero(t, last)
		require.Less(t, last, values["kubeproxy_sync_proxy_rules_iptables_total IPv4 nat"])
		require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{Before: more}}))
		requireCounts()
	})
}

// TestKernelsWithoutCounters asserts that everything is programmed without counters if iptables or
// the kernel lacks the match, or for as long as nobody could be asked.
func TestKernelsWithoutCounters(t *testing.T) {
	for name, test := range map[string]struct {
		refuses func(args []string) bool
		exit    string
		says    string
		again   bool // the next Replace asks again
	}{
		"iptables lacks the match": {func([]string) bool { return true }, "exit status 2", "Couldn't load match `nfacct'", false},
		// A kernel without xt_nfacct refuses only what is written, not what is tried.
		"the kernel lacks the match": {
			func(args []string) bool { return !slices.Contains(args, "--test") }, "exit status 4",
			"iptables-nft-restore: line 2: RULE_APPEND failed (No such file or directory): rule in chain " + checkChain, false,
		},
		"the lock is held": {
			func([]string) bool { return true }, "exit status 4",
			"Another app is currently holding the xtables lock. Perhaps you want to use the -w option?", true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, Options{Variant: NFT})
			c.state.Node.LocalhostNodePorts = true
			refusals, over := 0, false
			run := func(ctx context.Context, stdin []byte, name string, args ...string) ([]byte, error) {
				if !over && strings.Contains(string(stdin), "nfacct") && test.refuses(args) {
					refusals++
					return nil, &commandError{name: name, exit: errors.New(test.exit), said: test.says}
				}
				return runCommand(ctx, stdin, name, args...)
			}
			var p *Programmer
			replace := func() {
				t.Helper()
				require.NoError(t, c.a.Do(func() (err error) { return p.Replace(t.Context(), c.state) }))
			}
			require.NoError(t, c.a.Do(func() (err error) {
				p, err = newProgrammer(Options{Variant: NFT}, run)
				return err
			}))
			replace()
			require.Equal(t, 2, refusals, "one for each IP family")
			rules := c.inHost.rules(t, model.IPv4, NFT)
			require.NotContains(t, rules, "nfacct")
			require.NotContains(t, rules, checkChain)
			require.Contains(t, rules, "-A SLICECAST-FORWARD -m conntrack --ctstate INVALID -j DROP")
			require.Equal(t, "1", strings.TrimSpace(readSysctl(t, c.a.Host, programmer.RouteLocalnet)))

			over = true
			replace()
			const with = "-m nfacct --nfacct-name  " + invalidCounter + " -j DROP"
			if test.again {
				require.Contains(t, c.inHost.rules(t, model.IPv4, NFT), with)
			} else {
				require.NotContains(t, c.inHost.rules(t, model.IPv4, NFT), "nfacct")
			}
			// With the match, the same node gets the counters at the next start at the latest.
			require.NoError(t, c.inHost.Replace(t.Context(), c.state))
			require.Contains(t, c.inHost.rules(t, model.IPv4, NFT), with)
		})
	}
}

func readSysctl(t *testing.T, host *testenv.Host, name string) (value string) {
	t.Helper()
	require.NoError(t, host.Do(func() error {
		b, err := os.ReadFile("/proc/sys/" + name)
		value = string(b)
		return err
	}))
	return value
}

// TestKernelCounters asserts that counters can be created twice, and are removed unless they are in
// use.
func TestKernelCounters(t *testing.T) {
	host := testenv.NewNetwork(t).AddNode("a").Host
	iptables := func(args string) {
		t.Helper()
		_, err := host.Run(t.Context(), "iptables-nft", strings.Fields(args)...)
		require.NoError(t, err)
	}
	exists := func() (exists bool) {
		require.NoError(t, host.Do(func() error {
			return withCounters(func(s *netlink.Socket, name string) error {
				_, err := s.CounterPackets(name)
				exists = exists || err == nil
				return nil
			})
		}))
		return exists
	}
	require.False(t, exists())
	require.NoError(t, host.Do(removeCounters))
	for range 2 {
		require.NoError(t, host.Do(addCounters))
		require.True(t, exists())
	}
	iptables("-A OUTPUT " + counted(invalidCounter))
	require.NoError(t, host.Do(removeCounters))
	require.True(t, exists(), "it is in use")
	iptables("-F OUTPUT")
	require.NoError(t, host.Do(removeCounters))
	require.False(t, exists())
}
