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
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/slicecast/slicecast/internal/conformance/bugs"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// settleTimeout returns the bound of the time for which a check may fail after the agent has
// programmed the change. Agents do some work afterwards, such as health checks and cleaning the
// conntrack table. A case may allow more time.
func settleTimeout() time.Duration { return time.Duration(*patience) * 5 * time.Second }

// play runs the cases for the subject's mode. Cases with the same configuration run one after the
// other, so that the subject need not be restarted between them.
func (s *stage) play(t *testing.T, cases []*Case, exceptions exceptions) {
	t.Helper()
	cases = slices.Clone(cases)
	slices.SortStableFunc(cases, func(a, b *Case) int { return cmp.Compare(a.Config.key(), b.Config.key()) })
	for _, c := range cases {
		if c.In(s.subject.Mode()) && (s.recorder != nil || !s.stops(c)) {
			t.Run(c.ID, func(t *testing.T) { s.playCase(t, c, exceptions) })
		}
	}
}

// stops reports whether the subject is a kube-proxy that stops working when it gets a case.
func (s *stage) stops(c *Case) bool {
	k, ok := s.subject.(*kubeProxy)
	return ok && slices.Contains(c.KubeProxyStops[k.minor()], k.mode)
}

func (s *stage) playCase(t *testing.T, c *Case, exceptions exceptions) {
	t.Helper()
	s.setUp(t, c)
	conntrack := &conntrack{node: s.node.Host}
	for _, step := range c.All(s.subject.Mode()) {
		report := func(what string, err error) {
			if s.recorder != nil {
				s.recorder.add(t, c, step, what, err)
			} else if err != nil {
				t.Errorf("step %q: %s: %v", step.Name, what, err)
			}
		}
		if err := s.change(t, step, conntrack); err != nil {
			report(bugs.Stopped, err)
			require.NotNil(t, s.recorder, err)
			return
		}
		limit := settleTimeout()
		if step.WithinSeconds > 0 {
			limit = time.Duration(*patience*step.WithinSeconds) * time.Second
		}
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		// Conntrack entries come first, because flows may be connections of these entries.
		if want := step.ExpectConntrack.of(s.reference()); len(want.Deleted)+len(want.Kept) > 0 {
			report("conntrack", conntrack.Await(ctx, want))
		}
		s.checkFlows(ctx, t, c, step, exceptions, report)
		for i := range step.HealthChecks {
			report("health check "+step.HealthChecks[i].URL, s.checkHealth(ctx, &step.HealthChecks[i]))
		}
		for i := range step.ProxyHealth {
			report("the agent's health check "+step.ProxyHealth[i].URL, s.checkHealth(ctx, &step.ProxyHealth[i]))
		}
		cancel()
		if s.recorder == nil && s.servesObjects(step) {
			report("verify", s.verify(t.Context(), c, step))
		}
		s.checkSessions(t, c, step, exceptions, report)
	}
}

// exits reports whether kube-proxy exits in a step. It does if its Node is deleted or gets other
// addresses (see pkg/proxy/node.go). Versions before 1.37 go on, unless the Node is registered
// again with other pod CIDRs.
func exits(step *Step, name string) bool {
	return registers(step, name) || os.Getenv(controlplane.KubeProxyVariable) == "" && (slices.Contains(step.Delete, node(name)) ||
		slices.ContainsFunc(step.Status, func(s Status) bool { return s.Reference == node(name) }))
}

// registers reports whether a step creates a Node.
func registers(step *Step, name string) bool {
	return slices.ContainsFunc(step.Apply, func(o *unstructured.Unstructured) bool { return o.GetKind() == "Node" && o.GetName() == name })
}

func node(name string) Reference { return Reference{Kind: "Node", Name: name} }

// change makes the changes of a step and waits until the agent has programmed them. The error says
// that the agent does not program them.
func (s *stage) change(t *testing.T, step *Step, conntrack *conntrack) error {
	t.Helper()
	ctx := t.Context()
	s.nft(t, step.NFT)
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
	if step.Config != nil {
		s.running = &settings{*step.Config, s.running.Node}
	}
	switch step.Action {
	case RestartAgent, StopAgentApplyStart:
		require.NoError(t, s.subject.Stop())
		if err := s.start(t); err != nil {
			return err
		}
	case FlushKubeRules:
		require.NoError(t, s.subject.Flush(ctx, s))
		return nil // the agent must notice by itself
	}
	if proxy, ok := s.subject.(*kubeProxy); ok && exits(step, s.running.Node) {
		require.ErrorContains(t, proxy.Wait(syncTimeout()), "exit status 1")
		if slices.Contains(step.Delete, node(s.running.Node)) && !registers(step, s.running.Node) {
			return nil // its rules stay, and a restarted kube-proxy would wait for its Node
		}
		if err := s.start(t); err != nil {
			return err
		}
	}
	return s.awaitSync(t)
}

// nft executes commands of another program on the node. Its tables are removed at the end of t.
func (s *stage) nft(t *testing.T, script string) {
	t.Helper()
	if script == "" {
		return
	}
	run := func(ctx context.Context, script string) {
		_, err := s.node.Run(ctx, "nft", script)
		require.NoError(t, err)
	}
	run(t.Context(), script)
	t.Cleanup(func() {
		for _, table := range []string{"ip others", "ip6 others", "inet others"} {
			run(context.Background(), "add table "+table+"; delete table "+table)
		}
	})
}
