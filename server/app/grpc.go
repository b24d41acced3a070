package app

import (
	"time"

	"google.golang.org/grpc"
	channelz "google.golang.org/grpc/channelz/service"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

	"github.com/slicecast/slicecast/internal/auth"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
)

// These bound what a client may do and what the server spends on it. A typical client is a node's
// agent, of which there are thousands. It has one stream, sends little and receives a lot.
const (
	// maxReceived is more than the largest message, in bytes: digests of 4096 shards (100 KiB), or
	// an Ack of as many positions.
	maxReceived = 128 << 10
	// window is the flow-control window for what clients send, in bytes. A fixed window also turns
	// off the bandwidth estimator, whose ping after every read costs more than the reads.
	window = 128 << 10
	// readBuffer is small, in bytes, as TLS has a buffer of its own and clients send acks of a few
	// bytes.
	readBuffer = 4 << 10
	// maxConcurrentStreams bounds the streams of a connection. An agent has one, and an operator
	// few.
	maxConcurrentStreams = 16
	// maxHeaderBytes leaves room for a ServiceAccount token.
	maxHeaderBytes = 16 << 10
	// strangerTimeout covers TCP, TLS, HTTP/2 and the first admitted call together. It leaves time
	// for a thousand others that connect at once, and for the API server to review a token.
	strangerTimeout = 20 * time.Second
	// maxStrangersOfNodes is enough for thousands of nodes that connect at once. With maxStrangers,
	// a client from elsewhere has four seconds to authenticate while 1,000 others arrive per
	// second.
	maxStrangersOfNodes, maxStrangers = 8192, 4096
	// maxStrangersPerAddress is a small share of maxStrangers. It is enough for a load balancer
	// that hides its clients' addresses: if 1,000 clients arrive per second, each of them has a
	// quarter of a second.
	maxStrangersPerAddress = 256
	// maxNodeConnections has room for an agent's stream, for a stream to another address of this
	// server that is to replace it, for dead connections that are not detected yet, and for tools.
	// The oldest connection is closed for a further one, so none of them keeps an agent out.
	// maxNodeCalls bounds calls in addition to the stream: health checks, and calls that a node may
	// not make.
	maxNodeConnections, maxNodeCalls = 8, 16
	// maxUserConnections is the number of streams that fanout allows an observer or relay. All
	// relays may share a ServiceAccount, and all observers a certificate. maxUserCalls allows one
	// more call for each stream.
	maxUserConnections, maxUserCalls = 256, 512
	// maxIdle is how long a connection may be without a stream, and maxLeanIdle how long a
	// connection of an agent may be, which only serves its stream. Refused streams keep a
	// connection from being idle, so maxRefusedIdle closes connections with only refused ones.
	maxIdle, maxLeanIdle, maxRefusedIdle = 5 * time.Minute, 30 * time.Second, 6 * time.Minute
	// recheckInterval is how often the server looks whether the CAs of client certificates have
	// changed, to close connections whose certificate they no longer accept.
	recheckInterval = 5 * time.Second
	// pingInterval and pingTimeout detect a dead client within half a minute.
	pingInterval, pingTimeout = 20 * time.Second, 10 * time.Second
	// minClientPing is the shortest interval between a client's pings. A client that pings more
	// often is disconnected.
	minClientPing = 5 * time.Second
)

// newGRPC returns a gRPC server with all services for callers that authenticate accepts. creds is
// nil for plaintext.
func (s *Server) newGRPC(
	creds credentials.TransportCredentials, authentication *auth.Auth, authenticate auth.Authenticator,
) *grpc.Server {
	options := append(authentication.ServerOptions(authenticate),
		fanout.ServerOption(),
		grpc.Creds(creds),
		grpc.MaxRecvMsgSize(maxReceived),
		grpc.StaticStreamWindowSize(window),
		grpc.StaticConnWindowSize(window),
		grpc.ReadBufferSize(readBuffer),
		grpc.MaxConcurrentStreams(maxConcurrentStreams),
		grpc.MaxHeaderListSize(maxHeaderBytes),
		grpc.ConnectionTimeout(strangerTimeout),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: maxIdle, Time: pingInterval, Timeout: pingTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: minClientPing, PermitWithoutStream: true}),
	)
	server := grpc.NewServer(options...)
	pb.RegisterDistributionServiceServer(server, s.hub)
	pb.RegisterDebugServiceServer(server, s.debug)
	healthpb.RegisterHealthServer(server, s.health)
	channelz.RegisterChannelzServiceToServer(server)
	reflection.Register(server)
	return server
}
