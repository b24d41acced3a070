// These tests prove that a client that does not read is refused more, costs bounded memory, and
// later gets everything in order. Real sockets fill up.
package h2

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"

	"github.com/slicecast/slicecast/internal/wire"
)

// TestClientThatDoesNotRead checks a client that does not read. TrySend refuses, memory is bounded,
// and the client gets everything in order once it reads.
func TestClientThatDoesNotRead(t *testing.T) {
	const size = 10 << 10
	streams := make(chan *Stream, 1)
	f := start(t, func(s *session) error { streams <- s.Stream; return until(s) })
	c := f.raw(t, http2.Setting{ID: http2.SettingInitialWindowSize, Val: maxWindow})
	c.ok(c.WriteWindowUpdate(0, maxWindow-initialWindow))
	c.request(1)
	s := <-streams
	require.Eventually(t, func() bool { // the window has arrived
		s.conn.mu.Lock()
		defer s.conn.mu.Unlock()
		return s.conn.window > initialWindow
	}, patience, tick)

	frame := func(i int) wire.Frame { return binary.BigEndian.AppendUint64(make(wire.Frame, size), uint64(i)) }
	// The kernel may accept more after a refusal while its buffers grow. They are full once
	// refusals go on for a while.
	sent, refused := 0, 0
	require.Eventually(t, func() bool {
		ok, err := s.TrySend(frame(sent))
		require.NoError(t, err)
		if ok {
			sent, refused = sent+1, 0
		} else {
			refused++
		}
		require.Less(t, s.conn.socket.kept(), 2*frameSize)
		return refused > 1000
	}, patience, time.Nanosecond)

	blocked := make(chan error, 1)
	more := []wire.Frame{frame(sent), frame(sent + 1)}
	go func() { blocked <- s.Send(more...) }()
	sent += 2
	expect[*http2.MetaHeadersFrame](c)
	var got bytes.Buffer
	for i := range sent {
		for got.Len() < messagePrefix+size+8 {
			got.Write(expect[*http2.DataFrame](c).Data())
		}
		b := got.Next(messagePrefix + size + 8)
		require.Equal(t, uint64(i), binary.BigEndian.Uint64(b[messagePrefix+size:]))
	}
	require.NoError(t, <-blocked)
	require.Eventually(t, func() bool { // what has arrived may be pending for another moment
		ok, err := s.TrySend(frame(sent))
		require.NoError(t, err)
		return ok
	}, patience, tick)
	t.Logf("%d messages of %d bytes before TrySend refused", sent-2, size)
}

// TestTrySendOfLargeMessages checks that TrySend refuses what does not fit into one write.
func TestTrySendOfLargeMessages(t *testing.T) {
	tried := make(chan bool, 2)
	f := start(t, func(s *session) error {
		for _, n := range []int{chunk - messagePrefix + 1, chunk - messagePrefix} {
			sent, err := s.TrySend(make(wire.Frame, n))
			if err != nil {
				return err
			}
			tried <- sent
		}
		return nil
	})
	c := f.raw(t)
	c.request(1)
	require.False(t, <-tried)
	require.True(t, <-tried)
	expect[*http2.MetaHeadersFrame](c)
	require.Len(t, expect[*http2.DataFrame](c).Data(), chunk)
}

// TestSendAfterTheEnd checks that sends on an ended stream return why it has ended.
func TestSendAfterTheEnd(t *testing.T) {
	errs := make(chan error, 2)
	f := start(t, func(s *session) error {
		<-s.Context().Done()
		_, err := s.TrySend([]byte("x"))
		errs <- err
		errs <- s.Send([]byte("x"))
		return nil
	})
	c := f.raw(t)
	c.request(1)
	c.ok(c.WriteRSTStream(1, http2.ErrCodeCancel))
	require.EqualError(t, <-errs, "rpc error: code = Canceled desc = the client has reset the stream (CANCEL)")
	require.Error(t, <-errs)
}

// pair returns a socket after noWait, and the other end of its connection.
func pair(t *testing.T) (*socket, net.Conn) {
	t.Helper()
	l := listen(t)
	defer l.Close()
	there, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	here, err := l.Accept()
	require.NoError(t, err)
	s := &socket{Conn: here}
	var wait sync.WaitGroup
	require.NoError(t, s.noWait(&wait, func() {}))
	t.Cleanup(func() {
		there.Close()
		s.Close()
		wait.Wait()
	})
	return s, there
}

// fill writes until bytes are pending.
func fill(t *testing.T, s *socket) (written int) {
	t.Helper()
	for b := make([]byte, 1000); !s.busy(); written += len(b) {
		_, err := s.Write(b)
		require.NoError(t, err)
	}
	return written
}

// kept returns how many written bytes the kernel has not accepted.
func (s *socket) kept() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.flight + len(s.pending)
}

// TestSocketIsBounded checks the bound on frames that the client causes and does not read.
func TestSocketIsBounded(t *testing.T) {
	s, _ := pair(t)
	err, most := error(nil), 0
	for b := make([]byte, 1000); err == nil; most = max(most, s.kept()) {
		_, err = s.Write(b)
	}
	require.ErrorIs(t, err, errNotRead)
	require.LessOrEqual(t, most, maxPending)
	require.Greater(t, most, maxPending-1000)
	_, err = s.Write([]byte("x"))
	require.ErrorIs(t, err, errNotRead, "what is lost is not jumped over")
}

// TestSocketShutdown checks that the socket is closed after everything pending is written.
func TestSocketShutdown(t *testing.T) {
	s, there := pair(t)
	written := fill(t, s)
	s.shutdown()
	n, err := io.Copy(io.Discard, there)
	require.NoError(t, err)
	require.Equal(t, int64(written), n)
}

func TestNoWaitNeedsASocket(t *testing.T) {
	here, there := net.Pipe()
	defer here.Close()
	defer there.Close()
	require.ErrorContains(t, (&socket{Conn: here}).noWait(nil, nil), "*net.pipe")
}
