// Package vm has the tests of internal/moving run where the kernel has IPVS.
package vm

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/slicecast/slicecast/internal/testenv/controlplane"
	"github.com/slicecast/slicecast/internal/testenv/vm"
)

var (
	programmers = flag.String("vm.programmers", "ipvs:nftables,ipvs:iptables-legacy", "as -moving.programmers")
	kubeProxy   = flag.String("vm.kube-proxy", "ipvs:nftables,ipvs:ipvs,nftables:ipvs,iptables-legacy:ipvs", "as -moving.kube-proxy")
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestWithIPVS(t *testing.T) {
	// An API server would take minutes to start in the machine.
	control := controlplane.Start(t, controlplane.Options{})
	binary, err := controlplane.KubernetesBinary(t.Context(), "kube-proxy")
	require.NoError(t, err)
	dir := t.TempDir()
	require.NoError(t, os.Symlink(binary, filepath.Join(dir, "kube-proxy")))
	vm.Test(t, vm.Suite{
		Dir:   "internal/moving",
		Flags: []string{"-test.timeout=30m", "-moving.programmers=" + *programmers, "-moving.kube-proxy=" + *kubeProxy},
		Env: []string{
			controlplane.BinariesVariable + "=" + dir,
			controlplane.LentVariable + "=" + controlplane.Lend([]*controlplane.ControlPlane{control}, vm.Socket),
		},
		Ports: []uint16{control.Port()},
	})
}
