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

// TestLostAnswers holds that a transaction of which the kernel has more to say than fits in the socket's buffer still fails by what it
// said first, and that the socket is good for the next.
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

// TestLostNotifications holds that others' changes that can't all be told count as changes of the table.
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
	c.nft(t, "flush ruleset") // nothing is read after that until somebody takes the reason
	c.nft(t, fillOther(5000))
	defer func() {
		go func() { stop(); close(lost) }()
		for range lost { // what it still has to say
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

// TestLargeTransactionsOfOthers holds that what others change elsewhere, however much at once, is not taken for a change of the table.
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
		for range lost { // what it still has to say
		}
	}()
	select {
	case reason := <-lost:
		require.Contains(t, reason, "another process did this")
	case <-time.After(patient.Timeout):
		require.Fail(t, "nobody noticed")
	}
}

// fillOther gives a transaction that makes another table, with so many elements in a set.
func fillOther(size int) string {
	elements := make([]string, size)
	for i := range elements {
		elements[i] = fmt.Sprint(i)
	}
	return "add table ip other; add set ip other s { type mark; elements = { " + strings.Join(elements, ", ") + " }; }"
}

// TestChangesBeforeWatch holds that what others change is told however soon after a Replace has read the tables they do, and also if it
// is after Watch could not listen for a while.
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

// TestRepairedChangesAreForgotten holds that what others have changed, however much is told of it, is not told once a Replace has seen it.
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

// watch has the programmer watch until the test ends, and returns when it does.
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
