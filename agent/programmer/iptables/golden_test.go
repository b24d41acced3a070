// TestGolden prints what the programmer writes for random clusters, to compare commits by.
package iptables_test

import (
	"log/slog"
	"testing"

	"github.com/slicecast/slicecast/agent/programmer/iptables"
	"github.com/slicecast/slicecast/agent/verify/verifytest"
)

// TestGolden is for internal/tools/goldens.sh; see verifytest.Golden.
func TestGolden(t *testing.T) {
	verifytest.Golden(t, func() (*iptables.Programmer, error) {
		return iptables.New(iptables.Options{Log: slog.New(slog.DiscardHandler)})
	}, 4, "iptables-nft-save | sed /^#/d", "ip6tables-nft-save | sed /^#/d")
}
