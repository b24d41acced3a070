// These tests prove which programmer a node chooses and why, that the probes before the choice
// leave nothing in a real kernel, and that traffic is accepted where the FORWARD chain drops it.
package app

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/programmer/printer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/testenv"
)

// TestChoice asserts which programmer a node uses, depending on what works there, and that the
// reason is given.
func TestChoice(t *testing.T) {
	for _, c := range []struct {
		wanted   string
		fallback bool
		has      string
		gets     string // empty means an error
		reason   string
		warns    bool
	}{
		{"auto", true, "nftables iptables ipvs", "nftables", "--programmer=auto, and the kernel supports it", false},
		{"auto", false, "iptables", "iptables", "--programmer=auto, but nftables cannot be used: no nftables here; nor this", true},
		{"auto", true, "", "", "--programmer=auto: nftables cannot be used: no nftables here\nnor this\niptables cannot be used", false},
		{"nftables", true, "nftables iptables", "nftables", "--programmer=nftables", false},
		{"nftables", true, "iptables", "iptables", "--programmer=nftables, but nftables cannot be used: no nftables here", true},
		{"nftables", false, "iptables", "", "set --programmer-fallback to use another programmer: iptables", false},
		{"iptables", true, "nftables iptables", "iptables", "--programmer=iptables", false},
		{"iptables", true, "nftables", "", "iptables cannot be used", false},
		{"ipvs", false, "ipvs", "ipvs", "--programmer=ipvs", false},
		{"ipvs", true, "nftables iptables", "nftables", "--programmer=ipvs, but ipvs cannot be used: no ipvs here", true},
		{"ipvs", true, "iptables", "iptables", "ipvs cannot be used: no ipvs here; nor this; nftables cannot be used", true},
		{"ipvs", false, "nftables", "", "another programmer: nftables, iptables", false},
		{"printer", true, "printer", "printer", "--programmer=printer", false},
	} {
		t.Run(fmt.Sprint(c.wanted, " ", c.fallback, " of ", c.has), func(t *testing.T) {
			var log bytes.Buffer
			got, err := choose(t.Context(), c.wanted, c.fallback, slog.New(slog.NewTextHandler(&log, nil)), func(name string) (programmer.Programmer, error) {
				if !slices.Contains(strings.Fields(c.has), name) {
					return nil, errors.Join(fmt.Errorf("no %s here", name), errors.New("nor this"))
				}
				return printer.New(&log), nil
			})
			require.Equal(t, c.warns, strings.Contains(log.String(), "level=WARN"), &log)
			if c.gets == "" {
				require.ErrorContains(t, err, c.reason)
				return
			}
			require.NoError(t, err)
			require.Equal(t, c.gets, got.name)
			require.Contains(t, got.reason, c.reason)
			require.NotContains(t, got.reason, "\n")
			registry := prometheus.NewRegistry()
			got.observe(registry)
			require.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(fmt.Sprintf(
				"# HELP slicecast_agent_programmer_info Always 1, with the programmer in use and the reason for its choice as labels.\n# TYPE slicecast_agent_programmer_info gauge\n"+
					"slicecast_agent_programmer_info{programmer=%q,reason=%q} 1\n", got.name, got.reason))))
		})
	}
}

// TestPassingErrors asserts that an error that says nothing about the kernel does not make a node
// use another programmer, unless it lasts, and that the log says so.
func TestPassingErrors(t *testing.T) {
	for _, c := range []struct {
		err      error
		fails    int // how often the probe of nftables fails
		gets     string
		attempts int
	}{
		{unix.ENOBUFS, 3, "nftables", 4},
		{&netlink.Error{Errno: unix.EINTR}, probeAttempts - 1, "nftables", probeAttempts},
		{fmt.Errorf("open a socket: %w", os.NewSyscallError("socket", unix.EMFILE)), 1, "nftables", 2},
		{unix.ENOMEM, 1000, "iptables", probeAttempts},
		{unix.EOPNOTSUPP, 1, "iptables", 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			var log bytes.Buffer
			logger := slog.New(slog.NewTextHandler(&log, nil))
			attempts := map[string]int{}
			got, err := choose(t.Context(), "auto", true, logger, func(name string) (programmer.Programmer, error) {
				return patiently(t.Context(), logger, name, func() (programmer.Programmer, error) {
					if attempts[name]++; name == "nftables" && attempts[name] <= c.fails {
						return nil, c.err
					}
					return printer.New(&log), nil
				})
			})
			require.NoError(t, err)
			require.Equal(t, c.gets, got.name, c.err)
			require.Equal(t, c.attempts, attempts["nftables"], c.err)
			require.Equal(t, c.gets == "iptables", strings.Contains(log.String(), "Using another programmer"))
			require.Equal(t, c.attempts > 1, strings.Contains(log.String(), "trying again"))
		})
	}
}

// TestStopWhileAProbeIsRepeated asserts that an agent that is stopped while it waits to probe again
// ends at once, and tries no other programmer.
func TestStopWhileAProbeIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		logger := slog.New(slog.DiscardHandler)
		var tried []string
		start := time.Now()
		got, err := choose(ctx, programmerAuto, true, logger, func(name string) (programmer.Programmer, error) {
			return patiently(ctx, logger, name, func() (programmer.Programmer, error) {
				tried = append(tried, name)
				cancel()
				return nil, unix.ENOBUFS
			})
		})
		require.ErrorIs(t, err, context.Canceled)
		require.Nil(t, got)
		require.Equal(t, []string{"nftables"}, tried)
		require.Zero(t, time.Since(start))
	})
}

// TestProbesLeaveNothing asserts that the probes that choose a programmer leave nothing in the
// kernel.
func TestProbesLeaveNothing(t *testing.T) {
	node := testenv.NewNetwork(t).AddNode("a")
	state := func() (all string) {
		for _, c := range []string{"nft list ruleset", "ip link", "ip addr", "cat /proc/self/net/ip_tables_names"} {
			words := strings.Fields(c)
			out, err := node.Run(t.Context(), words[0], words[1:]...)
			require.NoError(t, err)
			all += out
		}
		return all
	}
	before := state()
	for _, wanted := range []string{"auto", "iptables", "ipvs"} {
		o := parse(t, "--source=kube", "--programmer="+wanted, "--iptables-variant=nft")
		require.NoError(t, node.Do(func() error {
			got, err := o.choose(t.Context(), slog.New(slog.DiscardHandler), nil)
			if err != nil {
				return err
			}
			if wanted == programmerIPVS && got.name != wanted { // this machine may lack IPVS
				require.Contains(t, got.reason, "--programmer=ipvs, but ipvs cannot be used: this node has no IPVS (kernel module ip_vs)")
				wanted = programmerNFTables
			}
			require.Equal(t, candidates[wanted][0], got.name)
			return nil
		}))
	}
	require.Equal(t, before, state())
}

// TestForwardDrops covers a node whose FORWARD chain drops what iptables rules do not accept. Every
// programmer has to add rules that accept the traffic.
func TestForwardDrops(t *testing.T) {
	node := testenv.NewNetwork(t).AddNode("a")
	run := func(words ...string) string {
		t.Helper()
		out, err := node.Run(t.Context(), words[0], words[1:]...)
		require.NoError(t, err)
		return out
	}
	start := func() {
		t.Helper()
		o := parse(t, "--source=kube", "--programmer=nftables", "--iptables-masquerade-bit=15")
		require.NoError(t, node.Do(func() error {
			p, err := o.choose(t.Context(), slog.New(slog.DiscardHandler), nil)
			if err != nil {
				return err
			}
			return p.Replace(t.Context(), view.State{})
		}))
	}
	run("iptables-nft", "-P", "FORWARD", "DROP")
	start()
	saved := run("iptables-nft-save")
	require.Contains(t, saved, "-A FORWARD -j SLICECAST-FORWARD\n")
	require.Contains(t, saved, "-A SLICECAST-FORWARD -m mark --mark 0x8000/0x8000 -j ACCEPT\n")
	require.NotContains(t, run("ip6tables-nft-save"), "SLICECAST")
	run("iptables-nft", "-P", "FORWARD", "ACCEPT")
	start()
	require.NotContains(t, run("iptables-nft-save"), "SLICECAST")
}
