package client

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// CacheStatus is what a cache holds, in numbers.
type CacheStatus struct {
	// Epoch that the sequences belong to; 0: none yet.
	Epoch uint64
	// Sequences and Digests, by shard.
	Sequences []uint64
	Digests   []model.Digest
	// ResourceVersions are the highest ones seen.
	ResourceVersions model.ResourceVersions
	// How much there is.
	Services, Slices, Endpoints int
	// InSync: it has been in sync since the process started. Stale: a checkpoint counts in the place of that.
	InSync, Stale bool
}

// Status counts what the cache holds.
func (c *Cache) Status() CacheStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := CacheStatus{Epoch: c.epoch, ResourceVersions: c.seen, InSync: c.inSync, Stale: c.stale}
	for i := range c.shards {
		s := &c.shards[i]
		out.Sequences = append(out.Sequences, s.sequence)
		out.Digests = append(out.Digests, s.currentDigest())
		out.Slices += len(s.slices)
		for _, held := range s.services {
			if held.service != nil {
				out.Services++
			}
		}
		for _, slice := range s.slices {
			out.Endpoints += len(slice.Endpoints)
		}
	}
	return out
}

// Connection is how a client stands with its servers.
type Connection struct {
	// Server that the client is in sync with, since Since; its address is empty if there is none, and then Since is when the
	// last one was lost, or the client was made.
	Server Server
	Since  time.Time
	// ServerName and ServerVersion are what the server says of itself.
	ServerName, ServerVersion string
	// LastError is why the last stream or attempt ended, nil while there is a server.
	LastError error
	// Servers are those that the client knows, by address.
	Servers []Server
}

// Connection tells how the client stands with its servers.
func (c *Client) Connection() Connection {
	c.connection.mu.Lock()
	out := c.connection.now
	c.connection.mu.Unlock()
	out.Servers = slices.Concat(c.options.Cache.knownServers(), out.Servers)
	slices.SortStableFunc(out.Servers, func(a, b Server) int { return cmp.Compare(a.Address, b.Address) })
	out.Servers = slices.CompactFunc(out.Servers, func(a, b Server) bool { return a.Address == b.Address })
	return out
}

// InSync tells whether the client has a stream that is in sync, for who asks of thousands of clients again and again.
func (c *Client) InSync() bool {
	c.connection.mu.Lock()
	defer c.connection.mu.Unlock()
	return c.connection.now.Server.Address != ""
}

// Proto translates what debug services tell: the server, or else since when there is none and why.
func (c Connection) Proto() (server *pb.ServerConnection, staleSince *timestamppb.Timestamp, lastError string, servers []*pb.Server) {
	for _, s := range c.Servers {
		servers = append(servers, &pb.Server{Address: s.Address})
	}
	if c.Server.Address != "" {
		return &pb.ServerConnection{
			Name: c.ServerName, Address: c.Server.Address, Version: c.ServerVersion, Since: timestamppb.New(c.Since),
		}, nil, "", servers
	}
	if c.LastError != nil {
		lastError = c.LastError.Error()
	}
	return nil, timestamppb.New(c.Since), lastError, servers
}

// connection takes note of what happens to streams.
type connection struct {
	mu sync.Mutex
	// now has the servers of Options.Servers only.
	now Connection
	// welcomed is the server of the stream that is not in sync yet.
	welcomed Connection
}

func (c *connection) welcome(server Server, w *pb.Welcome) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.welcomed = Connection{Server: server, ServerName: w.GetServerName(), ServerVersion: w.GetServerVersion()}
}

func (c *connection) inSync() {
	c.mu.Lock()
	defer c.mu.Unlock()
	servers := c.now.Servers
	c.now = c.welcomed
	c.now.Since, c.now.Servers = time.Now(), servers
}

func (c *connection) found(servers []Server) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(servers) > 0 {
		c.now.Servers = slices.Clone(servers)
	}
}

// ended takes note of the end of a stream, or that there could be none.
func (c *connection) ended(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.now.Server.Address != "" {
		c.now = Connection{Since: time.Now(), Servers: c.now.Servers}
	}
	c.now.LastError = err
}
