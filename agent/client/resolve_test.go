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
	r := newResolver([]string{"a.example:1", "10.0.0.9:2", "b.example:3"}, "", slog.New(slog.DiscardHandler))
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

	// DNS is asked each time; where it can't tell, what it said before counts.
	records["b.example"], records["a.example"] = []netip.Addr{netip.MustParseAddr("10.0.0.3")}, nil
	found, err = r.servers(t.Context())
	require.NoError(t, err)
	require.Equal(t, append(a, Server{Address: "10.0.0.3:3", Name: "b.example"}), found)

	r.name = "server.example"
	found, err = r.servers(t.Context())
	require.NoError(t, err)
	require.Equal(t, []Server{{Address: "10.0.0.9:2", Name: "server.example"}, {Address: "10.0.0.3:3", Name: "server.example"}}, found[3:])
}
