// These tests prove how the size and the timeouts of the connection tracking table follow from the
// settings. Those of a network namespace are written to a real kernel, and those of the machine to
// files in its place.
package conntrack

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestTableSize(t *testing.T) {
	for name, c := range map[string]struct {
		settings Settings
		cpus     int
		want     int
	}{
		"left as it is":             {Settings{Min: 131072}, 8, 0},
		"by CPUs":                   {Settings{MaxPerCore: 32768, Min: 131072}, 8, 262144},
		"at least":                  {Settings{MaxPerCore: 32768, Min: 131072}, 2, 131072},
		"at most":                   {Settings{MaxPerCore: 32768, Min: 131072}, 256, 1 << 20},
		"more only where asked for": {Settings{MaxPerCore: 1, Min: 2 << 20}, 256, 2 << 20},
	} {
		require.Equal(t, c.want, c.settings.max(c.cpus), name)
	}
}

func TestCountCPUs(t *testing.T) {
	for list, want := range map[string]int{"0": 1, "0-3": 4, "0-3,8,10-11": 7} {
		got, ok := countCPUs(list)
		require.True(t, ok, list)
		require.Equal(t, want, got, list)
	}
	for _, list := range []string{"", "a", "0-", "3-1", "0,"} {
		_, ok := countCPUs(list)
		require.False(t, ok, list)
	}
	require.Positive(t, cpus())
}

var settings = Settings{
	MaxPerCore: 32768, Min: 131072, TCPEstablishedTimeout: 24 * time.Hour, TCPCloseWaitTimeout: time.Hour,
	UDPTimeout: 40 * time.Second, UDPStreamTimeout: 200 * time.Second, TCPBeLiberal: true,
}

// TestSettingsOfTheKernel asserts that Apply sets what a network namespace has of its own, and
// leaves what belongs to the machine.
func TestSettingsOfTheKernel(t *testing.T) {
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	const procfs = "/proc/sys/net/netfilter/"
	size, err := read(procfs + "nf_conntrack_max")
	require.NoError(t, err)
	// This is the kernel's default.
	require.NoError(t, os.WriteFile(procfs+"nf_conntrack_tcp_timeout_established", []byte("432000\n"), 0o600))
	require.NoError(t, settings.Apply(logger))
	for name, want := range map[string]int{
		"nf_conntrack_tcp_timeout_established": 86400, "nf_conntrack_tcp_timeout_close_wait": 3600, "nf_conntrack_udp_timeout": 40,
		"nf_conntrack_udp_timeout_stream": 200, "nf_conntrack_tcp_be_liberal": 1, "nf_conntrack_max": size,
	} {
		got, err := read(procfs + name)
		require.NoError(t, err)
		require.Equal(t, want, got, name)
	}
	require.Contains(t, log.String(), "sysctl=net.netfilter.nf_conntrack_tcp_timeout_established from=432000 to=86400")
	log.Reset()
	require.NoError(t, settings.Apply(logger))
	require.NoError(t, Settings{}.Apply(logger))
	require.Empty(t, log.String(), "nothing is to be changed")
}

func TestSettingsOfTheMachine(t *testing.T) {
	write := func(dir string, values map[string]int) {
		for name, value := range values {
			require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(strconv.Itoa(value)+"\n"), 0o600))
		}
	}
	for name, c := range map[string]struct {
		before, after map[string]int
		says          string
	}{
		"raised": {
			map[string]int{"nf_conntrack_max": 65536, "nf_conntrack_buckets": 16384},
			map[string]int{"nf_conntrack_max": 262144, "nf_conntrack_buckets": 65536}, "level=INFO",
		},
		"never lowered": {
			map[string]int{"nf_conntrack_max": 1 << 20, "nf_conntrack_buckets": 1 << 20},
			map[string]int{"nf_conntrack_max": 1 << 20, "nf_conntrack_buckets": 1 << 20}, "",
		},
		"only the smaller one is raised": {
			map[string]int{"nf_conntrack_max": 262145, "nf_conntrack_buckets": 65535},
			map[string]int{"nf_conntrack_max": 262145, "nf_conntrack_buckets": 65536}, "nf_conntrack_buckets",
		},
		"as wanted": {
			map[string]int{"nf_conntrack_max": 262144, "nf_conntrack_buckets": 65536},
			map[string]int{"nf_conntrack_max": 262144, "nf_conntrack_buckets": 65536}, "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			var log bytes.Buffer
			k := sysctls{procfs: t.TempDir(), log: slog.New(slog.NewTextHandler(&log, nil))}
			write(k.procfs, c.before)
			require.NoError(t, Settings{MaxPerCore: 32768, Min: 131072}.apply(k, 8))
			for file, want := range c.after {
				got, err := read(filepath.Join(k.procfs, file))
				require.NoError(t, err)
				require.Equal(t, want, got, file)
			}
			require.Contains(t, log.String(), c.says)
			require.Equal(t, c.says == "", log.Len() == 0)
		})
	}
	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "nf_conntrack_max"), 0o700))
	write(dir, map[string]int{"nf_conntrack_udp_timeout": 30})
	err := settings.apply(sysctls{procfs: dir, log: slog.New(slog.DiscardHandler)}, 8)
	require.ErrorContains(t, err, "net.netfilter.nf_conntrack_max")
	require.ErrorContains(t, err, "net.netfilter.nf_conntrack_tcp_be_liberal")
	require.NotContains(t, err.Error(), "nf_conntrack_udp_timeout:", "the others are set nonetheless")
	got, err := read(filepath.Join(dir, "nf_conntrack_udp_timeout"))
	require.NoError(t, err)
	require.Equal(t, 40, got)
}
