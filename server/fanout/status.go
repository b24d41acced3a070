package fanout

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Status returns what the hub knows of the server's state. It is cheap, however many sessions there
// are.
func (h *Hub) Status() *pb.GetStatusResponse {
	servers, _ := h.announced()
	out := &pb.GetStatusResponse{
		ServerName: h.options.ServerName, ServerVersion: h.options.ServerVersion, StartTime: timestamppb.New(h.started),
		Draining: h.drainBegun.Err() != nil, Nodes: uint32(h.servedNodes.Load()), Servers: servers,
	}
	streams := make(map[pb.ClientKind]uint32)
	for _, s := range h.sessions.list() {
		streams[s.kind]++
	}
	for w := range h.warnings {
		if n := h.warnings[w].Load(); n > 0 {
			out.Warnings = append(out.Warnings, &pb.WarningCount{Warning: pb.NodeWarning(w + 1), Nodes: uint32(n)})
		}
	}
	for _, kind := range slices.Sorted(maps.Keys(streams)) {
		out.Streams = append(out.Streams, &pb.StreamCount{Kind: kind, Count: streams[kind]})
	}
	if h.upward != nil {
		path, stream := h.upward.Path()
		out.Upstream = &pb.UpstreamStatus{Connected: stream != nil, Path: path}
	}
	return out
}

// Agents returns all clients, sorted by node name. With a service, it sets Lacks of each of them:
// whether the client lacks the server's latest state of the Service, or has an open nack that
// concerns it.
func (h *Hub) Agents(service *model.ServiceKey) []*pb.AgentStatus {
	if service == nil {
		return h.agents(nil)
	}
	snapshot := h.store.Snapshot(service.Shard(h.store.Shards()))
	return h.agents(&question{
		shard: snapshot.Shard(), sequence: snapshot.ChangedAt(*service),
		nacked: func(n openNack) bool { return n.concerns(*service, snapshot) },
	})
}

// AgentsLacking returns the clients, as Agents does, whose nodes have not acknowledged a shard up
// to a sequence. As in a Convergence, a node that has nacked something of it counts as having it.
// Nobody lacks a shard that does not exist.
func (h *Hub) AgentsLacking(shard uint32, sequence uint64) []*pb.AgentStatus {
	if shard >= h.store.Shards() {
		return nil
	}
	all := h.agents(&question{shard: shard, sequence: sequence})
	return slices.DeleteFunc(all, func(a *pb.AgentStatus) bool { return !a.GetLacks() })
}

// agents returns all clients. It sets Lacks to the answer to a question, unless that is nil.
func (h *Hub) agents(about *question) (out []*pb.AgentStatus) {
	now := time.Now()
	for _, s := range h.sessions.list() {
		agent := &pb.AgentStatus{
			NodeName: s.node, Kind: s.kind, Address: s.peer, ClientVersion: s.version, Programmer: s.programmer,
			Since: timestamppb.New(s.since), Synced: s.synced.Load(), SentBytes: s.sentBytes.Load(),
		}
		if lacks := s.reports.describe(agent, about, now); about != nil {
			agent.Lacks = &lacks
		}
		out = append(out, agent)
	}
	slices.SortFunc(out, func(a, b *pb.AgentStatus) int {
		return cmp.Or(cmp.Compare(a.GetNodeName(), b.GetNodeName()), a.GetSince().AsTime().Compare(b.GetSince().AsTime()))
	})
	return out
}

// Convergences returns how long nodes took to program the latest Updates, newest first.
func (h *Hub) Convergences() []Convergence { return h.convergence.latest() }

// Steps returns the curve of an Update: how many nodes had it within which time, in the order of
// the times. It is empty if no node has the Update, and if the Update is not known any more.
func (h *Hub) Steps(shard uint32, sequence uint64) []Step {
	return h.convergence.steps(shard, sequence)
}
