// Package vm runs the tests of internal/moving on a kernel with IPVS.
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
	programmers = flag.String("vm.programmers", "ipvs:nftables,ipvs:iptables-legacy", "see -moving.programmers")
	kubeProxy   = flag.String("vm.kube-proxy", "ipvs:nftables,ipvs:ipvs,nftables:ipvs,iptables-legacy:ipvs", "see -moving.kube-proxy")
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestWithIPVS(t *testing.T) {
	// Starting an API server in the virtual machine would take minutes.
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
