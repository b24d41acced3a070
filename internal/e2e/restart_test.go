// This test proves that killing agents, the server or the API server breaks no connection and
// changes no rule, and that changes made meanwhile arrive afterwards.
package e2e

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
)

// TestRestarts kills agents, the server and the API server. Established connections must survive
// and new ones must succeed all the time. Changes made in the meantime must arrive after the
// restart.
func TestRestarts(t *testing.T) {
	c := newCluster(t)
	pods := c.Deployment("web", 4)
	web := c.Service("web", selecting("web", tcp("tcp", 80, onPodPort()), udp("udp", 80, onPodPort())))
	c.RequireAnswers(web, 80, pods...)
	o := c.Observe()
	connections := c.Connect(web, 80)
	prober := c.ProbeAllTheTime(web, 80)
	// requireKept requires that the nodes still do what they did before something was killed.
	before := c.saved()
	requireKept := func() {
		t.Helper()
		require.Equal(t, before, c.saved())
		connections.RequireAlive()
	}
	// change toggles the readiness of one pod and returns the pods that are then ready.
	down := false
	change := func() []*pod {
		t.Helper()
		down = !down
		c.SetReady(pods[3], !down)
		if down {
			return pods[:3]
		}
		return pods
	}
	requireArrived := func(ready []*pod) {
		t.Helper()
		c.RequireAnswers(web, 80, ready...)
		o.AwaitTruth()
		connections.RequireAlive()
		before = c.saved()
	}

	t.Log("the agents are killed and nothing changes")
	writes := c.watchWrites()
	c.killAgents()
	requireKept()
	c.startAgents()
	writes.RequireNone()
	requireKept()

	t.Log("the agents are killed and something changes")
	c.killAgents()
	ready := change()
	o.AwaitTruth()
	requireKept()
	c.startAgents()
	requireArrived(ready)

	t.Log("the agents are killed while they are programming")
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for range 12 {
		c.killAgents()
		ready = change()
		c.startAgentsSoon()
		select {
		case <-time.After(time.Duration(random.IntN(300)) * time.Millisecond):
		case <-t.Context().Done():
		}
	}
	requireArrived(ready)

	t.Log("the server is killed and something changes")
	c.server.Kill()
	ready = change()
	c.AwaitAPI(web, 80, ready)
	requireKept()
	c.server.Start()
	requireArrived(ready)

	t.Log("the server is killed and the agents start without it")
	c.server.Kill()
	c.killAgents()
	ready = change()
	c.AwaitAPI(web, 80, ready)
	for _, n := range c.nodes() {
		n.agent.Start()
		n.agent.AwaitLine("Cannot reach the server")
	}
	requireKept()
	c.server.Start()
	requireArrived(ready)

	t.Log("the API server is killed")
	require.NoError(t, c.cp.APIServer.Kill())
	requireKept()
	require.NoError(t, c.cp.APIServer.Start(t.Context()))
	requireArrived(change())

	t.Log("everything is killed")
	require.NoError(t, c.cp.APIServer.Kill())
	c.server.Kill()
	c.killAgents()
	requireKept()
	c.startAgentsSoon()
	c.server.Start()
	require.NoError(t, c.cp.APIServer.Start(t.Context()))
	requireArrived(change())

	prober.RequireNoFailure()
}

func (c *cluster) saved() map[string][]string {
	c.t.Helper()
	rules := map[string][]string{}
	for _, n := range c.nodes() {
		rules[n.Name] = n.Saved(c.t)
	}
	return rules
}

func (c *cluster) killAgents() {
	c.t.Helper()
	for _, n := range c.nodes() {
		n.agent.Kill()
	}
}

// startAgentsSoon starts the agents. It does not wait until they have programmed anything.
func (c *cluster) startAgentsSoon() {
	c.t.Helper()
	for _, n := range c.nodes() {
		n.agent.Start()
	}
}

// startAgents starts the agents and waits until they have programmed their nodes.
func (c *cluster) startAgents() {
	c.t.Helper()
	c.startAgentsSoon()
	for _, n := range c.nodes() {
		n.agent.AwaitReady()
	}
}

// writeWatch detects writes to the nodes' rules.
type writeWatch struct {
	c *cluster
	// log is the path of the output of nft monitor on node a.
	log string
	// packets holds the packet counters of the rules on node b. Writing a chain again resets its
	// counters.
	packets []int
}

// watchWrites starts to watch for writes.
func (c *cluster) watchWrites() *writeWatch {
	c.t.Helper()
	w := &writeWatch{c: c, log: filepath.Join(c.dir, "nft-monitor")}
	log, err := os.Create(w.log)
	require.NoError(c.t, err)
	defer log.Close()
	monitor := c.a.Command(context.Background(), "nft", "monitor")
	monitor.Stdout, monitor.Stderr = log, log
	require.NoError(c.t, monitor.Start())
	c.t.Cleanup(func() {
		require.NoError(c.t, monitor.Process.Kill())
		require.Error(c.t, monitor.Wait())
	})
	w.mark("begin")
	w.packets = w.packetsNow()
	return w
}

// marks is the prefix of the names of the tables that mark creates.
const marks = "slicecast_e2e_"

// mark makes a change and waits until the monitor has reported it. The monitor has then reported
// all earlier changes, too.
func (w *writeWatch) mark(name string) {
	w.c.t.Helper()
	testenv.Eventually(w.c.t, settleTimeout, func() error {
		// Repeat the change, because the monitor may not listen yet.
		for _, verb := range []string{"add", "delete"} {
			if _, err := w.c.a.Run(w.c.t.Context(), "nft", verb, "table", "inet", marks+name); err != nil {
				return err
			}
		}
		text, err := os.ReadFile(w.log)
		if err == nil && !bytes.Contains(text, []byte("delete table inet "+marks+name)) {
			err = fmt.Errorf("nft monitor has not reported table %s: %s", marks+name, text)
		}
		return err
	})
}

// packetsNow returns the packet counters of the rules on node b, in order.
func (w *writeWatch) packetsNow() []int {
	w.c.t.Helper()
	var counts []int
	for _, command := range []string{"iptables-legacy-save", "ip6tables-legacy-save"} {
		out, err := w.c.b.Run(w.c.t.Context(), command, "--counters")
		require.NoError(w.c.t, err)
		for line := range strings.Lines(out) {
			var packets, bytes int
			if n, _ := fmt.Sscanf(line, "[%d:%d] -A", &packets, &bytes); n == 2 {
				counts = append(counts, packets)
			}
		}
	}
	return counts
}

// RequireNone requires that nothing was written since watchWrites.
func (w *writeWatch) RequireNone() {
	w.c.t.Helper()
	w.mark("end")
	text, err := os.ReadFile(w.log)
	require.NoError(w.c.t, err)
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "# new generation ") {
			require.Contains(w.c.t, line, marks, "a write on node a")
		}
	}
	now := w.packetsNow()
	require.Len(w.c.t, now, len(w.packets), "rules on node b")
	counting := 0
	for i := range now {
		require.GreaterOrEqual(w.c.t, now[i], w.packets[i], "packets through rule %d on node b", i)
		counting += w.packets[i]
	}
	require.NotZero(w.c.t, counting)
}
