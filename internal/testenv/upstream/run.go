package upstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/slicecast/slicecast/internal/testenv/cluster"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// Options configure a run.
type Options struct {
	// Focus is a regular expression for the names of the cases to run. Empty means all.
	Focus string
	// Dir is the folder of the report and the log. Run replaces it.
	Dir string
	// Logf receives a line for each step and each case.
	Logf func(format string, args ...any)
}

const (
	// processes is the number of cases that run at the same time. It suits two CPUs, because cases
	// mostly wait.
	processes = 8
	// files are where the cases come from.
	files = `test/e2e/(network|common/network)/`
	// reportName is the name that upstream gives to the report.
	reportName = "junit_01.xml"
	// timeout ends a run that hangs.
	timeout = 4 * time.Hour
)

// clientAddresses are those of the host on which the tests run. No test uses them for a Service.
var clientAddresses = []netip.Addr{netip.MustParseAddr("198.51.100.2"), netip.MustParseAddr("2001:db8:cafe::2")}

// Run runs upstream's cases in a cluster, and returns the outcomes of those that could run. An
// error means that there are none; a case that fails is an outcome.
func Run(ctx context.Context, c *cluster.Cluster, o Options) ([]Result, error) {
	dir, err := filepath.Abs(o.Dir)
	if err != nil {
		return nil, err
	}
	report := filepath.Join(dir, reportName)
	if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o755)); err != nil {
		return nil, err
	}
	o.Logf("loading the images of the tests")
	if err := importImages(ctx, c); err != nil {
		return nil, err
	}
	client := c.Network.AddClient("e2e", clientAddresses...)
	balancing, stop := context.WithCancel(ctx)
	var balancers sync.WaitGroup
	balancers.Go(func() { newBalancer(c, client).run(balancing) })
	defer balancers.Wait()
	defer stop()

	args, err := arguments(ctx, c, o, dir)
	if err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(dir, "ginkgo.log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	o.Logf("running the tests; the details are in %s", log.Name())
	cmd := client.Command(ctx, args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = io.MultiWriter(log, &progress{logf: o.Logf}), log
	// Ginkgo's processes have the output open, too. They end with the client.
	cmd.WaitDelay = time.Second
	runErr := cmd.Run()
	if exit := new(exec.ExitError); runErr != nil && (!errors.As(runErr, &exit) || ctx.Err() != nil) {
		return nil, errors.Join(runErr, ctx.Err())
	}
	results, err := readReport(report)
	if err != nil {
		return nil, fmt.Errorf("the tests ended without a report (%w); see %s: %w", runErr, log.Name(), err)
	}
	if len(results) == 0 {
		return nil, fmt.Errorf("no case ran: check FOCUS=%s, or see %s", o.Focus, log.Name())
	}
	return results, nil
}

// arguments returns the command line of ginkgo.
func arguments(ctx context.Context, c *cluster.Cluster, o Options, dir string) ([]string, error) {
	ginkgo, err := controlplane.KubernetesBinary(ctx, "ginkgo")
	if err != nil {
		return nil, err
	}
	tests, err := controlplane.KubernetesBinary(ctx, "e2e.test")
	if err != nil {
		return nil, err
	}
	args := []string{
		ginkgo, "--procs=" + strconv.Itoa(processes), "--timeout=" + timeout.String(), "--no-color", "-v", "--silence-skips",
		"--focus-file=" + files, "--label-filter=sig-network", "--focus=" + o.Focus,
	}
	for _, excluded := range cases.CannotRun {
		args = append(args, "--skip="+excluded.Match)
	}
	return append(args, tests, "--",
		"--kubeconfig="+c.Kubeconfig, "--kubectl-path="+c.KubectlPath, "--provider=skeleton",
		"--num-nodes="+strconv.Itoa(len(c.Nodes)), "--disable-log-dump", "--report-dir="+dir,
	), nil
}
