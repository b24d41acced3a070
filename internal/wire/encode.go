// Package wire translates between the wire API and internal/model, so that generated types stay at
// the edge.
//
// Its input comes from outside. It leaves out and reports an object that does not decode, and keeps
// the rest of the message.
package wire

import (
	"fmt"
	"net/netip"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Frame is an encoded StreamResponse, envelope included. A frame is encoded once for many streams.
type Frame []byte

// Encode returns the frame of a response.
func Encode(r *pb.StreamResponse) (Frame, error) {
	return marshal(r)
}

func marshal(m proto.Message) ([]byte, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", m.ProtoReflect().Descriptor().Name(), err)
	}
	return b, nil
}

// EncodeUpdate returns a single frame with the whole Update, however large. Use EncodeParts for
// frames that are sent.
func EncodeUpdate(u *model.Update) (Frame, error) {
	return Encode(&pb.StreamResponse{Message: &pb.StreamResponse_ShardUpdate{ShardUpdate: UpdateToProto(u)}})
}

// EncodeNode returns the frame that announces a Node, as of a resource version of Nodes. nil means
// that no Node of that name exists.
func EncodeNode(name string, n *model.Node, resourceVersion uint64) (Frame, error) {
	return Encode(&pb.StreamResponse{Message: &pb.StreamResponse_NodeUpdate{NodeUpdate: &pb.NodeUpdate{
		Node: nodeToProto(n), Name: name, ResourceVersion: resourceVersion,
	}}})
}

// UpdateToProto converts an Update.
func UpdateToProto(u *model.Update) *pb.ShardUpdate {
	p := &pb.ShardUpdate{
		Shard: u.Shard, FromSequence: fromToProto(u.From, u.To), Sequence: u.To, Full: u.Full, FullBuckets: u.FullBuckets,
		ServicesResourceVersion: u.ResourceVersions.Services, SlicesResourceVersion: u.ResourceVersions.Slices,
	}
	p.Services, p.Slices = convert(u.Services, serviceToProto), convert(u.Slices, sliceToProto)
	p.SliceDeltas, p.Removed = convert(u.Deltas, deltaToProto), convert(u.Removed, KeyToProto)
	return p
}

func convert[M, P any](list []M, toProto func(M) P) []P {
	out := slices.Grow([]P(nil), len(list))
	for _, m := range list {
		out = append(out, toProto(m))
	}
	return out
}

// fromToProto returns 0 in place of from if from is to-1. Nearly all updates are like that, and 0
// is omitted on the wire.
func fromToProto(from, to uint64) uint64 {
	if from+1 == to {
		return 0
	}
	return from
}

// ResourceVersionsToProto converts resource versions. It returns nil if all are 0.
func ResourceVersionsToProto(r model.ResourceVersions) *pb.ResourceVersions {
	if r == (model.ResourceVersions{}) {
		return nil
	}
	return &pb.ResourceVersions{Services: r.Services, Slices: r.Slices, Nodes: r.Nodes}
}

// KeyToProto converts the key of a Service, a slice or a Node.
func KeyToProto(k model.Key) *pb.ObjectKey {
	kind := pb.ObjectKind_OBJECT_KIND_SERVICE
	switch k.Kind {
	case model.KindSlice:
		kind = pb.ObjectKind_OBJECT_KIND_SLICE
	case model.KindNode:
		kind = pb.ObjectKind_OBJECT_KIND_NODE
	}
	return &pb.ObjectKey{Kind: kind, Namespace: k.Namespace, Name: k.Name}
}

func serviceToProto(s *model.Service) *pb.Service {
	p := &pb.Service{
		Namespace:               s.Namespace,
		Name:                    s.Name,
		Version:                 bytesOf(s.ContentVersion()),
		Type:                    pb.ServiceType(s.Type),
		ClusterIps:              convert(s.ClusterIPs, netip.Addr.String),
		ExternalIps:             convert(s.ExternalIPs, netip.Addr.String),
		InternalTrafficPolicy:   pb.TrafficPolicy(s.InternalTrafficPolicy),
		ExternalTrafficPolicy:   pb.TrafficPolicy(s.ExternalTrafficPolicy),
		ClientIpAffinitySeconds: s.ClientIPAffinitySeconds,
		HealthCheckNodePort:     uint32(s.HealthCheckNodePort),
		TrafficDistribution:     s.TrafficDistribution,
		CreationTimeSeconds:     s.CreationTimeSeconds,
		IpvsScheduler:           s.IPVSScheduler,

		LoadBalancerSourceRanges: convert(s.LoadBalancerSourceRanges, netip.Prefix.String),
	}
	for _, i := range s.LoadBalancerIngress {
		p.LoadBalancerIngress = append(p.LoadBalancerIngress, &pb.LoadBalancerIngress{Ip: i.IP.String(), ProxyMode: i.ProxyMode})
	}
	for _, x := range s.Ports {
		p.Ports = append(p.Ports, &pb.ServicePort{
			Name: x.Name, Protocol: pb.Protocol(x.Protocol), Port: uint32(x.Port), NodePort: uint32(x.NodePort),
		})
	}
	return p
}

func sliceToProto(s *model.Slice) *pb.Slice {
	p := &pb.Slice{
		Namespace:               s.Namespace,
		Name:                    s.Name,
		Version:                 bytesOf(s.ContentVersion()),
		Service:                 s.Service,
		AddressType:             pb.AddressType(s.Family),
		LastChangeTriggerTimeMs: s.LastChangeTriggerTimeMS,
	}
	for _, x := range s.Ports {
		p.Ports = append(p.Ports, &pb.SlicePort{Name: x.Name, Protocol: pb.Protocol(x.Protocol), Port: uint32(x.Port)})
	}
	for i := range s.Endpoints {
		p.Endpoints = append(p.Endpoints, endpointToProto(&s.Endpoints[i]))
	}
	return p
}

func endpointToProto(e *model.Endpoint) *pb.Endpoint {
	return &pb.Endpoint{
		Address:     e.Address.String(),
		Ready:       e.Conditions.Ready,
		Serving:     e.Conditions.Serving,
		Terminating: e.Conditions.Terminating,
		NodeName:    e.NodeName,
		Zone:        e.Zone,
		ZoneHints:   e.ZoneHints,
		NodeHints:   e.NodeHints,
	}
}

func deltaToProto(d *model.SliceDelta) *pb.SliceDelta {
	p := &pb.SliceDelta{
		Namespace: d.Namespace, Name: d.Name, Version: bytesOf(d.Version),
		Removed: convert(d.Removed, netip.Addr.String), LastChangeTriggerTimeMs: d.LastChangeTriggerTimeMS,
	}
	for i := range d.Endpoints {
		p.Endpoints = append(p.Endpoints, endpointToProto(&d.Endpoints[i]))
	}
	for _, c := range d.Conditions {
		p.Conditions = append(p.Conditions, &pb.EndpointConditions{
			Index: c.Index, Ready: c.Conditions.Ready, Serving: c.Conditions.Serving, Terminating: c.Conditions.Terminating,
		})
	}
	return p
}

func nodeToProto(n *model.Node) *pb.Node {
	if n == nil {
		return nil
	}
	return &pb.Node{
		Name: n.Name, Labels: n.Labels, Addresses: convert(n.Addresses, netip.Addr.String),
		PodCidrs: convert(n.PodCIDRs, netip.Prefix.String), ServiceCidrs: convert(n.ServiceCIDRs, netip.Prefix.String),
		Deleting: n.Deleting, TaintedForDeletion: n.TaintedForDeletion,
	}
}

func bytesOf(v model.Version) []byte { return v[:] }
