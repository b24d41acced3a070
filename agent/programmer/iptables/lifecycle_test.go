// These tests prove that the programmer leaves the rules of others alone, finds its own at a
// restart, writes only what differs, and removes everything at the end, also what the other variant
// of iptables holds. The kernel is real.
package iptables

import (
	"bytes"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/programmer/takeover"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// foreign are rules of other software, some of which resemble this package's.
var foreign = map[model.Family]string{
	model.IPv4: `*nat
:OTHER - [0:0]
:SLICECASTER - [0:0]
:KUBE-SERVICES - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A POSTROUTING -s 172.17.0.0/16 -j MASQUERADE
-A SLICECASTER -d 10.96.200.1/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.180.0.1:8080
-A KUBE-SERVICES -m comment --comment "-j SLICECASTER" -j SLICECASTER
COMMIT
*filter
:OTHER - [0:0]
-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT
-A FORWARD -j OTHER
-A OTHER -s 192.0.2.0/24 -j DROP
COMMIT
`,
	model.IPv6: `*nat
:OTHER - [0:0]
-A PREROUTING -j OTHER
COMMIT
*filter
-A FORWARD -s 2001:db8:bad::/48 -j DROP
COMMIT
`,
}

// addForeign adds rules of other software on node a.
func (c *cluster) addForeign(t *testing.T, variant Variant) {
	t.Helper()
	for _, family := range families {
		cmd := c.a.Command(t.Context(), programName(family, variant)+"-restore", "--noflush")
		cmd.Stdin = strings.NewReader(foreign[family])
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
}

// web returns a TCP Service port with a cluster IP, a nodePort and these pods.
func (c *cluster) web(name string, family model.Family, last byte, pods ...int) *view.ServicePort {
	return &view.ServicePort{
		ID:        serviceID(name, model.TCP, family),
		Frontends: []view.Frontend{clusterIP(vip(family, last)), nodePort(30000 + uint16(last))},
		Cluster:   c.backends(family, tcpPort, pods...),
	}
}

// none returns such a Service port without pods.
func none(name string, family model.Family, last byte) *view.ServicePort {
	return &view.ServicePort{
		ID:        serviceID(name, model.TCP, family),
		Frontends: []view.Frontend{rejected(clusterIP(vip(family, last))), rejected(nodePort(30000 + uint16(last)))},
	}
}

// ours returns only the lines of rules that belong to this package's chains.
func ours(rules string) string {
	var b strings.Builder
	for line := range strings.Lines(rules) {
		if strings.Contains(line, ":"+ChainPrefix) || strings.Contains(line, "-A "+ChainPrefix) {
			b.WriteString(line)
		}
	}
	return b.String()
}

// TestNeighbors asserts that nothing that the programmer does changes rules of others, and that
// Cleanup leaves nothing but these.
func TestNeighbors(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		c.addForeign(t, variant)
		before := map[model.Family]string{}
		for _, family := range families {
			before[family] = c.inHost.rules(t, family, variant)
			c.set(c.web("web", family, 1, 0, 1), none("none", family, 2))
		}
		untouched := func(step string) {
			t.Helper()
			for _, family := range families {
				rest := c.inHost.rules(t, family, variant)
				require.NotEqual(t, before[family], rest, step)
				for line := range strings.Lines(before[family]) {
					require.Contains(t, rest, line, step)
				}
			}
		}
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		untouched("Replace")
		require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{
			{Before: c.web("web", model.IPv4, 1, 0, 1)}, {After: c.web("new", model.IPv6, 3, 2)},
		}))
		untouched("Apply")
		require.NoError(t, c.inHost.Cleanup(t.Context()))
		for _, family := range families {
			require.Equal(t, before[family], c.inHost.rules(t, family, variant))
		}
		require.NoError(t, c.inHost.Cleanup(t.Context()), "nothing left to clean")
		require.ErrorContains(t, c.inHost.Apply(t.Context(), []view.Change{{After: c.web("new", model.IPv6, 3, 2)}}), "call Replace first")
	})
}

// TestCleanupOfBothVariants asserts that the programmer of either variant removes what both
// created, and loads no legacy table.
func TestCleanupOfBothVariants(t *testing.T) {
	c := newCluster(t, Options{Variant: NFT})
	c.set(c.web("web", model.IPv4, 1, 0), c.web("web", model.IPv6, 1, 0))
	require.NoError(t, c.inHost.Replace(t.Context(), c.state))
	require.NoError(t, c.inHost.Cleanup(t.Context()))
	names, err := c.a.Run(t.Context(), "cat", "/proc/self/net/ip_tables_names")
	require.NoError(t, err)
	require.Empty(t, names)

	legacy := newInHost(t, c.a.Host, Options{Variant: Legacy})
	for _, cleaner := range []*inHost{legacy, c.inHost} {
		for _, p := range []*inHost{legacy, c.inHost} {
			require.NoError(t, p.Replace(t.Context(), c.state))
		}
		require.NoError(t, cleaner.Cleanup(t.Context()))
		for _, family := range families {
			for _, variant := range []Variant{NFT, Legacy} {
				require.NotContains(t, c.inHost.rules(t, family, variant), ChainPrefix)
			}
		}
	}
}

// TestOtherVariant asserts that what an earlier run left in the other variant stays as long as the
// used variant lacks some of it, like the rules of any other programmer. After its removal, it does
// not come back.
func TestOtherVariant(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		for i := range byte(3) {
			c.set(c.web(string('a'+rune(i)), model.IPv4, i, 0, 1))
		}
		other := map[Variant]Variant{NFT: Legacy, Legacy: NFT}[variant]
		old := newInHost(t, c.a.Host, Options{Variant: other})
		require.NoError(t, old.Replace(t.Context(), c.state))
		p := takeover.New(c.inHost, []takeover.Other{{Name: "other", Cleanup: c.inHost.RetireOtherVariant}}, slog.New(slog.DiscardHandler))
		serves := func(want bool) {
			t.Helper()
			require.NoError(t, c.a.Do(func() error {
				got, err := c.inHost.OtherVariantServes(model.IPv4)
				require.Equal(t, want, got)
				return err
			}))
		}
		stays := func() {
			t.Helper()
			serves(true)
			for i := range byte(3) {
				require.Contains(t, old.rules(t, model.IPv4, other), "/"+string('a'+rune(i))+":p/TCP")
			}
		}
		for _, refused := range []string{"-d 10.96.0.1/32", "-j DNAT"} {
			c.inHost.refuse = func(input []byte) string {
				if bytes.Contains(input, []byte(refused)) {
					return "iptables-restore: line 7 failed"
				}
				return ""
			}
			require.Error(t, p.Replace(t.Context(), c.state))
			stays()
		}
		c.inHost.refuse = nil
		require.NoError(t, p.Replace(t.Context(), c.state))
		require.NotContains(t, old.rules(t, model.IPv4, other), ChainPrefix)
		serves(false)
		require.NoError(t, old.Replace(t.Context(), c.state))
		require.NoError(t, p.Replace(t.Context(), c.state))
		require.NotContains(t, old.rules(t, model.IPv4, other), ChainPrefix)
		c.requireFresh(t)
	})
}

// TestOtherVariantStays asserts that a failure to remove what the other variant holds is reported,
// and that programming goes on.
func TestOtherVariantStays(t *testing.T) {
	c := newCluster(t, Options{Variant: NFT})
	old := newInHost(t, c.a.Host, Options{Variant: Legacy})
	require.NoError(t, old.Replace(t.Context(), c.state))
	var log bytes.Buffer
	p := newInHost(t, c.a.Host, Options{Variant: NFT, Log: slog.New(slog.NewTextHandler(&log, nil))})
	refuse := func(input []byte) string {
		if bytes.Contains(input, []byte("-X "+ChainPrefix)) && !bytes.Contains(input, []byte(checkChain)) {
			return "iptables-restore: line 7 failed"
		}
		return ""
	}
	p.refuse = refuse
	require.NoError(t, p.Replace(t.Context(), c.state))
	require.ErrorContains(t, p.RetireOtherVariant(t.Context()), "line 7 failed")
	p.refuse = nil
	require.NoError(t, p.RetireOtherVariant(t.Context()))
	require.NoError(t, old.Replace(t.Context(), c.state))
	require.Empty(t, log.String())
	p.refuse = refuse
	require.NoError(t, p.Replace(t.Context(), c.state))
	require.Contains(t, log.String(), "remove them with slicecast-agent cleanup")
}

// TestInvalid asserts that packets which conntrack finds invalid are dropped, unless conntrack is
// liberal.
func TestInvalid(t *testing.T) {
	c := newCluster(t, Options{Variant: NFT})
	const rule = "-A SLICECAST-FORWARD -m conntrack --ctstate INVALID "
	require.NoError(t, c.inHost.Replace(t.Context(), c.state))
	require.Contains(t, c.inHost.rules(t, model.IPv6, NFT), rule)
	_, err := c.a.Run(t.Context(), "sysctl", "-w", "net.netfilter.nf_conntrack_tcp_be_liberal=1")
	require.NoError(t, err)
	require.NoError(t, c.inHost.Replace(t.Context(), c.state))
	require.NotContains(t, c.inHost.rules(t, model.IPv6, NFT), rule)
}

// TestCleanupFails asserts that Cleanup returns an error if something is left.
func TestCleanupFails(t *testing.T) {
	c := newCluster(t, Options{Variant: Legacy})
	c.set(c.web("web", model.IPv4, 1, 0))
	require.NoError(t, c.inHost.Replace(t.Context(), c.state))
	c.inHost.refuse = func([]byte) string { return "Permission denied (you must be root)" }
	require.ErrorContains(t, c.inHost.Cleanup(t.Context()), "clean up with iptables-legacy")
}

// TestRestart asserts that a new process writes nothing if everything is as it should be, and
// repairs no more than what is wrong.
func TestRestart(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		for _, family := range families {
			// These are enough for forks in the trees, and for a Service port with groups.
			for i := range byte(40) {
				c.set(c.web(string('a'+rune(i)), family, i, int(i)%4, (int(i)+1)%4), none(string('A'+rune(i)), family, 100+i))
			}
			big := c.web("big", family, 200)
			for i := range uint16(3 * maxPlain) {
				big.Cluster = view.NewBackends(append(big.Cluster.List(), c.backends(family, 9000+i, 1).List()...)...)
			}
			c.set(big)
		}
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, 17), servicePort), 5, patient)
		require.True(t, r.All(testenv.Answered), "%v", r)
		withCounters := func() string {
			return ours(c.inHost.rules(t, model.IPv4, variant, "-c")) + ours(c.inHost.rules(t, model.IPv6, variant, "-c"))
		}
		before := withCounters()

		again := newInHost(t, c.a.Host, Options{Variant: variant})
		require.NoError(t, again.Replace(t.Context(), c.state))
		require.Zero(t, again.restoredBytes())
		require.Equal(t, before, withCounters())

		// Somebody flushes one chain, removes a hook and leaves a chain of an older version.
		for _, args := range []string{"-F SLICECAST-POSTROUTING", "-D OUTPUT -j SLICECAST-SERVICES", "-N SLICECAST-OLD", "-I INPUT -j SLICECAST-OLD"} {
			_, err := c.a.Run(t.Context(), programName(model.IPv4, variant), append([]string{"-t", "nat"}, strings.Fields(args)...)...)
			require.NoError(t, err)
		}
		require.NoError(t, again.Replace(t.Context(), c.state))
		require.Len(t, again.restored, 1)
		require.Less(t, again.restoredBytes(), 500, "just the one chain and the old one")
		third := newInHost(t, c.a.Host, Options{Variant: variant})
		require.NoError(t, third.Replace(t.Context(), c.state))
		require.Zero(t, third.restoredBytes())
		r = c.a.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, 17), servicePort), 5, patient)
		require.True(t, r.All(testenv.Answered), "%v", r)
		require.NotContains(t, c.inHost.rules(t, model.IPv4, variant), "SLICECAST-OLD")

		// Everything is flushed, as by a firewall's restart.
		for _, table := range []string{"nat", "filter"} {
			for _, what := range []string{"-F", "-X"} {
				_, err := c.a.Run(t.Context(), programName(model.IPv4, variant), "-t", table, what)
				require.NoError(t, err)
			}
		}
		require.NoError(t, third.Replace(t.Context(), c.state))
		require.Equal(t, stripCounters(before), stripCounters(withCounters()))
	})
}

func stripCounters(rules string) string {
	var b strings.Builder
	for line := range strings.Lines(rules) {
		if i := strings.Index(line, "["); i >= 0 {
			line = line[:i] + line[strings.Index(line, "]")+1:]
		}
		b.WriteString(line)
	}
	return b.String()
}

// TestApplyWritesLittle counts the bytes that go to the kernel when one backend is removed.
func TestApplyWritesLittle(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		for i := range byte(100) {
			c.set(c.web(string('a'+rune(i)), model.IPv4, i, 0, 1, 2, 3))
		}
		big := c.web("big", model.IPv4, 200)
		var backends []view.Backend
		for i := range uint16(5000) {
			backends = append(backends, c.backends(model.IPv4, 9000+i, 1).List()...)
		}
		big.Cluster = view.NewBackends(backends...)
		c.set(big)
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		c.inHost.restoredBytes()

		require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{Before: c.web("a", model.IPv4, 0, 0, 1, 2, 3), After: c.web("a", model.IPv4, 0, 0, 1, 3)}}))
		require.Len(t, c.inHost.restored, 1)
		require.Equal(t, 3, bytes.Count(c.inHost.restored[0], []byte("-A ")), "%s", c.inHost.restored[0])
		c.inHost.restoredBytes()

		less := *big
		less.Cluster = view.NewBackends(slices.Delete(backends, 70, 71)...)
		require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{Before: big, After: &less}}))
		require.Len(t, c.inHost.restored, 1)
		rules := bytes.Count(c.inHost.restored[0], []byte("-A "))
		require.Less(t, rules, 250, "the groups' chances and one group")
		c.inHost.restoredBytes()

		require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{Before: &less, After: &less}}))
		require.Zero(t, c.inHost.restoredBytes())
	})
}

// TestOptions asserts that New refuses options that it cannot follow.
func TestOptions(t *testing.T) {
	_, err := New(Options{Variant: "nftables"})
	require.ErrorContains(t, err, `iptables variant is "nftables"`)
	_, err = New(Options{MasqueradeMark: 3})
	require.ErrorContains(t, err, "a single bit")
}
