// This file runs a Server and a grpc.Server behind one Mux on loopback TLS, with sessions that a
// test implements, and opens streams to them as a client of grpc-go.
package h2

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/testca"
)

func TestMain(m *testing.M) {
	if arguments := os.Getenv(clientsEnv); arguments != "" {
		if err := holdClients(arguments); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

const (
	// patience bounds waits for events that take milliseconds on an idle machine.
	patience = 30 * time.Second
	tick     = 2 * time.Millisecond

	testPath = "/slicecast.v1.DistributionService/Stream"
)

// session is a Session that a test implements.
type session struct {
	*Stream
	serve    func(*session) error
	message  func(b []byte) error // nil sends messages to received
	received chan string
	closed   chan struct{} // closed by CloseSend
}

func (s *session) Serve() error { return s.serve(s) }

func (s *session) Message(b []byte) error {
	if s.message != nil {
		return s.message(b)
	}
	select {
	case s.received <- string(b):
		return nil
	default:
		return fmt.Errorf("more than %d messages", cap(s.received))
	}
}

func (s *session) CloseSend() { close(s.closed) }

// echo sends back what it receives, until the client has closed its side.
func echo(s *session) error {
	for {
		select {
		case m := <-s.received:
			if err := s.Send([]byte(m)); err != nil {
				return err
			}
		case <-s.closed:
			for len(s.received) > 0 {
				if err := s.Send([]byte(<-s.received)); err != nil {
					return err
				}
			}
			return nil
		case <-s.Context().Done():
			return s.Context().Err()
		}
	}
}

// until waits for the end of the stream.
func until(s *session) error {
	<-s.Context().Done()
	return s.Context().Err()
}

// opener returns an Open function whose sessions run serve.
func opener(serve func(*session) error) func(*Stream) (Session, error) {
	return func(s *Stream) (Session, error) {
		return &session{Stream: s, serve: serve, received: make(chan string, 100), closed: make(chan struct{})}, nil
	}
}

// as returns an identify function that returns a caller.
func as(c Caller) func() (Caller, error) { return func() (Caller, error) { return c, nil } }

// fixture is a Server and a grpc.Server behind one Mux.
type fixture struct {
	t       testing.TB
	server  *Server
	mux     *Mux
	grpc    *grpc.Server
	address string
	ca      *testca.CA
	inner   *tls.Config  // the server's configuration, except for its protocols
	other   atomic.Value // the context of the grpc.Server's last stream
	// refuse makes both servers refuse calls.
	refuse atomic.Bool
	// anonymous means that clients present no certificate.
	anonymous bool
}

// start serves sessions with serve. adjust may change the options.
func start(t testing.TB, serve func(*session) error, adjust ...func(*Options)) *fixture {
	t.Helper()
	f := &fixture{t: t}
	options := Options{
		Path: testPath, Open: opener(serve), MaxReceive: 128 << 10, MaxHeaderBytes: 16 << 10,
		PingInterval: time.Hour, PingTimeout: time.Hour, MinClientPing: 5 * time.Second, MaxIdle: time.Hour,
		Logger: slog.New(slog.DiscardHandler), Registerer: prometheus.NewRegistry(),
	}
	for _, a := range adjust {
		a(&options)
	}
	accept := options.Open
	options.Open = func(s *Stream) (Session, error) {
		if f.refuse.Load() {
			return nil, status.Error(codes.Unauthenticated, "who are you?")
		}
		session, err := accept(s)
		if err == nil {
			connection, _ := ConnectionOf(s.Context())
			err = connection.Enter(s.Context(), as(Caller{}))
		}
		return session, err
	}
	f.server = New(options)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	f.address = l.Addr().String()
	f.ca, err = testca.New()
	require.NoError(t, err)
	certificate, err := f.ca.Server("127.0.0.1")
	require.NoError(t, err)
	f.inner = &tls.Config{
		Certificates: []tls.Certificate{certificate}, ClientCAs: f.ca.Pool(), ClientAuth: tls.VerifyClientCertIfGiven,
		MinVersion: tls.VersionTLS13,
	}
	// With this timeout, no stranger ends by itself during a test.
	f.mux = NewMux(f.muxOptions(l, time.Hour))
	// The other server does the same with grpc-go, as far as tests need it.
	other := grpc.NewServer(grpc.Creds(Credentials()), grpc.ForceServerCodecV2(bytesCodec{}),
		grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
			connection, ctx := ConnectionOf(stream.Context())
			f.other.Store(ctx)
			if f.refuse.Load() {
				return status.Error(codes.Unauthenticated, "who are you?")
			}
			if err := connection.Enter(ctx, as(Caller{})); err != nil {
				return err
			}
			asked, _ := metadata.FromIncomingContext(ctx)
			if len(asked["wait"]) > 0 {
				<-ctx.Done()
			}
			for len(asked["endless"]) > 0 {
				if err := stream.SendMsg(make([]byte, 1<<20)); err != nil {
					return err
				}
			}
			return nil
		}))
	f.grpc = other
	var serving sync.WaitGroup
	serving.Go(func() { require.NoError(t, f.mux.Serve()) })
	serving.Go(func() { require.NoError(t, other.Serve(f.mux.GRPC())) })
	t.Cleanup(func() {
		require.NoError(t, f.mux.Close())
		other.Stop()
		f.server.Stop()
		serving.Wait()
	})
	return f
}

// muxOptions returns options for another Mux in front of the server.
func (f *fixture) muxOptions(l net.Listener, strangerTimeout time.Duration) MuxOptions {
	return MuxOptions{
		Listener: l, Server: f.server, StrangerTimeout: strangerTimeout, MaxIdle: time.Hour, Logger: f.server.options.Logger,
		Registerer: prometheus.NewRegistry(), MaxStrangersOfNodes: 10_000, MaxStrangers: 10_000, MaxStrangersPerAddress: 10_000,
		NodeAddress: func(netip.Addr) bool { return false },
		TLS: &tls.Config{
			MinVersion:         tls.VersionTLS13,
			GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return f.inner, nil },
		},
	}
}

// tls returns a client's configuration that offers the protocols.
func (f *fixture) tls(protocols ...string) *tls.Config {
	config := &tls.Config{RootCAs: f.ca.Pool(), NextProtos: protocols, ServerName: "127.0.0.1", MinVersion: tls.VersionTLS13}
	if !f.anonymous {
		node, err := f.ca.Node("node-1")
		require.NoError(f.t, err)
		config.Certificates = []tls.Certificate{node}
	}
	return config
}

// dial returns a grpc-go client that offers the protocols.
func (f *fixture) dial(protocols []string, options ...grpc.DialOption) *grpc.ClientConn {
	f.t.Helper()
	options = append(options, grpc.WithTransportCredentials(credentials.NewTLS(f.tls(protocols...))),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(bytesCodec{}), grpc.MaxCallRecvMsgSize(1<<30)))
	conn, err := grpc.NewClient(f.address, options...)
	require.NoError(f.t, err)
	f.t.Cleanup(func() { _ = conn.Close() }) // a test may have closed it
	return conn
}

var ours = []string{Protocol, "h2"}

// call is the client's side of a stream.
type call struct {
	grpc.ClientStream
	t      testing.TB
	cancel context.CancelFunc
}

// open opens a stream.
func open(ctx context.Context, t testing.TB, conn *grpc.ClientConn, options ...grpc.CallOption) *call {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, patience)
	t.Cleanup(cancel)
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, testPath, options...)
	require.NoError(t, err)
	return &call{stream, t, cancel}
}

func (c *call) send(m string) {
	c.t.Helper()
	require.NoError(c.t, c.SendMsg([]byte(m)))
}

func (c *call) receive() string {
	c.t.Helper()
	var b []byte
	require.NoError(c.t, c.RecvMsg(&b))
	return string(b)
}

// end returns the error that ends the stream.
func (c *call) end() error {
	c.t.Helper()
	var b []byte
	err := c.RecvMsg(&b)
	require.Error(c.t, err)
	return err
}

// bytesCodec passes messages unchanged.
type bytesCodec struct{}

var _ encoding.CodecV2 = bytesCodec{}

func (bytesCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(v.([]byte))}, nil
}

func (bytesCodec) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

func (bytesCodec) Name() string { return "bytes" }
