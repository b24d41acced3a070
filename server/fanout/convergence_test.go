package fanout

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestAcksBeforeThePublisherTells: a node that catches up from a snapshot may be faster than the publisher.
func TestAcksBeforeThePublisherTells(t *testing.T) {
	told := map[uint64]int{}
	c := newConvergence(1, newMetrics(nil, nil))
	c.done = func(_ uint32, sequence uint64) { told[sequence]++ }
	now := time.Now()
	a, b := c.join(1), c.join(3)
	c.ack(a, 0, 2, now)
	c.published(0, 1, now)
	c.resize(b, 4)
	c.ack(b, 0, 2, now)
	require.Equal(t, 1, told[1])
	c.published(0, 2, now)
	require.Equal(t, 1, told[2], "both had it before")
	latest := c.latest()
	require.Len(t, latest, 2)
	for _, p := range latest {
		require.Equal(t, 5, p.Nodes)
		require.Equal(t, 5, p.Programmed)
		require.Positive(t, p.Times[len(shares)-1])
	}

	c.ack(a, 0, 3, now)
	c.ack(b, 0, 4, now)
	c.resize(b, 6)
	c.resize(a, 0)
	c.published(0, 3, now.Add(1))
	c.published(0, 4, now.Add(2))
	require.Equal(t, 6, c.latest()[0].Programmed)
	require.Equal(t, 1, told[4])
	require.Empty(t, c.shards[0].early)
	c.published(0, 5, now.Add(3))
	require.Zero(t, told[5])
	require.Zero(t, c.latest()[0].Programmed)
}
