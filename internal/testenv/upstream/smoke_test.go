// TestSmoke proves with ten of upstream's end-to-end cases that Slicecast serves a real cluster as
// its only proxy, with each programmer. kubelets, containers and upstream's tests are real.
package upstream

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv/cluster"
)

// smoke are the cases of TestSmoke, by what they are about.
var smoke = map[string]string{
	"TCP and UDP":           "Services should serve endpoints on same port and different protocols",
	"node ports":            "Services should be able to create a functioning NodePort service",
	"session affinity":      "Services should have session affinity work for NodePort service",
	"externalTrafficPolicy": "Services should support externalTrafficPolicy=Local for type=NodePort",
	"internalTrafficPolicy": "Services should respect internalTrafficPolicy=Local Pod to Pod",
	"DNS, headless":         "DNS should provide DNS for services",
	"terminating endpoints": "Services should fallback to terminating endpoints when there are no ready endpoints with internalTrafficPolicy=Cluster",
	"hairpin":               "Services should allow pods to hairpin back to themselves through services",
	"dual stack":            "Granular Checks: Services Secondary IP Family [LinuxOnly] should function for pod-Service: udp",
	"conntrack":             "Conntrack should be able to preserve UDP traffic when server pod cycles for a ClusterIP service and client is hostNetwork",
}

func TestSmoke(t *testing.T) {
	var names []string
	for _, name := range smoke {
		names = append(names, regexp.QuoteMeta(name))
	}
	for _, programmer := range []string{"nftables", "iptables"} {
		t.Run(programmer, func(t *testing.T) {
			c, err := cluster.Start(t.Context(), cluster.Options{Nodes: 2, Proxy: cluster.Slicecast, Programmer: programmer, Logf: t.Logf})
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, c.Stop()) })
			results, err := Run(t.Context(), c, Options{Focus: strings.Join(names, "|"), Dir: t.TempDir(), Logf: t.Logf})
			require.NoError(t, err)
			for _, result := range results {
				require.Equal(t, passed, result.Outcome, "%s\n%s", result.Name, result.Message)
			}
			require.Len(t, results, len(smoke), Summary(results))
		})
	}
}
