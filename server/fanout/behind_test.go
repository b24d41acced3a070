package fanout

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model/modeltest"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// A client that has seen more than the server waits for it, whatever it holds, whatever it wants and however often it comes: it gets
// nothing until the server has come as far.
func TestWhoHasSeenMoreWaits(t *testing.T) {
	seen := &pb.ResourceVersions{Services: 9, Slices: 9}
	for name, hello := range map[string]*pb.Hello{
		"resumes":                         {Digest: modeltest.Digests(5), Sequences: []uint64{3, 3}},
		"holds nothing":                   {Digest: modeltest.Digests(0), Sequences: []uint64{0, 0}},
		"was never here":                  {},
		"is narrowed":                     {Digest: modeltest.Digests(5), Sequences: []uint64{3, 3}, Subscription: only("service-0")},
		"is narrowed, and holds nothing":  {Digest: modeltest.Digests(0), Sequences: []uint64{0, 0}, Subscription: only("service-0")},
		"is narrowed, and was never here": {Subscription: only("service-0")},
	} {
		t.Run(name, func(t *testing.T) {
			s := filled(t, 1)
			h := running(t, Options{Store: s, MaxBehindWait: time.Hour, Heartbeat: time.Millisecond})
			hello.ResourceVersions = seen
			for _, epoch := range []uint64{s.Epoch() + 1, s.Epoch()} { // the second time it was cut off while it waited
				hello.Epoch = epoch
				p := connect(t, h, hello)
				eventually(t, func() bool { // it waits
					for _, r := range p.read(t) {
						require.Nil(t, r.Update)
						require.Nil(t, r.InSync)
						if r.Heartbeat != nil {
							return true
						}
					}
					return false
				})
				require.Error(t, p.close())
			}
			p := connect(t, h, hello)
			defer p.cancel()
			s.Upsert(service(0), 9)
			s.Upsert(slice(0, 7), 9)
			came := false
			eventually(t, func() bool {
				for _, r := range p.read(t) {
					if r.Update == nil {
						continue
					}
					for _, o := range r.Update.Slices {
						require.Equal(t, slice(0, 7).ContentVersion(), o.ContentVersion())
						came = true
					}
				}
				return came && p.session.s.synced.Load()
			})
		})
	}
}
