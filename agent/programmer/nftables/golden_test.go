// TestGolden prints what the programmer writes for random clusters, to compare commits by.
package nftables_test

import (
	"log/slog"
	"testing"

	"github.com/slicecast/slicecast/agent/programmer/nftables"
	"github.com/slicecast/slicecast/agent/verify/verifytest"
)

// TestGolden is for internal/tools/goldens.sh; see verifytest.Golden.
func TestGolden(t *testing.T) {
	verifytest.Golden(t, func() (*nftables.Programmer, error) {
		return nftables.New(nftables.Options{Log: slog.New(slog.DiscardHandler)})
	}, 8, "nft --stateless list ruleset")
}
