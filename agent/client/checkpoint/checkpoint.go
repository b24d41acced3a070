// Package checkpoint keeps a cache in a file, so that an agent that starts gets only the
// differences from the servers, and knows the endpoints of Services even without a server.
package checkpoint

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/slicecast/slicecast/agent/client/cache"
)

const (
	// interval is the minimum time between two checkpoints. After a crash, the servers
	// send again what arrived since the last one.
	interval = 10 * time.Second
	// staleGrace is how long servers have to bring the cache in sync. After that, the node is
	// programmed from its checkpoint alone.
	staleGrace = 5 * time.Second
	// lastStep bounds how long the last save, when the agent stops, waits for the kernel to be
	// programmed, and lastSave bounds the duration of that save.
	lastStep, lastSave = time.Second, 3 * time.Second
)

// rejectedSuffix is appended to the path of a checkpoint that is set aside. newSuffix is appended
// to the path of one that is being written. aheadSuffix is appended to the path of the file that
// names the boot in which the kernel may have got ahead of the checkpoint.
const (
	rejectedSuffix = ".rejected"
	newSuffix      = ".new"
	aheadSuffix    = ".ahead"
)

// Options configure a Checkpoint.
type Options struct {
	// Path is the path of the file. Its directory must exist, and only the agent may be able to
	// write to it.
	Path string
	// NodeName is the node that the cache belongs to. A checkpoint of another node is rejected.
	NodeName string
	// Cache is the cache to restore and save. It must be unused.
	Cache *cache.Cache
	// Boot identifies the boot of this machine. Empty means that it is not known, and that the kernel
	// is never ahead.
	Boot string
	// Settled is closed once the kernel is no longer programmed. The last save waits for it, within
	// lastStep. nil means that this is not known, so that the kernel may be ahead of the last save.
	Settled <-chan struct{}
	// Disk holds the file. nil means the operating system's files.
	Disk Disk
	// Logger is the checkpoint's log. nil means slog.Default.
	Logger *slog.Logger
	// Registerer registers the checkpoint's metrics. nil means that they are not registered.
	Registerer prometheus.Registerer
}

// Checkpoint keeps a cache in a file.
//
// Invariants:
//
//  1. The cache starts with the content of the file, and the first Hello resumes from there.
//  2. Restored content does not count until a server has brought the cache in sync. If none has
//     within staleGrace, the node is programmed from the restored content, unless the kernel is
//     ahead of it and intact. That is logged, and the metric slicecast_agent_stale shows it.
//     Restored content is never acked.
//  3. Nothing is written before the first server has brought the cache in sync. After that, a
//     changed cache is written at most once per interval, and once more when the agent stops.
//  4. A reader finds either the old file or the new one, whole.
//  5. A file that is not exactly what an agent of this node wrote is renamed with the suffix
//     ".rejected", and the cache starts empty.
//  6. If the file cannot be read or written, the agent goes on without it. It tries to write it
//     again. What is at its path and is no regular file is neither read nor replaced.
//  7. encoder, lastSections and lastError belong to the goroutine that saves. There is one at a
//     time.
//  8. While the kernel may hold later content than the file, the file with aheadSuffix names the
//     boot. It is there while an agent runs, because the disk may be full or the agent may be
//     killed at any moment. Only a last save removes it.
type Checkpoint struct {
	options  Options
	log      *slog.Logger
	restored bool
	ahead    bool
	written  time.Time // when the restored file was written; zero if none was
	errors   prometheus.Counter
	bytes    prometheus.Gauge
	saved    prometheus.Gauge
	// lastSaved is when this process last wrote the file. nil means that it has not.
	lastSaved atomic.Pointer[time.Time]

	encoder      *encoder
	lastSections [][]byte // what this process last wrote
	lastError    string   // the error of the last save; empty if it succeeded
}

// Open restores the cache from the file. A file that cannot be used is set aside, and the agent
// starts without it.
func Open(o Options) *Checkpoint {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Disk == nil {
		o.Disk = system{}
	}
	f := promauto.With(o.Registerer)
	opts := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: "slicecast", Subsystem: "agent", Name: name, Help: help}
	}
	f.NewGaugeFunc(prometheus.GaugeOpts(opts("stale",
		"1 while the node is programmed from a checkpoint that no server has confirmed since the agent started, "+
			"0 otherwise.")), func() float64 {
		if o.Cache.Stale() {
			return 1
		}
		return 0
	})
	p := &Checkpoint{
		options: o, log: o.Logger, encoder: newEncoder(),
		errors: f.NewCounter(prometheus.CounterOpts(opts("checkpoint_errors_total",
			"Number of checkpoints that could not be written."))),
		bytes: f.NewGauge(prometheus.GaugeOpts(opts("checkpoint_bytes",
			"Size of the last checkpoint written, in bytes."))),
		saved: f.NewGauge(prometheus.GaugeOpts(opts("checkpoint_timestamp_seconds",
			"Time of the last checkpoint written, in seconds since 1970, or 0 if none was."))),
	}
	p.restore()
	p.noteBoot()
	return p
}

// noteBoot finds out whether the kernel may be ahead of the file, and notes that it may be from now
// on. The note need not survive a power failure, because the kernel does not either.
func (p *Checkpoint) noteBoot() {
	path, disk, boot := p.options.Path, p.options.Disk, p.options.Boot
	if info, err := disk.Stat(path); boot == "" || err == nil && !info.Mode().IsRegular() {
		return
	}
	if f, err := disk.Open(path + aheadSuffix); err == nil {
		noted, _ := io.ReadAll(io.LimitReader(f, int64(len(boot))+1)) // or another boot
		_ = f.Close()
		if string(noted) == boot {
			p.ahead = p.restored
			return
		}
	}
	f, err := disk.Create(path + aheadSuffix)
	if err == nil {
		_, err = io.WriteString(f, boot)
		err = errors.Join(err, f.Close())
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) { // restore has logged that
		p.errors.Inc()
		p.log.Warn("Cannot note that the kernel may get ahead of the checkpoint; if this agent is killed, "+
			"the next one may program older rules", "err", err)
	}
}

// Ahead reports whether the kernel, unless somebody has changed it, holds what was restored or
// later content. That is so if the last agent was killed since the machine booted.
func (p *Checkpoint) Ahead() bool { return p.ahead }

// restore fills the cache from the file.
func (p *Checkpoint) restore() {
	path, disk := p.options.Path, p.options.Disk
	info, err := disk.Stat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		if _, err := disk.Stat(filepath.Dir(path)); errors.Is(err, os.ErrNotExist) {
			p.log.Warn("Cannot keep a checkpoint, its directory does not exist; create it or change --checkpoint", "path", path)
		} else {
			p.log.Info("No checkpoint yet, starting without it", "path", path)
		}
		return
	case err == nil && !info.Mode().IsRegular():
		p.log.Error("Cannot use the checkpoint, starting without it", "err", errNotRegular(path))
		return
	}
	contents, written, err := readFile(disk, path, p.options.NodeName)
	if err == nil {
		err = p.options.Cache.Restore(contents)
	}
	if err != nil {
		if set := disk.Rename(path, path+rejectedSuffix); set != nil {
			err = errors.Join(err, set)
		}
		p.log.Warn("Cannot use the checkpoint, set it aside; the server will send a snapshot", "path", path,
			"aside", path+rejectedSuffix, "err", err)
		return
	}
	p.restored, p.written = true, written
	p.log.Info("Restored the checkpoint", "path", path, "written", written, "services", len(p.options.Cache.Services()))
}

func errNotRegular(path string) error {
	return fmt.Errorf("%s is not a regular file: use the path of a file in an existing directory", path)
}

// readFile reads the checkpoint of a node and returns when it was written.
func readFile(disk Disk, path, node string) (contents *cache.Contents, written time.Time, err error) {
	f, err := disk.Open(path)
	if err != nil {
		return nil, written, err
	}
	defer func() { _ = f.Close() }()
	file, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	switch {
	case err != nil:
		return nil, written, err
	case len(file) > maxFile:
		return nil, written, fmt.Errorf("file is larger than %d bytes", maxFile)
	}
	return decode(file, node)
}

// Saved returns when this process last wrote the checkpoint. If it has not, Saved returns when the
// restored checkpoint was written, or the zero time if there was none.
func (p *Checkpoint) Saved() time.Time {
	if t := p.lastSaved.Load(); t != nil {
		return *t
	}
	return p.written
}

// Remove removes a checkpoint and the files that may be left beside it. If the path is
// not a regular file, it removes nothing and returns an error.
func Remove(path string) error {
	if info, err := os.Lstat(path); err == nil && !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file: use the path that the agent writes to", path)
	}
	var errs []error
	for _, suffix := range []string{"", rejectedSuffix, newSuffix, aheadSuffix} {
		if err := os.Remove(path + suffix); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Run saves the cache until the context ends. If no server brings the cache in sync within
// staleGrace, it makes the restored content count.
func (p *Checkpoint) Run(ctx context.Context) {
	// Saves have their own goroutine, because a disk that hangs must delay neither the grace period
	// nor the end of Run.
	saves, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for range saves {
			p.save()
		}
	}()
	p.follow(ctx, saves)
	settled := false
	if p.options.Settled != nil {
		select {
		case <-p.options.Settled:
			settled = true
		case <-time.After(lastStep):
		}
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastSave)
	defer cancel()
	select {
	case saves <- struct{}{}:
	case <-last.Done(): // the previous save is still running
		settled = false
	}
	close(saves)
	select {
	case <-ended:
		// If this process has saved nothing, the kernel holds what it held before.
		if settled && p.lastError == "" && (p.lastSections != nil || !p.ahead) {
			_ = p.options.Disk.Remove(p.options.Path + aheadSuffix) // the kernel may then count as ahead
		}
	case <-last.Done():
		p.log.Warn("Cannot write the last checkpoint in time, the previous one stays",
			"path", p.options.Path, "within", lastSave)
	}
}

func (p *Checkpoint) follow(ctx context.Context, saves chan<- struct{}) {
	var grace <-chan time.Time
	if p.restored {
		grace = time.After(staleGrace)
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-grace:
			if p.options.Cache.UseRestored() {
				p.log.Warn("No server has synced this node yet, using the checkpoint, which may be out of date",
					"age", time.Since(p.written).Round(time.Second), "written", p.written, "path", p.options.Path)
			}
		case <-tick.C:
			select {
			case saves <- struct{}{}:
			default: // the previous save is still running
			}
		}
	}
}

// save writes the cache to the file if it has changed.
func (p *Checkpoint) save() {
	size, err := p.write()
	switch {
	case err != nil:
		p.errors.Inc()
		if err.Error() != p.lastError {
			p.lastError = err.Error()
			p.log.Error("Cannot write the checkpoint, trying again; the previous one stays", "path", p.options.Path,
				"interval", interval, "err", err)
		}
	case size > 0:
		if p.lastError != "" {
			p.lastError = ""
			p.log.Info("Checkpoint is written again", "path", p.options.Path)
		}
		now := time.Now()
		p.lastSaved.Store(&now)
		p.bytes.Set(float64(size))
		p.saved.SetToCurrentTime()
	}
}

// write writes the file and returns its size in bytes. 0 means that nothing has changed since the
// last save.
func (p *Checkpoint) write() (size int, err error) {
	c := p.options.Cache.Contents(p.encoder.lacks)
	if c == nil {
		return 0, nil
	}
	sections, err := p.encoder.encode(p.options.NodeName, c)
	if err != nil || slices.EqualFunc(sections, p.lastSections, bytes.Equal) {
		return 0, err
	}
	for _, s := range sections {
		size += len(s)
	}
	if size > maxFile-fileHeader-checksumSize {
		return 0, fmt.Errorf("checkpoint would be larger than %d bytes", maxFile)
	}
	size, err = replaceFile(p.options.Disk, p.options.Path, func(w io.Writer) (int, error) {
		return writeFile(w, time.Now(), sections)
	})
	if err == nil {
		p.lastSections = sections
	}
	return size, err
}

// replaceFile replaces the file with what write writes, or leaves it unchanged. A reader finds one
// or the other, even after a power failure.
func replaceFile(disk Disk, path string, write func(io.Writer) (int, error)) (size int, err error) {
	if info, err := disk.Stat(path); err == nil && !info.Mode().IsRegular() {
		return 0, errNotRegular(path) // a renaming would replace a device, for example
	}
	// The name is fixed, so that the file that a killed process left behind is overwritten. Such
	// files would pile up otherwise.
	f, err := disk.Create(path + newSuffix)
	if err != nil {
		return 0, err
	}
	buffered := bufio.NewWriterSize(f, 64<<10)
	size, err = write(buffered)
	if err == nil {
		err = buffered.Flush()
	}
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = disk.Rename(path+newSuffix, path)
	}
	if err != nil { // the disk may be full, so the partial file must not stay
		return 0, errors.Join(err, disk.Remove(path+newSuffix))
	}
	return size, disk.SyncDirectory(filepath.Dir(path))
}
