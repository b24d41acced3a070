// This file runs servers and relays, which are those of server/app, and holds the convergence that
// they report to what the nodes' kernels really held.
package simulate

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/source/kube"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/app"
	"github.com/slicecast/slicecast/server/fanout"
)

const (
	serverPort = 8472
	// maxBehindWait is the default of --max-behind-wait.
	maxBehindWait = 10 * time.Second
	// tombstones are few, so that clients are often away for more removals.
	tombstones = 3
)

// server is a server or a relay, with the parts that change with each of its lives.
type server struct {
	world   *world
	name    string
	address netip.AddrPort
	api     *apiServer // nil for a relay
	relayed bool

	life *serverLife // nil while it does not run
}

type serverLife struct {
	app       *app.Server
	process   *process
	transport *http.Transport
	registry  *accounts
	cancel    context.CancelFunc
	running   sync.WaitGroup
}

func (s *server) host() string { return s.address.Addr().String() }

func (s *server) start() {
	w := s.world
	l := &serverLife{process: w.network.process(s.host()), registry: newAccounts()}
	c := app.Config{
		SourceKind: "kube", Listener: l.process.listen(s.address), Shards: w.shards, Tombstones: tombstones,
		HeartbeatInterval: fanout.DefaultHeartbeat, DrainWindow: 4 * time.Second, GracePeriod: 8 * time.Second,
		MaxBehindWait: maxBehindWait, MaxColdSyncBytes: fanout.DefaultColdBytes,
		Logger: w.logger(s.name), Registry: l.registry,
	}
	// Roots name roots, and relays name relays, or relays would follow relays.
	for _, address := range w.addresses(s.relayed) {
		c.Servers = append(c.Servers, &pb.Server{Address: address})
	}
	var err error
	if w.pki != nil {
		c.TLS, c.Now = w.pki.renewServer(s, lifetime), w.pki.clockOf(s.name)
	}
	if s.relayed {
		c.Upstream = &client.Options{
			Servers: client.Static(w.addresses(false)...), Logger: c.Logger, Registerer: l.registry,
			DialOptions: append(w.credentials(relayName), grpc.WithContextDialer(l.process.dialGRPC),
				w.skewed(s.name, func() form { return w.formOf(s.host()) })),
		}
	} else {
		l.transport = newTransport(l.process)
		c.Source, err = kube.New(kube.Options{
			Config: &rest.Config{Host: "http://" + s.api.address.String(), Transport: l.transport, QPS: -1},
			Log:    c.Logger, Metrics: l.registry,
		})
	}
	if err == nil {
		l.app, err = app.New(c)
	}
	if err != nil {
		w.violated("%s does not start: %v", s.name, err)
		return
	}
	w.network.mu.Lock()
	l.process.keeps = l.keeps
	w.network.mu.Unlock()
	ctx, cancel := context.WithCancel(context.Background())
	l.cancel = cancel
	l.running.Go(func() {
		if err := l.app.Run(ctx); err != nil && !l.process.hasEnded() {
			w.violated("%s ended: %v", s.name, err)
		}
		if l.transport != nil {
			l.transport.CloseIdleConnections()
		}
	})
	w.mu.Lock()
	w.registries = append(w.registries, l.registry.Registry)
	w.mu.Unlock()
	s.life = l
}

// kill ends the server as SIGKILL does.
func (s *server) kill() {
	if l := s.life; l != nil {
		l.process.kill()
		s.world.bury(l.cancel, &l.running)
		s.life = nil
		s.world.setLie(s.host(), lie{})
	}
}

// stop lets the server drain, as SIGTERM does. It returns at once.
func (s *server) stop() {
	if l := s.life; l != nil {
		s.life = nil
		s.world.setLie(s.host(), lie{})
		l.cancel()
		s.world.graves.Go(func() {
			l.running.Wait()
			l.process.kill()
		})
	}
}

// gaveUp returns how often servers have served a client that had seen newer state.
func (w *world) gaveUp() (sum float64) {
	w.mu.Lock()
	registries := slices.Clone(w.registries)
	w.mu.Unlock()
	for _, r := range registries {
		families, err := r.Gather()
		if err != nil {
			w.violated("metrics: %v", err)
		}
		for _, f := range families {
			if f.GetName() != "slicecast_server_behind_waits_total" {
				continue
			}
			for _, m := range f.GetMetric() {
				for _, l := range m.GetLabel() {
					if l.GetValue() == "gave_up" {
						sum += m.GetCounter().GetValue()
					}
				}
			}
		}
	}
	return sum
}

// convergence knows when nodes had what programmed.
type convergence struct {
	mu sync.Mutex // guards nodes
	// nodes has the acknowledgements of each node in the order of their times.
	nodes map[nodeShard][]acknowledged
}

type nodeShard struct {
	node  string
	epoch uint64
	shard uint32
}

type acknowledged struct {
	sequence uint64
	at       time.Time
}

func (c *convergence) programmed(node string, epoch uint64, shard uint32, sequence uint64, at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := nodeShard{node, epoch, shard}
	all := c.nodes[key]
	if len(all) > 1024 {
		all = all[512:]
	}
	c.nodes[key] = append(all, acknowledged{sequence, at})
}

// by returns how many nodes had a position programmed at a time.
func (c *convergence) by(epoch uint64, shard uint32, sequence uint64, at time.Time) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for key, all := range c.nodes {
		if key.epoch != epoch || key.shard != shard {
			continue
		}
		for _, a := range all {
			if a.at.After(at) {
				break
			}
			if a.sequence >= sequence {
				n++
				break
			}
		}
	}
	return n
}

// compareConvergence asks a server for its status and compares its convergence with the truth.
func (w *world) compareConvergence(s *server) {
	if s.life == nil || !s.relayed && w.hasRelays() {
		return // a root's positions are not those that the nodes of its relays acknowledge
	}
	var status *pb.GetStatusResponse
	if err := w.ask(s, func(ctx context.Context, c pb.DebugServiceClient) (err error) {
		status, err = c.GetStatus(ctx, &pb.GetStatusRequest{})
		return err
	}); err != nil {
		return // it may be out of reach
	}
	for _, c := range status.GetConvergences() {
		for _, share := range []struct {
			percent int
			time    interface{ AsDuration() time.Duration }
			known   bool
		}{
			{50, c.GetTimeToHalf(), c.GetTimeToHalf() != nil}, {99, c.GetTimeToMost(), c.GetTimeToMost() != nil},
			{100, c.GetTimeToAll(), c.GetTimeToAll() != nil},
		} {
			if !share.known {
				continue
			}
			at := c.GetPublishTime().AsTime().Add(share.time.AsDuration())
			least := (int(c.GetNodes())*share.percent + 99) / 100
			if n := w.convergence.by(status.GetEpoch(), c.GetShard(), c.GetSequence(), at); n < least {
				w.violated("%s reports that %d%% of %d nodes had sequence %d of shard %d after %v, but %d had",
					s.name, share.percent, c.GetNodes(), c.GetSequence(), c.GetShard(), share.time.AsDuration(), n)
			}
		}
	}
	w.observed("%s: %d convergences", s.name, len(status.GetConvergences()))
}

func (w *world) hasRelays() bool { return len(w.addresses(true)) > 0 }

// addresses returns the addresses of the relays, or those of the other servers.
func (w *world) addresses(relays bool) (out []string) {
	for _, s := range w.servers {
		if s.relayed == relays {
			out = append(out, s.address.String())
		}
	}
	return out
}

func address(format string, i int, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(fmt.Sprintf(format, i)), port)
}
