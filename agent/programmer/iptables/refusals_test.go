// These tests prove that a Service port that the kernel refuses does not keep the others from being
// programmed, and that a failure of everything is not blamed on single Service ports. The refusals
// are made up in front of a real kernel, except for those of the xtables lock.
package iptables

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
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
			require.ErrorContains(t, errs[0], "the kernel refuses its rules beside those of other Service ports")
			require.ErrorContains(t, errs[0], "Memory allocation problem")
			require.Equal(t, "abcdefghijkl", programmed())
		}
		errs, ok := programmer.PortErrors(c.inHost.Replace(t.Context(), state("ABCefghijklmnopqrst")))
		require.True(t, ok)
		require.Len(t, errs, 7)
		require.Equal(t, "ABCefghijklm", programmed(), "what was there, and the first others")
		// A new agent finds in the kernel what was there.
		c.inHost = newInHost(t, c.a.Host, c.options)
		c.inHost.refuse = limited
		for range 2 {
			errs, ok = programmer.PortErrors(c.inHost.Replace(t.Context(), state("0123ABCDefghijklmnop")))
			require.True(t, ok)
			require.Len(t, errs, 8)
			require.Equal(t, "ABCefghijklm", programmed())
		}
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

// TestNeighboringPorts asserts that a Service whose SCTP nodePorts are next to each other, so that
// the chains of their tree have the longest names, is programmed, and that it does not cost any
// other Service its rules.
func TestNeighboringPorts(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		for _, family := range families {
			c.setOrdinary(family, 20)
		}
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		var changes []view.Change
		for _, family := range families {
			var backends []view.Backend
			for i := range uint16(10) {
				backends = append(backends, c.backends(family, 9000+i, 2).List()...)
			}
			for i := range uint16(16) {
				for _, protocol := range protocols {
					p := &view.ServicePort{
						ID: serviceID(fmt.Sprint("evil", i), protocol, family), Cluster: view.NewBackends(backends...),
						Frontends: []view.Frontend{
							everyone(clusterIP(vip(family, 250)), view.Route{To: view.Drop}), nodePort(32000 + i),
						},
					}
					p.Frontends[0].Port = 32000 + i
					changes = append(changes, view.Change{After: p})
				}
			}
		}
		require.NoError(t, c.inHost.Apply(t.Context(), changes))
		for _, change := range changes {
			c.set(change.After)
		}
		c.requireFresh(t)
		require.NoError(t, c.inHost.Cleanup(t.Context()))
		require.NoError(t, newInHost(t, c.a.Host, c.options).Replace(t.Context(), c.state))
	})
}

// setOrdinary sets ordinary Service ports of one family, whose names sort before "o" and after it.
func (c *cluster) setOrdinary(family model.Family, count byte) {
	for i := range count {
		c.set(c.web(fmt.Sprintf("%c%d", 'a'+i%26, i), family, i, 0, 1))
	}
}

// TestRefusedInTheTree asserts that rules which the kernel accepts by themselves, but not where
// they belong, concern nobody but their Service. No other one is without rules at any moment,
// neither in a running agent nor in one that starts. The number of attempts is bounded.
func TestRefusedInTheTree(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		c.setOrdinary(model.IPv4, 200)
		evil := c.web("n", model.IPv4, 201, 0, 1)
		refuse := func(input []byte) string {
			if regexp.MustCompile(`(?m)^-A SLICECAST-(VIPS|PORTS-TCP).*default/n:`).Match(input) {
				return "iptables-restore: line 7 failed"
			}
			return ""
		}
		h := c.inHost
		require.NoError(t, h.Replace(t.Context(), c.state))
		inTrees := func() int {
			out, err := runCommand(t.Context(), nil, programName(model.IPv4, variant)+"-save", "-t", "nat")
			require.NoError(t, err)
			return len(regexp.MustCompile(`(?m)^-A SLICECAST-(VIPS|PORTS-TCP)\S* .*-m comment`).FindAll(out, -1))
		}
		innocent := 0
		require.NoError(t, c.a.Do(func() error { innocent = inTrees(); return nil }))
		require.GreaterOrEqual(t, innocent, 400)
		whole := func() { require.GreaterOrEqual(t, inTrees(), innocent, "rules of others are missing") }
		blamed := func(err error, most int) {
			t.Helper()
			ports, ok := programmer.PortErrors(err)
			require.True(t, ok, "%v", err)
			require.Len(t, ports, 1)
			require.Equal(t, evil.ID, ports[0].ID)
			require.LessOrEqual(t, len(h.restored), most)
			h.restored = nil
		}
		h.restored, h.refuse, h.accepted = nil, refuse, whole
		blamed(h.Apply(t.Context(), []view.Change{{After: evil}}), 10)
		c.set(evil)
		for range 2 {
			blamed(h.Replace(t.Context(), c.state), 10)
		}
		h = newInHost(t, c.a.Host, c.options)
		h.refuse, h.accepted = refuse, whole
		for range 2 {
			blamed(h.Replace(t.Context(), c.state), 10)
		}
		// Others come or have changed at the same time.
		for i := range byte(40) {
			c.set(c.web(fmt.Sprint("later", i), model.IPv4, 205+i, 2))
			if i%4 == 0 {
				c.set(c.web(fmt.Sprintf("%c%d", 'a'+i%26, i), model.IPv4, i, 2, 3))
			}
		}
		h = newInHost(t, c.a.Host, c.options)
		h.refuse, h.accepted = refuse, whole
		blamed(h.Replace(t.Context(), c.state), 40)
		for i := range byte(40) {
			require.Contains(t, h.rules(t, model.IPv4, variant), fmt.Sprintf("default/later%d:", i))
		}
	})
}

// TestMissingMatch asserts that a match which the kernel lacks is found once and not once for each
// Service port that needs it, at first as well as at each retry, and that the others are served.
func TestMissingMatch(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		attempts := map[int]int{}
		for _, count := range []int{200, 10_000} {
			c := newCluster(t, Options{Variant: variant})
			c.setOrdinary(model.IPv4, 20)
			h := c.inHost
			require.NoError(t, h.Replace(t.Context(), c.state))
			h.restored = nil
			h.refuse = func(input []byte) string {
				if bytes.Contains(input, []byte("-m sctp ")) {
					return "iptables-restore: line 7 failed"
				}
				return ""
			}
			var changes []view.Change
			for i := range count {
				p := benchmarkPort(i, 1+i%4, 0)
				p.ID.Protocol = model.SCTP
				p.Frontends[0].Address = netip.AddrFrom4([4]byte{10, 97, byte(i >> 8), byte(i)})
				if i%3 == 0 {
					p.Frontends = append(p.Frontends, nodePort(uint16(20_000+i)))
				}
				changes = append(changes, view.Change{After: p})
			}
			changes = append(changes, view.Change{After: c.web("z", model.IPv4, 100, 0)})
			refused := func(err error, most int) {
				t.Helper()
				ports, ok := programmer.PortErrors(err)
				require.True(t, ok, "%v", err)
				require.Len(t, ports, count)
				for _, p := range ports {
					require.Equal(t, model.SCTP, p.ID.Protocol)
				}
				tries := 0
				for _, input := range h.restored {
					if bytes.Contains(input, []byte(checkChain)) {
						tries++
					}
				}
				require.NotZero(t, tries)
				require.LessOrEqual(t, tries, most)
				attempts[count] += tries
				h.restored = nil
			}
			refused(h.Apply(t.Context(), changes), 12)
			require.Contains(t, h.rules(t, model.IPv4, variant), "default/z:")
			for _, change := range changes {
				c.set(change.After)
			}
			for range 2 {
				refused(h.Replace(t.Context(), c.state), 12)
			}
			h = newInHost(t, c.a.Host, c.options)
			h.refuse = c.inHost.refuse
			refused(h.Replace(t.Context(), c.state), 12)
			require.Contains(t, h.rules(t, model.IPv4, variant), "default/z:")
		}
		require.Equal(t, attempts[200], attempts[10_000], "it does not matter how many there are")
	})
}

// TestTriesAreBounded asserts that the work to find refused Service ports one by one is bounded,
// and that each operation finds some of them, so that all are found in the end.
func TestTriesAreBounded(t *testing.T) {
	left := make([]int, 10_000)
	for i := range left {
		left[i] = i
	}
	for good := 0; good < 9_000; {
		tries, budget := 0, maxTries
		var refused, untried []int
		require.NoError(t, divide(left, &budget, func(some []int) error {
			tries++
			if slices.ContainsFunc(some, func(i int) bool { return i%10 == 3 }) {
				return &rejectedError{command: &commandError{name: "iptables-restore", exit: errors.New("exit status 1")}}
			}
			good += len(some)
			return nil
		}, func(i int, err error) {
			if errors.Is(err, errUntried) {
				untried = append(untried, i)
			} else {
				refused = append(refused, i)
			}
		}))
		require.LessOrEqual(t, tries, maxTries)
		require.Less(t, len(untried), max(1, len(left)-maxTries/4))
		for _, i := range refused {
			require.Equal(t, 3, i%10)
		}
		left = untried
	}
}
