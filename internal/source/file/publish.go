package file

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
)

// state is the combined content of all files.
type state struct {
	objects  map[model.Key]model.Keyed
	skips    map[model.Key][]source.Skip
	problems []problem
}

var kinds = []model.Kind{model.KindService, model.KindSlice, model.KindNode, model.KindServiceCIDR}

func (st *state) problem(o *object, format string, args ...any) {
	st.problems = append(st.problems, problem{o.file, o.line, fmt.Sprintf(format, args...)})
}

// assemble combines the content of the files with the slices that Endpoints objects are mirrored
// to, and collects the problems. If an object occurs more than once, the first one counts, in the
// order of file names and then of lines; the others are problems.
func (s *Source) assemble() state {
	st := state{objects: map[model.Key]model.Keyed{}, skips: map[model.Key][]source.Skip{}}
	if s.files.problem != nil {
		st.problems = append(st.problems, *s.files.problem)
	}
	st.problems = append(st.problems, s.files.strange...)
	objects := map[objectID]*object{}
	for _, name := range slices.Sorted(maps.Keys(s.files.known)) {
		f := s.files.known[name]
		st.problems = append(st.problems, f.problems...)
		for _, o := range f.objects {
			if first := objects[o.id]; first != nil {
				st.problem(o, "%s is already in %s:%d, and that one is used: remove one of them", o.id, first.file, first.line)
				continue
			}
			objects[o.id] = o
			if o.model != nil { // nil for Endpoints, which mirror reads, and for what nodes do not use
				st.objects[o.model.Key()] = o.model
			}
			if len(o.skips) > 0 {
				st.skips[o.key] = o.skips
			}
		}
	}
	s.mirror(&st, objects)
	return st
}

// mirror adds the slices of Endpoints objects whose Services have no selector.
func (s *Source) mirror(st *state, objects map[objectID]*object) {
	mirrored := map[model.ServiceKey]bool{}
	byName := func(a, b objectID) int { return cmp.Compare(a.String(), b.String()) }
	for _, id := range slices.SortedFunc(maps.Keys(objects), byName) {
		o, service := objects[id], objects[objectID{model.KindService.String(), id.namespace, id.name}]
		if o.endpoints == nil || o.endpoints.skip || service == nil || service.hasSelector {
			continue
		}
		key := model.ServiceKey{Namespace: id.namespace, Name: id.name}
		mirrored[key] = true
		for _, slice := range s.mirrors.slices(key, o.endpoints) {
			if _, taken := st.objects[slice.Key()]; taken {
				st.problem(o, "%s is mirrored to %s, which is also in a manifest: rename the one in the manifest", id, slice.Key())
			} else if err := slice.Check(); err != nil {
				st.problem(o, "%s cannot be mirrored to %s: %v", id, slice.Key(), err)
			} else {
				st.objects[slice.Key()] = slice
			}
		}
	}
	maps.DeleteFunc(s.mirrors, func(key model.ServiceKey, _ *mirror) bool { return !mirrored[key] })
}

func (s *Source) fill(sink source.Sink, now state) {
	for _, kind := range kinds {
		var objects []model.Keyed
		for key, o := range now.objects {
			if key.Kind == kind {
				objects = append(objects, o)
			}
		}
		sink.Replace(kind, objects, 0)
	}
	s.held = now.objects
}

func (s *Source) follow(sink source.Sink, now state) {
	for _, key := range slices.SortedFunc(maps.Keys(now.objects), model.Key.Compare) {
		if s.held[key] != now.objects[key] {
			sink.Upsert(now.objects[key], 0)
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(s.held), model.Key.Compare) {
		if now.objects[key] == nil {
			sink.Remove(key, 0)
		}
	}
	s.held = now.objects
}

// report logs new problems, and the end of problems that are over.
func (s *Source) report(problems []problem) {
	s.gauge.Set(float64(len(problems)))
	for _, p := range problems {
		if !slices.Contains(s.problems, p) {
			s.log.Warn("Found a problem in a manifest", "problem", p.String(), "directory", s.files.directory)
		}
	}
	for _, p := range s.problems {
		if !slices.Contains(problems, p) {
			s.log.Info("Problem in a manifest is solved", "problem", p.String(), "directory", s.files.directory)
		}
	}
	s.problems = problems
}
