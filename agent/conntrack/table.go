package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
)

// These constants of linux/netfilter/nfnetlink_conntrack.h are missing from netlink's package.
const (
	ctaFilter          = 25
	ctaFilterOrigFlags = 1
	filterProtocol     = 1 << 3 // CTA_FILTER_F_CTA_PROTO_NUM in nf_internals.h
)

// flow is an entry of the connection tracking table.
type flow struct {
	// original is the address that the client sends to, and reply the address that answers. They are
	// equal if the flow is not translated.
	original, reply netip.AddrPort
	// message is the entry as the kernel sent it. It contains the entry's id, so it names this entry
	// and no later one of the same client.
	message []byte
}

// table is the kernel's connection tracking table in this network namespace. The netlink library's
// own functions are not used, because they hold the whole table in memory, including TCP, and open
// a socket for each deletion.
type table struct{ sockets map[int]*nl.SocketHandle }

func openTable() (*table, error) {
	s, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	if err := errors.Join(s.SetSendTimeout(&nl.SocketTimeoutTv), s.SetReceiveTimeout(&nl.SocketTimeoutTv)); err != nil {
		s.Close()
		return nil, err
	}
	return &table{map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: {Socket: s}}}, nil
}

func (t *table) close() { t.sockets[unix.NETLINK_NETFILTER].Close() }

func (t *table) request(family model.Family, operation, flags int) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|operation, flags)
	r.Sockets = t.sockets
	number := uint8(unix.AF_INET)
	if family == model.IPv6 {
		number = unix.AF_INET6
	}
	r.AddData(&nl.Nfgenmsg{NfgenFamily: number, Version: nl.NFNETLINK_V0})
	return r
}

// dump calls f for each UDP flow of the family. f must not keep the flow's message. The error is
// netlink.ErrDumpInterrupted if some flows may be missing.
func (t *table) dump(family model.Family, f func(flow)) error {
	r := t.request(family, nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP)
	// The kernel leaves out other protocols since Linux 5.8. An older one ignores the filter.
	tuple := nl.NewRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_ORIG, nil)
	tuple.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_PROTO, nil).AddRtAttr(nl.CTA_PROTO_NUM, []byte{unix.IPPROTO_UDP})
	r.AddData(tuple)
	filter := nl.NewRtAttr(unix.NLA_F_NESTED|ctaFilter, nil)
	filter.AddRtAttr(ctaFilterOrigFlags, nl.Uint32Attr(filterProtocol))
	r.AddData(filter)
	err := r.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(message []byte) bool {
		if entry, ok := parseFlow(message); ok {
			f(entry)
		}
		return true
	})
	if err != nil {
		return fmt.Errorf("read the connection tracking table: %w", err)
	}
	return nil
}

// remove removes a flow. It is no error if the flow no longer exists.
func (t *table) remove(family model.Family, entry flow) error {
	r := t.request(family, nl.IPCTNL_MSG_CT_DELETE, unix.NLM_F_ACK)
	r.AddRawData(entry.message[nl.SizeofNfgenmsg:])
	if _, err := r.Execute(unix.NETLINK_NETFILTER, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove a flow from the connection tracking table: %w", err)
	}
	return nil
}

// parseFlow parses an entry of a dump. ok is false if the entry is not a complete UDP flow.
func parseFlow(message []byte) (entry flow, ok bool) {
	if len(message) < nl.SizeofNfgenmsg {
		return flow{}, false
	}
	entry.message = message
	protocols := 0
	for attribute, value := range attributes(message[nl.SizeofNfgenmsg:]) {
		if attribute != nl.CTA_TUPLE_ORIG && attribute != nl.CTA_TUPLE_REPLY {
			continue
		}
		source, destination, protocol := parseTuple(value)
		if protocol == unix.IPPROTO_UDP {
			protocols++
		}
		if attribute == nl.CTA_TUPLE_ORIG {
			entry.original = destination
		} else {
			entry.reply = source
		}
	}
	return entry, protocols == 2 && entry.original.IsValid() && entry.reply.IsValid()
}

// parseTuple parses one direction of an entry. Missing parts are zero.
func parseTuple(b []byte) (source, destination netip.AddrPort, protocol uint8) {
	var addresses [2]netip.Addr
	var ports [2]uint16
	for attribute, value := range attributes(b) {
		for inner, value := range attributes(value) {
			switch {
			case attribute == nl.CTA_TUPLE_IP && (inner == nl.CTA_IP_V4_SRC || inner == nl.CTA_IP_V6_SRC):
				addresses[0], _ = netip.AddrFromSlice(value)
			case attribute == nl.CTA_TUPLE_IP && (inner == nl.CTA_IP_V4_DST || inner == nl.CTA_IP_V6_DST):
				addresses[1], _ = netip.AddrFromSlice(value)
			case attribute == nl.CTA_TUPLE_PROTO && inner == nl.CTA_PROTO_NUM && len(value) == 1:
				protocol = value[0]
			case attribute == nl.CTA_TUPLE_PROTO && inner == nl.CTA_PROTO_SRC_PORT && len(value) == 2:
				ports[0] = binary.BigEndian.Uint16(value)
			case attribute == nl.CTA_TUPLE_PROTO && inner == nl.CTA_PROTO_DST_PORT && len(value) == 2:
				ports[1] = binary.BigEndian.Uint16(value)
			}
		}
	}
	return netip.AddrPortFrom(addresses[0], ports[0]), netip.AddrPortFrom(addresses[1], ports[1]), protocol
}

// attributes returns the netlink attributes in b, up to the first malformed one.
func attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= nl.SizeofNfattr {
			length := int(binary.NativeEndian.Uint16(b))
			if length < nl.SizeofNfattr || length > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:])&nl.NLA_TYPE_MASK, b[nl.SizeofNfattr:length]) {
				return
			}
			b = b[min((length+3)&^3, len(b)):]
		}
	}
}
