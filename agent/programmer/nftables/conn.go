package nftables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// conn is a netlink socket for nf_tables, used by one goroutine at a time. The kernel works on a request while it is
// sent: when that returns, the answer is there.
type conn struct {
	fd int
	// port is the socket's address; notifications of a change carry that of the socket it came from.
	port uint32
	seq  uint32
	// limit is the longest transaction in bytes that the kernel takes from this socket.
	limit int
	in    []byte
	// watcher hears of what others do over other sockets.
	watcher watcher
}

// wantedLimit is the longest transaction that is asked for. It takes a privilege of the machine, not only of its network
// namespace, to have one of more than a few hundred kilobytes.
const wantedLimit = 64 << 20

// errInterrupted tells that what a dump gave may have missed something, as the ruleset changed meanwhile.
var errInterrupted = errors.New("the ruleset changed while it was read")

// errUnanswered tells that it is not known whether the kernel did something.
var errUnanswered = errors.New("the kernel's answer was lost")

// kernelError is what the kernel says of a message of a transaction, which has no effect then.
type kernelError struct {
	errno unix.Errno
	// what the message was to do, empty if it was not one message's fault; said is what the kernel adds, or empty.
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
	if err := unix.Connect(c.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil { // to the kernel
		return os.NewSyscallError("connect", err)
	}
	for _, option := range []int{unix.NETLINK_CAP_ACK, unix.NETLINK_EXT_ACK} {
		if err := unix.SetsockoptInt(c.fd, unix.SOL_NETLINK, option, 1); err != nil {
			return os.NewSyscallError("setsockopt", err)
		}
	}
	if unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, wantedLimit) != nil {
		_ = unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, wantedLimit) // as much as is allowed
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

// portOf gives the address that the kernel chose for a socket.
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

// batch is a transaction: all of its messages have effect at once, or none has.
type batch struct {
	writer
}

// newBatch begins a transaction in a buffer that is not needed any more.
func newBatch(buf []byte) *batch {
	b := &batch{writer{buf[:0]}}
	b.end(b.header(unix.NFNL_MSG_BATCH_BEGIN, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES))
	return b
}

// empty tells whether there is nothing to do.
func (b *batch) empty() bool { return len(b.buf) <= headerLen }

// append adds messages.
func (b *batch) append(messages ...[]byte) {
	for _, m := range messages {
		b.buf = append(b.buf, m...)
	}
}

// fits tells whether the kernel takes the transaction from a socket.
func (b *batch) fits(c *conn) bool { return len(b.buf)+headerLen <= c.limit }

// commitParts is commit for messages that need not have effect at once, as many at a time as the kernel takes.
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

// commit makes a transaction have effect. After a kernelError it has none.
func (c *conn) commit(b *batch) error {
	if len(b.buf) > largeTransaction {
		return c.watcher.deaf(c, func() error { return c.transact(b, true) })
	}
	return c.transact(b, true)
}

// largeTransaction is what is better done without notifications: about two thousand elements.
const largeTransaction = 1 << 17

// check has the kernel look at a transaction without giving it effect.
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
	if commit { // else the kernel takes it back in the end
		b.end(b.header(unix.NFNL_MSG_BATCH_END, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES))
	}
	if err := unix.Send(c.fd, b.buf, 0); err != nil {
		return os.NewSyscallError("send to netlink", err)
	}
	return c.answer(b, first)
}

// answer reads what the kernel says of a transaction whose messages are numbered from first to c.seq: errors of any of
// them, and an acknowledgement of the last. The answers are there; if some did not fit in the socket's buffer, they are
// lost.
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
			continue // what did fit is of use
		}
		if err != nil {
			return errors.Join(failed, err)
		}
		for h, body := range messages(c.in[:n]) {
			if h.kind != unix.NLMSG_ERROR || len(body) < 4 || h.seq-first > c.seq-first {
				continue // of an earlier transaction
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

// receive reads what is there; unix.EAGAIN: nothing is.
func (c *conn) receive() (int, error) {
	for {
		n, _, err := unix.Recvfrom(c.fd, c.in, unix.MSG_DONTWAIT)
		if !errors.Is(err, unix.EINTR) {
			return n, os.NewSyscallError("receive from netlink", err)
		}
	}
}

// said gives what the kernel adds to an error.
func said(h header, body []byte) string {
	const capped = unix.NLMSG_HDRLEN // of the request only its header is sent back: NETLINK_CAP_ACK
	if h.flags&unix.NLM_F_ACK_TLVS == 0 || len(body) < 4+capped {
		return ""
	}
	return textOf(attribute(body[4+capped:], unix.NLMSGERR_ATTR_MSG))
}

// operations names what is done by messages that are sent.
var operations = map[int]string{
	unix.NFT_MSG_NEWTABLE: "add table", unix.NFT_MSG_DELTABLE: "remove table",
	unix.NFT_MSG_NEWCHAIN: "add chain", unix.NFT_MSG_DELCHAIN: "remove chain",
	unix.NFT_MSG_NEWRULE: "add a rule of chain", unix.NFT_MSG_DELRULE: "remove the rules of chain",
	unix.NFT_MSG_NEWSET: "add set", unix.NFT_MSG_DELSET: "remove set",
	unix.NFT_MSG_NEWSETELEM: "add elements of set", unix.NFT_MSG_DELSETELEM: "remove elements of set",
}

// describe says what a message of a transaction was to do.
func describe(b []byte, seq uint32) string {
	for h, body := range messages(b) {
		if kind, attrs, ok := h.nftables(body); ok && h.seq == seq {
			return describeMessage(kind, attrs)
		}
	}
	return ""
}

func describeMessage(kind int, attrs []byte) string {
	name := unix.NFTA_SET_NAME // and NFTA_RULE_CHAIN, NFTA_SET_ELEM_LIST_SET
	switch kind {
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		name = unix.NFTA_CHAIN_NAME
	case unix.NFT_MSG_NEWTABLE, unix.NFT_MSG_DELTABLE:
		name = unix.NFTA_TABLE_NAME
	}
	return operations[kind] + " " + textOf(attribute(attrs, uint16(name)))
}

// dump asks for all objects of a kind and gives their attributes to each. errInterrupted: something may be missing. Of
// elements the kernel does not tell that.
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
				continue // of an earlier request
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
				return nil // it was one object
			}
		}
	}
}
