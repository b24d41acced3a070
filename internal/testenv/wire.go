package testenv

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Wire opens connections with crafted packets, from any source address, and sees what becomes of them: where the first
// packet arrives and with which source, whether the answer to it comes back, or an error in its place. Nobody listens;
// the wire answers for all. So any address and port of any protocol can be a backend, and thousands of connections are
// tried in a second.
//
// It sees what reaches its edges: pods and clients, with the networks that they [Host.Attract]; and what its node
// delivers to itself, past the rules for input.
type Wire struct {
	node  *Host
	hosts map[*Host]*station

	mu       sync.Mutex
	attempts map[uint32]*attempt
	token    uint32
	port     uint16
	closed   bool
}

// station is where a wire sends from and sees what arrives.
type station struct {
	host *Host
	send [2]*os.File // IPv4, IPv6
	taps []interface{ Close() error }
	done sync.WaitGroup
}

// Opening is a connection to open.
type Opening struct {
	From  *Host
	Proto Proto
	// Src may lack the port, for which the wire takes one that it has not used for long, and the address, which then is
	// the one that From's kernel would take. Other addresses than From's own are fine.
	Src, Dst netip.AddrPort
}

// Fate is what became of a connection.
type Fate struct {
	// Opening is complete: Src is what was sent.
	Opening
	// At is where the first packet arrived: an edge, or the node; nil if nowhere.
	At *Host
	// SeenSrc and SeenDst are its addresses as they were there.
	SeenSrc, SeenDst netip.AddrPort
	// Answered tells whether an answer came back, from Dst to Src: the wire's to a packet that arrived at an edge, or a
	// reset in its place.
	Answered bool
	// Refused is an ICMP error that came back; "" if none did.
	Refused string
	// Denied is why the kernel of From did not let it out: EPERM from rules for output.
	Denied error
}

// PortUnreachable tells whether it was refused as by a port that nobody listens on.
func (f *Fate) PortUnreachable() bool { return f.Refused == portUnreachable }

type attempt struct {
	fate Fate
	// decided tells that nothing more is expected.
	decided bool
	// progress holds a value when something was seen of this attempt or of another that was made with it.
	progress chan struct{}
}

// NewWire makes a wire of a node and its edges, and has t close it.
func NewWire(t TB, node *Node, edges ...*Host) *Wire {
	t.Helper()
	w := &Wire{
		node: node.Host, hosts: map[*Host]*station{}, attempts: map[uint32]*attempt{}, token: uint32(os.Getpid()) << 16, port: firstPort,
	}
	t.Cleanup(w.Close)
	for _, host := range append(slices.Clone(edges), node.Host) {
		if err := w.addStation(host); err != nil {
			t.Fatalf("testenv: tap %s: %v", host.Name, err)
		}
	}
	return w
}

// Ports that connections come from if none is given. They are used in turn, so that a connection is not taken for an
// earlier one that a kernel still remembers.
const (
	firstPort = 10000
	lastPort  = 65000
)

func (w *Wire) addStation(host *Host) error {
	s := &station{host: host}
	w.hosts[host] = s
	return host.Do(func() error {
		for i, family := range []int{unix.AF_INET, unix.AF_INET6} {
			fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_RAW)
			if err != nil {
				return os.NewSyscallError("socket", err)
			}
			s.send[i] = os.NewFile(uintptr(fd), "sender")
			s.taps = append(s.taps, s.send[i])
		}
		if host == w.node {
			return w.tapNode(s)
		}
		return w.tapEdge(s)
	})
}

// tapEdge sees all that arrives on eth0.
func (w *Wire) tapEdge(s *station) error {
	const every = unix.ETH_P_ALL << 8 // in network byte order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	tap := os.NewFile(uintptr(fd), "tap")
	s.taps = append(s.taps, tap)
	if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1); err != nil {
		return os.NewSyscallError("setsockopt", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: every, Ifindex: s.host.eth0.Attrs().Index}); err != nil {
		return os.NewSyscallError("bind", err)
	}
	if err := enlarge(fd); err != nil {
		return err
	}
	s.done.Go(func() {
		data := make([]byte, 65536)
		for {
			n, err := tap.Read(data)
			if err != nil {
				return // closed
			}
			if p, ok := decodeIP(data[:n]); ok {
				w.see(s, p)
			}
		}
	})
	return nil
}

// tapNode sees what is delivered: a packet socket would see it before the rules have had their say.
func (w *Wire) tapNode(s *station) error {
	for _, protocol := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP, unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6} {
		for _, network := range []string{"ip4", "ip6"} {
			if network == "ip4" && protocol == unix.IPPROTO_ICMPV6 || network == "ip6" && protocol == unix.IPPROTO_ICMP {
				continue
			}
			if err := w.tapProtocol(s, network, protocol); err != nil {
				return fmt.Errorf("%s, protocol %d: %w", network, protocol, err)
			}
		}
	}
	return nil
}

func (w *Wire) tapProtocol(s *station, network string, protocol byte) error {
	config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var err error
		controlErr := raw.Control(func(fd uintptr) { err = enlarge(int(fd)) })
		if network == "ip6" {
			err = errors.Join(err, setOption(raw, unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO))
		}
		return errors.Join(controlErr, err)
	}}
	packets, err := config.ListenPacket(context.Background(), network+":"+strconv.Itoa(int(protocol)), "")
	if err != nil {
		return err
	}
	conn := packets.(*net.IPConn)
	s.taps = append(s.taps, conn)
	s.done.Go(func() {
		data, control := make([]byte, 65536), make([]byte, 128)
		for {
			n, controlLen, _, from, err := conn.ReadMsgIP(data, control)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				continue // an ICMP error about an earlier packet of this protocol
			}
			var p packet
			var ok bool
			if network == "ip4" { // with its header
				p, ok = decodeIP(data[:n])
			} else {
				src, _ := netip.AddrFromSlice(from.IP)
				dst, _ := packetInfo(control[:controlLen])
				p, ok = decodeSegment(protocol, src, dst, data[:n])
			}
			if ok {
				w.see(s, p)
			}
		}
	})
	return nil
}

// enlarge gives a socket room for bursts: as much as the kernel allows this user.
func enlarge(fd int) error {
	const size = 16 << 20
	err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, size)
	if errors.Is(err, unix.EPERM) {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, size)
	}
	return os.NewSyscallError("setsockopt", err)
}

// see notes what a packet tells of an attempt, and answers it if it is a first one that arrived at an edge.
func (w *Wire) see(s *station, p packet) {
	w.mu.Lock()
	defer w.mu.Unlock()
	a := w.attempts[p.token]
	if a == nil || w.closed || a.fate.Proto != p.proto {
		return
	}
	f := &a.fate
	home := f.From == s.host
	switch {
	case p.kind == opening && f.At == nil:
		f.At, f.SeenSrc, f.SeenDst = s.host, p.src, p.dst
		// The node answers for itself: that nobody listens.
		a.decided = s.host == w.node
		if s.host != w.node {
			// One that can't be sent does not arrive.
			_ = s.transmit(packet{kind: answer, proto: p.proto, src: p.dst, dst: p.src, token: p.token})
		}
	case p.kind == answer && home && p.src == f.Dst && p.dst == f.Src:
		f.Answered, a.decided = true, f.At != nil
	case p.kind == icmpError && home && f.At == nil:
		// The node's own UDP says the same of a packet whose arrival there may be seen a moment later.
		f.Refused, a.decided = p.icmp, p.proto != UDP
	default:
		return
	}
	select {
	case a.progress <- struct{}{}:
	default:
	}
}

func (s *station) transmit(p packet) error {
	index := 0
	if p.dst.Addr().Is6() {
		index = 1
	}
	raw, err := s.send[index].SyscallConn()
	if err != nil {
		return err
	}
	data, to := p.encode(), sockaddr(netip.AddrPortFrom(p.dst.Addr(), 0))
	sendErr := error(nil)
	err = raw.Control(func(fd uintptr) {
		for range 10 {
			if sendErr = unix.Sendto(int(fd), data, 0, to); !errors.Is(sendErr, unix.EAGAIN) {
				return
			}
			// Earlier packets have to leave first, on a slow machine.
			_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, 100)
		}
	})
	if err != nil {
		return err
	}
	return os.NewSyscallError("sendto", sendErr)
}

// Open sends the first packets of connections, in their order, and returns when it is known what became of each; at the
// latest when nothing has been seen of any for the time of silence, which is how a dropped packet is told.
func (w *Wire) Open(ctx context.Context, openings []Opening, silence time.Duration) ([]Fate, error) {
	progress := make(chan struct{}, 1)
	attempts, err := w.register(openings, progress)
	if err != nil {
		return nil, err
	}
	defer w.forget(attempts)
	pace := time.NewTicker(time.Millisecond)
	defer pace.Stop()
	for i, p := range attempts {
		if i%burst == burst-1 {
			<-pace.C
		}
		if err := w.launch(p); err != nil {
			return nil, err
		}
	}
	quiet := time.NewTimer(silence)
	defer quiet.Stop()
	for !w.allDecided(attempts) {
		select {
		case <-progress:
			quiet.Reset(silence)
		case <-quiet.C:
			return w.fates(attempts), nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return w.fates(attempts), nil
}

// burst is how many packets are sent in a millisecond: no queue on the way is shorter.
const burst = 64

// registered is an attempt with its packet.
type registered struct {
	*attempt
	packet packet
}

func (w *Wire) register(openings []Opening, progress chan struct{}) ([]registered, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var list []registered
	for _, o := range openings {
		if w.hosts[o.From] == nil {
			return nil, fmt.Errorf("%s is not at this wire", o.From.Name)
		}
		src, port := o.Src.Addr(), o.Src.Port()
		if !src.IsValid() {
			var err error
			if src, err = o.From.sourceFor(o.Dst); err != nil {
				return nil, err
			}
		}
		if port == 0 {
			if w.port++; w.port > lastPort {
				w.port = firstPort
			}
			port = w.port
		}
		o.Src = netip.AddrPortFrom(src, port)
		w.token++
		a := &attempt{fate: Fate{Opening: o}, progress: progress}
		w.attempts[w.token] = a
		list = append(list, registered{a, packet{kind: opening, proto: o.Proto, src: o.Src, dst: o.Dst, token: w.token}})
	}
	return list, nil
}

func (w *Wire) forget(list []registered) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range list {
		delete(w.attempts, r.packet.token)
	}
}

// launch sends a first packet.
func (w *Wire) launch(r registered) error {
	// From does not change.
	err := w.hosts[r.fate.From].transmit(r.packet)
	if !errors.Is(err, unix.EPERM) {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	r.fate.Denied = err
	return nil
}

func (w *Wire) allDecided(list []registered) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return !slices.ContainsFunc(list, func(r registered) bool { return !r.decided })
}

func (w *Wire) fates(list []registered) []Fate {
	w.mu.Lock()
	defer w.mu.Unlock()
	var fates []Fate
	for _, r := range list {
		fates = append(fates, r.fate)
	}
	return fates
}

// sourceFor is the address that the kernel takes for a connection that is bound to none.
func (h *Host) sourceFor(dst netip.AddrPort) (netip.Addr, error) {
	var source netip.Addr
	err := h.Do(func() error {
		conn, err := net.Dial("udp", dst.String())
		if err != nil {
			return err
		}
		defer conn.Close()
		source = addrPort(conn.LocalAddr()).Addr()
		return nil
	})
	if err != nil {
		return source, fmt.Errorf("which address %s would take for %s: %w", h.Name, dst, err)
	}
	return source, nil
}

// Close gives up the wire. Calling it again does nothing.
func (w *Wire) Close() {
	w.mu.Lock()
	closed := w.closed
	w.closed = true
	w.mu.Unlock()
	if closed {
		return
	}
	for _, s := range w.hosts {
		for _, tap := range s.taps {
			_ = tap.Close()
		}
		s.done.Wait()
	}
}
