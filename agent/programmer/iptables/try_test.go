// These tests prove that Try finds what New does not ask the kernel for, by family, and leaves no
// rules. The kernel's refusals are made up; everything else is real.
package iptables

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

func TestTry(t *testing.T) {
	for _, variant := range []Variant{NFT, Legacy} {
		var node *testenv.Node
		// lacks is what the kernel lacks for IPv6: the beginning of a program's name, or a target.
		lacks := ""
		var written string
		run := func(ctx context.Context, stdin []byte, name string, args ...string) ([]byte, error) {
			if strings.HasSuffix(name, "-restore") {
				written += string(stdin)
			}
			if lacks != "" && !slices.Contains(args, "--version") && strings.HasPrefix(name, "ip6tables") && (strings.HasPrefix(name, lacks) || bytes.Contains(stdin, []byte(lacks))) {
				return nil, &commandError{name: name, exit: errors.New("exit status 4"), said: lacks + " is not supported"}
			}
			return runCommand(ctx, stdin, name, args...)
		}
		for lacking, want := range map[string]string{"": "", "MASQUERADE": "MASQUERADE is not supported", "-m statistic": "-m statistic is not supported", "ip6tables": "no iptables for IPv6: "} {
			lacks, written = lacking, ""
			node = testenv.NewNetwork(t).AddNode("a") // without tables
			require.NoError(t, node.Do(func() error {
				p, err := newProgrammer(Options{Variant: variant, Log: slog.New(slog.DiscardHandler)}, run)
				require.NoError(t, err, "%s: New does not ask", lacking)
				ports, failed := programmer.Split(p.Try(t.Context()), nil)
				require.Empty(t, ports)
				if want == "" {
					require.Empty(t, failed)
					return nil
				}
				require.Len(t, failed, 1)
				require.ErrorContains(t, failed[model.IPv6], want)
				return nil
			}))
			for _, rule := range []string{"-j MASQUERADE", "-j DNAT", "--ctstate", "-m statistic", "-m comment"} {
				require.Contains(t, written, rule)
			}
			for _, name := range []string{"iptables-", "ip6tables-"} {
				saved, err := node.Run(t.Context(), name+string(variant)+"-save")
				require.NoError(t, err)
				require.NotContains(t, saved, prefix, "nothing is left")
			}
		}
	}
}
