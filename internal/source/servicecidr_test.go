// This test proves that the ranges of ServiceCIDRs are bounded, and that those left out are
// reported while they are.
package source

import (
	"log/slog"
	"net/netip"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
)

// lastNode is a Sink that keeps the last Node that it was given.
type lastNode struct {
	Sink
	node *model.Node
}

func (l *lastNode) Upsert(o model.Keyed, _ uint64) { l.node = o.(*model.Node) }

// TestServiceCIDRsAreBounded checks that a Node has a bounded number of ranges, however many
// ServiceCIDRs there are, and that ranges are reported while they are left out.
func TestServiceCIDRsAreBounded(t *testing.T) {
	skips := NewSkips(slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	last := &lastNode{}
	sink := WithServiceCIDRs(last, skips)
	sink.Upsert(&model.Node{Name: "n"}, 1)
	object := func(i int) *ServiceCIDR {
		return &ServiceCIDR{Name: "c" + string(rune('0'+i)), CIDRs: []netip.Prefix{
			netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(i)}), 128), netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 99, 0, byte(i)}), 32),
		}}
	}
	many := &ServiceCIDR{Name: "many"}
	for i := range model.MaxServiceCIDRs - 1 {
		many.CIDRs = append(many.CIDRs, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), 32))
	}
	for i, o := range []*ServiceCIDR{many, object(1), object(2), object(3)} {
		sink.Upsert(o, 1)
		require.NoError(t, last.node.Check())
		require.Equal(t, min(len(many.CIDRs)+i, model.MaxServiceCIDRs)+i, len(last.node.ServiceCIDRs))
		left := 0.0
		if i > 1 {
			left = 1
		}
		require.Equal(t, left, testutil.ToFloat64(skips.gauge.WithLabelValues("ServiceCIDR", string(TooMany))))
	}
	sink.Remove(many.Key(), 2)
	require.Len(t, last.node.ServiceCIDRs, 6)
	require.Zero(t, testutil.ToFloat64(skips.gauge.WithLabelValues("ServiceCIDR", string(TooMany))))
}
