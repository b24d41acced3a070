// These tests prove properties of slots, sizes, policies and labels without a kernel: no gaps, no
// needless moves, exact shares, and names that are different and fit.
package nftables

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

func address(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 80)
}

// TestEdits asserts that slots have no gaps after any change, that nothing moves without need, and
// that both comparisons find the differences.
func TestEdits(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		indices := rapid.SliceOfNDistinct(rapid.IntRange(0, 40), 0, 30, rapid.ID[int])
		var slots []slot
		var before []view.Backend
		for _, i := range indices.Draw(t, "before") {
			slots = append(slots, slotOf(address(i)))
			before = append(before, view.Backend{Address: address(i), Local: i%2 == 0})
		}
		var after []view.Backend
		for _, i := range indices.Draw(t, "after") {
			after = append(after, view.Backend{Address: address(i), Local: rapid.Bool().Draw(t, "local")})
		}
		was, is := view.NewBackends(before...), view.NewBackends(after...)
		local := map[netip.Addr]int{}
		removed, added := compareBackends(was, is, func(a netip.Addr, by int) { local[a] += by })
		places := locate(slots, removed)
		byContent, addedByContent := compareSlots(slots, is)
		require.Equal(t, places, byContent)
		require.Equal(t, added, addedByContent)

		var newcomers []slot
		for _, a := range added {
			newcomers = append(newcomers, slotOf(a))
		}
		changes := edits(slots, places, newcomers)
		require.LessOrEqual(t, len(changes), max(2*len(removed), len(added)))
		for _, e := range changes {
			if e.index < len(slots) {
				require.Equal(t, slots[e.index], e.before)
			} else {
				require.True(t, e.before.empty())
			}
		}
		held := perform(slices.Clone(slots), changes)
		require.Len(t, held, len(after))
		var got []netip.AddrPort
		for _, s := range held {
			got = append(got, s.address())
		}
		slices.SortFunc(got, netip.AddrPort.Compare)
		for i, b := range is.List() {
			require.Equal(t, b.Address, got[i])
		}
		for a, by := range local {
			was := slices.ContainsFunc(before, func(b view.Backend) bool { return b.Local && b.Address.Addr() == a })
			is := slices.ContainsFunc(after, func(b view.Backend) bool { return b.Local && b.Address.Addr() == a })
			require.Equal(t, map[bool]int{true: 1}[is]-map[bool]int{true: 1}[was], by, "%v", a)
		}
	})
}

// TestSizes asserts that all indices of a set are drawn, that most drawn indices have a backend,
// and that every index of the last draw has one.
func TestSizes(t *testing.T) {
	t.Parallel()
	sizes := map[class]bool{}
	for n := 1; n <= maxBackends; n++ {
		c := classOf(n, 0, 0)
		require.True(t, c.valid())
		require.EqualValues(t, 10800, classOf(n, 10800, 0).timeout())
		require.Equal(t, c, classOf(n, 10800, 0)&^timeoutBits)
		sizes[c] = true
		draws := c.draws()
		first, last := int(draws[0]), int(draws[len(draws)-1])
		require.LessOrEqual(t, n, first)
		if n <= exactSize {
			require.Equal(t, []uint32{uint32(n)}, draws)
			continue
		}
		require.Greater(t, 5*n, 4*first)
		require.LessOrEqual(t, last, n)
		require.Len(t, draws, tries+1)
	}
	require.Len(t, sizes, 68, "docs/security.md names this number")
	require.Equal(t, "local-10-affinity-nodeport", pick{local, viaNodePort, classOf(9, 0, 0)}.drawChain())
	require.Equal(t, "cluster-56-part-2", pick{cluster, viaAddress, classOf(50, 0, 1)}.chain())
	names := map[string]class{}
	for part := range uint8(parts) {
		c := classOf(1, 0, part)
		require.True(t, c.valid())
		require.Equal(t, part, c.part())
		require.NotContains(t, names, pick{class: c}.chain())
		names[pick{class: c}.chain()] = c
	}
	require.Zero(t, classOf(0, 10800, 0))
}

// TestTimeouts asserts that there are few timeouts, however often somebody changes one: none is
// shorter than wanted, and none is longer by a tenth.
func TestTimeouts(t *testing.T) {
	t.Parallel()
	seen := map[uint32]bool{}
	for seconds := uint32(1); seconds <= model.MaxAffinitySeconds; seconds++ {
		rounded := roundTimeout(seconds)
		require.GreaterOrEqual(t, rounded, seconds)
		require.Less(t, 10*rounded, 11*seconds+1, seconds)
		require.Equal(t, rounded, roundTimeout(rounded))
		seen[rounded] = true
	}
	require.Len(t, seen, 144, "docs/security.md names this number")
	for _, usual := range []uint32{1, 5, 10, 15, 30, 60, 90, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400} {
		require.True(t, seen[usual], usual)
	}
	require.Zero(t, roundTimeout(0))
	require.EqualValues(t, model.MaxAffinitySeconds, roundTimeout(1<<32-1))
}

// TestPolicies asserts that a policy's number determines its routes, and that no two policies have
// the same chain name.
func TestPolicies(t *testing.T) {
	t.Parallel()
	routes := []view.Route{toReject, toDrop, toCluster, toClusterMasquerade, toLocal, {To: view.Local, Masquerade: true}}
	names := map[string]policy{}
	for _, pods := range routes {
		for _, node := range routes {
			for _, others := range routes {
				for _, sources := range [][]netip.Prefix{nil, {netip.MustParsePrefix("10.0.0.0/8")}} {
					p := policyOf(view.Frontend{Pods: pods, Node: node, Others: others, Sources: sources})
					a, b, c := p.routes()
					require.Equal(t, []view.Route{pods, node, others}, []view.Route{a, b, c})
					require.True(t, p.valid())
					require.NotContains(t, names, p.chain())
					names[p.chain()] = p
				}
			}
		}
	}
}

// TestLabels asserts that labels fit into comments and are still different for different Service
// ports.
func TestLabels(t *testing.T) {
	t.Parallel()
	long := func(last string) view.ServicePortID {
		return serviceID(strings.Repeat("n", 300)+last, model.SCTP, model.IPv6)
	}
	require.NotEqual(t, label(long("a")), label(long("b")))
	for _, id := range []view.ServicePortID{long("a"), serviceID("web", model.TCP, model.IPv4)} {
		comment := label(id) + " " + view.LoadBalancer.String()
		require.LessOrEqual(t, len(comment), nft.MaxComment)
		require.Equal(t, label(id), nameOf(comment))
	}
}
