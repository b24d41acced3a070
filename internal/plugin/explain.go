package plugin

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/show"
	"github.com/slicecast/slicecast/internal/source"
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
	c := &cobra.Command{
		Use:   "explain NODE NAMESPACE/SERVICE[:PORT]",
		Short: "Explain what a node does with the traffic of a Service, and why",
		Long: `explain follows a Service from the objects in the API server over the servers and the node's agent to the rules in the
node's kernel and the flows in conntrack. The first line says what happens to connections. Each step says whether it
agrees with the step before, so the first that does not is where to look.

Connections come from a pod, from the node and from outside, or only from --from. PORT is the name or the number of a port.
The command needs the same rights as verify.

The exit code is 1 if a step does not agree, or if connections are dropped or rejected, and 2 if something could not be
asked or judged. A Service that needs no rules, such as a headless one, is no error.`,
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
			q := explainQuestion{node: args[0], name: args[1], from: from, output: out.Output, timeout: o.timeout}
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
	c.Flags().StringVar(&from, "from", "", "Address that connections come from. By default, that of a pod, of the node and of a client outside.")
	return c
}

// explainQuestion is what is asked.
type explainQuestion struct {
	node, name, port, from, output string
	service                        model.ServiceKey
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
	if at := slices.IndexFunc(r.steps, func(s *step) bool { return s.State == stepDiffers }); at >= 0 {
		out.Row(fmt.Sprintf("Look at step %d (%s): %s", at+1, r.steps[at].Name, r.steps[at].Why[0]))
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

// explain asks for an explanation, and once more if a step does not agree: what was on its way is
// there by then.
func explain(ctx context.Context, f *fleet.Fleet, q explainQuestion) (r *explainReport, err error) {
	for range 2 {
		if r, err = explainOnce(ctx, f, q); err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(r.steps, func(s *step) bool { return s.State == stepDiffers }) {
			break
		}
	}
	return r, nil
}

func explainOnce(ctx context.Context, f *fleet.Fleet, q explainQuestion) (*explainReport, error) {
	r := &explainReport{question: q}
	o, err := readExplained(ctx, f.Client(), q)
	if err != nil {
		return nil, err
	}
	r.objects(o)
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
	r.held(o, answers)
	r.follows(nodes)
	pods, err := agentPods(ctx, f)
	if err != nil {
		return nil, err
	}
	at := slices.IndexFunc(pods, func(p *fleet.Agent) bool { return p.Node == q.node && p.Missing == "" })
	if at < 0 {
		r.withoutAgent(ctx, f.Client())
		return r, ctx.Err()
	}
	ctx, cancel := context.WithTimeoutCause(ctx, explainTimeout, fmt.Errorf("no answer within %v", explainTimeout))
	defer cancel()
	r.askAgent(ctx, o, answers, func(ctx context.Context, in io.Reader, command ...string) ([]byte, error) {
		return f.Run(ctx, pods[at], fleet.MaxOutput, in, command...)
	})
	return r, nil
}

// explained are the objects of the API server.
type explained struct {
	service *corev1.Service // nil if there is none
	slices  []discoveryv1.EndpointSlice
	node    *corev1.Node // nil if there is none
	// text is what the agent needs of all of them, as JSON compressed by gzip.
	text []byte
}

// readExplained reads the objects. All Services are read, because another one may have an address.
func readExplained(ctx context.Context, client kubernetes.Interface, q explainQuestion) (*explained, error) {
	ctx, cancel := context.WithTimeout(ctx, 6*q.timeout)
	defer cancel()
	o := &explained{}
	var all bytes.Buffer
	w := gzip.NewWriter(&all)
	read := func(from rest.Interface, resource, namespace, selector, name string, into any) error {
		request := from.Get().Resource(resource).SetHeader("Accept", "application/json")
		switch {
		case name != "":
			request = request.Name(name)
		case selector != "":
			request = request.Namespace(namespace).Param("labelSelector", selector)
		}
		text, err := request.Do(ctx).Raw()
		if err != nil {
			return err
		}
		if _, err := w.Write(text); err != nil {
			return err
		}
		return json.Unmarshal(text, into)
	}
	var services corev1.ServiceList
	var slicesOf discoveryv1.EndpointSliceList
	var node corev1.Node
	var ranges struct{}
	if err := read(client.CoreV1().RESTClient(), "services", "", "", "", &services); err != nil {
		return nil, fmt.Errorf("list the Services: %w; explain needs the right to list them in all namespaces", err)
	}
	selector := discoveryv1.LabelServiceName + "=" + q.service.Name
	if err := read(client.DiscoveryV1().RESTClient(), "endpointslices", q.service.Namespace, selector, "", &slicesOf); err != nil {
		return nil, fmt.Errorf("list the EndpointSlices of %v: %w", q.service, err)
	}
	err := read(client.NetworkingV1().RESTClient(), "servicecidrs", "", "", "", &ranges)
	if err != nil && !apierrors.IsNotFound(err) { // they exist since Kubernetes 1.33
		return nil, fmt.Errorf("list the ServiceCIDRs: %w", err)
	}
	switch err := read(client.CoreV1().RESTClient(), "nodes", "", "", q.node, &node); {
	case err == nil:
		o.node = &node
	case !apierrors.IsNotFound(err):
		return nil, fmt.Errorf("read the Node %s: %w", q.node, err)
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	if i := slices.IndexFunc(services.Items, func(s corev1.Service) bool {
		return s.Namespace == q.service.Namespace && s.Name == q.service.Name
	}); i >= 0 {
		o.service = &services.Items[i]
	}
	o.slices, o.text = slicesOf.Items, all.Bytes()
	return o, nil
}

// objects adds the step of the objects.
func (r *explainReport) objects(o *explained) {
	s := r.step("objects in the API server")
	if o.node == nil {
		s.differs("there is no Node %s: check its name", r.question.node)
	} else {
		s.fact("Node %s: zone %s, podCIDRs %s, resource version %s", o.node.Name, orNone(o.node.Labels[corev1.LabelTopologyZone]),
			orNone(strings.Join(o.node.Spec.PodCIDRs, " ")), o.node.ResourceVersion)
	}
	if o.service == nil {
		r.refused = true
		r.verdict = append(r.verdict, fmt.Sprintf("There is no Service %v", r.question.service))
		s.differs("there is no Service %v: check its namespace and name", r.question.service)
		return
	}
	describeService(s, o.service)
	shown, total := 0, 0
	for i := range o.slices {
		slice := &o.slices[i]
		var ports []string
		for _, p := range slice.Ports {
			ports = append(ports, fmt.Sprintf("%s=%d", deref(p.Name), deref(p.Port)))
		}
		s.fact("EndpointSlice %s: %s, ports %s, resource version %s", slice.Name, slice.AddressType, orNone(strings.Join(ports, " ")), slice.ResourceVersion)
		total += len(slice.Endpoints)
		for j := range slice.Endpoints {
			if shown++; shown <= maxShownEndpoints {
				s.fact("  %s", describeEndpoint(&slice.Endpoints[j]))
			}
		}
	}
	if total > maxShownEndpoints {
		s.fact("  … and %d more endpoints", total-maxShownEndpoints)
	}
	if len(o.slices) == 0 {
		s.fact("no EndpointSlice: does the Service's selector match pods?")
	}
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

func deref[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

func describeService(s *step, o *corev1.Service) {
	s.fact("Service %s/%s: type %s, cluster IPs %s, resource version %s", o.Namespace, o.Name, o.Spec.Type,
		orNone(strings.Join(o.Spec.ClusterIPs, " ")), o.ResourceVersion)
	for _, p := range o.Spec.Ports {
		s.fact("  port %s %d/%s, node port %d", orNone(p.Name), p.Port, p.Protocol, p.NodePort)
	}
	s.fact("  internalTrafficPolicy %s, externalTrafficPolicy %s, sessionAffinity %s, trafficDistribution %s",
		orNone(string(deref(o.Spec.InternalTrafficPolicy))), orNone(string(o.Spec.ExternalTrafficPolicy)), o.Spec.SessionAffinity,
		orNone(deref(o.Spec.TrafficDistribution)))
	if len(o.Spec.LoadBalancerSourceRanges) > 0 {
		s.fact("  loadBalancerSourceRanges %s", strings.Join(o.Spec.LoadBalancerSourceRanges, " "))
	}
	if len(o.Spec.ExternalIPs) > 0 {
		s.fact("  externalIPs %s", strings.Join(o.Spec.ExternalIPs, " "))
	}
	for _, i := range o.Status.LoadBalancer.Ingress {
		s.fact("  load balancer %s, ipMode %s", orNone(i.IP+i.Hostname), orNone(string(deref(i.IPMode))))
	}
	if p := o.Labels[source.LabelServiceProxyName]; p != "" {
		s.fact("  label %s: %s", source.LabelServiceProxyName, p)
	}
}

func describeEndpoint(e *discoveryv1.Endpoint) string {
	text := strings.Join(e.Addresses, " ")
	if e.TargetRef != nil {
		text += fmt.Sprintf(" %s %s", e.TargetRef.Kind, e.TargetRef.Name)
	}
	text += fmt.Sprintf(" on %s, zone %s,", orNone(deref(e.NodeName)), orNone(deref(e.Zone)))
	for _, c := range []struct {
		name string
		is   *bool
	}{{"ready", e.Conditions.Ready}, {"serving", e.Conditions.Serving}, {"terminating", e.Conditions.Terminating}} {
		// A condition that is not set counts as true, except terminating.
		if c.is != nil && *c.is || c.is == nil && c.name != "terminating" {
			text += " " + c.name
		} else if c.name != "terminating" {
			text += " not-" + c.name
		}
	}
	if e.Hints != nil {
		var hints []string
		for _, z := range e.Hints.ForZones {
			hints = append(hints, "zone "+z.Name)
		}
		for _, n := range e.Hints.ForNodes {
			hints = append(hints, "node "+n.Name)
		}
		text += ", hints: " + orNone(strings.Join(hints, ", "))
	}
	return text
}

// held adds the step of the servers, which should have the objects.
func (r *explainReport) held(o *explained, answers []fleet.Answer[lacking]) {
	s := r.step("servers")
	converter := source.NewConverter("")
	if o.service != nil {
		converter = source.NewConverter(o.service.Labels[source.LabelServiceProxyName])
	}
	versions := map[string]string{}
	wanted := false
	if o.service != nil {
		if m, skips := converter.FromService(o.service); m != nil {
			wanted = true
			v := m.ContentVersion()
			versions["Service"] = hex.EncodeToString(v[:])
		} else {
			r.unserved(s, skips)
		}
		for i := range o.slices {
			if m, _ := converter.FromEndpointSlice(&o.slices[i]); m != nil {
				v := m.ContentVersion()
				versions[m.Name] = hex.EncodeToString(v[:])
			}
		}
	}
	found := false
	for _, a := range answers {
		if a.Err != nil {
			s.notJudged("%v did not answer: %v", a.Server, a.Err)
			continue
		}
		g := a.Value.service
		s.fact("%v: shard %d, sequence %d, this Service last changed at %d, epoch %d", a.Server, g.GetShard(), g.GetSequence(),
			g.GetChangedSequence(), a.Value.status.GetEpoch())
		if g.GetService() == nil {
			if wanted && (o.service.Labels[source.LabelServiceProxyName] == "") {
				s.differs("%v does not have the Service", a.Server)
			}
			continue
		}
		found = true
		have := map[string]string{"Service": hex.EncodeToString(g.GetService().GetVersion())}
		for _, slice := range g.GetSlices() {
			have[slice.GetName()] = hex.EncodeToString(slice.GetVersion())
		}
		for name, version := range versions {
			if have[name] != version {
				s.differs("%v has another version of %s than the API server: it is behind", a.Server, name)
			}
		}
		for name := range have {
			if _, ok := versions[name]; !ok {
				s.differs("%v still has %s, which the API server does not", a.Server, name)
			}
		}
	}
	slices.Sort(s.Why)
	if wanted && !found && o.service.Labels[source.LabelServiceProxyName] != "" {
		r.verdict = append(r.verdict, fmt.Sprintf("Slicecast has no rules for %v: its label %s says that the proxy %q serves it",
			r.question.service, source.LabelServiceProxyName, o.service.Labels[source.LabelServiceProxyName]))
	}
}

// unserved says why nodes have no rules for a Service.
func (r *explainReport) unserved(s *step, skips []source.Skip) {
	for _, skip := range skips {
		text := skip.String()
		switch skip.Reason {
		case source.Headless:
			text = "it is headless, so clients connect to the addresses of its endpoints, which DNS returns"
		case source.ExternalName:
			text = "it is of type ExternalName, which is a name in DNS"
		}
		r.verdict = append(r.verdict, fmt.Sprintf("No node has rules for %v: %s", r.question.service, text))
		s.fact("%s", text)
	}
}

// follows adds the step of what the servers know of the node.
func (r *explainReport) follows(nodes *nodesReport) {
	s := r.step("the node, as its server sees it")
	if nodes.agentsErr != nil {
		s.notJudged("the agents' Pods are not known: %v", nodes.agentsErr)
	}
	at := slices.IndexFunc(nodes.nodes, func(n node) bool { return n.Node == r.question.node })
	if at < 0 {
		s.notJudged("no server knows the node, and no agent was found on it")
		return
	}
	n := nodes.nodes[at]
	late := n.agent.GetLacks() && n.agent.GetLag().AsDuration() < slowChange
	if !late {
		s.fact("%s, server %s", n.State, orNone(n.Server))
	}
	switch {
	case n.State == unknown:
		s.notJudged("the node may follow a server that was not asked")
	case n.agent == nil:
		s.differs("%s is %s: the servers cannot tell it of changes, and it keeps the rules that it has", n.Node, n.State)
	case n.stale > 0:
		s.differs("its server may lack changes of the last %s", show.Age(n.stale))
	case late:
		s.fact("server %s; the latest state of the Service is %s old, and not acknowledged yet, which the agent does every few seconds",
			orNone(n.Server), show.Span(n.agent.GetLag()))
	case n.agent.GetLacks():
		s.differs("it has not programmed the latest state of the Service; it lacks %d publishes, the oldest for %s", n.agent.GetLagSequences(),
			show.Span(n.agent.GetLag()))
	}
	for _, e := range n.agent.GetErrors() {
		if strings.HasSuffix(e.GetObject(), " "+r.question.service.String()) {
			s.differs("it cannot program %s: %s", e.GetObject(), e.GetReason())
		}
	}
}

// withoutAgent adds what can be said of a node without an agent.
func (r *explainReport) withoutAgent(ctx context.Context, client kubernetes.Interface) {
	s := r.step("agent and kernel")
	s.notJudged("no Pod of an agent runs on %s: run \"slicecast-agent explain\" there, see docs/kubectl.md", r.question.node)
	r.verdict = append(r.verdict, fmt.Sprintf("What %s does is not known: no Pod of an agent runs there", r.question.node))
	list, err := client.CoreV1().Pods(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{
		LabelSelector: "k8s-app=kube-proxy", FieldSelector: "spec.nodeName=" + r.question.node, Limit: 10,
	})
	switch {
	case err != nil:
		s.notJudged("whether kube-proxy runs there: %v", err)
	case len(list.Items) == 0:
		r.verdict = append(r.verdict, fmt.Sprintf("No Pod with the label k8s-app=kube-proxy runs there in %s either", metav1.NamespaceSystem))
	}
	if err == nil {
		for _, p := range list.Items {
			r.verdict = append(r.verdict, fmt.Sprintf("kube-proxy serves the node: Pod %s/%s is %s", p.Namespace, p.Name, p.Status.Phase))
		}
	}
}

// nodeAnswer is what is read of what "slicecast-agent explain -o json" prints.
type nodeAnswer struct {
	Served   *bool    `json:"served"`
	Problems []string `json:"problems"`
	Unjudged []string `json:"unjudged"`
	Ports    []struct {
		ID            string `json:"id"`
		EndpointCount int    `json:"endpointCount"`
		Packets       []struct {
			Frontend   string `json:"frontend"`
			Source     string `json:"source"`
			Wanted     string `json:"wanted"`
			Because    string `json:"because"`
			Backends   int    `json:"backends"`
			Found      string `json:"found"`
			Difference string `json:"difference"`
			Deviation  string `json:"deviation"`
			// RefusedBy is as in explain.Packet.
			RefusedBy []string `json:"refusedBy"`
		} `json:"packets"`
		Flows struct {
			Total int `json:"total"`
			Stale int `json:"stale"`
		} `json:"flows"`
	} `json:"ports"`
}

// askAgent adds the steps of the agent and of the kernel.
func (r *explainReport) askAgent(ctx context.Context, o *explained, answers []fleet.Answer[lacking], run runner) {
	r.agentHas(ctx, answers, run)
	s := r.step("the kernel, compared with the decision")
	if o.service == nil || o.node == nil {
		return // what is missing was said
	}
	command := []string{"slicecast-agent", "explain", r.question.name, "--objects=-"}
	if r.question.from != "" {
		command = append(command, "--from="+r.question.from)
	}
	var a nodeAnswer
	text, err := run(ctx, bytes.NewReader(o.text), append(command, "--output=json")...)
	// The command fails if there are differences, and prints them nevertheless.
	if failed := json.Unmarshal(text, &a); failed != nil || a.Served == nil {
		if err == nil {
			err = fmt.Errorf("the agent has not printed an explanation as JSON, but %.100q: upgrade it", text)
		}
		s.notJudged("%v", err)
		r.verdict = append(r.verdict, "What the kernel does is not known: "+err.Error())
		return
	}
	r.answer = text
	r.judge(s, &a)
	if r.question.output != "table" && r.question.output != "wide" {
		return
	}
	out, err := run(ctx, bytes.NewReader(o.text), append(command, "--output="+r.question.output)...)
	if r.text = string(out); r.text == "" && err != nil {
		s.notJudged("the details: %v", err)
	}
}

// agentHas adds the step of what the agent says that it has.
func (r *explainReport) agentHas(ctx context.Context, answers []fleet.Answer[lacking], run runner) {
	s := r.step("the node's agent")
	text, err := run(ctx, nil, "slicecast-agent", "status", "--output=json")
	var fields struct{ Status json.RawMessage }
	status := &pb.AgentDebugServiceGetStatusResponse{}
	if err == nil {
		err = json.Unmarshal(text, &fields)
	}
	if err == nil && fields.Status == nil {
		err = errors.New("the agent has not printed its status as JSON: upgrade it")
	}
	if err == nil {
		err = protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(fields.Status, status)
	}
	if err != nil {
		s.notJudged("%v", err)
		return
	}
	s.fact("programmer %s; follows %s", status.GetProgrammer(), orNone(status.GetServer().GetName()+status.GetSource()))
	if status.GetByCheckpoint() {
		s.differs("the node is programmed from the checkpoint: no server has confirmed the state since the agent was started")
	}
	if status.GetStaleSince() != nil {
		s.differs("it has been in sync with no server for %s: %s", show.Age(status.GetTime().AsTime().Sub(status.GetStaleSince().AsTime())),
			orNone(status.GetLastError()))
	}
	for _, a := range answers {
		g := a.Value.service
		if a.Err != nil || g == nil || a.Value.status.GetEpoch() != status.GetEpoch() {
			continue
		}
		for _, shard := range status.GetShards() {
			if shard.GetShard() != g.GetShard() {
				continue
			}
			s.fact("shard %d: received up to sequence %d, programmed up to %d", shard.GetShard(), shard.GetSequence(), shard.GetProgrammedSequence())
			if shard.GetProgrammedSequence() < g.GetChangedSequence() {
				s.differs("the Service changed at sequence %d, which it has not programmed", g.GetChangedSequence())
			}
		}
	}
	for _, f := range status.GetFailures() {
		if f.GetService().GetNamespace() == r.question.service.Namespace && f.GetService().GetName() == r.question.service.Name {
			s.differs("it cannot program the Service: %s", f.GetReason())
		}
	}
	if e := status.GetProgrammingError(); e != "" {
		s.differs("it cannot program its kernel: %s", e)
	}
}

// judge judges the agent's answer, and says what happens to connections.
func (r *explainReport) judge(s *step, a *nodeAnswer) {
	for _, p := range a.Problems {
		s.fact("not served: %s", p)
	}
	for _, u := range a.Unjudged {
		s.notJudged("%s", u)
	}
	if !*a.Served && len(r.verdict) == 0 {
		r.refused = true
		r.verdict = append(r.verdict, fmt.Sprintf("%s has no rules for %s: the Service has no such port or family", r.question.node, r.question.name))
	}
	for _, p := range a.Ports {
		var texts []string
		of := map[string][]string{}
		for _, k := range p.Packets {
			var text string
			switch {
			case k.Difference != "":
				s.differs("%s", k.Difference)
				text = "what comes there " + k.Found + ", which is not what was decided"
			case len(k.RefusedBy) > 0:
				r.refused = true
				text = strings.Join(k.RefusedBy, "; ") + ", which is of a firewall or a network policy"
				if why := "all rules of Slicecast are as they should be, and what comes there " + text; !slices.Contains(s.Why, why) {
					s.Why = append(s.Why, why) // although the step agrees
				}
			case k.Deviation != "" && strings.Contains(k.Found, "reaches"):
				text = "what comes there " + k.Found + ": " + k.Deviation
			case k.Found == "":
				text = "what the kernel does is not known; decided is " + k.Wanted + ": " + k.Because
			case k.Wanted == "drop" || k.Wanted == "reject":
				r.refused = true
				text = map[string]string{"drop": "dropped", "reject": "rejected"}[k.Wanted] + ": " + k.Because
			default:
				text = fmt.Sprintf("reaches %d of %s", k.Backends, show.Plural("endpoint", p.EndpointCount))
			}
			if of[text] == nil {
				texts = append(texts, text)
			}
			of[text] = append(of[text], k.Frontend+" from "+k.Source)
		}
		for _, text := range texts {
			where := ""
			switch n := len(of[text]); {
			case n == len(p.Packets):
			case n <= 2:
				where = " at " + strings.Join(of[text], " and ")
			default:
				where = fmt.Sprintf(" at %s and %d others", of[text][0], n-1)
			}
			r.verdict = append(r.verdict, fmt.Sprintf("%s, %s%s: %s", r.question.node, p.ID, where, text))
		}
		if p.Flows.Stale > 0 {
			s.differs("%d of %s of %s in conntrack lead to no backend", p.Flows.Stale, show.Plural("flow", p.Flows.Total), p.ID)
		}
	}
}
