// These tests prove that the package reads the generation, the size and the policies of tables from
// a real kernel, as iptables has set them.
package xtables

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// in runs commands on a host.
func in(t *testing.T, host *testenv.Host, commands ...string) {
	t.Helper()
	for _, c := range commands {
		words := strings.Fields(c)
		_, err := host.Run(t.Context(), words[0], words[1:]...)
		require.NoError(t, err, c)
	}
}

func TestSize(t *testing.T) {
	host := testenv.NewNetwork(t).AddNode("a").Host
	size := func(family model.Family, table string) (s Size) {
		require.NoError(t, host.Do(func() (err error) {
			s, err = SizeOf(family, table)
			return err
		}))
		return s
	}
	for program, family := range map[string]model.Family{"iptables-legacy": model.IPv4, "ip6tables-legacy": model.IPv6} {
		empty, other := size(family, "nat"), size(family, "filter")
		require.Zero(t, empty.Base)
		require.NotZero(t, empty.Bytes)
		in(t, host, program+" -t nat -N CHAIN", program+" -t nat -A CHAIN -j RETURN")
		chain := size(family, "nat")
		require.Equal(t, empty.Entries+3, chain.Entries)
		require.Zero(t, chain.Base)
		in(t, host, program+" -t nat -A OUTPUT -j CHAIN")
		hooked := size(family, "nat")
		require.Greater(t, hooked.Bytes, chain.Bytes)
		require.NotZero(t, hooked.Base[3])
		require.Equal(t, [5]uint32{3: hooked.Base[3]}, hooked.Base)
		require.Equal(t, other, size(family, "filter"))
	}
	require.NoError(t, host.Do(func() error {
		_, err := SizeOf(model.IPv4, "nothing")
		require.ErrorContains(t, err, "IPv4 table nothing")
		return nil
	}))
}

// TestChains asserts that the chains of a table are found without iptables' programs, however many
// rules there are, and that no table is created.
func TestChains(t *testing.T) {
	host := testenv.NewNetwork(t).AddNode("a").Host
	chains := func(family model.Family) (names []string) {
		require.NoError(t, host.Do(func() (err error) {
			names, err = Chains(family, "nat")
			return err
		}))
		return names
	}
	for program, family := range map[string]model.Family{"iptables-legacy": model.IPv4, "ip6tables-legacy": model.IPv6} {
		require.Empty(t, chains(family))
		require.NoError(t, host.Do(func() error {
			has, err := HasLegacy(family, "nat")
			require.False(t, has, "it does not create the table")
			return err
		}))
		in(t, host, program+" -t nat -A OUTPUT -p tcp -m comment --comment ERROR -j DNAT --to-destination :80")
		require.Empty(t, chains(family))
		var input strings.Builder
		input.WriteString("*nat\n")
		var want []string
		for i := range 300 {
			want = append(want, fmt.Sprintf("CHAIN-%022d", i))
			fmt.Fprintf(&input, ":%s - [0:0]\n-A %s -p tcp -m tcp --dport %d -j RETURN\n", want[i], want[i], i+1)
		}
		restore := host.Command(t.Context(), program+"-restore", "--noflush")
		restore.Stdin = strings.NewReader(input.String() + "COMMIT\n")
		out, err := restore.CombinedOutput()
		require.NoError(t, err, "%s", out)
		got := chains(family)
		slices.Sort(got)
		require.Equal(t, want, got)
	}
}
