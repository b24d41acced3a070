package discovery

import (
	"cmp"
	"context"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/cespare/xxhash/v2"
	"google.golang.org/grpc/resolver"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/internal/model"
)

const (
	// maxKnown bounds the number of servers that a client learns from a stream.
	maxKnown = 1024
	// maxAddress bounds the length, in bytes, of a server's address.
	maxAddress = 253 + len(":65535")
)

// Server is a server that a client can connect to.
type Server = cache.Server

// Finder returns the servers to start with.
type Finder = func(context.Context) ([]Server, error)

// preference returns the servers in a node's order of preference, by rendezvous hashing. Each node
// has its own order, and each server is the first choice of about the same share of nodes. If a
// server leaves, only its own nodes move.
func preference(servers []Server, node string) []Server {
	weight := func(s Server) uint64 { return xxhash.Sum64String(node + "\x00" + s.Address) }
	return slices.SortedFunc(slices.Values(servers), func(a, b Server) int {
		return cmp.Or(cmp.Compare(weight(b), weight(a)), cmp.Compare(a.Address, b.Address))
	})
}

// certificateName returns the name that a server's certificate must have if no name is configured
// for all servers.
func certificateName(s Server) string {
	if s.Name != "" {
		return s.Name
	}
	return hostName(s.Address)
}

// hostName returns the name that gRPC requires in the certificate of the server at an address.
func hostName(address string) string {
	host, _, err := net.SplitHostPort(address)
	switch {
	case err != nil || strings.HasPrefix(address, "unix:"):
		return "localhost" // gRPC's authority of unix sockets
	case strings.Contains(host, ":"):
		return "[" + host + "]"
	}
	return host
}

// valid reports whether a stream may name a server at this address. Only the IP address or DNS name
// of a host, with the number of a port, is accepted. gRPC knows other kinds of targets, which a
// server must not be able to choose: for gRPC, unix-abstract:1 is a socket and no port of a host.
func valid(address string) bool {
	host, port, err := net.SplitHostPort(address)
	number, bad := strconv.ParseUint(port, 10, 16)
	if err != nil || bad != nil || number == 0 || len(address) > maxAddress {
		return false
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		return ip.Zone() == ""
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	return model.IsSubdomain(host) && resolver.Get(host) == nil
}

// sorted returns servers ascending by address and without duplicates. It reuses the memory.
func sorted(servers []Server) []Server {
	slices.SortStableFunc(servers, func(a, b Server) int { return cmp.Compare(a.Address, b.Address) })
	return slices.CompactFunc(servers, func(a, b Server) bool { return a.Address == b.Address })
}
