// These tests prove that what is small on the wire keeps its meaning: the keys of objects, resource
// versions, the names of warnings, and the delay after which a client may come back.
package wire

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

func TestRetryLater(t *testing.T) {
	err := RetryLater(status.Error(codes.ResourceExhausted, "full"), 90*time.Second+time.Millisecond)
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.ErrorContains(t, err, "full: try again in 1m30s")
	require.Equal(t, 90*time.Second+time.Millisecond, RetryAfter(err))
	require.Equal(t, 90*time.Second+time.Millisecond, RetryAfter(fmt.Errorf("connect: %w", err)))

	require.Zero(t, RetryAfter(nil))
	require.Zero(t, RetryAfter(errors.New("no status")))
	require.Zero(t, RetryAfter(status.Error(codes.ResourceExhausted, "full")))
	require.Zero(t, RetryAfter(RetryLater(status.Error(codes.Unavailable, "a server's mistake"), -time.Hour)))
	other, detailErr := status.New(codes.Unavailable, "other details").WithDetails(&errdetails.ErrorInfo{Reason: "x"})
	require.NoError(t, detailErr)
	require.Equal(t, time.Minute, RetryAfter(RetryLater(status.FromProto(other.Proto()).Err(), time.Minute)))
}

// TestWarningNames checks that each warning has a name of its own, and that warnings of newer
// agents share one.
func TestWarningNames(t *testing.T) {
	require.Len(t, WarningNames, len(pb.NodeWarning_name))
	for number, name := range pb.NodeWarning_name {
		want := strings.ToLower(strings.TrimPrefix(name, "NODE_WARNING_"))
		if number == 0 {
			want = "other"
		}
		require.Equal(t, want, WarningName(pb.NodeWarning(number)))
	}
	for _, newer := range []pb.NodeWarning{-1, pb.NodeWarning(len(pb.NodeWarning_name)), pb.NodeWarning(len(pb.NodeWarning_name) + 1), 1000} {
		require.Equal(t, "other", WarningName(newer))
	}
}

// TestKeys checks that keys come back as they were sent, whether they are canonical or not, and
// that only a Nack may be about a Node.
func TestKeys(t *testing.T) {
	for _, k := range []model.Key{
		{Kind: model.KindService, Namespace: "default", Name: "web"}, {Kind: model.KindSlice, Namespace: "Not_canonical", Name: "web-1"},
	} {
		got, err := KeyFromProto(KeyToProto(k))
		require.NoError(t, err)
		require.Equal(t, k, got)
		got, err = NackedFromProto(KeyToProto(k))
		require.NoError(t, err)
		require.Equal(t, k, got)
	}
	for _, node := range []model.Key{{Kind: model.KindNode, Name: "node-1"}, {Kind: model.KindNode}} {
		got, err := NackedFromProto(KeyToProto(node))
		require.NoError(t, err)
		require.Equal(t, node, got)
		_, err = KeyFromProto(KeyToProto(node))
		require.ErrorContains(t, err, "unknown kind")
	}
	_, err := NackedFromProto(&pb.ObjectKey{Kind: pb.ObjectKind_OBJECT_KIND_SERVICE, Namespace: "default"})
	require.ErrorContains(t, err, "without a name")
}

func TestResourceVersionsOnTheWire(t *testing.T) {
	require.Nil(t, ResourceVersionsToProto(model.ResourceVersions{}))
	require.Zero(t, ResourceVersionsFromProto(nil))
	for _, r := range []model.ResourceVersions{{Services: 1}, {Slices: 2}, {Services: 3, Slices: 4}} {
		require.Equal(t, r, ResourceVersionsFromProto(ResourceVersionsToProto(r)))
	}
}
