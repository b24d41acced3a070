// These tests prove that rules which nobody would write neither stop the evaluation nor make it
// take long, and that the rules of others cost little.
package trace

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables/expr"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/internal/model"
)

var packet = Packet{
	Protocol: model.TCP, Source: netip.MustParseAddr("203.0.113.1"), Destination: netip.MustParseAddrPort("10.96.0.1:80"), Interface: "eth0",
}

// traceAll follows packets through rules, and requires that what happens to them adds up.
func traceAll(t require.TestingT, r *Rules) {
	r.finish()
	for i, over := range []string{"eth0", "", "eth0", ""} {
		p := packet
		p.Interface, p.Firewalls = over, i >= 2
		out, err := r.Trace(p)
		if err != nil {
			require.ErrorIs(t, err, ErrTooComplex)
			continue
		}
		sum := 0.0
		for _, o := range out {
			sum += o.Probability
		}
		require.InDelta(t, 1, sum, 1e-6)
	}
}

func FuzzSaved(f *testing.F) {
	f.Add("*nat\n:PREROUTING ACCEPT [0:0]\n:A - [0:0]\n-A PREROUTING -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j A\n" +
		"-A A -m statistic --mode random --probability 0.5 -j DNAT --to-destination 10.0.0.1:80\n-A A -j A\nCOMMIT\n")
	f.Add("*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -p tcp -m tcp --sport 1:9 --tcp-flags SYN,ACK SYN -j CT --notrack\nCOMMIT\n*mangle\n:FORWARD DROP [0:0]\n" +
		"-A FORWARD -m connmark --mark 0x1/0x3 -j CONNMARK --restore-mark --nfmask 0xf --ctmask 0xf\nCOMMIT\n")
	f.Add("*filter\n:INPUT DROP [0:0]\n:KUBE-SERVICES - [0:0]\n-A INPUT -m comment --comment \"a \\\" b\" -g KUBE-SERVICES\n" +
		"-A KUBE-SERVICES ! -s ::1 -m recent --set --name x -m mark ! --mark 0x1/0x2 -j REJECT\nCOMMIT\n")
	f.Fuzz(func(t *testing.T, text string) {
		r := newRules(model.IPv4, Facts{})
		r.addSaved(text, "nft", nil)
		traceAll(t, r)
	})
}

// encode returns expressions as the kernel holds them.
func encode(all ...expr.Any) []byte {
	w := &netlink.Writer{}
	for _, e := range all {
		b, err := expr.Marshal(unix.NFPROTO_IPV4, e)
		if err != nil {
			panic(err)
		}
		w.Bytes(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, b)
	}
	return w.Buf
}

// tableOf returns a table with rules in its chain for prerouting.
func tableOf(name string, rules ...[]byte) *nft.Held {
	chain := &nft.HeldRules{Hook: nft.Hook{Kind: "nat", Priority: -100}}
	for _, r := range rules {
		chain.Rules = append(chain.Rules, nft.HeldRule{Expressions: r})
	}
	return &nft.Held{
		Table:  nft.Table{Family: nft.FamilyOf(model.IPv4), Name: name},
		Chains: map[string]*nft.HeldRules{"pre": chain, "again": {Rules: chain.Rules}},
		Sets: map[string]*nft.HeldElements{
			"ranges":  {Flags: unix.NFT_SET_INTERVAL, KeyType: 7, KeyLen: 4, Elements: []nft.HeldElement{{Key: "\x0a\x00\x00\x00"}, {Key: "\x0b\x00\x00\x00", IsEnd: true}}},
			"many":    {Flags: unix.NFT_SET_INTERVAL, KeyType: keyFrontend4, KeyLen: 12, Elements: []nft.HeldElement{{Key: "a", End: "b"}}},
			"map":     {Flags: unix.NFT_SET_MAP, KeyType: 19, KeyLen: 4, DataLen: 4, Elements: []nft.HeldElement{{Key: "abcd", Data: "efgh"}}},
			"clients": {Flags: unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT, KeyType: 7, KeyLen: 4},
		},
	}
}

func FuzzExpressions(f *testing.F) {
	family := nft.FamilyOf(model.IPv4)
	f.Add(encode(append(family.Destination(0), nft.In("ranges")...)...))
	f.Add(encode(append(nft.RandomIndex(1<<18, 0), nft.StoreMark(0)...)...))
	f.Add(encode(append(family.Source(0), nft.UpdateSet("clients", 0, 0, 0, time.Second)...)...))
	f.Add(encode(nft.Jump("again")...))
	f.Add(encode(append(nft.Immediate(1, 0), family.DNAT(0)...)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := newRules(model.IPv4, Facts{})
		r.addTable(tableOf("slicecast", b, b))
		traceAll(t, r)
	})
}

// TestTooComplex proves that rules which lead to themselves and that draw numbers again and again
// end.
func TestTooComplex(t *testing.T) {
	r := newRules(model.IPv4, Facts{})
	draw := encode(append(nft.RandomIndex(1<<18, 0), nft.StoreMark(0)...)...)
	r.addTable(tableOf("slicecast", draw, draw, encode(nft.Jump("again")...)))
	r.finish()
	begin := time.Now()
	_, err := r.Trace(packet)
	require.ErrorIs(t, err, ErrTooComplex)
	require.Less(t, time.Since(begin), time.Minute)
}

// TestManyForeignRules proves that a packet passes by 100,000 rules for other addresses at once.
func TestManyForeignRules(t *testing.T) {
	var text strings.Builder
	text.WriteString("*nat\n:PREROUTING ACCEPT [0:0]\n:DOCKER - [0:0]\n-A PREROUTING -j DOCKER\n")
	for i := range 100_000 {
		fmt.Fprintf(&text, "-A DOCKER -d 172.%d.%d.%d/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.0.0.1:80\n", 16+i>>16, i>>8&0xff, i&0xff)
	}
	text.WriteString("COMMIT\n*filter\n:FORWARD DROP [0:0]\n:cali-FORWARD - [0:0]\n-A FORWARD -m set --match-set x src -j cali-FORWARD\n-A cali-FORWARD -j DROP\nCOMMIT\n")
	r := newRules(model.IPv4, Facts{})
	r.addSaved(text.String(), "nft", nil)
	r.finish()
	require.Empty(t, r.Unjudged)
	x := &run{rules: r, packet: packet, budget: maxSteps, over: "eth0"}
	x.setHeaders()
	x.hook(unix.NF_INET_PRE_ROUTING, []state{{probability: 1, to: packet.Destination}})
	require.Less(t, maxSteps-x.budget, 100, "steps")

	to := packet
	to.Destination = netip.MustParseAddrPort("172.16.1.2:80")
	out, err := r.Trace(to)
	require.NoError(t, err)
	require.Equal(t, netip.MustParseAddrPort("10.0.0.1:80"), out[0].Backend)
	require.Equal(t, 259, out[0].By.Position)
}
