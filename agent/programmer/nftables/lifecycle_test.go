// These tests prove that tables in a real kernel are found, repaired, replaced and removed without
// a lost connection, whatever others do to them, and that what the kernel refuses does not keep the
// rest from being programmed.
package nftables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// nft runs the nft command in the programmer's namespace, as others may.
func (c *testCluster) nft(t testing.TB, args ...string) {
	t.Helper()
	_, err := c.a.Run(t.Context(), "nft", args...)
	require.NoError(t, err)
}

// generation returns the generation number of the ruleset, which shows whether anything was
// written.
func (c *testCluster) generation(t testing.TB) uint32 {
	t.Helper()
	g, err := c.inHost.conn.Generation()
	require.NoError(t, err)
	return g
}

// message returns a message about a table, with further attributes.
func message(t nft.Table, kind, flags uint16, rest func(*nft.Messages)) *nft.Messages {
	m := &nft.Messages{Table: t}
	at := m.Begin(unix.NFNL_SUBSYS_NFTABLES<<8|kind, flags)
	m.Buf = append(m.Buf, t.Number, unix.NFNETLINK_V0, 0, 0)
	m.Text(unix.NFTA_TABLE_NAME, t.Name)
	rest(m)
	m.End(at)
	return m
}

// web returns a Service port with one cluster IP.
func (c *testCluster) web(family model.Family, last byte, pods ...int) *view.ServicePort {
	return &view.ServicePort{
		ID: serviceID(fmt.Sprint("web", last), model.TCP, family), Frontends: []view.Frontend{clusterIP(vip(family, last))}, Cluster: c.backends(family, tcpPort, pods...),
	}
}

// stream makes connections from the client to one address after the other until stop is called.
// stop asserts that all of them were answered. A moment without the table would be an error,
// because nothing else knows these addresses.
func (c *testCluster) stream(t *testing.T, to ...netip.AddrPort) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	results := make([]testenv.Result, len(to))
	var wait sync.WaitGroup
	for i, address := range to {
		wait.Go(func() {
			for ctx.Err() == nil {
				r := c.client.Probe(context.WithoutCancel(ctx), testenv.TCP, address, 20, patient)
				results[i].Attempts = append(results[i].Attempts, r.Attempts...)
			}
		})
	}
	return func() {
		t.Helper()
		cancel()
		wait.Wait()
		for i, r := range results {
			require.True(t, r.All(testenv.Answered), "%v: %v", to[i], r)
		}
	}
}

// damage holds nft commands by which others may damage the table, by name. They are formats whose
// arguments are the family and an address.
var damage = map[string]string{
	"flush ruleset":    "flush ruleset",
	"delete table":     "delete table %s slicecast",
	"flush chain":      "flush chain %s slicecast services",
	"delete element":   "delete element %s slicecast frontends { %s . tcp . 80 }",
	"flush map":        "flush map %s slicecast cluster-endpoints",
	"flush vmap":       "flush map %s slicecast policies",
	"add rule":         "add rule %s slicecast services drop",
	"insert rule":      "insert rule %s slicecast prerouting ct state new drop",
	"chain policy":     "chain %s slicecast forward { policy drop; }",
	"dormant":          "add table %s slicecast { flags dormant; }",
	"other priority":   "delete chain %s slicecast postrouting; add chain %s slicecast postrouting { type nat hook postrouting priority 0; }",
	"add base chain":   "add chain %s slicecast other { type filter hook forward priority 0; policy drop; }",
	"add element":      "add element %s slicecast cluster-endpoints { 0x77000 . 0x3 : %s . 80 }",
	"add frontend":     "add element %s slicecast frontends { %s . udp . 99 : 0x77001 }",
	"add set":          "add set %s slicecast other { type mark; }",
	"add sources":      "add set %s slicecast sources-7 { type mark; }",
	"wrong policy":     "add element %s slicecast policies { 0xfff : goto refuse }",
	"wrong picks":      "add element %s slicecast cluster-picks { 0x1 : goto refuse }",
	"stray size":       "add element %s slicecast cluster-sizes { 0x66000 : 0x3 }",
	"stray number":     "add element %s slicecast cluster-numbers { 0x1000 . 0x3 : 0x99 }",
	"stray backend":    "add element %s slicecast cluster-backends { 0x1000 . 0x99 : %s . 80 }",
	"stray cluster IP": "add element %s slicecast cluster-ips { %s }",
	"stray hairpin":    "add element %s slicecast hairpins { %[2]s . %[2]s }",
}

// TestRepair asserts that Watch reports whatever others do to the tables, and that Replace repairs
// it.
func TestRepair(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	for _, family := range families {
		sticky := c.sticky(family, transports[0], time.Hour, []int{0, 2}, []int{1})
		sticky.Frontends = []view.Frontend{clusterIP(vip(family, 3)), localPolicy(nodePort(30001))}
		c.set(c.web(family, 1, 0, 2), c.web(family, 2, 1, 2), sticky)
	}
	c.replace(t)
	wanted := [2]holds{c.inHost.families[0].holds(t), c.inHost.families[1].holds(t)}

	lost := make(chan string, 100)
	stop := c.watch(t, lost)

	for name, command := range damage {
		t.Run(name, func(t *testing.T) {
			eachFamily(t, func(t *testing.T, family model.Family) {
				nft := map[model.Family]string{model.IPv4: "ip", model.IPv6: "ip6"}[family]
				address := vip(family, 200).String()
				if name == "delete element" {
					address = vip(family, 1).String()
				}
				command := strings.NewReplacer("%s slicecast", nft+" slicecast", "%[2]s", address, "%s", address).Replace(command)
				c.nft(t, command)
				select {
				case reason := <-lost:
					t.Log(reason)
				case <-time.After(patient.Timeout):
					require.Fail(t, "nobody noticed")
				}
				c.replace(t)
				require.Equal(t, wanted, [2]holds{c.inHost.families[0].holds(t), c.inHost.families[1].holds(t)})
				r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(family, 1), servicePort), 1, patient)
				require.True(t, r.All(testenv.Answered))
				for len(lost) > 0 { // further reports of the same damage
					<-lost
				}
			})
		})
	}

	// Watch ignores changes elsewhere, and the programmer's own.
	c.nft(t, "add table ip other; add chain ip other slicecast; delete table ip other")
	c.apply(t, c.web(model.IPv4, 1, 1))
	big := c.web(model.IPv4, 1)
	big.Cluster = nobodys(5000)
	c.apply(t, big) // too large for notifications
	c.apply(t, c.web(model.IPv4, 1, 1))
	stop()
	require.Empty(t, lost)
}

// TestRestart asserts that another process finds everything as it is and changes only what is
// wanted otherwise, while connections go on.
func TestRestart(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	var addresses []netip.AddrPort
	for _, family := range families {
		sticky := c.sticky(family, transports[0], time.Hour, []int{0, 1, 2}, []int{0, 1})
		sticky.Frontends = []view.Frontend{localPolicy(external(vip(family, 2))), localPolicy(nodePort(30002))}
		sticky.Frontends[0].Kind = view.LoadBalancer
		sticky.Frontends[0].Sources = []netip.Prefix{netip.PrefixFrom(c.client.Addr(family == model.IPv6), 24)}
		c.set(c.web(family, 1, 1, 2), sticky)
		addresses = append(addresses, netip.AddrPortFrom(vip(family, 1), servicePort), netip.AddrPortFrom(vip(family, 2), servicePort),
			netip.AddrPortFrom(c.a.Addr(family == model.IPv6), 30002))
	}
	c.replace(t)
	stop := c.stream(t, addresses...)
	defer stop()

	for range 20 {
		c.restart()
		before := c.generation(t)
		c.replace(t)
		require.Equal(t, before, c.generation(t), "nothing is touched")
	}
	// While no process runs, backends come and go, a Service takes over another one's address, and a
	// timeout changes.
	for _, family := range families {
		moved := c.web(family, 1, 0, 2, 3)
		moved.ID.Service.Name = "renamed"
		delete(c.state.Ports, c.web(family, 1).ID)
		sticky := *c.state.Ports[serviceID("sticky", model.TCP, family)]
		sticky.Affinity, sticky.Cluster = 2*time.Hour, c.backends(family, tcpPort, 3)
		c.set(moved, &sticky, c.web(family, 7, 0))
	}
	c.restart()
	c.replace(t)
	// A different Node changes rules only.
	c.state.Node.Pods = view.PodDetector{Interface: "pod1"}
	c.state.Node.LocalhostNodePorts = true
	c.replace(t)
	// A table of another version is replaced as a whole.
	for range 3 {
		c.nft(t, "add set ip slicecast sources-7 { type mark; }; add set ip6 slicecast sources-7 { type mark; }")
		c.replace(t)
		require.NotContains(t, c.inHost.list(t, model.IPv4), "sources-7")
		c.nft(t, "add table ip slicecast-stand-in") // as if the process had ended meanwhile
	}
	c.replace(t)
	tables, err := c.a.Run(t.Context(), "nft", "list", "tables")
	require.NoError(t, err)
	require.Equal(t, []string{"table ip slicecast", "table ip6 slicecast"}, strings.Split(strings.TrimSpace(tables), "\n"))
	for i := range 50 {
		for _, family := range families {
			c.apply(t, c.web(family, 7, i%4))
			renamed := c.web(family, 1, slices.Compact([]int{i % 4, 3})...)
			renamed.ID.Service.Name = "renamed"
			c.apply(t, renamed)
		}
	}
}

// TestOtherLayout asserts that a table of an earlier build, which identifies backends by numbers
// alone, is replaced without an interruption.
func TestOtherLayout(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	var addresses []netip.AddrPort
	for _, family := range families {
		sticky := c.sticky(family, transports[0], time.Hour, []int{0, 1}, nil)
		sticky.Frontends = []view.Frontend{clusterIP(vip(family, 2))}
		c.set(c.web(family, 1, 2), sticky)
		addresses = append(addresses, netip.AddrPortFrom(vip(family, 1), servicePort), netip.AddrPortFrom(vip(family, 2), servicePort))
	}
	c.replace(t)
	stop := c.stream(t, addresses...)
	for range 5 {
		// No rule uses this map, so it can be added with another form.
		c.nft(t, "add map ip slicecast local-endpoints-part-2 { type mark : ipv4_addr . inet_service; }; "+
			"add map ip6 slicecast local-endpoints-part-2 { type mark : ipv6_addr . inet_service; }")
		var log bytes.Buffer
		c.inHost = newInHost(t, c.a.Host, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
		c.replace(t)
		require.Equal(t, 2, strings.Count(log.String(), "Recreating the nftables table"), &log)
		for _, f := range c.inHost.families {
			f.holds(t)
		}
	}
	stop()
}

// TestTableOfAnother asserts that Services are served while the table cannot be created because
// another process owns it, and that no connection is lost meanwhile or when that process ends.
func TestTableOfAnother(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	const tableOwner = 2 // NFT_TABLE_F_OWNER: the table exists as long as its owner's socket is open
	var owner *nft.Conn
	require.NoError(t, c.a.Do(func() (err error) {
		owner, err = nft.Dial()
		return err
	}))
	for _, f := range c.inHost.families {
		m := message(f.Table, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, func(m *nft.Messages) { m.BigUint32(unix.NFTA_TABLE_FLAGS, tableOwner) })
		require.NoError(t, owner.Commit(m.Batch()))
	}
	var addresses []netip.AddrPort
	serve := func(last byte) {
		for _, family := range families {
			c.set(c.web(family, last, 2))
			addresses = append(addresses, netip.AddrPortFrom(vip(family, last), servicePort))
		}
		require.ErrorIs(t, c.inHost.Replace(t.Context(), c.state), unix.EPERM)
	}
	serve(1)
	stop := c.stream(t, addresses...)
	serve(2)
	c.restart()
	serve(3)
	for _, a := range addresses {
		require.True(t, c.client.Probe(t.Context(), testenv.TCP, a, 1, patient).All(testenv.Answered))
	}
	owner.Close() // and the kernel removes the table
	c.replace(t)
	stop()
	tables, err := c.a.Run(t.Context(), "nft", "list", "tables")
	require.NoError(t, err)
	require.NotContains(t, tables, StandInTable)
	for _, f := range c.inHost.families {
		f.holds(t)
	}
}

// TestOneFamilyOut asserts that if nothing of one family can be programmed, the other one is, and
// that this is reported once, however many Service ports there are.
func TestOneFamilyOut(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	gone, wanted := c.web(model.IPv6, 1, 2), c.web(model.IPv6, 2, 2)
	c.set(c.web(model.IPv4, 1, 2), gone)
	c.replace(t)
	four, six := c.inHost.families[0], c.inHost.families[1]
	works := six.conn
	// The zero file descriptor is the standard input, which is not a socket.
	broken := &nft.Conn{Socket: &netlink.Socket{Limit: works.Limit}, Watcher: works.Watcher}
	leftOut := func(err error, families ...model.Family) {
		t.Helper()
		ports, failed := programmer.Split(err, nil)
		require.Empty(t, ports)
		require.Equal(t, families, slices.Sorted(maps.Keys(failed)))
	}
	answers := func(a netip.Addr) bool {
		return c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(a, servicePort), 1, patient).All(testenv.Answered)
	}

	six.conn = broken
	delete(c.state.Ports, gone.ID)
	c.set(c.web(model.IPv4, 2, 2), wanted)
	for range 2 {
		leftOut(c.inHost.Replace(t.Context(), c.state), model.IPv6)
	}
	require.True(t, answers(vip(model.IPv4, 2)))
	more := c.web(model.IPv4, 3, 2)
	c.set(more)
	require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{After: more}}))
	require.True(t, answers(vip(model.IPv4, 3)))

	four.conn = broken
	leftOut(c.inHost.Replace(t.Context(), c.state), model.IPv4, model.IPv6)
	require.ErrorIs(t, c.inHost.Apply(t.Context(), []view.Change{{After: more}}), programmer.ErrReplaceFirst)

	four.conn, six.conn = works, works
	c.replace(t)
	require.True(t, answers(vip(model.IPv6, 2)))
	six.holds(t)
	require.NotContains(t, six.ports, gone.ID)
}

// TestKernelTakesNoServicePort asserts that a family counts as failed if the kernel refuses every
// Service port, however many there are. What the kernel holds stays as it is, even if the agent
// restarts. Service ports that are at fault themselves fail by themselves, even if the family has
// no others.
func TestKernelTakesNoServicePort(t *testing.T) {
	t.Parallel()
	eachFamily(t, func(t *testing.T, family model.Family) {
		c := newCluster(t)
		for i := range byte(3) {
			c.set(c.web(family, i, 2))
		}
		c.replace(t)
		before := c.inHost.list(t, family)
		reason := ""
		out := func(err error) {
			t.Helper()
			ports, failed := programmer.Split(err, c.inHost.Families())
			require.Empty(t, ports)
			require.Len(t, failed, 1)
			if reason != "" {
				require.EqualError(t, failed[family], reason, "the node is nacked once for each reason")
			}
			reason = failed[family].Error()
			require.Equal(t, before, c.inHost.list(t, family))
		}
		limit := c.inHost.conn.Limit
		c.inHost.conn.Limit = 100
		changed := c.web(family, 0, 3)
		out(c.inHost.Apply(t.Context(), []view.Change{{Before: c.web(family, 0, 2), After: changed}}))
		c.set(changed)
		for range 2 {
			out(c.inHost.Replace(t.Context(), c.state))
			for i := range byte(3) {
				c.set(c.web(family, i, 3))
			}
		}
		c.restart()
		c.inHost.conn.Limit = 100
		out(c.inHost.Replace(t.Context(), c.state))
		c.inHost.conn.Limit = limit
		c.replace(t)
		c.inHost.families[slices.Index(families, family)].holds(t)

		addr := func(i int) netip.Addr {
			a := vip(family, 0).AsSlice()
			copy(a[len(a)-3:], []byte{byte(i >> 16), byte(i >> 8), byte(i)})
			out, _ := netip.AddrFromSlice(a)
			return out
		}
		c.state.Ports = map[view.ServicePortID]*view.ServicePort{}
		var many []view.Backend
		for i := range maxBackends + 1 {
			many = append(many, view.Backend{Address: netip.AddrPortFrom(addr(i), tcpPort)})
		}
		for i := range byte(2) {
			p := c.web(family, 10+i)
			p.Cluster = view.NewBackends(many...)
			c.set(p)
		}
		ports, ok := programmer.PortErrors(c.inHost.Replace(t.Context(), c.state))
		require.True(t, ok)
		require.Len(t, ports, 2)
	})
}

// TestForeignSets asserts that what others put into the table is removed without creating the table
// again, which would lose affinity.
func TestForeignSets(t *testing.T) {
	t.Parallel()
	var log strings.Builder
	c := newCluster(t)
	c.inHost = newInHost(t, c.a.Host, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	c.set(c.web(model.IPv4, 1, 0, 2))
	c.replace(t)
	wanted := c.inHost.families[0].holds(t)
	for name, command := range map[string]string{
		"anonymous set":                "insert rule ip slicecast prerouting ip saddr { 198.51.100.1, 198.51.100.7 } counter",
		"anonymous map":                "insert rule ip slicecast services ip saddr vmap { 198.51.100.1 : accept, 198.51.100.2 : drop }",
		"anonymous set of a new chain": "add chain ip slicecast foreign; add rule ip slicecast foreign ip saddr { 198.51.100.1, 198.51.100.7 } counter; insert rule ip slicecast prerouting jump foreign",
		"named set":                    "add set ip slicecast mine { type ipv4_addr; }; insert rule ip slicecast prerouting ip saddr @mine counter",
		"map of chains":                "add chain ip slicecast foreign; add map ip slicecast mine { type ipv4_addr : verdict; }; add element ip slicecast mine { 198.51.100.1 : jump foreign }",
	} {
		t.Run(name, func(t *testing.T) {
			c.nft(t, command)
			c.replace(t)
			require.Equal(t, wanted, c.inHost.families[0].holds(t))
			require.NotContains(t, log.String(), "Recreating the nftables table")
		})
	}
}

// TestRefused asserts that a Service port which the kernel refuses does not keep the others from
// being programmed, and that it is programmed once the kernel accepts it.
func TestRefused(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	// Two Service ports with one address are never wanted at once. Here they stand for what the kernel
	// refuses.
	rival := c.web(model.IPv4, 5, 3)
	rival.ID.Service.Name = "rival"
	good := c.state.Ports
	for i := range byte(10) {
		c.set(c.web(model.IPv4, i, 2), c.web(model.IPv6, i, 2))
	}
	blamed := func(t *testing.T, err error, of ...view.ServicePortID) {
		t.Helper()
		ports, ok := programmer.PortErrors(err)
		require.True(t, ok, "%v", err)
		require.Len(t, ports, 1, "%v", err)
		require.Contains(t, of, ports[0].ID)
		require.ErrorContains(t, err, "add elements of set frontends")
	}
	answered := func(t *testing.T) {
		t.Helper()
		for i := range byte(10) {
			for _, family := range families {
				require.True(t, c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(family, i), servicePort), 1, patient).All(testenv.Answered))
			}
		}
	}
	fifth := c.web(model.IPv4, 5).ID
	t.Run("Replace", func(t *testing.T) {
		c.set(rival)
		blamed(t, c.inHost.Replace(t.Context(), c.state), rival.ID, fifth)
		answered(t)
		blamed(t, c.inHost.Replace(t.Context(), c.state), rival.ID, fifth) // a second time
		answered(t)
		delete(good, rival.ID)
		c.replace(t)
		answered(t)
		c.inHost.families[0].holds(t)
	})
	t.Run("Apply", func(t *testing.T) {
		var changes []view.Change
		for i := range byte(10) {
			changes = append(changes, view.Change{Before: c.web(model.IPv4, i, 2), After: c.web(model.IPv4, i, 3)})
		}
		blamed(t, c.inHost.Apply(t.Context(), append(slices.Clone(changes), view.Change{After: rival})), rival.ID)
		answered(t)
		for id := range c.inHost.families[0].ports {
			require.Equal(t, c.backends(model.IPv4, tcpPort, 3).List()[0].Address, c.inHost.families[0].ports[id].slots[cluster][0].address())
		}
		c.inHost.families[0].holds(t)
		// The address moves from the last to the first of several changes, beside one that is refused
		// again.
		moved := c.web(model.IPv4, 20, 3)
		moved.ID = fifth
		other := c.web(model.IPv4, 6, 3)
		other.ID.Service.Name = "other rival"
		blamed(t, c.inHost.Apply(t.Context(), []view.Change{{After: rival}, {After: other}, {Before: c.web(model.IPv4, 5, 3), After: moved}}), other.ID)
		answered(t)
		c.inHost.families[0].holds(t)
	})
}

// TestLongTransactions asserts that what is too long for one transaction takes several, and that no
// connection is lost in between.
func TestLongTransactions(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.inHost.conn.Limit = 90000
	pods := map[model.Family]view.Backends{model.IPv4: c.backends(model.IPv4, tcpPort, 0, 1), model.IPv6: c.backends(model.IPv6, tcpPort, 0, 1)}
	// All backends are pods, so each connection is answered by one.
	big := func(family model.Family, from, count int, affinity time.Duration) *view.ServicePort {
		p := c.web(family, 1)
		p.Affinity = affinity
		var backends []view.Backend
		for pod := range pods[family].All() {
			for port := from; port < from+count; port++ {
				backends = append(backends, view.Backend{Address: netip.AddrPortFrom(pod.Address.Addr(), uint16(port)), Local: true})
			}
		}
		p.Cluster = view.NewBackends(backends...)
		return p
	}
	redirect := func(from, to int) {
		for _, pod := range c.pods[:2] {
			for _, nft := range []string{"ip", "ip6"} {
				_, err := pod.Run(t.Context(), "nft", fmt.Sprintf(
					"add table %[1]s t; add chain %[1]s t c { type nat hook prerouting priority 0; }; add rule %[1]s t c tcp dport %[2]d-%[3]d redirect to :%[4]d", nft, from, to, tcpPort))
				require.NoError(t, err)
			}
		}
	}
	redirect(10000, 20000)
	for _, family := range families {
		c.set(big(family, 10000, 1500, 0))
		for i := range byte(150) {
			c.set(c.web(family, 2+i, 0))
		}
	}
	c.replace(t)
	stop := c.stream(t, netip.AddrPortFrom(vip(model.IPv4, 1), servicePort), netip.AddrPortFrom(vip(model.IPv6, 1), servicePort), netip.AddrPortFrom(vip(model.IPv4, 151), servicePort))
	check := func() {
		t.Helper()
		for _, f := range c.inHost.families {
			f.holds(t)
		}
	}
	check()
	for _, affinity := range []time.Duration{0, time.Hour} {
		for _, from := range []int{10000, 12000, 11000, 12000} {
			for _, family := range families {
				c.apply(t, big(family, from, 1500, affinity))
			}
			check()
		}
	}
	c.restart()
	c.inHost.conn.Limit = 90000
	for _, family := range families {
		c.set(big(family, 13000, 1400, 0), c.web(family, 151, 1))
	}
	c.replace(t)
	check()
	stop()
	for _, family := range families {
		require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{Before: c.state.Ports[c.web(family, 1).ID]}}))
	}
	check()
}

// TestCleanup asserts that nothing of the tables is left, and that tables of others are not
// touched.
func TestCleanup(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	require.NoError(t, c.inHost.Cleanup(t.Context()), "nothing there")
	c.nft(t, "add table ip other; add chain ip other slicecast; add table inet slicecast")
	before, err := c.a.Run(t.Context(), "nft", "list", "ruleset")
	require.NoError(t, err)
	serves := func(want bool) {
		t.Helper()
		for _, family := range families {
			require.NoError(t, c.a.Do(func() error {
				got, err := Serves(family)
				require.Equal(t, want, got)
				return err
			}))
		}
	}
	serves(false)
	c.set(c.web(model.IPv4, 1, 0), c.web(model.IPv6, 1, 0))
	c.replace(t)
	serves(true)
	require.NoError(t, c.a.Do(func() error { return Cleanup(t.Context()) }))
	serves(false)
	after, err := c.a.Run(t.Context(), "nft", "list", "ruleset")
	require.NoError(t, err)
	require.Equal(t, before, after)
	err = c.inHost.Apply(t.Context(), []view.Change{{Before: c.web(model.IPv4, 1, 0), After: c.web(model.IPv4, 1, 1)}})
	require.ErrorIs(t, err, unix.ENOENT, "the table is gone")
	require.ErrorIs(t, c.inHost.Apply(t.Context(), []view.Change{{After: c.web(model.IPv4, 1, 1)}}), programmer.ErrReplaceFirst)
	c.replace(t)
	require.NoError(t, c.inHost.Cleanup(t.Context()))
	require.ErrorIs(t, c.inHost.Apply(t.Context(), []view.Change{{After: c.web(model.IPv4, 1, 1)}}), programmer.ErrReplaceFirst)
}

// TestRestless asserts that a table is read correctly while others keep changing their tables, and
// while the kernel moves elements.
func TestRestless(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	for i := range byte(50) {
		for _, family := range families {
			p := c.web(family, i)
			var backends []view.Backend
			for j := range 2 * int(i) { // creates many chains
				backends = append(backends, view.Backend{Address: netip.AddrPortFrom(vip(family, i), uint16(1000+j))})
			}
			p.Cluster = view.NewBackends(backends...)
			c.set(p)
		}
	}
	c.replace(t)
	other := newInHost(t, c.a.Host, Options{})
	ctx, cancel := context.WithCancel(t.Context())
	var wait sync.WaitGroup
	wait.Go(func() {
		for ctx.Err() == nil {
			m := &nft.Messages{Table: nft.Table{Family: nft.FamilyOf(model.IPv4), Name: "other"}}
			m.AddTable()
			m.RemoveTable()
			if err := other.conn.Commit(m.Batch()); err != nil {
				t.Error(err)
				return
			}
		}
	})
	defer wait.Wait()
	defer cancel()
	require.Eventually(t, func() bool {
		ask := message(nft.Table{Family: nft.FamilyOf(model.IPv4), Name: Table}, unix.NFT_MSG_GETRULE, 0, func(*nft.Messages) {})
		return errors.Is(c.inHost.conn.Dump(&ask.Writer, func(netlink.Message) {}), netlink.ErrInterrupted)
	}, patient.Timeout, time.Millisecond, "or else this tests nothing")
	for i := range 20 {
		// After a large change, the kernel goes on resizing a map for a while, and elements move.
		p := c.web(model.IPv4, 100)
		p.Cluster = nobodys(1 + i%2*10000)
		c.apply(t, p)
		for _, f := range c.inHost.families {
			f.holds(t)
		}
		c.restart()
		c.replace(t)
		for _, f := range c.inHost.families {
			f.holds(t)
		}
	}
}
