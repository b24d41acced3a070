// Package slicecast.v1 is how a node learns where Services lead: one bidirectional stream between a node's agent and a
// server, in the manner of xDS.
//
// # The conversation
//
//	agent                                server
//	  | -- Hello ------------------------> |   who I am, what I hold (position in each shard, digest of all)
//	  | <------------------------ Welcome |   epoch, number of shards, heartbeat interval
//	  | <------------------------ Servers |   where else to connect; again whenever that changes
//	  | <--------------------- NodeUpdate |   the agent's own Node, now and whenever it changes
//	  | <-------------------- ShardUpdate |   for each shard that differs from what the agent holds
//	  | <------------------------- InSync |   now the agent has everything; positions of all shards
//	  | -- Ack --------------------------> |   programmed in the kernel up to these positions
//	  | <-------------------- ShardUpdate |   from now on: changes, as they happen
//	  | -- Nack / Resync ----------------> |   this key could not be programmed / send this again
//	  | <---------------------- Heartbeat |   digest of everything, in quiet moments too
//	  | <-------------------------- Drain |   this server goes away: resume on another
//
// Hello is the first message, exactly once, and the only one before Welcome. A server that has not synced with its source answers UNAVAILABLE and serves
// nothing. A client may close its sending side: the server goes on sending, so that a stream can be followed with grpcurl.
//
// # State
//
// The objects are Services and Slices (EndpointSlices, trimmed). A Service and its Slices live in the same shard, chosen
// by a hash of "namespace/service". Each shard has a sequence that grows by one with each publish; sequences mean
// something within one epoch, that is one life of one server's store.
//
// An object's version is a hash of its content: the same content has the same version on every server, and the key is part
// of the content. All hashes are SHA-256 (FIPS 180-4), truncated to their first 25 bytes: whoever may write Services and
// EndpointSlices can't make two states that compare equal with less than 2^100 operations. Digests are hashes of versions:
//
//   - 64 buckets divide a shard's objects by a hash of their own keys: an object is in bucket
//     xxhash64("<kind>/<namespace>/<name>") modulo 64, with kind as in ObjectKind. A bucket's digest is the hash of
//     the byte 0x81 and the versions of its objects, in ascending order.
//   - A shard's digest is the hash of the byte 0x82 and the digests of its buckets, by number.
//   - The digest of the state is the hash of the byte 0x83 and the digests of all shards, by number.
//   - Where there are no objects the digest is 25 zero bytes. Several digests in one field follow each other.
//
// Within one epoch sequences decide what a client holds; digests are for coming to another epoch, and for finding out that
// something went wrong.
//
// # Rules
//
//   - A ShardUpdate is atomic: it is applied as a whole, or not at all. It leads from `from_sequence` to `sequence`, and a
//     client may apply it if its position is within that range (changes are idempotent).
//   - A client removes an object only when an update says so: by name in `removed`, or by leaving it out of a `full` update.
//   - A SliceDelta leads from the state at from_sequence, and promises the version that results. A client that gets
//     another result, or lacks the slice, asks for that key with Resync, and keeps what it has meanwhile. So it does where a
//     delta does not decode. One that can't compute the result, as the slice has fields that it does not know, applies the
//     delta at exactly from_sequence only.
//   - Objects are canonical. Names, addresses and ports are what a Kubernetes API server admits. Addresses and ranges are in their
//     shortest form, without zones, IPv4-mapped IPv6 or host bits. Lists are in ascending order, each entry once, but for a Node's
//     addresses and pod CIDRs, whose order counts: ports by name and protocol, endpoints and load-balancer ingress by address,
//     conditions by index, IPv4 before IPv6. A list has at most 1000 endpoints, 20,000 ports of a slice, 10,000 ports, addresses or
//     ranges of a Service in each family, 8 hints of a kind. A client refuses other objects as ones that do not decode: it keeps
//     what it has, and programs the rest.
//   - The server sends the same bytes to every node, NodeUpdate and narrowed streams aside.
//   - A stream with a Subscription gets only what that names. Its heartbeats have no digests, and its updates skip
//     sequences at which nothing in it changed: each leads from the one sent before.
//   - Fields that a client does not know it ignores; it takes versions from the wire, so that a newer server's content
//     still has the right digest. Coming to a server of another version, and from what it has kept in a file, it has objects
//     whose content has another hash than their version count by that hash, and asks for what differs: the software before
//     may have left something out of them. It need not where they came with fields that it does not know.
//   - What a client could misunderstand, such as a new form of a delta or a message, is sent to those only that say with a
//     Capability that they know it.

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
	// Stream carries everything between one node and the server; the package comment gives the conversation.
	//
	// Status codes: UNAVAILABLE (not synced, or draining: try another server or later), INVALID_ARGUMENT (the stream broke
	// the protocol: a bug in the client), UNAUTHENTICATED and PERMISSION_DENIED (who the client is, or says it is),
	// RESOURCE_EXHAUSTED (too many streams, or a message over the limit; with google.rpc.RetryInfo where waiting helps),
	// UNIMPLEMENTED (a kind of client that this server does not serve).
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
	// Stream carries everything between one node and the server; the package comment gives the conversation.
	//
	// Status codes: UNAVAILABLE (not synced, or draining: try another server or later), INVALID_ARGUMENT (the stream broke
	// the protocol: a bug in the client), UNAUTHENTICATED and PERMISSION_DENIED (who the client is, or says it is),
	// RESOURCE_EXHAUSTED (too many streams, or a message over the limit; with google.rpc.RetryInfo where waiting helps),
	// UNIMPLEMENTED (a kind of client that this server does not serve).
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
