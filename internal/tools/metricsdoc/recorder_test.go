// This file collects metrics for TestMetricsPage before they have values.
package metricsdoc

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// metric is what is known about a metric before it has a value.
type metric struct {
	name, help, kind string
	labels           []string
}

// recorder is a registry that records the collectors registered with it.
type recorder struct {
	*prometheus.Registry
	collectors []prometheus.Collector
}

func newRecorder() *recorder { return &recorder{Registry: prometheus.NewRegistry()} }

// Register implements prometheus.Registerer.
func (r *recorder) Register(c prometheus.Collector) error {
	r.collectors = append(r.collectors, c)
	return r.Registry.Register(c)
}

// MustRegister implements prometheus.Registerer.
func (r *recorder) MustRegister(all ...prometheus.Collector) {
	for _, c := range all {
		if err := r.Register(c); err != nil {
			panic(err)
		}
	}
}

func (r *recorder) metrics() (out []metric, err error) {
	families, err := r.Gather()
	if err != nil {
		return nil, err
	}
	kinds := make(map[string]string)
	for _, f := range families {
		kinds[f.GetName()] = strings.ToLower(f.GetType().String())
	}
	for _, c := range r.collectors {
		descs := make(chan *prometheus.Desc)
		go func() {
			c.Describe(descs)
			close(descs)
		}()
		for d := range descs {
			m, parse := parseDesc(d.String())
			m.kind = cmp.Or(kinds[m.name], kindOf(c))
			if m.kind == "" {
				parse = errors.Join(parse, fmt.Errorf("metric %s is of a collector of type %T: extend kindOf", m.name, c))
			}
			err = errors.Join(err, parse)
			out = append(out, m)
		}
	}
	return out, err
}

// kindOf returns the type of metrics that have labels but no values yet, and "" for other kinds of
// collectors.
func kindOf(c prometheus.Collector) string {
	switch c := c.(type) {
	case interface{ Kind() string }:
		return c.Kind()
	case *prometheus.CounterVec:
		return "counter"
	case *prometheus.GaugeVec:
		return "gauge"
	case *prometheus.HistogramVec:
		return "histogram"
	}
	return ""
}

// description matches the String of a prometheus.Desc, which has no other way to access its fields.
var description = regexp.MustCompile(`^Desc\{fqName: ("(?:[^"\\]|\\.)*"), help: ("(?:[^"\\]|\\.)*"), (?:unit: "[^"]*", )?constLabels: \{(.*)\}, variableLabels: \{(.*)\}\}$`)

// constLabel matches a label whose value is part of the description.
var constLabel = regexp.MustCompile(`(\w+)="(?:[^"\\]|\\.)*"`)

func parseDesc(s string) (m metric, err error) {
	parts := description.FindStringSubmatch(s)
	if parts == nil {
		return m, fmt.Errorf("client_golang describes a metric in an unknown form, %s: adapt parseDesc", s)
	}
	if m.name, err = strconv.Unquote(parts[1]); err != nil {
		return m, err
	}
	if m.help, err = strconv.Unquote(parts[2]); err != nil {
		return m, err
	}
	for _, label := range constLabel.FindAllStringSubmatch(parts[3], -1) {
		m.labels = append(m.labels, label[1])
	}
	if parts[4] != "" {
		m.labels = append(m.labels, strings.Split(parts[4], ",")...)
	}
	return m, nil
}
