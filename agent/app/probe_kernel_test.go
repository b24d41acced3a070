// These tests prove that "probe kernel" says which programmers work in a real kernel, with the
// whole reason for one that does not, and that it leaves no rules. This machine's kernel may lack
// IPVS; that of the virtual machine has it. Programs that are missing and a capability that is
// missing are made up by taking them away.
package app

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/probe"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/vm"
)

// probeIn runs the command on a node, and returns what it printed by programmer and variant.
func probeIn(t *testing.T, node *testenv.Node) map[string]probe.KernelProgrammer {
	t.Helper()
	var out bytes.Buffer
	c := newProbeCommand()
	c.SetArgs([]string{"kernel"})
	c.SetOut(&out)
	require.NoError(t, node.Do(func() error { return c.ExecuteContext(t.Context()) }))
	var k probe.Kernel
	decoder := json.NewDecoder(&out)
	decoder.DisallowUnknownFields()
	require.NoError(t, decoder.Decode(&k))
	var name unix.Utsname
	require.NoError(t, unix.Uname(&name))
	require.Equal(t, unix.ByteSliceToString(name.Release[:]), k.Release)
	return byName(t, k)
}

func byName(t *testing.T, k probe.Kernel) map[string]probe.KernelProgrammer {
	t.Helper()
	by := make(map[string]probe.KernelProgrammer)
	for _, p := range k.Programmers {
		by[strings.TrimSuffix(p.Programmer+"-"+p.Variant, "-")] = p
	}
	require.Len(t, by, 4)
	return by
}

func TestProbeKernel(t *testing.T) {
	node := testenv.NewNetwork(t).AddNode("a")
	both := []string{"IPv4", "IPv6"}
	by := probeIn(t, node)
	for _, name := range []string{"nftables", "iptables-nft", "iptables-legacy"} {
		require.Equal(t, both, by[name].Families, "%s: %s", name, by[name].Error)
		require.Empty(t, by[name].Error)
		require.Empty(t, by[name].LeftOut)
	}
	if ipvs := by["ipvs"]; vm.Inside() || len(ipvs.Families) > 0 {
		require.Equal(t, both, ipvs.Families, ipvs.Error)
		require.Empty(t, ipvs.Error)
	} else {
		require.Contains(t, ipvs.Error, "this node has no IPVS (kernel module ip_vs)")
		require.Contains(t, ipvs.Error, "; this node has no IPVS scheduler rr", "the whole reason, in one line")
		require.False(t, ipvs.NoProgram || ipvs.NotPermitted)
	}
	for _, save := range []string{"nft list ruleset", "iptables-legacy-save", "ip6tables-legacy-save"} {
		words := strings.Fields(save)
		out, err := node.Run(t.Context(), words[0], words[1:]...)
		require.NoError(t, err)
		require.NotContains(t, strings.ToLower(out), "slicecast")
	}
}

// TestProbeKernelWithout checks what is said of a machine without iptables' programs, and of a
// process without NET_ADMIN.
func TestProbeKernelWithout(t *testing.T) {
	node := testenv.NewNetwork(t).AddNode("a")
	path := os.Getenv("PATH")
	t.Setenv("PATH", t.TempDir())
	by := probeIn(t, node)
	require.Equal(t, []string{"IPv4", "IPv6"}, by["nftables"].Families)
	for _, name := range []string{"iptables-nft", "iptables-legacy"} {
		require.True(t, by[name].NoProgram)
		require.Contains(t, by[name].Error, "executable file not found")
		require.Empty(t, by[name].Families)
	}

	t.Setenv("PATH", path)
	var k probe.Kernel
	require.NoError(t, node.Do(func() error {
		// The capabilities are those of this thread. Programs that it starts get them back.
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var before [2]unix.CapUserData
		if err := unix.Capget(&header, &before[0]); err != nil {
			return err
		}
		without := before
		without[0].Effective &^= 1 << unix.CAP_NET_ADMIN
		if err := unix.Capset(&header, &without[0]); err != nil {
			return err
		}
		var err error
		k, err = probeKernel(t.Context())
		return errors.Join(err, unix.Capset(&header, &before[0]))
	}))
	by = byName(t, k)
	require.Contains(t, by["nftables"].Error, "run as root with CAP_NET_ADMIN")
	require.True(t, by["nftables"].NotPermitted)
	require.False(t, by["nftables"].NoProgram)
	require.Equal(t, []string{"IPv4", "IPv6"}, by["iptables-nft"].Families, by["iptables-nft"].Error)
}
