package app

import (
	"errors"
	"fmt"
	"net"

	"github.com/spf13/pflag"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/client/flags"
	"github.com/slicecast/slicecast/internal/daemon"
)

type upstreamOptions struct {
	servers []string
	flags.Options
}

func (o *upstreamOptions) addFlags(fs *pflag.FlagSet) {
	fs.StringSliceVar(&o.servers, "upstream-servers", nil,
		"Comma-separated addresses (host:port) of the servers that feed this relay, for --source=upstream. "+
			"A host name stands for all of its addresses in DNS.")
	o.Options.AddFlags(fs, "upstream-")
}

func (o *upstreamOptions) validate(isSource bool) error {
	switch {
	case !isSource && (o.IsSet() || len(o.servers) > 0):
		return errors.New("flags that begin with --upstream- require --source=upstream: set it, or remove them")
	case !isSource:
		return nil
	case len(o.servers) == 0:
		return errors.New("--source=upstream requires --upstream-servers: set it to the addresses (host:port) of the " +
			"servers")
	}
	for _, s := range o.servers {
		if _, _, err := net.SplitHostPort(s); err != nil {
			return fmt.Errorf("--upstream-servers: %w: use host:port", err)
		}
	}
	return o.Validate()
}

func (o *upstreamOptions) config(c Config) *client.Options {
	return &client.Options{
		Servers: client.Resolve(o.servers, c.Logger), ServerName: client.ServerName(o.ServerName, o.servers),
		DialOptions: o.DialOptions(nil, c.Logger), Version: daemon.Version(), Logger: c.Logger, Registerer: c.Registry,
	}
}
