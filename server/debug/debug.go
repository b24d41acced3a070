// Package debug answers operators' questions to a server. It implements slicecast.v1.DebugService.
//
// The package only reads what the hub and the store publish anyway, so a question disturbs no
// client. GetStatus counts only the objects of shards that have changed since the previous call.
// ListAgents reads the states of all streams once, and sends them at the caller's pace. Callers are
// authorized before they get here (see internal/auth).
package debug

import (
	"context"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
)

// maxConvergences is how many Updates GetStatus reports the convergence of.
const maxConvergences = 16

// Options configures a Service. All fields except Stale, LastEvent and Upstream are required.
type Options struct {
	Hub   *fanout.Hub
	Store *store.Store
	// Source is the kind of the store's source: the value of --source.
	Source string
	// Stale returns since when the source may have missed changes, and why; zero if it has not. It is
	// nil if the source does not know.
	Stale func() (since time.Time, why string)
	// LastEvent returns when something last came from the API server; zero if nothing has. It is nil
	// if the source is no API server.
	LastEvent func() time.Time
	// Upstream returns the state of a relay's connection to its servers.
	Upstream func() client.Connection
}

// Service implements the DebugService.
type Service struct {
	pb.UnimplementedDebugServiceServer

	Options

	// mu guards sizes.
	mu sync.Mutex
	// sizes has the size of each shard's snapshot that was last counted.
	sizes []size
}

// size is what a snapshot holds.
type size struct {
	snapshot                    *store.Snapshot
	services, slices, endpoints int
}

// New returns a Service.
func New(o Options) *Service {
	return &Service{Options: o, sizes: make([]size, o.Store.Shards())}
}

// GetStatus implements the API.
func (s *Service) GetStatus(context.Context, *pb.GetStatusRequest) (*pb.GetStatusResponse, error) {
	out := s.Hub.Status()
	// The convergences are read first, so that the source has reached what they say was published.
	convergences := s.Hub.Convergences()
	out.Time, out.Epoch, out.Size = timestamppb.Now(), s.Store.Epoch(), s.size()
	out.Source = &pb.SourceStatus{
		Kind: s.Source, Synced: s.Store.Published(), ResourceVersions: wire.ResourceVersionsToProto(s.Store.Reached()),
	}
	if s.Stale != nil {
		if since, why := s.Stale(); !since.IsZero() {
			out.Source.StaleSince, out.Source.LastError = timestamppb.New(since), why
		}
	}
	if s.LastEvent != nil {
		if at := s.LastEvent(); !at.IsZero() {
			out.Source.LastEventTime = timestamppb.New(at)
		}
	}
	for _, c := range convergences {
		p := convergence(c)
		if p.GetLacking() > 0 {
			out.OpenConvergences++
			out.OldestOpenConvergence = p
		}
		if len(out.Convergences) < maxConvergences {
			out.Convergences = append(out.Convergences, p)
		}
	}
	if up := out.GetUpstream(); up != nil && s.Upstream != nil {
		c := s.Upstream()
		up.Server, up.StaleSince, up.LastError, up.Servers = c.Proto()
	}
	return out, nil
}

// size returns what the store holds. It only counts shards that have changed since the previous
// call.
func (s *Service) size() *pb.StateSize {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := &pb.StateSize{Shards: s.Store.Shards()}
	for i := range s.sizes {
		if snapshot := s.Store.Snapshot(uint32(i)); s.sizes[i].snapshot != snapshot {
			s.sizes[i] = count(snapshot)
		}
		out.Services += uint32(s.sizes[i].services)
		out.Slices += uint32(s.sizes[i].slices)
		out.Endpoints += uint32(s.sizes[i].endpoints)
	}
	return out
}

func count(snapshot *store.Snapshot) size {
	u := snapshot.Where(func(model.ServiceKey) bool { return true })
	n := size{snapshot: snapshot, services: len(u.Services), slices: len(u.Slices)}
	for _, slice := range u.Slices {
		n.endpoints += len(slice.Endpoints)
	}
	return n
}

func convergence(c fanout.Convergence) *pb.Convergence {
	out := &pb.Convergence{
		Shard: c.Shard, Sequence: c.Sequence, PublishTime: timestamppb.New(c.Published),
		Nodes: uint32(c.Nodes), Lacking: uint32(c.Nodes - c.Programmed),
		TimeToHalf: duration(c.Times[0]), TimeToMost: duration(c.Times[1]), TimeToAll: duration(c.Times[2]),
	}
	out.MoreServices, out.ResourceVersions = c.Changed.More, wire.ResourceVersionsToProto(c.Changed.ResourceVersions)
	for _, s := range c.Changed.Services {
		out.Services = append(out.Services, &pb.ServiceName{Namespace: s.Namespace, Name: s.Name})
	}
	for _, n := range c.Last {
		out.Last = append(out.Last, &pb.NodeTime{NodeName: n.Node, Time: duration(n.Time)})
	}
	return out
}

// duration returns nil for 0, which stands for an unknown duration.
func duration(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

// ListAgents implements the API.
func (s *Service) ListAgents(r *pb.ListAgentsRequest, to grpc.ServerStreamingServer[pb.ListAgentsResponse]) error {
	about, filter := r.GetAbout(), r.GetLacks() != nil
	if filter {
		if about != nil {
			return status.Error(codes.InvalidArgument, "lacks and about exclude each other: set one of them")
		}
		about = r.GetLacks()
	}
	var service *model.ServiceKey
	if about != nil {
		key, err := serviceKey(about)
		if err != nil {
			return err
		}
		service = &key
	}
	for _, agent := range s.Hub.Agents(service) {
		switch {
		case filter && !agent.GetLacks():
			continue
		case r.GetNodeName() != "" && agent.GetNodeName() != r.GetNodeName(),
			r.GetOnlyBehind() && !behind(agent),
			r.GetOnlyWithErrors() && len(agent.GetErrors())+len(agent.GetWarnings()) == 0:
			continue
		}
		if err := to.Send(&pb.ListAgentsResponse{Agent: agent}); err != nil {
			return err
		}
	}
	return nil
}

// behind reports whether a client lacks something. For an observer, only what it was sent is known.
func behind(a *pb.AgentStatus) bool {
	return !a.GetSynced() || a.GetLagSequences() > 0 ||
		a.GetKind() != pb.ClientKind_CLIENT_KIND_OBSERVER && !a.GetProgrammed()
}

// ListShards implements the API.
func (s *Service) ListShards(context.Context, *pb.ListShardsRequest) (*pb.ListShardsResponse, error) {
	out := &pb.ListShardsResponse{}
	for i := range s.Store.Shards() {
		snapshot := s.Store.Snapshot(i)
		digest := snapshot.Digest()
		out.Shards = append(out.Shards, &pb.ShardStatus{
			Shard: i, Sequence: snapshot.Sequence(), Digest: digest[:], Objects: uint32(snapshot.Len()),
			ResourceVersions: wire.ResourceVersionsToProto(snapshot.ResourceVersions()),
		})
	}
	return out, nil
}

// GetService implements the API.
func (s *Service) GetService(_ context.Context, r *pb.GetServiceRequest) (*pb.GetServiceResponse, error) {
	key, err := serviceKey(r.GetService())
	if err != nil {
		return nil, err
	}
	snapshot := s.Store.Snapshot(key.Shard(s.Store.Shards()))
	held := wire.UpdateToProto(snapshot.Where(func(k model.ServiceKey) bool { return k == key }))
	out := &pb.GetServiceResponse{
		Shard: snapshot.Shard(), Sequence: snapshot.Sequence(), ChangedSequence: snapshot.ChangedAt(key), Slices: held.GetSlices(),
	}
	if len(held.GetServices()) > 0 {
		out.Service = held.GetServices()[0]
	}
	if out.GetService() == nil && len(out.GetSlices()) == 0 {
		return nil, status.Errorf(codes.NotFound, "this server has no Service %s: it does not exist in the cluster, "+
			"or nodes do not serve it (headless, ExternalName, or of another proxy)", key)
	}
	return out, nil
}

func serviceKey(n *pb.ServiceName) (model.ServiceKey, error) {
	key := model.ServiceKey{Namespace: n.GetNamespace(), Name: n.GetName()}
	if key.Namespace == "" || key.Name == "" || strings.Contains(key.Namespace+key.Name, "/") {
		return key, status.Errorf(codes.InvalidArgument, "invalid Service %q: set its namespace and name", key)
	}
	return key, nil
}
