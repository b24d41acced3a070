package h2

import (
	"net"
	"net/netip"
	"sync"
)

// strangers are the connections whose clients have not shown yet who they are.
type strangers struct {
	most, mostOfOne int

	mu        sync.Mutex
	count     int
	byAddress map[netip.Addr]int
}

// enter counts a connection until leave is called, which may be more than once. It gives false if there is no place.
func (s *strangers) enter(from net.Addr) (leave func(), ok bool) {
	var address netip.Addr // those that have none share one
	if a, err := netip.ParseAddrPort(from.String()); err == nil {
		address = a.Addr().Unmap()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.count >= s.most || s.byAddress[address] >= s.mostOfOne {
		return nil, false
	}
	s.count++
	s.byAddress[address]++
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.count--
		if s.byAddress[address]--; s.byAddress[address] == 0 {
			delete(s.byAddress, address)
		}
	}), true
}
