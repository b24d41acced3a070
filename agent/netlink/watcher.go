package netlink

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"os"
	"sync"
	"time"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Watcher receives the kernel's notifications about what others change. A programmer opens it
// before it reads what the kernel holds. What others change after that waits in the socket until
// Watch reads it, so no change is missed in between.
//
// Invariants, while mu is not held:
//
//  1. file is the socket, which is a member of the groups, or nil.
//  2. If file is nil although it was open before, closed is true. Changes since then are unknown,
//     and Open makes Watch report them.
//  3. If missed is true, a read of file is interrupted, so that Watch reports it.
type Watcher struct {
	protocol int
	groups   []int
	own      uint32

	mu             sync.Mutex // guards the fields below
	file           *os.File
	closed, missed bool
}

// NotificationBuffer is the number of bytes of notifications that a Watcher's socket holds until
// they are read. Large transactions of others have to fit, such as kube-proxy's or the sets of
// network policies. If a transaction does not fit, everything has to be programmed again.
const NotificationBuffer = 8 << 20

// NewWatcher returns a Watcher for groups of one of netlink's protocols. It leaves out what the
// socket with the port own does; 0 means no socket.
func NewWatcher(protocol int, own uint32, groups ...int) *Watcher {
	return &Watcher{protocol: protocol, own: own, groups: groups}
}

// Open opens the socket unless it is open.
func (w *Watcher) Open() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file != nil {
		return nil
	}
	if err := w.subscribe(); err != nil {
		w.closed = true
		return err
	}
	if w.closed {
		w.miss()
	}
	return nil
}

// subscribe opens the socket. The caller holds w.mu.
func (w *Watcher) subscribe() error {
	fd, _, err := bind(w.protocol, unix.SOCK_NONBLOCK)
	if err != nil {
		return err
	}
	file := os.NewFile(uintptr(fd), "netlink notifications")
	setBuffer(fd, unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, NotificationBuffer)
	if w.own != 0 {
		err = leaveOut(fd, w.own)
	}
	w.file = file
	if err = errors.Join(err, w.member(unix.NETLINK_ADD_MEMBERSHIP)); err != nil {
		w.file = nil
		return errors.Join(os.NewSyscallError("setsockopt", err), file.Close())
	}
	return nil
}

// leaveOut filters out the notifications about what the socket with a port does itself. That saves
// waking up for them. They could also be more than the socket can hold until they are read.
func leaveOut(fd int, port uint32) error {
	// A filter loads numbers as if they were in network byte order.
	asLoaded := binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, port))
	raw, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: 12, Size: 4}, // the sender's port in nlmsghdr
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: asLoaded, SkipTrue: 1},
		bpf.RetConstant{Val: math.MaxUint32},
		bpf.RetConstant{Val: 0},
	})
	if err != nil {
		return err
	}
	filter := make([]unix.SockFilter, len(raw))
	for i, f := range raw {
		filter[i] = unix.SockFilter{Code: f.Op, Jt: f.Jt, Jf: f.Jf, K: f.K}
	}
	program := &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, program)
}

// Close closes the socket. Watch opens it again.
func (w *Watcher) Close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file != nil {
		_ = w.file.Close()
	}
	w.file, w.closed = nil, true
}

// Forget discards the notifications that wait in the socket. The caller is about to read what the
// kernel holds, and sees those changes there.
func (w *Watcher) Forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file == nil {
		return
	}
	w.missed = false
	_ = w.control(func(fd int) error {
		var b [1]byte
		var err error
		for err == nil || errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EINTR) {
			_, _, err = unix.Recvfrom(fd, b[:], unix.MSG_DONTWAIT|unix.MSG_TRUNC)
		}
		return nil
	})
}

// Deaf calls change while the socket receives no notifications. If anybody listens, the kernel
// makes a notification for each object that changes, even if all listeners leave it out. For a
// large change, that takes several times as long as the change itself, and gigabytes of memory.
// generation returns a number that each change by anybody increases by one. It shows whether others
// changed something meanwhile. change returns by how much it has increased the number.
func (w *Watcher) Deaf(generation func() (uint32, error), change func() (by uint32, err error)) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file == nil {
		_, err := change()
		return err
	}
	before, err := generation()
	failed := err != nil || w.member(unix.NETLINK_DROP_MEMBERSHIP) != nil
	by, err := change()
	failed = w.member(unix.NETLINK_ADD_MEMBERSHIP) != nil || failed
	after, errAfter := generation()
	if failed || errAfter != nil || after != before+by {
		w.miss()
	}
	return err
}

// miss makes Watch report that others may have changed something. The caller holds w.mu.
func (w *Watcher) miss() {
	w.missed = true
	_ = w.file.SetReadDeadline(time.Now())
}

// member adds the socket to its groups, or removes it, depending on the option. The caller holds
// w.mu.
func (w *Watcher) member(option int) error {
	return w.control(func(fd int) (err error) {
		for _, group := range w.groups {
			err = errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_NETLINK, option, group))
		}
		return err
	})
}

// control calls f with the socket's file descriptor. The caller holds w.mu.
func (w *Watcher) control(f func(fd int) error) error {
	raw, err := w.file.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = f(int(fd)) })
	return errors.Join(err, failed)
}

// Watch calls lost when others have changed something, until ctx ends. loss returns what a
// notification says about that, or "" if it does not matter. lost is also called if changes may
// have been missed. If the socket fails, Watch calls failed with the reason and tries again after a
// pause.
func (w *Watcher) Watch(
	ctx context.Context, pause time.Duration, loss func(Message) string, lost func(reason string), failed func(error),
) {
	for {
		err := w.Open()
		if err == nil {
			err = w.listen(ctx, loss, lost)
		}
		if ctx.Err() != nil {
			return
		}
		w.Close()
		failed(err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// listen is Watch until the socket fails.
func (w *Watcher) listen(ctx context.Context, loss func(Message) string, lost func(reason string)) error {
	w.mu.Lock()
	file := w.file
	w.mu.Unlock()
	defer context.AfterFunc(ctx, w.wake)()
	buf := make([]byte, 1<<16)
	for {
		n, err := file.Read(buf)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, os.ErrDeadlineExceeded):
			if w.resume() {
				lost("changes by other processes may have been missed")
			}
		case errors.Is(err, unix.ENOBUFS):
			lost("other processes changed more than the notification socket holds")
		case err != nil:
			return err
		default:
			for m := range Messages(buf[:n]) {
				if reason := loss(m); reason != "" {
					lost(reason)
					break
				}
			}
		}
	}
}

// wake interrupts listen's read.
func (w *Watcher) wake() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file != nil {
		_ = w.file.SetReadDeadline(time.Now())
	}
}

// resume lets listen read again after an interruption, and reports whether something was missed.
func (w *Watcher) resume() (missed bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = w.file.SetReadDeadline(time.Time{})
	missed, w.missed = w.missed, false
	return missed
}
