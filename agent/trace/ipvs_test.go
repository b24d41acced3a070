// These tests prove, without a kernel that has IPVS, how packets pass IPVS between the rules that
// kube-proxy's mode ipvs makes, and what ipsets match. The tests of agent/programmer/ipvs run the
// same on a kernel with IPVS.
package trace

import (
	"net/netip"
	"testing"
	"time"

	"github.com/moby/ipvs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	anetlink "github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/internal/model"
)

const rulesForIPVS = `*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A OUTPUT -j KUBE-SERVICES
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-SERVICES ! -s 10.180.0.0/16 -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
COMMIT
`

// balanced returns the rules of a node with one cluster IP in IPVS.
func balanced(affinity time.Duration, weights ...int) *Rules {
	vip, pod := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("10.180.0.1")
	r := newRules(model.IPv4, Facts{Local: map[netip.Addr]bool{vip: true}, IPVS: true})
	clusterIPs := &ipset{fields: []string{"ip", "port"}, exact: map[string]struct{}{}}
	clusterIPs.exact[clusterIPs.key([2]netip.Addr{vip}, unix.IPPROTO_TCP, 80)] = struct{}{}
	hairpins := &ipset{fields: []string{"ip", "port", "ip"}, exact: map[string]struct{}{}}
	hairpins.exact[hairpins.key([2]netip.Addr{pod, pod}, unix.IPPROTO_TCP, 8080)] = struct{}{}
	r.ipsets = map[string]*ipset{"KUBE-CLUSTER-IP": clusterIPs, "KUBE-LOOP-BACK": hairpins}
	r.addSaved(rulesForIPVS, "nft", nil)
	b := &balancer{services: map[virtualKey]*virtualService{}}
	s := &ipvs.Service{Address: vip.AsSlice(), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: "rr"}
	if affinity > 0 {
		s.Flags, s.Timeout = persistent, uint32(affinity/time.Second)
	}
	var backends []*ipvs.Destination
	for _, w := range weights {
		backends = append(backends, &ipvs.Destination{Address: pod.AsSlice(), Port: 8080, Weight: w})
		pod = pod.Next()
	}
	r.addVirtual(b, s, backends)
	r.balance(b)
	r.finish()
	return r
}

func follow(t *testing.T, r *Rules, source, over string, known Memory) []Outcome {
	t.Helper()
	out, err := r.Trace(Packet{
		Protocol: model.TCP, Source: netip.MustParseAddr(source), Destination: netip.MustParseAddrPort("10.96.0.1:80"), Interface: over,
		Known: known,
	})
	require.NoError(t, err)
	return out
}

func TestIPVS(t *testing.T) {
	t.Parallel()
	r := balanced(0, 1, 3, 0)
	require.Empty(t, r.Unjudged)
	for source, c := range map[string]struct {
		over       string
		masquerade []bool
	}{
		"203.0.113.1": {"eth0", []bool{true, true}}, "192.168.0.2": {"", []bool{true, true}}, "10.180.0.9": {"pod", []bool{false, false}},
		"10.180.0.1": {"pod", []bool{true, false}}, // the backend itself
	} {
		out := follow(t, r, source, c.over, Memory{})
		require.Len(t, out, 2, source)
		for i, o := range out {
			require.Equal(t, Pass, o.Verdict)
			require.Equal(t, []string{"10.180.0.1:8080", "10.180.0.2:8080"}[i], o.Backend.String())
			require.InDelta(t, []float64{0.25, 0.75}[i], o.Probability, 1e-9)
			require.Equal(t, c.masquerade[i], o.Masquerade, source)
			require.Equal(t, "rr", o.Scheduler)
		}
	}
	require.Contains(t, r.Frontends(), Frontend{model.TCP, netip.MustParseAddr("10.96.0.1"), 80})

	out := follow(t, balanced(0, 0), "203.0.113.1", "eth0", Memory{})
	require.Len(t, out, 1)
	require.Equal(t, Reject, out[0].Verdict, "no backend gets connections")

	r.balancer.untracked = true
	require.False(t, follow(t, r, "203.0.113.1", "eth0", Memory{})[0].Masquerade, "conntrack does not know of them")

	sticky := balanced(time.Hour, 1, 1)
	for _, first := range follow(t, sticky, "203.0.113.1", "eth0", Memory{}) {
		require.Equal(t, time.Hour, first.Affinity)
		again := follow(t, sticky, "203.0.113.1", "eth0", first.Memory)
		require.Len(t, again, 1)
		require.Equal(t, first.Backend, again[0].Backend)
	}
}

func TestIPSets(t *testing.T) {
	t.Parallel()
	address := netip.MustParseAddr
	nets := &ipset{fields: []string{"ip", "port", "net"}, exact: map[string]struct{}{}, others: []ipsetEntry{{
		[2]netip.Prefix{netip.MustParsePrefix("10.96.0.1/32"), netip.MustParsePrefix("10.98.0.0/16")}, unix.IPPROTO_UDP, 53,
	}}}
	require.True(t, nets.has([2]netip.Addr{address("10.96.0.1"), address("10.98.3.4")}, unix.IPPROTO_UDP, 53))
	require.False(t, nets.has([2]netip.Addr{address("10.96.0.1"), address("10.99.3.4")}, unix.IPPROTO_UDP, 53))
	require.False(t, nets.has([2]netip.Addr{address("10.96.0.1"), address("10.98.3.4")}, unix.IPPROTO_TCP, 53))
	require.False(t, nets.has([2]netip.Addr{address("10.96.0.1"), address("10.98.3.4")}, unix.IPPROTO_UDP, 54))
	ports := &ipset{fields: []string{"port"}, bitmap: true, exact: map[string]struct{}{}}
	ports.exact[ports.key([2]netip.Addr{}, 0, 30001)] = struct{}{}
	require.True(t, ports.has([2]netip.Addr{}, unix.IPPROTO_TCP, 30001), "a bitmap has no protocol")
	require.False(t, ports.has([2]netip.Addr{}, unix.IPPROTO_TCP, 30002))

	r := balanced(0, 1)
	r.ipsets["KUBE-X"] = &ipset{fields: []string{"ip", "mac"}}
	r.addSaved("*nat\n:KUBE-SERVICES - [0:0]\n-A KUBE-SERVICES -m set --match-set KUBE-X dst,dst -j ACCEPT\n"+
		"-A KUBE-SERVICES -m set --match-set KUBE-Y dst,dst -j ACCEPT\nCOMMIT\n", "nft", nil)
	r.finish()
	require.Len(t, r.Unjudged, 2)
	require.Contains(t, r.Unjudged[0], `the ipset "KUBE-X" has a field "mac"`)
	require.Contains(t, r.Unjudged[1], `the ipset "KUBE-Y" does not exist`)
}

// TestVirtual proves that a rule sees what a packet was for before IPVS chose a backend. kube-proxy
// drops by it what the node sends to a load balancer's address that is not open to the node.
func TestVirtual(t *testing.T) {
	t.Parallel()
	for rule, drops := range map[string]bool{
		"-s 10.96.0.1/32 -m ipvs --vaddr 10.96.0.1 --vproto 6 --vport 80 -j DROP": true,
		"-m ipvs --vaddr 10.96.0.0/24 -j DROP":                                    true,
		"-m ipvs ! --vport 81 -j DROP":                                            true,
		"-m ipvs --vproto tcp ! --vaddr 10.96.0.1 -j DROP":                        false,
		"-m ipvs --vaddr 10.96.0.1 --vproto 17 --vport 80 -j DROP":                false,
		"-m ipvs --vaddr 10.96.0.1 --vport 81 -j DROP":                            false,
		"-m ipvs --vaddr 10.180.0.1 -j DROP":                                      false,
		"-s 10.96.0.2/32 -m ipvs --vaddr 10.96.0.1 -j DROP":                       false,
	} {
		r := balanced(0, 1)
		r.addSaved("*filter\n:OUTPUT ACCEPT [0:0]\n:KUBE-IPVS-OUT-FILTER - [0:0]\n-A OUTPUT -j KUBE-IPVS-OUT-FILTER\n"+
			"-A KUBE-IPVS-OUT-FILTER "+rule+"\nCOMMIT\n", "nft", nil)
		r.finish()
		require.Empty(t, r.Unjudged, rule)
		out := follow(t, r, "10.96.0.1", "", Memory{})
		require.Len(t, out, 1)
		require.Equal(t, drops, out[0].Verdict == Drop, rule)
	}
	r := balanced(0, 1)
	r.addSaved("*filter\n:OUTPUT ACCEPT [0:0]\n:KUBE-IPVS-OUT-FILTER - [0:0]\n-A KUBE-IPVS-OUT-FILTER -m ipvs --vdir REPLY -j DROP\n"+
		"-A KUBE-IPVS-OUT-FILTER -m ipvs --vaddr x -j DROP\nCOMMIT\n", "nft", nil)
	r.finish()
	require.Len(t, r.Unjudged, 2)
}

// TestBridge proves that a rule which asks for a bridge's port is judged as long as the answer
// makes no difference. kube-proxy's rules for external IPs are such rules.
func TestBridge(t *testing.T) {
	t.Parallel()
	for rules, differs := range map[string]bool{
		"-A KUBE-SERVICES -m physdev ! --physdev-is-in -m addrtype ! --src-type LOCAL -j ACCEPT\n": false,
		"-A KUBE-SERVICES -m physdev --physdev-is-in -j MARK --set-xmark 0x4000/0x4000\n":          true,
	} {
		r := balanced(0, 1)
		r.addSaved("*nat\n:PREROUTING ACCEPT [0:0]\n:KUBE-SERVICES - [0:0]\n-A PREROUTING -j KUBE-SERVICES\n"+rules+"COMMIT\n", "nft", nil)
		r.finish()
		require.Empty(t, r.Unjudged)
		from := func(source, over string) error {
			_, err := r.Trace(Packet{
				Protocol: model.TCP, Source: netip.MustParseAddr(source), Destination: netip.MustParseAddrPort("10.96.0.1:80"), Interface: over,
			})
			return err
		}
		require.NoError(t, from("192.168.0.2", ""), "what the node sends comes through no port")
		if err := from("10.180.0.9", "pod"); differs {
			require.ErrorIs(t, err, ErrBridge)
		} else {
			require.NoError(t, err)
		}
	}
}

// TestEntriesAreFrontends proves that entries of the ipsets that kube-proxy's rules ask for
// destinations count as frontends, so that stale ones are found.
func TestEntriesAreFrontends(t *testing.T) {
	t.Parallel()
	r := newRules(model.IPv4, Facts{IPVS: true, KubeProxyIPVS: true})
	vip, pod := netip.MustParsePrefix("198.51.100.9/32"), netip.MustParsePrefix("10.180.0.1/32")
	entry := anetlink.IPSetEntry{First: vip, Protocol: unix.IPPROTO_TCP, Port: 80}
	for name, s := range map[string]*ipset{
		"KUBE-EXTERNAL-IP": {fields: []string{"ip", "port"}}, "KUBE-LOOP-BACK": {fields: []string{"ip", "port", "ip"}},
		"KUBE-NODE-PORT-UDP": {fields: []string{"port"}, bitmap: true}, "KUBE-HEALTH-CHECK-NODE-PORT": {fields: []string{"port"}, bitmap: true},
		"OTHERS": {fields: []string{"ip", "port"}},
	} {
		e := entry
		if name == "KUBE-LOOP-BACK" {
			e.First, e.Second = pod, pod
		}
		s.exact = map[string]struct{}{}
		s.addFrontend(e)
		if r.ipsets == nil {
			r.ipsets = map[string]*ipset{}
		}
		r.ipsets[name] = s
	}
	r.addSaved("*nat\n:PREROUTING ACCEPT [0:0]\n:KUBE-SERVICES - [0:0]\n:KUBE-NODE-PORT - [0:0]\n:KUBE-POSTROUTING - [0:0]\n"+
		"-A KUBE-SERVICES -m set --match-set KUBE-EXTERNAL-IP dst,dst -j ACCEPT\n"+
		"-A KUBE-SERVICES -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j ACCEPT\n"+
		"-A KUBE-NODE-PORT -p udp -m set --match-set KUBE-NODE-PORT-UDP dst -j RETURN\n"+
		"-A KUBE-POSTROUTING -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE\n"+
		"-A PREROUTING -m set --match-set OTHERS dst,dst -j ACCEPT\nCOMMIT\n", "nft", nil)
	r.finish()
	require.Empty(t, r.Unjudged)
	require.Equal(t, map[Frontend]string{
		{model.TCP, vip.Addr(), 80}: "ipset KUBE-EXTERNAL-IP", {Protocol: model.UDP, Port: 80}: "ipset KUBE-NODE-PORT-UDP",
	}, r.Frontends())
	require.True(t, r.KubeProxyIPVS)
}
