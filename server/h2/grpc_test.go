package h2

import (
	"context"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

func TestStreamWithGRPCClient(t *testing.T) {
	f := start(t, echo)
	conn := f.dial(ours)
	for range 3 { // one after the other on one connection
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
			frames := []string{"a", strings.Repeat("b", 60<<10), "", strings.Repeat("c", 20<<20), "d"}
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
					require.True(t, want == c.receive()) //nolint:testifylint // megabytes are nothing to print
				}
			}
			big := strings.Repeat("e", 128<<10)
			c.send(big)
			require.Equal(t, len(big), len(c.receive()))
		})
	}
}

// What a session can know of a client is what it would know in a handler of grpc-go.
func TestContextIsThatOfGRPC(t *testing.T) {
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
