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

// Code generated by protoc-gen-go-grpc. DO NOT EDIT.
// versions:
// - protoc-gen-go-grpc v1.6.2
// - protoc             (unknown)
// source: slicecast/v1/slicecast.proto

package slicecastv1

import (
	context "context"
	grpc "google.golang.org/grpc"
	codes "google.golang.org/grpc/codes"
	status "google.golang.org/grpc/status"
)

// This is a compile-time assertion to ensure that this generated file
// is compatible with the grpc package it is being compiled against.
// Requires gRPC-Go v1.64.0 or later.
const _ = grpc.SupportPackageIsVersion9

const (
	DistributionService_Stream_FullMethodName = "/slicecast.v1.DistributionService/Stream"
)

// DistributionServiceClient is the client API for DistributionService service.
//
// For semantics around ctx use and closing/ending streaming RPCs, please refer to https://pkg.go.dev/google.golang.org/grpc/?tab=doc#ClientConn.NewStream.
//
// DistributionService streams Services and their endpoints to nodes.
type DistributionServiceClient interface {
	// Stream carries everything between one client and the server. The package comment describes the
	// conversation. The status codes with which a stream ends mean:
	//
	//   - UNAVAILABLE: The server has not synced, is draining, has lost its own upstream, or cannot
	//     review tokens now. The client should try another server, or try again later.
	//   - DEADLINE_EXCEEDED: The client did not answer a DigestQuery or BucketQuery in time.
	//   - INVALID_ARGUMENT: The client broke the protocol, which is a bug in the client.
	//   - UNAUTHENTICATED or PERMISSION_DENIED: The server does not accept who the client is, or who
	//     it claims to be.
	//   - RESOURCE_EXHAUSTED: There are too many streams, or a message exceeds the limit. If waiting
	//     helps, the status has a google.rpc.RetryInfo.
	//   - UNIMPLEMENTED: The server does not serve this kind of client.
	Stream(ctx context.Context, opts ...grpc.CallOption) (grpc.BidiStreamingClient[StreamRequest, StreamResponse], error)
}

type distributionServiceClient struct {
	cc grpc.ClientConnInterface
}

func NewDistributionServiceClient(cc grpc.ClientConnInterface) DistributionServiceClient {
	return &distributionServiceClient{cc}
}

func (c *distributionServiceClient) Stream(ctx context.Context, opts ...grpc.CallOption) (grpc.BidiStreamingClient[StreamRequest, StreamResponse], error) {
	cOpts := append([]grpc.CallOption{grpc.StaticMethod()}, opts...)
	stream, err := c.cc.NewStream(ctx, &DistributionService_ServiceDesc.Streams[0], DistributionService_Stream_FullMethodName, cOpts...)
	if err != nil {
		return nil, err
	}
	x := &grpc.GenericClientStream[StreamRequest, StreamResponse]{ClientStream: stream}
	return x, nil
}

// This type alias is provided for backwards compatibility with existing code that references the prior non-generic stream type by name.
type DistributionService_StreamClient = grpc.BidiStreamingClient[StreamRequest, StreamResponse]

// DistributionServiceServer is the server API for DistributionService service.
// All implementations must embed UnimplementedDistributionServiceServer
// for forward compatibility.
//
// DistributionService streams Services and their endpoints to nodes.
type DistributionServiceServer interface {
	// Stream carries everything between one client and the server. The package comment describes the
	// conversation. The status codes with which a stream ends mean:
	//
	//   - UNAVAILABLE: The server has not synced, is draining, has lost its own upstream, or cannot
	//     review tokens now. The client should try another server, or try again later.
	//   - DEADLINE_EXCEEDED: The client did not answer a DigestQuery or BucketQuery in time.
	//   - INVALID_ARGUMENT: The client broke the protocol, which is a bug in the client.
	//   - UNAUTHENTICATED or PERMISSION_DENIED: The server does not accept who the client is, or who
	//     it claims to be.
	//   - RESOURCE_EXHAUSTED: There are too many streams, or a message exceeds the limit. If waiting
	//     helps, the status has a google.rpc.RetryInfo.
	//   - UNIMPLEMENTED: The server does not serve this kind of client.
	Stream(grpc.BidiStreamingServer[StreamRequest, StreamResponse]) error
	mustEmbedUnimplementedDistributionServiceServer()
}

// UnimplementedDistributionServiceServer must be embedded to have
// forward compatible implementations.
//
// NOTE: this should be embedded by value instead of pointer to avoid a nil
// pointer dereference when methods are called.
type UnimplementedDistributionServiceServer struct{}

func (UnimplementedDistributionServiceServer) Stream(grpc.BidiStreamingServer[StreamRequest, StreamResponse]) error {
	return status.Error(codes.Unimplemented, "method Stream not implemented")
}
func (UnimplementedDistributionServiceServer) mustEmbedUnimplementedDistributionServiceServer() {}
func (UnimplementedDistributionServiceServer) testEmbeddedByValue()                             {}

// UnsafeDistributionServiceServer may be embedded to opt out of forward compatibility for this service.
// Use of this interface is not recommended, as added methods to DistributionServiceServer will
// result in compilation errors.
type UnsafeDistributionServiceServer interface {
	mustEmbedUnimplementedDistributionServiceServer()
}

func RegisterDistributionServiceServer(s grpc.ServiceRegistrar, srv DistributionServiceServer) {
	// If the following call panics, it indicates UnimplementedDistributionServiceServer was
	// embedded by pointer and is nil.  This will cause panics if an
	// unimplemented method is ever invoked, so we test this at initialization
	// time to prevent it from happening at runtime later due to I/O.
	if t, ok := srv.(interface{ testEmbeddedByValue() }); ok {
		t.testEmbeddedByValue()
	}
	s.RegisterService(&DistributionService_ServiceDesc, srv)
}

func _DistributionService_Stream_Handler(srv interface{}, stream grpc.ServerStream) error {
	return srv.(DistributionServiceServer).Stream(&grpc.GenericServerStream[StreamRequest, StreamResponse]{ServerStream: stream})
}

// This type alias is provided for backwards compatibility with existing code that references the prior non-generic stream type by name.
type DistributionService_StreamServer = grpc.BidiStreamingServer[StreamRequest, StreamResponse]

// DistributionService_ServiceDesc is the grpc.ServiceDesc for DistributionService service.
// It's only intended for direct use with grpc.RegisterService,
// and not to be introspected or modified (even as a copy)
var DistributionService_ServiceDesc = grpc.ServiceDesc{
	ServiceName: "slicecast.v1.DistributionService",
	HandlerType: (*DistributionServiceServer)(nil),
	Methods:     []grpc.MethodDesc{},
	Streams: []grpc.StreamDesc{
		{
			StreamName:    "Stream",
			Handler:       _DistributionService_Stream_Handler,
			ServerStreams: true,
			ClientStreams: true,
		},
	},
	Metadata: "slicecast/v1/slicecast.proto",
}
