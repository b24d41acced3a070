package client

import (
	"cmp"
	"context"
	"slices"

	"github.com/cespare/xxhash/v2"
)

// Static gives always the same servers.
func Static(servers ...string) func(context.Context) ([]string, error) {
	return func(context.Context) ([]string, error) { return servers, nil }
}

// preference orders servers by rendezvous hashing: each node has its own order, all servers come first for the same
// share of nodes, and one that goes moves only its own nodes.
func preference(servers []string, node string) []string {
	weight := func(server string) uint64 { return xxhash.Sum64String(node + "\x00" + server) }
	return slices.SortedFunc(slices.Values(servers), func(a, b string) int {
		return cmp.Or(cmp.Compare(weight(b), weight(a)), cmp.Compare(a, b))
	})
}
