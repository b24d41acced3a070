package vm

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
)

func TestMain(m *testing.M) { Main(m) }

// TestInside holds that tests are in the machine: with modules that are loaded when they are asked for, with the host's
// files, which they cannot change, and with a place for their own.
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
