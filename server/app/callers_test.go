// These tests prove the bounds on the connections and calls of one node, observer or relay, in a
// real server on both transports, and that other callers are served meanwhile.
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

	"github.com/slicecast/slicecast/internal/auth"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// lean makes a client's configuration offer the protocol of the lean server.
func lean(config *tls.Config) *tls.Config {
	config.NextProtos = []string{wire.Protocol, "h2"}
	return config
}

// watch opens a call that watches the server's health.
func watch(ctx context.Context, conn *grpc.ClientConn) (healthpb.Health_WatchClient, error) {
	stream, err := healthpb.NewHealthClient(conn).Watch(ctx, &healthpb.HealthCheckRequest{})
	if err == nil {
		_, err = stream.Recv()
	}
	return stream, err
}

// TestConnectionsOfANodeAreBounded checks that a node keeps few connections, however many it opens,
// as the oldest ones are closed. Its agent and others are served nonetheless.
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
	// Each of them has displaced one connection, those of the grpc.Server first.
	require.Eventually(t, func() bool { return displaced(3 + maxNodeConnections + 3) }, deadline, time.Millisecond)
	_, err = hello(t, dial(t, address, lean(ca.ClientTLS(a))), "a")
	require.NoError(t, err)
	require.NoError(t, other.Context().Err())
	require.NoError(t, other.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: &pb.Ack{}}}))
}

// TestCallsOfANodeAreBounded checks the bound on a node's calls in addition to its agent's stream.
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
	require.ErrorContains(t, err, "node a has 16 open calls")
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

// TestConnectionsAndCallsOfAUserAreBounded checks the bounds on observers and relays.
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
		require.ErrorContains(t, err, "user observer has 256 open connections")
	}
	_, err = hello(t, dial(t, address, ca.ClientTLS(ca.Client("another", "slicecast:observers"))), "")
	require.NoError(t, err)

	// A relay makes 16 calls on each connection, of every service.
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

// TestCallers checks that each relay of a ServiceAccount has bounds of its own on connections and
// calls, as each node has.
func TestCallers(t *testing.T) {
	relay := func(pod string) string { return caller(auth.Identity{User: "relay", Pod: pod, Relay: true}).Name }
	require.NotEqual(t, relay("a"), relay("b"))
	require.Equal(t, relay("a"), relay("a"))
	require.Equal(t, "node a", caller(auth.Identity{User: "agent", Node: "a", Pod: "b"}).Name)
	require.Empty(t, caller(auth.Identity{User: "admin", Operator: true}).Name)
}

// reflect opens a call of the reflection service and leaves it open.
func reflect(t *testing.T, conn *grpc.ClientConn) error {
	t.Helper()
	stream, err := reflectionpb.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
	require.NoError(t, err)
	_ = stream.Send(&reflectionpb.ServerReflectionRequest{ // Recv returns what failed
		MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{},
	})
	_, err = stream.Recv()
	return err
}
