package wire

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/slicecast/slicecast/internal/intern"
	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Problem is an object that was left out of an Update because it did not decode.
type Problem struct {
	Key model.Key
	Err error
}

// Response is a decoded StreamResponse. At most one message is set. None is set if this version
// does not know the message.
type Response struct {
	Welcome     *pb.Welcome
	Update      *model.Update // with Problems and More
	Node        *NodeUpdate
	InSync      *pb.InSync
	Heartbeat   *pb.Heartbeat
	Drain       *pb.Drain
	Servers     *pb.Servers
	BucketQuery *pb.BucketQuery
	Digests     *pb.Digests
	DigestQuery *pb.DigestQuery

	// Problems are the objects that were left out of Update, or the Node that was left out of Node.
	Problems []Problem
	// More reports that further parts of Update follow.
	More bool
}

// NodeUpdate carries a Node. If the Node does not decode, it is also a Problem.
type NodeUpdate struct {
	Name string
	// Node is nil if no Node of that name exists or if it does not decode.
	Node *model.Node
	// Unreadable reports that the Node exists and did not decode. The receiver keeps what it knows
	// of it.
	Unreadable bool
	// ResourceVersion is the resource version of Nodes that the update reflects; 0 means unknown.
	ResourceVersion uint64
}

// Decode decodes a frame, which may be compressed. An error means that the frame as a whole is
// invalid.
func Decode(f Frame) (*Response, error) {
	number, message, err := messageOf(f)
	if err != nil {
		return nil, fmt.Errorf("decode a frame of %d bytes: %w", len(f), err)
	}
	content := []byte(f)
	if number == responseZstd {
		if content, err = decompress(message); err != nil {
			return nil, fmt.Errorf("decompress a frame of %d bytes: %w", len(f), err)
		}
		number, message, err = messageOf(content)
		if err == nil && number == responseZstd {
			err = errNested
		}
		if err != nil {
			return nil, fmt.Errorf("decode a frame of %d bytes, %d decompressed: %w", len(f), len(content), err)
		}
	}
	var r *Response
	switch number {
	case 0:
		return &Response{}, nil // the API permits ignoring unknown messages
	case responseShardUpdate:
		if r = decodeDeltas(message); r == nil {
			r, err = decodeUpdate(message)
		}
	default:
		r, err = decodeOther(number, content)
	}
	if err != nil {
		return nil, fmt.Errorf("decode a frame of %d bytes, %d decompressed: %w", len(f), len(content), err)
	}
	return r, nil
}

// messageOf returns the message that a StreamResponse holds, without decoding it. number is 0 if
// this version does not know the message.
func messageOf(b []byte) (number protowire.Number, message []byte, err error) {
	err = fields(b, func(field wireField, v wireValue) error {
		switch {
		case field.number > lastResponse || field.kind != protowire.BytesType:
			return nil
		case number != 0:
			return errSeveral
		}
		number, message = field.number, v.bytes
		return nil
	})
	return number, message, err
}

func decodeOther(number protowire.Number, content []byte) (*Response, error) {
	most := maxSeveral
	if number == responseNodeUpdate {
		most = maxNode
	}
	if len(content) > most {
		return nil, fmt.Errorf("message %d may have %d bytes", number, most)
	}
	var r pb.StreamResponse
	if err := proto.Unmarshal(content, &r); err != nil {
		return nil, err
	}
	out := &Response{
		Welcome: r.GetWelcome(), InSync: r.GetInSync(), Heartbeat: r.GetHeartbeat(), Drain: r.GetDrain(),
		Servers: r.GetServers(), BucketQuery: r.GetBucketQuery(), DigestQuery: r.GetDigestQuery(), Digests: r.GetDigests(),
	}
	if p := r.GetNodeUpdate(); p != nil {
		name := cmp.Or(p.GetName(), p.GetNode().GetName())
		if len(name) > maxName {
			return nil, fmt.Errorf("the name of a Node has %d bytes", len(name))
		}
		n, err := nodeFromProto(p.GetNode())
		out.Node = &NodeUpdate{Name: name, Node: n, Unreadable: err != nil, ResourceVersion: p.GetResourceVersion()}
		if err != nil {
			out.Problems = []Problem{{model.Key{Kind: model.KindNode, Name: name}, err}}
		}
	}
	return out, nil
}

// ResourceVersionsFromProto converts resource versions.
func ResourceVersionsFromProto(p *pb.ResourceVersions) model.ResourceVersions {
	return model.ResourceVersions{Services: p.GetServices(), Slices: p.GetSlices(), Nodes: p.GetNodes()}
}

// KeyFromProto converts the key of a Service or slice. It accepts keys that are not canonical,
// since a client may name a key that came from another server.
func KeyFromProto(k *pb.ObjectKey) (model.Key, error) {
	m := model.Key{Namespace: k.GetNamespace(), Name: k.GetName()}
	switch k.GetKind() {
	case pb.ObjectKind_OBJECT_KIND_SERVICE:
		m.Kind = model.KindService
	case pb.ObjectKind_OBJECT_KIND_SLICE:
		m.Kind = model.KindSlice
	default:
		return m, fmt.Errorf("unknown kind of object %d", k.GetKind())
	}
	if m.Name == "" {
		return m, errors.New("object without a name")
	}
	return m, nil
}

// NackedFromProto converts the key of the subject of a Nack, which is a Service, a slice or a Node.
// The name of a Node may be empty.
func NackedFromProto(k *pb.ObjectKey) (model.Key, error) {
	if k.GetKind() == pb.ObjectKind_OBJECT_KIND_NODE {
		return model.Key{Kind: model.KindNode, Name: k.GetName()}, nil
	}
	return KeyFromProto(k)
}

func removedFromProto(k *pb.ObjectKey) (model.Key, error) {
	m, err := KeyFromProto(k)
	if err != nil {
		return m, err
	}
	return m, m.Check()
}

func (u *updateDecoder) service(p *pb.Service) (*model.Service, error) {
	var d decoder
	s := model.Service{
		Namespace:               common.Get(p.GetNamespace()),
		Name:                    p.GetName(),
		Type:                    enum[model.ServiceType](&d, "type", p.GetType()),
		ClusterIPs:              d.addrs("cluster_ips", p.GetClusterIps()),
		ExternalIPs:             d.addrs("external_ips", p.GetExternalIps()),
		InternalTrafficPolicy:   enum[model.TrafficPolicy](&d, "internal_traffic_policy", p.GetInternalTrafficPolicy()),
		ExternalTrafficPolicy:   enum[model.TrafficPolicy](&d, "external_traffic_policy", p.GetExternalTrafficPolicy()),
		ClientIPAffinitySeconds: p.GetClientIpAffinitySeconds(),
		HealthCheckNodePort:     d.port("health_check_node_port", p.GetHealthCheckNodePort()),
		TrafficDistribution:     common.Get(p.GetTrafficDistribution()),
		CreationTimeSeconds:     p.GetCreationTimeSeconds(),
		IPVSScheduler:           common.Get(p.GetIpvsScheduler()),
	}
	for _, i := range p.GetLoadBalancerIngress() {
		s.LoadBalancerIngress = append(s.LoadBalancerIngress, model.LoadBalancerIngress{
			IP: d.addr("load_balancer_ingress", i.GetIp()), ProxyMode: i.GetProxyMode(),
		})
	}
	for _, x := range p.GetPorts() {
		s.Ports = append(s.Ports, model.ServicePort{
			Name: common.Get(x.GetName()), Protocol: enum[model.Protocol](&d, "protocol", x.GetProtocol()),
			Port: d.port("port", x.GetPort()), NodePort: d.port("node_port", x.GetNodePort()),
		})
	}
	s.LoadBalancerSourceRanges = d.prefixes("load_balancer_source_ranges", p.GetLoadBalancerSourceRanges())
	version := d.version(p.GetVersion())
	if err := d.check(&s); err != nil {
		return nil, err
	}
	service := model.NewService(s)
	u.verify(service, version, p)
	return service, nil
}

func (u *updateDecoder) slice(p *pb.Slice) (*model.Slice, error) {
	var d decoder
	s := model.Slice{
		Namespace:               common.Get(p.GetNamespace()),
		Name:                    p.GetName(),
		Service:                 p.GetService(),
		Family:                  enum[model.Family](&d, "address_type", p.GetAddressType()),
		Endpoints:               d.endpoints(p.GetEndpoints()),
		LastChangeTriggerTimeMS: p.GetLastChangeTriggerTimeMs(),
	}
	for _, x := range p.GetPorts() {
		s.Ports = append(s.Ports, model.SlicePort{
			Name: common.Get(x.GetName()), Protocol: enum[model.Protocol](&d, "protocol", x.GetProtocol()), Port: d.port("port", x.GetPort()),
		})
	}
	version := d.version(p.GetVersion())
	if err := d.check(&s); err != nil {
		return nil, err
	}
	slice := model.NewSlice(s)
	u.verify(slice, version, p)
	return slice, nil
}

// verify compares the version that an object has at the sender with the hash of its content. An
// object whose hash is another one for no visible reason counts as what it is. So no sender makes
// its content pass for the content of that version.
func (u *updateDecoder) verify(o model.Object, version model.Version, p proto.Message) {
	if version != o.ContentVersion() && hasUnknown(p.ProtoReflect()) {
		u.update.Unverified = append(u.update.Unverified, model.Unverified{Key: o.Key(), Version: version})
	}
}

// hasUnknown reports whether a message, or a message nested in it, has fields that this version
// does not know. It does not look into maps.
func hasUnknown(m protoreflect.Message) (found bool) {
	if len(m.GetUnknown()) > 0 {
		return true
	}
	m.Range(func(field protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case field.Message() == nil, field.IsMap():
		case field.IsList():
			for i := range v.List().Len() {
				found = found || hasUnknown(v.List().Get(i).Message())
			}
		default:
			found = hasUnknown(v.Message())
		}
		return !found
	})
	return found
}

func deltaFromProto(p *pb.SliceDelta) (*model.SliceDelta, error) {
	var d decoder
	m := &model.SliceDelta{
		Namespace: common.Get(p.GetNamespace()), Name: p.GetName(),
		Version:   d.version(p.GetVersion()),
		Endpoints: d.endpoints(p.GetEndpoints()), Removed: d.addrs("removed", p.GetRemoved()),
		LastChangeTriggerTimeMS: p.GetLastChangeTriggerTimeMs(),
	}
	for _, c := range p.GetConditions() {
		m.Conditions = append(m.Conditions, model.EndpointConditions{
			Index:      c.GetIndex(),
			Conditions: model.Conditions{Ready: c.GetReady(), Serving: c.GetServing(), Terminating: c.GetTerminating()},
		})
	}
	return m, d.check(m)
}

func nodeFromProto(p *pb.Node) (*model.Node, error) {
	if p == nil {
		return nil, nil
	}
	var d decoder
	n := &model.Node{
		Name: p.GetName(), Labels: p.GetLabels(), Addresses: d.addrs("addresses", p.GetAddresses()),
		PodCIDRs: d.prefixes("pod_cidrs", p.GetPodCidrs()),
		Deleting: p.GetDeleting(), TaintedForDeletion: p.GetTaintedForDeletion(),
		ServiceCIDRs: d.prefixes("service_cidrs", p.GetServiceCidrs()),
	}
	if err := d.check(n); err != nil {
		return nil, fmt.Errorf("node %.80q: %w", p.GetName(), err)
	}
	return n, nil
}

// decoder keeps the first error, so that a message can be decoded in one expression.
type decoder struct{ err error }

func (d *decoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf(format, args...)
	}
}

// check returns the first error, or else the error of the object's own Check, which fails if the
// object is not canonical. Canonical objects with the same content are equal, because their lists
// are sorted.
func (d *decoder) check(o interface{ Check() error }) error {
	if d.err != nil {
		return d.err
	}
	return o.Check()
}

func (d *decoder) version(b []byte) model.Version {
	v, err := model.ParseVersion(b)
	if err != nil && len(b) > 0 {
		d.fail("%w", err)
	}
	d.there(v)
	return v
}

func (d *decoder) there(v model.Version) {
	if v == (model.Version{}) {
		d.fail("no version")
	}
}

// enum converts a value that fits the model's type. The object's own Check refuses unknown values
// that fit.
func enum[M ~uint8, P ~int32](d *decoder, field string, v P) M {
	if v != P(M(v)) {
		d.fail("%s: unknown value %d", field, v)
	}
	return M(v)
}

func (d *decoder) port(field string, v uint32) uint16 {
	if v > 65535 {
		d.fail("%s: %d is not a port number", field, v)
	}
	return uint16(v)
}

func (d *decoder) addr(field, s string) netip.Addr {
	a, err := netip.ParseAddr(s)
	if err != nil {
		d.fail("%s: %.80q is not an address", field, s)
	}
	return a
}

func (d *decoder) prefix(field, s string) netip.Prefix {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		d.fail("%s: %.80q is not a range of addresses", field, s)
	}
	return p
}

func (d *decoder) addrs(field string, list []string) []netip.Addr {
	return each(d, list, func(s string) netip.Addr { return d.addr(field, s) })
}

func (d *decoder) prefixes(field string, list []string) []netip.Prefix {
	return each(d, list, func(s string) netip.Prefix { return d.prefix(field, s) })
}

// each parses strings until one is invalid: a few bytes of a frame hold millions of them.
func each[T any](d *decoder, list []string, parse func(string) T) (out []T) {
	for _, s := range list {
		if d.err != nil {
			break
		}
		out = append(out, parse(s))
	}
	return out
}

func (d *decoder) endpoints(list []*pb.Endpoint) []model.Endpoint {
	out := make([]model.Endpoint, 0, len(list))
	for _, p := range list {
		if d.err != nil {
			break
		}
		out = append(out, model.Endpoint{
			Address:    d.addr("address", p.GetAddress()),
			Conditions: model.Conditions{Ready: p.GetReady(), Serving: p.GetServing(), Terminating: p.GetTerminating()},
			NodeName:   common.Get(p.GetNodeName()),
			Zone:       common.Get(p.GetZone()),
			ZoneHints:  interned(p.GetZoneHints()),
			NodeHints:  interned(p.GetNodeHints()),
		})
	}
	return out
}

// common interns the strings that many objects share.
var common intern.Strings

func interned(list []string) []string {
	for i, s := range list {
		list[i] = common.Get(s)
	}
	return list
}
