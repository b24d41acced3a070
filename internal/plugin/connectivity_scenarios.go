package plugin

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
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
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/probe"
)

const (
	// dialTimeout bounds an attempt that should be answered, and silence one that should not be.
	dialTimeout, silence = 2 * time.Second, time.Second
	// refusal bounds an attempt that should be refused. An ICMPv6 error that comes while connect
	// still holds the socket is ignored. TCP then learns of it by the SYN that it sends again after
	// one second.
	refusal = 3 * time.Second
	// pace is the time between attempts while something changes.
	pace = 25 * time.Millisecond
	// convinced is how many answers in a row of other backends show that a backend is no longer
	// chosen. If one of two were still chosen at random, that would take 2^40 series.
	convinced = 40
	// maxFailures is how many attempts without an answer end a series that should have answers
	// only.
	maxFailures = 3
	// parallelScenarios is how many commands run in Pods at the same time.
	parallelScenarios = 8
)

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
	// judge returns what is wrong with the results of a target, or an empty string.
	judge func(results []probe.Result) string
}

// scenarios plays all scenarios and returns their results. What nothing changes is checked first.
func (r *connectivityRun) scenarios(ctx context.Context) (results []scenarioResult) {
	var mu sync.Mutex
	add := func(some ...scenarioResult) {
		mu.Lock()
		defer mu.Unlock()
		for _, s := range some {
			// After an interruption, all that is left cannot be judged.
			if (s.State == scenarioFailed || s.State == scenarioUnjudged) && ctx.Err() == nil {
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
	if !r.hostNet {
		add(scenarioResult{Scenario: "externalTrafficPolicy Local", State: scenarioSkipped, Detail: "it concerns clients outside of Pods: use --host-network"})
	}
	if len(r.nodes) == 1 {
		add(scenarioResult{Scenario: "between nodes", State: scenarioSkipped, Detail: "there is one node only"})
	}
	if ctx.Err() != nil {
		add(scenarioResult{Scenario: "all scenarios", State: scenarioUnjudged, Detail: context.Cause(ctx).Error()})
	}
	r.explain(ctx, results)
	slices.SortStableFunc(results, func(a, b scenarioResult) int {
		return strings.Compare(a.Scenario+"\x00"+a.Node, b.Scenario+"\x00"+b.Node)
	})
	return results
}

// withoutDNS returns why names cannot be resolved, or an empty string.
func (r *connectivityRun) withoutDNS(ctx context.Context) string {
	list, err := fleet.Within(ctx, r.fleet, func(ctx context.Context) (*corev1.ServiceList, error) {
		return r.fleet.Client().CoreV1().Services(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{LabelSelector: "k8s-app=kube-dns"})
	})
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
	one := probe.Plan{Attempts: 3, Timeout: dialTimeout}
	nothing := probe.Plan{Attempts: 3, Interval: 300 * time.Millisecond, Timeout: silence}
	for i, n := range r.nodes {
		client := podName(roleClient, i)
		add := func(scenario, pod, service string, targets []target, plan probe.Plan, judge func([]probe.Result) string) {
			all = append(all, trial{scenario, n.name, pod, service, targets, plan, judge})
		}
		add("ClusterIP, all backends", client, "all", r.clusterTargets("all"), whole, wholeSet(servers))
		add("ClusterIP, from a backend, also to itself", servers[i], "all", r.clusterTargets("all"), whole, wholeSet(servers))
		add("ClusterIP, one backend", client, "first", r.clusterTargets("first"), one, wholeSet(first))
		add("ClusterIP, many backends", client, "many", r.clusterTargets("many"),
			probe.Plan{Attempts: enough(manyPorts * len(servers)), Parallel: 16, Timeout: dialTimeout, MaxFailures: maxFailures}, wholeSet(servers))
		add("no endpoints", client, "none", r.clusterTargets("none"), probe.Plan{Attempts: 3, Interval: 300 * time.Millisecond, Timeout: refusal}, refused)
		add("sessionAffinity ClientIP", client, "affinity", r.clusterTargets("affinity"), probe.Plan{Attempts: 20, Timeout: dialTimeout}, sameBackend(servers))
		if i == 0 {
			add("internalTrafficPolicy Local", client, "local", r.clusterTargets("local"), one, wholeSet(first))
		} else {
			add("internalTrafficPolicy Local, no local endpoint", client, "local", r.clusterTargets("local"), nothing, unanswered)
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
	for settled := false; ; {
		results, err := r.dial(ctx, c)
		if err != nil {
			return []scenarioResult{{Scenario: c.scenario, Node: c.node, State: scenarioUnjudged, Detail: fmt.Sprintf("run the probe in the Pod %s: %v", c.pod, err)}}
		}
		failed = map[int]string{}
		for i := range c.targets {
			if text := c.judge(results[i]); text != "" {
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

// dial sends to the targets of a check, and returns the results by target.
func (r *connectivityRun) dial(ctx context.Context, c trial) ([][]probe.Result, error) {
	plans := make([]probe.Plan, len(c.targets))
	for i, t := range c.targets {
		plans[i] = c.plan
		plans[i].Network, plans[i].Address = t.network, t.address
	}
	in, err := json.Marshal(plans)
	if err != nil {
		return nil, err
	}
	results := make([][]probe.Result, len(plans))
	var out lineWriter
	out.line = func(line []byte) error {
		var one probe.Result
		if err := json.Unmarshal(line, &one); err != nil || one.Plan < 0 || one.Plan >= len(plans) || len(results[one.Plan]) >= plans[one.Plan].Attempts {
			return fmt.Errorf("the probe has printed %.100q: use an image of this version", line)
		}
		results[one.Plan] = append(results[one.Plan], one)
		return nil
	}
	if err := r.exec(ctx, c.pod, bytes.NewReader(in), &out, "dial"); err != nil {
		return nil, err
	}
	for i := range results {
		lost := 0
		for _, one := range results[i] {
			if one.Outcome != probe.Answered {
				lost++
			}
		}
		endedEarly := plans[i].MaxFailures > 0 && lost >= plans[i].MaxFailures
		if len(results[i]) != plans[i].Attempts && !endedEarly {
			return nil, fmt.Errorf("the probe has printed %d of %d results", len(results[i]), plans[i].Attempts)
		}
	}
	return results, nil
}

// exec runs a command of the probe in a Pod.
func (r *connectivityRun) exec(ctx context.Context, pod string, in io.Reader, out io.Writer, args ...string) error {
	return r.fleet.Exec(ctx, types.NamespacedName{Namespace: r.namespace, Name: pod}, in, out, append([]string{"slicecast-agent", "probe"}, args...)...)
}

// maxLine bounds a line of a probe, in bytes.
const maxLine = 64 << 10

// lineWriter calls line for each line.
type lineWriter struct {
	line func([]byte) error
	rest []byte
}

// Write implements io.Writer.
func (w *lineWriter) Write(p []byte) (int, error) {
	w.rest = append(w.rest, p...)
	for {
		end := bytes.IndexByte(w.rest, '\n')
		switch {
		case end < 0 && len(w.rest) > maxLine:
			return 0, errors.New("the probe has printed a line that is too long")
		case end < 0:
			return len(p), nil
		}
		if err := w.line(w.rest[:end]); err != nil {
			return 0, err
		}
		w.rest = w.rest[end+1:]
	}
}

// seen describes results: which servers have answered how often, and what else became of attempts.
func seen(results []probe.Result) string {
	counts := map[string]int{}
	var example string
	for _, one := range results {
		if one.Outcome == probe.Answered {
			counts["answered by "+one.Server]++
			continue
		}
		counts[string(one.Outcome)]++
		example = one.Error
	}
	var parts []string
	for _, what := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%s: %d", what, counts[what]))
	}
	text := strings.Join(parts, ", ")
	if example != "" {
		text += " (" + example + ")"
	}
	return text
}

// wholeSet requires that all attempts are answered, by each of the servers and by nobody else.
func wholeSet(servers []string) func([]probe.Result) string {
	return func(results []probe.Result) string {
		got := map[string]bool{}
		for _, one := range results {
			got[one.Server] = true
		}
		if slices.Equal(slices.Sorted(maps.Keys(got)), slices.Sorted(slices.Values(servers))) {
			return ""
		}
		return fmt.Sprintf("expected answers of each of %s and nobody else; saw %s", strings.Join(servers, ", "), seen(results))
	}
}

// sameBackend requires that all attempts are answered by one of the servers.
func sameBackend(servers []string) func([]probe.Result) string {
	return func(results []probe.Result) string {
		for _, one := range results {
			if one.Server != results[0].Server || !slices.Contains(servers, one.Server) {
				return "expected answers of one backend only; saw " + seen(results)
			}
		}
		return ""
	}
}

// keptClient requires that the servers answer, and that they see the client by one of these
// addresses.
func keptClient(servers, addresses []string) func([]probe.Result) string {
	return func(results []probe.Result) string {
		for _, one := range results {
			if one.Outcome == probe.Answered && !slices.Contains(addresses, one.Client) {
				return fmt.Sprintf("expected the client's address, one of %s; the backend saw %s", strings.Join(addresses, ", "), one.Client)
			}
		}
		return wholeSet(servers)(results)
	}
}

// refused requires that nobody answers, and that attempts are refused and do not time out. Kernels
// limit how often they refuse, so one refusal is enough.
func refused(results []probe.Result) string {
	some := slices.ContainsFunc(results, func(one probe.Result) bool { return one.Outcome == probe.Refused })
	if some && unanswered(results) == "" {
		return ""
	}
	return "expected that it is refused; saw " + seen(results)
}

// unanswered requires that nobody answers.
func unanswered(results []probe.Result) string {
	if slices.ContainsFunc(results, func(one probe.Result) bool { return one.Outcome == probe.Answered }) {
		return "expected no answer; saw " + seen(results)
	}
	return ""
}

// resolved requires that a name has these addresses.
func resolved(addresses []string) func([]probe.Result) string {
	return func(results []probe.Result) string {
		got := slices.Sorted(slices.Values(results[0].Addresses))
		if want := slices.Sorted(slices.Values(addresses)); !slices.Equal(got, want) {
			return fmt.Sprintf("expected %s; saw %s %s", strings.Join(want, ", "), strings.Join(got, ", "), results[0].Error)
		}
		return ""
	}
}

// series is what comes of attempts that last while something changes.
type series struct {
	node   string
	pod    string
	target target
	// results receives the results.
	results chan timedResult
}

// timedResult is a result with the time at which its attempt began, by this machine's clock.
// Results arrive in bursts, so the time of arrival says little. The probe says when each attempt
// began, by a clock of its own. The result that has arrived fastest says how the clocks differ, up
// to the time that it took to arrive.
type timedResult struct {
	probe.Result
	at time.Time
}

// start lets a client on each node send to the targets until stop is called, which waits for the
// end. It returns the series of each node and target.
func (r *connectivityRun) start(ctx context.Context, targets []target, plan probe.Plan) (all []*series, stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	var running errgroup.Group
	var inputs []*io.PipeWriter
	for i, n := range r.nodes {
		pod := podName(roleClient, i)
		plans := make([]probe.Plan, len(targets))
		own := make([]*series, len(targets))
		for j, t := range targets {
			plans[j] = plan
			plans[j].Network, plans[j].Address = t.network, t.address
			own[j] = &series{node: n.name, pod: pod, target: t, results: make(chan timedResult, 4096)}
		}
		all = append(all, own...)
		in, input := io.Pipe()
		inputs = append(inputs, input)
		reader := io.MultiReader(encoded(plans), in)
		var base time.Time // when the plans began, by this machine's clock; zero until the first result
		out := &lineWriter{line: func(line []byte) error {
			var one probe.Result
			if err := json.Unmarshal(line, &one); err != nil || one.Plan < 0 || one.Plan >= len(own) {
				return fmt.Errorf("the probe has printed %.100q: use an image of this version", line)
			}
			if began := time.Now().Add(-one.Began); base.IsZero() || began.Before(base) {
				base = began
			}
			select {
			case own[one.Plan].results <- timedResult{one, base.Add(one.Began)}:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}}
		running.Go(func() error {
			defer func() {
				for _, s := range own {
					close(s.results)
				}
			}()
			return r.exec(ctx, pod, reader, out, "dial")
		})
	}
	return all, func() error {
		for _, in := range inputs {
			_ = in.Close()
		}
		for _, s := range all {
			go func() {
				for range s.results {
					// What comes after the end does not count.
				}
			}()
		}
		defer cancel()
		return running.Wait()
	}
}

func encoded(plans []probe.Plan) io.Reader {
	text, err := json.Marshal(plans)
	if err != nil {
		text = []byte(err.Error()) // a Plan can always be encoded
	}
	return bytes.NewReader(text)
}

// await receives results until done says that it has seen enough, for settleTime at most.
func (s *series) await(ctx context.Context, done func(timedResult) bool) error {
	timer := time.NewTimer(settleTime)
	defer timer.Stop()
	for {
		select {
		case one, ok := <-s.results:
			switch {
			case !ok:
				return errors.New("the probe has ended")
			case done(one):
				return nil
			}
		case <-timer.C:
			return errLimit
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// errLimit and errSeen mean that a scenario has failed: what was awaited has not come, or something
// else was seen. Other errors mean that it could not be judged.
var (
	errLimit = fmt.Errorf("not within %v", settleTime)
	errSeen  = errors.New("something else was seen")
)

// each waits for all series at the same time, and returns a result for each.
func (r *connectivityRun) each(scenario, service string, all []*series, wait func(int, *series) (detail string, err error)) []scenarioResult {
	results := make([]scenarioResult, len(all))
	var waits sync.WaitGroup
	for i, s := range all {
		waits.Go(func() {
			one := scenarioResult{Scenario: scenario, Node: s.node, Target: s.target.String(), State: scenarioOK}
			detail, err := wait(i, s)
			switch {
			case err == nil:
			case errors.Is(err, errLimit), errors.Is(err, errSeen):
				one.State, one.Service, one.From = scenarioFailed, r.namespace+"/"+service, r.source(s.pod, s.target)
			default:
				one.State, detail = scenarioUnjudged, err.Error()
			}
			one.Detail = detail
			results[i] = one
		})
	}
	waits.Wait()
	return results
}

// followed is what a series has seen of a change.
type followed struct {
	// first and last are when attempts that the changed backend answered began.
	first, last time.Time
	// lost are the attempts that nobody answered, of which example is one.
	lost    int
	example probe.Result
}

// note adds a result of the series, and reports whether the backend answered.
func (f *followed) note(one timedResult, backend string) bool {
	switch {
	case one.Outcome != probe.Answered:
		f.lost++
		f.example = one.Result
		return false
	case one.Server != backend:
		return false
	}
	if f.first.IsZero() {
		f.first = one.at
	}
	f.last = one.at
	return true
}

// result returns a scenario's detail, or why the scenario has failed although it was followed.
func (f *followed) result(detail string) (string, error) {
	if f.lost > 0 {
		return fmt.Sprintf("expected an answer to each attempt, because a backend was ready all the time; %d had none: %s %s", f.lost, f.example.Outcome, f.example.Error), errSeen
	}
	return detail, nil
}

// readiness makes one of two backends unready and ready again. The times are between the
// EndpointSlice and the last or first new connection.
func (r *connectivityRun) readiness(ctx context.Context) (out []scenarioResult) {
	const service, down, up = "changing", "a backend turns unready", "a backend turns ready"
	pod := podName(roleChanging, 0)
	all, stop := r.start(ctx, r.clusterTargets(service), probe.Plan{Interval: pace, Timeout: dialTimeout})
	defer func() {
		if err := stop(); err != nil && ctx.Err() == nil {
			out = append(out, scenarioResult{Scenario: down, State: scenarioUnjudged, Detail: err.Error()})
		}
	}()
	// Before the change, each series must reach the backend, or "no longer" would mean nothing.
	reached := r.each(down, service, all, func(_ int, s *series) (string, error) {
		var before followed
		return "expected that the backend is reached before it turns unready", s.await(ctx, func(one timedResult) bool { return before.note(one, pod) })
	})
	if slices.ContainsFunc(reached, func(s scenarioResult) bool { return s.State != scenarioOK }) {
		return reached
	}
	// turn returns when the EndpointSlice said so, and what the series have seen by then.
	turn := func(ready bool) (since time.Time, seen []followed, err error) {
		seen = make([]followed, len(all))
		end := r.drain(all, func(i int, one timedResult) { seen[i].note(one, pod) })
		defer end()
		if err := r.exec(ctx, pod, nil, io.Discard, "ready", strconv.FormatBool(ready)); err != nil {
			return since, nil, fmt.Errorf("run the probe in the Pod %s: %w", pod, err)
		}
		limited, cancel := context.WithTimeoutCause(ctx, time.Minute, errors.New("the EndpointSlice has not followed the Pod within a minute"))
		defer cancel()
		err = r.endpoints(limited, service, func(pods map[string]bool) bool {
			if pods[pod] != ready {
				return false
			}
			since = time.Now() // the last family that follows counts
			return true
		})
		return since, seen, err
	}
	since, seen, err := turn(false)
	if err != nil {
		return []scenarioResult{{Scenario: down, State: scenarioUnjudged, Detail: err.Error()}}
	}
	out = r.each(down, service, all, func(i int, s *series) (string, error) {
		others := 0
		err := s.await(ctx, func(one timedResult) bool {
			if seen[i].note(one, pod) {
				others = 0
			} else if one.Outcome == probe.Answered {
				others++
			}
			return others >= convinced
		})
		if err != nil {
			return fmt.Sprintf("expected that the backend is reached no more; it still is, or nothing is, %v after the EndpointSlice", settleTime), err
		}
		return seen[i].result(after("last", seen[i].last.Sub(since)))
	})
	since, seen, err = turn(true)
	if err != nil {
		return append(out, scenarioResult{Scenario: up, State: scenarioUnjudged, Detail: err.Error()})
	}
	return append(out, r.each(up, service, all, func(i int, s *series) (string, error) {
		if seen[i].first.IsZero() {
			if err := s.await(ctx, func(one timedResult) bool { return seen[i].note(one, pod) }); err != nil {
				return fmt.Sprintf("expected that the backend is reached again; it is not, %v after the EndpointSlice", settleTime), err
			}
		}
		return seen[i].result(after("first", seen[i].first.Sub(since)))
	})...)
}

// after says when the first or last new connection to a backend was. This command sees the
// EndpointSlice later than the node may, so a node can be ahead of it.
func after(which string, d time.Duration) string {
	if d <= 0 {
		return which + " new connection before this command saw the EndpointSlice"
	}
	return fmt.Sprintf("%s new connection %v after the EndpointSlice", which, d.Round(time.Millisecond))
}

// drain receives results until the function that it returns is called, which waits for the end, and
// passes each on with the index of its series. A series that is not read would hold up the others.
func (r *connectivityRun) drain(all []*series, note func(int, timedResult)) (end func()) {
	done := make(chan struct{})
	var running sync.WaitGroup
	for i, s := range all {
		running.Go(func() {
			for {
				select {
				case one, ok := <-s.results:
					if !ok {
						return
					}
					note(i, one)
				case <-done:
					return
				}
			}
		})
	}
	return func() {
		close(done)
		running.Wait()
	}
}

// addPort adds a port to a Service while connections to another one stand.
func (r *connectivityRun) addPort(ctx context.Context) (out []scenarioResult) {
	const service, scenario = "changing", "a port is added while connections stand"
	var tcp []target
	for _, t := range r.clusterTargets(service) {
		if t.network == "tcp" {
			tcp = append(tcp, t)
		}
	}
	all, stop := r.start(ctx, tcp, probe.Plan{Interval: pace, Timeout: dialTimeout, Keep: true})
	defer func() {
		if err := stop(); err != nil && ctx.Err() == nil {
			out = append(out, scenarioResult{Scenario: scenario, State: scenarioUnjudged, Detail: err.Error()})
		}
	}()
	first := make([]string, len(all))
	for i, s := range all {
		if err := s.await(ctx, func(one timedResult) bool { first[i] = one.Server; return true }); err != nil || first[i] == "" {
			return []scenarioResult{{Scenario: scenario, Node: s.node, Target: s.target.String(), State: scenarioFailed, Detail: "expected a connection before the change", Service: r.namespace + "/" + service, From: r.source(s.pod, s.target)}}
		}
	}
	broken := make([]bool, len(all))
	end := r.drain(all, func(i int, one timedResult) {
		broken[i] = broken[i] || one.Outcome != probe.Answered || one.Server != first[i]
	})
	patch := *r.services[service]
	patch.Spec.Ports = append(slices.Clone(patch.Spec.Ports), corev1.ServicePort{Name: "more", Protocol: corev1.ProtocolTCP, Port: 81, TargetPort: intstr.FromInt32(firstPort + 1)})
	_, err := r.fleet.Client().CoreV1().Services(r.namespace).Update(ctx, &patch, metav1.UpdateOptions{})
	if err != nil {
		end()
		return []scenarioResult{{Scenario: scenario, State: scenarioUnjudged, Detail: fmt.Sprintf("update the Service: %v", err)}}
	}
	var more []target
	for _, ip := range r.services[service].Spec.ClusterIPs {
		more = append(more, target{network: "tcp", address: net.JoinHostPort(ip, "81")})
	}
	backends := []string{podName(roleChanging, 0), podName(roleChanging, 1)}
	var mu sync.Mutex
	var added sync.WaitGroup
	for i, n := range r.nodes {
		added.Go(func() {
			some := r.settle(ctx, trial{"a port is added", n.name, podName(roleClient, i), service, more, probe.Plan{Attempts: enough(len(backends)), Parallel: 8, Timeout: dialTimeout, MaxFailures: maxFailures}, wholeSet(backends)})
			mu.Lock()
			defer mu.Unlock()
			out = append(out, some...)
		})
	}
	added.Wait()
	end()
	for i, s := range all {
		one := scenarioResult{Scenario: scenario, Node: s.node, Target: s.target.String(), State: scenarioOK, Detail: "the connection to " + first[i] + " goes on"}
		// The connection must also answer now.
		err := s.await(ctx, func(one timedResult) bool { return one.Outcome == probe.Answered && one.Server == first[i] })
		if err != nil || broken[i] {
			one.State, one.Detail = scenarioFailed, "expected that the connection to "+first[i]+" goes on; it broke"
			one.Service, one.From = r.namespace+"/"+service, r.source(s.pod, s.target)
		}
		out = append(out, one)
	}
	return out
}

// deletion deletes a Service and requires that nobody answers at its addresses.
func (r *connectivityRun) deletion(ctx context.Context) (out []scenarioResult) {
	const service, scenario = "changing", "a Service is deleted"
	if err := r.fleet.Client().CoreV1().Services(r.namespace).Delete(ctx, service, metav1.DeleteOptions{}); err != nil {
		return []scenarioResult{{Scenario: scenario, State: scenarioUnjudged, Detail: fmt.Sprintf("delete the Service: %v", err)}}
	}
	var mu sync.Mutex
	var all sync.WaitGroup
	for i, n := range r.nodes {
		all.Go(func() {
			some := r.settle(ctx, trial{scenario, n.name, podName(roleClient, i), service, r.clusterTargets(service), probe.Plan{Attempts: 2, Timeout: silence}, unanswered})
			mu.Lock()
			defer mu.Unlock()
			out = append(out, some...)
		})
	}
	all.Wait()
	return out
}

// maxExplained is how many failures are explained. The others point to those.
const maxExplained = 5

// explain adds to failures what explain says about their Services on their nodes.
func (r *connectivityRun) explain(ctx context.Context, results []scenarioResult) {
	type question struct{ node, service, from string }
	known := make(map[question][]string)
	for i := range results {
		s := &results[i]
		if s.State != scenarioFailed || s.Service == "" || ctx.Err() != nil {
			continue
		}
		q := question{s.Node, s.Service, s.From}
		reasons, ok := known[q]
		switch {
		case ok:
		case len(known) == maxExplained:
			reasons = []string{"not explained, as more than " + strconv.Itoa(maxExplained) + " failed; ask with explain"}
		default:
			reasons = r.reasons(ctx, q.node, q.service, q.from)
			known[q] = reasons
		}
		s.Reasons = append(s.Reasons, reasons...)
	}
}

// reasons returns what explain says about a Service on a node, and the command that says more.
func (r *connectivityRun) reasons(ctx context.Context, node, service, from string) (reasons []string) {
	key, ok := model.ParseServiceKey(service)
	if !ok {
		return nil
	}
	report, err := explain(ctx, r.fleet, explainQuestion{node: node, name: service, from: from, output: "json", service: key, timeout: r.timeout})
	if err != nil {
		return []string{"not explained: " + err.Error()}
	}
	reasons = append(reasons, report.verdict...)
	for i, s := range report.steps {
		if s.State != stepAgrees && len(s.Why) > 0 {
			reasons = append(reasons, fmt.Sprintf("step %d of explain (%s) %s: %s", i+1, s.Name, s.State, s.Why[0]))
		}
	}
	if !slices.ContainsFunc(report.steps, func(s *step) bool { return s.State != stepAgrees }) && !report.refused {
		reasons = append(reasons, "the node does with this Service what it should: look at routes, at network policies, and at the other node")
	}
	return reasons
}
