// This test proves that what the programmers write for random Services, as the view decides for
// them, is as wanted.
package verify_test

import (
	"log/slog"
	"testing"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/programmer/iptables"
	"github.com/slicecast/slicecast/agent/programmer/nftables"
	"github.com/slicecast/slicecast/agent/verify"
	"github.com/slicecast/slicecast/agent/verify/verifytest"
)

// TestRandomServices asserts that verify finds nothing wrong with what any programmer writes for
// random Services. For IPVS, TestVerifyRandomServices of agent/programmer/ipvs does.
func TestRandomServices(t *testing.T) {
	t.Parallel()
	log := slog.New(slog.DiscardHandler)
	ofIPTables := func(variant iptables.Variant) func() (programmer.Programmer, error) {
		return func() (programmer.Programmer, error) {
			return iptables.New(iptables.Options{Variant: variant, Log: log})
		}
	}
	for name, newProgrammer := range map[string]func() (programmer.Programmer, error){
		"nftables":     func() (programmer.Programmer, error) { return nftables.New(nftables.Options{Log: log}) },
		"iptables-nft": ofIPTables(iptables.NFT), "iptables-legacy": ofIPTables(iptables.Legacy),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			verifytest.Check(t, newProgrammer, verify.Options{MasqueradeMark: programmer.DefaultMasqueradeMark})
		})
	}
}
