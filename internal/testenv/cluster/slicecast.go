package cluster

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
)

const (
	// ServerNamespace is the namespace of Slicecast's servers.
	ServerNamespace = "slicecast-system"
	// AgentNamespace is the namespace of Slicecast's agents.
	AgentNamespace = "slicecast-agents"
	// OwnTag is the tag of the images of this tree's server and agent, which all nodes have. It is
	// the tag in the chart and the manifests.
	OwnTag = "v0.1.0"
)

// SlicecastImages returns the images of a server and an agent whose binaries are in a folder. They
// have the names that the chart and the manifests give them.
func SlicecastImages(dir, tag string) []Image {
	image := func(name, command string, commands ...string) Image {
		return Image{
			Name: "ghcr.io/slicecast/" + name + ":" + tag, Binary: filepath.Join(dir, command),
			Entrypoint: "/usr/local/bin/" + command, Commands: commands,
		}
	}
	return []Image{
		image("slicecast-server", "slicecast-server"),
		image("slicecast-agent-iptables", "slicecast-agent", proxying...),
	}
}

// InstallSlicecast does what deploy/README.md asks for without Helm, and waits until Slicecast is
// ready. It installs a folder with a kustomization, such as deploy/kubernetes, after edit, which
// may be nil, has changed its manifest.
func (c *Cluster) InstallSlicecast(ctx context.Context, dir string, edit func(manifest string) string) error {
	if err := c.applySlicecast(ctx, dir, edit); err != nil {
		return err
	}
	return c.AwaitSlicecast(ctx)
}

func (c *Cluster) applySlicecast(ctx context.Context, dir string, edit func(manifest string) string) error {
	manifest, err := c.SlicecastManifest(ctx, dir)
	if err != nil {
		return err
	}
	if edit != nil {
		manifest = edit(manifest)
	}
	_, err = c.Kubectl(ctx, manifest, "apply", "--server-side", "-f", "-")
	return err
}

// AwaitSlicecast waits until all servers and agents are ready.
func (c *Cluster) AwaitSlicecast(ctx context.Context) error {
	return errors.Join(
		c.AwaitRollout(ctx, ServerNamespace, "deployment/slicecast-server"),
		c.AwaitRollout(ctx, AgentNamespace, "daemonset/slicecast-agent"),
	)
}

// SlicecastManifest returns the manifest of a folder with a kustomization. If it has settings, they
// are those of this cluster.
func (c *Cluster) SlicecastManifest(ctx context.Context, dir string) (string, error) {
	manifest, err := c.Kubectl(ctx, "", "kustomize", dir)
	if err != nil || !strings.Contains(manifest, "kind: AgentConfiguration") {
		return manifest, err
	}
	localhost := ""
	if c.options.Programmer == "iptables" {
		localhost = "      localhostNodePorts: true\n" // as kube-proxy's mode iptables has it by default
	}
	for _, setting := range [][2]string{
		{"clusterCIDR: EDIT-THE-POD-RANGES", "clusterCIDR: " + PodCIDRs},
		{"programmer: auto", "programmer: " + c.options.Programmer},
		{"variant: nft\n", "variant: nft\n" + localhost},
		{
			"EDIT-THE-API-SERVER\n  apiServerPort: \"6443\"",
			fmt.Sprintf("%q\n  apiServerPort: \"%d\"", c.Network.World.IPv4, c.ControlPlane.Port()),
		},
	} {
		if !strings.Contains(manifest, setting[0]) {
			return "", fmt.Errorf("%s has no %q: adapt the installation in internal/testenv/cluster", dir, setting[0])
		}
		manifest = strings.ReplaceAll(manifest, setting[0], setting[1])
	}
	return manifest, nil
}
