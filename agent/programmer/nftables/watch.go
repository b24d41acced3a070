package nftables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/xtables"
)

// Watch calls lost when others have changed the tables of this package, as soon as the kernel
// reports it.
func (p *Programmer) Watch(ctx context.Context, lost func(reason string)) {
	w := &p.conn.watcher
	for {
		err := w.open(p.conn.port)
		if err == nil {
			err = w.listen(ctx, p.foreign, lost)
		}
		if ctx.Err() != nil {
			return
		}
		w.close()
		p.log.Warn("changes of nftables by others can't be seen; trying again in a minute", "err", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Minute):
		}
	}
}

// foreign returns what others changed in this package's tables according to notifications, or "" if
// they changed nothing.
func (p *Programmer) foreign(b []byte) string {
	for h, body := range messages(b) {
		kind, attrs, ok := h.nftables(body)
		if !ok || operations[kind] == "" || textOf(attribute(attrs, unix.NFTA_TABLE_NAME)) != Table {
			continue
		}
		for _, f := range p.families {
			if body[0] == f.nfproto {
				return fmt.Sprintf("another process did this to the %v table: %s", f.family, describeMessage(kind, attrs))
			}
		}
	}
	return ""
}

// watcher receives the kernel's notifications about changes. It is open from the first Replace on.
// What others change after that Replace has read the tables waits in the socket until Watch reads
// it.
type watcher struct {
	// mu guards the fields below.
	mu sync.Mutex
	// file is the socket. nil means that it is not open.
	file *os.File
	// closed means that the socket was open and closed again. Changes since then are unknown.
	closed bool
	// missed means that others may have changed something while the socket was deaf or closed.
	missed bool
}

// open opens the socket and subscribes to notifications, unless it is open.
func (w *watcher) open(ownPort uint32) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file != nil {
		return nil
	}
	file, err := subscribe(ownPort)
	if err != nil {
		w.closed = true
		return err
	}
	w.file = file
	if w.closed {
		w.miss()
	}
	return nil
}

// forget discards the notifications that wait in the socket. The caller is about to read the
// tables, and sees those changes there.
func (w *watcher) forget() {
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

func (w *watcher) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file != nil {
		_ = w.file.Close()
	}
	w.file, w.closed = nil, true
}

// miss makes listen report that others may have changed something. The caller holds w.mu.
func (w *watcher) miss() {
	w.missed = true
	_ = w.file.SetReadDeadline(time.Now())
}

// listen calls lost with what others change, and have changed since the socket was opened. It
// returns when ctx ends or reading fails.
func (w *watcher) listen(ctx context.Context, foreign func([]byte) string, lost func(string)) error {
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
			if w.awake() {
				lost("others may have changed something while that could not be heard")
			}
		case errors.Is(err, unix.ENOBUFS):
			lost("others changed more than could be told")
		case err != nil:
			return err
		default:
			if reason := foreign(buf[:n]); reason != "" {
				lost(reason)
			}
		}
	}
}

// wake interrupts listen's read.
func (w *watcher) wake() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file != nil {
		_ = w.file.SetReadDeadline(time.Now())
	}
}

// awake lets listen read again, and reports whether something was missed.
func (w *watcher) awake() (missed bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = w.file.SetReadDeadline(time.Time{})
	missed, w.missed = w.missed, false
	return missed
}

// subscribe returns a socket that receives notifications of changes, except those made by the
// socket with ownPort.
func subscribe(ownPort uint32) (*os.File, error) {
	fd, err := openNetlink(unix.SOCK_NONBLOCK)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "nftables notifications")
	filter, err := xtables.WithoutOwn(ownPort)
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	program := make([]unix.SockFilter, len(filter))
	for i, f := range filter {
		program[i] = unix.SockFilter{Code: f.Op, Jt: f.Jt, Jf: f.Jf, K: f.K}
	}
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, xtables.NotificationBuffer) != nil {
		// Without the privilege, as much as is allowed must do.
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, xtables.NotificationBuffer)
	}
	err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]})
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, unix.NFNLGRP_NFTABLES)
	}
	if err != nil {
		return nil, errors.Join(os.NewSyscallError("setsockopt", err), file.Close())
	}
	return file, nil
}

// deaf runs a transaction while the socket receives no notifications. If anybody listens, the
// kernel makes a notification for each element. That takes several times as long as the elements
// themselves, and gigabytes of memory for a large table. The generation number of the ruleset shows
// whether others changed something meanwhile.
func (w *watcher) deaf(c *conn, commit func() error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file == nil {
		return commit()
	}
	before, err := c.generation()
	failed := err != nil || w.member(unix.NETLINK_DROP_MEMBERSHIP) != nil
	err = commit()
	if err == nil {
		before++
	}
	failed = w.member(unix.NETLINK_ADD_MEMBERSHIP) != nil || failed
	after, errAfter := c.generation()
	if failed || errAfter != nil || after != before {
		w.miss()
	}
	return err
}

func (w *watcher) member(option int) error {
	return w.control(func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_NETLINK, option, unix.NFNLGRP_NFTABLES) })
}

// control calls f with the socket's file descriptor. The caller holds w.mu.
func (w *watcher) control(f func(fd int) error) error {
	raw, err := w.file.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = f(int(fd)) })
	return errors.Join(err, failed)
}

// generation returns the generation number of the ruleset, which each transaction increases by one.
func (c *conn) generation() (uint32, error) {
	var generation uint32
	err := c.ask(unix.NFT_MSG_GETGEN, 0, unix.AF_UNSPEC, func(*writer) {}, func(attrs []byte) {
		generation = uint32Of(attribute(attrs, unix.NFTA_GEN_ID))
	})
	return generation, err
}
