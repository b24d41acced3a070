package app

import (
	"log/slog"
	"time"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	"github.com/slicecast/slicecast/server/auth"
)

// Config is what a Server is made of. Options make it from the command line.
type Config struct {
	// Source feeds the server. SourceKind is its name, as --source has it.
	Source     source.Source
	SourceKind string
	// TLS of the gRPC and metrics listeners; nil: they are plaintext, and everybody is an operator.
	TLS *tlsfiles.Files
	// Tokens reviews ServiceAccount tokens; nil: none is accepted. Needs TLS.
	Tokens *auth.TokenReviewer

	// BindAddress is for gRPC.
	BindAddress string
	// DebugSocket, HealthzBindAddress and MetricsBindAddress are for what their names say; "": not served.
	DebugSocket, HealthzBindAddress, MetricsBindAddress string

	// Shards and Tombstones are store.Options'.
	Shards     uint32
	Tombstones int
	// HeartbeatInterval, DrainWindow, MaxBehindWait and ColdBytes are fanout.Options' Heartbeat, DrainWindow, MaxBehindWait and
	// ColdBytes.
	HeartbeatInterval, DrainWindow, MaxBehindWait time.Duration
	ColdBytes                                     int64
	// GracePeriod is how long calls may take to end when the server stops.
	GracePeriod time.Duration

	// Logger and Registry are required.
	Logger   *slog.Logger
	Registry daemon.Registry
}
