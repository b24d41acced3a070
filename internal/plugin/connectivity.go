package plugin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/probe"
	"github.com/slicecast/slicecast/internal/show"
)

const (
	// maxConnectivityNodes bounds the nodes of a run. Each has two Pods.
	maxConnectivityNodes = 20
	// settleTime is how long nodes may take to follow a change.
	settleTime = 15 * time.Second
	// agentImage is the repository of the image that is used if no agents run.
	agentImage = "ghcr.io/slicecast/slicecast-agent"
)

// connectivity is the command and its flags.
type connectivity struct {
	*options

	out       show.Options
	sample    int
	seed      uint64
	image     string
	hostNet   bool
	cleanup   bool
	timeLimit time.Duration

	progress
}

func newConnectivityCommand(o *options) *cobra.Command {
	x := &connectivity{options: o, out: show.Options{Wide: true, Once: true}}
	c := &cobra.Command{
		Use:   "connectivity [NODE...]",
		Short: "Send packets to Services from temporary Pods on some nodes",
		Long: `connectivity creates a namespace with Pods on the given nodes, or on a sample of them, and with Services of the kinds
that matter. The Pods send packets to the Services, while endpoints and Services change. Then it removes the namespace,
also after Ctrl-C. It works with Slicecast and with kube-proxy, so it is a check before and after a move.

A failure says what was expected and what was seen, and what explain says about that Service on that node. Pods need no
privileges, except those of --host-network, and end by themselves after the time limit.

What a killed command has left is removed by --cleanup. That ends runs of others, too. It needs the right to
create and delete Namespaces, and to create Pods, Services, EndpointSlices, ServiceAccounts and pods/exec in them.

The exit code is 1 if a scenario fails, and 2 if a scenario or a node could not be judged.`,
		Example: `  kubectl slicecast connectivity
  kubectl slicecast connectivity node-1 node-2
  kubectl slicecast connectivity --sample=5 --image=registry.example.com/slicecast-agent:v1.2.3
  kubectl slicecast connectivity --cleanup`,
		ValidArgsFunction: func(c *cobra.Command, done []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			return o.complete(c, func(ctx context.Context, f *fleet.Fleet) ([]string, error) { return agentNodes(ctx, f, done) })
		},
		RunE: func(c *cobra.Command, nodes []string) error {
			if err := x.validate(nodes); err != nil {
				return err
			}
			x.progress.to, x.out.AskTimeout = c.ErrOrStderr(), 10*x.timeout+x.timeLimit+lateTime+2*cleanupTime
			return o.run(c, &x.out, func(ctx context.Context, f *fleet.Fleet) (report, error) { return x.run(ctx, f, nodes) })
		},
	}
	fs := c.Flags()
	addOutputFlags(c, &x.out)
	fs.IntVar(&x.sample, "sample", 3, "Number of nodes to choose, unless some are named: those in trouble first, then random ones.")
	fs.Uint64Var(&x.seed, "seed", 0, "Seed by which random nodes are chosen; 0 means a new one, which is printed.")
	fs.StringVar(&x.image, "image", "", "Image of an agent, for the Pods. If empty, that of the agents or, without agents, the published one of this version.")
	fs.BoolVar(&x.hostNet, "host-network", false, "Also send packets from the nodes themselves, by Pods in their network. The namespace then allows privileged Pods.")
	fs.BoolVar(&x.cleanup, "cleanup", false, "Only remove what earlier runs have left. This ends runs of others, too.")
	fs.DurationVar(&x.timeLimit, "time-limit", 10*time.Minute, "Maximum time of the run, without its removal.")
	completeNothing(c, "sample", "seed", "image", "time-limit")
	return c
}

func (x *connectivity) validate(nodes []string) error {
	switch {
	case x.cleanup && len(nodes) > 0:
		return errors.New("--cleanup removes all runs: name no nodes")
	case len(nodes) > maxConnectivityNodes:
		return fmt.Errorf("%d nodes are named: name at most %d", len(nodes), maxConnectivityNodes)
	case x.sample < 1 || x.sample > maxConnectivityNodes:
		return fmt.Errorf("--sample is %d: use 1 to %d", x.sample, maxConnectivityNodes)
	case x.timeLimit < time.Minute || x.timeLimit > time.Hour:
		return fmt.Errorf("--time-limit is %v: use 1m to 1h", x.timeLimit)
	}
	return nil
}

// run makes a run, or removes the earlier ones.
func (x *connectivity) run(ctx context.Context, f *fleet.Fleet, names []string) (report, error) {
	r := &connectivityReport{Removed: []string{}, Results: []scenarioResult{}}
	var err error
	if r.Removed, err = removeLeft(ctx, f, &x.progress, x.cleanup); err != nil || x.cleanup {
		return r, err
	}
	nodes, text, image, err := x.chooseNodes(ctx, f, names)
	if err != nil {
		return nil, err
	}
	x.say("%s", text)
	run := newConnectivityRun(x, f, nodes, cmp.Or(x.image, image))
	r.Namespace, r.Choice, r.Image = run.namespace, text, run.image

	limited, cancel := context.WithTimeoutCause(ctx, x.timeLimit, fmt.Errorf("the run has taken %v (--time-limit)", x.timeLimit))
	defer cancel()
	err = run.create(limited)
	if err == nil {
		r.Results = run.scenarios(limited)
	}
	if ctx.Err() != nil {
		err = errors.New("interrupted")
	}
	if left := run.end(ctx); left != nil {
		r.Results = append(r.Results, scenarioResult{Scenario: "removal of the namespace", State: scenarioUnjudged, Detail: left.Error()})
	}
	if err != nil && len(r.Results) == 0 {
		return nil, err
	}
	if err != nil {
		r.Results = append(r.Results, scenarioResult{Scenario: "the rest of the run", State: scenarioUnjudged, Detail: err.Error()})
	}
	return r, nil
}

// chosenNode is a node of a run.
type chosenNode struct {
	name string
	// addresses are the node's internal addresses.
	addresses []string
	// elsewhere is why the node's proxy may lead to endpoints of other nodes although the policy is
	// Local and the node has none. It is empty if the proxy does not.
	elsewhere string
}

// chooseNodes returns the nodes of the run, a sentence about their choice, and the image.
func (x *connectivity) chooseNodes(ctx context.Context, f *fleet.Fleet, names []string) (chosen []chosenNode, text, image string, err error) {
	list, err := fleet.List(ctx, f, f.Client().CoreV1().Nodes().List, metav1.ListOptions{})
	if err != nil {
		return nil, "", "", fmt.Errorf("list Nodes: %w", err)
	}
	all := map[string]*corev1.Node{}
	for i := range list.Items {
		if n := &list.Items[i]; n.Labels[corev1.LabelOSStable] != "windows" {
			all[n.Name] = n
		}
	}
	var candidates []node
	known, err := askNodes(ctx, f)
	switch {
	case errors.Is(err, fleet.ErrNoServers): // before the move
	case err != nil:
		return nil, "", "", err
	default:
		candidates = slices.DeleteFunc(known.nodes, func(n node) bool { return all[n.Node] == nil })
		pods, err := agentPods(ctx, f)
		if err != nil {
			return nil, "", "", err
		}
		if at := slices.IndexFunc(pods, func(p *fleet.Agent) bool { return p.Missing == "" }); at >= 0 {
			image = pods[at].Pod.Spec.Containers[0].Image
		}
	}
	for name := range all {
		if !slices.ContainsFunc(candidates, func(n node) bool { return n.Node == name }) {
			candidates = append(candidates, node{Node: name, State: "without an agent"})
		}
	}
	slices.SortFunc(candidates, func(a, b node) int { return cmp.Compare(a.Node, b.Node) })
	sampled, text := choose(candidates, names, x.sample, x.seed)
	kubeProxies, proxiesErr := kubeProxyPods(ctx, f)
	settings := settingsReader{f.ConfigFiles()}
	for _, s := range sampled {
		n := all[s.Name]
		if n == nil {
			return nil, "", "", fmt.Errorf("there is no Linux node %q; see kubectl get nodes", s.Name)
		}
		c := chosenNode{name: s.Name, elsewhere: settings.leadsElsewhere(ctx, s.Name, known, kubeProxies[s.Name], proxiesErr)}
		for _, a := range n.Status.Addresses {
			if a.Type == corev1.NodeInternalIP {
				c.addresses = append(c.addresses, a.Address)
			}
		}
		chosen = append(chosen, c)
	}
	if len(chosen) == 0 {
		return nil, "", "", errors.New("the cluster has no Linux nodes")
	}
	if image == "" && x.image == "" {
		v := daemon.Version()
		if v == "devel" {
			return nil, "", "", errors.New("this build has no version, so " + agentImage + " has no image of it: name an image of an agent that the nodes can pull (--image)")
		}
		image = agentImage + ":" + v
	}
	return chosen, text, image, nil
}

// The states of a scenario on a node.
const (
	scenarioOK     = "ok"
	scenarioFailed = "FAILED"
	// scenarioSlow is for what led where it should, but took long. It is no failure.
	scenarioSlow = "SLOW"
	// scenarioSkipped is for what the cluster does not have.
	scenarioSkipped = "skipped"
	// scenarioUnjudged is for what could not be done, such as running a command in a Pod.
	scenarioUnjudged = "NOT JUDGED"
)

// scenarioResult is the outcome of a scenario on a node.
type scenarioResult struct {
	Scenario string `json:"scenario"`
	Node     string `json:"node,omitempty"`
	// Target is what was reached: a protocol and an address.
	Target string `json:"target,omitempty"`
	State  string `json:"state"`
	// Detail is what was expected and seen, why the scenario was skipped, or how long it took.
	Detail string `json:"detail,omitempty"`
	// Service and From are the arguments that an explanation of a failure needs.
	Service string `json:"service,omitempty"`
	From    string `json:"from,omitempty"`
	// Packets are the attempts, and Attempts is their number. Of many, only maxPackets are kept: those
	// that failed or were slow first.
	Packets  []packet `json:"packets,omitempty"`
	Attempts int      `json:"attempts,omitempty"`
	// Reasons are what explain says about the Service on the node, in short.
	Reasons []string `json:"reasons,omitempty"`
	// Explanation is what "explain -o json" prints.
	Explanation json.RawMessage `json:"explanation,omitempty"`
}

// packet is the outcome of an attempt to reach a target.
type packet struct {
	// From is the address of the client, and To the protocol and address of the target.
	From string `json:"from"`
	To   string `json:"to"`
	// Expected is what should come of it, and Got what did.
	Expected string `json:"expected"`
	Got      string `json:"got"`
	// Seconds is how long that took.
	Seconds float64 `json:"seconds"`
}

// maxPackets bounds the packets that are kept of a result.
const maxPackets = 50

// setPackets sets the packets of a result.
func (s *scenarioResult) setPackets(from, expected string, results []probe.Result) {
	s.Attempts = len(results)
	results = slices.Clone(results)
	interesting := func(r probe.Result) bool { return r.Outcome != probe.Answered || r.Took > slowAnswer }
	slices.SortStableFunc(results, func(a, b probe.Result) int {
		switch {
		case interesting(a) == interesting(b):
			return 0
		case interesting(a):
			return -1
		}
		return 1
	})
	for _, r := range results[:min(len(results), maxPackets)] {
		got := string(r.Outcome)
		switch {
		case r.Server != "":
			got += " by " + r.Server + " to the client " + r.Client
		case len(r.Addresses) > 0:
			got += ": " + strings.Join(r.Addresses, ", ")
		case r.Error != "":
			got += ": " + r.Error
		}
		s.Packets = append(s.Packets, packet{From: from, To: s.Target, Expected: expected, Got: got, Seconds: r.Took.Seconds()})
	}
}

// connectivityReport is the report of connectivity.
type connectivityReport struct {
	Namespace string           `json:"namespace,omitempty"`
	Choice    string           `json:"choice,omitempty"`
	Image     string           `json:"image,omitempty"`
	Removed   []string         `json:"removed"`
	Results   []scenarioResult `json:"results"`
}

// code implements report.
func (r *connectivityReport) code() int {
	code := fine
	for _, s := range r.Results {
		switch s.State {
		case scenarioUnjudged:
			return incomplete
		case scenarioFailed:
			code = wrong
		}
	}
	return code
}

// Fields implements show.Report.
func (r *connectivityReport) Fields() []show.Field {
	return []show.Field{{Name: "namespace", Value: r.Namespace}, {Name: "choice", Value: r.Choice}, {Name: "image", Value: r.Image}, {Name: "removed", Value: r.Removed}, {Name: "results", Value: r.Results}}
}

// Print implements show.Report.
func (r *connectivityReport) Print(out *show.Page) {
	for _, name := range r.Removed {
		out.Row("Removed what an earlier run had left: namespace " + name)
	}
	if r.Namespace == "" {
		if len(r.Removed) == 0 {
			out.Row("No run has left anything.")
		}
		return
	}
	if len(r.Removed) > 0 {
		out.Title("")
	}
	out.Row("SCENARIO", "NODE", "RESULT", "DETAIL")
	counts := map[string]int{}
	// Without -o wide, the targets that are fine on a node share a line.
	type key struct{ scenario, node string }
	fineOnes := map[key]int{}
	for _, s := range r.Results {
		counts[s.State]++
		if s.State == scenarioOK {
			fineOnes[key{s.Scenario, s.Node}]++
		}
	}
	for _, s := range r.Results {
		detail := strings.TrimPrefix(s.Target+": "+s.Detail, ": ")
		if s.State == scenarioOK && s.Detail == "" {
			detail = s.Target
		}
		k := key{s.Scenario, s.Node}
		if n := fineOnes[k]; !out.Wide && s.State == scenarioOK && s.Detail == "" {
			if n == 0 {
				continue // in the line of another target
			}
			fineOnes[k] = 0
			detail = show.Plural("target", n)
		}
		out.Row(s.Scenario, s.Node, s.State, detail)
	}
	for _, s := range r.Results {
		if len(s.Reasons) > 0 {
			out.Title("%s, %s, %s: what explain says", s.Scenario, s.Node, s.Target)
		}
		for _, reason := range s.Reasons {
			out.Row(reason)
		}
	}
	out.Title("%d ok, %d slow, %d failed, %d not judged, %d skipped", counts[scenarioOK], counts[scenarioSlow], counts[scenarioFailed], counts[scenarioUnjudged], counts[scenarioSkipped])
}
