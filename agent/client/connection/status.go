package connection

import (
	"sync"
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
		return &pb.ServerConnection{
			Name: s.ServerName, Address: s.Server.Address, Version: s.ServerVersion, Since: timestamppb.New(s.Since),
		}, nil, "", servers
	}
	if s.LastError != nil {
		lastError = s.LastError.Error()
	}
	return nil, timestamppb.New(s.Since), lastError, servers
}

// status records what happens to streams.
type status struct {
	mu  sync.Mutex // guards now
	now Status
}

func (s *status) get() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now
}

// inSync records that the client is in sync with a server.
func (s *status) inSync(server discovery.Server, name, version string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now = Status{Server: server, ServerName: name, ServerVersion: version, Since: time.Now()}
}

// ended records that a stream has ended or an attempt has failed.
func (s *status) ended(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.now.Server.Address != "" {
		s.now = Status{Since: time.Now()}
	}
	s.now.LastError = err
}
