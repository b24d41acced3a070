// These tests prove which server a client is connected to, whatever servers say and do.
package client

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/agent/client/discovery"
	"github.com/slicecast/slicecast/internal/logtest"
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
func ordered(addresses ...string) (out []string) {
	w := &cache.Writer{Cache: NewCache()}
	c := discovery.New(discovery.Options{NodeName: "node-1", Cache: w.Cache})
	for len(addresses) > 0 {
		w.SetServers(asServers(addresses...))
		first, _ := c.Preferred(Server{})
		out = append(out, first.Address)
		addresses = slices.DeleteFunc(slices.Clone(addresses), func(a string) bool { return a == first.Address })
	}
	return out
}

func hint(code codes.Code, d time.Duration) error {
	s, err := status.New(code, "come back later").WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(d)})
	if err != nil {
		panic(err)
	}
	return s.Err()
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
	o.Registerer = prometheus.NewRegistry()
	return o
}

// TestRetryHint checks that the client does not try a server before the time that it asked for, and
// tries other servers meanwhile.
func TestRetryHint(t *testing.T) {
	id := newIdentity(t)
	servers, _, addresses := replicas(t, id, 2)
	servers[0].play = says(hint(codes.ResourceExhausted, time.Hour))
	servers[1].play = says(status.Error(codes.Unavailable, "no hint"))
	o := quiet(id, Options{Servers: Static(addresses...)})
	run(t, NewCache(), o)
	servers[1].waitStreams(t, 4)
	require.Equal(t, 1, servers[0].streams())
	require.EqualValues(t, 1, metric(t, o.Registerer, "retry_hints_total"))
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
	require.Eventually(t, func() bool { return len(cache.Servers()) == 2 }, patience, tick)
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
	o := quiet(id, Options{Servers: Static(addresses[1])})
	run(t, cache, o, func(t *discovery.Times) {
		t.MoveWindow = 10 * time.Millisecond
	})
	<-left
	require.Eventually(t, func() bool { return cache.Node() != nil }, patience, tick)
	require.EqualValues(t, 1, metric(t, o.Registerer, "moves_total", "preferred"))
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
	o := quiet(id, Options{Servers: Static(addresses[1]), DialOptions: []grpc.DialOption{dialer}})
	run(t, NewCache(), o, func(t *discovery.Times) {
		t.MoveWindow, t.ReturnAfter = tick, tick
	})
	for range 3 {
		<-dials
	}
	require.Zero(t, metric(t, o.Registerer, "moves_total", "preferred"))
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
	o := quiet(id, Options{Servers: Static(addresses...)})
	run(t, NewCache(), o, func(t *discovery.Times) {
		t.ReturnAfter = 20 * time.Millisecond
	})
	servers[0].waitStreams(t, 2)
	require.Equal(t, 1, servers[1].streams())
	require.EqualValues(t, 1, metric(t, o.Registerer, "moves_total", "preferred"))
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
	o := quiet(id, Options{Servers: Static(addresses...)})
	run(t, NewCache(), o, func(t *discovery.Times) {
		t.ReturnAfter = 20 * time.Millisecond
	})
	servers[0].waitStreams(t, 2)
	require.Equal(t, 1, servers[1].streams())
	require.EqualValues(t, 1, metric(t, o.Registerer, "moves_total", "preferred"))
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
		for _, end := range []string{"Cannot reach the server", "Lost the connection to the server"} {
			if strings.Contains(line, end) {
				ends = append(ends, end)
			}
		}
	}
	require.Equal(t, []string{"Cannot reach the server", "Lost the connection to the server", "Cannot reach the server"}, ends[:3])
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
	run(t, NewCache(), quiet(id, Options{Servers: Static(addresses...)}), func(t *discovery.Times) {
		t.Settled, t.MinBackoff, t.MaxBackoff = 0, time.Hour, time.Hour
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
			held, save := openCheckpoint(t, path)
			logs := &logtest.Buffer{}
			options := quiet(id, Options{ServerName: test.pinned, Servers: bootstrap(serve(t, id, rogue).address)})
			options.Logger = slog.New(slog.NewTextHandler(logs, nil))
			_, stop := run(t, held, options, func(t *discovery.Times) {
				t.Settled, t.MoveWindow, t.ReturnAfter = time.Hour, time.Millisecond, time.Millisecond
			})
			require.Eventually(t, func() bool {
				return target.streams() > 0 || rogue.streams() == 3 || strings.Contains(logs.String(), "Cannot move to the preferred")
			}, patience, tick)
			stop()
			require.Zero(t, target.streams(), logs)
			save()

			held, _ = openCheckpoint(t, path)
			require.Equal(t, []Server{{Address: at, Name: configured}}, held.Servers())
			honest := &scripted{play: oneShard(1)}
			_, stop = run(t, held, quiet(id, Options{ServerName: test.pinned, Servers: bootstrap(serve(t, id, honest).address)}))
			honest.waitStreams(t, 1)
			stop()
			require.Zero(t, target.streams())
		})
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
	held, save := openCheckpoint(t, path)
	_, stop := run(t, held, quiet(id, Options{Servers: bootstrap(serve(t, id, rogue).address)}))
	rogue.waitStreams(t, 2)
	stop()
	require.Zero(t, target.streams())
	save()
	held, _ = openCheckpoint(t, path)
	require.Len(t, held.Servers(), 1)
	honest := &scripted{play: oneShard(1)}
	_, stop = run(t, held, quiet(id, Options{Servers: bootstrap(serve(t, id, honest).address)}))
	honest.waitStreams(t, 1)
	stop()
	require.Zero(t, target.streams(), "the agent went where the rogue server once said")
}

// TestInventedServers checks that a list of servers that drop packets does not keep a client from
// those of Options.Servers.
func TestInventedServers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var known []Server
		for i := range 1024 {
			known = append(known, Server{Address: fmt.Sprint("192.0.2.1:", i+1)})
		}
		w := &cache.Writer{Cache: NewCache()}
		w.SetServers(known)
		hangs := grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		})
		ctx, cancel := context.WithCancel(t.Context())
		var asked []time.Time
		c := New(Options{
			Cache: w.Cache, NodeName: "node-1", Logger: slog.New(slog.DiscardHandler),
			DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials()), hangs},
			Servers: func(context.Context) ([]Server, error) {
				if asked = append(asked, time.Now()); len(asked) == 2 {
					cancel()
				}
				return nil, nil
			},
		})
		require.NoError(t, c.Run(ctx))
		require.Less(t, asked[1].Sub(asked[0]), 2*time.Minute)
	})
}

// TestServersThatAreGone checks that the client tries only a few servers from a checkpoint before
// it calls Options.Servers, and then the others.
func TestServersThatAreGone(t *testing.T) {
	const few, all = 2, 10
	var known []Server
	for i := range all {
		// No server listens at these addresses.
		known = append(known, Server{Address: fmt.Sprintf("127.0.0.%d:1", i+1)})
	}
	w := &cache.Writer{Cache: NewCache()}
	w.SetServers(known)
	ctx, cancel := context.WithCancel(t.Context())
	registry := prometheus.NewRegistry()
	var tried []float64
	c := New(Options{
		Cache: w.Cache, NodeName: "node-1", Logger: slog.New(slog.DiscardHandler), Registerer: registry,
		DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())},
		Servers: func(context.Context) ([]Server, error) {
			if tried = append(tried, metric(t, registry, "disconnects_total")); len(tried) == 2 {
				cancel()
			}
			return nil, nil
		},
	})
	require.NoError(t, c.Run(ctx))
	require.Equal(t, []float64{few, all + few}, tried)
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
	require.Eventually(t, func() bool { _, _, _, n := a.counts(); return n == 2 }, 3*fanout.DefaultHeartbeat-10*time.Second, tick)
}
