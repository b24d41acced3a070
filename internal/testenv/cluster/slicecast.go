package cluster

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/slicecast/slicecast/internal/testenv/repository"
)

const (
	serverNamespace = "slicecast-system"
	agentNamespace  = "slicecast-agents"
	// The images have the names that the chart and the manifests give them, but are built from this
	// tree.
	serverImage = "ghcr.io/slicecast/slicecast-server:v0.1.0"
	agentImage  = "ghcr.io/slicecast/slicecast-agent-iptables:v0.1.0"
)

// installSlicecast does what deploy/README.md asks for without Helm.
func (c *Cluster) installSlicecast(ctx context.Context) error {
	root, err := repository.Root()
	if err != nil {
		return err
	}
	deploy := filepath.Join(root, "deploy", "kubernetes")
	manifest, err := c.Kubectl(ctx, "", "kustomize", deploy)
	if err != nil {
		return err
	}
	localhost := ""
	if c.options.Programmer == "iptables" {
		localhost = "      localhostNodePorts: true\n" // as kube-proxy's mode iptables has it by default
	}
	for _, setting := range [][2]string{
		{"clusterCIDR: EDIT-THE-POD-RANGES", "clusterCIDR: " + PodCIDRs},
		{"programmer: auto", "programmer: " + c.options.Programmer},
		{"variant: nft\n", "variant: nft\n" + localhost},
		{"kind: AgentConfiguration\n", "kind: AgentConfiguration\n    conntrack: {maxPerCore: 0, min: 0}\n"},
		{"EDIT-THE-API-SERVER\n  apiServerPort: \"6443\"", fmt.Sprintf("%q\n  apiServerPort: \"%d\"", c.Network.World.IPv4, c.ControlPlane.Port())},
	} {
		if !strings.Contains(manifest, setting[0]) {
			return fmt.Errorf("%s has no %q: adapt the installation in internal/testenv/cluster", deploy, setting[0])
		}
		manifest = strings.ReplaceAll(manifest, setting[0], setting[1])
	}
	_, err = c.Kubectl(ctx, manifest, "apply", "--server-side", "-f", "-")
	return err
}
