package source

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/slicecast/slicecast/internal/model"
)

// Reason says why an object, or a part of it, is left out. It is a metric's label.
type Reason string

// Objects that are well-formed and left out as kube-proxy leaves them out.
const (
	Headless          Reason = "headless"
	ExternalName      Reason = "external_name"
	OtherProxy        Reason = "other_proxy" // label service.kubernetes.io/service-proxy-name
	FQDN              Reason = "fqdn"
	NoService         Reason = "no_service"          // a slice without label kubernetes.io/service-name
	PortWithoutNumber Reason = "port_without_number" // a slice port that stands for all ports
)

// Objects that the API server would not have accepted; see Skip.Invalid.
const (
	NoClusterIP     Reason = "no_cluster_ip"
	InvalidType     Reason = "invalid_type"
	InvalidAddress  Reason = "invalid_address"
	InvalidRange    Reason = "invalid_range"
	InvalidPort     Reason = "invalid_port"
	InvalidProtocol Reason = "invalid_protocol"
	InvalidTimeout  Reason = "invalid_timeout"
	WrongFamily     Reason = "wrong_family"
	InvalidText     Reason = "invalid_text" // of a name, or something like one
	Duplicate       Reason = "duplicate"
	Invalid         Reason = "invalid" // as a whole, in another way
	// InvalidAnnotation: a value of one of Slicecast's own that can't be meant.
	InvalidAnnotation Reason = "invalid_annotation"
)

// TooMany is for lists that are longer than what is kept of them; see the bounds.
const TooMany Reason = "too_many"

// Skip tells what of an object is left out and why.
type Skip struct {
	Reason Reason
	Field  string // what it is about, such as "spec.ports[2].port"
	Detail string // for people
}

// String gives "field: detail".
func (s Skip) String() string { return s.Field + ": " + s.Detail }

// Invalid tells whether the object breaks the API's rules. What does not is left out because nodes have no use for it.
func (s Skip) Invalid() bool {
	switch s.Reason {
	case Headless, ExternalName, OtherProxy, FQDN, NoService, PortWithoutNumber:
		return false
	}
	return true
}

// skipList collects an object's skips, one for each reason: a thousand bad addresses are one piece of news.
type skipList []Skip

func (l *skipList) add(reason Reason, field, format string, args ...any) {
	if slices.ContainsFunc(*l, func(s Skip) bool { return s.Reason == reason }) {
		return
	}
	detail := fmt.Sprintf(format, args...)
	if len(detail) > maxDetail { // of a value that anybody may have written
		detail = strings.ToValidUTF8(detail[:maxDetail], "") + "…"
	}
	*l = append(*l, Skip{reason, field, detail})
}

// Skips keeps account of what a source leaves out: in a metric, and in the log once for each object and reason.
type Skips struct {
	log   *slog.Logger
	gauge *prometheus.GaugeVec

	mu      sync.Mutex
	objects map[model.Key][]Skip // those with skips only
}

// NewSkips gives an account with nothing in it.
func NewSkips(log *slog.Logger, metrics prometheus.Registerer) *Skips {
	return &Skips{
		log: log,
		gauge: promauto.With(metrics).NewGaugeVec(prometheus.GaugeOpts{
			Name: "slicecast_source_skipped_objects",
			Help: "Objects of the cluster that are left out, wholly or in part, for this reason at present.",
		}, []string{"kind", "reason"}),
		objects: map[model.Key][]Skip{},
	}
}

// Set tells what is left out of the object now; no skips mean nothing is, or that the object is gone.
func (s *Skips) Set(key model.Key, skips []Skip) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set(key, skips)
}

// Replace tells what is left out of all objects of that kind.
func (s *Skips) Replace(kind model.Kind, skips map[model.Key][]Skip) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key := range s.objects {
		if _, ok := skips[key]; !ok && key.Kind == kind {
			s.set(key, nil)
		}
	}
	for key, l := range skips {
		s.set(key, l)
	}
}

func (s *Skips) set(key model.Key, now []Skip) {
	before := s.objects[key]
	if len(before) == 0 && len(now) == 0 {
		return
	}
	for _, b := range before {
		s.gauge.WithLabelValues(key.Kind.String(), string(b.Reason)).Dec()
	}
	for _, n := range now {
		s.gauge.WithLabelValues(key.Kind.String(), string(n.Reason)).Inc()
		if slices.ContainsFunc(before, func(b Skip) bool { return b.Reason == n.Reason }) {
			continue
		}
		if n.Invalid() {
			s.log.Warn("object has what cannot be used, leaving that out",
				"object", key.String(), "field", n.Field, "reason", n.Reason, "detail", n.Detail)
		} else {
			s.log.Debug("object is not for nodes, leaving it out",
				"object", key.String(), "field", n.Field, "reason", n.Reason, "detail", n.Detail)
		}
	}
	if len(now) == 0 {
		delete(s.objects, key)
		return
	}
	s.objects[key] = now
}
