// The fuzz target proves that a flow is parsed without reading beyond the message, whatever the
// kernel sends.
package netlink

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// FuzzFlow asserts that a flow is parsed, and that nothing is read beyond the message, whatever the
// kernel sends.
func FuzzFlow(f *testing.F) {
	w := &Writer{}
	for _, kind := range []uint16{nl.CTA_TUPLE_ORIG, nl.CTA_TUPLE_REPLY} {
		tuple := w.Nest(kind)
		ip := w.Nest(nl.CTA_TUPLE_IP)
		w.Bytes(nl.CTA_IP_V4_SRC, []byte{10, 0, 0, 1})
		w.Bytes(nl.CTA_IP_V4_DST, []byte{10, 0, 0, 2})
		w.Close(ip)
		protocol := w.Nest(nl.CTA_TUPLE_PROTO)
		w.Bytes(nl.CTA_PROTO_NUM, []byte{unix.IPPROTO_UDP})
		w.BigUint16(nl.CTA_PROTO_SRC_PORT, 256)
		w.BigUint16(nl.CTA_PROTO_DST_PORT, 53)
		w.Close(protocol)
		w.Close(tuple)
	}
	w.BigUint32(nl.CTA_STATUS, 6)
	flow := flowOf(w.Buf)
	require.Equal(f, "10.0.0.2:53", flow.Original.Destination.String())
	require.Equal(f, "10.0.0.1:256", flow.Reply.Source.String())
	require.EqualValues(f, unix.IPPROTO_UDP, flow.Original.Protocol)
	require.Equal(f, flow.Original, flow.Reply)
	require.EqualValues(f, 6, flow.Status)
	f.Add(w.Buf)
	f.Fuzz(func(t *testing.T, attributes []byte) {
		require.Equal(t, attributes, flowOf(attributes).Attributes)
	})
}
