package app

import (
	"log/slog"
	"net"
	"time"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/auth"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/certificates"
)

// Config configures a Server. Options.Complete creates it from the command line.
type Config struct {
	// Source feeds the server. If Upstream is set, the server is a relay, and Source is ignored.
	// SourceKind is the value of --source.
	Source     source.Source
	Upstream   *client.Options
	SourceKind string
	// fanout.Options describes the fields up to MaxBehindWait, and ColdBytes for MaxColdSyncBytes.
	Servers                                       []*pb.Server
	ServerService                                 model.ServiceKey
	MaxColdSyncBytes                              int64
	HeartbeatInterval, DrainWindow, MaxBehindWait time.Duration
	// store.Options describes Shards and Tombstones.
	Shards     uint32
	Tombstones int
	// TLS or Certificates is for the gRPC and metrics listeners. If both are nil, these are
	// plaintext, and everyone is an operator.
	TLS          *tlsfiles.Files
	Certificates *certificates.Options
	// Tokens configures the review of ServiceAccount tokens. nil means that no token is accepted.
	// Tokens requires TLS.
	Tokens *auth.TokenOptions

	// Now returns the time by which credentials of clients expire; with Certificates it should be
	// their clock. nil means time.Now.
	Now func() time.Time

	// Events writes Events about warnings of nodes. nil means that none are written.
	Events *kube.Events

	// BindAddress is the address of the gRPC listener. If Listener is not nil, the server uses it
	// instead and closes it in the end.
	BindAddress string
	Listener    net.Listener
	// DebugSocket, HealthzBindAddress and MetricsBindAddress are the addresses of further
	// listeners. Empty ones are not served.
	DebugSocket, HealthzBindAddress, MetricsBindAddress string
	// Page means that the page at page.Path is served at MetricsBindAddress.
	Page bool

	// GracePeriod is how long calls may take to end when the server stops.
	GracePeriod time.Duration

	// Logger and Registry are required.
	Logger   *slog.Logger
	Registry daemon.Registry
}
