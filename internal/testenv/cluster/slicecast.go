package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/testenv/repository"
)

const (
	slicecastNamespace = "slicecast-system"
	serverImage        = "slicecast-server:cluster"
	agentImage         = "slicecast-agent:cluster"
)

// installSlicecast does what deploy/README.md asks for.
func (c *Cluster) installSlicecast(ctx context.Context) error {
	root, err := repository.Root()
	if err != nil {
		return err
	}
	deploy := filepath.Join(root, "deploy", "kubernetes")
	if _, err := c.Kubectl(ctx, "", "apply", "-f", filepath.Join(deploy, "namespace.yaml")); err != nil {
		return err
	}
	if err := c.createCertificates(ctx); err != nil {
		return err
	}
	manifest, err := c.Kubectl(ctx, "", "kustomize", deploy)
	if err != nil {
		return err
	}
	for _, setting := range [][2]string{
		{"clusterCIDR: 10.244.0.0/16", "clusterCIDR: " + PodCIDRs},
		{"programmer: auto", "programmer: " + c.options.Programmer},
		{"kind: AgentConfiguration\n", "kind: AgentConfiguration\n    conntrack: {maxPerCore: 0, min: 0}\n"},
		{"\ndata:\n", fmt.Sprintf("\ndata:\n  apiServerHost: %q\n  apiServerPort: \"%d\"\n", c.Network.World.IPv4, c.ControlPlane.Port())},
		{"image: slicecast-server:latest", "image: " + serverImage},
		{"image: slicecast-agent:latest", "image: " + agentImage},
	} {
		if !strings.Contains(manifest, setting[0]) {
			return fmt.Errorf("%s has no %q: adapt the installation in internal/testenv/cluster", deploy, setting[0])
		}
		manifest = strings.ReplaceAll(manifest, setting[0], setting[1])
	}
	_, err = c.Kubectl(ctx, manifest, "apply", "--server-side", "-f", "-")
	return err
}

// createCertificates stores the certificates of the servers, and the CA for the agents.
func (c *Cluster) createCertificates(ctx context.Context) error {
	dir := filepath.Join(c.state, "certificates")
	ca, err := testca.New()
	if err != nil {
		return err
	}
	serving, err := ca.Server("slicecast-server." + slicecastNamespace + ".svc")
	if err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	caFile, err := ca.WriteCA(dir)
	if err != nil {
		return err
	}
	cert, key, err := testca.Write(dir, "tls", serving)
	if err != nil {
		return err
	}
	_, secretErr := c.Kubectl(ctx, "", "--namespace="+slicecastNamespace, "create", "secret", "generic", "slicecast-server-tls",
		"--type=kubernetes.io/tls", "--from-file=tls.crt="+cert, "--from-file=tls.key="+key, "--from-file=ca.crt="+caFile)
	_, caErr := c.Kubectl(ctx, "", "--namespace="+slicecastNamespace, "create", "configmap", "slicecast-ca", "--from-file=ca.crt="+caFile)
	return errors.Join(secretErr, caErr)
}
