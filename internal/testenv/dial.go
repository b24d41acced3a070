package testenv

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// DialContext connects from the host. The address must be a literal IP address and port, because
// hosts have no DNS. It can serve as the dialer of http.Transport and grpc.WithContextDialer.
func (h *Host) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	dst, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, fmt.Errorf("dial from %s: %w", h.Name, err)
	}
	return h.dial(ctx, network, dst, netip.AddrPort{})
}

// DialUnused is DialContext from a port that the host has not used for this destination and network
// yet, or not for the longest time. While nothing translates an address, conntrack remembers for
// two minutes that connections to it are not translated. A new connection from the same port would
// fail for this reason alone.
func (h *Host) DialUnused(ctx context.Context, network string, dst netip.AddrPort) (net.Conn, error) {
	for {
		conn, err := h.dial(ctx, network, dst, netip.AddrPortFrom(netip.Addr{}, h.unusedPort(network, dst)))
		if !errors.Is(err, syscall.EADDRINUSE) {
			return conn, err
		}
	}
}

// unusedPort returns source ports for a destination in turn, above the ports of a node's own
// servers and below those of NodePorts.
func (h *Host) unusedPort(network string, dst netip.AddrPort) uint16 {
	const first, last = 12000, 29999
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.used == nil {
		h.used = map[string]uint16{}
	}
	key := network + " " + dst.String()
	port := max(h.used[key], first-1) + 1
	if port > last {
		port = first
	}
	h.used[key] = port
	return port
}

// dial connects from src. The address of src, its port or both may be zero.
func (h *Host) dial(ctx context.Context, network string, dst, src netip.AddrPort) (net.Conn, error) {
	if !src.Addr().IsValid() {
		addr := netip.IPv4Unspecified()
		if dst.Addr().Is6() {
			addr = netip.IPv6Unspecified()
		}
		if h.world && !dst.Addr().IsLoopback() {
			addr = h.Addr(dst.Addr().Is6())
		}
		src = netip.AddrPortFrom(addr, src.Port())
	}
	if strings.HasPrefix(network, "tcp") {
		conn, err := h.dialTCP(ctx, dst, src)
		if err != nil {
			return nil, fmt.Errorf("dial from %s to TCP %s: %w", h.Name, dst, err)
		}
		return conn, nil
	}
	if src.Port() != 0 {
		return h.dialUDP(ctx, network, dst, src)
	}
	for {
		conn, err := h.dialUDP(ctx, network, dst, netip.AddrPortFrom(src.Addr(), nextPort()))
		if !errors.Is(err, syscall.EADDRINUSE) {
			return conn, err
		}
	}
}

var usedPorts atomic.Uint32

// nextPort returns source ports in turn, below the ranges of NodePorts and of the kernel's own
// choice. Conntrack may still have an entry for a port that the kernel chooses, from an earlier
// socket, and translate new datagrams in the same way.
func nextPort() uint16 { return uint16(10000 + usedPorts.Add(1)%20000) }

func (h *Host) dialUDP(ctx context.Context, network string, dst, src netip.AddrPort) (conn net.Conn, err error) {
	dialer := net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(src), Control: reportUnreachable}
	err = h.Do(func() error {
		// For a literal address the dialer creates its socket in this goroutine, which is in the
		// host's namespace.
		conn, err = dialer.DialContext(ctx, network, dst.String())
		return err
	})
	return conn, err
}

// dialTCP connects like a net.Dialer, but also sees an ICMP error that comes back while the connect
// system call is still running, as may happen over a veth pair. The kernel records such an error,
// but reports it only when it sends the next SYN a second later.
func (h *Host) dialTCP(ctx context.Context, dst, src netip.AddrPort) (net.Conn, error) {
	family := unix.AF_INET
	if dst.Addr().Is6() {
		family = unix.AF_INET6
	}
	var file *os.File
	err := h.Do(func() error {
		fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		file = os.NewFile(uintptr(fd), "tcp")
		return connect(fd, dst, src)
	})
	if file == nil {
		return nil, err
	}
	// net.FileConn duplicates the descriptor.
	defer file.Close()
	if err == nil {
		err = awaitConnected(ctx, file)
	}
	if err != nil {
		return nil, err
	}
	return net.FileConn(file)
}

func connect(fd int, dst, src netip.AddrPort) error {
	level, option := unix.SOL_SOCKET, unix.SO_REUSEADDR
	if src.Port() == 0 {
		// The kernel chooses the port in connect, where it knows which ports are free for this
		// destination.
		level, option = unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT
	}
	if err := unix.SetsockoptInt(fd, level, option, 1); err != nil {
		return os.NewSyscallError("setsockopt", err)
	}
	if err := unix.Bind(fd, sockaddr(src)); err != nil {
		return os.NewSyscallError("bind", err)
	}
	if err := unix.Connect(fd, sockaddr(dst)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return os.NewSyscallError("connect", err)
	}
	return socketError(fd)
}

func awaitConnected(ctx context.Context, file *os.File) error {
	stop, err := limit(ctx, file)
	if err != nil {
		return err
	}
	defer stop()
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var failure error
	err = raw.Write(func(fd uintptr) (done bool) {
		if failure = socketError(int(fd)); failure != nil {
			return true
		}
		_, err := unix.Getpeername(int(fd))
		return !errors.Is(err, unix.ENOTCONN)
	})
	return errors.Join(failure, err)
}

// socketError returns and clears a socket's pending error, including one that the kernel would not
// report yet.
func socketError(fd int) error {
	number, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return os.NewSyscallError("getsockopt", err)
	}
	if number != 0 {
		return os.NewSyscallError("connect", syscall.Errno(number))
	}
	return nil
}

func sockaddr(addr netip.AddrPort) unix.Sockaddr {
	if addr.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: addr.Addr().As4(), Port: int(addr.Port())}
	}
	return &unix.SockaddrInet6{Addr: addr.Addr().As16(), Port: int(addr.Port())}
}

// limit sets the deadline of ctx on a connection. If ctx is canceled before stop is called,
// operations on the connection fail.
func limit(ctx context.Context, conn interface{ SetDeadline(time.Time) error }) (stop func(), err error) {
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return nil, err
	}
	stopped := make(chan struct{})
	cancel := context.AfterFunc(ctx, func() {
		defer close(stopped)
		// An error means that the connection has been closed already.
		_ = conn.SetDeadline(time.Unix(1, 0))
	})
	return func() {
		if !cancel() {
			<-stopped
		}
	}, nil
}

// reportUnreachable makes a connected UDP socket report all ICMP unreachable errors, not only port
// unreachable.
func reportUnreachable(network, _ string, raw syscall.RawConn) error {
	if network == "udp6" {
		return setOption(raw, unix.IPPROTO_IPV6, unix.IPV6_RECVERR)
	}
	return setOption(raw, unix.IPPROTO_IP, unix.IP_RECVERR)
}

func setOption(raw syscall.RawConn, level, option int) error {
	var err error
	controlErr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, 1) })
	return errors.Join(controlErr, err)
}

// Listen opens a listening socket in the host, like [net.Listen]. The caller must close it.
func (h *Host) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	var listener net.Listener
	err := h.Do(func() (err error) {
		listener, err = new(net.ListenConfig).Listen(ctx, network, address)
		return err
	})
	return listener, err
}
