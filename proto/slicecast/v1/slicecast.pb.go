// Package slicecast.v1 is the API through which the nodes of a cluster learn its Services and their
// endpoints. A node's agent opens one bidirectional stream to a server, in the manner of xDS.
//
// # The conversation
//
//	agent                           server
//	  | -- Hello --------------------> |   who the client is and what it holds (its
//	  |                                |   position in each shard, the digest of all)
//	  | <--------------------- Welcome |   epoch, number of shards, heartbeat interval
//	  | <--------------------- Servers |   where else to connect; again whenever that changes
//	  | <------------------ NodeUpdate |   the agent's own Node, now and whenever it changes
//	  | <----------------- ShardUpdate |   for each shard that differs from what the agent holds
//	  | <---------------------- InSync |   the agent has everything; positions of all shards
//	  | -- Ack ----------------------> |   the kernel is programmed up to these positions
//	  | <----------------- ShardUpdate |   from now on, the changes as they happen
//	  | -- Nack / Resync ------------> |   this key could not be programmed / send this again
//	  | <------------------- Heartbeat |   digest of everything, also when nothing changes
//	  | <----------------------- Drain |   this server is going away: resume on another one
//
// Hello is the first message of every stream. A client sends it exactly once and sends nothing else
// before Welcome. A server that has not synced with its source answers UNAVAILABLE and serves
// nothing. A client may close its sending side. The server goes on sending, so that grpcurl can
// follow a stream.
//
// # State
//
// The objects are Services and Slices. A Slice is an EndpointSlice, trimmed to what a node needs. A
// Service and its Slices are in the same shard, whose number is xxhash64("<namespace>/<service>")
// modulo the number of shards. Each shard has a sequence, which grows by one with each publish.
// Sequences mean something within one epoch only. An epoch is one life of one server's store.
//
// An object's version is a hash of its content. The key is part of the content. The same content
// has the same version on every server. Digests are hashes of versions. Versions and digests are
// SHA-256 hashes (FIPS 180-4), truncated to their first 25 bytes. Therefore, whoever may write
// Services and EndpointSlices needs at least 2^100 operations to make two states that compare
// equal.
//
//   - A shard's objects are divided into 64 buckets by a hash of their own keys. An object is in
//     the bucket xxhash64("<kind>/<namespace>/<name>") modulo 64, where kind is the number of its
//     ObjectKind. The digest of a bucket is the hash of the byte 0x81 and the versions of its
//     objects in ascending order.
//   - The digest of a shard is the hash of the byte 0x82 and the digests of its buckets, by number.
//   - The digest of the state is the hash of the byte 0x83 and the digests of all shards, by
//     number.
//   - If there are no objects, the digest is 25 zero bytes. A field with several digests is their
//     concatenation.
//
// Within one epoch, sequences decide what a client holds. If a client comes to another epoch,
// digests decide. Digests also show that something went wrong.
//
// # Updates
//
//   - A ShardUpdate is atomic. It is applied as a whole or not at all. It leads from
//     `from_sequence` to `sequence`. A client may apply it if the client's position is within that
//     range, because changes are idempotent. An update that is full, or has whole buckets, may be
//     applied at any position.
//   - A client removes an object only when an update says so. The update either names the object in
//     `removed`, or has the object's shard or bucket whole and does not name the object.
//   - A SliceDelta leads from the state at `from_sequence` and promises the version that results.
//     If a client gets another version, lacks the slice, or cannot decode the delta, it asks for
//     that key with Resync. The client keeps what it has until the answer comes.
//   - If a slice has fields that a client does not know, the client cannot compute the resulting
//     version. It then applies a delta only if its position is exactly `from_sequence`.
//   - The server sends the same bytes to every node, except for NodeUpdates. Every client gets all
//     Services.
//
// # Stale servers
//
// A server is stale while its source may have missed changes: its API server does not answer, or it
// is a relay that follows no server, or one that is stale itself. A stale server goes on serving
// what it holds. It says in Welcome that it is stale, and in a Heartbeat whenever that changes.
//
// A client may leave a stale server for one that is not. Before it leaves, it opens a stream on the
// other server with a Hello that has `probe` set. The server admits it like any other stream, sends
// Welcome, and ends the stream.
//
// # Canonical objects
//
// Objects are canonical. A client refuses any other object in the same way as an object that does
// not decode: it keeps what it has of the object and programs the rest.
//
//   - Names, addresses and ports are what a Kubernetes API server admits.
//   - Addresses and ranges are in their shortest form. They have no zones and no host bits, and are
//     not IPv4-mapped IPv6.
//   - Lists are in ascending order, with each entry once. Ports are ordered by name and protocol,
//     endpoints and load-balancer ingress by address, and conditions by index. IPv4 comes before
//     IPv6. A Node's addresses and pod CIDRs keep the cluster's order, because that order has a
//     meaning.
//   - A slice has at most 1000 endpoints and 20,000 ports. A Service has at most 10,000 ports, and
//     in each IP family at most 10,000 addresses or ranges in a list, and a session affinity of at
//     most 86,400 seconds. An endpoint has at most 8 hints of each kind. A Node has at most 1000
//     addresses, 16 pod CIDRs, and 1000 service CIDRs of each IP family.
//
// # Compatibility
//
//   - A client ignores fields that it does not know. An object that came with such fields counts in
//     digests with the version on the wire, but only on the stream that it came on. In any other
//     case, an object counts with the hash of the content that the client holds, whatever version
//     was sent with it.
//   - A relay sends the content that it holds, with the hash of that content as the version. The
//     version may be another one than upstream's if the relay is older.
//   - A client could misunderstand some content, such as a new form of a delta or a new message. A
//     server sends such content only to clients that declare the Capability for it.

// Code generated by protoc-gen-go. DO NOT EDIT.
// versions:
// 	protoc-gen-go v1.36.12
// 	protoc        (unknown)
// source: slicecast/v1/slicecast.proto

package slicecastv1

import (
	protoreflect "google.golang.org/protobuf/reflect/protoreflect"
	protoimpl "google.golang.org/protobuf/runtime/protoimpl"
	reflect "reflect"
	sync "sync"
	unsafe "unsafe"
)

const (
	// Verify that this generated code is sufficiently up-to-date.
	_ = protoimpl.EnforceVersion(20 - protoimpl.MinVersion)
	// Verify that runtime/protoimpl is sufficiently up-to-date.
	_ = protoimpl.EnforceVersion(protoimpl.MaxVersion - 20)
)

// Capability is something that some clients understand and others do not.
type Capability int32

const (
	// No capability.
	Capability_CAPABILITY_UNSPECIFIED Capability = 0
	// The client understands StreamResponse.zstd.
	Capability_CAPABILITY_ZSTD Capability = 1
	// The client understands DigestQuery, BucketQuery, and ShardUpdates with full_buckets.
	Capability_CAPABILITY_BUCKETS Capability = 2
)

// Enum value maps for Capability.
var (
	Capability_name = map[int32]string{
		0: "CAPABILITY_UNSPECIFIED",
		1: "CAPABILITY_ZSTD",
		2: "CAPABILITY_BUCKETS",
	}
	Capability_value = map[string]int32{
		"CAPABILITY_UNSPECIFIED": 0,
		"CAPABILITY_ZSTD":        1,
		"CAPABILITY_BUCKETS":     2,
	}
)

func (x Capability) Enum() *Capability {
	p := new(Capability)
	*p = x
	return p
}

func (x Capability) String() string {
	return protoimpl.X.EnumStringOf(x.Descriptor(), protoreflect.EnumNumber(x))
}

func (Capability) Descriptor() protoreflect.EnumDescriptor {
	return file_slicecast_v1_slicecast_proto_enumTypes[0].Descriptor()
}

func (Capability) Type() protoreflect.EnumType {
	return &file_slicecast_v1_slicecast_proto_enumTypes[0]
}

func (x Capability) Number() protoreflect.EnumNumber {
	return protoreflect.EnumNumber(x)
}

// Deprecated: Use Capability.Descriptor instead.
func (Capability) EnumDescriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{0}
}

// ClientKind is what a client is.
type ClientKind int32

const (
	// The kind is not set. The client is an observer. If node_name is set, the client gets that Node.
	ClientKind_CLIENT_KIND_UNSPECIFIED ClientKind = 0
	// The agent of the Node node_name. A Node has one agent: its newest stream ends the previous one.
	ClientKind_CLIENT_KIND_AGENT ClientKind = 1
	// A client that only watches. Its acks do not count. If node_name is empty, the client gets no
	// NodeUpdate.
	ClientKind_CLIENT_KIND_OBSERVER ClientKind = 2
	// Another server, which serves agents from this stream. It gets a NodeUpdate for every Node, and
	// sends acks and nacks for its agents.
	ClientKind_CLIENT_KIND_RELAY ClientKind = 3
)

// Enum value maps for ClientKind.
var (
	ClientKind_name = map[int32]string{
		0: "CLIENT_KIND_UNSPECIFIED",
		1: "CLIENT_KIND_AGENT",
		2: "CLIENT_KIND_OBSERVER",
		3: "CLIENT_KIND_RELAY",
	}
	ClientKind_value = map[string]int32{
		"CLIENT_KIND_UNSPECIFIED": 0,
		"CLIENT_KIND_AGENT":       1,
		"CLIENT_KIND_OBSERVER":    2,
		"CLIENT_KIND_RELAY":       3,
	}
)

func (x ClientKind) Enum() *ClientKind {
	p := new(ClientKind)
	*p = x
	return p
}

func (x ClientKind) String() string {
	return protoimpl.X.EnumStringOf(x.Descriptor(), protoreflect.EnumNumber(x))
}

func (ClientKind) Descriptor() protoreflect.EnumDescriptor {
	return file_slicecast_v1_slicecast_proto_enumTypes[1].Descriptor()
}

func (ClientKind) Type() protoreflect.EnumType {
	return &file_slicecast_v1_slicecast_proto_enumTypes[1]
}

func (x ClientKind) Number() protoreflect.EnumNumber {
	return protoreflect.EnumNumber(x)
}

// Deprecated: Use ClientKind.Descriptor instead.
func (ClientKind) EnumDescriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{1}
}

// NodeWarning is something that an operator should mend on a node. A server counts values that it
// does not know as warnings, too.
type NodeWarning int32

const (
	// No warning.
	NodeWarning_NODE_WARNING_UNSPECIFIED NodeWarning = 0
	// Pods have IPv4 addresses that the agent does not recognize as those of pods.
	NodeWarning_NODE_WARNING_POD_RANGE_IPV4 NodeWarning = 1
	// Pods have IPv6 addresses that the agent does not recognize as those of pods.
	NodeWarning_NODE_WARNING_POD_RANGE_IPV6 NodeWarning = 2
	// A kube-proxy runs beside the agent, which was not told to expect one.
	NodeWarning_NODE_WARNING_KUBE_PROXY NodeWarning = 3
	// The kernel, which something else programs, differs from what the agent would program.
	NodeWarning_NODE_WARNING_KERNEL_DIFFERS NodeWarning = 4
	// The agent cannot serve its metrics over TLS or its status.
	NodeWarning_NODE_WARNING_NOT_SERVED NodeWarning = 5
)

// Enum value maps for NodeWarning.
var (
	NodeWarning_name = map[int32]string{
		0: "NODE_WARNING_UNSPECIFIED",
		1: "NODE_WARNING_POD_RANGE_IPV4",
		2: "NODE_WARNING_POD_RANGE_IPV6",
		3: "NODE_WARNING_KUBE_PROXY",
		4: "NODE_WARNING_KERNEL_DIFFERS",
		5: "NODE_WARNING_NOT_SERVED",
	}
	NodeWarning_value = map[string]int32{
		"NODE_WARNING_UNSPECIFIED":    0,
		"NODE_WARNING_POD_RANGE_IPV4": 1,
		"NODE_WARNING_POD_RANGE_IPV6": 2,
		"NODE_WARNING_KUBE_PROXY":     3,
		"NODE_WARNING_KERNEL_DIFFERS": 4,
		"NODE_WARNING_NOT_SERVED":     5,
	}
)

func (x NodeWarning) Enum() *NodeWarning {
	p := new(NodeWarning)
	*p = x
	return p
}

func (x NodeWarning) String() string {
	return protoimpl.X.EnumStringOf(x.Descriptor(), protoreflect.EnumNumber(x))
}

func (NodeWarning) Descriptor() protoreflect.EnumDescriptor {
	return file_slicecast_v1_slicecast_proto_enumTypes[2].Descriptor()
}

func (NodeWarning) Type() protoreflect.EnumType {
	return &file_slicecast_v1_slicecast_proto_enumTypes[2]
}

func (x NodeWarning) Number() protoreflect.EnumNumber {
	return protoreflect.EnumNumber(x)
}

// Deprecated: Use NodeWarning.Descriptor instead.
func (NodeWarning) EnumDescriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{2}
}

// ObjectKind is the kind of an object.
type ObjectKind int32

const (
	// The kind is not set.
	ObjectKind_OBJECT_KIND_UNSPECIFIED ObjectKind = 0
	// A Service.
	ObjectKind_OBJECT_KIND_SERVICE ObjectKind = 1
	// A Slice.
	ObjectKind_OBJECT_KIND_SLICE ObjectKind = 2
	// A node, which only a Nack may name. The Nack says that nothing in one or both IP families is
	// programmed on the node. A server replaces the name by that of the client's own node.
	ObjectKind_OBJECT_KIND_NODE ObjectKind = 3
)

// Enum value maps for ObjectKind.
var (
	ObjectKind_name = map[int32]string{
		0: "OBJECT_KIND_UNSPECIFIED",
		1: "OBJECT_KIND_SERVICE",
		2: "OBJECT_KIND_SLICE",
		3: "OBJECT_KIND_NODE",
	}
	ObjectKind_value = map[string]int32{
		"OBJECT_KIND_UNSPECIFIED": 0,
		"OBJECT_KIND_SERVICE":     1,
		"OBJECT_KIND_SLICE":       2,
		"OBJECT_KIND_NODE":        3,
	}
)

func (x ObjectKind) Enum() *ObjectKind {
	p := new(ObjectKind)
	*p = x
	return p
}

func (x ObjectKind) String() string {
	return protoimpl.X.EnumStringOf(x.Descriptor(), protoreflect.EnumNumber(x))
}

func (ObjectKind) Descriptor() protoreflect.EnumDescriptor {
	return file_slicecast_v1_slicecast_proto_enumTypes[3].Descriptor()
}

func (ObjectKind) Type() protoreflect.EnumType {
	return &file_slicecast_v1_slicecast_proto_enumTypes[3]
}

func (x ObjectKind) Number() protoreflect.EnumNumber {
	return protoreflect.EnumNumber(x)
}

// Deprecated: Use ObjectKind.Descriptor instead.
func (ObjectKind) EnumDescriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{3}
}

// Protocol is the protocol of a port, as in Kubernetes.
type Protocol int32

const (
	// The protocol is not set.
	Protocol_PROTOCOL_UNSPECIFIED Protocol = 0
	// TCP.
	Protocol_PROTOCOL_TCP Protocol = 1
	// UDP.
	Protocol_PROTOCOL_UDP Protocol = 2
	// SCTP.
	Protocol_PROTOCOL_SCTP Protocol = 3
)

// Enum value maps for Protocol.
var (
	Protocol_name = map[int32]string{
		0: "PROTOCOL_UNSPECIFIED",
		1: "PROTOCOL_TCP",
		2: "PROTOCOL_UDP",
		3: "PROTOCOL_SCTP",
	}
	Protocol_value = map[string]int32{
		"PROTOCOL_UNSPECIFIED": 0,
		"PROTOCOL_TCP":         1,
		"PROTOCOL_UDP":         2,
		"PROTOCOL_SCTP":        3,
	}
)

func (x Protocol) Enum() *Protocol {
	p := new(Protocol)
	*p = x
	return p
}

func (x Protocol) String() string {
	return protoimpl.X.EnumStringOf(x.Descriptor(), protoreflect.EnumNumber(x))
}

func (Protocol) Descriptor() protoreflect.EnumDescriptor {
	return file_slicecast_v1_slicecast_proto_enumTypes[4].Descriptor()
}

func (Protocol) Type() protoreflect.EnumType {
	return &file_slicecast_v1_slicecast_proto_enumTypes[4]
}

func (x Protocol) Number() protoreflect.EnumNumber {
	return protoreflect.EnumNumber(x)
}

// Deprecated: Use Protocol.Descriptor instead.
func (Protocol) EnumDescriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{4}
}

// ServiceType is the type of a Service, as in Kubernetes. Headless and ExternalName Services are
// not sent.
type ServiceType int32

const (
	// The type is not set.
	ServiceType_SERVICE_TYPE_UNSPECIFIED ServiceType = 0
	// ClusterIP.
	ServiceType_SERVICE_TYPE_CLUSTER_IP ServiceType = 1
	// NodePort.
	ServiceType_SERVICE_TYPE_NODE_PORT ServiceType = 2
	// LoadBalancer.
	ServiceType_SERVICE_TYPE_LOAD_BALANCER ServiceType = 3
)

// Enum value maps for ServiceType.
var (
	ServiceType_name = map[int32]string{
		0: "SERVICE_TYPE_UNSPECIFIED",
		1: "SERVICE_TYPE_CLUSTER_IP",
		2: "SERVICE_TYPE_NODE_PORT",
		3: "SERVICE_TYPE_LOAD_BALANCER",
	}
	ServiceType_value = map[string]int32{
		"SERVICE_TYPE_UNSPECIFIED":   0,
		"SERVICE_TYPE_CLUSTER_IP":    1,
		"SERVICE_TYPE_NODE_PORT":     2,
		"SERVICE_TYPE_LOAD_BALANCER": 3,
	}
)

func (x ServiceType) Enum() *ServiceType {
	p := new(ServiceType)
	*p = x
	return p
}

func (x ServiceType) String() string {
	return protoimpl.X.EnumStringOf(x.Descriptor(), protoreflect.EnumNumber(x))
}

func (ServiceType) Descriptor() protoreflect.EnumDescriptor {
	return file_slicecast_v1_slicecast_proto_enumTypes[5].Descriptor()
}

func (ServiceType) Type() protoreflect.EnumType {
	return &file_slicecast_v1_slicecast_proto_enumTypes[5]
}

func (x ServiceType) Number() protoreflect.EnumNumber {
	return protoreflect.EnumNumber(x)
}

// Deprecated: Use ServiceType.Descriptor instead.
func (ServiceType) EnumDescriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{5}
}

// TrafficPolicy is a Service's internalTrafficPolicy or externalTrafficPolicy.
type TrafficPolicy int32

const (
	// The policy is not set, which means Cluster.
	TrafficPolicy_TRAFFIC_POLICY_UNSPECIFIED TrafficPolicy = 0
	// Traffic goes to all endpoints.
	TrafficPolicy_TRAFFIC_POLICY_CLUSTER TrafficPolicy = 1
	// Traffic goes only to endpoints on the same node.
	TrafficPolicy_TRAFFIC_POLICY_LOCAL TrafficPolicy = 2
)

// Enum value maps for TrafficPolicy.
var (
	TrafficPolicy_name = map[int32]string{
		0: "TRAFFIC_POLICY_UNSPECIFIED",
		1: "TRAFFIC_POLICY_CLUSTER",
		2: "TRAFFIC_POLICY_LOCAL",
	}
	TrafficPolicy_value = map[string]int32{
		"TRAFFIC_POLICY_UNSPECIFIED": 0,
		"TRAFFIC_POLICY_CLUSTER":     1,
		"TRAFFIC_POLICY_LOCAL":       2,
	}
)

func (x TrafficPolicy) Enum() *TrafficPolicy {
	p := new(TrafficPolicy)
	*p = x
	return p
}

func (x TrafficPolicy) String() string {
	return protoimpl.X.EnumStringOf(x.Descriptor(), protoreflect.EnumNumber(x))
}

func (TrafficPolicy) Descriptor() protoreflect.EnumDescriptor {
	return file_slicecast_v1_slicecast_proto_enumTypes[6].Descriptor()
}

func (TrafficPolicy) Type() protoreflect.EnumType {
	return &file_slicecast_v1_slicecast_proto_enumTypes[6]
}

func (x TrafficPolicy) Number() protoreflect.EnumNumber {
	return protoreflect.EnumNumber(x)
}

// Deprecated: Use TrafficPolicy.Descriptor instead.
func (TrafficPolicy) EnumDescriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{6}
}

// AddressType is the family of a Slice's addresses. FQDN slices are not sent.
type AddressType int32

const (
	// The family is not set.
	AddressType_ADDRESS_TYPE_UNSPECIFIED AddressType = 0
	// IPv4.
	AddressType_ADDRESS_TYPE_IPV4 AddressType = 1
	// IPv6.
	AddressType_ADDRESS_TYPE_IPV6 AddressType = 2
)

// Enum value maps for AddressType.
var (
	AddressType_name = map[int32]string{
		0: "ADDRESS_TYPE_UNSPECIFIED",
		1: "ADDRESS_TYPE_IPV4",
		2: "ADDRESS_TYPE_IPV6",
	}
	AddressType_value = map[string]int32{
		"ADDRESS_TYPE_UNSPECIFIED": 0,
		"ADDRESS_TYPE_IPV4":        1,
		"ADDRESS_TYPE_IPV6":        2,
	}
)

func (x AddressType) Enum() *AddressType {
	p := new(AddressType)
	*p = x
	return p
}

func (x AddressType) String() string {
	return protoimpl.X.EnumStringOf(x.Descriptor(), protoreflect.EnumNumber(x))
}

func (AddressType) Descriptor() protoreflect.EnumDescriptor {
	return file_slicecast_v1_slicecast_proto_enumTypes[7].Descriptor()
}

func (AddressType) Type() protoreflect.EnumType {
	return &file_slicecast_v1_slicecast_proto_enumTypes[7]
}

func (x AddressType) Number() protoreflect.EnumNumber {
	return protoreflect.EnumNumber(x)
}

// Deprecated: Use AddressType.Descriptor instead.
func (AddressType) EnumDescriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{7}
}

// StreamRequest is a message from the client.
type StreamRequest struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The message.
	//
	// Types that are valid to be assigned to Message:
	//
	//	*StreamRequest_Hello
	//	*StreamRequest_Ack
	//	*StreamRequest_Nack
	//	*StreamRequest_Resync
	//	*StreamRequest_DigestQuery
	//	*StreamRequest_Digests
	Message       isStreamRequest_Message `protobuf_oneof:"message"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *StreamRequest) Reset() {
	*x = StreamRequest{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[0]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *StreamRequest) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*StreamRequest) ProtoMessage() {}

func (x *StreamRequest) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[0]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use StreamRequest.ProtoReflect.Descriptor instead.
func (*StreamRequest) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{0}
}

func (x *StreamRequest) GetMessage() isStreamRequest_Message {
	if x != nil {
		return x.Message
	}
	return nil
}

func (x *StreamRequest) GetHello() *Hello {
	if x != nil {
		if x, ok := x.Message.(*StreamRequest_Hello); ok {
			return x.Hello
		}
	}
	return nil
}

func (x *StreamRequest) GetAck() *Ack {
	if x != nil {
		if x, ok := x.Message.(*StreamRequest_Ack); ok {
			return x.Ack
		}
	}
	return nil
}

func (x *StreamRequest) GetNack() *Nack {
	if x != nil {
		if x, ok := x.Message.(*StreamRequest_Nack); ok {
			return x.Nack
		}
	}
	return nil
}

func (x *StreamRequest) GetResync() *Resync {
	if x != nil {
		if x, ok := x.Message.(*StreamRequest_Resync); ok {
			return x.Resync
		}
	}
	return nil
}

func (x *StreamRequest) GetDigestQuery() *DigestQuery {
	if x != nil {
		if x, ok := x.Message.(*StreamRequest_DigestQuery); ok {
			return x.DigestQuery
		}
	}
	return nil
}

func (x *StreamRequest) GetDigests() *Digests {
	if x != nil {
		if x, ok := x.Message.(*StreamRequest_Digests); ok {
			return x.Digests
		}
	}
	return nil
}

type isStreamRequest_Message interface {
	isStreamRequest_Message()
}

type StreamRequest_Hello struct {
	// The first message of every stream.
	Hello *Hello `protobuf:"bytes,1,opt,name=hello,proto3,oneof"`
}

type StreamRequest_Ack struct {
	// The positions whose content the kernel holds.
	Ack *Ack `protobuf:"bytes,2,opt,name=ack,proto3,oneof"`
}

type StreamRequest_Nack struct {
	// An object that could not be programmed.
	Nack *Nack `protobuf:"bytes,3,opt,name=nack,proto3,oneof"`
}

type StreamRequest_Resync struct {
	// A request to send objects or a shard again.
	Resync *Resync `protobuf:"bytes,4,opt,name=resync,proto3,oneof"`
}

type StreamRequest_DigestQuery struct {
	// A request for the digests of all shards.
	DigestQuery *DigestQuery `protobuf:"bytes,5,opt,name=digest_query,json=digestQuery,proto3,oneof"`
}

type StreamRequest_Digests struct {
	// The answer to the server's DigestQuery.
	Digests *Digests `protobuf:"bytes,6,opt,name=digests,proto3,oneof"`
}

func (*StreamRequest_Hello) isStreamRequest_Message() {}

func (*StreamRequest_Ack) isStreamRequest_Message() {}

func (*StreamRequest_Nack) isStreamRequest_Message() {}

func (*StreamRequest_Resync) isStreamRequest_Message() {}

func (*StreamRequest_DigestQuery) isStreamRequest_Message() {}

func (*StreamRequest_Digests) isStreamRequest_Message() {}

// StreamResponse is a message from the server.
type StreamResponse struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The message.
	//
	// Types that are valid to be assigned to Message:
	//
	//	*StreamResponse_Welcome
	//	*StreamResponse_ShardUpdate
	//	*StreamResponse_NodeUpdate
	//	*StreamResponse_InSync
	//	*StreamResponse_Heartbeat
	//	*StreamResponse_Drain
	//	*StreamResponse_Servers
	//	*StreamResponse_BucketQuery
	//	*StreamResponse_Zstd
	//	*StreamResponse_Digests
	//	*StreamResponse_DigestQuery
	Message       isStreamResponse_Message `protobuf_oneof:"message"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *StreamResponse) Reset() {
	*x = StreamResponse{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[1]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *StreamResponse) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*StreamResponse) ProtoMessage() {}

func (x *StreamResponse) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[1]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use StreamResponse.ProtoReflect.Descriptor instead.
func (*StreamResponse) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{1}
}

func (x *StreamResponse) GetMessage() isStreamResponse_Message {
	if x != nil {
		return x.Message
	}
	return nil
}

func (x *StreamResponse) GetWelcome() *Welcome {
	if x != nil {
		if x, ok := x.Message.(*StreamResponse_Welcome); ok {
			return x.Welcome
		}
	}
	return nil
}

func (x *StreamResponse) GetShardUpdate() *ShardUpdate {
	if x != nil {
		if x, ok := x.Message.(*StreamResponse_ShardUpdate); ok {
			return x.ShardUpdate
		}
	}
	return nil
}

func (x *StreamResponse) GetNodeUpdate() *NodeUpdate {
	if x != nil {
		if x, ok := x.Message.(*StreamResponse_NodeUpdate); ok {
			return x.NodeUpdate
		}
	}
	return nil
}

func (x *StreamResponse) GetInSync() *InSync {
	if x != nil {
		if x, ok := x.Message.(*StreamResponse_InSync); ok {
			return x.InSync
		}
	}
	return nil
}

func (x *StreamResponse) GetHeartbeat() *Heartbeat {
	if x != nil {
		if x, ok := x.Message.(*StreamResponse_Heartbeat); ok {
			return x.Heartbeat
		}
	}
	return nil
}

func (x *StreamResponse) GetDrain() *Drain {
	if x != nil {
		if x, ok := x.Message.(*StreamResponse_Drain); ok {
			return x.Drain
		}
	}
	return nil
}

func (x *StreamResponse) GetServers() *Servers {
	if x != nil {
		if x, ok := x.Message.(*StreamResponse_Servers); ok {
			return x.Servers
		}
	}
	return nil
}

func (x *StreamResponse) GetBucketQuery() *BucketQuery {
	if x != nil {
		if x, ok := x.Message.(*StreamResponse_BucketQuery); ok {
			return x.BucketQuery
		}
	}
	return nil
}

func (x *StreamResponse) GetZstd() []byte {
	if x != nil {
		if x, ok := x.Message.(*StreamResponse_Zstd); ok {
			return x.Zstd
		}
	}
	return nil
}

func (x *StreamResponse) GetDigests() *Digests {
	if x != nil {
		if x, ok := x.Message.(*StreamResponse_Digests); ok {
			return x.Digests
		}
	}
	return nil
}

func (x *StreamResponse) GetDigestQuery() *DigestQuery {
	if x != nil {
		if x, ok := x.Message.(*StreamResponse_DigestQuery); ok {
			return x.DigestQuery
		}
	}
	return nil
}

type isStreamResponse_Message interface {
	isStreamResponse_Message()
}

type StreamResponse_Welcome struct {
	// The answer to Hello.
	Welcome *Welcome `protobuf:"bytes,1,opt,name=welcome,proto3,oneof"`
}

type StreamResponse_ShardUpdate struct {
	// A change of one shard.
	ShardUpdate *ShardUpdate `protobuf:"bytes,2,opt,name=shard_update,json=shardUpdate,proto3,oneof"`
}

type StreamResponse_NodeUpdate struct {
	// The agent's own Node.
	NodeUpdate *NodeUpdate `protobuf:"bytes,3,opt,name=node_update,json=nodeUpdate,proto3,oneof"`
}

type StreamResponse_InSync struct {
	// The end of the initial state.
	InSync *InSync `protobuf:"bytes,4,opt,name=in_sync,json=inSync,proto3,oneof"`
}

type StreamResponse_Heartbeat struct {
	// A sign of life, with the digest of the state.
	Heartbeat *Heartbeat `protobuf:"bytes,5,opt,name=heartbeat,proto3,oneof"`
}

type StreamResponse_Drain struct {
	// The server is about to close the stream.
	Drain *Drain `protobuf:"bytes,6,opt,name=drain,proto3,oneof"`
}

type StreamResponse_Servers struct {
	// The other servers that the client may connect to.
	Servers *Servers `protobuf:"bytes,7,opt,name=servers,proto3,oneof"`
}

type StreamResponse_BucketQuery struct {
	// A request for digests of buckets.
	BucketQuery *BucketQuery `protobuf:"bytes,8,opt,name=bucket_query,json=bucketQuery,proto3,oneof"`
}

type StreamResponse_Zstd struct {
	// A StreamResponse compressed with zstd (RFC 8878). Only clients with CAPABILITY_ZSTD get it.
	Zstd []byte `protobuf:"bytes,9,opt,name=zstd,proto3,oneof"`
}

type StreamResponse_Digests struct {
	// The answer to the client's DigestQuery.
	Digests *Digests `protobuf:"bytes,10,opt,name=digests,proto3,oneof"`
}

type StreamResponse_DigestQuery struct {
	// A request for the digests of all shards, before InSync. Only clients with CAPABILITY_BUCKETS
	// get it.
	DigestQuery *DigestQuery `protobuf:"bytes,11,opt,name=digest_query,json=digestQuery,proto3,oneof"`
}

func (*StreamResponse_Welcome) isStreamResponse_Message() {}

func (*StreamResponse_ShardUpdate) isStreamResponse_Message() {}

func (*StreamResponse_NodeUpdate) isStreamResponse_Message() {}

func (*StreamResponse_InSync) isStreamResponse_Message() {}

func (*StreamResponse_Heartbeat) isStreamResponse_Message() {}

func (*StreamResponse_Drain) isStreamResponse_Message() {}

func (*StreamResponse_Servers) isStreamResponse_Message() {}

func (*StreamResponse_BucketQuery) isStreamResponse_Message() {}

func (*StreamResponse_Zstd) isStreamResponse_Message() {}

func (*StreamResponse_Digests) isStreamResponse_Message() {}

func (*StreamResponse_DigestQuery) isStreamResponse_Message() {}

// Hello says who the client is and what it already holds.
type Hello struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The name of the Node that this client serves. It must be the Node that the client's credentials
	// name. It is empty for a relay, and for an observer that follows no Node.
	NodeName string `protobuf:"bytes,1,opt,name=node_name,json=nodeName,proto3" json:"node_name,omitempty"`
	// The version of the client's software, for operators.
	ClientVersion string `protobuf:"bytes,2,opt,name=client_version,json=clientVersion,proto3" json:"client_version,omitempty"`
	// How the client programs its kernel, such as "iptables" or "printer", for operators.
	Programmer string `protobuf:"bytes,3,opt,name=programmer,proto3" json:"programmer,omitempty"`
	// The epoch that `sequences` belong to; 0 if the client holds nothing.
	Epoch uint64 `protobuf:"varint,4,opt,name=epoch,proto3" json:"epoch,omitempty"`
	// The client's position in each shard, by shard number. 0 means that the client has no position
	// in the shard. The list is empty if the client holds nothing. If `epoch` is still the server's,
	// the server continues from these positions. For shards where it cannot, the server compares
	// digests: first that of the state, then those of the shards, and then those of buckets. It asks
	// the client for the digests of shards and buckets.
	Sequences []uint64 `protobuf:"varint,5,rep,packed,name=sequences,proto3" json:"sequences,omitempty"`
	// The digest of the state that the client holds; empty or zero if it holds nothing.
	Digest []byte `protobuf:"bytes,6,opt,name=digest,proto3" json:"digest,omitempty"`
	// The highest resource versions that the client has seen; absent if it has seen none. A server
	// that is behind them does not send the client back in time.
	ResourceVersions *ResourceVersions `protobuf:"bytes,7,opt,name=resource_versions,json=resourceVersions,proto3" json:"resource_versions,omitempty"`
	// What the client is.
	Kind ClientKind `protobuf:"varint,8,opt,name=kind,proto3,enum=slicecast.v1.ClientKind" json:"kind,omitempty"`
	// What the client understands beyond the first version of this API.
	Capabilities []Capability `protobuf:"varint,9,rep,packed,name=capabilities,proto3,enum=slicecast.v1.Capability" json:"capabilities,omitempty"`
	// The hash of the byte 0x84 and the versions of all Nodes that a relay holds, in ascending order.
	// Only a relay sets it. If the server's Nodes have another hash, the server sends all Nodes and
	// says so in InSync.
	NodesDigest []byte `protobuf:"bytes,10,opt,name=nodes_digest,json=nodesDigest,proto3" json:"nodes_digest,omitempty"`
	// The client only asks whether the server would serve it, and whether the server is stale. The
	// server sends Welcome and ends the stream. What the client holds need not be set. A server that
	// does not know this field goes on with the stream, so the client ends it after Welcome.
	Probe bool `protobuf:"varint,11,opt,name=probe,proto3" json:"probe,omitempty"`
	// The cluster of the content that the client holds; see Welcome.cluster. If it is another one
	// than the server's, resource_versions mean nothing.
	Cluster       int64 `protobuf:"varint,12,opt,name=cluster,proto3" json:"cluster,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *Hello) Reset() {
	*x = Hello{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[2]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *Hello) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*Hello) ProtoMessage() {}

func (x *Hello) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[2]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use Hello.ProtoReflect.Descriptor instead.
func (*Hello) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{2}
}

func (x *Hello) GetNodeName() string {
	if x != nil {
		return x.NodeName
	}
	return ""
}

func (x *Hello) GetClientVersion() string {
	if x != nil {
		return x.ClientVersion
	}
	return ""
}

func (x *Hello) GetProgrammer() string {
	if x != nil {
		return x.Programmer
	}
	return ""
}

func (x *Hello) GetEpoch() uint64 {
	if x != nil {
		return x.Epoch
	}
	return 0
}

func (x *Hello) GetSequences() []uint64 {
	if x != nil {
		return x.Sequences
	}
	return nil
}

func (x *Hello) GetDigest() []byte {
	if x != nil {
		return x.Digest
	}
	return nil
}

func (x *Hello) GetResourceVersions() *ResourceVersions {
	if x != nil {
		return x.ResourceVersions
	}
	return nil
}

func (x *Hello) GetKind() ClientKind {
	if x != nil {
		return x.Kind
	}
	return ClientKind_CLIENT_KIND_UNSPECIFIED
}

func (x *Hello) GetCapabilities() []Capability {
	if x != nil {
		return x.Capabilities
	}
	return nil
}

func (x *Hello) GetNodesDigest() []byte {
	if x != nil {
		return x.NodesDigest
	}
	return nil
}

func (x *Hello) GetProbe() bool {
	if x != nil {
		return x.Probe
	}
	return false
}

func (x *Hello) GetCluster() int64 {
	if x != nil {
		return x.Cluster
	}
	return 0
}

// ResourceVersions are Kubernetes resourceVersions, one for each kind that has a watch of its own.
// Only those from servers of the same cluster can be compared.
type ResourceVersions struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The highest resource version of Services; 0 means none.
	Services uint64 `protobuf:"varint,1,opt,name=services,proto3" json:"services,omitempty"`
	// The highest resource version of EndpointSlices; 0 means none.
	Slices uint64 `protobuf:"varint,2,opt,name=slices,proto3" json:"slices,omitempty"`
	// The highest resource version of Nodes; 0 means none.
	Nodes         uint64 `protobuf:"varint,3,opt,name=nodes,proto3" json:"nodes,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *ResourceVersions) Reset() {
	*x = ResourceVersions{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[3]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *ResourceVersions) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*ResourceVersions) ProtoMessage() {}

func (x *ResourceVersions) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[3]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use ResourceVersions.ProtoReflect.Descriptor instead.
func (*ResourceVersions) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{3}
}

func (x *ResourceVersions) GetServices() uint64 {
	if x != nil {
		return x.Services
	}
	return 0
}

func (x *ResourceVersions) GetSlices() uint64 {
	if x != nil {
		return x.Slices
	}
	return 0
}

func (x *ResourceVersions) GetNodes() uint64 {
	if x != nil {
		return x.Nodes
	}
	return 0
}

// Ack says that the kernel holds everything up to these positions, except for objects with an
// unresolved Nack. Acks are coalesced, so one Ack may cover many updates.
type Ack struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The positions that have changed since the last Ack. If a shard's position has changed several
	// times, its positions are in ascending order.
	Positions []*ShardPosition `protobuf:"bytes,1,rep,name=positions,proto3" json:"positions,omitempty"`
	// The number of nodes that a relay serves, all of which hold these positions. The maximum is
	// 1,048,576. Only a relay sets it; 0 otherwise. A node that has come to the relay counts once it
	// has what was published before it came. If nodes have left since the last Ack, this is the
	// smallest number since then. Nodes that came in their place therefore do not count for what was
	// published before they came.
	Nodes         uint32 `protobuf:"varint,3,opt,name=nodes,proto3" json:"nodes,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *Ack) Reset() {
	*x = Ack{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[4]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *Ack) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*Ack) ProtoMessage() {}

func (x *Ack) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[4]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use Ack.ProtoReflect.Descriptor instead.
func (*Ack) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{4}
}

func (x *Ack) GetPositions() []*ShardPosition {
	if x != nil {
		return x.Positions
	}
	return nil
}

func (x *Ack) GetNodes() uint32 {
	if x != nil {
		return x.Nodes
	}
	return 0
}

// ShardPosition is a place in one shard's history.
type ShardPosition struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The shard number, below Welcome.shard_count.
	Shard uint32 `protobuf:"varint,1,opt,name=shard,proto3" json:"shard,omitempty"`
	// The sequence in the stream's epoch.
	Sequence uint64 `protobuf:"varint,2,opt,name=sequence,proto3" json:"sequence,omitempty"`
	// For how many milliseconds the kernel has had the position, rounded down. It is set in an Ack,
	// because an Ack may wait for others. A relay counts from when the last of its nodes had the
	// position.
	AgeMs uint32 `protobuf:"varint,3,opt,name=age_ms,json=ageMs,proto3" json:"age_ms,omitempty"`
	// The name of that last node in at most 253 bytes, for operators. It is set in an Ack from a
	// relay, and may be absent even there.
	LastNode      string `protobuf:"bytes,4,opt,name=last_node,json=lastNode,proto3" json:"last_node,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *ShardPosition) Reset() {
	*x = ShardPosition{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[5]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *ShardPosition) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*ShardPosition) ProtoMessage() {}

func (x *ShardPosition) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[5]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use ShardPosition.ProtoReflect.Descriptor instead.
func (*ShardPosition) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{5}
}

func (x *ShardPosition) GetShard() uint32 {
	if x != nil {
		return x.Shard
	}
	return 0
}

func (x *ShardPosition) GetSequence() uint64 {
	if x != nil {
		return x.Sequence
	}
	return 0
}

func (x *ShardPosition) GetAgeMs() uint32 {
	if x != nil {
		return x.AgeMs
	}
	return 0
}

func (x *ShardPosition) GetLastNode() string {
	if x != nil {
		return x.LastNode
	}
	return ""
}

// Nack says that one object could not be programmed. The client has programmed the rest, keeps what
// it had for this key, and goes on trying.
//
// A Nack of a node says that nothing in an IP family could be programmed. Until it is resolved, the
// client does not acknowledge positions of shards with objects of that family.
//
// A Nack with a `warning` is about a node, too, but nothing is missing from the node's kernel. A
// server that does not know the field takes it for a Nack of the node.
//
// A server remembers 1024 open Nacks of a relay and 256 of any other client.
type Nack struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The number of the shard that the object is in.
	Shard uint32 `protobuf:"varint,1,opt,name=shard,proto3" json:"shard,omitempty"`
	// The client's position in that shard when the programming failed.
	Sequence uint64 `protobuf:"varint,2,opt,name=sequence,proto3" json:"sequence,omitempty"`
	// The object.
	Key *ObjectKey `protobuf:"bytes,3,opt,name=key,proto3" json:"key,omitempty"`
	// What went wrong, for operators.
	Reason string `protobuf:"bytes,4,opt,name=reason,proto3" json:"reason,omitempty"`
	// The name of the node that could not program the object. Only a relay sets it.
	NodeName string `protobuf:"bytes,5,opt,name=node_name,json=nodeName,proto3" json:"node_name,omitempty"`
	// The object, which was nacked before, is programmed now. From a relay, it may also mean that the
	// node has left.
	Resolved bool `protobuf:"varint,6,opt,name=resolved,proto3" json:"resolved,omitempty"`
	// What should be mended on the node, although everything is programmed. 0 means that the Nack
	// reports a failure. With a warning, `key` is the node, and `reason` says what to do.
	Warning       NodeWarning `protobuf:"varint,7,opt,name=warning,proto3,enum=slicecast.v1.NodeWarning" json:"warning,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *Nack) Reset() {
	*x = Nack{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[6]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *Nack) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*Nack) ProtoMessage() {}

func (x *Nack) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[6]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use Nack.ProtoReflect.Descriptor instead.
func (*Nack) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{6}
}

func (x *Nack) GetShard() uint32 {
	if x != nil {
		return x.Shard
	}
	return 0
}

func (x *Nack) GetSequence() uint64 {
	if x != nil {
		return x.Sequence
	}
	return 0
}

func (x *Nack) GetKey() *ObjectKey {
	if x != nil {
		return x.Key
	}
	return nil
}

func (x *Nack) GetReason() string {
	if x != nil {
		return x.Reason
	}
	return ""
}

func (x *Nack) GetNodeName() string {
	if x != nil {
		return x.NodeName
	}
	return ""
}

func (x *Nack) GetResolved() bool {
	if x != nil {
		return x.Resolved
	}
	return false
}

func (x *Nack) GetWarning() NodeWarning {
	if x != nil {
		return x.Warning
	}
	return NodeWarning_NODE_WARNING_UNSPECIFIED
}

// Resync asks for state to be sent again, because a delta's base is missing or a digest differs.
type Resync struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The shard number.
	Shard uint32 `protobuf:"varint,1,opt,name=shard,proto3" json:"shard,omitempty"`
	// The objects to send again, as whole objects. The answer names objects that no longer exist as
	// removed. Empty means the whole shard.
	Keys []*ObjectKey `protobuf:"bytes,2,rep,name=keys,proto3" json:"keys,omitempty"`
	// Why the client asks, for operators.
	Reason string `protobuf:"bytes,3,opt,name=reason,proto3" json:"reason,omitempty"`
	// The digests of the client's buckets of the shard, by bucket number, 25 bytes each. They are set
	// if the client wants only the buckets that differ. The answer is then a ShardUpdate of these
	// buckets. Empty means that the client wants all of the shard.
	BucketDigests []byte `protobuf:"bytes,4,opt,name=bucket_digests,json=bucketDigests,proto3" json:"bucket_digests,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *Resync) Reset() {
	*x = Resync{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[7]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *Resync) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*Resync) ProtoMessage() {}

func (x *Resync) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[7]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use Resync.ProtoReflect.Descriptor instead.
func (*Resync) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{7}
}

func (x *Resync) GetShard() uint32 {
	if x != nil {
		return x.Shard
	}
	return 0
}

func (x *Resync) GetKeys() []*ObjectKey {
	if x != nil {
		return x.Keys
	}
	return nil
}

func (x *Resync) GetReason() string {
	if x != nil {
		return x.Reason
	}
	return ""
}

func (x *Resync) GetBucketDigests() []byte {
	if x != nil {
		return x.BucketDigests
	}
	return nil
}

// Welcome is the first message from the server.
type Welcome struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The life of the server's store; never 0. Sequences of another epoch mean nothing on this
	// stream.
	Epoch uint64 `protobuf:"varint,1,opt,name=epoch,proto3" json:"epoch,omitempty"`
	// The number of shards, a power of two.
	ShardCount uint32 `protobuf:"varint,2,opt,name=shard_count,json=shardCount,proto3" json:"shard_count,omitempty"`
	// The name of the server, for operators.
	ServerName string `protobuf:"bytes,3,opt,name=server_name,json=serverName,proto3" json:"server_name,omitempty"`
	// The version of the server's software, for operators.
	ServerVersion string `protobuf:"bytes,4,opt,name=server_version,json=serverVersion,proto3" json:"server_version,omitempty"`
	// The time between heartbeats in milliseconds. A client that receives nothing for three intervals
	// may consider the server dead.
	HeartbeatIntervalMs uint32 `protobuf:"varint,5,opt,name=heartbeat_interval_ms,json=heartbeatIntervalMs,proto3" json:"heartbeat_interval_ms,omitempty"`
	// The servers that the stream has passed through, by epoch. This server is the last one. A relay
	// that finds its own epoch here is part of a circle.
	Path []uint64 `protobuf:"fixed64,6,rep,packed,name=path,proto3" json:"path,omitempty"`
	// For how many milliseconds the server has been stale: its source may have missed changes for
	// that time. 0 means that the server is not stale.
	StaleMs uint64 `protobuf:"varint,7,opt,name=stale_ms,json=staleMs,proto3" json:"stale_ms,omitempty"`
	// What identifies the cluster: the creation time of the Service default/kubernetes, in seconds
	// since 1970. It survives a restore of etcd and differs between clusters. 0 means unknown. A
	// client that holds the state of another cluster does not use it.
	Cluster       int64 `protobuf:"varint,8,opt,name=cluster,proto3" json:"cluster,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *Welcome) Reset() {
	*x = Welcome{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[8]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *Welcome) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*Welcome) ProtoMessage() {}

func (x *Welcome) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[8]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use Welcome.ProtoReflect.Descriptor instead.
func (*Welcome) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{8}
}

func (x *Welcome) GetEpoch() uint64 {
	if x != nil {
		return x.Epoch
	}
	return 0
}

func (x *Welcome) GetShardCount() uint32 {
	if x != nil {
		return x.ShardCount
	}
	return 0
}

func (x *Welcome) GetServerName() string {
	if x != nil {
		return x.ServerName
	}
	return ""
}

func (x *Welcome) GetServerVersion() string {
	if x != nil {
		return x.ServerVersion
	}
	return ""
}

func (x *Welcome) GetHeartbeatIntervalMs() uint32 {
	if x != nil {
		return x.HeartbeatIntervalMs
	}
	return 0
}

func (x *Welcome) GetPath() []uint64 {
	if x != nil {
		return x.Path
	}
	return nil
}

func (x *Welcome) GetStaleMs() uint64 {
	if x != nil {
		return x.StaleMs
	}
	return 0
}

func (x *Welcome) GetCluster() int64 {
	if x != nil {
		return x.Cluster
	}
	return 0
}

// Servers lists the servers that the client may also connect to. It replaces the previous list.
type Servers struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The servers.
	Servers       []*Server `protobuf:"bytes,1,rep,name=servers,proto3" json:"servers,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *Servers) Reset() {
	*x = Servers{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[9]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *Servers) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*Servers) ProtoMessage() {}

func (x *Servers) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[9]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use Servers.ProtoReflect.Descriptor instead.
func (*Servers) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{9}
}

func (x *Servers) GetServers() []*Server {
	if x != nil {
		return x.Servers
	}
	return nil
}

// Server is one address of a server. It has no name, because a client knows which name the
// certificates of all servers have. So no server can lead the client to a server of another name.
type Server struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The address, as host:port.
	Address       string `protobuf:"bytes,1,opt,name=address,proto3" json:"address,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *Server) Reset() {
	*x = Server{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[10]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *Server) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*Server) ProtoMessage() {}

func (x *Server) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[10]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use Server.ProtoReflect.Descriptor instead.
func (*Server) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{10}
}

func (x *Server) GetAddress() string {
	if x != nil {
		return x.Address
	}
	return ""
}

// BucketQuery asks a client that resumes with other digests for the digests of its buckets. The
// client answers with one Resync for each shard, with bucket_digests. Until then, the server sends
// nothing of these shards.
type BucketQuery struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The shard numbers.
	Shards        []uint32 `protobuf:"varint,1,rep,packed,name=shards,proto3" json:"shards,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *BucketQuery) Reset() {
	*x = BucketQuery{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[11]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *BucketQuery) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*BucketQuery) ProtoMessage() {}

func (x *BucketQuery) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[11]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use BucketQuery.ProtoReflect.Descriptor instead.
func (*BucketQuery) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{11}
}

func (x *BucketQuery) GetShards() []uint32 {
	if x != nil {
		return x.Shards
	}
	return nil
}

// ShardUpdate is a change of one shard, or the whole shard.
type ShardUpdate struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The shard number.
	Shard uint32 `protobuf:"varint,1,opt,name=shard,proto3" json:"shard,omitempty"`
	// The update has all changes after this sequence. If it is 0 and the update is not full, the
	// update has all changes after `sequence` - 1.
	FromSequence uint64 `protobuf:"varint,2,opt,name=from_sequence,json=fromSequence,proto3" json:"from_sequence,omitempty"`
	// The update has all changes up to and including this sequence, which is the client's position
	// after the update.
	Sequence uint64 `protobuf:"varint,3,opt,name=sequence,proto3" json:"sequence,omitempty"`
	// The update has the whole shard. Objects that it does not name no longer exist.
	Full bool `protobuf:"varint,4,opt,name=full,proto3" json:"full,omitempty"`
	// Services that are new or have changed.
	Services []*Service `protobuf:"bytes,5,rep,name=services,proto3" json:"services,omitempty"`
	// Slices that are new, or have changed in more than their endpoints.
	Slices []*Slice `protobuf:"bytes,6,rep,name=slices,proto3" json:"slices,omitempty"`
	// Slices of which some endpoints have changed.
	SliceDeltas []*SliceDelta `protobuf:"bytes,7,rep,name=slice_deltas,json=sliceDeltas,proto3" json:"slice_deltas,omitempty"`
	// Objects that no longer exist in this shard. A Slice that is handed to another Service may be
	// removed here and come in another shard.
	Removed []*ObjectKey `protobuf:"bytes,8,rep,name=removed,proto3" json:"removed,omitempty"`
	// The resource version of Services that this update reflects; 0 if it changes no Service.
	ServicesResourceVersion uint64 `protobuf:"varint,9,opt,name=services_resource_version,json=servicesResourceVersion,proto3" json:"services_resource_version,omitempty"`
	// The resource version of EndpointSlices that this update reflects; 0 if it changes none.
	SlicesResourceVersion uint64 `protobuf:"varint,12,opt,name=slices_resource_version,json=slicesResourceVersion,proto3" json:"slices_resource_version,omitempty"`
	// More parts of this update follow, with the same shard and sequences. The client applies all
	// parts as one update. The full_buckets of the parts add up. A message has at most 16 MiB, and
	// few messages have more than 1 MiB.
	More bool `protobuf:"varint,10,opt,name=more,proto3" json:"more,omitempty"`
	// The buckets that the update has whole. Objects in these buckets that the update does not name
	// no longer exist.
	FullBuckets   []uint32 `protobuf:"varint,11,rep,packed,name=full_buckets,json=fullBuckets,proto3" json:"full_buckets,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *ShardUpdate) Reset() {
	*x = ShardUpdate{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[12]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *ShardUpdate) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*ShardUpdate) ProtoMessage() {}

func (x *ShardUpdate) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[12]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use ShardUpdate.ProtoReflect.Descriptor instead.
func (*ShardUpdate) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{12}
}

func (x *ShardUpdate) GetShard() uint32 {
	if x != nil {
		return x.Shard
	}
	return 0
}

func (x *ShardUpdate) GetFromSequence() uint64 {
	if x != nil {
		return x.FromSequence
	}
	return 0
}

func (x *ShardUpdate) GetSequence() uint64 {
	if x != nil {
		return x.Sequence
	}
	return 0
}

func (x *ShardUpdate) GetFull() bool {
	if x != nil {
		return x.Full
	}
	return false
}

func (x *ShardUpdate) GetServices() []*Service {
	if x != nil {
		return x.Services
	}
	return nil
}

func (x *ShardUpdate) GetSlices() []*Slice {
	if x != nil {
		return x.Slices
	}
	return nil
}

func (x *ShardUpdate) GetSliceDeltas() []*SliceDelta {
	if x != nil {
		return x.SliceDeltas
	}
	return nil
}

func (x *ShardUpdate) GetRemoved() []*ObjectKey {
	if x != nil {
		return x.Removed
	}
	return nil
}

func (x *ShardUpdate) GetServicesResourceVersion() uint64 {
	if x != nil {
		return x.ServicesResourceVersion
	}
	return 0
}

func (x *ShardUpdate) GetSlicesResourceVersion() uint64 {
	if x != nil {
		return x.SlicesResourceVersion
	}
	return 0
}

func (x *ShardUpdate) GetMore() bool {
	if x != nil {
		return x.More
	}
	return false
}

func (x *ShardUpdate) GetFullBuckets() []uint32 {
	if x != nil {
		return x.FullBuckets
	}
	return nil
}

// NodeUpdate carries the client's own Node. To a relay, it carries any Node.
type NodeUpdate struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The Node; absent if the cluster has no Node of that name.
	Node *Node `protobuf:"bytes,1,opt,name=node,proto3" json:"node,omitempty"`
	// The name of the Node.
	Name string `protobuf:"bytes,2,opt,name=name,proto3" json:"name,omitempty"`
	// The resource version of Nodes that the update reflects; 0 means unknown.
	ResourceVersion uint64 `protobuf:"varint,3,opt,name=resource_version,json=resourceVersion,proto3" json:"resource_version,omitempty"`
	unknownFields   protoimpl.UnknownFields
	sizeCache       protoimpl.SizeCache
}

func (x *NodeUpdate) Reset() {
	*x = NodeUpdate{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[13]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *NodeUpdate) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*NodeUpdate) ProtoMessage() {}

func (x *NodeUpdate) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[13]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use NodeUpdate.ProtoReflect.Descriptor instead.
func (*NodeUpdate) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{13}
}

func (x *NodeUpdate) GetNode() *Node {
	if x != nil {
		return x.Node
	}
	return nil
}

func (x *NodeUpdate) GetName() string {
	if x != nil {
		return x.Name
	}
	return ""
}

func (x *NodeUpdate) GetResourceVersion() uint64 {
	if x != nil {
		return x.ResourceVersion
	}
	return 0
}

// InSync says that the client now has the server's whole state, as of these positions. A stream has
// one.
type InSync struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The position in every shard, by shard number, in the epoch of the Welcome.
	Sequences []uint64 `protobuf:"varint,1,rep,packed,name=sequences,proto3" json:"sequences,omitempty"`
	// The resource versions that the client has seen from now on. They are those that the state
	// reflects, unless the client holds the same state and has seen higher versions. Then they are
	// these, until the server has them, too, or sends Heartbeat.seen_versions.
	ResourceVersions *ResourceVersions `protobuf:"bytes,2,opt,name=resource_versions,json=resourceVersions,proto3" json:"resource_versions,omitempty"`
	// All Nodes were sent earlier on this stream, and other Nodes no longer exist. It is set only for
	// a relay.
	AllNodes      bool `protobuf:"varint,3,opt,name=all_nodes,json=allNodes,proto3" json:"all_nodes,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *InSync) Reset() {
	*x = InSync{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[14]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *InSync) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*InSync) ProtoMessage() {}

func (x *InSync) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[14]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use InSync.ProtoReflect.Descriptor instead.
func (*InSync) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{14}
}

func (x *InSync) GetSequences() []uint64 {
	if x != nil {
		return x.Sequences
	}
	return nil
}

func (x *InSync) GetResourceVersions() *ResourceVersions {
	if x != nil {
		return x.ResourceVersions
	}
	return nil
}

func (x *InSync) GetAllNodes() bool {
	if x != nil {
		return x.AllNodes
	}
	return false
}

// Heartbeat shows that the server is alive, and lets the client find out that it holds something
// other than the server.
type Heartbeat struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The sum, modulo 2^64, of the positions of all shards. The client has everything that was sent
	// before the heartbeat. Therefore, if the client's own positions have the same sum, they are the
	// same positions.
	SequenceSum uint64 `protobuf:"varint,1,opt,name=sequence_sum,json=sequenceSum,proto3" json:"sequence_sum,omitempty"`
	// The digest of the state at these positions. A client that is at these positions and has another
	// digest asks with DigestQuery for the digests of the shards. It then asks with Resync for what
	// differs. `digest` and `sequence_sum` are empty if there is nothing to compare.
	Digest []byte `protobuf:"bytes,2,opt,name=digest,proto3" json:"digest,omitempty"`
	// The resource versions up to which everything was sent earlier on this stream. They are set only
	// for a relay, because the resource versions of an update say nothing about other shards. Between
	// heartbeats, a relay also gets this field alone.
	ResourceVersions *ResourceVersions `protobuf:"bytes,3,opt,name=resource_versions,json=resourceVersions,proto3" json:"resource_versions,omitempty"`
	// As in Welcome. It is set when the server has become stale, or is stale no longer, and is then
	// sent alone. Absent means that what the server said last on this stream still holds.
	StaleMs *uint64 `protobuf:"varint,4,opt,name=stale_ms,json=staleMs,proto3,oneof" json:"stale_ms,omitempty"`
	// The resource versions that the client has seen from now on. They may be lower than before: the
	// server has stopped waiting for the versions of the client's Hello after InSync, or its state
	// has gone back. They are sent alone.
	SeenVersions  *ResourceVersions `protobuf:"bytes,5,opt,name=seen_versions,json=seenVersions,proto3" json:"seen_versions,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *Heartbeat) Reset() {
	*x = Heartbeat{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[15]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *Heartbeat) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*Heartbeat) ProtoMessage() {}

func (x *Heartbeat) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[15]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use Heartbeat.ProtoReflect.Descriptor instead.
func (*Heartbeat) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{15}
}

func (x *Heartbeat) GetSequenceSum() uint64 {
	if x != nil {
		return x.SequenceSum
	}
	return 0
}

func (x *Heartbeat) GetDigest() []byte {
	if x != nil {
		return x.Digest
	}
	return nil
}

func (x *Heartbeat) GetResourceVersions() *ResourceVersions {
	if x != nil {
		return x.ResourceVersions
	}
	return nil
}

func (x *Heartbeat) GetStaleMs() uint64 {
	if x != nil && x.StaleMs != nil {
		return *x.StaleMs
	}
	return 0
}

func (x *Heartbeat) GetSeenVersions() *ResourceVersions {
	if x != nil {
		return x.SeenVersions
	}
	return nil
}

// DigestQuery asks for the digests of all shards. The answer is Digests.
//
// When a stream begins, the server asks a client that holds something other than the server. Until
// it has the answer, the server sends nothing of the shards in question.
//
// A client asks when a heartbeat shows that it holds something other than the server.
type DigestQuery struct {
	state         protoimpl.MessageState `protogen:"open.v1"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *DigestQuery) Reset() {
	*x = DigestQuery{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[16]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *DigestQuery) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*DigestQuery) ProtoMessage() {}

func (x *DigestQuery) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[16]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use DigestQuery.ProtoReflect.Descriptor instead.
func (*DigestQuery) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{16}
}

// Digests has the digests of all shards at some positions. If a server sends it, the server has
// already brought the client to these positions.
type Digests struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The position of every shard, by shard number. Only a server sets it.
	Sequences []uint64 `protobuf:"varint,1,rep,packed,name=sequences,proto3" json:"sequences,omitempty"`
	// The digest of every shard at that position, by shard number, 25 bytes each. A client that is at
	// the same position and has another digest asks with Resync for what differs in the shard.
	Digests       []byte `protobuf:"bytes,2,opt,name=digests,proto3" json:"digests,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *Digests) Reset() {
	*x = Digests{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[17]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *Digests) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*Digests) ProtoMessage() {}

func (x *Digests) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[17]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use Digests.ProtoReflect.Descriptor instead.
func (*Digests) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{17}
}

func (x *Digests) GetSequences() []uint64 {
	if x != nil {
		return x.Sequences
	}
	return nil
}

func (x *Digests) GetDigests() []byte {
	if x != nil {
		return x.Digests
	}
	return nil
}

// Drain says that the server is going away. The client connects to another server, or to this
// address again after the delay, and resumes. Nothing that the client holds becomes invalid.
type Drain struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The time in milliseconds within which the client should reconnect. The client chooses the
	// moment at random.
	ReconnectWithinMs uint32 `protobuf:"varint,1,opt,name=reconnect_within_ms,json=reconnectWithinMs,proto3" json:"reconnect_within_ms,omitempty"`
	unknownFields     protoimpl.UnknownFields
	sizeCache         protoimpl.SizeCache
}

func (x *Drain) Reset() {
	*x = Drain{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[18]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *Drain) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*Drain) ProtoMessage() {}

func (x *Drain) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[18]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use Drain.ProtoReflect.Descriptor instead.
func (*Drain) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{18}
}

func (x *Drain) GetReconnectWithinMs() uint32 {
	if x != nil {
		return x.ReconnectWithinMs
	}
	return 0
}

// ObjectKey names an object.
type ObjectKey struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The kind of the object.
	Kind ObjectKind `protobuf:"varint,1,opt,name=kind,proto3,enum=slicecast.v1.ObjectKind" json:"kind,omitempty"`
	// The namespace of the object.
	Namespace string `protobuf:"bytes,2,opt,name=namespace,proto3" json:"namespace,omitempty"`
	// The name of the object.
	Name          string `protobuf:"bytes,3,opt,name=name,proto3" json:"name,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *ObjectKey) Reset() {
	*x = ObjectKey{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[19]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *ObjectKey) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*ObjectKey) ProtoMessage() {}

func (x *ObjectKey) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[19]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use ObjectKey.ProtoReflect.Descriptor instead.
func (*ObjectKey) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{19}
}

func (x *ObjectKey) GetKind() ObjectKind {
	if x != nil {
		return x.Kind
	}
	return ObjectKind_OBJECT_KIND_UNSPECIFIED
}

func (x *ObjectKey) GetNamespace() string {
	if x != nil {
		return x.Namespace
	}
	return ""
}

func (x *ObjectKey) GetName() string {
	if x != nil {
		return x.Name
	}
	return ""
}

// Service is what a node needs of a Service.
type Service struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The namespace.
	Namespace string `protobuf:"bytes,1,opt,name=namespace,proto3" json:"namespace,omitempty"`
	// The name.
	Name string `protobuf:"bytes,2,opt,name=name,proto3" json:"name,omitempty"`
	// The hash of the content, 25 bytes.
	Version []byte `protobuf:"bytes,3,opt,name=version,proto3" json:"version,omitempty"`
	// The type.
	Type ServiceType `protobuf:"varint,4,opt,name=type,proto3,enum=slicecast.v1.ServiceType" json:"type,omitempty"`
	// The cluster IPs, at most one of each IP family.
	ClusterIps []string `protobuf:"bytes,5,rep,name=cluster_ips,json=clusterIps,proto3" json:"cluster_ips,omitempty"`
	// The external IPs.
	ExternalIps []string `protobuf:"bytes,6,rep,name=external_ips,json=externalIps,proto3" json:"external_ips,omitempty"`
	// The load balancer's ingress points that have an IP.
	LoadBalancerIngress []*LoadBalancerIngress `protobuf:"bytes,7,rep,name=load_balancer_ingress,json=loadBalancerIngress,proto3" json:"load_balancer_ingress,omitempty"`
	// The ports.
	Ports []*ServicePort `protobuf:"bytes,8,rep,name=ports,proto3" json:"ports,omitempty"`
	// The policy for traffic to cluster IPs.
	InternalTrafficPolicy TrafficPolicy `protobuf:"varint,9,opt,name=internal_traffic_policy,json=internalTrafficPolicy,proto3,enum=slicecast.v1.TrafficPolicy" json:"internal_traffic_policy,omitempty"`
	// The policy for traffic to all other addresses of the Service.
	ExternalTrafficPolicy TrafficPolicy `protobuf:"varint,10,opt,name=external_traffic_policy,json=externalTrafficPolicy,proto3,enum=slicecast.v1.TrafficPolicy" json:"external_traffic_policy,omitempty"`
	// For how many seconds the traffic of a client IP stays with its endpoint (sessionAffinity
	// ClientIP); 0 means no affinity.
	ClientIpAffinitySeconds uint32 `protobuf:"varint,11,opt,name=client_ip_affinity_seconds,json=clientIpAffinitySeconds,proto3" json:"client_ip_affinity_seconds,omitempty"`
	// The ranges that may use the load-balancer IPs; empty means all addresses.
	LoadBalancerSourceRanges []string `protobuf:"bytes,12,rep,name=load_balancer_source_ranges,json=loadBalancerSourceRanges,proto3" json:"load_balancer_source_ranges,omitempty"`
	// The port of the node's health check for external load balancers; 0 means none.
	HealthCheckNodePort uint32 `protobuf:"varint,13,opt,name=health_check_node_port,json=healthCheckNodePort,proto3" json:"health_check_node_port,omitempty"`
	// trafficDistribution, as in Kubernetes; empty means none.
	TrafficDistribution string `protobuf:"bytes,14,opt,name=traffic_distribution,json=trafficDistribution,proto3" json:"traffic_distribution,omitempty"`
	// The creation time in seconds since 1970. It decides between Services that claim the same
	// address.
	CreationTimeSeconds int64 `protobuf:"varint,15,opt,name=creation_time_seconds,json=creationTimeSeconds,proto3" json:"creation_time_seconds,omitempty"`
	// The scheduler for agents that program IPVS, from the annotation slicecast.io/ipvs-scheduler.
	// Empty means the agent's own default. If an agent does not know the name, it nacks the Service
	// and serves it with its own default.
	IpvsScheduler string `protobuf:"bytes,16,opt,name=ipvs_scheduler,json=ipvsScheduler,proto3" json:"ipvs_scheduler,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *Service) Reset() {
	*x = Service{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[20]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *Service) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*Service) ProtoMessage() {}

func (x *Service) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[20]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use Service.ProtoReflect.Descriptor instead.
func (*Service) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{20}
}

func (x *Service) GetNamespace() string {
	if x != nil {
		return x.Namespace
	}
	return ""
}

func (x *Service) GetName() string {
	if x != nil {
		return x.Name
	}
	return ""
}

func (x *Service) GetVersion() []byte {
	if x != nil {
		return x.Version
	}
	return nil
}

func (x *Service) GetType() ServiceType {
	if x != nil {
		return x.Type
	}
	return ServiceType_SERVICE_TYPE_UNSPECIFIED
}

func (x *Service) GetClusterIps() []string {
	if x != nil {
		return x.ClusterIps
	}
	return nil
}

func (x *Service) GetExternalIps() []string {
	if x != nil {
		return x.ExternalIps
	}
	return nil
}

func (x *Service) GetLoadBalancerIngress() []*LoadBalancerIngress {
	if x != nil {
		return x.LoadBalancerIngress
	}
	return nil
}

func (x *Service) GetPorts() []*ServicePort {
	if x != nil {
		return x.Ports
	}
	return nil
}

func (x *Service) GetInternalTrafficPolicy() TrafficPolicy {
	if x != nil {
		return x.InternalTrafficPolicy
	}
	return TrafficPolicy_TRAFFIC_POLICY_UNSPECIFIED
}

func (x *Service) GetExternalTrafficPolicy() TrafficPolicy {
	if x != nil {
		return x.ExternalTrafficPolicy
	}
	return TrafficPolicy_TRAFFIC_POLICY_UNSPECIFIED
}

func (x *Service) GetClientIpAffinitySeconds() uint32 {
	if x != nil {
		return x.ClientIpAffinitySeconds
	}
	return 0
}

func (x *Service) GetLoadBalancerSourceRanges() []string {
	if x != nil {
		return x.LoadBalancerSourceRanges
	}
	return nil
}

func (x *Service) GetHealthCheckNodePort() uint32 {
	if x != nil {
		return x.HealthCheckNodePort
	}
	return 0
}

func (x *Service) GetTrafficDistribution() string {
	if x != nil {
		return x.TrafficDistribution
	}
	return ""
}

func (x *Service) GetCreationTimeSeconds() int64 {
	if x != nil {
		return x.CreationTimeSeconds
	}
	return 0
}

func (x *Service) GetIpvsScheduler() string {
	if x != nil {
		return x.IpvsScheduler
	}
	return ""
}

// LoadBalancerIngress is an ingress point of a Service's load balancer.
type LoadBalancerIngress struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The address.
	Ip string `protobuf:"bytes,1,opt,name=ip,proto3" json:"ip,omitempty"`
	// Nodes do not capture traffic to the address, because its ipMode is Proxy. False means that its
	// ipMode is VIP.
	ProxyMode     bool `protobuf:"varint,2,opt,name=proxy_mode,json=proxyMode,proto3" json:"proxy_mode,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *LoadBalancerIngress) Reset() {
	*x = LoadBalancerIngress{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[21]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *LoadBalancerIngress) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*LoadBalancerIngress) ProtoMessage() {}

func (x *LoadBalancerIngress) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[21]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use LoadBalancerIngress.ProtoReflect.Descriptor instead.
func (*LoadBalancerIngress) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{21}
}

func (x *LoadBalancerIngress) GetIp() string {
	if x != nil {
		return x.Ip
	}
	return ""
}

func (x *LoadBalancerIngress) GetProxyMode() bool {
	if x != nil {
		return x.ProxyMode
	}
	return false
}

// ServicePort is a port of a Service. It does not have the Service's targetPort, because traffic
// goes to the slice port with the same name and protocol.
type ServicePort struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The name; it may be empty.
	Name string `protobuf:"bytes,1,opt,name=name,proto3" json:"name,omitempty"`
	// The protocol.
	Protocol Protocol `protobuf:"varint,2,opt,name=protocol,proto3,enum=slicecast.v1.Protocol" json:"protocol,omitempty"`
	// The port on the Service's addresses.
	Port uint32 `protobuf:"varint,3,opt,name=port,proto3" json:"port,omitempty"`
	// The port on the node's addresses; 0 means none.
	NodePort      uint32 `protobuf:"varint,4,opt,name=node_port,json=nodePort,proto3" json:"node_port,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *ServicePort) Reset() {
	*x = ServicePort{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[22]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *ServicePort) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*ServicePort) ProtoMessage() {}

func (x *ServicePort) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[22]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use ServicePort.ProtoReflect.Descriptor instead.
func (*ServicePort) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{22}
}

func (x *ServicePort) GetName() string {
	if x != nil {
		return x.Name
	}
	return ""
}

func (x *ServicePort) GetProtocol() Protocol {
	if x != nil {
		return x.Protocol
	}
	return Protocol_PROTOCOL_UNSPECIFIED
}

func (x *ServicePort) GetPort() uint32 {
	if x != nil {
		return x.Port
	}
	return 0
}

func (x *ServicePort) GetNodePort() uint32 {
	if x != nil {
		return x.NodePort
	}
	return 0
}

// Slice is what a node needs of an EndpointSlice.
type Slice struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The namespace.
	Namespace string `protobuf:"bytes,1,opt,name=namespace,proto3" json:"namespace,omitempty"`
	// The name of the EndpointSlice.
	Name string `protobuf:"bytes,2,opt,name=name,proto3" json:"name,omitempty"`
	// The hash of the content, 25 bytes.
	Version []byte `protobuf:"bytes,3,opt,name=version,proto3" json:"version,omitempty"`
	// The name of the Service that the slice belongs to, from the label kubernetes.io/service-name.
	// The Service is in the same namespace.
	Service string `protobuf:"bytes,4,opt,name=service,proto3" json:"service,omitempty"`
	// The family of the addresses.
	AddressType AddressType `protobuf:"varint,5,opt,name=address_type,json=addressType,proto3,enum=slicecast.v1.AddressType" json:"address_type,omitempty"`
	// The ports, which are the same for all endpoints.
	Ports []*SlicePort `protobuf:"bytes,6,rep,name=ports,proto3" json:"ports,omitempty"`
	// The endpoints, in ascending order, each address once. All addresses are of the slice's family.
	Endpoints []*Endpoint `protobuf:"bytes,7,rep,name=endpoints,proto3" json:"endpoints,omitempty"`
	// The time of the change in the cluster that led to this state, in milliseconds since 1970, from
	// the annotation endpoints.kubernetes.io/last-change-trigger-time; 0 means unknown. It is not
	// part of the version.
	LastChangeTriggerTimeMs int64 `protobuf:"varint,8,opt,name=last_change_trigger_time_ms,json=lastChangeTriggerTimeMs,proto3" json:"last_change_trigger_time_ms,omitempty"`
	unknownFields           protoimpl.UnknownFields
	sizeCache               protoimpl.SizeCache
}

func (x *Slice) Reset() {
	*x = Slice{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[23]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *Slice) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*Slice) ProtoMessage() {}

func (x *Slice) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[23]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use Slice.ProtoReflect.Descriptor instead.
func (*Slice) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{23}
}

func (x *Slice) GetNamespace() string {
	if x != nil {
		return x.Namespace
	}
	return ""
}

func (x *Slice) GetName() string {
	if x != nil {
		return x.Name
	}
	return ""
}

func (x *Slice) GetVersion() []byte {
	if x != nil {
		return x.Version
	}
	return nil
}

func (x *Slice) GetService() string {
	if x != nil {
		return x.Service
	}
	return ""
}

func (x *Slice) GetAddressType() AddressType {
	if x != nil {
		return x.AddressType
	}
	return AddressType_ADDRESS_TYPE_UNSPECIFIED
}

func (x *Slice) GetPorts() []*SlicePort {
	if x != nil {
		return x.Ports
	}
	return nil
}

func (x *Slice) GetEndpoints() []*Endpoint {
	if x != nil {
		return x.Endpoints
	}
	return nil
}

func (x *Slice) GetLastChangeTriggerTimeMs() int64 {
	if x != nil {
		return x.LastChangeTriggerTimeMs
	}
	return 0
}

// SlicePort is a port of a Slice's endpoints.
type SlicePort struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The name; it may be empty.
	Name string `protobuf:"bytes,1,opt,name=name,proto3" json:"name,omitempty"`
	// The protocol.
	Protocol Protocol `protobuf:"varint,2,opt,name=protocol,proto3,enum=slicecast.v1.Protocol" json:"protocol,omitempty"`
	// The port on the endpoints.
	Port          uint32 `protobuf:"varint,3,opt,name=port,proto3" json:"port,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *SlicePort) Reset() {
	*x = SlicePort{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[24]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *SlicePort) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*SlicePort) ProtoMessage() {}

func (x *SlicePort) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[24]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use SlicePort.ProtoReflect.Descriptor instead.
func (*SlicePort) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{24}
}

func (x *SlicePort) GetName() string {
	if x != nil {
		return x.Name
	}
	return ""
}

func (x *SlicePort) GetProtocol() Protocol {
	if x != nil {
		return x.Protocol
	}
	return Protocol_PROTOCOL_UNSPECIFIED
}

func (x *SlicePort) GetPort() uint32 {
	if x != nil {
		return x.Port
	}
	return 0
}

// Endpoint is one address that serves a Service, or has served it.
type Endpoint struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The address.
	Address string `protobuf:"bytes,1,opt,name=address,proto3" json:"address,omitempty"`
	// The endpoint is ready for traffic. The server applies Kubernetes' default: if the EndpointSlice
	// does not set the condition, it is true.
	Ready bool `protobuf:"varint,2,opt,name=ready,proto3" json:"ready,omitempty"`
	// The endpoint is serving: it is ready, or would be if it were not terminating. If the
	// EndpointSlice does not set the condition, it is true.
	Serving bool `protobuf:"varint,3,opt,name=serving,proto3" json:"serving,omitempty"`
	// The endpoint is terminating.
	Terminating bool `protobuf:"varint,4,opt,name=terminating,proto3" json:"terminating,omitempty"`
	// The name of the Node that the endpoint is on. Empty means none: the endpoint is local to no
	// node.
	NodeName string `protobuf:"bytes,5,opt,name=node_name,json=nodeName,proto3" json:"node_name,omitempty"`
	// The zone that the endpoint is in; empty means unknown.
	Zone string `protobuf:"bytes,6,opt,name=zone,proto3" json:"zone,omitempty"`
	// The zones that should use the endpoint (hints.forZones).
	ZoneHints []string `protobuf:"bytes,7,rep,name=zone_hints,json=zoneHints,proto3" json:"zone_hints,omitempty"`
	// The Nodes that should use the endpoint (hints.forNodes).
	NodeHints     []string `protobuf:"bytes,8,rep,name=node_hints,json=nodeHints,proto3" json:"node_hints,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *Endpoint) Reset() {
	*x = Endpoint{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[25]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *Endpoint) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*Endpoint) ProtoMessage() {}

func (x *Endpoint) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[25]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use Endpoint.ProtoReflect.Descriptor instead.
func (*Endpoint) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{25}
}

func (x *Endpoint) GetAddress() string {
	if x != nil {
		return x.Address
	}
	return ""
}

func (x *Endpoint) GetReady() bool {
	if x != nil {
		return x.Ready
	}
	return false
}

func (x *Endpoint) GetServing() bool {
	if x != nil {
		return x.Serving
	}
	return false
}

func (x *Endpoint) GetTerminating() bool {
	if x != nil {
		return x.Terminating
	}
	return false
}

func (x *Endpoint) GetNodeName() string {
	if x != nil {
		return x.NodeName
	}
	return ""
}

func (x *Endpoint) GetZone() string {
	if x != nil {
		return x.Zone
	}
	return ""
}

func (x *Endpoint) GetZoneHints() []string {
	if x != nil {
		return x.ZoneHints
	}
	return nil
}

func (x *Endpoint) GetNodeHints() []string {
	if x != nil {
		return x.NodeHints
	}
	return nil
}

// SliceDelta changes endpoints of a Slice that the client holds.
type SliceDelta struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The namespace.
	Namespace string `protobuf:"bytes,1,opt,name=namespace,proto3" json:"namespace,omitempty"`
	// The name of the EndpointSlice.
	Name string `protobuf:"bytes,2,opt,name=name,proto3" json:"name,omitempty"`
	// The version of the slice that results, 25 bytes.
	Version []byte `protobuf:"bytes,3,opt,name=version,proto3" json:"version,omitempty"`
	// The endpoints that are new, or have changed in more than their conditions. They are whole, with
	// each address once.
	Endpoints []*Endpoint `protobuf:"bytes,4,rep,name=endpoints,proto3" json:"endpoints,omitempty"`
	// The endpoints of which only conditions have changed, with each index once.
	Conditions []*EndpointConditions `protobuf:"bytes,5,rep,name=conditions,proto3" json:"conditions,omitempty"`
	// The addresses of endpoints that no longer exist, each once.
	Removed []string `protobuf:"bytes,6,rep,name=removed,proto3" json:"removed,omitempty"`
	// The time of the change in the cluster, as in Slice, in milliseconds since 1970; 0 means
	// unknown.
	LastChangeTriggerTimeMs int64 `protobuf:"varint,7,opt,name=last_change_trigger_time_ms,json=lastChangeTriggerTimeMs,proto3" json:"last_change_trigger_time_ms,omitempty"`
	unknownFields           protoimpl.UnknownFields
	sizeCache               protoimpl.SizeCache
}

func (x *SliceDelta) Reset() {
	*x = SliceDelta{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[26]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *SliceDelta) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*SliceDelta) ProtoMessage() {}

func (x *SliceDelta) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[26]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use SliceDelta.ProtoReflect.Descriptor instead.
func (*SliceDelta) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{26}
}

func (x *SliceDelta) GetNamespace() string {
	if x != nil {
		return x.Namespace
	}
	return ""
}

func (x *SliceDelta) GetName() string {
	if x != nil {
		return x.Name
	}
	return ""
}

func (x *SliceDelta) GetVersion() []byte {
	if x != nil {
		return x.Version
	}
	return nil
}

func (x *SliceDelta) GetEndpoints() []*Endpoint {
	if x != nil {
		return x.Endpoints
	}
	return nil
}

func (x *SliceDelta) GetConditions() []*EndpointConditions {
	if x != nil {
		return x.Conditions
	}
	return nil
}

func (x *SliceDelta) GetRemoved() []string {
	if x != nil {
		return x.Removed
	}
	return nil
}

func (x *SliceDelta) GetLastChangeTriggerTimeMs() int64 {
	if x != nil {
		return x.LastChangeTriggerTimeMs
	}
	return 0
}

// EndpointConditions changes the conditions of an endpoint.
type EndpointConditions struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The index of the endpoint, counted from 0, in the slice before the delta. The endpoints of the
	// slice are in ascending order of their addresses, compared as numbers.
	Index uint32 `protobuf:"varint,1,opt,name=index,proto3" json:"index,omitempty"`
	// As in Endpoint.
	Ready bool `protobuf:"varint,2,opt,name=ready,proto3" json:"ready,omitempty"`
	// As in Endpoint.
	Serving bool `protobuf:"varint,3,opt,name=serving,proto3" json:"serving,omitempty"`
	// As in Endpoint.
	Terminating   bool `protobuf:"varint,4,opt,name=terminating,proto3" json:"terminating,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *EndpointConditions) Reset() {
	*x = EndpointConditions{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[27]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *EndpointConditions) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*EndpointConditions) ProtoMessage() {}

func (x *EndpointConditions) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[27]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use EndpointConditions.ProtoReflect.Descriptor instead.
func (*EndpointConditions) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{27}
}

func (x *EndpointConditions) GetIndex() uint32 {
	if x != nil {
		return x.Index
	}
	return 0
}

func (x *EndpointConditions) GetReady() bool {
	if x != nil {
		return x.Ready
	}
	return false
}

func (x *EndpointConditions) GetServing() bool {
	if x != nil {
		return x.Serving
	}
	return false
}

func (x *EndpointConditions) GetTerminating() bool {
	if x != nil {
		return x.Terminating
	}
	return false
}

// Node is what a node needs to know about itself and its cluster.
type Node struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The name.
	Name string `protobuf:"bytes,1,opt,name=name,proto3" json:"name,omitempty"`
	// The labels.
	Labels map[string]string `protobuf:"bytes,2,rep,name=labels,proto3" json:"labels,omitempty" protobuf_key:"bytes,1,opt,name=key" protobuf_val:"bytes,2,opt,name=value"`
	// The internal IPs and then the external IPs, in the order of the Node's status. The first one of
	// an IP family is the node's primary address of that family.
	Addresses []string `protobuf:"bytes,3,rep,name=addresses,proto3" json:"addresses,omitempty"`
	// The pod CIDRs.
	PodCidrs []string `protobuf:"bytes,4,rep,name=pod_cidrs,json=podCidrs,proto3" json:"pod_cidrs,omitempty"`
	// The Node object is being deleted.
	Deleting bool `protobuf:"varint,5,opt,name=deleting,proto3" json:"deleting,omitempty"`
	// The cluster autoscaler has tainted the Node for deletion (ToBeDeletedByClusterAutoscaler).
	TaintedForDeletion bool `protobuf:"varint,6,opt,name=tainted_for_deletion,json=taintedForDeletion,proto3" json:"tainted_for_deletion,omitempty"`
	// The ranges of the cluster's cluster IPs, from its ServiceCIDRs. They may overlap. Empty means
	// unknown.
	ServiceCidrs  []string `protobuf:"bytes,7,rep,name=service_cidrs,json=serviceCidrs,proto3" json:"service_cidrs,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *Node) Reset() {
	*x = Node{}
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[28]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *Node) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*Node) ProtoMessage() {}

func (x *Node) ProtoReflect() protoreflect.Message {
	mi := &file_slicecast_v1_slicecast_proto_msgTypes[28]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use Node.ProtoReflect.Descriptor instead.
func (*Node) Descriptor() ([]byte, []int) {
	return file_slicecast_v1_slicecast_proto_rawDescGZIP(), []int{28}
}

func (x *Node) GetName() string {
	if x != nil {
		return x.Name
	}
	return ""
}

func (x *Node) GetLabels() map[string]string {
	if x != nil {
		return x.Labels
	}
	return nil
}

func (x *Node) GetAddresses() []string {
	if x != nil {
		return x.Addresses
	}
	return nil
}

func (x *Node) GetPodCidrs() []string {
	if x != nil {
		return x.PodCidrs
	}
	return nil
}

func (x *Node) GetDeleting() bool {
	if x != nil {
		return x.Deleting
	}
	return false
}

func (x *Node) GetTaintedForDeletion() bool {
	if x != nil {
		return x.TaintedForDeletion
	}
	return false
}

func (x *Node) GetServiceCidrs() []string {
	if x != nil {
		return x.ServiceCidrs
	}
	return nil
}

var File_slicecast_v1_slicecast_proto protoreflect.FileDescriptor

const file_slicecast_v1_slicecast_proto_rawDesc = "" +
	"\n" +
	"\x1cslicecast/v1/slicecast.proto\x12\fslicecast.v1\"\xbb\x02\n" +
	"\rStreamRequest\x12+\n" +
	"\x05hello\x18\x01 \x01(\v2\x13.slicecast.v1.HelloH\x00R\x05hello\x12%\n" +
	"\x03ack\x18\x02 \x01(\v2\x11.slicecast.v1.AckH\x00R\x03ack\x12(\n" +
	"\x04nack\x18\x03 \x01(\v2\x12.slicecast.v1.NackH\x00R\x04nack\x12.\n" +
	"\x06resync\x18\x04 \x01(\v2\x14.slicecast.v1.ResyncH\x00R\x06resync\x12>\n" +
	"\fdigest_query\x18\x05 \x01(\v2\x19.slicecast.v1.DigestQueryH\x00R\vdigestQuery\x121\n" +
	"\adigests\x18\x06 \x01(\v2\x15.slicecast.v1.DigestsH\x00R\adigestsB\t\n" +
	"\amessage\"\xde\x04\n" +
	"\x0eStreamResponse\x121\n" +
	"\awelcome\x18\x01 \x01(\v2\x15.slicecast.v1.WelcomeH\x00R\awelcome\x12>\n" +
	"\fshard_update\x18\x02 \x01(\v2\x19.slicecast.v1.ShardUpdateH\x00R\vshardUpdate\x12;\n" +
	"\vnode_update\x18\x03 \x01(\v2\x18.slicecast.v1.NodeUpdateH\x00R\n" +
	"nodeUpdate\x12/\n" +
	"\ain_sync\x18\x04 \x01(\v2\x14.slicecast.v1.InSyncH\x00R\x06inSync\x127\n" +
	"\theartbeat\x18\x05 \x01(\v2\x17.slicecast.v1.HeartbeatH\x00R\theartbeat\x12+\n" +
	"\x05drain\x18\x06 \x01(\v2\x13.slicecast.v1.DrainH\x00R\x05drain\x121\n" +
	"\aservers\x18\a \x01(\v2\x15.slicecast.v1.ServersH\x00R\aservers\x12>\n" +
	"\fbucket_query\x18\b \x01(\v2\x19.slicecast.v1.BucketQueryH\x00R\vbucketQuery\x12\x14\n" +
	"\x04zstd\x18\t \x01(\fH\x00R\x04zstd\x121\n" +
	"\adigests\x18\n" +
	" \x01(\v2\x15.slicecast.v1.DigestsH\x00R\adigests\x12>\n" +
	"\fdigest_query\x18\v \x01(\v2\x19.slicecast.v1.DigestQueryH\x00R\vdigestQueryB\t\n" +
	"\amessage\"\xc3\x03\n" +
	"\x05Hello\x12\x1b\n" +
	"\tnode_name\x18\x01 \x01(\tR\bnodeName\x12%\n" +
	"\x0eclient_version\x18\x02 \x01(\tR\rclientVersion\x12\x1e\n" +
	"\n" +
	"programmer\x18\x03 \x01(\tR\n" +
	"programmer\x12\x14\n" +
	"\x05epoch\x18\x04 \x01(\x04R\x05epoch\x12\x1c\n" +
	"\tsequences\x18\x05 \x03(\x04R\tsequences\x12\x16\n" +
	"\x06digest\x18\x06 \x01(\fR\x06digest\x12K\n" +
	"\x11resource_versions\x18\a \x01(\v2\x1e.slicecast.v1.ResourceVersionsR\x10resourceVersions\x12,\n" +
	"\x04kind\x18\b \x01(\x0e2\x18.slicecast.v1.ClientKindR\x04kind\x12<\n" +
	"\fcapabilities\x18\t \x03(\x0e2\x18.slicecast.v1.CapabilityR\fcapabilities\x12!\n" +
	"\fnodes_digest\x18\n" +
	" \x01(\fR\vnodesDigest\x12\x14\n" +
	"\x05probe\x18\v \x01(\bR\x05probe\x12\x18\n" +
	"\acluster\x18\f \x01(\x03R\acluster\"\\\n" +
	"\x10ResourceVersions\x12\x1a\n" +
	"\bservices\x18\x01 \x01(\x04R\bservices\x12\x16\n" +
	"\x06slices\x18\x02 \x01(\x04R\x06slices\x12\x14\n" +
	"\x05nodes\x18\x03 \x01(\x04R\x05nodes\"n\n" +
	"\x03Ack\x129\n" +
	"\tpositions\x18\x01 \x03(\v2\x1b.slicecast.v1.ShardPositionR\tpositions\x12\x14\n" +
	"\x05nodes\x18\x03 \x01(\rR\x05nodesJ\x04\b\x02\x10\x03R\x10nodes_programmed\"u\n" +
	"\rShardPosition\x12\x14\n" +
	"\x05shard\x18\x01 \x01(\rR\x05shard\x12\x1a\n" +
	"\bsequence\x18\x02 \x01(\x04R\bsequence\x12\x15\n" +
	"\x06age_ms\x18\x03 \x01(\rR\x05ageMs\x12\x1b\n" +
	"\tlast_node\x18\x04 \x01(\tR\blastNode\"\xe9\x01\n" +
	"\x04Nack\x12\x14\n" +
	"\x05shard\x18\x01 \x01(\rR\x05shard\x12\x1a\n" +
	"\bsequence\x18\x02 \x01(\x04R\bsequence\x12)\n" +
	"\x03key\x18\x03 \x01(\v2\x17.slicecast.v1.ObjectKeyR\x03key\x12\x16\n" +
	"\x06reason\x18\x04 \x01(\tR\x06reason\x12\x1b\n" +
	"\tnode_name\x18\x05 \x01(\tR\bnodeName\x12\x1a\n" +
	"\bresolved\x18\x06 \x01(\bR\bresolved\x123\n" +
	"\awarning\x18\a \x01(\x0e2\x19.slicecast.v1.NodeWarningR\awarning\"\x8a\x01\n" +
	"\x06Resync\x12\x14\n" +
	"\x05shard\x18\x01 \x01(\rR\x05shard\x12+\n" +
	"\x04keys\x18\x02 \x03(\v2\x17.slicecast.v1.ObjectKeyR\x04keys\x12\x16\n" +
	"\x06reason\x18\x03 \x01(\tR\x06reason\x12%\n" +
	"\x0ebucket_digests\x18\x04 \x01(\fR\rbucketDigests\"\x85\x02\n" +
	"\aWelcome\x12\x14\n" +
	"\x05epoch\x18\x01 \x01(\x04R\x05epoch\x12\x1f\n" +
	"\vshard_count\x18\x02 \x01(\rR\n" +
	"shardCount\x12\x1f\n" +
	"\vserver_name\x18\x03 \x01(\tR\n" +
	"serverName\x12%\n" +
	"\x0eserver_version\x18\x04 \x01(\tR\rserverVersion\x122\n" +
	"\x15heartbeat_interval_ms\x18\x05 \x01(\rR\x13heartbeatIntervalMs\x12\x12\n" +
	"\x04path\x18\x06 \x03(\x06R\x04path\x12\x19\n" +
	"\bstale_ms\x18\a \x01(\x04R\astaleMs\x12\x18\n" +
	"\acluster\x18\b \x01(\x03R\acluster\"9\n" +
	"\aServers\x12.\n" +
	"\aservers\x18\x01 \x03(\v2\x14.slicecast.v1.ServerR\aservers\"\"\n" +
	"\x06Server\x12\x18\n" +
	"\aaddress\x18\x01 \x01(\tR\aaddress\"%\n" +
	"\vBucketQuery\x12\x16\n" +
	"\x06shards\x18\x01 \x03(\rR\x06shards\"\xf3\x03\n" +
	"\vShardUpdate\x12\x14\n" +
	"\x05shard\x18\x01 \x01(\rR\x05shard\x12#\n" +
	"\rfrom_sequence\x18\x02 \x01(\x04R\ffromSequence\x12\x1a\n" +
	"\bsequence\x18\x03 \x01(\x04R\bsequence\x12\x12\n" +
	"\x04full\x18\x04 \x01(\bR\x04full\x121\n" +
	"\bservices\x18\x05 \x03(\v2\x15.slicecast.v1.ServiceR\bservices\x12+\n" +
	"\x06slices\x18\x06 \x03(\v2\x13.slicecast.v1.SliceR\x06slices\x12;\n" +
	"\fslice_deltas\x18\a \x03(\v2\x18.slicecast.v1.SliceDeltaR\vsliceDeltas\x121\n" +
	"\aremoved\x18\b \x03(\v2\x17.slicecast.v1.ObjectKeyR\aremoved\x12:\n" +
	"\x19services_resource_version\x18\t \x01(\x04R\x17servicesResourceVersion\x126\n" +
	"\x17slices_resource_version\x18\f \x01(\x04R\x15slicesResourceVersion\x12\x12\n" +
	"\x04more\x18\n" +
	" \x01(\bR\x04more\x12!\n" +
	"\ffull_buckets\x18\v \x03(\rR\vfullBuckets\"s\n" +
	"\n" +
	"NodeUpdate\x12&\n" +
	"\x04node\x18\x01 \x01(\v2\x12.slicecast.v1.NodeR\x04node\x12\x12\n" +
	"\x04name\x18\x02 \x01(\tR\x04name\x12)\n" +
	"\x10resource_version\x18\x03 \x01(\x04R\x0fresourceVersion\"\x90\x01\n" +
	"\x06InSync\x12\x1c\n" +
	"\tsequences\x18\x01 \x03(\x04R\tsequences\x12K\n" +
	"\x11resource_versions\x18\x02 \x01(\v2\x1e.slicecast.v1.ResourceVersionsR\x10resourceVersions\x12\x1b\n" +
	"\tall_nodes\x18\x03 \x01(\bR\ballNodes\"\x85\x02\n" +
	"\tHeartbeat\x12!\n" +
	"\fsequence_sum\x18\x01 \x01(\x04R\vsequenceSum\x12\x16\n" +
	"\x06digest\x18\x02 \x01(\fR\x06digest\x12K\n" +
	"\x11resource_versions\x18\x03 \x01(\v2\x1e.slicecast.v1.ResourceVersionsR\x10resourceVersions\x12\x1e\n" +
	"\bstale_ms\x18\x04 \x01(\x04H\x00R\astaleMs\x88\x01\x01\x12C\n" +
	"\rseen_versions\x18\x05 \x01(\v2\x1e.slicecast.v1.ResourceVersionsR\fseenVersionsB\v\n" +
	"\t_stale_ms\"\r\n" +
	"\vDigestQuery\"A\n" +
	"\aDigests\x12\x1c\n" +
	"\tsequences\x18\x01 \x03(\x04R\tsequences\x12\x18\n" +
	"\adigests\x18\x02 \x01(\fR\adigests\"7\n" +
	"\x05Drain\x12.\n" +
	"\x13reconnect_within_ms\x18\x01 \x01(\rR\x11reconnectWithinMs\"k\n" +
	"\tObjectKey\x12,\n" +
	"\x04kind\x18\x01 \x01(\x0e2\x18.slicecast.v1.ObjectKindR\x04kind\x12\x1c\n" +
	"\tnamespace\x18\x02 \x01(\tR\tnamespace\x12\x12\n" +
	"\x04name\x18\x03 \x01(\tR\x04name\"\xb9\x06\n" +
	"\aService\x12\x1c\n" +
	"\tnamespace\x18\x01 \x01(\tR\tnamespace\x12\x12\n" +
	"\x04name\x18\x02 \x01(\tR\x04name\x12\x18\n" +
	"\aversion\x18\x03 \x01(\fR\aversion\x12-\n" +
	"\x04type\x18\x04 \x01(\x0e2\x19.slicecast.v1.ServiceTypeR\x04type\x12\x1f\n" +
	"\vcluster_ips\x18\x05 \x03(\tR\n" +
	"clusterIps\x12!\n" +
	"\fexternal_ips\x18\x06 \x03(\tR\vexternalIps\x12U\n" +
	"\x15load_balancer_ingress\x18\a \x03(\v2!.slicecast.v1.LoadBalancerIngressR\x13loadBalancerIngress\x12/\n" +
	"\x05ports\x18\b \x03(\v2\x19.slicecast.v1.ServicePortR\x05ports\x12S\n" +
	"\x17internal_traffic_policy\x18\t \x01(\x0e2\x1b.slicecast.v1.TrafficPolicyR\x15internalTrafficPolicy\x12S\n" +
	"\x17external_traffic_policy\x18\n" +
	" \x01(\x0e2\x1b.slicecast.v1.TrafficPolicyR\x15externalTrafficPolicy\x12;\n" +
	"\x1aclient_ip_affinity_seconds\x18\v \x01(\rR\x17clientIpAffinitySeconds\x12=\n" +
	"\x1bload_balancer_source_ranges\x18\f \x03(\tR\x18loadBalancerSourceRanges\x123\n" +
	"\x16health_check_node_port\x18\r \x01(\rR\x13healthCheckNodePort\x121\n" +
	"\x14traffic_distribution\x18\x0e \x01(\tR\x13trafficDistribution\x122\n" +
	"\x15creation_time_seconds\x18\x0f \x01(\x03R\x13creationTimeSeconds\x12%\n" +
	"\x0eipvs_scheduler\x18\x10 \x01(\tR\ripvsScheduler\"D\n" +
	"\x13LoadBalancerIngress\x12\x0e\n" +
	"\x02ip\x18\x01 \x01(\tR\x02ip\x12\x1d\n" +
	"\n" +
	"proxy_mode\x18\x02 \x01(\bR\tproxyMode\"\x86\x01\n" +
	"\vServicePort\x12\x12\n" +
	"\x04name\x18\x01 \x01(\tR\x04name\x122\n" +
	"\bprotocol\x18\x02 \x01(\x0e2\x16.slicecast.v1.ProtocolR\bprotocol\x12\x12\n" +
	"\x04port\x18\x03 \x01(\rR\x04port\x12\x1b\n" +
	"\tnode_port\x18\x04 \x01(\rR\bnodePort\"\xce\x02\n" +
	"\x05Slice\x12\x1c\n" +
	"\tnamespace\x18\x01 \x01(\tR\tnamespace\x12\x12\n" +
	"\x04name\x18\x02 \x01(\tR\x04name\x12\x18\n" +
	"\aversion\x18\x03 \x01(\fR\aversion\x12\x18\n" +
	"\aservice\x18\x04 \x01(\tR\aservice\x12<\n" +
	"\faddress_type\x18\x05 \x01(\x0e2\x19.slicecast.v1.AddressTypeR\vaddressType\x12-\n" +
	"\x05ports\x18\x06 \x03(\v2\x17.slicecast.v1.SlicePortR\x05ports\x124\n" +
	"\tendpoints\x18\a \x03(\v2\x16.slicecast.v1.EndpointR\tendpoints\x12<\n" +
	"\x1blast_change_trigger_time_ms\x18\b \x01(\x03R\x17lastChangeTriggerTimeMs\"g\n" +
	"\tSlicePort\x12\x12\n" +
	"\x04name\x18\x01 \x01(\tR\x04name\x122\n" +
	"\bprotocol\x18\x02 \x01(\x0e2\x16.slicecast.v1.ProtocolR\bprotocol\x12\x12\n" +
	"\x04port\x18\x03 \x01(\rR\x04port\"\xe5\x01\n" +
	"\bEndpoint\x12\x18\n" +
	"\aaddress\x18\x01 \x01(\tR\aaddress\x12\x14\n" +
	"\x05ready\x18\x02 \x01(\bR\x05ready\x12\x18\n" +
	"\aserving\x18\x03 \x01(\bR\aserving\x12 \n" +
	"\vterminating\x18\x04 \x01(\bR\vterminating\x12\x1b\n" +
	"\tnode_name\x18\x05 \x01(\tR\bnodeName\x12\x12\n" +
	"\x04zone\x18\x06 \x01(\tR\x04zone\x12\x1d\n" +
	"\n" +
	"zone_hints\x18\a \x03(\tR\tzoneHints\x12\x1d\n" +
	"\n" +
	"node_hints\x18\b \x03(\tR\tnodeHints\"\xa8\x02\n" +
	"\n" +
	"SliceDelta\x12\x1c\n" +
	"\tnamespace\x18\x01 \x01(\tR\tnamespace\x12\x12\n" +
	"\x04name\x18\x02 \x01(\tR\x04name\x12\x18\n" +
	"\aversion\x18\x03 \x01(\fR\aversion\x124\n" +
	"\tendpoints\x18\x04 \x03(\v2\x16.slicecast.v1.EndpointR\tendpoints\x12@\n" +
	"\n" +
	"conditions\x18\x05 \x03(\v2 .slicecast.v1.EndpointConditionsR\n" +
	"conditions\x12\x18\n" +
	"\aremoved\x18\x06 \x03(\tR\aremoved\x12<\n" +
	"\x1blast_change_trigger_time_ms\x18\a \x01(\x03R\x17lastChangeTriggerTimeMs\"|\n" +
	"\x12EndpointConditions\x12\x14\n" +
	"\x05index\x18\x01 \x01(\rR\x05index\x12\x14\n" +
	"\x05ready\x18\x02 \x01(\bR\x05ready\x12\x18\n" +
	"\aserving\x18\x03 \x01(\bR\aserving\x12 \n" +
	"\vterminating\x18\x04 \x01(\bR\vterminating\"\xbb\x02\n" +
	"\x04Node\x12\x12\n" +
	"\x04name\x18\x01 \x01(\tR\x04name\x126\n" +
	"\x06labels\x18\x02 \x03(\v2\x1e.slicecast.v1.Node.LabelsEntryR\x06labels\x12\x1c\n" +
	"\taddresses\x18\x03 \x03(\tR\taddresses\x12\x1b\n" +
	"\tpod_cidrs\x18\x04 \x03(\tR\bpodCidrs\x12\x1a\n" +
	"\bdeleting\x18\x05 \x01(\bR\bdeleting\x120\n" +
	"\x14tainted_for_deletion\x18\x06 \x01(\bR\x12taintedForDeletion\x12#\n" +
	"\rservice_cidrs\x18\a \x03(\tR\fserviceCidrs\x1a9\n" +
	"\vLabelsEntry\x12\x10\n" +
	"\x03key\x18\x01 \x01(\tR\x03key\x12\x14\n" +
	"\x05value\x18\x02 \x01(\tR\x05value:\x028\x01*U\n" +
	"\n" +
	"Capability\x12\x1a\n" +
	"\x16CAPABILITY_UNSPECIFIED\x10\x00\x12\x13\n" +
	"\x0fCAPABILITY_ZSTD\x10\x01\x12\x16\n" +
	"\x12CAPABILITY_BUCKETS\x10\x02*q\n" +
	"\n" +
	"ClientKind\x12\x1b\n" +
	"\x17CLIENT_KIND_UNSPECIFIED\x10\x00\x12\x15\n" +
	"\x11CLIENT_KIND_AGENT\x10\x01\x12\x18\n" +
	"\x14CLIENT_KIND_OBSERVER\x10\x02\x12\x15\n" +
	"\x11CLIENT_KIND_RELAY\x10\x03*\xc8\x01\n" +
	"\vNodeWarning\x12\x1c\n" +
	"\x18NODE_WARNING_UNSPECIFIED\x10\x00\x12\x1f\n" +
	"\x1bNODE_WARNING_POD_RANGE_IPV4\x10\x01\x12\x1f\n" +
	"\x1bNODE_WARNING_POD_RANGE_IPV6\x10\x02\x12\x1b\n" +
	"\x17NODE_WARNING_KUBE_PROXY\x10\x03\x12\x1f\n" +
	"\x1bNODE_WARNING_KERNEL_DIFFERS\x10\x04\x12\x1b\n" +
	"\x17NODE_WARNING_NOT_SERVED\x10\x05*o\n" +
	"\n" +
	"ObjectKind\x12\x1b\n" +
	"\x17OBJECT_KIND_UNSPECIFIED\x10\x00\x12\x17\n" +
	"\x13OBJECT_KIND_SERVICE\x10\x01\x12\x15\n" +
	"\x11OBJECT_KIND_SLICE\x10\x02\x12\x14\n" +
	"\x10OBJECT_KIND_NODE\x10\x03*[\n" +
	"\bProtocol\x12\x18\n" +
	"\x14PROTOCOL_UNSPECIFIED\x10\x00\x12\x10\n" +
	"\fPROTOCOL_TCP\x10\x01\x12\x10\n" +
	"\fPROTOCOL_UDP\x10\x02\x12\x11\n" +
	"\rPROTOCOL_SCTP\x10\x03*\x84\x01\n" +
	"\vServiceType\x12\x1c\n" +
	"\x18SERVICE_TYPE_UNSPECIFIED\x10\x00\x12\x1b\n" +
	"\x17SERVICE_TYPE_CLUSTER_IP\x10\x01\x12\x1a\n" +
	"\x16SERVICE_TYPE_NODE_PORT\x10\x02\x12\x1e\n" +
	"\x1aSERVICE_TYPE_LOAD_BALANCER\x10\x03*e\n" +
	"\rTrafficPolicy\x12\x1e\n" +
	"\x1aTRAFFIC_POLICY_UNSPECIFIED\x10\x00\x12\x1a\n" +
	"\x16TRAFFIC_POLICY_CLUSTER\x10\x01\x12\x18\n" +
	"\x14TRAFFIC_POLICY_LOCAL\x10\x02*Y\n" +
	"\vAddressType\x12\x1c\n" +
	"\x18ADDRESS_TYPE_UNSPECIFIED\x10\x00\x12\x15\n" +
	"\x11ADDRESS_TYPE_IPV4\x10\x01\x12\x15\n" +
	"\x11ADDRESS_TYPE_IPV6\x10\x022^\n" +
	"\x13DistributionService\x12G\n" +
	"\x06Stream\x12\x1b.slicecast.v1.StreamRequest\x1a\x1c.slicecast.v1.StreamResponse(\x010\x01B?Z=github.com/slicecast/slicecast/proto/slicecast/v1;slicecastv1b\x06proto3"

var (
	file_slicecast_v1_slicecast_proto_rawDescOnce sync.Once
	file_slicecast_v1_slicecast_proto_rawDescData []byte
)

func file_slicecast_v1_slicecast_proto_rawDescGZIP() []byte {
	file_slicecast_v1_slicecast_proto_rawDescOnce.Do(func() {
		file_slicecast_v1_slicecast_proto_rawDescData = protoimpl.X.CompressGZIP(unsafe.Slice(unsafe.StringData(file_slicecast_v1_slicecast_proto_rawDesc), len(file_slicecast_v1_slicecast_proto_rawDesc)))
	})
	return file_slicecast_v1_slicecast_proto_rawDescData
}

var file_slicecast_v1_slicecast_proto_enumTypes = make([]protoimpl.EnumInfo, 8)
var file_slicecast_v1_slicecast_proto_msgTypes = make([]protoimpl.MessageInfo, 30)
var file_slicecast_v1_slicecast_proto_goTypes = []any{
	(Capability)(0),             // 0: slicecast.v1.Capability
	(ClientKind)(0),             // 1: slicecast.v1.ClientKind
	(NodeWarning)(0),            // 2: slicecast.v1.NodeWarning
	(ObjectKind)(0),             // 3: slicecast.v1.ObjectKind
	(Protocol)(0),               // 4: slicecast.v1.Protocol
	(ServiceType)(0),            // 5: slicecast.v1.ServiceType
	(TrafficPolicy)(0),          // 6: slicecast.v1.TrafficPolicy
	(AddressType)(0),            // 7: slicecast.v1.AddressType
	(*StreamRequest)(nil),       // 8: slicecast.v1.StreamRequest
	(*StreamResponse)(nil),      // 9: slicecast.v1.StreamResponse
	(*Hello)(nil),               // 10: slicecast.v1.Hello
	(*ResourceVersions)(nil),    // 11: slicecast.v1.ResourceVersions
	(*Ack)(nil),                 // 12: slicecast.v1.Ack
	(*ShardPosition)(nil),       // 13: slicecast.v1.ShardPosition
	(*Nack)(nil),                // 14: slicecast.v1.Nack
	(*Resync)(nil),              // 15: slicecast.v1.Resync
	(*Welcome)(nil),             // 16: slicecast.v1.Welcome
	(*Servers)(nil),             // 17: slicecast.v1.Servers
	(*Server)(nil),              // 18: slicecast.v1.Server
	(*BucketQuery)(nil),         // 19: slicecast.v1.BucketQuery
	(*ShardUpdate)(nil),         // 20: slicecast.v1.ShardUpdate
	(*NodeUpdate)(nil),          // 21: slicecast.v1.NodeUpdate
	(*InSync)(nil),              // 22: slicecast.v1.InSync
	(*Heartbeat)(nil),           // 23: slicecast.v1.Heartbeat
	(*DigestQuery)(nil),         // 24: slicecast.v1.DigestQuery
	(*Digests)(nil),             // 25: slicecast.v1.Digests
	(*Drain)(nil),               // 26: slicecast.v1.Drain
	(*ObjectKey)(nil),           // 27: slicecast.v1.ObjectKey
	(*Service)(nil),             // 28: slicecast.v1.Service
	(*LoadBalancerIngress)(nil), // 29: slicecast.v1.LoadBalancerIngress
	(*ServicePort)(nil),         // 30: slicecast.v1.ServicePort
	(*Slice)(nil),               // 31: slicecast.v1.Slice
	(*SlicePort)(nil),           // 32: slicecast.v1.SlicePort
	(*Endpoint)(nil),            // 33: slicecast.v1.Endpoint
	(*SliceDelta)(nil),          // 34: slicecast.v1.SliceDelta
	(*EndpointConditions)(nil),  // 35: slicecast.v1.EndpointConditions
	(*Node)(nil),                // 36: slicecast.v1.Node
	nil,                         // 37: slicecast.v1.Node.LabelsEntry
}
var file_slicecast_v1_slicecast_proto_depIdxs = []int32{
	10, // 0: slicecast.v1.StreamRequest.hello:type_name -> slicecast.v1.Hello
	12, // 1: slicecast.v1.StreamRequest.ack:type_name -> slicecast.v1.Ack
	14, // 2: slicecast.v1.StreamRequest.nack:type_name -> slicecast.v1.Nack
	15, // 3: slicecast.v1.StreamRequest.resync:type_name -> slicecast.v1.Resync
	24, // 4: slicecast.v1.StreamRequest.digest_query:type_name -> slicecast.v1.DigestQuery
	25, // 5: slicecast.v1.StreamRequest.digests:type_name -> slicecast.v1.Digests
	16, // 6: slicecast.v1.StreamResponse.welcome:type_name -> slicecast.v1.Welcome
	20, // 7: slicecast.v1.StreamResponse.shard_update:type_name -> slicecast.v1.ShardUpdate
	21, // 8: slicecast.v1.StreamResponse.node_update:type_name -> slicecast.v1.NodeUpdate
	22, // 9: slicecast.v1.StreamResponse.in_sync:type_name -> slicecast.v1.InSync
	23, // 10: slicecast.v1.StreamResponse.heartbeat:type_name -> slicecast.v1.Heartbeat
	26, // 11: slicecast.v1.StreamResponse.drain:type_name -> slicecast.v1.Drain
	17, // 12: slicecast.v1.StreamResponse.servers:type_name -> slicecast.v1.Servers
	19, // 13: slicecast.v1.StreamResponse.bucket_query:type_name -> slicecast.v1.BucketQuery
	25, // 14: slicecast.v1.StreamResponse.digests:type_name -> slicecast.v1.Digests
	24, // 15: slicecast.v1.StreamResponse.digest_query:type_name -> slicecast.v1.DigestQuery
	11, // 16: slicecast.v1.Hello.resource_versions:type_name -> slicecast.v1.ResourceVersions
	1,  // 17: slicecast.v1.Hello.kind:type_name -> slicecast.v1.ClientKind
	0,  // 18: slicecast.v1.Hello.capabilities:type_name -> slicecast.v1.Capability
	13, // 19: slicecast.v1.Ack.positions:type_name -> slicecast.v1.ShardPosition
	27, // 20: slicecast.v1.Nack.key:type_name -> slicecast.v1.ObjectKey
	2,  // 21: slicecast.v1.Nack.warning:type_name -> slicecast.v1.NodeWarning
	27, // 22: slicecast.v1.Resync.keys:type_name -> slicecast.v1.ObjectKey
	18, // 23: slicecast.v1.Servers.servers:type_name -> slicecast.v1.Server
	28, // 24: slicecast.v1.ShardUpdate.services:type_name -> slicecast.v1.Service
	31, // 25: slicecast.v1.ShardUpdate.slices:type_name -> slicecast.v1.Slice
	34, // 26: slicecast.v1.ShardUpdate.slice_deltas:type_name -> slicecast.v1.SliceDelta
	27, // 27: slicecast.v1.ShardUpdate.removed:type_name -> slicecast.v1.ObjectKey
	36, // 28: slicecast.v1.NodeUpdate.node:type_name -> slicecast.v1.Node
	11, // 29: slicecast.v1.InSync.resource_versions:type_name -> slicecast.v1.ResourceVersions
	11, // 30: slicecast.v1.Heartbeat.resource_versions:type_name -> slicecast.v1.ResourceVersions
	11, // 31: slicecast.v1.Heartbeat.seen_versions:type_name -> slicecast.v1.ResourceVersions
	3,  // 32: slicecast.v1.ObjectKey.kind:type_name -> slicecast.v1.ObjectKind
	5,  // 33: slicecast.v1.Service.type:type_name -> slicecast.v1.ServiceType
	29, // 34: slicecast.v1.Service.load_balancer_ingress:type_name -> slicecast.v1.LoadBalancerIngress
	30, // 35: slicecast.v1.Service.ports:type_name -> slicecast.v1.ServicePort
	6,  // 36: slicecast.v1.Service.internal_traffic_policy:type_name -> slicecast.v1.TrafficPolicy
	6,  // 37: slicecast.v1.Service.external_traffic_policy:type_name -> slicecast.v1.TrafficPolicy
	4,  // 38: slicecast.v1.ServicePort.protocol:type_name -> slicecast.v1.Protocol
	7,  // 39: slicecast.v1.Slice.address_type:type_name -> slicecast.v1.AddressType
	32, // 40: slicecast.v1.Slice.ports:type_name -> slicecast.v1.SlicePort
	33, // 41: slicecast.v1.Slice.endpoints:type_name -> slicecast.v1.Endpoint
	4,  // 42: slicecast.v1.SlicePort.protocol:type_name -> slicecast.v1.Protocol
	33, // 43: slicecast.v1.SliceDelta.endpoints:type_name -> slicecast.v1.Endpoint
	35, // 44: slicecast.v1.SliceDelta.conditions:type_name -> slicecast.v1.EndpointConditions
	37, // 45: slicecast.v1.Node.labels:type_name -> slicecast.v1.Node.LabelsEntry
	8,  // 46: slicecast.v1.DistributionService.Stream:input_type -> slicecast.v1.StreamRequest
	9,  // 47: slicecast.v1.DistributionService.Stream:output_type -> slicecast.v1.StreamResponse
	47, // [47:48] is the sub-list for method output_type
	46, // [46:47] is the sub-list for method input_type
	46, // [46:46] is the sub-list for extension type_name
	46, // [46:46] is the sub-list for extension extendee
	0,  // [0:46] is the sub-list for field type_name
}

func init() { file_slicecast_v1_slicecast_proto_init() }
func file_slicecast_v1_slicecast_proto_init() {
	if File_slicecast_v1_slicecast_proto != nil {
		return
	}
	file_slicecast_v1_slicecast_proto_msgTypes[0].OneofWrappers = []any{
		(*StreamRequest_Hello)(nil),
		(*StreamRequest_Ack)(nil),
		(*StreamRequest_Nack)(nil),
		(*StreamRequest_Resync)(nil),
		(*StreamRequest_DigestQuery)(nil),
		(*StreamRequest_Digests)(nil),
	}
	file_slicecast_v1_slicecast_proto_msgTypes[1].OneofWrappers = []any{
		(*StreamResponse_Welcome)(nil),
		(*StreamResponse_ShardUpdate)(nil),
		(*StreamResponse_NodeUpdate)(nil),
		(*StreamResponse_InSync)(nil),
		(*StreamResponse_Heartbeat)(nil),
		(*StreamResponse_Drain)(nil),
		(*StreamResponse_Servers)(nil),
		(*StreamResponse_BucketQuery)(nil),
		(*StreamResponse_Zstd)(nil),
		(*StreamResponse_Digests)(nil),
		(*StreamResponse_DigestQuery)(nil),
	}
	file_slicecast_v1_slicecast_proto_msgTypes[15].OneofWrappers = []any{}
	type x struct{}
	out := protoimpl.TypeBuilder{
		File: protoimpl.DescBuilder{
			GoPackagePath: reflect.TypeOf(x{}).PkgPath(),
			RawDescriptor: unsafe.Slice(unsafe.StringData(file_slicecast_v1_slicecast_proto_rawDesc), len(file_slicecast_v1_slicecast_proto_rawDesc)),
			NumEnums:      8,
			NumMessages:   30,
			NumExtensions: 0,
			NumServices:   1,
		},
		GoTypes:           file_slicecast_v1_slicecast_proto_goTypes,
		DependencyIndexes: file_slicecast_v1_slicecast_proto_depIdxs,
		EnumInfos:         file_slicecast_v1_slicecast_proto_enumTypes,
		MessageInfos:      file_slicecast_v1_slicecast_proto_msgTypes,
	}.Build()
	File_slicecast_v1_slicecast_proto = out.File
	file_slicecast_v1_slicecast_proto_goTypes = nil
	file_slicecast_v1_slicecast_proto_depIdxs = nil
}
