package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"
)

// lookupTimeout bounds one question to DNS.
const lookupTimeout = 10 * time.Second

// Resolve gives the servers at these addresses (host:port), looked up each time that it is asked: a host name that has several
// addresses is as many servers, with that name in their certificates.
func Resolve(addresses []string, log *slog.Logger) func(context.Context) ([]Server, error) {
	return newResolver(addresses, log).servers
}

// ServerName returns the name that the certificates of all servers have, for Options.ServerName:
// the configured one, or else the host name that all addresses have in common. It returns "" if
// there is none.
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

// resolver looks up addresses.
type resolver struct {
	given  []string
	log    *slog.Logger
	lookup func(ctx context.Context, network, host string) ([]netip.Addr, error)
	// known is what each of given was last.
	known map[string][]Server
}

func newResolver(given []string, log *slog.Logger) *resolver {
	return &resolver{
		given: given, log: log, lookup: net.DefaultResolver.LookupNetIP, known: make(map[string][]Server),
	}
}

// servers asks DNS anew. Where DNS can't tell, it gives what was known last.
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
			r.log.Warn("Using the addresses that were found before", "server", address, "err", err)
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
