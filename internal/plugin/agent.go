package plugin

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/show"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// parallelAgents is how many agents are asked at the same time.
const parallelAgents = 16

func newAgentCommand(o *options) *cobra.Command {
	out := &show.Options{Wide: true}
	c := &cobra.Command{
		Use:   "agent NODE...",
		Short: "Show what the agents of nodes say themselves",
		Long: `agent runs "slicecast-agent status" in the Pods of agents. It shows what no server knows: which server an agent
follows or why it follows none, and what its kernel holds. It also asks the servers when they last heard of the API
server. It needs the right to pods/exec in the agents' namespace. -o wide shows the shards, too.
The exit code is 1 if an agent follows no server, cannot program something or has a warning.`,
		Example: `  kubectl slicecast agent node-1
  kubectl slicecast agent node-1 node-2 -o json`,
		Args: cobra.MinimumNArgs(1),
		ValidArgsFunction: func(c *cobra.Command, done []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			return o.complete(c, func(ctx context.Context, f *fleet.Fleet) (names []string, err error) {
				pods, err := agentPods(ctx, f)
				for _, p := range pods {
					if p.Missing == "" && !slices.Contains(done, p.Node) {
						names = append(names, p.Node)
					}
				}
				return names, err
			})
		},
		RunE: func(c *cobra.Command, nodes []string) error {
			return o.run(c, out, func(ctx context.Context, f *fleet.Fleet) (report, error) {
				return askAgents(ctx, f, nodes, o, out.Output)
			})
		},
	}
	addOutputFlags(c, out)
	return c
}

// agentReport is the report of agent.
type agentReport struct{ agents []agentStatus }

// agentStatus is what an agent says.
type agentStatus struct {
	Node string `json:"node"`
	Pod  string `json:"pod,omitempty"`
	// Error is why the agent was not asked, or did not answer.
	Error string `json:"error,omitempty"`
	// Answer is what "slicecast-agent status -o json" prints.
	Answer json.RawMessage `json:"answer,omitempty"`
	// Problems are what is wrong according to the answer.
	Problems []string `json:"problems,omitempty"`
	// LastEvent is what the API server's last event is known of, at the root of the servers that the
	// agent follows.
	LastEvent *lastEvent `json:"lastEvent,omitempty"`

	text   string               // what it prints for people
	server *pb.ServerConnection // the server that it follows; nil if there is none
}

// agentPods returns the Pods of the agents.
func agentPods(ctx context.Context, f *fleet.Fleet) ([]*fleet.Agent, error) {
	_, pods, err := allPods(ctx, f)
	return pods, err
}

// allPods returns the Pods of the servers and of the agents.
func allPods(ctx context.Context, f *fleet.Fleet) ([]*fleet.Server, []*fleet.Agent, error) {
	servers, err := f.Servers(ctx)
	if err != nil {
		return nil, nil, err
	}
	agents, err := f.Agents(ctx, servers)
	return servers, agents, err
}

func askAgents(ctx context.Context, f *fleet.Fleet, nodes []string, o *options, output string) (*agentReport, error) {
	servers, pods, err := allPods(ctx, f)
	if err != nil {
		return nil, err
	}
	r := &agentReport{agents: make([]agentStatus, len(nodes))}
	var all errgroup.Group
	all.SetLimit(parallelAgents)
	var answers []fleet.Answer[*pb.GetStatusResponse]
	asked := make(chan struct{})
	go func() {
		defer close(asked)
		answers = fleet.Ask(ctx, f, servers, func(ctx context.Context, conn *grpc.ClientConn) (*pb.GetStatusResponse, error) {
			return pb.NewDebugServiceClient(conn).GetStatus(ctx, &pb.GetStatusRequest{})
		})
	}()
	for i, node := range nodes {
		a := &r.agents[i]
		a.Node = node
		agent, err := fleet.AgentOn(pods, node)
		if err != nil {
			a.Error = err.Error()
			continue
		}
		a.Pod = agent.String()
		all.Go(func() error {
			ctx, cancel := context.WithTimeoutCause(ctx, o.timeout, hangs(agent, fmt.Sprintf("%v (--timeout)", o.timeout)))
			defer cancel()
			run := runnerIn(f, agent)
			err := a.ask(output, func(command ...string) ([]byte, error) { return run(ctx, nil, command...) })
			if err != nil {
				a.Error = err.Error()
			}
			return nil
		})
	}
	_ = all.Wait() // the errors are in the report
	<-asked
	for i := range r.agents {
		if a := &r.agents[i]; a.server != nil {
			a.LastEvent = findLastEvent(answers, a.server)
		}
	}
	return r, ctx.Err()
}

// hangs returns what is wrong if a command in the Pod of an agent does not end in time, and what to
// do about it.
func hangs(a *fleet.Agent, within string) error {
	return fmt.Errorf("slicecast-agent has not answered in its Pod within %s, although the Pod runs: the agent or the node hangs. "+
		"See kubectl logs -n %s %s and kubectl describe node %s; if that lasts, kubectl delete pod -n %s %s starts the agent anew, and the kernel keeps its rules meanwhile",
		within, a.Namespace, a.Name, a.Node, a.Namespace, a.Name)
}

// lastEvent says when something last came from the API server.
type lastEvent struct {
	// Server is the Pod that follows the API server: the agent's server, or the one that feeds it.
	Server string `json:"server,omitempty"`
	// AgeSeconds is how long ago it was.
	AgeSeconds float64 `json:"ageSeconds,omitempty"`
	// Unknown is why that is unknown.
	Unknown string `json:"unknown,omitempty"`
}

// String is a sentence for people.
func (e *lastEvent) String() string {
	if e.Unknown != "" {
		return "last event unknown: " + e.Unknown
	}
	return fmt.Sprintf("last event %s ago, at %s", show.Age(time.Duration(e.AgeSeconds*float64(time.Second))), e.Server)
}

// findLastEvent returns when the API server was last heard of by a server, or by the one from which
// that one has its state through relays. The name of a server is that of its Pod or, in the network
// of its node, that of the node.
func findLastEvent(answers []fleet.Answer[*pb.GetStatusResponse], server *pb.ServerConnection) *lastEvent {
	for range len(answers) {
		host, _, _ := net.SplitHostPort(server.GetAddress()) // no server has an empty address
		at := slices.IndexFunc(answers, func(a fleet.Answer[*pb.GetStatusResponse]) bool {
			return a.Err == nil && (a.Server.Name == server.GetName() || slices.Contains(a.Server.Addresses, host))
		})
		if at < 0 {
			break
		}
		a := answers[at]
		if up := a.Value.GetUpstream(); up != nil {
			server = up.GetServer()
			continue
		}
		if a.Value.GetSource().GetLastEventTime() == nil {
			return &lastEvent{Unknown: a.Server.String() + " does not say it: it follows no API server, or is of an earlier version"}
		}
		return &lastEvent{Server: a.Server.String(), AgeSeconds: since(a.Value, a.Value.GetSource().GetLastEventTime().AsTime()).Seconds()}
	}
	if server == nil {
		return &lastEvent{Unknown: "the relay that it follows is connected to no server"}
	}
	return &lastEvent{Unknown: fmt.Sprintf("no answer of the server %s; kubectl slicecast status says why", server.GetName())}
}

// ask asks the agent with run, which runs a command in the agent's Pod and returns its output.
func (a *agentStatus) ask(output string, run func(command ...string) ([]byte, error)) error {
	answer, err := run("slicecast-agent", "status", "--output=json")
	if err != nil {
		return err
	}
	s, err := readAgentStatus(answer)
	if err != nil {
		return err
	}
	a.Problems = agentProblems(s)
	a.server = s.GetServer()
	command := []string{"slicecast-agent", "status"}
	switch output {
	case "table":
	case "wide":
		command = append(command, "--shards")
	default:
		a.Answer = answer
		return nil
	}
	text, err := run(command...)
	a.text = string(text)
	return err
}

// readAgentStatus reads what "slicecast-agent status --output=json" has printed.
func readAgentStatus(answer []byte) (*pb.AgentDebugServiceGetStatusResponse, error) {
	var fields struct{ Status json.RawMessage }
	s := &pb.AgentDebugServiceGetStatusResponse{}
	if err := json.Unmarshal(answer, &fields); err != nil || fields.Status == nil {
		return nil, fmt.Errorf("the agent has not printed its status as JSON, but %.100q: upgrade it", answer)
	}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(fields.Status, s); err != nil {
		return nil, fmt.Errorf("what the agent has printed is of another version: %w; upgrade what is older", err)
	}
	return s, nil
}

// agentProblems returns what is wrong according to an agent.
func agentProblems(s *pb.AgentDebugServiceGetStatusResponse) (out []string) {
	if s.GetSource() == "" && s.GetServer() == nil {
		out = append(out, strings.TrimSuffix("it follows no server: "+s.GetLastError(), ": "))
	}
	if stale := s.GetServer().GetStaleSince(); stale != nil {
		out = append(out, fmt.Sprintf("it follows %s, which may lack changes of the last %s; kubectl slicecast status says why",
			s.GetServer().GetName(), show.Age(s.GetTime().AsTime().Sub(stale.AsTime()))))
	}
	if s.GetProgrammingTime() == nil {
		out = append(out, "it has not programmed anything since it was started")
	}
	if e := s.GetProgrammingError(); e != "" {
		out = append(out, "it cannot program its kernel: "+e)
	}
	for _, f := range s.GetFailures() {
		out = append(out, fmt.Sprintf("it cannot program %s/%s: %s", f.GetService().GetNamespace(), f.GetService().GetName(), f.GetReason()))
	}
	for _, w := range s.GetWarnings() {
		out = append(out, wire.WarningName(w.GetWarning())+": "+w.GetReason())
	}
	return out
}

// code implements report.
func (r *agentReport) code() int {
	switch {
	case slices.ContainsFunc(r.agents, func(a agentStatus) bool { return a.Error != "" }):
		return incomplete
	case slices.ContainsFunc(r.agents, func(a agentStatus) bool { return len(a.Problems) > 0 }):
		return wrong
	}
	return fine
}

// Fields implements show.Report.
func (r *agentReport) Fields() []show.Field { return []show.Field{{Name: "agents", Value: r.agents}} }

// Print implements show.Report.
func (r *agentReport) Print(out *show.Page) {
	for _, a := range r.agents {
		if a.Error != "" {
			out.Title("%s was not asked: %s", a.Node, a.Error)
			continue
		}
		out.Title("%s, by %s", a.Node, a.Pod)
		for line := range strings.Lines(a.text) {
			if line = strings.TrimRight(line, "\n"); line == "" {
				out.Title("") // begins the next table
				continue
			}
			out.Row(line)
		}
		if a.LastEvent != nil {
			out.Title("API server: %s", a.LastEvent)
		}
	}
}
