// TestRepair proves that Services work again, with each programmer, after another program has
// removed all rules of the node.
package moving

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
)

// repairTimeout is much longer than a repair takes on a slow machine, but much shorter than the
// hour after which an agent programs everything again even if nothing changed.
const repairTimeout = 2 * time.Minute

// TestRepair removes all rules of the node twice, like a firewall that restarts, and requires that
// all ways to the Services work again. Each way leads to a pod on another node, so that none works
// without rules, not even if IPVS still translates.
func TestRepair(t *testing.T) {
	names := strings.FieldsFunc(*programmers, func(r rune) bool { return r == ',' || r == ':' })
	slices.Sort(names)
	for _, programmer := range slices.Compact(names) {
		t.Run(programmer, func(t *testing.T) {
			w := newWorld(t)
			web := newService("web", 1, w.pods[1])
			w.write(web)
			w.start(programmer, "--node-name=a", "--source=file", "--manifests="+w.dir)
			w.requireServed(web, settleTimeout)
			for range 2 {
				w.removeRules(programmer)
				w.requireServed(web, repairTimeout)
			}
		})
	}
}

// removeRules removes all rules of the node in the place where a programmer has its own.
func (w *world) removeRules(programmer string) {
	w.t.Helper()
	commands := []string{"nft flush ruleset"}
	if programmer == "iptables-legacy" {
		commands = []string{"iptables-legacy -t nat -F", "iptables-legacy -t filter -F", "ip6tables-legacy -t nat -F", "ip6tables-legacy -t filter -F"}
	}
	for _, c := range commands {
		words := strings.Fields(c)
		_, err := w.node.Run(w.t.Context(), words[0], words[1:]...)
		require.NoError(w.t, err)
	}
}

// requireServed waits until connections on all ways to a Service are answered.
func (w *world) requireServed(s service, timeout time.Duration) {
	w.t.Helper()
	ways := slices.DeleteFunc(w.ways(s), func(way way) bool { return way.proto != testenv.TCP })
	testenv.Eventually(w.t, timeout, func() error {
		for _, way := range ways {
			// A new port for each attempt, because the kernel does not translate a connection whose
			// first packet arrived before the rules.
			options := testenv.ProbeOptions{Timeout: 2 * time.Second, Source: newPorts.next()}
			if r := way.from.Probe(w.t.Context(), way.proto, way.to, 1, options); !r.All(testenv.Answered) {
				return fmt.Errorf("%s: %s", way, r)
			}
		}
		return nil
	})
}
