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

// Reason is why an object, or a part of it, is left out. It is the value of a metric's label.
type Reason string

// These are reasons for objects that are valid and left out as in kube-proxy.
const (
	Headless          Reason = "headless"
	ExternalName      Reason = "external_name"
	OtherProxy        Reason = "other_proxy" // label service.kubernetes.io/service-proxy-name
	FQDN              Reason = "fqdn"
	NoService         Reason = "no_service"          // a slice whose labels name no Service
	PortWithoutNumber Reason = "port_without_number" // a slice's port that stands for all ports
)

// These are reasons for objects that the API server would not have accepted; see Skip.Invalid.
const (
	NoClusterIP     Reason = "no_cluster_ip"
	InvalidType     Reason = "invalid_type"
	InvalidAddress  Reason = "invalid_address"
	InvalidRange    Reason = "invalid_range"
	InvalidPort     Reason = "invalid_port"
	InvalidProtocol Reason = "invalid_protocol"
	InvalidTimeout  Reason = "invalid_timeout"
	WrongFamily     Reason = "wrong_family"
	InvalidText     Reason = "invalid_text" // of a name or a similar text
	Duplicate       Reason = "duplicate"
	Invalid         Reason = "invalid" // as a whole, for another reason
	// InvalidAnnotation is for an invalid value of one of Slicecast's own annotations.
	InvalidAnnotation Reason = "invalid_annotation"
)

// TooMany is for lists that are longer than their bounds.
const TooMany Reason = "too_many"

// Skip describes what of an object is left out, and why.
type Skip struct {
	Reason Reason
	Field  string // the field, such as "spec.ports[2].port"
	Detail string // for people
}

// String returns "field: detail".
func (s Skip) String() string { return s.Field + ": " + s.Detail }

// Invalid reports whether the object breaks the rules of the API. Otherwise it is left out because
// nodes do not use it.
func (s Skip) Invalid() bool {
	switch s.Reason {
	case Headless, ExternalName, OtherProxy, FQDN, NoService, PortWithoutNumber:
		return false
	}
	return true
}

// skipList collects an object's skips, one for each reason. A thousand bad addresses are reported
// once.
type skipList []Skip

func (l *skipList) add(reason Reason, field, format string, args ...any) {
	if slices.ContainsFunc(*l, func(s Skip) bool { return s.Reason == reason }) {
		return
	}
	detail := fmt.Sprintf(format, args...)
	if len(detail) > maxDetail { // it may quote a value that anyone may have written
		detail = strings.ToValidUTF8(detail[:maxDetail], "") + "…"
	}
	*l = append(*l, Skip{reason, field, detail})
}

// Skips tracks what a source leaves out. It reports this in a metric, and in the log once for each
// object and reason.
type Skips struct {
	log   *slog.Logger
	gauge *prometheus.GaugeVec

	mu      sync.Mutex           // guards objects
	objects map[model.Key][]Skip // only objects with skips
}

// NewSkips returns an empty Skips.
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

// Set sets what is left out of an object. No skips mean that nothing is left out, or that the
// object is gone.
func (s *Skips) Set(key model.Key, skips []Skip) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set(key, skips)
}

// Replace sets what is left out of all objects of a kind.
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
