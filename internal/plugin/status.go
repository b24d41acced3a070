package plugin

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/show"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// slowChange is how long a change may be missing on some node before that is a problem.
const slowChange = 10 * time.Second

func newStatusCommand(o *options) *cobra.Command {
	out := &show.Options{Wide: true}
	c := &cobra.Command{
		Use:   "status",
		Short: "Show all servers and relays, and what is wrong",
		Example: `  kubectl slicecast status
  kubectl slicecast status --watch
  kubectl slicecast status -o json`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return o.run(c, out, func(ctx context.Context, f *fleet.Fleet) (report, error) { return askStatus(ctx, f) })
		},
	}
	addOutputFlags(c, out)
	return c
}

// addOutputFlags adds the flags about output to a command, with their completion.
func addOutputFlags(c *cobra.Command, out *show.Options) {
	out.AddFlags(c.Flags())
	// It fails only for flags that do not exist.
	_ = c.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(out.Formats(), cobra.ShellCompDirectiveNoFileComp))
}

// completeNothing keeps shells from completing the values of flags to the names of files.
func completeNothing(c *cobra.Command, flags ...string) {
	for _, name := range flags {
		// It fails only for flags that do not exist.
		_ = c.RegisterFlagCompletionFunc(name, cobra.NoFileCompletions)
	}
}

// statusReport is the report of status.
type statusReport struct {
	servers
	rows     []serverStatus
	problems []problem
	// relays are those that did not answer, such as relays outside of the cluster.
	relays []node
}

// serverStatus is a server with its state, if it has answered.
type serverStatus struct {
	server
	Node      string   `json:"node"`
	Addresses []string `json:"addresses"`
	// State says whether the server serves its clients; empty if it did not answer.
	State string `json:"state,omitempty"`
	// Status is nil if the server did not answer.
	Status *show.Message `json:"status,omitempty"`

	status *pb.GetStatusResponse
}

// problem is something that is wrong with a server, or with what it knows.
type problem struct {
	Server  string `json:"server"`
	Problem string `json:"problem"`
}

func askStatus(ctx context.Context, f *fleet.Fleet) (*statusReport, error) {
	answers, all, err := ask(ctx, f, func(ctx context.Context, conn *grpc.ClientConn) (out agents, err error) {
		out.status, err = pb.NewDebugServiceClient(conn).GetStatus(ctx, &pb.GetStatusRequest{})
		feeds := slices.ContainsFunc(out.status.GetStreams(), func(c *pb.StreamCount) bool {
			return c.GetKind() == pb.ClientKind_CLIENT_KIND_RELAY
		})
		if err == nil && feeds { // otherwise the list of all clients is not needed
			return listAgents(ctx, conn, &pb.ListAgentsRequest{})
		}
		return out, err
	})
	if err != nil {
		return nil, err
	}
	return statusOf(answers, all), nil
}

// statusOf returns the states in the answers of servers.
func statusOf(answers []fleet.Answer[agents], all servers) *statusReport {
	r := &statusReport{servers: all, relays: merge(answers, all).relays}
	stalled := findStale(statuses(answers))
	for i, a := range answers {
		row := serverStatus{server: all[i], Node: a.Server.Node, Addresses: a.Server.Addresses}
		if s := a.Value.status; a.Err == nil {
			row.State, row.Status, row.status = serverState(s, stalled), &show.Message{Message: s}, s
			for _, text := range problems(s, stalled) {
				r.problems = append(r.problems, problem{Server: a.Server.String(), Problem: text})
			}
		}
		r.rows = append(r.rows, row)
	}
	return r
}

// problems returns what is wrong according to a server, and whether its state is stale. What is
// wrong with a server that feeds it is not among them.
func problems(s *pb.GetStatusResponse, stalled staleness) (out []string) {
	if !s.GetSource().GetSynced() {
		out = append(out, "it is not in sync with its source, and serves nobody")
	}
	if l, ok := stalled[s.GetEpoch()]; ok {
		out = append(out, l.reason)
	}
	if c := s.GetOldestOpenConvergence(); c != nil {
		if age := since(s, c.GetPublishTime().AsTime()); age > slowChange {
			out = append(out, fmt.Sprintf("%s for %s do not have a change of shard %d: %s",
				show.Plural("node", c.GetLacking()), show.Age(age), c.GetShard(), show.LastNodes(c.GetLast())))
		}
	}
	for _, w := range s.GetWarnings() {
		out = append(out, fmt.Sprintf("%s: %s", wire.WarningName(w.GetWarning()), show.Plural("node", w.GetNodes())))
	}
	return out
}

// since returns the age of a time by the clock of a server.
func since(s *pb.GetStatusResponse, t time.Time) time.Duration { return s.GetTime().AsTime().Sub(t) }

// code implements report. Relays that did not answer make the answers incomplete.
func (r *statusReport) code() int {
	if len(r.relays) > 0 {
		return incomplete
	}
	return r.servers.code(len(r.problems) > 0)
}

// Fields implements show.Report.
func (r *statusReport) Fields() []show.Field {
	return []show.Field{{Name: "servers", Value: r.rows}, {Name: "problems", Value: nonNil(r.problems)},
		{Name: "relaysNotAsked", Value: nonNil(r.relays)}}
}

// nonNil returns a list that is not nil, so that it is no null in JSON.
func nonNil[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// Print implements show.Report.
func (r *statusReport) Print(out *show.Page) {
	r.servers.print(out)
	out.Title("")
	header := []string{"SERVER", "KIND", "STATE", "VERSION", "UP", "LAST EVENT", "SERVICES", "ENDPOINTS", "CLIENTS", "NODES", "OPEN CHANGES", "OLDEST"}
	if out.Wide {
		header = append(header, "NODE", "ADDRESSES", "SLICES", "SERVICES' VERSION", "SLICES' VERSION", "EPOCH", "UPSTREAM")
	}
	out.Row(header...)
	for _, row := range r.rows {
		out.Row(row.cells(out.Wide)...)
	}
	if len(r.problems) > 0 {
		out.Title("%s", show.Plural("problem", len(r.problems)))
		out.Row("SERVER", "PROBLEM")
		for _, p := range r.problems {
			out.Row(p.Server, p.Problem)
		}
	}
	printRelays(out, r.relays)
}

func (s *serverStatus) cells(wide bool) []string {
	cells := []string{s.Namespace + "/" + s.Name, "server"}
	if s.Relay {
		cells[1] = "relay"
	}
	v := s.status
	if v == nil {
		cells = append(cells, "not asked", "", "", "", "", "", "", "", "", "")
		if wide {
			cells = append(cells, s.Node, strings.Join(s.Addresses, ","), "", "", "", "", "")
		}
		return cells
	}
	var clients uint32
	for _, c := range v.GetStreams() {
		clients += c.GetCount()
	}
	oldest := ""
	if c := v.GetOldestOpenConvergence(); c != nil {
		oldest = show.Age(since(v, c.GetPublishTime().AsTime()))
	}
	cells = append(cells, s.State, v.GetServerVersion(), show.Age(since(v, v.GetStartTime().AsTime())), eventAge(v),
		fmt.Sprint(v.GetSize().GetServices()), fmt.Sprint(v.GetSize().GetEndpoints()), fmt.Sprint(clients),
		fmt.Sprint(v.GetNodes()), fmt.Sprint(v.GetOpenConvergences()), oldest)
	if wide {
		versions := v.GetSource().GetResourceVersions()
		cells = append(cells, s.Node, strings.Join(s.Addresses, ","), fmt.Sprint(v.GetSize().GetSlices()),
			fmt.Sprint(versions.GetServices()), fmt.Sprint(versions.GetSlices()), fmt.Sprintf("%016x", v.GetEpoch()),
			v.GetUpstream().GetServer().GetName())
	}
	return cells
}

// eventAge returns how long ago something last came from the API server, according to a server. It
// is empty if the server does not know, as a relay.
func eventAge(s *pb.GetStatusResponse) string {
	if s.GetSource().GetLastEventTime() == nil {
		return ""
	}
	return show.Age(since(s, s.GetSource().GetLastEventTime().AsTime()))
}

// serverState says whether a server serves its clients, and whether what it serves may be of the
// past.
func serverState(s *pb.GetStatusResponse, stalled staleness) string {
	switch {
	case s.GetDraining():
		return "draining"
	case !s.GetSource().GetSynced():
		return "not synced"
	case stalled.of(s) > 0:
		return stale
	}
	return "serving"
}
