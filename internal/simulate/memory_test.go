// This file is memory: it holds what servers and agents keep to the stated bounds, and kills
// processes that need more than they may, as the kernel does.
package simulate

import (
	"fmt"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// These are the stated bounds of what a server keeps: those of the ring, of the frame cache, and of
// a shard's updates whose convergence is measured.
const (
	mostRingEntries     = 1024
	mostRingBytes       = 32 << 20
	mostFrameCacheBytes = 64 << 20
	mostOpenUpdates     = 256 // of a shard
)

// mostCheckpointBytes bounds a checkpoint. In these clusters, an object takes less than 1 KiB of
// it, and everything else together less than 8 KiB. A node has four files at most: the checkpoint,
// the one that is going to replace it, the last one that was rejected, and the mark of a kernel
// that may be ahead.
const mostCheckpointBytes = (maxServices*(1+2*maxSlices) + 8) << 10

// accounts is a registry that can read single gauges. To gather all metrics takes a hundred times
// longer.
type accounts struct {
	*prometheus.Registry
	gauges map[string]prometheus.Metric
}

func newAccounts() *accounts {
	return &accounts{prometheus.NewRegistry(), make(map[string]prometheus.Metric)}
}

// MustRegister implements prometheus.Registerer.
func (a *accounts) MustRegister(all ...prometheus.Collector) {
	a.Registry.MustRegister(all...)
	for _, c := range all {
		g, ok := c.(prometheus.GaugeFunc)
		if !ok {
			continue
		}
		_, rest, _ := strings.Cut(g.Desc().String(), `fqName: "`)
		name, _, _ := strings.Cut(rest, `"`)
		a.gauges[name] = g
	}
}

// gauge returns the value of a gauge of a server.
func (a *accounts) gauge(name string) int {
	var m dto.Metric
	g := a.gauges["slicecast_server_"+name]
	if g == nil {
		panic("no gauge is called " + name)
	}
	if err := g.Write(&m); err != nil {
		panic(err)
	}
	return int(m.GetGauge().GetValue())
}

// checkMemory checks that what processes keep is within the stated bounds.
func (w *world) checkMemory() {
	for _, s := range w.servers {
		if s.life == nil {
			continue
		}
		entries := s.life.registry.gauge("ring_entries")
		for _, b := range []struct {
			name string
			most int
		}{
			{"ring_entries", mostRingEntries}, {"ring_bytes", mostRingBytes}, {"frame_cache_bytes", mostFrameCacheBytes},
			{"open_updates", mostOpenUpdates * int(w.shards)}, {"tombstones", tombstones * int(w.shards)},
		} {
			if n := s.life.registry.gauge(b.name); n > b.most && (b.name != "ring_bytes" || entries > 1) {
				w.violated("%s: %s is %d, and may be %d", s.name, b.name, n, b.most)
			}
		}
	}
	for _, n := range w.nodes {
		if files, size := n.disk.size(); files > 4 || size > 3*mostCheckpointBytes {
			w.violated("%s: %d files of %d bytes, and a checkpoint may have %d bytes", n.name, files, size, mostCheckpointBytes)
		}
	}
}

// size returns the number of files and their bytes.
func (d *disk) size() (files, bytes int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, f := range d.files {
		bytes += len(f.content)
	}
	return len(d.files), bytes
}

// memoryLocked returns the memory that counts against a process's limit, in bytes: its sockets'
// buffers, its written pages, and what a server counts of its own.
func (p *process) memoryLocked() int {
	sum := p.dirty
	for _, c := range p.network.conns {
		if c.process == p {
			sum += c.in.size + c.peer.in.size
		}
	}
	if p.keeps != nil {
		sum += p.keeps()
	}
	return sum
}

// chargeLocked ends a process that needs more memory than its limit. Everything else goes on, until
// the next step finds that the process has ended.
func (p *process) chargeLocked() {
	if p.limit == 0 || p.ended {
		return
	}
	if used := p.memoryLocked(); used > p.limit {
		p.starved = used
		p.killLocked()
	}
}

// write counts pages that are written, or with a negative number those that are synchronized.
func (p *process) write(bytes int) {
	p.network.mu.Lock()
	defer p.network.mu.Unlock()
	p.dirty += bytes
	p.chargeLocked()
}

// keeps returns the bytes that a server counts of its own.
func (l *serverLife) keeps() int {
	return l.registry.gauge("ring_bytes") + l.registry.gauge("frame_cache_bytes")
}

// limitMemory sets a limit that a server or an agent will exceed when it needs some bytes more than
// now. If these are few, it dies in the midst of something small; otherwise only whole shards
// exceed the limit.
func (w *world) limitMemory(s step) string {
	var p *process
	var name string
	if i := int(s.a) % (len(w.servers) + len(w.nodes)); i < len(w.servers) {
		if l := w.servers[i].life; l != nil {
			p, name = l.process, w.servers[i].name
		}
	} else if n := w.nodes[i-len(w.servers)]; n.agent != nil {
		p, name = n.agent.process, n.name
	}
	if p == nil {
		return ""
	}
	more := int(s.c>>4) % (64 << (s.b % 11))
	w.network.mu.Lock()
	defer w.network.mu.Unlock()
	p.limit = p.memoryLocked() + more + 1
	return fmt.Sprintf("%s may need %d bytes more than now", name, more+1)
}

// replaceStarved starts what was killed for its memory: agents with their checkpoint.
func (w *world) replaceStarved() {
	for _, s := range w.servers {
		if s.life != nil && s.life.process.outOfMemory() > 0 {
			w.observed("* %s was killed when it needed %d bytes, and starts", s.name, s.life.process.outOfMemory())
			s.kill()
			s.start()
		}
	}
	for _, n := range w.nodes {
		if n.agent != nil && n.agent.process.outOfMemory() > 0 {
			w.observed("* the agent of %s was killed when it needed %d bytes, and starts", n.name, n.agent.process.outOfMemory())
			n.kill()
			n.start()
		}
	}
}

// outOfMemory returns the memory for which the process was killed, in bytes, or 0 if it was not.
func (p *process) outOfMemory() int {
	p.network.mu.Lock()
	defer p.network.mu.Unlock()
	return p.starved
}

// liftLimits ends all limits of memory.
func (w *world) liftLimits() {
	w.network.mu.Lock()
	defer w.network.mu.Unlock()
	for _, s := range w.servers {
		if s.life != nil {
			s.life.process.limit = 0
		}
	}
	for _, n := range w.nodes {
		if n.agent != nil {
			n.agent.process.limit = 0
		}
	}
}
