package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"reflect"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
)

// backoff is the delay between attempts. Its cap is far below client-go's 30 seconds, which is
// meant for thousands of clients. Here, a few servers ask, and each of them serves many nodes.
var backoff = wait.Backoff{Duration: 200 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 10, Cap: 5 * time.Second}

// backoffReset is how often the back-off starts at its minimum again.
const backoffReset = time.Minute

// listPause bounds the time from one list to the next if watches after them do not last, whatever
// the reason. A list of a large cluster costs the API server far more than a refused request.
var listPause = 30 * time.Second

// listTime bounds a request for a list or one of its pages, and the time until a watch is accepted.
// API servers answer within a minute.
const listTime = 2 * time.Minute

// lastingWatch is how long a list has to be followed until the next list need not wait.
const lastingWatch = time.Minute

// absence is how often an API server that lacks an optional kind, or does not permit access to it,
// is asked again.
var absence = time.Minute

type shared struct {
	converter *source.Converter
	skips     *source.Skips
	metrics   *metrics
}

// resource watches one kind of object. It is the reflector's client of the API server, where it
// counts and reports requests. It is also the reflector's store, which passes objects to the sink.
type resource struct {
	shared
	kind    model.Kind
	example metav1.Object
	server  *cache.ListWatch
	// other makes the same requests as server over connections that no other resource uses, which
	// are those of apart. If these are closed first, the next request goes over a new connection.
	// Behind a load balancer, it may reach another API server.
	other *cache.ListWatch
	apart *http.Client
	log   *slog.Logger
	// optional means that the sync only waits for the API server's first answer, whatever it is.
	optional bool

	contact contact
	failing atomic.Bool // whether the last request failed and that was reported
	absent  atomic.Bool // whether it was reported that the kind is absent
	// plain means that a watch has made no progress, so that the next list must not be streamed.
	plain atomic.Bool

	// Only the reflector's goroutine uses the fields below.
	sink     source.Sink
	synced   func() // nil once it has been called
	watch    watch.Interface
	highest  uint64 // highest resourceVersion seen
	objects  int    // number of objects that the API server has, by the last list and the events since
	doubted  bool   // the API server has named an older resourceVersion than highest
	switched bool   // requests go to other
	// connection is that of the last list or watch.
	connection net.Conn
	// listEnd is when the last list was complete; zero means that none has been since run looked, or
	// that another one has to confirm it.
	listEnd time.Time
}

func (r *resource) run(ctx context.Context, sink source.Sink, synced func()) {
	r.sink, r.synced = sink, synced
	reflector := cache.NewReflectorWithOptions(
		&cache.ListWatch{ListWithContextFunc: r.list, WatchFuncWithContext: r.openWatch},
		r.example, r, cache.ReflectorOptions{Name: r.kind.String(), Backoff: &backoff})
	var pause time.Duration // before the next list
	_ = backoff.DelayWithReset(clock.RealClock{}, backoffReset).Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		// Only requests and Replace fail here, and they have reported it.
		err := reflector.ListAndWatchWithContext(ctx)
		if ctx.Err() != nil {
			return true, err // the reflector does not wait for the end of its request
		}
		elsewhere := r.doubted && r.confirm(ctx)
		r.switchTo(elsewhere || r.plain.Load())
		if answer := apierrors.APIStatus(nil); r.optional && errors.As(err, &answer) {
			r.done()
			if isAbsence(err) {
				select {
				case <-ctx.Done():
				case <-time.After(absence):
				}
			}
		}
		if r.listEnd.IsZero() {
			return false, nil
		}
		lasted := time.Since(r.listEnd)
		r.listEnd = time.Time{}
		if lasted >= lastingWatch {
			pause = 0
			return false, nil
		}
		if rest := wait.Jitter(pause, backoff.Jitter) - lasted; rest > 0 {
			// Nothing is followed meanwhile, so what the server has is stale.
			r.contact.fail(time.Now(), fmt.Errorf("watches end soon after their lists: the next list is in %v", rest.Round(time.Second)))
			select {
			case <-ctx.Done():
			case <-time.After(rest):
			}
		}
		pause = min(max(2*pause, backoff.Duration), listPause)
		return false, nil
	})
}

// done reports, once, that the sync need not wait for this kind any longer.
func (r *resource) done() {
	if r.synced != nil {
		r.synced()
		r.synced = nil
	}
}

// isAbsence reports whether the API server lacks a kind, or does not permit access to it.
func isAbsence(err error) bool { return apierrors.IsNotFound(err) || apierrors.IsForbidden(err) }

// switchTo lets requests go over a new connection of their own, or over the one of all resources.
func (r *resource) switchTo(other bool) {
	r.switched = other
	r.apart.CloseIdleConnections()
}

// requests returns what the reflector's requests are made with.
func (r *resource) requests() *cache.ListWatch {
	if r.switched {
		return r.other
	}
	return r.server
}

// list lists objects for the reflector, if the API server does not stream lists.
func (r *resource) list(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	switch {
	case r.plain.Load():
		// A cache that stands still would answer a request for what was seen. Its present state can
		// be large, so request pages.
		o.ResourceVersion, o.ResourceVersionMatch, o.Limit = "", "", listPage
	case o.ResourceVersion == "0":
		// The reflector would accept the first list from any cache, however old. Nodes may have
		// seen newer state, so request the present state.
		o.ResourceVersion = ""
	}
	inTime, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	ended := r.contact.ask(time.Now())
	list, err := r.requests().ListWithContextFunc(r.traced(inTime), o)
	if m, errList := meta.ListAccessor(list); err == nil && errList == nil && o.Continue != "" && m.GetContinue() == o.Continue {
		err = errors.New("the API server answers the same page again: is there a proxy in front of it that drops parameters?")
	}
	r.report(ctx, "list", o, err)
	ended()
	return list, err
}

// traced returns a context for a list or watch, whose connection is remembered.
func (r *resource) traced(ctx context.Context) context.Context {
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) { r.connection = i.Conn }})
}

// listPage is the number of objects of a page, as client-go requests them.
const listPage = 500

// confirmations is how many questions have to be answered from the past, too, before a list from
// the past is followed. Each is asked over another connection, confirmPause after the one before.
const confirmations = 3

// confirmPause is the pause before each of these questions. Tests change it.
var confirmPause = 2 * time.Second

// confirm finds out whether the API server's state has gone back for good, as after a restore of
// etcd, or only that of one API server behind a load balancer. In the first case it lowers highest
// to the newest resourceVersion that any connection has named, so that the next list is accepted if
// it is no older. confirm reports whether an API server was found that has not gone back.
func (r *resource) confirm(ctx context.Context) (elsewhere bool) {
	r.doubted = false
	r.contact.refuse(time.Now(), fmt.Errorf("the API server has gone back from resourceVersion %d, asking over other connections", r.highest))
	var newest uint64
	for range confirmations {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(confirmPause):
		}
		r.apart.CloseIdleConnections()
		once, cancel := context.WithTimeout(ctx, askOnce)
		list, err := r.other.ListWithContextFunc(once, metav1.ListOptions{Limit: 1})
		cancel()
		var rv uint64
		if err == nil {
			rv, err = strconv.ParseUint(resourceVersion(list), 10, 64)
		}
		switch {
		case err != nil:
			r.log.Debug("Cannot determine whether the API server's state has gone back, trying again", "err", err)
			return false
		case rv >= r.highest:
			r.log.Info("The API server's state has not gone back over another connection, following that",
				"highest", r.highest, "resourceVersion", rv)
			return true
		}
		newest = max(newest, rv)
	}
	r.log.Warn("Cluster state went back in time, following it: was etcd restored from a backup?",
		"from", r.highest, "to", newest)
	r.highest = newest
	return false
}

// askInterval is the pause before the API server is asked for its resourceVersion again, after an
// error.
const askInterval = time.Second

// askOnce bounds one request for the API server's resourceVersion, and how long a list or watch may
// be unanswered until the source counts as stale. So it soon knows if packets to the API server are
// dropped.
const askOnce = 5 * time.Second

// askTime bounds how long the API server is asked for its resourceVersion. Tests change it.
var askTime = 20 * time.Second

// ahead returns an error if the API server has not reached the resourceVersion at which a watch has
// begun, as after a restore of etcd. The API server accepts such a watch, and is silent until it
// has reached that version, whatever happens to its objects meanwhile. The question comes after the
// watch: a request for a watch is repeated by client-go, so etcd may be restored before it is
// accepted. After it, a restore ends the watch, because the API server must restart. If the API
// server is down or does not permit access to the kind, ahead returns an error, too. If its
// resourceVersion cannot be determined, ahead returns nil.
func (r *resource) ahead(ctx context.Context, known string) error {
	asking, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	for {
		once, cancel := context.WithTimeout(asking, askOnce)
		list, err := r.requests().ListWithContextFunc(once, metav1.ListOptions{Limit: 1})
		cancel()
		if err == nil {
			return r.isAhead(known, resourceVersion(list))
		}
		if utilnet.IsConnectionRefused(err) || isAbsence(err) {
			return err
		}
		if ctx.Err() == nil {
			r.contact.fail(time.Now(), err)
		}
		select {
		case <-asking.Done():
			r.log.Debug("Cannot determine the resourceVersion of the API server, resuming the watch", "err", err)
			return nil
		case <-time.After(askInterval): // it may be starting
		}
	}
}

func (r *resource) isAhead(known, of string) error {
	have, _ := strconv.ParseUint(of, 10, 64) // 0 if it is not a number
	want, _ := strconv.ParseUint(known, 10, 64)
	if have == 0 || have >= want {
		return nil
	}
	r.doubted = true
	return apierrors.NewResourceExpired(fmt.Sprintf("the API server is at resourceVersion %d, and %d was seen", have, want))
}

// resourceVersion returns the resourceVersion of a list, or an empty string if it has none.
func resourceVersion(list runtime.Object) string {
	m, err := meta.ListAccessor(list)
	if err != nil {
		return ""
	}
	return m.GetResourceVersion()
}

// errNoWatch means that a request for a watch was not answered.
var errNoWatch = errors.New("the request timed out, or the connection was closed before there was an answer")

// isEmpty reports whether w is what client-go returns instead of an error if a request for a watch
// times out or its connection is closed. The reflector then tries again.
func isEmpty(w watch.Interface) bool {
	return reflect.TypeOf(w) == reflect.TypeOf(watch.NewEmptyWatch())
}

// openWatch opens watches for the reflector, including those that begin with a list.
func (r *resource) openWatch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	streams := o.SendInitialEvents != nil
	if streams && r.contact.isStreaming() { // the last streamed list has ended before it was complete
		r.plain.Store(true)
	}
	if r.plain.Load() {
		r.switchTo(true)
		if streams {
			return nil, errPlain
		}
		return nil, apierrors.NewResourceExpired(errPlain.Error())
	}
	if !streams && r.contact.isCheckDue(time.Now()) {
		return nil, apierrors.NewResourceExpired("the last watch was resumed after an outage")
	}
	r.metrics.watches.WithLabelValues(r.kind.String()).Inc()
	ended := r.contact.ask(time.Now())
	defer func() { ended() }() // after what it has ended with is reported
	answered, cancel := context.WithCancel(ctx)
	late := time.AfterFunc(listTime, cancel)
	before := r.connection
	w, err := r.requests().WatchFuncWithContext(r.traced(answered), o)
	late.Stop()
	if err == nil && isEmpty(w) {
		cancel()
		r.report(ctx, "watch", o, errNoWatch)
		return w, nil
	}
	if err == nil && !streams {
		if err = r.ahead(ctx, o.ResourceVersion); err != nil {
			w.Stop()
		} else {
			r.contact.resume(time.Now(), r.connection == before)
		}
	}
	r.report(ctx, "watch", o, err)
	if err != nil {
		cancel()
		if streams && utilnet.IsConnectionRefused(err) {
			// The reflector would sleep on this error without watching ctx. run's back-off watches
			// it.
			return nil, errors.New(err.Error())
		}
		return nil, err
	}
	if streams {
		ended = func() {}
		r.contact.stream(time.Now())
	}
	r.watch = r.guard(w, cancel)
	return r.watch, nil
}

// errPlain makes the reflector list in pages.
var errPlain = errors.New("the last watch has made no progress")

// guarded is a watch that guard watches over.
type guarded struct {
	watch.Interface
	stop func()
}

// Stop implements watch.Interface.
func (g guarded) Stop() { g.stop() }

// guard returns a watch that stops itself if it makes no progress, and sees to it that a list
// follows that is not streamed. It also stops if a list is due. Stopping the watch also calls
// cancel.
func (r *resource) guard(w watch.Interface, cancel func()) watch.Interface {
	stopped, opened := make(chan struct{}), time.Now()
	stop := sync.OnceFunc(func() {
		close(stopped)
		w.Stop() // before cancel, which would be an error of the watch
		cancel()
	})
	go func() {
		for {
			left := r.contact.left(opened, time.Now())
			if left <= 0 {
				break
			}
			select {
			case <-stopped:
				return
			case <-time.After(left):
			}
		}
		switch {
		case r.contact.isStreaming():
			err := errors.New("a list that the API server streams does not come to its end")
			now := time.Now()
			if since, _ := r.contact.stale(now); !since.IsZero() {
				now = since
			}
			r.contact.fail(now, err)
			r.metrics.errors.WithLabelValues(r.kind.String(), "watch").Inc()
			r.log.Warn("Streamed list makes no progress, keeping the current state and listing in pages",
				"pause", streamPause, "time", streamTime, "err", err)
			r.plain.Store(true)
		case r.contact.isCheckDue(time.Now()):
			r.log.Debug("The watch was resumed after an outage, listing again in case etcd was restored meanwhile")
		default:
			r.log.Debug("The watch has brought no newer resourceVersion, listing again", "time", stillTime)
			r.plain.Store(true)
		}
		stop()
	}()
	return guarded{w, stop}
}

// report counts a failure. It logs the first of consecutive failures, and the success after them.
func (r *resource) report(ctx context.Context, operation string, o metav1.ListOptions, err error) {
	switch {
	case err == nil:
		r.contact.succeed(time.Now())
		if r.failing.CompareAndSwap(true, false) {
			r.log.Info("API server answers again", "operation", operation)
		}
	case ctx.Err() != nil:
	case o.SendInitialEvents != nil && apierrors.IsInvalid(err):
		r.log.Debug("API server does not stream lists, listing in pages", "err", err)
	case apierrors.IsResourceExpired(err), apierrors.IsGone(err),
		apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge):
		r.log.Debug("Cannot resume from the last resourceVersion, listing again", "operation", operation, "err", err)
	case r.optional && isAbsence(err):
		r.contact.succeed(time.Now())
		r.metrics.lastEvent.DeleteLabelValues(r.kind.String()) // no event is to be expected
		switch {
		case !r.absent.CompareAndSwap(false, true):
		case apierrors.IsForbidden(err):
			r.log.Warn("Not allowed to list ServiceCIDRs, continuing without them: agents do not learn the ranges of cluster IPs; "+
				"allow list and watch of servicecidrs.networking.k8s.io, as in deploy/kubernetes/server-rbac.yaml", "err", err)
		default:
			r.log.Info("API server has no ServiceCIDRs, continuing without them: agents do not learn the ranges of cluster IPs; "+
				"Kubernetes 1.33 and later has them", "err", err)
		}
	default:
		r.contact.fail(time.Now(), err)
		r.metrics.errors.WithLabelValues(r.kind.String(), operation).Inc()
		level := slog.LevelDebug
		if r.failing.CompareAndSwap(false, true) {
			level = slog.LevelWarn
		}
		r.log.Log(ctx, level, "Request to the API server failed, keeping the current state and trying again",
			"operation", operation, "err", err)
	}
}
