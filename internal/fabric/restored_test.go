// This test proves that nodes and relays accept a cluster whose resource versions went back for
// good, and that they wait for it only once.
package fabric

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/proxytest"
	"github.com/slicecast/slicecast/server/app"
)

// TestAClusterThatWentBackInTime checks resource versions that are far below what nodes and relays
// have seen, and stay there. The cause may be an etcd that was restored from a backup, or a server
// that has reported too high versions. A client waits once for a server that is behind. From then
// on it goes by that server's versions, so no later stream is delayed. A client whose server goes
// back while it follows does not wait at all.
func TestAClusterThatWentBackInTime(t *testing.T) {
	const wait = time.Second
	short := func(c *app.Config) { c.MaxBehindWait = wait }
	gaveUp := func(s *server) float64 { return s.metric(t, "slicecast_server_behind_waits_total", "gave_up") }
	slice := func(endpoints int) *model.Slice { return model.NewSlice(modeltest.WebSlice(endpoints)) }
	clusterAt := func(version uint64, endpoints int) *cluster {
		c := newCluster(modeltest.Web(), slice(endpoints))
		c.version = version
		return c
	}
	before, after := clusterAt(1<<63, 5), clusterAt(7, 3)
	old := serve(t, &watch{cluster: before}, short)
	restored := []*server{serve(t, &watch{cluster: after}, short), serve(t, &watch{cluster: after}, short)}
	// This relay has seen both histories.
	above := proxytest.New(t, old.address())
	relay := serve(t, nil, short, upstreamOf(above.Address()))
	p := proxytest.New(t, relay.address())
	a := follow(t, agentOptions{node: nodes[0], servers: []string{p.Address()}})
	a.waitEquals(t, before)
	stays := follow(t, agentOptions{node: nodes[1], servers: []string{relay.address()}, count: true})
	stays.waitEquals(t, before)
	forgets := func(a *agent) {
		t.Helper()
		require.Eventually(t, func() bool {
			v := a.cache.Status().ResourceVersions
			return v.Services < 1000 && v.Slices < 1000
		}, patience, tick)
	}
	goTo := func(s *server, cluster *cluster) {
		t.Helper()
		p.Lead(s.address())
		p.Cut()
		a.waitEquals(t, cluster)
	}
	goTo(restored[0], after)
	require.EqualValues(t, 1, gaveUp(restored[0]), "it could have been behind for a moment only")
	after.upsert(slice(4))
	goTo(restored[1], after)
	require.Zero(t, gaveUp(restored[1]))

	above.Lead(restored[1].address())
	above.Cut()
	require.Eventually(t, func() bool { return gaveUp(restored[1]) == 1 }, patience, tick, "the relay waits, too")
	forgets(stays)
	require.EqualValues(t, 1, stays.inSyncs.Load(), "its stream is that of before")
	goTo(relay, after)
	after.upsert(slice(2))
	a.waitEquals(t, after)
	waits := gaveUp(restored[0])
	p.Lead(proxytest.Nowhere)
	p.Cut()
	after.upsert(slice(1))
	goTo(restored[0], after)
	require.Equal(t, waits, gaveUp(restored[0]), "what the relay told is not of the other history")

	// This server lists again, as its watch has found that the API server went back.
	watched := clusterAt(1<<62, 5)
	survivor := serve(t, &watch{cluster: watched}, short)
	goTo(survivor, watched)
	watched.mu.Lock()
	watched.version = 100
	watched.mu.Unlock()
	watched.replace(model.KindService, func(map[model.Key]model.Keyed) {})
	watched.replace(model.KindSlice, func(objects map[model.Key]model.Keyed) { objects[slice(2).Key()] = slice(2) })
	a.waitEquals(t, watched)
	forgets(a)
	another := serve(t, &watch{cluster: watched}, short)
	watched.upsert(slice(6))
	goTo(another, watched)
	require.Zero(t, gaveUp(another))
}
