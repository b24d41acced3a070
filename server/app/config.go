package app

import (
	"log/slog"
	"time"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/source/upstream"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/auth"
)

// Config is what a Server is made of. Options make it from the command line.
type Config struct {
	// Source feeds the server; with Upstream it is a relay, and that does. SourceKind is the source's name, as --source has it.
	Source     source.Source
	Upstream   *upstream.Options
	SourceKind string
	// Servers and ServerService are fanout.Options'.
	Servers       []*pb.Server
	ServerService model.ServiceKey
	// TLS of the gRPC and metrics listeners; nil: they are plaintext, and everybody is an operator.
	TLS *tlsfiles.Files
	// Tokens is how ServiceAccount tokens are reviewed. nil means that none is accepted. Needs TLS.
	Tokens *auth.TokenOptions

	// BindAddress is for gRPC.
	BindAddress string
	// DebugSocket, HealthzBindAddress and MetricsBindAddress are for what their names say; "": not served.
	DebugSocket, HealthzBindAddress, MetricsBindAddress string

	// Shards and Tombstones are store.Options'.
	Shards     uint32
	Tombstones int
	// HeartbeatInterval and DrainWindow are fanout.Options' Heartbeat and DrainWindow.
	HeartbeatInterval, DrainWindow time.Duration
	// MaxBehindWait and MaxColdSyncBytes are fanout.Options' MaxBehindWait and ColdBytes.
	MaxBehindWait    time.Duration
	MaxColdSyncBytes int64
	// GracePeriod is how long calls may take to end when the server stops.
	GracePeriod time.Duration

	// Logger and Registry are required.
	Logger   *slog.Logger
	Registry daemon.Registry
}
