// These tests prove how answers of servers are merged to states of nodes, and that a server cannot
// make the command hold any number of clients.
package plugin

import (
	"context"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/apimachinery/pkg/types"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// lister is a server that lists a number of clients.
type lister struct {
	pb.UnimplementedDebugServiceServer

	status  *pb.GetStatusResponse
	clients int
}

// serve serves the DebugService until the end of the test, and returns a connection to it.
func serve(t *testing.T, service pb.DebugServiceServer) *grpc.ClientConn {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := grpc.NewServer()
	pb.RegisterDebugServiceServer(server, service)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, conn.Close())
		server.Stop()
		require.NoError(t, <-served)
	})
	return conn
}

func (l *lister) GetStatus(context.Context, *pb.GetStatusRequest) (*pb.GetStatusResponse, error) {
	return l.status, nil
}

func (l *lister) ListAgents(_ *pb.ListAgentsRequest, stream grpc.ServerStreamingServer[pb.ListAgentsResponse]) error {
	for range l.clients {
		if err := stream.Send(&pb.ListAgentsResponse{Agent: &pb.AgentStatus{}}); err != nil {
			return err
		}
	}
	return nil
}

func TestClientsOfAServerAreBounded(t *testing.T) {
	for _, n := range []int{maxClients, maxClients + 1} {
		conn := serve(t, &lister{status: &pb.GetStatusResponse{}, clients: n})
		got, err := listAgents(t.Context(), conn, &pb.ListAgentsRequest{})
		if n > maxClients {
			require.ErrorIs(t, err, errTooManyClients)
			require.Empty(t, got.clients)
		} else {
			require.NoError(t, err)
			require.Len(t, got.clients, n)
		}
	}
}

// TestAgesOfClients checks that no client has an age below zero, whatever its server says.
func TestAgesOfClients(t *testing.T) {
	now := time.Now()
	require.Equal(t, time.Minute, age(node{now: now, agent: &pb.AgentStatus{Since: timestamppb.New(now.Add(-time.Minute))}}))
	require.Zero(t, age(node{now: now, agent: &pb.AgentStatus{Since: timestamppb.New(now.Add(time.Hour))}}))
}

// TestOnlyRelays checks that nodes without a relay are not taken for lost if the servers of their
// namespace were not asked.
func TestOnlyRelays(t *testing.T) {
	relay := answerOf("relay", &pb.GetStatusResponse{Epoch: 2, Upstream: &pb.UpstreamStatus{Connected: true, Path: []uint64{1}}},
		&pb.AgentStatus{NodeName: "of-relay", Kind: pb.ClientKind_CLIENT_KIND_AGENT, Synced: true, Programmed: true})
	pods := []*fleet.Agent{{Node: "of-relay"}, {Node: "of-server"}, {Node: "down", Missing: "Failed"}}
	states := func(answers ...fleet.Answer[agents]) (*nodesReport, map[string]string) {
		r := merge(answers, make(servers, len(answers)))
		r.addPods(pods)
		r.choose(nil, false, false)
		got := make(map[string]string)
		for _, n := range r.nodes {
			got[n.Node] = n.State
		}
		return r, got
	}
	r, got := states(relay)
	require.Equal(t, map[string]string{"of-relay": programmed, "of-server": unknown, "down": notRunning + "Failed"}, got)
	require.Equal(t, incomplete, r.code())
	require.Contains(t, printed(t, r), "Only relays were asked, so 1 node may follow servers of other namespaces")
	r, got = states(relay, answerOf("server", &pb.GetStatusResponse{Epoch: 1}))
	require.Equal(t, notConnected, got["of-server"])
	require.Equal(t, wrong, r.code())
	require.NotContains(t, printed(t, r), "Only relays")
}

// TestStaleNodes checks that no node counts as programmed behind a relay that follows no server,
// also if there are further relays between them.
func TestStaleNodes(t *testing.T) {
	now := time.Now()
	answer := func(epoch uint64, upstream *pb.UpstreamStatus, clients ...*pb.AgentStatus) fleet.Answer[agents] {
		return fleet.Answer[agents]{
			Server: &fleet.Server{NamespacedName: types.NamespacedName{Namespace: "relays", Name: fmt.Sprint(epoch)}},
			Value:  agents{status: &pb.GetStatusResponse{Time: timestamppb.New(now), Epoch: epoch, Upstream: upstream}, clients: clients},
		}
	}
	client := func(name string, programmed bool) *pb.AgentStatus {
		return &pb.AgentStatus{NodeName: name, Kind: pb.ClientKind_CLIENT_KIND_AGENT, Synced: true, Programmed: programmed}
	}
	r := merge([]fleet.Answer[agents]{
		answer(1, nil, client("of-server", true)),
		answer(2, &pb.UpstreamStatus{Connected: true, Path: []uint64{1}}, client("of-relay", true)),
		answer(3, &pb.UpstreamStatus{StaleSince: timestamppb.New(now.Add(-time.Minute))}, client("of-cut-off", true), client("new", false)),
		answer(4, &pb.UpstreamStatus{Connected: true, Path: []uint64{1, 3}}, client("of-second-tier", true)),
	}, nil)
	got := make(map[string]string)
	for _, n := range r.nodes {
		got[n.Node] = n.State
		require.Equal(t, n.Node == "of-server" || n.Node == "of-relay", n.stale == 0, n.Node)
		require.Contains(t, []time.Duration{0, time.Minute}, n.stale)
	}
	require.Equal(t, map[string]string{
		"of-server": "programmed", "of-relay": "programmed", "of-cut-off": stale, "new": "programming", "of-second-tier": stale,
	}, got)
}
