// These tests prove that a cache which is restored from Contents is as the cache was, that its
// positions are only those that a server can continue from, and which shards Contents copies.
package cache

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
)

// udpService returns a Service with a UDP port.
func udpService(name string) *model.Service {
	return model.NewService(model.Service{
		Namespace: "default", Name: name, Type: model.ClusterIP,
		Ports: []model.ServicePort{{Protocol: model.TCP, Port: 53}, {Protocol: model.UDP, Port: 53}},
	})
}

func everything(int, uint64) bool { return true }

// TestContentsAreRestored checks that another cache holds and reports the same after Restore.
func TestContentsAreRestored(t *testing.T) {
	w := &Writer{Cache: New()}
	w.Begin()
	require.NoError(t, w.Welcome(epoch, 2))
	shard := webKey.Shard(2)
	tcp := model.NewService(model.Service{Namespace: "default", Name: "tcp", Type: model.ClusterIP, Ports: []model.ServicePort{{Protocol: model.TCP, Port: 53}}})
	for _, s := range []*model.Service{udpService("web"), tcp} {
		apply(t, w, &model.Update{Shard: s.ServiceKey().Shard(2), To: 3, FullBuckets: []uint32{s.Key().Bucket()}, Services: []*model.Service{s}})
	}
	lonely := named("lonely", "no-service", 1)
	apply(t, w, &model.Update{Shard: shard, From: 3, To: 4, Slices: []*model.Slice{named("s", "web", 2), named("t", "web", 3)}})
	apply(t, w, &model.Update{Shard: lonely.ServiceKey().Shard(2), To: 5, FullBuckets: []uint32{lonely.Key().Bucket()}, Slices: []*model.Slice{lonely}})
	w.SetNode(&model.Node{Name: "n"})
	w.SetServers([]Server{{Address: "a:1"}})
	require.Nil(t, w.Contents(everything), "it is not complete before it is in sync")
	seen := model.ResourceVersions{Services: 7, Slices: 8}
	require.NoError(t, w.InSync([]uint64{5, 6}, seen))

	r := &Writer{Cache: New()}
	require.NoError(t, r.Restore(w.Contents(everything)))
	want := w.Status()
	want.InSync = false
	require.Equal(t, want, r.Status())
	require.Equal(t, w.Node(), r.Node())
	require.Equal(t, w.Servers(), r.Servers())
	require.ElementsMatch(t, w.Services(), r.Services())
	svc, list := r.Service(webKey)
	require.Equal(t, udpService("web"), svc)
	require.Equal(t, []*model.Slice{named("s", "web", 2), named("t", "web", 3)}, list)
	require.Equal(t, []uint64{5, 6}, r.Begin().Sequences)

	_, ok := r.Take()
	require.False(t, ok, "nobody has said that it counts")
	require.True(t, r.UseRestored())
	<-r.Dirty()
	require.True(t, r.Stale())
	changes, ok := r.Take()
	require.True(t, ok)
	require.True(t, changes.Node)
	require.ElementsMatch(t, w.Services(), changes.Services)
	require.Equal(t, []*model.Service{udpService("web")}, r.TakeRestored())
	require.Empty(t, r.TakeRestored())
	require.NoError(t, r.InSync([]uint64{5, 6}, seen))
	require.False(t, r.UseRestored(), "a server has confirmed it")
	require.False(t, r.Stale())

	r = &Writer{Cache: New()}
	contents := w.Contents(everything)
	contents.Node = nil
	require.NoError(t, r.Restore(contents))
	require.True(t, r.UseRestored())
	changes, _ = r.Take()
	require.False(t, changes.Node, "there is none")
}

// TestServerOfAnotherClusterIsLate checks a server that answers after restored content has begun to
// count. If the content is of another cluster, nothing of both is returned together: the server's
// state replaces the content at InSync, and the old Node's addresses do not pass to the new one.
func TestServerOfAnotherClusterIsLate(t *testing.T) {
	const old, now = 1_700_000_000, 1_800_000_000
	state := func(name string, created int64) *model.Update {
		cluster := model.NewService(model.Service{
			Namespace: model.ClusterService.Namespace, Name: model.ClusterService.Name, Type: model.ClusterIP,
			CreationTimeSeconds: created,
		})
		return &model.Update{To: 1, Full: true, Services: []*model.Service{cluster, udpService(name)}}
	}
	for name, c := range map[string]struct {
		from, to int64
		another  bool
	}{
		"the same cluster":          {old, old, false},
		"another cluster":           {old, now, true},
		"a checkpoint of any":       {0, now, false},
		"a server that cannot know": {old, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := welcomed(t, 1)
			apply(t, w, state("before", c.from))
			w.SetNode(&model.Node{Name: "n", Addresses: []netip.Addr{netip.MustParseAddr("192.168.0.2")}})
			require.NoError(t, w.InSync([]uint64{1}, model.ResourceVersions{}))
			r := &Writer{Cache: New()}
			require.NoError(t, r.Restore(w.Contents(everything)))
			require.True(t, r.UseRestored())
			_, ok := r.Take()
			require.True(t, ok, "it counts, because no server has answered")

			r.Begin()
			require.Equal(t, c.another, r.FromCluster(c.to))
			require.NoError(t, r.Welcome(epoch+1, 1))
			r.SetNode(&model.Node{Name: "n"})
			apply(t, r, state("after", c.to))
			changes, ok := r.Take()
			require.True(t, ok)
			require.Equal(t, c.another, len(changes.Services) == 0)
			require.False(t, c.another && changes.Node)
			require.True(t, changes.Stale)
			require.Equal(t, c.another, len(r.Node().Addresses) == 0)
			require.True(t, r.Stale(), "no server has confirmed it")
			require.False(t, c.another && r.UseRestored())
			require.NoError(t, r.InSync([]uint64{1}, model.ResourceVersions{}))
			changes, ok = r.Take()
			require.True(t, ok)
			require.False(t, changes.Stale)
			require.False(t, r.Stale())
			require.ElementsMatch(t, []model.ServiceKey{model.ClusterService, udpService("after").ServiceKey()}, r.Services())
			if c.another {
				require.ElementsMatch(t, changes.Services, []model.ServiceKey{
					model.ClusterService, udpService("before").ServiceKey(), udpService("after").ServiceKey(),
				})
				require.True(t, changes.Node)
			}
		})
	}
}

// TestContentsOfChangedShards checks that Contents copies the shards that it is asked for, and that
// a shard's revision grows with every change of its content.
func TestContentsOfChangedShards(t *testing.T) {
	w := welcomed(t, 4)
	shard := webKey.Shard(4)
	slice := named("s", "web", 2)
	var before *Contents
	for i, u := range []*model.Update{
		{Services: []*model.Service{service("web")}},
		{Slices: []*model.Slice{slice}},
		{Unreadable: []model.Unreadable{unreadableSlice("s", 9, false)}},
		{Removed: []model.Key{slice.Key()}},
	} {
		u.Shard, u.From, u.To = shard, uint64(i+1), uint64(i+2)
		apply(t, w, u)
		now := w.Contents(func(i int, revision uint64) bool { return before == nil || revision != before.Revisions[i] })
		for i, u := range now.Shards {
			require.Equal(t, before == nil || uint32(i) == shard, u != nil)
		}
		if before != nil {
			require.Greater(t, now.Revisions[shard], before.Revisions[shard])
		}
		before = now
	}
	require.Equal(t, &model.Update{Shard: shard, Full: true, Services: []*model.Service{service("web")}}, before.Shards[shard])
}

// TestContentsHavePositionsToContinueFrom checks that a shard has no position in Contents if the
// server would leave out what the restored cache lacks.
func TestContentsHavePositionsToContinueFrom(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(*Writer)
		want    uint64
	}{
		"complete":        {func(*Writer) {}, 1},
		"a missing slice": {func(w *Writer) { w.shards[0].setMissing(named("s", "", 0).Key()) }, 0},
		"unreadable":      {func(w *Writer) { w.shards[0].setUnreadable(named("s", "", 0).Key(), model.Version{1}) }, 0},
	} {
		w := welcomed(t, 2)
		c.prepare(w)
		require.Equal(t, c.want, w.Contents(everything).Sequences[0], name)
	}

	// A checkpoint of newer software may have fields that this software does not know.
	shards := []*model.Update{{Full: true}, {Shard: 1, Full: true}}
	shard := webKey.Shard(2)
	shards[shard].Services = []*model.Service{service("web")}
	shards[shard].Unverified = []model.Unverified{{Key: service("web").Key(), Version: model.Version{9}}}
	r := &Writer{Cache: New()}
	require.NoError(t, r.Restore(&Contents{Epoch: epoch, Sequences: []uint64{3, 3}, Shards: shards}))
	want := slices.Repeat([]uint64{3}, 2)
	want[shard] = 0
	require.Equal(t, want, r.Begin().Sequences)
}
