// This test proves that the key of a Subscription stands for it alone.
package wire

import (
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// TestSubscriptionKey checks that a key stands for one Subscription, and that everything, however
// it is said, has a key that no other Subscription has.
func TestSubscriptionKey(t *testing.T) {
	require.Empty(t, SubscriptionKey(nil))
	require.Empty(t, SubscriptionKey(&pb.Subscription{Everything: true, Namespaces: []string{"a"}}))
	everything, err := SubscriptionFromKey("")
	require.NoError(t, err)
	require.Nil(t, everything)
	keys := map[string]bool{"": true}
	for _, s := range []*pb.Subscription{
		{},
		{Namespaces: []string{"a"}},
		{Services: []*pb.ServiceName{{Namespace: "a", Name: "b"}}},
	} {
		key := SubscriptionKey(s)
		require.False(t, keys[key], "%v", s)
		keys[key] = true
		again, err := SubscriptionFromKey(key)
		require.NoError(t, err)
		require.True(t, proto.Equal(s, again), "%v: %v", s, again)
	}
	require.Equal(t, SubscriptionKey(&pb.Subscription{}), SubscriptionKey(&pb.Subscription{Namespaces: []string{"\xff"}}))
}
