// These tests prove that a Service port that the kernel refuses does not keep the others from being
// programmed, and that a failure of everything is not blamed on single Service ports. The refusals
// are made up in front of a real kernel, except for those of the xtables lock.
package iptables

import (
	"bytes"
	"net/netip"
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// TestRejectedPort asserts that a bad Service port does not keep the others from being programmed.
func TestRejectedPort(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		answers := func(last byte) testenv.Result {
			return c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, last), servicePort), 3, patient)
		}
		bad := func(p *view.ServicePort) *view.ServicePort {
			p.Cluster = view.NewBackends(append(p.Cluster.List(), c.backends(model.IPv6, tcpPort, 2).List()...)...)
			return p
		}
		for i := range byte(20) {
			c.set(c.web(string('a'+rune(i)), model.IPv4, i, 0, 1))
		}
		c.set(bad(c.web("d", model.IPv4, 3, 0)), bad(c.web("k", model.IPv4, 10)))
		rejected := func(err error, names ...string) {
			t.Helper()
			ports, ok := programmer.PortErrors(err)
			require.True(t, ok, "%v", err)
			var got []string
			for _, p := range ports {
				got = append(got, p.ID.Service.Name)
				require.ErrorContains(t, p, "fd00:10:180:1::1", "iptables' words and the line")
			}
			require.Equal(t, names, got)
		}
		rejected(c.inHost.Replace(t.Context(), c.state), "d", "k")
		rejected(c.inHost.Replace(t.Context(), c.state), "d", "k")
		require.True(t, answers(2).All(testenv.Answered))
		require.Zero(t, answers(3).Count(testenv.Answered))
		require.NotContains(t, c.inHost.rules(t, model.IPv4, variant), checkChain)

		rejected(c.inHost.Apply(t.Context(), []view.Change{
			{Before: c.web("a", model.IPv4, 0, 0, 1), After: bad(c.web("a", model.IPv4, 0, 0))},
			{Before: c.web("b", model.IPv4, 1, 0, 1), After: c.web("b", model.IPv4, 1, 3)},
			{Before: bad(c.web("d", model.IPv4, 3, 0)), After: c.web("d", model.IPv4, 3, 0)},
		}), "a")
		require.True(t, answers(0).All(testenv.Answered), "stays as it was")
		require.Equal(t, map[string]int{"pod3": 3}, answers(1).Backends())
		require.Equal(t, map[string]int{"pod0": 3}, answers(3).Backends(), "good again")

		// After an Apply that failed for another reason, there is no known state to return to.
		worse := bad(c.web("e", model.IPv4, 4))
		c.inHost.refuse = func([]byte) string { return "holding the xtables lock" }
		require.Error(t, c.inHost.Apply(t.Context(), []view.Change{{Before: c.web("e", model.IPv4, 4, 0, 1), After: worse}}))
		c.inHost.refuse = nil
		c.state.Ports = map[view.ServicePortID]*view.ServicePort{}
		c.set(worse, c.web("b", model.IPv4, 1, 3))
		rejected(c.inHost.Replace(t.Context(), c.state), "e")

		c.state.Ports = map[view.ServicePortID]*view.ServicePort{}
		c.set(bad(c.web("b", model.IPv4, 1, 0)), c.web("c", model.IPv4, 2, 0))
		rejected(c.inHost.Replace(t.Context(), c.state), "b")
		require.Equal(t, map[string]int{"pod3": 3}, answers(1).Backends(), "stays as it was")
		require.True(t, answers(2).All(testenv.Answered))
	})
}

// TestKernelRefuses tests the search with a kernel that does not say which rule it refuses, like
// the legacy variant's.
func TestKernelRefuses(t *testing.T) {
	c := newCluster(t, Options{Variant: Legacy})
	for i := range byte(9) {
		c.set(c.web(string('a'+rune(i)), model.IPv4, i, 0, 1))
	}
	c.inHost.refuse = func(input []byte) string {
		if bytes.Contains(input, []byte("-d 10.96.0.4/32")) {
			return "iptables-restore: line 7 failed"
		}
		return ""
	}
	err := c.inHost.Replace(t.Context(), c.state)
	ports, ok := programmer.PortErrors(err)
	require.True(t, ok, "%v", err)
	require.Len(t, ports, 1)
	require.Equal(t, "e", ports[0].ID.Service.Name)

	c.inHost.refuse = func([]byte) string { return "iptables-restore: line 1 failed" }
	change := []view.Change{{Before: c.web("a", model.IPv4, 0, 0, 1), After: c.web("a", model.IPv4, 0)}}
	err = c.inHost.Apply(t.Context(), change)
	_, ok = programmer.PortErrors(err)
	require.False(t, ok, "nothing works, so it is not the Service port: %v", err)
	require.ErrorContains(t, c.inHost.Apply(t.Context(), change), "call Replace first")
	c.inHost.refuse = nil
	require.NoError(t, c.inHost.Replace(t.Context(), c.state))
	require.NoError(t, c.inHost.Apply(t.Context(), change))
}

// TestRefusedAgain asserts that a Service port which the kernel always refuses, because it lacks
// SCTP, costs little, and is programmed once the kernel accepts it.
func TestRefusedAgain(t *testing.T) {
	c := newCluster(t, Options{Variant: Legacy})
	port := func(i byte, pods ...int) *view.ServicePort {
		p := c.web(string('a'+rune(i)), model.IPv4, i, pods...)
		if i%20 == 7 {
			p.ID.Protocol = model.SCTP
		}
		return p
	}
	for i := range byte(60) {
		c.set(port(i, 0, 1))
	}
	c.inHost.refuse = func(input []byte) string {
		if bytes.Contains(input, []byte("-m sctp --dport 80 ")) {
			return "iptables-restore: line 7 failed"
		}
		return ""
	}
	refused := func(err error, most int) {
		t.Helper()
		ports, ok := programmer.PortErrors(err)
		require.True(t, ok, "%v", err)
		require.NotEmpty(t, ports)
		for _, p := range ports {
			require.Equal(t, model.SCTP, p.ID.Protocol)
		}
		require.LessOrEqual(t, len(c.inHost.restored), most)
		c.inHost.restored = nil
	}
	refused(c.inHost.Replace(t.Context(), c.state), 100)
	refused(c.inHost.Replace(t.Context(), c.state), 10)
	refused(c.inHost.Apply(t.Context(), []view.Change{
		{Before: port(0, 0, 1), After: port(0, 0)}, {Before: port(7, 0, 1), After: port(7, 0)},
	}), 3)
	require.Contains(t, c.inHost.rules(t, model.IPv4, Legacy), `default/a:p/TCP/IPv4 clusterIP" -j DNAT`)
	require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{Before: port(7, 0)}}))
	c.set(port(0, 0))
	delete(c.state.Ports, port(7).ID)
	refused(c.inHost.Replace(t.Context(), c.state), 6)

	c.inHost.refuse = nil
	require.NoError(t, c.inHost.Replace(t.Context(), c.state))
	require.Contains(t, c.inHost.rules(t, model.IPv4, Legacy), "/SCTP/IPv4 clusterIP")
	c.requireFresh(t)
}

// TestKernelRefusesEveryServicePort asserts that a family counts as failed if the kernel lacks
// something that every Service port needs, however many there are. What the kernel holds stays as
// it is, even if the agent restarts.
func TestKernelRefusesEveryServicePort(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		noDNAT := func(input []byte) string {
			if bytes.Contains(input, []byte("-j DNAT")) {
				return "iptables-restore: line 7 failed"
			}
			return ""
		}
		reason := ""
		out := func(err error) {
			t.Helper()
			ports, failed := programmer.Split(err, c.inHost.Families())
			require.Empty(t, ports)
			require.Len(t, failed, 1)
			require.ErrorContains(t, failed[model.IPv4], "line 7 failed")
			if reason != "" {
				require.EqualError(t, failed[model.IPv4], reason, "the node is nacked once for each reason")
			}
			reason = failed[model.IPv4].Error()
		}
		c.inHost.refuse = noDNAT
		c.set(c.web("a", model.IPv4, 0, 0, 1))
		out(c.inHost.Replace(t.Context(), c.state))
		c.inHost.refuse = nil

		for i := range byte(4) {
			c.set(c.web(string('a'+rune(i)), model.IPv4, i, 0, 1))
		}
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		before := c.inHost.rules(t, model.IPv4, variant)
		unchanged := func() {
			t.Helper()
			require.Equal(t, before, c.inHost.rules(t, model.IPv4, variant))
		}
		c.inHost.refuse = noDNAT
		changed := c.web("a", model.IPv4, 0, 1)
		err := c.inHost.Apply(t.Context(), []view.Change{{Before: c.web("a", model.IPv4, 0, 0, 1), After: changed}})
		out(err)
		unchanged()
		c.set(changed)
		for range 2 {
			out(c.inHost.Replace(t.Context(), c.state))
			unchanged()
			for i := range byte(4) {
				c.set(c.web(string('a'+rune(i)), model.IPv4, i, 1))
			}
		}
		c.inHost = newInHost(t, c.a.Host, c.options)
		c.inHost.refuse = noDNAT
		out(c.inHost.Replace(t.Context(), c.state))
		unchanged()
		c.inHost.refuse = nil
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		c.requireFresh(t)
	})
}

// TestOnlyRefusedPorts asserts that Services which the kernel cannot serve fail by themselves, even
// if a family has no others. They do not hide that the kernel later refuses every Service port.
func TestOnlyRefusedPorts(t *testing.T) {
	for _, count := range []byte{1, 3} {
		c := newCluster(t, Options{Variant: NFT})
		port := func(i byte, pods ...int) *view.ServicePort {
			p := c.web(string('a'+rune(i)), model.IPv4, i, pods...)
			p.ID.Protocol = model.SCTP
			return p
		}
		for i := range count {
			c.set(port(i, 0, 1))
		}
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		before := c.inHost.rules(t, model.IPv4, NFT)
		for i := range count {
			c.set(port(i, 0))
		}
		refuse := func(what string) {
			c.inHost.refuse = func(input []byte) string {
				if bytes.Contains(input, []byte(what)) {
					return "iptables-restore: line 7 failed"
				}
				return ""
			}
		}
		for range 2 {
			refuse("-m sctp --dport 80 ")
			ports, ok := programmer.PortErrors(c.inHost.Replace(t.Context(), c.state))
			require.True(t, ok)
			require.Len(t, ports, int(count))
			require.Equal(t, before, c.inHost.rules(t, model.IPv4, NFT), "stays as it was")
		}
		refuse("-j DNAT")
		_, failed := programmer.Split(c.inHost.Replace(t.Context(), c.state), c.inHost.Families())
		require.Len(t, failed, 1)
		require.Equal(t, before, c.inHost.rules(t, model.IPv4, NFT))
	}
}

// TestLimit asserts that a kernel which does not accept all Service ports together holds about as
// many as it accepts, and prefers those that it held before.
func TestLimit(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		const limit = 12
		limited := func(input []byte) string {
			if bytes.Count(input, []byte("-A "+vipsChain+" -d")) > limit {
				return "iptables-restore: line 99 failed: Memory allocation problem."
			}
			return ""
		}
		state := func(names string) view.State {
			s := view.State{Node: c.state.Node, Ports: map[view.ServicePortID]*view.ServicePort{}}
			for _, name := range []byte(names) {
				p := c.web(string(name), model.IPv4, name, 0)
				s.Ports[p.ID] = p
			}
			return s
		}
		programmed := func() (names string) {
			for _, m := range regexp.MustCompile(`default/(\w):p/TCP/IPv4 clusterIP`).FindAllStringSubmatch(c.inHost.rules(t, model.IPv4, variant), -1) {
				names += m[1]
			}
			return names
		}
		require.NoError(t, c.inHost.Replace(t.Context(), state("efghij")))
		c.inHost.refuse = limited
		for range 2 {
			errs, ok := programmer.PortErrors(c.inHost.Replace(t.Context(), state("abcdefghijklmnopqrst")))
			require.True(t, ok)
			require.Len(t, errs, 8)
			require.ErrorContains(t, errs[0], "the kernel accepts the rules of only 12 of 20 Service ports")
			require.ErrorContains(t, errs[0], "Memory allocation problem")
			require.Equal(t, "abcdefghijkl", programmed())
		}
		errs, ok := programmer.PortErrors(c.inHost.Replace(t.Context(), state("ABCefghijklmnopqrst")))
		require.True(t, ok)
		require.Len(t, errs, 7)
		require.Equal(t, "ABCefghijklm", programmed(), "what was there, and the first others")
		c.inHost.refuse = nil
		require.NoError(t, c.inHost.Replace(t.Context(), state("ABCefghijklmnopqrst")))
		require.Equal(t, "ABCefghijklmnopqrst", programmed())
	})
}

// TestLock asserts that the programmer waits for a lock that is held for a while, and does not
// blame Service ports for one that is held forever.
func TestLock(t *testing.T) {
	c := newCluster(t, Options{Variant: Legacy})
	c.set(c.web("web", model.IPv4, 1, 0))
	lock, err := os.OpenFile("/run/xtables.lock", os.O_CREATE|os.O_RDWR, 0o600)
	require.NoError(t, err)
	require.NoError(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX))
	release := time.AfterFunc(500*time.Millisecond, func() { _ = lock.Close() })
	defer release.Stop()
	require.NoError(t, c.inHost.Replace(t.Context(), c.state))
	c.inHost.restoredBytes()

	c.inHost.refuse = func([]byte) string {
		return "Another app is currently holding the xtables lock; still 0s 0us time ahead to have a chance to grab the lock..."
	}
	err = c.inHost.Apply(t.Context(), []view.Change{{Before: c.web("web", model.IPv4, 1, 0), After: c.web("web", model.IPv4, 1, 1)}})
	require.ErrorContains(t, err, "/run/xtables.lock")
	_, ok := programmer.PortErrors(err)
	require.False(t, ok)
	require.Len(t, c.inHost.restored, 1, "no search for a Service port")
}
