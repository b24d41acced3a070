package h2

import (
	"log/slog"
	"net"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
)

// refusals counts what a Mux refuses or closes, by reason. It logs the first of each reason and
// minute.
type refusals struct {
	log      *slog.Logger
	details  map[string]string // by reason, for the log; it has every reason
	count    *prometheus.CounterVec
	sometime map[string]*rate.Sometimes
}

func newClosed(o *MuxOptions) *refusals {
	return newRefusals(o, map[string]string{
		reasonAddress:   "too many connections from this address have no admitted call, and this was the oldest",
		reasonStrangers: "too many connections have no admitted call, and this was the oldest",
		reasonTimeout:   "no call was admitted in time",
		reasonCertificate: "the client certificate is invalid: check that a CA in this server's --client-ca-file " +
			"issued it",
		reasonRefused: "the credentials of too many of its calls were refused",
		reasonCaller:  "the caller has too many connections, and this was the oldest",
	}, prometheus.CounterOpts{
		Name: "slicecast_server_refused_connections_total",
		Help: "Number of connections that the server closed, by reason: address (too many connections from the " +
			"address had no admitted call), strangers (too many connections had none), timeout (no call was admitted " +
			"in time), certificate (the client certificate is invalid), refused (the credentials of too many calls " +
			"were refused) or caller (the node has opened newer connections).",
	})
}

func newRefused(o *MuxOptions) *refusals {
	return newRefusals(o, map[string]string{
		reasonConnections: "the caller has too many connections",
		reasonCalls:       "the caller has too many calls",
	}, prometheus.CounterOpts{
		Name: "slicecast_server_refused_calls_total",
		Help: "Number of calls that were refused because their caller has too much open, by reason: connections or " +
			"calls.",
	})
}

func newRefusals(o *MuxOptions, details map[string]string, counter prometheus.CounterOpts) *refusals {
	r := &refusals{
		log: o.Logger, details: details,
		count: prometheus.NewCounterVec(counter, []string{"reason"}), sometime: make(map[string]*rate.Sometimes),
	}
	for reason := range details {
		r.count.WithLabelValues(reason)
		r.sometime[reason] = &rate.Sometimes{Interval: logInterval}
	}
	o.Registerer.MustRegister(r.count)
	return r
}

// add counts a refusal.
func (r *refusals) add(reason string, client net.Addr, attributes ...any) {
	r.count.WithLabelValues(reason).Inc()
	r.sometime[reason].Do(func() {
		r.log.Warn("Closed a connection or refused a call; logged at most once per reason and interval", append([]any{
			"reason", reason, "client", client.String(), "detail", r.details[reason], "interval", logInterval,
		}, attributes...)...)
	})
}
