// This file holds the wire, which opens connections with crafted packets and observes what becomes
// of them.
package conformance

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
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/testenv"
)

// Wire opens connections with crafted packets from any source address and observes what becomes of
// them. It sees where the first packet arrives and with which source address, and whether an answer
// or an ICMP error comes back. No server listens anywhere; the wire answers itself. Therefore any
// address and port of any protocol can be a backend, and a test can try thousands of connections in
// a second.
//
// A wire sees packets that reach its edges, which are pods and clients with the networks that they
// [testenv.Host.Attract]. It also sees packets that its node delivers locally, after the node's
// rules for input.
type Wire struct {
	node  *testenv.Host
	hosts map[*testenv.Host]*station

	// mu guards the fields below.
	mu       sync.Mutex
	attempts map[uint32]*attempt // by token
	token    uint32              // the last token used
	relayed  chan<- Fate         // receives where a connection without a token arrives; see Relayed
	port     uint16              // the last source port used
	closed   bool
}

// station is a host at which a wire sends and receives.
type station struct {
	host *testenv.Host
	send [2]*os.File                  // raw sockets for IPv4 and IPv6
	taps []interface{ Close() error } // all sockets of the station
	done sync.WaitGroup
}

// Opening describes a connection to open.
type Opening struct {
	From  *testenv.Host
	Proto Proto
	// Src may lack the address, the port or both. The wire fills in the address that From's kernel
	// would choose, and a port that it has not used recently. Src may be an address that From does
	// not have.
	Src, Dst netip.AddrPort
}

// Fate describes what became of a connection.
type Fate struct {
	// Opening is the opening with the Src that was sent.
	Opening
	// At is where the first packet arrived: an edge or the node. It is nil if the packet arrived
	// nowhere.
	At *testenv.Host
	// SeenSrc and SeenDst are the addresses of the first packet where it arrived.
	SeenSrc, SeenDst netip.AddrPort
	// Answered means that an answer came back from Dst to Src. The wire answers packets that arrive
	// at an edge; a TCP reset or an SCTP abort by a rule counts, too.
	Answered bool
	// Refused is the ICMP error that came back; empty if none did.
	Refused string
	// Denied is the error with which From's kernel refused to send the packet, EPERM from a rule
	// for output; nil if it did not.
	Denied error
}

// PortUnreachable reports whether the connection was refused as if no server listened on the port.
func (f *Fate) PortUnreachable() bool { return f.Refused == portUnreachable }

// attempt is one opening of a wire and what has been seen of it so far.
type attempt struct {
	fate Fate
	// decided means that no more packets are expected.
	decided bool
	// progress receives a value when a packet of this attempt, or of another one of the same Open,
	// was seen.
	progress chan struct{}
}

// NewWire creates a wire with a node and edges, which t closes in the end.
func NewWire(t testing.TB, node *testenv.Node, edges ...*testenv.Host) *Wire {
	t.Helper()
	w := &Wire{
		node: node.Host, hosts: map[*testenv.Host]*station{}, attempts: map[uint32]*attempt{}, token: uint32(os.Getpid()) << 16, port: firstPort,
	}
	t.Cleanup(w.Close)
	for _, host := range append(slices.Clone(edges), node.Host) {
		if err := w.addStation(host); err != nil {
			t.Fatalf("tap %s: %v", host.Name, err)
		}
	}
	return w
}

// The range of source ports for openings without a port. The wire uses them in turn, so that a
// kernel does not confuse a connection with an earlier one that it still tracks.
const (
	firstPort = 10000
	lastPort  = 65000
)

func (w *Wire) addStation(host *testenv.Host) error {
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

// tapEdge receives all packets that arrive on eth0.
func (w *Wire) tapEdge(s *station) error {
	const every = unix.ETH_P_ALL << 8 // in network byte order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	tap := os.NewFile(uintptr(fd), "tap")
	s.taps = append(s.taps, tap)
	eth0, err := netlink.LinkByName("eth0")
	if err != nil {
		return err
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1); err != nil {
		return os.NewSyscallError("setsockopt", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: every, Ifindex: eth0.Attrs().Index}); err != nil {
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

// tapNode receives packets that the node delivers locally. A packet socket would see packets before
// the rules for input.
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
		controlErr := raw.Control(func(fd uintptr) {
			err = enlarge(int(fd))
			if network == "ip6" {
				err = errors.Join(err, unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1))
			}
		})
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
				continue // an ICMP error for an earlier packet of this protocol
			}
			var p packet
			var ok bool
			if network == "ip4" { // data includes the IP header
				p, ok = decodeIP(data[:n])
			} else {
				src, _ := netip.AddrFromSlice(from.IP)
				p, ok = decodeSegment(protocol, src, destination(control[:controlLen]), data[:n])
			}
			if ok {
				w.see(s, p)
			}
		}
	})
	return nil
}

// destination returns the destination address in the control data of an IPv6 packet.
func destination(control []byte) netip.Addr {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return netip.Addr{}
	}
	for _, m := range messages {
		if m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_PKTINFO {
			return netip.AddrFrom16([16]byte(m.Data[:16]))
		}
	}
	return netip.Addr{}
}

// enlarge increases a socket's receive buffer as far as the kernel allows it, for bursts.
func enlarge(fd int) error {
	const size = 16 << 20
	err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, size)
	if errors.Is(err, unix.EPERM) {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, size)
	}
	return os.NewSyscallError("setsockopt", err)
}

// see records what a packet reveals about an attempt. If the packet is the first one and arrived at
// an edge, see answers it.
func (w *Wire) see(s *station, p packet) {
	w.mu.Lock()
	defer w.mu.Unlock()
	a := w.attempts[p.token]
	if a == nil && w.relayed != nil && p.kind == opening && p.proto == TCP && s.host != w.node {
		select {
		case w.relayed <- Fate{At: s.host, SeenSrc: p.src, SeenDst: p.dst}:
			_ = s.transmit(packet{kind: answer, proto: p.proto, src: p.dst, dst: p.src, token: p.token})
		default:
		}
	}
	if a == nil || w.closed || a.fate.Proto != p.proto {
		return
	}
	f := &a.fate
	home := f.From == s.host
	switch {
	case p.kind == opening && f.At == nil:
		f.At, f.SeenSrc, f.SeenDst = s.host, p.src, p.dst
		// The node answers by itself that no server listens.
		a.decided = s.host == w.node
		if s.host != w.node {
			// An answer that cannot be sent does not arrive, which is what a test sees.
			_ = s.transmit(packet{kind: answer, proto: p.proto, src: p.dst, dst: p.src, token: p.token})
		}
	case p.kind == answer && home && p.src == f.Dst && p.dst == f.Src:
		f.Answered, a.decided = true, f.At != nil
	case p.kind == icmpError && home && f.At == nil:
		// For UDP the node itself sends this error if the packet arrived there. Its arrival may be
		// seen a moment later.
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
	index, to := 0, unix.Sockaddr(&unix.SockaddrInet6{Addr: p.dst.Addr().As16()})
	if p.dst.Addr().Is6() {
		index = 1
	} else {
		to = &unix.SockaddrInet4{Addr: p.dst.Addr().As4()}
	}
	raw, err := s.send[index].SyscallConn()
	if err != nil {
		return err
	}
	data := p.encode()
	sendErr := error(nil)
	err = raw.Control(func(fd uintptr) {
		for range 10 {
			if sendErr = unix.Sendto(int(fd), data, 0, to); !errors.Is(sendErr, unix.EAGAIN) {
				return
			}
			// The queue is full. Wait until earlier packets have left, which takes time on a slow
			// machine.
			_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, 100)
		}
	})
	if err != nil {
		return err
	}
	return os.NewSyscallError("sendto", sendErr)
}

// Open sends the first packets of connections in order. It returns when the fate of each is
// decided, or when nothing has been seen of any for the duration of silence. Only silence reveals
// dropped packets.
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

// burst is the number of packets sent in a millisecond. No queue on the way is shorter.
const burst = 64

// registered is an attempt with its first packet.
type registered struct {
	*attempt
	packet packet
}

// Relayed opens a TCP connection as a program on the node does, to an address of the node, and
// returns what a proxy in user space that listens there does with it. Such a proxy answers the
// connection and opens another one, which has no token. A connection that a server on the node
// accepts and does not relay arrives at the node. Nothing else on the node may open connections to
// the edges meanwhile.
func (w *Wire) Relayed(ctx context.Context, src netip.Addr, dst netip.AddrPort) (Fate, error) {
	relayed := make(chan Fate, 1)
	w.relay(relayed)
	defer w.relay(nil)
	fate := Fate{Opening: Opening{From: w.node, Proto: TCP, Src: netip.AddrPortFrom(src, 0), Dst: dst}}
	err := w.node.Do(func() error {
		dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(fate.Src), Timeout: settleTimeout()}
		conn, err := dialer.DialContext(ctx, "tcp", dst.String())
		if err != nil {
			return err
		}
		defer conn.Close()
		select {
		case f := <-relayed:
			fate.At, fate.SeenSrc, fate.SeenDst = f.At, f.SeenSrc, f.SeenDst
		case <-time.After(silence):
			fate.At, fate.SeenSrc, fate.SeenDst = w.node, conn.LocalAddr().(*net.TCPAddr).AddrPort(), dst
		}
		fate.Answered = true
		return nil
	})
	if errors.Is(err, unix.ECONNREFUSED) {
		fate.Refused, err = portUnreachable, nil
	}
	return fate, err
}

func (w *Wire) relay(relayed chan<- Fate) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.relayed = relayed
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
			if src, err = sourceFor(o.From, o.Dst); err != nil {
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

// launch sends the first packet of an attempt.
func (w *Wire) launch(r registered) error {
	// fate.From never changes, so reading it needs no lock.
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

// sourceFor returns the source address that the kernel of a host chooses for an unbound connection
// to dst.
func sourceFor(h *testenv.Host, dst netip.AddrPort) (netip.Addr, error) {
	var source netip.Addr
	err := h.Do(func() error {
		conn, err := net.Dial("udp", dst.String())
		if err != nil {
			return err
		}
		defer conn.Close()
		source = conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap()
		return nil
	})
	if err != nil {
		return source, fmt.Errorf("find the source address of %s for %s: %w", h.Name, dst, err)
	}
	return source, nil
}

// Close closes the wire. Later calls have no effect.
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
