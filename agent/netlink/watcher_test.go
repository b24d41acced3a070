// These tests prove that a Watcher reports every change by others in a real kernel, even if
// notifications are lost, and none by its caller.
package netlink

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/testenv"
)

// watch is a Watcher of nf_tables on a host. Every notification counts as a loss.
type watch struct {
	*Watcher
	t    *testing.T
	host *testenv.Host
	lost chan string
	// stop ends Watch.
	stop func()
}

// newWatch returns a Watcher that is open. It leaves out what the socket with the port own does.
func newWatch(t *testing.T, host *testenv.Host, own uint32) *watch {
	t.Helper()
	w := &watch{Watcher: NewWatcher(unix.NETLINK_NETFILTER, own, unix.NFNLGRP_NFTABLES), t: t, host: host, lost: make(chan string)}
	require.NoError(t, host.Do(w.Open))
	t.Cleanup(w.Close)
	return w
}

// start runs Watch until the test or stop ends it. What it still has to report then is discarded.
func (w *watch) start() {
	w.t.Helper()
	ctx, cancel := context.WithCancel(w.t.Context())
	var wait sync.WaitGroup
	wait.Go(func() {
		require.NoError(w.t, w.host.Do(func() error {
			w.Watch(ctx, time.Millisecond, func(Message) string { return "something changed" }, func(reason string) {
				select {
				case w.lost <- reason:
				case <-ctx.Done():
				}
			}, func(err error) { w.t.Log(err) })
			return nil
		}))
	})
	w.stop = sync.OnceFunc(func() {
		cancel()
		wait.Wait()
	})
	w.t.Cleanup(w.stop)
}

func (w *watch) nft(command string) {
	w.t.Helper()
	_, err := w.host.Run(w.t.Context(), "nft", command)
	require.NoError(w.t, err)
}

// hears waits until Watch reports something that contains text.
func (w *watch) hears(text string) {
	w.t.Helper()
	timeout := time.After(10 * time.Second)
	for {
		select {
		case reason := <-w.lost:
			if strings.Contains(reason, text) {
				return
			}
		case <-timeout:
			require.FailNow(w.t, "nobody noticed")
		}
	}
}

func (w *watch) hearsNothing() {
	w.t.Helper()
	select {
	case reason := <-w.lost:
		require.FailNow(w.t, reason)
	case <-time.After(100 * time.Millisecond):
	}
}

// fill returns a command that creates a table, with a set of size elements.
func fill(size int) string {
	elements := make([]string, size)
	for i := range elements {
		elements[i] = fmt.Sprint(i)
	}
	return "add table ip other; add set ip other s { type mark; elements = { " + strings.Join(elements, ", ") + " }; }"
}

func newHost(t *testing.T) *testenv.Host { return testenv.NewNetwork(t).AddNode("a").Host }

// TestLostNotifications asserts that it is reported if not all changes by others can be.
func TestLostNotifications(t *testing.T) {
	t.Parallel()
	w := newWatch(t, newHost(t), 0)
	require.NoError(t, w.control(func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 1) }))
	w.start()
	w.nft("add table ip one") // nothing more is read until this is received
	w.nft(fill(5000))
	w.hears("more than the notification socket holds")
}

// TestLargeTransactionsOfOthers asserts that large changes by others fit, even while nobody reads
// them.
func TestLargeTransactionsOfOthers(t *testing.T) {
	t.Parallel()
	w := newWatch(t, newHost(t), 0)
	require.NoError(t, w.control(func(fd int) error {
		size, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
		require.GreaterOrEqual(t, size, NotificationBuffer, "run the tests as root: the kernel gives others less")
		return err
	}))
	w.nft(fill(15000))
	w.nft("flush ruleset")
	w.start()
	select {
	case reason := <-w.lost:
		require.Equal(t, "something changed", reason)
	case <-time.After(10 * time.Second):
		require.Fail(t, "nobody noticed")
	}
}

// TestOpenAndForget asserts that changes are reported however soon they come after Open, and also
// if the socket was closed for a while, but not those before Forget.
func TestOpenAndForget(t *testing.T) {
	t.Parallel()
	w := newWatch(t, newHost(t), 0)
	w.nft("add table ip one")
	w.start()
	w.hears("something changed")
	w.stop()
	w.Close()
	w.nft("add table ip two")
	w.start()
	w.hears("may have been missed")
	w.stop()
	w.nft("add table ip three")
	w.Forget()
	w.start()
	w.hearsNothing()
	w.nft("add table ip four")
	w.hears("something changed")
}

// TestDeaf asserts that a change by the caller is not reported, and that one by others meanwhile
// is.
func TestDeaf(t *testing.T) {
	t.Parallel()
	w := newWatch(t, newHost(t), 0)
	w.start()
	generation := uint32(7)
	read := func() (uint32, error) { return generation, nil }
	require.NoError(t, w.Deaf(read, func() (uint32, error) {
		w.nft("add table ip own")
		generation += 3
		return 3, nil
	}))
	w.hearsNothing()
	require.NoError(t, w.Deaf(read, func() (uint32, error) {
		w.nft("add table ip own2")
		generation += 2
		return 1, nil
	}))
	w.hears("may have been missed")
	require.ErrorIs(t, w.Deaf(read, func() (uint32, error) { return 0, unix.EPERM }), unix.EPERM)
	w.hearsNothing()
	require.ErrorIs(t, w.Deaf(read, func() (uint32, error) { generation++; return 0, unix.EPERM }), unix.EPERM)
	w.hears("may have been missed")
	w.nft("add table ip two")
	w.hears("something changed")
}
