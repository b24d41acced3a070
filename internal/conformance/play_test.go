// This file plays the steps of the cases in order and checks, after each, everything that the step
// expects.
package conformance

import (
	"cmp"
	"context"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// settleTimeout bounds the time for which a check may fail after the agent has programmed the
// change. Agents do some work afterwards, such as health checks and cleaning the conntrack table. A
// case may allow more time.
const settleTimeout = 5 * time.Second

// play runs the cases for the subject's mode. Cases with the same configuration run one after the
// other, so that the subject need not be restarted between them.
func (s *stage) play(t *testing.T, cases []*Case, exceptions exceptions) {
	t.Helper()
	cases = slices.Clone(cases)
	slices.SortStableFunc(cases, func(a, b *Case) int { return cmp.Compare(a.Config.key(), b.Config.key()) })
	for _, c := range cases {
		if c.In(s.subject.Mode()) {
			t.Run(c.ID, func(t *testing.T) { s.playCase(t, c, exceptions) })
		}
	}
}

func (s *stage) playCase(t *testing.T, c *Case, exceptions exceptions) {
	t.Helper()
	s.setUp(t, c)
	conntrack := &conntrack{node: s.node.Host}
	for _, step := range c.All(s.subject.Mode()) {
		s.change(t, step, conntrack)
		report := func(what string, err error) {
			if err != nil {
				t.Errorf("step %q: %s: %v", step.Name, what, err)
			}
		}
		limit := settleTimeout
		if step.WithinSeconds > 0 {
			limit = time.Duration(step.WithinSeconds) * time.Second
		}
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		// Conntrack entries come first, because flows may be connections of these entries.
		report("conntrack", conntrack.Await(ctx, step.ExpectConntrack))
		s.checkFlows(ctx, t, c, step, exceptions, report)
		for i := range step.HealthChecks {
			report("health check "+step.HealthChecks[i].URL, s.checkHealth(ctx, &step.HealthChecks[i]))
		}
		for i := range step.ProxyHealth {
			report("the agent's health check "+step.ProxyHealth[i].URL, s.checkHealth(ctx, &step.ProxyHealth[i]))
		}
		cancel()
		s.checkSessions(t, c, step, exceptions, report)
	}
}

// exits reports whether kube-proxy exits in a step. It does if its Node is deleted or gets other
// addresses (see pkg/proxy/node.go). Versions before 1.37 go on.
func exits(step *Step, name string) bool {
	return os.Getenv(controlplane.KubeProxyVariable) == "" && (slices.Contains(step.Delete, node(name)) ||
		slices.ContainsFunc(step.Status, func(s Status) bool { return s.Reference == node(name) }))
}

func node(name string) Reference { return Reference{Kind: "Node", Name: name} }

// change makes the changes of a step and waits until the agent has programmed them.
func (s *stage) change(t *testing.T, step *Step, conntrack *conntrack) {
	t.Helper()
	ctx := t.Context()
	for _, prefix := range step.AddLocalAddresses {
		s.addAddress(t, "lo", prefix.Prefix)
	}
	require.NoError(t, conntrack.Inject(step.InjectConntrack))
	if step.Action == StopAgentApplyStart {
		require.NoError(t, s.subject.Stop())
	}
	for _, r := range step.Delete {
		require.NoError(t, s.cluster.Delete(ctx, r))
	}
	require.NoError(t, s.cluster.Apply(ctx, step.Apply))
	for _, p := range step.Patch {
		require.NoError(t, s.cluster.Patch(ctx, p.Reference, p.Patch))
	}
	for _, status := range step.Status {
		require.NoError(t, s.cluster.Patch(ctx, status.Reference, map[string]any{"status": status.Status}, "status"))
	}
	switch step.Action {
	case RestartAgent:
		require.NoError(t, s.subject.Stop())
		s.start(t)
	case StopAgentApplyStart:
		s.start(t)
	case FlushKubeRules:
		require.NoError(t, s.subject.Flush(ctx, s))
		return // the agent must notice by itself
	}
	if proxy, ok := s.subject.(*kubeProxy); ok && exits(step, s.running.Node) {
		require.ErrorContains(t, proxy.Wait(syncTimeout), "exit status 1")
		if slices.Contains(step.Delete, node(s.running.Node)) {
			return // its rules stay, and a restarted kube-proxy would wait for its Node
		}
		s.start(t)
	}
	s.AwaitSync(t)
}
