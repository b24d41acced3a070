package conntrack

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/internal/model"
)

// flow is a UDP flow in the connection tracking table.
type flow struct {
	// original is the address that the client sends to, and reply the address that answers. They are
	// equal if the flow is not translated.
	original, reply netip.AddrPort
	// attributes name the entry: see netlink.Flow.
	attributes []byte
}

// table is the kernel's connection tracking table in a network namespace.
type table struct{ socket *netlink.Socket }

func openTable() (table, error) {
	s, err := netlink.Open(unix.NETLINK_NETFILTER)
	if err != nil {
		return table{}, fmt.Errorf("open a netlink socket: %w", err)
	}
	return table{s}, nil
}

func (t table) close() { t.socket.Close() }

// dump calls f for each UDP flow of the family. f must not keep the flow's attributes. The error is
// netlink.ErrInterrupted if some flows may be missing.
func (t table) dump(family model.Family, f func(flow)) error {
	return t.socket.Flows(family, unix.IPPROTO_UDP, func(entry netlink.Flow) {
		original, reply := entry.Original.Destination, entry.Reply.Source
		if isUDP(entry.Original) && isUDP(entry.Reply) && original.IsValid() && reply.IsValid() {
			f(flow{original, reply, entry.Attributes})
		}
	})
}

func isUDP(t netlink.Tuple) bool { return t.Protocol == unix.IPPROTO_UDP }

// remove removes a flow. It is no error if the flow no longer exists.
func (t table) remove(family model.Family, entry flow) error {
	return t.socket.RemoveFlow(family, entry.attributes)
}
