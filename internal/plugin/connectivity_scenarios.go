package plugin

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/probe"
)

const (
	// dialTimeout bounds an attempt that should be answered, and silence one that should not be. In
	// dialTimeout, TCP sends a lost SYN twice again.
	dialTimeout, silence = 5 * time.Second, time.Second
	// slowAnswer is how long an answer takes that is called slow. TCP sends a lost SYN again after a
	// second.
	slowAnswer = 500 * time.Millisecond
	// refusal bounds an attempt that should be refused. An ICMPv6 error that comes while connect
	// still holds the socket is ignored. TCP then learns of it by the SYN that it sends again after
	// one second.
	refusal = 3 * time.Second
	// pace is the time between attempts while something changes.
	pace = 25 * time.Millisecond
	// parallelAttempts is how many attempts of a series are made at the same time, so that one that
	// is not answered does not hold up the others.
	parallelAttempts = 8
	// convinced is how many answers in a row of other backends show that a backend is no longer
	// chosen. If one of two were still chosen at random, that would take 2^40 series.
	convinced = 40
	// maxFailures is how many attempts without an answer end a series that should have answers
	// only.
	maxFailures = 3
	// parallelScenarios is how many commands run in Pods at the same time. Each makes four attempts
	// at once, so that the probes do not slow each other.
	parallelScenarios = 8
)

// noLocalEndpoint is the scenario that kube-proxy's mode ipvs fails on purpose.
const noLocalEndpoint = "internalTrafficPolicy Local, no local endpoint"

// target is an address to reach.
type target struct {
	network, address string
	// node is the one whose kernel leads the packets on. Empty means that of the client.
	node string
}

func (t target) String() string { return t.network + " " + t.address }

// trial is what a Pod of a node sends to one Service, and what should come of it.
type trial struct {
	scenario, node, pod, service string
	targets                      []target
	// plan has the number of attempts and their time.
	plan probe.Plan
	judge
}

// judge says what should come of the attempts at a target.
type judge struct {
	// expected is what should come of each.
	expected string
	// wrong returns what is wrong with the results, or an empty string.
	wrong func(results []probe.Result) string
}

// scenarios plays all scenarios and returns their results. What nothing changes is checked first.
func (r *connectivityRun) scenarios(ctx context.Context) (results []scenarioResult) {
	var mu sync.Mutex
	add := func(some ...scenarioResult) {
		mu.Lock()
		defer mu.Unlock()
		for _, s := range some {
			// After an interruption, all that is left cannot be judged.
			if (s.State == scenarioFailed || s.State == scenarioUnjudged || s.State == scenarioSlow) && ctx.Err() == nil {
				r.say("%s %s: %s", s.State, s.Scenario, strings.Join(slices.DeleteFunc([]string{s.Node, s.Target, s.Detail}, func(s string) bool { return s == "" }), ", "))
			}
		}
		results = append(results, some...)
	}
	checks := r.checks()
	if why := r.withoutDNS(ctx); why != "" {
		checks = slices.DeleteFunc(checks, func(c trial) bool { return c.service == "headless" })
		add(scenarioResult{Scenario: "headless name by DNS", State: scenarioSkipped, Detail: why})
	}
	r.say("%d checks on %d nodes", len(checks), len(r.nodes))
	var all errgroup.Group
	all.SetLimit(parallelScenarios)
	for _, c := range checks {
		all.Go(func() error {
			add(r.settle(ctx, c)...)
			return nil
		})
	}
	_ = all.Wait() // the errors are in the results
	for _, change := range []func(context.Context) []scenarioResult{r.readiness, r.addPort, r.deletion} {
		if ctx.Err() == nil {
			add(change(ctx)...)
		}
	}
	add(r.skipped()...)
	if ctx.Err() != nil {
		add(scenarioResult{Scenario: "all scenarios", State: scenarioUnjudged, Detail: context.Cause(ctx).Error()})
	}
	r.explain(ctx, results)
	slices.SortStableFunc(results, func(a, b scenarioResult) int {
		return strings.Compare(a.Scenario+"\x00"+a.Node, b.Scenario+"\x00"+b.Node)
	})
	return results
}

// skipped returns the scenarios that the run's nodes and flags leave out, with the reasons.
func (r *connectivityRun) skipped() (out []scenarioResult) {
	add := func(scenario, node, why string) {
		out = append(out, scenarioResult{Scenario: scenario, Node: node, State: scenarioSkipped, Detail: why})
	}
	if !r.hostNet {
		add("externalTrafficPolicy Local", "", "it concerns clients outside of Pods: use --host-network")
	}
	for _, n := range r.nodes[1:] { // the first has the endpoint
		if n.elsewhere != "" {
			add(noLocalEndpoint, n.name, n.elsewhere)
		}
	}
	if len(r.nodes) == 1 {
		add("between nodes", "", "there is one node only")
	}
	return out
}

// withoutDNS returns why names cannot be resolved, or an empty string.
func (r *connectivityRun) withoutDNS(ctx context.Context) string {
	list, err := fleet.List(ctx, r.fleet, r.fleet.Client().CoreV1().Services(metav1.NamespaceSystem).List, metav1.ListOptions{LabelSelector: "k8s-app=kube-dns"})
	if err == nil && len(list.Items) == 0 {
		return "kube-system has no Service with the label k8s-app=kube-dns"
	}
	return "" // if it is unknown, trying tells
}

// clusterTargets are the cluster IPs of a Service, by TCP and UDP.
func (r *connectivityRun) clusterTargets(service string) (out []target) {
	for _, ip := range r.services[service].Spec.ClusterIPs {
		for _, network := range []string{"tcp", "udp"} {
			out = append(out, target{network: network, address: net.JoinHostPort(ip, "80")})
		}
	}
	return out
}

// nodePortTargets are the node ports of a Service at the addresses of a node. A node has addresses
// of families that the Service may lack.
func (r *connectivityRun) nodePortTargets(service string, n chosenNode) (out []target) {
	s := r.services[service]
	for _, a := range n.addresses {
		family := corev1.IPv4Protocol
		if strings.Contains(a, ":") {
			family = corev1.IPv6Protocol
		}
		if !slices.Contains(s.Spec.IPFamilies, family) {
			continue
		}
		for _, p := range s.Spec.Ports {
			out = append(out, target{strings.ToLower(string(p.Protocol)), net.JoinHostPort(a, strconv.Itoa(int(p.NodePort))), n.name})
		}
	}
	return out
}

// checks returns the checks of what nothing changes.
func (r *connectivityRun) checks() (all []trial) {
	servers := make([]string, len(r.nodes))
	for i := range r.nodes {
		servers[i] = podName(roleServer, i)
	}
	first := servers[:1]
	whole := probe.Plan{Attempts: enough(len(servers)), Parallel: 8, Timeout: dialTimeout, MaxFailures: maxFailures}
	one := probe.Plan{Attempts: 3, Parallel: 3, Timeout: dialTimeout}
	nothing := probe.Plan{Attempts: 3, Interval: 300 * time.Millisecond, Timeout: silence}
	for i, n := range r.nodes {
		client := podName(roleClient, i)
		add := func(scenario, pod, service string, targets []target, plan probe.Plan, j judge) {
			all = append(all, trial{scenario, n.name, pod, service, targets, plan, j})
		}
		add("ClusterIP, all backends", client, "all", r.clusterTargets("all"), whole, wholeSet(servers))
		add("ClusterIP, from a backend, also to itself", servers[i], "all", r.clusterTargets("all"), whole, wholeSet(servers))
		add("ClusterIP, one backend", client, "first", r.clusterTargets("first"), one, wholeSet(first))
		add("ClusterIP, many backends", client, "many", r.clusterTargets("many"),
			probe.Plan{Attempts: enough(manyPorts * len(servers)), Parallel: 16, Timeout: dialTimeout, MaxFailures: maxFailures}, wholeSet(servers))
		add("no endpoints", client, "none", r.clusterTargets("none"), probe.Plan{Attempts: 3, Interval: 300 * time.Millisecond, Timeout: refusal}, refused)
		add("sessionAffinity ClientIP", client, "affinity", r.clusterTargets("affinity"), probe.Plan{Attempts: 20, Timeout: dialTimeout, MaxFailures: 1}, sameBackend(servers))
		switch {
		case i == 0:
			add("internalTrafficPolicy Local", client, "local", r.clusterTargets("local"), one, wholeSet(first))
		case n.elsewhere == "":
			add(noLocalEndpoint, client, "local", r.clusterTargets("local"), nothing, unanswered)
		}
		var ports []target
		for _, other := range r.nodes {
			ports = append(ports, r.nodePortTargets("node-port", other)...)
		}
		add("NodePort of each node", client, "node-port", ports, whole, wholeSet(servers))
		if r.hostNet {
			for j, other := range r.nodes {
				switch {
				case i == j: // a node's own packets are not those of a client outside
				case j == 0:
					add("externalTrafficPolicy Local", podName(roleHost, i), "node-port-local", r.nodePortTargets("node-port-local", other), one, keptClient(first, n.addresses))
				default:
					add("externalTrafficPolicy Local, no local endpoint", podName(roleHost, i), "node-port-local", r.nodePortTargets("node-port-local", other), nothing, unanswered)
				}
			}
			add("ClusterIP from the node", podName(roleHost, i), "all", r.clusterTargets("all"), whole, wholeSet(servers))
		}
		var addresses []string
		for _, s := range servers {
			for _, ip := range r.pods[s].Status.PodIPs {
				addresses = append(addresses, ip.IP)
			}
		}
		name := "headless." + r.namespace + ".svc"
		add("headless name by DNS", client, "headless", []target{{network: "lookup", address: name + ":80"}}, probe.Plan{Attempts: 1, Timeout: 5 * time.Second}, resolved(addresses))
	}
	return all
}

// enough returns how many random choices of n backends leave out one of them only once in 10^6.
func enough(n int) int { return int(math.Ceil(float64(n) * (math.Log(float64(n)) + 14))) }

// settle carries out a check until it succeeds, for settleTime at most, and then once more. So a
// change on its way is no failure, but what fails now and then is one.
func (r *connectivityRun) settle(ctx context.Context, c trial) (out []scenarioResult) {
	began := time.Now()
	var failed map[int]string
	var results [][]probe.Result
	for settled := false; ; {
		var err error
		results, err = r.dial(ctx, c)
		if err != nil {
			return []scenarioResult{{Scenario: c.scenario, Node: c.node, State: scenarioUnjudged, Detail: fmt.Sprintf("run the probe in the Pod %s: %v", c.pod, err)}}
		}
		failed = map[int]string{}
		for i := range c.targets {
			if text := c.wrong(results[i]); text != "" {
				failed[i] = text
			}
		}
		if settled || len(failed) > 0 && time.Since(began) > settleTime {
			break
		}
		settled = len(failed) == 0
	}
	for i, t := range c.targets {
		one := scenarioResult{Scenario: c.scenario, Node: cmp.Or(t.node, c.node), Target: t.String(), State: scenarioOK}
		one.setPackets(cmp.Or(r.source(c.pod, t), c.pod), c.expected, results[i])
		if text := slowness(results[i]); text != "" {
			one.State, one.Detail = scenarioSlow, text
		}
		if one.Node != c.node {
			one.Target += " from " + c.node
		}
		if failed[i] != "" {
			one.State, one.Detail, one.Service, one.From = scenarioFailed, failed[i], r.namespace+"/"+c.service, r.source(c.pod, t)
		}
		out = append(out, one)
	}
	return out
}

// source returns the address from which a Pod sends to a target.
func (r *connectivityRun) source(pod string, t target) string {
	family := corev1.IPv4Protocol
	if strings.HasPrefix(t.address, "[") {
		family = corev1.IPv6Protocol
	}
	return podAddress(r.pods[pod], family)
}
