// Package prometheus lets tests evaluate queries and alerts on the metrics of running programs,
// with Prometheus' own database, query engine and rules. Its time is the test's: a Timeline passes
// the quarter of an hour that an alert waits in no time.
package prometheus

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/slicecast/slicecast/internal/testenv/repository"
)

// Interval is the time between two scrapes, and between two evaluations of the rules.
const Interval = 30 * time.Second

// Prepare builds the engine. Afterwards Evaluate neither waits for a build nor fails for lack of a
// network.
func Prepare() error {
	_, err := engine()
	return err
}

var engine = sync.OnceValues(func() (string, error) {
	root, err := repository.Root()
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(context.Background(), filepath.Join(root, "internal/testenv/prometheus/engine/build.sh"))
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	return strings.TrimSpace(string(out)), err
})

// Target is something that Prometheus scrapes.
type Target struct {
	Job, Instance string
	// Scrape returns the target's page of metrics, in the text format.
	Scrape func(ctx context.Context) (string, error)
}

// Timeline holds what targets have answered, at times that the test decides. The first one is the
// present. Only one goroutine may use a Timeline.
type Timeline struct {
	bodies []string
	rounds []round
	now    time.Time // the time of the last round
	// shift is how far the Timeline is ahead of the real time, in milliseconds. Times in metrics are
	// moved by it, so that what is a minute ago in the real world is a minute ago here.
	shift int64
	// aging means that shift is frozen.
	aging bool
}

// round is a scrape of all targets, and scrape the answer of one; see the engine.
type (
	round struct {
		Time    int64    `json:"time"`
		Shift   int64    `json:"shift"`
		Targets []scrape `json:"targets"`
	}
	scrape struct {
		Labels map[string]string `json:"labels"`
		Body   int               `json:"body"`
	}
)

// Now returns the time of the last scrape.
func (l *Timeline) Now() time.Time { return l.now }

// Scrape scrapes all targets, an Interval after the last scrape. Targets that do not answer are
// down. Targets of earlier scrapes that are missing are gone.
func (l *Timeline) Scrape(ctx context.Context, targets ...Target) {
	bodies := make([]string, len(targets))
	errs := make([]error, len(targets))
	var wg sync.WaitGroup
	for i, t := range targets {
		wg.Go(func() { bodies[i], errs[i] = t.Scrape(ctx) })
	}
	wg.Wait()
	var all []scrape
	for i, t := range targets {
		s := scrape{Labels: map[string]string{"job": t.Job, "instance": t.Instance}, Body: -1}
		if errs[i] == nil {
			s.Body = len(l.bodies)
			l.bodies = append(l.bodies, bodies[i])
		}
		all = append(all, s)
	}
	l.record(all)
}

// Hold lets time pass, in which every target answers as it did at the last scrape.
func (l *Timeline) Hold(d time.Duration) {
	last := l.rounds[len(l.rounds)-1].Targets
	for end := l.now.Add(d); l.now.Before(end); {
		l.record(last)
	}
}

// Age makes times in metrics become older as time passes, or stops that. Otherwise what targets
// say to be a minute ago stays a minute ago in Hold.
func (l *Timeline) Age(on bool) { l.aging = on }

// record adds a round an Interval after the last one.
func (l *Timeline) record(targets []scrape) {
	if l.now.IsZero() {
		l.now = time.Now()
	} else {
		l.now = l.now.Add(Interval)
	}
	if !l.aging {
		l.shift = time.Until(l.now).Milliseconds()
	}
	l.rounds = append(l.rounds, round{l.now.UnixMilli(), l.shift, targets})
}

// Query is an expression that is evaluated at a time.
type Query struct {
	Expression string
	Time       time.Time
}

// Sample is a part of the result of a query. Value is as Prometheus prints it, such as NaN.
type Sample struct {
	Labels map[string]string `json:"labels"`
	Value  string            `json:"value"`
}

// Alert is an alert that fired, from its first evaluation to its last.
type Alert struct {
	Name                string
	Labels, Annotations map[string]string
	From, To            time.Time
}

// Result is what rules and queries made of a Timeline.
type Result struct {
	// Alerts are all that fired, by the time at which they began.
	Alerts []Alert
	// Samples are the results of the queries, in their order.
	Samples [][]Sample
}

// Firing returns the names of the alerts that fired at some time between from and to, sorted.
func (r *Result) Firing(from, to time.Time) []string {
	var names []string
	for _, a := range r.Alerts {
		if !a.To.Before(from) && !a.From.After(to) {
			names = append(names, a.Name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// Evaluate evaluates rules, the content of a file of Prometheus, at all times of the Timeline, and
// then the queries. A rule or a query with an error is an error.
func (l *Timeline) Evaluate(ctx context.Context, rules string, queries ...Query) (*Result, error) {
	type timedQuery struct {
		Expression string `json:"expression"`
		Time       int64  `json:"time"`
	}
	in := struct {
		Rules   string       `json:"rules"`
		Bodies  []string     `json:"bodies"`
		Rounds  []round      `json:"rounds"`
		Queries []timedQuery `json:"queries"`
	}{Rules: rules, Bodies: l.bodies, Rounds: l.rounds}
	for _, q := range queries {
		in.Queries = append(in.Queries, timedQuery{q.Expression, q.Time.UnixMilli()})
	}
	path, err := engine()
	if err != nil {
		return nil, fmt.Errorf("build the engine: %w", err)
	}
	text, err := json.Marshal(in)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, path)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(text), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("evaluate: %w: %s", err, stderr.String())
	}
	var out struct {
		Alerts []struct {
			Name                string
			Labels, Annotations map[string]string
			From, To            int64
		}
		Results [][]Sample
	}
	if err := json.Unmarshal(stdout.Bytes(), &out); err != nil {
		return nil, err
	}
	result := &Result{Samples: out.Results}
	for _, a := range out.Alerts {
		result.Alerts = append(result.Alerts, Alert{a.Name, a.Labels, a.Annotations, time.UnixMilli(a.From), time.UnixMilli(a.To)})
	}
	return result, nil
}
