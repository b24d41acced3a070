package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/show"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

func newNodesCommand(o *options) *cobra.Command {
	out := &show.Options{Wide: true}
	var behind, withErrors bool
	c := &cobra.Command{
		Use:   "nodes [NODE...]",
		Short: "Show how far each node is, and which are not connected",
		Long: `nodes shows the agents of all servers and relays. A node whose agent's Pod runs, but follows no server that was asked,
is not connected: the servers know nothing of it, and it keeps the rules that it has. So does a node whose agent's Pod
does not run.`,
		Example: `  kubectl slicecast nodes
  kubectl slicecast nodes --behind --watch
  kubectl slicecast nodes --errors -o wide
  kubectl slicecast nodes node-1 node-2 -o json`,
		ValidArgsFunction: func(c *cobra.Command, done []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			return o.complete(c, func(ctx context.Context, f *fleet.Fleet) ([]string, error) {
				r, err := askNodes(ctx, f)
				if err != nil {
					return nil, err
				}
				return slices.DeleteFunc(r.names(), func(name string) bool { return slices.Contains(done, name) }), nil
			})
		},
		RunE: func(c *cobra.Command, names []string) error {
			return o.run(c, out, func(ctx context.Context, f *fleet.Fleet) (report, error) {
				r, err := askNodes(ctx, f)
				if err != nil {
					return nil, err
				}
				r.choose(names, behind, withErrors)
				return r, nil
			})
		},
	}
	addOutputFlags(c, out)
	c.Flags().BoolVar(&behind, "behind", false, "Show only nodes that are not connected, or have not programmed the latest state.")
	c.Flags().BoolVar(&withErrors, "errors", false, "Show only nodes that cannot program something, or that have a warning.")
	return c
}

// The states of nodes that their servers do not know of.
const (
	// notConnected means that no server that was asked knows the node.
	notConnected = "not connected"
	// unknown means that the node may follow a server that did not answer or was not asked.
	unknown = "unknown"
	// stale means that the agent follows a server that may lack changes (see findStale), or a relay
	// that is fed by such a server. The node may lack any change of the meantime.
	stale = "stale"
	// notRunning begins the state of a node whose agent's Pod does not run. Why it does not follows.
	notRunning = "agent not running: "
)

// nodesReport is the report of nodes.
type nodesReport struct {
	servers
	nodes []node
	// relays are those whose nodes are not in nodes, because they did not answer.
	relays []node
	// onlyRelays means that no server was asked that is no relay. Then nodes that follow none of the
	// relays may follow a server of another namespace.
	onlyRelays bool
	// pods are the Pods of the agents. agentsErr is why they are not known, and so which nodes are not
	// connected; nil if they are known.
	pods      []*fleet.Agent
	agentsErr error
	// missing are names that were asked for, of which there is no node.
	missing []string
	// wrong means that one of the nodes is behind or in trouble.
	wrong bool
}

// node is a node, or a relay that stands for some.
type node struct {
	// Node is empty for a relay.
	Node string `json:"node"`
	// State is what show.State says, stale, notConnected, unknown, or what notRunning begins.
	State string `json:"state"`
	// Server is the server or relay that the agent follows.
	Server string `json:"server,omitempty"`
	// Agent is what that server knows of the agent; nil if there is none.
	Agent *show.Message `json:"agent,omitempty"`

	agent *pb.AgentStatus
	now   time.Time // by the server's clock
	// stale is for how long the server's state has been stale; 0 means that it is not.
	stale time.Duration
}

// agents is what a server knows of its clients.
type agents struct {
	status  *pb.GetStatusResponse
	clients []*pb.AgentStatus
}

// maxClients is how many clients one server may list. It bounds the memory of this command.
const maxClients = 131072

// errTooManyClients means that a server has listed more clients than any server has.
var errTooManyClients = fmt.Errorf("the server lists more than %d clients, which is not believed: look at its Pod and its image", maxClients)

// listAgents asks a server for its clients. It returns errTooManyClients if there are more than
// maxClients.
func listAgents(ctx context.Context, conn *grpc.ClientConn, request *pb.ListAgentsRequest) (out agents, err error) {
	client := pb.NewDebugServiceClient(conn)
	if out.status, err = client.GetStatus(ctx, &pb.GetStatusRequest{}); err != nil {
		return out, err
	}
	stream, err := client.ListAgents(ctx, request)
	for err == nil {
		var a *pb.ListAgentsResponse
		if a, err = stream.Recv(); err != nil {
			break
		}
		if len(out.clients) == maxClients {
			return agents{}, errTooManyClients
		}
		out.clients = append(out.clients, a.GetAgent())
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return out, err
}

// askNodes returns all nodes of the fleet.
func askNodes(ctx context.Context, f *fleet.Fleet) (*nodesReport, error) {
	answers, all, err := ask(ctx, f, func(ctx context.Context, conn *grpc.ClientConn) (agents, error) {
		return listAgents(ctx, conn, &pb.ListAgentsRequest{})
	})
	if err != nil {
		return nil, err
	}
	return nodesOf(ctx, f, answers, all)
}

// nodesOf returns the nodes in the answers of servers, and those of the other agents' Pods.
func nodesOf(ctx context.Context, f *fleet.Fleet, answers []fleet.Answer[agents], all servers) (*nodesReport, error) {
	var found []*fleet.Server
	for _, a := range answers {
		found = append(found, a.Server)
	}
	r := merge(answers, all)
	pods, err := f.Agents(ctx, found)
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil:
		r.agentsErr = err
	}
	r.pods = pods
	r.addPods(pods)
	return r, nil
}

// merge merges the answers of servers and relays.
func merge(answers []fleet.Answer[agents], all servers) *nodesReport {
	r := &nodesReport{servers: all, onlyRelays: !slices.ContainsFunc(answers, func(a fleet.Answer[agents]) bool { return !a.Server.Relay })}
	newest := make(map[string]node)
	stalled := findStale(statuses(answers))
	for _, a := range answers {
		if a.Err != nil {
			continue
		}
		past := stalled.of(a.Value.status)
		for _, c := range a.Value.clients {
			n := node{
				Node: c.GetNodeName(), State: show.State(c), Server: a.Server.String(), Agent: &show.Message{Message: c},
				agent: c, now: a.Value.status.GetTime().AsTime(), stale: past,
			}
			if past > 0 && !n.behind() {
				n.State = stale
			}
			switch c.GetKind() {
			case pb.ClientKind_CLIENT_KIND_AGENT:
				// While an agent moves to another server, the earlier one may not have noticed it.
				before, ok := newest[n.Node]
				if !ok || age(n) < age(before) {
					newest[n.Node] = n
				}
			case pb.ClientKind_CLIENT_KIND_RELAY:
				if !answered(answers, c) {
					r.relays = append(r.relays, n)
				}
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(newest)) {
		r.nodes = append(r.nodes, newest[name])
	}
	return r
}

// age returns for how long a client has been connected. It is never negative.
func age(n node) time.Duration { return max(0, n.now.Sub(n.agent.GetSince().AsTime())) }

// answered reports whether a relay that is a client of another server has answered itself.
func answered(answers []fleet.Answer[agents], relay *pb.AgentStatus) bool {
	host, _, err := net.SplitHostPort(relay.GetAddress())
	if err != nil {
		return false
	}
	return slices.ContainsFunc(answers, func(a fleet.Answer[agents]) bool {
		return a.Err == nil && a.Value.status.GetUpstream() != nil && slices.Contains(a.Server.Addresses, host)
	})
}

// addPods adds the nodes with agents' Pods of which no server knows.
func (r *nodesReport) addPods(pods []*fleet.Agent) {
	state := notConnected
	if r.silent() > 0 || len(r.relays) > 0 || r.onlyRelays {
		state = unknown
	}
	known := make(map[string]bool, len(r.nodes))
	for _, n := range r.nodes {
		known[n.Node] = true
	}
	// An agent that was evicted, or is replaced, may have a successor on its node, which counts.
	order := func(p *fleet.Agent) int {
		switch {
		case p.Missing == "":
			return 0
		case strings.HasPrefix(p.Missing, string(corev1.PodPending)):
			return 1
		}
		return 2
	}
	for _, p := range slices.SortedStableFunc(slices.Values(pods), func(a, b *fleet.Agent) int { return order(a) - order(b) }) {
		if known[p.Node] {
			continue
		}
		known[p.Node] = true
		n := node{Node: p.Node, State: state}
		if p.Missing != "" {
			n.State = notRunning + p.Missing
		}
		r.nodes = append(r.nodes, n)
	}
	slices.SortFunc(r.nodes, func(a, b node) int { return cmp.Compare(a.Node, b.Node) })
}

// programmed is the state of a node that has everything.
const programmed = "programmed"

// lasting returns for how long a node that a server knows has at least not been programmed.
func (n node) lasting() time.Duration {
	switch {
	case n.State == programmed:
		return 0
	case n.State == stale:
		return n.stale
	case n.agent.GetProgrammed(): // it lacks changes
		return n.agent.GetLag().AsDuration()
	}
	return age(n)
}

// behind reports whether a node lacks something, as far as is known.
func (n node) behind() bool { return n.State != programmed }

// inTrouble reports whether a node cannot program something, or has a warning.
func (n node) inTrouble() bool { return len(n.agent.GetErrors())+len(n.agent.GetWarnings()) > 0 }

// choose leaves the nodes with these names, if there are any, that are behind or in trouble, if
// that is asked for. The exit code is about the nodes that are left.
func (r *nodesReport) choose(names []string, behind, withErrors bool) {
	for _, name := range names {
		if !slices.ContainsFunc(r.nodes, func(n node) bool { return n.Node == name }) {
			r.missing = append(r.missing, name)
		}
	}
	leave := func(n node) bool {
		return len(names) > 0 && !slices.Contains(names, n.Node) || behind && !n.behind() || withErrors && !n.inTrouble()
	}
	r.nodes, r.relays = slices.DeleteFunc(r.nodes, leave), slices.DeleteFunc(r.relays, func(n node) bool {
		return behind && !n.behind() || withErrors && !n.inTrouble()
	})
	r.wrong = len(r.missing) > 0 || slices.ContainsFunc(slices.Concat(r.nodes, r.relays), func(n node) bool {
		return n.behind() || n.inTrouble()
	})
}

// names returns the names of the nodes.
func (r *nodesReport) names() (out []string) {
	for _, n := range r.nodes {
		out = append(out, n.Node)
	}
	return out
}

// code implements report.
func (r *nodesReport) code() int { return r.codeOf(r.wrong) }

// codeOf returns the exit code, where isWrong says that something in the answers is. A relay that
// did not answer, and agents or nodes that are not known, make the answers incomplete.
func (r *nodesReport) codeOf(isWrong bool) int {
	if len(r.relays) > 0 || r.agentsErr != nil || r.elsewhere() > 0 {
		return incomplete
	}
	return r.servers.code(isWrong)
}

// Fields implements show.Report.
func (r *nodesReport) Fields() []show.Field {
	notListed := ""
	if r.agentsErr != nil {
		notListed = r.agentsErr.Error()
	}
	return []show.Field{
		{Name: "nodes", Value: nonNil(r.nodes)}, {Name: "relaysNotAsked", Value: nonNil(r.relays)},
		{Name: "missing", Value: nonNil(r.missing)}, {Name: "agentsNotListed", Value: notListed}, {Name: "servers", Value: r.servers},
	}
}

// elsewhere returns how many of the nodes may follow servers of other namespaces.
func (r *nodesReport) elsewhere() (n int) {
	for _, one := range r.nodes {
		if r.onlyRelays && one.State == unknown {
			n++
		}
	}
	return n
}

// Print implements show.Report.
func (r *nodesReport) Print(out *show.Page) {
	r.servers.print(out)
	out.Title("%s", show.Plural("node", len(r.nodes)))
	if len(r.nodes) > 0 {
		printNodes(out, r.nodes)
	}
	if len(r.missing) > 0 {
		out.Title("No such node: %s", strings.Join(r.missing, ", "))
	}
	r.printUnknown(out)
	printWarnings(out, slices.Concat(r.nodes, r.relays))
}

// printUnknown says which nodes may be missing: those of relays, and those that are not connected.
func (r *nodesReport) printUnknown(out *show.Page) {
	if r.agentsErr != nil {
		out.Title("Nodes that are not connected are not shown: %v", r.agentsErr)
	}
	if n := r.elsewhere(); n > 0 {
		out.Title("Only relays were asked, so %s may follow servers of other namespaces: ask these with --namespace, or all "+
			"with --all-namespaces", show.Plural("node", n))
	}
	printRelays(out, r.relays)
}

// printRelays names the relays that did not answer, with what is known of them.
func printRelays(out *show.Page, relays []node) {
	if len(relays) == 0 {
		return
	}
	out.Title("Relays that were not asked, and whose nodes are not shown: %d. Relays of other namespaces are asked with "+
		"--all-namespaces", len(relays))
	out.Row("ADDRESS", "NODES", "STATE", "LAG", "BEHIND", "SERVER", "LAST ERROR")
	for _, n := range relays {
		out.Row(n.agent.GetAddress(), fmt.Sprint(n.agent.GetNodes()), n.State, show.Span(n.agent.GetLag()), lag(n.agent),
			n.Server, show.LastError(n.agent, n.now))
	}
}

func printNodes(out *show.Page, nodes []node) {
	header := []string{"NODE", "STATE", "LAG", "BEHIND", "SERVER", "SINCE", "PROGRAMMER", "VERSION", "ERRORS", "LAST ERROR"}
	if out.Wide {
		header = append(header, "ADDRESS", "SENT", "WARNINGS")
	}
	out.Row(header...)
	for _, n := range nodes {
		a := n.agent
		if a == nil {
			out.Row(append([]string{n.Node, n.State}, make([]string, len(header)-2)...)...)
			continue
		}
		cells := []string{
			n.Node, n.State, show.Span(a.GetLag()), lag(a), n.Server, show.Age(age(n)), a.GetProgrammer(), a.GetClientVersion(),
			fmt.Sprint(len(a.GetErrors())), show.LastError(a, n.now),
		}
		if out.Wide {
			var warnings []string
			for _, w := range a.GetWarnings() {
				warnings = append(warnings, wire.WarningName(w.GetWarning()))
			}
			cells = append(cells, a.GetAddress(), show.Bytes(a.GetSentBytes()), strings.Join(warnings, ","))
		}
		out.Row(cells...)
	}
}

// lag returns how many publishes a client lacks; empty if there are none.
func lag(a *pb.AgentStatus) string {
	if a.GetLagSequences() == 0 {
		return ""
	}
	return fmt.Sprint(a.GetLagSequences())
}

// printWarnings prints what should be mended on nodes.
func printWarnings(out *show.Page, nodes []node) {
	titled := false
	for _, n := range nodes {
		for _, w := range n.agent.GetWarnings() {
			if !titled {
				out.Title("Warnings")
				out.Row("NODE", "WARNING", "SINCE", "REASON")
				titled = true
			}
			out.Row(cmp.Or(w.GetNodeName(), n.Node), wire.WarningName(w.GetWarning()),
				show.Age(n.now.Sub(w.GetTime().AsTime())), w.GetReason())
		}
	}
}
