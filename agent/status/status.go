// Package status answers what operators ask an agent. It implements slicecast.v1.AgentDebugService,
// which an agent serves on a unix socket that only its own user may open.
package status

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	channelz "google.golang.org/grpc/channelz/service"
	"google.golang.org/grpc/reflection"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/client/checkpoint"
	"github.com/slicecast/slicecast/agent/reconcile"
	"github.com/slicecast/slicecast/agent/warnings"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Options are the parts of an agent whose status is reported.
type Options struct {
	NodeName, Version string
	// Programmer names what programs the kernel, and ProgrammerReason says why it was chosen.
	Programmer, ProgrammerReason string
	// Source is the value of --source if the agent has no servers, and empty otherwise.
	Source string
	// Client is nil if the agent has no servers, and Checkpoint is nil if it keeps none. Warnings is
	// nil if nobody looks for any. Cache and Reconciler are required.
	Client     *client.Client
	Checkpoint *checkpoint.Checkpoint
	Cache      *client.Cache
	Reconciler *reconcile.Reconciler
	Warnings   *warnings.Warnings
}

// Service implements the AgentDebugService.
type Service struct {
	pb.UnimplementedAgentDebugServiceServer

	Options

	started time.Time
}

// New returns a Service for an agent that starts now.
func New(o Options) *Service { return &Service{Options: o, started: time.Now()} }

// Serve answers on the listener until ctx ends. It also serves reflection and channelz, which shows
// the agent's own connections.
func (s *Service) Serve(ctx context.Context, l net.Listener) error {
	server := grpc.NewServer()
	pb.RegisterAgentDebugServiceServer(server, s)
	channelz.RegisterChannelzServiceToServer(server)
	reflection.Register(server)
	defer context.AfterFunc(ctx, server.Stop)()
	if err := server.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("serve the agent's status on %s: %w", l.Addr(), err)
	}
	return nil
}

// GetStatus implements pb.AgentDebugServiceServer.
func (s *Service) GetStatus(
	context.Context, *pb.AgentDebugServiceGetStatusRequest,
) (*pb.AgentDebugServiceGetStatusResponse, error) {
	// The kernel's positions are read first, so that they are not ahead of the cache's.
	kernel, cache := s.Reconciler.Status(), s.Cache.Status()
	out := &pb.AgentDebugServiceGetStatusResponse{
		Time: timestamppb.Now(), NodeName: s.NodeName, Version: s.Version, Source: s.Source,
		Programmer: s.Programmer, ProgrammerReason: s.ProgrammerReason,
		StartTime: timestamppb.New(s.started), Epoch: cache.Epoch, ByCheckpoint: cache.Stale,
		ResourceVersions: wire.ResourceVersionsToProto(cache.ResourceVersions),
		Size: &pb.StateSize{
			Shards: uint32(len(cache.Sequences)), Services: uint32(cache.Services), Slices: uint32(cache.Slices),
			Endpoints: uint32(cache.Endpoints),
		},
		ServicePorts: uint32(kernel.ServicePorts),
	}
	for i, sequence := range cache.Sequences {
		shard := &pb.AgentShard{Shard: uint32(i), Sequence: sequence, Digest: cache.Digests[i][:]}
		if kernel.Epoch == cache.Epoch {
			shard.ProgrammedSequence = kernel.Positions[uint32(i)]
		}
		out.Shards = append(out.Shards, shard)
		switch {
		case shard.GetProgrammedSequence() == 0 && sequence > 0:
			out.LagSequences++
		case sequence > shard.GetProgrammedSequence():
			out.LagSequences += sequence - shard.GetProgrammedSequence()
		}
	}
	if !kernel.Time.IsZero() {
		out.ProgrammingTime, out.ProgrammingDuration = timestamppb.New(kernel.Time), durationpb.New(kernel.Duration)
	}
	out.ProgrammingError = kernel.Err
	for _, f := range kernel.Failures {
		out.Failures = append(out.Failures, &pb.ProgrammingFailure{
			Service: &pb.ServiceName{Namespace: f.Service.Namespace, Name: f.Service.Name},
			Reason:  f.Reason, Since: timestamppb.New(f.Since),
		})
	}
	if s.Checkpoint != nil && !s.Checkpoint.Saved().IsZero() {
		out.CheckpointTime = timestamppb.New(s.Checkpoint.Saved())
	}
	if s.Warnings != nil {
		out.Warnings = s.Warnings.List()
	}
	if s.Client != nil {
		out.Server, out.StaleSince, out.LastError, out.Servers = s.Client.Connection().Proto()
	}
	return out, nil
}
