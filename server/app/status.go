package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/show"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

type statusOptions struct {
	show.Options

	Server, DebugSocket                               string
	CAFile, ClientCertFile, ClientKeyFile, ServerName string
	InsecurePlaintext                                 bool

	Service, Lacks, Node   string
	Behind, Errors, Shards bool

	// service and lacks are Service and Lacks, parsed.
	service, lacks *pb.ServiceName
}

func newStatusCommand() *cobra.Command {
	o := &statusOptions{}
	c := &cobra.Command{
		Use:   "status",
		Short: "Show the state of a running server and of its clients",
		Long: `status shows the state of a running server: how long the nodes took to program the latest changes, and how far behind
each client is. It asks the server through its debug socket, or over the network as an operator or observer.

A server knows only its own clients. To see all of them, ask each replica.`,
		Example: `  slicecast-server status --debug-socket=/run/slicecast/debug/server.sock --watch
  slicecast-server status --debug-socket=/run/slicecast/debug/server.sock --service=default/web
  slicecast-server status --debug-socket=/run/slicecast/debug/server.sock --lacks=default/web
  slicecast-server status --server=10.0.0.7:8472 --server-name=slicecast-server.slicecast-system.svc \
    --ca-file=ca.crt --client-cert-file=operator.crt --client-key-file=operator.key -o json`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true, // main prints the error
		RunE: func(c *cobra.Command, _ []string) error {
			if err := o.validate(); err != nil {
				return err
			}
			conn, err := o.dial()
			if err != nil {
				return err
			}
			defer func() { _ = conn.Close() }()
			return o.Run(c.Context(), c.OutOrStdout(), func(ctx context.Context) (show.Report, error) {
				return o.ask(ctx, pb.NewDebugServiceClient(conn))
			})
		},
	}
	o.addFlags(c.Flags())
	return c
}

func (o *statusOptions) addFlags(fs *pflag.FlagSet) {
	o.AddFlags(fs)
	fs.StringVar(&o.DebugSocket, "debug-socket", "", "Path of the server's debug socket.")
	fs.StringVar(&o.Server, "server", "", "Address (host:port) of the server. Use it instead of --debug-socket.")
	fs.StringVar(&o.CAFile, "ca-file", "",
		"Path to the PEM file with the CA certificates that the server's certificate is verified against.")
	fs.StringVar(&o.ClientCertFile, "client-cert-file", "",
		"Path to the PEM file with the client certificate of an operator or observer.")
	fs.StringVar(&o.ClientKeyFile, "client-key-file", "",
		"Path to the PEM file with the private key of --client-cert-file.")
	fs.StringVar(&o.ServerName, "server-name", "",
		"Name that the server's certificate must be valid for. If empty, it is the host in --server.")
	fs.BoolVar(&o.InsecurePlaintext, "insecure-plaintext", false, "Connect to the server without TLS.")

	fs.StringVar(&o.Service, "service", "",
		"Service (namespace/name) to show as the server has it, instead of the clients.")
	fs.StringVar(&o.Lacks, "lacks", "",
		"Show only clients that have not programmed the latest state of this Service (namespace/name).")
	fs.StringVar(&o.Node, "node", "", "Show only clients of this Node.")
	fs.BoolVar(&o.Behind, "behind", false, "Show only clients that have not programmed the latest state.")
	fs.BoolVar(&o.Errors, "errors", false, "Show only clients that cannot program something, or that have a warning.")
	fs.BoolVar(&o.Shards, "shards", false, "Show the shards, too.")
}

func (o *statusOptions) validate() error {
	tls := o.CAFile != "" || o.ClientCertFile != "" || o.ClientKeyFile != "" || o.ServerName != ""
	switch {
	case o.DebugSocket == "" && o.Server == "":
		return errors.New("no server: set --debug-socket to the path that the server on this machine was started " +
			"with, or set --server")
	case o.DebugSocket != "" && (o.Server != "" || tls || o.InsecurePlaintext):
		return errors.New("--debug-socket excludes --server, --ca-file, --client-cert-file, --client-key-file, " +
			"--server-name and --insecure-plaintext: remove it or them")
	case o.InsecurePlaintext && tls:
		return errors.New("--insecure-plaintext excludes --ca-file, --client-cert-file, --client-key-file and " +
			"--server-name: remove it or them")
	case o.Server != "" && !o.InsecurePlaintext && (o.CAFile == "" || o.ClientCertFile == "" || o.ClientKeyFile == ""):
		return errors.New("no credentials: set --ca-file, --client-cert-file and --client-key-file, or " +
			"--insecure-plaintext if the server was started with that")
	case o.Service != "" && (o.Lacks != "" || o.Node != "" || o.Behind || o.Errors):
		return errors.New("--service shows a Service instead of clients: remove it, or remove --lacks, --node, " +
			"--behind and --errors")
	}
	var serviceErr, lacksErr error
	o.service, serviceErr = parseService("--service", o.Service)
	o.lacks, lacksErr = parseService("--lacks", o.Lacks)
	return errors.Join(serviceErr, lacksErr, o.Validate())
}

// parseService parses the value of a flag. It returns nil for an empty one.
func parseService(flag, s string) (*pb.ServiceName, error) {
	if s == "" {
		return nil, nil
	}
	key, ok := model.ParseServiceKey(s)
	if !ok {
		return nil, fmt.Errorf("%s is %q: use namespace/name", flag, s)
	}
	return &pb.ServiceName{Namespace: key.Namespace, Name: key.Name}, nil
}

func (o *statusOptions) dial() (*grpc.ClientConn, error) {
	target, options := o.Server, []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	switch {
	case o.DebugSocket != "":
		if _, err := os.Stat(o.DebugSocket); err != nil {
			return nil, fmt.Errorf("--debug-socket: %w; use the path that the server was started with", err)
		}
		target = "unix:" + o.DebugSocket
	case !o.InsecurePlaintext:
		files, err := tlsfiles.Follow(tlsfiles.Files{
			Certificate: o.ClientCertFile, PrivateKey: o.ClientKeyFile, CA: o.CAFile,
		}, slog.New(slog.DiscardHandler))
		if err != nil {
			return nil, fmt.Errorf("--ca-file, --client-cert-file, --client-key-file: %w", err)
		}
		options = []grpc.DialOption{grpc.WithTransportCredentials(files.ClientCredentials())}
		if o.ServerName != "" {
			options = append(options, grpc.WithAuthority(o.ServerName))
		}
	}
	return show.Dial(target, options...)
}

func (o *statusOptions) ask(ctx context.Context, client pb.DebugServiceClient) (_ show.Report, err error) {
	defer func() { err = o.explain(err) }()
	r := &statusReport{}
	if r.status, err = client.GetStatus(ctx, &pb.GetStatusRequest{}); err != nil {
		return nil, err
	}
	if o.Shards {
		if r.shards, err = client.ListShards(ctx, &pb.ListShardsRequest{}); err != nil {
			return nil, err
		}
	}
	if o.service != nil {
		r.service, err = client.GetService(ctx, &pb.GetServiceRequest{Service: o.service})
		return r, err
	}
	if o.lacks != nil {
		_, err := client.GetService(ctx, &pb.GetServiceRequest{Service: o.lacks})
		if status.Code(err) == codes.NotFound {
			r.gone = o.Lacks
		} else if err != nil {
			return nil, err
		}
	}
	agents, err := client.ListAgents(ctx, &pb.ListAgentsRequest{
		NodeName: o.Node, OnlyBehind: o.Behind, OnlyWithErrors: o.Errors, Lacks: o.lacks,
	})
	for err == nil {
		var a *pb.ListAgentsResponse
		if a, err = agents.Recv(); err == nil {
			r.agents = append(r.agents, a.GetAgent())
		}
	}
	if !errors.Is(err, io.EOF) {
		return nil, err
	}
	return r, nil
}

func (o *statusOptions) explain(err error) error {
	switch s := status.Convert(err); s.Code() {
	case codes.Unavailable:
		return fmt.Errorf("no answer from %s: %s; check that the server runs there and accepts these credentials",
			cmp.Or(o.DebugSocket, o.Server), s.Message())
	case codes.Unimplemented:
		return errors.New("the server does not implement the DebugService: use the status command of the server's " +
			"version")
	default:
		return err
	}
}
