// Package e2e tests the whole system: a real API server with its controllers, the slicecast-server
// and slicecast-agent commands as they are built, and traffic from pods, nodes and an outside
// client through the kernel's rules.
//
// A pod is a Pod object and a network namespace with the same addresses. The tests write the status
// of Pods, as a kubelet would. The controllers of Kubernetes create the slices, unless a test says
// otherwise.
package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
	"github.com/slicecast/slicecast/internal/testenv/prometheus"
)

var (
	// network is the network of all tests. Each test adds its own nodes.
	network *testenv.Network
	// outside is a host outside the cluster.
	outside *testenv.Client
	// shared is the control plane for all tests that do not need one of their own.
	shared *controlplane.ControlPlane
)

// The commands, by the names of their folders in the repository.
const (
	serverCommand = "server"
	agentCommand  = "agent"
)

// binaries is the folder of the commands in the tests' namespaces. It is on a tmpfs that disappears
// with them.
const binaries = "/run/slicecast-e2e"

// buildDirVariable is the name of an environment variable with the folder into which build has
// built the commands.
const buildDirVariable = "SLICECAST_E2E_BUILD"

func TestMain(m *testing.M) {
	testenv.Isolate(build, controlplane.Prepare, prometheus.Prepare, func() error {
		_, err := controlplane.KubernetesBinary(context.Background(), "kube-proxy")
		return err
	})
	// With this setting the commands do not wait one second for data races when they end.
	if err := errors.Join(takeBinaries(), os.Setenv("GORACE", "atexit_sleep_ms=0")); err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		os.Exit(1)
	}
	// The API server warns about the Endpoints API, whose mirroring is tested.
	rest.SetDefaultWarningHandler(rest.NoWarnings{})
	network = testenv.NewNetwork(forever{})
	outside = network.AddClient("outside")
	goleak.VerifyTestMain(controlplane.Around(m, controlOptions(), &shared))
}

// controlOptions returns the options of a control plane with controllers that the nodes can reach.
func controlOptions(controllerFlags ...string) controlplane.Options {
	return controlplane.Options{Address: network.World.IPv4, Controllers: true, ControllerFlags: controllerFlags}
}

// build builds the commands, with the race detector if the tests use it.
func build() error {
	dir, err := os.MkdirTemp("", "slicecast-e2e-")
	if err != nil {
		return err
	}
	args := []string{"build", "-o", dir + "/"}
	if raceDetector {
		args = append(args, "-race")
	}
	cmd := exec.CommandContext(context.Background(), "go", append(args, "./"+serverCommand, "./"+agentCommand)...)
	cmd.Dir = filepath.Join("..", "..")
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("build the commands: %w", err)
	}
	return os.Setenv(buildDirVariable, dir)
}

// takeBinaries moves the built commands to binaries, so that nothing is left behind when this
// process is killed.
func takeBinaries() error {
	dir := os.Getenv(buildDirVariable)
	if err := os.MkdirAll(binaries, 0o755); err != nil {
		return err
	}
	for _, name := range []string{serverCommand, agentCommand} {
		if err := copyExecutable(filepath.Join(binaries, name), filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return os.RemoveAll(dir)
}

func copyExecutable(to, from string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		return err
	}
	return out.Close()
}

// forever is the testenv.TB of a network that lives as long as the process.
type forever struct{}

func (forever) Helper() {}

func (forever) Fatalf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "e2e: "+format+"\n", args...)
	os.Exit(1)
}

func (forever) Cleanup(func()) {}
