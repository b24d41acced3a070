// TestSlicecast proves that Slicecast passes every case with each programmer, apart from the listed
// exceptions. slicecast-server and slicecast-agent run as they are built, with a real API server
// and real packets.
package conformance

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testca"
	testcommand "github.com/slicecast/slicecast/internal/testenv/command"
)

// TestSlicecast plays the cases with a slicecast-server and a slicecast-agent.
func TestSlicecast(t *testing.T) {
	t.Parallel()
	cases, exceptions := loadAll(t)
	eachVariant(t, *slicecasts, func(t *testing.T, mode Mode, iptables string) {
		t.Parallel()
		s := newStage(t)
		s.subject = newSlicecast(t, s, mode, iptables)
		s.play(t, cases, exceptions)
	})
}

// slicecast is the subject that runs a slicecast-agent. Its server runs all the time.
type slicecast struct {
	*testcommand.Command
	mode     Mode
	iptables string
	// feed returns the flags with the address of the server and the identity of the agent.
	feed func(node string) ([]string, error)
}

// The server's ports.
const (
	serverPort       = 8472
	serverHealthPort = 8473
)

func newSlicecast(t *testing.T, s *stage, mode Mode, iptables string) *slicecast {
	t.Helper()
	dir, world := t.TempDir(), s.network.World
	authority, err := testca.New()
	require.NoError(t, err)
	ca, err := authority.WriteCA(dir)
	require.NoError(t, err)
	serving, err := authority.Server(world.IPv4.String())
	require.NoError(t, err)
	cert, key, err := testca.Write(dir, "server", serving)
	require.NoError(t, err)
	// Agents present certificates like those of kubelets.
	clients := filepath.Join(dir, "clients.crt")
	require.NoError(t, os.WriteFile(clients, s.control.AdminConfig().CAData, 0o600))

	server := testcommand.New(t, world, "slicecast-server")
	require.NoError(t, server.Start(nil, command(serverCommand),
		"--kubeconfig="+s.control.Kubeconfig(t, s.control.AdminConfig()),
		fmt.Sprintf("--bind-address=%s:%d", world.IPv4, serverPort),
		fmt.Sprintf("--healthz-bind-address=%s:%d", world.IPv4, serverHealthPort),
		"--tls-cert-file="+cert, "--tls-private-key-file="+key, "--client-ca-file="+clients,
		"--drain-window=100ms", "--log-level=debug",
	))
	server.AwaitOK(t, syncTimeout(), fmt.Sprintf("http://%s:%d/readyz", world.IPv4, serverHealthPort))

	return &slicecast{
		Command: testcommand.New(t, s.node.Host, "slicecast-agent"), mode: mode, iptables: iptables,
		feed: func(node string) ([]string, error) {
			identity := s.control.ConfigFor("system:node:"+node, "system:nodes")
			cert, key := filepath.Join(dir, "node.crt"), filepath.Join(dir, "node.key")
			for file, content := range map[string][]byte{cert: identity.CertData, key: identity.KeyData} {
				if err := os.WriteFile(file, content, 0o600); err != nil {
					return nil, err
				}
			}
			return []string{
				fmt.Sprintf("--servers=%s:%d", world.IPv4, serverPort),
				"--ca-file=" + ca, "--client-cert-file=" + cert, "--client-key-file=" + key,
				"--checkpoint=" + filepath.Join(dir, "checkpoint"),
			}, nil
		},
	}
}

func (a *slicecast) Name() string { return agentCommand }

func (a *slicecast) Mode() Mode { return a.mode }

func (a *slicecast) Reference() bool { return false }

func (a *slicecast) Flush(ctx context.Context, s *stage) error { return flush(ctx, s, a.iptables) }

func (a *slicecast) Start(s settings) error {
	feed, err := a.feed(s.Node)
	if err != nil {
		return err
	}
	return a.Command.Start(nil, command(agentCommand), append(feed, a.flags(s)...)...)
}

// flags returns the agent's flags for the settings of a case. Settings that a case leaves out keep
// the agent's default, except for the cluster CIDRs, which have none.
func (a *slicecast) flags(s settings) []string {
	flags := []string{
		"--node-name=" + s.Node,
		"--programmer=" + string(a.mode),
		"--healthz-bind-address=0.0.0.0:10256",
		"--log-level=debug",
	}
	if a.iptables != "" {
		flags = append(flags, "--iptables-variant="+a.iptables)
	}
	switch s.detectLocalMode() {
	case ClusterCIDR:
		flags = append(flags, "--cluster-cidr="+strings.Join(s.clusterCIDRs(), ","))
	case NodeCIDR:
		flags = append(flags, "--detect-local-mode=NodeCIDR")
	case InterfaceNamePrefix:
		flags = append(flags, "--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix="+s.PodInterfacePrefix)
	}
	if s.NodePortAddresses != nil {
		flags = append(flags, "--nodeport-addresses="+strings.Join(s.NodePortAddresses, ","))
	}
	if s.LocalhostNodePorts != nil {
		flags = append(flags, fmt.Sprintf("--iptables-localhost-nodeports=%t", *s.LocalhostNodePorts))
	}
	if s.NoExternalIPs {
		flags = append(flags, "--allow-service-external-ips=false")
	}
	if s.MasqueradeAll {
		flags = append(flags, "--masquerade-all")
	}
	return flags
}
