package app

import (
	"context"
	"crypto/tls"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	channelzpb "google.golang.org/grpc/channelz/grpc_channelz_v1"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/auth"
)

// lean makes a client one that the lean server serves.
func lean(config *tls.Config) *tls.Config {
	config.NextProtos = []string{wire.Protocol, "h2"}
	return config
}

// watch asks for the server's health again and again.
func watch(ctx context.Context, conn *grpc.ClientConn) (healthpb.Health_WatchClient, error) {
	stream, err := healthpb.NewHealthClient(conn).Watch(ctx, &healthpb.HealthCheckRequest{})
	if err == nil {
		_, err = stream.Recv()
	}
	return stream, err
}

// However many connections a node opens, it has a few: the oldest make room. Its agent and others are served nonetheless.
func TestConnectionsOfANodeAreBounded(t *testing.T) {
	c, ca := tlsConfig(t)
	r := start(t, c)
	r.sync()
	address := r.Addresses().GRPC.String()
	a, b := ca.Node("a"), ca.Node("b")
	displaced := func(n int) bool {
		page := get(t, ca.ClientTLS(ca.Operator()), "https://"+r.Addresses().Metrics.String()+"/metrics")
		return strings.Contains(page, fmt.Sprintf("slicecast_server_refused_connections_total{reason=%q} %d", "caller", n))
	}
	other, err := hello(t, dial(t, address, lean(ca.ClientTLS(b))), "b")
	require.NoError(t, err)

	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	var watches []healthpb.Health_WatchClient
	for range maxNodeConnections + 3 {
		stream, err := watch(ctx, dial(t, address, ca.ClientTLS(a)))
		require.NoError(t, err)
		watches = append(watches, stream)
	}
	for _, stream := range watches[:3] {
		_, err := stream.Recv()
		require.Equal(t, codes.Unavailable, status.Code(err), err)
	}
	for range maxNodeConnections + 3 {
		_, err := pb.NewDistributionServiceClient(dial(t, address, lean(ca.ClientTLS(a)))).Stream(t.Context())
		require.NoError(t, err)
	}
	// Each of them has taken the place of one, those of the other server first.
	require.Eventually(t, func() bool { return displaced(3 + maxNodeConnections + 3) }, deadline, time.Millisecond)
	_, err = hello(t, dial(t, address, lean(ca.ClientTLS(a))), "a")
	require.NoError(t, err)
	require.NoError(t, other.Context().Err())
	require.NoError(t, other.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: &pb.Ack{}}}))
}

// A node has no more calls than it may beside its agent's stream.
func TestCallsOfANodeAreBounded(t *testing.T) {
	c, ca := tlsConfig(t)
	r := start(t, c)
	r.sync()
	address := r.Addresses().GRPC.String()
	node := ca.Node("a")
	conns := []*grpc.ClientConn{dial(t, address, ca.ClientTLS(node)), dial(t, address, ca.ClientTLS(node))}
	ctx, cancel := context.WithCancel(t.Context())
	for i := range maxNodeCalls {
		_, err := watch(ctx, conns[i%2])
		require.NoError(t, err)
	}
	_, err := watch(t.Context(), conns[0])
	require.Equal(t, codes.ResourceExhausted, status.Code(err), err)
	require.ErrorContains(t, err, "16 calls of node a are open")
	_, err = watch(t.Context(), dial(t, address, ca.ClientTLS(ca.Node("b"))))
	require.NoError(t, err)
	_, err = hello(t, dial(t, address, lean(ca.ClientTLS(node))), "a")
	require.NoError(t, err)
	cancel()
	require.Eventually(t, func() bool {
		_, err := watch(t.Context(), conns[0])
		return err == nil
	}, deadline, time.Millisecond)
}

// What an observer or a relay has is bounded too, whatever it asks.
func TestConnectionsAndCallsOfAUserAreBounded(t *testing.T) {
	c, ca := tlsConfig(t)
	r := start(t, c)
	r.sync()
	address := r.Addresses().GRPC.String()
	observer := ca.Observer()

	first := dial(t, address, ca.ClientTLS(observer))
	_, err := watch(t.Context(), first)
	require.NoError(t, err)
	for range maxUserConnections - 1 {
		conn := dial(t, address, lean(ca.ClientTLS(observer)))
		stream, err := pb.NewDistributionServiceClient(conn).Stream(t.Context())
		require.NoError(t, err)
		require.NoError(t, stream.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: &pb.Hello{}}}))
		_, err = stream.Recv()
		require.NoError(t, err)
	}
	for _, config := range []*tls.Config{ca.ClientTLS(observer), lean(ca.ClientTLS(observer))} {
		_, err := hello(t, dial(t, address, config), "")
		require.Equal(t, codes.ResourceExhausted, status.Code(err), err)
		require.ErrorContains(t, err, "256 connections of user observer are open")
	}
	_, err = hello(t, dial(t, address, ca.ClientTLS(ca.Client("another", "slicecast:observers"))), "")
	require.NoError(t, err)

	// A relay, on connections of 16 calls each, of every service there is.
	relay := ca.Client("relay", "slicecast:relays", "slicecast:observers")
	var conn *grpc.ClientConn
	for i := range maxUserCalls {
		if i%maxConcurrentStreams == 0 {
			conn = dial(t, address, ca.ClientTLS(relay))
		}
		switch i % 2 {
		case 0:
			_, err = watch(t.Context(), conn)
		default:
			err = reflect(t, conn)
		}
		require.NoError(t, err, i)
	}
	conn = dial(t, address, ca.ClientTLS(relay))
	for name, call := range map[string]func() error{
		"health":     func() error { _, err := watch(t.Context(), conn); return err },
		"reflection": func() error { return reflect(t, conn) },
		"channelz": func() error {
			_, err := channelzpb.NewChannelzClient(conn).GetServers(t.Context(), &channelzpb.GetServersRequest{})
			return err
		},
		"debug": func() error {
			_, err := pb.NewDebugServiceClient(conn).GetStatus(t.Context(), &pb.GetStatusRequest{})
			return err
		},
		"stream": func() error { _, err := hello(t, conn, ""); return err },
	} {
		require.Equal(t, codes.ResourceExhausted, status.Code(call()), name)
	}
	page := get(t, ca.ClientTLS(ca.Operator()), "https://"+r.Addresses().Metrics.String()+"/metrics")
	require.Contains(t, page, fmt.Sprintf("slicecast_server_refused_calls_total{reason=%q} 2", "connections"))
	require.Contains(t, page, fmt.Sprintf("slicecast_server_refused_calls_total{reason=%q} 5", "calls"))
}

// TestCallers holds that the relays of a ServiceAccount have connections and calls of their own each, as
// agents have those of their nodes.
func TestCallers(t *testing.T) {
	relay := func(pod string) string { return caller(auth.Identity{User: "relay", Pod: pod, Relay: true}).Name }
	require.NotEqual(t, relay("a"), relay("b"))
	require.Equal(t, relay("a"), relay("a"))
	require.Equal(t, "node a", caller(auth.Identity{User: "agent", Node: "a", Pod: "b"}).Name)
	require.Empty(t, caller(auth.Identity{User: "admin", Operator: true}).Name)
}

// reflect leaves a call open that asks what the server has.
func reflect(t *testing.T, conn *grpc.ClientConn) error {
	t.Helper()
	stream, err := reflectionpb.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
	require.NoError(t, err)
	_ = stream.Send(&reflectionpb.ServerReflectionRequest{ // Recv tells what failed
		MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{},
	})
	_, err = stream.Recv()
	return err
}
