// Package flags has the flags that the agent and a relay share, because both are clients of
// slicecast-server: how to verify the servers, and how to authenticate to them.
package flags

import (
	"fmt"
	"log/slog"

	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	"github.com/slicecast/slicecast/internal/wire"
)

// Options has the values of the flags.
type Options struct {
	CAFile            string
	ServerName        string
	TokenFile         string
	ClientCertFile    string
	ClientKeyFile     string
	InsecurePlaintext bool

	prefix string // what the names of the flags begin with, such as "--upstream-"
}

// AddFlags adds the flags with their defaults. Their names begin with prefix, which may be empty.
func (o *Options) AddFlags(fs *pflag.FlagSet, prefix string) {
	o.prefix = "--" + prefix
	fs.StringVar(&o.CAFile, prefix+"ca-file", "",
		"Path to the PEM file with the CA certificates that the servers' certificates are verified against. "+
			"The file is reloaded when it changes.")
	fs.StringVar(&o.ServerName, prefix+"server-name", "",
		"Name that the certificate of every server must be valid for. If empty, it is the host in the server's "+
			"address. A server that another server has advertised then needs the name of that other server.")
	fs.StringVar(&o.TokenFile, prefix+"token-file", "",
		"Path to the ServiceAccount token to authenticate with. The file is read again for each stream.")
	fs.StringVar(&o.ClientCertFile, prefix+"client-cert-file", "",
		"Path to the PEM file with the client certificate to authenticate with. Its organization must be system:nodes "+
			"for an agent, and slicecast:relays for a relay. The file is reloaded when it changes.")
	fs.StringVar(&o.ClientKeyFile, prefix+"client-key-file", "",
		"Path to the PEM file with the private key of "+o.prefix+"client-cert-file. "+
			"The file is reloaded when it changes.")
	fs.BoolVar(&o.InsecurePlaintext, prefix+"insecure-plaintext", false,
		"Connect to the servers without TLS and without authentication. "+
			"Anyone on the network path can then read and redirect traffic.")
}

// IsSet reports whether any of the flags is set.
func (o *Options) IsSet() bool { return o.usesTLS() || o.InsecurePlaintext }

func (o *Options) usesTLS() bool {
	return o.CAFile != "" || o.ServerName != "" || o.TokenFile != "" || o.ClientCertFile != "" || o.ClientKeyFile != ""
}

// Validate returns an error if the flags contradict each other or one of them is missing.
func (o *Options) Validate() error {
	p := o.prefix
	switch {
	case o.InsecurePlaintext && o.usesTLS():
		return fmt.Errorf("%sinsecure-plaintext excludes %sca-file, %sserver-name, %stoken-file, %sclient-cert-file "+
			"and %sclient-key-file: remove it or them", p, p, p, p, p, p)
	case o.InsecurePlaintext:
		return nil
	case o.CAFile == "":
		return fmt.Errorf("%sca-file is not set: set it to the CA of the servers' certificates, or set "+
			"%sinsecure-plaintext for a test on one machine", p, p)
	case (o.ClientCertFile == "") != (o.ClientKeyFile == ""):
		return fmt.Errorf("%sclient-cert-file and %sclient-key-file must be set together", p, p)
	case o.ClientCertFile == "" && o.TokenFile == "":
		return fmt.Errorf("no credentials for the servers: set %stoken-file, or %sclient-cert-file and "+
			"%sclient-key-file", p, p, p)
	}
	return nil
}

// DialOptions returns the options for connections to the servers. They contain the credentials, but
// not the name of the server, which client.Server has.
//
// Files that cannot be used are no error, because they may be complete a moment later. A connection
// fails until they are. As long as there has never been a CAFile, the CAs that early returns count,
// if it is not nil and returns any.
func (o *Options) DialOptions(early func() []byte, logger *slog.Logger) []grpc.DialOption {
	if o.InsecurePlaintext {
		return []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	}
	files := tlsfiles.FollowLater(tlsfiles.Files{
		Certificate: o.ClientCertFile, PrivateKey: o.ClientKeyFile, CA: o.CAFile,
	}, early, logger)
	out := []grpc.DialOption{grpc.WithTransportCredentials(files.ClientCredentials(wire.Protocol))}
	if o.TokenFile != "" {
		out = append(out, grpc.WithPerRPCCredentials(client.TokenFile(o.TokenFile)))
	}
	return out
}
