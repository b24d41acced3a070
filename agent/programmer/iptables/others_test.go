// These tests prove that others may have rules in the tables of iptables-nft that iptables'
// programs do not print or fail at. Services are programmed and rules are removed all the same, and
// the rules of others stay.
package iptables

import (
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// native are rules of others in tables of iptables-nft, as nft adds them. With some,
// iptables-nft-save prints a comment only, with others it fails.
var native = map[string][]string{
	"not printed": {
		"nat PREROUTING ip daddr 192.0.2.1 tcp dport { 8443, 9443 } dnat to 10.1.1.1:443",
		"filter FORWARD ct mark set 7",
	},
	"fails": {
		"nat POSTROUTING ip saddr 203.0.113.7 meta mark set 0x7",
		"filter FORWARD ip saddr 203.0.113.7 meta mark set 0x7",
		"filter INPUT ip saddr 203.0.113.7 meta skuid 7 accept",
	},
	"in a chain of their own": {"nat OTHER fib daddr type local counter", "filter OTHER meta priority set 1:2"},
}

// addNative adds rules of others, for both families.
func (c *cluster) addNative(t *testing.T, rules []string) {
	t.Helper()
	for _, rule := range rules {
		for family, program := range map[string]string{"ip": "iptables-nft", "ip6": "ip6tables-nft"} {
			words := strings.Fields(rule)
			creates := []string{"-t", words[0], "-A", words[1], "-m", "comment", "--comment", "others"}
			if words[1] == "OTHER" {
				creates = []string{"-t", words[0], "-N", words[1]}
			}
			_, err := c.a.Run(t.Context(), program, creates...)
			require.NoError(t, err)
			add := rule
			if family == "ip6" {
				add = strings.NewReplacer("ip saddr 203.0.113.7", "ip6 saddr 2001:db8::7", "ip daddr 192.0.2.1", "ip6 daddr 2001:db8::1",
					"10.1.1.1:443", "[2001:db8::2]:443").Replace(rule)
			}
			_, err = c.a.Run(t.Context(), "nft", "add", "rule", family, add)
			require.NoError(t, err, rule)
		}
	}
}

// nftRules returns the rules of a family's nat and filter tables as nft lists them.
func (c *cluster) nftRules(t *testing.T) (rules string) {
	t.Helper()
	for _, family := range []string{"ip", "ip6"} {
		for _, table := range []string{"nat", "filter"} {
			out, err := c.a.Run(t.Context(), "nft", "--stateless", "list", "table", family, table)
			require.NoError(t, err)
			rules += out
		}
	}
	return rules
}

// TestNativeRules asserts that Services are programmed and changed beside rules that iptables does
// not know, by an agent that runs and by one that starts, that what others break is noticed and
// repaired, and that everything can be removed.
func TestNativeRules(t *testing.T) {
	for name, rules := range native {
		for _, before := range []bool{true, false} {
			t.Run(name+map[bool]string{true: " before", false: " later"}[before], func(t *testing.T) {
				t.Parallel()
				c := newCluster(t, Options{Variant: NFT})
				clean := ""
				if before {
					c.addNative(t, rules)
					clean = c.nftRules(t)
					c.inHost = newInHost(t, c.a.Host, c.options)
				}
				require.Equal(t, families, c.inHost.Families())
				for _, family := range families {
					for i := range byte(20) {
						c.set(c.web(string('a'+rune(i)), family, i, 0, 1), none(string('A'+rune(i)), family, 100+i))
					}
				}
				require.NoError(t, c.inHost.Replace(t.Context(), c.state))
				if !before {
					c.addNative(t, rules)
				}
				leads := func(last byte, backends ...string) {
					t.Helper()
					for _, family := range families {
						tries := 20 * len(backends) // so that chance misses none of two
						r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(family, last), servicePort), tries, patient)
						for backend := range r.Backends() {
							require.Contains(t, backends, backend, "%v", r)
						}
						require.Len(t, r.Backends(), len(backends), "%v", r)
					}
				}
				leads(1, "pod0", "pod1")
				var changes []view.Change
				for _, family := range families {
					changes = append(changes, view.Change{Before: c.web("b", family, 1, 0, 1), After: c.web("b", family, 1, 2)})
					c.set(changes[len(changes)-1].After)
				}
				require.NoError(t, c.inHost.Apply(t.Context(), changes))
				leads(1, "pod2")
				require.NoError(t, c.inHost.Replace(t.Context(), c.state))
				c.requireFresh(t)

				// What others break is noticed, and repaired by the agent that runs or by another one.
				for i, broken := range []string{
					"flush chain ip nat SLICECAST-SERVICES", "flush chain ip nat OUTPUT", "flush chain ip6 filter OUTPUT",
					"add rule ip nat SLICECAST-VIPS ip daddr 10.96.0.1 tcp dport { 80, 81 } drop",
					"add chain ip nat SLICECAST-OLD; insert rule ip nat PREROUTING jump SLICECAST-OLD",
					"insert rule ip nat PREROUTING ip saddr 203.0.113.9 meta mark set 0x9; flush chain ip nat OUTPUT",
				} {
					require.NoError(t, c.a.Do(func() error {
						reason, err := c.inHost.readBack(t.Context())
						require.Empty(t, reason)
						return err
					}))
					_, err := c.a.Run(t.Context(), "nft", broken)
					require.NoError(t, err)
					require.NoError(t, c.a.Do(func() error {
						reason, err := c.inHost.readBack(t.Context())
						require.NotEmpty(t, reason, broken)
						return err
					}))
					if i%2 == 1 {
						c.inHost = newInHost(t, c.a.Host, c.options)
					}
					require.NoError(t, c.inHost.Replace(t.Context(), c.state))
					require.Equal(t, 4, strings.Count(c.nftRules(t), "jump SLICECAST-SERVICES"), broken)
					require.NotContains(t, c.nftRules(t), "OLD")
					c.requireFresh(t)
					leads(1, "pod2")
				}
				for _, remove := range []func() error{
					func() error { return c.inHost.Cleanup(t.Context()) },
					func() error {
						return c.a.Do(func() error { return Retire(t.Context(), Options{Log: slog.New(slog.DiscardHandler)}) })
					},
					func() error {
						legacy := newInHost(t, c.a.Host, Options{Variant: Legacy})
						require.NoError(t, legacy.Replace(t.Context(), c.state))
						serves, err := false, error(nil)
						require.NoError(t, c.a.Do(func() error {
							serves, err = legacy.OtherVariantServes(model.IPv6)
							return err
						}))
						require.True(t, serves)
						require.NoError(t, legacy.RetireOtherVariant(t.Context()))
						return legacy.Cleanup(t.Context())
					},
				} {
					require.NoError(t, c.inHost.Replace(t.Context(), c.state))
					require.NoError(t, remove())
					after := c.nftRules(t)
					require.NotContains(t, after, ChainPrefix)
					for line := range strings.Lines(clean) {
						if !strings.Contains(line, "dnat to 10.1.1.1") { // flushed above
							require.Contains(t, after, line)
						}
					}
				}
			})
		}
	}
}

// TestWithoutPrograms asserts that Cleanup without iptables' programs removes what nf_tables holds,
// and does not claim to have removed what only the legacy programs can.
func TestWithoutPrograms(t *testing.T) {
	c := newCluster(t, Options{Variant: NFT})
	c.set(c.web("web", model.IPv4, 1, 0))
	path := os.Getenv("PATH")
	without := func(f func() error) (err error) {
		t.Setenv("PATH", t.TempDir())
		defer t.Setenv("PATH", path)
		return c.a.Do(f)
	}
	require.NoError(t, c.inHost.Replace(t.Context(), c.state))
	for _, remove := range []func() error{
		func() error { return Cleanup(t.Context()) },
		func() error { return Retire(t.Context(), Options{Log: slog.New(slog.DiscardHandler)}) },
	} {
		require.NoError(t, without(remove))
		require.NotContains(t, c.nftRules(t), ChainPrefix)
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
	}
	require.NoError(t, c.inHost.Cleanup(t.Context()))
	legacy := newInHost(t, c.a.Host, Options{Variant: Legacy})
	require.NoError(t, legacy.Replace(t.Context(), c.state))
	require.ErrorContains(t, without(func() error { return Cleanup(t.Context()) }), "clean up with iptables-legacy")
	require.NoError(t, c.a.Do(func() error { return Cleanup(t.Context()) }))
	require.NoError(t, without(func() error { return Cleanup(t.Context()) }), "others' tables are no reason")
	require.False(t, slices.Contains(strings.Fields(legacy.rules(t, model.IPv4, Legacy)), ChainPrefix))
}
