package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// requests are netlink messages to be sent together. The libraries send one at a time and wait for
// its answer. For tens of thousands of backends and addresses, that would take most of the time.
type requests struct {
	buf []byte
	at  []int // where each message begins in buf
}

func (r *requests) reset() { r.buf, r.at = r.buf[:0], r.at[:0] }

// begin begins a message. What is appended until the next end belongs to it.
func (r *requests) begin(kind, flags uint16) {
	r.at = append(r.at, len(r.buf))
	r.buf = append(r.buf, make([]byte, unix.NLMSG_HDRLEN)...)
	header := r.buf[len(r.buf)-unix.NLMSG_HDRLEN:]
	binary.NativeEndian.PutUint16(header[4:], kind)
	binary.NativeEndian.PutUint16(header[6:], flags|unix.NLM_F_REQUEST)
}

func (r *requests) end() {
	at := r.at[len(r.at)-1]
	binary.NativeEndian.PutUint32(r.buf[at:], uint32(len(r.buf)-at))
}

// nest begins an attribute that contains others, and returns the position to pass to endNest.
func (r *requests) nest(kind uint16) int {
	at := len(r.buf)
	r.header(kind, 0)
	return at
}

func (r *requests) endNest(at int) {
	binary.NativeEndian.PutUint16(r.buf[at:], uint16(len(r.buf)-at))
}

func (r *requests) header(kind uint16, length int) {
	r.buf = binary.NativeEndian.AppendUint16(r.buf, uint16(unix.SizeofNlAttr+length))
	r.buf = binary.NativeEndian.AppendUint16(r.buf, kind)
}

func (r *requests) pad() {
	for len(r.buf)%unix.NLA_ALIGNTO != 0 {
		r.buf = append(r.buf, 0)
	}
}

func (r *requests) bytes(kind uint16, value []byte) {
	r.header(kind, len(value))
	r.buf = append(r.buf, value...)
	r.pad()
}

func (r *requests) text(kind uint16, value string) {
	r.header(kind, len(value)+1)
	r.buf = append(append(r.buf, value...), 0)
	r.pad()
}

func (r *requests) uint16(kind, value uint16) {
	r.header(kind, 2)
	r.buf = binary.NativeEndian.AppendUint16(r.buf, value)
	r.pad()
}

func (r *requests) port(kind, value uint16) {
	r.header(kind, 2)
	r.buf = binary.BigEndian.AppendUint16(r.buf, value)
	r.pad()
}

func (r *requests) uint32(kind uint16, value uint32) {
	r.header(kind, 4)
	r.buf = binary.NativeEndian.AppendUint32(r.buf, value)
}

// socket is a netlink socket. Only one goroutine uses it at a time. The kernel handles a request
// inside the call that sends it, so the answers are in the socket when that call returns.
type socket struct {
	fd  int
	seq uint32
	in  []byte
}

// maxSent is how many messages are sent at once. If all of them fail, the answers still fit in the
// socket's buffer.
const maxSent = 200

// errUnanswered reports that the kernel's answer was lost, so its effect is unknown.
var errUnanswered = errors.New("the kernel's answer was lost")

func dial(protocol int) (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	s := &socket{fd: fd, in: make([]byte, 64<<10)}
	// With NETLINK_CAP_ACK, errors come without the whole message that they refer to.
	err = errors.Join(
		os.NewSyscallError("bind", unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})),
		// The default address is the kernel's.
		os.NewSyscallError("connect", unix.Connect(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})),
		os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)),
	)
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *socket) close() { _ = unix.Close(s.fd) }

// execute lets the kernel carry out messages in their order, whether or not single ones fail. It
// calls failed with the index of each message that fails.
func (s *socket) execute(r *requests, failed func(i int, err unix.Errno)) error {
	for first := 0; first < len(r.at); first += maxSent {
		if err := s.executePart(r, first, min(first+maxSent, len(r.at)), failed); err != nil {
			return err
		}
	}
	return nil
}

// executePart is execute for the messages from first up to, but not including, next. It sends them
// at once.
func (s *socket) executePart(r *requests, first, next int, failed func(int, unix.Errno)) error {
	base := s.seq + 1
	for i := first; i < next; i++ {
		s.seq++
		binary.NativeEndian.PutUint32(r.buf[r.at[i]+8:], s.seq)
	}
	// The kernel acknowledges only failures and messages that ask for it.
	flags := r.buf[r.at[next-1]+6:]
	binary.NativeEndian.PutUint16(flags, binary.NativeEndian.Uint16(flags)|unix.NLM_F_ACK)
	end := len(r.buf)
	if next < len(r.at) {
		end = r.at[next]
	}
	if err := unix.Send(s.fd, r.buf[r.at[first]:end], 0); err != nil {
		return os.NewSyscallError("send to netlink", err)
	}
	for {
		n, err := s.receive()
		if err != nil {
			return err
		}
		for m := range messages(s.in[:n]) {
			if m.kind != unix.NLMSG_ERROR || len(m.body) < 4 || m.seq-base > s.seq-base {
				continue // answers an earlier message
			}
			if errno := unix.Errno(-int32(binary.NativeEndian.Uint32(m.body))); errno != 0 {
				failed(first+int(m.seq-base), errno)
			}
			if m.seq == s.seq {
				return nil
			}
		}
	}
}

// dump requests all objects of a kind with a message without flags, and calls each with the body of
// every one. It returns netlink.ErrDumpInterrupted if an object may be missing, because objects
// changed meanwhile.
func (s *socket) dump(r *requests, each func(body []byte)) error {
	return s.ask(r, unix.NLM_F_DUMP, each)
}

// get is dump for a single object.
func (s *socket) get(r *requests, of func(body []byte)) error { return s.ask(r, unix.NLM_F_ACK, of) }

func (s *socket) ask(r *requests, flags uint16, each func(body []byte)) error {
	s.seq++
	binary.NativeEndian.PutUint16(r.buf[6:], unix.NLM_F_REQUEST|flags)
	binary.NativeEndian.PutUint32(r.buf[8:], s.seq)
	if err := unix.Send(s.fd, r.buf, 0); err != nil {
		return os.NewSyscallError("send to netlink", err)
	}
	var interrupted error
	for {
		n, err := s.receive()
		if err != nil {
			return err
		}
		for m := range messages(s.in[:n]) {
			if m.seq != s.seq {
				continue
			}
			if m.flags&unix.NLM_F_DUMP_INTR != 0 {
				interrupted = netlink.ErrDumpInterrupted
			}
			if m.kind != unix.NLMSG_DONE && m.kind != unix.NLMSG_ERROR {
				each(m.body)
				continue
			}
			if len(m.body) >= 4 {
				if errno := unix.Errno(-int32(binary.NativeEndian.Uint32(m.body))); errno != 0 {
					return errno
				}
			}
			return interrupted
		}
	}
}

func (s *socket) receive() (int, error) {
	for {
		n, _, err := unix.Recvfrom(s.fd, s.in, unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOBUFS):
			return 0, fmt.Errorf("%w: %w", errUnanswered, err)
		default:
			return n, os.NewSyscallError("receive from netlink", err)
		}
	}
}

// message is a message from the kernel.
type message struct {
	kind, flags uint16
	seq         uint32
	body        []byte
}

// messages yields the messages in a buffer, and stops at the first incomplete one.
func messages(b []byte) func(yield func(message) bool) {
	return func(yield func(message) bool) {
		for len(b) >= unix.NLMSG_HDRLEN {
			length := int(binary.NativeEndian.Uint32(b))
			if length < unix.NLMSG_HDRLEN || length > len(b) {
				return
			}
			if !yield(message{binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:]), binary.NativeEndian.Uint32(b[8:]), b[unix.NLMSG_HDRLEN:length]}) {
				return
			}
			b = b[min((length+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1), len(b)):]
		}
	}
}

// attributes yields the attributes in a buffer, and stops at the first incomplete one.
func attributes(b []byte) func(yield func(kind uint16, value []byte) bool) {
	const flags = unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= unix.SizeofNlAttr {
			length := int(binary.NativeEndian.Uint16(b))
			if length < unix.SizeofNlAttr || length > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:])&^flags, b[unix.SizeofNlAttr:length]) {
				return
			}
			b = b[min((length+unix.NLA_ALIGNTO-1)&^(unix.NLA_ALIGNTO-1), len(b)):]
		}
	}
}
