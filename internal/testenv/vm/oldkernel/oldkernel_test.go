// TestOldKernel proves that the programmers behave on an older kernel as on others, by running
// their tests and the conformance cases in a virtual machine. With a flag, it measures nodes with
// IPVS there instead.
package oldkernel

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/slicecast/slicecast/internal/conformance/bugs"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
	"github.com/slicecast/slicecast/internal/testenv/vm"
)

var (
	slicecasts  = flag.String("oldkernel.slicecast", "ipvs,nftables,iptables-legacy", "the variants of Slicecast to run the conformance cases against; see -conformance.slicecast")
	kubeProxies = flag.String("oldkernel.kube-proxy", "", "the variants of kube-proxy to run the conformance cases against; see -conformance.kube-proxy")
	broken      = flag.String("oldkernel.broken", "", "the variants of kube-proxy whose rules are broken; see -conformance.broken")
	cases       = flag.String("oldkernel.cases", "", "a regular expression for the names of the cases; empty means all cases")
	record      = flag.String("oldkernel.record", "", "only record in this folder how kube-proxy in mode ipvs does with the cases of known bugs in this mode; see -conformance.record")
	programmers = flag.Bool("oldkernel.programmers", true, "also run the tests of the programmers")
	changes     = flag.Int("oldkernel.changes", 6, "the number of changes; see -kubeproxy.changes")
	figures     = flag.String("oldkernel.figures", "", "only measure nodes with IPVS in clusters of these sizes (see -kubeproxy.sizes); nothing else should run on the machine")
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is the factor of the time that agents may take. A kube-proxy takes minutes to start in
// the virtual machine if the host is busy.
const patience = 5

// atATime is the number of conformance variants that run at the same time. The machine has two
// processors.
const atATime = 2

// TestOldKernel requires the programmers to behave on an older kernel as they do on others.
func TestOldKernel(t *testing.T) {
	var suites []vm.Suite
	if *figures != "" {
		vm.Test(t, lent(t, vm.Suite{Dir: "loadtest/kubeproxy", Flags: []string{
			"-test.run=^$", "-test.bench=Node", "-test.benchtime=1x", "-kubeproxy.modes=ipvs", "-kubeproxy.sizes=" + *figures, fmt.Sprint("-kubeproxy.changes=", *changes),
		}}, 1+strings.Count(*figures, ",")))
		return
	}
	if *record != "" {
		outputs := vm.Test(t, lent(t, vm.Suite{Dir: "internal/conformance", Flags: []string{
			"-test.run=^TestKubeProxy$", "-conformance.slicecast=", "-conformance.kube-proxy=ipvs", "-conformance.broken=", "-conformance.record=-",
			fmt.Sprint("-conformance.patience=", patience),
		}}, 1))
		require.NoError(t, bugs.WritePrinted(*record, "ipvs", outputs[0]))
		return
	}
	if *programmers {
		suites = append(suites,
			vm.Suite{Dir: "internal/testenv", Flags: []string{"-test.run=^TestProbeSeesTranslation$|^TestHairpinNeedsMasquerade$"}},
			// These tests cover what kernels may handle differently: the rules that they accept and
			// report. The conformance cases cover packets.
			vm.Suite{Dir: "agent/programmer/nftables", Flags: []string{
				"-test.run=^(TestDocs|TestHistories|TestRepair|TestCleanup|TestNew|TestLongTransactions|TestSCTP)$", "-rapid.checks=10",
			}},
			vm.Suite{Dir: "agent/programmer/iptables", Flags: []string{"-test.run=^(TestPackets|TestCleanupOfBothVariants|TestKernelRefuses|TestSCTP)$"}},
			vm.Suite{Dir: "agent/app", Flags: []string{"-test.run=^TestProbeKernel$"}},
		)
	}
	if *slicecasts+*kubeProxies+*broken != "" {
		suites = append(suites, lent(t, vm.Suite{Dir: "internal/conformance", Flags: []string{
			"-test.run=^(TestSlicecast|TestKubeProxy|TestBrokenKubeProxy)$//(" + *cases + ")",
			"-conformance.slicecast=" + *slicecasts, "-conformance.kube-proxy=" + *kubeProxies, "-conformance.broken=" + *broken,
			fmt.Sprint("-conformance.patience=", patience),
		}}, atATime))
	}
	vm.Test(t, suites...)
}

// lent adds to a suite what it cannot build or start in the virtual machine: the commands, and
// count API servers. The API servers run on this machine, because starting one in the virtual
// machine would take minutes.
func lent(t *testing.T, suite vm.Suite, count int) vm.Suite {
	t.Helper()
	var planes []*controlplane.ControlPlane
	for range count {
		cp := controlplane.Start(t, controlplane.Options{OldAddresses: true})
		planes, suite.Ports = append(planes, cp), append(suite.Ports, cp.Port())
	}
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", dir+"/", "./server", "./agent")
	cmd.Dir = filepath.Join("..", "..", "..", "..")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "build the commands: %s", out)
	kubeProxy, err := controlplane.KubernetesBinary(t.Context(), "kube-proxy")
	require.NoError(t, err)
	for name, file := range map[string]string{"slicecast-server": "server", "slicecast-agent": "agent", "kube-proxy": kubeProxy} {
		require.NoError(t, os.Symlink(file, filepath.Join(dir, name)))
	}
	suite.Env = []string{
		controlplane.BinariesVariable + "=" + dir, controlplane.LentVariable + "=" + controlplane.Lend(planes, vm.Socket),
		"SLICECAST_KUBEPROXY_BUILD=" + dir,
	}
	return suite
}
