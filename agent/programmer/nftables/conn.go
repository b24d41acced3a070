package nftables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// conn is a netlink socket for nf_tables. Only one goroutine uses it at a time. The kernel handles
// a request inside the call that sends it, so the answer is in the socket when that call returns.
type conn struct {
	fd int
	// port is the socket's netlink address. Notifications of a change carry the port of the socket
	// that made it.
	port uint32
	seq  uint32
	// limit is the length in bytes of the longest transaction that the kernel accepts from this
	// socket.
	limit int
	in    []byte
	// watcher receives notifications about what others do over other sockets.
	watcher watcher
}

// wantedLimit is the longest transaction to ask for, in bytes. More than a few hundred kilobytes
// take a privilege on the machine, not only in its network namespace.
const wantedLimit = 64 << 20

// errInterrupted reports that a dump may be incomplete, because the ruleset changed meanwhile.
var errInterrupted = errors.New("the ruleset changed while it was read")

// errUnanswered reports that the kernel's answer was lost, so its effect is unknown.
var errUnanswered = errors.New("the kernel's answer was lost")

// kernelError is the kernel's error for a transaction, which then has no effect.
type kernelError struct {
	errno unix.Errno
	// what describes the operation of the refused message. It is empty if no single message was at
	// fault. said is the explanation that the kernel adds, which may be empty.
	what, said string
}

func (e *kernelError) Error() string {
	text := e.errno.Error()
	if e.said != "" {
		text += ": " + e.said
	}
	if e.what != "" {
		return e.what + ": " + text
	}
	return text
}

func (e *kernelError) Unwrap() error { return e.errno }

func dial() (*conn, error) {
	fd, err := openNetlink(0)
	if err != nil {
		return nil, err
	}
	c := &conn{fd: fd, in: make([]byte, 1<<16)}
	if err := c.setUp(); err != nil {
		c.close()
		return nil, err
	}
	return c, nil
}

func (c *conn) setUp() (err error) {
	if c.port, err = portOf(c.fd); err != nil {
		return err
	}
	if err := unix.Connect(c.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		// The default address is the kernel's.
		return os.NewSyscallError("connect", err)
	}
	for _, option := range []int{unix.NETLINK_CAP_ACK, unix.NETLINK_EXT_ACK} {
		if err := unix.SetsockoptInt(c.fd, unix.SOL_NETLINK, option, 1); err != nil {
			return os.NewSyscallError("setsockopt", err)
		}
	}
	if unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, wantedLimit) != nil {
		// Without the privilege, as much as is allowed must do.
		_ = unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, wantedLimit)
	}
	buffer, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
	if err != nil {
		return os.NewSyscallError("getsockopt", err)
	}
	c.limit = min(buffer-1024, wantedLimit)
	return nil
}

func openNetlink(flags int) (int, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|flags, unix.NETLINK_NETFILTER)
	if err != nil {
		return 0, os.NewSyscallError("socket", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, errors.Join(os.NewSyscallError("bind", err), unix.Close(fd))
	}
	return fd, nil
}

// portOf returns the netlink address that the kernel chose for a socket.
func portOf(fd int) (uint32, error) {
	address, err := unix.Getsockname(fd)
	if err != nil {
		return 0, os.NewSyscallError("getsockname", err)
	}
	netlink, ok := address.(*unix.SockaddrNetlink)
	if !ok {
		return 0, fmt.Errorf("getsockname of a netlink socket gave %T", address)
	}
	return netlink.Pid, nil
}

func (c *conn) close() { _ = unix.Close(c.fd) }

// batch is a transaction. All of its messages take effect at once, or none does.
type batch struct {
	writer
}

// newBatch begins a transaction, and reuses buf for it.
func newBatch(buf []byte) *batch {
	b := &batch{writer{buf[:0]}}
	b.end(b.header(unix.NFNL_MSG_BATCH_BEGIN, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES))
	return b
}

// empty reports whether the transaction holds no messages.
func (b *batch) empty() bool { return len(b.buf) <= headerLen }

// append adds messages to the transaction.
func (b *batch) append(messages ...[]byte) {
	for _, m := range messages {
		b.buf = append(b.buf, m...)
	}
}

// fits reports whether the kernel accepts a transaction of this length from c.
func (b *batch) fits(c *conn) bool { return len(b.buf)+headerLen <= c.limit }

// commitParts commits messages that need not take effect at once, in as few transactions as the
// kernel accepts.
func (c *conn) commitParts(parts *batch) error {
	b, rest := newBatch(nil), parts.buf
	for len(rest) > 0 {
		length := int(binary.NativeEndian.Uint32(rest))
		if len(b.buf) > headerLen && len(b.buf)+length+headerLen > c.limit {
			if err := c.commit(b); err != nil {
				return err
			}
			b = newBatch(b.buf)
		}
		b.append(rest[:length])
		rest = rest[length:]
	}
	return c.commit(b)
}

// commit commits a transaction. A kernelError means that it had no effect. For a large transaction,
// notifications are switched off.
func (c *conn) commit(b *batch) error {
	if len(b.buf) > largeTransaction {
		return c.watcher.deaf(c, func() error { return c.transact(b, true) })
	}
	return c.transact(b, true)
}

// largeTransaction is the length in bytes, about two thousand elements, above which a transaction
// is better committed without notifications.
const largeTransaction = 1 << 17

// check lets the kernel validate a transaction without committing it.
func (c *conn) check(b *batch) error { return c.transact(b, false) }

func (c *conn) transact(b *batch, commit bool) error {
	if b.empty() {
		return nil
	}
	if !b.fits(c) {
		return &kernelError{errno: unix.EMSGSIZE}
	}
	first, last := c.seq+1, 0
	for at := 0; at < len(b.buf); at += int(binary.NativeEndian.Uint32(b.buf[at:])) {
		c.seq++
		binary.NativeEndian.PutUint32(b.buf[at+8:], c.seq)
		last = at
	}
	flags := binary.NativeEndian.Uint16(b.buf[last+6:])
	binary.NativeEndian.PutUint16(b.buf[last+6:], flags|unix.NLM_F_ACK)
	if commit { // without the end message, the kernel rolls the batch back
		b.end(b.header(unix.NFNL_MSG_BATCH_END, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES))
	}
	if err := unix.Send(c.fd, b.buf, 0); err != nil {
		return os.NewSyscallError("send to netlink", err)
	}
	return c.answer(b, first)
}

// answer reads the kernel's answer to a transaction whose messages are numbered from first to
// c.seq. The answer consists of an error for each refused message and an acknowledgement of the
// last one. All of it is in the socket already. What did not fit in the socket's buffer is lost.
func (c *conn) answer(b *batch, first uint32) error {
	var failed error
	for {
		n, err := c.receive()
		if errors.Is(err, unix.EAGAIN) {
			if failed == nil {
				failed = errUnanswered
			}
			return failed
		}
		if errors.Is(err, unix.ENOBUFS) {
			continue // the part that did fit is still useful
		}
		if err != nil {
			return errors.Join(failed, err)
		}
		for h, body := range messages(c.in[:n]) {
			if h.kind != unix.NLMSG_ERROR || len(body) < 4 || h.seq-first > c.seq-first {
				continue // answers an earlier transaction
			}
			errno := unix.Errno(-int32(binary.NativeEndian.Uint32(body)))
			if errno == 0 && failed == nil && h.seq == c.seq {
				return nil
			}
			if errno != 0 && failed == nil {
				failed = &kernelError{errno: errno, what: describe(b.buf, h.seq), said: said(h, body)}
			}
		}
	}
}

// receive reads the next datagram without waiting. It returns unix.EAGAIN if there is none.
func (c *conn) receive() (int, error) {
	for {
		n, _, err := unix.Recvfrom(c.fd, c.in, unix.MSG_DONTWAIT)
		if !errors.Is(err, unix.EINTR) {
			return n, os.NewSyscallError("receive from netlink", err)
		}
	}
}

// said returns the explanation that the kernel adds to an error, or "".
func said(h header, body []byte) string {
	const capped = unix.NLMSG_HDRLEN // with NETLINK_CAP_ACK only the request's header is sent back
	if h.flags&unix.NLM_F_ACK_TLVS == 0 || len(body) < 4+capped {
		return ""
	}
	return textOf(attribute(body[4+capped:], unix.NLMSGERR_ATTR_MSG))
}

// operations describes each type of message that this package sends.
var operations = map[int]string{
	unix.NFT_MSG_NEWTABLE: "add table", unix.NFT_MSG_DELTABLE: "remove table",
	unix.NFT_MSG_NEWCHAIN: "add chain", unix.NFT_MSG_DELCHAIN: "remove chain",
	unix.NFT_MSG_NEWRULE: "add a rule of chain", unix.NFT_MSG_DELRULE: "remove the rules of chain",
	unix.NFT_MSG_NEWSET: "add set", unix.NFT_MSG_DELSET: "remove set",
	unix.NFT_MSG_NEWSETELEM: "add elements of set", unix.NFT_MSG_DELSETELEM: "remove elements of set",
}

// describe returns what the message with this sequence number was to do.
func describe(b []byte, seq uint32) string {
	for h, body := range messages(b) {
		if kind, attrs, ok := h.nftables(body); ok && h.seq == seq {
			return describeMessage(kind, attrs)
		}
	}
	return ""
}

func describeMessage(kind int, attrs []byte) string {
	name := unix.NFTA_SET_NAME // has the value of NFTA_RULE_CHAIN and NFTA_SET_ELEM_LIST_SET
	switch kind {
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		name = unix.NFTA_CHAIN_NAME
	case unix.NFT_MSG_NEWTABLE, unix.NFT_MSG_DELTABLE:
		name = unix.NFTA_TABLE_NAME
	}
	return operations[kind] + " " + textOf(attribute(attrs, uint16(name)))
}

// dump requests all objects of a kind and calls each with the attributes of every one. It returns
// errInterrupted if an object may be missing. For elements, the kernel does not report that: see
// readElements.
func (c *conn) dump(kind int, family byte, write func(*writer), each func(attrs []byte)) error {
	return c.ask(kind, unix.NLM_F_DUMP, family, write, each)
}

func (c *conn) ask(kind int, flags uint16, family byte, write func(*writer), each func(attrs []byte)) error {
	w := &writer{}
	at := w.message(kind, flags, family)
	write(w)
	w.end(at)
	c.seq++
	binary.NativeEndian.PutUint32(w.buf[8:], c.seq)
	if err := unix.Send(c.fd, w.buf, 0); err != nil {
		return os.NewSyscallError("send to netlink", err)
	}
	var interrupted error
	for {
		n, err := c.receive()
		if err != nil {
			return err
		}
		for h, body := range messages(c.in[:n]) {
			if h.seq != c.seq {
				continue // answers an earlier request
			}
			if h.flags&unix.NLM_F_DUMP_INTR != 0 {
				interrupted = errInterrupted
			}
			switch h.kind {
			case unix.NLMSG_DONE, unix.NLMSG_ERROR:
				if len(body) >= 4 {
					if errno := unix.Errno(-int32(binary.NativeEndian.Uint32(body))); errno != 0 {
						return &kernelError{errno: errno, what: "read the ruleset", said: said(h, body)}
					}
				}
				return interrupted
			}
			if _, attrs, ok := h.nftables(body); ok {
				each(attrs)
			}
			if flags == 0 {
				return nil // a request without NLM_F_DUMP has one object as its answer
			}
		}
	}
}
