// These tests prove which settings of a real kernel count as keeping it from forwarding packets,
// and as delivering them to the node.
package trace_test

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/trace"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// TestDelivered asserts that marks count as delivered if the whole mark leads to a route that
// delivers everything.
func TestDelivered(t *testing.T) {
	t.Parallel()
	node := testenv.NewNetwork(t).AddNode("a")
	run := func(command string) {
		_, err := node.Run(t.Context(), "ip", strings.Fields(command)...)
		require.NoError(t, err)
	}
	delivered := func() (marks map[model.Family][]uint32) {
		require.NoError(t, node.Do(func() error {
			facts, err := trace.ReadFacts()
			marks = facts.Delivered
			return err
		}))
		return marks
	}
	run("link add slicecast-ipvs0 type veth peer name peer")
	for _, family := range []string{"-4", "-6"} {
		run(family + " rule add fwmark 7 lookup 700")
		run(family + " rule add fwmark 8/0xff lookup 700")
		run(family + " rule add fwmark 9 iif lo lookup 700")
		run(family + " rule add fwmark 10 lookup main")
	}
	require.Empty(t, delivered())
	run("-4 route add local default dev lo table 700")
	require.Equal(t, map[model.Family][]uint32{model.IPv4: {7}}, delivered())
	run("-6 route add local default dev lo table 700")
	require.Equal(t, map[model.Family][]uint32{model.IPv4: {7}, model.IPv6: {7}}, delivered())
	run("link del slicecast-ipvs0")
	require.Empty(t, delivered(), "no rule of IPVS uses them")
}

func TestForwarding(t *testing.T) {
	t.Parallel()
	network := testenv.NewNetwork(t)
	node := network.AddNode("a")
	pod, client := node.AddPod("client"), network.AddClient("outside")
	pod.Serve(testenv.TCP, 8080)
	client.RouteVia(node, netip.PrefixFrom(pod.IPv4, 24).Masked(), netip.PrefixFrom(pod.IPv6, 64).Masked())
	set := func(setting string) {
		_, err := node.Run(t.Context(), "sysctl", "-q", "-w", setting)
		require.NoError(t, err)
	}
	require.NoError(t, node.Do(func() error {
		for _, link := range []string{"all", "default"} {
			require.NoError(t, os.WriteFile("/proc/sys/net/ipv6/conf/"+link+"/forwarding", []byte("1"), 0))
		}
		return nil
	}))
	toPod := func(to netip.Addr) (link string) {
		require.NoError(t, node.Do(func() error { link = trace.InterfaceTo(to); return nil }))
		require.NotEmpty(t, link)
		return link
	}
	type settings struct{ none, some string }
	check := func(want settings, family model.Family) {
		t.Helper()
		to := pod.IPv4
		if family == model.IPv6 {
			to = pod.IPv6
		}
		r := client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(to, 8080), 1, testenv.ProbeOptions{Timeout: 300 * time.Millisecond})
		require.Equal(t, want == settings{}, r.Attempts[0].Outcome == testenv.Answered)
		require.NoError(t, node.Do(func() error {
			facts, err := trace.ReadFacts()
			require.Equal(t, want, settings{facts.NotForwarding[family], facts.PartlyForwarding[family]})
			return err
		}))
	}
	veth := toPod(pod.IPv4)
	check(settings{}, model.IPv4)
	set("net.ipv4.conf." + veth + ".forwarding=0")
	check(settings{some: "net.ipv4.conf." + veth + ".forwarding = 0"}, model.IPv4)
	set("net.ipv4.ip_forward=0")
	check(settings{none: "net.ipv4.ip_forward = 0"}, model.IPv4)

	check(settings{}, model.IPv6)
	set("net.ipv6.conf.all.forwarding=0")
	const all = "net.ipv6.conf.all.forwarding = 0"
	check(settings{none: all}, model.IPv6)
	forced := func(link string) string { return fmt.Sprintf("net.ipv6.conf.%s.force_forwarding", link) }
	if _, err := node.Run(t.Context(), "sysctl", "-q", "-w", forced("eth0")+"=1"); err != nil {
		return // older than Linux 6.17
	}
	check(settings{some: all + ", " + forced(veth) + " = 0"}, model.IPv6)
	set(forced(veth) + "=1")
	check(settings{}, model.IPv6)
}
