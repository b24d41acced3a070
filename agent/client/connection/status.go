package connection

import (
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/slicecast/slicecast/agent/client/discovery"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Status is the state of a client's connection to its servers.
type Status struct {
	// Server is the server that the client has been in sync with since Since. If the client is in
	// sync with none, Server is zero, and Since is when it lost the last one or was created.
	Server discovery.Server
	Since  time.Time
	// ServerName and ServerVersion are what the server claims in its Welcome.
	ServerName, ServerVersion string
	// StaleSince is since when Server has been stale, as it says; zero if it is not.
	StaleSince time.Time
	// LastError is why the last stream or attempt ended. It is nil while the client is in sync.
	LastError error
	// Servers are the servers that the client knows, by address.
	Servers []discovery.Server
}

// Proto returns the status as debug services report it. It returns either the server, or since when
// and why there is none.
func (s Status) Proto() (
	server *pb.ServerConnection, staleSince *timestamppb.Timestamp, lastError string, servers []*pb.Server,
) {
	for _, known := range s.Servers {
		servers = append(servers, &pb.Server{Address: known.Address})
	}
	if s.Server.Address != "" {
		server = &pb.ServerConnection{
			Name: s.ServerName, Address: s.Server.Address, Version: s.ServerVersion, Since: timestamppb.New(s.Since),
		}
		if !s.StaleSince.IsZero() {
			server.StaleSince = timestamppb.New(s.StaleSince)
		}
		return server, nil, "", servers
	}
	if s.LastError != nil {
		lastError = s.LastError.Error()
	}
	return nil, timestamppb.New(s.Since), lastError, servers
}

// Status returns the state of the connection, without Servers.
func (c *Connection) Status() Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.status
}

// Failed records why there is no stream. It implements discovery.Connector, as Stream does.
func (c *Connection) Failed(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.status.Server.Address != "" {
		c.status = Status{Since: time.Now()}
	}
	c.status.LastError = err
}

// recordSync records that the stream is in sync.
func (s *stream) recordSync() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status = Status{Server: s.server, ServerName: s.name, ServerVersion: s.software, Since: time.Now()}
	if stale := s.stale.Load(); stale != nil {
		s.status.StaleSince = *stale
	}
}

// recordStale records since when the server has been stale, if the stream is in sync.
func (s *stream) recordStale() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status.Server.Address == "" {
		return
	}
	s.status.StaleSince = time.Time{}
	if stale := s.stale.Load(); stale != nil {
		s.status.StaleSince = *stale
	}
}
