package plugin

import (
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/show"
	"github.com/slicecast/slicecast/internal/source"
)

// held adds the step of the servers, which should have the objects.
func (r *explainReport) held(o *explained, answers []fleet.Answer[lacking]) {
	s := r.step("servers")
	label := ""
	if o.service != nil {
		label = o.service.Labels[source.LabelServiceProxyName]
	}
	converter := source.NewConverter(label)
	versions := map[string]string{}
	wanted := false
	if o.service != nil {
		switch m, skips := converter.FromService(o.service); {
		case m == nil:
			r.unserved(s, skips)
		case r.proxyNamed && label != r.proxyName:
			r.served(s, label)
		default:
			wanted = true
			v := m.ContentVersion()
			versions["Service"] = hex.EncodeToString(v[:])
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
			if wanted && (r.proxyNamed || label == "") {
				r.moving = true
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
				r.moving = true
				s.differs("%v has another version of %s than the API server: it is behind", a.Server, name)
			}
		}
		for name := range have {
			if _, ok := versions[name]; !ok {
				r.moving = true
				s.differs("%v still has %s, which the API server does not", a.Server, name)
			}
		}
	}
	slices.Sort(s.Why)
	if wanted && !found && !r.proxyNamed && label != "" {
		r.served(s, label)
	}
}

// asksFor finds out which Services the servers serve.
func (r *explainReport) asksFor(ctx context.Context, f *fleet.Fleet, answers []fleet.Answer[lacking]) {
	var all []*fleet.Server
	for _, a := range answers {
		all = append(all, a.Server)
	}
	var err error
	if r.proxyName, r.proxyNamed, err = r.question.proxy.name(ctx, f, all); err != nil {
		r.steps[0].notJudged("which Services the servers serve is not known: %v", err)
	}
}

// served says which other proxy than Slicecast serves a Service with this value of the label.
func (r *explainReport) served(s *step, label string) {
	r.others = true
	text := fmt.Sprintf("its label %s says that the proxy %q serves it", source.LabelServiceProxyName, label)
	if label == "" {
		text = fmt.Sprintf("the servers serve Services with the label %s: %s, and without it the cluster's default proxy does, such as kube-proxy",
			source.LabelServiceProxyName, r.proxyName)
	}
	r.verdict = append(r.verdict, fmt.Sprintf("Slicecast has no rules for %v: %s", r.question.service, text))
	s.fact("%s", text)
}

// defaultProxy names the Pod of kube-proxy on the node if it serves the Service.
func (r *explainReport) defaultProxy(ctx context.Context, client kubernetes.Interface, o *explained) {
	if !r.others || o.service.Labels[source.LabelServiceProxyName] != "" {
		return
	}
	list, err := r.kubeProxies(ctx, client)
	switch {
	case err != nil:
		r.verdict = append(r.verdict, fmt.Sprintf("Whether kube-proxy runs in a Pod on %s is not known: %v", r.question.node, err))
	case len(list) == 0:
		r.verdict = append(r.verdict, fmt.Sprintf("No Pod with the label k8s-app=kube-proxy runs on %s in %s", r.question.node, metav1.NamespaceSystem))
	}
	r.shows(list)
}

// kubeProxies returns the Pods of kube-proxy on the node.
func (r *explainReport) kubeProxies(ctx context.Context, client kubernetes.Interface) ([]corev1.Pod, error) {
	list, err := client.CoreV1().Pods(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{
		LabelSelector: "k8s-app=kube-proxy", FieldSelector: "spec.nodeName=" + r.question.node, Limit: 10,
	})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// shows names Pods of kube-proxy.
func (r *explainReport) shows(kubeProxies []corev1.Pod) {
	for _, p := range kubeProxies {
		r.verdict = append(r.verdict, fmt.Sprintf("kube-proxy serves the node: Pod %s/%s is %s", p.Namespace, p.Name, p.Status.Phase))
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
		case source.OtherProxy: // it has the label, and the label names no proxy
			text = fmt.Sprintf("its label %s is empty, so no proxy serves it", source.LabelServiceProxyName)
		}
		r.verdict = append(r.verdict, fmt.Sprintf("No node has rules for %v: %s", r.question.service, text))
		s.fact("%s", text)
	}
}

// nodeStep is the step of what the servers know of the node.
const nodeStep = "the node, as its server sees it"

// follows adds the step of what the servers know of the node.
func (r *explainReport) follows(nodes *nodesReport) {
	s := r.step(nodeStep)
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
		r.late = true
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
	list, err := r.kubeProxies(ctx, client)
	switch {
	case err != nil:
		s.notJudged("whether kube-proxy runs there: %v", err)
	case len(list) == 0:
		r.verdict = append(r.verdict, fmt.Sprintf("No Pod with the label k8s-app=kube-proxy runs there in %s either", metav1.NamespaceSystem))
	}
	r.shows(list)
}
