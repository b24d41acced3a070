// These tests prove that places are taken in turns by source, that Nodes have turns of their own,
// and that those who give up leave nothing behind.
package bounded

import (
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
)

// waiting returns how many wait.
func (t *Turns) waiting() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for class := range t.order {
		for e := t.order[class].Front(); e != nil; e = e.Next() {
			n += e.Value.(*waiters).Len()
		}
	}
	return n
}

func TestSourcesTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turns, gone := NewTurns(1), make(chan struct{})
		require.True(t, turns.Take(netip.Prefix{}, false, nil))
		var mu sync.Mutex
		var order []string
		wait := func(name string, ofNode bool, gone chan struct{}) {
			source := netip.MustParsePrefix("192.0.2." + name[1:] + "/32")
			go func() {
				if turns.Take(source, ofNode, gone) {
					mu.Lock()
					order = append(order, name)
					mu.Unlock()
				}
			}()
			synctest.Wait()
		}
		for range 3 {
			wait("a1", false, nil)
		}
		for range 3 {
			wait("b2", false, gone) // they give up
		}
		for range 2 {
			wait("c3", false, nil)
		}
		wait("n4", true, nil)
		wait("n5", true, nil)
		require.Equal(t, 10, turns.waiting())
		close(gone)
		synctest.Wait()
		require.Equal(t, 7, turns.waiting())
		for range 7 {
			turns.Leave()
			synctest.Wait()
		}
		require.Equal(t, []string{"n4", "a1", "n5", "c3", "a1", "c3", "a1"}, order)
		require.Zero(t, turns.waiting())
		require.Empty(t, turns.sources[0])
		require.Empty(t, turns.sources[1])
		turns.Leave()
		require.True(t, turns.Take(netip.Prefix{}, true, nil))
	})
}
