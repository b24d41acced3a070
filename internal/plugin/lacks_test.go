// These tests prove that lacks asks each server for its clients once, so that no node that moves
// meanwhile is overlooked.
package plugin

import (
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/plugin/fleet"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// mover is a server that a node leaves after the first list.
type mover struct {
	pb.UnimplementedDebugServiceServer

	mu    sync.Mutex
	lists int
}

func (m *mover) GetStatus(context.Context, *pb.GetStatusRequest) (*pb.GetStatusResponse, error) {
	return &pb.GetStatusResponse{Time: timestamppb.Now()}, nil
}

func (m *mover) GetService(context.Context, *pb.GetServiceRequest) (*pb.GetServiceResponse, error) {
	return &pb.GetServiceResponse{}, nil
}

func (m *mover) ListAgents(r *pb.ListAgentsRequest, stream grpc.ServerStreamingServer[pb.ListAgentsResponse]) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.lists++; m.lists > 1 {
		return nil
	}
	a := &pb.AgentStatus{NodeName: "moves", Kind: pb.ClientKind_CLIENT_KIND_AGENT, Synced: true, Programmed: true}
	if r.GetAbout() != nil {
		a.Lacks = new(true)
	}
	return stream.Send(&pb.ListAgentsResponse{Agent: a})
}

// TestLacksAsksOnce checks that a node that moves while lacks asks its server is not overlooked.
func TestLacksAsksOnce(t *testing.T) {
	conn := serve(t, &mover{})
	got, err := askLacking(t.Context(), conn, &pb.ServiceName{Namespace: "default", Name: "web"})
	require.NoError(t, err)
	answers := []fleet.Answer[lacking]{{Server: &fleet.Server{}, Value: got}}
	nodes := merge(as(answers, func(l lacking) agents { return l.agents }), nil)
	r := lacksOf(nodes, answers, model.ServiceKey{Namespace: "default", Name: "web"})
	require.Equal(t, []string{"moves"}, r.names())
}

// TestServersThatDoNotKnowLacks checks that a server that does not say who lacks a Service is
// named.
func TestServersThatDoNotKnowLacks(t *testing.T) {
	conn := serve(t, &silentAboutLacks{lister{status: &pb.GetStatusResponse{}, clients: 1}})
	_, err := askLacking(t.Context(), conn, &pb.ServiceName{Namespace: "default", Name: "web"})
	require.ErrorIs(t, err, errNoVerdict)
}

type silentAboutLacks struct{ lister }

func (s *silentAboutLacks) GetService(context.Context, *pb.GetServiceRequest) (*pb.GetServiceResponse, error) {
	return &pb.GetServiceResponse{}, nil
}
