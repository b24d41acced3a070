// This file has the ways to break what a real kube-proxy has programmed in its mode ipvs: its rules
// of iptables, ipsets, virtual services of IPVS, and addresses on its device.
package conformance

import (
	"errors"
	"net"
	"strings"
	"testing"

	"github.com/moby/ipvs"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

var brokenIPVSRules = []edit{
	{"services are not looked up", `(?m)^-A PREROUTING .*-j KUBE-SERVICES$`, "", []string{"shop/web:http", "from outside", "not masqueraded"}},
	{"nothing is masqueraded", `(?m)^-A KUBE-POSTROUTING -m comment .*-j MASQUERADE.*$`, "", []string{"shop/web:http", "not masqueraded"}},
	{"nothing gets a mark", `(?m)^-A KUBE-MARK-MASQ .*$`, "", []string{"shop/web:http", "not masqueraded"}},
	{"pods are masqueraded", `(?m)^(-A KUBE-SERVICES) ! -s 10\.180\.0\.0/16 (.*KUBE-CLUSTER-IP)`, "$1 $2", []string{"from a pod", "it is masqueraded"}},
	{"hairpins are not masqueraded", `(?m)^-A KUBE-POSTROUTING .*KUBE-LOOP-BACK.*$`, "", []string{"from the backend itself (10.180.0.10)"}},
	{"the mark is asked for before it is there", `(?m)^(-A KUBE-POSTROUTING -m mark ! .*\n)((?:-A KUBE-POSTROUTING .*\n)*-A KUBE-POSTROUTING .*)`, "${1}-A KUBE-POSTROUTING -j RETURN\n$2",
		[]string{"shop/web:http", "not masqueraded"}},
	{"a policy is reordered", `(?m)^(-A KUBE-NODE-PORT .*KUBE-NODE-PORT-LOCAL-TCP.*\n)(-A KUBE-NODE-PORT .*KUBE-NODE-PORT-TCP.*\n)`, "$2$1",
		[]string{"shop/edge:http", "nodePort", "with its own source address, but it is masqueraded"}},
	{"the firewall is not asked", `(?m)^-A KUBE-PROXY-FIREWALL .*$`, "", []string{"shop/edge:http", "should be dropped"}},
	{"the firewall lets everything pass", `(?m)^-A KUBE-SOURCE-RANGES-FIREWALL -j DROP$`, "", []string{"shop/edge:http", "should be dropped"}},
	{"the firewall lets nobody pass", `(?m)^-A KUBE-SOURCE-RANGES-FIREWALL .*RETURN$`, "", []string{"in 203.0.113.0/25", "is dropped"}},
	{"the node is not stopped", `(?m)^-A KUBE-IPVS-OUT-FILTER .*$`, "", []string{"shop/edge:http", "from the node (198.51.100.93)", "should be dropped"}},
	{"the node is stopped for another port", `(?m)^(-A KUBE-IPVS-OUT-FILTER .*--vport) 80`, "$1 81", []string{"from the node (198.51.100.93)", "should be dropped"}},
}

// brokenIPVS are breakages of what is no rule. The function makes one.
var brokenIPVS = []struct {
	name  string
	make  func(b *ipvsBreaker)
	found []string
}{
	{"a backend is removed", func(b *ipvsBreaker) { b.del(b.at("10.96.9.1:80"), "10.180.1.10:80") },
		[]string{"shop/web:http", "clusterIP 10.96.9.1:80", "never leads to 10.180.1.10:80"}},
	{"a backend gets no connections", func(b *ipvsBreaker) { b.weigh(b.at("10.96.9.1:80"), "10.180.0.10:80", 0) },
		[]string{"shop/web:http", "never leads to 10.180.0.10:80"}},
	{"no backend gets connections", func(b *ipvsBreaker) {
		b.weigh(b.at("10.96.9.1:80"), "10.180.0.10:80", 0)
		b.weigh(b.at("10.96.9.1:80"), "10.180.1.10:80", 0)
	}, []string{"shop/web:http", "is rejected"}},
	{"a backend has another weight", func(b *ipvsBreaker) { b.weigh(b.at("192.168.0.2:30901"), "10.180.0.10:80", 5) },
		[]string{"nodePort 192.168.0.2:30901", "with probability"}},
	{"a backend is another Service's", func(b *ipvsBreaker) { b.add(b.at("10.96.9.1:80"), "10.180.1.20:80") },
		[]string{"shop/web:http", "may lead to 10.180.1.20:80"}},
	{"a backend of another node with the policy Local", func(b *ipvsBreaker) { b.add(b.at("198.51.100.93:80"), "10.180.1.30:80") },
		[]string{"shop/edge:http", "1 backend of the local set", "may lead to 10.180.1.30:80"}},
	{"a Service without backends gets one", func(b *ipvsBreaker) { b.add(b.at("10.96.9.4:80"), "10.180.1.30:80") },
		[]string{"shop/none:http", "should be rejected"}},
	{"a virtual service is removed", func(b *ipvsBreaker) { require.NoError(b, b.handle.DelService(b.at("198.51.100.91:80"))) },
		[]string{"shop/web:http", "externalIP 198.51.100.91:80", "is not translated"}},
	{"a virtual service is stale", func(b *ipvsBreaker) {
		stale := *b.at("10.96.9.2:80")
		stale.Port = 81
		require.NoError(b, b.handle.NewService(&stale))
	}, []string{"no rules for 10.96.9.2:81/TCP"}},
	{"another scheduler", func(b *ipvsBreaker) {
		s := *b.at("10.96.9.1:80")
		s.SchedName = "sh"
		require.NoError(b, b.handle.UpdateService(&s))
	}, []string{"shop/web:http", "be scheduled by rr, but is scheduled by sh"}},
	{"affinity is lost", func(b *ipvsBreaker) {
		s := *b.at("10.96.9.2:80")
		s.Flags, s.Timeout = 0, 0
		require.NoError(b, b.handle.UpdateService(&s))
	}, []string{"shop/sticky:http", "no affinity"}},
	{"affinity is shorter", func(b *ipvsBreaker) {
		s := *b.at("10.96.9.2:80")
		s.Timeout = 60
		require.NoError(b, b.handle.UpdateService(&s))
	}, []string{"shop/sticky:http", "an affinity of 1m0s"}},
	{"a cluster IP is not masqueraded", func(b *ipvsBreaker) { b.run("ipset", "del", "KUBE-CLUSTER-IP", "10.96.9.1,tcp:80") },
		[]string{"shop/web:http", "clusterIP 10.96.9.1:80", "not masqueraded"}},
	{"a NodePort is not masqueraded", func(b *ipvsBreaker) { b.run("ipset", "del", "KUBE-NODE-PORT-TCP", "30901") },
		[]string{"shop/web:http", "nodePort", "not masqueraded"}},
	{"an entry is stale", func(b *ipvsBreaker) { b.run("ipset", "add", "KUBE-EXTERNAL-IP", "198.51.100.99,tcp:80") },
		[]string{"no rules for 198.51.100.99:80/TCP", "ipset KUBE-EXTERNAL-IP"}},
	{"a NodePort's entry is stale", func(b *ipvsBreaker) { b.run("ipset", "add", "KUBE-NODE-PORT-TCP", "30999") },
		[]string{"no rules for NodePort 30999/TCP"}},
	{"the policy Local masquerades", func(b *ipvsBreaker) { b.run("ipset", "flush", "KUBE-NODE-PORT-LOCAL-TCP") },
		[]string{"shop/edge:http", "nodePort", "it is masqueraded"}},
	{"a load balancer's address is not filtered", func(b *ipvsBreaker) { b.run("ipset", "flush", "KUBE-LOAD-BALANCER-FW") },
		[]string{"shop/edge:http", "should be dropped"}},
	{"the firewall has another range", func(b *ipvsBreaker) {
		b.run("ipset", "add", "KUBE-LOAD-BALANCER-SOURCE-CIDR", "198.51.100.93,tcp:80,203.0.113.128/25")
	}, []string{"just after 203.0.113.0/25", "should be dropped"}},
	{"a hairpin is not masqueraded", func(b *ipvsBreaker) { b.run("ipset", "del", "KUBE-LOOP-BACK", "10.180.0.10,tcp:80,10.180.0.10") },
		[]string{"shop/web:http", "from the backend itself (10.180.0.10)"}},
	{"an address is removed", func(b *ipvsBreaker) { b.run("ip", "address", "del", "10.96.9.1/32", "dev", "kube-ipvs0") },
		[]string{"shop/web:http", "clusterIP 10.96.9.1:80", "is not translated"}},
	{"an address is stale", func(b *ipvsBreaker) { b.run("ip", "address", "add", "10.96.9.9/32", "dev", "kube-ipvs0") },
		[]string{"no address 10.96.9.9 on a device for Services"}},
}

// ipvsBreaker breaks what a node holds in kube-proxy's mode ipvs, and restores it.
type ipvsBreaker struct {
	*testing.T

	stage  *stage
	handle *ipvs.Handle
	// services and destinations are the virtual services of IPv4, sets what ipset has saved, and
	// addresses those of the device.
	services     []*ipvs.Service
	destinations map[*ipvs.Service][]*ipvs.Destination
	sets         string
	device       netlink.Link
	addresses    []netlink.Addr
}

// newIPVSBreaker saves what a node holds.
func newIPVSBreaker(t *testing.T, s *stage) *ipvsBreaker {
	t.Helper()
	b := &ipvsBreaker{T: t, stage: s, destinations: map[*ipvs.Service][]*ipvs.Destination{}}
	require.NoError(t, s.node.Do(func() (err error) {
		if b.device, err = netlink.LinkByName("kube-ipvs0"); err != nil {
			return err
		}
		if b.addresses, err = netlink.AddrList(b.device, unix.AF_INET); err != nil { //nolint:forbidigo // an error ends the test
			return err
		}
		if b.handle, err = ipvs.New(""); err != nil {
			return err
		}
		all, err := b.handle.GetServices()
		if err != nil {
			return err
		}
		for _, v := range all {
			if v.AddressFamily == unix.AF_INET {
				v.Flags &^= 2 // IP_VS_SVC_F_HASHED, which the kernel sets itself
				b.services = append(b.services, v)
				if b.destinations[v], err = b.handle.GetDestinations(v); err != nil {
					return err
				}
			}
		}
		return nil
	}))
	t.Cleanup(b.handle.Close)
	b.sets = b.run("ipset", "save")
	return b
}

// run runs a command on the node and returns its output.
func (b *ipvsBreaker) run(args ...string) string {
	out, err := b.stage.node.Run(b.Context(), args[0], args[1:]...)
	require.NoError(b, err)
	return out
}

// at returns the virtual service of an address and port.
func (b *ipvsBreaker) at(frontend string) *ipvs.Service {
	for _, v := range b.services {
		if (&net.TCPAddr{IP: v.Address, Port: int(v.Port)}).String() == frontend {
			return v
		}
	}
	require.Fail(b, "no such virtual service", frontend)
	return nil
}

func (b *ipvsBreaker) destination(backend string, weight int) *ipvs.Destination {
	a, err := net.ResolveTCPAddr("tcp", backend)
	require.NoError(b, err)
	return &ipvs.Destination{Address: a.IP.To4(), Port: uint16(a.Port), Weight: weight, AddressFamily: unix.AF_INET}
}

func (b *ipvsBreaker) add(v *ipvs.Service, backend string) {
	require.NoError(b, b.handle.NewDestination(v, b.destination(backend, 1)))
}

func (b *ipvsBreaker) del(v *ipvs.Service, backend string) {
	require.NoError(b, b.handle.DelDestination(v, b.destination(backend, 1)))
}

func (b *ipvsBreaker) weigh(v *ipvs.Service, backend string, weight int) {
	require.NoError(b, b.handle.UpdateDestination(v, b.destination(backend, weight)))
}

// restore undoes a breakage.
func (b *ipvsBreaker) restore() {
	all, err := b.handle.GetServices()
	require.NoError(b, err)
	for _, v := range all {
		if v.AddressFamily == unix.AF_INET {
			require.NoError(b, b.handle.DelService(v))
		}
	}
	for _, v := range b.services {
		require.NoError(b, b.handle.NewService(v))
		for _, d := range b.destinations[v] {
			require.NoError(b, b.handle.NewDestination(v, d))
		}
	}
	require.NoError(b, b.stage.node.Do(func() error {
		held, err := netlink.AddrList(b.device, unix.AF_INET) //nolint:forbidigo // an error ends the test
		for i := range held {
			err = errors.Join(err, netlink.AddrDel(b.device, &held[i]))
		}
		for i := range b.addresses {
			err = errors.Join(err, netlink.AddrAdd(b.device, &b.addresses[i]))
		}
		return err
	}))
	restore := b.stage.node.Command(b.Context(), "ipset", "restore", "-exist")
	var script strings.Builder
	for line := range strings.Lines(b.sets) {
		words := strings.Fields(line)
		if words[0] == "create" {
			script.WriteString("flush " + words[1] + "\n")
		}
	}
	restore.Stdin = strings.NewReader(script.String() + b.sets)
	out, err := restore.CombinedOutput()
	require.NoError(b, err, "%s", out)
}
