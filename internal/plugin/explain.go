package plugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/show"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// explainTimeout bounds the agent's part of an explanation.
const explainTimeout = 3 * time.Minute

// maxShownEndpoints and maxShownLines bound what a step shows.
const (
	maxShownEndpoints = 100
	maxShownLines     = 2000
)

func newExplainCommand(o *options) *cobra.Command {
	out := &show.Options{Wide: true, Once: true, AskTimeout: 2 * explainTimeout}
	from := ""
	var proxy serviceProxy
	c := &cobra.Command{
		Use:   "explain NODE NAMESPACE/SERVICE[:PORT]",
		Short: "Explain what a node does with the traffic of a Service, and why",
		Long: `explain follows a Service from the objects in the API server over the servers and the node's agent to the rules in the
node's kernel and the flows in conntrack. The first line says what happens to connections. Each step says whether it
agrees with the step before, so the first that does not is where to look.

Connections come from a pod, from the node and from outside, or only from --from. PORT is the name or the number of a port.
The command needs the same rights as verify.

The exit code is 1 if a step does not agree, or if connections are dropped or rejected, and 2 if something could not be
asked or judged. A Service that needs no rules, such as a headless one, or that another proxy serves is no error.`,
		Example: `  kubectl slicecast explain node-1 default/web
  kubectl slicecast explain node-1 default/web:http --from=10.244.1.7 -o wide`,
		Args: cobra.ExactArgs(2),
		ValidArgsFunction: func(c *cobra.Command, done []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			switch len(done) {
			case 0:
				return o.complete(c, func(ctx context.Context, f *fleet.Fleet) ([]string, error) { return agentNodes(ctx, f, nil) })
			case 1:
				return o.complete(c, serviceNames)
			}
			return nil, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(c *cobra.Command, args []string) error {
			q := explainQuestion{node: args[0], name: args[1], from: from, output: out.Output, proxy: proxy, timeout: o.timeout}
			name, port, _ := strings.Cut(args[1], ":")
			var ok bool
			if q.service, ok = model.ParseServiceKey(name); !ok {
				return fmt.Errorf("%q is not the name of a Service: use NAMESPACE/SERVICE or NAMESPACE/SERVICE:PORT", args[1])
			}
			q.port = port
			if from != "" {
				if _, err := netip.ParseAddr(from); err != nil {
					return fmt.Errorf("--from: %w; use an IP address", err)
				}
			}
			return o.run(c, out, func(ctx context.Context, f *fleet.Fleet) (report, error) { return explain(ctx, f, q) })
		},
	}
	addOutputFlags(c, out)
	proxy.addFlag(c.Flags())
	c.Flags().StringVar(&from, "from", "", "Address that connections come from. By default, that of a pod, of the node and of a client outside.")
	return c
}

// explainQuestion is what is asked.
type explainQuestion struct {
	node, name, port, from, output string
	service                        model.ServiceKey
	proxy                          serviceProxy
	timeout                        time.Duration
}

// The states of a step.
const (
	stepAgrees    = "agrees"
	stepDiffers   = "DIFFERS"
	stepNotJudged = "not judged"
)

// step is a part of the way from the API server to the packet.
type step struct {
	Name  string `json:"name"`
	State string `json:"state"`
	// Why is what does not agree with the step before, or why it was not judged.
	Why []string `json:"why"`
	// Facts are what is so.
	Facts []string `json:"facts"`
}

func (s *step) fact(format string, args ...any) {
	s.Facts = append(s.Facts, fmt.Sprintf(format, args...))
}

// differs records a disagreement. It counts more than what was not judged.
func (s *step) differs(format string, args ...any) {
	s.State, s.Why = stepDiffers, append(s.Why, fmt.Sprintf(format, args...))
}

func (s *step) notJudged(format string, args ...any) {
	if s.Why = append(s.Why, fmt.Sprintf(format, args...)); s.State != stepDiffers {
		s.State = stepNotJudged
	}
}

// explainReport is the report of explain.
type explainReport struct {
	servers
	question explainQuestion
	verdict  []string
	steps    []*step
	// answer is what "slicecast-agent explain -o json" prints, and text what it prints for people.
	answer json.RawMessage
	text   string
	// refused means that connections are dropped or rejected, or that there is no such Service or
	// port.
	refused bool
	// moving means that a change is on its way to the node. late means that the node has not
	// acknowledged the Service's latest version, and that nothing else says that it has programmed it.
	moving, late bool
	// proxyName is the label's value of the Services that the servers serve, if proxyNamed is set.
	proxyName  string
	proxyNamed bool
	// others means that another proxy than Slicecast serves the Service, because of its label.
	others bool
}

func (r *explainReport) step(name string) *step {
	s := &step{Name: name, State: stepAgrees, Why: []string{}, Facts: []string{}}
	r.steps = append(r.steps, s)
	return s
}

// code implements report.
func (r *explainReport) code() int {
	has := func(state string) bool {
		return slices.ContainsFunc(r.steps, func(s *step) bool { return s.State == state })
	}
	if has(stepNotJudged) {
		return incomplete
	}
	return r.servers.code(has(stepDiffers) || r.refused)
}

// Fields implements show.Report.
func (r *explainReport) Fields() []show.Field {
	answer := r.answer
	if answer == nil {
		answer = json.RawMessage("null")
	}
	return []show.Field{
		{Name: "node", Value: r.question.node}, {Name: "service", Value: r.question.name}, {Name: "verdict", Value: nonNil(r.verdict)},
		{Name: "steps", Value: r.steps}, {Name: "agent", Value: answer}, {Name: "servers", Value: r.servers},
	}
}

// Print implements show.Report.
func (r *explainReport) Print(out *show.Page) {
	for _, v := range r.verdict {
		out.Row(v)
	}
	if at := slices.IndexFunc(r.steps, func(s *step) bool { return s.State != stepAgrees }); at >= 0 {
		s, not := r.steps[at], ""
		if s.State == stepNotJudged {
			not = ", which was not judged"
		}
		out.Row(fmt.Sprintf("Look at step %d (%s)%s: %s", at+1, s.Name, not, s.Why[0]))
	}
	for i, s := range r.steps {
		out.Title("%d. %s: %s", i+1, s.Name, s.State)
		for _, line := range s.Why {
			out.Row("! " + line)
		}
		for _, line := range s.Facts {
			out.Row("  " + line)
		}
	}
	lines := 0
	for line := range strings.Lines(r.text) {
		if lines++; lines > maxShownLines {
			out.Row("  … (-o json has all)")
			break
		}
		if line = strings.TrimRight(line, "\n"); line == "" {
			out.Title("") // begins the next table
			continue
		}
		out.Row("  " + line)
	}
	r.servers.print(out)
}

// explainSettle is how long a change may be on its way to the node before it is reported, and
// explainPause the time between two looks at it.
const (
	explainSettle = 10 * time.Second
	explainPause  = time.Second
)

// explain asks for an explanation.
func explain(ctx context.Context, f *fleet.Fleet, q explainQuestion) (*explainReport, error) {
	return settled(ctx, func() (*explainReport, error) { return explainOnce(ctx, f, q) })
}

// settled asks once more if a step does not agree. While a change is on its way to the node, it
// asks again and again, but not for longer than explainSettle.
func settled(ctx context.Context, ask func() (*explainReport, error)) (r *explainReport, err error) {
	end := time.Now().Add(explainSettle)
	for again := false; ; again = true {
		if r, err = ask(); err != nil {
			return nil, err
		}
		differs := slices.ContainsFunc(r.steps, func(s *step) bool { return s.State == stepDiffers })
		switch isMoving := r.moving || r.late; {
		case isMoving && time.Now().Before(end):
		case !again && differs:
			continue
		default:
			r.unsettled()
			return r, nil
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(explainPause):
		}
	}
}

// unsettled says that the node may not have the Service's latest version, if that is so.
func (r *explainReport) unsettled() {
	if !r.late {
		return
	}
	at := slices.IndexFunc(r.steps, func(s *step) bool { return s.Name == nodeStep })
	r.steps[at].differs("%s has not acknowledged the latest version of the Service yet", r.question.node)
}

func explainOnce(ctx context.Context, f *fleet.Fleet, q explainQuestion) (*explainReport, error) {
	r := &explainReport{question: q}
	o, err := readExplained(ctx, f.Client(), q)
	if err != nil {
		return nil, err
	}
	r.objects(o)
	defer r.pods(ctx, f.Client(), o) // after what happens to connections
	name := &pb.ServiceName{Namespace: q.service.Namespace, Name: q.service.Name}
	answers, all, err := ask(ctx, f, func(ctx context.Context, conn *grpc.ClientConn) (lacking, error) {
		return askLacking(ctx, conn, name)
	})
	if errors.Is(err, fleet.ErrNoServers) { // also before the move from kube-proxy
		r.held(o, nil)
		r.steps[len(r.steps)-1].notJudged("%v", err)
		r.withoutAgent(ctx, f.Client())
		return r, ctx.Err()
	}
	if err != nil {
		return nil, err
	}
	r.servers = all
	nodes, err := nodesOf(ctx, f, as(answers, func(l lacking) agents { return l.agents }), all)
	if err != nil {
		return nil, err
	}
	r.asksFor(ctx, f, answers)
	r.held(o, answers)
	r.follows(nodes)
	pods, err := agentPods(ctx, f)
	if err != nil {
		return nil, err
	}
	agent, missing := fleet.AgentOn(pods, q.node)
	if missing != nil {
		r.withoutAgent(ctx, f.Client())
		return r, ctx.Err()
	}
	r.defaultProxy(ctx, f.Client(), o)
	ctx, cancel := context.WithTimeoutCause(ctx, explainTimeout, fmt.Errorf("no answer within %v", explainTimeout))
	defer cancel()
	r.askAgent(ctx, o, answers, runnerIn(f, agent))
	r.unchanged(ctx, f.Client(), o)
	return r, nil
}
