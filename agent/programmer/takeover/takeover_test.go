// These tests prove when the rules of earlier programmers are removed: once the new one has
// programmed what they served, or after a while if it lacks some of that. The programmers are
// fakes, and the clock is a bubble's.
package takeover

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a programmer whose Replace and Apply return err.
type fake struct {
	programmer.Monitor
	err error // returned by Replace and Apply
	// lacks is a family that the programmer does not serve; zero means none.
	lacks model.Family
}

func (f *fake) Families() []model.Family {
	return slices.DeleteFunc([]model.Family{model.IPv4, model.IPv6}, func(family model.Family) bool { return family == f.lacks })
}

func (f *fake) Replace(context.Context, view.State) error { return f.err }

func (f *fake) Apply(context.Context, []view.Change) error { return f.err }

func (f *fake) Watch(ctx context.Context, lost func(string)) {
	lost("watched")
	<-ctx.Done()
}

// other counts the attempts to remove what it left. They fail with err.
type other struct {
	mu    sync.Mutex
	tries int
	err   error
}

func (o *other) cleanup(context.Context) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.tries++
	return o.err
}

func (o *other) fails(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.err = err
}

// pass lets d pass in a bubble.
func pass(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // in a bubble it takes no time
	synctest.Wait()
}

func (o *other) tried() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.tries
}

// take returns a Programmer, the fake inside it, and a function that returns its log.
func take(o *other) (f *fake, p *Programmer, log func() string) {
	var b bytes.Buffer
	f = &fake{}
	p = New(f, []Other{{Name: "other", Cleanup: o.cleanup}}, slog.New(slog.NewTextHandler(&b, nil)))
	return f, p, func() string {
		p.mu.Lock() // guards the buffer, because the Programmer logs with it held
		defer p.mu.Unlock()
		return b.String()
	}
}

func TestOthersAreRemovedOnceEverythingIsProgrammed(t *testing.T) {
	o := &other{}
	f, p, _ := take(o)
	f.err = errors.New("the kernel has no memory")
	require.Equal(t, f.err, p.Replace(t.Context(), view.State{}))
	require.Zero(t, o.tried())
	f.err = nil
	require.NoError(t, p.Replace(t.Context(), view.State{}))
	require.Equal(t, 1, o.tried())
	require.NoError(t, p.Replace(t.Context(), view.State{}))
	require.Equal(t, 1, o.tried(), "nothing is left")
}

// TestPatience asserts that the others' rules stay for a while if the new programmer lacks some of
// what they serve.
func TestPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := &other{}
		f, p, _ := take(o)
		f.err = &programmer.PortError{Err: errors.New("no SCTP")}
		for range 3 {
			require.Equal(t, f.err, p.Replace(t.Context(), view.State{}))
			require.Zero(t, o.tried())
			pass(patience / 3)
		}
		require.Equal(t, f.err, p.Replace(t.Context(), view.State{}))
		require.Equal(t, 1, o.tried())
	})
}

// TestPatienceOfWatch asserts that this while also ends if nothing is programmed any more, and that
// it does not end while nothing is known to be programmed.
func TestPatienceOfWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := &other{}
		f, p, _ := take(o)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			p.Watch(ctx, func(string) {})
		}()
		partly := &programmer.PortError{Err: errors.New("no SCTP")}
		f.err = partly
		require.Equal(t, f.err, p.Replace(t.Context(), view.State{}))
		pass(patience / 2)
		f.err = errors.New("the kernel has no memory")
		require.Equal(t, f.err, p.Apply(t.Context(), []view.Change{{After: &view.ServicePort{}}}))
		pass(patience)
		require.Zero(t, o.tried())
		f.err = partly
		require.Equal(t, f.err, p.Replace(t.Context(), view.State{}))
		require.Equal(t, 1, o.tried())
		cancel()
		<-ended

		o = &other{}
		f, p, _ = take(o)
		ctx, cancel = context.WithCancel(t.Context())
		ended = make(chan struct{})
		go func() {
			defer close(ended)
			p.Watch(ctx, func(string) {})
		}()
		f.err = partly
		require.Equal(t, f.err, p.Replace(t.Context(), view.State{}))
		pass(patience - retryAfter)
		require.Zero(t, o.tried())
		pass(2 * retryAfter)
		require.Equal(t, 1, o.tried())
		cancel()
		<-ended
	})
}

// TestApplyRemovesOthers asserts that the others' rules go as soon as an Apply has programmed the
// last of what a Replace could not, and that they stay after an Apply of something else.
func TestApplyRemovesOthers(t *testing.T) {
	o := &other{}
	f, p, _ := take(o)
	port := func(name string) *view.ServicePort {
		return &view.ServicePort{ID: view.ServicePortID{Port: name}}
	}
	fails := func(names ...string) (err error) {
		for _, name := range names {
			err = errors.Join(err, &programmer.PortError{ID: port(name).ID, Err: errors.New("it is another's")})
		}
		return err
	}
	f.err = fails("a", "b")
	require.Equal(t, f.err, p.Replace(t.Context(), view.State{}))
	for _, step := range []struct {
		change view.Change
		err    error
		tried  int
	}{
		{view.Change{After: port("c")}, fails("c"), 0},
		{view.Change{Before: port("a"), After: port("a")}, nil, 0},
		{view.Change{Before: port("b"), After: port("b")}, fails("b"), 0},
		{view.Change{Before: port("b")}, nil, 0},
		{view.Change{After: port("d")}, nil, 0},
		{view.Change{After: port("c")}, nil, 1},
		{view.Change{Before: port("c")}, nil, 1},
	} {
		f.err = step.err
		require.Equal(t, f.err, p.Apply(t.Context(), []view.Change{step.change}))
		require.Equal(t, step.tried, o.tried())
	}
}

// TestFailedFamilyKeepsOthers asserts that the others' rules stay as long as nothing of an IP
// family is programmed, whatever happens to the other family. The time for single Service ports
// begins only after that.
func TestFailedFamilyKeepsOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := &other{}
		f, p, _ := take(o)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			p.Watch(ctx, func(string) {})
		}()
		out := &programmer.FamilyError{Family: model.IPv6, Err: errors.New("another program holds the lock")}
		partly := &programmer.PortError{ID: view.ServicePortID{Port: "a"}, Err: errors.New("no SCTP")}
		for range 3 {
			f.err = errors.Join(out, partly)
			require.Equal(t, f.err, p.Replace(t.Context(), view.State{}))
			f.err = nil
			require.NoError(t, p.Apply(t.Context(), []view.Change{{After: &view.ServicePort{ID: partly.ID}}}), "all of the other family")
			pass(2 * patience)
			require.Zero(t, o.tried())
		}
		f.err = partly
		require.Equal(t, f.err, p.Replace(t.Context(), view.State{}))
		pass(patience - retryAfter)
		require.Zero(t, o.tried())
		pass(2 * retryAfter)
		require.Equal(t, 1, o.tried())
		cancel()
		<-ended

		o = &other{}
		f, p, _ = take(o)
		f.err = out
		require.Equal(t, f.err, p.Replace(t.Context(), view.State{}))
		f.err = nil
		require.NoError(t, p.Replace(t.Context(), view.State{}))
		require.Equal(t, 1, o.tried())
	})
}

// TestUnsupportedFamily asserts that a family counts as failed, and that the others' rules stay,
// if Services want the family, one of the others served it and the programmer lacks it. A family
// that none of the others served is no fault.
func TestUnsupportedFamily(t *testing.T) {
	four := &view.ServicePort{ID: view.ServicePortID{Port: "four", Family: model.IPv4}}
	six := &view.ServicePort{ID: view.ServicePortID{Port: "six", Family: model.IPv6}}
	wanted := func(ports ...*view.ServicePort) view.State {
		s := view.State{Ports: map[view.ServicePortID]*view.ServicePort{}}
		for _, p := range ports {
			s.Ports[p.ID] = p
		}
		return s
	}
	for name, c := range map[string]struct {
		lacks  model.Family
		wanted view.State
		serves bool
		err    error
		stays  bool
	}{
		"served":     {model.IPv6, wanted(four, six), true, nil, true},
		"not known":  {model.IPv6, wanted(four, six), false, errors.New("no answer"), true},
		"not served": {model.IPv6, wanted(four, six), false, nil, false},
		"not wanted": {model.IPv6, wanted(four), true, nil, false},
		"not left":   {0, wanted(four, six), true, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			o := &other{}
			f, p, _ := take(o)
			f.lacks = c.lacks
			p.others[0].Serves = func(family model.Family) (bool, error) {
				require.Equal(t, model.IPv6, family)
				return c.serves, c.err
			}
			ports, failed := programmer.Split(p.Replace(t.Context(), c.wanted), p.Families())
			require.Empty(t, ports)
			if !c.stays {
				require.Empty(t, failed)
				require.Equal(t, 1, o.tried())
				return
			}
			require.Len(t, failed, 1)
			require.ErrorContains(t, failed[model.IPv6], "other")
			require.NoError(t, p.Apply(t.Context(), []view.Change{{After: four}}))
			require.Zero(t, o.tried())
			require.NoError(t, p.Replace(t.Context(), wanted(four)), "nobody wants the family any more")
			require.Equal(t, 1, o.tried())
		})
	}
}

// TestUnsupportedPrimaryFamily asserts that the programmer's own reason counts for a family that
// another programmer has served. Here the node's primary family is missing.
func TestUnsupportedPrimaryFamily(t *testing.T) {
	o := &other{}
	f, p, _ := take(o)
	f.lacks = model.IPv4
	f.err = &programmer.FamilyError{Family: model.IPv4, Err: errors.New("it is the primary one")}
	p.others[0].Serves = func(model.Family) (bool, error) { return true, nil }
	four := &view.ServicePort{ID: view.ServicePortID{Port: "four", Family: model.IPv4}}
	state := view.State{Ports: map[view.ServicePortID]*view.ServicePort{four.ID: four}}
	_, failed := programmer.Split(p.Replace(t.Context(), state), p.Families())
	require.Len(t, failed, 1)
	require.EqualError(t, failed[model.IPv4], "it is the primary one")
	require.Zero(t, o.tried())
}

// TestRemovalIsRetried asserts that Watch removes later what could not be removed at first, because
// of an error or of open connections.
func TestRemovalIsRetried(t *testing.T) {
	for name, c := range map[string]struct {
		err        error
		says, ends string
	}{
		"failure":  {errors.New("no lock"), "level=ERROR", ""},
		"draining": {programmer.ErrDraining, "level=INFO", "Removed the rules of another programmer"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := &other{err: c.err}
				_, p, log := take(o)
				ctx, cancel := context.WithCancel(t.Context())
				lost, ended := make(chan string, 1), make(chan struct{})
				go func() {
					defer close(ended)
					p.Watch(ctx, func(reason string) { lost <- reason })
				}()
				require.Equal(t, "watched", <-lost)
				pass(2 * retryAfter)
				require.Zero(t, o.tried(), "it is not time yet")
				require.NoError(t, p.Replace(t.Context(), view.State{}))
				require.Contains(t, log(), c.says)
				pass(2*retryAfter + retryAfter/2)
				require.Equal(t, 3, o.tried())
				if errors.Is(c.err, programmer.ErrDraining) {
					require.Equal(t, 1, strings.Count(log(), "\n"), "it is said once")
				}
				o.fails(nil)
				pass(5 * retryAfter)
				require.Equal(t, 4, o.tried())
				require.Contains(t, log(), c.ends)
				cancel()
				<-ended
			})
		})
	}
}
