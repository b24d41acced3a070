// These tests prove that the engine stores scrapes as Prometheus does: samples with the target's
// labels, up, and series that end. They prove that alerts wait, fire and end, that times in metrics
// follow the Timeline, and that errors in rules, queries and pages are reported.
package prometheus

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// target returns a target that answers with *body, or not at all if *body is empty.
func target(body *string) Target {
	return Target{Job: "j", Instance: "i", Scrape: func(context.Context) (string, error) {
		if *body == "" {
			return "", errors.New("down")
		}
		return *body, nil
	}}
}

func TestSamples(t *testing.T) {
	var l Timeline
	body := "a{instance=\"own\"} 1\nb 2\n"
	l.Scrape(t.Context(), target(&body))
	first := l.Now()
	body = "b 62\n"
	l.Scrape(t.Context(), target(&body))
	second := l.Now()
	body = ""
	l.Scrape(t.Context(), target(&body))
	third := l.Now()
	l.Scrape(t.Context())
	require.Equal(t, Interval, l.Now().Sub(third))
	r, err := l.Evaluate(t.Context(), "", Query{"a", first}, Query{"a", second}, Query{"irate(b[1m])", second}, Query{"up", second},
		Query{"b", third}, Query{"up", third}, Query{"up", l.Now()})
	require.NoError(t, err)
	labels := map[string]string{"job": "j", "instance": "i"}
	up := map[string]string{"__name__": "up", "job": "j", "instance": "i"}
	require.Equal(t, [][]Sample{
		{{map[string]string{"__name__": "a", "job": "j", "instance": "i", "exported_instance": "own"}, "1"}},
		{}, {{labels, "2"}}, {{up, "1"}}, {}, {{up, "0"}}, {},
	}, r.Samples)
}

func TestAlerts(t *testing.T) {
	const rules = `groups: [{name: g, rules: [
  {alert: Down, expr: up == 0, for: 5m, annotations: {summary: "{{ $labels.instance }} is down"}},
  {alert: Old, expr: time() - event_timestamp_seconds > 600}]}]`
	var l Timeline
	body := fmt.Sprintf("event_timestamp_seconds %d\n", time.Now().Unix()-60)
	l.Scrape(t.Context(), target(&body))
	begin := l.Now()
	l.Hold(time.Hour)
	healthy := l.Now()
	require.Equal(t, time.Hour, healthy.Sub(begin))
	l.Age(true)
	l.Hold(20 * time.Minute)
	old := l.Now()
	l.Age(false)
	up := body
	body = ""
	l.Scrape(t.Context(), target(&body))
	down := l.Now()
	l.Hold(10 * time.Minute)
	stillDown := l.Now()
	l.Scrape(t.Context(), target(&up))
	l.Hold(time.Minute)
	r, err := l.Evaluate(t.Context(), rules)
	require.NoError(t, err)
	require.Empty(t, r.Firing(begin, healthy))
	require.Equal(t, []string{"Old"}, r.Firing(healthy.Add(Interval), old))
	require.Empty(t, r.Firing(down, down.Add(4*time.Minute)))
	require.Equal(t, []string{"Down"}, r.Firing(down, stillDown))
	require.Empty(t, r.Firing(l.Now(), l.Now()))
	require.Equal(t, "i is down", r.Alerts[1].Annotations["summary"])
	require.WithinDuration(t, down.Add(5*time.Minute), r.Alerts[1].From, time.Second)
	require.WithinDuration(t, stillDown, r.Alerts[1].To, time.Second)
}

func TestErrors(t *testing.T) {
	var l Timeline
	body := "a 1\n"
	l.Scrape(t.Context(), target(&body))
	_, err := l.Evaluate(t.Context(), "groups: [{name: g, rules: [{record: x, expr: sum(}]}]")
	require.ErrorContains(t, err, "load the rules")
	_, err = l.Evaluate(t.Context(), "", Query{"a +", l.Now()})
	require.ErrorContains(t, err, "a +: ")
	_, err = l.Evaluate(t.Context(), "groups: [{name: g, rules: [{record: x, expr: 'a + on () {job=\"j\"}'}]}]",
		Query{"a", l.Now()})
	require.ErrorContains(t, err, "rule x")
	body = "a b c\n"
	l.Scrape(t.Context(), target(&body))
	_, err = l.Evaluate(t.Context(), "")
	require.ErrorContains(t, err, "scrape of")
}
