// This test proves that verify finds nothing wrong with what the programmer writes for random
// Services. It is in a package of its own, because the package verify uses this one.
package ipvs_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/slicecast/slicecast/agent/programmer/ipvs"
	"github.com/slicecast/slicecast/agent/verify"
	"github.com/slicecast/slicecast/agent/verify/verifytest"
	"github.com/slicecast/slicecast/agent/view"
)

var options = verify.Options{IPVS: ipvs.Options{Scheduler: ipvs.DefaultScheduler, UDPTimeout: 5 * time.Minute}}

func init() {
	ipvs.Verify = func(ctx context.Context, state view.State) ([]string, error) {
		o := options
		o.State = state
		return verifytest.Lines(ctx, o)
	}
}

// TestVerifyRandomServices proves that verify finds nothing wrong with what the programmer writes
// for random Services.
func TestVerifyRandomServices(t *testing.T) {
	verifytest.Check(t, func() (*ipvs.Programmer, error) {
		return ipvs.New(ipvs.Options{Log: slog.New(slog.DiscardHandler)})
	}, options)
}
