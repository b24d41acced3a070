// Package file is the source that reads a directory of Kubernetes manifests: for clusters without an API server, for trying
// Slicecast out, and for tests. It does what an API server and the mirroring controller would do with the same manifests,
// except that it allocates nothing: cluster IPs and node ports must be given.
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
	// debounce is how long after an event the directory is read: one save of an editor makes several.
	debounce = 10 * time.Millisecond
	// absence is how often a missing directory is looked for.
	absence = 250 * time.Millisecond
	// rescan is how often the directory is read without an event: links may lead to files elsewhere, and network file
	// systems do not tell of changes made on other machines.
	rescan = 10 * time.Second
)

// Options of a Source. All but ServiceProxyName are required.
type Options struct {
	Directory string
	// ServiceProxyName is the value of the label service.kubernetes.io/service-proxy-name of the Services to serve; empty:
	// those without the label.
	ServiceProxyName string
	Log              *slog.Logger
	Metrics          prometheus.Registerer
}

// Source reads the *.yaml, *.yml and *.json files of one directory, not of those below it, and follows their changes. Where
// two files hold the same object, the first by name has it.
type Source struct {
	directory string
	log       *slog.Logger
	skips     *source.Skips
	gauge     prometheus.Gauge
	files     files
	mirrors   mirrors

	held     map[model.Key]source.Object // what the sink was given
	problems []problem                   // as last reported
}

var _ source.Source = (*Source)(nil)

// New gives a Source, or an error that says what is wrong with the directory.
func New(o Options) (*Source, error) {
	if _, err := os.ReadDir(o.Directory); err != nil {
		return nil, fmt.Errorf("directory of manifests: %w; create it, or name one that this process may read", err)
	}
	return &Source{
		directory: filepath.Clean(o.Directory),
		log:       o.Log,
		skips:     source.NewSkips(o.Log, o.Metrics),
		gauge: promauto.With(o.Metrics).NewGauge(prometheus.GaugeOpts{
			Name: "slicecast_source_file_problems",
			Help: "Manifests, or parts of them, that cannot be used as they are now; the log says which and why.",
		}),
		files: files{
			directory: filepath.Clean(o.Directory),
			parser:    parser{source.NewConverter(o.ServiceProxyName), o.Log},
			known:     map[string]*file{},
			pending:   map[string]*pending{},
		},
		mirrors: mirrors{},
		held:    map[model.Key]source.Object{},
	}, nil
}

// Run implements source.Source. It fails only where the kernel has no file notifications left.
func (s *Source) Run(ctx context.Context, sink source.Sink) error {
	sink = source.WithServiceCIDRs(sink, s.skips)
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch of directory %s: %w; is the sysctl fs.inotify.max_user_instances too low?", s.directory, err)
	}
	defer func() { _ = watcher.Close() }()

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
		case err := <-watcher.Errors: // such as an overflow: events are missing
			s.log.Debug("file notifications failed, reading the directory", "directory", s.directory, "error", err)
			wake(debounce)
		case <-watcher.Events:
			if time.Until(due) > debounce {
				wake(debounce)
			}
		case <-timer.C:
			// The watch is renewed each time: it does nothing on the same directory, and the path may be another one by now.
			err := watcher.Add(s.directory)
			wait, settled := s.files.scan()
			if err != nil && s.files.problem == nil {
				s.files.problem = &problem{file: s.directory, detail: fmt.Sprintf(
					"cannot be watched, changes are seen late: %v; is the sysctl fs.inotify.max_user_watches too low?", err)}
			}
			now := s.assemble()
			s.report(now.problems)
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
