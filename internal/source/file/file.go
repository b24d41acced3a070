// Package file is the source that reads a directory of Kubernetes manifests. It is for clusters
// without an API server, for trying Slicecast out, and for tests. It treats the manifests as an API
// server and its mirroring controller would, but it allocates nothing: manifests must have cluster
// IPs and node ports.
package file

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
)

const (
	// debounce is how long after an event the directory is read, as an editor causes several events
	// when it saves a file.
	debounce = 10 * time.Millisecond
	// absence is how often a missing directory is looked for.
	absence = 250 * time.Millisecond
	// rescan is how often the directory is read without an event. Links may lead to files
	// elsewhere, and network file systems do not report changes that other machines make.
	rescan = 10 * time.Second
)

// Options configures a Source. All fields except ServiceProxyName are required.
type Options struct {
	Directory string
	// ServiceProxyName is the value of the label service.kubernetes.io/service-proxy-name of the
	// Services to serve. If it is empty, Services without the label are served.
	ServiceProxyName string
	Log              *slog.Logger
	Metrics          prometheus.Registerer
}

// Source reads the *.yaml, *.yml and *.json files of one directory, without its subdirectories, and
// follows their changes. If two files contain the same object, the file whose name sorts first
// counts.
type Source struct {
	log     *slog.Logger
	skips   *source.Skips
	gauge   prometheus.Gauge
	files   files
	mirrors mirrors

	held     map[model.Key]model.Keyed // what the sink holds
	problems []problem                 // as last reported

	newWatcher func() (*fsnotify.Watcher, error)
}

var _ source.Source = (*Source)(nil)

// New returns a Source. It returns an error if the directory cannot be read.
func New(o Options) (*Source, error) {
	if _, err := os.ReadDir(o.Directory); err != nil {
		return nil, fmt.Errorf("read the directory of manifests: %w; create it, or set --manifests to another one", err)
	}
	return &Source{
		log:   o.Log,
		skips: source.NewSkips(o.Log, o.Metrics),
		gauge: promauto.With(o.Metrics).NewGauge(prometheus.GaugeOpts{
			Name: "slicecast_source_file_problems",
			Help: "Number of current problems in manifests; the log names each with its file and line.",
		}),
		files: files{
			directory: filepath.Clean(o.Directory),
			parser:    parser{converter: source.NewConverter(o.ServiceProxyName), log: o.Log},
			known:     map[string]*file{},
			pending:   map[string]*pending{},
		},
		mirrors: mirrors{},
		held:    map[model.Key]model.Keyed{},

		newWatcher: fsnotify.NewWatcher,
	}, nil
}

// Run implements source.Source. It does not fail: without notifications, it reads the directory
// again from time to time.
func (s *Source) Run(ctx context.Context, sink source.Sink) error {
	sink = source.WithServiceCIDRs(sink, s.skips)
	var watcher *fsnotify.Watcher // nil while the kernel has none left
	var events <-chan fsnotify.Event
	var failures <-chan error
	defer func() {
		if watcher != nil {
			_ = watcher.Close()
		}
	}()

	timer := time.NewTimer(0)
	defer timer.Stop()
	due := time.Now()
	wake := func(after time.Duration) {
		timer.Reset(after)
		due = time.Now().Add(after)
	}
	synced := false
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-failures: // an overflow, for example: events are missing
			s.log.Debug("File notifications failed, reading the directory", "directory", s.files.directory, "err", err)
			wake(debounce)
		case <-events:
			if time.Until(due) > debounce {
				wake(debounce)
			}
		case <-timer.C:
			var err error
			if watcher == nil {
				if watcher, err = s.newWatcher(); err == nil {
					events, failures = watcher.Events, watcher.Errors
				}
			}
			// The watch is renewed each time. That has no effect on the same directory, but the
			// path may meanwhile be another one.
			if err == nil {
				err = watcher.Add(s.files.directory)
			}
			wait, settled := s.files.scan()
			if err != nil && s.files.problem == nil {
				s.files.problem = &problem{file: s.files.directory, detail: fmt.Sprintf("cannot be watched, so changes take effect "+
					"late: %v; is the sysctl fs.inotify.max_user_instances or max_user_watches too low?", err)}
			}
			now := s.assemble()
			s.report(now.problems)
			s.skips.Replace(now.skips, kinds...)
			switch {
			case synced:
				s.follow(sink, now)
			case settled:
				s.fill(sink, now)
				sink.Synced()
				synced = true
			}
			wake(wait)
		}
	}
}
