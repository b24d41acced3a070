// Package netlink exchanges messages with the kernel over netlink: sockets, the encoding of
// messages and attributes, answers, dumps and notifications. Together with agent/nft, which builds
// on it, it is the only place with raw netlink.
//
// It has what the libraries lack. They send one message at a time, wait for its answer and decode
// answers by reflection or into maps. For tens of thousands of elements, backends or addresses that
// takes most of the time: see Load and Restart in BenchmarkProgrammer of agent/programmer/nftables
// and agent/programmer/ipvs. They also do not report whether a dump is complete.
// What is rare or small goes through github.com/vishvananda/netlink.
//
// The kernel handles a request inside the call that sends it. So the answer is in the socket when
// that call returns, and nothing here waits for an answer.
package netlink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Socket is a netlink socket for requests. Only one goroutine uses it at a time.
//
// Invariants, between calls:
//
//  1. seq is the number of the last message that was sent. Answers with any other number than those
//     of the current call belong to an earlier one and are skipped.
//  2. fd is connected to the kernel, so nothing else's messages arrive.
type Socket struct {
	fd int
	// Port is the socket's netlink address. Notifications of a change carry the port of the socket
	// that made it.
	Port uint32
	// Limit is the number of bytes that the kernel accepts from this socket in one call.
	Limit int
	seq   uint32
	in    []byte
}

// wantedLimit is the Limit to ask for, in bytes. More than a few hundred kilobytes take a privilege
// on the machine, not only in its network namespace.
const wantedLimit = 64 << 20

var (
	// ErrInterrupted reports that a dump may be incomplete, because the kernel's objects changed
	// meanwhile.
	ErrInterrupted = errors.New("the kernel's objects changed while they were read")
	// ErrUnanswered reports that an answer of the kernel was lost, so the effect of a request is
	// unknown.
	ErrUnanswered = errors.New("the kernel's answer was lost")
)

// Error is the kernel's error in answer to a message.
type Error struct {
	Errno unix.Errno
	// Operation is what the message was to do. It is empty if that is not known.
	Operation string
	// Explanation is the text that the kernel adds, which may be empty.
	Explanation string
}

func (e *Error) Error() string {
	text := e.Errno.Error()
	if e.Explanation != "" {
		text += ": " + e.Explanation
	}
	if e.Operation != "" {
		text = e.Operation + ": " + text
	}
	return text
}

func (e *Error) Unwrap() error { return e.Errno }

// Open opens a socket for one of netlink's protocols, in the network namespace of the calling
// thread.
func Open(protocol int) (*Socket, error) {
	fd, port, err := bind(protocol, 0)
	if err != nil {
		return nil, err
	}
	s := &Socket{fd: fd, Port: port, in: make([]byte, 1<<16)}
	if err := s.setUp(); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// bind returns a socket with a netlink address, which the kernel chooses.
func bind(protocol, flags int) (fd int, port uint32, err error) {
	if fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|flags, protocol); err != nil {
		return 0, 0, os.NewSyscallError("socket", err)
	}
	err = os.NewSyscallError("bind", unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}))
	if err == nil {
		port, err = portOf(fd)
	}
	if err != nil {
		return 0, 0, errors.Join(err, unix.Close(fd))
	}
	return fd, port, nil
}

func portOf(fd int) (uint32, error) {
	address, err := unix.Getsockname(fd)
	if err != nil {
		return 0, os.NewSyscallError("getsockname", err)
	}
	netlink, ok := address.(*unix.SockaddrNetlink)
	if !ok {
		return 0, fmt.Errorf("getsockname of a netlink socket returned a %T", address)
	}
	return netlink.Pid, nil
}

func (s *Socket) setUp() error {
	// The default address is the kernel's.
	if err := unix.Connect(s.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return os.NewSyscallError("connect", err)
	}
	for _, option := range []int{unix.NETLINK_CAP_ACK, unix.NETLINK_EXT_ACK} {
		if err := unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, option, 1); err != nil {
			return os.NewSyscallError("setsockopt", err)
		}
	}
	setBuffer(s.fd, unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, wantedLimit)
	buffer, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
	if err != nil {
		return os.NewSyscallError("getsockopt", err)
	}
	s.Limit = min(buffer-1024, wantedLimit)
	return nil
}

// setBuffer sets the size of a socket's buffer. Without the privilege for force, as much as is
// allowed must do.
func setBuffer(fd, force, ordinary, size int) {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, force, size) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, ordinary, size)
	}
}

// Close closes the socket.
func (s *Socket) Close() { _ = unix.Close(s.fd) }

// maxSent is how many messages Execute sends at once. If all of them fail, the answers still fit in
// the socket's buffer.
const maxSent = 200

// Execute lets the kernel carry out the messages of w in their order, whether or not single ones
// fail. It calls failed with the index of each message that fails.
func (s *Socket) Execute(w *Writer, failed func(i int, err *Error)) error {
	done := 0
	for rest := w.Buf; len(rest) > 0; {
		count, length := 0, 0
		for ; length < len(rest) && count < maxSent; count++ {
			length += lengthAt(rest, length)
		}
		err := s.Transact(rest[:length], length, func(i int, err *Error) { failed(done+i, err) })
		if err != nil {
			return err
		}
		done, rest = done+count, rest[length:]
	}
	return nil
}

func lengthAt(b []byte, at int) int { return int(binary.NativeEndian.Uint32(b[at:])) }

// Transact sends messages in one call and reads the answers to those within the first answered
// bytes. It calls failed with the index of each of them that fails, in their order. The kernel
// answers every message that fails, and the last one in any case. If ErrUnanswered is returned,
// further messages may have failed.
func (s *Socket) Transact(b []byte, answered int, failed func(i int, err *Error)) error {
	first, last := s.seq+1, 0
	for at := 0; at < answered; at += lengthAt(b, at) {
		s.seq++
		binary.NativeEndian.PutUint32(b[at+8:], s.seq)
		last = at
	}
	flags := binary.NativeEndian.Uint16(b[last+6:])
	binary.NativeEndian.PutUint16(b[last+6:], flags|unix.NLM_F_ACK)
	if err := s.send(b); err != nil {
		return err
	}
	var lost error
	for {
		n, err := s.receive()
		switch {
		case errors.Is(err, unix.ENOBUFS): // the part that did fit is still useful
			lost = ErrUnanswered
			continue
		case errors.Is(err, unix.EAGAIN):
			return ErrUnanswered
		case err != nil:
			return err
		}
		for m := range Messages(s.in[:n]) {
			errno, ok := m.errno()
			if !ok || m.Seq-first > s.seq-first {
				continue // invariant 1
			}
			if errno != 0 {
				failed(int(m.Seq-first), m.err(errno))
			}
			if m.Seq == s.seq {
				return lost
			}
		}
	}
}

// errno returns the error number of an answer, which is 0 if the message succeeded. ok is false if
// m carries none.
func (m Message) errno() (errno unix.Errno, ok bool) {
	if m.Kind != unix.NLMSG_ERROR && m.Kind != unix.NLMSG_DONE || len(m.Body) < 4 {
		return 0, false
	}
	return unix.Errno(-int32(binary.NativeEndian.Uint32(m.Body))), true
}

func (m Message) err(errno unix.Errno) *Error {
	const request = unix.NLMSG_HDRLEN // with NETLINK_CAP_ACK, only the request's header is sent back
	e := &Error{Errno: errno}
	if m.Flags&unix.NLM_F_ACK_TLVS != 0 && m.Kind == unix.NLMSG_ERROR {
		e.Explanation = Text(Attribute(m.Attributes(4+request), unix.NLMSGERR_ATTR_MSG))
	}
	return e
}

func (s *Socket) send(b []byte) error {
	return os.NewSyscallError("send to netlink", unix.Send(s.fd, b, 0))
}

// receive reads the next datagram without waiting. It returns unix.EAGAIN if there is none, and
// unix.ENOBUFS if some were lost.
func (s *Socket) receive() (int, error) {
	for {
		n, _, err := unix.Recvfrom(s.fd, s.in, unix.MSG_DONTWAIT)
		if !errors.Is(err, unix.EINTR) {
			return n, os.NewSyscallError("receive from netlink", err)
		}
	}
}

// Get sends the message of w, and calls each with every message of the answer.
func (s *Socket) Get(w *Writer, each func(Message)) error { return s.ask(w, unix.NLM_F_ACK, each) }

// Dump requests all objects with the message of w, and calls each with every message of the answer.
// It returns ErrInterrupted if an object may be missing. Read is for all who can begin anew.
func (s *Socket) Dump(w *Writer, each func(Message)) error { return s.ask(w, unix.NLM_F_DUMP, each) }

// Attempts is how often an interrupted dump is attempted.
const Attempts = 10

// Read is Dump until no object is missing. It calls reset before each attempt. On a node where
// others change their objects all the time, every attempt may be interrupted. So two attempts in a
// row that return the same number of messages count as complete.
func (s *Socket) Read(w *Writer, reset func(), each func(Message)) error {
	before := -1
	for range Attempts {
		reset()
		returned := 0
		err := s.Dump(w, func(m Message) {
			returned++
			each(m)
		})
		if !errors.Is(err, ErrInterrupted) {
			return err
		}
		if returned == before {
			return nil
		}
		before = returned
	}
	return ErrInterrupted
}

func (s *Socket) ask(w *Writer, flags uint16, each func(Message)) error {
	s.seq++
	binary.NativeEndian.PutUint16(w.Buf[6:], unix.NLM_F_REQUEST|flags)
	binary.NativeEndian.PutUint32(w.Buf[8:], s.seq)
	if err := s.send(w.Buf); err != nil {
		return err
	}
	var interrupted error
	for {
		n, err := s.receive()
		switch {
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOBUFS):
			return fmt.Errorf("%w: %w", ErrUnanswered, err)
		case err != nil:
			return err
		}
		for m := range Messages(s.in[:n]) {
			if m.Seq != s.seq {
				continue // invariant 1
			}
			if m.Flags&unix.NLM_F_DUMP_INTR != 0 {
				interrupted = ErrInterrupted
			}
			if m.Kind != unix.NLMSG_DONE && m.Kind != unix.NLMSG_ERROR {
				each(m)
				continue
			}
			if errno, _ := m.errno(); errno != 0 {
				return m.err(errno)
			}
			return interrupted
		}
	}
}
