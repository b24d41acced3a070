package app

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/status"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/show"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// defaultStatusSocket is where the status command looks for the agent. The manifests in deploy/
// make the agent listen there.
const defaultStatusSocket = "/run/slicecast/agent.sock"

func newServices(logger *slog.Logger, registerer prometheus.Registerer) *daemon.Services {
	return daemon.NewServices("agent", "metrics over TLS or the status, by flag: secure-metrics-bind-address or status-socket.",
		logger, registerer)
}

// serveStatus answers the status command until ctx ends, if --status-socket is set.
func (a *agent) serveStatus(ctx context.Context) {
	const flag = "status-socket"
	o := a.options
	if o.StatusSocket == "" {
		return
	}
	servers, _ := a.feed.(*client.Client) // nil if standalone
	service := status.New(status.Options{
		NodeName: o.NodeName, Version: daemon.Version(), Programmer: a.programmer.name, ProgrammerReason: a.programmer.reason,
		Source: o.Source, Client: servers, Checkpoint: a.checkpoint, Cache: a.cache, Reconciler: a.reconciler,
		Warnings: a.warnings,
	})
	a.services.Serve(ctx, flag, func() (net.Listener, error) {
		l, err := daemon.ListenSocket(o.StatusSocket)
		if err != nil {
			return nil, fmt.Errorf("--%s: %w", flag, err)
		}
		return l, nil
	}, service.Serve)
}

func newStatusCommand() *cobra.Command {
	var socket string
	var shards bool
	o := &show.Options{}
	c := &cobra.Command{
		Use:   "status",
		Short: "Show the state of the agent on this node: what it received, and what the kernel holds",
		Example: `  slicecast-agent status --watch
  slicecast-agent status --status-socket=/run/slicecast/agent.sock -o json`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true, // main prints the error
		RunE: func(c *cobra.Command, _ []string) error {
			if err := o.Validate(); err != nil {
				return err
			}
			if _, err := os.Stat(socket); err != nil {
				return fmt.Errorf("--status-socket: %w; use the path that the agent was started with", err)
			}
			conn, err := show.Dial("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
			if err != nil {
				return err
			}
			defer func() { _ = conn.Close() }()
			client := pb.NewAgentDebugServiceClient(conn)
			return o.Run(c.Context(), c.OutOrStdout(), func(ctx context.Context) (show.Report, error) {
				s, err := client.GetStatus(ctx, &pb.AgentDebugServiceGetStatusRequest{})
				return &statusReport{s, shards}, unanswered(err, socket)
			})
		},
	}
	o.AddFlags(c.Flags())
	c.Flags().StringVar(&socket, "status-socket", defaultStatusSocket, "Path of the agent's socket, as the agent was "+
		"started with.")
	c.Flags().BoolVar(&shards, "shards", false, "Show the shards, too.")
	return c
}

// unanswered returns an error of asking the agent with what to do about it.
func unanswered(err error, socket string) error {
	switch grpcstatus.Code(err) {
	case codes.Unavailable:
		return fmt.Errorf("no answer from %s: %s; check that the agent runs", socket, grpcstatus.Convert(err).Message())
	case codes.DeadlineExceeded:
		return fmt.Errorf("the agent accepts connections at %s and does not answer: it hangs. Its log may say why, and "+
			"/debug/pprof/goroutine?debug=2 of its pages where; a restart ends that, and the kernel keeps its rules meanwhile", socket)
	}
	return err
}

// statusReport is the report that the status command prints.
type statusReport struct {
	*pb.AgentDebugServiceGetStatusResponse
	shards bool
}

// Fields implements show.Report.
func (r *statusReport) Fields() []show.Field {
	return []show.Field{{Name: "status", Message: r.AgentDebugServiceGetStatusResponse}}
}

// since returns the age of a time, by the agent's clock.
func (r *statusReport) since(t *timestamppb.Timestamp) string {
	return show.Age(r.GetTime().AsTime().Sub(t.AsTime()))
}

// Print implements show.Report.
func (r *statusReport) Print(out *show.Page) {
	out.Row("Agent", fmt.Sprintf("of node %s, version %s, up %s",
		r.GetNodeName(), r.GetVersion(), r.since(r.GetStartTime())))
	r.printServer(out)
	size := r.GetSize()
	state := fmt.Sprintf("%d Services, %d slices, %d endpoints in %d shards, epoch %016x",
		size.GetServices(), size.GetSlices(), size.GetEndpoints(), size.GetShards(), r.GetEpoch())
	if v := r.GetResourceVersions(); v != nil {
		state += fmt.Sprintf(", resource versions %d (Services), %d (EndpointSlices)", v.GetServices(), v.GetSlices())
	}
	out.Row("State", state)
	r.printKernel(out)
	if t := r.GetCheckpointTime(); t != nil {
		out.Row("Checkpoint", fmt.Sprintf("written %s ago", r.since(t)))
	}
	if len(r.GetFailures()) > 0 {
		out.Title("Services that are not completely programmed: %d", len(r.GetFailures()))
		out.Row("SERVICE", "SINCE", "REASON")
		for _, f := range r.GetFailures() {
			out.Row(f.GetService().GetNamespace()+"/"+f.GetService().GetName(), r.since(f.GetSince()), f.GetReason())
		}
	}
	if len(r.GetWarnings()) > 0 {
		out.Title("Warnings")
		out.Row("WARNING", "SINCE", "REASON")
		for _, w := range r.GetWarnings() {
			out.Row(wire.WarningName(w.GetWarning()), r.since(w.GetTime()), w.GetReason())
		}
	}
	if r.shards {
		out.Title("Shards")
		out.Row("SHARD", "SEQUENCE", "PROGRAMMED", "DIGEST")
		for _, s := range r.GetShards() {
			out.Row(fmt.Sprint(s.GetShard()), fmt.Sprint(s.GetSequence()), fmt.Sprint(s.GetProgrammedSequence()),
				show.Hash(s.GetDigest()))
		}
	}
}

func (r *statusReport) printServer(out *show.Page) {
	switch s := r.GetServer(); {
	case r.GetSource() != "":
		out.Row("Source", r.GetSource()+", standalone")
		return
	case s != nil:
		text := fmt.Sprintf("%s at %s, version %s, in sync for %s",
			s.GetName(), s.GetAddress(), s.GetVersion(), r.since(s.GetSince()))
		if since := s.GetStaleSince(); since != nil {
			text += fmt.Sprintf("; stale: it may lack changes of the last %s", r.since(since))
		}
		out.Row("Server", text)
	default:
		text := "none for " + r.since(r.GetStaleSince())
		if r.GetLastError() != "" {
			text += ": " + r.GetLastError()
		}
		out.Row("Server", text)
	}
	var known []string
	for _, s := range r.GetServers() {
		known = append(known, s.GetAddress())
	}
	out.Row("Known", strings.Join(known, ", "))
}

func (r *statusReport) printKernel(out *show.Page) {
	var text string
	switch {
	case r.GetProgrammingTime() == nil && r.GetByCheckpoint():
		text = "kept as the last agent programmed it, because that may be later than the checkpoint"
	case r.GetProgrammingTime() == nil:
		text = "not programmed yet by this agent"
	case r.GetProgrammingError() != "":
		text = fmt.Sprintf("%s; tried %s ago", r.GetProgrammingError(), r.since(r.GetProgrammingTime()))
	default:
		text = fmt.Sprintf("%d Service ports, programmed %s ago in %s",
			r.GetServicePorts(), r.since(r.GetProgrammingTime()),
			show.Age(r.GetProgrammingDuration().AsDuration()))
	}
	if r.GetByCheckpoint() && r.GetProgrammingTime() != nil {
		text += ", from the checkpoint, which may be out of date"
	}
	if n := r.GetLagSequences(); n > 0 {
		text += fmt.Sprintf(", %d changes behind", n)
	}
	out.Row("Kernel", r.GetProgrammer()+": "+text)
	out.Row("Programmer", r.GetProgrammer()+": "+r.GetProgrammerReason())
}
