// This file stands for a connection: a transport in memory that a test opens, closes and reads, and
// a plain client that holds what it was sent.
package fanout

import (
	"context"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// pipe is a transport that accepts frames at once while it is open. The test reads them.
type pipe struct {
	ctx     context.Context
	cancel  context.CancelFunc
	session *Session
	done    chan error
	taken   atomic.Uint64

	mu     sync.Mutex
	opened sync.Cond
	open   bool
	frames []wire.Frame
	tried  int  // accepted calls of TrySend
	waits  bool // whether Send blocks until the pipe is open
}

// connect begins a stream.
func connect(t require.TestingT, h *Hub, hello *pb.Hello) *pipe {
	p := &pipe{open: true, done: make(chan error, 1)}
	p.begin(t, h, p, hello)
	return p
}

// begin begins the stream on as, a transport that may do more than the pipe.
func (p *pipe) begin(t require.TestingT, h *Hub, as Transport, hello *pb.Hello) {
	p.opened.L = &p.mu
	p.ctx, p.cancel = context.WithCancel(context.Background())
	context.AfterFunc(p.ctx, p.opened.Broadcast)
	p.session = h.Open(as)
	go func() { p.done <- p.session.Serve() }()
	require.NoError(t, p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: hello}}))
}

func (p *pipe) say(r *pb.StreamRequest) error {
	b, err := proto.Marshal(r)
	if err != nil {
		return err
	}
	return p.session.Message(b)
}

func (p *pipe) Context() context.Context { return p.ctx }

func (p *pipe) Send(frames ...wire.Frame) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.waits = true; !p.open && p.ctx.Err() == nil; {
		p.opened.Wait()
	}
	p.waits = false
	p.frames = append(p.frames, frames...)
	p.taken.Add(uint64(wire.Bytes(frames)))
	return p.ctx.Err()
}

func (p *pipe) TrySend(frames ...wire.Frame) (bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open {
		p.frames = append(p.frames, frames...)
		p.tried++
	}
	return p.open, nil
}

// Taken implements Transport.
func (p *pipe) Taken() uint64 { return p.taken.Load() }

func (p *pipe) set(open bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open = open
	p.opened.Broadcast()
}

func (p *pipe) waiting() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.waits
}

// read returns the frames sent since the last call, decoded.
func (p *pipe) read(t require.TestingT) []*wire.Response {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []*wire.Response
	for _, f := range p.frames {
		r, err := wire.Decode(f)
		require.NoError(t, err)
		require.Empty(t, r.Problems)
		out = append(out, r)
	}
	p.frames = nil
	return out
}

// End implements Transport.
func (p *pipe) End(error) { p.cancel() }

// close ends the stream and returns its status.
func (p *pipe) close() error {
	p.cancel()
	return <-p.done
}

// eventually polls a condition, which may fail the test itself, until it holds.
func eventually(t require.TestingT, condition func() bool) {
	for deadline := time.Now().Add(patience); !condition(); {
		require.True(t, time.Now().Before(deadline), "it has not happened within %v", patience)
		<-time.After(tick / 10)
	}
}

// running returns a hub that publishes.
func running(t *testing.T, o Options) *Hub {
	h, stop := run(t, o)
	t.Cleanup(stop)
	return h
}

// anybody authorizes every client.
func anybody(context.Context, pb.ClientKind, string) (string, time.Time, error) {
	return "", time.Time{}, nil
}

func run(t require.TestingT, o Options) (h *Hub, stop func()) {
	o.Logger = slog.New(slog.DiscardHandler)
	if o.Authorize == nil {
		o.Authorize = anybody
	}
	h = New(o)
	ctx, cancel := context.WithCancel(context.Background())
	var wait sync.WaitGroup
	wait.Go(func() { h.Run(ctx) })
	return h, func() { cancel(); wait.Wait() }
}

// placed is an object in a shard. A slice that moves to a Service of another shard may be in both
// for a moment.
type placed struct {
	shard uint32
	key   model.Key
}

// copyOf is a client that holds what it was sent. It is a plain implementation of the wire
// contract.
type copyOf struct {
	objects   map[placed]model.Object
	sequences map[uint32]uint64
	shards    uint32
	inSyncs   int
}

func (c *copyOf) take(t require.TestingT, responses []*wire.Response) {
	for _, r := range responses {
		if r.InSync != nil {
			c.inSyncs++
			for i, s := range r.InSync.GetSequences() {
				c.sequences[uint32(i)] = s
			}
		}
		u := r.Update
		if u == nil {
			continue
		}
		at := c.sequences[u.Shard]
		if !u.Full {
			require.LessOrEqual(t, u.From, at, "an update that leaves a gap")
			require.GreaterOrEqual(t, u.To, at, "an update from the past")
		}
		c.sequences[u.Shard] = u.To
		if u.Full {
			maps.DeleteFunc(c.objects, func(at placed, _ model.Object) bool { return at.shard == u.Shard })
		}
		for _, key := range u.Removed {
			delete(c.objects, placed{u.Shard, key})
		}
		for _, s := range u.Services {
			c.put(s)
		}
		for _, s := range u.Slices {
			c.put(s)
		}
		for _, d := range u.Deltas {
			old, ok := c.objects[placed{u.Shard, d.Key()}].(*model.Slice)
			require.True(t, ok, "a delta of a slice that was never sent")
			if old.ContentVersion() == d.Version {
				continue
			}
			s, err := d.Apply(old)
			require.NoError(t, err)
			require.Equal(t, d.Version, s.ContentVersion())
			c.objects[placed{u.Shard, d.Key()}] = s
		}
	}
}

func (c *copyOf) put(o model.Object) {
	c.objects[placed{o.ServiceKey().Shard(c.shards), o.Key()}] = o
}

// equals reports whether the copy equals the store.
func (c *copyOf) equals(s *store.Store) bool {
	n := 0
	for i := range s.Shards() {
		u := s.Snapshot(i).Since(0)
		for _, o := range u.Services {
			if have := c.objects[placed{i, o.Key()}]; have == nil || have.ContentVersion() != o.ContentVersion() {
				return false
			}
		}
		for _, o := range u.Slices {
			if have := c.objects[placed{i, o.Key()}]; have == nil || have.ContentVersion() != o.ContentVersion() {
				return false
			}
		}
		n += u.Len()
	}
	return n == len(c.objects)
}
