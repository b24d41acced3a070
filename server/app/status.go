package app

import (
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

// statusOptions has the values of the status command's flags.
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
		Short: "Show what a running server has, who is connected, and who lacks what",
		Long: `status asks a running server, by its debug socket or over the network as an operator or observer, and shows its state: how
long the nodes took for the latest changes, and every client with how far it is behind.

A server knows of its own clients only: ask each replica.`,
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
			client := pb.NewDebugServiceClient(conn)
			return o.Run(c.Context(), c.OutOrStdout(), func(ctx context.Context) (show.Report, error) { return o.ask(ctx, client) })
		},
	}
	o.addFlags(c.Flags())
	return c
}

func (o *statusOptions) addFlags(fs *pflag.FlagSet) {
	o.AddFlags(fs)
	fs.StringVar(&o.DebugSocket, "debug-socket", "", "path of the server's debug socket")
	fs.StringVar(&o.Server, "server", "", "address (host:port) of the server, instead of --debug-socket")
	fs.StringVar(&o.CAFile, "ca-file", "", "CA certificates (PEM) that the server's certificate is checked against")
	fs.StringVar(&o.ClientCertFile, "client-cert-file", "", "client certificate (PEM) of an operator or observer")
	fs.StringVar(&o.ClientKeyFile, "client-key-file", "", "private key (PEM) of --client-cert-file")
	fs.StringVar(&o.ServerName, "server-name", "", "name that the server's certificate must have; the default is the host of --server")
	fs.BoolVar(&o.InsecurePlaintext, "insecure-plaintext", false, "talk to the server without TLS")

	fs.StringVar(&o.Service, "service", "", "namespace/name of a Service to show as the server has it, instead of clients")
	fs.StringVar(&o.Lacks, "lacks", "", "namespace/name of a Service: only clients that don't have its latest state programmed")
	fs.StringVar(&o.Node, "node", "", "only clients of this Node")
	fs.BoolVar(&o.Behind, "behind", false, "only clients that don't have everything programmed")
	fs.BoolVar(&o.Errors, "errors", false, "only clients that can't program something")
	fs.BoolVar(&o.Shards, "shards", false, "show the shards too")
}

func (o *statusOptions) validate() (err error) {
	tls := o.CAFile != "" || o.ClientCertFile != "" || o.ClientKeyFile != "" || o.ServerName != ""
	switch {
	case o.DebugSocket == "" && o.Server == "":
		return errors.New("which server? Give --debug-socket=PATH, as the server on this machine has it, or --server=HOST:PORT")
	case o.DebugSocket != "" && (o.Server != "" || tls || o.InsecurePlaintext):
		return errors.New("--debug-socket excludes --server, --ca-file, --client-cert-file, --client-key-file, --server-name " +
			"and --insecure-plaintext: leave it out, or them")
	case o.InsecurePlaintext && tls:
		return errors.New("--insecure-plaintext excludes --ca-file, --client-cert-file, --client-key-file and --server-name")
	case o.Server != "" && !o.InsecurePlaintext && (o.CAFile == "" || o.ClientCertFile == "" || o.ClientKeyFile == ""):
		return errors.New("over TLS the server and an operator must know each other: give --ca-file, --client-cert-file and " +
			"--client-key-file (or --insecure-plaintext, if the server runs with that)")
	case o.Service != "" && (o.Lacks != "" || o.Node != "" || o.Behind || o.Errors):
		return errors.New("--service shows a Service instead of clients: leave out --lacks, --node, --behind and --errors")
	}
	if o.service, err = parseService("--service", o.Service); err != nil {
		return err
	}
	if o.lacks, err = parseService("--lacks", o.Lacks); err != nil {
		return err
	}
	return o.Validate()
}

// parseService parses the value of a flag. It returns nil for an empty one.
func parseService(flag, s string) (*pb.ServiceName, error) {
	if s == "" {
		return nil, nil
	}
	key, ok := model.ParseServiceKey(s)
	if !ok {
		return nil, fmt.Errorf("%s is %q: give namespace/name", flag, s)
	}
	return &pb.ServiceName{Namespace: key.Namespace, Name: key.Name}, nil
}

func (o *statusOptions) dial() (*grpc.ClientConn, error) {
	target, options := o.Server, []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	switch {
	case o.DebugSocket != "":
		if _, err := os.Stat(o.DebugSocket); err != nil {
			return nil, fmt.Errorf("--debug-socket: %w; start the server with --debug-socket=%s, or name the one that it has", err, o.DebugSocket)
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

// ask requests from the server what the flags ask for.
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
	if err != nil {
		return nil, err
	}
	for {
		a, err := agents.Recv()
		if errors.Is(err, io.EOF) {
			return r, nil
		}
		if err != nil {
			return nil, err
		}
		r.agents = append(r.agents, a.GetAgent())
	}
}

// explain adds to an error what the user can do about it.
func (o *statusOptions) explain(err error) error {
	if err == nil {
		return nil
	}
	s := status.Convert(err)
	switch s.Code() {
	case codes.Unavailable:
		where := o.Server
		if o.DebugSocket != "" {
			where = o.DebugSocket
		}
		return fmt.Errorf("no answer on %s: %s; is the server running there, and are the credentials those that it wants?", where, s.Message())
	case codes.Unimplemented:
		return errors.New("this server has no DebugService: it is older than this command")
	default:
		return err
	}
}
