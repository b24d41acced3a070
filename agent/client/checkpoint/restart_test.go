// These tests prove what an agent that starts with a checkpoint knows of its Node and of what an
// earlier agent programmed.
package checkpoint

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/internal/model"
)

const epoch = 7

func apply(t *testing.T, w *cache.Writer, u *model.Update) {
	t.Helper()
	_, err := w.Apply(u)
	require.NoError(t, err)
}

// TestDeletedNodeStays checks that a deleted Node stays in the cache and in the checkpoint with
// Deleting set, until the Node exists again.
func TestDeletedNodeStays(t *testing.T) {
	c := inSyncWith(t, epoch, 1, nil)
	require.False(t, c.SetNode(nil), "there was none")
	require.Nil(t, c.Node())
	n := model.Node{
		Name: "node-1", Labels: map[string]string{"zone": "a"},
		Addresses: []netip.Addr{netip.MustParseAddr("192.168.0.2")},
	}
	require.False(t, c.SetNode(&n))
	require.NoError(t, c.InSync(make([]uint64, 1), model.ResourceVersions{}))
	changes, _ := c.Take()
	require.True(t, changes.Node)

	deleted := n
	deleted.Deleting = true
	for what, c := range map[string]*cache.Writer{"at run time": c, "while the agent was away": restart(t, c.Cache)} {
		for range 2 {
			require.True(t, c.SetNode(nil), what)
			require.Equal(t, &deleted, c.Node(), what)
		}
	}
	changes, _ = c.Take()
	require.True(t, changes.Node)
	restarted := restart(t, c.Cache)
	require.Equal(t, &deleted, restarted.Node(), "no server has said otherwise yet")
	require.False(t, restarted.SetNode(&n))
	require.Equal(t, &n, restarted.Node())
}

// TestNodeThatIsRegisteredAnew checks that a new Node's content counts, but that the old addresses
// and pod CIDRs stay until the new Node has its own. That holds whether or not the agent has seen
// the deletion.
func TestNodeThatIsRegisteredAnew(t *testing.T) {
	before := &model.Node{
		Name: "node-1", Labels: map[string]string{"zone": "a"},
		Addresses: []netip.Addr{netip.MustParseAddr("2001:db8::1")},
		PodCIDRs:  []netip.Prefix{netip.MustParsePrefix("fd00:10:180::/64")},
	}
	again := &model.Node{Name: "node-1", Labels: map[string]string{"zone": "b"}}
	known := &model.Node{Name: "node-1", Labels: again.Labels, Addresses: before.Addresses, PodCIDRs: before.PodCIDRs}
	own := &model.Node{
		Name: "node-1", Labels: again.Labels,
		Addresses: []netip.Addr{netip.MustParseAddr("192.168.0.2")},
		PodCIDRs:  []netip.Prefix{netip.MustParsePrefix("10.180.0.0/24")},
	}
	c := inSyncWith(t, epoch, 1, nil)
	c.SetNode(before)
	for what, c := range map[string]*cache.Writer{"at run time": c, "while the agent was away": restart(t, c.Cache)} {
		c.SetNode(nil)
		require.False(t, c.SetNode(again), what)
		require.Equal(t, known, c.Node(), what)
		require.Equal(t, known, restart(t, c.Cache).Node(), "a restart before it has its own")
		require.False(t, c.SetNode(own), what)
		require.Equal(t, own, c.Node(), what)
	}
	require.Equal(t, &model.Node{Name: "node-1", Labels: map[string]string{"zone": "b"}}, again, "objects are immutable")
}

// TestRestoredServices checks that a cache returns the restored Services with UDP ports once, as
// they were restored.
func TestRestoredServices(t *testing.T) {
	service := func(name string, protocols ...model.Protocol) *model.Service {
		s := model.Service{Namespace: "default", Name: name, Type: model.ClusterIP}
		for i, p := range protocols {
			s.Ports = append(s.Ports, model.ServicePort{Name: string(rune('a' + i)), Protocol: p, Port: 53})
		}
		return model.NewService(s)
	}
	dns, gone := service("dns", model.TCP, model.UDP), service("gone", model.UDP)
	c := inSyncWith(t, epoch, 1, nil)
	apply(t, c, &model.Update{From: 100, To: 101, Services: []*model.Service{service("web", model.TCP), dns, gone}})
	require.Empty(t, c.TakeRestored())
	c = restart(t, c.Cache)
	require.NoError(t, c.Welcome(epoch+1, 1))
	apply(t, c, &model.Update{To: 1, Full: true, Services: []*model.Service{service("new", model.UDP), service("dns", model.UDP)}})
	restored := c.TakeRestored()
	slices.SortFunc(restored, func(a, b *model.Service) int { return a.Key().Compare(b.Key()) })
	require.Equal(t, []*model.Service{dns, gone}, restored)
	require.Empty(t, c.TakeRestored())
}
