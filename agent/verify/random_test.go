// This test proves that what the programmers write for random Services, as the view decides for
// them, is as wanted.
package verify_test

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/programmer/iptables"
	"github.com/slicecast/slicecast/agent/programmer/nftables"
	"github.com/slicecast/slicecast/agent/verify"
	"github.com/slicecast/slicecast/agent/verify/verifytest"
	"github.com/slicecast/slicecast/internal/testenv"
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
			host := testenv.NewNetwork(t).AddNode("a")
			var p programmer.Programmer
			require.NoError(t, host.Do(func() (err error) {
				p, err = newProgrammer()
				return err
			}))
			rapid.Check(t, func(r *rapid.T) {
				state := verifytest.State(r, host.IPv4, host.IPv6)
				require.NoError(r, host.Do(func() error {
					if err := p.Replace(t.Context(), state); err != nil {
						return err
					}
					found, err := verify.Kernel(t.Context(), verify.Options{State: state, MasqueradeMark: programmer.DefaultMasqueradeMark})
					var lines []string
					for _, d := range found.Differences {
						lines = append(lines, d.String())
					}
					require.Empty(r, strings.Join(append(lines, found.Unjudged...), "\n"))
					return err
				}))
			})
		})
	}
}
