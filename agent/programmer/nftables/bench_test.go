package nftables

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

func benchPort(service, backends int) *view.ServicePort {
	p := &view.ServicePort{ID: serviceID(fmt.Sprint("s", service), model.TCP, model.IPv4)}
	p.Frontends = []view.Frontend{clusterIP(netip.AddrFrom4([4]byte{10, byte(96 + service>>16), byte(service >> 8), byte(service)}))}
	for i := range backends {
		a := netip.AddrFrom4([4]byte{byte(11 + service>>16), byte(service >> 8), byte(service), byte(i)})
		p.Cluster = append(p.Cluster, view.Backend{Address: netip.AddrPortFrom(a, uint16(1000+i>>8))})
	}
	return p
}

func TestQuick(t *testing.T) {
	h := newInHost(t, testenv.NewNetwork(t).AddNode("a").Host, Options{})
	for _, size := range [][2]int{{1000, 5}, {44125, 1}} {
		state := newState()
		for i := range size[0] {
			p := benchPort(i, size[1])
			state.Ports[p.ID] = p
		}
		now := cpuNow(t)
		require.NoError(t, h.Replace(t.Context(), state))
		fmt.Println(size, "load", (cpuNow(t) - now))
		now = cpuNow(t)
		require.NoError(t, h.Replace(t.Context(), state))
		fmt.Println(size, "again", (cpuNow(t) - now))
		p := benchPort(7, size[1])
		without := *p
		without.Cluster = p.Cluster[1:]
		if size[1] == 1 {
			without.Frontends = []view.Frontend{everyone(p.Frontends[0], toReject)}
		}
		now = cpuNow(t)
		n := 2000
		for range n / 2 {
			require.NoError(t, h.Apply(t.Context(), []view.Change{{Before: p, After: &without}}))
			require.NoError(t, h.Apply(t.Context(), []view.Change{{Before: &without, After: p}}))
		}
		fmt.Println(size, "flip", (cpuNow(t)-now)/time.Duration(n))
		now = cpuNow(t)
		require.NoError(t, h.Cleanup(t.Context()))
		fmt.Println(size, "cleanup", (cpuNow(t) - now))
	}
}

func cpuNow(t testing.TB) time.Duration {
	var u unix.Rusage
	require.NoError(t, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
