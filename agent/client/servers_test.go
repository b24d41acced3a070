package client

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/slicecast/slicecast/internal/proxytest"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/testca"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
)

// asServers returns the Servers at these addresses.
func asServers(addresses ...string) []Server {
	var out []Server
	for _, a := range addresses {
		out = append(out, Server{Address: a})
	}
	return out
}

// ordered returns the addresses in node-1's order of preference.
func ordered(addresses ...string) []string {
	var out []string
	for _, s := range preference(asServers(addresses...), "node-1") {
		out = append(out, s.Address)
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
		c := choice{node: "node-1"}
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

func TestServersFromProto(t *testing.T) {
	own := func(Server) string { return "own" }
	said := &pb.Servers{}
	for _, address := range []string{"10.0.0.2:1", "[fd00::1]:1", "a.example:1", "10.0.0.2:1", "", "10.0.0.3", ":1", "unix:///run/x:1",
		"dns://8.8.8.8/x:1", "/run/x:1", "x:", strings.Repeat("n", 300) + ":1"} {
		said.Servers = append(said.Servers, &pb.Server{Address: address})
	}
	require.Equal(t, []Server{{"10.0.0.2:1", "own"}, {"[fd00::1]:1", "own"}, {"a.example:1", "own"}}, serversFromProto(said, own))
	for i := range 2 * maxKnown {
		said.Servers = append(said.Servers, &pb.Server{Address: fmt.Sprint("many:", i)})
	}
	require.LessOrEqual(t, len(serversFromProto(said, own)), maxKnown)
}

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
		"too long":        {hint(codes.ResourceExhausted, time.Hour), maxRetryDelay},
		"another code":    {hint(codes.Internal, time.Second), 0},
		"no hint":         {status.Error(codes.Unavailable, ""), 0},
		"not of a server": {errSilent, 0},
		"the past":        {hint(codes.Unavailable, -time.Second), 0},
	} {
		d, ok := retryDelay(c.err)
		require.Equal(t, c.want, d, name)
		require.Equal(t, c.want > 0, ok, name)
	}
}

// replicas starts n scripted servers and returns them in node-1's order of preference.
func replicas(t *testing.T, id identity, n int) (servers []*scripted, instances []*instance, addresses []string) {
	t.Helper()
	byAddress := map[string]*scripted{}
	at := map[string]*instance{}
	for range n {
		s := &scripted{}
		i := serve(t, id, s, fanout.ServerOption())
		byAddress[i.address], at[i.address] = s, i
		addresses = append(addresses, i.address)
	}
	addresses = ordered(addresses...)
	for _, a := range addresses {
		servers, instances = append(servers, byAddress[a]), append(instances, at[a])
	}
	return servers, instances, addresses
}

func tells(addresses ...string) *pb.StreamResponse {
	m := &pb.Servers{}
	for _, a := range addresses {
		m.Servers = append(m.Servers, &pb.Server{Address: a})
	}
	return &pb.StreamResponse{Message: &pb.StreamResponse_Servers{Servers: m}}
}

func oneShard(epoch uint64, more ...any) func(pb.DistributionService_StreamServer) error {
	return says(append([]any{welcome(&pb.Welcome{Epoch: epoch, ShardCount: 1}), inSync(1)}, more...)...)
}

func (s *scripted) streams() int {
	hellos, _ := s.seen()
	return len(hellos)
}

func (s *scripted) waitStreams(t *testing.T, n int) {
	t.Helper()
	require.Eventually(t, func() bool { return s.streams() >= n }, patience, tick)
}

func quiet(id identity, o Options) Options {
	o.NodeName, o.DialOptions, o.Logger = "node-1", append(id.client, o.DialOptions...), slog.New(slog.DiscardHandler)
	return o
}

// TestRetryHint checks that the client does not try a server before the time that it asked for, and
// tries other servers meanwhile.
func TestRetryHint(t *testing.T) {
	id := newIdentity(t)
	servers, _, addresses := replicas(t, id, 2)
	servers[0].play = says(hint(codes.ResourceExhausted, time.Hour))
	servers[1].play = says(status.Error(codes.Unavailable, "no hint"))
	c, _ := run(t, NewCache(), quiet(id, Options{Servers: Static(addresses...)}))
	servers[1].waitStreams(t, 4)
	require.Equal(t, 1, servers[0].streams())
	require.EqualValues(t, 1, testutil.ToFloat64(c.metrics.retryHints))
}

// TestServersAreLearned checks that a client uses the servers named by streams. It goes back to
// those of Options.Servers only when none of them answers.
func TestServersAreLearned(t *testing.T) {
	id := newIdentity(t)
	servers, instances, addresses := replicas(t, id, 3)
	// At first, only the last server is known. It names itself and the one before it.
	servers[2].play = oneShard(2, tells(addresses[1:]...))
	servers[1].play = oneShard(1, tells(addresses[1:]...))
	servers[0].play = oneShard(3)
	var mu sync.Mutex
	bootstrap, asked := addresses[2], 0
	cache := NewCache()
	run(t, cache, quiet(id, Options{Servers: func(context.Context) ([]Server, error) {
		mu.Lock()
		defer mu.Unlock()
		asked++
		return asServers(bootstrap), nil
	}}))
	servers[2].waitStreams(t, 1)
	require.Eventually(t, func() bool { return len(cache.knownServers()) == 2 }, patience, tick)
	instances[2].stop()
	servers[1].waitStreams(t, 1)
	mu.Lock()
	require.Equal(t, 1, asked)
	bootstrap = addresses[0]
	mu.Unlock()
	instances[1].stop()
	servers[0].waitStreams(t, 1)
}

// TestMove checks that a node moves to its first choice as soon as a stream names that server. It
// moves only once, whatever servers name later.
func TestMove(t *testing.T) {
	id := newIdentity(t)
	servers, _, addresses := replicas(t, id, 2)
	left := make(chan struct{})
	servers[1].play = func(g pb.DistributionService_StreamServer) error {
		go func() {
			<-g.Context().Done()
			close(left)
		}()
		return oneShard(1, tells(addresses...))(g)
	}
	// The second server does not name itself.
	servers[0].play = oneShard(2, tells(addresses[1]), nodeUpdate("node-1", &pb.Node{Name: "node-1"}))
	cache := NewCache()
	c, _ := run(t, cache, quiet(id, Options{Servers: Static(addresses[1])}), func(t *times) {
		t.moveWindow = 10 * time.Millisecond
	})
	<-left
	require.Eventually(t, func() bool { return cache.Node() != nil }, patience, tick)
	require.EqualValues(t, 1, testutil.ToFloat64(c.metrics.moves))
	require.Equal(t, 1, servers[0].streams())
	require.Equal(t, 1, servers[1].streams())
}

// TestMoveToAServerThatIsAway checks that a node stays where it is if it cannot reach its first
// choice.
func TestMoveToAServerThatIsAway(t *testing.T) {
	id := newIdentity(t)
	servers, instances, addresses := replicas(t, id, 2)
	instances[0].stop()
	servers[1].play = oneShard(1, tells(addresses...))
	dials := make(chan struct{}, 100)
	dialer := grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
		if address == addresses[0] {
			dials <- struct{}{}
		}
		return (&net.Dialer{}).DialContext(ctx, "tcp", address)
	})
	c, _ := run(t, NewCache(), quiet(id, Options{Servers: Static(addresses[1]), DialOptions: []grpc.DialOption{dialer}}), func(t *times) {
		t.moveWindow, t.returnAfter = tick, tick
	})
	for range 3 {
		<-dials
	}
	require.Zero(t, testutil.ToFloat64(c.metrics.moves))
	require.Equal(t, 1, servers[1].streams())
}

// TestReturn checks that a node that had to leave its server returns to it some time later.
func TestReturn(t *testing.T) {
	id := newIdentity(t)
	servers, _, addresses := replicas(t, id, 2)
	drain := &pb.StreamResponse{Message: &pb.StreamResponse_Drain{Drain: &pb.Drain{ReconnectWithinMs: 1}}}
	servers[0].play = func(g pb.DistributionService_StreamServer) error {
		if servers[0].streams() == 1 {
			return oneShard(1, tells(addresses...), drain, status.Error(codes.Unavailable, "draining"))(g)
		}
		return oneShard(1, tells(addresses...))(g)
	}
	servers[1].play = oneShard(2, tells(addresses...))
	c, _ := run(t, NewCache(), quiet(id, Options{Servers: Static(addresses...)}), func(t *times) {
		t.returnAfter = 20 * time.Millisecond
	})
	servers[0].waitStreams(t, 2)
	require.Equal(t, 1, servers[1].streams())
	require.EqualValues(t, 1, testutil.ToFloat64(c.metrics.moves))
}

// TestReturnToAGivenServer checks the same for a node whose servers name no others.
func TestReturnToAGivenServer(t *testing.T) {
	id := newIdentity(t)
	servers, _, addresses := replicas(t, id, 2)
	servers[0].play = func(g pb.DistributionService_StreamServer) error {
		if servers[0].streams() == 1 {
			return status.Error(codes.Unavailable, "not now")
		}
		return oneShard(1)(g)
	}
	servers[1].play = oneShard(2)
	c, _ := run(t, NewCache(), quiet(id, Options{Servers: Static(addresses...)}), func(t *times) {
		t.returnAfter = 20 * time.Millisecond
	})
	servers[0].waitStreams(t, 2)
	require.Equal(t, 1, servers[1].streams())
	require.EqualValues(t, 1, testutil.ToFloat64(c.metrics.moves))
}

// TestNewServersWhileAllRest checks that a client calls Options.Servers and finds new servers while
// all servers that it knows have asked for time.
func TestNewServersWhileAllRest(t *testing.T) {
	id := newIdentity(t)
	servers, _, addresses := replicas(t, id, 2)
	servers[0].play = says(hint(codes.Unavailable, time.Hour))
	servers[1].play = oneShard(1)
	var asked atomic.Int32
	run(t, NewCache(), quiet(id, Options{Servers: func(context.Context) ([]Server, error) {
		if asked.Add(1) < 4 {
			return asServers(addresses[0]), nil
		}
		return asServers(addresses...), nil
	}}))
	servers[1].waitStreams(t, 1)
	require.Equal(t, 1, servers[0].streams())
}

// TestLostOrOutOfReach checks that the log distinguishes a server that was lost from one that never
// answered.
func TestLostOrOutOfReach(t *testing.T) {
	id := newIdentity(t)
	servers, _, addresses := replicas(t, id, 1)
	servers[0].play = func(g pb.DistributionService_StreamServer) error {
		if servers[0].streams() == 2 {
			return oneShard(1, status.Error(codes.Unavailable, "welcomed"))(g)
		}
		return status.Error(codes.Unavailable, "not now")
	}
	var mu sync.Mutex
	var log bytes.Buffer
	o := quiet(id, Options{Servers: Static(addresses...)})
	o.Logger = slog.New(slog.NewTextHandler(writer(func(b []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return log.Write(b)
	}), nil))
	_, stop := run(t, NewCache(), o)
	servers[0].waitStreams(t, 4)
	stop()
	var ends []string
	for line := range strings.Lines(log.String()) {
		for _, end := range []string{"Can't reach the server", "Lost the server"} {
			if strings.Contains(line, end) {
				ends = append(ends, end)
			}
		}
	}
	require.Equal(t, []string{"Can't reach the server", "Lost the server", "Can't reach the server"}, ends[:3])
}

// TestExpiredCredentials checks that a client whose credentials have expired returns to the same
// server at once.
func TestExpiredCredentials(t *testing.T) {
	id := newIdentity(t)
	servers, _, addresses := replicas(t, id, 3)
	var streams atomic.Int32
	for _, s := range servers {
		s.play = func(g pb.DistributionService_StreamServer) error {
			if streams.Add(1) < 4 {
				return oneShard(1, status.Error(codes.Unauthenticated, "expired"))(g)
			}
			return oneShard(1)(g)
		}
	}
	run(t, NewCache(), quiet(id, Options{Servers: Static(addresses...)}), func(t *times) {
		t.settled, t.minBackoff, t.maxBackoff = 0, time.Hour, time.Hour
	})
	require.Eventually(t, func() bool { return streams.Load() == 4 }, patience, tick)
	for _, s := range servers {
		require.Contains(t, []int{0, 4}, s.streams())
	}
}

// writer is a function that implements io.Writer.
type writer func([]byte) (int, error)

func (w writer) Write(b []byte) (int, error) { return w(b) }

// TestServerName checks that a server's certificate must have the name in its Server.
func TestServerName(t *testing.T) {
	id := newIdentity(t)
	server := &scripted{play: oneShard(1)}
	i := serve(t, id, server, fanout.ServerOption())
	var mu sync.Mutex
	name, asked := "other.example", 0
	run(t, NewCache(), quiet(id, Options{Servers: func(context.Context) ([]Server, error) {
		mu.Lock()
		defer mu.Unlock()
		if asked++; asked == 3 {
			name = "server.example"
		}
		return []Server{{Address: i.address, Name: name}}, nil
	}}))
	server.waitStreams(t, 1)
	mu.Lock()
	defer mu.Unlock()
	require.Equal(t, 3, asked, "with another name it is not the server")
}

// TestServerNameIsPinned checks that an agent stays away from a server whose certificate has
// another name than the configured one. A rogue server with a good certificate names that server
// and its certificate's name, which is from the same CA. The agent also stays away when it starts
// from its checkpoint.
func TestServerNameIsPinned(t *testing.T) {
	const configured, others = "server.example", "other.example"
	ca, err := testca.New()
	require.NoError(t, err)
	id := identityOf(t, ca, configured)
	for name, test := range map[string]struct {
		pinned string // sets Options.ServerName
		stays  bool   // the rogue keeps its stream open, so that the agent moves by itself
	}{
		"configured, lost":  {configured, false},
		"configured, moves": {configured, true},
		"by address, lost":  {"", false},
		"by address, moves": {"", true},
	} {
		t.Run(name, func(t *testing.T) {
			target := &scripted{play: oneShard(1)}
			at := serve(t, identityOf(t, ca, others), target).address
			// Field 2 of the wire's Server was once the name of its certificate.
			list := tells(at)
			list.GetServers().GetServers()[0].ProtoReflect().SetUnknown(
				protowire.AppendString(protowire.AppendTag(nil, 2, protowire.BytesType), others))
			script := []any{list}
			if !test.stays {
				script = append(script, status.Error(codes.Unavailable, "gone"))
			}
			rogue := &scripted{play: oneShard(1, script...)}
			bootstrap := func(address string) func(context.Context) ([]Server, error) {
				return func(context.Context) ([]Server, error) { return []Server{{Address: address, Name: configured}}, nil }
			}
			path := filepath.Join(t.TempDir(), "checkpoint")
			k, logs := open(t, path, NewCache()), &logBuffer{}
			options := quiet(id, Options{ServerName: test.pinned, Servers: bootstrap(serve(t, id, rogue).address)})
			options.Logger = slog.New(slog.NewTextHandler(logs, nil))
			_, stop := run(t, k.cache, options, func(t *times) { t.settled, t.moveWindow, t.returnAfter = time.Hour, time.Millisecond, time.Millisecond })
			require.Eventually(t, func() bool {
				return target.streams() > 0 || rogue.streams() == 3 || strings.Contains(logs.String(), "can't be reached; staying")
			}, patience, tick)
			stop()
			require.Zero(t, target.streams(), logs)
			k.save()

			k = open(t, path, NewCache())
			require.Equal(t, []Server{{Address: at, Name: configured}}, k.cache.knownServers())
			honest := &scripted{play: oneShard(1)}
			_, stop = run(t, k.cache, quiet(id, Options{ServerName: test.pinned, Servers: bootstrap(serve(t, id, honest).address)}))
			honest.waitStreams(t, 1)
			stop()
			require.Zero(t, target.streams())
		})
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
		"names": {given: []Server{{"10.0.0.1:1", "a.example"}, {"10.0.0.2:1", "b.example"}}, teller: Server{Address: "10.0.0.1:1", Name: "a.example"},
			want: map[string]string{"10.0.0.1:1": "a.example", "10.0.0.2:1": "b.example", "10.0.0.3:1": "a.example", "evil.example:1": "a.example"}},
		"addresses": {given: asServers("10.0.0.1:1", "[fd00::2]:1"), teller: Server{Address: "10.0.0.1:1"},
			want: map[string]string{"10.0.0.1:2": "10.0.0.1", "[fd00::2]:1": "[fd00::2]", "10.0.0.3:1": "10.0.0.1", "evil.example:1": "10.0.0.1"}},
		"addresses of a checkpoint": {known: []Server{{"10.0.0.2:1", "10.0.0.2"}, {"10.0.0.3:1", "x.example"}}, teller: Server{"10.0.0.1:1", "10.0.0.1"},
			want: map[string]string{"10.0.0.1:1": "10.0.0.1", "10.0.0.2:1": "10.0.0.2", "10.0.0.3:1": "10.0.0.1"}},
		"a name and a port": {given: asServers("a.example:1"), teller: Server{Address: "a.example:1"},
			want: map[string]string{"10.0.0.1:1": "a.example", "evil.example:1": "a.example"}},
		"a socket": {given: asServers("unix:///run/x"), teller: Server{Address: "unix:///run/x"}, want: map[string]string{"10.0.0.1:1": "localhost"}},
	} {
		cache := NewCache()
		cache.setServers(test.known)
		c := New(Options{Cache: cache, ServerName: test.configured})
		c.choice.given = test.given
		of := c.names(test.teller)
		for address, want := range test.want {
			require.Equal(t, want, of(Server{Address: address}), "%s: %s", name, address)
		}
	}
}

// TestNameInACheckpoint covers a configuration without a name for all servers. A rogue server names
// another one by its host name, for which that one has a certificate. An agent that starts from its
// checkpoint must still require the name from its configuration.
func TestNameInACheckpoint(t *testing.T) {
	ca, err := testca.New()
	require.NoError(t, err)
	id := identityOf(t, ca, "server.example")
	target := &scripted{play: oneShard(1)}
	_, port, err := net.SplitHostPort(serve(t, identityOf(t, ca, "localhost"), target).address)
	require.NoError(t, err)
	rogue := &scripted{play: oneShard(1, tells("localhost:"+port), status.Error(codes.Unavailable, "gone"))}
	bootstrap := func(address string) func(context.Context) ([]Server, error) {
		return func(context.Context) ([]Server, error) {
			return []Server{{Address: address, Name: "server.example"}}, nil
		}
	}
	path := filepath.Join(t.TempDir(), "checkpoint")
	k := open(t, path, NewCache())
	_, stop := run(t, k.cache, quiet(id, Options{Servers: bootstrap(serve(t, id, rogue).address)}))
	rogue.waitStreams(t, 2)
	stop()
	require.Zero(t, target.streams())
	k.save()
	k = open(t, path, NewCache())
	require.Len(t, k.cache.knownServers(), 1)
	honest := &scripted{play: oneShard(1)}
	_, stop = run(t, k.cache, quiet(id, Options{Servers: bootstrap(serve(t, id, honest).address)}))
	honest.waitStreams(t, 1)
	stop()
	require.Zero(t, target.streams(), "the agent went where the rogue server once said")
}

// TestInventedServers checks that a list of servers that drop packets does not keep a client from
// those of Options.Servers.
func TestInventedServers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var known []Server
		for i := range maxKnown {
			known = append(known, Server{Address: fmt.Sprint("192.0.2.1:", i+1)})
		}
		cache := NewCache()
		cache.setServers(known)
		hangs := grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		})
		c := New(Options{
			Cache: cache, NodeName: "node-1", Logger: slog.New(slog.DiscardHandler), Servers: Static(),
			DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials()), hangs},
		})
		begin := time.Now()
		_, useful := c.round(t.Context())
		require.False(t, useful)
		require.Less(t, time.Since(begin), 2*time.Minute)
	})
}

// TestServersThatAreGone checks that the client tries only a few servers from a checkpoint before
// it calls Options.Servers.
func TestServersThatAreGone(t *testing.T) {
	var known []Server
	for i := range 10 {
		// No server listens at these addresses.
		known = append(known, Server{Address: fmt.Sprintf("127.0.0.%d:1", i+1)})
	}
	cache := NewCache()
	cache.setServers(known)
	var c *Client
	asked := 0
	c = New(Options{
		Cache: cache, NodeName: "node-1", Logger: slog.New(slog.DiscardHandler),
		DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())},
		Servers: func(context.Context) ([]Server, error) {
			asked++
			require.EqualValues(t, firstKnown, testutil.ToFloat64(c.metrics.disconnects))
			return nil, nil
		},
	})
	tried, useful := c.round(t.Context())
	require.False(t, useful)
	require.Equal(t, len(known), tried, "then the others")
	require.Equal(t, 1, asked)
}

// TestServerThatIsCutOff checks that a client leaves a server that falls silent without closing its
// connection, long before the server has missed its heartbeats.
func TestServerThatIsCutOff(t *testing.T) {
	t.Parallel()
	id := newIdentity(t)
	s, err := store.New(store.Options{})
	require.NoError(t, err)
	s.Upsert(named("web", "web-1", 1), 1)
	s.Synced()
	server := serveStore(t, id, s, fanout.DefaultHeartbeat)
	proxies := make(map[string]*proxytest.Proxy)
	var addresses []string
	for range 2 {
		p := proxytest.New(t, server.address)
		proxies[p.Address()], addresses = p, append(addresses, p.Address())
	}
	a := connect(t, id, NewCache(), nil, addresses...)
	a.waitInSync(t, 1)
	proxies[a.Connection().Server.Address].Die()
	require.Eventually(t, func() bool { _, _, _, n := a.counts(); return n == 2 }, silentBeats*fanout.DefaultHeartbeat-10*time.Second, tick)
}
