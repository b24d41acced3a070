package client

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// What was programmed while an Ack waited goes with it, each position with its own time; of very many, the last ones as one.
func TestAnAckHasTheTimeOfEachPosition(t *testing.T) {
	o := newOutbox(NewCache(), nil)
	o.newStream()
	o.inSync()
	for sequence := uint64(1); sequence <= 2*maxPositions; sequence++ {
		o.ack(0, map[uint32]uint64{5: sequence})
		if sequence == 1 {
			o.acks[5][0].at = time.Now().Add(-time.Minute)
		}
	}
	requests, acked, err := o.take(true)
	require.NoError(t, err)
	require.True(t, acked)
	positions := requests[0].GetAck().GetPositions()
	require.Len(t, positions, maxPositions)
	require.GreaterOrEqual(t, positions[0].GetAgeMs(), uint32(60_000))
	for i, p := range positions {
		require.EqualValues(t, 5, p.GetShard())
		if i < maxPositions-1 {
			require.EqualValues(t, i+1, p.GetSequence())
		}
	}
	require.EqualValues(t, 2*maxPositions, positions[maxPositions-1].GetSequence())
	require.Less(t, positions[1].GetAgeMs(), uint32(50_000))
}

// However many nacks a relay's nodes have: the stream goes on, and what the relay itself asks for is sent.
func TestRelayedNacksAreBounded(t *testing.T) {
	o := newOutbox(NewCache(), nil)
	o.newStream()
	require.False(t, o.report(&pb.Nack{}), "not in sync yet")
	o.inSync()
	for range maxRelayed {
		require.True(t, o.report(&pb.Nack{}))
	}
	require.False(t, o.report(&pb.Nack{}))
	for range maxRequests {
		o.request(&pb.StreamRequest{})
	}
	requests, _, err := o.take(true)
	require.NoError(t, err)
	require.Len(t, requests, maxRelayed+maxRequests)
	require.True(t, o.report(&pb.Nack{}))
	o.newStream()
	requests, _, err = o.take(true)
	require.NoError(t, err)
	require.Empty(t, requests, "they were of the stream before")
}
