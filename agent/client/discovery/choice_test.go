// These tests prove in which order servers are tried, when they are tried again, and which name a
// server's certificate must have.
package discovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/slicecast/slicecast/agent/client/cache"
)

// asServers returns the Servers at these addresses.
func asServers(addresses ...string) []Server {
	var out []Server
	for _, a := range addresses {
		out = append(out, Server{Address: a})
	}
	return out
}

func TestPreference(t *testing.T) {
	servers := asServers("a", "b", "c", "d")
	first := map[string]int{}
	for i := range 4000 {
		node := fmt.Sprint("node-", i)
		order := preference(servers, node)
		require.ElementsMatch(t, servers, order)
		first[order[0].Address]++
		without := preference(asServers("d", "b", "a"), node)
		if order[0].Address != "c" {
			require.Equal(t, order[0], without[0], "only the nodes of the server that is gone move")
		}
	}
	for _, s := range servers {
		require.InDelta(t, 1000, first[s.Address], 150, s)
	}
}

func TestChoice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := New(Options{NodeName: "node-1"})
		servers := preference(asServers("a", "b", "c"), "node-1")
		require.Equal(t, servers, c.order(servers))
		c.lost = servers[0].Address
		require.Equal(t, []Server{servers[1], servers[2], servers[0]}, c.order(servers), "the one that was lost comes last")

		require.Zero(t, c.firstRested())
		c.rest("a", time.Minute)
		c.rest("a", time.Second)
		c.rest("b", time.Second)
		require.Equal(t, time.Second, c.firstRested())
		require.Equal(t, time.Minute, c.rests("a"))
		require.Zero(t, c.rests("c"))
		<-time.After(2 * time.Second)
		require.Zero(t, c.rests("b"))
		require.Equal(t, 58*time.Second, c.firstRested())
	})
}

// TestServersThatAreNamed checks what a stream may name as a server.
func TestServersThatAreNamed(t *testing.T) {
	c := New(Options{Cache: cache.New(), ServerName: "own"})
	said := []string{"10.0.0.2:1", "[fd00::1]:1", "a.example:1", "10.0.0.2:1", "", "10.0.0.3", ":1", "unix:///run/x:1",
		"dns://8.8.8.8/x:1", "/run/x:1", "x:", strings.Repeat("n", 300) + ":1", "unix-abstract:x", "unix-abstract:1", "unix:x", "unix:1",
		"dns:a.example", "dns:1", "passthrough:x", "passthrough:1", "DNS:1", "vsock:3:1", "10.0.0.2:0", "10.0.0.2:65536", "10.0.0.2:+1",
		"a.example.:1", "..:1", "10.0.0.2:https", "[fe80::1%eth0]:1", "a b:1", "a%2f:1", "a?x:1", "a#x:1", "-a:1", "user@a:1", "\x00a:1"}
	require.Equal(t, []Server{{Address: "10.0.0.2:1", Name: "own"}, {Address: "[fd00::1]:1", Name: "own"}, {Address: "a.example.:1", Name: "own"}, {Address: "a.example:1", Name: "own"}}, c.Named(said, Server{}))
	for i := range 2 * maxKnown {
		said = append(said, fmt.Sprint("many:", i))
	}
	require.LessOrEqual(t, len(c.Named(said, Server{})), maxKnown)
}

// hint returns the error of a server that asks the client to come back after d.
func hint(code codes.Code, d time.Duration) error {
	s, err := status.New(code, "come back later").WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(d)})
	if err != nil {
		panic(err)
	}
	return s.Err()
}

func TestRetryDelay(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want time.Duration
	}{
		"unavailable":     {hint(codes.Unavailable, time.Second), time.Second},
		"exhausted":       {fmt.Errorf("stream: %w", hint(codes.ResourceExhausted, time.Minute)), time.Minute},
		"too long":        {hint(codes.ResourceExhausted, time.Hour), MaxRetryDelay},
		"another code":    {hint(codes.Internal, time.Second), 0},
		"no hint":         {status.Error(codes.Unavailable, ""), 0},
		"not of a server": {errors.New("silent"), 0},
		"the past":        {hint(codes.Unavailable, -time.Second), 0},
	} {
		d, ok := retryDelay(c.err)
		require.Equal(t, c.want, d, name)
		require.Equal(t, c.want > 0, ok, name)
	}
}

// TestNamesOfServers checks that the name in a server's certificate must be one from the
// configuration, whatever addresses servers name.
func TestNamesOfServers(t *testing.T) {
	for name, test := range map[string]struct {
		configured   string
		given, known []Server
		teller       Server
		want         map[string]string
	}{
		"one name for all": {configured: "s.example", teller: Server{Address: "10.0.0.1:1", Name: "a.example"}, given: asServers("10.0.0.1:1"),
			want: map[string]string{"10.0.0.1:1": "s.example", "evil.example:1": "s.example"}},
		"names": {given: []Server{{Address: "10.0.0.1:1", Name: "a.example"}, {Address: "10.0.0.2:1", Name: "b.example"}}, teller: Server{Address: "10.0.0.1:1", Name: "a.example"},
			want: map[string]string{"10.0.0.1:1": "a.example", "10.0.0.2:1": "b.example", "10.0.0.3:1": "a.example", "evil.example:1": "a.example"}},
		"addresses": {given: asServers("10.0.0.1:1", "[fd00::2]:1"), teller: Server{Address: "10.0.0.1:1"},
			want: map[string]string{"10.0.0.1:2": "10.0.0.1", "[fd00::2]:1": "[fd00::2]", "10.0.0.3:1": "10.0.0.1", "evil.example:1": "10.0.0.1"}},
		"addresses of a checkpoint": {known: []Server{{Address: "10.0.0.2:1", Name: "10.0.0.2"}, {Address: "10.0.0.3:1", Name: "x.example"}}, teller: Server{Address: "10.0.0.1:1", Name: "10.0.0.1"},
			want: map[string]string{"10.0.0.1:1": "10.0.0.1", "10.0.0.2:1": "10.0.0.2", "10.0.0.3:1": "10.0.0.1"}},
		"a name and a port": {given: asServers("a.example:1"), teller: Server{Address: "a.example:1"},
			want: map[string]string{"10.0.0.1:1": "a.example", "evil.example:1": "a.example"}},
		"a socket": {given: asServers("unix:///run/x"), teller: Server{Address: "unix:///run/x"}, want: map[string]string{"10.0.0.1:1": "localhost"}},
	} {
		w := &cache.Writer{Cache: cache.New()}
		w.SetServers(test.known)
		c := New(Options{Cache: w.Cache, ServerName: test.configured})
		c.given = test.given
		of := c.names(test.teller)
		for address, want := range test.want {
			require.Equal(t, want, of(address), "%s: %s", name, address)
		}
	}
}

// ending is a Connector whose streams end at once.
type ending struct {
	end   End
	tried []string
}

func (e *ending) Stream(_ context.Context, s Server) End {
	e.tried = append(e.tried, s.Address)
	return e.end
}

func (e *ending) Failed(error) {}

// TestServersRestForMinutes checks that a client comes back within minutes to a server that asked
// it to stay away for as long as possible, even if it knows no other server.
func TestServersRestForMinutes(t *testing.T) {
	for name, end := range map[string]End{
		"retry":   {Err: hint(codes.Unavailable, math.MaxInt64)},
		"drained": {Err: errors.New("drained"), Welcomed: true, Drained: MaxRetryDelay},
		"both":    {Err: hint(codes.Unavailable, math.MaxInt64), Welcomed: true, Drained: MaxRetryDelay},
	} {
		synctest.Test(t, func(t *testing.T) {
			c := New(Options{
				Cache: cache.New(), NodeName: "node-1", Times: DefaultTimes, Logger: slog.New(slog.DiscardHandler),
				Find: func(context.Context) ([]Server, error) { return asServers("a"), nil },
			})
			to := &ending{end: end}
			c.round(t.Context(), to)
			c.round(t.Context(), to)
			require.Equal(t, []string{"a"}, to.tried, name)
			require.Positive(t, c.firstRested(), name)
			require.LessOrEqual(t, c.firstRested(), 3*MaxRetryDelay/2, name)
		})
	}
}

// TestSearchesAreRare checks that a client searches a few times in an outage of ten minutes, and no
// more often for a server that keeps saying that it is stale, and that it is not.
func TestSearchesAreRare(t *testing.T) {
	for name, told := range map[string]time.Duration{"one outage": time.Hour, "a server that lies": 20 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			c := New(Options{Times: DefaultTimes})
			begin, searches := time.Now(), 0
			for time.Since(begin) < 10*time.Minute {
				delay := c.SearchDelay()
				require.GreaterOrEqual(t, delay, DefaultTimes.StaleAfter, name)
				require.LessOrEqual(t, delay, DefaultTimes.MaxSearchPause, name)
				if delay > told {
					<-time.After(told)
					continue
				}
				<-time.After(delay)
				c.Searched()
				searches++
			}
			require.LessOrEqual(t, searches, 7, name)
			<-time.After(2*DefaultTimes.MaxSearchPause + time.Second)
			require.LessOrEqual(t, c.SearchDelay(), 2*DefaultTimes.StaleAfter, "the next outage is another one")
		})
	}
}

// TestOthers checks which servers are asked: a few, at random, and none that rests.
func TestOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &cache.Writer{Cache: cache.New()}
		w.SetServers(asServers("a", "b", "c", "d", "e"))
		c := New(Options{Cache: w.Cache, Times: DefaultTimes})
		c.given = asServers("f", "a")
		c.Heed(Server{Address: "b"}, hint(codes.Unavailable, time.Minute))
		c.Heed(Server{Address: "c"}, errors.New("no hint"))
		found := make(map[string]bool)
		for range 1000 {
			others := c.Others(Server{Address: "a"})
			require.Len(t, others, maxSearched)
			for _, s := range others {
				found[s.Address] = true
			}
		}
		require.Equal(t, map[string]bool{"c": true, "d": true, "e": true, "f": true}, found)
		<-time.After(2 * time.Minute)
		w.SetServers(asServers("b"))
		require.ElementsMatch(t, asServers("b", "f"), c.Others(Server{Address: "a"}))
	})
}
