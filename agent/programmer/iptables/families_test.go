// These tests prove that an IP family that is missing or fails is reported, and does not keep the
// other from being programmed. The kernel's refusals are made up; everything else is real.
package iptables

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// TestFamilyMissing asserts that a machine without IPv6 programs IPv4 and logs what it leaves out.
func TestFamilyMissing(t *testing.T) {
	for _, test := range []struct {
		variant Variant
		said    string
	}{
		{NFT, "can't initialize ip6tables table `nat': Address family not supported by protocol"},
		{Legacy, "ip6tables-legacy-save v1.8.9 (legacy): Cannot initialize: Table does not exist (do you need to insmod?)"},
		{Legacy, "ip6tables-legacy-save v1.8.9 (legacy): Cannot initialize: ip6tables who? (do you need to insmod?)"},
	} {
		t.Run(test.said, func(t *testing.T) { testFamilyMissing(t, test.variant, test.said) })
	}
	for err, says := range map[error]string{
		// A temporary failure must not count as a missing family.
		errors.New("no such kernel"): "run as root",
		&commandError{name: "iptables-save", exit: errors.New("exit status 3"), said: "Table does not exist (do you need to insmod?)"}: "load its kernel modules",
	} {
		_, got := newProgrammer(Options{}, func(ctx context.Context, _ []byte, name string, args ...string) ([]byte, error) {
			if slices.Contains(args, "--version") {
				return runCommand(ctx, nil, name, args...)
			}
			return nil, err
		})
		require.ErrorIs(t, got, err)
		require.ErrorContains(t, got, says)
	}
}

// TestPrimaryFamilyMissing asserts that a node without its primary family does not count as
// programmed.
func TestPrimaryFamilyMissing(t *testing.T) {
	c := newCluster(t, Options{})
	run := func(ctx context.Context, stdin []byte, name string, args ...string) ([]byte, error) {
		if strings.HasPrefix(name, "iptables") && !slices.Contains(args, "--version") {
			return nil, &commandError{name: name, exit: errors.New("exit status 3"), said: "Table does not exist (do you need to insmod?)"}
		}
		return runCommand(ctx, stdin, name, args...)
	}
	require.NoError(t, c.a.Do(func() error {
		p, err := newProgrammer(Options{Log: slog.New(slog.DiscardHandler)}, run)
		require.NoError(t, err)
		require.Equal(t, []model.Family{model.IPv6}, p.Families())
		c.set(c.web("web", model.IPv4, 1, 0), c.web("web", model.IPv6, 1, 0))
		for primary, want := range map[model.Family][]model.Family{model.IPv4: {model.IPv4}, model.IPv6: nil} {
			c.state.Node.Primary = primary
			ports, failed := programmer.Split(p.Replace(t.Context(), c.state), p.Families())
			require.Empty(t, ports)
			require.Equal(t, want, slices.Sorted(maps.Keys(failed)))
			saved, err := p.families[model.IPv6].tool.save(t.Context(), "-t", "nat")
			require.NoError(t, err)
			require.Contains(t, string(saved), "/web:", "the other family goes on")
		}
		return p.Cleanup(t.Context())
	}))
}

func testFamilyMissing(t *testing.T, variant Variant, said string) {
	// The kernel must not have the tables.
	c := newCluster(t, Options{Variant: map[Variant]Variant{NFT: Legacy, Legacy: NFT}[variant]})
	var log bytes.Buffer
	run := func(ctx context.Context, stdin []byte, name string, args ...string) ([]byte, error) {
		if strings.HasPrefix(name, "ip6tables") && !slices.Contains(args, "--version") {
			return nil, &commandError{name: name, exit: errors.New("exit status 3"), said: said}
		}
		return runCommand(ctx, stdin, name, args...)
	}
	require.NoError(t, c.a.Do(func() error {
		p, err := newProgrammer(Options{Variant: variant, Log: slog.New(slog.NewTextHandler(&log, nil))}, run)
		if err != nil {
			return err
		}
		require.Equal(t, 1, strings.Count(log.String(), "\n"), log.String())
		require.Contains(t, log.String(), "IPv6")
		require.Equal(t, []model.Family{model.IPv4}, p.Families())
		c.set(c.web("web", model.IPv4, 1, 0), c.web("web", model.IPv6, 1, 0))
		for _, err := range []error{
			p.Replace(t.Context(), c.state),
			p.Apply(t.Context(), []view.Change{
				{After: c.web("new", model.IPv4, 2, 0)}, {After: c.web("new", model.IPv6, 2, 0)}, {Before: c.web("old", model.IPv6, 2, 0)},
			}),
		} {
			require.NoError(t, err)
		}
		saved, err := p.families[model.IPv4].tool.save(t.Context(), "-t", "nat")
		require.NoError(t, err)
		require.Contains(t, string(saved), "/new:")
		return p.Cleanup(t.Context())
	}))
}

// TestFamilyFails asserts that a failed IP family does not keep the other one from being programmed
// and watched, and that it is programmed as soon as it works again.
func TestFamilyFails(t *testing.T) {
	c := newCluster(t, Options{})
	require.NoError(t, newInHost(t, c.a.Host, Options{Variant: Legacy}).Replace(t.Context(), c.state))
	broken := ""
	var log bytes.Buffer
	run := func(ctx context.Context, stdin []byte, name string, args ...string) ([]byte, error) {
		if broken != "" && strings.HasPrefix(name, broken) {
			return nil, &commandError{name: name, exit: errors.New("exit status 4"), said: "out of order"}
		}
		return runCommand(ctx, stdin, name, args...)
	}
	require.NoError(t, c.a.Do(func() error {
		p, err := newProgrammer(Options{Variant: NFT, Log: slog.New(slog.NewTextHandler(&log, nil))}, run)
		require.NoError(t, err)
		leftOut := func(err error, families ...model.Family) {
			t.Helper()
			ports, failed := programmer.Split(err, nil)
			require.Empty(t, ports)
			require.Equal(t, families, slices.Sorted(maps.Keys(failed)))
			for _, why := range failed {
				require.ErrorContains(t, why, "out of order")
			}
		}
		saved := func(name string) string {
			out, err := runCommand(t.Context(), nil, name+"-save", "-t", "nat")
			require.NoError(t, err)
			return string(out)
		}
		c.set(c.web("web", model.IPv4, 1, 0), c.web("web", model.IPv6, 1, 0))

		broken = "ip6tables-nft"
		require.Equal(t, []model.Family{model.IPv4, model.IPv6}, p.Families())
		leftOut(p.Replace(t.Context(), c.state), model.IPv6)
		require.Empty(t, log.String(), "it is for the caller to say")
		require.Contains(t, saved("iptables-nft"), "/web:")
		require.NoError(t, p.RetireOtherVariant(t.Context()))
		require.NotContains(t, saved("iptables-legacy"), ChainPrefix)
		require.Contains(t, saved("ip6tables-legacy"), ChainPrefix, "as long as there is nothing else")

		broken = ""
		require.NoError(t, p.Replace(t.Context(), c.state))
		require.NotContains(t, saved("ip6tables-legacy"), ChainPrefix)

		broken = "ip6tables-nft"
		change := []view.Change{{After: c.web("new", model.IPv4, 2, 0)}, {After: c.web("new", model.IPv6, 2, 0)}}
		leftOut(p.Apply(t.Context(), change), model.IPv6)
		c.set(change[0].After, change[1].After)
		delete(c.state.Ports, serviceID("web", model.TCP, model.IPv6))
		leftOut(p.Replace(t.Context(), c.state), model.IPv6)
		require.Contains(t, saved("iptables-nft"), "/new:")
		require.NoError(t, p.Apply(t.Context(), []view.Change{{After: c.web("newer", model.IPv4, 3, 0)}}))
		require.Contains(t, saved("iptables-nft"), "/newer:")
		_, err = runCommand(t.Context(), nil, "iptables-nft", "-t", "nat", "-F", vipsChain)
		require.NoError(t, err)
		reason, err := p.readBack(t.Context())
		require.NoError(t, err)
		require.Contains(t, reason, "IPv4: table nat: the chain SLICECAST-VIPS has changed")

		broken = "ip"
		leftOut(p.Replace(t.Context(), c.state), model.IPv4, model.IPv6)
		broken = ""
		require.NoError(t, p.Replace(t.Context(), c.state))
		require.NoError(t, p.Apply(t.Context(), []view.Change{{After: c.web("newer", model.IPv6, 3, 0)}}))
		require.Contains(t, saved("ip6tables-nft"), "/newer:")
		require.NotContains(t, saved("ip6tables-nft"), "/web:")
		return nil
	}))
}
