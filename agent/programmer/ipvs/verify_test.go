// This test proves that verify finds nothing wrong with what the programmer writes, and that each
// way to break it, in IPVS, in the table or on the device, is found and named.
package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	mobyipvs "github.com/moby/ipvs"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// Verify compares the kernel of the calling thread with a state, and returns what differs. It is
// set by the package ipvs_test, because the package verify uses this one.
var Verify func(ctx context.Context, state view.State) (lines []string, err error)

// sentences compares the kernel with the cluster's state and returns what differs.
func (c *cluster) sentences(t *testing.T) string {
	t.Helper()
	var lines []string
	require.NoError(t, c.a.Do(func() (err error) {
		lines, err = Verify(t.Context(), c.state)
		return err
	}))
	return strings.Join(lines, "\n")
}

// breakage is a way to break what the kernel holds, and parts of what verify must say then.
type breakage struct {
	name   string
	change func() error
	found  []string
}

func TestVerify(t *testing.T) {
	const timeout = 5 * time.Minute
	c := newCluster(t, Options{TCPTimeout: timeout, UDPTimeout: timeout})
	web := &view.ServicePort{
		ID:        serviceID("web", model.TCP, model.IPv4),
		Frontends: []view.Frontend{clusterIP(vip(model.IPv4, 1)), nodePort(30001)}, Cluster: c.backends(model.IPv4, tcpPort, 0, 1, 2, 3),
	}
	sticky := &view.ServicePort{
		ID:        serviceID("sticky", model.TCP, model.IPv4),
		Frontends: []view.Frontend{clusterIP(vip(model.IPv4, 2)), nodePort(30002)}, Cluster: c.backends(model.IPv4, tcpPort, 0, 2), Affinity: time.Hour,
	}
	edge := localPolicy(view.Frontend{Kind: view.LoadBalancer, Address: ingress(model.IPv4, 4), Port: servicePort}, view.Local)
	edge.Sources = []netip.Prefix{netip.MustParsePrefix("10.98.0.0/24"), netip.MustParsePrefix("10.180.0.0/16")}
	edgePort := &view.ServicePort{
		ID: serviceID("edge", model.TCP, model.IPv4), Frontends: []view.Frontend{edge},
		Cluster: c.backends(model.IPv4, tcpPort, 0, 2), Local: c.backends(model.IPv4, tcpPort, 0), HealthCheckPort: 32000,
	}
	none := everywhere(view.Frontend{Kind: view.ClusterIP, Address: vip(model.IPv4, 3), Port: servicePort}, view.Reject, false)
	dns := &view.ServicePort{
		ID: serviceID("dns", model.UDP, model.IPv4), Frontends: []view.Frontend{clusterIP(vip(model.IPv4, 5))}, Cluster: c.backends(model.IPv4, udpPort, 0, 2),
	}
	hashed := &view.ServicePort{
		ID: serviceID("hashed", model.TCP, model.IPv4), Frontends: []view.Frontend{clusterIP(vip(model.IPv4, 6))},
		Cluster: c.backends(model.IPv4, tcpPort, 0, 2), Scheduler: "mh",
	}
	c.set(web, sticky, edgePort, dns, hashed,
		&view.ServicePort{ID: serviceID("none", model.TCP, model.IPv4), Frontends: []view.Frontend{none}},
		&view.ServicePort{
			ID: serviceID("six", model.UDP, model.IPv6), Frontends: []view.Frontend{clusterIP(vip(model.IPv6, 1)), nodePort(30006)},
			Cluster: c.backends(model.IPv6, udpPort, 0, 2),
		},
	)
	c.state.Node.ServiceCIDRs = testenv.ServiceCIDRs()
	require.NoError(t, c.Replace(t.Context(), c.state))
	require.Empty(t, c.sentences(t))

	b := &breaker{cluster: c, t: t, ipvs: c.machine.ipvs}
	// A virtual service that was removed comes back with another mark.
	of := func(p *view.ServicePort) *mobyipvs.Service { return c.virtuals(p.ID)[0].moby() }
	backend := func(pod int, port uint16, weight int) *mobyipvs.Destination {
		return &mobyipvs.Destination{Address: c.pods[pod].Addr(false).AsSlice(), Port: port, Weight: weight, AddressFamily: 2}
	}
	weigh := func(pod, weight int) func() error {
		return func() error { return b.ipvs.UpdateDestination(of(web), backend(pod, tcpPort, weight)) }
	}
	edit := func(p *view.ServicePort, change func(s *mobyipvs.Service)) func() error {
		return func() error {
			s := of(p)
			change(s)
			return b.ipvs.UpdateService(s)
		}
	}
	alter := func(change func(d *mobyipvs.Destination)) func() error {
		return func() error {
			d := backend(1, tcpPort, 1)
			change(d)
			return b.ipvs.UpdateDestination(of(web), d)
		}
	}
	stale := &mobyipvs.Service{
		Address: vip(model.IPv4, 9).AsSlice(), Protocol: 6, Port: 80, AddressFamily: 2, Netmask: 1<<32 - 1, SchedName: "rr",
	}
	staleMark := &mobyipvs.Service{FWMark: markTag | maxID, AddressFamily: 2, Netmask: 1<<32 - 1, SchedName: "rr"}

	const late = "add chain ip slicecast-ipvs late { type filter hook input priority 101; }; add rule ip slicecast-ipvs late goto others; " +
		"flush chain ip slicecast-ipvs input"
	bothFamilies := []string{
		"conntrack does not see connections", "IPVS is cleared", "the device is removed", "the device is down", "others have set a timeout",
	}
	webAt, edgeAt := vip(model.IPv4, 1).String()+" . tcp . 80", ingress(model.IPv4, 4).String()+" . tcp . 80"
	list := []breakage{
		{"a backend is removed", func() error { return b.ipvs.DelDestination(of(web), backend(3, tcpPort, 1)) },
			[]string{"default/web", "never leads to " + c.pods[3].IPv4.String()}},
		{"a backend is added", func() error { return b.ipvs.NewDestination(of(web), backend(3, 99, 1)) },
			[]string{"default/web", ":99, which is not among them"}},
		{"a backend is swapped", func() error {
			return errors.Join(b.ipvs.NewDestination(of(web), backend(3, 98, 1)), b.ipvs.DelDestination(of(web), backend(3, tcpPort, 1)))
		}, []string{"default/web", ":98, which is not among them"}},
		{"a backend gets no connections", weigh(1, 0), []string{"never leads to " + c.pods[1].IPv4.String()}},
		{"no backend gets connections", func() error {
			return errors.Join(b.ipvs.UpdateDestination(of(dns), backend(0, udpPort, 0)), b.ipvs.UpdateDestination(of(dns), backend(2, udpPort, 0)))
		}, []string{"default/dns", "is rejected"}},
		{"a backend has another weight", weigh(1, 5), []string{"with probability"}},
		{"a backend gets packets as they are", alter(func(d *mobyipvs.Destination) { d.ConnectionFlags = mobyipvs.ConnectionFlagDirectRoute }),
			[]string{"default/web", "is not translated"}},
		{"a backend gets few connections", alter(func(d *mobyipvs.Destination) { d.UpperThreshold = 1 }),
			[]string{"no more than 1 connections go to " + c.pods[1].IPv4.String()}},
		{"a virtual service is removed", func() error { return b.ipvs.DelService(of(web)) }, []string{"default/web"}},
		{"a virtual service is stale", func() error { return b.ipvs.NewService(stale) },
			[]string{fmt.Sprintf("no rules for %v:80/TCP", vip(model.IPv4, 9))}},
		{"a virtual service by mark is stale", func() error {
			return errors.Join(b.ipvs.NewService(staleMark), b.ipvs.NewDestination(staleMark, backend(1, tcpPort, 1)))
		}, []string{"be no virtual service " + serviceKey{number: maxID}.String()}},
		{"another scheduler", edit(web, func(s *mobyipvs.Service) { s.SchedName = "sh" }),
			[]string{"default/web", "the settings {scheduler:rr"}},
		{"the flags of a scheduler are lost", edit(hashed, func(s *mobyipvs.Service) { s.Flags = 0 }),
			[]string{"default/hashed", "the settings {scheduler:mh flags:24"}},
		{"each packet is scheduled by itself", edit(dns, func(s *mobyipvs.Service) { s.Flags = onePacket }),
			[]string{"default/dns", "the settings {scheduler:rr flags:0"}},
		{"affinity is lost", edit(sticky, func(s *mobyipvs.Service) { s.Flags, s.Timeout = tagged, 0 }), []string{"default/sticky", "no affinity"}},
		{"another affinity", edit(sticky, func(s *mobyipvs.Service) { s.Timeout = 60 }), []string{"default/sticky", "an affinity of 1m0s"}},
		{"affinity of whole networks", edit(sticky, func(s *mobyipvs.Service) { s.Netmask = 1<<24 - 1 }),
			[]string{"default/sticky", "the settings {scheduler:rr flags:33 timeout:3600 netmask:4294967295}"}},
		{"affinity that nobody wants", edit(web, func(s *mobyipvs.Service) { s.Flags, s.Timeout = persistent, 60 }),
			[]string{"default/web", "have no affinity"}},
		{"a sticky backend is removed", func() error { return b.ipvs.DelDestination(of(sticky), backend(2, tcpPort, 1)) },
			[]string{"default/sticky", "never leads to"}},
		{"IPVS is cleared", func() error { return b.ipvs.Flush() }, []string{"default/web", "default/sticky"}},

		{"a rule of the routing policy is removed", b.shell("ip", "rule", "del", "pref", "93"), []string{"default/edge", "is not translated"}},
		{"the route of the routing policy is removed", b.shell("ip", "route", "flush", "table", fmt.Sprint(deliveryTable)),
			[]string{"default/edge", "is not translated"}},
		{"what is delivered gets no mark", b.nft("flush chain ip slicecast-ipvs prerouting"), []string{"default/edge", "is not translated"}},
		{"an address is stale", b.shell("ip", "address", "add", "10.96.0.99/32", "dev", Device),
			[]string{"no address 10.96.0.99 on device " + Device}},
		{"the device is removed", b.shell("ip", "link", "del", Device), []string{"default/web", "default/sticky", "is not translated"}},

		{"nothing is masqueraded", b.nft("flush chain ip slicecast-ipvs postrouting"), []string{"masqueraded, but it is not masqueraded"}},
		{"packets get no mark", b.nft("flush chain ip slicecast-ipvs input"), []string{"default/web", "from outside"}},
		{"packets get their mark after IPVS", b.nft(late), []string{"default/web", "from outside", "is not translated"}},
		{"the rules sleep", b.nft("add table ip slicecast-ipvs { flags dormant; }"), []string{"default/web", "is not translated"}},
		{"the rules are gone", b.nft("delete table ip slicecast-ipvs"), []string{"default/web", "is not translated"}},
		{"input drops", b.nft("chain ip slicecast-ipvs input { policy drop; }"), []string{"default/web", "is dropped"}},
		{"pods count as others", b.nft("flush chain ip slicecast-ipvs input; add rule ip slicecast-ipvs input goto others"),
			[]string{"from a pod", "it is masqueraded"}},
		{"sources are not filtered", b.nft("flush chain ip slicecast-ipvs sources"), []string{"default/edge", "be dropped"}},
		{"a rule of others", b.nft("insert rule ip slicecast-ipvs input ip saddr 198.51.100.9 drop"),
			[]string{"other rules in chain input in the IPv4 table slicecast-ipvs, whose rule 1 another program has written"}},
		{"a rule of others for nobody's address", b.nft("insert rule ip slicecast-ipvs forward ip daddr 8.8.8.8 drop"),
			[]string{"other rules in chain forward in the IPv4 table slicecast-ipvs, whose rule 1 another program has written"}},
		{"an address of nobody is refused", b.nft("add element ip slicecast-ipvs addresses { 8.8.8.8 }"),
			[]string{"no element for 8.8.8.8 in set addresses"}},
		{"a stale chain", b.nft("add chain ip slicecast-ipvs gone; add rule ip slicecast-ipvs gone drop"), []string{"no chain gone in the IPv4 table slicecast-ipvs"}},

		{"a frontend is removed", b.remove("from-others", webAt), []string{"default/web", "from outside"}},
		{"a frontend is removed for pods", b.remove("from-pods", webAt), []string{"default/web", "from a pod"}},
		{"a frontend is removed for the node", b.remove("from-node", webAt), []string{"default/web", "from the node"}},
		{"a NodePort is removed", b.remove("from-others-nodeports", "tcp . 30001"), []string{"default/web", "nodePort", ":30001 from outside"}},
		{"a frontend is stale", b.add("from-others", "10.96.0.77 . tcp . 80", web), []string{"no element for 10.96.0.77 . tcp . 80 in set from-others"}},
		{"a NodePort is stale", b.add("from-pods-nodeports", "tcp . 30999", web), []string{"no element for tcp . 30999 in set from-pods-nodeports"}},
		{"a frontend leads to another Service", b.replace("from-others", webAt, dns, flagMasquerade),
			[]string{"default/web", "from outside", "which is not among them"}},
		{"a frontend leads to no virtual service", b.replace("from-others", webAt, nil, maxID), []string{"default/web", "from outside", "is not translated"}},
		{"a frontend refuses", b.replace("from-others", webAt, nil, flagReject), []string{"default/web", "from outside", "is rejected"}},
		{"pods are masqueraded", b.replace("from-pods", webAt, web, flagMasquerade), []string{"default/web", "from a pod", "it is masqueraded"}},
		{"others are not masqueraded", b.replace("from-others", webAt, web, 0), []string{"default/web", "from outside", "it is not masqueraded"}},
		{"refusals are silent", b.replace("from-others", vip(model.IPv4, 3).String()+" . tcp . 80", nil, flagDrop),
			[]string{"default/none", "should be rejected, but is dropped"}},
		{"a policy is not followed", b.replace("from-others", edgeAt, edgePort, 0), []string{"default/edge", "1 backend of the local set"}},
		{"a hairpin is not masqueraded", b.remove("hairpins", c.pods[0].IPv4.String()+" . "+c.pods[0].IPv4.String()), []string{"from the backend itself"}},
		{"a frontend is not filtered", b.remove("filtered", edgeAt), []string{"default/edge", "be dropped"}},
		{"a frontend is filtered", b.nft("add element ip slicecast-ipvs filtered { " + webAt + " }"), []string{"default/web", "is dropped"}},
		{"a range is missing", b.remove("sources", edgeAt+" . 10.98.0.0/24"), []string{"default/edge", "in 10.98.0.0/24", "is dropped"}},
		{"a range is wider", b.nft("add element ip slicecast-ipvs sources { " + edgeAt + " . 10.98.1.0/24 }"), []string{"just after 10.98.0.0/24", "be dropped"}},
		{"the node's address counts as a Service's", b.nft(fmt.Sprintf("add element ip slicecast-ipvs addresses { %v }", c.a.IPv4)),
			[]string{"default/web", "nodePort", "is rejected"}},

		{"conntrack does not see connections", func() error { return setSysctl(conntrackSysctl, "0") }, []string{"not masqueraded"}},
		{"the device is down", b.shell("ip", "link", "set", Device, "down"), []string{"a device " + Device + " that is up"}},
		{"others have set a timeout", func() error { return b.ipvs.SetConfig(&mobyipvs.Config{TimeoutUDP: time.Minute}) }, []string{"other timeouts of IPVS"}},
	}
	// Each chain, each set and each setting is broken once.
	for _, chain := range c.family(model.IPv4).layout.chains() {
		if len(chain.rules) > 0 {
			list = append(list, breakage{"chain " + chain.name + " is empty", b.nft("flush chain ip slicecast-ipvs " + chain.name),
				[]string{"other rules in chain " + chain.name}})
		}
	}
	held, _, err := c.readTable(c.family(model.IPv4).layout)
	require.NoError(t, err)
	for id, s := range c.family(model.IPv4).layout.sets {
		require.True(t, slices.ContainsFunc(slices.Collect(maps.Keys(held)), func(k elementKey) bool { return k.set == setID(id) }), s.name)
		kind := "set"
		if s.Data != nil {
			kind = "map"
		}
		list = append(list, breakage{"set " + s.name + " is empty", b.nft("flush " + kind + " ip slicecast-ipvs " + s.name), []string{"in set " + s.name}})
	}
	for name, value := range sysctls {
		name = strings.TrimPrefix(name, "?")
		if _, err := os.Stat(filepath.Join("/proc/sys", name)); err != nil {
			continue
		}
		other := map[string]string{"0": "1", "1": "0"}[value]
		list = append(list, breakage{"the sysctl " + name, func() error { return setSysctl(name, other) }, []string{strings.ReplaceAll(name, "/", ".") + " = " + value}})
	}
	for _, x := range list {
		t.Run(x.name, func(t *testing.T) {
			require.NoError(t, c.a.Do(x.change))
			found := c.sentences(t)
			for _, text := range x.found {
				require.Contains(t, found, text)
			}
			if !slices.Contains(bothFamilies, x.name) && !strings.HasPrefix(x.name, "the sysctl") {
				require.NotContains(t, found, "IPv6")
			}
			require.NoError(t, c.a.Do(func() error {
				different, err := Differences(model.IPv4, Options{TCPTimeout: timeout, UDPTimeout: timeout}, c.state)
				if x.name != "a virtual service is stale" { // it is not Slicecast's
					require.NotEmpty(t, different, "the programmer knows by itself")
				}
				_ = b.ipvs.DelService(stale)
				return err
			}))
			require.NoError(t, c.Replace(t.Context(), c.state))
			require.Empty(t, c.sentences(t), "repaired")
		})
	}
}

func setSysctl(name, to string) error {
	return os.WriteFile(filepath.Join("/proc/sys", name), []byte(to), 0)
}

// breaker returns functions that break what the kernel holds of IPv4.
type breaker struct {
	*cluster
	t    *testing.T
	ipvs *balancer
}

func (b *breaker) shell(args ...string) func() error {
	return func() error {
		_, err := b.a.Run(b.t.Context(), args[0], args[1:]...)
		return err
	}
}

func (b *breaker) nft(script string) func() error { return b.shell("nft", script) }

// remove removes an element from a set or a map.
func (b *breaker) remove(set, key string) func() error {
	return b.nft(fmt.Sprintf("delete element ip slicecast-ipvs %s { %s }", set, key))
}

// add adds an element that leads to a Service port's backends to a map.
func (b *breaker) add(to, key string, p *view.ServicePort) func() error {
	return func() error {
		return b.nft(fmt.Sprintf("add element ip slicecast-ipvs %s { %s : %d }", to, key, b.mark(p, 0)))()
	}
}

// replace sets another mark in an element of a map; see mark.
func (b *breaker) replace(in, key string, p *view.ServicePort, flags uint32) func() error {
	return func() error {
		return b.nft(fmt.Sprintf("delete element ip slicecast-ipvs %[1]s { %[2]s }; add element ip slicecast-ipvs %[1]s { %[2]s : %[3]d }",
			in, key, b.mark(p, flags)))()
	}
}

// mark returns the mark of the virtual service with all backends of a Service port, which may be
// nil for none, and flags.
func (b *breaker) mark(p *view.ServicePort, flags uint32) uint32 {
	if p == nil {
		return markTag | flags
	}
	return markTag | b.programmed(p.ID).numbers[clusterRole] | flags
}
