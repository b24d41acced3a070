package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"github.com/slicecast/slicecast/agent/client/discovery"
)

// lookupTimeout bounds the DNS lookups of one call.
const lookupTimeout = 10 * time.Second

// Resolve returns a function for Options.Servers that looks up these addresses (host:port) on each
// call. A host name with several IP addresses becomes as many servers. Their certificates must have
// that host name.
func Resolve(addresses []string, log *slog.Logger) discovery.Finder {
	return newResolver(addresses, log).servers
}

// ServerName returns the name that the certificates of all servers must have, for
// Options.ServerName. That is the configured name or else the host name that all addresses share.
// It returns "" if there is neither.
func ServerName(configured string, addresses []string) string {
	if configured != "" || len(addresses) == 0 {
		return configured
	}
	common, _, err := net.SplitHostPort(addresses[0])
	if _, notName := netip.ParseAddr(common); err != nil || notName == nil {
		return ""
	}
	for _, address := range addresses {
		if host, _, err := net.SplitHostPort(address); err != nil || host != common {
			return ""
		}
	}
	return common
}

// resolver looks up addresses and remembers the last results.
type resolver struct {
	given  []string
	log    *slog.Logger
	lookup func(ctx context.Context, network, host string) ([]netip.Addr, error)
	// known holds the servers that each given address last resolved to.
	known map[string][]Server
}

func newResolver(given []string, log *slog.Logger) *resolver {
	return &resolver{
		given: given, log: log, lookup: net.DefaultResolver.LookupNetIP, known: make(map[string][]Server),
	}
}

// servers looks up all addresses. For an address whose lookup fails, it returns the last known
// servers.
func (r *resolver) servers(ctx context.Context) ([]Server, error) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	var out []Server
	var errs []error
	for _, address := range r.given {
		found, err := r.resolve(ctx, address)
		switch {
		case err == nil:
			r.known[address] = found
		case len(r.known[address]) > 0:
			r.log.Warn("Cannot look up the server, using the addresses of the last lookup", "server", address, "err", err)
		default:
			errs = append(errs, fmt.Errorf("server %s: %w", address, err))
		}
		out = append(out, r.known[address]...)
	}
	return out, errors.Join(errs...)
}

func (r *resolver) resolve(ctx context.Context, address string) ([]Server, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	if _, err := netip.ParseAddr(host); err == nil {
		return []Server{{Address: address}}, nil
	}
	ips, err := r.lookup(ctx, "ip", host)
	if err != nil {
		return nil, err
	}
	var out []Server
	for _, ip := range ips {
		out = append(out, Server{Address: net.JoinHostPort(ip.Unmap().String(), port), Name: host})
	}
	return out, nil
}
