package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/cespare/xxhash/v2"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Server is a server that a client can connect to.
type Server struct {
	// Address is a gRPC target: host:port or unix:///path.
	Address string
	// Name is the name that the server's certificate must have, unless Options.ServerName is set.
	// Empty means that the credentials' name applies, or else the host of Address.
	Name string
}

// Static returns a function for Options.Servers that always returns the servers at these addresses.
func Static(addresses ...string) func(context.Context) ([]Server, error) {
	var servers []Server
	for _, address := range addresses {
		servers = append(servers, Server{Address: address})
	}
	return func(context.Context) ([]Server, error) { return servers, nil }
}

// preference returns the servers in a node's order of preference, by rendezvous hashing. Each node
// has its own order, and each server is the first choice of about the same share of nodes. If a
// server leaves, only its own nodes move.
func preference(servers []Server, node string) []Server {
	weight := func(s Server) uint64 { return xxhash.Sum64String(node + "\x00" + s.Address) }
	return slices.SortedFunc(slices.Values(servers), func(a, b Server) int {
		return cmp.Or(cmp.Compare(weight(b), weight(a)), cmp.Compare(a.Address, b.Address))
	})
}

// maxKnown bounds the number of servers that a client learns from a stream.
const maxKnown = 1024

// certificateName returns the name that the server's certificate must have if no name is configured
// for all servers.
func (s Server) certificateName() string {
	if s.Name != "" {
		return s.Name
	}
	host, _, err := net.SplitHostPort(s.Address)
	switch {
	case err != nil || strings.HasPrefix(s.Address, "unix:"):
		return "localhost" // gRPC's authority of unix sockets
	case strings.Contains(host, ":"):
		return "[" + host + "]"
	}
	return host
}

// names returns a function that returns the certificate name for a server which teller has named.
// The name always comes from the client's configuration, so that no server can lead the client to a
// server of another name. It is the first of these that exists:
//
//  1. The name that is configured for all servers.
//  2. The name that belongs to the host of the address. The host must be that of a server of
//     Options.Servers, or of a known server whose name is this host.
//  3. The name of teller.
func (c *Client) names(teller Server) func(Server) string {
	if c.options.ServerName != "" {
		return func(Server) string { return c.options.ServerName }
	}
	host := func(s Server) string { return Server{Address: s.Address}.certificateName() }
	own := make(map[string]string)
	for _, s := range c.options.Cache.knownServers() {
		if s.Name == host(s) {
			own[s.Name] = s.Name
		}
	}
	for _, s := range c.choice.given {
		own[host(s)] = s.certificateName()
	}
	return func(s Server) string { return cmp.Or(own[host(s)], teller.certificateName()) }
}

// serversFromProto converts the servers that a server names. It drops invalid addresses and
// duplicates, sorts by address, and keeps maxKnown at most.
func serversFromProto(m *pb.Servers, name func(Server) string) []Server {
	var out []Server
	for _, s := range m.GetServers() {
		// Only host:port is accepted. gRPC knows other kinds of targets, which a server must not be
		// able to choose.
		host, port, err := net.SplitHostPort(s.GetAddress())
		if err != nil || host == "" || port == "" || strings.Contains(s.GetAddress(), "/") || len(s.GetAddress()) > maxAddress || len(out) == maxKnown {
			continue
		}
		server := Server{Address: s.GetAddress()}
		server.Name = name(server)
		out = append(out, server)
	}
	slices.SortFunc(out, func(a, b Server) int { return cmp.Compare(a.Address, b.Address) })
	return slices.CompactFunc(out, func(a, b Server) bool { return a.Address == b.Address })
}

// retryDelay returns the time that a server asked the client to wait before it comes back, and
// whether the server asked for one.
func retryDelay(err error) (time.Duration, bool) {
	var s interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &s) {
		return 0, false
	}
	if code := s.GRPCStatus().Code(); code != codes.ResourceExhausted && code != codes.Unavailable {
		return 0, false
	}
	for _, d := range s.GRPCStatus().Details() {
		if info, ok := d.(*errdetails.RetryInfo); ok && info.GetRetryDelay().AsDuration() > 0 {
			return min(info.GetRetryDelay().AsDuration(), maxRetryDelay), true
		}
	}
	return 0, false
}

// choice decides which server is next. Only the goroutine of Run uses it.
type choice struct {
	// node is the key for rendezvous hashing.
	node string
	// resting maps the addresses of servers that must not be tried yet to the times when they may
	// be.
	resting map[string]time.Time
	// given are the servers that Options.Servers last returned.
	given []Server
	// lost is the address of the server that was lost last. It is tried last. Empty means none.
	lost string
	// moved is when the client last left a server for one that it prefers.
	moved time.Time
}

// order returns servers in the order in which to try them.
func (c *choice) order(servers []Server) []Server {
	out := preference(servers, c.node)
	if i := slices.IndexFunc(out, func(s Server) bool { return s.Address == c.lost }); i >= 0 {
		out = append(slices.Delete(slices.Clone(out), i, i+1), out[i])
	}
	return out
}

// rest keeps the client from trying a server for at least d.
func (c *choice) rest(address string, d time.Duration) {
	if c.resting == nil {
		c.resting = make(map[string]time.Time)
	}
	if until := time.Now().Add(d); until.After(c.resting[address]) {
		c.resting[address] = until
	}
}

// rests returns how long a server must not be tried. 0 means that it may be tried now.
func (c *choice) rests(address string) time.Duration {
	until, ok := c.resting[address]
	if !ok {
		return 0
	}
	d := time.Until(until)
	if d <= 0 {
		delete(c.resting, address)
	}
	return max(d, 0)
}

// firstRested returns the time until the first resting server may be tried again. 0 means that no
// server rests.
func (c *choice) firstRested() time.Duration {
	var first time.Duration
	for address := range c.resting {
		if d := c.rests(address); d > 0 && (first == 0 || d < first) {
			first = d
		}
	}
	return first
}

// Run keeps the client connected until the context ends. It then returns nil.
func (c *Client) Run(ctx context.Context) error {
	defer func() { c.takePrepared(Server{}) }()
	backoff := c.times.minBackoff
	for {
		tried, useful := c.round(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case useful:
			backoff = c.times.minBackoff
			continue
		}
		pause := backoff/2 + rand.N(backoff/2)
		if rested := c.choice.firstRested(); tried == 0 && rested > 0 {
			// Options.Servers may return other servers by then.
			pause = min(rested, c.times.maxBackoff)
		} else {
			backoff = min(2*backoff, c.times.maxBackoff)
		}
		sleep(ctx, pause)
	}
}

// firstKnown is the number of servers known from streams that are tried before those of
// Options.Servers. A checkpoint may name servers that are long gone. Each of them may cost 20 s,
// which is how long gRPC tries to connect if packets are dropped.
const firstKnown = 2

// round tries servers until one stream was useful. It returns how many servers it tried. useful
// reports that the next round may follow at once.
//
// The first servers known from streams come first, then those of Options.Servers, then the others
// known from streams. A server may have invented a thousand of the others. They are therefore tried
// in random order and for a bounded time, so that those of Options.Servers soon have their turn
// again.
func (c *Client) round(ctx context.Context) (tried int, useful bool) {
	seen := make(map[string]bool)
	first := func(context.Context) []Server {
		all := c.choice.order(c.options.Cache.knownServers())
		return all[:min(len(all), firstKnown)]
	}
	var end time.Time
	others := func(ctx context.Context) []Server {
		end = time.Now().Add(c.times.maxBackoff)
		all := slices.Clone(c.options.Cache.knownServers())
		rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		return all
	}
	bootstrap := func(ctx context.Context) []Server { return c.choice.order(c.bootstrap(ctx)) }
	for _, source := range []func(context.Context) []Server{first, bootstrap, others} {
		for _, server := range source(ctx) {
			if !end.IsZero() && time.Now().After(end) {
				break
			}
			if seen[server.Address] || c.choice.rests(server.Address) > 0 {
				continue
			}
			seen[server.Address] = true
			if c.try(ctx, server) || ctx.Err() != nil {
				return len(seen), true
			}
		}
	}
	return len(seen), false
}

func (c *Client) bootstrap(ctx context.Context) []Server {
	servers, err := c.options.Servers(ctx)
	c.choice.given = servers
	c.connection.found(servers)
	if err != nil && ctx.Err() == nil {
		c.connection.ended(err)
		c.log.Error("Can't find a server; what was programmed stays", "err", err)
	}
	return servers
}

// try runs one stream with a server until it ends, and reports whether the stream was useful.
func (c *Client) try(ctx context.Context, server Server) bool {
	start := time.Now()
	s, err := c.stream(ctx, server)
	if ctx.Err() != nil {
		return false
	}
	c.connection.ended(fmt.Errorf("%s: %w", server.Address, err))
	c.metrics.disconnects.Inc()
	c.metrics.connected.Set(0)
	if d, ok := retryDelay(err); ok {
		c.metrics.retryHints.Inc()
		c.choice.rest(server.Address, d+rand.N(d/2+1))
	}
	switch {
	case errors.Is(err, errMove):
		c.log.Info("Moving to the server that is this node's by hashing", "from", server.Address)
		c.metrics.moves.Inc()
		c.choice.moved, c.choice.lost = time.Now(), ""
		return true
	case s.drained > 0:
		c.log.Info("The server has drained", "server", server.Address, "err", err)
		c.choice.rest(server.Address, max(rand.N(s.drained), c.times.minBackoff))
		c.choice.lost = ""
		return s.welcomed
	}
	settled := s.welcomed && time.Since(start) >= c.times.settled
	if settled && status.Code(err) == codes.Unauthenticated {
		c.log.Info("The credentials that the stream began with have expired; coming back with those of now", "server", server.Address)
		return true
	}
	c.logEnd(server.Address, err, s.welcomed)
	if !settled {
		return false
	}
	c.choice.lost = server.Address
	// After a server's death, all its nodes reconnect, so their attempts are spread.
	sleep(ctx, rand.N(2*c.times.minBackoff))
	return true
}

func (c *Client) logEnd(server string, err error, welcomed bool) {
	switch code := status.Code(err); {
	case code == codes.Unauthenticated || code == codes.PermissionDenied:
		c.log.Error("The server refuses this node; check its credentials. What was programmed stays", "server", server, "err", err)
	case !welcomed:
		c.log.Warn("Can't reach the server; what was programmed stays", "server", server, "err", err)
	default:
		c.log.Warn("Lost the server; what was programmed stays", "server", server, "err", err)
	}
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
