package h2

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/slicecast/slicecast/server/refusals"
)

// newClosed returns the counter of connections that a Mux closes.
func newClosed(o *MuxOptions) *refusals.Counter {
	return refusals.New(o.Logger, o.Registerer, prometheus.CounterOpts{
		Name: "slicecast_server_refused_connections_total",
		Help: "Number of connections that the server closed, by reason. For address, strangers and caller, a newer " +
			"connection took the place of the oldest one: of an address or of all addresses, without an admitted " +
			"call, or of a node. For timeout, no call was admitted in time. For certificate, the client certificate " +
			"is invalid. For refused, the credentials of too many calls were refused.",
	}, map[string]string{
		reasonAddress:   "too many connections from this address have no admitted call, and this was the oldest",
		reasonStrangers: "too many connections have no admitted call, and this was the oldest",
		reasonTimeout:   "no call was admitted in time",
		reasonCertificate: "the client certificate is invalid: check that a CA in this server's --client-ca-file " +
			"issued it",
		reasonRefused: "the credentials of too many of its calls were refused",
		reasonCaller:  "the caller has too many connections, and this was the oldest",
	})
}

// newRefused returns the counter of calls that a Mux refuses.
func newRefused(o *MuxOptions) *refusals.Counter {
	return refusals.New(o.Logger, o.Registerer, prometheus.CounterOpts{
		Name: "slicecast_server_refused_calls_total",
		Help: "Number of calls that were refused because their caller has too much open, by reason: connections or " +
			"calls.",
	}, map[string]string{
		reasonConnections: "the caller has too many connections",
		reasonCalls:       "the caller has too many calls",
	})
}
