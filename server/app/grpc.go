package app

import (
	"time"

	"google.golang.org/grpc"
	channelz "google.golang.org/grpc/channelz/service"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/auth"
	"github.com/slicecast/slicecast/server/fanout"
)

// What the gRPC server allows a client, and spends on it. A client is a node's agent with one stream, thousands at a time,
// that says little and listens a lot.
const (
	// maxReceived is larger than the largest message: digests of 4096 shards (100 KiB), and an Ack of as many.
	maxReceived = 128 << 10
	// window is for what clients send. A fixed one also turns off the bandwidth estimator, whose ping after every read
	// costs more than the reads do.
	window = 128 << 10
	// readBuffer is small, as TLS has a buffer of its own and clients send acks of some bytes.
	readBuffer = 4 << 10
	// maxConcurrentStreams per connection: an agent's, or an operator's few.
	maxConcurrentStreams = 16
	// maxHeaderBytes leaves room for a ServiceAccount token.
	maxHeaderBytes = 16 << 10
	// strangerTimeout is for TCP, TLS, HTTP/2 and the first call that is let in together, with a thousand others at the same
	// time and an API server that reviews a token.
	strangerTimeout = 20 * time.Second
	// maxStrangersOfNodes is enough for thousands of nodes that come at once. With maxStrangers, a client from elsewhere has four
	// seconds to show who it is while 1,000 others come in a second.
	maxStrangersOfNodes, maxStrangers = 8192, 4096
	// maxStrangersPerAddress is a small share, and enough for a load balancer that hides its clients' addresses: its newcomers
	// have a quarter of a second each when 1,000 come in a second.
	maxStrangersPerAddress = 256
	// maxNodeConnections is for an agent's stream, that to another address of this server which is to take its place, those that
	// are not known to be dead yet, and tools. The oldest makes room for more, so that none keeps an agent out.
	// maxNodeCalls bounds what is beside the stream: health checks, and calls that a node may not make.
	maxNodeConnections, maxNodeCalls = 8, 16
	// maxUserConnections is what fanout has for the streams of an observer or relay: all relays may share a ServiceAccount, and
	// all observers a certificate. maxUserCalls lets each ask something else beside.
	maxUserConnections, maxUserCalls = 256, 512
	// maxIdle closes connections without a stream; of agents, who come for nothing else, maxLeanIdle. maxRefusedIdle closes
	// those that have had none but refused ones, which keep a connection from being idle.
	maxIdle, maxLeanIdle, maxRefusedIdle = 5 * time.Minute, 30 * time.Second, 6 * time.Minute
	// pingInterval and pingTimeout find a dead client within half a minute.
	pingInterval, pingTimeout = 20 * time.Second, 10 * time.Second
	// minClientPing is how often clients may ping; one that does so more often is disconnected.
	minClientPing = 5 * time.Second
)

// newGRPC makes a gRPC server with all services for those whom authenticate knows. creds is nil for plaintext.
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
