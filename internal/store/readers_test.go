// These tests prove what the fan-out learns from the store: when to publish, and at once or not;
// which objects left a Service; and what a snapshot holds for some Services or buckets only.
package store

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
)

// received reports whether a channel has a value, and receives it.
func received(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// TestUrgent checks which changes must not wait for others: those that take something from nodes.
// Every change makes the store dirty.
func TestUrgent(t *testing.T) {
	const shards = 4
	unready := func(s *model.Slice) *model.Slice {
		changed := *s
		changed.Endpoints = append([]model.Endpoint(nil), s.Endpoints...)
		changed.Endpoints[0].Conditions.Ready = false
		return model.NewSlice(changed)
	}
	other := inShard(shards, "a", false)
	for name, c := range map[string]struct {
		write  func(s *Store)
		urgent bool
	}{
		"a new slice":               {func(s *Store) { s.Upsert(slice("new", "a", 1), 1) }, false},
		"a new Service":             {func(s *Store) { s.Upsert(service("b"), 1) }, false},
		"a Node":                    {func(s *Store) { s.Upsert(&model.Node{Name: "n"}, 1) }, false},
		"more endpoints":            {func(s *Store) { s.Upsert(slice("s", "a", 4), 1) }, false},
		"fewer endpoints":           {func(s *Store) { s.Upsert(slice("s", "a", 2), 1) }, true},
		"an endpoint is unready":    {func(s *Store) { s.Upsert(unready(slice("s", "a", 3)), 1) }, true},
		"a slice is removed":        {func(s *Store) { s.Remove(slice("s", "a", 3).Key(), 1) }, true},
		"a Service is removed":      {func(s *Store) { s.Remove(service("a").Key(), 1) }, true},
		"an unknown one is removed": {func(s *Store) { s.Remove(service("b").Key(), 1) }, false},
		"a Node is removed":         {func(s *Store) { s.Remove((&model.Node{Name: "n"}).Key(), 1) }, false},
		"to another shard":          {func(s *Store) { s.Upsert(slice("s", other, 3), 1) }, true},
		"a list without a slice":    {func(s *Store) { s.Replace(model.KindSlice, nil, 1) }, true},
		"a list with it":            {func(s *Store) { s.Replace(model.KindSlice, []model.Keyed{slice("s", "a", 3)}, 1) }, false},
		"progress":                  {func(s *Store) { s.Progress(model.KindSlice, 1) }, false},
		"the source has synced":     {func(s *Store) { s.Synced() }, false},
	} {
		s := synced(t, Options{Shards: shards})
		s.Upsert(service("a"), 0)
		s.Upsert(slice("s", "a", 3), 0)
		s.Publish()
		require.True(t, received(s.Dirty()), name)
		require.False(t, received(s.Urgent()), name)
		c.write(s)
		require.True(t, received(s.Dirty()), name)
		require.Equal(t, c.urgent, received(s.Urgent()), name)

		// What was urgent is not urgent any more once it is published.
		c.write(s)
		s.Publish()
		require.False(t, received(s.Urgent()), name)
	}
}

// TestDepartures checks which objects an Update says to have left a Service. The measurement of
// convergence counts the Services that an Update changes that way.
func TestDepartures(t *testing.T) {
	const shards = 4
	a := model.ServiceKey{Namespace: "default", Name: "a"}
	same, other := inShard(shards, "a", true), inShard(shards, "a", false)
	moved := model.Departure{Key: slice("s", "a", 1).Key(), Service: a}
	for name, c := range map[string]struct {
		write func(s *Store)
		left  []model.Departure
	}{
		"changed":            {func(s *Store) { s.Upsert(slice("s", "a", 4), 1) }, nil},
		"added":              {func(s *Store) { s.Upsert(slice("new", "a", 4), 1) }, nil},
		"removed":            {func(s *Store) { s.Remove(moved.Key, 1) }, []model.Departure{moved}},
		"Service removed":    {func(s *Store) { s.Remove(service("a").Key(), 1) }, []model.Departure{{Key: service("a").Key(), Service: a}}},
		"moved":              {func(s *Store) { s.Upsert(slice("s", same, 3), 1) }, []model.Departure{moved}},
		"moved to shard":     {func(s *Store) { s.Upsert(slice("s", other, 3), 1) }, []model.Departure{moved}},
		"back after removal": {func(s *Store) { s.Upsert(slice("gone", same, 3), 1) }, nil},
	} {
		s := synced(t, Options{Shards: shards})
		s.Upsert(service("a"), 0)
		s.Upsert(slice("s", "a", 3), 0)
		s.Upsert(slice("gone", "a", 3), 0)
		s.Publish()
		s.Remove(slice("gone", "a", 3).Key(), 0)
		s.Publish()
		c.write(s)
		var left []model.Departure
		for _, u := range s.Publish().Updates {
			left = append(left, u.Left...)
		}
		require.Equal(t, c.left, left, name)
	}
}

// TestPartsOfASnapshot checks what a snapshot returns for some Services or some buckets.
func TestPartsOfASnapshot(t *testing.T) {
	s := synced(t, Options{Shards: 1})
	is := func(name string) func(model.ServiceKey) bool {
		return func(k model.ServiceKey) bool { return k == model.ServiceKey{Namespace: "default", Name: name} }
	}
	require.EqualValues(t, 1, s.Snapshot(0).Oldest())
	for _, name := range []string{"a", "b", "c"} {
		s.Upsert(service(name), 5)
		s.Upsert(slice(name+"-1", name, 1), 6)
	}
	s.Publish() // sequence 1
	s.Upsert(slice("a-1", "a", 2), 7)
	s.Publish() // sequence 2
	s.Remove(service("c").Key(), 8)
	s.Remove(slice("c-1", "c", 1).Key(), 8)
	s.Publish() // sequence 3
	now := s.Snapshot(0)

	require.Equal(t, &model.Update{
		To: 3, Full: true, Services: []*model.Service{service("a")}, Slices: []*model.Slice{slice("a-1", "a", 2)},
		ResourceVersions: model.ResourceVersions{Services: 8, Slices: 8},
	}, now.Where(is("a")))
	require.Zero(t, now.Where(is("c")).Len(), "removed objects")
	require.EqualValues(t, 2, now.ChangedAt(model.ServiceKey{Namespace: "default", Name: "a"}))
	require.EqualValues(t, 1, now.ChangedAt(model.ServiceKey{Namespace: "default", Name: "b"}))
	require.EqualValues(t, 3, now.ChangedAt(model.ServiceKey{Namespace: "default", Name: "c"}), "its removal")
	require.Zero(t, now.ChangedAt(model.ServiceKey{Namespace: "default", Name: "d"}))

	bucket := slice("a-1", "a", 2).Key().Bucket()
	u := now.InBuckets([]uint32{bucket})
	require.Equal(t, [2]uint64{3, 3}, [2]uint64{u.From, u.To})
	require.Equal(t, []uint32{bucket}, u.FullBuckets)
	require.False(t, u.Full)
	require.Contains(t, u.Slices, now.Get(slice("a-1", "a", 2).Key()))
	all := 0
	for b := range uint32(model.Buckets) {
		u := now.InBuckets([]uint32{b})
		all += u.Len()
		for _, o := range u.Services {
			require.Equal(t, b, o.Key().Bucket())
		}
		for _, o := range u.Slices {
			require.Equal(t, b, o.Key().Bucket())
		}
	}
	require.Equal(t, now.Len(), all)
	require.Equal(t, 4, all)
	require.Equal(t, now.Digest(), model.ShardDigest(now.Buckets()))
	require.Equal(t, modeltest.ShardDigest(service("a"), service("b"), slice("a-1", "a", 2), slice("b-1", "b", 1)), now.Digest())
}

// TestDigestOfAll checks that the digest of all objects is that of the shards at the sequences that
// come with it.
func TestDigestOfAll(t *testing.T) {
	const shards = 4
	s := synced(t, Options{Shards: shards})
	digest, sequences := s.Digest()
	require.Zero(t, digest)
	require.Equal(t, make([]uint64, shards), sequences)
	for i := range 9 {
		s.Upsert(service(fmt.Sprint("s-", i)), 0)
		s.Publish()
	}
	digest, sequences = s.Digest()
	sum := uint64(0)
	digests := make([]model.Digest, shards)
	for i := range digests {
		snapshot := s.Snapshot(uint32(i))
		require.EqualValues(t, i, snapshot.Shard())
		digests[i] = snapshot.Digest()
		require.Equal(t, snapshot.Sequence(), sequences[i])
		sum += sequences[i]
	}
	require.EqualValues(t, 9, sum)
	require.Equal(t, model.StateDigest(digests), digest)
}

// TestDefaults checks that a store without options remembers removals, and the limits of the number
// of shards.
func TestDefaults(t *testing.T) {
	s := synced(t, Options{})
	require.EqualValues(t, DefaultShards, s.Shards())
	s.Upsert(service("a"), 0)
	s.Publish()
	s.Remove(service("a").Key(), 0)
	s.Publish()
	shard := service("a").ServiceKey().Shard(s.Shards())
	require.Equal(t, []model.Key{service("a").Key()}, s.Snapshot(shard).Since(1).Removed)
	for _, shards := range []uint32{1, 4096} {
		require.Equal(t, shards, newStore(t, Options{Shards: shards}).Shards())
	}
}

// TestPublishedNodes checks that Publish names each Node that changed once, and no other.
func TestPublishedNodes(t *testing.T) {
	s := synced(t, Options{Shards: 1})
	require.False(t, s.Published())
	s.Upsert(&model.Node{Name: "n"}, 0)
	s.Upsert(&model.Node{Name: "n", Deleting: true}, 0)
	require.Equal(t, []string{"n"}, s.Publish().Nodes)
	require.True(t, s.Published())
	require.Empty(t, s.Publish().Nodes)
	s.Upsert(&model.Node{Name: "n", Deleting: true}, 0)
	require.Empty(t, s.Publish().Nodes)
	require.Len(t, s.Nodes(), 1)
}

// TestUpdatesAreSorted checks that the objects of an Update are in the order of their keys, so that
// all servers encode the same state as the same bytes.
func TestUpdatesAreSorted(t *testing.T) {
	s := synced(t, Options{Shards: 1})
	var keys []model.Key
	write := func(endpoints int) *model.Update {
		for i := range 20 {
			s.Upsert(slice(fmt.Sprintf("s-%02d", i), "a", endpoints), 0)
		}
		return only(t, s.Publish())
	}
	for i := range 20 {
		s.Upsert(service(fmt.Sprintf("s-%02d", i)), 0)
		keys = append(keys, service(fmt.Sprintf("s-%02d", i)).Key(), slice(fmt.Sprintf("s-%02d", 19-i), "a", 1).Key(),
			model.Key{Kind: model.KindSlice, Namespace: "default", Name: fmt.Sprintf("t-%02d", 19-i)})
	}
	whole, deltas := write(5), write(4)
	now := s.Snapshot(0)
	for i := range 20 {
		s.Remove(service(fmt.Sprintf("s-%02d", i)).Key(), 0)
		s.Remove(slice(fmt.Sprintf("s-%02d", i), "a", 4).Key(), 0)
	}
	removed := only(t, s.Publish())
	require.Len(t, removed.Removed, 40)
	require.Len(t, deltas.Deltas, 20)
	for name, u := range map[string]*model.Update{
		"whole": whole, "deltas": deltas, "removed": removed, "since": now.Since(0), "removed since": s.Snapshot(0).Since(2), "selected": now.Select(keys),
	} {
		require.True(t, slices.IsSortedFunc(u.Services, func(a, b *model.Service) int { return a.Key().Compare(b.Key()) }), name)
		require.True(t, slices.IsSortedFunc(u.Slices, func(a, b *model.Slice) int { return a.Key().Compare(b.Key()) }), name)
		require.True(t, slices.IsSortedFunc(u.Deltas, func(a, b *model.SliceDelta) int { return a.Key().Compare(b.Key()) }), name)
		require.True(t, slices.IsSortedFunc(u.Removed, model.Key.Compare), name)
	}
}

// TestNothingRemainsOfChurn checks that names which never come back leave no more behind than the
// tombstones. Otherwise they would fill the server's memory.
func TestNothingRemainsOfChurn(t *testing.T) {
	const tombstones = 5
	s := synced(t, Options{Shards: 1, Tombstones: tombstones})
	for i := range 100 {
		s.Upsert(service(fmt.Sprint("s-", i)), 0)
		s.Publish()
		s.Remove(service(fmt.Sprint("s-", i)).Key(), 0)
		s.Publish()
	}
	now := s.Snapshot(0)
	require.Zero(t, now.Len())
	require.Equal(t, tombstones, now.byKey.Len())
	require.Equal(t, tombstones, now.byChange.Len())
	require.Len(t, s.shards[0].tombstones, tombstones)
	require.Empty(t, s.held)
	require.Empty(t, s.pending[0])
	require.Empty(t, s.pendingNodes)
}
