// This test proves that verify finds nothing wrong with what the programmer writes, and that each
// way to break it, in IPVS, in the table or on the device, is found and named.
package ipvs

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	mobyipvs "github.com/moby/ipvs"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/verify"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// sentences compares the kernel with the cluster's state and returns what differs.
func (c *cluster) sentences(t *testing.T) string {
	t.Helper()
	var lines []string
	require.NoError(t, c.a.Do(func() error {
		r, err := verify.Kernel(t.Context(), verify.Options{State: c.state, Scheduler: DefaultScheduler})
		for _, d := range r.Differences {
			lines = append(lines, d.String())
		}
		lines = append(lines, r.Unjudged...)
		return err
	}))
	return strings.Join(lines, "\n")
}

func TestVerify(t *testing.T) {
	c := newCluster(t, Options{})
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
	none := everywhere(view.Frontend{Kind: view.ClusterIP, Address: vip(model.IPv4, 3), Port: servicePort}, view.Reject, false)
	c.set(web, sticky,
		&view.ServicePort{ID: serviceID("none", model.TCP, model.IPv4), Frontends: []view.Frontend{none}},
		&view.ServicePort{
			ID: serviceID("edge", model.TCP, model.IPv4), Frontends: []view.Frontend{edge},
			Cluster: c.backends(model.IPv4, tcpPort, 0, 2), Local: c.backends(model.IPv4, tcpPort, 0),
		},
		&view.ServicePort{
			ID: serviceID("six", model.UDP, model.IPv6), Frontends: []view.Frontend{clusterIP(vip(model.IPv6, 1)), nodePort(30006)},
			Cluster: c.backends(model.IPv6, udpPort, 0, 2),
		},
	)
	c.state.Node.ServiceCIDRs = testenv.ServiceCIDRs()
	require.NoError(t, c.Replace(t.Context(), c.state))
	require.Empty(t, c.sentences(t))

	// A virtual service that was removed comes back with another mark.
	ofWeb := func() *mobyipvs.Service { return c.virtuals(web.ID)[0].moby() }
	ofSticky := func() *mobyipvs.Service { return c.virtuals(sticky.ID)[0].moby() }
	backend := func(pod int, port uint16, weight int) *mobyipvs.Destination {
		return &mobyipvs.Destination{Address: c.pods[pod].Addr(false).AsSlice(), Port: port, Weight: weight, AddressFamily: 2}
	}
	balancer := c.machine.ipvs
	setConntrack := func(to string) error {
		return os.WriteFile(filepath.Join("/proc/sys", conntrackSysctl), []byte(to), 0)
	}
	shell := func(args ...string) func() error {
		return func() error {
			_, err := c.a.Run(t.Context(), args[0], args[1:]...)
			return err
		}
	}
	nft := func(script string) func() error { return shell("nft", script) }
	stale := &mobyipvs.Service{
		Address: vip(model.IPv4, 9).AsSlice(), Protocol: 6, Port: 80, AddressFamily: 2, Netmask: 1<<32 - 1, SchedName: "rr",
	}
	for name, b := range map[string]struct {
		change func() error
		found  []string
	}{
		"a backend is removed": {func() error { return balancer.DelDestination(ofWeb(), backend(3, tcpPort, 1)) },
			[]string{"default/web", "never leads to " + c.pods[3].IPv4.String()}},
		"a backend is added": {func() error { return balancer.NewDestination(ofWeb(), backend(3, 99, 1)) },
			[]string{"default/web", ":99, which is not among them"}},
		"a backend gets no connections": {func() error { return balancer.UpdateDestination(ofWeb(), backend(1, tcpPort, 0)) },
			[]string{"never leads to " + c.pods[1].IPv4.String()}},
		"a backend has another weight": {func() error { return balancer.UpdateDestination(ofWeb(), backend(1, tcpPort, 5)) },
			[]string{"with probability"}},
		"a virtual service is removed": {func() error { return balancer.DelService(ofWeb()) }, []string{"default/web"}},
		"a virtual service is stale": {func() error { return balancer.NewService(stale) },
			[]string{fmt.Sprintf("no rules for %v:80/TCP", vip(model.IPv4, 9))}},
		"another scheduler": {func() error {
			s := ofWeb()
			s.SchedName = "sh"
			return balancer.UpdateService(s)
		}, []string{"be scheduled by " + DefaultScheduler, "is scheduled by sh"}},
		"affinity is lost": {func() error {
			s := ofSticky()
			s.Flags, s.Timeout = tagged, 0
			return balancer.UpdateService(s)
		}, []string{"default/sticky", "no affinity"}},
		"another affinity": {func() error {
			s := ofSticky()
			s.Timeout = 60
			return balancer.UpdateService(s)
		}, []string{"default/sticky", "an affinity of 1m0s"}},
		"a sticky backend is removed": {func() error { return balancer.DelDestination(ofSticky(), backend(2, tcpPort, 1)) },
			[]string{"default/sticky", "never leads to"}},
		"an address is removed": {shell("ip", "address", "del", vip(model.IPv4, 1).String()+"/32", "dev", Device),
			[]string{"default/web", "is not translated"}},
		"an address is stale": {shell("ip", "address", "add", "10.96.0.99/32", "dev", Device),
			[]string{"no address 10.96.0.99 on a device for Services"}},
		"nothing is masqueraded":   {nft("flush chain ip slicecast-ipvs postrouting"), []string{"masqueraded, but it is not masqueraded"}},
		"packets get no mark":      {nft("flush chain ip slicecast-ipvs input"), []string{"default/web", "from outside"}},
		"sources are not filtered": {nft("flush chain ip slicecast-ipvs sources"), []string{"default/edge", "be dropped"}},
		"a frontend is removed": {nft(fmt.Sprintf("delete element ip slicecast-ipvs from-others { %v . tcp . 80 }", vip(model.IPv4, 1))),
			[]string{"default/web", "from outside"}},
		"conntrack does not see connections": {func() error { return setConntrack("0") }, []string{"not masqueraded"}},
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, c.a.Do(b.change))
			found := c.sentences(t)
			for _, text := range b.found {
				require.Contains(t, found, text)
			}
			if !strings.Contains(name, "conntrack") { // a setting for both families
				require.NotContains(t, found, "IPv6")
			}
			require.NoError(t, c.a.Do(func() error {
				_ = balancer.DelService(stale)
				return setConntrack("1")
			}))
			require.NoError(t, c.Replace(t.Context(), c.state))
			require.Empty(t, c.sentences(t), "repaired")
		})
	}
}
