// These tests prove that programs of this tree and of the release before it work together: servers,
// relays and agents in every combination, agents on what agents of the other version have left, and
// the status commands. Before the first release there is one version only, and the log says so.
package skew

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/command"
	"github.com/slicecast/slicecast/internal/testenv/previous"
	"github.com/slicecast/slicecast/internal/testenv/repository"
)

// Environment variables with what build has built.
const (
	currentVariable = "SLICECAST_SKEW_CURRENT" // the folder of this tree's programs
	// The folder of programs of the release before, and its tag. They are not set if there is none.
	previousVariable, releaseVariable = "SLICECAST_SKEW_PREVIOUS", "SLICECAST_SKEW_RELEASE"
)

// patience bounds the time of a single step on a slow machine.
const patience = time.Minute

func TestMain(m *testing.M) { testenv.Main(m, build) }

// build builds the programs of both versions while there still is a network.
func build() error {
	ctx := context.Background()
	root, err := repository.Root()
	if err != nil {
		return err
	}
	release, err := previous.Release(ctx, root)
	if err != nil {
		return err
	}
	current, err := os.MkdirTemp("", "slicecast-skew-")
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", current+"/", "./server", "./agent")
	cmd.Dir, cmd.Stderr, cmd.Env = root, os.Stderr, append(os.Environ(), "CGO_ENABLED=0")
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", cmd, err)
	}
	for _, name := range []string{"server", "agent"} {
		if err := os.Rename(filepath.Join(current, name), filepath.Join(current, "slicecast-"+name)); err != nil {
			return err
		}
	}
	if err := os.Setenv(currentVariable, current); err != nil || release == "" {
		return err
	}
	before, err := previous.Build(ctx, root, release)
	return errors.Join(err, os.Setenv(previousVariable, before), os.Setenv(releaseVariable, release))
}

// version is a version of the programs.
type version struct{ name, bin string }

// versions returns this tree's version, after that of the release before it, if there is one.
func versions(t *testing.T) (all []version) {
	t.Helper()
	if release := os.Getenv(releaseVariable); release != "" {
		all = append(all, version{release, os.Getenv(previousVariable)})
	} else {
		t.Log("there is no release before this tree: its programs are tested with themselves only")
	}
	return append(all, version{"this tree", os.Getenv(currentVariable)})
}

// cluster is a server, a node with two pods, and the manifests that the server reads.
type cluster struct {
	t         *testing.T
	node      *testenv.Node
	one, two  *testenv.Pod
	client    *testenv.Pod
	dir       string
	upstream  string // the address of the server or relay that was started last
	listeners int
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	node := testenv.NewNetwork(t).AddNode("node")
	c := &cluster{t: t, node: node, one: node.AddPod("one"), two: node.AddPod("two"), client: node.AddPod("client"), dir: t.TempDir()}
	c.one.Serve(testenv.TCP, 8080)
	c.two.Serve(testenv.TCP, 8080)
	require.NoError(t, os.Mkdir(c.path("manifests"), 0o755))
	c.lead(c.one)
	return c
}

func (c *cluster) path(name string) string { return filepath.Join(c.dir, name) }

// lead makes a pod the Service's only endpoint.
func (c *cluster) lead(to *testenv.Pod) {
	c.t.Helper()
	partial := c.path("web.partial")
	require.NoError(c.t, os.WriteFile(partial, []byte(testenv.WebManifest(to.IPv4)), 0o600))
	require.NoError(c.t, os.Rename(partial, c.path("manifests/web.yaml")))
}

// serve starts a server or, if there is one, a relay of it.
func (c *cluster) serve(v version) *command.Command {
	c.t.Helper()
	c.listeners++
	source := []string{"--source=file", "--manifests=" + c.path("manifests")}
	if c.upstream != "" {
		source = []string{"--source=upstream", "--upstream-servers=" + c.upstream, "--upstream-insecure-plaintext"}
	}
	name := fmt.Sprintf("server-%d", c.listeners)
	c.upstream = fmt.Sprintf("127.0.0.1:%d", 8600+c.listeners)
	health := fmt.Sprintf("127.0.0.1:%d", 8700+c.listeners)
	server := command.New(c.t, c.node.Host, name+" ("+v.name+")")
	require.NoError(c.t, server.Start(nil, filepath.Join(v.bin, "slicecast-server"), append(source, "--insecure-plaintext",
		"--bind-address="+c.upstream, "--advertise-servers="+c.upstream, "--healthz-bind-address="+health,
		"--debug-socket="+c.path(name+".sock"))...))
	server.AwaitOK(c.t, patience, "http://"+health+"/readyz")
	return server
}

// run starts an agent of the server or relay that was started last, and waits until it is ready.
func (c *cluster) run(v version) *command.Command {
	c.t.Helper()
	agent := command.New(c.t, c.node.Host, "agent ("+v.name+")")
	require.NoError(c.t, agent.Start(nil, filepath.Join(v.bin, "slicecast-agent"), "--node-name=node", "--servers="+c.upstream,
		"--insecure-plaintext", "--programmer=nftables", "--programmer-fallback=false", "--cluster-cidr="+c.node.PodCIDR4.String(),
		"--checkpoint="+c.path("checkpoint"), "--status-socket="+c.path("agent.sock"), "--healthz-bind-address=127.0.0.1:8475"))
	agent.AwaitOK(c.t, patience, "http://127.0.0.1:8475/readyz")
	return agent
}

// awaitReached waits until connections to the Service reach a pod.
func (c *cluster) awaitReached(pod *testenv.Pod) {
	c.t.Helper()
	testenv.Eventually(c.t, patience, func() error {
		result := c.client.Probe(c.t.Context(), testenv.TCP, testenv.WebService, 1, testenv.ProbeOptions{})
		if got := result.Backends(); got[pod.Name] != 1 {
			return fmt.Errorf("reached %v instead of %s", got, pod.Name)
		}
		return nil
	})
}

// awaitStatus waits until a version's status command says that the server has a node that has
// programmed everything.
func (c *cluster) awaitStatus(v version, socket string) {
	c.t.Helper()
	testenv.Eventually(c.t, patience, func() error {
		out, err := c.node.Run(c.t.Context(), filepath.Join(v.bin, "slicecast-server"), "status", "--debug-socket="+c.path(socket))
		if err != nil {
			return err
		}
		if !strings.Contains(out, "1 Services, 1 slices, 1 endpoints") || !strings.Contains(out, "node") {
			return fmt.Errorf("the status is\n%s", out)
		}
		return nil
	})
}

// TestServersRelaysAndAgents runs chains of a server, a relay and an agent in all combinations of
// versions.
func TestServersRelaysAndAgents(t *testing.T) {
	all := versions(t)
	for _, server := range all {
		for _, relay := range all {
			for _, agent := range all {
				t.Run(fmt.Sprintf("server of %s, relay of %s, agent of %s", server.name, relay.name, agent.name), func(t *testing.T) {
					c := newCluster(t)
					c.serve(server)
					c.serve(relay)
					c.run(agent)
					c.awaitReached(c.one)
					c.lead(c.two)
					c.awaitReached(c.two)
					for _, v := range all {
						c.awaitStatus(v, "server-1.sock")
						c.awaitStatus(v, "server-2.sock")
					}
				})
			}
		}
	}
}

// TestAgentsTakeOver lets agents of both versions take turns at a node: with a server, and with the
// checkpoint alone.
func TestAgentsTakeOver(t *testing.T) {
	all := versions(t)
	for i, first := range all {
		second := all[len(all)-1-i]
		t.Run(first.name+", then "+second.name, func(t *testing.T) {
			c := newCluster(t)
			server := c.serve(first)
			agent := c.run(first)
			c.awaitReached(c.one)
			require.NoError(t, agent.Stop())
			agent = c.run(second)
			c.lead(c.two)
			c.awaitReached(c.two)
			require.NoError(t, agent.Stop())
			require.NoError(t, server.Stop())
			c.run(first) // it is ready with the checkpoint of the other version
			c.awaitReached(c.two)
			out, err := c.node.Run(t.Context(), filepath.Join(second.bin, "slicecast-agent"), "status", "--status-socket="+c.path("agent.sock"))
			require.NoError(t, err)
			require.Contains(t, out, "1 Service ports")
		})
	}
}
