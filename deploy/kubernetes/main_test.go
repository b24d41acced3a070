// This file starts the API server and the network that all tests of the manifests share.
package kubernetes

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

var (
	network *testenv.Network
	cluster *controlplane.ControlPlane
)

func TestMain(m *testing.M) {
	// This binary also stands for the images; see container_test.go.
	if os.Getenv(containerVariable) != "" {
		runContainer()
	}
	if os.Getenv(imageVariable) != "" {
		runImage()
	}
	testenv.Isolate(controlplane.Prepare)
	network = testenv.NewNetwork(wholeProcess{})
	options := controlplane.Options{Address: network.World.IPv4, Controllers: true, Policies: true}
	goleak.VerifyTestMain(controlplane.Around(m, options, &cluster))
}

// wholeProcess is the testenv.TB of a network that lives as long as the process.
type wholeProcess struct{}

func (wholeProcess) Helper()        {}
func (wholeProcess) Cleanup(func()) {}
func (wholeProcess) Fatalf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", args...)
	os.Exit(1)
}
