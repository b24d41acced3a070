// These tests prove that what one client says and asks for is bounded, also over its streams
// together, and that a client lacks what it has not acknowledged.
package fanout

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

func resyncOf(r *pb.Resync) *pb.StreamRequest {
	return &pb.StreamRequest{Message: &pb.StreamRequest_Resync{Resync: r}}
}

// TestAnObjectIsSentOnceHoweverOftenItIsNamed checks that a Resync that names an object several
// times is answered with the object once.
func TestAnObjectIsSentOnceHoweverOftenItIsNamed(t *testing.T) {
	s := filled(t, 4)
	f := start(t, s)
	c := f.hello(&pb.Hello{})
	c.inSync()
	r := &pb.Resync{Shard: slice(1, 3).ServiceKey().Shard(2)}
	for range maxKeys {
		r.Keys = append(r.Keys, wire.KeyToProto(slice(1, 3).Key()))
	}
	c.send(resyncOf(r))
	require.Len(t, c.update().GetSlices(), 1)
	r.Keys = append(r.Keys, r.GetKeys()[0])
	c.send(resyncOf(r))
	end := c.ends()
	require.Equal(t, codes.InvalidArgument, end.Code())
	require.Contains(t, end.Message(), "request the shard")
}

// TestRequestsThatWaitAreBounded checks that the number of a client's messages is bounded, and the
// size of its requests that wait while it reads nothing.
func TestRequestsThatWaitAreBounded(t *testing.T) {
	h := running(t, Options{Store: filled(t, 4)})
	for name, c := range map[string]struct {
		message func(n int) *pb.StreamRequest
		most    int
		says    string
	}{
		"resyncs of long names": {func(int) *pb.StreamRequest {
			return resyncOf(&pb.Resync{Keys: []*pb.ObjectKey{{
				Kind: pb.ObjectKind_OBJECT_KIND_SERVICE, Name: strings.Repeat("x", 4<<10),
			}}})
		}, 40, "too many resyncs are waiting"},
		"resyncs":        {func(int) *pb.StreamRequest { return resyncOf(&pb.Resync{}) }, resyncsBurst, "resyncs"},
		"empty messages": {func(int) *pb.StreamRequest { return &pb.StreamRequest{} }, 2 * messagesBurst, "messages per second"},
		"nacks": {func(n int) *pb.StreamRequest {
			return &pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{Reason: fmt.Sprint(n)}}}
		}, 2 * messagesBurst, "messages per second"},
	} {
		t.Run(name, func(t *testing.T) {
			// A node's limits apply to all of its streams together.
			p := connect(t, h, &pb.Hello{NodeName: name, Kind: pb.ClientKind_CLIENT_KIND_AGENT})
			defer p.cancel()
			eventually(t, p.session.synced.Load)
			p.set(false)
			var err error
			n := 0
			for ; err == nil && n <= 2*messagesBurst+1000; n++ {
				err = p.say(c.message(n))
			}
			require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
			require.ErrorContains(t, err, c.says)
			require.LessOrEqual(t, n, c.most+1000)
			p.session.mu.Lock()
			require.LessOrEqual(t, p.session.requests.size, maxWaiting+2*resyncBytes)
			p.session.mu.Unlock()
			p.session.reports.mu.Lock()
			require.LessOrEqual(t, len(p.session.reports.nacks), maxNacks)
			p.session.reports.mu.Unlock()
		})
	}
}

// TestOnlyAHelloIsTakenOfStrangers checks that messages before the client's authorization are
// refused, whether they arrive together with the Hello or while it is being checked.
func TestOnlyAHelloIsTakenOfStrangers(t *testing.T) {
	asked, answer := make(chan struct{}), make(chan struct{})
	up := &told{}
	h := running(t, Options{
		Store: filled(t, 1), Upstream: up,
		Authorize: func(context.Context, pb.ClientKind, string) (string, time.Time, error) {
			asked <- struct{}{}
			<-answer
			return "", time.Time{}, status.Error(codes.PermissionDenied, "who are you?")
		},
	})
	nack := &pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{
		Key: wire.KeyToProto(service(0).Key()), Reason: "no room",
	}}}
	p := connect(t, h, &pb.Hello{NodeName: "victim", Kind: pb.ClientKind_CLIENT_KIND_AGENT})
	require.Equal(t, codes.InvalidArgument, status.Code(p.say(nack)))
	<-asked
	require.Equal(t, codes.InvalidArgument, status.Code(p.say(nack)))
	close(answer)
	require.Equal(t, codes.PermissionDenied, status.Code(<-p.done))
	require.Equal(t, codes.InvalidArgument, status.Code(p.say(nack)))
	require.Zero(t, testutil.ToFloat64(h.metrics.nacks))
	require.Empty(t, up.nacks)
}

// TestHeadersComeFirst checks that a stream sends its headers first. Otherwise, a status that
// arrives while grpc-go sends the first message could leave the client without headers, behind
// messages that fill its window.
func TestHeadersComeFirst(t *testing.T) {
	f := start(t, filled(t, 1))
	headers, err := f.open().Header()
	require.NoError(t, err)
	require.NotEmpty(t, headers)
}

// TestAReplacedStreamEndsWhateverItWaitsFor checks that a stream whose client reads nothing ends
// when its node opens another one, and no longer counts.
func TestAReplacedStreamEndsWhateverItWaitsFor(t *testing.T) {
	s := filled(t, 4)
	f := start(t, s)
	agent := &pb.Hello{NodeName: "a", Kind: pb.ClientKind_CLIENT_KIND_AGENT}
	var old []*call
	for range 5 {
		c := f.hello(agent)
		require.NotNil(t, c.recv().GetWelcome())
		// Each second one has 165 KiB, more than the windows allow, so the server blocks in Send.
		for n := range 4 {
			s.Upsert(slice(1, 100+n%2*3000), 0)
			f.publish()
		}
		old = append(old, c)
	}
	last := f.hello(agent)
	last.inSync()
	eventually(t, func() bool { return len(f.Agents(nil)) == 1 })
	require.EqualValues(t, 1, f.servedNodes.Load())
	for _, c := range old {
		require.Equal(t, codes.Aborted, c.ends().Code())
	}
}

// TestWhatClientsSayStaysText checks that texts from clients are cut if they are too long, and stay
// valid UTF-8.
func TestWhatClientsSayStaysText(t *testing.T) {
	for _, in := range []string{strings.Repeat("a", 511) + "é", strings.Repeat("é", 512), strings.Repeat("世", 400)} {
		out := clip(in)
		require.True(t, utf8.ValidString(out))
		require.Less(t, len(out), 520)
	}
	f := start(t, filled(t, 1))
	f.hello(&pb.Hello{NodeName: strings.Repeat("n", 254)})
	end := f.hello(&pb.Hello{NodeName: strings.Repeat("n", 254)}).ends()
	require.Equal(t, codes.InvalidArgument, end.Code())
	f.hello(&pb.Hello{ClientVersion: strings.Repeat("v", 100_000)}).inSync()
	require.Less(t, len(f.Agents(nil)[0].GetClientVersion()), 520)
}

// TestNamesInNacksAreBounded checks that a nack takes little memory, however long its names are.
func TestNamesInNacksAreBounded(t *testing.T) {
	up := &told{}
	h := running(t, Options{Store: filled(t, 1), Upstream: up})
	p := connect(t, h, &pb.Hello{NodeName: "a", Kind: pb.ClientKind_CLIENT_KIND_AGENT})
	defer p.cancel()
	eventually(t, p.session.synced.Load)
	long := strings.Repeat("n", 64<<10)
	for n := range maxNacks {
		require.NoError(t, p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{
			Key:    &pb.ObjectKey{Kind: pb.ObjectKind_OBJECT_KIND_SERVICE, Namespace: fmt.Sprint(n), Name: long},
			Reason: long, NodeName: long,
		}}}))
	}
	kept := 0
	r := &p.session.reports
	r.mu.Lock()
	defer r.mu.Unlock()
	require.Len(t, r.nacks, maxNacks)
	for id, n := range r.nacks {
		kept += len(id) + len(n.Object) + len(n.Reason) + len(n.NodeName) + len(n.key.Namespace) + len(n.key.Name)
	}
	require.Less(t, kept, maxNacks*2000)
	up.mu.Lock()
	defer up.mu.Unlock()
	for _, n := range up.nacks {
		require.Less(t, len(n), 2000)
	}
}

// TestANodeLacksWhatItHasNotAcknowledged checks that a node lacks what it has not acknowledged,
// even if that was published just before its stream began.
func TestANodeLacksWhatItHasNotAcknowledged(t *testing.T) {
	s := filled(t, 10)
	h := running(t, Options{Store: s})
	p := connect(t, h, &pb.Hello{NodeName: "a", Kind: pb.ClientKind_CLIENT_KIND_AGENT})
	defer p.cancel()
	eventually(t, p.session.synced.Load)
	key := model.ServiceKey{Namespace: "default", Name: "service-1"}
	shard := key.Shard(2)
	lacks := func() bool { return len(lacking(h, &key)) == 1 }
	require.True(t, lacks())
	require.NoError(t, p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: &pb.Ack{
		Positions: []*pb.ShardPosition{{Shard: 1 - shard, Sequence: 1}},
	}}}))
	require.True(t, lacks(), "another shard")
	require.NoError(t, p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: &pb.Ack{
		Positions: []*pb.ShardPosition{{Shard: shard, Sequence: 1}},
	}}}))
	require.False(t, lacks())

	// A nacked object is not programmed, although the position of its shard is acknowledged.
	for _, key := range []model.Key{service(1).Key(), slice(1, 3).Key()} {
		nack := func(key model.Key, resolved bool) {
			t.Helper()
			require.NoError(t, p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{
				Key: wire.KeyToProto(key), Reason: "no room", Resolved: resolved,
			}}}))
		}
		nack(model.Key{Kind: key.Kind, Namespace: key.Namespace, Name: "another"}, false)
		require.False(t, lacks())
		nack(key, false)
		require.True(t, lacks())
		nack(key, true)
		require.False(t, lacks())
	}
}
