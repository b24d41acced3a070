package file

import (
	"cmp"
	"fmt"
	"io"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/slicecast/slicecast/internal/source"
)

// Read reads the objects of an API server, as JSON values one after the other or as YAML documents,
// and gives them to the sink once. It uses the ServiceProxyName and the Log of the options. It
// returns an error if an object cannot be read.
func Read(in io.Reader, name string, o Options, sink source.Sink) error {
	text, err := io.ReadAll(in)
	if err != nil {
		return fmt.Errorf("read objects from %s: %w", name, err)
	}
	log := cmp.Or(o.Log, slog.Default())
	p := parser{source.NewConverter(o.ServiceProxyName), log, true}
	if len(text) > 0 && text[0] == '{' {
		name += ".json" // the extension decides how the file is read
	}
	f := p.parse(name, text, nil)
	if f.unread != "" {
		return fmt.Errorf("read objects: %s", f.unread)
	}
	s := &Source{files: files{known: map[string]*file{name: f}}, mirrors: mirrors{}}
	now := s.assemble()
	s.fill(source.WithServiceCIDRs(sink, source.NewSkips(log, prometheus.NewRegistry())), now)
	return nil
}
