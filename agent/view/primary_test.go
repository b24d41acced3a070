// This test proves that the node's primary IP family is found as kube-proxy finds it, and follows
// the Node.
package view_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// TestPrimaryFamily asserts that the primary family is that of the Node's first InternalIP, as in
// kube-proxy, and IPv4 while none is known.
func TestPrimaryFamily(t *testing.T) {
	v := view.New(view.Options{NodeName: here, NodePortAddresses: prefixes("10.0.0.0/8", "fd00::/8")})
	require.Equal(t, model.IPv4, v.State().Node.Primary)
	for _, c := range []struct {
		ips     []string
		want    model.Family
		changed bool
	}{
		{nil, model.IPv4, false},
		{[]string{"2001:db8::2", "192.168.0.2"}, model.IPv6, true},
		{[]string{"2001:db8::3"}, model.IPv6, false},
		{[]string{"192.168.0.2", "2001:db8::2"}, model.IPv4, true},
		{[]string{"192.168.0.2"}, model.IPv4, false},
	} {
		v.SetNode(&model.Node{Name: here, Addresses: addrs(c.ips...)})
		_, changed := v.Update()
		require.Equal(t, c.changed, changed, c)
		require.Equal(t, c.want, v.State().Node.Primary, c)
	}
}
