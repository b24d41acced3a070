package health

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/nodeport"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/model"
)

// retryInterval is how often the server retries ports that it could not open, and reads the
// machine's addresses again.
const retryInterval = 5 * time.Second

// listenerKey identifies an address to listen on, and the health check to answer there.
type listenerKey struct {
	network, address string
	check            view.HealthCheckID // zero means the node's
}

// listeners are the listeners that are open now. Only the goroutine of Server.Run uses them.
//
// Invariants, between two updates:
//
//  1. open has the server of each listener that is open, which serves until it is closed.
//  2. failed has the listeners that are wanted and could not be opened at the last attempt.
type listeners struct {
	handlers
	open    map[listenerKey]*http.Server
	failed  map[listenerKey]bool // whether the failure was logged
	lines   *bounded.Lines       // about ports of Services
	lost    bool                 // the addresses could not be read, which was logged already
	serving sync.WaitGroup
}

// update closes the listeners that are no longer wanted, and opens those that are missing.
func (l *listeners) update(ctx context.Context) {
	wanted, err := l.wanted()
	if err != nil {
		l.failures.Inc()
		if !l.lost {
			l.Logger.Error("Cannot read the node's addresses, no ports for health checks are opened or closed",
				"err", err)
		}
		l.lost = true
		return
	}
	l.lost = false
	for key, server := range l.open {
		if _, ok := wanted[key]; !ok {
			_ = server.Close() // the error is the listener's, and nothing can be done about it
			delete(l.open, key)
		}
	}
	maps.DeleteFunc(l.failed, func(key listenerKey, _ bool) bool {
		_, ok := wanted[key]
		return !ok
	})
	for key, handler := range wanted {
		if _, ok := l.open[key]; !ok {
			l.listen(ctx, key, handler)
		}
	}
}

// wanted returns all that should be listened on, with the handlers.
func (l *listeners) wanted() (map[listenerKey]http.Handler, error) {
	l.mu.Lock()
	checks, node := l.checks, l.node
	l.mu.Unlock()
	wanted := make(map[listenerKey]http.Handler)
	for _, address := range l.Addresses {
		wanted[listenerKey{network: "tcp", address: address}] = l.nodeHandler()
	}
	if len(checks) == 0 {
		return wanted, nil
	}
	addresses, err := nodeport.Addresses(node)
	if err != nil {
		return nil, err
	}
	of := map[model.Family][]netip.Addr{}
	for _, address := range listenAddresses(node, addresses) {
		of[model.FamilyOf(address)] = append(of[model.FamilyOf(address)], address)
	}
	networks := map[model.Family]string{model.IPv4: "tcp4", model.IPv6: "tcp6"}
	for id, check := range checks {
		on := of[id.Family]
		if !slices.ContainsFunc(on, netip.Addr.IsUnspecified) {
			on = slices.Concat(on, check.Addresses)
		}
		for _, address := range on {
			wanted[listenerKey{networks[id.Family], netip.AddrPortFrom(address, check.Port).String(), id}] = l.serviceHandler(id)
		}
	}
	return wanted, nil
}

// listenAddresses returns the addresses to listen on to answer on the given ones. In a family
// in which NodePorts are on all addresses, it is the unspecified address.
func listenAddresses(node view.Node, addresses []netip.Addr) []netip.Addr {
	var out []netip.Addr
	for _, a := range addresses {
		all := netip.IPv4Unspecified()
		if a.Is6() {
			all = netip.IPv6Unspecified()
		}
		switch {
		case slices.Contains(node.NodePorts, netip.PrefixFrom(all, 0)):
			a = all
		case a.IsLinkLocalUnicast(): // it has no meaning without an interface
			continue
		}
		if !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out
}

// freeBind lets a socket listen on an address that the node does not have, and may never have. A
// load balancer's address often becomes the node's by a route, which nobody reports as an address.
// With IPVS, rules deliver what comes to the address, and replies need IP_TRANSPARENT. An agent
// that may not set it has no such rules.
func freeBind(_, _ string, socket syscall.RawConn) error {
	var err error
	control := socket.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1)
		_ = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_TRANSPARENT, 1)
	})
	return errors.Join(control, err)
}

func (l *listeners) listen(ctx context.Context, key listenerKey, handler http.Handler) {
	config := net.ListenConfig{}
	if key.check != (view.HealthCheckID{}) {
		config.Control = freeBind
	}
	listener, err := config.Listen(ctx, key.network, key.address)
	if err != nil {
		if ctx.Err() != nil {
			return
		}
		l.failures.Inc()
		if _, failed := l.failed[key]; failed {
			return
		}
		log := l.Logger
		if key.check != (view.HealthCheckID{}) {
			log = l.lines.Logger(log, key.check.Service.Namespace)
		}
		l.failed[key] = log != nil
		if log != nil {
			log.Error("Cannot listen for health checks, so load balancers consider the node unhealthy; trying "+
				"again",
				"for", key.subject(), "address", key.address, "err", err)
		}
		return
	}
	if l.failed[key] {
		l.Logger.Info("Listening for health checks", "for", key.subject(), "address", key.address)
	}
	delete(l.failed, key)
	port := l.nodePort
	if key.check != (view.HealthCheckID{}) {
		port = l.servicePort
	}
	server := port.Server(handler)
	l.open[key] = server
	// Serve ends with Close. The listener's Accept returns only temporary errors before.
	l.serving.Go(func() { _ = server.Serve(port.Listener(listener)) })
}

// subject names the node or the Service that k's health check is about, for logs.
func (k listenerKey) subject() string {
	if k.check == (view.HealthCheckID{}) {
		return "the node"
	}
	return k.check.Service.String()
}

// close closes all listeners, and waits until no request is being answered.
func (l *listeners) close() {
	for _, server := range l.open {
		_ = server.Close() // the error is the listener's, and nothing can be done about it
	}
	l.serving.Wait()
}
