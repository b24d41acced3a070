// This test proves that verify finds nothing wrong with what the programmer writes for random
// Services. It is in a package of its own, because the package verify uses this one.
package ipvs_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/agent/programmer/ipvs"
	"github.com/slicecast/slicecast/agent/verify"
	"github.com/slicecast/slicecast/agent/verify/verifytest"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/testenv"
)

func init() {
	ipvs.Verify = func(ctx context.Context, state view.State) (lines []string, err error) {
		o := ipvs.Options{Scheduler: ipvs.DefaultScheduler, UDPTimeout: 5 * time.Minute}
		r, err := verify.Kernel(ctx, verify.Options{State: state, IPVS: o})
		for _, d := range r.Differences {
			lines = append(lines, d.String())
		}
		return append(lines, r.Unjudged...), err
	}
}

// TestVerifyRandomServices proves that verify finds nothing wrong with what the programmer writes
// for random Services.
func TestVerifyRandomServices(t *testing.T) {
	host := testenv.NewNetwork(t).AddNode("a")
	var p *ipvs.Programmer
	require.NoError(t, host.Do(func() (err error) {
		p, err = ipvs.New(ipvs.Options{Log: slog.New(slog.DiscardHandler)})
		return err
	}))
	rapid.Check(t, func(r *rapid.T) {
		state := verifytest.State(r, host.IPv4, host.IPv6)
		require.NoError(r, host.Do(func() error {
			if err := p.Replace(t.Context(), state); err != nil {
				return err
			}
			found, err := ipvs.Verify(t.Context(), state)
			require.Empty(r, found)
			return err
		}))
	})
}
