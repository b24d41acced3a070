// This file has the flags of the benchmarks, and builds the measured commands.
package kubeproxy

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

var (
	sizesFlag    = flag.String("kubeproxy.sizes", "1000x50+5000,10000x5", "comma-separated sizes of clusters: SERVICESxENDPOINTS, with +ENDPOINTS for an additional large Service")
	modesFlag    = flag.String("kubeproxy.modes", "nftables,iptables-nft,iptables-legacy", "comma-separated modes of nodes; ipvs is allowed, too, see internal/testenv/vm/oldkernel")
	subjectsFlag = flag.String("kubeproxy.subjects", "kube-proxy,slicecast", "comma-separated programs to measure")
	changesFlag  = flag.Int("kubeproxy.changes", 20, "number of flips of one endpoint in each Service; with 0, changes are not measured")
	runsFlag     = flag.Int("kubeproxy.runs", 5, "number of runs of which BenchmarkStall reports the median")
	durationFlag = flag.Duration("kubeproxy.duration", 4*time.Hour, "for how long BenchmarkSoak runs")
	pauseFlag    = flag.Duration("kubeproxy.pause", 500*time.Millisecond, "time from one new Service of BenchmarkSoak to the next")
	soakFlag     = flag.String("kubeproxy.soak", "", "folder to which BenchmarkSoak writes its samples, curves and page")
	dialsFlag    = flag.Int("kubeproxy.connections", 5000, "number of connections to each Service")
)

// buildDirVariable is the environment variable with the directory of the built commands.
const buildDirVariable = "SLICECAST_KUBEPROXY_BUILD"

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == serveArgument {
		runtime.GOMAXPROCS(1) // the server is not part of the node, so leave a CPU to the agent
		os.Exit(serve(os.Stdin, os.Stdout))
	}
	if len(os.Args) == 3 && os.Args[1] == probeArgument {
		os.Exit(probe(os.Args[2]))
	}
	flag.Parse()
	var prepare []func() error
	if bench := flag.Lookup("test.bench").Value.String(); bench != "" {
		prepare = append(prepare, controlplane.Prepare, build)
	}
	rest.SetDefaultWarningHandler(rest.NoWarnings{})
	testenv.Main(m, prepare...)
}

// build builds the measured commands while there is still network access.
func build() error {
	if os.Getenv(buildDirVariable) != "" {
		return nil // already built
	}
	dir, err := os.MkdirTemp("", "slicecast-kubeproxy-")
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(context.Background(), "go", "build", "-o", dir+"/", "./server", "./agent")
	cmd.Dir = filepath.Join("..", "..")
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("build the commands: %w", err)
	}
	_, err = controlplane.KubernetesBinary(context.Background(), "kube-proxy")
	return errors.Join(err, os.Setenv(buildDirVariable, dir))
}
