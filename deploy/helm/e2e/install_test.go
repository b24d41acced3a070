// This test proves that the commands of the README install Slicecast by Helm as a cluster's only
// Service proxy, and that those for uninstalling it leave nothing. In between, an observer and
// kubectl slicecast find everything in order. The cluster has kubelets and containers, and tells
// the chart everything that it needs.
package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
)

func init() { installs["alone"] = alone }

func alone(t *testing.T) {
	i := start(t)
	before := i.objects()

	notes := i.helm("install", "slicecast", "../slicecast")
	require.Contains(t, notes, fmt.Sprintf("%s:%d", i.Network.World.IPv4, i.ControlPlane.Port()))
	require.Contains(t, notes, "the podCIDRs of each Node")
	i.rollout(servers, "deployment/slicecast-server")
	i.rollout(agents, "daemonset/slicecast-agent")
	i.requireService()
	i.requireStatus()
	i.requirePlugin()
	i.requireBugreport()
	i.requireObserver()
	i.requireScraper()
	i.requireDebug()

	// A cleaner takes the place of each agent.
	i.helm("upgrade", "slicecast", "../slicecast", "--reuse-values", "--set=cleanup.agents=true")
	i.rollout(agents, "daemonset/slicecast-agent")
	for _, node := range i.Nodes {
		left, err := node.Command(t.Context(), "sh", "-c", "nft list ruleset | grep -i slicecast; find /var/lib/slicecast -type f").Output()
		require.NoError(t, err)
		require.Empty(t, string(left), node.Name)
	}
	i.helm("uninstall", "slicecast", "--wait", fmt.Sprintf("--timeout=%s", patience))
	testenv.Eventually(t, patience, func() error {
		if left := i.kubectl("get", "namespaces", "--selector=app.kubernetes.io/part-of=slicecast", "--output=name"); left != "" {
			return fmt.Errorf("left: %s", left)
		}
		return nil
	})
	require.ElementsMatch(t, before, i.objects())
}

// objects returns the names of the objects that an install could leave.
func (i install) objects() []string {
	i.Helper()
	kinds := "namespaces,clusterroles,clusterrolebindings,roles,rolebindings,serviceaccounts,configmaps,secrets,services,daemonsets,deployments"
	return strings.Fields(i.kubectl("get", kinds, "--all-namespaces", "--output=name"))
}
