// These tests prove that a client that has seen newer state waits for the server, that a kind of
// objects that is quiet holds up nobody, and that the wait is bounded.
package fanout

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// TestWhoHasSeenMoreWaits checks that a client that has seen newer versions waits for the server,
// whatever it holds and however often it connects. It is sent no state until the server
// has caught up. A relay is never told that the state is older than that: it would pass on the
// state as an older one, and a node could then be sent back in time by a third server.
func TestWhoHasSeenMoreWaits(t *testing.T) {
	seen := &pb.ResourceVersions{Services: 9, Slices: 9}
	for name, hello := range map[string]*pb.Hello{
		"resumes":        {Digest: modeltest.Digests(5), Sequences: []uint64{3, 3}},
		"holds nothing":  {Digest: modeltest.Digests(0), Sequences: []uint64{0, 0}},
		"was never here": {},
		"is a relay":     {Kind: pb.ClientKind_CLIENT_KIND_RELAY, Digest: modeltest.Digests(5), Sequences: []uint64{3, 3}},
	} {
		t.Run(name, func(t *testing.T) {
			s := filled(t, 1)
			h := running(t, Options{Store: s, MaxBehindWait: time.Hour, Heartbeat: time.Millisecond})
			hello.ResourceVersions = seen
			waits := func() *pipe {
				p := connect(t, h, hello)
				eventually(t, func() bool {
					for _, r := range p.read(t) {
						require.Nil(t, r.Update)
						require.Nil(t, r.InSync)
						if r.Heartbeat != nil {
							require.Nil(t, r.Heartbeat.ResourceVersions)
							return true
						}
					}
					return false
				})
				return p
			}
			// The second time, it was cut off while it waited.
			for _, epoch := range []uint64{s.Epoch() + 1, s.Epoch()} {
				hello.Epoch = epoch
				require.Error(t, waits().close())
			}
			p := waits()
			defer p.cancel()
			s.Upsert(service(0), 9)
			s.Upsert(slice(0, 7), 9)
			came, reached := false, hello.Kind != pb.ClientKind_CLIENT_KIND_RELAY
			eventually(t, func() bool {
				for _, r := range p.read(t) {
					if v := r.Heartbeat.GetResourceVersions(); v != nil {
						reached = true
						require.Equal(t, seen.String(), v.String())
					}
					if r.Update == nil {
						continue
					}
					for _, o := range r.Update.Slices {
						require.Equal(t, slice(0, 7).ContentVersion(), o.ContentVersion())
						came = true
					}
				}
				return came && reached && p.session.synced.Load()
			})
		})
	}
}

// TestAQuietKindHoldsUpNobody checks a client from a server whose list of Services is newer than
// the last that this server has heard of them. Both hold the same state. Changes of slices, in
// which this server is not behind, and the client's Node are sent at once. A change of a Service
// waits, as the client may have seen it undone, and so does everything after it in its shard.
func TestAQuietKindHoldsUpNobody(t *testing.T) {
	for name, after := range map[string]func(*testing.T, *store.Store, *pipe){
		"until the server has heard more": func(_ *testing.T, s *store.Store, _ *pipe) {
			s.Progress(model.KindService, 800)
		},
		"until a newer change of the kind": func(_ *testing.T, s *store.Store, _ *pipe) {
			s.Upsert(service(1), 801)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := filled(t, 8) // Services at version 1, slices at version 2
			s.Upsert(slice(0, 3), 900)
			s.Publish()
			h := running(t, Options{Store: s, MaxBehindWait: time.Hour, Heartbeat: time.Hour})
			hello := holding(s)
			hello.Epoch++
			hello.NodeName, hello.Kind = "a", pb.ClientKind_CLIENT_KIND_AGENT
			hello.ResourceVersions = &pb.ResourceVersions{Services: 800, Slices: 800}
			p := connect(t, h, hello)
			defer p.cancel()
			seen := seenIn(t, p)
			require.Equal(t, (&pb.ResourceVersions{Services: 800, Slices: 900}).String(), seen.String(), "it must wait for them on its next stream, too")
			var got []*wire.Response
			comes := func(what func(*wire.Response) bool) {
				t.Helper()
				got = nil
				eventually(t, func() bool {
					got = append(got, p.read(t)...)
					return slices.ContainsFunc(got, what)
				})
			}
			endpoints := func(service, n int) func(*wire.Response) bool {
				return func(r *wire.Response) bool {
					if r.Update == nil {
						return false
					}
					for _, d := range r.Update.Deltas {
						if d.Key() == slice(service, n).Key() && d.Version == slice(service, n).ContentVersion() {
							return true
						}
					}
					return slices.ContainsFunc(r.Update.Slices, func(o *model.Slice) bool {
						return o.ContentVersion() == slice(service, n).ContentVersion()
					})
				}
			}
			s.Upsert(slice(0, 2), 1000)
			comes(endpoints(0, 2))
			s.Upsert(&model.Node{Name: "a", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}, 1001)
			comes(func(r *wire.Response) bool { return r.Node != nil })

			shardOf := func(i int) uint32 { return service(i).ServiceKey().Shard(2) }
			other, same := 0, 0 // Services of another shard, and of the same one as service 1
			for i := 2; i < 8; i++ {
				if shardOf(i) == shardOf(1) {
					same = i
				} else {
					other = i
				}
			}
			changed := *service(1)
			changed.CreationTimeSeconds++
			s.Upsert(model.NewService(changed), 700)
			s.Upsert(slice(same, 1), 1002)
			eventually(t, func() bool { return s.Reached().Services == 700 })
			s.Upsert(slice(other, 1), 1003)
			comes(endpoints(other, 1))
			for _, r := range got {
				require.True(t, r.Update == nil || r.Update.Shard != shardOf(1))
			}
			after(t, s, p)
			comes(endpoints(same, 1))
			s.Upsert(slice(same, 2), 1004)
			comes(endpoints(same, 2))
			require.Zero(t, testutil.ToFloat64(h.metrics.behindWaits.WithLabelValues("gave_up")))
			for _, r := range append(got, p.read(t)...) {
				require.Nil(t, r.Heartbeat.GetSeenVersions(), "the server has caught up")
			}
		})
	}
}

// seenIn waits for an InSync, and returns the resource versions that it names. It calls each check
// with each message.
func seenIn(t *testing.T, p *pipe, check ...func(*wire.Response)) (seen *pb.ResourceVersions) {
	t.Helper()
	eventually(t, func() bool {
		for _, r := range p.read(t) {
			for _, f := range check {
				f(r)
			}
			if r.InSync != nil {
				seen = r.InSync.GetResourceVersions()
			}
		}
		return seen != nil
	})
	return seen
}

// TestChangesThatAreHeldBackComeAfterAWait checks that a client waits no longer than MaxBehindWait
// for a server that does not catch up. The wait is counted, unless nothing was held back.
func TestChangesThatAreHeldBackComeAfterAWait(t *testing.T) {
	for _, changes := range []bool{true, false} {
		s := filled(t, 4)
		h := running(t, Options{Store: s, MaxBehindWait: 100 * time.Millisecond, Heartbeat: time.Hour})
		hello := holding(s)
		hello.Epoch++
		hello.ResourceVersions = &pb.ResourceVersions{Services: 800, Slices: 800}
		p := connect(t, h, hello)
		require.Equal(t, hello.GetResourceVersions().String(), seenIn(t, p).String())
		begin := time.Now()
		want := 0.0
		if changes {
			want = 1
			s.Upsert(slice(0, 2), 700)
		}
		eventually(t, func() bool {
			p.session.mu.Lock()
			defer p.session.mu.Unlock()
			return p.session.live
		})
		got := p.read(t)
		if changes {
			require.Greater(t, time.Since(begin), 50*time.Millisecond)
			require.True(t, slices.ContainsFunc(got, func(r *wire.Response) bool { return r.Update != nil }))
		}
		last := got[len(got)-1]
		require.Equal(t, wire.ResourceVersionsToProto(s.Seen()).String(), last.Heartbeat.GetSeenVersions().String(), "it waits once")
		require.Equal(t, want, testutil.ToFloat64(h.metrics.behindWaits.WithLabelValues("gave_up")))
		require.Error(t, p.close())
	}
}

// TestClientsAreToldThatVersionsWentBack checks that all clients of a server whose versions go back
// are told so after the state that went back, on the streams that they have: those that follow, and
// one that waits. What is sent of shards that have not changed since names no higher versions, also
// to later streams.
func TestClientsAreToldThatVersionsWentBack(t *testing.T) {
	const far = 1 << 40
	s := filled(t, 8)
	for i := range 8 {
		s.Upsert(slice(i, 2), far)
	}
	s.Publish()
	h := running(t, Options{Store: s, MaxBehindWait: time.Hour, Heartbeat: time.Hour})
	follow := func(kind pb.ClientKind, node string, seen *pb.ResourceVersions) *pipe {
		hello := holding(s)
		hello.Kind, hello.NodeName, hello.ResourceVersions = kind, node, seen
		p := connect(t, h, hello)
		t.Cleanup(p.cancel)
		require.EqualValues(t, far, seenIn(t, p).GetSlices())
		return p
	}
	whole := &pb.Resync{Shard: slice(1, 2).ServiceKey().Shard(2)}
	highest := func(p *pipe) (version uint64) { // of an answer to whole
		require.NoError(t, p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Resync{Resync: whole}}))
		came := false
		eventually(t, func() bool {
			for _, r := range p.read(t) {
				if r.Update != nil && r.Update.Full {
					came, version = true, max(version, r.Update.ResourceVersions.Slices)
				}
			}
			return came
		})
		return version
	}
	pipes := []*pipe{
		follow(pb.ClientKind_CLIENT_KIND_AGENT, "a", nil),
		follow(pb.ClientKind_CLIENT_KIND_RELAY, "", nil),
		follow(pb.ClientKind_CLIENT_KIND_AGENT, "b", &pb.ResourceVersions{Services: 800}),
	}
	require.EqualValues(t, far, highest(pipes[0]))
	objects := []model.Keyed{slice(0, 1)}
	for i := 1; i < 8; i++ {
		objects = append(objects, slice(i, 2))
	}
	s.Replace(model.KindSlice, objects, 700)
	s.Progress(model.KindService, 800)
	for _, p := range pipes {
		var seen *pb.ResourceVersions
		came := false
		eventually(t, func() bool {
			for _, r := range p.read(t) {
				came = came || r.Update != nil
				if v := r.Heartbeat.GetSeenVersions(); v != nil {
					require.True(t, came, "what goes back has come")
					seen = v
				}
			}
			return seen != nil
		})
		require.Equal(t, wire.ResourceVersionsToProto(s.Seen()).String(), seen.String())
		require.EqualValues(t, 700, seen.GetSlices())
	}
	require.EqualValues(t, 700, highest(pipes[0]))
	s.Upsert(slice(0, 3), 701)
	eventually(t, func() bool { return s.Seen().Slices == 701 })
	for _, p := range pipes {
		for _, r := range p.read(t) {
			require.Nil(t, r.Heartbeat.GetSeenVersions(), "updates tell what is newer")
		}
	}
}

// TestNodeThatTheServerDoesNotKnowYet checks an agent that has seen newer Nodes than the server. As
// long as that is so, the server does not send it an older Node, and does not say that its Node is
// gone, however long it is behind. Slices do not wait for it.
func TestNodeThatTheServerDoesNotKnowYet(t *testing.T) {
	node := func(version byte) *model.Node {
		return &model.Node{Name: "a", Addresses: []netip.Addr{netip.AddrFrom4([4]byte{192, 0, 2, version})}}
	}
	for name, c := range map[string]struct {
		has  *model.Node
		wait time.Duration
		then func(*store.Store)
		want []*model.Node
	}{
		"it comes":                          {nil, time.Hour, func(s *store.Store) { s.Upsert(node(1), 800) }, []*model.Node{node(1)}},
		"it was older":                      {node(1), time.Hour, func(s *store.Store) { s.Upsert(node(2), 790); s.Progress(model.KindNode, 801) }, []*model.Node{node(2)}},
		"it is gone":                        {nil, time.Hour, func(s *store.Store) { s.Progress(model.KindNode, 800) }, []*model.Node{nil}},
		"the server gives up":               {nil, time.Millisecond, func(*store.Store) {}, nil},
		"the server gives up, it is older":  {node(1), time.Millisecond, func(*store.Store) {}, []*model.Node{node(1)}},
		"it comes after the server gave up": {nil, time.Millisecond, func(s *store.Store) { s.Upsert(node(1), 790) }, []*model.Node{node(1)}},
	} {
		t.Run(name, func(t *testing.T) {
			s := filled(t, 4)
			s.Upsert(&model.Node{Name: "b"}, 700)
			if c.has != nil {
				s.Upsert(c.has, 701)
			}
			s.Publish()
			h := running(t, Options{Store: s, MaxBehindWait: c.wait, Heartbeat: time.Hour})
			hello := holding(s)
			hello.NodeName, hello.Kind = "a", pb.ClientKind_CLIENT_KIND_AGENT
			hello.ResourceVersions = &pb.ResourceVersions{Services: 1, Slices: 2, Nodes: 800}
			p := connect(t, h, hello)
			defer p.cancel()
			var got []*model.Node
			came := false
			note := func(r *wire.Response) {
				came = came || r.Update != nil
				if r.Node != nil {
					got = append(got, r.Node.Node)
				}
			}
			require.EqualValues(t, 800, seenIn(t, p, note).GetNodes())
			live := func() bool {
				p.session.mu.Lock()
				defer p.session.mu.Unlock()
				return p.session.live
			}
			if c.wait != time.Hour {
				eventually(t, live)
			}
			s.Upsert(slice(0, 2), 1000)
			read := func() {
				for _, r := range p.read(t) {
					note(r)
				}
			}
			eventually(t, func() bool { read(); return came })
			if c.wait == time.Hour {
				require.Empty(t, got, "the server is still behind")
			}
			c.then(s)
			eventually(t, func() bool { read(); return len(got) >= len(c.want) && live() })
			read()
			require.Equal(t, c.want, got)
		})
	}
}

// TestVersionsOfAnotherCluster checks that nobody waits for resource versions of another cluster.
func TestVersionsOfAnotherCluster(t *testing.T) {
	for cluster, waits := range map[int64]bool{0: true, 1: true, 2: false} {
		s := filled(t, 1)
		s.Upsert(model.NewService(model.Service{Namespace: "default", Name: "kubernetes", Type: model.ClusterIP, CreationTimeSeconds: 1}), 1)
		s.Publish()
		h := running(t, Options{Store: s, MaxBehindWait: time.Hour, Heartbeat: time.Millisecond})
		p := connect(t, h, &pb.Hello{Digest: modeltest.Digests(5), Sequences: []uint64{3, 3}, Epoch: s.Epoch() + 1, Cluster: cluster,
			ResourceVersions: &pb.ResourceVersions{Services: 9, Slices: 9, Nodes: 9}})
		beats, served := 0, false
		eventually(t, func() bool {
			for _, r := range p.read(t) {
				if r.Welcome != nil {
					require.EqualValues(t, 1, r.Welcome.GetCluster())
				}
				if r.Heartbeat != nil {
					beats++
				}
				served = served || r.Update != nil || r.BucketQuery != nil || r.DigestQuery != nil
			}
			return served || waits && beats > 1
		})
		require.Equal(t, !waits, served, cluster)
		p.cancel()
	}
}
