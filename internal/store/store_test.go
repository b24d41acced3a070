// These tests prove that snapshots hold what a plain map would after any writes, and that Updates
// and Since lead every earlier state there. They also prove that changes that cancel out are not
// published, when tombstones are forgotten, and which versions of the source the store reports.
package store

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
)

func newStore(t require.TestingT, o Options) *Store {
	s, err := New(o)
	require.NoError(t, err)
	return s
}

// synced returns a store whose source has synced, so that Publish publishes.
func synced(t require.TestingT, o Options) *Store {
	s := newStore(t, o)
	s.Synced()
	return s
}

func service(name string) *model.Service {
	return model.NewService(model.Service{Namespace: "default", Name: name, Type: model.ClusterIP})
}

func slice(name, service string, endpoints int) *model.Slice {
	s := modeltest.WebSlice(endpoints)
	s.Name, s.Service = name, service
	return model.NewSlice(s)
}

// inShard returns the name of a Service that is in the same shard as another Service, or in a
// different shard if same is false.
func inShard(shards uint32, other string, same bool) string {
	key := func(name string) model.ServiceKey { return model.ServiceKey{Namespace: "default", Name: name} }
	for i := 0; ; i++ {
		name := fmt.Sprintf("other-%d", i)
		if (key(name).Shard(shards) == key(other).Shard(shards)) == same {
			return name
		}
	}
}

// only returns the only Update of a Publish.
func only(t *testing.T, p Publication) *model.Update {
	t.Helper()
	require.Len(t, p.Updates, 1)
	return p.Updates[0]
}

func TestOptions(t *testing.T) {
	for _, shards := range []uint32{3, 63, 8192} {
		_, err := New(Options{Shards: shards})
		require.ErrorContains(t, err, "power of two")
	}
	s := newStore(t, Options{})
	require.EqualValues(t, DefaultShards, s.Shards())
	require.NotZero(t, s.Epoch())
	require.NotEqual(t, s.Epoch(), newStore(t, Options{}).Epoch())
}

func TestNothingIsPublishedBeforeSynced(t *testing.T) {
	s := newStore(t, Options{Shards: 1})
	s.Upsert(service("a"), 5)
	s.Upsert(&model.Node{Name: "n"}, 6)
	require.Zero(t, s.Publish())
	require.Zero(t, s.Snapshot(0).Len())
	select {
	case <-s.WaitSynced():
		t.Fatal("synced")
	default:
	}
	<-s.Dirty()
	s.Synced()
	s.Synced()
	<-s.WaitSynced()
	<-s.Dirty()
	select {
	case <-s.WaitPublished():
		t.Fatal("published")
	default:
	}
	p := s.Publish()
	<-s.WaitPublished()
	require.Equal(t, []string{"n"}, p.Nodes)
	u := only(t, p)
	require.Len(t, u.Services, 1)
	require.EqualValues(t, 0, u.From)
	require.EqualValues(t, 1, u.To)
	require.Equal(t, model.ResourceVersions{Services: 5}, u.ResourceVersions, "the Node's does not count")
}

func TestChangesThatCancelOutAreNotPublished(t *testing.T) {
	s := synced(t, Options{Shards: 4})
	other := inShard(4, "a", false)
	a, b := slice("s", "a", 3), slice("s", "a", 4)
	s.Upsert(a, 1)
	s.Publish()

	s.Upsert(b, 2)
	s.Upsert(a, 3)
	require.Empty(t, s.Publish().Updates, "changed and changed back")

	s.Remove(a.Key(), 4)
	s.Upsert(a, 5)
	require.Empty(t, s.Publish().Updates, "removed and added again")

	s.Upsert(slice("new", "a", 1), 6)
	s.Remove(slice("new", "a", 1).Key(), 7)
	require.Empty(t, s.Publish().Updates, "added and removed")

	s.Upsert(slice("s", other, 3), 8)
	s.Upsert(a, 9)
	require.Empty(t, s.Publish().Updates, "moved to a Service in another shard and back")

	again := modeltest.WebSlice(3)
	again.Name, again.Service, again.LastChangeTriggerTimeMS = "s", "a", 1
	s.Upsert(model.NewSlice(again), 10)
	require.Empty(t, s.Publish().Updates, "only the time of the last change differs")

	s.Remove(model.Key{Kind: model.KindSlice, Namespace: "default", Name: "never there"}, 11)
	require.Empty(t, s.Publish().Updates)
	require.EqualValues(t, 1, s.Snapshot(a.ServiceKey().Shard(4)).Sequence())

	s.Upsert(b, 12)
	u := only(t, s.Publish())
	require.EqualValues(t, 1, u.From)
	require.EqualValues(t, 2, u.To)
	require.Equal(t, model.ResourceVersions{Slices: 12}, u.ResourceVersions)
	require.Len(t, u.Deltas, 1, "a change of endpoints must be a delta")
}

func TestSliceHandedToAnotherService(t *testing.T) {
	for _, same := range []bool{true, false} {
		t.Run(fmt.Sprintf("same shard %v", same), func(t *testing.T) {
			s := synced(t, Options{Shards: 4})
			other := inShard(4, "a", same)
			before, after := slice("s", "a", 3), slice("s", other, 3)
			s.Upsert(before, 1)
			s.Publish()
			s.Upsert(after, 2)
			p := s.Publish()
			from, to := s.Snapshot(before.ServiceKey().Shard(4)), s.Snapshot(after.ServiceKey().Shard(4))
			require.Same(t, after, to.Get(after.Key()))
			require.Equal(t, modeltest.ShardDigest(after), to.Digest())
			if same {
				u := only(t, p)
				require.Equal(t, []*model.Slice{after}, u.Slices)
				require.Empty(t, u.Removed)
			} else {
				require.Len(t, p.Updates, 2)
				require.Nil(t, from.Get(before.Key()))
				require.Zero(t, from.Digest())
				require.Equal(t, []model.Key{before.Key()}, from.Since(1).Removed)
			}
			// The slice is removed from its current shard, not from its former one.
			s.Remove(after.Key(), 3)
			require.Equal(t, []model.Key{after.Key()}, only(t, s.Publish()).Removed)
			require.Zero(t, s.Snapshot(to.Shard()).Len())
		})
	}
}

// TestUpdatesAreHeardOfFirst checks that Publish calls its hear functions with an Update before the
// Update is visible.
func TestUpdatesAreHeardOfFirst(t *testing.T) {
	s := synced(t, Options{})
	s.Upsert(slice("web-1", "web", 1), 1)
	s.Upsert(slice("other-1", inShard(DefaultShards, "web", false), 1), 1)
	var heard []*model.Update
	p := s.Publish(func(u *model.Update) {
		require.Zero(t, s.Snapshot(u.Shard).Sequence())
		heard = append(heard, u)
	})
	require.Len(t, p.Updates, 2)
	require.Equal(t, p.Updates, heard)
}

// TestReached checks that without a relay Reached follows the versions of objects. On a relay it
// follows only Progress, because objects arrive out of order. In both cases it changes with
// Publish.
func TestReached(t *testing.T) {
	for _, relayed := range []bool{false, true} {
		s := synced(t, Options{Relayed: relayed})
		s.Upsert(slice("web-1", "web", 1), 10)
		require.Zero(t, s.Reached())
		u := only(t, s.Publish())
		require.EqualValues(t, 10, u.ResourceVersions.Slices)
		if relayed {
			require.Zero(t, s.Reached(), "other objects may be missing")
		} else {
			require.EqualValues(t, 10, s.Reached().Slices)
		}
		s.Progress(model.KindSlice, 20)
		require.Empty(t, s.Publish().Updates)
		require.Equal(t, model.ResourceVersions{Slices: 20}, s.Reached())
	}
}

// TestAddressesOfNodes checks that an address counts as a Node's as long as at least one Node has
// it.
func TestAddressesOfNodes(t *testing.T) {
	s := synced(t, Options{Shards: 1})
	address := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}) }
	s.Upsert(&model.Node{Name: "a", Addresses: []netip.Addr{address(1), address(2)}}, 1)
	s.Upsert(&model.Node{Name: "b", Addresses: []netip.Addr{address(2)}}, 2)
	has := func() (all []int) {
		for i := range 100 {
			if s.HasNodeAddress(address(i)) {
				all = append(all, i)
			}
		}
		return all
	}
	require.Equal(t, []int{1, 2}, has())
	s.Upsert(&model.Node{Name: "a", Addresses: []netip.Addr{address(3)}}, 3)
	require.Equal(t, []int{2, 3}, has())
	s.Remove((&model.Node{Name: "b"}).Key(), 4)
	require.Equal(t, []int{3}, has())

	// A node writes its own status, so the number of addresses that count is bounded.
	many := &model.Node{Name: "a"}
	for i := range 50 {
		many.Addresses = append(many.Addresses, address(10+i))
	}
	s.Upsert(many, 5)
	require.Equal(t, []int{10, 11, 12, 13, 14, 15, 16, 17}, has())
	s.Replace(model.KindNode, nil, 6)
	require.Empty(t, has())
	require.Empty(t, s.addresses)
}

func TestReplace(t *testing.T) {
	s := synced(t, Options{Shards: 1})
	objects := func(list ...model.Keyed) []model.Keyed { return list }
	s.Replace(model.KindService, objects(service("a"), service("b")), 1)
	s.Replace(model.KindSlice, objects(slice("s1", "a", 1), slice("s2", "b", 1)), 2)
	s.Replace(model.KindNode, objects(&model.Node{Name: "n1"}, &model.Node{Name: "n2"}), 3)
	p := s.Publish()
	require.Equal(t, 4, only(t, p).Len())
	require.ElementsMatch(t, []string{"n1", "n2"}, p.Nodes)

	// A relist that finds the same state changes nothing.
	s.Replace(model.KindService, objects(service("b"), service("a")), 4)
	s.Replace(model.KindSlice, objects(slice("s1", "a", 1), slice("s2", "b", 1)), 4)
	s.Replace(model.KindNode, objects(&model.Node{Name: "n1"}, &model.Node{Name: "n2"}), 4)
	require.Zero(t, s.Publish())

	// It removes objects that are not in the list, but only of its kind. That includes pending
	// objects.
	s.Upsert(service("pending"), 5)
	s.Replace(model.KindService, objects(service("b"), service("c")), 6)
	s.Replace(model.KindNode, objects(&model.Node{Name: "n2", Deleting: true}, &model.Node{Name: "n3"}), 7)
	p = s.Publish()
	u := only(t, p)
	require.Equal(t, []model.Key{service("a").Key()}, u.Removed)
	require.Equal(t, []*model.Service{service("c")}, u.Services)
	require.Empty(t, u.Slices)
	require.ElementsMatch(t, []string{"n1", "n2", "n3"}, p.Nodes)
	require.Nil(t, s.Node("n1"))
	require.True(t, s.Node("n2").Deleting)

	// Relays compare digests of Nodes, so every field of a Node must count in the digest.
	before := model.NodesDigest(s.Nodes())
	s.Upsert(&model.Node{Name: "n3", ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}}, 8)
	require.Equal(t, []string{"n3"}, s.Publish().Nodes)
	after := model.NodesDigest(s.Nodes())
	require.NotEqual(t, before, after)

	s.Remove(model.Key{Kind: model.KindNode, Name: "n3"}, 8)
	s.Remove(model.Key{Kind: model.KindNode, Name: "never there"}, 8)
	require.Equal(t, []string{"n3"}, s.Publish().Nodes)
}

func TestForgottenTombstonesLeadToTheWholeShard(t *testing.T) {
	s := synced(t, Options{Shards: 1, Tombstones: 2})
	for i := range 4 {
		s.Upsert(service(fmt.Sprint("s", i)), 0)
	}
	s.Upsert(service("stays"), 0)
	s.Publish() // sequence 1
	for i := range 3 {
		s.Remove(service(fmt.Sprint("s", i)).Key(), 0)
		s.Publish() // sequences 2, 3 and 4
	}
	require.Equal(t, 2, s.Tombstones())
	now := s.Snapshot(0)
	require.True(t, now.Since(0).Full)
	require.True(t, now.Since(1).Full, "from before the forgotten removal")
	require.Equal(t, 2, now.Since(1).Len())
	require.False(t, now.Since(2).Full, "from the forgotten removal")
	require.Len(t, now.Since(2).Removed, 2)
	require.Equal(t, []model.Key{service("s2").Key()}, now.Since(3).Removed)
	require.Zero(t, now.Since(4).Len())
	require.True(t, now.Since(5).Full, "from a sequence in the future")

	// An object that is added again needs no tombstone.
	s.Upsert(service("s1"), 0)
	s.Upsert(service("s2"), 0)
	s.Publish() // sequence 5
	s.Remove(service("s1").Key(), 0)
	s.Remove(service("s2").Key(), 0)
	s.Publish() // sequence 6
	require.False(t, s.Snapshot(0).Since(2).Full)
	require.Len(t, s.Snapshot(0).Since(2).Removed, 2)
}

func TestSelect(t *testing.T) {
	s := synced(t, Options{Shards: 1})
	s.Upsert(service("a"), 0)
	s.Upsert(slice("s", "a", 2), 9)
	s.Publish()
	gone := model.Key{Kind: model.KindSlice, Namespace: "default", Name: "gone"}
	u := s.Snapshot(0).Select([]model.Key{gone, slice("s", "a", 2).Key(), service("a").Key()})
	require.Equal(t, &model.Update{
		From: 1, To: 1, ResourceVersions: model.ResourceVersions{Slices: 9},
		Services: []*model.Service{service("a")}, Slices: []*model.Slice{slice("s", "a", 2)}, Removed: []model.Key{gone},
	}, u)
}

// replica is a naive implementation of a client that receives the Updates of a shard.
type replica struct {
	sequence uint64
	objects  map[model.Key]model.Object
}

func (r *replica) clone() *replica { return &replica{r.sequence, maps.Clone(r.objects)} }

func (r *replica) apply(t require.TestingT, u *model.Update) {
	if u.Full {
		clear(r.objects)
	} else {
		require.Equal(t, u.From, r.sequence)
	}
	for _, k := range u.Removed {
		require.False(t, u.Full, "a full update lists a removed object")
		delete(r.objects, k)
	}
	for _, o := range u.Services {
		r.objects[o.Key()] = o
	}
	for _, o := range u.Slices {
		r.objects[o.Key()] = o
	}
	for _, d := range u.Deltas {
		held, ok := r.objects[d.Key()].(*model.Slice)
		require.True(t, ok, "a delta for a slice that the replica does not have")
		o, err := d.Apply(held)
		require.NoError(t, err)
		r.objects[d.Key()] = o
	}
	r.sequence = u.To
}

func (r *replica) equals(t require.TestingT, s *Snapshot) {
	require.Equal(t, s.Sequence(), r.sequence)
	require.Len(t, r.objects, s.Len())
	for key, o := range r.objects {
		there := s.Get(key)
		require.NotNil(t, there)
		require.Equal(t, there.ContentVersion(), o.ContentVersion())
	}
	require.Equal(t, s.Digest(), modeltest.ShardDigest(slices.Collect(maps.Values(r.objects))...))
}

// TestStoreAgainstPlainMap writes objects in any order. Afterwards, the snapshots must hold what a
// plain map would. The Updates must lead to that state, and so must Since from every earlier state.
func TestStoreAgainstPlainMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const shards = 2
		s := synced(t, Options{Shards: shards, Tombstones: rapid.IntRange(1, 6).Draw(t, "tombstones")})
		naive := map[model.Key]model.Object{}
		follower := [shards]*replica{}
		history := [shards][]*replica{}
		for i := range follower {
			follower[i] = &replica{objects: map[model.Key]model.Object{}}
			history[i] = append(history[i], follower[i].clone())
		}
		write := func(o model.Object) {
			s.Upsert(o, 0)
			naive[o.Key()] = o
		}
		t.Repeat(map[string]func(*rapid.T){
			"service":   func(t *rapid.T) { write(modeltest.Service(t, modeltest.ServiceKey(t))) },
			"new slice": func(t *rapid.T) { write(modeltest.Slice(t, modeltest.SliceKey(t))) },
			"changed slice": func(t *rapid.T) {
				if o, ok := naive[modeltest.SliceKey(t)].(*model.Slice); ok {
					write(modeltest.Changed(t, o))
				}
			},
			"remove": func(t *rapid.T) {
				key := modeltest.SliceKey(t)
				if rapid.Bool().Draw(t, "service") {
					k := modeltest.ServiceKey(t)
					key = model.Key{Kind: model.KindService, Namespace: k.Namespace, Name: k.Name}
				}
				s.Remove(key, 0)
				delete(naive, key)
			},
			"relist": func(t *rapid.T) {
				kind := rapid.SampledFrom([]model.Kind{model.KindService, model.KindSlice}).Draw(t, "kind")
				var list []model.Keyed
				for key, o := range naive {
					switch {
					case key.Kind != kind:
					case rapid.IntRange(0, 4).Draw(t, "gone") == 0:
						delete(naive, key)
					default:
						list = append(list, o)
					}
				}
				s.Replace(kind, list, 0)
			},
			"publish": func(t *rapid.T) {
				seen := map[uint32]bool{}
				for _, u := range s.Publish().Updates {
					require.False(t, seen[u.Shard], "more than one update for a shard")
					seen[u.Shard] = true
					require.NotZero(t, u.Len())
					require.Equal(t, u.From+1, u.To)
					follower[u.Shard].apply(t, u)
					history[u.Shard] = append(history[u.Shard], follower[u.Shard].clone())
				}
				n := 0
				for i := range follower {
					now := s.Snapshot(uint32(i))
					n += now.Len()
					follower[i].equals(t, now)
					for _, earlier := range history[i] {
						caughtUp := earlier.clone()
						u := now.Since(earlier.sequence)
						requireOnce(t, u)
						caughtUp.apply(t, u)
						caughtUp.equals(t, now)
					}
				}
				require.Equal(t, len(naive), n)
				for key, o := range naive {
					require.Equal(t, o.ContentVersion(), s.Snapshot(o.ServiceKey().Shard(shards)).Get(key).ContentVersion())
				}

				// A store that receives the same state at once must have the same digests.
				other := synced(t, Options{Shards: shards})
				for _, o := range naive {
					other.Upsert(o, 0)
				}
				other.Publish()
				for i := range uint32(shards) {
					require.Equal(t, s.Snapshot(i).Digest(), other.Snapshot(i).Digest())
				}
			},
		})
	})
}

// requireOnce requires that an update names each object at most once.
func requireOnce(t require.TestingT, u *model.Update) {
	keys := slices.Clone(u.Removed)
	for _, o := range u.Services {
		keys = append(keys, o.Key())
	}
	for _, o := range u.Slices {
		keys = append(keys, o.Key())
	}
	slices.SortFunc(keys, model.Key.Compare)
	require.Len(t, slices.Compact(keys), u.Len())
}

func TestReadersGoOnWhileTheStoreChanges(t *testing.T) {
	const writes = 300
	s := synced(t, Options{Shards: 2, Tombstones: 8})
	var readers, writers sync.WaitGroup
	done := make(chan struct{})
	for range 4 {
		readers.Go(func() {
			followed := [2]*replica{{objects: map[model.Key]model.Object{}}, {objects: map[model.Key]model.Object{}}}
			for last := false; ; {
				for i, r := range followed {
					now := s.Snapshot(uint32(i))
					r.apply(t, now.Since(r.sequence))
					r.equals(t, now)
				}
				if last {
					return
				}
				select {
				case <-done:
					last = true
				default:
				}
			}
		})
	}
	for w := range 2 {
		writers.Go(func() {
			for i := range writes {
				name := fmt.Sprint("s", i%20)
				switch o := slice(name, fmt.Sprint("a", (i+w)%3), 1+i%5); {
				case i%7 == 0:
					s.Remove(o.Key(), 0)
				default:
					s.Upsert(o, 0)
				}
				s.Publish()
			}
		})
	}
	writers.Wait()
	close(done)
	readers.Wait()
}

// BenchmarkFlip writes and publishes a slice with one changed endpoint. It measures the server's
// cost of such a change without the encoding.
func BenchmarkFlip(b *testing.B) {
	for _, endpoints := range []int{10, 100, 1000} {
		b.Run(fmt.Sprintf("endpoints=%d", endpoints), func(b *testing.B) {
			s := synced(b, Options{})
			for i := range 1000 {
				s.Upsert(slice(fmt.Sprint("other-", i), fmt.Sprint("service-", i), 10), 0)
			}
			states := [2]*model.Slice{slice("s", "a", endpoints)}
			flipped := modeltest.WebSlice(endpoints)
			flipped.Name, flipped.Service = "s", "a"
			flipped.Endpoints[endpoints/2].Conditions.Ready = false
			states[1] = model.NewSlice(flipped)
			s.Upsert(states[0], 0)
			s.Publish()
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				s.Upsert(states[(i+1)%2], 0)
				if len(s.Publish().Updates) != 1 {
					b.Fatal("no change")
				}
			}
		})
	}
}

// TestTheSourceGoesBack requires the store's versions to follow a source that goes back in time: by
// a new list, or, on a relay, by what the upstream server says. The progress that this server
// reports is only what the relay has reached: a relay can be ahead of a server that holds the same.
func TestTheSourceGoesBack(t *testing.T) {
	s := synced(t, Options{})
	s.Upsert(slice("a", "web", 1), 1000)
	s.Publish()
	require.EqualValues(t, 1000, s.Seen().Slices)
	require.EqualValues(t, 1000, s.Reached().Slices)
	s.Replace(model.KindSlice, []model.Keyed{slice("a", "web", 2)}, 7)
	p := s.Publish()
	require.EqualValues(t, 7, only(t, p).ResourceVersions.Slices)
	require.True(t, p.Back)
	require.EqualValues(t, 7, s.Seen().Slices)
	require.EqualValues(t, 7, s.Reached().Slices)
	s.Upsert(slice("a", "web", 3), 6)
	require.False(t, s.Publish().Back)
	require.EqualValues(t, 7, s.Seen().Slices, "a single event lowered the version")

	relay := synced(t, Options{Relayed: true})
	relay.Upsert(slice("a", "web", 1), 1000)
	relay.Progress(model.KindSlice, 2000)
	relay.Publish()
	require.EqualValues(t, 1000, relay.Seen().Slices)
	relay.Progress(model.KindSlice, 1500)
	relay.Publish()
	require.EqualValues(t, 1000, relay.Seen().Slices)
	require.EqualValues(t, 1500, relay.Reached().Slices)
	relay.Progress(model.KindSlice, 7)
	require.False(t, relay.Publish().Back)
	require.EqualValues(t, 1000, relay.Seen().Slices)
	require.EqualValues(t, 7, relay.Reached().Slices)
	relay.SetSeen(model.ResourceVersions{Services: 8, Slices: 7})
	require.True(t, relay.Publish().Back)
	require.EqualValues(t, 7, relay.Seen().Slices)
	relay.SetSeen(model.ResourceVersions{Services: 9, Slices: 7})
	require.False(t, relay.Publish().Back)
}

// TestProgressAfterAChange requires a relay's Update to have the version of the object that it
// changes, whatever progress is reported before the Update is published: that of another kind, or
// progress from before the change. A client would otherwise believe that it has seen less, and a
// server that is behind would send it back in time. Seeds 16 and 235 of internal/simulate found it.
func TestProgressAfterAChange(t *testing.T) {
	relay := synced(t, Options{Relayed: true})
	relay.Progress(model.KindService, 100)
	relay.Progress(model.KindSlice, 100)
	relay.Upsert(slice("a", "web", 1), 120)
	relay.Progress(model.KindService, 110)
	relay.Progress(model.KindSlice, 110)
	u := only(t, relay.Publish())
	require.EqualValues(t, 120, u.ResourceVersions.Slices)
	require.EqualValues(t, 120, relay.Seen().Slices)
	require.EqualValues(t, 110, relay.Reached().Slices)
}

// TestSeenIsNotBehindSnapshots checks that the versions which a stream is told to have seen are
// never lower than those of a snapshot that it may have been sent, also while one shard after the
// other is published. Otherwise, a client that is cut off then would go back in time with the next
// server.
func TestSeenIsNotBehindSnapshots(t *testing.T) {
	s := synced(t, Options{Shards: 8})
	upsert := func(version uint64) {
		for i := range 20 {
			s.Upsert(modeltest.NamedSlice(fmt.Sprint("s-", i), fmt.Sprint("svc-", i), int(version)), version)
		}
	}
	published := 0
	check := func(*model.Update) {
		for i := range s.Shards() {
			if v := s.Snapshot(i).ResourceVersions(); v == (model.ResourceVersions{Slices: 9}) {
				published++
				require.Equal(t, v, s.Seen().Max(v).Min(s.Seen()))
			}
		}
	}
	upsert(2)
	s.Publish()
	upsert(9)
	require.EqualValues(t, 2, s.Seen().Slices)
	require.Greater(t, len(s.Publish(check).Updates), 2)
	require.Positive(t, published, "some shards were published before others")
	require.EqualValues(t, 9, s.Seen().Slices)

	// The source goes back in time.
	s.Replace(model.KindSlice, []model.Keyed{modeltest.NamedSlice("s-0", "svc-0", 1)}, 5)
	require.NotEmpty(t, s.Publish(check).Updates)
	require.EqualValues(t, 5, s.Seen().Slices)
}
