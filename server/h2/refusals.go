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
		reasonAddress:     "too many clients of this address have not shown who they are, and this was the oldest",
		reasonStrangers:   "too many clients have not shown who they are, and this was the oldest",
		reasonTimeout:     "for too long no call was let in",
		reasonCertificate: "the client certificate is not valid: compare the client's CA with this server's client CA",
		reasonRefused:     "the credentials of too many of its calls were refused",
		reasonCaller:      "the caller has too many connections, and this was the oldest",
	}, prometheus.CounterOpts{
		Name: "slicecast_server_refused_connections_total",
		Help: "Connections that the server closed, by reason: address (a newer one of the same address took its place before the client " +
			"had shown who it is), strangers (the same, for one of any address), timeout (for too long no call was let in), certificate " +
			"(the client's is not valid, or of another CA), refused (credentials of too many of its calls were) or caller (newer ones of the same node " +
			"took its place).",
	})
}

func newRefused(o *MuxOptions) *refusals {
	return newRefusals(o, map[string]string{
		reasonConnections: "the caller has too many connections",
		reasonCalls:       "the caller has too many calls",
	}, prometheus.CounterOpts{
		Name: "slicecast_server_refused_calls_total",
		Help: "Calls refused because of what their caller has open already, by reason: connections (as many as it may have) or calls " +
			"(the same).",
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
		r.log.Warn("Connection closed or call refused; more for this reason are only counted for a while", append([]any{
			"reason", reason, "client", client.String(), "detail", r.details[reason], "interval", logInterval,
		}, attributes...)...)
	})
}
