package oldkernel

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/slicecast/slicecast/internal/testenv/controlplane"
	"github.com/slicecast/slicecast/internal/testenv/vm"
)

var (
	slicecasts  = flag.String("oldkernel.slicecast", "ipvs,nftables,iptables-nft,iptables-legacy", "what of Slicecast to run the conformance cases against, as with -conformance.slicecast")
	kubeProxies = flag.String("oldkernel.kube-proxy", "", "the same of kube-proxy, as with -conformance.kube-proxy")
	cases       = flag.String("oldkernel.cases", "", "a regular expression for the cases; empty: all")
	programmers = flag.Bool("oldkernel.programmers", true, "run the tests of the programmers, too")
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// atATime is how many ways of conformance go on at the same time, as the machine has two processors.
const atATime = 2

// TestOldKernel holds that the programmers do on an older kernel what they do on others.
func TestOldKernel(t *testing.T) {
	var suites []vm.Suite
	if *programmers {
		suites = append(suites,
			vm.Suite{Dir: "internal/testenv", Flags: []string{"-test.run=^TestProbeSeesTranslation$|^TestHairpinNeedsMasquerade$"}},
			vm.Suite{Dir: "agent/programmer/nftables", Flags: []string{"-rapid.checks=10"}},
			vm.Suite{Dir: "agent/programmer/iptables", Flags: []string{"-rapid.checks=10"}},
		)
	}
	if *slicecasts+*kubeProxies != "" {
		suites = append(suites, conformance(t))
	}
	vm.Test(t, suites...)
}

// conformance is the suite of that, with API servers on this machine: in the virtual one a start would take minutes.
func conformance(t *testing.T) vm.Suite {
	var planes []*controlplane.ControlPlane
	var ports []uint16
	for range atATime {
		cp := controlplane.Start(t, controlplane.Options{})
		planes, ports = append(planes, cp), append(ports, cp.Port())
	}
	dir := t.TempDir()
	for name, folder := range map[string]string{"slicecast-server": "server", "slicecast-agent": "agent"} {
		cmd := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, name), "./"+folder)
		cmd.Dir = filepath.Join("..", "..", "..", "..")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "build %s: %s", name, out)
	}
	if *kubeProxies != "" {
		binary, err := controlplane.KubernetesBinary(t.Context(), "kube-proxy")
		require.NoError(t, err)
		require.NoError(t, os.Symlink(binary, filepath.Join(dir, "kube-proxy")))
	}
	return vm.Suite{
		Dir: "internal/conformance",
		Flags: []string{
			"-test.run=^(TestSlicecast|TestKubeProxy)$//" + *cases, "-test.timeout=2h",
			"-conformance.slicecast=" + *slicecasts, "-conformance.kube-proxy=" + *kubeProxies,
		},
		Env:   []string{controlplane.BinariesVariable + "=" + dir, controlplane.LentVariable + "=" + controlplane.Lend(planes, vm.Socket)},
		Ports: ports,
	}
}
