// These tests prove what the configured addresses of servers resolve to.
package client

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestResolver(t *testing.T) {
	records := map[string][]netip.Addr{
		"a.example": {netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("::ffff:10.0.0.2"), netip.MustParseAddr("fd00::1")},
	}
	r := newResolver([]string{"a.example:1", "10.0.0.9:2", "b.example:3"}, slog.New(slog.DiscardHandler))
	r.lookup = func(_ context.Context, _, host string) ([]netip.Addr, error) {
		if records[host] == nil {
			return nil, errors.New("no such host")
		}
		return records[host], nil
	}
	a := []Server{{Address: "10.0.0.1:1", Name: "a.example"}, {Address: "10.0.0.2:1", Name: "a.example"},
		{Address: "[fd00::1]:1", Name: "a.example"}, {Address: "10.0.0.9:2"}}
	found, err := r.servers(t.Context())
	require.ErrorContains(t, err, "server b.example:3: no such host")
	require.Equal(t, a, found, "those that are known all the same")

	// Each call looks up the names again. If a lookup fails, the last result counts.
	records["b.example"], records["a.example"] = []netip.Addr{netip.MustParseAddr("10.0.0.3")}, nil
	found, err = r.servers(t.Context())
	require.NoError(t, err)
	require.Equal(t, append(a, Server{Address: "10.0.0.3:3", Name: "b.example"}), found)
}

func TestServerNameOfAll(t *testing.T) {
	for _, test := range []struct {
		configured string
		addresses  []string
		want       string
	}{
		{"", nil, ""},
		{"x", nil, "x"},
		{"x", []string{"a.example:1"}, "x"},
		{"", []string{"a.example:1", "a.example:2"}, "a.example"},
		{"", []string{"a.example:1", "b.example:1"}, ""},
		{"", []string{"a.example:1", "10.0.0.1:1"}, ""},
		{"", []string{"10.0.0.1:1"}, ""},
		{"", []string{"[fd00::1]:1"}, ""},
		{"", []string{"a.example"}, ""},
	} {
		require.Equal(t, test.want, ServerName(test.configured, test.addresses), "%+v", test)
	}
}
