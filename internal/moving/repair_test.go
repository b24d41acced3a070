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

// repairTimeout is many times what a slow machine takes, and far less than the hour after which an agent programs everything anew without
// being told.
const repairTimeout = 30 * time.Second

// TestRepair has somebody remove all rules of the node, twice as one who restarts a firewall does, and requires that Services are
// there again by all ways. Each way is to a pod of another node, so that none does without rules, also where IPVS goes on translating.
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

// removeRules removes all rules of the node where a programmer has its own.
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

// requireServed waits until connections by all ways to a Service are answered.
func (w *world) requireServed(s service, timeout time.Duration) {
	w.t.Helper()
	ways := slices.DeleteFunc(w.ways(s), func(way way) bool { return way.proto != testenv.TCP })
	testenv.Eventually(w.t, timeout, func() error {
		for _, way := range ways {
			// What is on its way before there are rules stays untranslated when it is sent again.
			options := testenv.ProbeOptions{Timeout: 2 * time.Second, Source: newPorts.next()}
			if r := way.from.Probe(w.t.Context(), way.proto, way.to, 1, options); !r.All(testenv.Answered) {
				return fmt.Errorf("%s: %s", way, r)
			}
		}
		return nil
	})
}
