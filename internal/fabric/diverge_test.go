// This test proves that a heartbeat's digest reveals a cache that is wrong, and that only the
// buckets that differ are sent again.
package fabric

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/logtest"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
)

// TestDivergenceIsFoundAndRepaired checks that a heartbeat detects a wrong cache, and that the
// buckets that differ are sent again. Both sides count and log this.
func TestDivergenceIsFoundAndRepaired(t *testing.T) {
	var objects []model.Keyed
	for i := range 200 {
		s := modeltest.WebSlice(3)
		s.Name = fmt.Sprint("web-", i)
		objects = append(objects, model.NewSlice(s))
	}
	c := newCluster(append(objects, modeltest.Web())...)
	s := serve(t, &watch{cluster: c})
	logged := &logtest.Buffer{}
	a := follow(t, agentOptions{node: nodes[0], servers: []string{s.address()}, logs: logged, count: true})
	other := follow(t, agentOptions{node: nodes[1], servers: []string{s.address()}, count: true})
	a.waitEquals(t, c)
	other.waitEquals(t, c)
	before, others := a.came(), other.came()

	tamper := func(u *model.Update) bool {
		if len(u.Deltas) == 0 {
			return false
		}
		u.Deltas = nil // as if it had not been sent
		return true
	}
	a.tamper.Store(&tamper)
	changed := objects[7].Key()
	c.flip([]model.Key{changed})
	require.Eventually(t, func() bool { return a.tamper.Load() == nil }, patience, tick)
	require.Error(t, a.contentDiffers(c.state()))
	a.waitEquals(t, c)
	other.waitEquals(t, c)

	repairs, err := metric(a.registry, "slicecast_agent_resyncs_total", "digest")
	require.NoError(t, err)
	require.EqualValues(t, 1, repairs)
	require.EqualValues(t, 1, s.metric(t, "slicecast_server_resyncs_total"))
	require.Equal(t, 1, logged.Count("level=WARN", "State differs from the server's"), logged)
	require.Equal(t, 1, s.logs.Count("level=WARN", "Client requested a resync", nodes[0]), s.logs)
	require.Equal(t, len(inPlaces(c.state(), []model.Object{c.state()[changed].(model.Object)})), a.came()-before,
		"the objects of one bucket have come")
	require.Equal(t, 1, other.came()-others, "others got the change and nothing else")
}
