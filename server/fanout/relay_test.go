package fanout

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// told is an upstream that remembers what it was told.
type told struct {
	mu    sync.Mutex
	nacks []string
}

func (*told) Path() ([]uint64, bool)            { return []uint64{1}, true }
func (*told) Mark(uint32) (p model.Position)    { return p }
func (*told) Programmed(uint32, model.Position) {}
func (*told) Nodes(int)                         {}

func (u *told) Nack(n *pb.Nack) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if n.GetResolved() {
		n.Reason = "resolved"
	}
	u.nacks = append(u.nacks, n.GetNodeName()+": "+n.GetKey().GetName()+": "+n.GetReason())
}

// take waits until so much was told.
func (u *told) take(t *testing.T, n int) (nacks []string) {
	t.Helper()
	eventually(t, func() bool {
		u.mu.Lock()
		defer u.mu.Unlock()
		if len(u.nacks) < n {
			return false
		}
		nacks, u.nacks = u.nacks, nil
		return true
	})
	return nacks
}

// Upstream hears of nacks that stand, once, and when they don't any more: as something is programmed, or its node has gone.
func TestNacksArePassedOn(t *testing.T) {
	up := &told{}
	h := running(t, Options{Store: filled(t, 2), Upstream: up})
	nack := func(p *pipe, node, reason string) {
		t.Helper()
		require.NoError(t, p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{
			Key: wire.KeyToProto(service(1).Key()), NodeName: node, Reason: reason, Resolved: reason == "",
		}}}))
	}
	open := func(hello *pb.Hello) *pipe {
		p := connect(t, h, hello)
		eventually(t, p.session.s.synced.Load)
		return p
	}
	agent := &pb.Hello{NodeName: "a", Kind: pb.ClientKind_CLIENT_KIND_AGENT}
	a, relay := open(agent), open(&pb.Hello{Kind: pb.ClientKind_CLIENT_KIND_RELAY})
	observer := open(&pb.Hello{NodeName: "a"})
	nack(observer, "", "it has no kernel")
	for _, reason := range []string{"", "no room", "no room", "no luck", "", "", "no room"} {
		nack(a, "somebody-else", reason)
	}
	nack(relay, "b", "no room")
	require.Equal(t, []string{
		"a: service-1: no room", "a: service-1: no luck", "a: service-1: resolved", "a: service-1: no room", "b: service-1: no room",
	}, up.take(t, 5))

	_ = relay.close()
	require.Equal(t, []string{"b: service-1: resolved"}, up.take(t, 1))
	again := open(agent)
	require.Equal(t, []string{"a: service-1: resolved"}, up.take(t, 1), "before the new stream says anything")
	nack(a, "", "from the past")
	nack(again, "", "no room")
	_ = observer.close()
	_ = again.close()
	require.Equal(t, []string{"a: service-1: no room", "a: service-1: resolved"}, up.take(t, 2))
}
