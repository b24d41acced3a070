package testenv

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Proto is a transport protocol.
type Proto string

// The transport protocols that servers and probes support.
const (
	TCP Proto = "tcp"
	UDP Proto = "udp"
)

// Reply is a server's answer to a line of text or a datagram, encoded as one line of JSON.
type Reply struct {
	// Name is the name of the host that answers.
	Name string `json:"name"`
	// Client is the source address that the server saw.
	Client netip.AddrPort `json:"client"`
	// Server is the destination address that the server saw.
	Server netip.AddrPort `json:"server"`
	// Echo is the text that the server answers, without the line ending.
	Echo string `json:"echo"`
}

// Server answers on ports of a host.
type Server struct {
	name string

	mu      sync.Mutex // guards closed and sockets
	closed  bool
	sockets map[interface{ Close() error }]struct{}
	running sync.WaitGroup
}

// Serve starts a server that answers every line on a TCP connection, and every UDP datagram, with a
// [Reply]. It listens on all IPv4 and IPv6 addresses of the host until it is closed or the host is
// deleted.
func (h *Host) Serve(proto Proto, ports ...uint16) *Server {
	h.t.Helper()
	s := &Server{name: h.Name, sockets: map[interface{ Close() error }]struct{}{}}
	for _, port := range ports {
		for _, ip := range []string{"4", "6"} {
			listen := s.listenTCP
			if proto == UDP {
				listen = s.listenUDP
			}
			err := h.Do(func() error { return listen(string(proto)+ip, ":"+strconv.Itoa(int(port))) })
			if err != nil {
				s.Close()
				h.t.Fatalf("testenv: serve %s port %d on %s: %v", proto, port, h.Name, err)
			}
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.servers = append(h.servers, s)
	return s
}

// Close stops the server and resets its connections. Later calls have no effect.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	for socket := range s.sockets {
		// The error does not matter, because no goroutine uses the socket any more.
		_ = socket.Close()
	}
	s.mu.Unlock()
	s.running.Wait()
}

// run runs f, which uses a socket, in the background and closes the socket when f returns.
func (s *Server) run(socket interface{ Close() error }, f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		_ = socket.Close()
		return
	}
	s.sockets[socket] = struct{}{}
	s.running.Go(func() {
		f()
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.sockets, socket)
		_ = socket.Close()
	})
}

func (s *Server) reply(client, server netip.AddrPort, text string) []byte {
	line, err := json.Marshal(Reply{Name: s.name, Client: client, Server: server, Echo: strings.TrimRight(text, "\r\n")})
	if err != nil {
		panic(err) // impossible: the reply has only strings and addresses
	}
	return append(line, '\n')
}

func (s *Server) listenTCP(network, address string) error {
	listener, err := net.Listen(network, address)
	if err != nil {
		return err
	}
	s.run(listener, func() {
		for {
			conn, err := listener.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				continue // the connection was reset before it was accepted
			}
			s.run(conn, func() { s.serveConn(conn.(*net.TCPConn)) })
		}
	})
	return nil
}

func (s *Server) serveConn(conn *net.TCPConn) {
	// Reset the connection on close, so that a closed server's connections do not look alive or
	// keep the port busy.
	_ = conn.SetLinger(0)
	client, server := addrPort(conn.RemoteAddr()), addrPort(conn.LocalAddr())
	lines := bufio.NewScanner(conn)
	for lines.Scan() {
		if _, err := conn.Write(s.reply(client, server, lines.Text())); err != nil {
			return
		}
	}
}

func addrPort(addr net.Addr) netip.AddrPort {
	var result netip.AddrPort
	switch addr := addr.(type) {
	case *net.TCPAddr:
		result = addr.AddrPort()
	case *net.UDPAddr:
		result = addr.AddrPort()
	}
	return netip.AddrPortFrom(result.Addr().Unmap(), result.Port())
}

func (s *Server) listenUDP(network, address string) error {
	// A socket that is bound to no address needs these options to learn the destination address of
	// a datagram.
	config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		if network == "udp4" {
			return setOption(raw, unix.IPPROTO_IP, unix.IP_PKTINFO)
		}
		return setOption(raw, unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO)
	}}
	packets, err := config.ListenPacket(context.Background(), network, address)
	if err != nil {
		return err
	}
	conn := packets.(*net.UDPConn)
	port := addrPort(conn.LocalAddr()).Port()
	s.run(conn, func() {
		data, control := make([]byte, 65536), make([]byte, 128)
		for {
			n, controlLen, _, client, err := conn.ReadMsgUDPAddrPort(data, control)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				continue // an ICMP error for an earlier reply
			}
			client = netip.AddrPortFrom(client.Addr().Unmap(), client.Port())
			destination, from := packetInfo(control[:controlLen])
			// If the reply does not arrive, the client notices.
			_, _, _ = conn.WriteMsgUDPAddrPort(s.reply(client, netip.AddrPortFrom(destination, port), string(data[:n])), from, client)
		}
	})
	return nil
}

// packetInfo returns the destination address in a datagram's control data, and the control data
// that makes this address the source of a reply.
func packetInfo(control []byte) (destination netip.Addr, from []byte) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return netip.Addr{}, nil
	}
	for _, message := range messages {
		switch {
		case message.Header.Level == unix.IPPROTO_IP && message.Header.Type == unix.IP_PKTINFO:
			address := [4]byte(message.Data[8:12]) // after the interface and the local address
			return netip.AddrFrom4(address), unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: address})
		case message.Header.Level == unix.IPPROTO_IPV6 && message.Header.Type == unix.IPV6_PKTINFO:
			address := [16]byte(message.Data[:16])
			return netip.AddrFrom16(address), unix.PktInfo6(&unix.Inet6Pktinfo{Addr: address})
		}
	}
	return netip.Addr{}, nil
}
