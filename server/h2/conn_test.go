// This test proves that no stream begins on a connection that has been closed meanwhile.
package h2

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
)

// TestNoStreamBeginsOnAClosedConnection reads HEADERS after the connection has been closed, as when
// a write fails while the frame is parsed.
func TestNoStreamBeginsOnAClosedConnection(t *testing.T) {
	c := &conn{closed: errDrained}
	headers := &http2.MetaHeadersFrame{HeadersFrame: &http2.HeadersFrame{FrameHeader: http2.FrameHeader{Type: http2.FrameHeaders, StreamID: 1}}}
	require.NoError(t, c.headersLocked(headers))
	require.Nil(t, c.stream)
	require.Zero(t, c.lastID)
}
