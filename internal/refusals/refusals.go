// Package refusals counts what the server refuses, by reason, and logs the first of each reason and
// minute. A fleet of nodes that retry must not fill the disk.
package refusals

import (
	"log/slog"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
)

// logInterval is how often refusals of one reason may be logged.
const logInterval = time.Minute

// Counter counts refusals of one kind. Any goroutine may use it.
type Counter struct {
	// Counts has the number of refusals by reason.
	Counts *prometheus.CounterVec

	log      *slog.Logger
	reasons  map[string]string
	sometime map[string]*rate.Sometimes
}

// New returns a Counter, and registers its metric. reasons has every reason, with the detail that
// the log has about it.
func New(log *slog.Logger, r prometheus.Registerer, metric prometheus.CounterOpts, reasons map[string]string) *Counter {
	c := &Counter{
		Counts: prometheus.NewCounterVec(metric, []string{"reason"}),
		log:    log, reasons: reasons, sometime: make(map[string]*rate.Sometimes),
	}
	for reason := range reasons {
		c.Counts.WithLabelValues(reason)
		c.sometime[reason] = &rate.Sometimes{Interval: logInterval}
	}
	r.MustRegister(c.Counts)
	return c
}

// Add counts a refusal. client is the address of who is refused, or nil if it is not known.
func (c *Counter) Add(reason string, client net.Addr, attributes ...any) {
	c.Counts.WithLabelValues(reason).Inc()
	c.sometime[reason].Do(func() {
		address := "unknown"
		if client != nil {
			address = client.String()
		}
		c.log.Warn("Refused a client; logged at most once per reason and interval", append([]any{
			"reason", reason, "client", address, "detail", c.reasons[reason], "interval", logInterval,
		}, attributes...)...)
	})
}
