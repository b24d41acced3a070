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

	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

var (
	sizesFlag    = flag.String("kubeproxy.sizes", "1000x50+5000,10000x5", "clusters, with commas: SERVICESxENDPOINTS, and +ENDPOINTS for one large Service more")
	modesFlag    = flag.String("kubeproxy.modes", "nftables,iptables-nft,iptables-legacy", "ways to program nodes, with commas; also ipvs, see internal/testenv/vm/oldkernel")
	subjectsFlag = flag.String("kubeproxy.subjects", "kube-proxy,slicecast", "who to measure, with commas")
	changesFlag  = flag.Int("kubeproxy.changes", 20, "changes of one endpoint to make in each Service; 0: none, and no figures of them")
	dialsFlag    = flag.Int("kubeproxy.connections", 5000, "connections to make to each Service")
)

// buildDirVariable names the folder that the commands were built into.
const buildDirVariable = "SLICECAST_KUBEPROXY_BUILD"

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == serveArgument {
		runtime.GOMAXPROCS(1) // a server is not on the node: it is to leave the agent a CPU
		os.Exit(serve(os.Stdin, os.Stdout))
	}
	flag.Parse()
	var prepare []func() error
	if bench := flag.Lookup("test.bench").Value.String(); bench != "" {
		prepare = append(prepare, controlplane.Prepare, build)
	}
	rest.SetDefaultWarningHandler(rest.NoWarnings{})
	testenv.Main(m, prepare...)
}

// build builds what is measured, while there still is a network.
func build() error {
	if os.Getenv(buildDirVariable) != "" {
		return nil // they are there
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
