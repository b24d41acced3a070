package plugin

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/pager"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/show"
	"github.com/slicecast/slicecast/internal/source"
)

const (
	// verifyTimeout bounds all comparisons together, and verifyNodeTimeout that of one node.
	verifyTimeout     = time.Hour
	verifyNodeTimeout = 5 * time.Minute
	// maxObjectsAge is the age of the objects that a node is compared with, at most, when the
	// comparison begins. In a large cluster, the last node's turn comes minutes after the first one's.
	maxObjectsAge = 20 * time.Second
	// shownPerNode is how many differences of a node are shown unless the output is wide.
	shownPerNode = 10
)

func newVerifyCommand(o *options) *cobra.Command {
	out := &show.Options{Wide: true, Once: true, AskTimeout: verifyTimeout}
	var proxy serviceProxy
	c := &cobra.Command{
		Use:   "verify [NODE...]",
		Short: "Compare what the kernels of nodes do with what the API server says",
		Long: `verify reads the Services, EndpointSlices, ServiceCIDRs and Nodes of the API server, and runs "slicecast-agent verify" in
the Pods of the agents of the given nodes, or of all nodes. That evaluates the rules in the node's kernel, which
Slicecast or kube-proxy has made, for packets to each frontend. Each difference names the Service, the frontend, the
source, what is wanted and what was found, and the rule.

What differs is compared once more with objects that are read anew, so a change on its way is no difference. The command
needs the right to list these objects, and the right to pods/exec in the agents' namespace.

The exit code is 1 if there are differences, and 2 if a node was not compared or something could not be judged.`,
		Example: `  kubectl slicecast verify
  kubectl slicecast verify node-1 node-2 -o wide`,
		ValidArgsFunction: func(c *cobra.Command, done []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			return o.complete(c, func(ctx context.Context, f *fleet.Fleet) ([]string, error) { return agentNodes(ctx, f, done) })
		},
		RunE: func(c *cobra.Command, nodes []string) error {
			return o.run(c, out, func(ctx context.Context, f *fleet.Fleet) (report, error) {
				return verifyNodes(ctx, f, nodes, proxy, o.timeout)
			})
		},
	}
	proxy.addFlag(c.Flags())
	addOutputFlags(c, out)
	return c
}

// agentNodes returns the nodes whose agents run, without those that are done.
func agentNodes(ctx context.Context, f *fleet.Fleet, done []string) (names []string, err error) {
	pods, err := agentPods(ctx, f)
	for _, p := range pods {
		if p.Missing == "" && !slices.Contains(done, p.Node) {
			names = append(names, p.Node)
		}
	}
	return names, err
}

// verifyReport is the report of verify.
type verifyReport struct{ nodes []verifiedNode }

// verifiedNode is what the comparison of a node has found.
type verifiedNode struct {
	Node string `json:"node"`
	Pod  string `json:"pod,omitempty"`
	// Error is why the node was not compared.
	Error string `json:"error,omitempty"`
	// Objects is the resource version of the Services that the kernel was compared with.
	Objects string `json:"servicesResourceVersion,omitempty"`
	verification
}

// verification is what "slicecast-agent verify -o json" prints.
type verification struct {
	Frontends int `json:"frontends"`
	Packets   int `json:"packets"`
	// Total is the number of differences, of which the agent prints only so many.
	Total       int          `json:"total"`
	Differences []difference `json:"differences"`
	Unjudged    []string     `json:"unjudged"`
	// Tolerated counts packets that kube-proxy's mode treats in its own way, which Facts name.
	Tolerated int `json:"tolerated"`
	// Facts are what is no difference: what rules of others and kube-proxy's mode do to packets.
	Facts []string `json:"facts"`
}

type difference struct {
	Service  string `json:"service,omitempty"`
	Frontend string `json:"frontend,omitempty"`
	Source   string `json:"source,omitempty"`
	Wanted   string `json:"wanted"`
	Found    string `json:"found"`
	Rule     string `json:"rule,omitempty"`
	// Text is the difference as a sentence.
	Text string `json:"text"`
}

// about returns what a difference is about: the packets or, without a Service, what is wanted. The
// rest may change while a Service changes.
func (d difference) about() difference {
	about := difference{Service: d.Service, Frontend: d.Frontend, Source: d.Source}
	if d.Service == "" {
		about.Wanted = d.Wanted
	}
	return about
}

// keep removes the differences that an earlier comparison has not found.
func (v *verification) keep(earlier verification) {
	if earlier.Total > len(earlier.Differences) || v.Total > len(v.Differences) {
		return // not all of them are known
	}
	known := make(map[difference]bool, len(earlier.Differences))
	for _, d := range earlier.Differences {
		known[d.about()] = true
	}
	v.Differences = slices.DeleteFunc(v.Differences, func(d difference) bool { return !known[d.about()] })
	v.Total = len(v.Differences)
}

// runner runs a command of an agent's Pod with an input, which may be nil, and returns its output.
type runner func(ctx context.Context, in io.Reader, command ...string) ([]byte, error)

func runnerIn(f *fleet.Fleet, agent *fleet.Agent) runner {
	return func(ctx context.Context, in io.Reader, command ...string) ([]byte, error) {
		return f.Run(ctx, agent.NamespacedName, agent.Container, fleet.MaxOutput, in, command...)
	}
}

func verifyNodes(ctx context.Context, f *fleet.Fleet, names []string, proxy serviceProxy, timeout time.Duration) (*verifyReport, error) {
	servers, pods, err := allPods(ctx, f)
	if err != nil {
		return nil, err
	}
	proxyName, _, err := proxy.name(ctx, f, servers)
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		for _, p := range pods {
			if !slices.Contains(names, p.Node) && p.Node != "" {
				names = append(names, p.Node)
			}
		}
		slices.Sort(names)
	}
	if len(names) == 0 {
		return nil, errors.New("no agents were found: docs/kubectl.md says how they are looked for")
	}
	r := &verifyReport{nodes: make([]verifiedNode, len(names))}
	runners := make([]runner, len(names))
	for i, name := range names {
		n := &r.nodes[i]
		n.Node = name
		agent, err := fleet.AgentOn(pods, name)
		if err != nil {
			n.Error = err.Error()
			continue
		}
		n.Pod = agent.String()
		runners[i] = runnerIn(f, agent)
	}
	command := append([]string{"slicecast-agent", "verify", "--objects=-", "--output=json"}, proxyNameArguments(proxyName)...)
	read := func(ctx context.Context) (*clusterObjects, error) {
		return readObjects(ctx, f.Client(), timeout)
	}
	return r, r.verify(ctx, command, &freshObjects{read: read, maxAge: maxObjectsAge}, runners)
}

// freshObjects are the objects, which are read again when they are too old. A Service that has
// changed since would look like a difference.
type freshObjects struct {
	read   func(context.Context) (*clusterObjects, error)
	maxAge time.Duration

	mu   sync.Mutex // guards the fields below, and keeps several from reading at once
	last *clusterObjects
	at   time.Time
}

// get returns objects that are not too old. With anew, it reads them in any case.
func (o *freshObjects) get(ctx context.Context, anew bool) (*clusterObjects, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.last != nil && !anew && time.Since(o.at) <= o.maxAge {
		return o.last, nil
	}
	at := time.Now()
	objects, err := o.read(ctx)
	if err == nil {
		o.last, o.at = objects, at
	}
	return objects, err
}

// verify runs the command on all nodes, and again on those with differences, with objects that are
// read anew.
func (r *verifyReport) verify(ctx context.Context, command []string, from *freshObjects, runners []runner) error {
	again := make([]bool, len(r.nodes))
	for first := true; ; first = false {
		if _, err := from.get(ctx, true); err != nil {
			return err
		}
		var all errgroup.Group
		all.SetLimit(parallelAgents)
		for i := range r.nodes {
			n := &r.nodes[i]
			if runners[i] == nil || !first && !again[i] {
				continue
			}
			all.Go(func() error {
				ctx, cancel := context.WithTimeoutCause(ctx, verifyNodeTimeout, fmt.Errorf("no answer within %v", verifyNodeTimeout))
				defer cancel()
				objects, err := from.get(ctx, false)
				var v verification
				if err == nil {
					v, err = objects.compare(ctx, n.Node, command, runners[i])
				}
				if err != nil {
					n.Error = err.Error()
					return nil
				}
				if !first {
					v.keep(n.verification)
				}
				n.verification, n.Objects = v, objects.version
				return nil
			})
		}
		_ = all.Wait() // the errors are in the report
		if ctx.Err() != nil {
			return ctx.Err()
		}
		differ := false
		for i := range r.nodes {
			again[i] = r.nodes[i].Error == "" && r.nodes[i].Total > 0
			differ = differ || again[i]
		}
		if !first || !differ {
			return nil
		}
	}
}

// clusterObjects are the objects of the API server that all nodes are compared with.
type clusterObjects struct {
	// shared are the objects other than Nodes, as JSON compressed by gzip.
	shared []byte
	// version is the resource version of the Services.
	version string
	// node returns a Node as JSON.
	node func(ctx context.Context, name string) ([]byte, error)
}

// readObjects reads the objects.
func readObjects(ctx context.Context, client kubernetes.Interface, timeout time.Duration) (*clusterObjects, error) {
	o := &clusterObjects{node: func(ctx context.Context, name string) ([]byte, error) {
		return getNode(ctx, client.CoreV1().RESTClient(), name, timeout)
	}}
	var all bytes.Buffer
	w := gzip.NewWriter(&all)
	to := json.NewEncoder(w)
	for _, list := range []struct {
		resource string
		kind     schema.GroupVersionKind
		optional bool
		page     pager.ListPageFunc
	}{
		{"services", corev1.SchemeGroupVersion.WithKind("Service"), false, func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return client.CoreV1().Services("").List(ctx, o)
		}},
		{"endpointslices", discoveryv1.SchemeGroupVersion.WithKind("EndpointSlice"), false, func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return client.DiscoveryV1().EndpointSlices("").List(ctx, o)
		}},
		{"servicecidrs", networkingv1.SchemeGroupVersion.WithKind("ServiceCIDR"), true, func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return client.NetworkingV1().ServiceCIDRs().List(ctx, o) // since Kubernetes 1.33
		}},
	} {
		version, err := writeObjects(ctx, to, list.kind, list.page, 6*timeout)
		if list.optional && apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list %s: %w; verify needs the right to list them in all namespaces", list.resource, err)
		}
		o.version = cmp.Or(o.version, version)
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	o.shared = all.Bytes()
	return o, nil
}

// writeObjects writes all objects of a kind, each as a JSON value, with only what nodes use. So
// agents need no memory for what else tenants put into them. It reads a page at a time, and returns
// the resource version of the list.
func writeObjects(
	ctx context.Context, to *json.Encoder, kind schema.GroupVersionKind, page pager.ListPageFunc, timeout time.Duration,
) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	pages := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		list, err := page(ctx, o)
		if err == nil {
			version = list.(metav1.ListInterface).GetResourceVersion()
		}
		return list, err
	})
	err = pages.EachListItem(ctx, metav1.ListOptions{}, func(object runtime.Object) error {
		object.GetObjectKind().SetGroupVersionKind(kind)
		source.Trim(object.(metav1.Object))
		return to.Encode(object)
	})
	return version, err
}

// getNode reads a Node as JSON.
func getNode(ctx context.Context, from rest.Interface, name string, timeout time.Duration) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return from.Get().Resource("nodes").SetHeader("Accept", "application/json").Name(name).Do(ctx).Raw()
}

// compare runs the comparison on a node.
func (o *clusterObjects) compare(ctx context.Context, name string, command []string, run runner) (v verification, err error) {
	node, err := o.node(ctx, name)
	switch {
	case apierrors.IsNotFound(err):
		return v, errors.New("the API server has no Node of this name")
	case err != nil:
		return v, fmt.Errorf("read the Node: %w", err)
	}
	// What gzip has compressed may follow each other.
	var compressed bytes.Buffer
	w := gzip.NewWriter(&compressed)
	if _, err := w.Write(node); err != nil {
		return v, err
	}
	if err := w.Close(); err != nil {
		return v, err
	}
	in := io.MultiReader(bytes.NewReader(o.shared), &compressed)
	answer, err := run(ctx, in, command...)
	// The command fails if there are differences, and prints them nevertheless.
	if failed := json.Unmarshal(answer, &v); failed == nil && v.Differences != nil {
		return v, nil
	} else if err == nil {
		err = fmt.Errorf("the agent has not printed its comparison as JSON, but %.100q: upgrade it", answer)
	}
	return verification{}, err
}

// code implements report.
func (r *verifyReport) code() int {
	code := fine
	for _, n := range r.nodes {
		switch {
		case n.Error != "" || len(n.Unjudged) > 0:
			return incomplete
		case n.Total > 0:
			code = wrong
		}
	}
	return code
}

// Fields implements show.Report.
func (r *verifyReport) Fields() []show.Field { return []show.Field{{Name: "nodes", Value: r.nodes}} }

// Print implements show.Report.
func (r *verifyReport) Print(out *show.Page) {
	out.Row("NODE", "FRONTENDS", "PACKETS", "DIFFERENCES", "TOLERATED", "NOT JUDGED")
	for _, n := range r.nodes {
		if n.Error == "" {
			out.Row(n.Node, fmt.Sprint(n.Frontends), fmt.Sprint(n.Packets), fmt.Sprint(n.Total), fmt.Sprint(n.Tolerated),
				fmt.Sprint(len(n.Unjudged)))
		}
	}
	for _, n := range r.nodes {
		if n.Error != "" {
			out.Title("%s was not compared: %s", n.Node, n.Error)
			continue
		}
		shown := len(n.Differences)
		if !out.Wide {
			shown = min(shown, shownPerNode)
		}
		if n.Total > 0 {
			out.Title("%s, compared with Services of resource version %s:", n.Node, n.Objects)
		}
		for _, d := range n.Differences[:shown] {
			out.Row(d.Text)
		}
		if more := n.Total - shown; more > 0 {
			out.Row(fmt.Sprintf("… and %d more (-o wide)", more))
		}
		if out.Wide && len(n.Facts) > 0 {
			out.Title("%s, facts:", n.Node)
			for _, f := range n.Facts {
				out.Row(f)
			}
		}
		if len(n.Unjudged) > 0 {
			out.Title("%s, not judged:", n.Node)
		}
		for _, u := range n.Unjudged {
			out.Row(u)
		}
	}
}
