// TestInside proves that tests run in the virtual machine with Debian's kernel, its modules and the
// host's files.
package vm

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
)

func TestMain(m *testing.M) { Main(m) }

// TestInside requires that tests run in the machine: modules are loaded on request, and the files
// are those of the host, below a layer that the tests can write to.
func TestInside(t *testing.T) {
	version, err := os.ReadFile("/proc/version")
	require.NoError(t, err)
	t.Logf("%s", version)
	require.Contains(t, string(version), "debian-kernel@lists.debian.org")

	name := "sc-dummy"
	require.NoError(t, netlink.LinkAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: name}}))
	family, err := netlink.GenlFamilyGet("IPVS")
	require.NoError(t, err)
	require.NotZero(t, family.ID)

	mounts, err := os.ReadFile("/proc/mounts")
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(string(mounts), "root / overlay "), "%s", mounts)
	require.FileExists(t, "vm_test.go")
	require.NoError(t, os.WriteFile("own", []byte("text"), 0o600))
}
