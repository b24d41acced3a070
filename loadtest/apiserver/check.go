package apiserver

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/slicecast/slicecast/loadtest/fleet"
)

const (
	// maxNamed is the maximum number of watchers that an error lists.
	maxNamed = 10
	// retryCheck is the pause before watchers that were not equal are checked again.
	retryCheck = 200 * time.Millisecond
)

// Objects returns the numbers of Services, slices and endpoints on the first node.
func (w *Watchers) Objects() (services, endpointSlices, endpoints int) {
	held := func(of *stream) (numbers []int) {
		of.mu.Lock()
		defer of.mu.Unlock()
		for number, version := range of.held {
			if version != 0 {
				numbers = append(numbers, number)
			}
		}
		return numbers
	}
	all := held(w.all[0].streams[1])
	return len(held(w.all[0].streams[0])), len(all), w.decoder.endpoints(all)
}

// Check compares what each watcher holds with what the API server has, by the resource versions of
// all objects. It follows the API server until the Services and the slices of each watcher were
// equal once, or the context ends. The error then wraps fleet.ErrDiverged.
func (w *Watchers) Check(ctx context.Context) error {
	// Going on after ctx lets the error describe the state at its end.
	following, stop := context.WithCancel(context.WithoutCancel(ctx))
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	r, err := w.startReference(following, &running)
	if err != nil {
		return err
	}
	pending := slices.Clone(w.Members)
	for {
		if pending = slices.DeleteFunc(pending, r.holds); len(pending) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return r.diverged(pending)
		case <-time.After(retryCheck):
		}
	}
}

// Holding returns a function that returns those of the given nodes that hold what the API server
// has, or had since the call of Holding; see Check. The function works until the context ends.
// Until then, goroutines of running follow the API server.
func (w *Watchers) Holding(ctx context.Context, running *sync.WaitGroup) (func([]*fleet.Member) []*fleet.Member, error) {
	r, err := w.startReference(ctx, running)
	if err != nil {
		return nil, err
	}
	return func(members []*fleet.Member) []*fleet.Member {
		return slices.DeleteFunc(slices.Clone(members), func(m *fleet.Member) bool { return !r.holds(m) })
	}, nil
}

// compared is the number of streams that are compared. The last one is not, because it is the
// watcher's own Node.
const compared = 2

// reference is one more watcher. No figure includes it. It records all states that the API server
// had since it was started.
type reference struct {
	of      *Watchers
	streams []*stream
	nodes   [][compared]comparison // by Index
}

// comparison is the comparison of one stream of a node: whether it was equal once, and otherwise
// which state to look for.
type comparison struct {
	equal bool
	last  sight
}

// sight is a state of a stream: its digest, and its resourceVersion as a number.
type sight struct{ digest, version uint64 }

// startReference starts a reference that follows the API server until the context ends, in
// goroutines of running.
func (w *Watchers) startReference(ctx context.Context, running *sync.WaitGroup) (*reference, error) {
	n, err := w.newWatcher(&fleet.Member{Index: -1, Name: "reference"})
	if err != nil {
		return nil, err
	}
	r := &reference{of: w, streams: n.streams[:compared], nodes: make([][compared]comparison, len(w.all))}
	for i, n := range w.all {
		for j := range r.nodes[i] {
			r.nodes[i][j].last = n.streams[j].sight()
		}
	}
	var following sync.WaitGroup
	for _, s := range r.streams {
		s.had = make(map[uint64]struct{})
		following.Go(func() { w.follow(ctx, s) })
	}
	running.Go(func() {
		following.Wait()
		n.transport.CloseIdleConnections()
	})
	return r, nil
}

// holds reports whether each stream of a node was in a state that the API server had since the
// start of the reference. The node may be ahead of the reference. Its state is therefore remembered
// until the reference has reached that version.
func (r *reference) holds(m *fleet.Member) bool {
	all := true
	for i, of := range r.streams {
		c := &r.nodes[m.Index][i]
		if !c.equal {
			now, reached := r.of.all[m.Index].streams[i].sight(), of.sight()
			c.equal = of.hasHad(c.last) || of.hasHad(now)
			if reached.version >= c.last.version {
				c.last = now
			}
		}
		all = all && c.equal
	}
	return all
}

func (s *stream) sight() sight {
	s.mu.Lock()
	defer s.mu.Unlock()
	version, _ := strconv.ParseUint(s.resourceVersion, 10, 64) // 0 if the list is not complete
	return sight{s.digest, version}
}

func (s *stream) hasHad(state sight) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, had := s.had[state.digest]
	return had
}

func (r *reference) diverged(members []*fleet.Member) error {
	what := "differ from what the API server has"
	if err := r.missing(); err != nil {
		what = fmt.Sprintf("could not be compared with what the API server has (%v): check that it answers and "+
			"lets the kubeconfig's user list and watch Services and EndpointSlices, or raise --timeout", err)
	}
	digests := func(streams []*stream) [compared]uint64 {
		return [...]uint64{streams[0].sight().digest, streams[1].sight().digest}
	}
	var named []string
	for _, m := range members[:min(len(members), maxNamed)] {
		have := digests(r.of.all[m.Index].streams)
		named = append(named, fmt.Sprintf("  watcher %s: digests of Services and slices %016x, should be %016x", m.Name, have, digests(r.streams)))
	}
	return fmt.Errorf("%w: %d watchers %s:\n%s", fleet.ErrDiverged, len(members), what, strings.Join(named, "\n"))
}

// missing says why the reference does not have the API server's state. It returns nil if it does.
func (r *reference) missing() error {
	for _, s := range r.streams {
		s.mu.Lock()
		has, failed := s.open && s.resourceVersion != "", s.failed
		s.mu.Unlock()
		switch {
		case has:
		case failed != nil:
			return fmt.Errorf("%s: %w", s.path, failed)
		default:
			return fmt.Errorf("%s: no complete list came in time", s.path)
		}
	}
	return nil
}
