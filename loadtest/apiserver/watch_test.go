package apiserver

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/loadtest/usage"
)

const (
	// selector is kube-proxy's.
	selector = "!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name"
	// atATime is how many watches are opened at the same time.
	atATime = 32
	// An event comes after its length.
	lengthBytes = 4
	// largestWindow is the largest one that HTTP/2 has; that of connections begins with defaultWindow.
	largestWindow, defaultWindow = math.MaxInt32, 1<<16 - 1
)

// watchers are connections that each watch all EndpointSlices as kube-proxy does, in protobuf. They count events and decode
// none, so that the machine is left to who is measured.
type watchers struct {
	config  *rest.Config
	traffic usage.Traffic
	reading sync.WaitGroup
	all     []*watcher
	round   atomic.Pointer[round]
}

type watcher struct {
	conn *tls.Conn
	// answered is closed when the watch is open; err says why it has ended.
	answered chan struct{}
	err      error
	// What is left of the current event, or of its length.
	left   int
	length [lengthBytes]byte
	inside bool
	// round that the latest event was of, and how many there were of it.
	round  *round
	events int
}

// round are the events that all watchers wait for.
type round struct {
	due       []time.Time
	latencies [][]time.Duration // by watcher
	left      atomic.Int64
	done      chan struct{}
}

// open adds watchers, of what follows the resource version.
func (w *watchers) open(ctx context.Context, count int, resourceVersion string) error {
	opening, ctx := errgroup.WithContext(ctx)
	opening.SetLimit(atATime)
	first := len(w.all)
	for range count {
		w.all = append(w.all, &watcher{answered: make(chan struct{}), left: lengthBytes})
	}
	for number := first; number < len(w.all); number++ {
		opening.Go(func() error {
			if err := w.start(ctx, number, resourceVersion); err != nil {
				return fmt.Errorf("watch %d of %d: %w", number+1, len(w.all), err)
			}
			return nil
		})
	}
	return opening.Wait()
}

func (w *watchers) start(ctx context.Context, number int, resourceVersion string) error {
	server, err := url.Parse(w.config.Host)
	if err != nil {
		return err
	}
	config, err := rest.TLSConfigFor(w.config)
	if err != nil {
		return err
	}
	config.NextProtos, config.ServerName = []string{"h2"}, server.Hostname()
	raw, err := w.traffic.Dial(ctx, server.Host)
	if err != nil {
		return err
	}
	me := w.all[number]
	me.conn = tls.Client(raw, config)
	if err := me.conn.HandshakeContext(ctx); err != nil {
		return err
	}
	if err := me.request(server.Host, resourceVersion); err != nil {
		return err
	}
	ended := make(chan struct{})
	w.reading.Go(func() {
		defer close(ended)
		me.err = me.read(func() { w.event(number) })
	})
	select {
	case <-me.answered:
		return nil
	case <-ended:
		return me.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// request asks for the watch.
func (w *watcher) request(authority, resourceVersion string) error {
	query := url.Values{"watch": {"true"}, "labelSelector": {selector}, "resourceVersion": {resourceVersion}}
	b := bufio.NewWriter(w.conn)
	f := http2.NewFramer(b, nil)
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	for _, field := range []hpack.HeaderField{
		{Name: ":method", Value: "GET"}, {Name: ":scheme", Value: "https"}, {Name: ":authority", Value: authority},
		{Name: ":path", Value: "/apis/discovery.k8s.io/v1/endpointslices?" + query.Encode()},
		{Name: "accept", Value: runtime.ContentTypeProtobuf + ";stream=watch"}, {Name: "user-agent", Value: "slicecast-benchmark"},
	} {
		if err := encoder.WriteField(field); err != nil {
			return err
		}
	}
	_, err := b.WriteString(http2.ClientPreface)
	return errors.Join(err,
		f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: largestWindow}),
		f.WriteWindowUpdate(0, largestWindow-defaultWindow),
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, EndHeaders: true, EndStream: true, BlockFragment: block.Bytes()}),
		b.Flush())
}

// read reads to the end of the connection.
func (w *watcher) read(event func()) error {
	f := http2.NewFramer(w.conn, bufio.NewReaderSize(w.conn, 4<<10))
	f.SetReuseFrames()
	f.ReadMetaHeaders = hpack.NewDecoder(4<<10, nil)
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return err
		}
		switch frame := frame.(type) {
		case *http2.MetaHeadersFrame:
			if status := frame.PseudoValue("status"); status != "200" {
				return fmt.Errorf("the API server answers with status %q", status)
			}
			close(w.answered)
		case *http2.DataFrame:
			w.data(frame.Data(), event)
		case *http2.SettingsFrame:
			if !frame.IsAck() {
				err = f.WriteSettingsAck()
			}
		case *http2.PingFrame:
			if !frame.IsAck() {
				err = f.WritePing(true, frame.Data)
			}
		case *http2.RSTStreamFrame, *http2.GoAwayFrame:
			err = fmt.Errorf("the API server ends the watch: %v", frame)
		}
		if err != nil {
			return err
		}
	}
}

// data finds the ends of events.
func (w *watcher) data(b []byte, event func()) {
	for len(b) > 0 {
		n := min(w.left, len(b))
		if !w.inside {
			copy(w.length[lengthBytes-w.left:], b[:n])
		}
		b = b[n:]
		if w.left -= n; w.left > 0 {
			return
		}
		if w.inside {
			event()
			w.left = lengthBytes
		} else {
			w.left = int(binary.BigEndian.Uint32(w.length[:]))
		}
		w.inside = !w.inside
	}
}

// event takes note that a watcher has got one more.
func (w *watchers) event(number int) {
	me, r := w.all[number], w.round.Load()
	if me.round != r {
		me.round, me.events = r, 0
	}
	r.latencies[number][me.events] = time.Since(r.due[me.events])
	me.events++
	if r.left.Add(-1) == 0 {
		close(r.done)
	}
}

// begin has all watchers wait for an event at each of these times.
func (w *watchers) begin(due []time.Time) *round {
	r := &round{due: due, done: make(chan struct{})}
	for range w.all {
		r.latencies = append(r.latencies, make([]time.Duration, len(due)))
	}
	r.left.Store(int64(len(due) * len(w.all)))
	if len(w.all) == 0 {
		close(r.done)
	}
	w.round.Store(r)
	return r
}

func (w *watchers) close() {
	for _, me := range w.all {
		if me.conn != nil {
			me.conn.NetConn().Close()
		}
	}
	w.reading.Wait()
}
