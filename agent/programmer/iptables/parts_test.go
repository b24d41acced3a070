// These tests prove that iptables-nft writes many rules in short transactions, which hold up no
// packets, and that no packet reaches any of them before the last one.
package iptables

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// changedChains returns the chains that an input for iptables-restore declares or adds rules to, as
// their table and name.
func changedChains(input []byte) (chains []string) {
	table := ""
	for line := range strings.Lines(string(input)) {
		words := strings.Fields(line)
		switch {
		case line[0] == '*':
			table = words[0][1:]
		case line[0] == ':':
			chains = append(chains, table+" "+words[0][1:])
		case words[0] == "-A":
			chains = append(chains, table+" "+words[1])
		}
	}
	slices.Sort(chains)
	return slices.Compact(chains)
}

// TestLongChangesAreShortTransactions asserts that iptables-nft writes new chains in short
// transactions before the one that leads packets to them, and that the legacy variant, which
// replaces a table as a whole, writes everything at once. A Service port that the kernel refuses in
// the middle keeps no other one from being programmed.
func TestLongChangesAreShortTransactions(t *testing.T) {
	t.Parallel()
	eachVariant(t, func(t *testing.T, variant Variant) {
		host := testenv.NewNetwork(t).AddNode("a").Host
		h := newInHost(t, host, Options{Variant: variant})
		state := view.State{Ports: map[view.ServicePortID]*view.ServicePort{}}
		require.NoError(t, h.Replace(t.Context(), state))
		check := func(was map[string]bool) {
			t.Helper()
			inputs := h.restored
			if variant == Legacy {
				require.Len(t, inputs, 1)
				return
			}
			require.Greater(t, len(inputs), 5)
			for _, input := range inputs[:len(inputs)-1] {
				require.LessOrEqual(t, bytes.Count(input, []byte("\n")), partLines+2)
				for _, chain := range changedChains(input) {
					require.False(t, was[chain], "%s was there before, so packets reach it", chain)
				}
			}
		}
		chains := func() map[string]bool {
			all := map[string]bool{}
			for table := range tables {
				for name := range h.families[model.IPv4].held.chains[table] {
					all[table.String()+" "+name] = true
				}
			}
			return all
		}
		var changes []view.Change
		for i := range 1000 {
			p := benchmarkPort(i, 3, 0)
			if i < 500 {
				state.Ports[p.ID] = p
			} else {
				changes = append(changes, view.Change{After: p})
			}
		}

		h.restored = nil
		before := chains()
		require.NoError(t, h.Replace(t.Context(), state))
		check(before)
		h.restored = nil
		before = chains()
		require.NoError(t, h.Apply(t.Context(), changes))
		check(before)
		for _, c := range changes {
			state.Ports[c.ID()] = c.After
		}
		again := newInHost(t, host, Options{Variant: variant})
		require.NoError(t, again.Replace(t.Context(), state))
		require.Empty(t, again.restored, "a new process finds that everything is as wanted")

		require.NoError(t, h.Cleanup(t.Context()))
		// This one has no earlier state of a Service port to keep.
		h = newInHost(t, host, Options{Variant: variant})
		bad := benchmarkPort(321, 3, 0)
		h.refuse = func(input []byte) string {
			if bytes.Contains(input, []byte(" --to-destination "+bad.Cluster.List()[0].Address.String()+"\n")) {
				return "iptables-restore: line 5 failed"
			}
			return ""
		}
		err := h.Replace(t.Context(), state)
		refused, ok := programmer.PortErrors(err)
		require.True(t, ok, "%v", err)
		require.Len(t, refused, 1)
		require.Equal(t, bad.ID, refused[0].ID)
		h.refuse = nil
		again = newInHost(t, host, Options{Variant: variant})
		require.NoError(t, again.Replace(t.Context(), state))
		require.Len(t, again.restored, 1, "only what was refused was missing")
	})
}
