// These tests prove that a dump has everything that a kernel's nf_tables holds, of all programs.
package nft

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDump(t *testing.T) {
	host := newHost(t)
	var out strings.Builder
	require.NoError(t, host.Do(func() error { return Dump(&out) }))
	require.Empty(t, out.String())

	command := host.Command(t.Context(), "nft", "-f", "-")
	command.Stdin = strings.NewReader(`table ip web {
	set sources { type ipv4_addr; elements = { 192.0.2.7 }; }
	set ranges { type ipv4_addr; flags interval; elements = { 10.0.0.0/8 }; }
	map backends { type inet_service : verdict; elements = { 80 : goto first }; }
	chain first {
		ip protocol tcp dnat to 10.1.2.3:8080
	}
	chain nat {
		type nat hook prerouting priority -100; policy accept;
		ip saddr @sources tcp dport vmap @backends
		fib daddr type local counter drop
		udp dport 53 quota over 5 mbytes drop
	}
}
table inet other {
	chain c {
		ip6 daddr ::1 meta l4proto tcp reject with tcp reset
	}
}
`)
	made, err := command.CombinedOutput()
	require.NoError(t, err, string(made))
	out.Reset()
	require.NoError(t, host.Do(func() error { return Dump(&out) }))
	got := out.String()
	for _, text := range []string{
		`table ip "web" `, `table inet "other" `, `chain ip "web" "nat" `, `rule ip "web" "first" `, `set ip "web" "sources" `, `set ip "web" "backends" `,
		"\timmediate{Register=1 Data=0a010203}\n", `lookup{`, `SetName="sources"`, "\tverdict{Kind=", "\tfib{", "\tcounter{", "reject{", "\tquota{",
		"elements ip \"web\" \"sources\"\n\tc0000207 ", "\t0050 : goto \"first\" ",
	} {
		require.Contains(t, got, text)
	}
	full := errors.New("full")
	require.ErrorIs(t, host.Do(func() error { return Dump(failing{full}) }), full)
}

// failing fails every write.
type failing struct{ err error }

// Write implements io.Writer.
func (f failing) Write([]byte) (int, error) { return 0, f.err }
