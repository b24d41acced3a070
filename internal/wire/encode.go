// Package wire translates between the wire API and internal/model, so that generated types stay at the edge. What it
// decodes comes from outside: an object that makes no sense is left out and reported, and the rest stands.
package wire

import (
	"fmt"
	"net/netip"

	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Frame is an encoded StreamResponse, envelope included: what is sent to many streams is encoded once.
type Frame []byte

// Encode gives the frame of a response that the caller built.
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

// EncodeUpdate returns one frame of an Update, however large it is. What is sent is made by EncodeParts.
func EncodeUpdate(u *model.Update) (Frame, error) {
	return Encode(&pb.StreamResponse{Message: &pb.StreamResponse_ShardUpdate{ShardUpdate: UpdateToProto(u)}})
}

// EncodeNode gives the frame of the Node of that name; nil: there is none.
func EncodeNode(name string, n *model.Node) (Frame, error) {
	return Encode(&pb.StreamResponse{Message: &pb.StreamResponse_NodeUpdate{NodeUpdate: &pb.NodeUpdate{Node: nodeToProto(n), Name: name}}})
}

// UpdateToProto translates an Update.
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

// fromToProto leaves out the sequence that nearly all updates lead from.
func fromToProto(from, to uint64) uint64 {
	if from+1 == to {
		return 0
	}
	return from
}

// ResourceVersionsToProto translates resource versions; nil: there are none.
func ResourceVersionsToProto(r model.ResourceVersions) *pb.ResourceVersions {
	if r == (model.ResourceVersions{}) {
		return nil
	}
	return &pb.ResourceVersions{Services: r.Services, Slices: r.Slices}
}

// KeyToProto translates the key of a Service or Slice.
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
