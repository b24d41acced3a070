// These tests prove what connectivity counts as a failure and how it says so, which flags it
// refuses, what its Pods may do, and that what probes print is bounded.
package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/probe"
	"github.com/slicecast/slicecast/internal/show"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// answersOf returns an answer of each server, to the client 10.0.0.1.
func answersOf(servers ...string) (out []probe.Result) {
	for _, s := range servers {
		out = append(out, probe.Result{Outcome: probe.Answered, Server: s, Client: "10.0.0.1"})
	}
	return out
}

func TestJudges(t *testing.T) {
	lost := probe.Result{Outcome: probe.TimedOut, Error: "i/o timeout"}
	refusedOne := probe.Result{Outcome: probe.Refused}
	both := []string{"a", "b"}
	for _, c := range []struct {
		name    string
		judge   judge
		results []probe.Result
		want    string // part of what is wrong; empty means nothing
	}{
		{"all backends", wholeSet(both), answersOf("a", "b", "a"), ""},
		{"a backend is missing", wholeSet(both), answersOf("a", "a"), "answered by a: 2"},
		{"a stranger answers", wholeSet(both), answersOf("a", "b", "c"), "answered by c: 1"},
		{"one attempt is lost", wholeSet(both), append(answersOf("a", "b"), lost), "timed out: 1 (i/o timeout)"},
		{"no results", wholeSet(both), nil, "expected answers of each of a, b"},
		{"the same backend", sameBackend(both), answersOf("b", "b"), ""},
		{"another backend", sameBackend(both), answersOf("b", "a"), "one backend only"},
		{"nobody at all is not the same backend", sameBackend(both), []probe.Result{lost, lost}, "one backend only"},
		{"refused", refused, []probe.Result{refusedOne, lost}, ""},
		{"it times out instead", refused, []probe.Result{lost, lost}, "expected that it is refused"},
		{"refused and answered", refused, append(answersOf("a"), refusedOne), "expected that it is refused"},
		{"unanswered", unanswered, []probe.Result{refusedOne, lost}, ""},
		{"answered", unanswered, append(answersOf("a"), lost), "expected no answer"},
		{"the client is kept", keptClient([]string{"a"}, []string{"10.0.0.1"}), answersOf("a"), ""},
		{"the client is hidden", keptClient([]string{"a"}, []string{"10.0.0.2"}), answersOf("a"), "the backend saw 10.0.0.1"},
		{"resolved", resolved([]string{"2", "1"}), []probe.Result{{Addresses: []string{"1", "2"}}}, ""},
		{"an address is missing", resolved([]string{"2", "1"}), []probe.Result{{Addresses: []string{"1"}}}, "expected 1, 2; saw 1"},
	} {
		got := c.judge.wrong(c.results)
		if c.want == "" {
			require.Empty(t, got, c.name)
		} else {
			require.Contains(t, got, c.want, c.name)
		}
	}
}

// TestFollowed checks that an attempt without an answer during a change is a failure, and that a
// time is never made up.
func TestFollowed(t *testing.T) {
	var f followed
	at := time.Unix(1000, 0)
	require.True(t, f.note(timedResult{answersOf("a")[0], at}, "a"))
	require.False(t, f.note(timedResult{answersOf("b")[0], at.Add(time.Second)}, "a"))
	require.True(t, f.note(timedResult{answersOf("a")[0], at.Add(2 * time.Second)}, "a"))
	require.Equal(t, followed{first: at, last: at.Add(2 * time.Second)}, f)
	detail, err := f.result("fine")
	require.NoError(t, err)
	require.Equal(t, "fine", detail)
	require.False(t, f.note(timedResult{probe.Result{Outcome: probe.Refused}, at}, "a"))
	detail, err = f.result("fine")
	require.ErrorIs(t, err, errSeen)
	require.Contains(t, detail, "1 had none: refused")
	require.Equal(t, "last new connection 20ms after the EndpointSlice", after("last", 20*time.Millisecond))
	require.Contains(t, after("first", -time.Second), "before this command saw")
}

// TestSlowIsNoFailure checks that slow answers are told from failures, in results of a target and
// in series, and that they do not change the exit code.
func TestSlowIsNoFailure(t *testing.T) {
	quick, slow := answersOf("a")[0], answersOf("a")[0]
	slow.Took = 1100 * time.Millisecond
	require.Empty(t, slowness([]probe.Result{quick, {Outcome: probe.TimedOut, Took: dialTimeout}}), "what has no answer is no slow answer")
	require.Equal(t, "1 of 2 answers took more than 500ms, the longest 1.1s: packets were lost, or a machine is busy", slowness([]probe.Result{quick, slow}))
	require.Empty(t, wholeSet([]string{"a"}).wrong([]probe.Result{quick, slow}))
	r := &connectivityReport{Namespace: "x", Results: []scenarioResult{{Scenario: "s", Node: "n", Target: "tcp 1", State: scenarioSlow, Detail: "took long"}}}
	require.Equal(t, fine, r.code())
	text := printed(t, r)
	require.Contains(t, text, "SLOW    tcp 1: took long")
	require.Contains(t, text, "0 ok, 1 slow, 0 failed")

	var f followed
	require.True(t, f.note(timedResult{slow, time.Unix(1000, 0)}, "a"))
	_, err := f.result("fine")
	require.ErrorIs(t, err, errSlow)
	results := (&connectivityRun{}).each("s", "web", []*series{{node: "n"}}, func(int, *series) (string, error) { return f.result("fine") })
	require.Equal(t, scenarioSlow, results[0].State)
	require.Equal(t, "fine; an answer took 1.1s: packets were lost, or a machine is busy", results[0].Detail)

	// An attempt that is lost when the series ends is a failure.
	s := &series{node: "n", lost: []probe.Result{{Outcome: probe.TimedOut, Error: "i/o timeout"}}}
	results = (&connectivityRun{temporaryNamespace: &temporaryNamespace{namespace: "x"}}).late("s", "web", []*series{s, {}})
	require.Len(t, results, 1)
	require.Equal(t, scenarioFailed, results[0].State)
	require.Contains(t, results[0].Detail, "1 had none: timed out i/o timeout")
}

// TestPackets checks that each attempt is in the report with what was expected and seen, and that
// those of interest are kept if there are many.
func TestPackets(t *testing.T) {
	many := answersOf(strings.Fields(strings.Repeat("a ", 2*maxPackets))...)
	lost := probe.Result{Outcome: probe.TimedOut, Error: "i/o timeout", Took: dialTimeout}
	refusedOne := probe.Result{Outcome: probe.Refused, Error: "connection refused"}
	slow := answersOf("b")[0]
	slow.Took = time.Second
	s := scenarioResult{Target: "tcp 10.96.0.1:80"}
	s.setPackets("10.1.0.7", "an answer of one of a, b", append(many, lost, slow, refusedOne))
	require.Equal(t, 2*maxPackets+3, s.Attempts)
	require.Len(t, s.Packets, maxPackets)
	one := packet{From: "10.1.0.7", To: "tcp 10.96.0.1:80", Expected: "an answer of one of a, b"}
	for i, want := range []struct {
		got     string
		seconds float64
	}{{"timed out: i/o timeout", 5}, {"answered by b to the client 10.0.0.1", 1}, {"refused: connection refused", 0}, {"answered by a to the client 10.0.0.1", 0}} {
		one.Got, one.Seconds = want.got, want.seconds
		require.Equal(t, one, s.Packets[i])
	}
	s = scenarioResult{}
	s.setPackets("a", resolved([]string{"1", "2"}).expected, []probe.Result{{Outcome: probe.Answered, Addresses: []string{"1"}}})
	require.Equal(t, []packet{{From: "a", Expected: "the addresses 1, 2", Got: "answered: 1"}}, s.Packets)
}

func TestConnectivityFlags(t *testing.T) {
	for want, args := range map[string][]string{
		"--sample is 0":         {"--sample=0"},
		"--sample is 21":        {"--sample=21"},
		"--time-limit is 1s":    {"--time-limit=1s"},
		"name no nodes":         {"--cleanup", "node-1"},
		"21 nodes are named":    strings.Fields(strings.Repeat("n ", 21)),
		"--output is \"other\"": {"--output=other"},
	} {
		c := NewCommand()
		c.SetArgs(append([]string{"connectivity", "--kubeconfig=/nowhere"}, args...))
		require.ErrorContains(t, c.Execute(), want)
	}
}

// TestConnectivityPods checks that Pods end by themselves and need no privileges.
func TestConnectivityPods(t *testing.T) {
	r := newConnectivityRun(&connectivity{hostNet: true, timeLimit: 10 * time.Minute}, nil, []chosenNode{{name: "n"}}, "image")
	pods := r.podsWanted()
	require.Len(t, pods, 5)
	for _, p := range pods {
		require.Equal(t, int64(13*60), *p.Spec.ActiveDeadlineSeconds, p.Name)
		require.Equal(t, p.Labels[roleLabel] == roleHost, p.Spec.HostNetwork, p.Name)
		require.False(t, *p.Spec.AutomountServiceAccountToken, p.Name)
		require.True(t, *p.Spec.SecurityContext.RunAsNonRoot, p.Name)
		s := p.Spec.Containers[0].SecurityContext
		require.True(t, *s.ReadOnlyRootFilesystem && !*s.AllowPrivilegeEscalation, p.Name)
		require.Equal(t, []corev1.Capability{"ALL"}, s.Capabilities.Drop, p.Name)
	}
}

func TestFailuresAreExplained(t *testing.T) {
	e := newEnvironment(t)
	e.service("explained")
	e.nodeWith("node-x", corev1.NodeSystemInfo{OperatingSystem: "linux"})
	o := &options{kubeconfig: plane.Kubeconfig(t, plane.AdminConfig()), serviceAccount: fleet.DefaultServiceAccount, timeout: patience}
	o.overrides.Context.Namespace = fleet.DefaultNamespace
	f, err := o.fleet()
	require.NoError(t, err)
	defer f.Close()

	// Before the move, there are no servers and no agents.
	run := &connectivityRun{connectivity: &connectivity{options: o}, temporaryNamespace: &temporaryNamespace{fleet: f}}
	results := []scenarioResult{{State: scenarioFailed, Service: "default/explained", Node: "node-x"}}
	run.explain(t.Context(), results)
	require.Contains(t, results[0].Reasons, "No Pod with the label k8s-app=kube-proxy runs there in kube-system either")

	e.server("server-1")
	e.eventually(fine, []string{"with 1 endpoint"}, "lacks", "default/explained")
	results = []scenarioResult{{State: scenarioOK, Service: "default/explained", Node: "node-x"}}
	for i := range maxExplained + 1 {
		s := scenarioResult{State: scenarioFailed, Service: "default/explained", Node: "node-x", From: fmt.Sprint("10.1.0.", i)}
		results = append(results, s, s)
	}
	run.explain(t.Context(), results)
	require.Empty(t, results[0].Reasons, "it has not failed")
	for i, s := range results[1:] {
		if i < 2*maxExplained {
			require.Contains(t, s.Reasons, "What node-x does is not known: no Pod of an agent runs there")
			var whole struct {
				Node  string
				Steps []step
			}
			require.NoError(t, json.Unmarshal(s.Explanation, &whole))
			require.Equal(t, "node-x", whole.Node)
			require.NotEmpty(t, whole.Steps)
		} else {
			require.Equal(t, []string{"not explained, as more than 5 failed; ask with explain"}, s.Reasons)
			require.Nil(t, s.Explanation)
		}
	}
}

func TestConnectivityReport(t *testing.T) {
	r := &connectivityReport{Namespace: "x", Results: []scenarioResult{
		{Scenario: "s", Node: "n", Target: "tcp 1", State: scenarioOK}, {Scenario: "s", Node: "n", Target: "udp 1", State: scenarioOK},
	}}
	require.Equal(t, fine, r.code())
	printed := func() string {
		var out bytes.Buffer
		o := show.Options{Output: "table"}
		require.NoError(t, o.Run(t.Context(), &out, func(context.Context) (show.Report, error) { return r, nil }))
		return out.String()
	}
	require.Contains(t, printed(), "2 targets")
	r.Results = append(r.Results, scenarioResult{Scenario: "s", Node: "m", Target: "tcp 1", State: scenarioFailed, Detail: "saw x", Reasons: []string{"because"}})
	require.Equal(t, wrong, r.code())
	require.Contains(t, printed(), "tcp 1: saw x")
	require.Contains(t, printed(), "s, m, tcp 1: what explain says\nbecause")
	require.Contains(t, printed(), "2 ok, 0 slow, 1 failed, 0 not judged, 0 skipped")
	r.Results = append(r.Results, scenarioResult{State: scenarioUnjudged})
	require.Equal(t, incomplete, r.code(), "what was not judged is not merely wrong")
}

func TestLinesOfProbes(t *testing.T) {
	var lines []string
	w := &lineWriter{line: func(line []byte) error {
		lines = append(lines, string(line))
		return nil
	}}
	for _, part := range []string{"a", "b\nc\n", "d"} {
		_, err := w.Write([]byte(part))
		require.NoError(t, err)
	}
	require.Equal(t, []string{"ab", "c"}, lines)
	_, err := w.Write(bytes.Repeat([]byte("x"), maxLine))
	require.ErrorContains(t, err, "too long")
}

// TestPlansOfManyNodes asserts that a run on as many nodes as are admitted stays in the probe's
// bounds.
func TestPlansOfManyNodes(t *testing.T) {
	r := newConnectivityRun(&connectivity{hostNet: true}, nil, nil, "image")
	for i := range maxConnectivityNodes {
		r.nodes = append(r.nodes, chosenNode{name: fmt.Sprint("node-", i), addresses: []string{fmt.Sprint("192.0.2.", i+1), fmt.Sprintf("2001:db8::%d", i+1)}})
	}
	for _, p := range r.podsWanted() {
		r.pods[p.Name] = p
	}
	for _, s := range r.servicesWanted() {
		s.Spec.ClusterIPs = []string{"10.96.0.1", "fd00::1"}
		for i := range s.Spec.Ports {
			s.Spec.Ports[i].NodePort = 30000
		}
		r.services[s.Name] = s
	}
	for _, c := range r.checks() {
		plans := make([]probe.Plan, 0, len(c.targets))
		for range c.targets {
			p := c.plan
			p.Network, p.Address = "tcp", "192.0.2.1:80"
			plans = append(plans, p)
		}
		require.NoError(t, probe.Validate(plans), "%s on %s", c.scenario, c.node)
	}
}

// TestLocalPolicyOfProxies checks on which nodes no answer is expected with internalTrafficPolicy
// Local and no local endpoint: kube-proxy's mode ipvs leads to other nodes then.
func TestLocalPolicyOfProxies(t *testing.T) {
	e := newEnvironment(t)
	o := &options{kubeconfig: plane.Kubeconfig(t, plane.AdminConfig()), serviceAccount: fleet.DefaultServiceAccount, timeout: patience}
	o.overrides.Context.Namespace = fleet.DefaultNamespace
	f, err := o.fleet()
	require.NoError(t, err)
	defer f.Close()
	x := &connectivity{options: o, sample: 3, image: "image"}
	elsewhere := func() map[string]string {
		chosen, _, _, err := x.chooseNodes(t.Context(), f, []string{"node-0", "node-1"})
		require.NoError(t, err)
		return map[string]string{chosen[0].name: chosen[0].elsewhere, chosen[1].name: chosen[1].elsewhere}
	}
	e.nodeWith("node-1", corev1.NodeSystemInfo{OperatingSystem: "linux"})
	const none = "the node's proxy is not known: no Pod of kube-proxy runs there"
	before := elsewhere()
	require.Contains(t, before["node-0"], none)
	require.Contains(t, before["node-1"], none)

	// Each kube-proxy has its own mode, as while one changes it.
	e.settings(metav1.NamespaceSystem, "kube-proxy", "config.conf", "mode: ipvs\n")
	proxy := func(node string, change func(*corev1.Pod)) {
		e.change = func(p *corev1.Pod) {
			p.Labels, p.Spec.HostNetwork = kubeProxyLabels, true
			p.Spec.Containers[0].Ports = nil
			change(p)
		}
		defer func() { e.change = nil }()
		e.pod(metav1.NamespaceSystem, "kube-proxy-"+node, "default", "kube-proxy", node, nil, corev1.PodRunning)
	}
	proxy("node-0", configured("kube-proxy", "--config=/config/config.conf", "--proxy-mode=nftables"))
	proxy("node-1", configured("", "--proxy-mode=iptables"))
	modes := elsewhere()
	require.Contains(t, modes["node-0"], "kube-proxy's mode ipvs leads to the endpoints of other nodes")
	require.Empty(t, modes["node-1"])

	// An agent that programs all Services does not, whichever mode the kube-proxy beside it has.
	settings := settingsReader{f.ConfigFiles()}
	ipvs := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Args: []string{"--proxy-mode=ipvs"}}}}}
	agentOf := func(status *pb.AgentStatus, args ...string) *nodesReport {
		pod := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Args: args}}}}
		return &nodesReport{nodes: []node{{Node: "a", agent: status}}, pods: []*fleet.Agent{{Node: "a", Pod: pod}}}
	}
	inNoPod := &nodesReport{nodes: []node{{Node: "a", agent: &pb.AgentStatus{Programmer: "nftables"}}}}
	unknownProxy := errors.New("forbidden")
	for name, test := range map[string]struct {
		known *nodesReport
		proxy *corev1.Pod
		err   error
		want  string
	}{
		"an agent alone":                     {agentOf(nil), nil, nil, ""},
		"an agent and kube-proxy":            {agentOf(nil), ipvs, nil, ""},
		"an agent, other proxies unknown":    {agentOf(nil), nil, unknownProxy, ""},
		"an agent in no Pod":                 {inNoPod, nil, nil, ""},
		"an agent in no Pod, and kube-proxy": {inNoPod, ipvs, nil, "mode ipvs leads"},
		"a shadow":                           {agentOf(&pb.AgentStatus{Programmer: "shadow"}), ipvs, nil, "mode ipvs leads"},
		"an agent for other Services":        {agentOf(nil, "--service-proxy-name=x"), ipvs, nil, "mode ipvs leads"},
		"the same without kube-proxy":        {agentOf(nil, "--service-proxy-name=x"), nil, nil, "no Pod of kube-proxy"},
		"proxies unknown":                    {nil, nil, unknownProxy, "the node's proxy is not known: forbidden"},
		"a kube-proxy in a shell":            {nil, &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Command: []string{"sh", "-c", "kube-proxy --proxy-mode=ipvs"}}}}}, nil, "neither --config nor --proxy-mode"},
	} {
		got := settings.leadsElsewhere(t.Context(), "a", test.known, test.proxy, test.err)
		if test.want == "" {
			require.Empty(t, got, name)
		} else {
			require.Contains(t, got, test.want, name)
		}
	}
}

// TestLocalPolicyIsSkipped checks that a run plays no scenario that the proxy of a node fails on
// purpose, and says so.
func TestLocalPolicyIsSkipped(t *testing.T) {
	r := newConnectivityRun(&connectivity{}, nil, []chosenNode{{name: "a", elsewhere: "a reason"}, {name: "b", elsewhere: "its mode is ipvs"}, {name: "c"}}, "image")
	for _, p := range r.podsWanted() {
		r.pods[p.Name] = p
	}
	for _, s := range r.servicesWanted() {
		r.services[s.Name] = s
	}
	var played []string
	for _, c := range r.checks() {
		if c.scenario == noLocalEndpoint {
			played = append(played, c.node)
		}
	}
	require.Equal(t, []string{"c"}, played)
	skipped := r.skipped()
	require.Contains(t, skipped, scenarioResult{Scenario: noLocalEndpoint, Node: "b", State: scenarioSkipped, Detail: "its mode is ipvs"})
	for _, s := range skipped {
		require.Equal(t, scenarioSkipped, s.State)
		require.NotEqual(t, "a", s.Node, "the first node has the endpoint")
	}
}
