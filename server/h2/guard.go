package h2

import (
	"io"
	"net"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
)

const (
	// maxFrames is how many frames a client may send within a second, in addition to those that
	// messages pay for.
	maxFrames = 1000
	// maxStrangerFrames is how many frames a client may send in all before a call is admitted. It
	// is enough for the calls that a connection to the grpc.Server may begin with.
	maxStrangerFrames = 100
	// bytesPerFrame is how many bytes of messages pay for one more frame.
	bytesPerFrame = 512
	// maxBlockFrames bounds the frames of one header block: HEADERS and its CONTINUATIONs.
	maxBlockFrames = 10
	// maxBlockTime is how long a client may take to send one header block.
	maxBlockTime = 10 * time.Second
	// maxWriteTime is how long a client of the grpc.Server may take to read a write. Meanwhile,
	// grpc-go queues the client's WINDOW_UPDATEs.
	maxWriteTime = time.Minute
	// maxSettings bounds the settings in one SETTINGS frame.
	maxSettings = 64

	frameHeaderSize = 9
	settingSize     = 6
)

// frameBudget bounds the work that a client may cause for free. Every frame costs bytesPerFrame,
// whatever its type is. The bytes of messages pay for frames.
type frameBudget struct {
	spent atomic.Int64 // bytes since the time since, less what was paid
	since time.Duration
}

func (b *frameBudget) spend(at time.Duration) error {
	if at-b.since > time.Second {
		b.since = at
		b.spent.Store(0)
	}
	if b.spent.Add(bytesPerFrame) > maxFrames*bytesPerFrame {
		return errTooManyFrames
	}
	return nil
}

// pay credits the client with bytes, so that it may send more frames. Any goroutine may call it.
func (b *frameBudget) pay(bytes int) { b.spent.Add(-int64(bytes)) }

// guard follows the frames of an HTTP/2 client while their bytes pass to the parser. It bounds
// frames that the parser consumes by itself, such as the CONTINUATIONs of a header block, and
// frames that grpc-go does not bound.
type guard struct {
	reader io.Reader
	budget frameBudget
	// maxBlock bounds the compressed bytes of a header block.
	maxBlock int
	// blockTime is maxBlockTime, except in tests.
	blockTime time.Duration
	// slow is called, on a goroutine of its own, if a header block takes longer than blockTime.
	slow func()
	// stranger reports whether no call has been admitted yet.
	stranger func() bool
	// dataPays means that the bytes of DATA frames pay for frames.
	dataPays bool

	// Only the reading goroutine uses the fields below.
	ofStranger  int   // frames that came before a call was admitted
	broken      error // the error that ends all reads; nil while there is none
	skip        int   // bytes before the header of the next frame
	header      [frameHeaderSize]byte
	got         int         // bytes of header that have arrived
	blockFrames int         // frames of the incomplete header block; 0 means that there is none
	blockSize   int         // bytes of the incomplete header block
	timer       *time.Timer // calls slow
}

// newGuard returns the guard of a connection. secure is TLS over the socket under.
func (s *Server) newGuard(secure net.Conn, under *socket, of *Connection, dataPays bool, slow func()) guard {
	return guard{
		reader: delivery{secure, under}, maxBlock: 2 * int(s.options.MaxHeaderBytes), blockTime: s.blockTime, slow: slow,
		stranger: of.stranger, dataPays: dataPays, skip: len(http2.ClientPreface),
	}
}

// Read implements io.Reader. After a violation it only returns the violation.
func (g *guard) Read(b []byte) (int, error) {
	if g.broken != nil {
		return 0, g.broken
	}
	n, err := g.reader.Read(b)
	if g.broken = g.follow(b[:n]); g.broken != nil {
		return 0, g.broken
	}
	return n, err
}

func (g *guard) follow(b []byte) error {
	for len(b) > 0 {
		if g.skip > 0 {
			n := min(g.skip, len(b))
			g.skip -= n
			b = b[n:]
			continue
		}
		n := copy(g.header[g.got:], b)
		g.got += n
		b = b[n:]
		if g.got < frameHeaderSize {
			return nil
		}
		g.got = 0
		g.skip = int(g.header[0])<<16 | int(g.header[1])<<8 | int(g.header[2])
		if err := g.frame(g.skip, http2.FrameType(g.header[3]), http2.Flags(g.header[4])); err != nil {
			return err
		}
	}
	return nil
}

// frame checks a frame before its payload is read.
func (g *guard) frame(size int, kind http2.FrameType, flags http2.Flags) error {
	if g.stranger() {
		if g.ofStranger++; g.ofStranger > maxStrangerFrames {
			return errTooManyFrames
		}
	}
	if err := g.budget.spend(now()); err != nil {
		return err
	}
	switch kind {
	case http2.FrameHeaders, http2.FrameContinuation:
		return g.block(size, flags.Has(http2.FlagHeadersEndHeaders))
	case http2.FrameSettings:
		if size > maxSettings*settingSize {
			return errTooManySettings
		}
	case http2.FrameData:
		if g.dataPays {
			g.budget.pay(size)
		}
	}
	return nil
}

// block counts a frame of a header block. The parser checks that a CONTINUATION only follows frames
// of its block.
func (g *guard) block(size int, last bool) error {
	g.blockFrames++
	g.blockSize += size
	if g.blockFrames > maxBlockFrames || g.blockSize > g.maxBlock {
		return errBlockTooLong
	}
	switch {
	case last:
		g.blockFrames, g.blockSize = 0, 0
		if g.timer != nil {
			g.timer.Stop()
			g.timer = nil
		}
	case g.timer == nil:
		g.timer = time.AfterFunc(g.blockTime, g.slow)
	}
	return nil
}
