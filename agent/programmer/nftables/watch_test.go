// These tests prove that Watch reports what others do to the tables of a real kernel between a
// Replace and Watch, and nothing that a Replace has seen.
package nftables

import (
	"context"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

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
	c.inHost.conn.Watcher.Close()
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

// TestIntact asserts what a new programmer finds of an earlier one's table, with a state that is
// older than the kernel's.
func TestIntact(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.set(c.web(model.IPv4, 1, 0, 2), c.web(model.IPv6, 1, 0, 2))
	older := view.State{Node: c.state.Node, Ports: maps.Clone(c.state.Ports)}
	intact := func() (is bool) {
		c.restart()
		require.NoError(t, c.a.Do(func() error { is = c.inHost.Intact(t.Context(), older); return nil }))
		return is
	}
	require.False(t, intact(), "nothing was ever programmed")
	c.replace(t)
	c.apply(t, c.web(model.IPv4, 1, 1))
	require.True(t, intact())
	for _, by := range []string{
		"flush ruleset", "flush table ip " + Table, "delete table ip6 " + Table, "flush map ip " + Table + " " + frontends.String(),
		"flush chain ip " + Table + " " + servicesChain,
	} {
		c.replace(t)
		require.True(t, intact())
		c.nft(t, by)
		require.False(t, intact(), by)
	}
}
