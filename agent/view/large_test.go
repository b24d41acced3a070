// This test proves that one Service gets a bounded number of frontends, however many ports and
// addresses it asks for, and that other Services are not affected.
package view_test

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// manyPorts returns an edit that sets count ports with NodePorts. Of every four ports, two have the
// same number.
func manyPorts(count int) func(*model.Service) {
	return func(s *model.Service) {
		s.Type, s.Ports = model.NodePort, nil
		for i := range count {
			s.Ports = append(s.Ports, model.ServicePort{
				Name: fmt.Sprintf("p%05d", i), Protocol: model.TCP, Port: uint16(1 + i - i%4/3), NodePort: uint16(20000 + i),
			})
		}
	}
}

func manyExternalIPs(count int) func(*model.Service) {
	return func(s *model.Service) {
		for i := range count {
			s.ExternalIPs = append(s.ExternalIPs, netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}))
		}
	}
}

func frontendCount(state view.State) (count int) {
	for _, p := range state.Ports {
		count += len(p.Frontends)
	}
	return count
}

// TestServiceIsBounded asserts that a Service gets a bounded number of frontends, however many
// ports and addresses it has. Each port keeps its cluster IP and NodePort, and other Services are
// not affected.
func TestServiceIsBounded(t *testing.T) {
	f := newFight(t)
	f.set(api, clusterIP("10.96.0.2"))
	f.set(web, manyPorts(400), manyExternalIPs(2000))
	f.change()
	require.Len(t, f.State().Ports, 401)
	require.Equal(t, 1+300*25+400, frontendCount(f.State()), "a quarter of the ports has the number of another")
	require.Contains(t, f.has(web), "clusterIP 10.96.0.1:1/TCP")
	require.Contains(t, f.has(web), "externalIP 203.0.0.23:1/TCP")
	require.NotContains(t, f.has(web), "externalIP 203.0.0.24:1/TCP")
	require.Contains(t, f.Problems()[0].Reason,
		"more than 10000 pairs of port and address over IPv4: the last 0 ports and the last 1976 external addresses are not served")

	// Other Services can have what is left out.
	f.set(api, clusterIP("10.96.0.2"), externalIP("203.0.0.24"), ports(model.ServicePort{Protocol: model.TCP, Port: 1}))
	f.change()
	require.Contains(t, f.has(api), "externalIP 203.0.0.24:1/TCP")

	f.set(web, manyPorts(10100))
	f.change()
	require.Len(t, f.State().Ports, 10001)
	require.Contains(t, f.Problems()[0].Reason, "the last 100 ports and the last 0 external addresses are not served")

	f.set(web, func(s *model.Service) {
		s.Ports = nil
		for i := range 10100 {
			s.Ports = append(s.Ports, model.ServicePort{Name: fmt.Sprintf("p%05d", i), Protocol: model.TCP, Port: uint16(1 + i)})
		}
	})
	f.change()
	require.NotContains(t, f.Problems()[0].Reason, ";", "their number is all that is wrong with them")

	f.set(web, manyPorts(100), manyExternalIPs(99))
	f.change()
	require.Equal(t, 1+75*100+100, frontendCount(f.State()))
	require.NotContains(t, f.Problems()[0].Reason, "are not served")
}
