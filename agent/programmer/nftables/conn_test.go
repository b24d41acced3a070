package nftables

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/xtables"
)

// TestLostAnswers asserts that a transaction fails with the kernel's first error even if the
// kernel's answers do not fit in the socket's buffer, and that the socket works for the next
// transaction.
func TestLostAnswers(t *testing.T) {
	t.Parallel()
	h := newInHost(t, testenv.NewNetwork(t).AddNode("a").Host, Options{})
	require.NoError(t, h.Replace(t.Context(), newState()))
	d := newDialect(model.IPv4, DefaultMasqueradeMark)
	require.NoError(t, unix.SetsockoptInt(h.conn.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 1))
	o := objects{dialect: d}
	for i := range 1000 {
		o.removeChain(fmt.Sprint("none-", i))
	}
	b := newBatch(nil)
	b.append(o.buf)
	err := h.conn.commit(b)
	require.ErrorIs(t, err, unix.ENOENT)
	require.ErrorContains(t, err, "remove chain none-0")
	before, err := h.conn.generation()
	require.NoError(t, err)
	o = objects{dialect: d.of("other")}
	o.addTable()
	b = newBatch(nil)
	b.append(o.buf)
	require.NoError(t, h.conn.commit(b))
	after, err := h.conn.generation()
	require.NoError(t, err)
	require.Equal(t, before+1, after)
}

// TestLostNotifications asserts that changes by others count as changes of the table if not all of
// them can be reported.
func TestLostNotifications(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.replace(t)
	lost := make(chan string)
	stop := c.watch(t, lost)
	w := &c.inHost.conn.watcher
	raw, err := w.file.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		require.NoError(t, unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 1))
	}))
	c.nft(t, "flush ruleset") // nothing more is read until the reason is received
	c.nft(t, fillOther(5000))
	defer func() {
		go func() { stop(); close(lost) }()
		for range lost { // what Watch still has to report
		}
	}()
	timeout := time.After(patient.Timeout)
	for {
		select {
		case reason := <-lost:
			if strings.Contains(reason, "more than could be told") {
				return
			}
		case <-timeout:
			require.Fail(t, "nobody noticed")
			return
		}
	}
}

// TestLargeTransactionsOfOthers asserts that large changes by others elsewhere are not mistaken for
// a change of the table.
func TestLargeTransactionsOfOthers(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.replace(t)
	raw, err := c.inHost.conn.watcher.file.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		size, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF)
		require.NoError(t, err)
		require.GreaterOrEqual(t, size, xtables.NotificationBuffer, "run the tests as root: the kernel gives others less")
	}))
	c.nft(t, fillOther(15000)) // nobody listens yet
	c.nft(t, "flush ruleset")
	lost := make(chan string)
	stop := c.watch(t, lost)
	defer func() {
		go func() { stop(); close(lost) }()
		for range lost { // what Watch still has to report
		}
	}()
	select {
	case reason := <-lost:
		require.Contains(t, reason, "another process did this")
	case <-time.After(patient.Timeout):
		require.Fail(t, "nobody noticed")
	}
}

// fillOther returns a transaction that creates another table, with a set of size elements.
func fillOther(size int) string {
	elements := make([]string, size)
	for i := range elements {
		elements[i] = fmt.Sprint(i)
	}
	return "add table ip other; add set ip other s { type mark; elements = { " + strings.Join(elements, ", ") + " }; }"
}

// TestChangesBeforeWatch asserts that Watch reports changes by others however soon they come after
// a Replace has read the tables, also if Watch could not listen for a while.
func TestChangesBeforeWatch(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.replace(t)
	c.nft(t, "flush ruleset")
	lost := make(chan string, 10)
	stop := c.watch(t, lost)
	hears := func() {
		t.Helper()
		select {
		case reason := <-lost:
			t.Log(reason)
		case <-time.After(patient.Timeout):
			require.Fail(t, "nobody noticed")
		}
	}
	hears()
	stop()

	c.replace(t)
	c.inHost.conn.watcher.close()
	c.nft(t, "flush ruleset")
	for len(lost) > 0 {
		<-lost
	}
	c.watch(t, lost)
	hears()
}

// TestRepairedChangesAreForgotten asserts that Watch does not report changes by others, however
// many, that a Replace has seen.
func TestRepairedChangesAreForgotten(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.replace(t)
	c.nft(t, "flush ruleset")
	c.replace(t)
	c.nft(t, "add chain ip "+Table+" foreign")
	lost := make(chan string, 10)
	c.watch(t, lost)
	select {
	case reason := <-lost:
		require.Contains(t, reason, "chain foreign")
	case <-time.After(patient.Timeout):
		require.Fail(t, "nobody noticed")
	}
}

// watch runs the programmer's Watch until the test ends. stop returns once Watch has.
func (c *testCluster) watch(t *testing.T, lost chan<- string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wait sync.WaitGroup
	wait.Go(func() { c.inHost.Watch(ctx, func(reason string) { lost <- reason }) })
	stop = func() {
		cancel()
		wait.Wait()
	}
	t.Cleanup(stop)
	return stop
}
