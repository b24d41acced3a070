// Command engine is a Prometheus without a network and without a clock. It stores the answers of
// scraped targets in Prometheus' database at the times that its input names, evaluates Prometheus'
// rules at these times, and answers queries. Input and output are JSON, as package prometheus of
// the parent folder describes them.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/textparse"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/rules"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb"
)

// input is what the engine reads. All times are in milliseconds since 1970.
type input struct {
	Rules   string   `json:"rules"` // the content of a file of rules
	Bodies  []string `json:"bodies"`
	Rounds  []round  `json:"rounds"` // by time
	Queries []query  `json:"queries"`
}

// round is a scrape of all targets.
type round struct {
	Time int64 `json:"time"`
	// Shift is added to the values of gauges that are times, as the names of these gauges say.
	Shift   int64    `json:"shift"`
	Targets []scrape `json:"targets"`
}

// scrape is one answer of a target.
type scrape struct {
	Labels map[string]string `json:"labels"` // of the target
	Body   int               `json:"body"`   // an index in Bodies, or -1 if the target did not answer
}

// query is an expression and the time of its evaluation.
type query struct {
	Expression string `json:"expression"`
	Time       int64  `json:"time"`
}

// output is what the engine writes.
type output struct {
	Alerts  []alert    `json:"alerts"`
	Results [][]sample `json:"results"` // of each query
}

// alert is an alert that fired.
type alert struct {
	Name        string            `json:"name"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
	From        int64             `json:"from"` // the first evaluation at which it fired
	To          int64             `json:"to"`   // the last one
}

type sample struct {
	Labels map[string]string `json:"labels"`
	Value  string            `json:"value"`
}

func main() {
	if err := run(context.Background(), os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, r io.Reader, w io.Writer) (err error) {
	var in input
	if err := json.NewDecoder(r).Decode(&in); err != nil {
		return fmt.Errorf("read the input: %w", err)
	}
	dir, err := os.MkdirTemp("", "slicecast-prometheus-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	logger := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	db, err := tsdb.Open(filepath.Join(dir, "data"), logger, nil, tsdb.DefaultOptions(), nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	db.DisableCompactions()
	engine := promql.NewEngine(promql.EngineOpts{
		Logger: logger, MaxSamples: 50_000_000, Timeout: time.Minute, LookbackDelta: 5 * time.Minute,
		EnableAtModifier: true, EnableNegativeOffset: true,
	})
	e := evaluator{db: db, engine: engine, bodies: in.Bodies, last: make(map[string][]labels.Labels)}
	if err := e.load(ctx, filepath.Join(dir, "rules.yaml"), in.Rules, logger); err != nil {
		return err
	}
	out, err := e.evaluate(ctx, in)
	if err != nil {
		return err
	}
	return json.NewEncoder(w).Encode(out)
}

// evaluator stores scrapes and evaluates rules and queries.
type evaluator struct {
	db     *tsdb.DB
	engine *promql.Engine
	groups []*rules.Group
	bodies []string
	// last holds the series of the last scrape of each target, by the target's labels.
	last map[string][]labels.Labels
	// firing holds the index in alerts of each alert that fires, by its labels.
	firing map[string]int
	alerts []alert
}

func (e *evaluator) load(ctx context.Context, path, text string, logger *slog.Logger) error {
	if text == "" {
		return nil
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return err
	}
	m := rules.NewManager(&rules.ManagerOptions{
		ExternalURL: &url.URL{}, QueryFunc: rules.EngineQueryFunc(e.engine, e.db), Context: ctx, AppendableV2: e.db, Queryable: e.db,
		Logger: logger, NotifyFunc: func(context.Context, string, ...*rules.Alert) {},
	})
	groups, errs := m.LoadGroups(time.Minute, labels.EmptyLabels(), "", nil, false, path)
	if len(errs) > 0 {
		return fmt.Errorf("load the rules: %w", errors.Join(errs...))
	}
	for _, g := range groups {
		e.groups = append(e.groups, g)
	}
	// Rules that record come first. Within a group, the order is that of the file.
	slices.SortFunc(e.groups, func(a, b *rules.Group) int { return strings.Compare(a.Name(), b.Name()) })
	return nil
}

func (e *evaluator) evaluate(ctx context.Context, in input) (output, error) {
	e.firing = make(map[string]int)
	out := output{Results: make([][]sample, len(in.Queries))}
	for _, r := range in.Rounds {
		if err := e.store(ctx, r); err != nil {
			return out, err
		}
		if err := e.rules(ctx, r.Time); err != nil {
			return out, err
		}
	}
	for i, q := range in.Queries {
		var err error
		if out.Results[i], err = e.query(ctx, q); err != nil {
			return out, fmt.Errorf("%s: %w", q.Expression, err)
		}
	}
	out.Alerts = e.alerts
	return out, nil
}

// store stores what targets answered. Series that a target no longer has end, as do those of
// targets that are no longer scraped.
func (e *evaluator) store(ctx context.Context, r round) error {
	appender := e.db.AppenderV2(ctx)
	add := func(l labels.Labels, v float64) error {
		_, err := appender.Append(0, l, 0, r.Time, v, (*histogram.Histogram)(nil), nil, storage.AppendV2Options{})
		return err
	}
	ended := e.last
	e.last = make(map[string][]labels.Labels)
	for _, s := range r.Targets {
		target := labels.FromMap(s.Labels)
		up := 0.0
		var series []labels.Labels
		if s.Body >= 0 {
			up = 1
			err := parse(e.bodies[s.Body], target, func(l labels.Labels, v float64) error {
				if strings.HasSuffix(l.Get(labels.MetricName), "_timestamp_seconds") && v > 0 {
					v += float64(r.Shift) / 1000
				}
				series = append(series, l)
				return add(l, v)
			})
			if err != nil {
				return fmt.Errorf("scrape of %s: %w", target, err)
			}
		}
		l := labels.NewBuilder(target).Set(labels.MetricName, "up").Labels()
		series = append(series, l)
		if err := add(l, up); err != nil {
			return err
		}
		e.last[target.String()] = series
	}
	for target, before := range ended {
		present := make(map[string]bool)
		for _, l := range e.last[target] {
			present[l.String()] = true
		}
		for _, l := range before {
			if present[l.String()] {
				continue
			}
			if err := add(l, math.Float64frombits(value.StaleNaN)); err != nil {
				return err
			}
		}
	}
	return appender.Commit()
}

// parse calls add for each sample of a page of metrics, with the target's labels added.
func parse(body string, target labels.Labels, add func(labels.Labels, float64) error) error {
	p, err := textparse.New([]byte(body), "text/plain; version=0.0.4", labels.NewSymbolTable(), textparse.ParserOptions{})
	if err != nil {
		return err
	}
	for {
		entry, err := p.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if entry != textparse.EntrySeries {
			continue
		}
		_, _, v := p.Series()
		var l labels.Labels
		p.Labels(&l)
		b := labels.NewBuilder(l)
		target.Range(func(t labels.Label) {
			// The target's labels win, as with Prometheus' default, honor_labels: false.
			if own := l.Get(t.Name); own != "" {
				b.Set("exported_"+t.Name, own)
			}
			b.Set(t.Name, t.Value)
		})
		if err := add(b.Labels(), v); err != nil {
			return err
		}
	}
}

// rules evaluates all rules, and notes which alerts fire.
func (e *evaluator) rules(ctx context.Context, t int64) error {
	for _, g := range e.groups {
		g.Eval(ctx, time.UnixMilli(t))
		for _, r := range g.Rules() {
			if err := r.LastError(); err != nil {
				return fmt.Errorf("rule %s: %w", r.Name(), err)
			}
		}
	}
	firing := make(map[string]int)
	for _, g := range e.groups {
		for _, r := range g.AlertingRules() {
			for _, a := range r.ActiveAlerts() {
				if a.State != rules.StateFiring {
					continue
				}
				key := a.Labels.String()
				i, ok := e.firing[key]
				if !ok {
					i = len(e.alerts)
					e.alerts = append(e.alerts, alert{
						Name: r.Name(), Labels: a.Labels.Map(), Annotations: a.Annotations.Map(), From: t,
					})
				}
				e.alerts[i].To = t
				firing[key] = i
			}
		}
	}
	e.firing = firing
	return nil
}

func (e *evaluator) query(ctx context.Context, q query) ([]sample, error) {
	prepared, err := e.engine.NewInstantQuery(ctx, e.db, nil, q.Expression, time.UnixMilli(q.Time))
	if err != nil {
		return nil, err
	}
	defer prepared.Close()
	result := prepared.Exec(ctx)
	if result.Err != nil {
		return nil, result.Err
	}
	number := func(v float64) string { return fmt.Sprint(v) }
	samples := []sample{}
	switch v := result.Value.(type) {
	case promql.Scalar:
		samples = append(samples, sample{Value: number(v.V)})
	case promql.Vector:
		for _, s := range v {
			samples = append(samples, sample{Labels: s.Metric.Map(), Value: number(s.F)})
		}
	default:
		return nil, fmt.Errorf("the result is a %s: only vectors and scalars can be shown", result.Value.Type())
	}
	return samples, nil
}
