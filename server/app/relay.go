package app

import (
	"errors"
	"fmt"
	"net"

	"github.com/spf13/pflag"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/client/flags"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/server/relay"
)

// UpstreamOptions has the values of the flags of the upstream source, which makes the server a
// relay.
type UpstreamOptions struct {
	Servers []string
	flags.Options
}

// AddFlags adds the flags with their defaults.
func (o *UpstreamOptions) AddFlags(fs *pflag.FlagSet) {
	fs.StringSliceVar(&o.Servers, "upstream-servers", nil,
		"Comma-separated addresses (host:port) of the servers that feed this relay, for --source=upstream. "+
			"A host name stands for all of its addresses in DNS.")
	o.Options.AddFlags(fs, "upstream-")
}

func (o *UpstreamOptions) validate(isSource bool) error {
	switch {
	case !isSource && (o.IsSet() || len(o.Servers) > 0):
		return errors.New("flags that begin with --upstream- require --source=upstream: set it, or remove them")
	case !isSource:
		return nil
	case len(o.Servers) == 0:
		return errors.New("--source=upstream requires --upstream-servers: set it to the addresses (host:port) of the " +
			"servers")
	}
	for _, s := range o.Servers {
		if _, _, err := net.SplitHostPort(s); err != nil {
			return fmt.Errorf("--upstream-servers: %w: use host:port", err)
		}
	}
	return o.Validate()
}

// config returns the options of the upstream source.
func (o *UpstreamOptions) config(c Config) (*relay.Options, error) {
	dial, err := o.DialOptions(c.Logger)
	if err != nil {
		return nil, err
	}
	return &relay.Options{
		Servers: client.Resolve(o.Servers, c.Logger), ServerName: client.ServerName(o.ServerName, o.Servers),
		DialOptions: dial, Version: daemon.Version(), Logger: c.Logger, Metrics: c.Registry,
	}, nil
}
