// Package discovery decides which server a client connects to, and when: from the servers that it
// is given and those that streams name, in the node's own order, and by how attempts end. It opens
// no connection itself.
//
// # Guarantees
//
//   - A server that asked for time is not tried before that time.
//   - The name that a server's certificate must have comes from the client's configuration. No
//     server can lead a client to a server of another name.
//   - The servers that a client is given have their turn within half a minute, whatever servers
//     streams have named.
package discovery

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/slicecast/slicecast/agent/client/cache"
)

// Times holds a client's delays.
type Times struct {
	// MinBackoff and MaxBackoff bound the pause after all servers have been tried. The pause is
	// chosen at random between half the back-off and all of it. The back-off doubles each round.
	MinBackoff, MaxBackoff time.Duration
	// Settled is how long a stream must live to reset the back-off.
	Settled time.Duration
	// MoveWindow is the time within which nodes move after the set of servers has changed.
	MoveWindow time.Duration
	// ReturnAfter is the minimum time that a node stays on a server that is not its first choice.
	// The maximum is twice as long.
	ReturnAfter time.Duration
	// StaleAfter is the minimum time that a node stays on a server that is stale. The maximum is
	// twice as long.
	StaleAfter time.Duration
	// MinSearchPause and MaxSearchPause bound the pause between two searches for a server that is
	// not stale. The pause is chosen and grows as the back-off does.
	MinSearchPause, MaxSearchPause time.Duration
}

// DefaultTimes are the delays of a client unless a test shortens them.
var DefaultTimes = Times{
	MinBackoff: 500 * time.Millisecond, MaxBackoff: 30 * time.Second, Settled: 10 * time.Second,
	MoveWindow: 30 * time.Second, ReturnAfter: 5 * time.Minute,
	// Servers say only after 10 s that they are stale. A server that is restarted, or whose API
	// server is, has half a minute in all to recover before any node moves.
	StaleAfter: 15 * time.Second, MinSearchPause: time.Minute, MaxSearchPause: 5 * time.Minute,
}

// maxSearched is how many servers a client asks in one search for a server that is not stale.
const maxSearched = 3

// MaxRetryDelay bounds the times that a server may ask for: the delay before the client returns to
// it, and the interval between heartbeats.
const MaxRetryDelay = 5 * time.Minute

// Options configure a Choice. All but ServerName and NodeName are required.
type Options struct {
	// Find returns the servers to start with. It is called in each round of attempts in which the
	// first servers known from streams do not answer.
	Find Finder
	// ServerName is the name that every server's certificate must have. Empty means that each
	// Server's own Name applies.
	ServerName string
	// NodeName is the key for rendezvous hashing. Empty means a random key.
	NodeName string
	// Cache holds the servers that streams have named.
	Cache *cache.Cache
	Times Times
	// Logger is the log.
	Logger *slog.Logger
	// Registerer registers the metrics, in Subsystem. nil means that they are not registered.
	Registerer prometheus.Registerer
	Subsystem  string
}

// Choice decides which server is next. Except for Servers, Others, Heed, Searched, SearchDelay and
// ReturnDelay, only the goroutine of Run uses it, which includes Connector.Stream.
//
// Invariants:
//
//  1. resting has only servers that asked for time or that drained. rest drops those whose time is
//     over, so it stays small.
//  2. given changes under mu. The goroutine of Run reads it without mu, because it alone changes
//     given.
//  3. There is no search before searchAgain, whatever servers say.
type Choice struct {
	options Options
	metrics *metrics
	// next is the server that the client has just moved to. It is tried first. Zero means none.
	next Server
	// lost is the address of the server that was lost last. It is tried last. Empty means none.
	lost string
	// moved is when the client last moved from one server to another.
	moved time.Time

	mu    sync.Mutex // guards the fields below
	given []Server   // the servers that Options.Find last found
	// resting maps the addresses of servers that must not be tried yet to the times when they may
	// be.
	resting map[string]time.Time
	// searchPause is the pause after the last search for a server that is not stale, which ends at
	// searchAgain.
	searchPause time.Duration
	searchAgain time.Time
}

// New returns a Choice.
func New(o Options) *Choice {
	o.NodeName = cmp.Or(o.NodeName, crand.Text())
	return &Choice{options: o, metrics: newMetrics(o.Registerer, o.Subsystem), resting: make(map[string]time.Time)}
}

// Servers returns the servers that the client knows, by address.
func (c *Choice) Servers() []Server {
	c.mu.Lock()
	defer c.mu.Unlock()
	return sorted(slices.Concat(c.options.Cache.Servers(), c.given))
}

// Named returns the servers at the addresses that a server has named, with the names that their
// certificates must have. It drops invalid addresses and duplicates, sorts by address, and keeps
// maxKnown at most.
func (c *Choice) Named(addresses []string, by Server) []Server {
	name := c.names(by)
	var out []Server
	for _, address := range addresses {
		if valid(address) && len(out) < maxKnown {
			out = append(out, Server{Address: address, Name: name(address)})
		}
	}
	return sorted(out)
}

// names returns a function that returns the certificate name for the address of a server which
// teller has named. The name always comes from the client's configuration, so that no server can
// lead the client to a server of another name. It is the first of these that exists:
//
//  1. The name that is configured for all servers.
//  2. The name that belongs to the host of the address. The host must be that of a given server, or
//     of a known server whose name is this host.
//  3. The name of teller.
func (c *Choice) names(teller Server) func(address string) string {
	if c.options.ServerName != "" {
		return func(string) string { return c.options.ServerName }
	}
	own := make(map[string]string)
	for _, s := range c.options.Cache.Servers() {
		if s.Name == hostName(s.Address) {
			own[s.Name] = s.Name
		}
	}
	for _, s := range c.given {
		own[hostName(s.Address)] = certificateName(s)
	}
	return func(address string) string { return cmp.Or(own[hostName(address)], certificateName(teller)) }
}

// find returns the given servers. If they cannot be found now, it returns what Options.Find knows.
func (c *Choice) find(ctx context.Context, to Connector) []Server {
	servers, err := c.options.Find(ctx)
	if err != nil && ctx.Err() == nil {
		to.Failed(err)
		c.options.Logger.Error("Cannot find a server, trying again; the rules in the kernel stay", "err", err)
	}
	if len(servers) > 0 {
		c.mu.Lock()
		c.given = slices.Clone(servers)
		c.mu.Unlock()
	}
	return servers
}

// order returns servers in the order in which to try them.
func (c *Choice) order(servers []Server) []Server {
	out := preference(servers, c.options.NodeName)
	if i := slices.IndexFunc(out, func(s Server) bool { return s.Address == c.lost }); i >= 0 {
		out = append(slices.Delete(slices.Clone(out), i, i+1), out[i])
	}
	return out
}

// rest keeps the client from trying a server for at least d.
func (c *Choice) rest(address string, d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.resting, func(_ string, until time.Time) bool { return time.Until(until) <= 0 })
	if until := time.Now().Add(d); until.After(c.resting[address]) {
		c.resting[address] = until
	}
}

// rests returns how long a server must not be tried. 0 means that it may be tried now.
func (c *Choice) rests(address string) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return max(time.Until(c.resting[address]), 0)
}

// firstRested returns the time until the first resting server may be tried again. 0 means that no
// server rests.
func (c *Choice) firstRested() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	var first time.Duration
	for _, until := range c.resting {
		if d := time.Until(until); d > 0 && (first == 0 || d < first) {
			first = d
		}
	}
	return first
}

type metrics struct {
	disconnects, retryHints prometheus.Counter
	moves                   *prometheus.CounterVec
}

// These are the values of the label of the metric of moves.
const (
	movePreferred = "preferred"
	moveStale     = "stale"
)

func newMetrics(r prometheus.Registerer, subsystem string) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return promauto.With(r).NewCounter(prometheus.CounterOpts{
			Namespace: "slicecast", Subsystem: subsystem, Name: name, Help: help,
		})
	}
	m := &metrics{
		disconnects: counter("disconnects_total", "Number of streams that ended and of attempts to connect that failed."),
		moves: promauto.With(r).NewCounterVec(prometheus.CounterOpts{
			Namespace: "slicecast", Subsystem: subsystem, Name: "moves_total",
			Help: "Number of moves to another server, by reason: preferred (the node prefers that server) or stale " +
				"(the server that was left said that it may lack changes).",
		}, []string{"reason"}),
		retryHints: counter("retry_hints_total",
			"Number of attempts that a server answered with a time to wait before the next one."),
	}
	for _, reason := range []string{movePreferred, moveStale} {
		m.moves.WithLabelValues(reason) // rates need the series before its first increment
	}
	return m
}

// Preferred returns the server that the node prefers to current. ok is false if it prefers none. If
// no stream has named servers, the given ones count.
func (c *Choice) Preferred(current Server) (preferred Server, ok bool) {
	servers := c.options.Cache.Servers()
	if len(servers) == 0 {
		servers = c.given
	}
	servers = preference(servers, c.options.NodeName)
	if len(servers) == 0 || servers[0].Address == current.Address {
		return Server{}, false
	}
	return servers[0], true
}

// MoveDelay returns when a stream should be left for the preferred server. If the stream has named
// other servers than those known before, the client moves within MoveWindow. If it is on another
// server for any other reason, or has moved recently, it waits for ReturnDelay, so that no node
// moves back and forth. failed is when the stream's last attempt to move failed; zero if none has.
func (c *Choice) MoveDelay(to Server, serversChanged bool, failed time.Time) time.Duration {
	times := &c.options.Times
	d := rand.N(times.MoveWindow)
	if !serversChanged || time.Since(c.moved) < times.ReturnAfter || time.Since(failed) < times.ReturnAfter {
		d = c.ReturnDelay()
	}
	return d + c.rests(to.Address)
}

// ReturnDelay returns a random time between ReturnAfter and twice ReturnAfter. Any goroutine may
// call it.
func (c *Choice) ReturnDelay() time.Duration {
	return c.options.Times.ReturnAfter + rand.N(c.options.Times.ReturnAfter)
}

// SearchDelay returns when a client whose server is stale should look for another server.
func (c *Choice) SearchDelay() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	after := c.options.Times.StaleAfter
	return max(after+rand.N(after), time.Until(c.searchAgain))
}

// Searched records that the client now looks for a server that is not stale. It must be called
// before each search. While all servers are stale, or claim to be, searches become rare.
func (c *Choice) Searched() {
	c.mu.Lock()
	defer c.mu.Unlock()
	times := &c.options.Times
	if time.Since(c.searchAgain) > times.MaxSearchPause {
		c.searchPause = times.MinSearchPause
	} else {
		c.searchPause = min(2*c.searchPause, times.MaxSearchPause)
	}
	c.searchAgain = time.Now().Add(c.searchPause/2 + rand.N(c.searchPause/2))
}

// Others returns some servers that the client knows, other than current and those that rest. They
// are in random order, so that later searches find what an earlier one has not asked.
func (c *Choice) Others(current Server) []Server {
	others := slices.DeleteFunc(c.Servers(), func(s Server) bool {
		return s.Address == current.Address || c.rests(s.Address) > 0
	})
	rand.Shuffle(len(others), func(i, j int) { others[i], others[j] = others[j], others[i] })
	return others[:min(len(others), maxSearched)]
}

// Heed keeps the client from trying a server that has ended a stream with err, for as long as err
// asks for.
func (c *Choice) Heed(server Server, err error) {
	if d, ok := retryDelay(err); ok {
		c.metrics.retryHints.Inc()
		c.rest(server.Address, d+rand.N(d/2+1))
	}
}
