// These tests prove that a client of grpc-go cannot tell this server from one of grpc-go: messages,
// headers, statuses, deadlines, cancellation and a graceful stop, over real TLS.
package h2

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

func TestStreamWithGRPCClient(t *testing.T) {
	f := start(t, echo)
	conn := f.dial(ours)
	for range 3 { // one after the other, on one connection
		c := open(t.Context(), t, conn)
		for i := range 10 {
			m := fmt.Sprint("message ", i)
			c.send(m)
			require.Equal(t, m, c.receive())
		}
		c.send("")
		require.Empty(t, c.receive())
		require.NoError(t, c.CloseSend())
		require.ErrorIs(t, c.end(), io.EOF)
	}
}

func TestBigMessages(t *testing.T) {
	for name, options := range map[string][]grpc.DialOption{
		"64 KiB windows": {grpc.WithStaticStreamWindowSize(64 << 10), grpc.WithStaticConnWindowSize(64 << 10)},
		"1 MiB windows":  {grpc.WithStaticStreamWindowSize(1 << 20), grpc.WithStaticConnWindowSize(1 << 20)},
		"moving windows": nil,
	} {
		t.Run(name, func(t *testing.T) {
			frames := []string{"a", strings.Repeat("b", 60<<10), "", strings.Repeat("c", 5<<20), "d"}
			f := start(t, func(s *session) error {
				for range 2 {
					if err := s.Send([]byte(frames[0]), []byte(frames[1]), []byte(frames[2]), []byte(frames[3]), []byte(frames[4])); err != nil {
						return err
					}
				}
				return echo(s)
			})
			c := open(t.Context(), t, f.dial(ours, options...))
			for range 2 {
				for _, want := range frames {
					require.True(t, want == c.receive())
				}
			}
			big := strings.Repeat("e", 128<<10)
			c.send(big)
			require.Equal(t, len(big), len(c.receive()))
		})
	}
}

// TestContextMatchesGRPC checks that a session's context carries what a handler of grpc-go would
// see of the client.
func TestContextMatchesGRPC(t *testing.T) {
	contexts := make(chan context.Context, 1)
	f := start(t, func(s *session) error { contexts <- s.Context(); return nil })
	out := metadata.Pairs("authorization", "Bearer xyz", "Several", "1", "several", "2", "blob-bin", "\x00\xff", "empty", "")
	get := func(protocols ...string) (context.Context, metadata.MD) {
		c := open(metadata.NewOutgoingContext(t.Context(), out), t, f.dial(protocols))
		require.NoError(t, c.CloseSend())
		require.ErrorIs(t, c.end(), io.EOF)
		if len(protocols) == 1 {
			contexts <- f.other.Load().(context.Context)
		}
		ctx := <-contexts
		md, ok := metadata.FromIncomingContext(ctx)
		require.True(t, ok)
		return ctx, md
	}
	ctx, md := get(ours...)
	ctxThere, mdThere := get("h2")
	require.Equal(t, mdThere, md)
	require.Equal(t, []string{"1", "2"}, metadata.ValueFromIncomingContext(ctx, "several"))

	_, ctx = ConnectionOf(ctx)
	p, ok := peer.FromContext(ctx)
	require.True(t, ok)
	there, ok := peer.FromContext(ctxThere)
	require.True(t, ok)
	require.Equal(t, f.address, p.LocalAddr.String())
	require.Equal(t, there.Addr.Network(), p.Addr.Network())
	info, infoThere := p.AuthInfo.(credentials.TLSInfo), there.AuthInfo.(credentials.TLSInfo)
	require.Equal(t, infoThere.CommonAuthInfo, info.CommonAuthInfo)
	require.Equal(t, Protocol, info.State.NegotiatedProtocol)
	require.Equal(t, "h2", infoThere.State.NegotiatedProtocol)
	require.Equal(t, "system:node:node-1", info.State.VerifiedChains[0][0].Subject.CommonName)
	require.Equal(t, "system:node:node-1", infoThere.State.VerifiedChains[0][0].Subject.CommonName)
}

func TestCancel(t *testing.T) {
	ended := make(chan error, 1)
	f := start(t, func(s *session) error { ended <- until(s); return nil })
	c := open(t.Context(), t, f.dial(ours))
	c.send("hello")
	c.cancel()
	require.ErrorIs(t, <-ended, context.Canceled)
	require.Equal(t, codes.Canceled, status.Code(c.end()))
}

func TestHalfClose(t *testing.T) {
	f := start(t, func(s *session) error {
		<-s.closed
		return s.Send([]byte("that was all"))
	})
	c := open(t.Context(), t, f.dial(ours))
	require.NoError(t, c.CloseSend())
	require.Equal(t, "that was all", c.receive())
	require.ErrorIs(t, c.end(), io.EOF)
}

func TestHeadersBeforeTheFirstMessage(t *testing.T) {
	f := start(t, func(s *session) error {
		if err := s.Send(); err != nil {
			return err
		}
		return until(s)
	})
	header, err := open(t.Context(), t, f.dial(ours)).Header()
	require.NoError(t, err)
	require.Equal(t, metadata.Pairs("content-type", "application/grpc"), header)
}

func TestStatus(t *testing.T) {
	detailed, err := status.New(codes.Unavailable, "später: 100 %\n\xff").WithDetails(
		&errdetails.RetryInfo{RetryDelay: durationpb.New(time.Second)})
	require.NoError(t, err)
	for name, test := range map[string]struct {
		err     error
		code    codes.Code
		message string
	}{
		"none":              {nil, codes.OK, ""},
		"with details":      {detailed.Err(), codes.Unavailable, "später: 100 %\n\uFFFD"},
		"any error":         {errors.New("oops"), codes.Unknown, "oops"},
		"a context's error": {context.DeadlineExceeded, codes.DeadlineExceeded, "context deadline exceeded"},
		"wrapped":           {fmt.Errorf("why: %w", status.Error(codes.Aborted, "no")), codes.Aborted, "why: rpc error: code = Aborted desc = no"},
		"more than fits":    {status.Error(codes.Internal, strings.Repeat("é", 10<<10)), codes.Internal, strings.Repeat("é", maxMessage/2)},
	} {
		for _, messages := range []int{0, 1} {
			t.Run(fmt.Sprintf("%s after %d messages", name, messages), func(t *testing.T) {
				f := start(t, func(s *session) error {
					for range messages {
						if err := s.Send([]byte("hello")); err != nil {
							return err
						}
					}
					return test.err
				})
				c := open(t.Context(), t, f.dial(ours))
				for range messages {
					require.Equal(t, "hello", c.receive())
				}
				err := c.end()
				if test.err == nil {
					require.ErrorIs(t, err, io.EOF)
					return
				}
				got := status.Convert(err)
				require.Equal(t, test.code, got.Code())
				require.Equal(t, test.message, got.Message())
				require.Len(t, got.Details(), len(status.Convert(test.err).Details()))
			})
		}
	}
}

func TestOpenRefusesBeforeAnythingIsSent(t *testing.T) {
	f := start(t, nil, func(o *Options) {
		o.Open = func(s *Stream) (Session, error) {
			return nil, status.Errorf(codes.PermissionDenied, "not you, %v", metadata.ValueFromIncomingContext(s.Context(), "who"))
		}
	})
	c := open(metadata.AppendToOutgoingContext(t.Context(), "who", "stranger"), t, f.dial(ours))
	err := c.end()
	require.Equal(t, codes.PermissionDenied, status.Code(err))
	require.Equal(t, "not you, [stranger]", status.Convert(err).Message())
	header, err := c.Header()
	require.NoError(t, err)
	require.Empty(t, header, "the trailers are all that there is")
}

// TestMessagesBeforeTheSessionIsOpen checks that messages that arrive during Open are passed to the
// session.
func TestMessagesBeforeTheSessionIsOpen(t *testing.T) {
	for name, size := range map[string]int{"small": 10, "larger than a window": 100 << 10} {
		t.Run(name, func(t *testing.T) {
			ready := make(chan struct{})
			f := start(t, nil, func(o *Options) {
				o.Open = func(s *Stream) (Session, error) {
					<-ready
					return opener(echo)(s)
				}
			})
			c := open(t.Context(), t, f.dial(ours))
			big := strings.Repeat("x", size)
			c.send("first")
			sent := make(chan error, 1)
			go func() { sent <- errors.Join(c.SendMsg([]byte(big)), c.CloseSend()) }()
			require.Eventually(t, func() bool { return f.inbox() >= min(size, 60<<10) }, patience, tick)
			close(ready)
			require.Equal(t, "first", c.receive())
			require.True(t, big == c.receive())
			require.ErrorIs(t, c.end(), io.EOF)
			require.NoError(t, <-sent)
		})
	}
}

// inbox returns how many bytes of clients' messages wait on all streams together.
func (f *fixture) inbox() (n int) {
	f.each(func(c *conn) {
		if c.stream != nil {
			n += len(c.stream.inbox)
		}
	})
	return n
}

func TestErrorOfAMessageEndsTheStream(t *testing.T) {
	f := start(t, until, func(o *Options) {
		o.Open = func(s *Stream) (Session, error) {
			return &session{Stream: s, serve: until, message: func(b []byte) error {
				return status.Errorf(codes.InvalidArgument, "%q makes no sense", b)
			}}, nil
		}
	})
	c := open(t.Context(), t, f.dial(ours))
	c.send("abc")
	err := c.end()
	require.Equal(t, codes.InvalidArgument, status.Code(err))
	require.Equal(t, `"abc" makes no sense`, status.Convert(err).Message())
}

func TestMessageLargerThanAllowed(t *testing.T) {
	f := start(t, until, func(o *Options) { o.MaxReceive = 1000 })
	c := open(t.Context(), t, f.dial(ours))
	c.send(strings.Repeat("x", 1001))
	err := c.end()
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.Equal(t, "message of 1001 bytes: the limit is 1000 bytes", status.Convert(err).Message())
}

func TestOtherMethodIsUnimplemented(t *testing.T) {
	f := start(t, until)
	err := f.dial(ours).Invoke(t.Context(), "/grpc.health.v1.Health/Check", []byte{}, &[]byte{})
	require.Equal(t, codes.Unimplemented, status.Code(err))
	require.Equal(t, "this connection serves only /slicecast.v1.DistributionService/Stream: for /grpc.health.v1.Health/Check, "+
		"open a connection that offers only the protocol h2 in TLS", status.Convert(err).Message())
}

func TestDeadline(t *testing.T) {
	errs := make(chan error, 1)
	f := start(t, func(s *session) error { errs <- until(s); return nil })
	conn := f.dial(ours)
	conn.Connect()
	require.Eventually(t, func() bool { return conn.GetState() == connectivity.Ready }, patience, tick)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	require.Equal(t, codes.DeadlineExceeded, status.Code(open(ctx, t, conn).end()))
	require.Error(t, <-errs) // either of the two may come first
}

// TestGracefulStop checks that a stream goes on after GOAWAY, and that the next stream uses another
// connection.
func TestGracefulStop(t *testing.T) {
	finish := make(chan struct{})
	f := start(t, func(s *session) error {
		if err := s.Send([]byte("hello")); err != nil {
			return err
		}
		<-finish
		return s.Send([]byte("goodbye"))
	})
	conn := f.dial(ours)
	c := open(t.Context(), t, conn)
	require.Equal(t, "hello", c.receive())
	stopped := make(chan error, 1)
	go func() { stopped <- f.server.GracefulStop(t.Context()) }()
	require.Eventually(t, func() bool { return conn.GetState() != connectivity.Ready }, patience, tick)
	close(finish)
	require.Equal(t, "goodbye", c.receive())
	require.ErrorIs(t, c.end(), io.EOF)
	require.NoError(t, <-stopped)
}

func TestGracefulStopEndsWithItsContext(t *testing.T) {
	f := start(t, func(s *session) error {
		if err := s.Send([]byte("hello")); err != nil {
			return err
		}
		return until(s)
	})
	c := open(t.Context(), t, f.dial(ours))
	require.Equal(t, "hello", c.receive())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, f.server.GracefulStop(ctx), context.Canceled)
	require.Equal(t, codes.Unavailable, status.Code(c.end()))
}

func TestConnectionWithoutAStreamEnds(t *testing.T) {
	f := start(t, echo, func(o *Options) {
		o.MaxIdle, o.PingInterval, o.PingTimeout = 10*time.Millisecond, 10*time.Millisecond, time.Second
	})
	conn := f.dial(ours)
	for range 2 {
		c := open(t.Context(), t, conn)
		c.send("hello")
		require.Equal(t, "hello", c.receive())
		require.NoError(t, c.CloseSend())
		require.ErrorIs(t, c.end(), io.EOF)
		require.Eventually(t, func() bool { return f.connections() == 0 }, patience, tick)
	}
}

// TestRefusedStreamsDoNotKeepAConnection checks that a connection without an admitted call counts
// as idle, however many calls are tried.
func TestRefusedStreamsDoNotKeepAConnection(t *testing.T) {
	f := start(t, echo, func(o *Options) {
		o.Open = func(*Stream) (Session, error) { return nil, status.Error(codes.Unauthenticated, "who are you?") }
	})
	client := f.dial(ours)
	idle := func() (since time.Duration) {
		f.each(func(c *conn) { since = c.pings.idle })
		return since
	}
	require.Equal(t, codes.Unauthenticated, status.Code(open(t.Context(), t, client).end()))
	before := idle()
	require.NotZero(t, before)
	require.Equal(t, codes.Unauthenticated, status.Code(open(t.Context(), t, client).end()))
	require.Equal(t, before, idle())
}

// each calls do for each connection, under its lock.
func (f *fixture) each(do func(*conn)) {
	f.server.mu.Lock()
	defer f.server.mu.Unlock()
	for c := range f.server.conns {
		c.mu.Lock()
		do(c)
		c.mu.Unlock()
	}
}

func (f *fixture) connections() (n int) {
	f.each(func(*conn) { n++ })
	return n
}
