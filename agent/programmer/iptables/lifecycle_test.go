package iptables

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// foreign are rules of other software, some of which look a bit like ours.
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

// addForeign puts rules of other software on node a.
func (c *cluster) addForeign(t *testing.T, variant Variant) {
	t.Helper()
	for _, family := range families {
		cmd := c.a.Command(t.Context(), programName(family, variant)+"-restore", "--noflush")
		cmd.Stdin = strings.NewReader(foreign[family])
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
}

// web gives a Service port on TCP with a cluster IP, a nodePort and these pods.
func (c *cluster) web(name string, family model.Family, last byte, pods ...int) *view.ServicePort {
	return &view.ServicePort{
		ID:        serviceID(name, model.TCP, family),
		Frontends: []view.Frontend{clusterIP(vip(family, last)), nodePort(30000 + uint16(last))},
		Cluster:   c.backends(family, tcpPort, pods...),
	}
}

// none gives the same without pods.
func none(name string, family model.Family, last byte) *view.ServicePort {
	return &view.ServicePort{
		ID:        serviceID(name, model.TCP, family),
		Frontends: []view.Frontend{rejected(clusterIP(vip(family, last))), rejected(nodePort(30000 + uint16(last)))},
	}
}

// ours leaves only our chains' lines of rules.
func ours(rules string) string {
	var b strings.Builder
	for line := range strings.Lines(rules) {
		if strings.Contains(line, ":"+prefix) || strings.Contains(line, "-A "+prefix) {
			b.WriteString(line)
		}
	}
	return b.String()
}

// TestNeighbours holds that rules of others are as they were after anything that the programmer does, and that Cleanup
// leaves nothing else.
func TestNeighbours(t *testing.T) {
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

// TestCleanupOfBothVariants holds that either variant's programmer removes what both made, and loads no legacy table.
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
				require.NotContains(t, c.inHost.rules(t, family, variant), prefix)
			}
		}
	}
}

// TestOtherVariantStays holds that what can't be removed of the other variant is told, with what to do, and stops nothing.
func TestOtherVariantStays(t *testing.T) {
	c := newCluster(t, Options{Variant: NFT})
	require.NoError(t, newInHost(t, c.a.Host, Options{Variant: Legacy}).Replace(t.Context(), c.state))
	var log bytes.Buffer
	p := newInHost(t, c.a.Host, Options{Variant: NFT, Log: slog.New(slog.NewTextHandler(&log, nil))})
	p.refuse = func(input []byte) string {
		if bytes.Contains(input, []byte("-X "+prefix)) {
			return "iptables-restore: line 7 failed"
		}
		return ""
	}
	require.NoError(t, p.Replace(t.Context(), c.state))
	require.Contains(t, log.String(), "remove them with slicecast-agent cleanup")
}

// TestInvalid holds that what conntrack finds invalid is dropped, unless conntrack is told to be liberal.
func TestInvalid(t *testing.T) {
	c := newCluster(t, Options{Variant: NFT})
	const rule = "-A SLICECAST-FORWARD -m conntrack --ctstate INVALID -j DROP"
	require.NoError(t, c.inHost.Replace(t.Context(), c.state))
	require.Contains(t, c.inHost.rules(t, model.IPv6, NFT), rule)
	_, err := c.a.Run(t.Context(), "sysctl", "-w", "net.netfilter.nf_conntrack_tcp_be_liberal=1")
	require.NoError(t, err)
	require.NoError(t, c.inHost.Replace(t.Context(), c.state))
	require.NotContains(t, c.inHost.rules(t, model.IPv6, NFT), rule)
}

// TestCleanupFails holds that Cleanup tells if something stays.
func TestCleanupFails(t *testing.T) {
	c := newCluster(t, Options{Variant: Legacy})
	c.set(c.web("web", model.IPv4, 1, 0))
	require.NoError(t, c.inHost.Replace(t.Context(), c.state))
	c.inHost.refuse = func([]byte) string { return "Permission denied (you must be root)" }
	require.ErrorContains(t, c.inHost.Cleanup(t.Context()), "clean up with iptables-legacy")
}

// TestRestart holds that a new process that finds everything as it should be writes nothing, and repairs no more than
// what is wrong.
func TestRestart(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		for _, family := range families {
			// Enough for forks in the trees, and a Service port with groups.
			for i := range byte(40) {
				c.set(c.web(string('a'+rune(i)), family, i, int(i)%4, (int(i)+1)%4), none(string('A'+rune(i)), family, 100+i))
			}
			big := c.web("big", family, 200)
			for i := range uint16(3 * maxPlain) {
				big.Cluster = append(big.Cluster, c.backends(family, 9000+i, 1)...)
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

		// Someone flushes one chain, removes a hook and leaves a chain of an older version.
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

		// Everything is flushed, as a firewall's restart does.
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

// TestApplyWritesLittle counts what goes to the kernel for one backend less.
func TestApplyWritesLittle(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		for i := range byte(100) {
			c.set(c.web(string('a'+rune(i)), model.IPv4, i, 0, 1, 2, 3))
		}
		big := c.web("big", model.IPv4, 200)
		for i := range uint16(5000) {
			big.Cluster = append(big.Cluster, c.backends(model.IPv4, 9000+i, 1)...)
		}
		c.set(big)
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		c.inHost.restoredBytes()

		require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{Before: c.web("a", model.IPv4, 0, 0, 1, 2, 3), After: c.web("a", model.IPv4, 0, 0, 1, 3)}}))
		require.Len(t, c.inHost.restored, 1)
		require.Equal(t, 3, bytes.Count(c.inHost.restored[0], []byte("-A ")), "%s", c.inHost.restored[0])
		c.inHost.restoredBytes()

		less := *big
		less.Cluster = append(append([]view.Backend{}, big.Cluster[:70]...), big.Cluster[71:]...)
		require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{Before: big, After: &less}}))
		require.Len(t, c.inHost.restored, 1)
		rules := bytes.Count(c.inHost.restored[0], []byte("-A "))
		require.Less(t, rules, 250, "the groups' chances and one group")
		c.inHost.restoredBytes()

		require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{Before: &less, After: &less}}))
		require.Zero(t, c.inHost.restoredBytes())
	})
}

// TestRejectedPort holds that one bad Service port does not keep the others from being programmed.
func TestRejectedPort(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		answers := func(last byte) testenv.Result {
			return c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, last), servicePort), 3, patient)
		}
		bad := func(p *view.ServicePort) *view.ServicePort {
			p.Cluster = append(p.Cluster, c.backends(model.IPv6, tcpPort, 2)...)
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

		// An Apply that fails for another reason leaves behind what cannot be gone back to.
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

// TestKernelRefuses holds the search to a kernel that does not say which rule it does not like, as the legacy variant's.
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

// TestRefusedAgain holds that a Service port that the kernel refuses for good, as it has no SCTP, costs little for ever, and is
// programmed when it can be.
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

// TestLimit holds that a kernel that does not take all Service ports has as many as it takes, and those of before first.
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
			require.ErrorContains(t, errs[0], "the kernel takes the rules of 12 of 20 Service ports")
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

// TestLock holds that a lock held for a while is waited for, and that one held for ever is not blamed on Service ports.
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

// TestFamilyMissing holds that a machine without IPv6 programs IPv4 and says what it does not.
func TestFamilyMissing(t *testing.T) {
	for _, test := range []struct {
		variant Variant
		said    string
	}{
		{NFT, "can't initialize ip6tables table `nat': Address family not supported by protocol"},
		{Legacy, "ip6tables-legacy-save v1.8.9 (legacy): Cannot initialize: Table does not exist (do you need to insmod?)"},
		{Legacy, "ip6tables-legacy-save v1.8.9 (legacy): Cannot initialize: ip6tables who? (do you need to insmod?)"},
	} {
		t.Run(test.said, func(t *testing.T) { testFamilyMissing(t, test.variant, test.said) })
	}
	for err, says := range map[error]string{
		errors.New("no such kernel"): "run as root", // a failure that may pass must not count as a missing family
		&commandError{name: "iptables-save", exit: errors.New("exit status 3"), said: "Table does not exist (do you need to insmod?)"}: "load its kernel modules",
	} {
		_, got := newProgrammer(Options{}, func(context.Context, []byte, string, ...string) ([]byte, error) {
			return nil, err
		})
		require.ErrorIs(t, got, err)
		require.ErrorContains(t, got, says)
	}
}

func testFamilyMissing(t *testing.T, variant Variant, said string) {
	c := newCluster(t, Options{Variant: variant})
	var log bytes.Buffer
	run := func(ctx context.Context, stdin []byte, name string, args ...string) ([]byte, error) {
		if strings.HasPrefix(name, "ip6tables") {
			return nil, &commandError{name: name, exit: errors.New("exit status 3"), said: said}
		}
		return runCommand(ctx, stdin, name, args...)
	}
	require.NoError(t, c.a.Do(func() error {
		p, err := newProgrammer(Options{Variant: variant, Log: slog.New(slog.NewTextHandler(&log, nil))}, run)
		if err != nil {
			return err
		}
		require.Equal(t, 1, strings.Count(log.String(), "\n"), log.String())
		require.Contains(t, log.String(), "IPv6")
		c.set(c.web("web", model.IPv4, 1, 0), c.web("web", model.IPv6, 1, 0))
		for _, err := range []error{
			p.Replace(t.Context(), c.state),
			p.Apply(t.Context(), []view.Change{
				{After: c.web("new", model.IPv4, 2, 0)}, {After: c.web("new", model.IPv6, 2, 0)}, {Before: c.web("old", model.IPv6, 2, 0)},
			}),
		} {
			require.NoError(t, err)
		}
		saved, err := p.families[model.IPv4].tool.save(t.Context(), "-t", "nat")
		require.NoError(t, err)
		require.Contains(t, string(saved), "/new:")
		return p.Cleanup(t.Context())
	}))
}

// TestFamilyFails holds that an IP family that is out of order does not keep the other from being programmed and watched, and
// is programmed as soon as it works.
func TestFamilyFails(t *testing.T) {
	c := newCluster(t, Options{})
	require.NoError(t, newInHost(t, c.a.Host, Options{Variant: Legacy}).Replace(t.Context(), c.state))
	broken := ""
	var log bytes.Buffer
	run := func(ctx context.Context, stdin []byte, name string, args ...string) ([]byte, error) {
		if broken != "" && strings.HasPrefix(name, broken) {
			return nil, &commandError{name: name, exit: errors.New("exit status 4"), said: "out of order"}
		}
		return runCommand(ctx, stdin, name, args...)
	}
	require.NoError(t, c.a.Do(func() error {
		p, err := newProgrammer(Options{Variant: NFT, Log: slog.New(slog.NewTextHandler(&log, nil))}, run)
		require.NoError(t, err)
		leftOut := func(err error, names ...string) {
			t.Helper()
			ports, ok := programmer.PortErrors(err)
			require.True(t, ok, "%v", err)
			var got []string
			for _, p := range ports {
				require.Equal(t, model.IPv6, p.ID.Family)
				require.ErrorContains(t, p, "nothing of IPv6 can be programmed")
				got = append(got, p.ID.Service.Name)
			}
			require.ElementsMatch(t, names, got)
		}
		saved := func(name string) string {
			out, err := runCommand(t.Context(), nil, name+"-save", "-t", "nat")
			require.NoError(t, err)
			return string(out)
		}
		c.set(c.web("web", model.IPv4, 1, 0), c.web("web", model.IPv6, 1, 0))

		broken = "ip6tables-nft"
		leftOut(p.Replace(t.Context(), c.state), "web")
		require.Equal(t, 1, strings.Count(log.String(), "out of order"), log.String())
		require.Contains(t, saved("iptables-nft"), "/web:")
		require.NotContains(t, saved("iptables-legacy"), prefix)
		require.Contains(t, saved("ip6tables-legacy"), prefix, "as long as there is nothing else")

		broken = ""
		require.NoError(t, p.Replace(t.Context(), c.state))
		require.NotContains(t, saved("ip6tables-legacy"), prefix)

		broken = "ip6tables-nft"
		change := []view.Change{{After: c.web("new", model.IPv4, 2, 0)}, {After: c.web("new", model.IPv6, 2, 0)}}
		_, ok := programmer.PortErrors(p.Apply(t.Context(), change))
		require.False(t, ok, "a Replace may mend it")
		c.set(change[0].After, change[1].After)
		delete(c.state.Ports, serviceID("web", model.TCP, model.IPv6))
		leftOut(p.Replace(t.Context(), c.state), "web", "new")
		require.Contains(t, saved("iptables-nft"), "/new:")
		leftOut(p.Apply(t.Context(), []view.Change{{After: c.web("newer", model.IPv4, 3, 0)}, {After: c.web("newer", model.IPv6, 3, 0)}}), "newer")
		require.Contains(t, saved("iptables-nft"), "/newer:")
		_, err = runCommand(t.Context(), nil, "iptables-nft", "-t", "nat", "-F", vipsChain)
		require.NoError(t, err)
		reason, err := p.compare(t.Context())
		require.NoError(t, err)
		require.Contains(t, reason, "IPv4: table nat: the chain SLICECAST-VIPS was changed")

		broken = "ip"
		_, ok = programmer.PortErrors(p.Replace(t.Context(), c.state))
		require.False(t, ok, "nothing works")
		broken = ""
		require.NoError(t, p.Replace(t.Context(), c.state))
		require.NoError(t, p.Apply(t.Context(), []view.Change{{After: c.web("newer", model.IPv6, 3, 0)}}))
		require.Contains(t, saved("ip6tables-nft"), "/newer:")
		require.NotContains(t, saved("ip6tables-nft"), "/web:")
		return nil
	}))
}

// TestOptions holds New to refusing what it cannot do.
func TestOptions(t *testing.T) {
	_, err := New(Options{Variant: "nftables"})
	require.ErrorContains(t, err, `iptables variant "nftables"`)
	_, err = New(Options{MasqueradeMark: 3})
	require.ErrorContains(t, err, "one bit")
}
