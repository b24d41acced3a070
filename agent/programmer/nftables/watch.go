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

// Watch calls lost when others changed the tables of this package, as soon as the kernel tells.
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

// foreign says what others changed in our tables, given notifications; "" if nothing.
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

// watcher hears what the kernel tells of changes. It is open from the first Replace on, so that what others change after that has
// read the tables waits in the socket for Watch.
type watcher struct {
	mu sync.Mutex
	// file is the socket; nil: nobody listens.
	file *os.File
	// closed: the socket was open, and what changed since is not known.
	closed bool
	// missed: something may have changed while the socket was deaf, or closed.
	missed bool
}

// open subscribes, unless that was done before.
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

// forget drops what has not been heard yet: who reads the tables from now on sees it there.
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

// miss has listen say that something may have changed. w.mu is held.
func (w *watcher) miss() {
	w.missed = true
	_ = w.file.SetReadDeadline(time.Now())
}

// listen calls lost with what others change, and have changed since the socket was opened, until ctx ends.
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

// wake has listen look around.
func (w *watcher) wake() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file != nil {
		_ = w.file.SetReadDeadline(time.Now())
	}
}

// awake has listen listen on, and tells whether something was missed.
func (w *watcher) awake() (missed bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = w.file.SetReadDeadline(time.Time{})
	missed, w.missed = w.missed, false
	return missed
}

// subscribe gives a socket from which what others change can be read.
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
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, xtables.NotificationBuffer) // as much as is allowed
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

// deaf runs a transaction without notifications: the kernel makes one for each element as long as anybody listens, which
// takes it several times as long as the elements do, and gigabytes for a large table. Whether others change something
// meanwhile is told by the number of the ruleset's generation.
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

// control calls f with the socket. w.mu is held.
func (w *watcher) control(f func(fd int) error) error {
	raw, err := w.file.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = f(int(fd)) })
	return errors.Join(err, failed)
}

// generation gives the number of the ruleset's generation, which each transaction makes one higher.
func (c *conn) generation() (uint32, error) {
	var generation uint32
	err := c.ask(unix.NFT_MSG_GETGEN, 0, unix.AF_UNSPEC, func(*writer) {}, func(attrs []byte) {
		generation = uint32Of(attribute(attrs, unix.NFTA_GEN_ID))
	})
	return generation, err
}
