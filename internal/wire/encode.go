// Package wire translates between the wire API and internal/model, so that generated types stay at
// the edge.
//
// Its input comes from outside. It leaves out and reports an object that does not decode, and keeps
// the rest of the message.
package wire

import (
	"fmt"
	"net/netip"

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

// EncodeNode returns the frame that announces a Node. nil means that no Node of that name exists.
func EncodeNode(name string, n *model.Node) (Frame, error) {
	return Encode(&pb.StreamResponse{Message: &pb.StreamResponse_NodeUpdate{NodeUpdate: &pb.NodeUpdate{Node: nodeToProto(n), Name: name}}})
}

// UpdateToProto converts an Update.
func UpdateToProto(u *model.Update) *pb.ShardUpdate {
	p := &pb.ShardUpdate{
		Shard: u.Shard, FromSequence: fromToProto(u.From, u.To), Sequence: u.To, Full: u.Full, FullBuckets: u.FullBuckets,
		ServicesResourceVersion: u.ResourceVersions.Services, SlicesResourceVersion: u.ResourceVersions.Slices,
	}
	for _, s := range u.Services {
		p.Services = append(p.Services, serviceToProto(s))
	}
	for _, s := range u.Slices {
		p.Slices = append(p.Slices, sliceToProto(s))
	}
	for _, d := range u.Deltas {
		p.SliceDeltas = append(p.SliceDeltas, deltaToProto(d))
	}
	for _, k := range u.Removed {
		p.Removed = append(p.Removed, KeyToProto(k))
	}
	return p
}

// fromToProto returns 0 in place of from if from is to-1. Nearly all updates are like that, and 0
// is omitted on the wire.
func fromToProto(from, to uint64) uint64 {
	if from+1 == to {
		return 0
	}
	return from
}

// ResourceVersionsToProto converts resource versions. It returns nil if both are 0.
func ResourceVersionsToProto(r model.ResourceVersions) *pb.ResourceVersions {
	if r == (model.ResourceVersions{}) {
		return nil
	}
	return &pb.ResourceVersions{Services: r.Services, Slices: r.Slices}
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
		ClusterIps:              addrs(s.ClusterIPs),
		ExternalIps:             addrs(s.ExternalIPs),
		InternalTrafficPolicy:   pb.TrafficPolicy(s.InternalTrafficPolicy),
		ExternalTrafficPolicy:   pb.TrafficPolicy(s.ExternalTrafficPolicy),
		ClientIpAffinitySeconds: s.ClientIPAffinitySeconds,
		HealthCheckNodePort:     uint32(s.HealthCheckNodePort),
		TrafficDistribution:     s.TrafficDistribution,
		CreationTimeSeconds:     s.CreationTimeSeconds,
		IpvsScheduler:           s.IPVSScheduler,
	}
	for _, i := range s.LoadBalancerIngress {
		p.LoadBalancerIngress = append(p.LoadBalancerIngress, &pb.LoadBalancerIngress{Ip: i.IP.String(), ProxyMode: i.ProxyMode})
	}
	for _, x := range s.Ports {
		p.Ports = append(p.Ports, &pb.ServicePort{
			Name: x.Name, Protocol: pb.Protocol(x.Protocol), Port: uint32(x.Port), NodePort: uint32(x.NodePort),
		})
	}
	for _, r := range s.LoadBalancerSourceRanges {
		p.LoadBalancerSourceRanges = append(p.LoadBalancerSourceRanges, r.String())
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
		Removed: addrs(d.Removed), LastChangeTriggerTimeMs: d.LastChangeTriggerTimeMS,
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
	p := &pb.Node{
		Name: n.Name, Labels: n.Labels, InternalIps: addrs(n.InternalIPs),
		Deleting: n.Deleting, TaintedForDeletion: n.TaintedForDeletion,
	}
	for _, c := range n.PodCIDRs {
		p.PodCidrs = append(p.PodCidrs, c.String())
	}
	for _, c := range n.ServiceCIDRs {
		p.ServiceCidrs = append(p.ServiceCidrs, c.String())
	}
	return p
}

func bytesOf(v model.Version) []byte { return v[:] }

func addrs(list []netip.Addr) []string {
	var out []string
	for _, a := range list {
		out = append(out, a.String())
	}
	return out
}
