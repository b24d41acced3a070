package fanout

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// serverPortName is the name of the port that agents connect to. If a slice has a single port, the
// port may have any name.
const serverPortName = "grpc"

// announce sends all clients the list of servers, if it has changed. An empty list is not sent: the
// client is connected to at least one server.
func (h *Hub) announce(servers []*pb.Server) {
	if len(servers) == 0 {
		return
	}
	f := mustEncode(&pb.StreamResponse{Message: &pb.StreamResponse_Servers{Servers: &pb.Servers{Servers: servers}}})
	h.mu.Lock()
	changed := string(f) != string(h.serversFrame)
	h.serversFrame, h.servers = f, servers
	h.mu.Unlock()
	if changed {
		h.broadcast(f)
	}
}

// announced returns the list of servers that clients are sent, and its frame; nil if there is none.
func (h *Hub) announced() ([]*pb.Server, wire.Frame) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.servers, h.serversFrame
}

// announceReplicas announces the ready endpoints of the ServerService, if updates may have changed
// them.
func (h *Hub) announceReplicas(updates []*model.Update) {
	service := h.options.ServerService
	if service == (model.ServiceKey{}) {
		return
	}
	shard := service.Shard(h.store.Shards())
	if !slices.ContainsFunc(updates, func(u *model.Update) bool { return u.Shard == shard }) {
		return
	}
	found := map[string]struct{}{}
	u := h.store.Snapshot(shard).Where(func(key model.ServiceKey) bool { return key == service })
	for _, s := range u.Slices {
		for _, p := range s.Ports {
			if p.Name != serverPortName && len(s.Ports) > 1 {
				continue
			}
			for _, e := range s.Endpoints {
				if e.Conditions.Ready {
					found[netip.AddrPortFrom(e.Address, p.Port).String()] = struct{}{}
				}
			}
		}
	}
	var servers []*pb.Server
	for _, address := range slices.Sorted(maps.Keys(found)) {
		servers = append(servers, &pb.Server{Address: address})
	}
	h.announce(servers)
}
