package fanout

import (
	"testing"

	"github.com/stretchr/testify/require"

	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// TestResubscribeWhileAnUpdateIsOnItsWay: what the old subscription wanted, and is removed by an update that the stream has not
// been sent yet, is told to be gone.
func TestResubscribeWhileAnUpdateIsOnItsWay(t *testing.T) {
	only := func(name string) *pb.Subscription {
		return &pb.Subscription{Services: []*pb.ServiceName{{Namespace: "default", Name: name}}}
	}
	for _, first := range []*pb.Subscription{nil, only("service-0")} {
		s := filled(t, 1)
		f := start(t, s)
		c := f.hello(&pb.Hello{Subscription: first})
		_, updates, _ := c.inSync()
		require.Len(t, updates, 1)
		// The store has it; the ring does not.
		s.Remove(service(0).Key(), 3)
		s.Remove(slice(0, 3).Key(), 4)
		require.Len(t, s.Publish().Updates, 1)
		c.send(&pb.StreamRequest{Message: &pb.StreamRequest_Subscribe{Subscribe: only("other")}})
		u := c.update()
		require.True(t, u.GetFull())
		require.Equal(t, updates[0].GetShard(), u.GetShard())
		require.Empty(t, u.GetServices())
		require.NotNil(t, c.recv().GetInSync())
	}
}
