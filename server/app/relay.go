package app

import (
	"errors"
	"fmt"
	"net"

	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	"github.com/slicecast/slicecast/internal/wire"
	"github.com/slicecast/slicecast/server/relay"
)

// UpstreamOptions has the values of the flags of the upstream source, which makes the server a
// relay.
type UpstreamOptions struct {
	Servers           []string
	CAFile            string
	ServerName        string
	TokenFile         string
	ClientCertFile    string
	ClientKeyFile     string
	InsecurePlaintext bool
}

// AddFlags adds the flags with their defaults.
func (o *UpstreamOptions) AddFlags(fs *pflag.FlagSet) {
	fs.StringSliceVar(&o.Servers, "upstream-servers", nil,
		"addresses (host:port) of the servers for the upstream source; a host name stands for all of its addresses")
	fs.StringVar(&o.CAFile, "upstream-ca-file", "",
		"CA certificates (PEM) that the upstream server's certificate is checked against; followed when it changes")
	fs.StringVar(&o.ServerName, "upstream-server-name", "",
		"name that the certificate of every upstream server must have; default: the host of its address, and for a server that another one names that one's")
	fs.StringVar(&o.TokenFile, "upstream-token-file", "", "ServiceAccount token to show to the upstream server; read again for each stream")
	fs.StringVar(&o.ClientCertFile, "upstream-client-cert-file", "",
		"client certificate (PEM), of the organization slicecast:relays, to show to the upstream server; followed when it changes")
	fs.StringVar(&o.ClientKeyFile, "upstream-client-key-file", "", "key (PEM) of --upstream-client-cert-file")
	fs.BoolVar(&o.InsecurePlaintext, "upstream-insecure-plaintext", false,
		"talk to the upstream server without TLS: anyone on the path can read and redirect traffic")
}

func (o *UpstreamOptions) validate(isSource bool) error {
	tls := o.CAFile != "" || o.ServerName != "" || o.TokenFile != "" || o.ClientCertFile != "" || o.ClientKeyFile != ""
	switch {
	case !isSource && (tls || o.InsecurePlaintext || len(o.Servers) > 0):
		return errors.New("the flags that begin with --upstream- are for the upstream source: add --source=upstream or leave them out")
	case !isSource:
		return nil
	case len(o.Servers) == 0:
		return errors.New("--source=upstream needs servers: add --upstream-servers=HOST:PORT")
	case o.InsecurePlaintext && tls:
		return errors.New("--upstream-insecure-plaintext means no TLS and no credentials: leave out either it or the other --upstream- flags")
	case !o.InsecurePlaintext && o.CAFile == "":
		return errors.New("--upstream-ca-file is missing: give the CA of the upstream server's certificate")
	case (o.ClientCertFile == "") != (o.ClientKeyFile == ""):
		return errors.New("--upstream-client-cert-file and --upstream-client-key-file go together")
	case !o.InsecurePlaintext && o.ClientCertFile == "" && o.TokenFile == "":
		return errors.New("the upstream server must know who this is: add --upstream-client-cert-file and --upstream-client-key-file, or --upstream-token-file")
	}
	for _, s := range o.Servers {
		if _, _, err := net.SplitHostPort(s); err != nil {
			return fmt.Errorf("--upstream-servers: %w: use HOST:PORT", err)
		}
	}
	return nil
}

// config returns the options of the upstream source.
func (o *UpstreamOptions) config(c Config) (*relay.Options, error) {
	out := &relay.Options{
		Servers: client.Resolve(o.Servers, c.Logger), ServerName: client.ServerName(o.ServerName, o.Servers),
		Version: daemon.Version(), Logger: c.Logger, Metrics: c.Registry,
	}
	if o.InsecurePlaintext {
		out.DialOptions = []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
		return out, nil
	}
	files, err := tlsfiles.Follow(tlsfiles.Files{Certificate: o.ClientCertFile, PrivateKey: o.ClientKeyFile, CA: o.CAFile}, c.Logger)
	if err != nil {
		return nil, fmt.Errorf("--upstream-ca-file, --upstream-client-cert-file, --upstream-client-key-file: %w", err)
	}
	out.DialOptions = []grpc.DialOption{grpc.WithTransportCredentials(files.ClientCredentials(wire.Protocol))}
	if o.TokenFile != "" {
		out.DialOptions = append(out.DialOptions, grpc.WithPerRPCCredentials(client.TokenFile(o.TokenFile)))
	}
	return out, nil
}
