package source

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	corev1 "k8s.io/api/core/v1"

	"github.com/slicecast/slicecast/internal/bounded"
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

// SkipList collects an object's skips, one for each reason. A thousand bad addresses are reported
// once.
type SkipList []Skip

// Add adds a skip, unless the list has one for the reason.
func (l *SkipList) Add(reason Reason, field, format string, args ...any) {
	if slices.ContainsFunc(*l, func(s Skip) bool { return s.Reason == reason }) {
		return
	}
	detail := fmt.Sprintf(format, args...)
	if len(detail) > maxDetail { // it may quote a value that anyone may have written
		detail = strings.ToValidUTF8(detail[:maxDetail], "") + "…"
	}
	*l = append(*l, Skip{reason, field, detail})
}

// Address parses an address for a use. If the address is not valid, it adds a skip for entry i of a
// list in the field, a format such as "spec.externalIPs[%d]".
func (l *SkipList) Address(s string, use model.AddressUse, field string, i int) (netip.Addr, bool) {
	a, ok := ParseAddr(s)
	if !ok {
		l.Add(InvalidAddress, at(field, i), "%q is not an IP address", s)
	} else if err := model.CheckAddress(a, use); err != nil {
		l.Add(InvalidAddress, at(field, i), "%v", err)
		ok = false
	}
	return a, ok
}

// Port validates and converts the protocol and the number of a port. An empty protocol is TCP. Port
// adds a skip if one of them is not valid.
func (l *SkipList) Port(protocol corev1.Protocol, number int32, field string) (p model.Protocol, n uint16, ok bool) {
	switch protocol {
	case corev1.ProtocolTCP, "":
		p = model.TCP
	case corev1.ProtocolUDP:
		p = model.UDP
	case corev1.ProtocolSCTP:
		p = model.SCTP
	default:
		l.Add(InvalidProtocol, field+".protocol", "%q is not one of TCP, UDP, SCTP", protocol)
		return 0, 0, false
	}
	n, ok = l.portNumber(number, field+".port")
	return p, n, ok
}

// portNumber returns 0 and adds a skip if the number is not valid.
func (l *SkipList) portNumber(number int32, field string) (uint16, bool) {
	if number < 1 || number > 65535 {
		l.Add(InvalidPort, field, "%d is not within 1 to 65535", number)
		return 0, false
	}
	return uint16(number), true
}

// PortName reports whether the name of a port is valid. It adds a skip if it is not.
func (l *SkipList) PortName(name, field string) bool {
	if name != "" && !model.IsLabel(name) {
		l.Add(InvalidText, field+".name", "%.80q is not a valid port name", name)
		return false
	}
	return true
}

// prefixes parses the first model.MaxCIDRs ranges of a field. It adds skips for those that are not
// valid.
func (l *SkipList) prefixes(list []string, field string) (out []netip.Prefix) {
	for i, s := range first(list, model.MaxCIDRs, field, l) {
		if p, ok := ParsePrefix(s); ok {
			out = append(out, p)
		} else {
			l.Add(InvalidRange, at(field+"[%d]", i), "%q is not a CIDR", s)
		}
	}
	return out
}

// at returns the field of entry i of a list. A field without a verb has no list.
func at(field string, i int) string {
	if !strings.Contains(field, "%d") {
		return field
	}
	return fmt.Sprintf(field, i)
}

// Skips tracks what a source leaves out. It reports this in a metric, and in the log once for each
// object and reason, within the bounds of bounded.Lines.
type Skips struct {
	log   *slog.Logger
	lines *bounded.Lines
	gauge *prometheus.GaugeVec

	mu      sync.Mutex           // guards objects
	objects map[model.Key][]Skip // only objects with skips
}

// NewSkips returns an empty Skips.
func NewSkips(log *slog.Logger, metrics prometheus.Registerer) *Skips {
	return &Skips{
		log: log, lines: bounded.NewLines(),
		gauge: promauto.With(metrics).NewGaugeVec(prometheus.GaugeOpts{
			Name: "slicecast_source_skipped_objects",
			Help: "Number of objects of the cluster that are currently left out, wholly or in part, by reason.",
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

// Replace sets what is left out of all objects of these kinds. It does not change what is left out
// of allServiceCIDRs.
func (s *Skips) Replace(skips map[model.Key][]Skip, kinds ...model.Kind) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key := range s.objects {
		if _, ok := skips[key]; !ok && slices.Contains(kinds, key.Kind) && key.Name != allServiceCIDRs {
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
		log := s.log.With("object", key.String(), "field", n.Field, "reason", n.Reason, "detail", n.Detail)
		if !n.Invalid() {
			log.Debug("Nodes do not use the object, leaving it out")
		} else if log = s.lines.Logger(log, key.Namespace); log != nil {
			log.Warn("Object has an invalid field, leaving the field out")
		}
	}
	if len(now) == 0 {
		delete(s.objects, key)
		return
	}
	s.objects[key] = now
}
