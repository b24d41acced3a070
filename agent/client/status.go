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

// CacheStatus summarizes the content of a cache.
type CacheStatus struct {
	// Epoch is the epoch of the sequences. 0 means that there is none yet.
	Epoch uint64
	// Sequences and Digests are indexed by shard.
	Sequences []uint64
	Digests   []model.Digest
	// ResourceVersions are the versions that the cache reflects.
	ResourceVersions model.ResourceVersions
	// Services, Slices and Endpoints are the numbers of objects in the cache.
	Services, Slices, Endpoints int
	// InSync reports that the cache has been in sync since the process started. Stale reports that
	// a checkpoint counts although no server has confirmed it.
	InSync, Stale bool
}

// Status returns a summary of the cache.
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

// Connection is the state of a client's connection to its servers.
type Connection struct {
	// Server is the server that the client has been in sync with since Since. If the client is in
	// sync with none, Server is zero, and Since is when it lost the last one or was created.
	Server Server
	Since  time.Time
	// ServerName and ServerVersion are what the server claims in its Welcome.
	ServerName, ServerVersion string
	// LastError is why the last stream or attempt ended. It is nil while the client is in sync.
	LastError error
	// Servers are the servers that the client knows, by address.
	Servers []Server
}

// Connection returns the state of the client's connection to its servers.
func (c *Client) Connection() Connection {
	c.connection.mu.Lock()
	out := c.connection.now
	c.connection.mu.Unlock()
	out.Servers = slices.Concat(c.options.Cache.knownServers(), out.Servers)
	slices.SortStableFunc(out.Servers, func(a, b Server) int { return cmp.Compare(a.Address, b.Address) })
	out.Servers = slices.CompactFunc(out.Servers, func(a, b Server) bool { return a.Address == b.Address })
	return out
}

// InSync reports whether the client has a stream that is in sync. It is much cheaper than
// Connection, for processes that poll thousands of clients.
func (c *Client) InSync() bool {
	c.connection.mu.Lock()
	defer c.connection.mu.Unlock()
	return c.connection.now.Server.Address != ""
}

// Proto returns the connection as debug services report it. It returns either the server, or since
// when and why there is none.
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

// connection records what happens to streams.
type connection struct {
	// mu guards now and welcomed.
	mu sync.Mutex
	// now is the state that Connection reports. Its Servers are those of Options.Servers only.
	now Connection
	// welcomed is the server of a stream that is not in sync yet.
	welcomed Connection
}

func (c *connection) welcome(welcomed Connection) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.welcomed = welcomed
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

// ended records that a stream has ended or an attempt has failed.
func (c *connection) ended(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.now.Server.Address != "" {
		c.now = Connection{Since: time.Now(), Servers: c.now.Servers}
	}
	c.now.LastError = err
}
