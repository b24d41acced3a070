// This test proves that a packet of a probe can be decoded again, and that only its beginning, as
// ICMP errors return it, is never taken for another packet.
package conformance

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPacketsSurviveTruncation(t *testing.T) {
	for _, addrs := range [][2]string{{"10.0.0.1:1", "10.0.0.2:65535"}, {"[fd00::1]:1", "[fd00::2]:65535"}} {
		for proto := range protocolNumbers {
			for _, kind := range []packetKind{opening, answer} {
				want := packet{
					kind: kind, proto: proto, token: 0x01020304,
					src: netip.MustParseAddrPort(addrs[0]), dst: netip.MustParseAddrPort(addrs[1]),
				}
				data := want.encode()
				have, ok := decodeIP(data)
				require.True(t, ok)
				require.Equal(t, want, have)
				for n := range data {
					if have, ok := decodeIP(data[:n]); ok && proto != TCP {
						require.Equal(t, want, have)
					}
				}
			}
		}
	}
}
