// These tests prove that the page of metrics is made from the registered collectors, whatever their
// type, and that an unknown type is an error.
package metricsdoc

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
)

// TestMetricsAreFoundByWhatTheyAre covers metrics with and without values and labels, and unusual
// help texts.
func TestMetricsAreFoundByWhatTheyAre(t *testing.T) {
	register := func(r prometheus.Registerer, extra bool) {
		r.MustRegister(
			prometheus.NewCounterVec(prometheus.CounterOpts{Name: "b_total", Help: `Of a "kind" | more.`}, []string{"x", "y"}),
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "a", Help: "One."}, func() float64 { return 1 }),
		)
		if extra {
			r.MustRegister(
				prometheus.NewHistogram(prometheus.HistogramOpts{Name: "c_seconds", Help: "Time."}),
				prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "d_seconds", Help: "Time."}, []string{"x"}),
				prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "e", Help: "State."}, []string{"x"}),
				prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "f", Help: "State.", ConstLabels: prometheus.Labels{"k": `="a", {b}`, "l": ""}}, []string{"x"}),
			)
		}
	}
	c := command{
		variants: []variant{{with: []string{"p"}}, {args: []string{"more"}, with: []string{"p", "q"}}, {args: []string{"more"}, with: []string{"r"}}},
		make:     func(args []string, r *recorder) error { register(r, len(args) > 0); return nil },
	}
	metrics, err := c.metrics()
	require.NoError(t, err)
	var got []string
	for _, m := range metrics {
		got = append(got, m.name+" "+m.kind+": "+m.text())
	}
	require.Equal(t, []string{
		`a gauge: One.`,
		`b_total counter: Of a "kind" \| more.`,
		`c_seconds histogram: Time. *Only with q or r.*`,
		`d_seconds histogram: Time. *Only with q or r.*`,
		`e gauge: State. *Only with q or r.*`,
		`f gauge: State. *Only with q or r.*`,
	}, got)
	require.Equal(t, []string{"x", "y"}, metrics[1].labels)
	require.Equal(t, []string{"k", "l", "x"}, metrics[5].labels, "labels with a constant value, too")

	require.Equal(t, "p", c.only(0b011))
	require.Equal(t, "some configurations", c.only(0b001))
}

func TestUnknownCollectorsAreReported(t *testing.T) {
	r := newRecorder()
	r.MustRegister(prometheus.NewSummaryVec(prometheus.SummaryOpts{Name: "s", Help: "h"}, []string{"x"}))
	_, err := r.metrics()
	require.ErrorContains(t, err, "metric s is of a collector of type *prometheus.SummaryVec")
	_, err = parseDesc("Desc{}")
	require.ErrorContains(t, err, "adapt parseDesc")
}
