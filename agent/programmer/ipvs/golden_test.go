// TestGolden prints what the programmer writes for random clusters, to compare commits by.
package ipvs_test

import (
	"log/slog"
	"testing"

	"github.com/slicecast/slicecast/agent/programmer/ipvs"
	"github.com/slicecast/slicecast/agent/verify/verifytest"
)

// TestGolden is for internal/tools/goldens.sh; see verifytest.Golden.
func TestGolden(t *testing.T) {
	verifytest.Golden(t, func() (*ipvs.Programmer, error) {
		return ipvs.New(ipvs.Options{Log: slog.New(slog.DiscardHandler)})
	}, 2, "nft --stateless list ruleset", "cat /proc/net/ip_vs", "ip -oneline address show scope global | cut -d: -f2-")
}
