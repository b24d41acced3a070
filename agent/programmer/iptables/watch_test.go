// These tests prove that Watch notices what others do to the rules in a real kernel, and that the
// programmer's own changes cost no reading.
package iptables

import (
	"context"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// watching runs a Programmer's Watch and returns the reasons with which it calls lost. reads counts
// how often it has read all rules.
func (c *cluster) watching(t *testing.T) (lost <-chan string, reads *atomic.Int32) {
	t.Helper()
	reasons, reads := make(chan string, 16), new(atomic.Int32)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	run := c.inHost.Programmer.run
	for _, f := range c.inHost.families {
		f.tool.run = func(ctx context.Context, stdin []byte, name string, args ...string) ([]byte, error) {
			if strings.HasSuffix(name, "-save") {
				reads.Add(1)
			}
			return run(ctx, stdin, name, args...)
		}
	}
	go func() {
		done <- c.a.Do(func() error {
			c.inHost.Watch(ctx, func(reason string) { reasons <- reason })
			return nil
		})
	}()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	return reasons, reads
}

// TestWatch asserts that whatever others do to the rules is noticed within seconds, and that a
// Replace repairs it.
func TestWatch(t *testing.T) {
	const foreign = "*nat\n:OTHER - [0:0]\n-A PREROUTING -j OTHER\nCOMMIT\n*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT\nCOMMIT\n"
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		for _, family := range families {
			c.set(c.web("web", family, 1, 0, 2), none("none", family, 3))
		}
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		lost, _ := c.watching(t)
		ip4, ip6 := programName(model.IPv4, variant), programName(model.IPv6, variant)
		for _, test := range []struct{ what, commands, reason string }{
			{"nat", ip4 + " -t nat -F", "IPv4: table nat: the rule"},
			{"nat and its chains", ip4 + " -t nat -F; " + ip4 + " -t nat -X", "IPv4: table nat: the rule"},
			{"filter", ip4 + " -F", "IPv4: table filter: the rule"},
			{"IPv6", ip6 + " -t nat -F; " + ip6 + " -F; " + ip6 + " -t nat -X; " + ip6 + " -X", "IPv6: table nat: the rule"},
			{"one hook", ip6 + " -t nat -D POSTROUTING -j SLICECAST-POSTROUTING", "IPv6: table nat: the rule \"-A POSTROUTING"},
			{"one chain", ip4 + " -t nat -F SLICECAST-DISPATCH", "IPv4: table nat: the chain SLICECAST-DISPATCH has changed"},
			{"one rule", ip6 + " -D SLICECAST-REJECT 1", "IPv6: table filter: the chain SLICECAST-REJECT has changed"},
			{"another's chain", ip4 + " -N SLICECAST-ELSE", "IPv4: table filter: there is an unexpected chain SLICECAST-ELSE"},
			{"another ruleset", "printf '" + foreign + "' | " + ip4 + "-restore", "IPv4: table nat: the rule"},
			{"nf_tables", "nft flush ruleset", "IPv"},
		} {
			if variant == Legacy && test.what == "nf_tables" {
				continue
			}
			_, err := c.a.Run(t.Context(), "sh", "-ec", test.commands)
			require.NoError(t, err, test.what)
			select {
			case reason := <-lost:
				require.Contains(t, reason, test.reason, test.what)
			case <-time.After(time.Minute):
				require.Fail(t, "not noticed", test.what)
			}
			require.ErrorContains(t, c.inHost.Apply(t.Context(), []view.Change{{After: c.web("new", model.IPv4, 9, 0)}, {After: c.web("new", model.IPv6, 9, 0)}}), "call Replace first", test.what)
			require.NoError(t, c.inHost.Replace(t.Context(), c.state))
			c.requireFresh(t)
			for _, family := range families {
				for last, outcome := range map[byte]testenv.Outcome{1: testenv.Answered, 3: testenv.Refused} {
					r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(family, last), servicePort), 2, patient)
					require.True(t, r.All(outcome), "%s, %v: %v", test.what, family, r)
				}
			}
			require.Empty(t, lost)
		}
	})
}

// TestChangesBeforeWatch asserts that changes by others between a Replace and Watch are noticed.
func TestChangesBeforeWatch(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		c.set(c.web("web", model.IPv4, 1, 0, 2))
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		_, err := c.a.Run(t.Context(), programName(model.IPv4, variant), "-t", "nat", "-F", "SLICECAST-DISPATCH")
		require.NoError(t, err)
		lost, _ := c.watching(t)
		select {
		case reason := <-lost:
			require.Contains(t, reason, "SLICECAST-DISPATCH has changed")
		case <-time.After(time.Minute):
			require.Fail(t, "not noticed")
		}
	})
}

// TestWatchIsCheap asserts that Watch does not read the rules because of the Programmer's own
// changes, and ignores changes by others elsewhere.
func TestWatchIsCheap(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		c.set(c.web("web", model.IPv4, 1, 0, 2), c.web("web", model.IPv6, 1, 0, 2))
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		lost, reads := c.watching(t)
		looked := func() bool { return !c.inHost.suspiciousIn(t) }
		require.Eventually(t, looked, time.Minute, 10*time.Millisecond, "the hooks are new, and looked at once")
		before := reads.Load()
		for i := range byte(10) {
			for _, family := range families {
				require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{
					{After: c.web(string('a'+rune(i)), family, 10+i, 0)},
					{After: none(string('A'+rune(i)), family, 30+i)},
				}))
			}
			require.True(t, looked())
		}
		require.Equal(t, before, reads.Load())

		_, err := c.a.Run(t.Context(), programName(model.IPv4, variant), "-A", "FORWARD", "-s", "192.0.2.1", "-j", "DROP")
		require.NoError(t, err)
		require.False(t, looked())
		// Reading them does not look suspicious, either.
		require.Eventually(t, func() bool { return looked() && reads.Load() > before }, time.Minute, 10*time.Millisecond)
		require.Empty(t, lost)
	})
}

// suspiciousIn calls noticeChangesLocked in the host's namespace, once nobody else holds the lock.
func (h *inHost) suspiciousIn(t *testing.T) (is bool) {
	t.Helper()
	require.NoError(t, h.host.Do(func() error {
		h.mu.Lock()
		defer h.mu.Unlock()
		is = h.noticeChangesLocked()
		return nil
	}))
	return is
}

// TestIntact asserts what a new programmer finds of an earlier one's rules, with a state that is
// older than the kernel's.
func TestIntact(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		c.set(c.web("web", model.IPv4, 1, 0, 2), c.web("web", model.IPv6, 1, 0, 2))
		intact := func() (is bool) {
			next := newInHost(t, c.a.Host, Options{Variant: variant})
			require.NoError(t, c.a.Do(func() error { is = next.Intact(t.Context(), c.state); return nil }))
			return is
		}
		require.False(t, intact(), "nothing was ever programmed")
		ip4, ip6 := programName(model.IPv4, variant), programName(model.IPv6, variant)
		for _, by := range []string{
			ip4 + " -t nat -F", ip6 + " -F", ip4 + " -t nat -F " + dispatchChain, ip6 + " -t nat -D POSTROUTING -j " + postroutingChain,
		} {
			require.NoError(t, c.inHost.Replace(t.Context(), c.state))
			require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{After: c.web("web", model.IPv4, 1, 1)}}))
			require.True(t, intact())
			_, err := c.a.Run(t.Context(), "sh", "-c", by)
			require.NoError(t, err)
			require.False(t, intact(), by)
		}
	})
}
