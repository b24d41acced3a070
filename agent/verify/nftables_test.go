// These tests prove that what the nftables programmer writes is found to be as wanted, and that each
// way to break it is found and named.
package verify

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer/nftables"
	"github.com/slicecast/slicecast/agent/trace"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// newNode returns a node without rules.
func newNode(t *testing.T) *testenv.Node {
	t.Helper()
	return testenv.NewNetwork(t).AddNode("a")
}

// compareNFT compares the kernel of a node with a state.
func compareNFT(t *testing.T, node *testenv.Node, state view.State) (all Result) {
	t.Helper()
	require.NoError(t, node.Do(func() error {
		facts, err := trace.ReadFacts()
		if err != nil {
			return err
		}
		c, err := nft.Dial()
		if err != nil {
			return err
		}
		defer c.Close()
		for _, family := range []model.Family{model.IPv4, model.IPv6} {
			rules, err := trace.ReadNFTables(c, family, facts, func(string) bool { return false })
			if err != nil {
				return err
			}
			all.Merge(Compare(Options{State: state, Addresses: facts.Addresses}, rules))
		}
		return nil
	}))
	return all
}

// sentences returns the differences as text.
func sentences(r Result) string {
	var lines []string
	for _, d := range r.Differences {
		lines = append(lines, d.String())
	}
	return strings.Join(append(lines, r.Unjudged...), "\n")
}

func replaceNFT(t *testing.T, node *testenv.Node, state view.State) {
	t.Helper()
	require.NoError(t, node.Do(func() error {
		p, err := nftables.New(nftables.Options{Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			return err
		}
		defer p.Close()
		return p.Replace(t.Context(), state)
	}))
}

// TestNFTables breaks the table in many ways.
func TestNFTables(t *testing.T) {
	t.Parallel()
	node := newNode(t)
	state := exampleState(node)
	replaceNFT(t, node, state)
	r := compareNFT(t, node, state)
	require.Empty(t, sentences(r))
	require.Greater(t, r.Packets, 100)
}
