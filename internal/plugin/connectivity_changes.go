package plugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/slicecast/slicecast/internal/probe"
)

// errLimit and errSeen mean that a scenario has failed: what was awaited has not come, or something
// else was seen. Other errors mean that it could not be judged.
var (
	errLimit = fmt.Errorf("not within %v", settleTime)
	errSeen  = errors.New("something else was seen")
	// errSlow means that a scenario has succeeded slowly.
	errSlow = errors.New("an answer was slow")
)

// each waits for all series at the same time, and returns a result for each.
func (r *connectivityRun) each(scenario, service string, all []*series, wait func(int, *series) (detail string, err error)) []scenarioResult {
	results := make([]scenarioResult, len(all))
	var waits sync.WaitGroup
	for i, s := range all {
		waits.Go(func() {
			one := scenarioResult{Scenario: scenario, Node: s.node, Target: s.target.String(), State: scenarioOK}
			detail, err := wait(i, s)
			switch {
			case err == nil:
			case errors.Is(err, errSlow):
				one.State = scenarioSlow
			case errors.Is(err, errLimit), errors.Is(err, errSeen):
				one.State, one.Service, one.From = scenarioFailed, r.namespace+"/"+service, r.source(s.pod, s.target)
			default:
				one.State, detail = scenarioUnjudged, err.Error()
			}
			one.Detail = detail
			results[i] = one
		})
	}
	waits.Wait()
	return results
}

// followed is what a series has seen of a change.
type followed struct {
	// first and last are when attempts that the changed backend answered began.
	first, last time.Time
	// lost are the attempts that nobody answered, of which example is one.
	lost    int
	example probe.Result
	// slowest is the longest time of an answer.
	slowest time.Duration
}

// note adds a result of the series, and reports whether the backend answered.
func (f *followed) note(one timedResult, backend string) bool {
	if one.Outcome != probe.Answered {
		f.lost++
		f.example = one.Result
		return false
	}
	f.slowest = max(f.slowest, one.Took)
	if one.Server != backend {
		return false
	}
	// Of attempts at the same time, a later one may be answered first.
	if f.first.IsZero() || one.at.Before(f.first) {
		f.first = one.at
	}
	if one.at.After(f.last) {
		f.last = one.at
	}
	return true
}

// result returns a scenario's detail, or why the scenario has failed although it was followed.
func (f *followed) result(detail string) (string, error) {
	if f.lost > 0 {
		return fmt.Sprintf("expected an answer to each attempt, because a backend was ready all the time; %d had none: %s %s", f.lost, f.example.Outcome, f.example.Error), errSeen
	}
	if f.slowest > slowAnswer {
		return fmt.Sprintf("%s; an answer took %v: packets were lost, or a machine is busy", detail, f.slowest.Round(time.Millisecond)), errSlow
	}
	return detail, nil
}

// readiness makes one of two backends unready and ready again. The times are between the
// EndpointSlice and the last or first new connection.
func (r *connectivityRun) readiness(ctx context.Context) (out []scenarioResult) {
	const service, down, up = "changing", "a backend turns unready", "a backend turns ready"
	pod := podName(roleChanging, 0)
	all, stop := r.start(ctx, r.clusterTargets(service), probe.Plan{Interval: pace, Parallel: parallelAttempts, Timeout: dialTimeout})
	defer func() {
		if err := stop(); err != nil && ctx.Err() == nil {
			out = append(out, scenarioResult{Scenario: down, State: scenarioUnjudged, Detail: err.Error()})
		}
		if ctx.Err() == nil { // otherwise the attempts have ended with it
			out = append(out, r.late(up, service, all)...)
		}
	}()
	// Before the change, each series must reach the backend, or "no longer" would mean nothing.
	reached := r.each(down, service, all, func(_ int, s *series) (string, error) {
		var before followed
		return "expected that the backend is reached before it turns unready", s.await(ctx, func(one timedResult) bool { return before.note(one, pod) })
	})
	if slices.ContainsFunc(reached, func(s scenarioResult) bool { return s.State != scenarioOK }) {
		return reached
	}
	// turn returns when the EndpointSlice said so, and what the series have seen by then.
	turn := func(ready bool) (since time.Time, seen []followed, err error) {
		seen = make([]followed, len(all))
		end := r.drain(all, func(i int, one timedResult) { seen[i].note(one, pod) })
		defer end()
		if err := r.exec(ctx, pod, nil, io.Discard, "ready", strconv.FormatBool(ready)); err != nil {
			return since, nil, fmt.Errorf("run the probe in the Pod %s: %w", pod, err)
		}
		limited, cancel := context.WithTimeoutCause(ctx, time.Minute, errors.New("the EndpointSlice has not followed the Pod within a minute"))
		defer cancel()
		err = r.endpoints(limited, service, func(pods map[string]bool) bool {
			if pods[pod] != ready {
				return false
			}
			since = time.Now() // the last family that follows counts
			return true
		})
		return since, seen, err
	}
	since, seen, err := turn(false)
	if err != nil {
		return []scenarioResult{{Scenario: down, State: scenarioUnjudged, Detail: err.Error()}}
	}
	out = r.each(down, service, all, func(i int, s *series) (string, error) {
		others := 0
		err := s.await(ctx, func(one timedResult) bool {
			if seen[i].note(one, pod) {
				others = 0
			} else if one.Outcome == probe.Answered {
				others++
			}
			return others >= convinced
		})
		if err != nil {
			return fmt.Sprintf("expected that the backend is reached no more; it still is, or nothing is, %v after the EndpointSlice", settleTime), err
		}
		return seen[i].result(after("last", seen[i].last.Sub(since)))
	})
	since, seen, err = turn(true)
	if err != nil {
		return append(out, scenarioResult{Scenario: up, State: scenarioUnjudged, Detail: err.Error()})
	}
	return append(out, r.each(up, service, all, func(i int, s *series) (string, error) {
		if seen[i].first.IsZero() {
			if err := s.await(ctx, func(one timedResult) bool { return seen[i].note(one, pod) }); err != nil {
				return fmt.Sprintf("expected that the backend is reached again; it is not, %v after the EndpointSlice", settleTime), err
			}
		}
		return seen[i].result(after("first", seen[i].first.Sub(since)))
	})...)
}

// late returns a failure for each series that has lost attempts after its last result that counted.
func (r *connectivityRun) late(scenario, service string, all []*series) (out []scenarioResult) {
	for _, s := range all {
		f := followed{lost: len(s.lost)}
		if f.lost == 0 {
			continue
		}
		f.example = s.lost[0]
		one := scenarioResult{Scenario: scenario, Node: s.node, Target: s.target.String(), State: scenarioFailed, Service: r.namespace + "/" + service, From: r.source(s.pod, s.target)}
		one.Detail, _ = f.result("") // which is an error, as attempts were lost
		out = append(out, one)
	}
	return out
}

// after says when the first or last new connection to a backend was. This command sees the
// EndpointSlice later than the node may, so a node can be ahead of it.
func after(which string, d time.Duration) string {
	if d <= 0 {
		return which + " new connection before this command saw the EndpointSlice"
	}
	return fmt.Sprintf("%s new connection %v after the EndpointSlice", which, d.Round(time.Millisecond))
}

// drain receives results until the function that it returns is called, which waits for the end, and
// passes each on with the index of its series. A series that is not read would hold up the others.
func (r *connectivityRun) drain(all []*series, note func(int, timedResult)) (end func()) {
	done := make(chan struct{})
	var running sync.WaitGroup
	for i, s := range all {
		running.Go(func() {
			for {
				select {
				case one, ok := <-s.results:
					if !ok {
						return
					}
					note(i, one)
				case <-done:
					return
				}
			}
		})
	}
	return func() {
		close(done)
		running.Wait()
	}
}

// addPort adds a port to a Service while connections to another one stand.
func (r *connectivityRun) addPort(ctx context.Context) (out []scenarioResult) {
	const service, scenario = "changing", "a port is added while connections stand"
	var tcp []target
	for _, t := range r.clusterTargets(service) {
		if t.network == "tcp" {
			tcp = append(tcp, t)
		}
	}
	all, stop := r.start(ctx, tcp, probe.Plan{Interval: pace, Timeout: dialTimeout, Keep: true})
	defer func() {
		if err := stop(); err != nil && ctx.Err() == nil {
			out = append(out, scenarioResult{Scenario: scenario, State: scenarioUnjudged, Detail: err.Error()})
		}
	}()
	first := make([]string, len(all))
	for i, s := range all {
		if err := s.await(ctx, func(one timedResult) bool { first[i] = one.Server; return true }); err != nil || first[i] == "" {
			return []scenarioResult{{Scenario: scenario, Node: s.node, Target: s.target.String(), State: scenarioFailed, Detail: "expected a connection before the change", Service: r.namespace + "/" + service, From: r.source(s.pod, s.target)}}
		}
	}
	broken := make([]bool, len(all))
	end := r.drain(all, func(i int, one timedResult) {
		broken[i] = broken[i] || one.Outcome != probe.Answered || one.Server != first[i]
	})
	patch := *r.services[service]
	patch.Spec.Ports = append(slices.Clone(patch.Spec.Ports), corev1.ServicePort{Name: "more", Protocol: corev1.ProtocolTCP, Port: 81, TargetPort: intstr.FromInt32(firstPort + 1)})
	_, err := r.fleet.Client().CoreV1().Services(r.namespace).Update(ctx, &patch, metav1.UpdateOptions{})
	if err != nil {
		end()
		return []scenarioResult{{Scenario: scenario, State: scenarioUnjudged, Detail: fmt.Sprintf("update the Service: %v", err)}}
	}
	var more []target
	for _, ip := range r.services[service].Spec.ClusterIPs {
		more = append(more, target{network: "tcp", address: net.JoinHostPort(ip, "81")})
	}
	backends := []string{podName(roleChanging, 0), podName(roleChanging, 1)}
	var mu sync.Mutex
	var added sync.WaitGroup
	for i, n := range r.nodes {
		added.Go(func() {
			some := r.settle(ctx, trial{"a port is added", n.name, podName(roleClient, i), service, more, probe.Plan{Attempts: enough(len(backends)), Parallel: 8, Timeout: dialTimeout, MaxFailures: maxFailures}, wholeSet(backends)})
			mu.Lock()
			defer mu.Unlock()
			out = append(out, some...)
		})
	}
	added.Wait()
	end()
	for i, s := range all {
		one := scenarioResult{Scenario: scenario, Node: s.node, Target: s.target.String(), State: scenarioOK, Detail: "the connection to " + first[i] + " goes on"}
		// The connection must also answer now.
		err := s.await(ctx, func(one timedResult) bool { return one.Outcome == probe.Answered && one.Server == first[i] })
		if err != nil || broken[i] {
			one.State, one.Detail = scenarioFailed, "expected that the connection to "+first[i]+" goes on; it broke"
			one.Service, one.From = r.namespace+"/"+service, r.source(s.pod, s.target)
		}
		out = append(out, one)
	}
	return out
}

// deletion deletes a Service and requires that nobody answers at its addresses.
func (r *connectivityRun) deletion(ctx context.Context) (out []scenarioResult) {
	const service, scenario = "changing", "a Service is deleted"
	if err := r.fleet.Client().CoreV1().Services(r.namespace).Delete(ctx, service, metav1.DeleteOptions{}); err != nil {
		return []scenarioResult{{Scenario: scenario, State: scenarioUnjudged, Detail: fmt.Sprintf("delete the Service: %v", err)}}
	}
	var mu sync.Mutex
	var all sync.WaitGroup
	for i, n := range r.nodes {
		all.Go(func() {
			some := r.settle(ctx, trial{scenario, n.name, podName(roleClient, i), service, r.clusterTargets(service), probe.Plan{Attempts: 2, Timeout: silence}, unanswered})
			mu.Lock()
			defer mu.Unlock()
			out = append(out, some...)
		})
	}
	all.Wait()
	return out
}
